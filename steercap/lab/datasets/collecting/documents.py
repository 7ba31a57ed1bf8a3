"""Document of a corpus: a text, token ids, or a conversation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from steercap.core.values import shown
from steercap.lab.datasets.collecting.readers.base import KEYS, Bad, half_of_pair

#: Contents of a document: text, token ids (int64 [tokens]), or {"role", "content"} messages.
Content: TypeAlias = "str | npt.NDArray[np.int64] | list[dict[str, Any]]"


class NotDocument(ValueError):
    """Error for a corpus item that is not a document; the message says what it is."""


@dataclass(frozen=True)
class CorpusDocument:
    """Document of a corpus.

    Args:
        number: number in the corpus, from 0; skipped items are not counted.
        content: text, token ids or messages.
        where: place named in messages: "corpus.jsonl, line 5".
        bytes: bytes of the corpus up to here, None if unknown.
    """

    number: int
    content: Content
    where: str
    bytes: int | None = None

    def enter(self, digest: Any) -> None:
        """Add the document to a hashlib digest: its kind, length and contents."""
        kind, data = _bytes_of(self.content)
        digest.update(kind + len(data).to_bytes(8, "little") + data)


def content_of(item: Any, column: str | None = None) -> Content:
    """Return the contents of one item of a corpus.

    Args:
        item: a str, token ids, a list of messages, or a mapping that holds one of them.
        column: key of the contents in a mapping; by default the first of `KEYS` that it has.

    Raises:
        NotDocument: the item is none of these.
    """
    if isinstance(item, Bad):
        raise NotDocument(item.reason)
    if isinstance(item, Mapping):
        key = column if column is not None else next((key for key in KEYS if key in item), None)
        if key is None or key not in item:
            wanted = repr(column) if column is not None else ", ".join(map(repr, KEYS))
            raise NotDocument(f"a record with {', '.join(map(repr, item)) or 'no keys'}, and without {wanted}")
        item = item[key]
    if isinstance(item, str):
        return _text(item)
    if isinstance(item, (list, tuple)) and item and all(isinstance(part, Mapping) for part in item):
        return [_message(part) for part in item]
    return _tokens(item)


def digests(documents: Sequence[CorpusDocument]) -> str:
    """Return the SHA-256 over the SHA-256 of each document, in hexadecimal, as stored in a shard's receipt."""
    found = hashlib.sha256()
    for document in documents:
        each = hashlib.sha256()
        document.enter(each)
        found.update(each.digest())
    return found.hexdigest()


def digest_of(documents: Sequence[CorpusDocument]) -> str:
    """Return the SHA-256 over documents, in hexadecimal."""
    found = hashlib.sha256()
    for document in documents:
        document.enter(found)
    return found.hexdigest()


def _message(part: Mapping[Any, Any]) -> dict[str, Any]:
    if not isinstance(part.get("role"), str) or not isinstance(part.get("content"), str):
        raise NotDocument(f"a message {shown(dict(part))}; give {{'role': text, 'content': text}}")
    found = {str(key): value for key, value in part.items()}
    try:
        _bytes_of([found])
    except UnicodeEncodeError as error:
        raise NotDocument(f"a message {shown(found)}: {half_of_pair(error)}") from error
    except TypeError as error:
        raise NotDocument(f"a message {shown(found)}, which JSON cannot hold: {error}") from error
    return found


def _text(item: str) -> str:
    try:
        item.encode()
    except UnicodeEncodeError as error:
        raise NotDocument(f"{half_of_pair(error)}: character {error.start} of {len(item):,}") from error
    return item


def _tokens(item: Any) -> npt.NDArray[np.int64]:
    if isinstance(item, (list, tuple)):
        kinds = {type(one) for one in item}
        if kinds and kinds != {int}:
            raise NotDocument(f"{shown(item)}; give a text, token ids, or messages")
    elif not hasattr(item, "__array__"):
        raise NotDocument(f"{shown(item)}; give a text, token ids, or messages")
    found = np.asarray(item) if len(item) else np.empty(0, dtype=np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu" or bool((found < 0).any()):
        raise NotDocument(f"{shown(item)}; token ids are whole numbers, 0 or above, in one line")
    return found.astype(np.int64)


def _bytes_of(content: Content) -> tuple[bytes, bytes]:
    if isinstance(content, str):
        return b"t", content.encode("utf-8", "surrogatepass")
    if isinstance(content, list):
        return b"m", msgspec.json.encode(content, order="deterministic")
    return b"i", content.astype("<i8").tobytes()
