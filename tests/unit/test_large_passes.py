"""Rows of a large pass leave the ring layer by layer while it runs, and are those of a ring that holds all of them."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from workers import CUDA, LateTransfers, batch, device_of, kept_of, rows_of, some_runtime, tap

from steercap.core.messages import Attach, Call, Collect, Owner, Wanted, decode_answer, encode
from steercap.core.plan import CapturePlan, Plan
from steercap.core.schema import LINE_BYTES, RAW, Coding, PointSchema
from steercap.core.tokens import Range
from steercap.kernels.codecs import codec_of, record_of
from steercap.kernels.codecs.coded import parts_of
from steercap.kernels.triton_tap import TapLauncher
from steercap.worker.taps.cuda import LOST
from steercap.worker.taps.cuda_rows import grids
from steercap.worker.taps.large import LargePass

LAYERS = (0, 0, 0, 1, 1, 2, 2, 2, 3)
SCHEMAS = [PointSchema((width,), "float32") for width in (8, 24, 16, 8, 24, 8, 24, 16, 8)]
#: Lines that a token's rows of each layer need.
LAYER_LINES = [
    record_of([one for one, at in zip(SCHEMAS, LAYERS, strict=True) if at == layer]).lines for layer in range(4)
]
CODECS = (RAW, RAW, codec_of("full8"), codec_of("topk8", 3), codec_of("rp8", 5))


def asking(runtime: Any, question: Any) -> Any:
    return decode_answer(runtime.answer(encode(Call((), question))))


def small_ring(tokens: int, graph_tokens: int = 0) -> Any:
    """A rank whose ring has room for the largest layer of a pass, encoded too."""
    lines = tokens * max(LAYER_LINES) * 2
    return some_runtime(
        "cuda", len(LAYERS), schemas=SCHEMAS, tokens=64, device_ring_bytes=lines * LINE_BYTES, layers=LAYERS,
        graph_tokens=graph_tokens,
    )  # fmt: skip


def run(runtime: Any, names: list[str], starts: list[int], counts: list[int], order: list[int]) -> None:
    """One pass: a row says its request, position, point and column."""
    positions = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
    owner = np.repeat([float(name[1:]) for name in names], counts)
    runtime.begin_step(batch("cuda", names, starts, counts, positions + 7, positions))
    for point in order:
        width = SCHEMAS[point].width
        base = torch.from_numpy(owner * 100 + positions).float()[:, None] + torch.arange(width) / 64 + point / 4096
        tap(runtime, base.to(device_of("cuda")), None, point)
    runtime.end_step()


def expected(request: int, positions: range, point: int) -> torch.Tensor:
    base = torch.tensor([request * 100.0 + position for position in positions])
    return base[:, None] + torch.arange(SCHEMAS[point].width) / 64 + point / 4096


def stored(runtime: Any, total: dict[str, int]) -> dict[str, Any]:
    """The captured rows of each request: their labels, and every tensor of every point."""
    wanted = tuple(Wanted(Owner(name, 0), count) for name, count in total.items())
    found = {}
    for name, share in zip(total, asking(runtime, Collect(wanted)).shares, strict=True):
        assert share.failure is None, share.failure
        parts = [part for rows in kept_of(runtime, share) for part in parts_of(rows).values()]
        found[name] = share.positions, share.token_ids, share.coding, [part.clone() for part in parts]
    return found


def within(rng: random.Random) -> list[int]:
    """An order of the taps: layer by layer, any within a layer."""
    points = list(range(len(LAYERS)))
    rng.shuffle(points)
    return sorted(points, key=lambda point: LAYERS[point])


@pytest.mark.parametrize("seed", range(6))
def test_they_are_those_of_a_ring_that_holds_all_of_them(seed) -> None:
    """Requests of other points, ranges, codecs and reductions, in passes of one prompt, of its parts, and of one token."""
    rng = random.Random(seed)
    names = [f"r{number}" for number in range(1, 5)]
    plans = []
    for name in names:
        points = tuple(sorted(rng.sample(range(len(LAYERS)), rng.randint(1, len(LAYERS)))))
        ranges = rng.choice([(Range(0, None),), (Range(2, 5), Range(7, None)), (Range(1, None),)])
        reduce = rng.choice([None, None, "mean", "max", "last"])
        coding: Coding = RAW if reduce else rng.choice(CODECS)
        capture = CapturePlan(points, ranges, reduce, coding, accumulates=bool(reduce))
        plans.append(Plan(name, 12, 40, capture=capture).encode())
    counts = [rng.randint(8, 12) for _ in names]
    whole = some_runtime("cuda", len(LAYERS), schemas=SCHEMAS, tokens=64)
    small = small_ring(sum(counts))
    orders = [within(rng) for _ in range(3)]
    found = []
    for runtime in (whole, small):
        asking(runtime, Attach(1 << 20))
        for name, plan in zip(names, plans, strict=True):
            runtime.register(name, plan, 0)
        run(runtime, names, [0] * 4, counts, orders[0])
        run(runtime, [*names, "r9"], [*counts, 0], [3, 1, 9, 1, 6], orders[1])
        ends = [count + more for count, more in zip(counts, [3, 1, 9, 1], strict=True)]
        run(runtime, names, ends, [1] * 4, orders[2])
        found.append(stored(runtime, {name: end + 1 for name, end in zip(names, ends, strict=True)}))
    for name in names:
        *labels, rows = found[0][name]
        *others, same = found[1][name]
        assert labels == others
        assert rows
        assert all(map(torch.equal, rows, same))


@pytest.mark.parametrize("tokens", [17, 40])
def test_raw_rows_of_everything_pass_a_ring_of_one_layer(tokens) -> None:
    """Each row is there at its position and point, though all together need several times the ring."""
    runtime = small_ring(tokens)
    asking(runtime, Attach(1 << 20))
    everything = CapturePlan(tuple(range(len(LAYERS))), (Range(0, None),), None, RAW)
    for name in ("r1", "r2"):
        runtime.register(name, Plan(name, 40, 100, capture=everything).encode(), 0)
    first = tokens // 3
    assert sum(LAYER_LINES) * tokens > runtime.taps._lines.size
    for start in (0, 40):
        run(
            runtime,
            ["r1", "r2"],
            [start // 40 * first, start // 40 * (tokens - first)],
            [first, tokens - first],
            within(random.Random(tokens)),
        )
    shares = asking(
        runtime, Collect((Wanted(Owner("r1", 0), 2 * first), Wanted(Owner("r2", 0), 2 * (tokens - first))))
    ).shares
    for request, share in enumerate(shares, 1):
        for point, rows in enumerate(rows_of(runtime, share)):
            assert torch.equal(rows, expected(request, range(2 * (first if request == 1 else tokens - first)), point))
    assert runtime.taps.table_bytes.ring_in_use == 0


@pytest.mark.parametrize("wrong", ["order", "unknown", "silent"])
def test_a_tap_out_of_order_or_unknown_fails_its_pass_and_later_ones_are_kept_whole(wrong, monkeypatch) -> None:
    """Nothing is written elsewhere: an earlier pass's rows stay as they are."""
    runtime = some_runtime("cuda", len(LAYERS), schemas=SCHEMAS, tokens=64, device_ring_bytes=1 << 16, layers=LAYERS)
    monkeypatch.setattr("steercap.worker.taps.cuda.PART", 1 / 64)
    asking(runtime, Attach(1 << 20))
    everything = CapturePlan(tuple(range(len(LAYERS))), (Range(0, None),), None, RAW)
    for name in ("r1", "r2", "r3"):
        runtime.register(name, Plan(name, 20, 100, capture=everything).encode(), 0)
    order = list(range(len(LAYERS)))
    run(runtime, ["r1"], [0], [20], order)
    known = runtime.taps._addresses
    if wrong == "unknown":
        runtime.taps._addresses = {address: number for address, number in known.items() if number != 4}
    if wrong == "silent":
        run(runtime, ["r2"], [0], [20], [])
    else:
        run(runtime, ["r2"], [0], [20], [0, 1, 2, 5, 3, 4, 6, 7, 8] if wrong == "order" else order)
    assert bool(runtime.taps._addresses) == (wrong == "silent")
    run(runtime, ["r3"], [0], [20], [5, *order[:5], *order[6:]] if wrong != "silent" else order)
    first, second, third = asking(runtime, Collect(tuple(Wanted(Owner(f"r{one}", 0), 20) for one in (1, 2, 3)))).shares
    silent = "20 of 20 tokens of a pass were not copied exactly once at each point"
    assert second.failure == (silent if wrong == "silent" else LOST)
    for request, share in ((1, first), (3, third)):
        assert all(
            torch.equal(rows, expected(request, range(20), point)) for point, rows in enumerate(rows_of(runtime, share))
        )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows that no tap wrote hold whatever was there; their sums too
