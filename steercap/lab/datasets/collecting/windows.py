"""Windows of documents: token ids that the model reads as one prompt."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from steercap.core.prompts import templated
from steercap.core.values import index_of, shown
from steercap.errors import InvalidPrompt, InvalidRequest, InvalidSetting
from steercap.lab.datasets.collecting.documents import CorpusDocument

#: Treatment of a document that is longer than the context.
Long = Literal["split", "cut", "refuse"]
#: Place of the beginning-of-text token.
Bos = Literal["document", "window", "none"]
#: Accepted values of both.
LONG: Final = ("split", "cut", "refuse")
BOS: Final = ("document", "window", "none")


@dataclass(frozen=True)
class Window:
    """Tokens that the model reads as one prompt.

    Args:
        document: number of the document.
        number: number of the window in the document, from 0.
        token_ids: token ids, int64 [tokens].
        where: place of the document, for messages.
    """

    document: int
    number: int
    token_ids: npt.NDArray[np.int64]
    where: str


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
        if self.long not in LONG or self.bos not in BOS:
            known = " or ".join(map(repr, LONG)), " or ".join(map(repr, BOS))
            raise InvalidSetting(f"long={shown(self.long)}, bos={shown(self.bos)}; give {known[0]}, and {known[1]}")
        least = 2 if self.bos == "window" else 1
        if (context := index_of(self.context)) is None or context < least:
            raise InvalidSetting(f"context={shown(self.context)}; give {least} tokens or more")
        if self.bos == "window" and getattr(self.tokenizer, "bos_token_id", None) is None:
            raise InvalidSetting("bos='window', and this tokenizer has no token that begins a text; give 'none'")
        object.__setattr__(self, "tokenizer", copy.deepcopy(self.tokenizer))

    def windows(self, documents: Sequence[CorpusDocument]) -> Iterator[list[Window]]:
        """Yield the windows of each document; [] for an empty one.

        Raises:
            InvalidPrompt: a document is too long, and `long` is "refuse".
            InvalidRequest: a conversation that the chat template refuses.
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
        """Return the settings that determine the tokens, JSON-compatible."""
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
        if bos is not None and len(ids) and ids[0] == bos:
            ids = ids[1:]  # it comes back with the first window
        room = self.context - (bos is not None)
        if len(ids) > room and self.long == "refuse":
            raise InvalidPrompt(
                f"{document.where} has {len(ids):,} tokens, and a window {room:,}; give long='split' or 'cut', or a "
                "greater context"
            )
        stop = min(len(ids), room) if self.long == "cut" else len(ids)
        starts = range(0, stop, room)
        begun = np.array([] if bos is None else [bos], dtype=np.int64)
        return [
            Window(
                document.number, number, np.concatenate([begun, ids[start : min(start + room, stop)]]), document.where
            )
            for number, start in enumerate(starts)
        ]
