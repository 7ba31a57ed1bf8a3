"""Assistant axis: the direction from the roles a model can play to its default assistant.

Shape legend: roles = number of roles, the assistant not counted; hidden = elements of a row. Arithmetic is in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float

from steercap.core.values import shown
from steercap.errors import InvalidSpec, LayerOutOfRange
from steercap.files import native
from steercap.files.native import FileKind
from steercap.lab.personas.roles.role import ASSISTANT
from steercap.lab.personas.roles.rows import RoleRows
from steercap.steering.directions import Provenance
from steercap.steering.edits.inputs import FrozenMapping
from steercap.steering.layers import LayerVectors

#: Method of computing an axis; see `AssistantAxis`.
How = Literal["contrast", "pca"]
HOWS: Final[tuple[How, ...]] = get_args(How)
#: Relative difference below which vectors count as equal, since means are rounded.
SAME: Final = 1e-6


class Directions(NamedTuple):
    """Directions of an axis at one layer.

    Args:
        contrast: unit vector from the mean of the roles to the assistant, [hidden].
        pca: first principal component of the roles' vectors around their mean, a unit vector signed so that the
            assistant is on its positive side, [hidden].
        explained: share of the roles' variance explained by each component, greatest first, [roles - 1].
        offset: assistant's vector minus the mean of the roles, [hidden].
        standing: projection of `offset` on the component, in standard deviations of the roles; 0 or more. If it is
            small, the sign of the component is arbitrary.
    """

    contrast: Float[torch.Tensor, " hidden"]
    pca: Float[torch.Tensor, " hidden"]
    explained: Float[torch.Tensor, " components"]
    offset: Float[torch.Tensor, " hidden"]
    standing: float

    def of(self, how: How) -> Float[torch.Tensor, " hidden"]:
        """Return the unit vector of one method, `contrast` or `pca`, [hidden]."""
        return self.contrast if how == "contrast" else self.pca


class Axes(NamedTuple):
    """Directions of several sets of roles, stacked along the leading axes; fields as in `Directions`.

    Args:
        contrast, pca: unit vectors, [..., hidden].
        offset: assistant's vector minus the mean of the roles, [..., hidden].
        sizes: sums of squares along each component, greatest first, [..., roles].
    """

    contrast: Float[torch.Tensor, "*sets hidden"]
    pca: Float[torch.Tensor, "*sets hidden"]
    offset: Float[torch.Tensor, "*sets hidden"]
    sizes: Float[torch.Tensor, "*sets roles"]


@dataclass(frozen=True, eq=False)
class AssistantAxis:
    """Direction at each layer from the roles to the default assistant, as `assistant_axis` computes it.

    Args:
        how: method: "contrast", the assistant's vector minus the mean of the roles', or "pca", the first principal
            component of the roles' vectors.
        vectors: vectors by layer, scaled so that adding one moves the roles' mean to the assistant's position along it.
        explained: share of the roles' variance explained by each principal component, greatest first, by layer.
        cosine: cosine of the contrast with the first component, by layer; 0 or more, since the component is signed
            towards the assistant.
        standing: projection on the first component of the assistant's distance from the roles' mean, in standard
            deviations of the roles, by layer. If it is small, the sign of the component is arbitrary.
        positions: projections of the roles' vectors, and the assistant's, on the axis, by name and layer, in the units
            of the stream; 0 is the mean of the roles.
        provenance: model, texts and selection that the rows come from.
    """

    how: How
    vectors: LayerVectors
    explained: Mapping[int, tuple[float, ...]]
    cosine: Mapping[int, float]
    standing: Mapping[int, float]
    positions: Mapping[str, Mapping[int, float]]
    provenance: Provenance

    def __post_init__(self) -> None:
        object.__setattr__(self, "how", how_of(self.how))
        for name in ("explained", "cosine", "standing"):
            object.__setattr__(self, name, FrozenMapping(getattr(self, name)))
        positions = {name: FrozenMapping(by_layer) for name, by_layer in self.positions.items()}
        object.__setattr__(self, "positions", FrozenMapping(positions))

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the axis, ascending."""
        return tuple(self.vectors)

    def ranked(self, layer: int) -> list[tuple[str, float]]:
        """Return (name, position) of roles and assistant at one layer, from the least assistant-like to the most.

        Raises:
            LayerOutOfRange: the axis has no vector at the layer.
        """
        if layer not in self.vectors:
            raise LayerOutOfRange(f"the axis is known at layers {list(self.layers)}, not at {layer}")
        found = [(name, by_layer[layer]) for name, by_layer in self.positions.items()]
        return sorted(found, key=lambda pair: pair[1])

    def save(self, path: str | Path) -> Path:
        """Write the axis to one safetensors file, and return its path; see `steercap.files.native`.

        Raises:
            InvalidFile: the suffix is not .safetensors.
        """
        return native.save(self, path, _kind(), model=self.vectors.model)

    @staticmethod
    def load(path: str | Path) -> AssistantAxis:
        """Read a file written by `save`.

        Raises:
            InvalidFile: the file is truncated, changed, of another kind, or of a newer version.
        """
        return native.load(path, _kind(), AssistantAxis)

    def __repr__(self) -> str:
        return f"AssistantAxis({self.how!r}, {len(self.positions) - 1} roles, {self.vectors!r})"


