"""A run's folder: which stages are done, under which settings, and the parts of the one under way.

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

    def __post_init__(self) -> None:
        if self.version != VERSION:  # msgspec's decoder makes a complaint about the file of it
            raise ValueError(f"it is of version {self.version}; this steercap reads {VERSION}")


def check_same(path: str | Path, settings: Mapping[str, Any]) -> None:
    """Check that a folder holds no answers of other settings; of which model is not asked.

    Args:
        path: the folder, which need not be there.
        settings: as `steercap.lab.personas.settings.described` gives them.

    Raises:
        RunDiffers, InvalidFile: as for `RunFolder`.
    """
    RUN.check_same(path, lambda found: _State(VERSION, found.model, _plain(settings)))


class RunFolder:
    """The folder of one run, opened under its settings.

    Args:
        path: the folder, made if it is not there.
        model: what is known of the model.
        settings: as `steercap.lab.personas.settings.described` gives them.

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
        RUN.write(self.path, self._state)


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(settings))
    return plain


def _differing(found: _State, wanted: _State) -> list[str]:
    """What differs, of what answers depend on: where later settings do, later stages are done again."""
    return other_answers(wanted.settings, found.settings, (wanted.model, found.model))


#: Folders of runs of personas.
RUN: Final = FolderKind("settings.json", _State, "run", _differing)
