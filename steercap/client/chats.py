"""Texts and conversations as token ids, by the server's own tokenizer and chat template, and where messages lie."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from steercap.client.connection import Connection
from steercap.core.chat import MessageSpan, content_region, token_span
from steercap.errors import InvalidRequest

#: Stands in for a content: one character and one byte, so that none of it is in any token of a content's.
_STAND_IN: Final = "\x01"
#: Arguments of a template that vLLM's server takes beside the others.
_BESIDE: Final = ("add_generation_prompt", "continue_final_message", "chat_template", "add_special_tokens", "tools")


class Rendered(NamedTuple):
    """A conversation as the model reads it.

    Args:
        ids: token ids.
        texts: of each token, as the tokenizer's vocabulary writes it.
    """

    ids: list[int]
    texts: list[str]

    @property
    def text(self) -> str:
        """All of it, in the vocabulary's writing, of which equal texts have equal ones."""
        return "".join(self.texts)

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """Where each token lies in it."""
        ends = [0, *itertools.accumulate(map(len, self.texts))]
        return list(itertools.pairwise(ends))


async def tokenised(connection: Connection, text: str, *, special: bool = True) -> list[int]:
    """Token ids of a text, as the server reads it for a prompt, or without the special tokens around it.

    Raises:
        The errors of `Connection.ask`.
    """
    body = {"model": connection.here().name, "prompt": text, "add_special_tokens": special}
    answer = await connection.ask("POST", "/tokenize", json=body)
    with connection.answering():
        return list(map(int, answer["tokens"]))


async def templated(
    connection: Connection, conversation: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], *, spans: bool
) -> tuple[list[int], tuple[MessageSpan, ...]]:
    """Token ids of a conversation that invites a reply, and where its messages' contents lie.

    Args:
        connection: to the server, which renders it.
        conversation: {"role", "content"} dicts.
        arguments: further ones of the chat template.
        spans: whether to look for the messages, which takes one rendering each.

    Raises:
        InvalidRequest: the server has no chat template, or it refuses the conversation.
        The errors of `Connection.ask`.
    """
    whole = await _rendered(connection, conversation, arguments)
    if not spans:
        return whole.ids, ()
    found = await asyncio.gather(
        *(_span(connection, whole, conversation, index, arguments) for index in range(len(conversation))),
        _invitation(connection, whole, conversation, arguments),
    )
    return whole.ids, tuple(span for span in found if span is not None)


async def _span(
    connection: Connection,
    whole: Rendered,
    conversation: Sequence[Mapping[str, Any]],
    index: int,
    arguments: Mapping[str, Any],
) -> MessageSpan | None:
    """Where the content of a message lies; None where the template says nothing of it."""
    message = {**conversation[index], "content": _STAND_IN}
    changed = [*conversation[:index], message, *conversation[index + 1 :]]
    try:
        other = await _rendered(connection, changed, arguments)
    except InvalidRequest:  # it expects words of its own there
        return None
    region = content_region(whole.text, other.text)
    return region and MessageSpan(str(message.get("role")), index, *token_span(whole.offsets, region))


async def _invitation(
    connection: Connection, whole: Rendered, conversation: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> MessageSpan | None:
    """The tokens that invite the reply."""
    try:
        closed = await _rendered(connection, conversation, {**arguments, "add_generation_prompt": False})
    except InvalidRequest:
        return None
    if not whole.text.startswith(closed.text) or len(closed.text) == len(whole.text):
        return None
    region = len(closed.text), len(whole.text)
    return MessageSpan("generation_prompt", None, *token_span(whole.offsets, region))


async def _rendered(
    connection: Connection, conversation: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> Rendered:
    beside = {name: value for name, value in arguments.items() if name in _BESIDE}
    others = {name: value for name, value in arguments.items() if name not in _BESIDE}
    body = {
        "model": connection.here().name,
        "messages": [dict(message) for message in conversation],
        "return_token_strs": True,
        "chat_template_kwargs": others,
        **beside,
    }
    answer = await connection.ask("POST", "/tokenize", json=body)
    with connection.answering():
        return Rendered(list(map(int, answer["tokens"])), list(map(str, answer["token_strs"])))
