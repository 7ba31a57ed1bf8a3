"""The work that the request table gives to each token, against each request's own plan, read token by token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from workers import batch, some_runtime

from steercap.core.messages import (
    Attach,
    Call,
    Collect,
    Configure,
    Configured,
    Owner,
    Placed,
    Vectors,
    decode_answer,
    encode,
)
from steercap.core.plan import CapturePlan, Plan
from steercap.core.program import NONE, Blob, Configuration, Entry, Response, SteeringPlan, blob_digest
from steercap.core.schema import RAW, Coding
from steercap.core.tokens import Range, selected
from steercap.kernels.bits import BEFORE, weight
from steercap.worker.runtime import Runtime
from steercap.worker.step import DEVICE, BatchRows, Step

WIDTH, POINTS, LIMIT = 128, 3, 70
VECTOR = np.ones(WIDTH, dtype=np.float32).tobytes()
#: Two edits, each with a scope of its own: the first at points 0 and 2, the second at point 1.
EDITS = ((0, 2), (1,))
CONFIGURATION = Configuration(
    tuple(Entry(scope, points, scope, 0, response=Response(offset=1.0)) for scope, points in enumerate(EDITS)),
    (Blob(blob_digest(VECTOR, 1), 1),),
    2,
    0,
)


@dataclass
class Running:
    """A request of the engine, how far it got, and how often a row of it was captured."""

    plan: Plan
    at: int = 0
    rows: int = 0


def configured() -> Runtime:
    runtime = some_runtime("host", POINTS, WIDTH, accumulators=64, lag=3, held=8)
    vectors = Vectors(blob_digest(VECTOR, 1), (5,), VECTOR)
    runtime.answer(encode(Call((), Attach(16 << 20))))
    configure = Configure((vectors,), (Placed(1, CONFIGURATION, ((5,),)),))
    assert decode_answer(runtime.answer(encode(Call((), configure)))) == Configured(())
    return runtime


def some_ranges(rng: np.random.Generator) -> tuple[Range, ...]:
    first, last = sorted(rng.integers(0, LIMIT, 2).tolist())
    return (Range(first, last + 1, int(rng.integers(1, 3))), Range(int(rng.integers(50, 90)), None))


def some_plan(rng: np.random.Generator, name: str) -> Plan:
    """Rows as they are, in a codec, before their edits, or reduced; edits of two scopes; both; or none at all."""
    points = ((0, 1, 2), (0, 2), (1,))[rng.integers(0, 3)]
    reduce = rng.random() < 0.2
    coding = RAW if reduce or rng.random() < 0.6 else Coding("full8")
    before = bool(not reduce and rng.random() < 0.3)
    capture = CapturePlan(
        points,
        some_ranges(rng),
        "mean" if reduce else None,
        coding,
        accumulates=reduce,
        before_edits=before,
    )
    scopes = some_ranges(rng)[:1], some_ranges(rng)
    steering = SteeringPlan(1, CONFIGURATION.digest, name.encode(), scopes, ())
    some = rng.random()
    return Plan(name, 4, LIMIT, capture=capture if some < 0.7 else None, steering=steering if some > 0.4 else None)


def demanded(runtime: Runtime, request: Running, position: int) -> dict[str, int] | None:
    """Read a token's work off its request's plan: None if there is none."""
    plan, table = request.plan, runtime._request_table
    tracked = table.find(Owner(plan.key, 0))
    rows, mask = tracked.capture_buffer, 0
    kept = rows is not None and position < LIMIT and bool(selected(plan.capture.ranges, LIMIT)[position])
    if plan.steering is not None and position < LIMIT:
        mask = sum(bool(selected(scope, LIMIT)[position]) << bit for bit, scope in enumerate(plan.steering.scopes))
    if not kept and not mask:
        return None
    work = dict.fromkeys(("lines", "accumulators", "layouts", "slots"), NONE) | {"strides": 0, "copies": 0, "before": 0}
    work |= {"requests": tracked.index, "positions": position, "masks": mask, "raw_lines": 0, "encoded": 0}
    work["edits"] = sum(weight(point) for bit, points in enumerate(EDITS) if mask >> bit & 1 for point in points)
    if mask:
        work["slots"] = 1
    if kept:
        layout = runtime.taps.layouts[rows.layout]
        work |= {"layouts": layout.number, "copies": sum(map(weight, plan.capture.points))}
        work |= {"raw_lines": layout.raw.lines, "before": int(plan.capture.before_edits)}
        work["accumulators"] = rows.accumulator
        if rows.accumulator == NONE:
            row = int(selected(plan.capture.ranges, LIMIT)[:position].sum())
            work |= {"lines": int(rows._places.lines(np.array([row]))[0]), "strides": layout.stored.lines}
            work["encoded"] = int(plan.capture.coding != RAW)
    return work


def compare(runtime: Runtime, step: Step | None, parts: list[tuple[Running | None, int]]) -> int:
    """Compare a step with the plans of the requests in its batch; return the number of its tokens."""
    found, place = [], 0
    for request, count in parts:
        for along in range(count):
            work = None if request is None else demanded(runtime, request, request.at + along)
            if work is not None:
                found.append(work | {"tokens": place, "firsts": request.at})
            place += 1
    assert (0 if step is None else len(step)) == len(found)
    for name in found[0] if found else ():
        column = step.table[DEVICE + BEFORE] if name == "before" else getattr(step, name)
        assert column.tolist() == [work[name] for work in found], name
    return len(found)


def some_count(rng: np.random.Generator, request: Running, drafted: float) -> int:
    """Chunks of a prompt, drafts, or one token."""
    if request.at < request.plan.prompt_len:
        return int(rng.integers(1, 9))
    return int(rng.integers(2, 5)) if rng.random() < drafted else 1


def rows_written(runtime: Runtime, request: Running) -> int | None:
    """The rows of a request that were written so far; None if none are captured, or they were given back."""
    tracked = runtime._request_table.find(Owner(request.plan.key, 0))
    if tracked is None or tracked.capture_buffer is None:
        return None
    runtime._request_table.flush(tracked)
    return tracked.capture_buffer.writes


@pytest.mark.parametrize("drafted", [0.08, 0.9], ids=["few", "most"])
@pytest.mark.parametrize("seed", range(6))
def test_each_token_has_the_work_of_its_own_plan_whatever_changes(seed, drafted) -> None:
    """Requests come, go, are preempted, drafted and rejected, given back, moved in the batch, and some have no plan."""
    rng = np.random.default_rng(seed)
    runtime = configured()
    table = runtime._request_table
    running: dict[str, Running] = {}
    made = compared = 0
    for number in range(250):
        while len(running) < 6 or rng.random() < 0.2:
            name, made = f"r{made}", made + 1
            running[name] = Running(some_plan(rng, name))
            runtime.register(name, running[name].plan.encode(), 0)
        batch_of = [
            (name, some_count(rng, request, drafted)) for name, request in running.items() if rng.random() < 0.97
        ]
        if number % 5 == 0:
            batch_of += [(f"x{number}", 3)]  # of no plan of steercap's
            rng.shuffle(batch_of)
        names, counts = [name for name, _ in batch_of], [int(count) for _, count in batch_of]
        if not names:
            continue
        starts = [running[name].at if name in running else 7 for name in names]
        step = table.make_step(batch("host", names, starts, counts, np.zeros(1), np.zeros(1)))
        tracked = [
            request if request is None or request.plan.key in table else None for request in map(running.get, names)
        ]
        compared += compare(runtime, step, list(zip(tracked, counts, strict=True)))
        if step is not None:
            runtime.taps.accumulators.update(step)
            table.complete(1)
        for name, start, count in zip(names, starts, counts, strict=True):
            if (request := running.get(name)) is None:
                continue
            if request.plan.capture is not None:
                request.rows += int(selected(request.plan.capture.ranges, LIMIT)[start : start + count].sum())
                if rng.random() < 0.3:
                    assert rows_written(runtime, request) in {None, request.rows}
            request.at += 1 + int(rng.integers(0, count)) if request.at >= request.plan.prompt_len else count
            chance = rng.random()
            if chance < 0.02:
                request.at = int(rng.integers(0, 3))  # preempted, some of it read from the prefix cache
            elif chance < 0.03:  # its rows are given back
                runtime.answer(encode(Call((Owner(name, 0),), Collect(()))))
            elif chance < 0.05 or request.at >= LIMIT + 3:
                runtime.end_requests([name])
                runtime.answer(encode(Call((Owner(name, 0),), Collect(()))))
                del running[name]
    assert compared > 800


def test_a_batch_of_one_and_of_strangers() -> None:
    runtime = configured()
    table = runtime._request_table

    def made(*names: str) -> Step | None:
        return table.make_step(
            BatchRows(names, np.zeros(len(names), int), np.ones(len(names), int), len(names), None, None)
        )

    assert made("x1") is None
    plan = Plan("r1", 4, LIMIT, capture=CapturePlan((0,), (Range(0, None),), None, RAW))
    runtime.register("r1", plan.encode(), 0)
    assert made() is None
    assert made("x1") is None
    assert made("x1", "x2") is None
    assert made("r1").tokens.tolist() == [0]
    assert made("x1", "r1", "x2").tokens.tolist() == [1]
