"""Encoded rows on the client, with decoding, error bounds and scalar products."""

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

#: Rows of one point: a tensor, or encoded rows.
Whole: TypeAlias = "torch.Tensor | CodedRows"
#: Name of the encoding of SAE features.
FEATURES: Final = "features"


@dataclass(frozen=True, eq=False, repr=False)
class CodedRows:
    """Encoded rows of one point, in a lossy codec.

    Args:
        coding: the codec and its parameters.
        schema: shape and dtype of the point's rows.
        parts: tensors by name, [rows, ...]: `q` are codes; `scale` and `zero`, where the codec has them, are per row or
            group; `indices` of `topk8`. For a point that is split over n tensor-parallel ranks, [rows, n, ...].
        shard: rank of this shard of a split point; None for all shards, or for a point that is not split.
        constants: vectors that all rows share, by name, float32 [width of whole rows]: `centre` and `reach` of
            calibrated rows.
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
        """True if random projections of the rows are stored instead of their elements."""
        return self._codec.seeded

    @property
    def matrix(self) -> torch.Tensor | None:
        """Matrix by which rows were projected, float32 [k, width]; None if the codec does not project."""
        signs = self._codec.matrix(self.schema.width, self.coding)
        return None if signs is None else signs * self.coding.k**-0.5

    @property
    def stores_features(self) -> bool:
        """True if SAE features of the rows are stored instead of their elements."""
        return self.codec == FEATURES

    @property
    def nbytes(self) -> int:
        """Number of bytes of the parts, without the constants."""
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
        """Description of the rows' width and projection; rows can be compared if their descriptions are equal."""
        seeded = f", projected with k={self.coding.k}, seed={self.coding.seed}" if self._codec.seeded else ""
        kept = f"the {self.coding.k} greatest of {self.schema.width} SAE features"
        elements = kept if self.stores_features else f"of {self.schema.width} elements{seeded}"
        return elements + ("" if self.shard is None else f", shard {self.shard}")

    def decoded(self) -> torch.Tensor:
        """Decode the rows; they differ from the captured rows by at most `error_bound`.

        Returns:
            float32 [rows, *shape of the point]; for `rp8` and `rp16`, [rows, k]: random projections, see `inner`.

        Raises:
            InvalidSpec: these are attention summaries, not rows of the model.
        """
        if self.codec == ATTENTION:
            raise InvalidSpec(f"{self} are targets of attention, not rows; use handle.attention(layer)")
        return self.numbers()

    def numbers(self) -> torch.Tensor:
        """Decode as `decoded` does, but attention summaries too: float32 [rows, heads, 2k + 3]; see `numbers_of`."""
        codec = self._codec
        return codec.joined([codec.decoded(parts, self.schema, self.coding) for parts in self._by_shard()])

    def error_bound(self) -> torch.Tensor:
        """Return an upper bound of the error of each element of `decoded()`, including rounding to float32.

        Returns:
            float64, of the shape of `decoded()`; for `rp8` and `rp16`, the error against the unrounded projection.
        """
        codec, bounds = self._codec, []
        for parts in self._by_shard():
            bound = codec.error_bound(parts, self.schema, self.coding)
            # activations of features are kept as they are
            bounds.append(
                bound if self.stores_features else bound + _half_ulp(codec.decoded(parts, self.schema, self.coding))
            )
        return codec.joined(bounds)

    def inner(self, other: CodedRows | torch.Tensor | None = None) -> torch.Tensor:
        """Compute scalar products with other rows or vectors.

        For `rp8` and `rp16` they are unbiased estimates over seeds, with a standard deviation of at most √(2 / k) times
        the product of the norms, √(1 / k) for orthogonal rows.

        Args:
            other: rows of equal width in any codec, with equal k and seed if either is projected; or vectors, [n,
                *shape of the point], [n, width] or [width]; None for these rows among themselves.

        Returns:
            float64 [rows, n].

        Raises:
            InvalidSpec: the rows have different widths or projection matrices.
        """
        mine = self.decoded().flatten(1).double()
        found = mine @ (mine if other is None else self._comparable(other)).T
        if other is None and self._codec.seeded:
            # A row's own rounding does not cancel in its square; it is uniform within a step.
            shards = self._by_shard()
            steps = [2 * self._codec.error_bound(parts, self.schema, self.coding) for parts in shards]
            found.diagonal().sub_(sum((step.square().sum(dim=1) / 12 for step in steps), start=found.new_zeros(())))
        return found

    def invalid_reason(self, rows: int) -> str:
        """Return the reason why these are not `rows` valid rows of the codec, as read from a file; "" if they are."""
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
        return codec.invalid_reason(self.parts, self.schema)

    @staticmethod
    def joined(shards: Sequence[CodedRows]) -> CodedRows:
        """Stack the shards of a point's rows, by rank, into one."""
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
        """Return a shard's columns of the constants, by name."""
        width = self.schema.shard_width
        return {name: whole[shard * width : (shard + 1) * width] for name, whole in self.constants.items()}

    def _comparable(self, other: CodedRows | torch.Tensor) -> torch.Tensor:
        """Return other rows or vectors, projected like these: float64 [n, width] or [n, k]."""
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
    """Return an index of rows: a single integer as a list, so that the axis of rows remains; all else as it is.

    Bytes become int64: torch takes them for a mask.
    """
    import torch

    if str(getattr(rows, "dtype", "")) in {"uint8", "torch.uint8"}:
        rows = torch.as_tensor(rows).long()
    index = None if getattr(rows, "ndim", 0) else index_of(rows)
    return cast("slice | torch.Tensor", rows) if index is None else [index]


def _half_ulp(rows: torch.Tensor) -> torch.Tensor:
    """Return the maximum error of rounding to each of these float32 numbers: float64, same shape."""
    import torch

    size = rows.abs()
    above = size.nextafter(size.new_tensor(torch.inf)).double()
    return (above.clamp_(max=2.0**128) - size.double()).div_(2)


def parts_of(rows: Whole) -> Mapping[str, torch.Tensor]:
    """Return the tensors of rows by name; uncoded rows are one tensor, "rows"."""
    return rows.parts if isinstance(rows, CodedRows) else {"rows": rows}


def decoded(rows: Whole) -> torch.Tensor:
    """Return rows as a tensor, decoded if they are encoded."""
    return rows.decoded() if isinstance(rows, CodedRows) else rows


def coding_of(rows: Whole) -> tuple[str, Mapping[str, int]]:
    """Return the name of the rows' codec, "raw" for a tensor, and the codec's parameters by name."""
    return named_parameters(rows.coding) if isinstance(rows, CodedRows) else ("raw", {})


def named_parameters(coding: Coding) -> tuple[str, Mapping[str, int]]:
    """Return the name of an encoding and its parameters by name."""
    codec = ENCODINGS[coding.encoding]
    parameters = {"k": coding.k} if codec.default_k else {}
    return coding.encoding, parameters | ({"seed": coding.seed} if codec.seeded else {})


def end_of(point: Point, shard: int | None = None) -> str:
    """Return the suffix of a point's tensor names in files, after the part's name, such as ".resid_post.5"."""
    return f".{point.site}.{point.layer}" + ("" if shard is None else f".shard{shard}")


def encoded(rows: torch.Tensor, coding: Coding) -> torch.Tensor | CodedRows:
    """Encode whole rows, [rows, *shape of the point], on the host, as a single worker would; raw rows are returned.

    Raises:
        InvalidSpec: a row has more elements than the codec's indices can address.
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
