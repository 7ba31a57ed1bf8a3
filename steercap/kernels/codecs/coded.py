"""Encoded rows on the client: codes and scales, with decoding, error bounds and scalar products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from steercap.core.schema import ATTENTION, RAW, Coding, PointSchema
from steercap.core.spec import Point
from steercap.core.values import index_of, shown
from steercap.errors import InvalidSpec
from steercap.kernels.codecs import ENCODINGS, MOST_INDEXED, Codec

if TYPE_CHECKING:
    import torch

#: Whole rows of one point: a tensor, or codes.
Whole: TypeAlias = "torch.Tensor | CodedRows"
#: Name of the encoding of SAE features.
FEATURES: Final = "features"


@dataclass(frozen=True, eq=False, repr=False)
class CodedRows:
    """Rows of one point in a lossy codec.

    Args:
        coding: the codec and its parameters.
        schema: schema of the tensor at the point.
        parts: tensors by name, [rows, ...]: `q` are codes; `scale` and `zero`, where the codec has them, are per row or
            group; `indices` of `topk8`. For a point that is split over n tensor-parallel ranks, [rows, n, ...].
        shard: index of this shard of a split point; None for all shards, or for a point that is not split.
        constants: vectors of the codec that all rows share, by name, float32 [width] of whole rows:
            `centre` and `reach` of calibrated rows.
    """

    coding: Coding
    schema: PointSchema
    parts: Mapping[str, torch.Tensor]
    shard: int | None = None
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def codec(self) -> str:
        """Name of the codec."""
        return self.coding.encoding

    @property
    def is_projected(self) -> bool:
        """True if random projections are kept instead of elements."""
        return self._codec.seeded

    @property
    def matrix(self) -> torch.Tensor | None:
        """Matrix that rows of elements were multiplied with, float32 [k, width]; None if elements are kept."""
        signs = self._codec.matrix(self.schema.width, self.coding)
        return None if signs is None else signs * self.coding.k**-0.5

    @property
    def is_read(self) -> bool:
        """True if SAE features are kept instead of elements of the model's rows."""
        return self.codec == FEATURES

    @property
    def nbytes(self) -> int:
        """Bytes of the parts; the constants are not counted."""
        return sum(part.nbytes for part in self.parts.values())

    def __len__(self) -> int:
        return len(self.parts["q"])

    def __getitem__(self, rows: int | slice | torch.Tensor) -> CodedRows:
        """Select rows by one index, a slice, or a tensor of indices or a mask."""
        kept = row_index(rows)
        return replace(self, parts={name: part[kept] for name, part in self.parts.items()})

    def __repr__(self) -> str:
        return f"CodedRows({len(self)} rows of {self.schema} as {self.coding}, {self.nbytes:,} bytes)"

    @property
    def terms(self) -> str:
        """Width and projection of the rows, as text; rows whose texts are equal can be compared."""
        seeded = f", projected with k={self.coding.k}, seed={self.coding.seed}" if self._codec.seeded else ""
        return f"of {self.schema.width} elements{seeded}" + ("" if self.shard is None else f", shard {self.shard}")

    def decoded(self) -> torch.Tensor:
        """Decode the rows, with the codec's error.

        Returns:
            float32 [rows, *shape of the point]; for `rp8` and `rp16`, [rows, k]: random projections, see `inner`.

        Raises:
            InvalidSpec: targets of attention, which are no rows of the model.
        """
        if self.codec == ATTENTION:
            raise InvalidSpec(f"{self} are targets of attention, not rows; use handle.attention(layer)")
        return self.numbers()

    def numbers(self) -> torch.Tensor:
        """Decode as `decoded` does, targets of attention too: float32 [rows, heads, 2k + 3]; see `numbers_of`."""
        codec = self._codec
        return codec.joined([codec.decoded(parts, self.schema, self.coding) for parts in self._by_shard()])

    def error_bound(self) -> torch.Tensor:
        """Bound the error of each element of `decoded()`, its own rounding to float32 included.

        Returns:
            float64, of the shape of `decoded()`; for `rp8` and `rp16`, the error against the unrounded projection.
        """
        codec, bounds = self._codec, []
        for parts in self._by_shard():
            bound = codec.bound(parts, self.schema, self.coding)
            # activations of features are kept as they are
            bounds.append(bound if self.is_read else bound + _half_ulp(codec.decoded(parts, self.schema, self.coding)))
        return codec.joined(bounds)

    def inner(self, other: CodedRows | torch.Tensor | None = None) -> torch.Tensor:
        """Compute scalar products with other rows.

        For `rp8` and `rp16` they are unbiased estimates: their mean over seeds is the product of the rows
        themselves, their standard deviation at most √(2 / k) of the product of the norms, √(1 / k) at right angles.

        Args:
            other: rows of as many elements in any codec, with the same k and seed if either is projected; or vectors,
                [n, *shape of the point] or [n, width], or one; None for these rows among themselves.

        Returns:
            float64 [rows, n].

        Raises:
            InvalidSpec: the rows cannot be compared: they have another width, or another projection matrix.
        """
        mine = self.decoded().flatten(1).double()
        found = mine @ (mine if other is None else self._comparable(other)).T
        if other is None and self._codec.seeded:
            # A row's own rounding does not cancel in its square; it is uniform within a step.
            shards = self._by_shard()
            steps = [2 * self._codec.bound(parts, self.schema, self.coding) for parts in shards]
            found.diagonal().sub_(sum((step.square().sum(dim=1) / 12 for step in steps), start=found.new_zeros(())))
        return found

    def damage(self, rows: int) -> str:
        """Return a reason why these are not `rows` valid rows of the codec, as from a damaged file; "" if they are."""
        import torch

        codec = ENCODINGS.get(self.codec)
        if not isinstance(codec, Codec):
            return f"{self.codec} is not a codec"
        nothing = torch.empty((0, codec.row_bytes(self.schema, self.coding)), dtype=torch.uint8)
        split = (self.schema.shards,) if self.schema.shards > 1 and self.shard is None else ()
        for name, part in codec.parts(nothing, self.schema, self.coding).items():
            wanted, found = (rows, *split, *part.shape[1:]), self.parts.get(name)
            if found is None or found.shape != wanted or found.dtype != part.dtype:
                had = "nothing" if found is None else f"{tuple(found.shape)} of {found.dtype}"
                return f"{name!r} must be {wanted} of {part.dtype}, and is {had}"
        if codec.indexed:
            indices = self.parts["indices"].long()
            if bool((indices >= self.schema.shard_width).any()) or bool((indices.diff(dim=-1) <= 0).any()):
                return f"'indices' must ascend, and lie below {self.schema.shard_width}"
        for name in codec.constants:
            constant = self.constants.get(name)
            if constant is None or constant.shape != (self.schema.width,) or constant.dtype != torch.float32:
                return f"{name!r} must be {self.schema.width} numbers of float32"
            if not bool(constant.isfinite().all()):
                return f"{name!r} holds NaN or infinity"
        return codec.damage(self.parts, self.schema)

    @staticmethod
    def joined(shards: Sequence[CodedRows]) -> CodedRows:
        """Join the shards of a point, in the order of the ranks."""
        import torch

        first = shards[0]
        if len(shards) == 1:
            return first
        parts = {name: torch.stack([shard.parts[name] for shard in shards], dim=1) for name in first.parts}
        return CodedRows(first.coding, first.schema, parts, constants=first.constants)

    @property
    def _codec(self) -> Codec:
        return cast("Codec", ENCODINGS[self.codec])

    def _by_shard(self) -> list[Mapping[str, torch.Tensor]]:
        if self.schema.shards == 1 or self.shard is not None:
            return [{**self.parts, **self._constants_of(self.shard or 0)}]
        return [
            {name: part[:, shard] for name, part in self.parts.items()} | self._constants_of(shard)
            for shard in range(self.schema.shards)
        ]

    def _constants_of(self, shard: int) -> dict[str, torch.Tensor]:
        """Return a shard's part of the constants."""
        width = self.schema.shard_width
        return {name: whole[shard * width : (shard + 1) * width] for name, whole in self.constants.items()}

    def _comparable(self, other: CodedRows | torch.Tensor) -> torch.Tensor:
        """Return other rows in the same terms: float64 [n, width] or [n, k]."""
        import torch

        if isinstance(other, CodedRows):
            mine, theirs = self.terms, other.terms
            if mine != theirs:
                raise InvalidSpec(f"these rows cannot be compared: {mine} and {theirs}")
            return other.decoded().flatten(1).double()
        if not isinstance(other, torch.Tensor):
            raise InvalidSpec(f"inner({shown(other)}); give CodedRows, or vectors as a tensor")
        vectors = other.reshape(1, -1) if other.ndim < 2 else other.flatten(1)
        if vectors.shape[1] != self.schema.width or self.shard is not None:
            raise InvalidSpec(
                f"vectors have {vectors.shape[1]} elements, but these rows are {self.terms}; give vectors of equal "
                "width"
            )
        vectors = vectors.double()
        matrix = self._codec.matrix(self.schema.width, self.coding)
        return vectors if matrix is None else vectors @ matrix.double().T * self.coding.k**-0.5


