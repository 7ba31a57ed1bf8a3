"""What a kind of sketch is: statistics of rows that come in blocks, in memory that does not grow with their number.

Shape legend: `rows` = rows of one point, `width` = elements of a row, or of the rank's part of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from jaxtyping import Float

from steercap.core.values import index_of, shown
from steercap.errors import InvalidRequest, InvalidSpec

#: Rows that are taken in at once: their products are added in float32, so fewer are exacter, and more are faster.
BLOCK: Final = 256


@dataclass
class State:
    """What is known of the rows of one point.

    Args:
        rows: how many rows there were.
        squares: sum of the squares of all their elements.
        tensors: what its kind keeps, by name.
        filled: rows of a buffer that are in use, where the kind has one.
    """

    rows: int
    squares: float
    tensors: Mapping[str, torch.Tensor]
    filled: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Kind(ABC):
    """A kind of sketch. It changes states in place; two states of one kind, width and size can be merged."""

    #: Whether it needs whole rows; else a row that is split over ranks is sketched in its parts.
    whole: ClassVar[bool] = True
    #: Its size where none is given; None where it has none.
    default_size: ClassVar[int | None] = None
    #: The most that the squares of all elements may add up to, so that nothing overflows.
    most_squares: ClassVar[float] = math.inf

    @abstractmethod
    def shapes(self, width: int, size: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor that is kept of a point.

        Args:
            width: elements of a row.
            size: of the sketch, 0 where the kind has none.
        """

    @abstractmethod
    def add(self, state: State, block: Float[torch.Tensor, "rows width"]) -> None:
        """Take in rows, float32, 1 to BLOCK of them; `rows` and `squares` are left to the caller."""

    @abstractmethod
    def combine(self, state: State, other: State) -> None:
        """Take in what another state knows, of one row at least; likewise."""

    def covariance(self, state: State) -> Float[torch.Tensor, "width width"]:
        """Covariance of the elements, of two rows or more: float64.

        Raises:
            InvalidSpec: this kind does not know it.
        """
        raise InvalidSpec(f"a {name_of(self)} sketch holds no covariance; use the kind 'moments'")

    def variance(self, state: State) -> Float[torch.Tensor, " width"]:
        """Variance of each element, of two rows or more: float64.

        Raises:
            InvalidSpec: this kind does not know it.
        """
        raise InvalidSpec(f"a {name_of(self)} sketch holds no variances; use the kind 'variances' or 'moments'")

    def spectrum(self, state: State) -> tuple[Float[torch.Tensor, " k"], Float[torch.Tensor, "k width"]]:
        """Variances along the principal directions, descending, and these directions, of length 1: float64.

        Raises:
            InvalidSpec: this kind does not know them.
        """
        raise InvalidSpec(
            f"a {name_of(self)} sketch holds no directions; use the kind 'moments' or 'frequent_directions'"
        )

    # What all kinds share

    def checked_size(self, size: object) -> int:
        """The size of a sketch that is asked for so; 0 where the kind has none.

        Raises:
            InvalidSpec: not a whole number above 0, or a size of a kind that has none.
        """
        if size is None:
            return self.default_size or 0
        found = index_of(size)
        if self.default_size is None:
            raise InvalidSpec(f"size={shown(size)}: a {name_of(self)} sketch has no size; leave it out")
        if found is None or found < 1:
            raise InvalidSpec(f"size={shown(size)}; give a whole number above 0")
        return found

    def empty(self, width: int, size: int, device: torch.device | str = "cpu") -> State:
        """What is known of no row."""
        shapes = self.shapes(width, size).items()
        return State(0, 0.0, {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes})

    def nbytes(self, width: int, size: int) -> int:
        """Bytes that a state takes."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.shapes(width, size).values())

    def refusal(self, squares: float) -> str | None:
        """Why rows whose squares would add up to so much, with those before, cannot be taken in; None if they can."""
        if not math.isfinite(squares):
            return "its rows hold NaN or infinity"
        if squares > self.most_squares:
            return (
                f"the squares of all elements would add up to {squares:.3g}, and a {name_of(self)} sketch can hold "
                f"{self.most_squares:.3g}"
            )
        return None

    def update(self, state: State, rows: Float[torch.Tensor, "rows width"]) -> None:
        """Take in rows of real floating-point numbers.

        Raises:
            InvalidRequest: they hold NaN or infinity, or are too large; the state is as it was.
        """
        squares = float(squares_of(rows))
        if reason := self.refusal(state.squares + squares):
            raise InvalidRequest(f"these rows cannot be taken into a sketch: {reason}")
        self.take(state, rows)
        state.squares += squares

    def take(self, state: State, rows: Float[torch.Tensor, "rows width"]) -> None:
        """Take in rows that are known to fit, their squares aside."""
        for block in rows.split(BLOCK) if len(rows) else ():
            self.add(state, block.float())
            state.rows += len(block)

    def merge(self, state: State, other: State) -> None:
        """Take in what another state, on the same device, knows.

        Raises:
            InvalidRequest: together they are too large; the state is as it was.
        """
        if reason := self.refusal(state.squares + other.squares):
            raise InvalidRequest(f"these sketches cannot be merged: {reason}")
        if other.rows:
            self.combine(state, other)
            state.rows += other.rows
            state.squares += other.squares


def name_of(kind: Kind) -> str:
    """The name of a kind: that of its file."""
    return type(kind).__module__.rpartition(".")[2]


def squares_of(rows: Float[torch.Tensor, "rows width"]) -> torch.Tensor:
    """The sum of the squares of all elements: float64 []."""
    norm: torch.Tensor = torch.linalg.vector_norm(rows, dtype=torch.float64)
    return norm.square()


def move_mean(state: State, mean: Float[torch.Tensor, " width"], rows: int) -> Float[torch.Tensor, " width"]:
    """Move the running mean, the tensor "mean", float64, by that of further rows.

    Returns:
        A row whose square is what the distance of the two means adds to the sum of squared deviations: float64.

    Source: Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample variances (1979).
    """
    before, total = state.rows, state.rows + rows
    distance = mean - state.tensors["mean"]
    state.tensors["mean"].add_(distance, alpha=rows / total)
    return distance.mul_(math.sqrt(before / total) * math.sqrt(rows))


def signed(directions: Float[torch.Tensor, "k width"]) -> Float[torch.Tensor, "k width"]:
    """Directions with the sign that makes the largest element of each positive: alike on any machine."""
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    return torch.where(largest < 0, -directions, directions)
