"""Plain vLLM and steercap side by side, and one run of either, timed and checked: what `bench_gpu.py` repeats."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from bench_capture import plain_outputs, sampling
from gpu_phases import Watch
from gpu_rounds import BASE, CODECS, CONTROL, Mode, Workload
from gpu_shapes import Shape

START = time.monotonic()
#: Least share of the requests of a strongly steered run whose tokens must differ from base's.
DIFFERENT = 0.9


class NotReal(RuntimeError):
    """A run did not do what its time is to stand for."""


#: Captures of every row at every layer as it is, some of which are fetched.
WHOLE = ("all", "z", "neurons")
#: Directions that rows are projected on.
DIRECTIONS = 4


def say(text: str) -> None:
    """A line of progress."""
    print(f"[{time.monotonic() - START:6.1f} s] {text}", file=sys.stderr, flush=True)


@dataclass
class Run:
    """One run of one mode.

    Args:
        mode: its name.
        seconds: from the call until outputs are there, and rows are readable.
        outputs: vLLM's output of each request.
        more: readable_s, bytes_per_token, fetch_s, fetch_bytes of a capture; its phases, if they are watched.
    """

    mode: str
    seconds: float
    outputs: list[Any] = field(repr=False)
    more: dict[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> list[list[int]]:
        """Generated token ids of each request."""
        return [list(output.outputs[0].token_ids) for output in self.outputs]

    def record(self, reference: Run) -> dict[str, Any]:
        """What is kept of it; `same_as_base` is the share of requests with the tokens of `reference`."""
        same = sum(mine == theirs for mine, theirs in zip(self.tokens, reference.tokens, strict=True))
        return {"mode": self.mode, "seconds": self.seconds, "same_as_base": same / len(self.outputs), **self.more}


@dataclass
class Bench:
    """Two engines, and what is asked of them.

    Args:
        plain: vLLM's AsyncLLM.
        again: the one that runs the control: `plain`, or a second engine of plain vLLM.
        model: the SteerModel.
        specs: steering specs, all different: those of the warm-up, which change outputs for all to see, and those that
            are timed, which change rows as little as they can.
        fetch_bytes: most bytes of rows to fetch after an all-layers capture.
        watches: of each engine, whose phases are then in what a run says.
    """

    plain: Any
    again: Any
    model: Any
    specs: dict[bool, list[Any]]
    fetch_bytes: float
    watches: dict[str, Watch] = field(default_factory=dict)

    def watch_phases(self) -> None:
        """Note when requests are sent and outputs come, from now on."""
        plain = {name: Watch.of(llm) for name, llm in ((BASE, self.plain), (CONTROL, self.again))}
        self.watches = {**plain, "steercap": Watch.of(self.model.engine)}

    @cached_property
    def directions(self) -> Any:
        """Directions at every layer, to project rows on."""
        import torch

        from steercap.steering import DirectionSet, LayerVectors

        drawn = torch.Generator().manual_seed(0)
        layers, width = range(self.model.num_layers), self.model.hidden_size
        return DirectionSet(
            {
                f"{name}": LayerVectors({layer: torch.randn(width, generator=drawn) for layer in layers})
                for name in range(DIRECTIONS)
            }
        )

    async def run(
        self,
        name: str,
        workload: Workload,
        tokens: list[list[int]],
        *,
        fetch: bool = False,
        wake: bool = True,
        strong: bool = False,
    ) -> Run:
        """One run, timed and checked.

        Args:
            name: a mode, or base.
            workload: how many requests of what length.
            tokens: the prompts.
            fetch: whether to fetch rows after an all-layers capture.
            wake: whether a short request comes before: modes come right after a run of the other engine, base after
                one of its own at times.
            strong: which of the specs steer.

        Raises:
            NotReal: it was not what it should be.
        """
        salt = str(time.monotonic_ns())
        given = [{"prompt_token_ids": prompt, "cache_salt": salt} for prompt in tokens]
        gc.collect()
        first = ({"prompt_token_ids": tokens[0][:8], "cache_salt": salt}, {**sampling(2), "detokenize": False})
        if name in (BASE, CONTROL):
            llm = self.plain if name == BASE else self.again
            if wake:
                await plain_outputs(llm, [first[0]], first[1])
            self._begin_watch(name)
            start = time.perf_counter()
            outputs = await in_turns(workload, partial(self._plain, llm, given))
            run = Run(name, time.perf_counter() - start, outputs, self._phases(name, workload))
        else:
            if wake:
                await self.model.generate(*first)
            self._begin_watch("steercap")
            run = await self._steercap(name, workload, given, fetch=fetch, strong=strong)
        _check_outputs(run, workload)
        return run

    def _begin_watch(self, engine: str) -> None:
        if engine in self.watches:
            self.watches[engine].begin()

    def _phases(self, engine: str, workload: Workload) -> dict[str, float]:
        """What the watch of an engine says, if it has one, of a run that has just ended."""
        return self.watches[engine].phases(workload.requests) if engine in self.watches else {}

    async def _plain(self, llm: Any, given: list[Any], places: slice, sampled: dict[str, Any]) -> list[Any]:
        outputs: list[Any] = await plain_outputs(llm, given[places], sampled)
        return outputs

    async def _steercap(self, name: str, workload: Workload, given: list[Any], *, fetch: bool, strong: bool) -> Run:
        from steercap import CaptureSpec

        mode, model = Mode.parse(name), self.model
        chosen = [self.specs[strong][place % mode.specs] for place in range(len(given))] if mode.specs else None
        layers: Any = [model.num_layers // 2] if mode.capture == "one" else "all"
        how: dict[str, Any] = {"reduce": "mean"} if mode.capture == "mean" else {}
        if (codec := (mode.capture or "").removeprefix("neurons-")) in {*CODECS, "topk8"}:
            how = {"codec": codec}
        spec = CaptureSpec(layers=layers, sites=mode.site, **how) if mode.capture and mode.site else None
        if mode.capture == "project":
            spec = CaptureSpec(project=self.directions)

        async def call(places: slice, sampled: dict[str, Any]) -> list[Any]:
            steering = chosen[places] if chosen else None
            results: list[Any] = await model.run(given[places], sampled, capture=spec, steering=steering)
            return results

        start = time.perf_counter()
        raws = await in_turns(workload, call)
        texts = time.perf_counter()
        if spec is None:
            run = Run(name, texts - start, [raw.output for raw in raws], self._phases("steercap", workload))
        else:
            handles = [raw.handle for raw in raws]
            found = await rows_readable(model, handles)
            end = time.perf_counter()
            more = {"readable_s": end - texts, **self._phases("steercap", workload)}
            run = Run(name, end - start, [raw.output for raw in raws], more)
            run.more["bytes_per_token"] = _stored_bytes(found) / sum(workload.rows)
            await self._captured(run, workload, handles, found, fetch=fetch and mode.capture in WHOLE)
        if chosen:
            _check_receipts(run, raws, workload, model.num_layers)
        return run

    async def _captured(
        self, run: Run, workload: Workload, handles: list[Any], found: Sequence[Sequence[Any]], *, fetch: bool
    ) -> None:
        """Check what was captured, fetch some of it, and free it before the next run."""
        import torch

        for handle, shares, rows in zip(handles, found, workload.rows, strict=True):
            _check_rows(run, handle, shares, rows)
        if fetch:
            dtype: torch.dtype = self.model.engine.vllm_config.model_config.dtype
            width = self.model.points[handles[0].points[0]].width
            size = max(workload.rows) * self.model.num_layers * width * dtype.itemsize
            some = handles[: max(1, int(self.fetch_bytes / size))]
            start = time.perf_counter()
            await self.model.fetch_captures_batch(some)
            run.more["fetch_s"] = time.perf_counter() - start
            run.more["fetch_bytes"] = sum(rows.nbytes for handle in some for rows in handle.captures.values())
            for rows in some[-1].captures.values():
                if (
                    rows.flatten(1).shape != (workload.rows[len(some) - 1], width)
                    or not rows.isfinite().all()
                    or not rows.any()
                ):
                    raise NotReal(f"{run.mode}: rows of shape {tuple(rows.shape)}, not finite, or all zero")
        for handle in handles:
            handle.release()
        await self.model.stats()  # a call that takes with it what was released


async def in_turns(workload: Workload, call: Callable[[slice, dict[str, Any]], Awaitable[list[Any]]]) -> list[Any]:
    """What one call of all requests returns, or one of each, begun when one of those under way ends."""
    if not workload.under_way:
        return await call(slice(None), {**sampling(workload.generated), "detokenize": False})
    limit = asyncio.Semaphore(workload.under_way)

    async def one(place: int, generated: int) -> list[Any]:
        async with limit:
            return await call(slice(place, place + 1), {**sampling(generated), "detokenize": False})

    found = await asyncio.gather(*(one(place, generated) for place, (_, generated) in enumerate(workload.lengths)))
    return [result for results in found for result in results]


async def rows_readable(model: Any, handles: Sequence[Any]) -> list[list[Any]]:
    """Wait until every row is readable by this process: each handle's captured rows, of each capturing worker."""
    located = await model.serving.opened().workers.locate([handle.lifecycle.source.wanted for handle in handles])
    return [[captured_rows for engine in engines for captured_rows in engine] for engines in located]


