"""A mix of everything that requests do, at more than the memory that there is, for as long as it is told.

Each task draws what to do next, again and again: capture, steer, reduce, encode, stream, sketch, cancel, save, hold
handles for long, or never fetch them. The rows of a sample of requests are compared with transformers, every request
must be answered, and memory is measured all along. The engine is one like `rows.CRAMPED` that serves the tiny qwen3: it
preempts, chunks, and has fewer slots than there are specs.
"""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Final

import torch

from steercap.captures.handle import CaptureHandle
from steercap.captures.stacking import flat
from steercap.core.extras import extra
from steercap.core.spec import REDUCTIONS, CaptureSpec
from steercap.model import SteerModel
from steercap.steering.spec import SteeringSpec
from steercap.testing.reference import Parity, Reference
from support.rows import ALL_SITES, CRAMPED, GREEDY, hold, random_prompt, settled, worst
from support.specs import random_spec

LAYERS, WIDTH = 4, 128
#: What the engine gets: memory for rows of 32 requests, and as much again on disk; a slot for half of those that run.
LIMITS: Final[MappingProxyType[str, Any]] = MappingProxyType(
    {
        **CRAMPED,
        "sites": ALL_SITES,
        "capture_bytes": 48 << 20,
        "overflow": "spill",
        "spill_bytes": 48 << 20,
        "overflow_timeout": 120.0,
        "steering_slots": 8,
    }
)
#: Tasks at once: 16 requests run, and handles of hundreds wait to be fetched.
TASKS: Final = 40
#: Seconds that a handle which is fetched late waits for it.
LATE: Final = (1.0, 45.0)
#: Bytes of rows of handles that wait at once: twice what memory and disk hold together.
HELD: Final = 4 * (48 << 20)
#: The share of requests whose rows are compared with transformers.
SAMPLED: Final = 0.15


@dataclass
class Moment:
    """What is held at a moment.

    Args:
        seconds: since the beginning.
        memory: bytes of the client and of the engine's processes, shared ones counted once: proportional set sizes.
        device: bytes in use on the first GPU, by whomever; 0 without one.
        shared: bytes of rows in shared memory.
        spilled: bytes of rows on disk.
        held: handles whose rows workers hold.
        waiting: requests that wait for memory or a slot.
        answered: requests so far.
    """

    seconds: float
    memory: int
    device: int
    shared: int
    spilled: int
    held: int
    waiting: int
    answered: int


@dataclass
class Report:
    """What a soak showed.

    Args:
        began: what was begun, by its name.
        ended: how it ended: "right", or by the name of what was to happen.
        worst: the worst row of each site that was compared.
        moments: what was held, in order.
        failures: what was not to happen.
    """

    began: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    worst: dict[str, Parity] = field(default_factory=dict)
    moments: list[Moment] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """How much more memory the last quarter took than the second, as a share of it; of a GPU's, if that is more."""
        quarter = len(self.moments) // 4
        early, late = self.moments[quarter : 2 * quarter], self.moments[-quarter:]
        grown = []
        for kind in ("memory", "device"):
            before, after = (median(getattr(one, kind) for one in moments) for moments in (early, late))
            grown.append(after / before - 1 if before else 0.0)
        return max(grown)


