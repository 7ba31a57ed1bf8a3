"""Runs of captures: handles written to a folder one by one, each listed in the manifest once its file is complete."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from steercap.captures import files
from steercap.captures.handle import CaptureHandle
from steercap.captures.manifest import (
    CAPTURES,
    FILE,
    JOURNAL,
    VERSION,
    Document,
    JournalLine,
    Layout,
    Manifest,
    ManifestRequest,
    is_name,
    layout_of,
    request_of,
)
from steercap.captures.stacking import flat
from steercap.core.values import shown
from steercap.errors import InvalidRequest
from steercap.files.base import check_extension
from steercap.files.journal import Journal

#: Numbered file names of a run; a file with such a name that no manifest lists is incomplete.
_OURS: Final = re.compile(r"\d{4,}\.safetensors")


class CaptureRun:
    """Folder that captures are written to; a context manager that seals the manifest on leaving.

    A killed run can be continued: listed entries are kept, and unlisted files are removed. One process writes at a
    time. The cost of an entry does not grow with the number of entries.

    Args:
        folder: the folder; created if missing.
        model: name of the model, `handle.model`.
        asked: settings of the run, as JSON data; a continued run must have equal ones. None compares the model alone.
        private: True for files that only the owner can read and write.

    Raises:
        RunDiffers: the folder holds a run of another model, or with other settings.
        InvalidFile: the folder's manifest cannot be read.
        InvalidRequest: another process writes to the folder, or it holds captures but no manifest.
    """

    def __init__(
        self, folder: str | Path, *, model: str, asked: Mapping[str, Any] | None = None, private: bool = False
    ) -> None:
        self.folder = Path(folder)
        self._mode = 0o600 if private else None
        plain = msgspec.json.decode(msgspec.json.encode(dict(asked or {})))  # as it is read again
        wanted = Document(VERSION, "captures", model, plain)
        self.folder.mkdir(parents=True, exist_ok=True)
        if CAPTURES.check_same(self.folder, lambda _: wanted) is None and (found := numbered(self.folder)):
            raise InvalidRequest(
                f"{self.folder} holds captures that no manifest lists, such as {found[0].name}; give another folder"
            )
        self._journal: Journal[JournalLine] = Journal(self.folder / JOURNAL, JournalLine, self._mode or 0o666)
        self._journal.lock()
        try:
            self._document = self._opened(wanted)
            self._known = list(self._document.layouts)
            self._layouts = {msgspec.json.encode(layout): number for number, layout in enumerate(self._known)}
            self._requests = {request.file: request for request in self._document.requests}
            self._new: list[JournalLine] = []
            self._journal.begin(self._document.entries)
        except BaseException:
            self._journal.close(remove=False)
            raise

    def _opened(self, expected: Document) -> Document:
        """Return the folder's document, after sealing its journal and removing unlisted files; create it if missing."""
        before = CAPTURES.open(self.folder, expected)
        if before is None:
            self._journal.begin(0)  # a journal left over from another run does not belong to this one
            CAPTURES.write(self.folder, expected, self._mode)
            return expected
        there = Manifest.load(self.folder).document
        if there.entries > before.entries:
            CAPTURES.write(self.folder, there, self._mode)
        listed = {request.file for request in there.requests}
        for path in numbered(self.folder):
            if path.name not in listed:
                path.unlink()
        return there

    def __repr__(self) -> str:
        return f"CaptureRun({str(self.folder)!r}, {len(self.requests):,} requests of {self._document.model!r})"

    @property
    def requests(self) -> Mapping[str, ManifestRequest]:
        """Manifest entries of the run, by file name."""
        return self._requests

    def layout_of(self, request: ManifestRequest) -> Layout:
        """Return the storage format of a request's rows."""
        return self._known[request.layout]

    @property
    def manifest(self) -> Manifest:
        """Current manifest of the folder, entries of the journal included."""
        return Manifest(self.folder, self._document.extended(self._new))

    def add(self, handle: CaptureHandle, name: str | None = None) -> ManifestRequest:
        """Write the captures of a handle, list them and return the entry; on failure, neither is done.

        Args:
            handle: a fetched handle.
            name: name of the file, ending in .safetensors; None for the next number.

        Raises:
            InvalidRequest: the name is listed already, the handle is of another model, or the run is closed.
            CaptureNotFetched: before `fetch()`.
            OSError: the folder cannot be written to.
        """
        return self._add({self._path(name): handle})[0]

    def record(self, handles: Sequence[CaptureHandle], *, answer_id: str, time: float) -> list[ManifestRequest]:
        """Write the captures of one request of a server, a file for each handle, and list them; on failure, list none.

        Args:
            handles: fetched handles.
            answer_id, time: see `ManifestRequest`.

        Raises:
            InvalidRequest, CaptureNotFetched, OSError: as for `add`.
        """
        paths = {self._path(self._next(further)): handle for further, handle in enumerate(handles)}
        return self._add(paths, answer_id, time)

    def discard(self, names: Iterable[str]) -> None:
        """Remove entries and their files, so that the captures can be added again; a kill leaves all entries or none.

        Raises:
            InvalidRequest: a name is not listed, or the run is closed.
        """
        if not self._journal.locked:
            raise InvalidRequest(f"this run is closed; open {self.folder} again with CaptureRun")
        gone = set(names)
        if wrong := gone - self._requests.keys():
            raise InvalidRequest(f"{self.folder} lists no {shown(wrong.pop())}; give names of `requests`")
        whole = self.manifest.document
        kept = tuple(request for request in whole.requests if request.file not in gone)
        for name in gone:  # one that is no sound capture now: after a kill, `add` would not write over it
            if not files.is_of(self.folder / name, self._document.model):
                (self.folder / name).unlink(missing_ok=True)
        CAPTURES.write(self.folder, whole, self._mode)
        self._journal.begin(0)  # one that goes on after more entries than the manifest has could not be read
        self._document, self._new = msgspec.structs.replace(whole, requests=kept), []
        CAPTURES.write(self.folder, self._document, self._mode)
        self._journal.begin(self._document.entries)
        self._requests = {request.file: request for request in kept}
        for name in gone:
            (self.folder / name).unlink(missing_ok=True)

    def _add(
        self, handles: Mapping[Path, CaptureHandle], answer_id: str = "", time: float | None = None
    ) -> list[ManifestRequest]:
        """Write capture files and list them together; return their entries. On failure those written are removed."""
        contents = {path: self._own(handle) for path, handle in handles.items()}
        before, known, new, written = self._journal.size, dict(self._layouts), list[JournalLine](), list[Path]()
        try:
            for path, saved in contents.items():
                written.append(files.write(saved, path, self._mode))
                key = msgspec.json.encode(layout := layout_of(saved))
                if key not in known:
                    known[key] = len(known)
                    new.append(JournalLine(layout=layout))
                new.append(JournalLine(request=request_of(saved, path, known[key], answer_id, time)))
            self._journal.append(*new)
        except BaseException:
            self._journal.cut(before)
            for path in written:
                with contextlib.suppress(OSError):  # an unlisted file is no record, whether it is removed or not
                    path.unlink(missing_ok=True)
            raise
        self._layouts = known
        self._known += [line.layout for line in new if line.layout is not None]
        added = [line.request for line in new if line.request is not None]
        self._requests |= {request.file: request for request in added}
        self._new += new
        return added

    def _path(self, name: str | None) -> Path:
        """Return the path of a new file; a name of None stands for the next number.

        Raises:
            InvalidRequest: the run is closed, or the name is listed, or of a file that is no capture of this model.
            InvalidFile: the name has another extension than .safetensors.
        """
        if not self._journal.locked:
            raise InvalidRequest(f"this run is closed; open {self.folder} again with CaptureRun")
        name = self._next() if name is None else name
        if not is_name(name) or name in self._requests:
            raise InvalidRequest(
                f"name={name!r} is already listed in {self.folder}, or is not a valid file name; give another"
            )
        path = self.folder / name
        check_extension(path, ".safetensors")
        if path.exists() and not (_OURS.fullmatch(name) or files.is_of(path, self._document.model)):
            raise InvalidRequest(f"{path} is there, and is no capture of {self._document.model!r}; give another name")
        return path

    def _own(self, handle: CaptureHandle) -> files.Saved:
        """Return the content of a handle's file; InvalidRequest if it is another model's, or as `as_saved` raises."""
        saved = handle.as_saved()
        if saved.header.model != self._document.model:
            raise InvalidRequest(
                f"{handle.request_id} is of {saved.header.model!r}, and {self.folder} of {self._document.model!r}; "
                "save the captures of each model in a folder of their own"
            )
        return saved

    def _next(self, further: int = 0) -> str:
        """Return an unused numbered file name: the next after skipping `further`, from the number of requests on."""
        names = (f"{number:06}.safetensors" for number in itertools.count(len(self._requests)))
        unused = (name for name in names if name not in self._requests)
        return next(itertools.islice(unused, further, None))

    def close(self) -> None:
        """Seal the manifest. Idempotent.

        Raises:
            OSError: the manifest cannot be written; all listed entries are in the journal.
        """
        try:
            if self._new:
                document = self.manifest.document
                CAPTURES.write(self.folder, document, self._mode)
                self._document, self._new = document, []
        finally:
            self._journal.close(remove=not self._new)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def save_run(folder: str | Path, handles: Any) -> Manifest:
    """Write captures to a folder, one file each, and a manifest that lists them; captures already there are kept.

    Args:
        folder: folder of one model's captures; created if missing.
        handles: fetched handles of one model; nested lists are allowed.

    Returns:
        The manifest of the whole folder.

    Raises:
        InvalidRequest: there are no handles, or as for `CaptureRun`, whose other errors are raised too.
        CaptureNotFetched: a handle is not fetched; the handles before it are saved.
    """
    given = flat(handles)
    if not given:
        raise InvalidRequest("save_run: no handles; give those of generate, chat or read")
    with CaptureRun(folder, model=given[0].model) as run:
        for handle in given:
            run.add(handle)
    return run.manifest


def forget_run(folder: Path) -> None:
    """Remove the files of a run, its manifest first, so that an interruption leaves no entry without its file.

    Args:
        folder: an existing folder.

    Raises:
        InvalidRequest: another process writes to the run.
    """
    journal: Journal[JournalLine] = Journal(folder / JOURNAL, JournalLine)
    journal.lock()
    try:
        for path in (folder / FILE, *numbered(folder)):
            path.unlink(missing_ok=True)
    finally:
        journal.close(remove=True)


def numbered(folder: Path) -> list[Path]:
    """Return the files of a folder named like "0001.safetensors" (4 digits or more), sorted by name."""
    return sorted(path for path in folder.glob("*.safetensors") if _OURS.fullmatch(path.name))
