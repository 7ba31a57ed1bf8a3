"""Folder of a run: finished stages with their settings, and partial results of the current stage.

Every file appears whole or not at all. Finished records of a stage go to small part files; when all are there they
become one file, the stage is marked as done, and the parts go. So a process that is killed loses the last records
alone, and the next one goes on from what is there.

Traits are marked one by one, and no trait's records depend on another's. What was found of a trait that is no longer
asked for stays where it is, in the tables too, and is used again when it is asked for again.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from steercap.files.folder import FolderKind
from steercap.lab.personas.settings import JOINT, STAGES, other_answers, stage_hashes, trait_hashes

VERSION: Final = 1
#: Digits of a SHA-256 that a folder of parts is named by.
_SHORT: Final = 16


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of `settings.json`.

    Args:
        version: version of the folder layout.
        model: identity of the model.
        settings: settings with traits in full, earlier ones included.
        done: finished work, "stage/trait" or "stage" for stages of all traits, with the SHA-256 of the inputs it
            depended on.
    """

    version: int
    model: dict[str, str]
    settings: dict[str, Any]
    done: dict[str, str] = {}

    def __post_init__(self) -> None:
        if self.version != VERSION:  # msgspec's decoder makes a complaint about the file of it
            raise ValueError(f"it is of version {self.version}; this steercap reads {VERSION}")


def check_same(path: str | Path, settings: Mapping[str, Any]) -> None:
    """Check that a folder holds no answers of other settings; the model is not compared.

    Args:
        path: the folder, which need not exist.
        settings: settings as returned by `steercap.lab.personas.settings.described`.

    Raises:
        RunDiffers, InvalidFile: as for `RunFolder`.
    """
    RUN.check_same(path, lambda found: _State(VERSION, found.model, _plain(settings)))


class RunFolder:
    """Folder of one run, opened under its settings.

    Args:
        path: the folder, created if needed.
        model: identity of the model.
        settings: settings as returned by `steercap.lab.personas.settings.described`.

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
        found = RUN.open(self.path, wanted)
        if found is not None:
            known = {**wanted.settings, "traits": {**found.settings["traits"], **wanted.settings["traits"]}}
            wanted = msgspec.structs.replace(wanted, settings=known, done=found.done)
        self._state = wanted
        RUN.write(self.path, self._state)

    def is_done(self, stage: str) -> bool:
        """Return True if a stage's results exist for every trait, for its current inputs."""
        return all(map(self._holds, self._keys(stage)))

    def traits_of(self, stage: str) -> set[str]:
        """Return the traits whose records of a stage are complete; after `begin`, for its current inputs."""
        return {key.partition("/")[2] for key in self._state.done if key.startswith(f"{stage}/")}

    def begin(self, stage: str) -> None:
        """Mark results of a stage and of later ones as unfinished, where they are of other settings.

        Results of traits that are not requested now stay.
        """
        gone = {key for later in STAGES[STAGES.index(stage) :] for key in self._keys(later) if not self._holds(key)}
        if stage in JOINT:
            gone.add(stage)
        self._mark({key: digest for key, digest in self._state.done.items() if key not in gone})
        for folder in self._parts_of(stage):
            if folder not in {self.parts(stage, trait) for trait in self.traits}:
                shutil.rmtree(folder)

    def finish(self, stage: str) -> None:
        """Mark a stage as finished for every trait, and remove its parts."""
        self._mark(self._state.done | {key: self._hashes[key] for key in self._keys(stage)})
        for folder in self._parts_of(stage):
            shutil.rmtree(folder)

    def parts(self, stage: str, trait: str) -> Path:
        """Return the folder of a stage's parts for one trait, for its current inputs."""
        return self.path / "parts" / f"{stage}-{trait}-{self._hashes[f'{stage}/{trait}'][:_SHORT]}"

    def _parts_of(self, stage: str) -> list[Path]:
        """Return the part folders of the requested traits, under any settings."""
        found = sorted((self.path / "parts").glob(f"{stage}-*"))
        return [folder for folder in found if folder.name[len(stage) + 1 : -_SHORT - 1] in self.traits]

    def _keys(self, stage: str) -> list[str]:
        return [stage] if stage in JOINT else [f"{stage}/{trait}" for trait in self.traits]

    def _holds(self, key: str) -> bool:
        return self._state.done.get(key) == self._hashes[key]

    def _mark(self, done: dict[str, str]) -> None:
        self._state = msgspec.structs.replace(self._state, done=done)
        RUN.write(self.path, self._state)


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings after a round trip through JSON."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(settings))
    return plain


def _differing(found: _State, wanted: _State) -> list[str]:
    """Return the differences that affect answers; where only later settings differ, later stages are repeated."""
    return other_answers(wanted.settings, found.settings, (wanted.model, found.model))


#: Folders of runs of personas.
RUN: Final = FolderKind("settings.json", _State, "run", _differing)