class Soak:
    """One soak of an open model.

    Args:
        model: serves the tiny qwen3 with all sites armed.
        reference: transformers on the same checkpoint.
        seed: what is drawn follows from it, but for the order in which tasks draw.
        on_gpu: watch the memory of the first GPU too, which nobody else must use.
    """

    def __init__(self, model: SteerModel, reference: Reference, seed: int, on_gpu: bool = False) -> None:
        self.report = Report()
        self._model, self._reference = model, reference
        self._on_gpu = on_gpu
        self._rng = random.Random(seed)
        self._comparing = asyncio.Semaphore(1)  # or comparing would take the engine's cores
        self._held = 0
        self._later: set[asyncio.Task[None]] = set()
        self._folder = Path(tempfile.mkdtemp(prefix="steercap-soak-"))
        self._kinds: dict[str, Callable[[random.Random], Awaitable[str]]] = {
            "captured": self._captured,
            "reduced": self._reduced,
            "encoded": self._encoded,
            "streamed": self._streamed,
            "sketched": self._sketched,
            "cancelled": self._cancelled,
            "late": self._late,
            "never fetched": self._never,
            "saved": self._saved,
            "plain": self._plain,
        }

    async def run(self, seconds: float, every: float = 5.0) -> Report:
        """Run for so long, and until all that was begun has ended."""
        began = time.monotonic()
        watch = asyncio.create_task(self._watch(began, every))
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(TASKS):
                    tasks.create_task(self._task(began + seconds))
            await asyncio.gather(*self._later)
        finally:
            watch.cancel()
        if any(left := await settled(self._model)):
            self.report.failures.append(f"at the end, handles held, bytes claimed and in use are {left}")
        return self.report

    async def _task(self, end: float) -> None:
        while time.monotonic() < end:
            rng = random.Random(self._rng.randrange(1 << 30))
            await self._one(rng.choice(list(self._kinds)), rng)

    async def _one(self, kind: str, rng: random.Random) -> None:
        self.report.began[kind] += 1
        try:
            ended = await self._kinds[kind](rng)
        except Exception as error:
            ended = f"FAILED: {type(error).__name__}"
            self.report.failures.append(f"{kind}: {type(error).__name__}: {error}")
        self.report.ended[ended] += 1

    # What is done

    async def _captured(self, rng: random.Random) -> str:
        handles, specs = await self._generated(rng, CaptureSpec(sites=_sites(rng), layers=_layers(rng)))
        await self._model.fetch_captures_batch(handles)
        return await self._compared(rng, handles, specs)

    async def _reduced(self, rng: random.Random) -> str:
        spec = CaptureSpec(sites=_sites(rng), layers=_layers(rng), reduce=rng.choice(REDUCTIONS))
        handles, specs = await self._generated(rng, spec)
        await self._model.fetch_captures_batch(handles)
        return await self._compared(rng, handles, specs)

    async def _encoded(self, rng: random.Random) -> str:
        spec = CaptureSpec(sites="resid_post", layers=_layers(rng), codec=rng.choice(("full8", "fp8", "int4")))
        handles, _ = await self._generated(rng, spec)
        await self._model.fetch_captures_batch(handles)
        for handle in handles:
            assert all(handle.captures[point].isfinite().all() for point in handle.points), "codes of no rows"
        return "right"

    async def _streamed(self, rng: random.Random) -> str:
        prompt, spec = _prompt(rng), _spec(rng)
        leaves = rng.randint(1, 12) if rng.random() < 1 / 2 else None
        capture = CaptureSpec(sites="resid_post")
        rows, generated = [], 0
        async with aclosing(self._model.stream(prompt, _params(rng), capture=capture, steering=spec)) as chunks:
            async for chunk in chunks:
                generated += len(chunk.token_ids)
                if chunk.positions is not None:
                    rows += chunk.positions.tolist()
                if leaves is not None and generated >= leaves:
                    return "left"
        assert rows == list(range(len(prompt) + generated - 1)), "a stream's rows are not all there, once each"
        return "right"

    async def _sketched(self, rng: random.Random) -> str:
        layer = rng.randrange(LAYERS)
        async with self._model.sketch("variances", layers=[layer]) as sketch:
            handles, _ = await self._generated(rng, CaptureSpec(sites="resid_post", layers=[layer]))
            found = await sketch.fetch()
        await self._model.fetch_captures_batch(handles)
        rows = torch.cat([handle.captures[layer] for handle in handles]).double()
        assert found.rows == len(rows), f"{found.rows} rows in a sketch of {len(rows)}"
        assert torch.allclose(found.mean(layer).double(), rows.mean(0), rtol=1e-4, atol=1e-5), "a sketch's mean"
        return "right"

    async def _cancelled(self, rng: random.Random) -> str:
        task = asyncio.create_task(self._generated(rng, CaptureSpec(sites=ALL_SITES)))
        await asyncio.sleep(rng.random() * 3)
        task.cancel()
        try:
            handles, _ = await task
        except asyncio.CancelledError:
            return "cancelled"
        for handle in handles:
            handle.release()
        return "right"

    async def _late(self, rng: random.Random) -> str:
        if self._held > HELD:
            return "held enough"
        handles, specs = await self._generated(rng, CaptureSpec(sites=ALL_SITES))
        held = sum(len(one.prompt_token_ids) + len(one.output_token_ids) for one in handles) * LAYERS * WIDTH * 16
        self._held += held

        async def fetch() -> None:
            try:
                await asyncio.sleep(rng.uniform(*LATE))
                await self._model.fetch_captures_batch(handles)
                await self._compared(rng, handles, specs)
            except Exception as error:
                self.report.failures.append(f"fetched late: {type(error).__name__}: {error}")
            finally:
                self._held -= held

        task = asyncio.create_task(fetch())
        self._later.add(task)
        task.add_done_callback(self._later.discard)
        return "right"

    async def _never(self, rng: random.Random) -> str:
        handles, _ = await self._generated(rng, CaptureSpec(sites=ALL_SITES))
        if rng.random() < 1 / 2:
            for handle in handles:
                handle.release()
        return "dropped"

    async def _saved(self, rng: random.Random) -> str:
        handles, _ = await self._generated(rng, CaptureSpec(sites="resid_post", layers=_layers(rng)))
        await self._model.fetch_captures_batch(handles)
        path = self._folder / f"{rng.randrange(1 << 60)}.safetensors"
        read = CaptureHandle.load(await asyncio.to_thread(handles[0].save, path))
        path.unlink()
        for point in handles[0].points:
            assert torch.equal(read.captures[point], handles[0].captures[point]), "a file's rows"
        return "right"

    async def _plain(self, rng: random.Random) -> str:
        await self._model.generate(_prompt(rng), _params(rng), steering=_spec(rng))
        return "right"

    # How

    async def _generated(
        self, rng: random.Random, capture: CaptureSpec
    ) -> tuple[list[CaptureHandle], list[SteeringSpec | None]]:
        """Handles of one to three prompts, and how each was steered."""
        count = rng.randint(1, 3)
        specs = [_spec(rng) for _ in range(count)]
        prompts = [_prompt(rng) for _ in range(count)]
        _, found = await self._model.generate(prompts, _params(rng), capture=capture, steering=specs)
        return flat(found), specs

    async def _compared(
        self, rng: random.Random, handles: list[CaptureHandle], specs: list[SteeringSpec | None]
    ) -> str:
        if rng.random() < SAMPLED:
            async with self._comparing:
                found = await asyncio.to_thread(hold, handles, self._reference, specs)
            self.report.worst = worst([self.report.worst, found])
            self.report.ended["compared"] += len(handles)
        return "right"

    async def _watch(self, began: float, every: float) -> None:
        while True:
            gc.collect()
            stats = await self._model.stats()
            self.report.moments.append(
                Moment(
                    time.monotonic() - began,
                    await asyncio.to_thread(memory_of_all),
                    await asyncio.to_thread(memory_of_device) if self._on_gpu else 0,
                    stats.capture_bytes_in_use,
                    stats.spill_bytes_in_use,
                    stats.handles_held + stats.handles_spilled,
                    stats.requests_waiting,
                    self.report.ended.total(),
                )
            )
            await asyncio.sleep(every)


def memory_of_all() -> int:
    """Bytes of this process and of those it started, what they share counted once."""
    with extra("cpu", "cuda"):
        import psutil

    own = psutil.Process()
    total = 0
    for process in (own, *own.children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total


def memory_of_device() -> int:
    """Bytes in use on the first GPU, by this process and all others."""
    asked = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.check_output(asked, text=True)) << 20


def _prompt(rng: random.Random) -> list[int]:
    return random_prompt(rng.randint(4, 140), rng.randrange(1 << 20))


def _params(rng: random.Random) -> dict[str, Any]:
    return {"max_tokens": rng.randint(2, 60), **GREEDY}


def _spec(rng: random.Random) -> SteeringSpec | None:
    return random_spec(rng, WIDTH, LAYERS, ("resid_pre", "resid_post"), 4) if rng.random() < 0.4 else None


def _sites(rng: random.Random) -> list[str]:
    return rng.sample(ALL_SITES, rng.randint(1, len(ALL_SITES)))


def _layers(rng: random.Random) -> list[int]:
    return sorted(rng.sample(range(LAYERS), rng.randint(1, LAYERS)))
