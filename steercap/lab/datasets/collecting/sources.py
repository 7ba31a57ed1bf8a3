"""Sources of documents: files of several formats, folders, Hugging Face data sets, any iterator."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec

from steercap.core.values import shown
from steercap.errors import InvalidFile, InvalidRequest, InvalidSetting
from steercap.files.fingerprint import nearest_path
from steercap.lab.datasets.collecting.documents import CorpusDocument, NotDocument, begun, content_of
from steercap.lab.datasets.collecting.readers import READERS, Reader, ReaderSettings, Unit

#: Accepted forms of a corpus: a path or a pattern, several paths, or documents.
Corpus: TypeAlias = (
    "str | os.PathLike[str] | Sequence[os.PathLike[str]] | Iterable[Any] | AsyncIterable[Any] | DocumentSource"
)
#: Treatment of an item that is not a document.
OnBad = Literal["error", "skip"]
#: Files of `datasets.save_to_disk`: of one data set, and of several splits.
STATE, SPLITS = "state.json", "dataset_dict.json"
#: Spellings of one split.
HELD_OUT: Final = ("heldout", "held_out", "held-out", "holdout", "hold_out", "hold-out")
#: Splits recognised in the names of files in a folder.
KNOWN_SPLITS: Final = (
    *("train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval", "evals", "evaluation"),
    *HELD_OUT,
)
#: Maximum number of skipped items whose reasons are kept.
COMPLAINTS: Final = 5


@dataclass
class DocumentSource:
    """Ordered source of documents.

    Args:
        name: name of the corpus, for messages.
        items: function that returns an iterator of triples, from the first item if it can: an item's place for
            messages, the item or `Bad`, and the bytes of the corpus read so far (None if unknown).
        column: key of documents in records, see `content_of`.
        bad: treatment of an item that is not a document.
        bytes: size of the whole corpus on disk, None if unknown.
        count: number of its documents, None if unknown.
        first: number of the first document.

    Attributes:
        skipped: number of skipped items.
        complaints: places and reasons of the first few skipped items.
    """

    name: str
    items: Callable[[], Iterator[tuple[str, Any, int | None]] | AsyncIterator[tuple[str, Any, int | None]]]
    column: str | None = None
    bad: OnBad = "error"
    bytes: int | None = None
    count: int | None = None
    first: int = 0
    skipped: int = 0
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._number = 0

    def begin(self) -> Iterator[Any] | AsyncIterator[Any]:
        """Reset all counts, and return an iterator of the items from the first on; `document` converts each."""
        self._number, self.skipped, self.complaints = self.first, 0, []
        return self.items()

    def __iter__(self) -> Iterator[CorpusDocument]:
        """Iterate over all documents, from the first on.

        Raises:
            InvalidFile: a file cannot be read, or an item of one is not a document.
            InvalidRequest: an item of an iterator is not a document, or the iterator is async.
        """
        items = self.begin()
        if isinstance(items, AsyncIterator):
            raise InvalidRequest(f"{self.name} is an async iterator; use `async for`")
        return self.documents(items)

    def documents(self, items: Iterator[tuple[str, Any, int | None]]) -> Iterator[CorpusDocument]:
        """Yield the documents of `items`, without those that are skipped; numbers continue from the last one."""
        for found in items:
            if (document := self.document(*found)) is not None:
                yield document

    def document(self, where: str, item: Any, read: int | None) -> CorpusDocument | None:
        """Convert the next item to a document with the next number; None if the item is skipped.

        Raises:
            InvalidFile, InvalidRequest: the item is not a document, and `bad` is "error".
        """
        try:
            content = content_of(item, self.column)
        except NotDocument as error:
            self._complain(where, error)
            return None
        self._number += 1
        return CorpusDocument(self._number - 1, content, where, read)

    def _complain(self, where: str, error: NotDocument) -> None:
        if self.bad == "error":
            kind = InvalidRequest if self.bytes is None else InvalidFile
            raise kind(f"{where}: {error}; correct it, or give bad='skip' to skip and count such documents") from error
        self.skipped += 1
        if len(self.complaints) < COMPLAINTS:
            self.complaints.append(f"{where}: {error}")


def open_source(
    corpus: Corpus,
    *,
    format: str | None = None,  # noqa: A002 -- the word for it
    split: str | None = None,
    column: str | None = None,
    unit: Unit = "line",
    bad: OnBad = "error",
) -> DocumentSource:
    """Open a corpus and return the source of its documents; nothing is read yet except numbers of documents.

    Args:
        corpus: a file, a folder or a glob pattern (as str or Path); several paths in a list, in their order; or any
            iterable or async iterable of documents: str, token ids, lists of {"role", "content"} messages, or
            mappings that hold one of these as "text", "messages" or "tokens". A list of str is a list of texts.
            Files are JSON lines, Parquet, Arrow or text, the first and the last also `.gz` and `.zst`. A folder may be
            one of `datasets.save_to_disk`, or a snapshot of a data set on the hub.
        format: format of the files, "jsonl", "parquet", "arrow" or "text"; by default from their names.
        split: split to read of a folder that holds several.
        column: key or column of documents in records; by default "text", "messages" or "tokens".
        unit: unit that is one document in a text file: a "line", a "paragraph" (blank lines between them) or a "file".
        bad: "error" to refuse an item that is not a document, or "skip" to skip and count it.

    Raises:
        InvalidFile: there is no such file, or none that can be read.
        InvalidSetting: an argument does not fit.
    """
    if isinstance(corpus, DocumentSource):
        return corpus
    if bad not in {"error", "skip"} or unit not in {"line", "paragraph", "file"}:
        raise InvalidSetting(
            f"bad={shown(bad)}, unit={shown(unit)}; give 'error' or 'skip', 'line', 'paragraph' or 'file'"
        )
    if (paths := _paths(corpus)) is None:
        if format is not None or split is not None or unit != "line":
            raise InvalidSetting("format=, split= and unit= are for files; give a path, or several as pathlib.Path")
        return _of_items(corpus, column, bad)
    found = [one for path in paths for one in _files(path, format, split)]
    asked, name = ReaderSettings(column, unit), ", ".join(map(str, paths))
    counts = [reader.count(path) for path, reader in found]
    return DocumentSource(
        name,
        lambda: _read(found, asked),
        column=column,
        bad=bad,
        bytes=sum(path.stat().st_size for path, _ in found),
        count=None if None in counts else sum(count for count in counts if count is not None),
    )


def _paths(corpus: Any) -> list[str] | None:
    """Return the paths that the user named; None if the corpus consists of documents."""
    if isinstance(corpus, (str, os.PathLike)):
        return [os.fspath(corpus)]
    if isinstance(corpus, (list, tuple)) and corpus and all(isinstance(one, os.PathLike) for one in corpus):
        return [os.fspath(one) for one in corpus]
    return None


def _of_items(corpus: Any, column: str | None, bad: OnBad) -> DocumentSource:
    if isinstance(corpus, AsyncIterable):
        return DocumentSource("an async iterator", lambda: _numbered(begun(corpus)), column=column, bad=bad)
    if isinstance(corpus, (Mapping, bytes)) or not isinstance(corpus, Iterable):
        raise InvalidRequest(f"{shown(corpus)} is not a corpus; give a path, or an iterable of documents")
    count = len(corpus) if isinstance(corpus, Sequence) else None
    return DocumentSource(
        "an iterator",
        lambda: ((f"document {number}", item, None) for number, item in enumerate(begun(corpus))),
        column=column,
        bad=bad,
        count=count,
    )


async def _numbered(corpus: AsyncIterable[Any]) -> AsyncIterator[tuple[str, Any, int | None]]:
    number = 0
    async for item in corpus:
        yield f"document {number}", item, None
        number += 1


def _read(files: Sequence[tuple[Path, Reader]], settings: ReaderSettings) -> Iterator[tuple[str, Any, int | None]]:
    """Yield the items of files, one file after the other, with places and the bytes of all files up to each."""
    before = 0
    for path, reader in files:
        item = None
        for place, item, read in reader.items(path, settings):
            # A value of a table is already that of its column.
            yield f"{path}, {place}", item, before + read
        before += path.stat().st_size


def _files(given: str, kind: str | None, split: str | None) -> list[tuple[Path, Reader]]:
    """Return the files of a path or a pattern, in the order of their names, each with its reader.

    Raises:
        InvalidFile: there is no file, or none that can be read.
    """
    path = Path(given)
    if path.is_dir():
        return _of_folder(path, kind, split)
    matching = [] if path.exists() else glob.glob(given, recursive=True)  # noqa: PTH207 -- absolute patterns too
    files = [path] if path.exists() else sorted(one for one in map(Path, matching) if one.is_file())
    if not files:
        raise InvalidFile(
            f"{given}: there is no such file, and no file matches it as a pattern{nearest_path(given)}; give a path or "
            "a glob pattern"
        )
    together = Path(os.path.commonpath([one.parent for one in files]))
    return [(one, _reader(one, kind)) for one in _split(files, split, together, given)]


def _of_folder(folder: Path, kind: str | None, split: str | None) -> list[tuple[Path, Reader]]:
    if (folder / SPLITS).is_file():
        splits = _json(folder / SPLITS).get("splits", [])
        if split not in splits:
            raise InvalidFile(f"{folder} holds splits {', '.join(map(repr, splits))}; give one of them by split=")
        return _of_folder(folder / str(split), kind, None)
    if (folder / STATE).is_file():
        files = [folder / one["filename"] for one in _json(folder / STATE).get("_data_files", [])]
        return [(one, READERS["arrow"]) for one in _split(files, split, folder, str(folder))]
    visible = (path for path in sorted(folder.rglob("*")) if "/." not in f"/{path.relative_to(folder)}")
    files = [path for path in visible if path.is_file()]
    known = files if kind else [path for path in files if any(reader.reads(path) for reader in READERS.values())]
    if not known:
        raise InvalidFile(f"{folder} holds no file of a corpus; known: {_suffixes()}")
    found = [(path, _reader(path, kind)) for path in _split(known, split, folder, str(folder))]
    if other := next((path.name for path, reader in found if reader is not found[0][1]), ""):
        raise InvalidFile(
            f"{folder} holds files of several kinds, such as {found[0][0].name} and {other}; give a pattern, such as "
            "'*.jsonl'"
        )
    return found


def _split(files: Sequence[Path], split: str | None, folder: Path, given: str) -> list[Path]:
    """Return the files of `split`, by their names, else their folders' from the nearest on; None for all, of one.

    Raises InvalidFile if there are several splits and none was named, or if no split has that name.
    """
    by_split = {path: _split_in(Path(os.path.relpath(path, folder)).parts[::-1], split) for path in files}
    by_split = by_split if any(by_split.values()) else dict.fromkeys(files, _split_in([folder.name], split))
    if split is None:
        if len(names := {*by_split.values()} - {""}) > 1:
            raise InvalidFile(f"{given} holds splits {', '.join(sorted(names))}; give one of them by split=")
        return list(files)
    if split not in by_split.values():
        raise InvalidFile(f"{given} holds no file of split={split!r}")
    return [path for path in files if by_split[path] == split]


def _split_in(names: Sequence[str], asked: str | None) -> str:
    """Return the split in the first name that has one, for `asked` alone if it is no usual one; "" if there is none."""
    known = KNOWN_SPLITS if asked is None or asked in KNOWN_SPLITS else (asked,)
    pairs = ((name, one) for name in names for one in known)
    return next((one for name, one in pairs if re.search(rf"(?i)(^|[-_.]){re.escape(one)}([-_.]|$)", name)), "")


def _reader(path: Path, kind: str | None) -> Reader:
    """Return the reader of the format `kind`, or if that is None, of the file's suffix.

    Raises:
        UnknownName: there is no such format.
        InvalidFile: the file's name does not tell its format.
    """
    if kind is not None:
        return READERS[kind]
    for reader in READERS.values():
        if reader.reads(path):
            return reader
    raise InvalidFile(f"{path}: the file name does not tell the format; use one of {_suffixes()}, or give format=")


def _suffixes() -> str:
    return ", ".join(suffix for reader in READERS.values() for suffix in reader.suffixes)


def _json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidFile(f"{path} cannot be read: {error}") from error