def assistant_axis(rows: RoleRows, how: How = "contrast") -> AssistantAxis:
    """Compute the assistant axis of a model, at each layer of the rows.

    Source: Lu et al. 2026, The Assistant Axis (arXiv:2601.10387), who use the contrast, as the first component need not
    be the direction that distinguishes the assistant.

    Args:
        rows: mean rows of the roles' and the assistant's answers.
        how: method, "contrast" or "pca"; see `AssistantAxis`.

    Raises:
        InvalidSpec: `how` is unknown, or as for `directions`.
    """
    how = how_of(how)
    found, positions = {}, dict[str, dict[int, float]]()
    vectors = {}
    for layer in rows.layers:
        roles, assistant = rows.means(layer)
        found[layer] = directions(roles, assistant)
        unit = found[layer].of(how)
        vectors[layer] = unit * (unit @ found[layer].offset)
        along = ((roles - roles.mean(0)) @ unit).tolist()
        told = [*zip(rows.names, along, strict=True), (ASSISTANT, float(unit @ found[layer].offset))]
        for name, place in told:
            positions.setdefault(name, {})[layer] = place
    return AssistantAxis(
        how,
        LayerVectors(vectors, name=f"assistant axis ({how})", model=rows.model, site=rows.site),
        {layer: tuple(one.explained.tolist()) for layer, one in found.items()},
        {layer: float(one.contrast @ one.pca) for layer, one in found.items()},
        {layer: one.standing for layer, one in found.items()},
        positions,
        rows.provenance,
    )


def directions(roles: Float[torch.Tensor, "roles hidden"], assistant: Float[torch.Tensor, " hidden"]) -> Directions:
    """Compute the contrast and the first principal component at one layer, float64.

    Args:
        roles: vectors of two roles or more, any floating dtype.
        assistant: vector of the assistant.

    Raises:
        InvalidSpec: all roles have equal vectors, or the assistant's is their mean, so there is no direction.
    """
    roles, assistant = roles.double(), assistant.double()
    found = axes(roles, assistant, torch.ones(len(roles), dtype=torch.bool))
    if bool(found.contrast.isnan().any()) or bool(found.pca.isnan().any()):
        raise InvalidSpec("all roles have one vector, or the assistant has the mean of theirs: there is no axis")
    sizes = found.sizes[: len(roles) - 1]
    spread = float(((roles - roles.mean(0)) @ found.pca).std())
    standing = float(found.pca @ found.offset) / spread
    return Directions(found.contrast, found.pca, sizes / sizes.sum(), found.offset, standing)


def axes(
    roles: Float[torch.Tensor, "*sets roles hidden"],
    assistant: Float[torch.Tensor, "*sets hidden"],
    used: Bool[torch.Tensor, "*sets roles"],
) -> Axes:
    """Compute the contrast and the first principal component for each set of roles; NaN where one is not defined.

    The contrast is the unit vector from the mean of the roles to the assistant. The component is that of the roles'
    vectors around their mean, a unit vector signed towards the assistant.

    Args:
        roles: vectors of the roles, float64.
        assistant: vector of the assistant for each set, float64.
        used: mask of the roles that belong to each set, at least two.
    """
    weights = used.to(roles.dtype)[..., None]
    mean = (roles * weights).sum(-2, keepdim=True) / weights.sum(-2, keepdim=True)
    centred, offset = (roles - mean) * weights, assistant - mean.squeeze(-2)
    # By the products of roles with each other: there are fewer of them than elements of a row.
    least = SAME * (roles * weights).norm(dim=-1).amax(-1, keepdim=True)  # rounding alone gives no direction
    sizes, vectors = torch.linalg.eigh(centred @ centred.mT)
    component = _direction((vectors[..., None, :, -1] @ centred).squeeze(-2), least)
    side = (component * offset).sum(-1, keepdim=True)
    return Axes(
        _direction(offset, least),
        torch.where(side < 0, -component, component),
        offset,
        sizes.flip(-1).clamp(min=0),
    )


def _direction(
    vectors: Float[torch.Tensor, "*sets hidden"], least: Float[torch.Tensor, "*sets 1"]
) -> Float[torch.Tensor, "*sets hidden"]:
    """Scale vectors to length 1; vectors whose norm is not above `least` become NaN."""
    norms = vectors.norm(dim=-1, keepdim=True)
    return torch.where(norms > least, vectors / norms, math.nan)


def how_of(how: Any) -> How:
    """Check the name of a method of computing an axis, "contrast" or "pca", and return it.

    Raises:
        InvalidSpec: the name is unknown.
    """
    if how not in HOWS:
        raise InvalidSpec(f"how={shown(how)}; give {' or '.join(map(repr, HOWS))}")
    found: How = how
    return found


def _kind() -> FileKind:
    return FileKind("axis", {"AssistantAxis": AssistantAxis, "LayerVectors": LayerVectors, "Provenance": Provenance})
