"""Statistics of a model's resources in use, and their limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from steercap.core.messages import Counted

if TYPE_CHECKING:
    from steercap.engine.engine import Engine


@dataclass(frozen=True)
class Stats:
    """Resources in use by the model, and their limits, in bytes and counts.

    Args:
        capture_bytes: maximum memory for captured rows on each capturing worker.
        capture_bytes_claimed: part reserved by running requests and unfetched handles, on the fullest engine.
        capture_bytes_in_use: part of `capture_bytes` filled with rows, on the fullest worker.
        capture_bytes_resident: shared memory that the system has allocated for rows, on the fullest worker.
        spill_bytes: maximum bytes of rows on disk; 0 unless `overflow` is "spill".
        spill_bytes_in_use: part used by rows of unfetched handles, or reserved for rows that leave memory.
        spill_bytes_written: bytes written to disk since the start.
        handles_spilled: number of handles whose rows are on disk; a request whose rows leave memory counts as one.
        device_ring_bytes: device memory for rows that are being copied to the host, on the worker with most; 0 on CPU.
        device_ring_bytes_in_use: part of `device_ring_bytes` with rows that are not copied yet, on the fullest worker.
        reduce_bytes: memory for reductions that run with their requests, on the worker with most.
        pinned_bytes: pinned host memory, on the worker with most; 0 on CPU.
        wire_bytes: maximum bytes of rows in RPCs at once, of all workers together; 0 where memory is shared.
        wire_bytes_in_flight: bytes of rows in RPCs that are in progress.
        reductions: maximum number of reductions that run with their requests at once, in each engine.
        reductions_running: number of such reductions now, in the fullest engine.
        requests_waiting: number of requests that wait for capture memory, for a reduction, or for a steering slot.
        handles_held: number of requests whose rows a worker holds.
        rows_captured: number of rows captured since the start, summed over workers.
        steps: number of forward passes run, by all engines together.
        steering_slots: maximum number of steering configurations in use at once.
        steering_slots_in_use: number of steering configurations in use by requests.
        vector_bytes: memory of the vector bank on each worker.
        vector_bytes_in_use: part of `vector_bytes` with vectors of running requests.
        vector_bytes_sent: bytes of vectors sent to the workers since the start.
        sketches: number of sketches that the workers hold.
        sketch_bytes: maximum memory of sketches on each capturing worker.
        sketch_bytes_in_use: part of it in use, on the fullest worker.
        saes: number of SAEs that the workers hold.
        sae_bytes: maximum memory of SAEs on each capturing worker.
        sae_bytes_in_use: part of it in use, on the fullest worker.
        restarts: number of restarts of a dead engine; values "since the start" begin at 0 with each.
    """

    capture_bytes: int
    capture_bytes_claimed: int
    capture_bytes_in_use: int
    capture_bytes_resident: int
    spill_bytes: int
    spill_bytes_in_use: int
    spill_bytes_written: int
    handles_spilled: int
    device_ring_bytes: int
    device_ring_bytes_in_use: int
    reduce_bytes: int
    pinned_bytes: int
    wire_bytes: int
    wire_bytes_in_flight: int
    reductions: int
    reductions_running: int
    requests_waiting: int
    handles_held: int
    rows_captured: int
    steps: int
    steering_slots: int
    steering_slots_in_use: int
    vector_bytes: int
    vector_bytes_in_use: int
    vector_bytes_sent: int
    sketches: int
    sketch_bytes: int
    sketch_bytes_in_use: int
    saes: int
    sae_bytes: int
    sae_bytes_in_use: int
    restarts: int = 0


async def stats_of(engine: Engine, restarts: int = 0) -> Stats:
    """Query the workers, and return the resources in use now; `restarts` is passed through."""
    engines = await engine.workers.get_stats()
    counts = [count for workers in engines for count in workers]
    budget, page_bytes = engine.admission.budget, engine.admission.page_bytes
    slots, row_bytes = engine.configurations.slots, engine.bank_row_bytes
    file = None if engine.spilling is None else engine.spilling.file
    return Stats(
        capture_bytes=budget.pages * page_bytes,
        capture_bytes_claimed=budget.reserved * page_bytes,
        capture_bytes_in_use=max(count.pages_in_use * count.page_bytes for count in counts),
        capture_bytes_resident=max(_resident(count) for count in counts),
        spill_bytes=0 if file is None else file.most_bytes,
        spill_bytes_in_use=0 if file is None else file.bytes_in_use,
        spill_bytes_written=0 if file is None else file.bytes_written,
        handles_spilled=0 if file is None else file.stored,
        device_ring_bytes=max(count.tables.ring for count in counts),
        device_ring_bytes_in_use=max(count.tables.ring_in_use for count in counts),
        reduce_bytes=max(count.tables.accumulators for count in counts),
        pinned_bytes=max(count.tables.pinned + count.arena_pinned * _resident(count) for count in counts),
        wire_bytes=sum(reader.wire_bytes for reader in engine.line_readers),
        wire_bytes_in_flight=sum(reader.wire_bytes_in_flight for reader in engine.line_readers),
        reductions=budget.reductions,
        reductions_running=budget.reducing,
        requests_waiting=budget.waiting + engine.configurations.waiting,
        handles_held=sum(max(count.requests for count in workers) for workers in engines),
        rows_captured=sum(count.rows_written for count in counts),
        steps=sum(max(count.steps for count in workers) for workers in engines),
        steering_slots=slots.slots,
        steering_slots_in_use=slots.slots_in_use,
        vector_bytes=slots.rows * row_bytes,
        vector_bytes_in_use=slots.rows_in_use * row_bytes,
        vector_bytes_sent=engine.configurations.bytes_sent,
        sketches=max(count.sketches for count in counts),
        sketch_bytes=engine.settings.sketch_bytes,
        sketch_bytes_in_use=max(count.sketch_bytes for count in counts),
        saes=max(count.saes for count in counts),
        sae_bytes=engine.settings.sae_bytes,
        sae_bytes_in_use=max(count.sae_bytes for count in counts),
        restarts=restarts,
    )


def _resident(count: Counted) -> int:
    """Return the bytes of a worker's arena that the system has allocated: all of it if it is pinned."""
    return (count.pages if count.arena_pinned else count.pages_touched) * count.page_bytes