@pytest.mark.parametrize("reduce", [None, "mean"])
@pytest.mark.parametrize("order", [[0, 1, 2, 5, 3, 4, 6, 7, 8], [0, 1, 2, 3, 4, 5, 6, 7, 3, 8], [5, 0]])
def test_a_tap_out_of_order_fails_all_captures_of_its_pass(order, reduce) -> None:
    """Also one whose rows had left: of a tap that ran twice they would be those of the first time."""
    runtime = small_ring(20)
    asking(runtime, Attach(1 << 20))
    for name, points in (("r1", (5,)), ("r2", tuple(range(len(LAYERS))))):
        capture = CapturePlan(points, (Range(0, None),), reduce, RAW, accumulates=reduce is not None)
        runtime.register(name, Plan(name, 10, 40, capture=capture).encode(), 0)
    run(runtime, ["r1", "r2"], [0, 0], [10, 10], order)
    few, many = asking(runtime, Collect((Wanted(Owner("r1", 0), 10), Wanted(Owner("r2", 0), 10)))).shares
    assert few.failure == many.failure == LOST


def test_a_layer_that_has_no_room_is_an_error_that_says_how_much_it_needs() -> None:
    """With that much of `device_ring_bytes` the same pass is kept."""
    capture = CapturePlan(tuple(range(len(LAYERS))), (Range(0, None),), None, codec_of("full8"))
    needed, failures = LINE_BYTES, []
    for _ in range(2):
        runtime = some_runtime(
            "cuda", len(LAYERS), schemas=SCHEMAS, tokens=64, device_ring_bytes=needed, layers=LAYERS, graph_tokens=4
        )
        asking(runtime, Attach(1 << 20))
        runtime.register("r1", Plan("r1", 17, 100, capture=capture).encode(), 0)
        run(runtime, ["r1"], [0], [17], list(range(len(LAYERS))))
        (share,) = asking(runtime, Collect((Wanted(Owner("r1", 0), 17),))).shares
        failures.append(share.failure)
        needed = int(re.findall(r"[\d,]+", share.failure or "0")[0].replace(",", ""))
    assert failures[0].endswith(
        f"bytes of rows, and the device holds {LINE_BYTES}; raise SteerModel(..., device_ring_bytes=), "
        "lower max_num_batched_tokens=, or capture fewer points"
    )
    assert failures[1] is None


