"""How long each pass takes in a worker of vLLM, on the host and on the device; see `sitecustomize`."""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

now = time.perf_counter
#: Names of the functions of steercap that are timed apart, by class or module.
STAGES: Final = {
    "RequestTable": ("make_step",),
    "CudaTaps": ("open", "_upload", "close", "_bundle", "_queue"),
    "Runtime": ("_take_completed", "_verify"),
    "kernel": ("launch_close",),
}
#: Seconds without a pass after which what was measured is written: the engine stands still.
QUIET: Final = 0.4


@dataclass
class PassTimes:
    """One pass; times are seconds of the host's clock, durations seconds.

    Args:
        kind: "plain" without steercap, "idle" if it tracks no token, "capture", "steer" or "both".
        requests, tokens: of the batch.
        started, executed: begin and end of the worker's execute_model.
        sampling, ended: begin and end of its sample_tokens.
        begin, end: of it, steercap's work before the pass and after it.
        launch: of it, the launch of the pass's graph.
        taps: of it, steercap's taps where they run outside of graphs.
        collected: of it, Python's garbage collector.
        thread, process: processor time of this thread and of the process, so far.
        stages: seconds of each function of `STAGES` in begin and end, by its name; one within another counts twice.
        replayed: whether the pass is one graph.
        events: the device's: at the begin, before and behind the graph, and at the end.
    """

    requests: int
    tokens: int
    started: float
    kind: str = "plain"
    executed: float = 0.0
    sampling: float = 0.0
    ended: float = 0.0
    begin: float = 0.0
    end: float = 0.0
    launch: float = 0.0
    taps: float = 0.0
    collected: float = 0.0
    thread: float = 0.0
    process: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    replayed: bool = False
    events: list[Any] = field(default_factory=list, repr=False)

    def record(self, before: PassTimes | None) -> dict[str, Any]:
        """What is written: with the device's µs if it said four times, and those since the pass before."""
        found = {name: value for name, value in vars(self).items() if name != "events"}
        if len(self.events) >= 4:
            first, graph, behind, last = *self.events[:3], self.events[-1]
            pairs = {"prepare": (first, graph), "graph": (graph, behind), "tail": (behind, last)}
            found |= {name: 1e3 * one.elapsed_time(other) for name, (one, other) in pairs.items()}
            if before is not None and len(before.events) >= 4:
                found["gap"] = 1e3 * before.events[-1].elapsed_time(first)
        return found


class Recorder:
    """The passes of this process.

    Args:
        folder: where they are written, into a file named for the process.
    """

    def __init__(self, folder: Path) -> None:
        self.current: PassTimes | None = None
        self._folder = folder
        self._passes: list[PassTimes] = []
        self._last = 0.0

    def watch(self) -> None:
        """Write from now on, whenever the engine stands still."""
        threading.Thread(target=self._watch, daemon=True, name="times of passes").start()

    def mark(self) -> None:
        """Have the device say when it is here."""
        if self.current is not None and (make := event_type()) is not None:
            event = make(enable_timing=True)
            event.record()
            self.current.events.append(event)

    def finish(self) -> None:
        """The pass has ended."""
        if self.current is not None:
            self.current.ended = self._last = now()
            self._passes.append(self.current)
            self.current = None

    def write(self) -> None:
        """Write the passes that have ended, and that none follows at once."""
        passes, self._passes = self._passes, []
        self._folder.mkdir(parents=True, exist_ok=True)
        befores: Sequence[PassTimes | None] = [None, *passes]
        with (self._folder / f"{os.getpid()}.jsonl").open("a") as file:
            for before, one in zip(befores, passes, strict=False):
                file.write(json.dumps(one.record(before)) + "\n")
            file.write(json.dumps({"over": True}) + "\n")

    def _watch(self) -> None:
        while True:
            time.sleep(QUIET / 2)
            if self._passes and now() - self._last > QUIET:
                try:
                    self.write()
                except Exception as error:  # noqa: BLE001 -- the engine must go on
                    print(f"times of passes: {error!r}", file=sys.stderr, flush=True)


@functools.cache
def event_type() -> Any:
    """The device's kind of event, None without a device; found once, since to ask takes long."""
    import torch

    return torch.cuda.Event if torch.cuda.is_available() else None


