"""State of one HTTP request while it is served: its parsed `steercap` field and its results."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import msgspec
import torch
from safetensors.torch import save

from steercap.captures.fetching import Arrived
from steercap.captures.files import named, shape_of
from steercap.captures.handle import CaptureHandle
from steercap.captures.rows import Rows
from steercap.core.receipt import SteeringReceipt
from steercap.core.spec import CaptureSpec, Point
from steercap.errors import CaptureMemoryFull, InvalidRequest
from steercap.kernels.codecs.coded import CodedRows, coding_of
from steercap.requests.job import Job, rows_so_far
from steercap.requests.sketching import RunningSketch
from steercap.steering.monitor import Monitor
from steercap.steering.spec import SteeringSpec

#: Delivery of captured rows: stored until the client fetches them, in the answer, or in the server's folder.
Delivery = Literal["fetch", "inline", "folder"]
#: Notes about the place of a tensor, by the field of the answer that has the place.
PLACES: Final[Mapping[str, str]] = {
    "data": "in `data`, base64 of a safetensors file",
    "url": "at `url`, a safetensors file, until it expires",
    "file": "in the server's folder, a safetensors file",
}
#: Maximum bytes of one sample's logits in float32; larger ones are not computed.
MOST_LOGITS: Final = 256 << 20


@dataclass(frozen=True)
class SteercapField:
    """Parsed `steercap` field of a request body.

    Args:
        capture: capture spec, or None.
        steering: edits, or None.
        delivery: delivery of rows, see `Delivery`.
        monitors: monitors that run on each sample.
        logits: True to compute the logits of all captured tokens too.
        sketches: ids of the open sketches that its rows enter.
    """

    capture: CaptureSpec | None = None
    steering: SteeringSpec | None = None
    delivery: Delivery = "fetch"
    monitors: tuple[Monitor, ...] = ()
    logits: bool = False
    sketches: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Return whether the field asks for anything."""
        return self.capture is not None or self.steering is not None or bool(self.monitors or self.sketches)


class Live(NamedTuple):
    """Per-token numbers, as JSON, to send with the next event of a stream.

    Args:
        choice: index of the choice.
        kind: field of the event for the numbers: "scores" (projections) or "crossings" (of monitors).
        content: the numbers.
    """

    choice: int
    kind: str
    content: dict[str, Any]


@dataclass
class SteercapRequest:
    """HTTP request that uses steercap, while it is served.

    Args:
        asked: its parsed `steercap` field.
        owner: digest of its API key, see `server.folder.owner_of`.
        results: results of its choices, as JSON, in the order in which they ended.
        prompts: number of its prompts that were given to the engine so far.
        live: numbers that wait for the next event of their choice in the stream, see `Live`.
        error: class name of the steercap error that it failed with; "" for none.
        inline: bytes of rows in its answer so far.
        unsaid: functions that delete captures whose ids the client has not received yet.
        sketches: sketches that its rows enter.
    """

    asked: SteercapField
    owner: str
    results: list[dict[str, Any]] = field(default_factory=list)
    prompts: int = 0
    live: list[Live] = field(default_factory=list)
    error: str = ""
    inline: int = 0
    unsaid: list[Callable[[], object]] = field(default_factory=list)
    sketches: tuple[RunningSketch, ...] = ()


#: True while a request is served whose client opted out of recording.
OPTED_OUT: Final[ContextVar[bool]] = ContextVar("steercap opted out", default=False)
#: SteercapRequest of the request being served, None for a request that does not use steercap.
CURRENT: Final[ContextVar[SteercapRequest | None]] = ContextVar("steercap call", default=None)


class Numbers:
    """Streamer of the per-token numbers of one job: projections and crossings of monitors.

    Args:
        call: HTTP request that the job belongs to; the numbers are queued in its `live`.
        first: index of the job's first choice in the answer.
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
        """Queue the numbers of tokens that are new since the last call.

        Args:
            tokens: ids of all tokens generated so far, by the index of the sample.

        Raises:
            CaptureIncomplete, CaptureNotFinite: a row is missing or not finite.
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
        """Return the projections of rows as JSON: positions, and per point ("resid_post[5]") a list per direction."""
        assert self._job.projected is not None
        names = self._job.projected.names
        scores = {str(point): dict(zip(names, came.captures[point].T.tolist(), strict=True)) for point in came.captures}
        return {"positions": came.positions.tolist(), "scores": scores}

    def _put(self, index: int, kind: str, content: dict[str, Any]) -> None:
        self._call.live.append(Live(self._first + index, kind, content))


def receipt_json(receipt: SteeringReceipt | None) -> dict[str, Any]:
    """Return a receipt as the field `steering` of a result; {} without a receipt."""
    if receipt is None:
        return {}
    said = {"rows": list(receipt.rows), "computed": receipt.computed, "cached": receipt.cached}
    return {"steering": {**said, "digest": receipt.digest}}


