"""Token ids of a text or a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from steercap.core.prompts import listed, templated
from steercap.core.values import shown
from steercap.errors import InvalidSpec


def tokens_of(tokenizer: Any, text: Any, *, special: bool) -> list[int]:
    """Tokenise a str or a conversation, by the chat template; token ids stay as they are.

    Args:
        tokenizer: the model's tokenizer.
        text: str, token ids, or {"role", "content"} dicts.
        special: True to add the special tokens that the tokenizer puts around a str.

    Raises:
        InvalidSpec: something else.
        InvalidRequest: no chat template, or one that refuses the conversation.
    """
    if isinstance(text, str):
        return list(tokenizer.encode(text, add_special_tokens=special))
    if is_conversation(text):
        return templated(tokenizer, text, {}, spans=False)[0]
    return given_ids(text)


def is_conversation(text: Any) -> bool:
    """Check for a list of {"role", "content"} dicts."""
    return isinstance(text, Sequence) and bool(text) and all(isinstance(part, Mapping) for part in text)


def given_ids(text: Any) -> list[int]:
    """Check token ids given in place of a text, and return them as plain integers.

    Raises:
        InvalidSpec: something else.
    """
    try:
        nothing = not len(text)
    except TypeError as error:  # such as a single id, where the ids of one text were given in place of several texts
        raise InvalidSpec(f"{shown(text)} is no text; give several in a list: str, token ids, or Exchange") from error
    if nothing:
        return []
    if isinstance(text, Mapping) or any(isinstance(part, (str, bytes, Sequence, Mapping)) for part in text):
        raise InvalidSpec(f"{shown(text)} is no text; give several in a list: str, token ids, or Exchange")
    _, (prompt,) = listed(list(text))
    return list(prompt["prompt_token_ids"])
