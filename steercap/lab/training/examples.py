"""Training examples of three kinds, their tokens, and their split into training and held-out ones."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from steercap.core.hints import dataclass
from steercap.core.prompts import templated
from steercap.core.values import number_of, shown
from steercap.errors import InvalidPrompt, InvalidSetting

#: A prompt: text, token ids, or a conversation of {"role", "content"} dicts, put through the chat template.
Prompt: TypeAlias = "str | Sequence[int] | Sequence[Mapping[str, Any]]"
#: A response: text, or token ids. Nothing is appended: the end of a turn is learned only where it is given.
Text: TypeAlias = "str | Sequence[int]"


@dataclass(frozen=True)
class Example:
    """Response to a prompt.

    Args:
        prompt: text, token ids or a conversation; "" for a text by itself, whose first token is then the prompt where
            the tokenizer begins with none of its own.
        response: text to make likelier.
        source: origin, such as a question: examples of one source are all trained on or all held out. None for a
            source of its own.
    """

    prompt: Prompt
    response: Text
    source: str | None = None


@dataclass(frozen=True)
class Preference:
    """Two responses to one prompt, one of them preferred.

    Args:
        prompt: prompt, as for `Example`.
        chosen, rejected: preferred response, and the other one.
        source: origin, as for `Example`.
    """

    prompt: Prompt
    chosen: Text
    rejected: Text
    source: str | None = None


@dataclass(frozen=True)
class Prompted:
    """Response given under a system prompt, which the edit is to replace.

    Args:
        system: the system prompt.
        prompt: text, which becomes the user's message, or a conversation without a system prompt.
        response: response, as for `Example`.
        source: origin, as for `Example`.
    """

    system: str
    prompt: str | Sequence[Mapping[str, Any]]
    response: Text
    source: str | None = None


class ExampleTokens(msgspec.Struct, frozen=True, array_like=True):
    """Token ids of a prompt and its response, one after the other, with the length of the prompt."""

    ids: tuple[int, ...]
    prompt_len: int

    @property
    def inputs(self) -> int:
        """Number of tokens that the model reads: all but the last, as in an engine."""
        return len(self.ids) - 1


def tokens_of(tokenizer: Any, prompt: Any, response: Any) -> ExampleTokens:
    """Tokenize a prompt and a response (see `Example`) as an engine would; an empty prompt gets length 1.

    Raises:
        InvalidPrompt: no token is left to learn, or the prompt or response is not valid.
    """
    before = _prompt_ids(tokenizer, prompt)
    after = _ids(response) if not isinstance(response, str) else tokenizer.encode(response, add_special_tokens=False)
    if after is None:
        raise InvalidPrompt(f"response={shown(response)}; give text or token ids")
    ids = (*before, *after)
    prompt_len = max(len(before), 1)
    if len(ids) <= prompt_len:
        raise InvalidPrompt(f"response={shown(response)} after prompt={shown(prompt)} has no token to predict")
    if min(ids) < 0:
        raise InvalidPrompt(f"token id {min(ids)} in {shown(response)} after prompt={shown(prompt)}; ids begin at 0")
    return ExampleTokens(tuple(map(int, ids)), prompt_len)


def conversation(prompt: Any, system: str | None = None) -> list[Mapping[str, Any]]:
    """Return a prompt, text or turns, as a list of turns, after a system prompt unless that is None."""
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return turns if system is None else [{"role": "system", "content": system}, *turns]


def digest_of(tokens: Iterable[Sequence[ExampleTokens]]) -> str:
    """Return the SHA-256 of tokenised examples, in hexadecimal."""
    return hashlib.sha256(msgspec.json.encode([list(one) for one in tokens])).hexdigest()


def _prompt_ids(tokenizer: Any, prompt: Any) -> Sequence[int]:
    if isinstance(prompt, str):
        ids: list[int] = tokenizer.encode(prompt)
        return ids
    if isinstance(prompt, Sequence) and prompt and all(isinstance(one, Mapping) for one in prompt):
        return templated(tokenizer, prompt, {}, spans=False)[0]
    found = _ids(prompt)
    if found is None:
        raise InvalidPrompt(f"prompt={shown(prompt)}; give text, token ids or a conversation")
    return found


def _ids(given: Any) -> Sequence[int] | None:
    known = isinstance(given, Sequence) and all(isinstance(one, int) for one in given)
    return given if known else None


def split(sources: Sequence[Hashable | None], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the indices, ascending, of training examples and of held-out ones.

    Examples of one source are all trained on or all held out. Which sources are held out depends on their names and the
    seed, not on the order of the examples.

    Args:
        sources: source of each example; None for one of its own.
        share: share of the sources to hold out, in (0, 1); at least one is held out, and one is not.
        seed: seed of the draw.

    Raises:
        InvalidSetting: the share is out of range, or there are fewer than two sources.
    """
    given = number_of(share)
    if given is None or not 0 < given < 1:
        raise InvalidSetting(f"held_out={shown(share)}; give a share of the sources, between 0 and 1")
    named = [(str(place), "") if source is None else ("", str(source)) for place, source in enumerate(sources)]
    distinct = sorted(set(named))
    if len(distinct) < 2:
        raise InvalidSetting(f"{len(distinct)} source; to hold some out, at least 2 are needed")
    count = min(max(1, round(given * len(distinct))), len(distinct) - 1)
    out = set(random.Random(seed).sample(distinct, count))  # noqa: S311 -- a split, no secret
    seen = [place for place, source in enumerate(named) if source not in out]
    return seen, [place for place, source in enumerate(named) if source in out]
