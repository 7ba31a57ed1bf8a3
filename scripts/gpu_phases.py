"""Where the time of one call goes that is not spent in steady passes: until requests are sent, until outputs come, behind them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from rich.table import Table

#: What is known of a run, milliseconds from the call on, but for the number of passes.
PHASES: Final[Mapping[str, str]] = {
    "first_sent_ms": "first request sent",
    "last_sent_ms": "last request sent",
    "first_output_ms": "first output",
    "first_full_ms": "first full pass",
    "passes": "passes",
    "full_ms": "a full pass",
    "tail_ms": "behind the last output",
    "whole_ms": "whole",
    "client_ms": "client's CPU",
}

now = time.perf_counter


@dataclass
class Watch:
    """Notes of the process that calls an engine.

    Args:
        sent: when each request was handed to the engine's core.
        outputs: when the outputs of each pass came, and of how many requests.
        started, cpu: when the run began, on both clocks.
    """

    sent: list[float] = field(default_factory=list)
    outputs: list[tuple[float, int]] = field(default_factory=list)
    started: float = 0.0
    cpu: float = 0.0

    @classmethod
    def of(cls, llm: Any) -> Watch:
        """Watch vLLM's AsyncLLM from now on."""
        watch = cls()
        core, processor = llm.engine_core, llm.output_processor
        add, process = core.add_request_async, processor.process_outputs

        async def add_request_async(*given: Any, **options: Any) -> Any:
            watch.sent.append(now())
            return await add(*given, **options)

        def process_outputs(outputs: Sequence[Any], *given: Any, **options: Any) -> Any:
            watch.outputs.append((now(), len(outputs)))
            return process(outputs, *given, **options)

        core.add_request_async, processor.process_outputs = add_request_async, process_outputs
        return watch

    def begin(self) -> None:
        """Forget all; a run begins."""
        self.sent.clear()
        self.outputs.clear()
        self.started, self.cpu = now(), time.process_time()

    def phases(self, requests: int) -> dict[str, float]:
        """What the run says that ends now; see `PHASES`."""
        return phases(self, requests, now(), time.process_time())


def phases(watch: Watch, requests: int, ended: float, cpu: float) -> dict[str, float]:
    """The phases of a run that ended then; those of full passes are left out where no pass had an output of every request."""
    full = [at for at, count in watch.outputs if count >= requests]
    seconds = {
        "first_sent_ms": watch.sent[0] - watch.started,
        "last_sent_ms": watch.sent[-1] - watch.started,
        "first_output_ms": watch.outputs[0][0] - watch.started,
        "tail_ms": ended - watch.outputs[-1][0],
        "whole_ms": ended - watch.started,
        "client_ms": cpu - watch.cpu,
    }
    if full:
        seconds["first_full_ms"] = full[0] - watch.started
    if len(full) > 1:
        seconds["full_ms"] = statistics.median(after - before for before, after in pairwise(full))
    return {"passes": len(watch.outputs), **{name: 1e3 * value for name, value in seconds.items()}}


def medians(passes: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """The medians over the runs of all rounds, of each mode."""
    everything = [run for runs in passes for run in runs]
    found: dict[str, dict[str, float]] = {}
    for mode in dict.fromkeys(run["mode"] for run in everything):
        of_mode = [run for run in everything if run["mode"] == mode]
        known = {name: [run[name] for run in of_mode if name in run] for name in PHASES}
        found[mode] = {name: statistics.median(values) for name, values in known.items() if values}
    return found


def phases_table(title: str, found: Mapping[str, Mapping[str, float]]) -> Table:
    """One workload's phases."""
    table = Table(title=f"{title}: ms from the call, medians", title_justify="left")
    table.add_column("mode")
    for heading in PHASES.values():
        table.add_column(heading, justify="right")
    for mode, values in found.items():
        table.add_row(mode, *(f"{values[name]:.2f}" if name in values else "" for name in PHASES))
    return table
