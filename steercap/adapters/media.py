"""Which tokens of a prompt stand for pictures, sound or video, as vLLM itself says.

What it relies on: of a rendered prompt of type "multimodal", `mm_placeholders`, by kind a `PlaceholderRange` for each
item in their order, and likewise `mm_hashes`. A range's `is_embed`, if there is one, says at which of its tokens the
embedding is replaced; vLLM's scheduler and its runners go by the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from steercap.core.media import MediaSpan
from steercap.core.values import Mask


def media_of(payload: Mapping[str, Any]) -> tuple[MediaSpan, ...]:
    """Where the pictures, sounds and videos of a rendered prompt are, in the order of their positions.

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
    """The stretches of a range whose embeddings are replaced: [start, stop) within it."""
    return iter([(0, one.length)]) if one.is_embed is None else Mask(bytes(one.is_embed.tolist())).runs
