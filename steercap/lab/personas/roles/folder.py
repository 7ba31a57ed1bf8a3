"""Folder of a run over roles: a subfolder for each role, with its own record of finished stages.

`settings.json` holds the settings of the run. Results of a role are under `roles/NAME`, and nothing in there depends on
another role: so several processes, each with its own roles, work in one folder and write no file twice. Every file is
written atomically, and finished records of a stage go to small files first, so that a process that is killed loses only
the last ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from steercap.errors import InvalidFile
from steercap.files.base import write_whole
from steercap.files.folder import FolderKind, differences
from steercap.lab.personas.folder import VERSION, RunDefinition, StageFolder
from steercap.lab.personas.roles.role import ASSISTANT
from steercap.lab.personas.roles.settings import (
    RoleOutcome,
    RoleSettings,
    described,
    digests_of,
    generation_of,
    settings_from,
)
from steercap.lab.personas.settings import scorer_args_of


class RolesDefinition(RunDefinition, frozen=True):
    """Contents of `settings.json` of a run over roles."""

    roles: tuple[str, ...]


class _Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of a role's `state.json`.

    Args:
        done: SHA-256 of each finished stage's inputs.
        outcome: outcome of the role, once it was read.
    """

    done: dict[str, str] = {}
    outcome: RoleOutcome | None = None


class RoleFolder(StageFolder):
    """Folder of one role in a run. Its methods raise InvalidFile if `state.json` cannot be read.

    Args:
        path: the folder.
        name: name of the role, or the assistant's.
        digests: SHA-256 of each stage's current inputs, in order.
    """

    def __init__(self, path: Path, name: str, digests: Mapping[str, str]) -> None:
        super().__init__(path, digests, lambda: self._done().done, self._write)
        self.name = name

    @property
    def outcome(self) -> RoleOutcome | None:
        """Outcome of the role, None until it was read."""
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
    """Folder of one run over roles."""

    def __init__(self, path: Path, definition: RolesDefinition) -> None:
        self.path, self.definition = path, definition
        self.roles = {name: self._role(name) for name in (ASSISTANT, *definition.roles)}

    @property
    def settings(self) -> RoleSettings:
        """Settings of the run, as `settings.json` has them, with the roles that were asked for."""
        return settings_from(self.definition.settings, self.definition.roles)

    @property
    def missing(self) -> list[str]:
        """Names of unfinished roles, the assistant among them."""
        return [name for name, role in self.roles.items() if not role.is_done("read")]

    def _role(self, name: str) -> RoleFolder:
        digests = digests_of(self.definition.settings, self.definition.model, name)
        return RoleFolder(self.path / "roles" / name, name, digests)


def open_folder(path: str | Path, model: Mapping[str, str], settings: RoleSettings) -> RolesFolder:
    """Open the folder of a run to resume it, creating it if needed.

    Raises:
        RunDiffers: the folder holds answers of another model, or of settings that give other answers. Where only later
            settings differ, the stages that depend on them are done again.
        InvalidFile: the folder holds something else.
    """
    wanted = RolesDefinition(VERSION, dict(model), described(settings), settings.roles.names)
    found = RUN.open(path, wanted)
    if found is not None:
        roles = {**found.settings["roles"]["roles"], **wanted.settings["roles"]["roles"]}
        known = {**wanted.settings, "roles": {**wanted.settings["roles"], "roles": roles}}
        known["scorer_args"] = scorer_args_of(found.settings, known)
        wanted = msgspec.structs.replace(wanted, settings=known, model=found.model)
    if found != wanted:  # several processes open a folder at once, and need not write the same
        RUN.write(path, wanted)
    return RolesFolder(Path(path), wanted)


def read_folder(path: str | Path) -> RolesFolder:
    """Open the folder of a run, without changing it.

    Raises:
        InvalidFile: it is not the folder of a run.
    """
    found = RUN.read(path)
    try:
        return RolesFolder(Path(path), found)
    except (LookupError, TypeError, AttributeError) as error:
        raise InvalidFile(
            f"{path} lacks settings that this version of steercap needs ({type(error).__name__}: {error})"
        ) from error


def check_same(path: str | Path, settings: RoleSettings) -> None:
    """Check that a folder holds no answers of other settings; the model is not compared.

    Raises:
        RunDiffers, InvalidFile: as for `open_folder`.
    """
    RUN.check_same(path, lambda found: RolesDefinition(VERSION, found.model, described(settings), settings.roles.names))


def _differing(stored: RolesDefinition, expected: RolesDefinition) -> list[str]:
    """Return the differences that affect answers, for roles that both have."""
    shared = [name for name in expected.settings["roles"]["roles"] if name in stored.settings["roles"]["roles"]]
    mine, theirs = (
        {"model": one.model, **{name: generation_of(one.settings, name) for name in (ASSISTANT, *shared)}}
        for one in (expected, stored)
    )
    return differences(theirs, mine)


#: Folders of runs over roles.
RUN: Final = FolderKind("settings.json", RolesDefinition, "run", _differing)
