"""Assembly of a stream's one sample from its events."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Mapping
from typing import Any

from steercap.client.monitors import crossings_of
from steercap.requests.monitoring import Crossing
from steercap.requests.stream import Chunk


async def lines_of(parts: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield the lines of a stream of events, which only a line feed ends.

    httpx's `aiter_lines` also ends lines at U+2028, U+0085 and the like, which JSON text may hold as they are.
    """
    held = b""
    async for part in parts:
        *lines, held = (held + part).split(b"\n")
        for line in lines:
            yield line
    if held:
        yield held


class Streamed:
    """Sample of a stream, as its events have described it so far.

    Attributes:
        document: the answer that a request without a stream would have got.
        crossings: tokens at which monitors fired, since the last chunk.
        finish_reason: the reason why the text ended.
    """

    def __init__(self) -> None:
        self._choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": []}
        self.document: dict[str, Any] = {"choices": [self._choice]}
        self.crossings: tuple[Crossing, ...] = ()
        self.finish_reason: str | None = None

    @property
    def reads_prompt(self) -> bool:
        """True once the token ids of the prompt have come."""
        return bool(self._choice.get("prompt_token_ids"))

    def take(self, event: Mapping[str, Any]) -> Chunk | None:
        """Add an event and return its chunk; None if it brings no text or tokens."""
        said = event.get("steercap") or {}
        self.crossings += crossings_of(said.get("crossings", ()))
        if "results" in said:
            self.document["steercap"] = said
        text, ids = "", tuple[int, ...]()
        for one in event.get("choices", ()):
            self._choice["prompt_token_ids"] = one.get("prompt_token_ids") or self._choice.get("prompt_token_ids")
            self.finish_reason = one.get("finish_reason") or self.finish_reason
            text, ids = text + one["text"], (*ids, *(one.get("token_ids") or ()))
        self._choice["text"] += text
        self._choice["token_ids"] += ids
        if not (text or ids):
            return None
        crossings, self.crossings = self.crossings, ()
        return Chunk(text, ids, None, None, finished=False, crossings=crossings)