@functools.cache
def recorder() -> Recorder:
    """The recorder of this process."""
    found = Recorder(Path(os.environ["PERF_TIMES"]))
    found.watch()
    return found


def patch_gpu_worker(module: Any) -> None:
    """Time the worker's two calls of a pass."""
    times, worker = recorder(), module.Worker
    execute, sample = worker.execute_model, worker.sample_tokens

    @functools.wraps(execute)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **options: Any) -> Any:
        tokens = scheduler_output.total_num_scheduled_tokens
        if not tokens:
            return execute(self, scheduler_output, *args, **options)
        one = PassTimes(len(scheduler_output.num_scheduled_tokens), tokens, now())
        one.thread, one.process = time.thread_time(), time.process_time()
        times.current = one
        times.mark()
        try:
            return execute(self, scheduler_output, *args, **options)
        finally:
            one.executed = now()

    @functools.wraps(sample)
    def sample_tokens(self: Any, *args: Any, **options: Any) -> Any:
        if (one := times.current) is None:
            return sample(self, *args, **options)
        one.sampling = now()
        try:
            return sample(self, *args, **options)
        finally:
            times.mark()
            times.finish()

    worker.execute_model, worker.sample_tokens = execute_model, sample_tokens


def patch_cudagraph_utils(module: Any) -> None:
    """Time graphs of whole passes."""
    times, manager = recorder(), module.CudaGraphManager
    run = manager.run_fullgraph

    @functools.wraps(run)
    def run_fullgraph(self: Any, *args: Any, **options: Any) -> Any:
        if (one := times.current) is None:
            return run(self, *args, **options)
        one.replayed = True
        times.mark()
        start = now()
        found = run(self, *args, **options)
        one.launch = now() - start
        times.mark()
        return found

    manager.run_fullgraph = run_fullgraph


def patch_runtime(module: Any) -> None:
    """Time steercap's work around a pass."""
    times, runtime = recorder(), module.Runtime
    begin, end = runtime.begin_step, runtime.end_step

    @functools.wraps(begin)
    def begin_step(self: Any, *args: Any, **options: Any) -> None:
        start = now()
        begin(self, *args, **options)
        if times.current is not None:
            times.current.begin = now() - start
            times.current.kind = kind_of(self.taps.open_step)

    runtime.begin_step, runtime.end_step = begin_step, _timed(end, _add_to("end"))
    time_stages(module, "RequestTable", "Runtime")


def patch_cuda(module: Any) -> None:
    """Time the taps of a GPU's worker, and the garbage collector."""
    module.CudaTaps.on_tap = _timed(module.CudaTaps.on_tap, _add_to("taps"))
    time_stages(module, "CudaTaps", "kernel")
    gc.callbacks.append(Collections(recorder()))


def time_stages(module: Any, *owners: str) -> None:
    """Time the functions of `STAGES` of some classes, or modules, that a module names."""
    for owner in owners:
        for name in STAGES[owner]:
            target = getattr(module, owner)
            setattr(target, name, _timed(getattr(target, name), _add_to(name, stage=True)))


def _add_to(name: str, *, stage: bool = False) -> Callable[[PassTimes, float], None]:
    """A function that adds seconds to a field of a pass, or to one of its stages."""

    def add(one: PassTimes, seconds: float) -> None:
        of = one.stages if stage else vars(one)
        of[name] = of.get(name, 0.0) + seconds

    return add


def _timed(function: Any, add: Callable[[PassTimes, float], None]) -> Any:
    times = recorder()

    @functools.wraps(function)
    def timed(*args: Any, **options: Any) -> Any:
        start = now()
        try:
            return function(*args, **options)
        finally:
            if (one := times.current) is not None:
                add(one, now() - start)

    return timed


class Collections:
    """Adds the time of the garbage collector to the pass that it interrupts."""

    def __init__(self, times: Recorder) -> None:
        self._times, self._started = times, 0.0

    def __call__(self, phase: str, _info: Mapping[str, int]) -> None:
        if phase == "start":
            self._started = now()
        elif self._times.current is not None:
            self._times.current.collected += now() - self._started


def kind_of(step: Any) -> str:
    """What a step does, by its first token."""
    if step is None:
        return "idle"
    kept, changed = bool(step.kept[0]), bool(step.changed[0])
    return "both" if kept and changed else "capture" if kept else "steer"
