"""Documents of a corpus (texts, token ids or conversations), and the windows of tokens into which they are cut."""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import AsyncGeneratorType as AsyncGenerator
from types import GeneratorType as Generator
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from steercap.core.prompts import templated
from steercap.core.values import count_of, shown
from steercap.errors import InvalidPrompt, InvalidRequest, InvalidSetting
from steercap.lab.datasets.collecting.readers import KEYS, Bad, half_of_pair

#: Contents of a document: text, token ids (int64 [tokens]), or {"role", "content"} messages.
Content: TypeAlias = "str | npt.NDArray[np.int64] | list[dict[str, Any]]"

#: Generators of documents that were begun.
_BEGUN: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


class NotDocument(ValueError):
    """Error for a corpus item that is not a document; its message states the reason."""


@dataclass(frozen=True)
class CorpusDocument:
    """Document of a corpus.

    Args:
        number: number in the corpus, from 0; skipped items are not counted.
        content: text, token ids or messages.
        where: place of the document, for error messages: "corpus.jsonl, line 5".
        bytes: bytes of the corpus up to the document's end, None if unknown.
    """

    number: int
    content: Content
    where: str
    bytes: int | None = None

    def enter(self, digest: Any) -> None:
        """Update a hashlib digest with the document's kind (text, ids or messages), length and contents."""
        kind, data = _bytes_of(self.content)
        digest.update(kind + len(data).to_bytes(8, "little") + data)


def content_of(item: Any, column: str | None = None) -> Content:
    """Return the contents of one item of a corpus: a str, token ids, a list of messages, or a mapping with one of them.

    `column` is the key of the contents in a mapping; by default the first of `KEYS` that the mapping has.

    Raises:
        NotDocument: the item is none of these.
    """
    if isinstance(item, Bad):
        raise NotDocument(item.reason)
    if isinstance(item, Mapping):
        key = column if column is not None else next((key for key in KEYS if key in item), None)
        if key is None or key not in item:
            wanted = repr(column) if column is not None else ", ".join(map(repr, KEYS))
            raise NotDocument(f"a record with {', '.join(map(repr, item)) or 'no keys'}, but without {wanted}")
        item = item[key]
    if isinstance(item, str):
        return _text(item)
    if isinstance(item, (list, tuple)) and item and all(isinstance(part, Mapping) for part in item):
        return [_checked_message(part) for part in item]
    return _tokens(item)


def digests(documents: Sequence[CorpusDocument]) -> str:
    """Return the SHA-256 over the SHA-256 digests of documents, in hexadecimal, as in a shard's receipt."""
    found = hashlib.sha256()
    for document in documents:
        each = hashlib.sha256()
        document.enter(each)
        found.update(each.digest())
    return found.hexdigest()


def _checked_message(part: Mapping[Any, Any]) -> dict[str, Any]:
    if not isinstance(part.get("role"), str) or not isinstance(part.get("content"), str):
        raise NotDocument(f"a message {shown(dict(part))}; give {{'role': text, 'content': text}}")
    message = {str(key): value for key, value in part.items()}
    try:
        _bytes_of([message])
    except UnicodeEncodeError as error:
        raise NotDocument(f"a message {shown(message)}: {half_of_pair(error)}") from error
    except TypeError as error:
        raise NotDocument(f"a message {shown(message)}, which JSON cannot hold: {error}") from error
    return message


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


#: Treatment of a document that is longer than the context.
Long = Literal["split", "cut", "refuse"]
#: Place of the beginning-of-text token.
Bos = Literal["document", "window", "none"]
#: Accepted values of `Long` and of `Bos`.
LONG: Final = ("split", "cut", "refuse")
BOS: Final = ("document", "window", "none")


@dataclass(frozen=True)
class Window:
    """Tokens that the model reads as one prompt.

    Args:
        document: number of the document in the corpus.
        number: number of the window in the document, from 0.
        token_ids: token ids, int64 [tokens].
        where: place of the document, for messages.
    """

    document: int
    number: int
    token_ids: npt.NDArray[np.int64]
    where: str


def begun(corpus: Any) -> Any:
    """Return an iterable of documents; raise InvalidRequest if it is a generator that was returned before.

    Other iterators may start anew, as an open file does.
    """
    if isinstance(corpus, (Generator, AsyncGenerator)):
        if corpus in _BEGUN:
            raise InvalidRequest(f"{shown(corpus)} was begun by an earlier call, which took documents; make it anew")
        _BEGUN.add(corpus)
    return corpus


