"""State of one HTTP request while it is served: its `steercap` field and its results."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from steercap.core.spec import CaptureSpec
from steercap.steering.monitor import Monitor
from steercap.steering.spec import SteeringSpec

#: Delivery of the captured rows.
Delivery = Literal["fetch", "inline", "folder"]


@dataclass(frozen=True)
class SteercapField:
    """Parsed `steercap` field of a request body.

    Args:
        capture: capture spec, or None.
        steering: edits, or None.
        delivery: delivery of rows: fetched later, in the answer, or written to the server's folder.
        monitors: monitors of each of its samples.
    """

    capture: CaptureSpec | None = None
    steering: SteeringSpec | None = None
    delivery: Delivery = "fetch"
    monitors: tuple[Monitor, ...] = ()

    def __bool__(self) -> bool:
        """Return whether the field asks for anything."""
        return self.capture is not None or self.steering is not None or bool(self.monitors)


class Live(NamedTuple):
    """Per-token numbers, as JSON, that are sent with an event of a stream.

    Args:
        choice: index of the choice.
        kind: field of the event for them: "scores" or "crossings".
        content: the numbers.
    """

    choice: int
    kind: str
    content: dict[str, Any]


@dataclass
class SteercapRequest:
    """HTTP request that uses steercap.

    Args:
        asked: its parsed `steercap` field.
        owner: its owner, see `server.folder.owner_of`.
        results: results of its choices, as JSON, in the order in which they ended.
        prompts: number of its prompts that were given to the engine.
        live: numbers that wait for the next event of their choice in the stream, see `Live`.
        error: class of the steercap error that it failed with; "" for none.
        inline: bytes of rows in its answer.
        unsaid: functions that release captures whose ids the client has not received.
    """

    asked: SteercapField
    owner: str
    results: list[dict[str, Any]] = field(default_factory=list)
    prompts: int = 0
    live: list[Live] = field(default_factory=list)
    error: str = ""
    inline: int = 0
    unsaid: list[Callable[[], object]] = field(default_factory=list)


#: SteercapRequest of the request being served, None for a request that does not use steercap.
CURRENT: Final[ContextVar[SteercapRequest | None]] = ContextVar("steercap call", default=None)
