"""The worker's side without a model: a runtime driven step by step, its taps called by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from support.bench import POINTS, WIDTH, Bench, expected
from workers import CUDA, DEVICE, KINDS, batch, device_of, some_runtime, tap

from steercap.core.messages import (
    Attach,
    Call,
    Collect,
    Configure,
    Configured,
    Counted,
    Engage,
    Engaged,
    Failed,
    GetStats,
    GetSteeringRecord,
    Lines,
    NotCapturing,
    Owner,
    Placed,
    Read,
    Unknown,
    Vectors,
    Wanted,
    decode_answer,
    encode,
)
from steercap.core.plan import CapturePlan, Plan
from steercap.core.program import NONE, Blob, Configuration, Entry, Response, SteeringPlan, blob_digest
from steercap.core.rows import page_shape
from steercap.core.schema import LINE_BYTES, RAW, REDUCED
from steercap.core.tokens import Range
from steercap.worker.step import BatchRows, Step, StepColumn
from steercap.worker.taps import cuda
from steercap.worker.taps.cuda_rows import pieces, runs
from steercap.worker.taps.transfers import Ring

#: For passes over thousands of tokens, which Triton's interpreter would take minutes for.
LARGE = pytest.mark.parametrize("kind", KINDS if CUDA else ("host",), indirect=True)


@pytest.fixture(params=KINDS, autouse=True)
def kind(request):
    """Every test here holds for the taps of the host and for those of a device."""
    Bench.kind = request.param
    return request.param


async def test_mixed_batches_keep_each_row_at_its_place() -> None:
    """Requests with other points and ranges share passes, with padding; recomputed positions overwrite."""
    bench = Bench()
    bench.plan("r1")
    bench.plan("r2", points=(1,), ranges=(Range(2, None, 2),))
    bench.plan("r3", points=(0, 2), ranges=(Range(0, 3), Range(9, 10)))
    bench.step(("r1", 0, 5), ("r0", 0, 3), ("r2", 0, 6), padding=4)
    bench.step(("r3", 0, 10), ("r1", 5, 1), ("r2", 6, 1))
    bench.step(("r2", 0, 8), ("r1", 6, 1))  # r2 was preempted
    for key, total, points, positions in (
        ("r1", 7, (0, 1, 2), range(7)),
        ("r2", 8, (1,), (2, 4, 6)),
        ("r3", 10, (0, 2), (0, 1, 2, 9)),
    ):
        captured_rows, rows = await bench.rows(key, total)
        assert np.frombuffer(captured_rows.positions, dtype=np.int64).tolist() == list(positions)
        assert captured_rows.points == points
        assert captured_rows.failure is None
        for index, point in enumerate(points):
            torch.testing.assert_close(rows[index, : len(positions)], expected(int(key[1:]), positions, point))


async def test_a_batch_is_kept_in_its_order() -> None:
    """Every token of a pass is kept: a request that begins stands before one that goes on."""
    bench = Bench(4 << 20)
    for number in range(1, 6):
        bench.plan(f"r{number}", limit=100)
    bench.step(("r1", 0, 3))
    for position in range(4):
        bench.step((f"r{position + 2}", 0, 3), ("r1", 3 + position, 1))
    for number, total in ((1, 7), (2, 3), (5, 3)):
        _, rows = await bench.rows(f"r{number}", total)
        for point in range(POINTS):
            torch.testing.assert_close(rows[point], expected(number, range(total), point))


@LARGE
async def test_rows_the_client_has_are_not_sent_again() -> None:
    """`first` leaves out rows, across pages; what is left is the same."""
    bench = Bench(4 << 20, tokens=9_000)
    bench.plan("r1", limit=9_000)
    bench.step(("r1", 0, 9_000))
    _, full = await bench.rows("r1", 9_000)
    for first in (0, 1, 2_500, 8_999, 9_000):
        captured_rows, rows = await bench.rows("r1", 9_000, first)
        assert np.frombuffer(captured_rows.positions, dtype=np.int64).tolist() == list(range(first, 9_000))
        assert torch.equal(rows, full[:, first:])


@pytest.fixture
def small_pages(monkeypatch) -> None:
    """Pages of 9 lines for rows that are a line wide: of 3 points, 3 records; of 2 points, 4 and a half."""
    monkeypatch.setattr("steercap.worker.runtime.page_shape", lambda lines: page_shape(lines, 9 * LINE_BYTES))


def crowd(bench: Bench, *others: int) -> None:
    """Take ten pages one by one, and give all but these back."""
    for number in range(10, 20):
        bench.plan(f"r{number}", limit=3)
        bench.step((f"r{number}", 0, 3))
        bench.runtime.end_requests([f"r{number}"])
    bench.ask(Collect(()), tuple(Owner(f"r{number}", 0) for number in range(10, 20) if number not in others))


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize(("others", "blocks"), [((), 1), ((11, 13, 16), 4), (tuple(range(11, 20, 2)), 6)])
@pytest.mark.slow
async def test_records_cross_from_page_to_page_where_these_are_consecutive(others, blocks) -> None:
    """Streamed, preempted, ended, and its spare pages taken by another request; in an arena that others crowd, or not."""
    bench = Bench(width=16)
    crowd(bench, *others)
    held = bench.ask(GetStats()).pages_in_use
    bench.plan("r1", points=(0, 2), ranges=(Range(0, 5), Range(6, None)), limit=81)
    bench.step(("r1", 0, 7))
    assert bench.ask(GetStats()).pages_in_use == held + 20  # four records each, wherever they lie
    bench.plan("r2", limit=35)
    for position in range(7, 42):
        bench.step(("r1", position, 1), ("r2", position - 7, 1))
        if position == 20:
            bench.step(("r1", 0, 20))  # it was preempted
        _, new = await bench.rows("r1", position + 1, position - 1)
        torch.testing.assert_close(new[1], expected(1, [position], 2)[:, :1].expand(-1, 16))
    ended = bench.ask(GetStats()).pages_in_use
    bench.runtime.end_requests(["r1"])
    left = bench.ask(GetStats()).pages_in_use - (ended - 20)
    assert left == 10 if blocks == 1 else 10 <= left <= 11  # 41 records of 2 lines, the last of them on two pages
    bench.plan("r3", limit=60)
    bench.step(("r3", 0, 60))
    kept: dict[str, set[int]] = {}
    for key, total, points in (("r1", 42, (0, 2)), ("r2", 35, (0, 1, 2)), ("r3", 60, (0, 1, 2))):
        positions = [position for position in range(total) if key != "r1" or position != 5]
        for first in (0, 1, 4, 17, 29):
            captured_rows, rows = await bench.rows(key, total, first)
            for index, point in enumerate(points):
                wanted = expected(int(key[1:]), positions[first:], point)[:, :1].expand(-1, 16)
                torch.testing.assert_close(rows[index], wanted)
            kept.setdefault(
                key, {line for one in captured_rows.lines for line in range(one.start, one.start + one.count)}
            )
            assert len(captured_rows.lines) <= blocks if key == "r1" else captured_rows.lines
    assert len(kept["r1"] | kept["r2"] | kept["r3"]) == 41 * 2 + 35 * 3 + 60 * 3


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("others", [(), (11, 13, 16)])
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.slow
async def test_a_reduction_reads_across_pages(others, accumulates) -> None:
    """All records of a request, in one block or several; one page is left."""
    bench = Bench(dtype=torch.bfloat16, width=32)
    crowd(bench, *others)
    held = bench.ask(GetStats()).pages_in_use
    bench.plan("r0", points=(0, 2), reduce="mean", limit=60, accumulates=accumulates)
    bench.step(("r0", 0, 25))
    for position in range(25, 40):
        bench.step(("r0", position, 1))
    for _ in range(2):
        _, rows = await bench.rows("r0", 40)
        torch.testing.assert_close(rows[0], torch.full((1, 32), 19.5))
    assert bench.ask(GetStats()).pages_in_use == held + 1


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("accumulates", [False, True])
async def test_what_runs_on_behind_its_reduction_is_not_kept(accumulates) -> None:
    """The pages are given back with the reduction, and another request's rows are in them when a pass comes late."""
    bench = Bench(width=16)
    bench.plan("r1", reduce="sum", limit=60, accumulates=accumulates)
    bench.step(("r1", 0, 9))
    _, first = await bench.rows("r1", 9)
    bench.plan("r2", limit=60)
    bench.step(("r1", 9, 1), ("r2", 0, 50))
    bench.step(("r1", 10, 30))
    bench.step(("r1", 0, 3))
    _, rows = await bench.rows("r2", 50)
    torch.testing.assert_close(rows[2], expected(2, range(50), 2)[:, :1].expand(-1, 16))
    _, again = await bench.rows("r1", 9)
    assert torch.equal(first, again)


