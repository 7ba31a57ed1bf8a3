"""The folder of a training: what it depends on, and how far it is, in files that appear whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from steercap.errors import InvalidFile
from steercap.files import native
from steercap.files.folder import FolderKind
from steercap.files.native import Kind
from steercap.lab.training.results import Validation

STATE: Final = "state.safetensors"


class Definition(msgspec.Struct, frozen=True):
    """What a training depends on, in words.

    Args:
        model: what identifies it, see `steercap.files.fingerprint`.
        objective: with its settings.
        settings: by name.
        edits: SHA-256 of what each trait starts from, by its name.
        examples: SHA-256 of the tokens that each learns from, by its name.
        held_out: SHA-256 of those that are held out, by its name.
        world: processes that share the examples of a step.
    """

    model: dict[str, str]
    objective: str
    settings: dict[str, str]
    edits: dict[str, str]
    examples: dict[str, str]
    held_out: dict[str, str]
    world: int


def _differing(found: Definition, wanted: Definition) -> Sequence[str]:
    one, other = (_flat(msgspec.to_builtins(definition)) for definition in (found, wanted))
    names = dict.fromkeys((*one, *other))
    return [f"{name} is {one.get(name)}, not {other.get(name)}" for name in names if one.get(name) != other.get(name)]


def _flat(nested: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in nested.items():
        inner = {f"{name} of {key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
        found |= inner
    return found


FOLDER: Final = FolderKind("training.json", Definition, "training", _differing)


@dataclass(frozen=True, eq=False)
class TraitState:
    """How far one trait is.

    Args:
        values: what is trained, by name, as it is now.
        best: the same where the loss on what is held out was least.
        best_step: when that was.
        waited: looks since then.
        optimizer, scheduler: what their `state_dict` gives; None for no scheduler.
        history: every look.
    """

    values: Mapping[str, torch.Tensor]
    best: Mapping[str, torch.Tensor]
    best_step: int
    waited: int
    optimizer: Mapping[str, Any]
    scheduler: Mapping[str, Any] | None
    history: tuple[Validation, ...]


@dataclass(frozen=True, eq=False)
class State:
    """How far a training is.

    Args:
        step: steps that were taken.
        traits: by name.
    """

    step: int
    traits: Mapping[str, TraitState]


def save_state(folder: Path, state: State, model: str) -> None:
    """Write how far a training is, in place of what was written before.

    Raises:
        InvalidSpec: an optimiser or a scheduler whose state is not made of numbers, text, lists and tensors.
    """
    native.save(state, folder / STATE, _kind(), model=model)


def load_state(folder: Path) -> State | None:
    """How far a training is; None if nothing was written yet.

    Raises:
        InvalidFile: the file was changed, or is of a newer version.
    """
    if not (folder / STATE).exists():
        return None
    return native.load(folder / STATE, _kind(), State)


def own(value: Any) -> Any:
    """A state with tensors of its own: in a file, equal ones are one. Sequences become lists."""
    match value:
        case torch.Tensor():
            return value.clone()
        case Mapping():
            return {name: own(one) for name, one in value.items()}
        case list() | tuple():
            return [own(one) for one in value]
        case _:
            return value


def write_history(path: Path, history: Sequence[Validation]) -> None:
    """Write every look at what is held out, as JSON."""
    from steercap.files.base import write_whole

    with write_whole(path) as scratch:
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(list(history)), indent=2))


def check_name(name: str) -> None:
    """Check that a trait's name can be that of a file.

    Raises:
        InvalidFile: it cannot.
    """
    if not name or name.startswith(".") or Path(name).name != name or name == Path(STATE).stem:
        raise InvalidFile(f"{name!r} is to name a file; give one word, and not {Path(STATE).stem!r}")


def _kind() -> Kind:
    return Kind("training", {"State": State, "TraitState": TraitState, "Validation": Validation})
