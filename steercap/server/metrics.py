"""steercap's metrics in `/metrics`, after vLLM's, in the same format and by Prometheus's conventions.

They are appended to the answer of vLLM's route, rather than registered with its registry, which all servers of a
process share. `IdleClock` measures how long the server has been idle.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from steercap.core.extras import extra
from steercap.errors import SteercapError
from steercap.requests.stats import Stats
from steercap.server.folder import CaptureStore
from steercap.server.middleware import App, Message, Receive, Send
from steercap.server.recording import DROPPED, SKIPPED, Recorder

with extra("cuda", "cpu"):
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

if TYPE_CHECKING:
    from steercap.model import SteerModel

PATH: Final = "/metrics"
#: Path that answers the server's idle time; and paths whose GET requests do not count as use.
IDLE: Final = "/v1/steercap/idle"
LOOKING: Final = frozenset({PATH, "/health", "/ping", "/version", "/v1/models", "/v1/steercap/model"})
_LOG: Final = logging.getLogger(__name__)
#: Maximum seconds to wait for the workers' figures, which are left out after that.
PATIENCE: Final = 2.0
_OPENMETRICS: Final = b"application/openmetrics-text"
_EOF: Final = b"# EOF\n"
#: Counters: metric name, without `steercap_` and `_total`, and help text by field of `Stats`.
COUNTERS: Final[Mapping[str, tuple[str, str]]] = {
    "rows_captured": ("captured_rows", "Rows that the workers have written."),
    "steps": ("forward_passes", "Forward passes run, by all engines together."),
    "spill_bytes_written": ("spill_written_bytes", "Bytes of rows moved to disk to make room."),
    "vector_bytes_sent": ("vector_sent_bytes", "Bytes of vectors sent to the workers."),
}
#: Gauges: metric name and help text by field of `Stats`.
GAUGES: Final[Mapping[str, tuple[str, str]]] = {
    "capture_bytes": ("capture_memory_bytes", "Memory for rows on each capturing worker."),
    "capture_bytes_claimed": ("capture_memory_claimed_bytes", "Part of it claimed, on the fullest engine."),
    "capture_bytes_in_use": ("capture_memory_used_bytes", "Part of it filled with rows, on the fullest worker."),
    "capture_bytes_resident": ("capture_memory_resident_bytes", "Part of it allocated, on the fullest worker."),
    "requests_waiting": ("waiting_requests", "Requests that wait for capture memory, a reduction or a slot."),
    "handles_held": ("held_requests", "Requests whose rows a worker holds."),
    "spill_bytes": ("spill_limit_bytes", "Maximum bytes of rows on disk."),
    "spill_bytes_in_use": ("spill_used_bytes", "Bytes of rows on disk."),
    "handles_spilled": ("spilled_requests", "Requests whose rows are on disk."),
    "steering_slots": ("steering_slots", "Steering configurations that can be in use at once."),
    "steering_slots_in_use": ("steering_slots_used", "Steering configurations in use."),
    "vector_bytes": ("vector_memory_bytes", "Memory of the vector bank on each worker."),
    "vector_bytes_in_use": ("vector_memory_used_bytes", "Part of it with vectors of running requests."),
    "reductions": ("reductions_limit", "Maximum running reductions in each engine."),
    "reductions_running": ("reductions_running", "Running reductions, in the fullest engine."),
}


class Metrics:
    """ASGI wrapper that appends steercap's metrics to vLLM's `/metrics`; also their collector for prometheus_client.

    Args:
        app: application to wrap.
        model: the open model.
        captures: store of captures that wait to be fetched.
        failures: number of failed requests by class name of the steercap error.
        recorder: recorder of requests, None if nothing is recorded.
    """

    def __init__(
        self,
        app: App,
        model: SteerModel,
        captures: CaptureStore,
        failures: Mapping[str, int],
        recorder: Recorder | None,
    ) -> None:
        self._app, self._model, self._captures = app, model, captures
        self._failures, self._recorder = failures, recorder
        self._stats: Stats | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one ASGI request; to a GET of `/metrics`, append steercap's metrics."""
        if scope["type"] != "http" or scope["method"] != "GET" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(PATIENCE):
                self._stats = await self._model.stats()
        except (SteercapError, TimeoutError):
            self._stats = None
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"accept-encoding"]
        held: list[Message] = []

        async def hold(message: Message) -> None:
            held.append(message)

        await self._app({**scope, "headers": headers}, receive, hold)
        for message in self._extended(held):
            await send(message)

    def _extended(self, answer: list[Message]) -> list[Message]:
        """Return vLLM's ASGI messages with steercap's metrics appended to the body; an error stays unchanged."""
        start = answer[0]
        if start["status"] != 200:
            return answer
        kind = next((value for name, value in start["headers"] if name.lower() == b"content-type"), b"")
        body = b"".join(part.get("body", b"") for part in answer[1:])
        if kind.startswith(_OPENMETRICS):
            body = body.removesuffix(_EOF) + generate_openmetrics(self._registry)  # type: ignore[no-untyped-call]
        else:
            body += generate_latest(self._registry)
        headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
        length = (b"content-length", str(len(body)).encode())
        return [{**start, "headers": [*headers, length]}, {"type": "http.response.body", "body": body}]

    def describe(self) -> Iterator[Metric]:
        """Yield nothing, so that prometheus_client does not check names against another registry's."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of steercap; those of the workers only if they answered in time."""
        stats: Any = self._stats
        up = "1 if the workers answered; else their figures are left out."
        yield GaugeMetricFamily("steercap_workers_up", up, value=float(stats is not None))
        if stats is not None:
            for field, (name, says) in COUNTERS.items():
                yield CounterMetricFamily(f"steercap_{name}", says, value=getattr(stats, field))
            for field, (name, says) in GAUGES.items():
                yield GaugeMetricFamily(f"steercap_{name}", says, value=getattr(stats, field))
        waiting = "Bytes of captures that wait to be fetched."
        yield GaugeMetricFamily("steercap_unfetched_captures_bytes", waiting, value=self._captures.waiting_bytes())
        failed = "Requests that failed with an error of steercap, by its class."
        yield _labelled("steercap_failed_requests", failed, "error", self._failures)
        if self._recorder is not None:
            yield from _of_recorder(self._recorder)