async def test_rows_that_were_never_computed_are_missed() -> None:
    """A sequence longer than what ran is a failure that counts what is missing."""
    bench = Bench()
    bench.plan("r1")
    bench.step(("r1", 0, 9))
    (captured_rows,) = bench.ask(Collect((Wanted(Owner("r1", 0), 12),))).shares
    assert captured_rows.failure == "3 of 12 rows were never computed, the first of them row 9"
    assert captured_rows.lines == ()


async def test_rows_past_the_end_are_not_handed_over() -> None:
    """A request that ran on after its end gives the rows of the tokens it kept."""
    bench = Bench()
    bench.plan("r1")
    bench.step(("r1", 0, 9))
    captured_rows, rows = await bench.rows("r1", 6)
    assert captured_rows.stored_rows == rows.shape[1] == 6


@LARGE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduce", ["mean", "sum", "max", "last"])
@pytest.mark.parametrize("accumulates", [False, True])
async def test_reductions_run_over_pages_in_float32(dtype, reduce, accumulates) -> None:
    """Many pages in, one float32 row a point out; a second look gives the same; the pages go but one.

    A reduction that runs along takes no more than its own.
    """
    bench = Bench(8 << 20, dtype, tokens=6_000)
    bench.plan("r1", reduce=reduce, limit=30_000, accumulates=accumulates, prompt=24_000)
    for start in range(0, 24_000, 6_000):
        bench.step(("r1", start, 6_000))
    pages = bench.ask(GetStats()).pages_in_use
    assert pages == 1 if accumulates else pages > 1
    for _ in range(2):
        captured_rows, rows = await bench.rows("r1", 24_000)
        assert captured_rows.coding == REDUCED
        assert rows.dtype == torch.float32
        assert rows.shape == (POINTS, 1, WIDTH)
        values = (1000 + torch.arange(24_000)).to(torch.float64) / 2
        kept = values.to(dtype).double()
        full = (kept.to(dtype) + kept.to(dtype)).double()
        by_hand = {"mean": full.mean(), "sum": full.sum(), "max": full.max(), "last": full[-1]}[reduce]
        torch.testing.assert_close(rows[0, 0, 0].double(), by_hand, rtol=1e-5, atol=0)
    assert bench.ask(GetStats()).pages_in_use == 1


async def test_a_tap_that_does_not_fire_spoils_the_step_loudly(kind) -> None:
    """Rows of a pass in which a tap was silent are never handed over as good."""
    bench = Bench()
    bench.plan("r1")
    bench.plan("r2")
    bench.step(("r1", 0, 4))
    bench.step(("r2", 0, 4), skip_point=1)
    good, _ = await bench.rows("r1", 4)
    bad = bench.ask(Collect((Wanted(Owner("r2", 0), 4),))).shares[0]
    assert good.failure is None
    assert (
        bad.failure
        == {
            "host": "taps of points [1] fired [0] times, not once",
            "cuda": "4 of 4 tokens of a pass were not copied exactly once at each point",
        }[kind]
    )


async def test_a_pass_that_fails_or_is_short_spoils_its_rows(kind) -> None:
    """An exception in the model, or hidden states for fewer tokens than were laid out, is a failure of the rows."""
    bench = Bench()
    bench.plan("r1")
    bench.plan("r2")
    layout = [0], [4], np.arange(4), np.arange(4)
    bench.runtime.begin_step(batch(kind, ["r1"], *layout))
    bench.runtime.end_step(ValueError("out of cheese"))
    bench.runtime.begin_step(batch(kind, ["r2"], *layout))
    for point in range(POINTS):
        tap(bench.runtime, torch.zeros(3, WIDTH, device=device_of(kind)), None, point)
    bench.runtime.end_step()
    first, second = bench.ask(Collect((Wanted(Owner("r1", 0), 4), Wanted(Owner("r2", 0), 4)))).shares
    assert "out of cheese" in first.failure
    assert (
        second.failure
        == {
            "host": "tap 2 saw a tensor of shape (3, 8); expected 4 tokens × 8",
            "cuda": "a tap saw a tensor of shape (3, 8); expected 4 tokens × 8",
        }[kind]
    )


