"""Folder of a training run, whose files are written atomically: definition, state, and as its result the edit at the
lowest held-out loss, with its history.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from steercap.errors import InvalidFile, InvalidSpec
from steercap.files import native
from steercap.files.base import write_whole
from steercap.files.folder import FolderKind, differences
from steercap.files.native import FileKind
from steercap.steering.directions import DirectionSet, Provenance
from steercap.steering.edits.add import Add
from steercap.steering.layers import LayerVectors
from steercap.steering.spec import SteeringSpec

STATE: Final = "state.safetensors"
#: End of the names of files of directions, before their suffix.
DIRECTIONS: Final = ".directions"
#: Names of settings that are real numbers.
_REAL: Final = frozenset({"norm_penalty", "sparsity_penalty", "max_grad_norm", "gate_width"})
#: Text of a number of NumPy's, whose own text is its group.
_NUMPY: Final = re.compile(r"\Anp\.\w+\((.*)\)\Z")
#: Such a text within another, and a whole number within a text.
_NUMPY_WITHIN: Final = re.compile(r"np\.\w+\(([^()]*)\)")
_WHOLE: Final = re.compile(r"(?<![\w.+-])-?\d+(?![\w.])")


@dataclass(frozen=True)
class Validation:
    """Result of one evaluation of a trait on its held-out examples.

    Args:
        step: number of optimiser steps before the evaluation.
        loss: mean loss of the steps since the previous validation, without penalties; None before the first step.
        validation_loss: mean loss of the held-out examples, without penalties.
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
    """Result of training one trait: the edit, its file and its history.

    Args:
        name: name of the trait.
        spec: edits at the lowest held-out loss; gates are hard.
        history: all validations, the first before any step.
        best_step: step of the lowest held-out loss.
        file: path of the spec's file, for `SteeringSpec.load`, with the provenance in its header. If the spec has
            `directions`, `DirectionSet.load` reads them from the file beside it, ending in .directions.safetensors.
        model: name of the model.
        provenance: origin of the edit: model, objective, settings, hashes of examples, losses.
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
        """Vectors that the edit adds to rows, times their scales: one direction, with a vector per layer.

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
    """Return the vectors that a spec of `Add`s adds, times their scales, as a direction called `name`.

    Raises:
        InvalidSpec: as for `Trained.directions`.
    """
    edits = spec.flat()
    adds = [edit for edit in edits if isinstance(edit, Add) and not edit.relative and edit.layer is not None]
    sites = {edit.site for edit in adds}
    if spec.keeps_norm or len(adds) < len(edits) or len(sites) > 1 or len({edit.layer for edit in adds}) < len(adds):
        raise InvalidSpec(
            f"{name}: only a spec of Add edits at one site, one for each layer, without relative= and preserve_norm=, "
            "can become directions; use the spec itself"
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


class TrainingDefinition(msgspec.Struct, frozen=True):
    """Everything that determines the result of a training run, as text, compared when the run is resumed.

    Args:
        model: identity of the model, see `steercap.files.fingerprint`.
        objective: objective with its settings.
        settings: `TrainingSettings` that affect results, by name.
        edits: SHA-256 of each trait's initial edits, by its name.
        examples: SHA-256 of each trait's training tokens, by its name.
        held_out: SHA-256 of each trait's held-out tokens, by its name.
        world: number of processes that share the examples of a step.

    Equal numbers in `settings` have one text, whatever their type: 1 and NumPy's 1.0 are "1.0" of a real setting. Those
    within the texts of the objective, optimiser and scheduler are as given, and are compared as numbers.
    """

    model: dict[str, str]
    objective: str
    settings: dict[str, str]
    edits: dict[str, str]
    examples: dict[str, str]
    held_out: dict[str, str]
    world: int

    def __post_init__(self) -> None:
        found = {name: _NUMPY.sub(r"\1", text) for name, text in self.settings.items()}
        found |= {name: repr(float(found[name])) for name in _REAL & found.keys() if found[name] != "None"}
        msgspec.structs.force_setattr(self, "settings", found)


def _differing(stored: TrainingDefinition, expected: TrainingDefinition) -> list[str]:
    """Return the differences; numbers within a text, such as an objective's, are compared as numbers: 1 is 1.0."""
    return differences(*(in_real_numbers(one) for one in (stored, expected)))


def in_real_numbers(one: TrainingDefinition) -> TrainingDefinition:
    """Return a definition whose texts of objective, optimiser and scheduler write whole numbers as 1.0."""
    texts = {name: one.settings[name] for name in ("optimizer", "scheduler") if name in one.settings}
    told = {
        name: _WHOLE.sub(r"\g<0>.0", _NUMPY_WITHIN.sub(r"\1", text))
        for name, text in [("objective", one.objective), *texts.items()]
    }
    return msgspec.structs.replace(one, objective=told.pop("objective"), settings=dict(one.settings) | told)


#: Kind of folder that holds a training run: its definition's file and type.
FOLDER: Final = FolderKind("training.json", TrainingDefinition, "training", _differing)


@dataclass(frozen=True, eq=False)
class TraitState:
    """Training state of one trait, for a resumed run.

    Args:
        values: current parameters, by name.
        best: parameters at the lowest held-out loss, by name.
        best_step: step of the lowest held-out loss.
        waited: number of validations since then.
        optimizer, scheduler: `state_dict` of each; None for no scheduler.
        history: all validations.
    """

    values: Mapping[str, torch.Tensor]
    best: Mapping[str, torch.Tensor]
    best_step: int
    waited: int
    optimizer: Mapping[str, Any]
    scheduler: Mapping[str, Any] | None
    history: tuple[Validation, ...]


@dataclass(frozen=True, eq=False)
class TrainingState:
    """State of a training run: number of steps taken, and the state of each trait by name."""

    step: int
    traits: Mapping[str, TraitState]


def save_state(folder: Path, state: TrainingState, model: str) -> None:
    """Write the state of a training run to its folder, replacing the previous one; `model` is the model's name.

    Raises:
        InvalidSpec: the state of an optimiser or scheduler is not made of numbers, text, lists and tensors.
    """
    native.save(state, folder / STATE, _kind(), model=model)


def load_state(folder: Path) -> TrainingState | None:
    """Read the state of a training run from its folder; None if none was written yet.

    Raises:
        InvalidFile: the file was changed, or is of a newer version.
    """
    if not (folder / STATE).exists():
        return None
    return native.load(folder / STATE, _kind(), TrainingState)


def own(value: Any) -> Any:
    """Return a deep copy of a state with cloned tensors: equal ones would be stored as one. Sequences become lists."""
    match value:
        case torch.Tensor():
            return value.clone()
        case Mapping():
            return {name: own(one) for name, one in value.items()}
        case list() | tuple():
            return [own(one) for one in value]
        case _:
            return value


def write_trained(trained: Trained) -> None:
    """Write a trained edit to its file, and beside it its directions, if it has any, and its validations as JSON."""
    trained.spec.save(trained.file, model=trained.model, provenance=trained.provenance)
    with write_whole(trained.file.with_name(f"{trained.name}.history.json")) as scratch:
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(list(trained.history)), indent=2))
    with suppress(InvalidSpec):  # not all edits are directions
        trained.directions.save(trained.file.with_name(f"{trained.name}{DIRECTIONS}.safetensors"))


def check_name(name: str) -> None:
    """Check that a trait's name can be a file name.

    Raises:
        InvalidFile: the name is empty, reserved, or not a plain file name.
    """
    if not name or name.startswith(".") or Path(name).name != name or name == Path(STATE).stem:
        raise InvalidFile(f"{name!r} must be usable as a file name; give one word other than {Path(STATE).stem!r}")


def _kind() -> FileKind:
    return FileKind("training", {"State": TrainingState, "TraitState": TraitState, "Validation": Validation})
