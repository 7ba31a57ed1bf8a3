"""Drafts with asynchronous scheduling: passes are scheduled before it is known which drafts of the last were accepted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.bench import POINTS, WIDTH, Bench
from workers import KINDS, batch, device_of, some_runtime, tap

from steercap.adapters import RUNTIME_ATTRIBUTE, runner_v1, runner_v2
from steercap.core.messages import (
    Attach,
    Attached,
    Collect,
    Configure,
    Configured,
    GetSteeringRecord,
    Owner,
    Placed,
    Vectors,
    Wanted,
)
from steercap.core.plan import CapturePlan, Plan
from steercap.core.program import Blob, Configuration, Entry, Response, SteeringPlan, blob_digest
from steercap.core.rows import page_shape
from steercap.core.schema import LINE_BYTES, RAW
from steercap.core.tokens import Range, selected
from steercap.worker.memory import open_reader

DRAFTS, ADDED = 3, 500.0
VECTOR = np.full(WIDTH, ADDED, dtype=np.float32).tobytes()
CONFIGURATION = Configuration(
    (Entry(0, (0, 2), 0, 0, response=Response(offset=1.0)),), (Blob(blob_digest(VECTOR, 1), 1),), 1, 0
)


@pytest.fixture(params=KINDS, autouse=True)
def kind(request):
    Bench.kind = request.param
    return request.param


@pytest.fixture(autouse=True)
def small_pages(monkeypatch) -> None:
    """Pages of 9 lines, so that three records fill one."""
    monkeypatch.setattr("steercap.worker.runtime.page_shape", lambda lines: page_shape(lines, 9 * LINE_BYTES))


class Filed(Bench):
    """A bench whose runtime has a file for rows that leave its arena."""

    def __init__(self, folder: Path) -> None:
        self.runtime = some_runtime(self.kind, POINTS, WIDTH, tokens=256)
        self.attached = self.ask(Attach(1 << 20, str(folder), 1 << 20))
        assert isinstance(self.attached, Attached)
        self.reader = open_reader(self.attached, "shared", self.no_wire)


@dataclass
class Running:
    """A request as the engine sees it.

    Args:
        plan: its plan.
        at: position of its next pass's first token on the device.
        scheduled: the same as the scheduler has it, which counts on drafts in flight.
        prompt: number of positions to prefill; after a preemption also those of generated tokens.
    """

    plan: Plan
    at: int = 0
    scheduled: int = 0
    prompt: int = 0

    @property
    def prefills(self) -> bool:
        return self.at < self.prompt

    @property
    def number(self) -> int:
        return int(self.plan.key[1:])


class Engine:
    """An engine that drafts, over a runtime whose taps are called by hand; each row says whose it is, and if a draft's."""

    def __init__(self, rng: np.random.Generator, folder: Path) -> None:
        self.rng = rng
        self.bench = Filed(folder)
        vectors = Vectors(CONFIGURATION.blobs[0].digest, (5,), VECTOR)
        assert self.bench.ask(Configure((vectors,), (Placed(0, CONFIGURATION, ((5,),)),))) == Configured(())
        self.running: dict[str, Running] = {}
        self.made = 0

    def begin(self, capture: CapturePlan | None, steering: SteeringPlan | None, prompt: int, limit: int) -> Running:
        self.made += 1
        plan = Plan(f"r{self.made}", prompt, limit, capture=capture, steering=steering)
        self.bench.runtime.register(plan.key, plan.encode(), 0)
        self.running[plan.key] = request = Running(plan, prompt=prompt)
        return request

    def step(self, names: list[str], wrong: str | None = None) -> None:
        """Run a pass of some requests; the positions on the device of `wrong` are not what drafts explain."""
        parts = []
        for name in names:
            one = self.running[name]
            left = one.prompt - one.at
            count = int(self.rng.integers(1, min(left, 9) + 1)) if one.prefills and not self.drafts(one) else 1 + DRAFTS
            parts.append((one, count))
        positions = np.concatenate(
            [
                np.arange(one.at, one.at + count) - (name == wrong) * 9
                for name, (one, count) in zip(names, parts, strict=True)
            ]
        )
        accepted = [1 + int(self.rng.integers(0, DRAFTS + 1)) if self.drafts(one) else count for one, count in parts]
        rejected = np.concatenate([np.arange(count) >= held for (_, count), held in zip(parts, accepted, strict=True)])
        owner = np.concatenate([np.full(count, one.number) for one, count in parts])
        starts = [one.scheduled for one, _ in parts]
        given = batch(
            self.bench.kind, names, starts, [count for _, count in parts], positions + 7 + 1000 * rejected, positions
        )
        ahead = np.array([DRAFTS * self.drafts(one) for one, _ in parts])
        self.bench.runtime.begin_step(given._replace(ahead=ahead))
        values = torch.from_numpy(owner * 1000.0 + positions + 0.25 * rejected)[:, None].expand(-1, WIDTH)
        for point in range(POINTS):
            rows = (values + point / 10).to(torch.float32).contiguous().to(device_of(self.bench.kind))
            tap(self.bench.runtime, rows, torch.zeros_like(rows), point)
        self.bench.runtime.end_step()
        for (one, count), held in zip(parts, accepted, strict=True):
            one.at, one.scheduled = one.at + held, one.at + count

    @staticmethod
    def drafts(request: Running) -> bool:
        """Say if a request's next pass has drafts: vLLM pads the last token of a prompt with them too, if it is left alone."""
        return request.at >= request.prompt - (request.number % 2)

    def end(self, request: Running) -> None:
        self.bench.runtime.end_requests([request.plan.key])
        del self.running[request.plan.key]

    async def check(self, request: Running, total: int) -> None:
        """Compare the rows, labels and edits of a request's first `total` tokens with what they must be."""
        plan, owner = request.plan, Owner(request.plan.key, 0)
        scope = (
            np.zeros(total, dtype=bool)
            if plan.steering is None
            else selected(plan.steering.scopes[0], plan.limit)[:total]
        )
        if plan.steering is not None:
            (record,) = self.bench.ask(GetSteeringRecord((Wanted(owner, total),), (False,))).records
            assert record.failure is None
            assert record.rows == (2 * int(scope.sum()),)
        if plan.capture is None or plan.capture.reduce:
            return
        kept = np.flatnonzero(selected(plan.capture.ranges, plan.limit)[:total])
        captured, rows = await self.bench.rows(plan.key, total)
        assert captured.failure is None
        assert np.frombuffer(captured.positions, dtype=np.int64).tolist() == kept.tolist()
        assert np.frombuffer(captured.token_ids, dtype=np.int64).tolist() == (kept + 7).tolist()
        for point in range(POINTS):
            added = ADDED * scope[kept] * (point in {0, 2})
            wanted = torch.from_numpy(request.number * 1000.0 + kept + point / 10 + added)
            torch.testing.assert_close(rows[point][:, 0], wanted.to(torch.float32))