@pytest.mark.parametrize("parts", [[slice(1, None)], [slice(1, None), slice(0, 1)]])
async def test_a_module_that_sees_a_part_of_a_batch_spoils_its_rows(kind, parts) -> None:
    """Here the prompt's tokens behind another request's: each would be labelled as the one before it."""
    bench = Bench()
    bench.plan("r1", ranges=[Range(0, 4)])
    layout = [30, 0], [1, 10], np.arange(11), np.array([30, *range(10)])
    bench.runtime.begin_step(batch(kind, ["other", "r1"], *layout))
    rows = torch.arange(11.0)[:, None].expand(-1, WIDTH).contiguous().to(device_of(kind))
    for point in range(POINTS):
        for part in parts if point == 1 else [slice(None)]:
            tap(bench.runtime, rows[part].clone(), None, point)
    bench.runtime.end_step()
    (share,) = bench.ask(Collect((Wanted(Owner("r1", 0), 10),))).shares
    assert "expected 11 tokens × 8" in share.failure


async def test_positions_that_are_not_those_scheduled_spoil_the_rows(kind) -> None:
    """The positions the model reads and those that were scheduled are compared in every pass."""
    bench = Bench()
    bench.plan("r1")
    bench.runtime.begin_step(batch(kind, ["r1"], [0], [4], np.arange(4), np.arange(4) + 1))
    for point in range(POINTS):
        tap(bench.runtime, torch.zeros(4, WIDTH, device=device_of(kind)), None, point)
    bench.runtime.end_step()
    (captured_rows,) = bench.ask(Collect((Wanted(Owner("r1", 0), 4),))).shares
    assert "computes position 1 where 0 was scheduled" in captured_rows.failure


@LARGE
async def test_a_full_arena_is_said_not_hidden() -> None:
    """When there is no page left the request's rows are a failure, its neighbour's are not."""
    bench = Bench(300_000, tokens=9_010)
    bench.plan("r1")
    bench.plan("r2", limit=20_000)
    bench.step(("r1", 0, 4), ("r2", 0, 9_000))
    good, bad = bench.ask(Collect((Wanted(Owner("r1", 0), 4), Wanted(Owner("r2", 0), 9_000)))).shares
    assert good.failure is None
    assert bad.failure == "the arena is full"


async def test_rows_given_back_are_gone_and_their_memory_free() -> None:
    """Release frees the pages; the owner is then unknown; a late pass of the request writes nothing."""
    bench = Bench()
    bench.plan("r1")
    bench.step(("r1", 0, 50))
    counted = bench.ask(GetStats(), released=(Owner("r1", 0), Owner("never", 0)))
    assert isinstance(counted, Counted)
    assert (counted.requests, counted.pages_in_use, counted.rows_written) == (0, 0, 50)
    bench.step(("r1", 50, 1))
    assert bench.ask(Collect((Wanted(Owner("r1", 0), 50),))).shares == (Unknown(Owner("r1", 0)),)


async def test_errors_are_answers(kind, caplog, monkeypatch) -> None:
    """Bytes that are no frame, and questions before the arena is there, come back as Failed, never as an exception."""
    runtime = some_runtime(kind)
    assert isinstance(decode_answer(runtime.answer(b"\xc1 no frame")), Failed)
    assert isinstance(decode_answer(runtime.answer(encode(Call((), GetStats())))), Failed)
    monkeypatch.delattr(type(runtime), "_attach")
    assert isinstance(decode_answer(runtime.answer(encode(Call((), Attach(1 << 20))))), Failed)
    told = [record for record in caplog.records if record.name == "steercap.worker.runtime"]
    assert [record.exc_info[0].__name__ for record in told] == ["AttributeError"], "what nobody foresaw, with its place"


async def test_lines_can_be_sent_as_bytes() -> None:
    """`Read` gives the bytes of just those lines."""
    bench = Bench()
    bench.plan("r1", points=(0,))
    bench.step(("r1", 0, 3))
    captured_rows, rows = await bench.rows("r1", 3)
    answer = bench.ask(Read(bench.attached.nonce, captured_rows.lines))
    assert isinstance(answer, Lines)
    sent = np.frombuffer(answer.data, dtype=np.uint8).reshape(3, LINE_BYTES)
    assert sent[:, : WIDTH * 4].tobytes() == rows[0].numpy().tobytes()


DEVICE_ALONE = pytest.mark.parametrize("kind", ["cuda"], indirect=True)


@DEVICE_ALONE
async def test_rows_in_flight_are_not_overwritten() -> None:
    """A ring that holds one pass: the next one waits until its rows are copied away, however late that is."""
    bench = Bench(device_ring_bytes=13 * LINE_BYTES)
    for key in ("r1", "r2"):
        bench.plan(key)
    for start in range(0, 40, 2):
        bench.step(("r1", start, 2), ("r2", start, 2))
    for number in (1, 2):
        captured_rows, rows = await bench.rows(f"r{number}", 40)
        assert captured_rows.failure is None
        for point in range(POINTS):
            torch.testing.assert_close(rows[point], expected(number, range(40), point))


@DEVICE_ALONE
async def test_a_pass_larger_than_the_ring_is_said_not_hidden() -> None:
    """Its rows are a failure that names the remedy; those of the next pass are not."""
    bench = Bench(device_ring_bytes=13 * LINE_BYTES)
    bench.plan("r1")
    bench.plan("r2")
    bench.step(("r1", 0, 5))
    bench.step(("r2", 0, 4))
    large, small = bench.ask(Collect((Wanted(Owner("r1", 0), 5), Wanted(Owner("r2", 0), 4)))).shares
    assert (
        "one pass keeps 960 bytes of rows, and the device holds 832; raise SteerModel(..., device_ring_bytes=)"
        in large.failure
    )
    assert small.failure is None


@LARGE
async def test_what_runs_on_costs_no_look_at_each_request() -> None:
    """A token more of each of 300 requests, most of them: the table works out only those that turn a page."""
    bench = Bench(96 << 20)
    keys = [f"r{number}" for number in range(300)]
    for key in keys:
        bench.plan(key, limit=60)
    bench.step(*((key, 0, 3) for key in keys))
    request_table, worked_out = bench.runtime._request_table, []
    work_out = request_table._work_out
    request_table._work_out = lambda *args: worked_out.append(args) or work_out(*args)
    for position in range(3, 9):
        bench.step(*((key, position, 1) for key in keys))
    assert not worked_out
    for number in (1, 299):
        _, rows = await bench.rows(f"r{number}", 9)
        torch.testing.assert_close(rows[2], expected(number, range(9), 2))


