"""The bench on GPU: its order of runs, its ratios, and its reading of traces, on figures made by hand."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docs_speed
import pytest
from gpu_phases import PHASES, Watch, medians, phases, phases_table
from gpu_rounds import BASE, CONTROL, MODES, NEURONS, Workload, modes_for, ratios, sequence, sites_for, summary
from gpu_shapes import SHAPES
from gpu_trace import Trace, differences, group_of, names_that_differ, read_trace


def event(name: str, start: float, duration: float, category: str = "kernel", thread: int = 7) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "pid": 0, "tid": thread}


STEP = "execute_context_0(0)_generation_4(4)"


def trace_of_two_steps(*, tapped: bool) -> list[dict[str, Any]]:
    """Two steps of a GEMM of 10 µs and a norm of 2 µs, 3 µs apart; taps of 1 µs and a copy beside them if tapped."""
    events = [{"ph": "M", "name": "process_name"}]
    for start in (100.0, 200.0):
        events += [
            event(STEP, start - 50, 40, "user_annotation"),
            event("execute_context_0(0)_generation_0(0)", start - 5, 1, "user_annotation"),
            event(STEP, start, 16, "gpu_user_annotation"),
            event("aten::mm", start - 45, 5, "cpu_op"),
            event("nvjet_tst_128x64_h_bz_TNT", start, 10),
            event("triton_red_fused_add_mean_mul_rsqrt_0", start + 13, 2),
        ]
        if tapped:
            events += [
                event("_tap_kernel", start + 15, 1),
                event("Memcpy DtoH (Device -> Pinned)", start + 2, 4, "gpu_memcpy", thread=9),
            ]
    return events


def test_a_trace_is_counted_by_step_group_and_kernel() -> None:
    """Annotations on the GPU's own track are no kernels, empty steps are no steps, copies beside kernels do not count as busy."""
    base, tapped = Trace.of(trace_of_two_steps(tapped=False)), Trace.of(trace_of_two_steps(tapped=True))
    assert (base.steps, base.on_device, base.busy, base.span) == (2, True, 24.0, 115.0)
    found = differences(base, tapped)
    assert found["GEMM"] == (10, 10)
    assert found["norm"] == (2, 2)
    assert found["steercap"] == (0, 1)
    assert found["memcpy DtoH"] == (0, 4)
    assert found["= sum"] == (12, 17)
    assert found["= any kernel runs"] == (12, 13)
    assert found["= span"] == (57.5, 58.0)
    first, second, *_ = names_that_differ(base, tapped, 5)
    assert first == ("Memcpy DtoH (Device -> Pinned)", 0, 4, 1)
    assert second == ("_tap_kernel", 0, 1, 1)


def test_operators_are_counted_without_what_they_call() -> None:
    """A trace without GPU events falls back on CPU operators, each thread by itself."""
    events = [
        event("outer", 0, 10, "cpu_op"),
        event("inner", 2, 3, "cpu_op"),
        event("innermost", 3, 1, "cpu_op"),
        event("inner", 6, 2, "cpu_op"),
        event("elsewhere", 4, 5, "cpu_op", thread=8),
    ]
    trace = Trace.of(events)
    assert not trace.on_device
    assert trace.times == {"outer": (5, 1), "inner": (4, 2), "innermost": (1, 1), "elsewhere": (5, 1)}


def test_traces_are_read_gzipped_or_not(tmp_path: Any) -> None:
    """Both give the same; a trace of nothing is an error."""
    content = json.dumps({"traceEvents": trace_of_two_steps(tapped=True)})
    (tmp_path / "a.json").write_text(content)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(content.encode()))
    assert read_trace(tmp_path / "a.json") == read_trace(tmp_path / "a.json.gz")
    with pytest.raises(ValueError, match="was anything run"):
        Trace.of([{"ph": "M", "name": "process_name"}])


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("_tap_kernel", "steercap"),
        ("_close_kernel", "steercap"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", "attention"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal>", "GEMM"),
        ("void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>", "norm"),
        ("triton_poi_fused_mul_silu_slice_1", "rotary, activation"),
        ("triton_poi_fused_embedding_0", "other, inductor"),
        ("_gather_block_tables_kernel", "runner's own"),
        ("Memset (Device)", "memset"),
        ("aten::addmm", "GEMM"),
        ("_C::onednn_mm", "GEMM"),
        ("something_else", "other"),
    ],
)
def test_kernels_are_known_by_name(name: str, group: str) -> None:
    """vLLM's own Triton kernels are not taken for steercap's, flash attention not for a GEMM."""
    assert group_of(name) == group