def row_index(rows: int | slice | torch.Tensor) -> list[int] | slice | torch.Tensor:
    """Return an index that keeps the axis of rows: the number of one row becomes a list of it."""
    index = None if getattr(rows, "ndim", 0) else index_of(rows)
    return cast("slice | torch.Tensor", rows) if index is None else [index]


def _half_ulp(rows: torch.Tensor) -> torch.Tensor:
    """Return the greatest error of rounding to these float32 numbers: float64, of their shape."""
    import torch

    size = rows.abs()
    above = size.nextafter(size.new_tensor(torch.inf)).double()
    return (above.clamp_(max=2.0**128) - size.double()).div_(2)


def parts_of(rows: Whole) -> Mapping[str, torch.Tensor]:
    """Return the tensors of rows or of one shard by name; uncoded rows are one tensor, `rows`."""
    return rows.parts if isinstance(rows, CodedRows) else {"rows": rows}


def decoded(rows: Whole) -> torch.Tensor:
    """Return rows, decoded if they are codes."""
    return rows.decoded() if isinstance(rows, CodedRows) else rows


def coding_of(rows: Whole) -> tuple[str, Mapping[str, int]]:
    """Return the codec of rows and its parameters."""
    return named_parameters(rows.coding) if isinstance(rows, CodedRows) else ("raw", {})


