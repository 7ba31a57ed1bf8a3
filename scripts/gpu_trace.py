"""Where the time of two torch profiler traces goes, by kind of kernel and step, and how they differ.

    python scripts/gpu_trace.py BASE.pt.trace.json.gz OTHER.pt.trace.json.gz

Reads Chrome traces, gzipped or not. Without GPU events in it, a trace's CPU operators are counted in their place,
each without what it calls.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
#: vLLM's worker wraps each forward pass in an annotation of this name, and steps of no tokens too.
STEP = re.compile(r"execute_(?!context_0\(0\)_generation_0\(0\))")
#: First match wins: flash attention's kernels carry cutlass in their names, inductor's the operators they fuse.
GROUPS = (
    ("steercap", r"steercap|^_?(tap|close)(_|$)"),
    ("memcpy DtoH", r"memcpy DtoH"),
    ("memcpy HtoD", r"memcpy HtoD"),
    ("memcpy other", r"memcpy"),
    ("memset", r"memset"),
    ("attention", r"attention|attn|flash|fmha|reshape_and_cache|merge_state"),
    ("norm", r"norm|rsqrt"),
    ("GEMM", r"gemm|gemv|cutlass|nvjet|cublas|matmul|wgmma|xmma|split_?k|(^|::|_)(add|b|ba)?mm\b|linear"),
    ("all-reduce", r"nccl|all_?reduce|all_?gather"),
    ("sampling", r"arg_?max|top_?k|sampl|gumbel|logit|softmax"),
    ("rotary, activation", r"rotary|rope|silu|gelu|swiglu"),
    ("other, inductor", r"^triton_"),
    ("runner's own", r"^_[a-z0-9_]+_kernel"),
)


@dataclass(frozen=True)
class Trace:
    """What one trace says; times in microseconds.

    Args:
        times: time and calls of each kernel, or of each CPU operator, by name.
        busy: time during which at least one kernel ran; copies and memsets, which run beside them, left out.
        span: time from the start of the first to the end of the last.
        steps: forward passes; 0 where they are not marked.
        on_device: whether these are GPU events.
    """

    times: dict[str, tuple[float, int]]
    busy: float
    span: float
    steps: int
    on_device: bool

    @classmethod
    def of(cls, events: Iterable[dict[str, Any]]) -> Trace:
        """Add up the events of a Chrome trace.

        Raises:
            ValueError: there is neither a GPU event nor a CPU operator.
        """
        complete = [event for event in events if event.get("ph") == "X"]
        steps = sum(event.get("cat") == "user_annotation" and bool(STEP.match(event["name"])) for event in complete)
        found = [event for event in complete if event.get("cat") in DEVICE]
        on_device = bool(found)
        if on_device:
            own = [float(event["dur"]) for event in found]
            kernels = [event for event in found if event["cat"] == "kernel"]
        else:
            found = kernels = [event for event in complete if event.get("cat") == "cpu_op"]
            own = _own_times(found)
        if not found:
            raise ValueError("the trace holds neither GPU events nor CPU operators: was anything run while it was on?")
        times: dict[str, list[float]] = defaultdict(list)
        for event, time in zip(found, own, strict=True):
            times[event["name"]].append(time)
        intervals = [_interval(event) for event in found]
        span = max(end for _, end in intervals) - min(start for start, _ in intervals)
        busy = _covered(map(_interval, kernels))
        return cls({name: (sum(all_), len(all_)) for name, all_ in times.items()}, busy, span, steps, on_device)

    def groups(self) -> dict[str, float]:
        """Microseconds of each group."""
        found: dict[str, float] = defaultdict(float)
        for name, (time, _) in self.times.items():
            found[group_of(name)] += time
        return dict(found)


def read_trace(path: Path) -> Trace:
    """Read one file.

    Raises:
        ValueError: it is not a trace, or an empty one.
    """
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        content = json.load(file)
    return Trace.of(content["traceEvents"] if isinstance(content, dict) else content)


def group_of(name: str) -> str:
    """The group of a kernel."""
    return next((group for group, pattern in GROUPS if re.search(pattern, name, re.IGNORECASE)), "other")


def differences(base: Trace, other: Trace) -> dict[str, tuple[float, float]]:
    """Microseconds a step of each group in both; a run where steps are not marked.

    The last rows are no groups: the sum of all, the time in which any kernel ran, the rest of the span, the span.
    """
    first, second = base.groups(), other.groups()
    per_base, per_other = max(base.steps, 1), max(other.steps, 1)
    names = [*(group for group, _ in GROUPS), "other"]
    found = {name: (first.get(name, 0.0), second.get(name, 0.0)) for name in names if name in first or name in second}
    found["= sum"] = (sum(first.values()), sum(second.values()))
    found["= any kernel runs"] = (base.busy, other.busy)
    found["= no kernel runs"] = (base.span - base.busy, other.span - other.busy)
    found["= span"] = (base.span, other.span)
    return {name: (a / per_base, b / per_other) for name, (a, b) in found.items()}


def names_that_differ(base: Trace, other: Trace, most: int) -> list[tuple[str, float, float, float]]:
    """The names whose time a step differs most: name, microseconds in base, in the other, calls a step in the other."""
    per_base, per_other = max(base.steps, 1), max(other.steps, 1)
    rows = []
    for name in base.times | other.times:
        before, (after, calls) = base.times.get(name, (0.0, 0))[0], other.times.get(name, (0.0, 0))
        rows.append((name, before / per_base, after / per_other, calls / per_other))
    return sorted(rows, key=lambda row: -abs(row[2] - row[1]))[:most]


def tables(base: Trace, other: Trace, title: str, most: int = 14) -> list[Table]:
    """Both comparisons, to print."""
    what = "GPU time" if base.on_device else "CPU operators, own time (no GPU events)"
    unit = "µs a step" if base.steps and other.steps else "µs a run"
    groups = _table(f"{title}: {what}, {unit}; {base.steps} and {other.steps} steps", "group")
    for name, (before, after) in differences(base, other).items():
        groups.add_row(name, f"{before:.1f}", f"{after:.1f}", f"{after - before:+.1f}")
    names = _table(f"{title}: what differs most, {unit}", "name", "calls")
    for name, before, after, calls in names_that_differ(base, other, most):
        names.add_row(name[:90], f"{before:.1f}", f"{after:.1f}", f"{after - before:+.1f}", f"{calls:.1f}")
    return [groups, names]


def _table(title: str, first: str, *more: str) -> Table:
    table = Table(title=title, title_justify="left", min_width=100)
    table.add_column(first)
    for column in ("base", "other", "difference", *more):
        table.add_column(column, justify="right")
    return table


def _interval(event: dict[str, Any]) -> tuple[float, float]:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _own_times(events: Sequence[dict[str, Any]]) -> list[float]:
    """Each event's duration without that of the events it calls, on its thread."""
    own = [float(event["dur"]) for event in events]
    order = sorted(range(len(events)), key=lambda place: (events[place]["ts"], -events[place]["dur"]))
    open_: dict[Any, list[int]] = defaultdict(list)
    for place in order:
        event = events[place]
        stack = open_[event.get("pid"), event.get("tid")]
        while stack and _interval(events[stack[-1]])[1] <= event["ts"]:
            stack.pop()
        if stack:
            own[stack[-1]] -= float(event["dur"])
        stack.append(place)
    return own


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("other", type=Path)
    args = parser.parse_args()
    for table in tables(read_trace(args.base), read_trace(args.other), args.other.name):
        Console(width=150).print(table)
