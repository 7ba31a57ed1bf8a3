"""Kinds of sketch: interface and registry. To add one, add a file with a `MEMBER`, or an entry of its `MEMBERS`.

A sketch is statistics of rows that come in blocks and are not kept, in memory independent of their number. Shape
legend: `rows` = rows of one point, `width` = elements of a row, or of the rank's part of it.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from jaxtyping import Float

from steercap.core.registry import Registry
from steercap.core.values import count_of, shown
from steercap.errors import InvalidRequest, InvalidSpec

#: Rows added at once. Their products are summed in float32: fewer are more exact, more are faster.
BLOCK: Final = 256


@dataclass
class SketchState:
    """Running statistics of the rows of one point.

    Args:
        rows: number of rows added.
        squares: sum of the squares of all their elements.
        tensors: tensors of the sketch, by name; the kind defines them.
        filled: number of buffer rows in use, where the kind has a buffer.
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
    """Kind of sketch. It changes states in place; two states of one kind, width and size can be merged."""

    #: True if it needs whole rows; else each rank sketches its part of a row that is split.
    whole: ClassVar[bool] = True
    #: Size if none is given; None if this kind has no size.
    default_size: ClassVar[int | None] = None
    #: Maximum sum of the squares of all elements, so that nothing overflows.
    most_squares: ClassVar[float] = math.inf

    @abstractmethod
    def shapes(self, width: int, size: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each tensor of a state.

        Args:
            width: elements of a row.
            size: size of the sketch, 0 where the kind has none.
        """

    @abstractmethod
    def add(self, state: SketchState, block: Float[torch.Tensor, "rows width"]) -> None:
        """Add rows, float32, 1 to BLOCK of them; the caller updates `rows` and `squares`."""

    @abstractmethod
    def combine(self, state: SketchState, other: SketchState) -> None:
        """Add the statistics of another state of at least one row; the caller updates `rows` and `squares`."""

    def covariance(self, state: SketchState) -> Float[torch.Tensor, "width width"]:
        """Return the covariance of the elements, of two rows or more: float64.

        Raises:
            InvalidSpec: this kind holds no covariance.
            InvalidRequest: the rows are so small that their products are zero.
        """
        raise InvalidSpec(f"a {name_of(self)} sketch holds no covariance; use the kind 'moments'")

    def variance(self, state: SketchState) -> Float[torch.Tensor, " width"]:
        """Return the variance of each element, of two rows or more: float64.

        Raises:
            InvalidSpec: this kind holds no variances.
            InvalidRequest: the rows are so small that their products are zero.
        """
        raise InvalidSpec(f"a {name_of(self)} sketch holds no variances; use the kind 'variances' or 'moments'")

    def spectrum(self, state: SketchState) -> tuple[Float[torch.Tensor, " k"], Float[torch.Tensor, "k width"]]:
        """Return the variances along the principal directions, descending, and these directions, of length 1: float64.

        Raises:
            InvalidSpec: this kind holds no directions.
        """
        raise InvalidSpec(
            f"a {name_of(self)} sketch holds no directions; use the kind 'moments' or 'frequent_directions'"
        )

    # Shared by all kinds

    def checked_size(self, size: object) -> int:
        """Check the size that a client gives; return it, the default if it is None, or 0 where the kind has none.

        Raises:
            InvalidSpec: `size` is not a whole number above 0, or the kind has no size.
        """
        if size is None:
            return self.default_size or 0
        if self.default_size is None:
            raise InvalidSpec(f"size={shown(size)}: a {name_of(self)} sketch has no size; leave it out")
        return count_of(size, "size")

    def empty(self, width: int, size: int, device: torch.device | str = "cpu") -> SketchState:
        """Create the state of no rows."""
        shapes = self.shapes(width, size).items()
        return SketchState(
            0, 0.0, {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes}
        )

    def nbytes(self, width: int, size: int) -> int:
        """Return the bytes of a state."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.shapes(width, size).values())

    def refusal(self, squares: float) -> str | None:
        """Return the reason why a state cannot have this sum of squares; None if it can."""
        if not math.isfinite(squares):
            return "its rows hold NaN or infinity"
        if squares > self.most_squares:
            return (
                f"the squares of all elements would add up to {squares:.3g}, and a {name_of(self)} sketch can hold "
                f"{self.most_squares:.3g}"
            )
        return None

    def update(self, state: SketchState, rows: Float[torch.Tensor, "rows width"]) -> None:
        """Add rows of real floating-point numbers.

        Raises:
            InvalidRequest: the rows hold NaN or infinity, or are too large; the state is unchanged.
        """
        squares = float(squares_of(rows))
        if reason := self.refusal(state.squares + squares):
            raise InvalidRequest(f"these rows cannot be taken into a sketch: {reason}")
        self.take(state, rows)
        state.squares += squares

    def take(self, state: SketchState, rows: Float[torch.Tensor, "rows width"]) -> None:
        """Add rows that were checked, without updating `squares`."""
        for block in rows.split(BLOCK) if len(rows) else ():
            self.add(state, block.float())
            state.rows += len(block)

    def merge(self, state: SketchState, other: SketchState) -> None:
        """Add the statistics of another state on the same device.

        Raises:
            InvalidRequest: together they are too large; the state is unchanged.
        """
        if reason := self.refusal(state.squares + other.squares):
            raise InvalidRequest(f"these sketches cannot be merged: {reason}")
        if other.rows:
            self.combine(state, other)
            state.rows += other.rows
            state.squares += other.squares


def name_of(kind: Kind) -> str:
    """Return the name of a kind in `SKETCHES`."""
    return next(name for name, one in SKETCHES.items() if one is kind)


def squares_of(rows: Float[torch.Tensor, "rows width"]) -> torch.Tensor:
    """Return the sum of the squares of all elements: float64 []."""
    norm: torch.Tensor = torch.linalg.vector_norm(rows, dtype=torch.float64)
    return norm.square()


def move_mean(state: SketchState, mean: Float[torch.Tensor, " width"], rows: int) -> Float[torch.Tensor, " width"]:
    """Update the running mean, the float64 tensor "mean", by the mean of `rows` further rows.

    Returns:
        A row whose outer product with itself is the term that the distance of the two means adds to the sum of
        squared deviations: float64.

    Source: Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample variances (1979).
    """
    before, total = state.rows, state.rows + rows
    distance = mean - state.tensors["mean"]
    state.tensors["mean"].add_(distance, alpha=rows / total)
    return distance.mul_(math.sqrt(before / total) * math.sqrt(rows))


def signed(directions: Float[torch.Tensor, "k width"]) -> Float[torch.Tensor, "k width"]:
    """Negate each row whose element of largest absolute value is negative, so that signs agree between machines."""
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    return torch.where(largest < 0, -directions, directions)


SKETCHES: Registry[Kind] = Registry("sketch", sys.modules[__name__], Kind)