def register_some(benches, name: str, rng, configuration: Configuration) -> None:
    """A request that keeps rows, or is steered, or both, of some positions."""
    first, last = sorted(rng.integers(0, 60, 2).tolist())
    capture = CapturePlan((0, 2), (Range(first, last + 1), Range(70, None)), None, RAW)
    some = rng.integers(0, 4)
    steering = steering_plan(configuration) if some > 1 else None
    plan = Plan(name, 3, 100, capture=capture if some < 3 else None, steering=steering)
    for bench in benches:
        bench.runtime.register(name, plan.encode(), 0)


def give_back(benches, name: str) -> None:
    for bench in benches:
        bench.ask(Collect(()), (Owner(name, 0),))


@pytest.mark.slow
async def test_a_series_of_passes_says_what_each_pass_alone_would() -> None:
    """At random: requests come, go, stand still, run ahead, are preempted and given back; with and without a series."""
    configuration, vectors = adding(1.0)
    rng = np.random.default_rng(5)
    both: list[Bench] = [Bench(8 << 20), Bench(8 << 20)]
    steps: list[list[Step]] = [[], []]
    for bench, seen in zip(both, steps, strict=True):
        configure(bench, configuration, vectors)
        opened = bench.runtime.taps.open
        bench.runtime.taps.open = lambda step, *more, opened=opened, seen=seen: seen.append(step) or opened(step, *more)
    reached: dict[str, int] = {}
    made = continued = 0
    for _ in range(150):
        if len(reached) < 4 or rng.random() < 0.04:
            name = f"r{made}"
            made += 1
            register_some(both, name, rng, configuration)
            reached[name] = 0
        elif rng.random() < 0.06:
            name = str(rng.choice(list(reached)))
            if rng.random() < 0.5:
                reached[name] = 0  # preempted
            else:
                give_back(both, name)
        parts = [(name, at, 1 + int(not at or rng.random() < 0.03)) for name, at in reached.items()]
        if rng.random() < 0.05:
            parts = parts[1:]
        series = both[0].runtime._request_table._steady
        both[0].step(*parts)
        continued += both[0].runtime._request_table._steady is series is not None
        both[1].runtime._request_table._steady = None
        both[1].step(*parts)
        for name, at, count in parts:
            reached[name] = at + count
            if at + count > 95:
                del reached[name]
                for bench in both:
                    bench.runtime.end_requests([name])
    assert len(steps[0]) == len(steps[1])
    columns = [name for name, one in vars(Step).items() if isinstance(one, StepColumn)]
    assert len(columns) == 14
    for step, alone in zip(*steps, strict=True):
        for name in ("replaced", *columns):
            np.testing.assert_equal(getattr(step, name), getattr(alone, name), err_msg=name)
    assert continued > 30
    together, apart = (Step.compared(seen) for seen in steps)
    np.testing.assert_array_equal(together.table, apart.table)
    np.testing.assert_array_equal(
        Step.records(steps[0]), np.concatenate([[one.lines, one.strides] for one in steps[1]], 1)
    )


@DEVICE_ALONE
@pytest.mark.parametrize(("ring_lines", "most"), [(40, 60), (256, 20), (1 << 14, 4)])
async def test_a_series_sends_one_table(ring_lines, most, monkeypatch) -> None:
    """Two requests, one of them steered too, for 60 passes; a ring that is always full, or goes round, or does not."""
    bench = Bench(device_ring_bytes=ring_lines * LINE_BYTES)
    configuration, vectors = adding(500.0)
    configure(bench, configuration, vectors)
    bench.plan("r1")
    steer(bench, "r2", steering_plan(configuration))
    sent: list[int] = []
    put = bench.runtime.taps._transfers.put
    monkeypatch.setattr(bench.runtime.taps._transfers, "put", lambda *given: sent.append(given[2]) or put(*given))
    for position in range(60):
        bench.step(("r1", position, 1), ("r0", position, 1), ("r2", position, 1), padding=3)
    assert len(sent) <= most
    for number, added in ((1, 0), (2, 500)):
        captured_rows, rows = await bench.rows(f"r{number}", 60)
        assert captured_rows.failure is None
        torch.testing.assert_close(rows[0], expected(number, range(60), 0) + added)
        torch.testing.assert_close(rows[1], expected(number, range(60), 1))
    assert settled(bench, "r2", 60).rows == (120,)


@DEVICE_ALONE
@pytest.mark.parametrize("between", ["a pass of others", "a pass of fewer", "a dummy pass", "a pass that fails"])
async def test_tables_left_for_a_next_pass_reach_no_other_one(between) -> None:
    """Another pass than the one expected finds no entry of a series, which then goes on."""
    bench = Bench()
    configuration, vectors = adding(500.0)
    configure(bench, configuration, vectors)
    for name in ("r1", "r2"):
        steer(bench, name, steering_plan(configuration))
    taps = bench.runtime.taps
    for position in range(20):
        bench.step(("r1", position, 1), ("r2", position, 1), padding=2)
    assert (taps._tokens[:2] != NONE).any()
    names = {"a pass of others": ["r3", "r4", "r5"], "a pass of fewer": ["r1"], "a pass that fails": ["r1", "r2"]}
    if between == "a dummy pass":
        taps.rest()
    else:
        at = [20] * len(names[between])
        bench.runtime.begin_step(batch("cuda", names[between], at, [1] * len(at), at, at))
    rows = torch.ones(4, WIDTH, device=DEVICE)
    tap(bench.runtime, rows, torch.zeros_like(rows), 0)
    asked = {"a pass of fewer": [0], "a pass that fails": [0, 1]}.get(between, [])
    assert [bool((row != 1).any()) for row in rows] == [token in asked for token in range(4)]
    if between != "a dummy pass":
        for point in (1, 2):
            tap(bench.runtime, torch.ones(4, WIDTH, device=DEVICE), torch.zeros(4, WIDTH, device=DEVICE), point)
        bench.runtime.end_step(ValueError("it fails") if between == "a pass that fails" else None)
    assert (taps._tokens == NONE).all()
    assert not taps._checksums.any()
    first = {"a pass of fewer": 21, "a pass that fails": 21}.get(between, 20)
    for position in range(20, 40):
        bench.step(("r1", max(position, first), 1), ("r2", position, 1)) if position >= first else bench.step(
            ("r2", 20, 1)
        )
    for name in ("r1", "r2"):
        failure = settled(bench, name, 40).failure
        assert ("the forward pass failed" in str(failure)) == (between == "a pass that fails")


