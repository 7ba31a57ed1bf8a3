"""Tokens as text that can be seen: white space, line ends and what cannot be printed have signs of their own."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from steercap.core.extras import extra

Item = TypeVar("Item")

#: The font of pictures, which comes with matplotlib.
FONT: Final = "DejaVu Sans Mono"
#: What is seen of what is not; any other white space is SPACE.
VISIBLE: Final = {" ": "·", "\t": "⇥", "\r": "␍", "\n": "↵", "\u00a0": "⍽"}
SPACE: Final = "␣"
#: Of no text at all, such as a token that `decode` leaves out.
NOTHING: Final = "∅"
UNKNOWN: Final = "�"


def visible(text: str) -> str:
    """A token's text with its white space seen: `·` for a space, `⇥` for a tab, `↵` for a line end."""
    return "".join(VISIBLE.get(letter) or _printed(letter) for letter in text) or NOTHING


def _printed(letter: str) -> str:
    return letter if letter.isprintable() else SPACE if letter.isspace() else UNKNOWN


def drawn(text: str) -> str:
    """A visible text that matplotlib can draw: signs for what its font lacks, and no dollar opens a formula."""
    font = _font()
    shown = (letter if font.get_char_index(ord(letter)) else UNKNOWN for letter in visible(text))
    return "".join(shown).replace("$", r"\$")


def shortened(text: str, width: int) -> str:
    """A visible text of at most `width` letters, an ellipsis for what is left out."""
    shown = visible(text)
    return shown if len(shown) <= width else f"{shown[: width - 1]}…"


def texts_of(tokenizer: Any, token_ids: Iterable[int]) -> list[str]:
    """Text of each token by itself; a token that is part of a letter is shown as the replacement sign."""
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    return [str(decode([token])) for token in token_ids]


def lines_of(items: Sequence[Item], count: int) -> Iterator[tuple[int, Sequence[Item]]]:
    """Items in lines of at most `count`, each line with the number of its first item."""
    for first in range(0, len(items), count):
        yield first, items[first : first + count]


@functools.cache
def _font() -> Any:
    with extra("plots"):
        from matplotlib.font_manager import findfont, get_font

    return get_font(findfont(FONT))
