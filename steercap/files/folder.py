"""Run folders: a definition file says what the records depend on, and a resumed run must match it.

Every file in it appears whole or not at all: the definition by `files.base.write_whole`, records by
`files.tables.TableWriter`. So a process that is killed leaves half-written files at most, under temporary names;
they are removed when the folder is opened again.
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

#: Maximum number of differences that an error names.
NAMED: Final = 5
#: Lock file; it stays, empty.
LOCK: Final = ".lock"


def differences(
    stored: Any, expected: Any, *, but: Collection[str] = (), later: Collection[str] = (), none_is_unset: bool = False
) -> list[str]:
    """Return the differences of two definitions in words, such as "model.name was 'a', is 'b'".

    They are compared as JSON holds them, tuples as lists; where both hold a mapping, its entries one by one.

    Args:
        stored, expected: Structs or mappings: the definition in a folder, and that of the run to resume.
        but: names of fields that may differ.
        later: names of fields that older versions did not write: not compared with a definition that lacks them.
        none_is_unset: True to take a field that is None as one that is missing: a version that did not know it yet
            wrote nothing of it.
    """
    was, now = map(_as_stored, (stored, expected))
    if none_is_unset:
        was, now = ({name: value for name, value in one.items() if value is not None} for one in (was, now))
    ignored = {*but, *(name for name in later if name not in was)}
    return [line for name in {**was, **now} if name not in ignored for line in _apart(name, was, now)]


def _as_stored(one: Any) -> dict[str, Any]:
    """Return what JSON holds of a Struct or mapping, under the names that Python has for the fields of the Struct."""
    found = msgspec.json.decode(msgspec.json.encode(one), type=dict[str, Any])
    fields = msgspec.structs.fields(one) if isinstance(one, msgspec.Struct) else ()
    return found | {field.name: found.pop(field.encode_name) for field in fields if field.encode_name in found}


def _apart(name: str, was: Mapping[str, Any], now: Mapping[str, Any], under: str = "") -> list[str]:
    """Return the differences of one entry; a missing one differs from None."""
    one, other = was.get(name, msgspec.UNSET), now.get(name, msgspec.UNSET)
    if isinstance(one, dict) and isinstance(other, dict):
        return [line for key in {**one, **other} for line in _apart(key, one, other, f"{under}{name}.")]
    before, after = ("not set" if value is msgspec.UNSET else shown(value) for value in (one, other))
    return [] if one == other else [f"{under}{name} was {before}, is {after}"]


@dataclass(frozen=True)
class FolderKind(Generic[Definition]):
    """Format of the folders of one kind of run.

    Args:
        file: name of the definition file, in JSON.
        type: type of the definition.
        noun: name of a run of this kind, for messages.
        differing: function of the definition in a folder and the wanted one, which returns their differences in words,
            as far as the records depend on them; by default all, see `differences`. It may raise LookupError, TypeError
            or AttributeError where something is lacking.
    """

    file: str
    type: type[Definition]
    noun: str
    differing: Callable[[Definition, Definition], Sequence[str]] = differences

    def read(self, folder: str | Path) -> Definition:
        """Read the definition in a folder.

        Raises:
            InvalidFile: it cannot be read.
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
            InvalidFile: it cannot be read.
        """
        try:
            return msgspec.json.decode(content, type=self.type)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._unreadable(file, error) from error

    def _unreadable(self, file: str | Path, error: Exception) -> InvalidFile:
        reason = f"there is no such file{nearest_path(file)}" if isinstance(error, FileNotFoundError) else error
        return InvalidFile(f"{file} cannot be read as the definition of a {self.noun}: {reason}; choose another folder")

    def check_same(self, folder: str | Path, expected: Callable[[Definition], Definition]) -> Definition | None:
        """Check that a folder holds no records of another run; nothing is written.

        Args:
            folder: run folder; it need not exist.
            expected: function that returns the definition of the run to resume, given the one in the folder. It copies
                from there what is not known yet, such as the model.

        Returns:
            The definition in the folder, or None if there is none.

        Raises:
            RunDiffers: it holds another run.
            InvalidFile: it cannot be read, or lacks something.
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
            The definition in it, or None if it is new; then the caller still has to `write` it.

        Raises:
            RunDiffers, InvalidFile: as for `check_same`; nothing has been changed.
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
    """Lock a local folder against other writers, creating it if needed; a URL is not locked.

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