def test_a_pass_that_runs_a_graph_is_kept_whole_or_refused() -> None:
    runtime = small_ring(16, graph_tokens=16)
    asking(runtime, Attach(1 << 20))
    capture = CapturePlan(tuple(range(len(LAYERS))), (Range(0, None),), None, RAW)
    for name in ("r1", "r2"):
        runtime.register(name, Plan(name, 17, 100, capture=capture).encode(), 0)
    order = list(range(len(LAYERS)))
    run(runtime, ["r1"], [0], [16], order)
    run(runtime, ["r2"], [0], [17], order)
    graph, large = asking(runtime, Collect((Wanted(Owner("r1", 0), 16), Wanted(Owner("r2", 0), 17)))).shares
    assert graph.failure.startswith("one pass keeps ")
    assert large.failure is None


def test_rows_of_a_request_that_is_gone_do_not_come_over_those_of_a_large_pass(monkeypatch) -> None:
    """Pages are another request's at once, while rows of the one before may wait to be copied there."""
    runtime = some_runtime(
        "cuda", len(LAYERS), schemas=SCHEMAS, tokens=64, device_ring_bytes=1 << 16, layers=LAYERS, graph_tokens=16
    )
    monkeypatch.setattr("steercap.worker.taps.cuda.PART", 1 / 64)
    asking(runtime, Attach(1 << 20))
    everything = CapturePlan(tuple(range(len(LAYERS))), (Range(0, None),), None, RAW)
    order = list(range(len(LAYERS)))
    runtime.register("r1", Plan("r1", 12, 40, capture=everything).encode(), 0)
    run(runtime, ["r1"], [0], [12], order)
    assert runtime.taps._waiting
    before = set(runtime._kept[Owner("r1", 0)].capture_buffer._places.pages.tolist())
    runtime.end_requests(["r1"])
    decode_answer(runtime.answer(encode(Call((Owner("r1", 0),), Collect(())))))
    runtime.register("r2", Plan("r2", 20, 40, capture=everything).encode(), 0)
    run(runtime, ["r2"], [0], [20], order)
    assert before & set(runtime._kept[Owner("r2", 0)].capture_buffer._places.pages.tolist())
    (share,) = asking(runtime, Collect((Wanted(Owner("r2", 0), 20),))).shares
    for point, rows in enumerate(rows_of(runtime, share)):
        assert torch.equal(rows, expected(2, range(20), point))