@contextmanager
def entered(sketches: Sequence[RunningSketch]) -> Iterator[None]:
    """Mark sketches as broken if the block raises, since rows of a request that ends in an error have entered them."""
    try:
        yield
    except (Exception, asyncio.CancelledError) as error:
        for one in sketches:
            one.record.broken = one.record.broken or f"a request failed after its rows had entered it: {error!r}"
        raise


def sketches_json(names: Sequence[str], sketches: Sequence[RunningSketch]) -> dict[str, Any]:
    """Return the field `sketches` of a result: numbers of requests and rows by sketch id; {} without sketches."""
    found = {name: {"requests": one.requests, "rows": one.rows} for name, one in zip(names, sketches, strict=True)}
    return {"sketches": found} if found else {}


def described(handle: CaptureHandle, place: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a fetched capture as the field `capture` of a result, for msgspec's JSON.

    The description has the points with shapes and dtypes, numbers of rows and tokens, the file's header without the
    text (the answer has it) and `place`, the fields that locate the file.
    """
    saved, receipt = handle.as_saved(), handle.receipt
    return {
        "points": [_point(point, rows, place) for point, rows in saved.rows.items()],
        "rows": len(handle.positions),
        "reduce": receipt.reduce,
        "prompt_tokens": len(handle.prompt_token_ids),
        "output_tokens": len(handle.output_token_ids),
        "directions": list(handle.directions),
        "verified": receipt.verified,
        "header": msgspec.structs.replace(saved.header, text=""),
        **place,
    }


def _point(point: Point, kept: Rows, place: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the rows of one point: dtype and shape of decoded rows, and bytes as stored."""
    first, _, row, _ = shape_of(kept)
    codec, parameters = coding_of(first)
    dtype = first.schema.dtype if isinstance(first, CodedRows) else str(first.dtype).removeprefix("torch.")
    size = sum(tensor.nbytes for _, tensor in named(point, kept))
    said = _tensor(dtype, (len(first), *row), size, place)
    if codec != "raw":
        said["note"] += f"; {codec} codes, which CaptureHandle.load decodes to such rows"
    return {"layer": point.layer, "site": point.site, "selector": str(point), "codec": codec, **parameters, **said}


def _tensor(dtype: str, shape: Sequence[int], size: int, place: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a tensor and where it is delivered, by the fields of `place`; without any it is "left out"."""
    where = next((note for name, note in PLACES.items() if name in place), "left out")
    numel = math.prod(shape)
    size_mb, included = round(size / 2**20, 2), "data" in place
    facts = {"dtype": dtype, "shape": list(shape), "numel": numel, "size_mb": size_mb, "data_included": included}
    return {**facts, "note": where}


async def logits_of(handle: CaptureHandle, vocabulary: int, deliver: Callable[[bytes], dict[str, Any]]) -> Any:
    """Deliver the logits of a capture's rows, [1, rows, vocabulary], as a safetensors file, and describe it.

    They are in the dtype of the rows if that is lossless, else in float32. Logits that are too large to be computed or
    stored, whose rows are kept in a lossy codec, or that would not be the model's own, are left out; `note` gives the
    reason.

    Args:
        handle: fetched capture of the residual stream after the last layer.
        vocabulary: number of tokens in the model's logits.
        deliver: function that delivers a file and returns its place; raises CaptureMemoryFull if there is no room.
    """
    shape = (1, len(handle.positions), vocabulary)
    size, place, why = 4 * math.prod(shape), dict[str, Any](), ""
    dtype, codec = torch.float32, coding_of(shape_of(next(iter(handle.as_saved().rows.values()))).first)[0]
    if codec != "raw":
        why = f": the server keeps rows in {codec}, and logits of decoded rows would differ from the model's"
    elif size > MOST_LOGITS:
        why = (
            f": they take {size:,} bytes, of at most {MOST_LOGITS:,}; POST .../captures/ID/lens gives the most likely "
            "tokens"
        )
    else:
        try:
            found = (await handle.lens(full=True, top=1, max_bytes=MOST_LOGITS)).logits
            assert found is not None
            rows = next(iter(handle.captures.values())).dtype
            if torch.equal(found.to(rows).float(), found):
                found, dtype = found.to(rows), rows
            size = found.nbytes
            place = deliver(await asyncio.to_thread(save, {"_logits": found[None]}))
        except (InvalidRequest, CaptureMemoryFull) as error:
            why = f": {error}"
    said = _tensor(str(dtype).removeprefix("torch."), shape, size, place)
    return {**said, "note": said["note"] + why, **place}
