"""Token selections, by which captures and edits choose the tokens of a sequence.

A selection is parsed when the spec is made, and resolved to position ranges when the prompt's length is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from steercap.core.framing import Step, Whole
from steercap.core.values import FAR, Mask, choices, index_of, mask_of, parts_of, plain, shown
from steercap.errors import EmptySelection, InvalidSelection

#: Selection as a user writes it: a name, a slice, a range, positions, a mask, or a union (list or tuple) of these.
Tokens: TypeAlias = "str | int | slice | range | Mask | Iterable[bool] | Iterable[Tokens]"
#: Parsed term of a selection: a name, a position, (start, stop, step), or a mask.
Term: TypeAlias = "str | int | tuple[int | None, int | None, int] | Mask"

#: Selection of all tokens but the first, whose row in most models is an attention sink.
BUT_THE_FIRST: Final = slice(1, None)

NAMES: Final = ("all", "prompt", "generated", "last_prompt")
#: Maximum nesting of unions; a list that is nested deeper contains itself.
DEEPEST: Final = 8


class Range(msgspec.Struct, frozen=True, array_like=True):
    """Positions start, start + step, ... below `stop`; None for the end of the sequence."""

    start: Whole
    stop: Whole | None
    step: Step = 1


@dataclass(frozen=True)
class TokenSelection:
    """A selection of tokens, independent of any prompt: the union of its terms.

    `terms` are names, positions, (start, stop, step) triples or masks. Negative numbers count from the end of the
    prompt: -1 is the last prompt token. A stop of None runs through the generated tokens, so `slice(-5, None)` is the
    last five prompt tokens and everything after them. A mask has a bool for each prompt token, or for each possible
    model input: prompt + `max_tokens` - 1.
    """

    terms: tuple[Term, ...]

    @classmethod
    def parse(cls, tokens: Tokens | TokenSelection) -> TokenSelection:
        """Parse a selection as a user writes it; integers and bools may come from any library, tensors and arrays too.

        Raises:
            InvalidSelection: a name is unknown, a step is below 1, bools are mixed with other values, or a value has
                another type.
            EmptySelection: a union is empty, or a mask is True nowhere.
        """
        if isinstance(tokens, TokenSelection):
            return tokens
        terms = tuple(_terms(tokens, 0))
        if not terms or not any(len(term.places) if isinstance(term, Mask) else True for term in terms):
            raise EmptySelection(f"tokens={shown(tokens)} selects no token; name at least one position, or use 'all'")
        return cls(terms)

    def ranges(self, prompt_len: int, limit: int) -> tuple[Range, ...]:
        """Resolve the selection to position ranges, for a sequence of `prompt_len` prompt tokens and `limit` inputs.

        Args:
            prompt_len: number of prompt tokens.
            limit: maximum number of tokens that become model inputs: prompt + generated - 1.

        Raises:
            InvalidSelection: a position is outside the sequence, or a mask's length is neither `prompt_len` nor
                `limit`.
            EmptySelection: no position below `limit` is selected.
        """
        return _ranges(self, prompt_len, limit)

    @property
    def from_start(self) -> bool:
        """True if it selects every token from the first up to some position, for any prompt."""
        (first, *others) = self.terms
        return not others and (
            first == "all" or (isinstance(first, tuple) and first[0] in {None, 0} and first[2] in {None, 1})
        )

    def __str__(self) -> str:
        shown = [f"slice({t[0]}, {t[1]}, {t[2]})" if isinstance(t, tuple) else repr(t) for t in self.terms]
        return shown[0] if len(shown) == 1 else f"[{', '.join(shown)}]"


@lru_cache(maxsize=64)
def _ranges(tokens: TokenSelection, prompt_len: int, limit: int) -> tuple[Range, ...]:
    ranges = tuple(chain.from_iterable(_resolve(term, prompt_len, limit) for term in tokens.terms))
    if not selected(ranges, limit).any():
        raise EmptySelection(
            f"tokens={tokens} selects none of the {limit} positions this request can have "
            f"({prompt_len} prompt tokens; the last sampled token is never an input to the model)"
        )
    return ranges


@lru_cache(maxsize=64)
def count_selected(ranges: tuple[Range, ...], total: int) -> int:
    """Return the number of positions below `total` that the ranges select."""
    return int(selected(ranges, total).sum())


def selected(ranges: Iterable[Range], total: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the positions below `total` that the ranges select: bool [total]."""
    mask = np.zeros(max(total, 0), dtype=np.bool_)
    for item in ranges:
        mask[item.start : item.stop : item.step] = True
    return mask


