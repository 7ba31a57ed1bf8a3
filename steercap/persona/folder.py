"""A run's folder: which stages are done, under which settings, and the parts of the one under way.

Every file appears whole or not at all. Finished records of a stage go to small part files; when all are there they
become one file, the stage is marked as done, and the parts go. So a process that is killed loses the last records
alone, and the next one goes on from what is there.

Traits are marked one by one, and no trait's records depend on another's. What was found of a trait that is no longer
asked for stays where it is, in the tables too, and is used again when it is asked for again.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from steercap.errors import InvalidFile, RunDiffers
from steercap.files.base import write_whole
from steercap.persona.settings import JOINT, STAGES, other_answers, stage_hashes, trait_hashes

VERSION: Final = 1
#: Differences named in an error.
NAMED: Final = 5
#: Digits of a SHA-256 that a folder of parts is named by.
_SHORT: Final = 16


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `settings.json` holds.

    Args:
        version: of the layout of the folder.
        model: what is known of the model.
        settings: traits in full, those too that were asked for before.
        done: what is done, "stage/trait" or "stage" where all traits go together, with the SHA-256 of what it depended
            on.
    """

    version: int
    model: dict[str, str]
    settings: dict[str, Any]
    done: dict[str, str] = {}


def check_same(path: str | Path, settings: Mapping[str, Any]) -> None:
    """See that a folder holds no answers of other settings; of which model is not asked.

    Args:
        path: the folder, which need not be there.
        settings: as `steercap.persona.settings.described` gives them.

    Raises:
        RunDiffers, InvalidFile: as of `RunFolder`.
    """
    found = _state_of(Path(path))
    if found is not None:
        _check(Path(path), found, _State(VERSION, found.model, _plain(settings), {}))


class RunFolder:
    """The folder of one run, opened under its settings.

    Args:
        path: the folder, made if it is not there.
        model: what is known of the model.
        settings: as `steercap.persona.settings.described` gives them.

    Raises:
        RunDiffers: the folder holds answers of another model or of settings under which they would be others. Where
            later settings differ, the stages that depend on them are done again.
        InvalidFile: the folder is of another version, or its settings cannot be read or lack something.
    """

    def __init__(self, path: str | Path, model: Mapping[str, str], settings: Mapping[str, Any]) -> None:
        self.path = Path(path)
        each = trait_hashes(settings, model)
        self.traits: tuple[str, ...] = tuple(settings["traits"])
        self._hashes = {stage: digest for stage, digest in stage_hashes(settings, model).items() if stage in JOINT} | {
            f"{stage}/{trait}": digest
            for stage in STAGES
            if stage not in JOINT
            for trait, digest in each[stage].items()
        }
        wanted = _State(VERSION, dict(model), _plain(settings))
        found = _state_of(self.path)
        if found is not None:
            _check(self.path, found, wanted)
            known = {**wanted.settings, "traits": {**found.settings["traits"], **wanted.settings["traits"]}}
            wanted = msgspec.structs.replace(wanted, settings=known, done=found.done)
        self._state = wanted
        self.path.mkdir(parents=True, exist_ok=True)
        self._sweep()
        self._write()

    def is_done(self, stage: str) -> bool:
        """Whether a stage's results are there for every trait, under what it depends on now."""
        return all(map(self._holds, self._keys(stage)))

    def traits_of(self, stage: str) -> set[str]:
        """The traits whose records of a stage are whole; after `begin`, of what it depends on now."""
        return {key.partition("/")[2] for key in self._state.done if key.startswith(f"{stage}/")}

    def begin(self, stage: str) -> None:
        """Say that results of a stage, and of those after it, are about to change, where they are of other settings.

        What is there of traits that are not asked for now stays.
        """
        gone = {key for later in STAGES[STAGES.index(stage) :] for key in self._keys(later) if not self._holds(key)}
        if stage in JOINT:
            gone.add(stage)
        self._mark({key: digest for key, digest in self._state.done.items() if key not in gone})
        for folder in self._parts_of(stage):
            if folder not in {self.parts(stage, trait) for trait in self.traits}:
                shutil.rmtree(folder)

    def finish(self, stage: str) -> None:
        """Say that the results of a stage are there for every trait; their parts go."""
        self._mark(self._state.done | {key: self._hashes[key] for key in self._keys(stage)})
        for folder in self._parts_of(stage):
            shutil.rmtree(folder)

    def parts(self, stage: str, trait: str) -> Path:
        """Where the parts of a stage that is not of all traits together lie, under what it depends on now."""
        return self.path / "parts" / f"{stage}-{trait}-{self._hashes[f'{stage}/{trait}'][:_SHORT]}"

    def _parts_of(self, stage: str) -> list[Path]:
        """The parts of the traits asked for now, under whatever settings."""
        found = sorted((self.path / "parts").glob(f"{stage}-*"))
        return [folder for folder in found if folder.name[len(stage) + 1 : -_SHORT - 1] in self.traits]

    def _keys(self, stage: str) -> list[str]:
        return [stage] if stage in JOINT else [f"{stage}/{trait}" for trait in self.traits]

    def _holds(self, key: str) -> bool:
        return self._state.done.get(key) == self._hashes[key]

    def _mark(self, done: dict[str, str]) -> None:
        self._state = msgspec.structs.replace(self._state, done=done)
        self._write()

    def _write(self) -> None:
        with write_whole(self.path / "settings.json") as scratch:
            scratch.write_bytes(msgspec.json.format(msgspec.json.encode(self._state), indent=2))

    def _sweep(self) -> None:
        """Remove what a killed process had begun to write."""
        for path in self.path.rglob(".*"):
            if re.fullmatch(r"\..+\.[0-9a-f]{32}", path.name):
                path.unlink(missing_ok=True)


def _state_of(folder: Path) -> _State | None:
    """What a folder says of itself, None if it says nothing.

    Raises:
        InvalidFile: it cannot be read.
    """
    path = folder / "settings.json"
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=_State)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidFile(f"{path} holds no settings of a run: {error}; choose another folder") from error


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(settings))
    return plain


def _check(path: Path, found: _State, wanted: _State) -> None:
    """See that the answers in a folder are those that are wanted."""
    if found.version != VERSION:
        raise InvalidFile(f"{path} is a run folder of version {found.version}; this steercap reads {VERSION}")
    try:
        what = other_answers(wanted.settings, found.settings, (wanted.model, found.model))
    except (LookupError, TypeError, AttributeError) as error:
        raise InvalidFile(
            f"{path / 'settings.json'} lacks what this steercap must know to go on ({type(error).__name__}: {error}); "
            "it was written by another version, or changed: choose another folder"
        ) from error
    if what:
        more = f", and {len(what) - NAMED} more" if len(what) > NAMED else ""
        raise RunDiffers(
            f"{path} holds answers of another run ({'; '.join(what[:NAMED])}{more}); choose another folder, or ask for "
            "the same"
        )
