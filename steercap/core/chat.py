"""Positions in a prompt: of each message's content in a templated conversation, and of media.

Where media stand, the model reads embeddings made of them, not of the token ids, which are placeholders.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from steercap.core.placing import UNCLEAR, Region
from steercap.core.rows import Ints

#: Type of an ordinary token, whose embedding is that of its id.
TEXT: Final = "text"


@dataclass(frozen=True)
class MediaSpan:
    """Positions [start, stop) of a prompt whose embeddings are made of one picture, sound or video.

    A picture that is cut into tiles can have several: tokens between them, such as the end of a line, are text.

    Args:
        kind: "image", "audio" or "video", as vLLM calls it.
        index: index among the media of its kind in the prompt, from 0.
        start: first position.
        stop: position after the last.
        digest: vLLM's hash of the content, the same for the same picture in the same model.
    """

    kind: str
    index: int
    start: int
    stop: int
    digest: str


def types_at(spans: Sequence[MediaSpan], positions: Ints) -> npt.NDArray[np.str_]:
    """Return the type of each token, "text" or the kind of its media span: str [rows].

    Args:
        spans: media spans of the prompt; generated tokens are text.
        positions: positions of the rows, int64 [rows].
    """
    kinds = [TEXT, *(span.kind for span in spans)]
    types: npt.NDArray[Any] = np.full(len(positions), TEXT, dtype=np.array(kinds).dtype)
    for span in spans:
        types[(positions >= span.start) & (positions < span.stop)] = span.kind
    return types


@dataclass(frozen=True)
class MessageSpan:
    """Positions [start, stop) of one message's content, without the template's own tokens around it.

    A message that the template writes several times has several spans.

    Args:
        role: the message's role; "generation_prompt" for the tokens that invite the reply, and
            "assistant" with `index` None for the reply itself.
        index: index of the message in the conversation, or None.
        start: first position.
        stop: position after the last; `start` where the message has no token.
        missing: reason why a message has no span (the template leaves it out, or its place is unclear), or "".
    """

    role: str
    index: int | None
    start: int
    stop: int
    missing: str = ""


def message_spans(
    conversation: Sequence[Mapping[str, Any]],
    placed: Sequence[list[Region] | str],
    offsets: Sequence[tuple[int, int]],
) -> list[MessageSpan]:
    """Return the spans of all messages, in their order.

    Args:
        conversation: messages.
        placed: result of `place` for each message.
        offsets: characters [start, stop) of each token.
    """
    every = [(region, index) for index, one in enumerate(placed) if isinstance(one, list) for region in one]
    every = sorted(one for one in every if one[0][0] < one[0][1])
    shared = {
        index
        for left, right in itertools.pairwise(every)
        if left[1] != right[1] and right[0][0] < left[0][1]
        for index in (left[1], right[1])
    }
    spans: list[MessageSpan] = []
    for index, (message, one) in enumerate(zip(conversation, placed, strict=True)):
        role = str(message.get("role"))
        if isinstance(one, str) or index in shared:
            spans.append(MessageSpan(role, index, 0, 0, one if isinstance(one, str) else UNCLEAR))
        else:
            spans += [MessageSpan(role, index, *token_span(offsets, region)) for region in one or [(0, 0)]]
    return spans


def token_span(offsets: Sequence[tuple[int, int]], region: Region) -> tuple[int, int]:
    """Return the tokens [start, stop) that hold any character of a region; empty if no token does.

    Args:
        offsets: characters [start, stop) of each token.
        region: characters [start, stop).
    """
    inside = [index for index, (start, stop) in enumerate(offsets) if start < region[1] and stop > region[0]]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)