def named_parameters(coding: Coding) -> tuple[str, Mapping[str, int]]:
    """Return the name of a codec and its parameters, by name."""
    codec = ENCODINGS[coding.encoding]
    parameters = {"k": coding.k} if codec.default_k else {}
    return coding.encoding, parameters | ({"seed": coding.seed} if codec.seeded else {})


def end_of(point: Point, shard: int | None = None) -> str:
    """Return the suffix of a point's tensor names in files, which follows the name of the part."""
    return f".{point.site}.{point.layer}" + ("" if shard is None else f".shard{shard}")


def encoded(rows: torch.Tensor, coding: Coding) -> torch.Tensor | CodedRows:
    """Encode whole rows, [rows, *shape of the point], on the host, as workers of one rank do; raw rows stay.

    Raises:
        InvalidSpec: more elements than the codec's indices can name.
    """
    if coding == RAW:
        return rows
    codec = ENCODINGS[coding.encoding]
    assert isinstance(codec, Codec)
    schema = PointSchema(tuple(rows.shape[1:]), str(rows.dtype).removeprefix("torch."))
    if codec.indexed and schema.width > MOST_INDEXED:
        raise InvalidSpec(f"{coding} takes rows of at most {MOST_INDEXED:,} elements, and these are {schema}")
    stored = codec.encode(rows.flatten(1), schema, coding, codec.matrix(schema.width, coding))
    return CodedRows(coding, schema, codec.parts(stored, schema, coding))
