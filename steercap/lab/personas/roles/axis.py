"""Assistant axis: the direction from the roles a model can play to its default assistant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from steercap.errors import LayerOutOfRange
from steercap.files import native
from steercap.files.native import FileKind
from steercap.lab.personas.roles.directions import How, directions, how_of
from steercap.lab.personas.roles.role import ASSISTANT
from steercap.lab.personas.roles.rows import RoleRows
from steercap.steering.directions import Provenance
from steercap.steering.layers import FrozenMapping, LayerVectors


@dataclass(frozen=True, eq=False)
class AssistantAxis:
    """Direction at each layer from the roles to the default assistant; made by `assistant_axis`.

    Args:
        how: method: "contrast", the assistant's vector minus the mean of the roles', or "pca", the first principal
            component of the roles' vectors.
        vectors: vectors by layer, scaled so that adding one moves the roles' mean to the assistant's position along it.
        explained: share of the roles' variance explained by each principal component, greatest first, by layer.
        cosine: cosine of the contrast with the first component, by layer; the component points to the assistant's side,
            so it is 0 or more.
        standing: score of the assistant on the first component, in the roles' standard deviations from their mean, by
            layer. If it is small, the sign of the component is arbitrary.
        positions: projections of the roles' vectors, and the assistant's, on the axis, by name and layer, in the units
            of the stream; 0 is the mean of the roles.
        provenance: provenance of the rows.
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
        """Return roles and assistant with their positions at one layer, from the least assistant-like to the most.

        Raises:
            LayerOutOfRange: the axis has no vector at the layer.
        """
        if layer not in self.vectors:
            raise LayerOutOfRange(f"the axis is known at layers {list(self.layers)}, not at {layer}")
        found = [(name, by_layer[layer]) for name, by_layer in self.positions.items()]
        return sorted(found, key=lambda pair: pair[1])

    def save(self, path: str | Path) -> Path:
        """Write the axis to one safetensors file; see `steercap.files.native`.

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
    """Compute the assistant axis of a model.

    Source: Lu et al. 2026, The Assistant Axis (arXiv:2601.10387), who use the contrast, as the first component need not
    be the direction that distinguishes the assistant.

    Args:
        rows: rows of roles and assistant.
        how: method, "contrast" or "pca"; see `AssistantAxis`.

    Raises:
        InvalidSpec: an unknown `how`, or all roles are equal.
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


def _kind() -> FileKind:
    return FileKind("axis", {"AssistantAxis": AssistantAxis, "LayerVectors": LayerVectors, "Provenance": Provenance})