def some_ranges(rng: np.random.Generator, limit: int) -> tuple[Range, ...]:
    first, last = sorted(rng.integers(0, limit, 2).tolist())
    return ((Range(0, None),), (Range(first, last + 1),), (Range(first, None),))[rng.integers(0, 3)]


def some_request(rng: np.random.Generator, engine: Engine) -> Running:
    prompt = int(rng.integers(1, 12))
    limit = prompt + int(rng.integers(1, 60))
    reduce, window = [(None, 0), ("sum", 0), (None, 12)][rng.choice(3, p=[0.7, 0.1, 0.2])]
    capture: Any = CapturePlan((0, 1, 2), some_ranges(rng, limit), reduce, RAW, window=window)
    steering: Any = SteeringPlan(0, CONFIGURATION.digest, b"id%d" % engine.made, (some_ranges(rng, limit),), ())
    some = rng.random()
    return engine.begin(capture if some < 0.7 else None, steering if some > 0.4 else None, prompt, limit)


@pytest.mark.parametrize(
    ("kind", "seed"), [("host", seed) for seed in range(6)] + [("cuda", seed) for seed in range(2)], indirect=["kind"]
)
async def test_rows_and_edits_are_those_of_the_positions_that_were_computed(seed, tmp_path) -> None:
    """Requests come, go, are preempted and moved in the batch; any number of each pass's drafts is rejected."""
    rng = np.random.default_rng(seed)
    engine = Engine(rng, tmp_path)
    checked = 0
    for _ in range(120 if Bench.kind == "host" else 50):
        while len(engine.running) < 4 or rng.random() < 0.1:
            some_request(rng, engine)
        names = [name for name in engine.running if rng.random() < 0.95]
        rng.shuffle(names)
        if not names:
            continue
        engine.step(names)
        for name in names:
            request = engine.running[name]
            if request.at >= request.plan.limit + int(rng.integers(0, 2 * DRAFTS)):
                engine.end(request)
                await engine.check(request, request.plan.limit)
                engine.bench.ask(Collect(()), (Owner(name, 0),))
                checked += 1
            elif rng.random() < 0.02:
                request.prompt, request.at = (
                    max(request.at, request.prompt),
                    int(rng.integers(0, min(request.at, 2) + 1)),
                )
                request.scheduled = request.at
            elif rng.random() < 0.1:
                await engine.check(request, min(request.at, request.plan.limit))
    assert checked > 5


