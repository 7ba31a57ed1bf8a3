"""Streams: text and captured rows of one request while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from steercap.captures.checks import Expected, parts_of
from steercap.captures.fetching import arrived
from steercap.captures.rows import Captures
from steercap.core.budget import Reservation
from steercap.core.chat import types_at
from steercap.core.display import brief
from steercap.core.messages import Owner
from steercap.core.receipt import SteeringReceipt
from steercap.requests.job import Job, enter_sketches, expected_of, memory_for, outputs_of, planned, receipts_of
from steercap.requests.monitoring import Crossing, MonitorReport


@dataclass(frozen=True)
class Chunk:
    """Text and rows of a stream that are new since the chunk before.

    Args:
        text: new text.
        token_ids: new generated token ids.
        captures: new rows by point, [rows, *shape of the point]; None if nothing is captured.
        positions: position of each new row, int64 [rows]; None if nothing is captured.
        finished: True for the last chunk.
        steering: in the last chunk, the receipt of the edits; None without steering.
        token_types: type of the token at each new row, str [rows], as in `CaptureHandle.token_types`, or None.
        crossings: tokens at which monitors fired since the last chunk.
        monitors: in the last chunk, the report of each monitor.
        finish_reason: in the last chunk, the reason why the text ended: vLLM's, or "steercap_probe" for a monitor.
    """

    text: str
    token_ids: tuple[int, ...]
    captures: Captures | None
    positions: torch.Tensor | None
    finished: bool
    steering: SteeringReceipt | None = None
    token_types: npt.NDArray[np.str_] | None = None
    crossings: tuple[Crossing, ...] = ()
    monitors: tuple[MonitorReport, ...] = ()
    finish_reason: str | None = None

    __repr__ = brief


@dataclass(frozen=True)
class Grown:
    """Cumulative state of a stream's sample.

    Args:
        text: text generated so far.
        token_ids: token ids generated so far, a copy, since vLLM's own list grows.
        finished: True if the sample has ended.
        receipt: receipt of the edits so far, None without steering.
        crossings: one for each token and monitor whose score crossed its threshold, in the order of tokens.
        monitors: report of each monitor, in the order of the call.
        finish_reason: reason why the sample has ended, None while it runs.
    """

    text: str
    token_ids: tuple[int, ...]
    finished: bool
    receipt: SteeringReceipt | None = None
    crossings: tuple[Crossing, ...] = ()
    monitors: tuple[MonitorReport, ...] = ()
    finish_reason: str | None = None


async def stream(job: Job) -> AsyncGenerator[Chunk, None]:
    """Run a job with one sample; yield text and rows while it runs, after checking its edits.

    The request does not wait for the reader of the chunks, and releases its slot when it ends.

    Raises:
        CaptureIncomplete: rows are missing or belong to another token.
        SteeringNotApplied: a worker did not make every edit.
    """
    reservation = await memory_for(job, object())
    outputs: asyncio.Queue[Grown | None] = asyncio.Queue()

    over = left = False

    def ended(task: asyncio.Task[None]) -> None:
        nonlocal reservation, over
        if reservation is not None:  # it waits for its reader now, as a handle does
            (reservation,) = job.engine.admission.finish(reservation, [reservation.pages])
        if not task.cancelled():
            task.exception()  # a reader that still reads is told
        outputs.put_nowait(None)
        over = True
        free()

    def free() -> None:
        """Free the request's memory once it has ended and the reader has left, which may be cancelled in leaving."""
        if over and left and job.plan is not None:
            job.engine.abandon(job.plan, reservation)

    running = asyncio.create_task(_follow(job, reservation, outputs), name="steercap stream")
    running.add_done_callback(ended)
    try:
        last, rows = Grown("", (), finished=False), 0
        while (grown := await outputs.get()) is not None:
            *parts, part = _parts(job, grown.token_ids, rows)
            for earlier in parts:
                captures, positions, types = await _new_rows(job, earlier)
                yield Chunk("", (), captures, positions, finished=False, token_types=types)
            captures, positions, types = await _new_rows(job, part)
            if grown.finished:
                await enter_sketches(job, [(0, grown.token_ids)])
            rows = 0 if part is None or positions is None else part.first + len(positions)
            yield Chunk(
                grown.text[len(last.text) :],
                grown.token_ids[len(last.token_ids) :],
                captures,
                positions,
                grown.finished,
                grown.receipt if grown.finished else None,
                types,
                grown.crossings[len(last.crossings) :],
                grown.monitors if grown.finished else (),
                grown.finish_reason,
            )
            last = grown
        await running
    finally:
        left = True
        free()
        if not over:
            running.cancel()
            await asyncio.wait([running])


async def _follow(job: Job, reservation: Reservation | None, outputs: asyncio.Queue[Grown | None]) -> None:
    """Run a job with one sample; put the latest cumulative state, with checked edits, into `outputs`."""
    async with planned(job) as complete, aclosing(outputs_of(job, complete, reservation, partial=True)) as found:
        async for output in found:
            (sample,) = job.samples_of(output)
            reason = getattr(sample, "finish_reason", None)
            grown = Grown(sample.text, tuple(sample.token_ids), finished=output.finished, finish_reason=reason)
            if job.watch is not None:
                grown = replace(grown, crossings=job.watch.crossings(), monitors=job.watch.reports())
            receipts = await receipts_of(job, complete.plan, [(0, len(grown.token_ids))], ended=grown.finished)
            while not outputs.empty():  # each state holds all that came before
                outputs.get_nowait()
            outputs.put_nowait(replace(grown, receipt=receipts[0] if receipts else None))


def _parts(job: Job, generated: Sequence[int], first: int) -> Sequence[Expected | None]:
    """Return the expected rows from row number `first` on, in parts that fit in memory; [None] without rows."""
    if job.plan is None or job.plan.capture is None or not job.hands_over:
        return [None]
    expected = replace(expected_of(job, job.plan, 0, generated), first=first)
    return parts_of(expected, job.plan.capture.window or max(1, job.plan.limit))


async def _new_rows(
    job: Job, part: Expected | None
) -> tuple[Captures | None, torch.Tensor | None, npt.NDArray[np.str_] | None]:
    """Fetch the rows that a stream has captured since its last chunk, `part`.

    Returns:
        Rows, positions and token types; three times None if `part` is None.
    """
    if job.plan is None or part is None:
        return None, None, None
    (came,) = await arrived(job.engine, [(Owner(job.plan.key, 0), part)])
    return came.captures, torch.from_numpy(came.positions), types_at(job.prompt.media, came.positions)