def test_each_workload_has_the_modes_it_can_tell_apart() -> None:
    """No more specs than requests, and "each" is the same as its number."""
    assert modes_for(MODES, Workload(1, 32, 200)) == [
        CONTROL, "idle", "capture-one", "capture-all", "capture-mean", "capture-project", "capture-full8", "steer-1",
    ]  # fmt: skip
    assert modes_for(MODES, Workload(48, 2000, 1))[7:] == ["steer-1", "steer-8", "steer-48"]
    assert modes_for(MODES, Workload(256, 128, 200))[7:] == ["steer-1", "steer-8", "steer-64", "steer-256"]
    with pytest.raises(ValueError, match="modes:"):
        modes_for(["steer-0"], Workload(1, 1, 1))
    with pytest.raises(ValueError, match="REQUESTS"):
        Workload.parse("64x128")


def test_neurons_are_armed_where_they_are_asked_for_alone() -> None:
    """What the default modes cost is not changed by a site that only one more mode needs."""
    assert sites_for(MODES) == sites_for([CONTROL, "idle"]) == ["resid_post"]
    assert sites_for(["idle", *NEURONS]) == ["neurons"]
    assert sites_for([*MODES, *NEURONS]) == ["neurons", "resid_post"]
    assert sites_for(["idle", "capture-z"]) == ["z"]
    assert sites_for(["idle"], ["q", "embed"]) == ["embed", "q"]
    assert SHAPES["qwen3-8b"].row_bytes("z") == SHAPES["qwen3-8b"].row_bytes("resid_post")
    assert (SHAPES["qwen3-8b"].row_bytes("neurons"), SHAPES["qwen3-8b"].row_bytes("resid_post")) == (884_736, 294_912)


@pytest.mark.parametrize("every", [0, 1, 2])
def test_every_mode_runs_once_a_round_between_base_runs(every: int) -> None:
    """The order turns, so that no mode keeps its place."""
    names = ["a", "b", "c"]
    orders = [sequence(names, number, every) for number in range(3)]
    for order in orders:
        assert order[0] == order[-1] == BASE
        assert sorted(name for name in order if name != BASE) == names
    assert len({tuple(order) for order in orders}) == 3
    assert sum(name == BASE for name in orders[0]) == {0: 2, 1: 4, 2: 3}[every]


def test_ratios_are_to_the_base_runs_around() -> None:
    """A machine that slows down steadily is not the fault of any mode."""
    runs = [(BASE, 1.0), ("a", 1.1), (BASE, 1.2), ("b", 1.5), ("c", 1.5), (BASE, 1.8)]
    assert [name for name, _ in ratios(runs)] == ["a", "b", "c"]
    assert [ratio for _, ratio in ratios(runs)] == pytest.approx([1.0, 1.0, 1.0])
    passes = [[{"mode": name, "seconds": seconds} for name, seconds in runs]] * 2
    passes[1] = [*passes[1][:1], {"mode": "a", "seconds": 2.2}, *passes[1][2:]]
    found = summary(passes, Workload(2, 3, 2), {"a": 2.0})
    assert found["a"]["ratio"]["median"] == pytest.approx(1.5)
    assert (found["a"]["ratio"]["low"], found["a"]["ratio"]["high"]) == pytest.approx((1.0, 2.0))
    assert found["a"]["limit_percent"] == 2.0
    assert found[BASE]["ratio"] is None
    assert found[BASE]["tokens_per_s"] == pytest.approx(10 / 1.2)


def test_the_phases_of_a_run_are_told_from_when_things_came() -> None:
    """Milliseconds from the call; a full pass is one with an output of every request."""
    watch = Watch(
        sent=[10.01, 10.02, 10.05],
        outputs=[(10.1, 1), (10.2, 3), (10.3, 3), (10.5, 3), (10.6, 2)],
        started=10.0,
        cpu=1.0,
    )
    found = phases(watch, 3, ended=10.7, cpu=1.25)
    assert set(found) == set(PHASES)
    assert found == pytest.approx({
        "passes": 5, "first_sent_ms": 10, "last_sent_ms": 50, "first_output_ms": 100, "first_full_ms": 200,
        "full_ms": 150, "tail_ms": 100, "whole_ms": 700, "client_ms": 250,
    })  # fmt: skip
    few = phases(watch, 4, ended=10.7, cpu=1.25)
    assert set(found) - set(few) == {"first_full_ms", "full_ms"}
    rounds = [
        [{"mode": "idle", "seconds": 1.0, **found}, {"mode": "base", **few}],
        [{"mode": "idle", **found, "tail_ms": 300}],
    ]
    said = medians(rounds)
    assert said["idle"]["tail_ms"] == pytest.approx(200)
    assert "seconds" not in said["idle"]
    assert len(phases_table("a trial", said).rows) == 2