def _stored_bytes(found: Sequence[Sequence[Any]]) -> int:
    """What rows take in the arenas of all workers together."""
    from steercap.core.schema import LINE_BYTES

    return LINE_BYTES * int(
        sum(lines.count for shares in found for captured_rows in shares for lines in captured_rows.lines)
    )


def _check_outputs(run: Run, workload: Workload) -> None:
    if len(run.outputs) != workload.requests:
        raise NotReal(f"{run.mode}: {len(run.outputs)} outputs, not {workload.requests}")
    for output, (_, generated) in zip(run.outputs, workload.lengths, strict=True):
        if len(output.outputs[0].token_ids) != generated:
            raise NotReal(f"{run.mode}: {len(output.outputs[0].token_ids)} tokens, not {generated}")
        if output.num_cached_tokens:
            raise NotReal(f"{run.mode}: {output.num_cached_tokens} prompt tokens came from the prefix cache")


def _check_rows(run: Run, handle: Any, shares: Sequence[Any], rows: int) -> None:
    import numpy as np

    from steercap.core.messages import Unknown

    points: set[int] = set()
    for captured_rows in shares:
        if isinstance(captured_rows, Unknown) or captured_rows.failure:
            raise NotReal(f"{run.mode}: a worker has no rows of {handle.request_id}: {captured_rows}")
        if captured_rows.points and not np.array_equal(
            np.frombuffer(captured_rows.positions, dtype=np.int64), np.arange(rows)
        ):
            raise NotReal(f"{run.mode}: {handle.request_id} has not one row for each of {rows} positions")
        points |= set(captured_rows.points)
    if len(points) != len(handle.points):
        raise NotReal(f"{run.mode}: rows at {len(points)} points of {handle.request_id}, not {len(handle.points)}")


