"""Run folders: a definition file holds the settings that the records depend on, and a resumed run must match it.

Every file appears whole or not at all: the definition by `files.base.write_whole`, records by
`files.tables.TableWriter`. So a killed process leaves half-written files under temporary names at most; they are
removed when the folder is opened again.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from steercap.core.values import shown
from steercap.errors import InvalidFile, InvalidRequest, RunDiffers
from steercap.files.base import sweep, write_whole
from steercap.files.fingerprint import nearest_path

Definition = TypeVar("Definition", bound=msgspec.Struct)

#: Maximum number of differences that an error lists.
NAMED: Final = 5
#: Name of the lock file, which is empty and is never removed.
LOCK: Final = ".lock"
#: Entries that older versions did not write, as (field of a definition, or "" for its own, entry).
NEWER: Final = frozenset({("model", "tensors"), ("model", "tokenizer"), ("", "steered_tokens")})


def differences(stored: Any, expected: Any, *, but: Collection[str] = (), none_is_unset: bool = False) -> list[str]:
    """Return the differences of two definitions in words, such as "model.name was 'a', is 'b'".

    Both are compared as JSON data, tuples as lists; mappings are compared entry by entry. Those of `NEWER` are compared
    only if the stored one has them.

    Args:
        stored, expected: definition in a folder, and that of the run to resume: Structs or mappings.
        but: names of fields that may differ.
        none_is_unset: True to treat a None as missing: older versions did not write fields that they did not know.
    """
    was, now = map(_as_stored, (stored, expected))
    if none_is_unset:
        was, now = ({name: value for name, value in one.items() if value is not None} for one in (was, now))
    return [line for name in _compared("", was, now) if name not in but for line in _apart(name, was, now)]


def _as_stored(one: Any) -> dict[str, Any]:
    """Return a Struct or mapping as JSON data, with a Struct's fields under their Python names."""
    found = msgspec.json.decode(msgspec.json.encode(one), type=dict[str, Any])
    fields = msgspec.structs.fields(one) if isinstance(one, msgspec.Struct) else ()
    return found | {field.name: found.pop(field.encode_name) for field in fields if field.encode_name in found}


def _compared(name: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the entries of field `name` to compare: all, without those of `NEWER` that the stored one lacks."""
    return [key for key in {**was, **now} if key in was or (name, key) not in NEWER]


def _apart(name: str, was: Mapping[str, Any], now: Mapping[str, Any], under: str = "") -> list[str]:
    """Return the differences of entry `name` in words; a missing entry differs from None. `under` is a prefix."""
    one, other = was.get(name, msgspec.UNSET), now.get(name, msgspec.UNSET)
    if isinstance(one, dict) and isinstance(other, dict):
        return [line for key in _compared(name, one, other) for line in _apart(key, one, other, f"{under}{name}.")]
    before, after = ("not set" if value is msgspec.UNSET else shown(value) for value in (one, other))
    return [] if one == other else [f"{under}{name} was {before}, is {after}"]


@dataclass(frozen=True)
class FolderKind(Generic[Definition]):
    """Format of the folders of one kind of run, whose settings are in a definition file.

    Args:
        file: name of the definition file, in JSON.
        type: type of the definition.
        noun: name of a run of this kind, for messages.
        differing: function that returns, in words, the differences between the definition in a folder and the expected
            one on which the records depend; by default all, see `differences`. It may raise LookupError, TypeError or
            AttributeError if a setting is missing.
    """

    file: str
    type: type[Definition]
    noun: str
    differing: Callable[[Definition, Definition], Sequence[str]] = differences

    def read(self, folder: str | Path) -> Definition:
        """Read the definition file of a folder.

        Raises:
            InvalidFile: the file is missing, or not a valid definition.
        """
        file = Path(folder) / self.file
        try:
            content = file.read_bytes()
        except OSError as error:
            raise self._unreadable(file, error) from error
        return self.decode(content, file)

    def decode(self, content: bytes, file: str | Path) -> Definition:
        """Decode the content of a definition file.

        Args:
            content: JSON bytes.
            file: name of the file, for messages.

        Raises:
            InvalidFile: the content is not a valid definition.
        """
        try:
            return msgspec.json.decode(content, type=self.type)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._unreadable(file, error) from error

    def _unreadable(self, file: str | Path, error: Exception) -> InvalidFile:
        reason = f"there is no such file{nearest_path(file)}" if isinstance(error, FileNotFoundError) else error
        return InvalidFile(f"{file} cannot be read as the definition of a {self.noun}: {reason}; choose another folder")

    def check_same(self, folder: str | Path, expected: Callable[[Definition], Definition]) -> Definition | None:
        """Check that a folder holds no other run than the one to resume; nothing is written.

        Args:
            folder: run folder; it need not exist.
            expected: function that returns the definition of the run to resume, given the one in the folder, from which
                it may copy fields that are not known yet, such as the model.

        Returns:
            The definition in the folder, or None if there is none.

        Raises:
            RunDiffers: the folder holds another run.
            InvalidFile: the definition cannot be read, or lacks settings.
        """
        file = Path(folder) / self.file
        if not file.exists():
            return None
        found = self.read(folder)
        self.check(found, expected, folder)
        return found

    def check(self, stored: Definition, expected: Callable[[Definition], Definition], folder: str | Path) -> None:
        """Check a definition that was read from a folder against the run to resume, as `check_same` does.

        Raises:
            RunDiffers, InvalidFile: as for `check_same`.
        """
        file = f"{folder}/{self.file}"
        try:
            what = self.differing(stored, expected(stored))
        except (LookupError, TypeError, AttributeError) as error:
            raise InvalidFile(
                f"{file} lacks settings that this version of steercap needs to resume it ({type(error).__name__}: "
                f"{error}); it was written by another version, or changed: choose another folder"
            ) from error
        if what:
            more = f"; and {len(what) - NAMED} more" if len(what) > NAMED else ""
            raise RunDiffers(
                f"{folder} holds another {self.noun}: {'; '.join(what[:NAMED])}{more}; give another folder, "
                f"or the {self.noun} it was begun with"
            )

    def open(self, folder: str | Path, expected: Definition) -> Definition | None:
        """Prepare a folder for a run: create it if it is missing, and remove temporary files.

        Returns:
            The folder's definition, or None if there is none yet, which the caller then has to `write`.

        Raises:
            RunDiffers, InvalidFile: as for `check_same`; nothing is changed then.
        """
        found = self.check_same(folder, lambda _: expected)
        Path(folder).mkdir(parents=True, exist_ok=True)
        sweep(Path(folder))
        return found

    def write(self, folder: str | Path, definition: Definition, mode: int | None = None) -> None:
        """Write the definition file of a folder, with the permissions `mode` if given."""
        with write_whole(Path(folder) / self.file, mode) as scratch:
            scratch.write_bytes(msgspec.json.format(msgspec.json.encode(definition), indent=2))


@contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Context manager that locks a local folder against other writers, creating it if needed; URLs are not locked.

    Raises:
        InvalidRequest: another writer holds the lock.
        OSError: the folder cannot be made or written to.
    """
    if "://" in str(folder):
        yield
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = os.open(Path(folder) / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise InvalidRequest(f"another call writes to {folder}; wait for it, or give another folder") from error
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # an engine that was forked meanwhile holds the file open
        os.close(file)
