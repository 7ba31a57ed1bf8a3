"""Result of training: the edit at its best validation, with its history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steercap.errors import InvalidSpec
from steercap.steering.directions import DirectionSet, Provenance
from steercap.steering.edits.add import Add
from steercap.steering.layers import LayerVectors
from steercap.steering.spec import SteeringSpec


@dataclass(frozen=True)
class Validation:
    """Validation on held-out examples.

    Args:
        step: number of optimiser steps before it.
        loss: mean loss of the steps since the previous validation, without penalties; None before the first step.
        validation_loss: mean loss of the held-out examples.
        norm: Euclidean norm of all trained parameters.
        lr: learning rate of the next step.
    """

    step: int
    loss: float | None
    validation_loss: float
    norm: float
    lr: float


@dataclass(frozen=True, eq=False)
class Trained:
    """Trained edit.

    Args:
        name: name of the trait.
        spec: edits at the lowest held-out loss; gates are hard.
        history: all validations, the first before any step.
        best_step: step of the lowest held-out loss.
        file: the spec, with its provenance in the header; `SteeringSpec.load` reads it. Where it has `directions`,
            `DirectionSet.load` reads the file beside it that ends in .directions.safetensors.
        model: name of the model.
        provenance: origin of the edit.
    """

    name: str
    spec: SteeringSpec
    history: tuple[Validation, ...]
    best_step: int
    file: Path
    model: str
    provenance: Mapping[str, Any]

    @property
    def validation_loss(self) -> float:
        """Lowest mean loss of the held-out examples."""
        return min(one.validation_loss for one in self.history)

    @property
    def directions(self) -> DirectionSet:
        """Vectors that it adds, by layer, times their scales, as directions.

        Raises:
            InvalidSpec: the spec is not made of `Add`s alone, at one site, one for each layer, none of them relative.
        """
        return added(self.spec, self.name, self.model, self.provenance)

    def __repr__(self) -> str:
        first = self.history[0].validation_loss
        return (
            f"Trained({self.name!r}, validation_loss={self.validation_loss:.4f} (before: {first:.4f}), "
            f"best_step={self.best_step}, file={str(self.file)!r})"
        )


def added(spec: SteeringSpec, name: str, model: str, provenance: Mapping[str, Any]) -> DirectionSet:
    """Return the vectors that a spec of `Add`s adds, as directions.

    Raises:
        InvalidSpec: as for `Trained.directions`.
    """
    edits = spec.flat()
    adds = [edit for edit in edits if isinstance(edit, Add) and not edit.relative and edit.layer is not None]
    sites = {edit.site for edit in adds}
    if spec.keeps_norm or len(adds) < len(edits) or len(sites) > 1 or len({edit.layer for edit in adds}) < len(adds):
        raise InvalidSpec(
            f"{name}: directions are of Add at one site, one for each layer=, not relative and without preserve_norm; "
            "use the spec"
        )
    vectors = {edit.layer: edit.scale * edit.vector for edit in adds}  # type: ignore[operator]
    found = LayerVectors(vectors, name=name, model=model, site=sites.pop())  # type: ignore[arg-type]
    counts = {key: {name: (int(provenance.get(key, 0)), 0)} for key in ("examples", "held_out")}
    said = Provenance(
        dtype=str(provenance.get("dtype", "")),
        prompts={name: str(provenance.get("examples_sha256", ""))},
        tokens=str(adds[0].selection),
        method=f"training by {provenance.get('objective', '')}",
        seed=int(provenance.get("seed", 0)),
        rows=counts["examples"],
        held_out=counts["held_out"],
    )
    return DirectionSet({name: found}, said)
