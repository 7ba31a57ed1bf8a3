"""Spans of a prompt that hold media: pictures, sound or video.

The model reads embeddings made of the media there, not of the token ids, which are placeholders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from steercap.core.rows import Ints

#: Type of an ordinary token, whose embedding is that of its id.
TEXT: Final = "text"


@dataclass(frozen=True)
class MediaSpan:
    """Positions [start, stop) of a prompt whose embeddings are made of one picture, sound or video.

    A picture that is cut into tiles can have several: tokens between them, such as the end of a line, are text.

    Args:
        kind: "image", "audio" or "video", as vLLM calls it.
        index: index among the media of its kind in the prompt, from 0.
        start: first position.
        stop: position after the last.
        digest: vLLM's hash of the content, the same for the same picture in the same model.
    """

    kind: str
    index: int
    start: int
    stop: int
    digest: str


def types_at(spans: Sequence[MediaSpan], positions: Ints) -> npt.NDArray[np.str_]:
    """Return the type of each token, "text" or the kind of its media span: str [rows].

    Args:
        spans: media spans of the prompt; generated tokens are text.
        positions: positions of the rows, int64 [rows].
    """
    kinds = [TEXT, *(span.kind for span in spans)]
    types: npt.NDArray[Any] = np.full(len(positions), TEXT, dtype=np.array(kinds).dtype)
    for span in spans:
        types[(positions >= span.start) & (positions < span.stop)] = span.kind
    return types
