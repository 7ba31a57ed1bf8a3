"""Token ids of texts and conversations, and positions of messages, from the server's tokenizer and chat template."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from steercap.client.connection import Connection
from steercap.core.chat import MessageSpan, Region, message_spans, place, token_span
from steercap.core.extras import extra
from steercap.core.names import require_contents, require_variables
from steercap.errors import InvalidRequest, ServerFailure
from steercap.files.fingerprint import template_digest, tokenizer_digest

#: Arguments of chat rendering that vLLM's server takes as fields of the body, not in `chat_template_kwargs`.
_BESIDE: Final = ("add_generation_prompt", "continue_final_message", "chat_template", "add_special_tokens", "tools")


#: Bytes that byte-level vocabularies write as themselves; the others are written in order from U+0100.
_PRINTED: Final = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES: Final = {chr(byte): byte for byte in _PRINTED} | {
    chr(0x100 + at): byte for at, byte in enumerate(byte for byte in range(0x100) if byte not in _PRINTED)
}


class RenderedChat(NamedTuple):
    """A conversation as the model reads it.

    Args:
        ids: token ids.
        texts: each token's bytes, decoded as Latin-1: one character per byte.
    """

    ids: list[int]
    texts: list[str]

    @property
    def text(self) -> str:
        """The whole conversation's bytes, decoded as Latin-1."""
        return "".join(self.texts)

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """Start and end of each token in `text`."""
        ends = [0, *itertools.accumulate(map(len, self.texts))]
        return list(itertools.pairwise(ends))


def spelled(text: str) -> str:
    """Return a text's UTF-8 bytes decoded as Latin-1, since a token may end inside a character."""
    return text.encode(errors="surrogatepass").decode("latin-1")


def token_text(token: str, *, in_bytes: bool) -> str:
    """Return a token's bytes, decoded as Latin-1.

    Args:
        token: the token as the vocabulary writes it.
        in_bytes: True for a byte-level vocabulary (as GPT-2's), False for one of text with "▁" for spaces
            (SentencePiece).
    """
    if in_bytes and all(one in _BYTES for one in token):
        return "".join(chr(_BYTES[one]) for one in token)
    if not in_bytes and (byte := re.fullmatch(r"<0x([0-9A-F]{2})>", token)):
        return chr(int(byte[1], 16))
    return spelled(token if in_bytes else token.replace("▁", " "))


async def tokenised(connection: Connection, text: str, *, special: bool | None = None) -> list[int]:
    """Return the token ids of a text as the server's model reads it; `special` as for `SteerModel.tokenize`.

    Raises:
        The errors of `Connection.ask`.
    """
    here = connection.here()
    special = here.texts["add_special_tokens"] if special is None else special
    words = text.lower() if here.texts["do_lower_case"] else text
    body = {"model": here.name, "prompt": words, "add_special_tokens": special}
    answer = await connection.ask("POST", "/tokenize", json=body)
    with connection.answering():
        return list(map(int, answer["tokens"]))


async def templated(
    connection: Connection, conversation: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], *, spans: bool
) -> tuple[list[int], tuple[MessageSpan, ...]]:
    """Return a conversation's token ids, up to where the reply begins, and the positions of its messages' contents.

    Args:
        connection: connection to the server, which renders it.
        conversation: {"role", "content"} dicts.
        arguments: further arguments of the chat template.
        spans: True to locate the messages, which takes at least one rendering each; False for no positions, ().

    Raises:
        InvalidRequest: the model has no chat template, it does not read an argument, or refuses the conversation.
        InvalidPrompt: a content is neither text nor parts, or is missing.
        The errors of `Connection.ask`.
    """
    require_contents(conversation)
    read = None if "chat_template" in arguments else connection.here().tokenizer.get("variables")
    require_variables(arguments, lambda: None if read is None else read.split())
    in_bytes = spans and await _in_bytes(connection)

    async def render(messages: Sequence[Mapping[str, Any]], **further: Any) -> RenderedChat:
        return await _rendered(connection, messages, {**arguments, **further}, in_bytes=in_bytes)

    whole = await render(conversation)
    if not spans:
        return whole.ids, ()
    placed = await asyncio.gather(*(_placed(whole, conversation, at, render) for at in range(len(conversation))))
    found = message_spans(conversation, placed, whole.offsets)
    with contextlib.suppress(InvalidRequest):
        closed = await render(conversation, add_generation_prompt=False)
        if whole.text.startswith(closed.text) and len(closed.text) < len(whole.text):
            region = len(closed.text), len(whole.text)
            found.append(MessageSpan("generation_prompt", None, *token_span(whole.offsets, region)))
    return whole.ids, tuple(found)


async def _placed(
    whole: RenderedChat,
    conversation: Sequence[Mapping[str, Any]],
    index: int,
    render: Callable[[Sequence[Mapping[str, Any]]], Awaitable[RenderedChat]],
) -> list[Region] | str:
    """Return the character regions of message `index`'s content in `whole.text`, or the reason why there are none."""
    steps = place(whole.text, conversation, index, spelled)
    try:
        changed = next(steps)
        while True:
            rendered = None
            with contextlib.suppress(InvalidRequest):  # a template may refuse what the content is changed to
                rendered = (await render(changed)).text
            changed = steps.send(rendered)
    except StopIteration as end:
        return cast("list[Region] | str", end.value)


async def _in_bytes(connection: Connection) -> bool:
    """Return True if the server's vocabulary is byte-level."""
    body = {"model": connection.here().name, "prompt": "é", "return_token_strs": True}
    answer = await connection.ask("POST", "/tokenize", json=body)
    with connection.answering():
        return spelled("é") in "".join(map(str, answer["token_strs"]))


async def _rendered(
    connection: Connection, conversation: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], *, in_bytes: bool
) -> RenderedChat:
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
        texts = [token_text(str(one), in_bytes=in_bytes) for one in answer["token_strs"]]
        return RenderedChat(list(map(int, answer["tokens"])), texts)


def tokenizer_here(description: Mapping[str, str], url: str) -> Any:
    """Load the server's tokenizer from files on this machine.

    Args:
        description: name or path, revision and digest of the tokenizer, digest of its chat template, and as "chats" the
            template by which the server renders conversations, if its flags name another or default arguments.
        url: address of the server, for messages.

    Raises:
        ServerFailure: the server names none, its files are not on this machine, or they make another tokenizer.
    """
    if not description:
        raise ServerFailure(f"{url} names no tokenizer; give token ids")
    with extra("cuda", "cpu"):
        from transformers import AutoTokenizer

    name, instead = (
        description["name"],
        "`await model.tokenize(text)` asks the server, and token ids are taken as they are",
    )
    try:
        found = AutoTokenizer.from_pretrained(name, revision=description["revision"] or None)
    except (OSError, ValueError) as error:
        raise ServerFailure(f"the tokenizer of {url}, {name}, cannot be read on this machine; {instead}") from error
    if (tokenizer_digest(found), template_digest(found)) != (description["digest"], description["template"]):
        raise ServerFailure(f"the tokenizer {name} on this machine is not that of {url}; {instead}")
    found.chat_template = description.get("chats", found.chat_template)
    return found
