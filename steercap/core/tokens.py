"""Which tokens of a sequence: the one selection language of captures and edits.

Number 1 in the life of a request: a selection is read when the spec is made, and becomes
plain ranges of positions once the length of the prompt is known.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from steercap.errors import EmptySelection, InvalidSelection

#: What a user may write: a name, a slice, a range, positions, or a union (a list or tuple) of these.
Tokens: TypeAlias = "str | int | slice | range | Iterable[Tokens]"

NAMES: Final = ("all", "prompt", "generated", "last_prompt")


class Range(msgspec.Struct, frozen=True, array_like=True):
    """Positions start, start + step, ... below stop; `stop` None runs to the end of the sequence."""

    start: int
    stop: int | None
    step: int = 1


@dataclass(frozen=True)
class TokenSelection:
    """A selection of tokens, independent of any prompt.

    `terms` are names, positions or (start, stop, step) triples; the selection is their union.
    Negative numbers count from the end of the prompt: -1 is the last prompt token. A stop of
    None runs through the generated tokens, so `slice(-5, None)` is the last five prompt tokens and
    everything after them.
    """

    terms: tuple[str | int | tuple[int | None, int | None, int], ...]

    @classmethod
    def parse(cls, tokens: Tokens | TokenSelection) -> TokenSelection:
        """Read what a user wrote.

        Raises:
            InvalidSelection: a name that is not known, a step below 1, or a value of another type.
            EmptySelection: an empty union.
        """
        if isinstance(tokens, TokenSelection):
            return tokens
        terms = tuple(_terms(tokens))
        if not terms:
            raise EmptySelection(f"tokens={tokens!r} selects no token; name at least one position, or use 'all'")
        return cls(terms)

    def ranges(self, prompt_len: int, limit: int) -> tuple[Range, ...]:
        """Positions selected in a sequence of `prompt_len` prompt tokens, all below `limit`.

        Args:
            prompt_len: number of prompt tokens.
            limit: number of tokens that can become inputs of the model: prompt + generated - 1 at most.

        Raises:
            InvalidSelection: a position outside the sequence.
            EmptySelection: nothing selected below `limit`.
        """
        ranges = tuple(_resolve(term, prompt_len, limit) for term in self.terms)
        if not selected(ranges, limit).any():
            raise EmptySelection(
                f"tokens={self} selects none of the {limit} positions this request can have "
                f"({prompt_len} prompt tokens; the last sampled token is never an input of the model)"
            )
        return ranges

    def __str__(self) -> str:
        shown = [f"slice({t[0]}, {t[1]}, {t[2]})" if isinstance(t, tuple) else repr(t) for t in self.terms]
        return shown[0] if len(shown) == 1 else f"[{', '.join(shown)}]"


def selected(ranges: Iterable[Range], total: int) -> npt.NDArray[np.bool_]:
    """Whether each position below `total` is selected: bool [total]."""
    mask = np.zeros(max(total, 0), dtype=np.bool_)
    for item in ranges:
        mask[item.start : item.stop : item.step] = True
    return mask


def _terms(tokens: Tokens) -> Iterable[str | int | tuple[int | None, int | None, int]]:
    if isinstance(tokens, str):
        if tokens not in NAMES:
            raise InvalidSelection(
                f"unknown tokens={tokens!r}; known: {', '.join(map(repr, NAMES))}, slices, positions"
            )
        yield tokens
    elif isinstance(tokens, bool) or tokens is None:
        raise InvalidSelection(f"tokens={tokens!r} is no selection; use a name, a slice, positions or a list of these")
    elif (position := _index(tokens)) is not None:
        yield position
    elif isinstance(tokens, range):
        yield from (int(position) for position in tokens)
    elif isinstance(tokens, slice):
        yield _slice_term(tokens)
    elif isinstance(tokens, Iterable):
        for part in tokens:
            yield from _terms(part)
    else:
        raise InvalidSelection(f"tokens={tokens!r} is no selection; use a name, a slice, positions or a list of these")


def _index(value: object) -> int | None:
    """An integer of any library, or None; arrays of several have an `__index__` that fails."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _slice_term(value: slice) -> tuple[int | None, int | None, int]:
    step = 1 if value.step is None else value.step
    for part in (value.start, value.stop, step):
        if part is not None and (isinstance(part, bool) or not isinstance(part, int)):
            raise InvalidSelection(f"tokens={value!r} must hold integers")
    if step < 1:
        raise InvalidSelection(f"tokens={value!r} has step {step}; steps count forward, from 1")
    return value.start, value.stop, step


def _resolve(term: str | int | tuple[int | None, int | None, int], prompt_len: int, limit: int) -> Range:
    match term:
        case "all":
            return Range(0, None)
        case "prompt":
            return Range(0, prompt_len)
        case "generated":
            return Range(prompt_len, None)
        case "last_prompt":
            return Range(prompt_len - 1, prompt_len)
        case int(position):
            return _one(position, prompt_len, limit)
        case (start, stop, step):
            return Range(_bound(start, prompt_len) or 0, _bound(stop, prompt_len), step)
    raise AssertionError(term)


def _one(position: int, prompt_len: int, limit: int) -> Range:
    at = position + prompt_len if position < 0 else position
    if not 0 <= at < limit:
        raise InvalidSelection(
            f"position {position} is outside the sequence: {prompt_len} prompt tokens, "
            f"positions -{prompt_len} to {limit - 1} can be inputs of the model"
        )
    return Range(at, at + 1)


def _bound(bound: int | None, prompt_len: int) -> int | None:
    if bound is None or bound >= 0:
        return bound
    return max(bound + prompt_len, 0)
