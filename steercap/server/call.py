"""State of one HTTP request while it is served: its `steercap` field and its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import msgspec

from steercap.captures.fetching import Arrived
from steercap.captures.handle import CaptureHandle
from steercap.core.spec import CaptureSpec
from steercap.kernels.codecs.coded import coding_of
from steercap.requests.job import Job, rows_so_far
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


#: True while a request is served whose client does not want it recorded.
OPTED_OUT: Final[ContextVar[bool]] = ContextVar("steercap opted out", default=False)
#: SteercapRequest of the request being served, None for a request that does not use steercap.
CURRENT: Final[ContextVar[SteercapRequest | None]] = ContextVar("steercap call", default=None)


class Numbers:
    """Streamed numbers of one job.

    Args:
        call: call that the numbers belong to.
        first: index of the job's first choice in the call.
        job: the running job; numbers are only streamed if its answer is a stream.
    """

    def __init__(self, call: SteercapRequest, first: int, job: Job) -> None:
        self._call, self._first, self._job = call, first, job
        params: Any = job.params
        self._streams = params.output_kind.name == "DELTA"
        self._projects = job.hands_over and job.projected is not None and self._streams
        self._tokens: dict[int, int] = {}
        self._rows: dict[int, int] = {}
        self._crossings: dict[int, int] = {}

    async def take(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Queue the new numbers for the stream.

        Args:
            tokens: tokens generated so far, by the index of the sample.

        Raises:
            CaptureIncomplete, CaptureNotFinite: a row is missing or invalid.
        """
        if self._projects:
            grown = {index: ids for index, ids in tokens.items() if len(ids) > self._tokens.get(index, 0)}
            self._tokens |= {index: len(ids) for index, ids in grown.items()}
            some = {index: (ids, self._rows.get(index, 0)) for index, ids in grown.items()}
            for index, came in (await rows_so_far(self._job, some)).items():
                self._rows[index] = self._rows.get(index, 0) + len(came.positions)
                if len(came.positions):
                    self._put(index, "scores", self._scores(came))
        if self._streams and self._job.watch is not None:
            for index in tokens:
                found = self._job.watch.crossings(index)
                for one in found[self._crossings.get(index, 0) :]:
                    self._put(index, "crossings", msgspec.to_builtins(one))
                self._crossings[index] = len(found)

    def _scores(self, came: Arrived) -> dict[str, Any]:
        """Return the projections of rows, by point and direction."""
        assert self._job.projected is not None
        names = self._job.projected.names
        scores = {
            f"{point.site}.{point.layer}": dict(zip(names, came.captures[point].T.tolist(), strict=True))
            for point in came.captures
        }
        return {"positions": came.positions.tolist(), "scores": scores}

    def _put(self, index: int, kind: str, content: dict[str, Any]) -> None:
        self._call.live.append(Live(self._first + index, kind, content))


def described(handle: CaptureHandle) -> dict[str, Any]:
    """Describe a handle for msgspec's JSON.

    The result has its points with shapes and dtypes, its numbers of rows and tokens, and its file's header without the
    text, which the answer has already.
    """
    saved, receipt = handle.as_saved(), handle.receipt
    points = []
    for point in handle.points:
        kept = saved.rows[point]
        first = kept[0] if isinstance(kept, tuple) else kept
        codec, parameters = coding_of(first)
        rows = handle.captures[point] if codec == "raw" and not isinstance(kept, tuple) else None
        one: dict[str, Any] = {"layer": point.layer, "site": point.site, "codec": codec, **parameters}
        if rows is not None:
            one |= {"shape": list(rows.shape), "dtype": str(rows.dtype).removeprefix("torch.")}
        points.append(one)
    return {
        "points": points,
        "rows": len(handle.positions),
        "reduce": receipt.reduce,
        "prompt_tokens": len(handle.prompt_token_ids),
        "output_tokens": len(handle.output_token_ids),
        "directions": list(handle.directions),
        "verified": receipt.verified,
        "header": msgspec.structs.replace(saved.header, text=""),
    }