@DEVICE_ALONE
async def test_rows_are_copied_behind_the_sampled_tokens_of_their_pass() -> None:
    """Eight passes together, not before another was launched, or somebody asks: the runner's own copies go first."""
    bench = Bench()
    bench.plan("r1")
    passes = bench.runtime.taps._passed
    bench.step(("r1", 0, 3))
    for number in range(1, 20):
        copied = [one.copied is not None for one in passes]
        assert copied == [at < (number - 1) // 8 * 8 for at in range(number)]
        bench.step(("r1", 2 + number, 1))
    _, rows = await bench.rows("r1", 21)
    torch.testing.assert_close(rows[1], expected(1, range(21), 1))
    assert [one.copied is not None for one in passes] == [False]


@DEVICE_ALONE
async def test_a_small_ring_does_not_wait_for_eight_passes() -> None:
    """Rows of few passes fill it: they are copied before the passes after them need their places."""
    bench = Bench(4 << 20, device_ring_bytes=64 * LINE_BYTES)
    for number in range(1, 9):
        bench.plan(f"r{number}")
    for position in range(60):
        bench.step(*((f"r{number}", position, 1) for number in range(1, 9)))
    for number in (1, 8):
        _, rows = await bench.rows(f"r{number}", 60)
        torch.testing.assert_close(rows[2], expected(number, range(60), 2))


async def test_a_page_has_the_rows_of_the_request_that_has_it() -> None:
    """Copies that are queued together have no order, so those of a request that is gone are queued before."""
    bench = Bench()
    for name in ("r1", "r2"):
        bench.plan(name)
        bench.step((name, 0, 8))
        if name == "r1":
            bench.runtime.end_requests([name])
            bench.ask(GetStats(), (Owner(name, 0),))
    _, rows = await bench.rows("r2", 8)
    torch.testing.assert_close(rows[1], expected(2, range(8), 1))


def moved(begin: Callable[[BatchRows], None], batch: BatchRows) -> None:
    """Begin a pass whose second token the model reads at the next position."""
    positions = batch.positions.clone()
    positions[1] += 1
    begin(batch._replace(positions=positions))


@pytest.mark.parametrize("at", [11, 20, 59])
async def test_one_bad_pass_of_a_series_fails_its_request_alone(at, monkeypatch) -> None:
    """Reports are read many at a time: a token of another position fails its own request, whichever pass it was in."""
    bench = Bench()
    for name in ("r1", "r2"):
        bench.plan(name)
        bench.step((name, 0, 10))
    begin = bench.runtime.begin_step
    for position in range(10, 60):
        monkeypatch.setattr(bench.runtime, "begin_step", partial(moved, begin) if position == at else begin)
        bench.step(("r1", position, 1), ("r2", position, 1))
    _, rows = await bench.rows("r1", 60)
    torch.testing.assert_close(rows[1], expected(1, range(60), 1))
    (captured_rows,) = bench.ask(Collect((Wanted(Owner("r2", 0), 60),))).shares
    assert captured_rows.failure == f"the runner computes position {at + 1} where {at} was scheduled"


@pytest.mark.parametrize("at", [0, 3, 17, 23])
async def test_one_bad_pass_of_a_changing_batch_fails_its_request_alone(at, monkeypatch) -> None:
    """A request comes and one leaves in every pass: the reports of passes that differ are still told apart."""
    bench = Bench(16 << 20)
    bench.plan("r1")
    bench.plan("r2")
    begin = bench.runtime.begin_step
    for position in range(24):
        come = f"r{10 + position}"
        bench.plan(come)
        monkeypatch.setattr(bench.runtime, "begin_step", partial(moved, begin) if position == at else begin)
        bench.step(("r1", position, 1), ("r2", position, 1), (come, 0, 2 + position % 3))
        bench.runtime.end_requests([come])
    for number, total in (("1", 24), *((10 + position, 2 + position % 3) for position in range(24))):
        captured_rows, rows = await bench.rows(f"r{number}", total)
        assert captured_rows.failure is None
        assert np.frombuffer(captured_rows.token_ids, dtype=np.int64).tolist() == [7 + one for one in range(total)]
        torch.testing.assert_close(rows[1], expected(int(number), range(total), 1))
    (captured_rows,) = bench.ask(Collect((Wanted(Owner("r2", 0), 24),))).shares
    assert captured_rows.failure == f"the runner computes position {at + 1} where {at} was scheduled"


async def test_passes_with_rows_and_passes_without_are_not_taken_for_each_other() -> None:
    """Every third pass keeps rows, all steer: a report is read once the rows before it have left the device."""
    bench = Bench()
    configuration, vectors = adding(500.0)
    configure(bench, configuration, vectors)
    kept = CapturePlan((0, 1, 2), (Range(0, None, 3),), None, RAW)
    bench.runtime.register("r1", Plan("r1", 1, 90, capture=kept, steering=steering_plan(configuration)).encode(), 0)
    for position in range(60):
        bench.step(("r1", position, 1))
        if position > 40 and position % 3 == 1:
            _, rows = await bench.rows("r1", position + 1)
            torch.testing.assert_close(rows[1], expected(1, range(0, position + 1, 3), 1))
    _, rows = await bench.rows("r1", 60)
    torch.testing.assert_close(rows[0], expected(1, range(0, 60, 3), 0) + 500)
    assert settled(bench, "r1", 60).rows == (120,)


@pytest.mark.parametrize("at", [11, 20, 59])
async def test_a_row_that_is_not_finite_is_named_whichever_pass_of_a_series_it_was_in(at) -> None:
    bench = Bench(dtype=torch.float16)
    for name in ("r1", "r2"):
        bench.plan(name)
        bench.step((name, 0, 10))
    for position in range(10, 60):
        bench.step(("r1", position, 1), ("r2", position, 1), scale=1e6 if position == at else 1.0)
    shares = bench.ask(Collect(tuple(Wanted(Owner(name, 0), 60) for name in ("r1", "r2")))).shares
    assert [captured_rows.nonfinite for captured_rows in shares] == [(at, 0), (at, 0)]


@pytest.mark.parametrize("part", ["nonfinite", "overflowed"])
async def test_a_report_of_a_point_that_there_is_not_fails_its_request_alone(part, monkeypatch) -> None:
    """Nothing is raised in the runner's step, which would end the engine."""
    bench = Bench()
    completed = bench.runtime.taps.completed

    def damaged(*given):
        for steps, report in completed(*given):
            points = np.full_like(report.positions, NONE)
            points[1] = POINTS
            yield steps, replace(report, **{part: points})

    monkeypatch.setattr(bench.runtime.taps, "completed", damaged)
    for name in ("r1", "r2"):
        bench.plan(name)
    bench.step(("r1", 0, 4), ("r2", 0, 4))
    (captured_rows,) = bench.ask(Collect((Wanted(Owner("r1", 0), 4),))).shares
    assert captured_rows.failure == "its pass reported point 3 of 3 at position 1, so its rows cannot be trusted"
    captured_rows, rows = await bench.rows("r2", 4)
    assert (captured_rows.failure, captured_rows.nonfinite) == (None, None)
    torch.testing.assert_close(rows[1], expected(2, range(4), 1))


@DEVICE_ALONE
async def test_what_a_large_pass_left_is_copied_beside_the_small_ones(monkeypatch) -> None:
    """Piece by piece, so many bytes a pass; asked for, at once; and every row is where it belongs."""
    monkeypatch.setattr(cuda, "BESIDE_BYTES", 0)
    monkeypatch.setattr(cuda, "PIECE_BYTES", 100)
    bench = Bench()
    bench.plan("r1")
    bench.plan("r2")
    bench.step(("r1", 0, 40))
    pending = []
    for position in range(30):
        bench.step(("r2", position, 1))
        pending.append(len(bench.runtime.taps.pending))
    assert max(pending) > 10
    for number, total in ((1, 40), (2, 30)):
        _, rows = await bench.rows(f"r{number}", total)
        for point in range(POINTS):
            torch.testing.assert_close(rows[point], expected(number, range(total), point))


@DEVICE_ALONE
async def test_rows_wait_for_a_pass_without_prompts(monkeypatch) -> None:
    """The device waits for the host in a pass with prompts. Eight passes at most wait; every row is where it belongs."""
    monkeypatch.setattr(cuda, "BUNDLE_BYTES", LINE_BYTES)
    bench, waiting = Bench(8 << 20), []
    totals = dict.fromkeys(range(1, 20), 3)

    def step(*passes: tuple[str, int, int]) -> None:
        bench.step(*passes)
        waiting.append(len(bench.runtime.taps._waiting))

    for number in totals:
        bench.plan(f"r{number}", limit=100)
    step(("r1", 0, 3))
    for position in (3, 4):
        step(("r1", position, 1))
    step(("r2", 0, 3), ("r1", 5, 1))
    step(("r1", 6, 1), ("r2", 3, 1))
    for number in range(3, 20):
        step((f"r{number}", 0, 3), ("r1", 4 + number, 1))
    assert waiting[:5] == [1, 1, 1, 2, 1]
    assert max(waiting) == cuda.BUNDLE
    for number, total in (totals | {1: 24, 2: 4}).items():
        _, rows = await bench.rows(f"r{number}", total)
        for point in range(POINTS):
            torch.testing.assert_close(rows[point], expected(number, range(total), point))


@DEVICE_ALONE
async def test_a_row_past_the_end_does_not_land_on_a_reduced_one() -> None:
    """A request of one row ran on for a pass, whose row is still on its way when the first is reduced."""
    bench = Bench(dtype=torch.bfloat16)
    bench.plan("r1", reduce="mean")
    bench.step(("r1", 0, 1))
    bench.step(("r1", 1, 1))
    _, first = await bench.rows("r1", 1)
    bench.step(("r0", 0, 1))
    bench.runtime._wait_for([Wanted(Owner("r1", 0), 9)])
    _, again = await bench.rows("r1", 1)
    assert torch.equal(first, again)
    torch.testing.assert_close(first[0], expected(1, [0], 0))


def test_copies_are_joined_and_cut() -> None:
    """Records one behind the other on both sides are one copy; no copy is larger than a piece; not a byte is lost."""
    lines, records = np.array([10, 13, 16, 40, 42, 5]), np.array([3, 3, 3, 2, 2, 1])
    to, start, count = runs(lines, np.array([0, 3, 7, 10, 12, 14]), records)
    assert (to.tolist(), start.tolist(), count.tolist()) == ([10, 16, 40, 5], [0, 7, 10, 14], [6, 3, 4, 1])
    to, start, count = runs(lines, np.array([0, 3, 6, 9, 11, 13]), records)
    assert (to.tolist(), start.tolist(), count.tolist()) == ([10, 40, 5], [0, 9, 13], [9, 4, 1])
    targets, sources, sizes = pieces(to, start, count, 4)
    assert sizes.tolist() == [4, 4, 1, 4, 1]
    assert targets.tolist() == [10, 14, 18, 40, 5]
    assert sources.tolist() == [0, 4, 8, 9, 13]


def test_a_ring_gives_nothing_twice() -> None:
    """At random: what is held is not handed out before its holder was waited for, and a pass lies in one piece."""
    rng = np.random.default_rng(0)
    ring: Ring[int] = Ring(50)
    held: dict[int, tuple[int, int]] = {}
    for mark in range(400):
        count = int(rng.integers(1, 20))
        first, waiting = ring.reserve(count)
        for done in waiting:
            del held[done]
        assert 0 <= first <= 50 - count
        assert all(stop <= first or first + count <= start for start, stop in held.values())
        ring.hold(first, count, mark)
        held[mark] = first, first + count
        if held and rng.random() < 0.5:
            oldest = min(held)
            ring.free(oldest)
            del held[oldest]
    with pytest.raises(ValueError, match="51 places"):
        ring.reserve(51)


# Steering


def steering_plan(configuration, slot: int = 0, ranges=((Range(0, None),),), identity: bytes = b"id") -> SteeringPlan:
    return SteeringPlan(slot, configuration.digest, identity, ranges, ())


def adding(value: float, points=(0, 2), row: int = 5) -> tuple[Configuration, Vectors]:
    """A configuration that adds `value` to every element at some points, and its vector in a row of the bank."""
    data = np.full(WIDTH, value, dtype=np.float32).tobytes()
    digest = blob_digest(data, 1)
    configuration = Configuration((Entry(0, points, 0, 0, response=Response(offset=1.0)),), (Blob(digest, 1),), 1, 0)
    return configuration, Vectors(digest, (row,), data)


def configure(bench: Bench, configuration: Configuration, vectors: Vectors, slot: int = 0):
    return bench.ask(Configure((vectors,), (Placed(slot, configuration, (vectors.bank_rows,)),)))


def steer(bench: Bench, key: str, steering: SteeringPlan, capture: bool = True) -> None:
    kept = CapturePlan((0, 1, 2), (Range(0, None),), None, RAW) if capture else None
    bench.runtime.register(key, Plan(key, 10, 100, capture=kept, steering=steering).encode(), 0)


def settled(bench: Bench, key: str, total: int):
    (record,) = bench.ask(GetSteeringRecord((Wanted(Owner(key, 0), total),), (True,))).records
    return record


async def test_edits_reach_their_rows_and_are_counted() -> None:
    """Beside a clean request in one batch: captured rows are those after the edit, at its points and positions alone."""
    bench = Bench()
    configuration, vectors = adding(500.0)
    assert configure(bench, configuration, vectors) == Configured(())
    steer(bench, "r1", steering_plan(configuration, ranges=((Range(1, 3),),)))
    bench.plan("r2")
    bench.step(("r2", 0, 3), ("r1", 0, 4), padding=2)
    bench.step(("r1", 4, 1), ("r2", 3, 1))
    _, rows = await bench.rows("r1", 5)
    for point in range(POINTS):
        added = torch.zeros(5, 1)
        added[1:3] = 500.0 if point != 1 else 0.0
        torch.testing.assert_close(rows[point], expected(1, range(5), point) + added)
    _, clean = await bench.rows("r2", 4)
    torch.testing.assert_close(clean[0], expected(2, range(4), 0))
    record = settled(bench, "r1", 5)
    assert (record.failure, record.rows, record.primary) == (None, (4,), True)
    assert np.unpackbits(np.frombuffer(record.computed, dtype=np.uint8))[:5].all()
    assert settled(bench, "r1", 5) == Unknown(Owner("r1", 0))


async def test_positions_read_from_the_cache_do_not_count_as_computed() -> None:
    """A first pass that starts late, and one that resumes: what lies before was in the prefix cache."""
    bench = Bench()
    configuration, vectors = adding(1.0)
    configure(bench, configuration, vectors)
    steer(bench, "r1", steering_plan(configuration))
    bench.step(("r1", 4, 2))
    bench.step(("r1", 0, 3))  # preempted, and nothing in the cache
    bench.step(("r1", 5, 3))
    record = settled(bench, "r1", 8)
    computed = np.unpackbits(np.frombuffer(record.computed, dtype=np.uint8))[:8]
    assert computed.tolist() == [1, 1, 1, 0, 1, 1, 1, 1]
    assert record.rows == (2 * 7,)


async def test_steering_that_is_held_back_begins_between_two_passes() -> None:
    """With the first token of no pass yet, once; what is computed again is edited from the same position on."""
    bench = Bench()
    configuration, vectors = adding(500.0)
    configure(bench, configuration, vectors)
    held = msgspec.structs.replace(steering_plan(configuration), held=True)
    steer(bench, "r1", held)
    steer(bench, "r2", held)
    bench.step(("r1", 0, 4), ("r2", 0, 4))
    for position in (4, 5):
        bench.step(("r1", position, 1), ("r2", position, 1))
    assert bench.ask(Engage((Owner("r1", 0), Owner("gone", 0)))) == Engaged((6, None))
    for position in (6, 7):
        bench.step(("r1", position, 1), ("r2", position, 1))
    assert bench.ask(Engage((Owner("r1", 0),))) == Engaged((6,))
    bench.step(("r1", 0, 5), ("r2", 8, 1))  # preempted
    bench.step(("r1", 5, 4))
    for number, key, start in ((1, "r1", 6), (2, "r2", 9)):
        _, rows = await bench.rows(key, 9)
        for point in range(POINTS):
            added = torch.zeros(9, 1)
            added[start:] = 500.0 if point != 1 else 0.0
            torch.testing.assert_close(rows[point], expected(number, range(9), point) + added)
        record = settled(bench, key, 9)
        assert (record.failure, record.rows) == (None, (2 * (9 - start),))


async def test_a_tap_that_does_not_edit_is_found_out(kind) -> None:
    """A silent tap fails the requests of its pass that it should have edited, and taints what they wrote."""
    bench = Bench()
    configuration, vectors = adding(1.0)
    configure(bench, configuration, vectors)
    steer(bench, "r1", steering_plan(configuration), capture=False)
    bench.step(("r1", 0, 4), skip_point=2)
    why = {"host": "fired [0] times", "cuda": "4 of 4 tokens of a pass did not get their edits"}[kind]
    assert why in settled(bench, "r1", 4).failure
    steer(bench, "r2", steering_plan(configuration), capture=False)  # it may have read what r1 wrote
    bench.step(("r2", 2, 2))
    assert why in settled(bench, "r2", 4).failure
    steer(bench, "r3", steering_plan(configuration, identity=b"other"), capture=False)
    bench.step(("r3", 0, 4))
    assert settled(bench, "r3", 4).failure is None


@pytest.mark.parametrize("kind", ["host"], indirect=True)
async def test_an_edit_lost_inside_the_kernel_is_found_out(monkeypatch) -> None:
    """The kernel counts what it applied, token by token; fewer than the plan demands is a failure."""
    bench = Bench()
    configuration, vectors = adding(1.0)
    configure(bench, configuration, vectors)
    steer(bench, "r1", steering_plan(configuration), capture=False)
    monkeypatch.setattr(bench.runtime.taps._edits, "apply", lambda *_: None)
    bench.step(("r1", 0, 4))
    assert settled(bench, "r1", 4).failure == "4 of 4 tokens of a pass did not get their edits"


async def test_a_slot_with_something_else_is_found_out() -> None:
    """An empty slot, or another configuration in it: the request fails, unedited as it is."""
    bench = Bench()
    configuration, vectors = adding(1.0)
    configure(bench, configuration, vectors)
    other, _ = adding(1.0, points=(1,))
    for key, plan in (("r1", steering_plan(configuration, slot=1)), ("r2", steering_plan(other, identity=b"2"))):
        steer(bench, key, plan, capture=False)
        bench.step((key, 0, 4))
        assert "does not hold this request's configuration" in settled(bench, key, 4).failure


async def test_nothing_in_use_is_overwritten() -> None:
    """Places of a request that has not left the engine are refused; what is there already is welcome; afterwards all is."""
    bench = Bench()
    configuration, vectors = adding(1.0)
    configure(bench, configuration, vectors)
    steer(bench, "r1", steering_plan(configuration), capture=False)
    other, same_row = adding(2.0)
    _, elsewhere = adding(2.0, row=6)
    refused = Configured((other.digest,))
    assert configure(bench, other, same_row, slot=1) == refused
    assert configure(bench, other, elsewhere, slot=0) == refused
    assert configure(bench, other, elsewhere, slot=1) == Configured(())
    assert configure(bench, configuration, vectors) == Configured(())
    bench.runtime.end_requests(["r1"])
    assert configure(bench, other, same_row, slot=0) == Configured(())


async def test_a_configuration_whose_vectors_are_gone_is_gone() -> None:
    """Rows written over take with them every configuration that used them."""
    bench = Bench()
    configuration, vectors = adding(1.0)
    configure(bench, configuration, vectors)
    _, other = adding(-777.0)
    bench.ask(Configure((other,), ()))
    steer(bench, "r1", steering_plan(configuration), capture=False)
    bench.step(("r1", 0, 4))
    assert "does not hold this request's configuration" in settled(bench, "r1", 4).failure


async def test_vectors_that_are_not_what_they_say_are_refused() -> None:
    """The worker hashes what arrives."""
    bench = Bench()
    _, vectors = adding(1.0)
    answer = bench.ask(Configure((Vectors(vectors.digest, (5,), bytes(WIDTH * 4)),), ()))
    assert isinstance(answer, Failed)
    assert "SHA-256" in answer.reason


async def test_vectors_for_wider_points_of_another_stage_fit() -> None:
    """All workers get all vectors: what is longer than this one's rows is for points that it does not have."""
    bench = Bench()
    configuration, vectors = adding(500.0)
    data = np.full(3 * WIDTH, 7.0, dtype=np.float32).tobytes()
    wide = Vectors(blob_digest(data, 1), (6,), data)
    assert bench.ask(Configure((wide,), ())) == Configured(())
    assert configure(bench, configuration, vectors) == Configured(())
    steer(bench, "r1", steering_plan(configuration))
    bench.step(("r1", 0, 3))
    _, rows = await bench.rows("r1", 3)
    torch.testing.assert_close(rows[0], expected(1, range(3), 0) + 500.0)


async def test_a_plan_that_fits_nothing_fails_alone() -> None:
    """A slot with another configuration, and a plan that replaces rows: no exception reaches the engine."""
    bench = Bench()
    configuration, vectors = adding(1.0)
    configure(bench, configuration, vectors)
    steer(bench, "r1", SteeringPlan(0, b"another", b"id", ((Range(0, 1),),), ((0,),)), capture=False)
    bench.step(("r1", 0, 4))
    assert "does not hold" in settled(bench, "r1", 4).failure


async def test_drafts_beyond_the_end_are_no_failure() -> None:
    """Positions past all that the request can keep are computed and thrown away by speculation; the rest counts."""
    bench = Bench()
    configuration, vectors = adding(1.0)
    configure(bench, configuration, vectors)
    bench.runtime.register("r1", Plan("r1", 4, 6, steering=steering_plan(configuration)).encode(), 0)
    bench.step(("r1", 0, 9))
    record = settled(bench, "r1", 6)
    assert (record.failure, record.rows) == (None, (12,))


async def test_edits_can_be_looked_at_before_the_end() -> None:
    """A record is given as often as asked while its request runs, and forgotten with the last time."""
    bench = Bench()
    configuration, vectors = adding(1.0)
    configure(bench, configuration, vectors)
    steer(bench, "r1", steering_plan(configuration), capture=False)
    bench.step(("r1", 0, 4))
    for _ in range(2):
        (record,) = bench.ask(GetSteeringRecord((Wanted(Owner("r1", 0), 4),), (False,))).records
        assert record.rows == (8,)
    bench.step(("r1", 4, 1))
    assert settled(bench, "r1", 5).rows == (10,)
    assert settled(bench, "r1", 5) == Unknown(Owner("r1", 0))


async def test_rows_are_kept_before_or_after_their_edits() -> None:
    """Two requests of one slot and one pass, one keeps rows before the edits, the other after."""
    bench = Bench()
    configuration, vectors = adding(500.0)
    configure(bench, configuration, vectors)
    for key, before in (("r1", True), ("r2", False)):
        kept = CapturePlan((0, 1, 2), (Range(0, None),), None, RAW, before)
        plan = Plan(key, 10, 100, capture=kept, steering=steering_plan(configuration))
        bench.runtime.register(key, plan.encode(), 0)
    bench.step(("r1", 0, 3), ("r2", 0, 3))
    for number, added in ((1, 0.0), (2, 500.0)):
        _, rows = await bench.rows(f"r{number}", 3)
        torch.testing.assert_close(rows[0], expected(number, range(3), 0) + added)


async def test_a_rank_without_rows_steers_all_the_same(kind) -> None:
    """Rank 1 of a tensor-parallel group captures nothing and edits everything; its rows are not counted twice."""
    bench = Bench.__new__(Bench)
    bench.runtime = some_runtime(kind, captures=False, shard=1)
    assert isinstance(bench.ask(Attach(1 << 20)), NotCapturing)
    configuration, vectors = adding(500.0)
    assert configure(bench, configuration, vectors) == Configured(())
    steer(bench, "r1", steering_plan(configuration))
    bench.step(("r1", 0, 4))
    record = settled(bench, "r1", 4)
    assert (record.failure, record.primary, record.rows) == (None, False, (8,))
    assert isinstance(bench.ask(GetStats()), NotCapturing)


def test_what_tables_take_is_said(kind) -> None:
    """Bank and accumulators everywhere; a ring, what of it is not copied yet, and pinned memory on a device alone."""
    bench = Bench(device_ring_bytes=1 << 20)
    tables = bench.ask(GetStats()).tables
    assert tables.bank == bench.runtime.taps._bank.nbytes == bench.attached.bank_rows * bench.attached.bank_width * 4
    assert tables.accumulators >= bench.attached.reductions * POINTS * WIDTH * 4
    if kind == "host":
        assert (tables.ring, tables.ring_in_use, tables.pinned) == (0, 0, 0)
        return
    assert tables.ring == 1 << 20
    assert tables.ring_in_use == 0 < tables.pinned
    bench.plan("r1")
    bench.step(("r1", 0, 10))
    assert 0 < bench.runtime.taps.table_bytes.ring_in_use <= tables.ring