#: Log message of a server that ends because it had no request.
IDLE_END: Final = "no request for %g s: the server ends"


class IdleClock:
    """ASGI wrapper that measures how long a server has had no request, and can end its process.

    GET requests for the paths in `LOOKING`, which only read the server's state, do not count.

    Args:
        app: application to wrap.
        limit: seconds without a request after which `end` ends the process; None for never.
    """

    def __init__(self, app: App, limit: float | None) -> None:
        self._app, self._limit = app, limit
        self._running, self._since, self._served = 0, time.monotonic(), 0

    @property
    def seconds(self) -> float:
        """Seconds since the last counted request ended, or since the start; 0 while one runs."""
        return 0.0 if self._running else time.monotonic() - self._since

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one ASGI request; at `IDLE`, answer the idle seconds, the limit and request counts as JSON."""
        if scope["type"] != "http" or (scope["method"] == "GET" and scope["path"] in LOOKING):
            await self._app(scope, receive, send)
            return
        if scope["path"] == IDLE:
            said = {"idle_seconds": self.seconds, "limit": self._limit, "running": self._running}
            body = json.dumps({**said, "served": self._served}).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        self._running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running, self._since, self._served = self._running - 1, time.monotonic(), self._served + 1

    async def end(self) -> None:
        """Wait until no request has come for `limit` seconds, then send SIGTERM to this process; return if None."""
        while self._limit is not None:
            left = self._limit - self.seconds
            if left <= 0 and not self._running:
                _LOG.warning(IDLE_END, self._limit)
                os.kill(os.getpid(), signal.SIGTERM)
                return
            await asyncio.sleep(max(left, 0.01))


def _of_recorder(recorder: Recorder) -> Iterator[Metric]:
    of = {"requests": "Engine requests, one for each prompt with all its samples,", "rows": "Rows", "bytes": "Bytes"}
    for what, named in of.items():
        says = f"{named} written to the folder of recordings."
        yield CounterMetricFamily(f"steercap_recorded_{what}", says, value=recorder.recorded[what])
    dropped = "Engine requests that could not be recorded, by reason."
    yield _labelled(
        "steercap_recording_dropped_requests", dropped, "reason", dict.fromkeys(DROPPED, 0) | recorder.dropped
    )
    skipped = "Engine requests that were skipped by the settings, by reason."
    yield _labelled(
        "steercap_recording_skipped_requests", skipped, "reason", dict.fromkeys(SKIPPED, 0) | recorder.skipped
    )
    queued = "Bytes of rows that wait to be written."
    yield GaugeMetricFamily("steercap_recording_queue_bytes", queued, value=recorder.pending)
    there = "Bytes of files in the folder of recordings, manifests included."
    yield GaugeMetricFamily("steercap_recording_folder_bytes", there, value=recorder.folder.bytes)


def _labelled(name: str, says: str, label: str, counts: Mapping[str, int]) -> Metric:
    """Return a counter metric with a value for each label value in `counts`."""
    family = CounterMetricFamily(name, says, labels=[label])
    for value, count in [*counts.items()]:
        family.add_metric([value], count)
    return family
