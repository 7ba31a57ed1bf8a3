"""Append-only journal of a run in progress: one line of JSON per entry, beside the document that later holds them all.

Writing an entry costs one line, however many there are. A line counts once its newline is written: a killed process
leaves at most an incomplete last line, which readers ignore and the next writer removes. The first line has the number
of entries that the document had when the journal was begun. It detects a journal whose entries are already in the
document, but which has not been removed yet; its entries are skipped.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from steercap.errors import InvalidFile, InvalidRequest

Entry = TypeVar("Entry", bound=msgspec.Struct)


class _Begin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First line of a journal: the number of entries that the document had then."""

    after: int


class JournalContent(NamedTuple, Generic[Entry]):
    """Content of a journal file.

    Args:
        after: number of entries that the document had when the journal was begun.
        entries: entries of the journal, in order.
    """

    after: int
    entries: list[Entry]

    def beyond(self, known: int, path: Path) -> list[Entry]:
        """Return all entries if the journal continues a document of `known` entries, none if the document has them.

        Raises:
            InvalidFile: it does neither, so `path`, the journal, belongs to another document.
        """
        if self.after == known:
            return self.entries
        if self.after + len(self.entries) <= known:
            return []
        raise InvalidFile(
            f"{path} continues after {self.after} entries, but {known} are there: it belongs to another run"
        )


class Journal(Generic[Entry]):
    """Journal file of one run; to write, `lock` it, then `begin`.

    Args:
        path: path of the journal.
        kind: type of the entries; lines of another form are refused.
        mode: permissions of a new file, as far as the umask leaves them.
    """

    def __init__(self, path: Path, kind: type[Entry], mode: int = 0o666) -> None:
        self.path = path
        self._mode = mode
        self._decoder = msgspec.json.Decoder(kind)
        self._file: int | None = None
        self._size = 0

    def read(self) -> JournalContent[Entry]:
        """Read the journal; a missing file counts as an empty one.

        Read the journal before the document, which is complete before the journal is removed.

        Raises:
            InvalidFile: a complete line is no valid entry.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            data = b""
        lines = data.split(b"\n")[:-1]  # after the last line end comes nothing, or an incomplete line
        if not lines:
            return JournalContent(0, [])
        number = 1
        try:
            after = msgspec.json.decode(lines[0], type=_Begin).after
            entries = []
            for number, line in enumerate(lines[1:], 2):  # noqa: B007 -- the message needs it
                entries.append(self._decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidFile(
                f"{self.path} cannot be read, in line {number}: {error}; restore it, or remove it and lose what it says"
            ) from error
        return JournalContent(after, entries)

    def lock(self) -> None:
        """Lock out other writers until `close`; the kernel releases the lock when this process ends, however it does.

        Raises:
            InvalidRequest: another process holds the lock.
            OSError: the file cannot be written, or is a symbolic link, whose target must not be emptied.
        """
        while self._file is None:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, self._mode)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(self.path, file):  # not a file that another writer has just removed
                    self._file, file = file, -1
            except BlockingIOError as error:
                raise InvalidRequest(
                    f"another process writes to {self.path.parent}; wait for it, or give another folder"
                ) from error
            finally:
                if file >= 0:
                    os.close(file)

    @property
    def locked(self) -> bool:
        """True if this object holds the lock and may write."""
        return self._file is not None

    def begin(self, after: int) -> None:
        """Empty the journal and write its first line; `after` is the number of entries that the document has."""
        self.cut(0)
        self._write(_Begin(after))

    @property
    def size(self) -> int:
        """Size of the journal in bytes, as written by this object."""
        return self._size

    def append(self, *entries: Entry) -> None:
        """Append entries, which survive a kill of this process once this method returns.

        Raises:
            OSError: the file cannot be written; nothing is appended.
        """
        self._write(*entries)

    def cut(self, size: int) -> None:
        """Truncate the journal to `size` bytes."""
        assert self._file is not None, "it is locked first"
        os.ftruncate(self._file, size)
        self._size = size

    def close(self, *, remove: bool) -> None:
        """Release the lock; `remove` deletes the file, for when the document holds all entries. Idempotent."""
        if self._file is not None:
            if remove:
                self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def _write(self, *records: msgspec.Struct) -> None:
        assert self._file is not None, "it is locked first"
        before, data = self._size, b"".join(msgspec.json.encode(one) + b"\n" for one in records)
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._file, left) :]
            self._size = before + len(data)
        except BaseException:
            self.cut(before)  # what comes next must begin a line
            raise


def _is_at(path: Path, file: int) -> bool:
    """Return whether an open file descriptor is still that of the file at a path."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
