"""Folders of runs: finished stages, marked by the SHA-256 of their inputs, and parts of unfinished ones.

Every file appears whole or not at all. Finished records of a stage are written to small part files; when all exist,
they are joined in one file, the stage is marked as done, and the parts are removed. A killed process thus loses only
its last records, and the next one resumes.

Traits are marked one by one, and no trait's records depend on another's. Results of a trait that is no longer
requested stay, in the tables too, and are used when it is requested again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from steercap.files.folder import FolderKind, differences
from steercap.lab.personas.settings import (
    JOINT,
    STAGES,
    STORED,
    PersonaSettings,
    check_samples,
    described,
    resumed,
    stage_hashes,
    stage_settings,
    trait_hashes,
)

VERSION: Final = 1
#: Hexadecimal digits of a SHA-256 in the name of a folder of parts.
_SHORT: Final = 16


class RunDefinition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of `settings.json` of any run over traits or roles, and of `answers.json` of `read_answers`.

    Args:
        version: version of the folder layout.
        model: identity of the model.
        settings: settings as plain values, those of earlier traits or roles included.
    """

    version: int
    model: dict[str, str]
    settings: dict[str, Any]

    def __post_init__(self) -> None:
        if self.version != VERSION:  # msgspec's decoder makes a complaint about the file of it
            raise ValueError(f"it is of version {self.version}; this steercap reads {VERSION}")


class _State(RunDefinition, frozen=True):
    """Contents of `settings.json` of a run over traits.

    Args:
        done: SHA-256 of the inputs of finished work, by "stage/trait", or by "stage" for stages over all traits.
    """

    done: dict[str, str] = {}


class StageFolder:
    """Folder with the results of stages, each marked as done by the SHA-256 of its inputs.

    Args:
        path: the folder; parts of unfinished stages are in its subfolder `parts`.
        digests: SHA-256 of the current inputs, by "stage", or by "stage/trait" for stages whose traits are marked one
            by one; in the order of the stages.
        load: function that returns the marks: the SHA-256 of the inputs of finished work, by the same keys.
        store: function that writes the marks, a mapping, and the keyword arguments of `finish`.
    """

    def __init__(
        self,
        path: Path,
        digests: Mapping[str, str],
        load: Callable[[], Mapping[str, str]],
        store: Callable[..., None],
    ) -> None:
        self.path, self._digests, self._load, self._store = path, digests, load, store
        #: Traits that are marked one by one, those requested now.
        self.traits = tuple(dict.fromkeys(trait for key in digests if (trait := key.partition("/")[2])))

    def is_done(self, stage: str) -> bool:
        """Return True if a stage is marked as done for every requested trait, with its current inputs."""
        done = self._load()
        return all(done.get(key) == self._digests[key] for key in self._keys(stage))

    def traits_of(self, stage: str) -> set[str]:
        """Return the names of traits whose records of a stage are complete; after `begin`, for its current inputs."""
        return {key.partition("/")[2] for key in self._load() if key.startswith(f"{stage}/")}

    def begin(self, stage: str) -> None:
        """Mark a stage as unfinished; remove its parts, and its and later stages' marks, that are of other inputs.

        A stage that is marked trait by trait keeps the marks of traits with the current inputs, and of traits that are
        not requested now.
        """
        done, keys = self._load(), list(self._digests)
        later = keys[keys.index(self._keys(stage)[0]) :]
        gone = {stage, *(key for key in later if done.get(key) != self._digests[key])}
        self._store({key: digest for key, digest in done.items() if key not in gone})
        current = [self._parts(key) for key in self._keys(stage)]
        for folder in self._parts_of(stage):
            if folder not in current:
                shutil.rmtree(folder)

    def finish(self, stage: str, **further: Any) -> None:
        """Mark a stage as done for every requested trait, and remove its parts; `further` is passed to `store`."""
        self._store({**self._load(), **{key: self._digests[key] for key in self._keys(stage)}}, **further)
        for folder in self._parts_of(stage):
            shutil.rmtree(folder)

    def parts(self, stage: str, trait: str = "") -> Path:
        """Return the folder of a stage's parts for its current inputs.

        Args:
            stage: the stage.
            trait: name of the trait, for a stage that is marked trait by trait; else "".
        """
        return self._parts(f"{stage}/{trait}" if trait else stage)

    def _parts(self, key: str) -> Path:
        return self.path / "parts" / f"{key.replace('/', '-')}-{self._digests[key][:_SHORT]}"

    def _parts_of(self, stage: str) -> list[Path]:
        """Return the part folders of a stage for the requested traits, under any settings."""
        names = {key.replace("/", "-") for key in self._keys(stage)}
        return [folder for folder in sorted((self.path / "parts").glob("*")) if folder.name[: -_SHORT - 1] in names]

    def _keys(self, stage: str) -> list[str]:
        return [key for key in self._digests if key.partition("/")[0] == stage]


def open_folder(path: str | Path, model: Mapping[str, str], settings: PersonaSettings) -> StageFolder:
    """Open the folder of a run over traits to resume it, creating it if needed; `model` is the model's identity.

    Raises:
        RunDiffers: the folder has answers of another model, or of other settings that change answers. If only settings
            of later stages differ, these stages are repeated.
        InvalidFile: the folder is of another version, or its settings cannot be read or lack a field.
        InvalidSetting: the folder has no run yet, and all samples would be the same text; see `check_samples`.
    """
    check_same(path, settings)
    wanted = _State(VERSION, dict(model), described(settings))
    found = RUN.open(path, wanted)
    if found is not None:
        traits = {**found.settings["traits"], **wanted.settings["traits"]}
        known = {**resumed(found.settings, wanted.settings), "traits": traits}
        wanted = _State(VERSION, found.model, known, found.done)
    RUN.write(path, wanted)
    plain, model = {**wanted.settings, "traits": described(settings)["traits"]}, wanted.model
    together, each, digests = stage_hashes(plain, model), trait_hashes(plain, model), dict[str, str]()
    for stage in STAGES:
        own = {f"{stage}/{trait}": digest for trait, digest in each[stage].items()}
        digests |= {stage: together[stage]} if stage in JOINT else own

    def store(done: dict[str, str]) -> None:
        RUN.write(path, msgspec.structs.replace(wanted, done=done))

    return StageFolder(Path(path), digests, lambda: RUN.read(path).done, store)


def check_same(path: str | Path, settings: PersonaSettings) -> None:
    """Check that a folder, which need not exist, has no answers of other settings; the model is not compared.

    Raises:
        RunDiffers, InvalidFile, InvalidSetting: as for `open_folder`.
    """
    if RUN.check_same(path, lambda found: _State(VERSION, found.model, described(settings))) is None:
        check_samples(settings)  # folders of before are resumed


def by_field(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored settings by the names of their fields, some of which have another name in files."""
    fields = {name: field for field, name in STORED.items()}
    return {fields.get(name, name): value for name, value in stored.items()}


def _differing(stored: _State, expected: _State) -> list[str]:
    """Return descriptions of the differences that change answers: in the model, or settings of the first stage."""
    (common, mine), (others, theirs) = (stage_settings(one.settings, "generate") for one in (expected, stored))
    shared = [name for name in mine if name in theirs]
    return differences(
        {**by_field(others), "traits": {name: theirs[name] for name in shared}, "model": stored.model},
        {**by_field(common), "traits": {name: mine[name] for name in shared}, "model": expected.model},
    )


#: Kind of folder of runs over traits.
RUN: Final = FolderKind("settings.json", _State, "run", _differing)
