"""Which tokens of a templated conversation are which message's words.

A chat template is a program: it may drop, move or decorate messages, and treat the last one differently from the rest.
So nothing is read off its markers. The conversation is rendered again with one message's content changed: that content
is where the two texts differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

#: Stands in for a message's content: one character that no content and no template holds.
STAND_IN: Final = "\u241e"


@dataclass(frozen=True)
class MessageSpan:
    """Positions of one message's content, the template's own tokens around it left out: [start, stop).

    Args:
        role: the message's role; "generation_prompt" for the tokens that invite the reply, and
            "assistant" with `index` None for the reply itself.
        index: index of the message in the conversation, or None.
        start: first position.
        stop: position after the last.
    """

    role: str
    index: int | None
    start: int
    stop: int


def content_region(text: str, changed: str) -> tuple[int, int] | None:
    """Where a content lies in the rendered conversation.

    Args:
        text: the rendered conversation.
        changed: the same with the content replaced by `STAND_IN`.

    Returns:
        Characters [start, stop) of the content in `text`, or None where the template leaves it out.
    """
    if text == changed:
        return None
    start = _common(text, changed)
    most = min(len(text), len(changed)) - start
    tail = _common(text[::-1][:most], changed[::-1][:most])
    return start, len(text) - tail


def token_span(offsets: Sequence[tuple[int, int]], region: tuple[int, int]) -> tuple[int, int]:
    """The tokens that hold any character of a region: [start, stop), empty where the region is.

    Args:
        offsets: characters [start, stop) of each token.
        region: characters [start, stop).
    """
    inside = [index for index, (start, stop) in enumerate(offsets) if start < region[1] and stop > region[0]]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


def _common(left: str, right: str) -> int:
    """Length of the common prefix."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
