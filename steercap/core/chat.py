"""Positions of each message's content in a templated conversation."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steercap.core.placing import UNCLEAR, Region


@dataclass(frozen=True)
class MessageSpan:
    """Positions of one message's content, the template's own tokens around it left out: [start, stop).

    A message that the template writes several times has several spans.

    Args:
        role: the message's role; "generation_prompt" for the tokens that invite the reply, and
            "assistant" with `index` None for the reply itself.
        index: index of the message in the conversation, or None.
        start: first position.
        stop: position after the last; `start` where the message has no token.
        missing: why a message has no span, if it has none: the template leaves it out, or its place is unclear.
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
    """Spans of all messages, in their order.

    Args:
        conversation: the messages.
        placed: of each, what `place` returned.
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
    """The tokens that hold any character of a region: [start, stop), empty where the region is.

    Args:
        offsets: characters [start, stop) of each token.
        region: characters [start, stop).
    """
    inside = [index for index, (start, stop) in enumerate(offsets) if start < region[1] and stop > region[0]]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)
