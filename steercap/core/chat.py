"""Which tokens of a templated conversation belong to which message.

A chat template is a program; what it writes around a message is found by applying it to the first
0, 1, 2, ... messages and comparing token ids, never by guessing its markers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MessageSpan:
    """Positions of one message, the template's own tokens around it included: [start, stop).

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


def message_spans(roles: Sequence[str], prefixes: Sequence[Sequence[int]], full: Sequence[int]) -> list[MessageSpan]:
    """Spans of the messages of one conversation.

    Args:
        roles: role of each message.
        prefixes: token ids of the template applied to the first 1, 2, ... messages, without generation prompt.
        full: token ids of the prompt that is sent.

    A boundary is where the ids of a prefix stop agreeing with the full prompt: the template may close a
    conversation otherwise than it continues it.
    """
    spans: list[MessageSpan] = []
    start = 0
    for index, (role, prefix) in enumerate(zip(roles, prefixes, strict=True)):
        stop = max(_agreement(prefix, full), start)
        spans.append(MessageSpan(role, index, start, stop))
        start = stop
    if start < len(full):
        spans.append(MessageSpan("generation_prompt", None, start, len(full)))
    return spans


def _agreement(prefix: Sequence[int], full: Sequence[int]) -> int:
    for index, (left, right) in enumerate(zip(prefix, full, strict=False)):
        if left != right:
            return index
    return min(len(prefix), len(full))
