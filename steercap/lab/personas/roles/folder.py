"""Folder of a run over roles: a subfolder for each role, with its own record of finished stages.

`settings.json` has the settings of the run. Results of a role are under `roles/NAME` and do not depend on other roles:
so several processes, each with its own roles, can work in one folder without writing the same file. Every file is
written atomically, and finished records of a stage are first written to small files, so that a killed process loses
only its last ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from steercap.errors import InvalidFile
from steercap.files.base import write_whole
from steercap.files.folder import FolderKind, differences
from steercap.lab.personas.folder import VERSION, RunDefinition, StageFolder, by_field
from steercap.lab.personas.roles.role import ASSISTANT
from steercap.lab.personas.roles.settings import (
    RoleOutcome,
    RoleSettings,
    described,
    digests_of,
    generation_of,
    settings_from,
)
from steercap.lab.personas.settings import check_samples, resumed


class RolesDefinition(RunDefinition, frozen=True):
    """Contents of `settings.json` of a run over roles; `roles` are the names of the roles last requested."""

    roles: tuple[str, ...]


class _Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of a role's `state.json`.

    Args:
        done: SHA-256 of each finished stage's inputs, by stage.
        outcome: outcome of the role once its last stage, "read", was done, else None.
    """

    done: dict[str, str] = {}
    outcome: RoleOutcome | None = None


class RoleFolder(StageFolder):
    """Folder of one role in a run. Its methods raise InvalidFile if `state.json` cannot be read.

    Args:
        path: the folder.
        name: name of the role, or "assistant".
        digests: SHA-256 of each stage's current inputs, in order.
    """

    def __init__(self, path: Path, name: str, digests: Mapping[str, str]) -> None:
        super().__init__(path, digests, lambda: self._done().done, self._write)
        self.name = name

    @property
    def outcome(self) -> RoleOutcome | None:
        """Outcome of the role, None until its last stage, "read", is done."""
        return self._done().outcome if self.is_done("read") else None

    def _done(self) -> _Done:
        file = self.path / "state.json"
        try:
            return msgspec.json.decode(file.read_bytes(), type=_Done)
        except FileNotFoundError:
            return _Done()
        except (OSError, msgspec.MsgspecError) as error:
            raise InvalidFile(f"{file} cannot be read: {error}; remove it, and the role is done again") from error

    def _write(self, done: dict[str, str], outcome: RoleOutcome | None = None) -> None:
        with write_whole(self.path / "state.json") as scratch:
            scratch.write_bytes(msgspec.json.encode(_Done(done, outcome)))


class RolesFolder:
    """Folder of one run over roles, with a `RoleFolder` by name for each requested role and the assistant."""

    def __init__(self, path: Path, definition: RolesDefinition) -> None:
        self.path, self.definition = path, definition
        self.roles = {name: self._role(name) for name in (ASSISTANT, *definition.roles)}

    @property
    def settings(self) -> RoleSettings:
        """Settings of the run from `settings.json`, with the requested roles alone."""
        return settings_from(self.definition.settings, self.definition.roles)

    @property
    def missing(self) -> list[str]:
        """Names of the requested roles, or the assistant, that are unfinished."""
        return [name for name, role in self.roles.items() if not role.is_done("read")]

    def _role(self, name: str) -> RoleFolder:
        digests = digests_of(self.definition.settings, self.definition.model, name)
        return RoleFolder(self.path / "roles" / name, name, digests)


def open_folder(path: str | Path, model: Mapping[str, str], settings: RoleSettings) -> RolesFolder:
    """Open the folder of a run over roles to resume it, creating it if needed; `model` is the model's identity.

    Raises:
        RunDiffers: the folder has answers of another model, or of other settings that change answers. If only settings
            of later stages differ, these stages are repeated.
        InvalidFile: the folder is not that of a run over roles, or cannot be read.
        InvalidSetting: the folder has no run yet, and all samples would be the same text; see `check_samples`.
    """
    check_same(path, settings)
    wanted = RolesDefinition(VERSION, dict(model), described(settings), settings.roles.names)
    found = RUN.open(path, wanted)
    if found is not None:
        roles = {**found.settings["roles"]["roles"], **wanted.settings["roles"]["roles"]}
        known = {**resumed(found.settings, wanted.settings), "roles": {**wanted.settings["roles"], "roles": roles}}
        wanted = msgspec.structs.replace(wanted, settings=known, model=found.model)
    if found != wanted:  # several processes open a folder at once, and need not write the same
        RUN.write(path, wanted)
    return RolesFolder(Path(path), wanted)


def read_folder(path: str | Path) -> RolesFolder:
    """Open the folder of an existing run over roles, without changing it.

    Raises:
        InvalidFile: the folder is not that of a run over roles, or lacks settings.
    """
    found = RUN.read(path)
    try:
        return RolesFolder(Path(path), found)
    except (LookupError, TypeError, AttributeError) as error:
        raise InvalidFile(
            f"{path} lacks settings that this version of steercap needs ({type(error).__name__}: {error})"
        ) from error


def check_same(path: str | Path, settings: RoleSettings) -> None:
    """Check that a folder, which need not exist, has no answers of other settings; the model is not compared.

    Raises:
        RunDiffers, InvalidFile, InvalidSetting: as for `open_folder`.
    """
    names, plain = settings.roles.names, described(settings)
    if RUN.check_same(path, lambda found: RolesDefinition(VERSION, found.model, plain, names)) is None:
        check_samples(settings)  # folders of before are resumed


def _differing(stored: RolesDefinition, expected: RolesDefinition) -> list[str]:
    """Return descriptions of the differences that change answers of the assistant, or of roles that both have."""
    shared = [name for name in expected.settings["roles"]["roles"] if name in stored.settings["roles"]["roles"]]
    mine, theirs = (
        {"model": one.model, **{name: by_field(generation_of(one.settings, name)) for name in (ASSISTANT, *shared)}}
        for one in (expected, stored)
    )
    return differences(theirs, mine)


#: Kind of folder of runs over roles.
RUN: Final = FolderKind("settings.json", RolesDefinition, "run", _differing)
