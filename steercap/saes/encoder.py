"""Encoder of an SAE, from rows to feature activations, shared by workers, clients and attribution.

Every architecture reduces to `pre = (normalised(row) - shift) @ weight + bias` and one of three responses, float32
throughout:

    relu        pre where pre > 0
    jumprelu    pre where pre > threshold, one per feature, 0 or more
    topk        the k greatest of a row's pre, where above 0; all others are 0

A gated SAE is converted to jumprelu, see `saes.reading`. Shape legend: d_in = elements of a row; d_sae = features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec
import torch
from jaxtyping import Float, Int

from steercap.core.display import brief
from steercap.core.messages import EncoderShape
from steercap.core.spec import Point
from steercap.core.values import index_of, shown
from steercap.errors import InvalidSpec
from steercap.kernels.bits import exact_products
from steercap.kernels.codecs.coded import CodedRows, row_index

#: Name, as in SAELens, of the normalisation of rows before they are encoded.
Normalisation: TypeAlias = Literal["none", "layer_norm", "constant_norm_rescale"]
NORMALISATIONS: Final[tuple[Normalisation, ...]] = get_args(Normalisation)
#: Constant that SAELens adds to the standard deviation.
EPSILON: Final = 1e-5
#: Alignment in bytes of tensors in the image of an encoder.
ALIGN: Final = 64


@dataclass(frozen=True, eq=False)
class Encoder:
    """Encoder half of an SAE, with float32 tensors.

    Args:
        weight: float32 [d_in, d_sae].
        bias: float32 [d_sae].
        threshold: float32 [d_sae], 0 or more; None for 0 everywhere.
        shift: float32 [d_in], subtracted from normalised rows; None for nothing.
        k: number of greatest pre-activations kept per row, 0 for all.
        normalisation: normalisation of rows before encoding.
        centred: True to subtract a row's mean first, for SAEs trained on models whose weights TransformerLens centred.
    """

    weight: Float[torch.Tensor, "d_in d_sae"]
    bias: Float[torch.Tensor, " d_sae"]
    threshold: Float[torch.Tensor, " d_sae"] | None = None
    shift: Float[torch.Tensor, " d_in"] | None = None
    k: int = 0
    normalisation: Normalisation = "none"
    centred: bool = False

    __repr__ = brief

    @property
    def d_in(self) -> int:
        """Number of elements of a row."""
        return self.weight.shape[0]

    @property
    def d_sae(self) -> int:
        """Number of features."""
        return self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Weight, bias, threshold and shift, in this order, without those that are None."""
        return tuple(one for one in (self.weight, self.bias, self.threshold, self.shift) if one is not None)

    def activations(self, rows: Float[torch.Tensor, "rows d_in"]) -> Float[torch.Tensor, "rows d_sae"]:
        """Return each feature's activation in each row, float32 [rows, d_sae]; rows may have any floating dtype.

        All activations of a row with NaN or infinity are NaN: weights could make zeros of it.
        """
        with exact_products():
            pre = self._read(rows) @ self.weight
        pre += self.bias
        if self.k:
            kept = pre.topk(self.k, dim=1)
            pre = torch.zeros_like(pre).scatter_(1, kept.indices, kept.values)
        if self.threshold is not None:
            pre = pre.where(~(pre <= self.threshold), 0.0)  # NaN stays
        return pre.relu_().masked_fill_(~rows.isfinite().all(dim=1, keepdim=True), torch.nan)

    def scales(self, rows: Float[torch.Tensor, "rows d_in"]) -> Float[torch.Tensor, " rows"]:
        """Return the factors that undo the rows' normalisation after reconstruction: float32 [rows]."""
        rows = self._centred(rows.float())
        match self.normalisation:
            case "layer_norm":
                return (rows - rows.mean(dim=1, keepdim=True)).std(dim=1)
            case "constant_norm_rescale":
                found: torch.Tensor = rows.norm(dim=1) / self.d_in**0.5
                return found
            case "none":
                return rows.new_ones(len(rows))

    def _read(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self._centred(rows.float())
        match self.normalisation:
            case "layer_norm":
                rows = rows - rows.mean(dim=1, keepdim=True)
                rows = rows / (rows.std(dim=1, keepdim=True) + EPSILON)
            case "constant_norm_rescale":
                rows = rows * (self.d_in**0.5 / rows.norm(dim=1, keepdim=True))
            case "none":
                pass
        return rows if self.shift is None else rows - self.shift

    def _centred(self, rows: torch.Tensor) -> torch.Tensor:
        return rows - rows.mean(dim=1, keepdim=True) if self.centred else rows

    # Transfer to other processes

    @property
    def shape(self) -> EncoderShape:
        """Sizes and options of the encoder, without its tensors."""
        return EncoderShape(
            self.d_in,
            self.d_sae,
            self.k,
            self.normalisation,
            self.centred,
            thresholds=self.threshold is not None,
            shifts=self.shift is not None,
        )

    def digest(self) -> bytes:
        """Return the SHA-256 of the encoder's shape and tensors, which identifies it."""
        found = hashlib.sha256(msgspec.msgpack.encode(self.shape))
        for tensor in self.tensors:
            found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        return found.digest()

    def write(self, image: torch.Tensor) -> None:
        """Copy the tensors into an image for another process: uint8 [`image_bytes(shape)`]."""
        for tensor, (start, _) in zip(self.tensors, layout(self.shape), strict=True):
            image[start : start + tensor.nbytes].view(torch.float32).view(tensor.shape).copy_(tensor)

    @staticmethod
    def read(shape: EncoderShape, image: torch.Tensor) -> Encoder:
        """Return the encoder that `write` copied into `image`, uint8 [bytes]; its tensors are views of that memory."""
        found = (image[start : start + size].view(torch.float32) for start, size in layout(shape))
        weight, bias = next(found).view(shape.d_in, shape.d_sae), next(found)
        threshold = next(found) if shape.thresholds else None
        shift = next(found) if shape.shifts else None
        normalisation = next(one for one in NORMALISATIONS if one == shape.normalisation)
        return Encoder(weight, bias, threshold, shift, shape.k, normalisation, shape.centred)

    def on(self, device: torch.device) -> Encoder:
        """Return the encoder with its tensors moved to a device."""
        weight, bias = self.weight.to(device), self.bias.to(device)
        threshold = None if self.threshold is None else self.threshold.to(device)
        shift = None if self.shift is None else self.shift.to(device)
        return Encoder(weight, bias, threshold, shift, self.k, self.normalisation, self.centred)


def floats_of(given: Any, name: str, width: int, hint: str) -> torch.Tensor:
    """Check rows that a user gave, and return them flattened to [rows, width].

    Raises:
        InvalidSpec: `given` is no floating-point tensor of `width` elements per row; the message has `name`, `hint`.
    """
    known = isinstance(given, torch.Tensor) and given.dim() > 1 and given.is_floating_point()
    if not known or given.flatten(1).shape[1] != width:
        had = f"{tuple(given.shape)} of {given.dtype}" if isinstance(given, torch.Tensor) else shown(given)
        raise InvalidSpec(f"{name}={had}; give floats [rows, {width}] as a tensor of torch; {hint}")
    flat: torch.Tensor = given.flatten(1)
    return flat


def layout(shape: EncoderShape) -> Iterator[tuple[int, int]]:
    """Yield (start, size) in bytes of each tensor in `Encoder.write`'s image, in the order of `Encoder.tensors`."""
    start = 0
    for elements in (
        shape.d_in * shape.d_sae,
        shape.d_sae,
        shape.d_sae if shape.thresholds else 0,
        shape.d_in if shape.shifts else 0,
    ):
        if elements:
            size = elements * torch.float32.itemsize
            yield start, size
            start += -(-size // ALIGN) * ALIGN


def image_bytes(shape: EncoderShape) -> int:
    """Return the number of bytes of the image of an encoder of this shape; see `Encoder.write`."""
    return sum(list(layout(shape))[-1])


@dataclass(frozen=True, eq=False, repr=False)
class Features:
    """The k most active SAE features of each row, by activation descending.

    Args:
        ids: indices of these features, int32 [rows, k]; -1 where fewer are active.
        values: activations of these features, float32 [rows, k]; 0 where fewer are active, NaN for a non-finite row.
        active: number of active features of each row, int32 [rows]; -1 for a non-finite row.
        rest: greatest activation of each row that is not among `values`, float32 [rows]; 0 if there is none.
        width: number of features of the SAE.
        point: point whose rows the SAE read, None if unknown.
        digest: digest of the SAE's encoder, `Encoder.digest`; b"" if unknown, as in files and from servers.
    """

    ids: Int[torch.Tensor, "rows k"]
    values: Float[torch.Tensor, "rows k"]
    active: Int[torch.Tensor, " rows"]
    rest: Float[torch.Tensor, " rows"]
    width: int
    point: Point | None = None
    digest: bytes = b""

    @staticmethod
    def of(rows: CodedRows, point: Point | None = None, digest: bytes = b"") -> Features:
        """Return the features stored in encoded rows that were captured with `CaptureSpec(sae=)`.

        `point` and `digest` are stored in the result.

        Raises:
            InvalidSpec: the rows are not SAE features.
        """
        if not rows.stores_features:
            raise InvalidSpec(f"{rows} are not features of an SAE; capture with CaptureSpec(sae=)")
        parts = rows.parts
        found = (parts["indices"], parts["q"], parts["active"], parts["rest"])
        return Features(*found, rows.schema.width, point, digest)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: int | slice | torch.Tensor) -> Features:
        """Select rows by one index, a slice, or a tensor of indices or a mask."""
        kept = row_index(rows)
        ids, values, active, rest = self.ids[kept], self.values[kept], self.active[kept], self.rest[kept]
        return replace(self, ids=ids, values=values, active=active, rest=rest)

    def __repr__(self) -> str:
        rows, k = self.ids.shape
        return f"Features({rows} rows, the {k} greatest of {self.width:,}; all of {int(self.complete.sum())} rows)"

    @property
    def complete(self) -> torch.Tensor:
        """Mask of rows whose active features are all in `ids`, bool [rows]; in others missing ones are <= `rest`."""
        return (self.active >= 0) & (self.active <= self.ids.shape[1])

    def dense(self) -> Float[torch.Tensor, "rows width"]:
        """Return the activations of all features, with 0 for those not in `ids`: float32 [rows, width]."""
        rows = self.values.new_zeros(len(self), self.width)
        rows.scatter_add_(1, self.ids.clamp(min=0).long(), self.values.where(self.ids >= 0, 0.0))
        return rows.masked_fill_((self.active < 0)[:, None], torch.nan)

    def of_feature(self, feature: int) -> Float[torch.Tensor, " rows"]:
        """Return one feature's activation in each row, float32 [rows]; 0 where it is not in `ids`, see `rest`.

        Raises:
            InvalidSpec: the SAE has no such feature.
        """
        index = index_of(feature)
        if index is None or not 0 <= index < self.width:
            raise InvalidSpec(f"feature {shown(feature)}; this SAE has features 0 to {self.width - 1}")
        found = self.values.where(self.ids == index, 0.0).sum(dim=1)
        return found.masked_fill(self.active < 0, torch.nan)
