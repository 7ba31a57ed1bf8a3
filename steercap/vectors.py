"""One vector a layer: what most published steering vectors are, whatever file they came in."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import SupportsIndex

import torch
from jaxtyping import Float

from steercap.edits.base import Vector
from steercap.errors import InvalidSpec, InvalidVector
from steercap.sites import SITES


@dataclass(frozen=True, eq=False)
class LayerVectors(Mapping[int, torch.Tensor]):
    """Vectors by decoder layer, in the order of their layers.

    Layers count from 0: layer `i` of `resid_post` is transformers' `hidden_states[i + 1]`.

    Args:
        vectors: [hidden] by layer, one at least; kept as float32 copies, in the units of the stream.
        name: what they mean, "" if unnamed.
        model: the model they were made for, "" if unknown.
        site: place in the layer: "resid_pre", "resid_post", "attn_out" or "mlp_out".

    Raises:
        InvalidSpec: no vector, a layer that is no index from 0, or a label that is no text.
        UnknownName: a site that does not exist.
        InvalidVector: a vector that holds NaN or inf, is not [hidden], or is of another width than the first.

    Equal are those of equal labels, layers and bits.
    """

    vectors: Mapping[int, Vector]
    name: str = ""
    model: str = ""
    site: str = "resid_post"

    def __post_init__(self) -> None:
        for label in ("name", "model", "site"):
            if not isinstance(getattr(self, label), str):
                raise InvalidSpec(f"LayerVectors: {label}={getattr(self, label)!r}; give text")
        _ = SITES[self.site]
        if not isinstance(self.vectors, Mapping) or not self.vectors:
            raise InvalidSpec("LayerVectors: no vectors; give a mapping from layer to [hidden], one layer at least")
        kept = {_layer(layer): _vector(layer, vector) for layer, vector in self.vectors.items()}
        object.__setattr__(self, "vectors", dict(sorted(kept.items())))
        widths = {layer: len(vector) for layer, vector in self.items()}
        if len(set(widths.values())) > 1:
            raise InvalidVector(f"LayerVectors: the widths by layer are {widths}; those of one model are equal")

    @property
    def width(self) -> int:
        """Elements of each vector."""
        return len(next(iter(self.values())))

    def save(self, path: str | Path) -> Path:
        """Write vectors and labels to one safetensors file; see `steercap.formats.native`."""
        from steercap.formats.native import save_vectors

        return save_vectors(self, path)

    @staticmethod
    def load(path: str | Path) -> LayerVectors:
        """Read what `save` wrote.

        Raises:
            InvalidFile: the file is truncated, changed, of another kind, or of a newer version.
        """
        from steercap.formats.native import load_vectors

        return load_vectors(path)

    def __getitem__(self, layer: int) -> Float[torch.Tensor, " hidden"]:
        vector = self.vectors[layer]
        assert isinstance(vector, torch.Tensor)
        return vector

    def __iter__(self) -> Iterator[int]:
        return iter(self.vectors)

    def __len__(self) -> int:
        return len(self.vectors)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayerVectors):
            return NotImplemented
        if self._labels() != other._labels() or self.width != other.width:
            return False
        return all(torch.equal(self[layer], other[layer]) for layer in self)

    def __hash__(self) -> int:
        return hash(self._labels())

    def __repr__(self) -> str:
        labels = f"name={self.name!r}, model={self.model!r}, site={self.site!r}"
        return f"LayerVectors(layers={list(self)}, width={self.width}, {labels})"

    def _labels(self) -> tuple[object, ...]:
        return self.name, self.model, self.site, *self


def _layer(layer: object) -> int:
    if isinstance(layer, bool) or not isinstance(layer, SupportsIndex) or operator.index(layer) < 0:
        raise InvalidSpec(f"LayerVectors: layer {layer!r}; layers are integers that count from 0, from the first layer")
    return operator.index(layer)


def _vector(layer: int, vector: Vector) -> Float[torch.Tensor, " hidden"]:
    """A float32 copy that no later change of the user's tensor reaches: [hidden]."""
    try:
        kept = torch.as_tensor(vector).detach().to(device="cpu", dtype=torch.float32, copy=True).contiguous()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidVector(f"LayerVectors: the vector of layer {layer} is no tensor: {error}") from error
    if kept.dim() != 1 or not kept.numel():
        raise InvalidVector(f"LayerVectors: layer {layer} has shape {tuple(kept.shape)}; expected [hidden]")
    wrong = int((~kept.isfinite()).sum())
    if wrong:
        raise InvalidVector(
            f"LayerVectors: layer {layer} holds {wrong} values of {kept.numel()} that are NaN or inf (in float32); "
            "look at where it was computed"
        )
    return kept
