"""Pairs of prompts: one is run with changes, the other supplies rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias, get_args

from steercap.core.values import index_of, shown
from steercap.errors import InvalidPrompt, InvalidSpec
from steercap.lab.directions.extraction import Text, ids_of

#: Direction of patching: "denoise" puts clean rows into the corrupted run, "noise" corrupted rows into the clean.
Direction: TypeAlias = Literal["denoise", "noise"]
#: Alignment of prompts of different lengths.
Align: TypeAlias = Literal["end"]

#: Sites whose rows depend on the position that they were computed at: rotary embedding is in them.
ROTATED: Final = frozenset({"q", "k"})


@dataclass(frozen=True)
class Pair:
    """Prompt that is changed, and prompt that rows are taken from.

    Args:
        number: index of the pair.
        base: token ids of the prompt that is changed.
        source: token ids of the other prompt.
        tokens: text of each token of `base`.
    """

    number: int
    base: tuple[int, ...]
    source: tuple[int, ...]
    tokens: tuple[str, ...]

    @property
    def shift(self) -> int:
        """Offset from a position of `base` to its counterpart in `source`."""
        return len(self.source) - len(self.base)


def pairs_of(tokenizer: Any, clean: Any, corrupted: Any, *, direction: Any, align: Any) -> list[Pair]:
    """Tokenize clean and corrupted prompts, one each or lists of equal length, and pair them.

    Raises:
        InvalidSpec: an unknown direction or alignment, or lists of different lengths.
        InvalidPrompt: prompts of a pair have different lengths, and `align` is None.
    """
    if direction not in get_args(Direction) or not isinstance(direction, str):
        raise InvalidSpec(f"direction={shown(direction)}; give 'denoise', clean rows into corrupted runs, or 'noise'")
    if align is not None and align not in get_args(Align):
        raise InvalidSpec(f"align={shown(align)}; give None for prompts of equal length, or 'end'")
    cleans, corrupteds = texts_of(clean, "clean"), texts_of(corrupted, "corrupted")
    if len(cleans) != len(corrupteds):
        raise InvalidSpec(f"{len(cleans)} clean prompts and {len(corrupteds)} corrupted ones; give as many of each")
    found = []
    ids = [tuple(one) for one in ids_of(tokenizer, [*cleans, *corrupteds])]
    for number, (one, other) in enumerate(zip(ids[: len(cleans)], ids[len(cleans) :], strict=True)):
        if len(one) != len(other) and align is None:
            raise InvalidPrompt(
                f"pair {number}: the clean prompt has {len(one)} tokens and the corrupted one {len(other)}: "
                f"{decoded(tokenizer, one)} and {decoded(tokenizer, other)}; make them alike, or give align='end' to "
                "lay their ends beside each other"
            )
        base, source = (other, one) if direction == "denoise" else (one, other)
        found.append(Pair(number, base, source, decoded(tokenizer, base)))
    return found


def texts_of(given: Any, what: str) -> list[Text]:
    """Return one text or several as a list.

    Raises:
        InvalidSpec: there is none, or it is not a text.
    """
    if isinstance(given, (str, tuple)) or (isinstance(given, Sequence) and given and index_of(given[0]) is not None):
        return [given]
    if isinstance(given, bytes) or not isinstance(given, Sequence) or not given:
        raise InvalidSpec(f"{what}={shown(given)}; give a str, token ids, an Exchange, or a list of these")
    return list(given)


def decoded(tokenizer: Any, ids: Sequence[int]) -> tuple[str, ...]:
    """Return the text of each token by itself."""
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    return tuple(str(decode([token])) for token in ids)
