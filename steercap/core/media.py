"""Which tokens of a prompt stand for pictures, sound or video: what the model reads there is made of these, and the
token's id says only that something is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from steercap.core.rows import Ints

#: The type of a token whose id is what the model reads.
TEXT: Final = "text"


@dataclass(frozen=True)
class MediaSpan:
    """Positions of a prompt whose embeddings are made of one picture, sound or video: [start, stop).

    A picture that is cut into tiles can have several: tokens between them, such as the end of a line, are text.

    Args:
        kind: "image", "audio" or "video", as vLLM calls it.
        index: which of its kind in the prompt, from 0.
        start: first position.
        stop: position after the last.
        digest: vLLM's hash of what it is made of, the same for the same picture in the same model.
    """

    kind: str
    index: int
    start: int
    stop: int
    digest: str


def types_at(spans: Sequence[MediaSpan], positions: Ints) -> npt.NDArray[np.str_]:
    """What the model read at some positions, int64 [rows]: "text", or the kind of a span, str [rows].

    Args:
        spans: of the prompt; generated tokens are text.
        positions: of the rows.
    """
    kinds = [TEXT, *(span.kind for span in spans)]
    types: npt.NDArray[Any] = np.full(len(positions), TEXT, dtype=np.array(kinds).dtype)
    for span in spans:
        types[(positions >= span.start) & (positions < span.stop)] = span.kind
    return types
