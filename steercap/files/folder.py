"""The folder of a run: a file says what its records depend on, and a run that goes on must find the same.

Every file in it appears whole or not at all: the definition by `files.base.write_whole`, records by
`files.tables.Parts`. So a process that is killed leaves half-written files at most, under names that nobody reads; they
are swept when the folder is opened again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec

from steercap.errors import InvalidFile, RunDiffers
from steercap.files.base import sweep, write_whole

Definition = TypeVar("Definition", bound=msgspec.Struct)

#: Differences named in an error.
NAMED: Final = 5


@dataclass(frozen=True)
class FolderKind(Generic[Definition]):
    """What the folders of one kind of run have in common.

    Args:
        file: the name of the file with the definition, in JSON.
        type: of the definition.
        noun: what a run of this kind is called.
        differing: of the definition in a folder and the one that is wanted: what differs, in words, of what the
            records in it depend on. It may raise LookupError, TypeError or AttributeError where something is lacking.
    """

    file: str
    type: type[Definition]
    noun: str
    differing: Callable[[Definition, Definition], Sequence[str]]

    def read(self, folder: str | Path) -> Definition:
        """What a folder says of itself.

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
        """What the file of a folder says, wherever that is.

        Raises:
            InvalidFile: it cannot be read.
        """
        try:
            return msgspec.json.decode(content, type=self.type)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._unreadable(file, error) from error

    def _unreadable(self, file: str | Path, error: Exception) -> InvalidFile:
        return InvalidFile(f"{file} cannot be read as the definition of a {self.noun}: {error}; choose another folder")

    def check_same(self, folder: str | Path, wanted: Callable[[Definition], Definition]) -> Definition | None:
        """Check that a folder holds no records of another run; nothing is written.

        Args:
            folder: which need not be there.
            wanted: the definition of the run that is to go on, given the one that is found: what is not known yet,
                such as the model, is taken from there.

        Returns:
            What the folder says of itself, None if it says nothing.

        Raises:
            RunDiffers: it holds another run.
            InvalidFile: it cannot be read, or lacks something.
        """
        file = Path(folder) / self.file
        if not file.exists():
            return None
        found = self.read(folder)
        self.check(found, wanted, folder)
        return found

    def check(self, found: Definition, wanted: Callable[[Definition], Definition], folder: str | Path) -> None:
        """Check what a folder says of itself against the run that is to go on, as `check_same` does.

        Raises:
            RunDiffers, InvalidFile: as for `check_same`.
        """
        file = f"{folder}/{self.file}"
        try:
            what = self.differing(found, wanted(found))
        except (LookupError, TypeError, AttributeError) as error:
            raise InvalidFile(
                f"{file} lacks what this steercap must know to go on ({type(error).__name__}: {error}); "
                "it was written by another version, or changed: choose another folder"
            ) from error
        if what:
            more = f"; and {len(what) - NAMED} more" if len(what) > NAMED else ""
            raise RunDiffers(
                f"{folder} holds another {self.noun}: {'; '.join(what[:NAMED])}{more}; give another folder, "
                f"or the {self.noun} it was begun with"
            )

    def open(self, folder: str | Path, wanted: Definition) -> Definition | None:
        """Make a folder ready for a run: made if it is not there, and swept.

        Returns:
            What it says of itself, None of a new one; `write` is still to be called there.

        Raises:
            RunDiffers, InvalidFile: as for `check_same`; nothing has been changed.
        """
        found = self.check_same(folder, lambda _: wanted)
        Path(folder).mkdir(parents=True, exist_ok=True)
        sweep(Path(folder))
        return found

    def write(self, folder: str | Path, definition: Definition) -> None:
        """Say what a folder holds."""
        with write_whole(Path(folder) / self.file) as scratch:
            scratch.write_bytes(msgspec.json.format(msgspec.json.encode(definition), indent=2))