def check_cutting(context: int, long: object, bos: object) -> None:
    """Check those settings of `Cutting` that need no tokenizer.

    Raises:
        InvalidSetting: a setting is not valid.
    """
    for name, value, known in (("long", long, LONG), ("bos", bos, BOS)):
        if value not in known:
            raise InvalidSetting(f"{name}={shown(value)}; give {' or '.join(map(repr, known))}")
    count_of(context, "context", 2 if bos == "window" else 1, wrong=InvalidSetting)


@dataclass(frozen=True)
class Cutting:
    """Settings for cutting documents into windows.

    Args:
        tokenizer: tokenizer of the model, None for documents of token ids alone; a copy of it is used, since another
            thread may use it at the same time.
        context: maximum tokens of a window.
        long: treatment of a longer document: "split" into windows, "cut" off, or "refuse"d.
        bos: place of the beginning-of-text token: as the tokenizer puts it before a "document" of text, before each
            "window" of text or token ids that lacks it, or "none".
        template: further arguments of the chat template. A conversation that ends with the assistant's message is read
            as it is, any other with the generation prompt.

    Raises:
        InvalidSetting: a setting is not valid.
    """

    tokenizer: Any
    context: int
    long: Long = "split"
    bos: Bos = "document"
    template: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_cutting(self.context, self.long, self.bos)
        if self.bos == "window" and getattr(self.tokenizer, "bos_token_id", None) is None:
            raise InvalidSetting("bos='window', and this tokenizer has no token that begins a text; give 'none'")
        object.__setattr__(self, "tokenizer", copy.deepcopy(self.tokenizer))

    def windows(self, documents: Sequence[CorpusDocument]) -> Iterator[list[Window]]:
        """Yield, for each document, the list of its windows in order; [] for an empty document.

        Raises:
            InvalidPrompt: a document is too long, and `long` is "refuse".
            InvalidRequest: the chat template refuses a conversation.
        """
        texts = [document.content for document in documents if isinstance(document.content, str)]
        tokens = iter(self._tokenised(texts) if self.tokenizer is not None else ())
        for document in documents:
            content = document.content
            if self.tokenizer is None and isinstance(content, (str, list)):
                raise InvalidPrompt(f"{document.where} is text, and the model was opened without a tokenizer")
            if isinstance(content, str):
                ids = next(tokens)
            elif isinstance(content, list):
                ids = self._templated(content, document.where)
            else:
                ids = content
            yield self._cut(document, ids)

    def described(self) -> dict[str, Any]:
        """Return the settings that determine token ids, JSON-compatible, for the data set's definition."""
        return {"context": self.context, "long": self.long, "bos": self.bos, "template": dict(self.template)}

    def _tokenised(self, texts: list[str]) -> list[npt.NDArray[np.int64]]:
        if not texts:
            return []
        given = {"add_special_tokens": self.bos != "none", "return_attention_mask": False, "verbose": False}
        found = self.tokenizer(texts, **given)["input_ids"]
        return [np.asarray(ids, dtype=np.int64) for ids in found]

    def _templated(self, messages: list[dict[str, Any]], where: str) -> npt.NDArray[np.int64]:
        invite = bool(messages) and messages[-1].get("role") != "assistant"
        arguments = {"add_generation_prompt": invite, **self.template}
        try:
            ids, _ = templated(self.tokenizer, messages, arguments, spans=False)
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}: {error}") from error
        return np.asarray(ids, dtype=np.int64)

    def _cut(self, document: CorpusDocument, ids: npt.NDArray[np.int64]) -> list[Window]:
        bos = self.tokenizer.bos_token_id if self.bos == "window" else None
        stripped = bos is not None and len(ids) > 1 and ids[0] == bos
        ids = ids[1:] if stripped else ids  # it comes back with the first window
        room = self.context - (bos is not None)
        if len(ids) > room and self.long == "refuse":
            raise InvalidPrompt(
                f"{document.where} has {len(ids):,} tokens, and a window {room:,}; give long='split' or 'cut', or a "
                "greater context"
            )
        stop = min(len(ids), room) if self.long == "cut" else len(ids)
        starts = range(0, stop, room)
        parts = [ids[start : min(start + room, stop)] for start in starts]
        if bos is not None:
            parts = [
                part if part[0] == bos and (number or not stripped) else np.insert(part, 0, bos)
                for number, part in enumerate(parts)
            ]
        return [Window(document.number, number, part, document.where) for number, part in enumerate(parts)]
