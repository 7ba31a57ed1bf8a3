"""One HTTP request while it is served: what it asks of steercap, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from steercap.core.spec import CaptureSpec
from steercap.steering.spec import SteeringSpec

#: How the rows of an answer are handed over.
Delivery = Literal["fetch", "inline"]


@dataclass(frozen=True)
class Asked:
    """What the field `steercap` of a body asks, read.

    Args:
        capture: what is kept.
        steering: what is changed.
        delivery: whether rows are in the answer, or fetched.
    """

    capture: CaptureSpec | None = None
    steering: SteeringSpec | None = None
    delivery: Delivery = "fetch"


@dataclass
class Call:
    """One HTTP request that asks something of steercap.

    Args:
        asked: what.
        owner: whose it is, see `serve.captures.owner_of`.
        results: what came of each of its choices, as JSON, in the order of their ends.
        prompts: how many of its prompts have been given to the engine.
        inline: bytes of rows that its answer holds.
        unsaid: lets go of the captures that the client has not been told of.
    """

    asked: Asked
    owner: str
    results: list[dict[str, Any]] = field(default_factory=list)
    prompts: int = 0
    inline: int = 0
    unsaid: list[Callable[[], object]] = field(default_factory=list)


#: The request that is being served, where it asks anything of steercap.
CURRENT: Final[ContextVar[Call | None]] = ContextVar("steercap call", default=None)