async def test_an_engine_is_watched_from_outside() -> None:
    """What its methods give and take stays the same, and what came before a run is forgotten."""

    async def add(request: str, *, urgent: bool) -> str:
        return f"{request} {urgent}"

    llm = SimpleNamespace(
        engine_core=SimpleNamespace(add_request_async=add), output_processor=SimpleNamespace(process_outputs=sum)
    )
    watch = Watch.of(llm)
    assert llm.output_processor.process_outputs([7]) == 7
    watch.begin()
    assert await llm.engine_core.add_request_async("one", urgent=True) == "one True"
    assert llm.output_processor.process_outputs([1, 2], 3) == 6
    found = watch.phases(2)
    assert found["passes"] == 1
    assert 0 < found["first_sent_ms"] <= found["first_output_ms"] <= found["whole_ms"]


def test_requests_that_arrive_as_others_end_have_lengths_around_those_written() -> None:
    load = Workload.parse("64~128+200")
    assert (str(load), load.requests, load.under_way) == ("64~128+200", 192, 64)
    prompts, generated = (sorted(lengths) for lengths in zip(*load.lengths, strict=True))
    assert 64 <= prompts[0] < 80
    assert 176 < prompts[-1] <= 192
    assert 100 <= generated[0] < 115
    assert 285 < generated[-1] <= 300
    assert load.tokens == sum(load.rows) + 192
    assert Workload.parse("64x128+200").lengths == ((128, 200),) * 64


def test_the_page_has_the_table_of_what_was_measured() -> None:
    table = docs_speed.markdown(json.loads(docs_speed.KEPT.read_text()))
    assert f"{docs_speed.START}{table}{docs_speed.END}" in docs_speed.PAGE.read_text()


def test_the_readme_claims_no_less_than_what_was_measured() -> None:
    """It names the greatest median of all workloads of 8B with all layers captured, and a range that holds those of 0.6B."""
    readme = (docs_speed.PAGE.parent.parent / "README.md").read_text()
    most = float(re.findall(r"adds \[at most ([\d.]+) %\]\(docs/speed\.md\)", readme)[0])
    entries = json.loads(docs_speed.KEPT.read_text())
    medians = {name: round(one["modes"]["capture-all"][0], 1) for name, one in entries.items()}
    drafting = float(re.findall(r"at most ([\d.]+) % where drafts", readme)[0])
    large = [median for name, median in medians.items() if "qwen3-8b" in name and "ngram" not in name]
    assert (max(large), max(medians.values())) == (most, drafting), medians
    low, high = map(int, re.findall(r"and (\d+) to (\d+) % to that of a model of 0\.6B", readme)[0])
    small = [
        entries[name]["modes"][mode][0] for name in medians if "0.6b" in name for mode in ("capture-all", "steer-1")
    ]
    assert low <= min(small) <= max(small) <= high, medians


def test_a_table_has_the_limit_of_each_mode(tmp_path: Path) -> None:
    ratio = {"median": 1.02, "low": 1.01, "high": 1.04}
    modes = {name: {"ratio": ratio} for name in ("control", "idle", "steer-1", "steer-64")} | {"base": {"ratio": None}}
    data = {
        "argv": ["bench_gpu.py", "--shape", "qwen3-8b"],
        "machine": {"gpus": "name, memory\nA card, 1 GiB", "commit": "0123456789"},
        "engine_args": {},
        "workloads": {"64x128+200": {"rounds": [[], []], "summary": modes}, "1x32+200": {"rounds": []}},
    }
    (tmp_path / "bench.json").write_text(json.dumps(data))
    found = docs_speed.kept(tmp_path / "bench.json", "A note.")
    assert found.keys() == {"qwen3-8b 64x128+200"}
    row, said = docs_speed.markdown(found).splitlines()[2::2]
    cell = "**+2.0** (+1.0 to +4.0"
    assert row == f"| qwen3-8b 64x128+200 | {cell}) | {cell}, aim 0.5) |  | {cell}, aim 1.5) | {cell}, aim 2) |"
    assert said.startswith("- qwen3-8b 64x128+200: A card, 20")
    assert said.endswith(", 01234567, 2 rounds. A note.")
    (tmp_path / "bench.json").write_text(json.dumps(data | {"engine_args": {"tensor_parallel_size": 2}}))
    found = docs_speed.kept(tmp_path / "bench.json", "")
    assert f"| qwen3-8b-tp2 64x128+200 | {cell}) | {cell}, aim 0.5) |  | {cell}, aim 2) |" in docs_speed.markdown(found)
