"""Sketches, statistics of rows that are not stored: interface and registry of their kinds.

A sketch is updated by blocks of rows, in memory independent of their number. A kind is a `MEMBER` or an entry of
`MEMBERS` of a file. Shape legend: `rows` = rows of one point, `width` = elements of a row or of a rank's part.
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

#: Maximum number of rows added at once. Their products are summed in float32: fewer are more exact, more are faster.
BLOCK: Final = 256


@dataclass
class SketchState:
    """Running statistics of the rows of one point.

    Args:
        rows: number of rows added.
        squares: sum of the squares of all elements of these rows.
        tensors: tensors by name, as defined by `Kind.shapes`.
        filled: number of buffer rows in use, for a kind with a buffer.
    """

    rows: int
    squares: float
    tensors: Mapping[str, torch.Tensor]
    filled: int = 0

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Kind(ABC):
    """Kind of sketch: updates, merges and results of states. States of equal width and size can be merged."""

    #: True if it needs whole rows; False if each rank can sketch its part of split rows.
    whole: ClassVar[bool] = True
    #: Size if none is given; None if this kind has no size.
    default_size: ClassVar[int | None] = None
    #: Maximum sum of the squares of all elements, above which a tensor could overflow.
    most_squares: ClassVar[float] = math.inf

    @abstractmethod
    def shapes(self, width: int, size: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each tensor of a state, by name.

        Args:
            width: number of elements of a row.
            size: size of the sketch, 0 where the kind has none.
        """

    @abstractmethod
    def add(self, state: SketchState, block: Float[torch.Tensor, "rows width"]) -> None:
        """Add 1 to `BLOCK` float32 rows to a state's tensors, in place; the caller updates `rows` and `squares`."""

    @abstractmethod
    def combine(self, state: SketchState, other: SketchState) -> None:
        """Add `other`, of one row or more, to the tensors of `state`, in place; the caller updates its other fields."""

    def covariance(self, state: SketchState) -> Float[torch.Tensor, "width width"]:
        """Return the sample covariance of the elements, float64; the state must have at least two rows.

        Raises:
            InvalidSpec: this kind has no covariance.
            InvalidRequest: the rows differ so little that float32 products are zero.
        """
        raise InvalidSpec(f"a {name_of(self)} sketch holds no covariance; use the kind 'moments'")

    def variance(self, state: SketchState) -> Float[torch.Tensor, " width"]:
        """Return the sample variance of each element, float64; the state must have at least two rows.

        Raises:
            InvalidSpec: this kind has no variances.
            InvalidRequest: the rows differ so little that float32 products are zero.
        """
        raise InvalidSpec(f"a {name_of(self)} sketch holds no variances; use the kind 'variances' or 'moments'")

    def spectrum(self, state: SketchState) -> tuple[Float[torch.Tensor, " k"], Float[torch.Tensor, "k width"]]:
        """Return the variances along principal directions, descending, and the unit directions: float64.

        Raises:
            InvalidSpec: this kind has no directions.
        """
        raise InvalidSpec(
            f"a {name_of(self)} sketch holds no directions; use the kind 'moments' or 'frequent_directions'"
        )

    # Shared by all kinds

    def checked_size(self, size: object) -> int:
        """Return the user's `size`, checked; the kind's default for None, and 0 for a kind without size.

        Raises:
            InvalidSpec: `size` is not a whole number above 0, or the kind has no size.
        """
        if size is None:
            return self.default_size or 0
        if self.default_size is None:
            raise InvalidSpec(f"size={shown(size)}: a {name_of(self)} sketch has no size; leave it out")
        return count_of(size, "size")

    def empty(self, width: int, size: int, device: torch.device | str = "cpu") -> SketchState:
        """Return a state without rows, on a device."""
        shapes = self.shapes(width, size).items()
        return SketchState(
            0, 0.0, {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes}
        )

    def nbytes(self, width: int, size: int) -> int:
        """Return the number of bytes of a state's tensors."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.shapes(width, size).values())

    def refusal(self, squares: float) -> str | None:
        """Return the reason why a state cannot have this sum of squares, which may be NaN; None if it can."""
        if not math.isfinite(squares):
            return "its rows hold NaN or infinity"
        if squares > self.most_squares:
            return (
                f"the squares of all elements would add up to {squares:.3g}, and a {name_of(self)} sketch can hold "
                f"{self.most_squares:.3g}"
            )
        return None

    def update(self, state: SketchState, rows: Float[torch.Tensor, "rows width"]) -> None:
        """Check rows of any real floating dtype and add them to a state, in place.

        Raises:
            InvalidRequest: the rows have NaN or infinity, or are too large; the state is unchanged.
        """
        squares = float(squares_of(rows))
        if reason := self.refusal(state.squares + squares):
            raise InvalidRequest(f"these rows cannot be taken into a sketch: {reason}")
        self.add_rows(state, rows)
        state.squares += squares

    def add_rows(self, state: SketchState, rows: Float[torch.Tensor, "rows width"]) -> None:
        """Add checked rows to a state, in place, updating `rows` but not `squares`."""
        for block in rows.split(BLOCK) if len(rows) else ():
            self.add(state, block.float())
            state.rows += len(block)

    def merge(self, state: SketchState, other: SketchState) -> None:
        """Add `other` to `state`, on the same device, in place.

        Raises:
            InvalidRequest: the sum of squares of both is too large; the state is unchanged.
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
    """Return the sum of the squares of all elements of a tensor: float64 []."""
    norm: torch.Tensor = torch.linalg.vector_norm(rows, dtype=torch.float64)
    return norm.square()


def move_mean(state: SketchState, mean: Float[torch.Tensor, " width"], rows: int) -> Float[torch.Tensor, " width"]:
    """Update a state's running mean, the float64 tensor "mean", by the mean of `rows` further rows.

    Returns:
        Float64 vector whose outer product with itself must be added to the summed products of deviations, since the two
        means differ.

    Source: Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample variances (1979).
    """
    before, total = state.rows, state.rows + rows
    distance = mean - state.tensors["mean"]
    state.tensors["mean"].add_(distance, alpha=rows / total)
    return distance.mul_(math.sqrt(before / total) * math.sqrt(rows))


def signed(directions: Float[torch.Tensor, "k width"]) -> Float[torch.Tensor, "k width"]:
    """Negate each row whose element of largest magnitude is negative, so that signs do not depend on the machine."""
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    return torch.where(largest < 0, -directions, directions)


SKETCHES: Registry[Kind] = Registry("sketch", sys.modules[__name__], Kind)
