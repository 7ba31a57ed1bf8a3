"""What is said of a run while it is under way: a line of JSON for each entry, beside the document that seals them.

An entry costs one line, however many there are. A line counts once its end is written, so a process that is killed
leaves at most a piece of one, which nobody reads and the next writer cuts off. The first line says how many entries the
document had when the journal was begun: one that was sealed already, but not removed, is known by that and passed over.
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
    """The first line."""

    after: int


class Said(NamedTuple, Generic[Entry]):
    """What a journal holds.

    Args:
        after: entries that the document had before.
        entries: those that came.
    """

    after: int
    entries: list[Entry]

    def beyond(self, known: int, path: Path) -> list[Entry]:
        """The entries that a document of `known` entries lacks: all of them, or none.

        Raises:
            InvalidFile: the journal belongs to another document.
        """
        if self.after == known:
            return self.entries
        if self.after + len(self.entries) <= known:
            return []
        raise InvalidFile(f"{path} goes on after {self.after} entries, and {known} are there: it is of another run")


class Journal(Generic[Entry]):
    """The journal of one run.

    Args:
        path: the file.
        kind: type of the entries, strict.
    """

    def __init__(self, path: Path, kind: type[Entry]) -> None:
        self.path = path
        self._decoder = msgspec.json.Decoder(kind)
        self._file: int | None = None
        self._size = 0

    def read(self) -> Said[Entry]:
        """What it says; nothing, where there is none. Read it before the document, which is written before it goes.

        Raises:
            InvalidFile: a whole line that is no entry.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            data = b""
        lines = data.split(b"\n")[:-1]  # behind the last end of a line there is nothing, or a piece
        if not lines:
            return Said(0, [])
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
        return Said(after, entries)

    def lock(self) -> None:
        """Keep other writers away until `close`; the kernel lets go when this process ends, however it does.

        Raises:
            InvalidRequest: another process writes.
            OSError: it cannot be written, or is a link: what a link leads to is not ours to empty.
        """
        while self._file is None:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(self.path, file):  # and is not one that a writer who ended has just removed
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
        """Whether this one may write."""
        return self._file is not None

    def begin(self, after: int) -> None:
        """Empty it, and say how many entries the document has.

        Args:
            after: their number.
        """
        self.cut(0)
        self._write(_Begin(after))

    @property
    def size(self) -> int:
        """Bytes that were written."""
        return self._size

    def append(self, *entries: Entry) -> None:
        """Say something more; it counts when this returns.

        Raises:
            OSError: it cannot be written; nothing is said.
        """
        self._write(*entries)

    def cut(self, size: int) -> None:
        """Take back what was said since the journal had this size."""
        assert self._file is not None, "it is locked first"
        os.ftruncate(self._file, size)
        self._size = size

    def close(self, *, remove: bool) -> None:
        """Let other writers come.

        Args:
            remove: whether the document says all that the journal does.
        """
        if self._file is not None:
            if remove:
                self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def _write(self, *said: msgspec.Struct) -> None:
        assert self._file is not None, "it is locked first"
        before, data = self._size, b"".join(msgspec.json.encode(one) + b"\n" for one in said)
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._file, left) :]
            self._size = before + len(data)
        except BaseException:
            self.cut(before)  # what comes next must begin a line
            raise


def _is_at(path: Path, file: int) -> bool:
    """Whether an open file is the one of this name."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