def _check_receipts(run: Run, raws: Sequence[Any], workload: Workload, layers: int) -> None:
    for raw, rows in zip(raws, workload.rows, strict=True):
        (receipt,) = raw.steering
        if sum(receipt.rows) != rows * layers or receipt.cached:
            raise NotReal(f"{run.mode}: {receipt}, where every one of {rows} rows has {layers} layers")


def check_steered(record: dict[str, Any]) -> None:
    if record["mode"].startswith("steer-") and record["same_as_base"] > 1 - DIFFERENT:
        raise NotReal(f"{record['mode']}: {record['same_as_base']:.0%} of the outputs are what they are unsteered")


#: What vectors are scaled by when it must be seen that they steer, and when they are timed. The rows of a model of vLLM's
#: random weights have elements of about 6e-4: rows that are mostly one vector draw less power than rows of a text, and a
#: GPU at its limit of power then runs faster than unsteered.
SCALES = {True: 0.01, False: 1e-6}


def specs_of(count: int, shape: Shape, *, per_layer: bool) -> dict[bool, list[Any]]:
    """Specs that add at every layer: a vector each, or one for each layer each."""
    import torch

    from steercap import Add, SteeringSpec

    def one(seed: int, scale: float) -> Any:
        generator = torch.Generator().manual_seed(seed)
        if not per_layer:
            return SteeringSpec([Add(torch.randn(shape.hidden_size, generator=generator), scale, layers="all")])
        vectors = torch.randn(shape.num_hidden_layers, shape.hidden_size, generator=generator)
        return SteeringSpec([Add(vector, scale, layer=layer) for layer, vector in enumerate(vectors)])

    return {strong: [one(seed, scale) for seed in range(count)] for strong, scale in SCALES.items()}


@asynccontextmanager
async def engines(
    folder: str, own: dict[str, Any], plain_args: list[dict[str, Any]], steer_args: dict[str, Any], *, in_turn: bool
) -> AsyncIterator[tuple[list[Any], Any, dict[str, float]]]:
    """Engines of plain vLLM, steercap, and how many seconds each took to start; at once, or one after the other."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from steercap import SteerModel

    model = SteerModel(folder, **own, **steer_args)
    plain: dict[str, Any] = {}
    took: dict[str, float] = {}

    async def start(name: str, args: dict[str, Any] | None) -> None:
        begun = time.monotonic()
        if args is None:
            await model.start()
        else:
            wanted = AsyncEngineArgs(model=folder, **args)
            plain[name] = await asyncio.to_thread(AsyncLLM.from_engine_args, wanted)
        took[name] = time.monotonic() - begun
        say(f"{name} is up after {took[name]:.0f} s")

    named = {**{f"plain {place}": args for place, args in enumerate(plain_args)}, "steercap": None}
    try:
        if in_turn:
            for name, args in named.items():
                await start(name, args)
        else:
            # Not a TaskGroup: a thread that starts an engine cannot be stopped, and what it started must be.
            starts = [start(name, args) for name, args in named.items()]
            for error in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(error, BaseException):
                    raise error
        yield [plain[name] for name in named if name in plain], model, took
    finally:
        await model.aclose()
        for llm in plain.values():
            await _shut_down(llm)


async def _shut_down(llm: Any) -> None:
    if llm.output_handler is not None:  # or it would report the engine's end as a crash
        llm.output_handler.cancel()
        await asyncio.wait([llm.output_handler])
    llm.shutdown()
