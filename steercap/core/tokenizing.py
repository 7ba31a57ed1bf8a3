"""Token ids of a text or a conversation, and tokens as visible text."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from steercap.core.extras import extra
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
        raise InvalidSpec(f"{shown(text)} is not a text; give texts in a list: str, token ids, or Exchange") from error
    if nothing:
        return []
    if isinstance(text, Mapping) or any(isinstance(part, (str, bytes, Sequence, Mapping)) for part in text):
        raise InvalidSpec(f"{shown(text)} is not a text; give texts in a list: str, token ids, or Exchange")
    _, (prompt,) = listed(list(text))
    return list(prompt["prompt_token_ids"])


Item = TypeVar("Item")

#: Font of plots, which comes with matplotlib.
FONT: Final = "DejaVu Sans Mono"
#: Signs of white space; any other is shown as SPACE.
VISIBLE: Final = {" ": "·", "\t": "⇥", "\r": "␍", "\n": "↵", "\u00a0": "⍽"}
SPACE: Final = "␣"
#: Sign of an empty text, such as that of a token that `decode` leaves out.
NOTHING: Final = "∅"
UNKNOWN: Final = "�"


def visible(text: str) -> str:
    """Return a token's text with visible white space: `·` for a space, `⇥` for a tab, `↵` for a line end."""
    return "".join(VISIBLE.get(letter) or _printed(letter) for letter in text) or NOTHING


def _printed(letter: str) -> str:
    return letter if letter.isprintable() else SPACE if letter.isspace() else UNKNOWN


def drawn(text: str) -> str:
    """Return visible text that matplotlib can draw: signs for letters its font lacks, and escaped dollars."""
    font = _font()
    shown = (letter if font.get_char_index(ord(letter)) else UNKNOWN for letter in visible(text))
    return "".join(shown).replace("$", r"\$")


def shortened(text: str, width: int) -> str:
    """Return visible text of at most `width` letters, with an ellipsis if it is cut."""
    shown = visible(text)
    return shown if len(shown) <= width else f"{shown[: width - 1]}…"


def texts_of(tokenizer: Any, token_ids: Iterable[int]) -> list[str]:
    """Decode each token by itself; a token that is part of a letter is shown as the replacement sign."""
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    return [str(decode([token])) for token in token_ids]


def lines_of(items: Sequence[Item], count: int) -> Iterator[tuple[int, Sequence[Item]]]:
    """Split items into lines of at most `count`; yield each line after the index of its first item."""
    for first in range(0, len(items), count):
        yield first, items[first : first + count]


@functools.cache
def _font() -> Any:
    with extra("plots"):
        from matplotlib.font_manager import findfont, get_font

    return get_font(findfont(FONT))
