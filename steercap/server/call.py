"""One HTTP request while it is served: what it asks of steercap, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from steercap.core.spec import CaptureSpec
from steercap.steering.monitor import Monitor
from steercap.steering.spec import SteeringSpec

#: How the rows of an answer are handed over.
Delivery = Literal["fetch", "inline", "folder"]


@dataclass(frozen=True)
class Asked:
    """What the field `steercap` of a body asks, read.

    Args:
        capture: what is kept.
        steering: what is changed.
        delivery: whether rows are in the answer, fetched, or written to the server's folder.
        monitors: what watches each of its requests.
    """

    capture: CaptureSpec | None = None
    steering: SteeringSpec | None = None
    delivery: Delivery = "fetch"
    monitors: tuple[Monitor, ...] = ()

    def __bool__(self) -> bool:
        """Whether it asks anything."""
        return self.capture is not None or self.steering is not None or bool(self.monitors)


class Live(NamedTuple):
    """Numbers of tokens, as JSON, that go out with an event of a stream.

    Args:
        choice: whose.
        kind: the field of the event that has them: "scores" or "crossings".
        content: they.
    """

    choice: int
    kind: str
    content: dict[str, Any]


@dataclass
class Call:
    """One HTTP request that asks something of steercap.

    Args:
        asked: what.
        owner: whose it is, see `serve.captures.owner_of`.
        results: what came of each of its choices, as JSON, in the order of their ends.
        prompts: how many of its prompts have been given to the engine.
        live: numbers of tokens that wait for the next event of their choice in the stream, see `Live`.
        error: the class of the error of ours that it failed with; "" where there was none.
        inline: bytes of rows that its answer holds.
        unsaid: lets go of the captures that the client has not been told of.
    """

    asked: Asked
    owner: str
    results: list[dict[str, Any]] = field(default_factory=list)
    prompts: int = 0
    live: list[Live] = field(default_factory=list)
    error: str = ""
    inline: int = 0
    unsaid: list[Callable[[], object]] = field(default_factory=list)


#: The request that is being served, where it asks anything of steercap.
CURRENT: Final[ContextVar[Call | None]] = ContextVar("steercap call", default=None)