@pytest.mark.parametrize(("drafts", "ahead"), [(None, [0, 0, 3]), ([0, 3, 3], [0, 3, 3])])
def test_a_prompt_is_where_it_is_scheduled_unless_drafts_follow_it(drafts, ahead) -> None:
    given = {"is_prefilling_np": np.array([True, True, False]), "req_ids": ["a", "b", "c"]}
    found = runner_v2._ahead(
        SimpleNamespace(**given, num_draft_tokens_per_req=None if drafts is None else np.array(drafts)), 3
    )
    assert found.tolist() == ahead


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("version", [1, 2])
async def test_requests_of_one_prompt_that_change_places_are_seen(version, swapped, tmp_path) -> None:
    """Their positions and token ids are alike: the runner's table of states tells which of them is computed where."""
    bench = Filed(tmp_path)
    for name in ("r1", "r2"):
        bench.plan(name)
    rows, names = {"r1": 1, "r2": 0} if swapped else {"r1": 0, "r2": 1}, ["r1", "r2"]
    ids = torch.arange(3).repeat(2).to(device_of(bench.kind))
    counts = np.full(2, 3)
    runner: Any = SimpleNamespace(**{RUNTIME_ATTRIBUTE: bench.runtime})
    if version == 1:
        runner.input_batch = SimpleNamespace(
            num_reqs=2, req_ids=names, req_id_to_index=rows, num_computed_tokens_cpu=np.zeros(2, dtype=np.int32)
        )
        runner.input_ids, runner.positions = SimpleNamespace(gpu=ids), ids
        runner_v1._preprocess(lambda: None, runner, SimpleNamespace(num_scheduled_tokens={"r1": 3, "r2": 3}))
    else:
        runner.req_states = SimpleNamespace(req_id_to_index=rows)
        given = {"idx_mapping_np": np.arange(2), "num_computed_tokens_np": np.zeros(2, dtype=np.int64), "num_tokens": 6}
        given |= {"num_scheduled_tokens": counts, "input_ids": ids, "positions": ids, "req_ids": names}
        runner_v2._prepare_inputs(lambda: SimpleNamespace(**given), runner)
    for point in range(POINTS):
        hidden = torch.zeros(6, WIDTH, device=device_of(bench.kind))
        tap(bench.runtime, hidden, torch.zeros_like(hidden), point)
    bench.runtime.end_step()
    for name in names:
        (captured,) = bench.ask(Collect((Wanted(Owner(name, 0), 3),))).shares
        assert (captured.failure is not None) == swapped
        assert not swapped or "rows [0, 1] of its table, and they are in rows [1, 0]" in captured.failure


async def test_an_edit_that_overflows_past_the_end_fails_nothing(tmp_path) -> None:
    """A draft at the limit, which is no input of the sequence, is edited with the others."""
    engine = Engine(np.random.default_rng(1), tmp_path)
    steering = SteeringPlan(0, CONFIGURATION.digest, b"id", ((Range(0, None),),), ())
    request = engine.begin(None, steering, 4, 10)
    for scheduled, start, ahead in ((0, 0, 0), (4, 4, DRAFTS), (8, 7, DRAFTS)):
        positions = np.arange(start, start + 4)
        given = batch(engine.bench.kind, ["r1"], [scheduled], [4], positions + 7, positions)
        engine.bench.runtime.begin_step(given._replace(ahead=np.array([ahead])))
        values = torch.from_numpy(np.where(positions < 10, 1.0, np.inf))[:, None].expand(-1, WIDTH)
        rows = values.to(torch.float32).contiguous().to(device_of(engine.bench.kind))
        for point in range(POINTS):
            tap(engine.bench.runtime, rows.clone(), torch.zeros_like(rows), point)
        engine.bench.runtime.end_step()
    await engine.check(request, 10)


async def test_positions_that_no_draft_explains_fail_their_request(tmp_path) -> None:
    """Of two requests in a pass, the device has one at a position that is further off than drafts could be."""
    engine = Engine(np.random.default_rng(1), tmp_path)
    capture = CapturePlan((0, 1, 2), (Range(0, None),), None, RAW)
    one, two = (engine.begin(capture, None, 4, 60) for _ in range(2))
    while one.prefills or two.prefills:
        engine.step([name for name, request in engine.running.items() if request.prefills])
    for _ in range(8):
        engine.step(["r1", "r2"])
    engine.step(["r1", "r2"], wrong="r2")
    await engine.check(one, one.at)
    (captured,) = engine.bench.ask(Collect((Wanted(Owner("r2", 0), two.at),))).shares
    assert "the runner computes position" in captured.failure
