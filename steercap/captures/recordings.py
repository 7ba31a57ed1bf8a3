"""Recordings of a server: a folder of numbered segments, each a run of captures with a manifest.

A segment ends at a size or an age, and is removed as a whole. Only the owner can read the files (0600). A request
counts once its segment's journal lists all its files. Files are not flushed to the disk itself: a killed process loses
nothing that is listed, but a power failure may leave files whose SHA-256 is wrong.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

import msgspec

from steercap.captures.files import bytes_of
from steercap.captures.handle import CaptureHandle
from steercap.captures.manifest import FILE, JOURNAL, JournalLine, Manifest, ManifestRequest
from steercap.captures.saving import CaptureRun, forget_run
from steercap.core.display import brief
from steercap.core.values import choices, shown
from steercap.errors import CaptureMemoryFull, InvalidFile, InvalidSetting
from steercap.files.base import sweep
from steercap.files.journal import Journal

#: Action when the folder is full: leave later requests out, or remove the oldest segments.
WhenFull: TypeAlias = Literal["drop", "rotate"]
#: Explanation, stored in each manifest, of what one recorded request is.
COUNTED: Final = "a prompt with all its samples, or one beam; a client's request may be several"
#: Name of the lock file that keeps out other servers.
LOCK: Final = "recording.lock"
_SEGMENT: Final = re.compile(r"\d{6,}")
_CAPTURE: Final = re.compile(r"\d{4,}\.safetensors")


@dataclass(frozen=True)
class RecordLimits:
    """Limits of a folder of recordings.

    Args:
        most_bytes: maximum bytes of the folder's files, manifests included; the last request's entries may exceed it.
        when_full: "drop" leaves later requests out; "rotate" removes the oldest segments.
        keep_seconds: seconds until a request is removed, at most a segment's age later; None for never.
        segment_bytes: bytes of files at which a segment ends.
        segment_seconds: age, in seconds, at which a segment ends.

    Raises:
        InvalidSetting: `when_full` is unknown, or a number is not above 0.
    """

    most_bytes: int = 64 << 30
    when_full: WhenFull = "drop"
    keep_seconds: float | None = None
    segment_bytes: int = 1 << 30
    segment_seconds: float = 3600.0

    def __post_init__(self) -> None:
        if self.when_full not in get_args(WhenFull):
            raise InvalidSetting(f"when_full={shown(self.when_full)}; {choices(self.when_full, get_args(WhenFull))}")
        for name in ("most_bytes", "segment_bytes", "segment_seconds", "keep_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidSetting(f"{name}={shown(value)}; give a number above 0")


@dataclass(frozen=True)
class RecordedRequest:
    """Recorded request to an engine: one prompt of a client's request with all its samples, or one beam.

    Args:
        manifest: manifest of the request's segment.
        files: manifest entries of the request: a file for each sample and codec.
    """

    manifest: Manifest
    files: tuple[ManifestRequest, ...]

    __repr__ = brief

    @property
    def answer_id(self) -> str:
        """Id that vLLM's server gave the request."""
        return self.files[0].answer_id

    @property
    def time(self) -> float:
        """Time when the request ended, in seconds since 1970."""
        return self.files[0].time or 0.0

    @property
    def bytes(self) -> int:
        """Total size in bytes of the request's files."""
        return sum(file.bytes for file in self.files)

    def handles(self) -> list[CaptureHandle]:
        """Read the captures, one handle for each file; the size and SHA-256 of each file are checked first.

        Raises:
            InvalidFile: a file differs from its entry.
        """
        own = msgspec.structs.replace(self.manifest.document, requests=self.files)
        return list(Manifest(self.manifest.folder, own).handles())