def _terms(tokens: Any, depth: int) -> Iterable[Term]:
    tokens = plain(tokens)
    if isinstance(tokens, str):
        if tokens not in NAMES:
            raise InvalidSelection(
                f"unknown tokens={shown(tokens)}; {choices(tokens, NAMES)}, slices, positions, masks"
            )
        yield tokens
    elif isinstance(tokens, slice):
        yield _slice_term(tokens)
    elif isinstance(tokens, Mask):
        yield tokens
    elif isinstance(tokens, TokenSelection):
        yield from tokens.terms
    elif (position := index_of(tokens)) is not None:
        yield _within_reach(position)
    else:
        yield from _union(tokens, depth)


def _union(tokens: Any, depth: int) -> Iterable[Term]:
    """Yield the terms of a sequence: one mask for bools, else those of each item."""
    parts = parts_of(tokens, "tokens", InvalidSelection) if depth < DEEPEST else None
    if parts is None:
        raise InvalidSelection(
            f"tokens={shown(tokens)} is not a selection; use a name, a slice, integer positions, a mask, "
            "or a list of these"
        )
    if (mask := mask_of(parts)) is not None:
        yield mask
        return
    if any(isinstance(part, bool) for part in parts):
        raise InvalidSelection(
            f"tokens={shown(tokens)} holds truth values beside other things; a mask holds nothing else: give "
            "[mask, 'generated'] for both"
        )
    for part in parts:
        yield from _terms(part, depth + 1)


def _within_reach(position: int) -> int:
    if not -FAR < position < FAR:
        raise InvalidSelection(f"position {position} is in no sequence; count from 0, or from -1 backwards")
    return position


def _slice_term(value: slice) -> tuple[int | None, int | None, int]:
    """Return start, stop and step of a slice, clamped to ±`FAR`."""
    found = [None if part is None else index_of(part) for part in (value.start, value.stop, value.step)]
    start, stop, step = (part if part is None else max(-FAR, min(part, FAR)) for part in found)
    if [part is None for part in found] != [part is None for part in (value.start, value.stop, value.step)]:
        raise InvalidSelection(f"tokens={shown(value)} must hold integers")
    if step is not None and step < 1:
        raise InvalidSelection(f"tokens={shown(value)} has step {step}; steps count forward, from 1")
    return start, stop, 1 if step is None else step


def _resolve(term: Term, prompt_len: int, limit: int) -> tuple[Range, ...]:
    if isinstance(term, Mask):
        return _where(term, prompt_len, limit)
    match term:
        case "all":
            found = Range(0, None)
        case "prompt":
            found = Range(0, prompt_len)
        case "generated":
            found = Range(prompt_len, None)
        case "last_prompt":
            found = Range(prompt_len - 1, prompt_len)
        case int(position):
            found = _one(position, prompt_len, limit)
        case (start, stop, step):
            found = Range(_bound(start, prompt_len) or 0, _bound(stop, prompt_len), step)
        case _:
            raise AssertionError(term)
    return (found,)


def _where(mask: Mask, prompt_len: int, limit: int) -> tuple[Range, ...]:
    """Return the runs of positions that a mask selects."""
    if len(mask) not in {prompt_len, limit}:
        raise InvalidSelection(
            f"tokens= is a mask of {len(mask)} truth values; here it can have {prompt_len}, one for each prompt token, "
            f"or {limit}, one for each position that can be an input of the model. One over the rows of a handle "
            "becomes positions by handle.positions[mask]"
        )
    return tuple(Range(start, stop) for start, stop in mask.runs)


def _one(position: int, prompt_len: int, limit: int) -> Range:
    at = position + prompt_len if position < 0 else position
    if not 0 <= at < limit:
        raise InvalidSelection(
            f"position {position} is outside the sequence: {prompt_len} prompt tokens, "
            f"positions -{prompt_len} to {limit - 1} can be inputs to the model"
        )
    return Range(at, at + 1)


def _bound(bound: int | None, prompt_len: int) -> int | None:
    if bound is None or bound >= 0:
        return bound
    return max(bound + prompt_len, 0)