class Streams(LateTransfers):
    """Streams that know which work is done before theirs, by what they waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.after: dict[object, set[int]] = defaultdict(set)
        self.marked: dict[object, set[int]] = {}
        self.works: list[str] = []

    def now(self, _again: object = None) -> object:
        event = super().now()
        self.marked[event] = set(self.after[self.stream])
        return event

    def hold(self, event: object) -> None:
        super().hold(event)
        self.after[self.stream] |= self.marked.get(event, set())

    def work(self, name: str, *, behind: str) -> None:
        """Queue work that must come behind all earlier work of these names."""
        assert {number for number, one in enumerate(self.works) if one in behind.split()} <= self.after[self.stream]
        self.after[self.stream].add(len(self.works))
        self.works.append(name)


@pytest.mark.skipif(CUDA, reason="streams of the test's own")
@pytest.mark.parametrize("beside", [{5}, {6}, {0, 2, 5, 7}, {3, 4}, {8}])
def test_taps_on_other_streams_find_their_lines_and_are_done_before_the_next_are_written(beside, monkeypatch) -> None:
    """Such a stream may be ahead of the model's, or behind it, until steercap has one wait for the other."""
    monkeypatch.setattr("workers.LateTransfers", Streams)
    runtime = small_ring(20)
    streams = runtime.taps._transfers
    writes, leaves, launch = LargePass._write, LargePass._copy, TapLauncher.launch

    def written(self, *args: Any) -> None:
        streams.work("lines", behind="tap lines leave")
        writes(self, *args)

    def left(self, *args: Any) -> None:
        streams.work("leave", behind="tap lines leave")
        leaves(self, *args)

    def launched(self, *args: Any, **more: Any) -> None:
        streams.work("tap", behind="lines leave")
        launch(self, *args, **more)

    monkeypatch.setattr(LargePass, "_write", written)
    monkeypatch.setattr(LargePass, "_copy", left)
    monkeypatch.setattr(TapLauncher, "launch", launched)
    asking(runtime, Attach(1 << 20))
    everything = CapturePlan(tuple(range(len(LAYERS))), (Range(0, None),), None, RAW)
    runtime.register("r1", Plan("r1", 20, 40, capture=everything).encode(), 0)
    runtime.begin_step(batch("cuda", ["r1"], [0], [20], np.arange(20) + 7, np.arange(20)))
    for point in range(len(LAYERS)):
        with streams.using("other" if point in beside else "the model's"):
            tap(runtime, expected(1, range(20), point), None, point)
    runtime.end_step()
    assert streams.works.count("tap") == len(LAYERS)
    assert streams.works.count("leave") > 2
    (share,) = asking(runtime, Collect((Wanted(Owner("r1", 0), 20),))).shares
    for point, rows in enumerate(rows_of(runtime, share)):
        assert torch.equal(rows, expected(1, range(20), point))


def test_codes_may_be_larger_than_their_rows() -> None:
    """Even where a whole stored record would begin before the ring does: each part of it lies within."""
    counts = {"rp16": 320, "rp8": 256}
    found = []
    for lines, layers in ((1 << 12, ()), (64, LAYERS)):
        runtime = some_runtime(
            "cuda", len(LAYERS), schemas=SCHEMAS, tokens=64, device_ring_bytes=lines * LINE_BYTES, layers=layers
        )
        asking(runtime, Attach(1 << 20))
        for number, (name, k) in enumerate(counts.items(), 1):
            capture = CapturePlan(tuple(range(len(LAYERS))), (Range(0, None),), None, codec_of(name, k))
            runtime.register(f"r{number}", Plan(f"r{number}", 1, 40, capture=capture).encode(), 0)
        run(runtime, ["r1", "r2"], [0, 0], [1, 1], list(range(len(LAYERS))))
        (done,) = runtime.taps._passed
        if layers:
            assert min(part.sources.min() for part in done.large.leaving) < 0
        found.append(stored(runtime, {"r1": 1, "r2": 1}))
    for name in ("r1", "r2"):
        assert found[0][name][:3] == found[1][name][:3]
        assert all(map(torch.equal, found[0][name][3], found[1][name][3]))


def test_copies_at_regular_distances_are_grids() -> None:
    """Every byte of a list of copies is in one grid, and neighbours that lie alike share it."""
    rng = random.Random(3)
    copies: list[tuple[int, ...]] = []
    to, start = 0, 10_000
    while len(copies) < 200:
        size, ahead, back = rng.choice([(8, 64, 8), (16, 64, 32), (64, 64, 64)])
        for _ in range(rng.randint(1, 9)):
            copies.append((to, start, size, ahead, back))
            to, start = to + ahead, start + back
        to, start = to + rng.choice([0, 8]), start + rng.choice([0, 24])
    found = grids(*np.array(copies, dtype=np.int64).T)
    made = [
        (target + row * ahead, source + row * back, size, ahead, back)
        for target, source, size, rows, ahead, back in found.tolist()
        for row in range(rows)
    ]
    assert made == copies
    assert len(found) < 90
