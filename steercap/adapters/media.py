"""Media spans of a rendered prompt, from vLLM's placeholders.

It relies on this: a rendered prompt of type "multimodal" has `mm_placeholders`, by kind a `PlaceholderRange` for each
item in order, and likewise `mm_hashes`. A range's `is_embed`, if there is one, marks the tokens whose embedding is
replaced; vLLM's scheduler and its runners use the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from steercap.core.media import MediaSpan
from steercap.core.values import Mask


def media_of(payload: Mapping[str, Any]) -> tuple[MediaSpan, ...]:
    """Return the media spans of a rendered prompt, in the order of their positions.

    Args:
        payload: vLLM's engine input.
    """
    if payload["type"] != "multimodal":
        return ()
    found = [
        MediaSpan(kind, index, one.offset + start, one.offset + stop, digest)
        for kind, ranges in payload["mm_placeholders"].items()
        for index, (one, digest) in enumerate(zip(ranges, payload["mm_hashes"][kind], strict=True))
        for start, stop in _runs(one)
    ]
    return tuple(sorted(found, key=lambda span: span.start))


def _runs(one: Any) -> Iterator[tuple[int, int]]:
    """Return the runs [start, stop) of tokens that embeddings replace, counted from the start of vLLM's range."""
    return iter([(0, one.length)]) if one.is_embed is None else Mask(bytes(one.is_embed.tolist())).runs