@dataclass(frozen=True)
class Recordings:
    """Listed requests of a folder that `steercap serve --record` writes or has written; made by `load`.

    Args:
        folder: the folder.
        segments: manifests of the folder's segments, the oldest first.
        unlisted: number of files that no manifest lists, since their request was being written when the folder was
            read, or when its server was killed.
    """

    folder: Path
    segments: tuple[Manifest, ...]
    unlisted: int

    __repr__ = brief

    @staticmethod
    def load(folder: str | Path) -> Recordings:
        """Read the manifests of a folder, but no captures. A server may be writing to it.

        Raises:
            InvalidFile: there is no such folder, or a manifest is malformed or of another version.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise InvalidFile(f"{folder} is no folder; give one that `steercap serve --record` has written")
        found, unlisted = list[Manifest](), 0
        for path in segments_in(folder):
            try:
                found.append(one := Manifest.load(path))
                unlisted += len(_names_in(path) - {request.file for request in one.requests})
            except (InvalidFile, FileNotFoundError):
                if (path / FILE).exists():  # else the segment has just begun, or is being removed
                    raise
        return Recordings(folder, tuple(found), unlisted)

    @property
    def requests(self) -> tuple[RecordedRequest, ...]:
        """Recorded requests, in the order in which they were written."""
        return tuple(
            RecordedRequest(one, tuple(files))
            for one in self.segments
            for _, files in groupby(one.requests, key=lambda request: (request.answer_id, request.time))
        )


class RecordingFolder:
    """Folder that a server records to. All methods but `full` and `close` must be called from one thread.

    Args:
        path: path of the folder, created if missing.
        model: name of the model.
        limits: limits of size and age.
        clock: function that returns seconds since 1970.

    Attributes:
        bytes: total size of listed files, manifests and journals.

    Raises:
        InvalidRequest: another process writes to the folder.
        InvalidFile: a manifest in it cannot be read.
        OSError: the folder cannot be written to.
    """

    def __init__(self, path: Path, *, model: str, limits: RecordLimits, clock: Callable[[], float] = time.time) -> None:
        self.path, self.limits, self.bytes = path, limits, 0
        self._model, self._clock = model, clock
        self._run: CaptureRun | None = None
        self._begun, self._listed = 0.0, 0  # time of the segment's start, bytes of its lists that are counted
        self._ended: dict[Path, tuple[int, float]] = {}  # bytes and time of the last request of ended segments
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock: Journal[JournalLine] = Journal(path / LOCK, JournalLine, 0o600)
        self._lock.lock()
        try:
            for segment in segments_in(path):
                self._take_over(segment)
            self._number = 1 + max((int(segment.name) for segment in segments_in(path)), default=-1)
        except BaseException:
            self._lock.close(remove=True)
            raise

    @property
    def full(self) -> bool:
        """True if later requests have no room and are left out; can be read from any thread."""
        return self.limits.when_full == "drop" and self.bytes >= self.limits.most_bytes

    def add(self, handles: Sequence[CaptureHandle], answer_id: str, ended: float | None = None) -> int:
        """Write the captures of a request and list them, or neither; old segments may be removed first.

        Args:
            handles: fetched handles.
            answer_id: id that vLLM's server gave the request.
            ended: when the request ended, in seconds since 1970; now by default.

        Returns:
            Total size in bytes of the request's files.

        Raises:
            CaptureMemoryFull: the folder has no room.
            OSError: the folder cannot be written to.
        """
        self.tidy()
        coming = sum(bytes_of(handle.as_saved()) for handle in handles)
        rotates = self.limits.when_full == "rotate" and coming <= self.limits.most_bytes  # else room would not help
        while rotates and self.bytes and self.bytes + coming > self.limits.most_bytes:
            if not self._ended:
                self._end()
            self._remove(next(iter(self._ended)))
        if self.bytes + coming > self.limits.most_bytes:
            raise CaptureMemoryFull(
                f"{self.path} holds {self.bytes:,} bytes of recordings, of at most {self.limits.most_bytes:,}; a "
                f"request of {coming:,} bytes is not recorded"
            )
        run = self._open()
        ended = self._clock() if ended is None else ended
        written = sum(one.bytes for one in run.record(handles, answer_id=answer_id, time=ended))
        listed = _listed(run.folder)
        self.bytes += written + listed - self._listed
        self._listed = listed
        return written

    def tidy(self) -> None:
        """End the current segment if it has reached its size or age; remove segments older than `keep_seconds`.

        Raises:
            OSError: a file cannot be written or removed.
        """
        now, keep = self._clock(), self.limits.keep_seconds
        if self._run is not None and (
            not (self._run.folder / JOURNAL).exists()
            or not 0 <= now - self._begun < self.limits.segment_seconds  # the clock may have been set back
            or self._size() >= self.limits.segment_bytes
        ):
            self._end()
        for segment, (size, last) in tuple(self._ended.items()):
            self._ended[segment] = size, min(last, now)
            if keep is not None and now - last >= keep:
                self._remove(segment)

    def close(self) -> None:
        """Seal the current segment's manifest, and release the folder's lock. Idempotent."""
        try:
            if self._run is not None:
                self._end()
        finally:
            self._lock.close(remove=True)

    def _take_over(self, segment: Path) -> None:
        """Seal a segment of an earlier server, removing unlisted files; remove it whole if it has no manifest."""
        sweep(segment)
        if not (segment / FILE).exists():
            _forget(segment)
            return
        model = Manifest.load(segment).model
        with CaptureRun(segment, model=model, private=True) as run:
            pass
        self._note(run)

    def _note(self, run: CaptureRun) -> None:
        """Record size and time of an ended segment, whose bytes are not counted yet."""
        size = sum(request.bytes for request in run.requests.values()) + _listed(run.folder)
        last = max((request.time or 0.0 for request in run.requests.values()), default=self._clock())
        self._ended[run.folder] = size, last
        self.bytes += size

    def _open(self) -> CaptureRun:
        """Return the segment that is being written; create one if there is none."""
        if self._run is None:
            segment = self.path / f"{self._number:06}"
            self._number += 1
            ours = not segment.exists()
            segment.mkdir(mode=0o700, exist_ok=True)
            try:
                self._run = CaptureRun(segment, model=self._model, asked={"request": COUNTED}, private=True)
                self._begun = self._clock()
            except BaseException:
                with contextlib.suppress(OSError):  # the first error is the one to report
                    if ours:
                        _forget(segment)
                raise
        return self._run

    def _size(self) -> int:
        assert self._run is not None
        return self.bytes - sum(size for size, _ in self._ended.values())

    def _end(self) -> None:
        run, size = self._run, self._size()
        assert run is not None
        self.bytes, self._listed, self._run = self.bytes - size, 0, None
        if (run.folder / JOURNAL).exists():  # else somebody has removed it
            try:
                run.close()
            finally:
                self._note(run)

    def _remove(self, segment: Path) -> None:
        """Remove a segment, its manifest first."""
        size, _ = self._ended[segment]
        _forget(segment)
        del self._ended[segment]
        self.bytes -= size


def segments_in(folder: Path) -> list[Path]:
    """Return the folders of the segments in a folder, the oldest first; symbolic links are ignored."""
    named = [path for path in folder.iterdir() if _SEGMENT.fullmatch(path.name)]
    return sorted((path for path in named if path.is_dir() and not path.is_symlink()), key=lambda path: int(path.name))


def _forget(segment: Path) -> None:
    """Remove a segment's files, its manifest first, and then its folder unless other files are in it."""
    with contextlib.suppress(FileNotFoundError):  # somebody has removed it
        forget_run(segment)
    with contextlib.suppress(OSError):  # what is not ours stays
        segment.rmdir()


def _listed(segment: Path) -> int:
    """Return the total size in bytes of a segment's manifest and journal."""
    found = 0
    for name in (FILE, JOURNAL):
        with contextlib.suppress(FileNotFoundError):  # it has no entries, or is sealed
            found += (segment / name).stat().st_size
    return found


def _names_in(segment: Path) -> set[str]:
    """Return the names of the capture files in a segment, including those that are still being written."""
    return {found[0] for path in segment.iterdir() if (found := _CAPTURE.search(path.name))}
