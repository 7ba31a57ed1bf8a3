"""A run's folder: which stages are done, under which settings, and the parts of the one under way.

Every file appears whole or not at all. Finished records of a stage go to small part files; when all are there they
become one file, the stage is marked as done, and the parts go. So a process that is killed loses the last records
alone, and the next one goes on from what is there.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from steercap.errors import InvalidFile, RunDiffers
from steercap.formats.base import write_whole
from steercap.persona.settings import STAGES, differences, stage_hashes

VERSION: Final = 1
#: Differences named in an error.
NAMED: Final = 5


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `settings.json` holds.

    Args:
        version: of the layout of the folder.
        model: what is known of the model.
        settings: traits in full.
        done: the stages that are done, with the SHA-256 of what they depended on.
    """

    version: int
    model: dict[str, str]
    settings: dict[str, Any]
    done: dict[str, str] = {}


class RunFolder:
    """The folder of one run, opened under its settings.

    Args:
        path: the folder, made if it is not there.
        model: what is known of the model.
        settings: as `steercap.persona.settings.described` gives them.

    Raises:
        RunDiffers: the folder holds answers of another model or of settings under which they would be others. Where
            later settings differ, the stages that depend on them are done again.
        InvalidFile: the folder is of a newer version, or its settings cannot be read.
    """

    def __init__(self, path: str | Path, model: Mapping[str, str], settings: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.hashes = stage_hashes(settings, model)
        wanted = _State(VERSION, dict(model), _plain(settings))
        found = self._read()
        if found is not None:
            _check(self.path, found, wanted)
            wanted = msgspec.structs.replace(wanted, done=found.done)
        self._state = wanted
        self.path.mkdir(parents=True, exist_ok=True)
        self._sweep()
        self._write()

    def is_done(self, stage: str) -> bool:
        """Whether a stage's results are there, under what it depends on now."""
        return self._state.done.get(stage) == self.hashes[stage]

    def begin(self, stage: str) -> None:
        """Say that the results of a stage, and of those after it, are about to change."""
        gone = STAGES[STAGES.index(stage) :]
        done = {name: digest for name, digest in self._state.done.items() if name not in gone or self.is_done(name)}
        done.pop(stage, None)
        self._mark(done)
        for other in self._parts_of(stage):
            if other != self.parts(stage):
                shutil.rmtree(other)

    def finish(self, stage: str) -> None:
        """Say that the results of a stage are there; its parts go."""
        self._mark(self._state.done | {stage: self.hashes[stage]})
        for folder in self._parts_of(stage):
            shutil.rmtree(folder)

    def parts(self, stage: str) -> Path:
        """Where the parts of a stage lie, under what it depends on now."""
        return self.path / "parts" / f"{stage}-{self.hashes[stage][:16]}"

    def _parts_of(self, stage: str) -> list[Path]:
        return sorted((self.path / "parts").glob(f"{stage}-*"))

    def _mark(self, done: dict[str, str]) -> None:
        self._state = msgspec.structs.replace(self._state, done=done)
        self._write()

    def _read(self) -> _State | None:
        path = self.path / "settings.json"
        if not path.exists():
            return None
        try:
            return msgspec.json.decode(path.read_bytes(), type=_State)
        except (OSError, msgspec.MsgspecError) as error:
            raise InvalidFile(f"{path} holds no settings of a run: {error}; choose another folder") from error

    def _write(self) -> None:
        with write_whole(self.path / "settings.json") as scratch:
            scratch.write_bytes(msgspec.json.format(msgspec.json.encode(self._state), indent=2))

    def _sweep(self) -> None:
        """Remove what a killed process had begun to write."""
        for path in self.path.rglob(".*"):
            if re.fullmatch(r"\..+\.[0-9a-f]{32}", path.name):
                path.unlink(missing_ok=True)


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(settings))
    return plain


def _check(path: Path, found: _State, wanted: _State) -> None:
    """See that the answers in a folder are those that are wanted."""
    if found.version != VERSION:
        raise InvalidFile(f"{path} is a run folder of version {found.version}; this steercap reads {VERSION}")
    if stage_hashes(found.settings, found.model)["generate"] == stage_hashes(wanted.settings, wanted.model)["generate"]:
        return
    what = [
        line
        for line in differences({**wanted.settings, "model": wanted.model}, {**found.settings, "model": found.model})
        if _matters(line)
    ]
    more = f", and {len(what) - NAMED} more" if len(what) > NAMED else ""
    raise RunDiffers(
        f"{path} holds answers of another run ({'; '.join(what[:NAMED])}{more}); choose another folder, or ask for "
        "the same"
    )


def _matters(line: str) -> bool:
    """Whether a difference changes answers."""
    from steercap.persona.settings import depends

    place = line.split(": ", maxsplit=1)[0].split(".")
    if place[0] == "traits":
        return len(place) < 3 or f"traits.{place[2]}" in depends("generate")
    return place[0] == "model" or place[0] in depends("generate")
