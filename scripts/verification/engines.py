"""The engines of `verify_gpu.py`: started when a check wants them, shared, closed when no check is left for them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.experts import routed_checkpoint
from support.lora import LORA_ENGINE
from support.quantised import KINDS, quantised_checkpoint
from support.rows import ALL_SITES, CRAMPED, TINY_ENGINE

from steercap import SteerModel
from steercap.architectures.families import FAMILIES
from steercap.testing import Reference, tiny_checkpoint
from steercap.testing.architectures import ENGINES, ON_CUDA

#: Seconds between the starts of two engines of one process: vLLM's and transformers' lazy imports take no threads.
APART = 1.5
CAPTURE_BYTES = 512 << 20
#: What names of engines with quantised checkpoints begin with.
QUANTISED = "quantised "
#: The same of engines whose experts are chosen with all that their routers can do.
ROUTED = "routed "
#: Ends of names of engines with `resid_post` alone: on CUDA, the tap behind a layer is one kernel with the next norm.
NORMS = " norms"

#: Modules of the engine "modules".
PATHS = (
    "model.layers.*.mlp.down_proj.input",
    "model.layers.*.self_attn.q_norm.output",
    "model.layers.*.input_layernorm.output",
    "model.layers.*.self_attn.o_proj.output",
    "model.norm.output",
)
#: Sites whose rows tensor-parallel ranks have a part of each, and one that all of them have whole.
SPLIT_SITES = ("resid_post", "neurons", "q", "k", "v", "z")
#: Words of names such as "tp 2 pp 2", of engines whose work several GPUs share, and the arguments that they stand for.
PARALLEL = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size"}
#: Begins names of tensor-parallel engines with points that are split; after it, the number of ranks.
SPLIT = "split "
#: Sites of some engines.
NAMED_SITES = {"modules": (*ALL_SITES, *SPLIT_SITES[1:], *PATHS)}


@dataclass(frozen=True)
class Machine:
    """Where the engines run.

    Args:
        device: "cuda" or "cpu".
        gpus: how many of them may be used.
        share: part of one GPU's memory an engine must find free; what it takes is less, see `Machine.base`.
        smollm2: a checkpoint of SmolLM2, or None.
    """

    device: str
    gpus: int
    share: float
    smollm2: Path | None

    @property
    def cuda(self) -> bool:
        """Whether it has GPUs."""
        return self.device == "cuda"

    def base(self, dtype: str) -> dict[str, Any]:
        """Arguments of a tiny engine: vLLM's defaults on CUDA, eager on CPU.

        The KV cache has a fixed size: vLLM would measure the memory that is free on the whole device, and engines that
        start together would take each other's for their own.
        """
        if not self.cuda:
            return {**TINY_ENGINE, "dtype": dtype}
        kept = {key: value for key, value in TINY_ENGINE.items() if key != "enforce_eager"}
        own = {"gpu_memory_utilization": self.share, "kv_cache_memory_bytes": 64 << 20, "capture_bytes": CAPTURE_BYTES}
        return {**kept, "dtype": dtype, **own}

    def engine(self, name: str) -> EngineChoice:
        """How an engine is started: a family (float32) or a name below, with " eager" or " compiled" after it or not."""
        name = name.removesuffix(NORMS)
        first, *rest = name.replace(SPLIT, "tp ").split()
        if first in PARALLEL:
            sizes = zip((first, *rest[1::2]), rest[::2], strict=True)
            own = {PARALLEL[word]: int(size) for word, size in sizes}
            return EngineChoice(tiny_checkpoint("qwen3"), self.base("float32") | own)
        first, _, mode = name.rpartition(" ")
        if mode in {"eager", "compiled"}:
            bare = self.engine(first)
            return EngineChoice(bare.path, bare.arguments | {"enforce_eager": mode == "eager"}, bare.environment)
        if kind := quantised(name):
            return EngineChoice(quantised_checkpoint(kind), self.base("bfloat16") | dict(KINDS[kind].engine))
        if name.startswith(ROUTED):
            kind = name.removeprefix(ROUTED)
            own = {**ENGINES.get(kind, {}), **(ON_CUDA.get(kind, {}) if self.cuda else {})}
            return EngineChoice(routed_checkpoint(kind), self.base("float32") | own)
        if name == "smollm2":
            assert self.smollm2 is not None
            return EngineChoice(self.smollm2, self.base("bfloat16") | {"kv_cache_memory_bytes": 256 << 20})
        little = {key: value for key, value in CRAMPED.items() if key != "enforce_eager"}
        drafts = {"num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        of_qwen3: dict[str, dict[str, Any]] = {
            "bf16": {"dtype": "bfloat16"},
            "modules": {},
            # vLLM's LoRA kernels for CUDA take 16 bits only.
            "lora": {**little, **LORA_ENGINE, "dtype": "bfloat16" if self.cuda else "float32"},
            "cramped": little,
            "cramped alone": little,  # whose cache nobody else fills
            "cramped float16": {**little, "dtype": "float16"},
            "cramped bfloat16": {**little, "dtype": "bfloat16"},
            "pooling": {"runner": "pooling", "convert": "embed", "max_num_batched_tokens": 64, "max_num_seqs": 16},
            "ngram": {"speculative_config": {"method": "ngram", **drafts}},
            "ngram_gpu": {"speculative_config": {"method": "ngram_gpu", **drafts}},
        }
        return EngineChoice(
            tiny_checkpoint("qwen3" if name in of_qwen3 else name),
            self.base("float32") | of_qwen3.get(name, {}),
        )


def quantised(name: str) -> str:
    """The kind of quantisation that an engine's name asks for, or ""."""
    return name.removeprefix(QUANTISED) if name.startswith(QUANTISED) else ""


@dataclass(frozen=True)
class EngineChoice:
    """Which engine to start.

    Args:
        path: its checkpoint.
        arguments: SteerModel's.
        environment: variables of its processes, where they differ from ours.
    """

    path: Path
    arguments: dict[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def surroundings(environment: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the processes started inside."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Engines:
    """The engines that are up.

    Args:
        machine: where.
        at_once: how many may start at once.
    """

    def __init__(self, machine: Machine, at_once: int) -> None:
        self.machine = machine
        self.seconds: dict[str, float] = {}
        self._slots = asyncio.Semaphore(at_once)
        self._gate = asyncio.Lock()
        self._wanted: Counter[str] = Counter()
        self._open: dict[str, asyncio.Task[SteerModel]] = {}
        self._references: dict[tuple[Path, str], Reference] = {}

    def expect(self, names: Iterable[str]) -> None:
        """A check will use these."""
        self._wanted.update(names)

    def start_all(self) -> None:
        """Start all that are expected now, rather than when first used."""
        for name in self._wanted:  # checkpoints are written before threads start to import transformers
            self.machine.engine(name)
        for name in self._wanted:
            self._started(name)

    async def up(self) -> None:
        """Wait until every start that is under way has ended, well or not."""
        await asyncio.wait([*self._open.values(), asyncio.ensure_future(asyncio.sleep(0))])

    async def get(self, name: str) -> SteerModel:
        """An engine; one that did not start raises for each who asks."""
        return await asyncio.shield(self._started(name))

    async def let_go(self, names: Iterable[str]) -> None:
        """A check is done with these; an engine that nobody expects to use any more is closed."""
        for name in names:
            self._wanted[name] -= 1
        await self._close([name for name in list(self._open) if self._wanted[name] <= 0])

    async def aclose(self) -> None:
        """Close all."""
        await self._close(list(self._open))

    async def _close(self, names: Iterable[str]) -> None:
        tasks = [self._open.pop(name) for name in names]
        started = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(model.aclose() for model in started if isinstance(model, SteerModel)))

    def _started(self, name: str) -> asyncio.Task[SteerModel]:
        if name not in self._open:
            self._open[name] = asyncio.create_task(self._start(name))
        return self._open[name]

    async def _start(self, name: str) -> SteerModel:
        async with self._slots:
            wanted = self.machine.engine(name)
            async with self._gate:
                await asyncio.sleep(APART)
            before = time.perf_counter()
            family = name.removesuffix(" eager").removesuffix(" compiled")
            known: tuple[str, ...] = NAMED_SITES.get(name, ("resid_post",) if name.endswith(NORMS) else ALL_SITES)
            if name.startswith(SPLIT):
                # The checkpoint has two heads of keys: more ranks have copies of them, which are refused.
                ranks = int(name.removeprefix(SPLIT))
                known = tuple(site for site in SPLIT_SITES if ranks <= 2 or site not in {"k", "v"})
            sites = "all" if family in FAMILIES or quantised(name) else known
            model = await self.start(wanted, sites="router" if name.startswith(ROUTED) else sites)
            self.seconds[name] = round(time.perf_counter() - before, 1)
            return model

    @staticmethod
    async def start(wanted: EngineChoice, **settings: Any) -> SteerModel:
        """Start an engine that is nobody else's."""
        with surroundings(wanted.environment):
            return await SteerModel(str(wanted.path), **wanted.arguments, **settings).start()

    def reference(self, path: Path, dtype: str = "float32") -> Reference:
        """transformers on a checkpoint, on CPU."""
        import torch

        if (path, dtype) not in self._references:
            self._references[path, dtype] = Reference(path, getattr(torch, dtype))
        return self._references[path, dtype]


def register_metrics_one_engine_at_a_time() -> None:
    """Let engines start in several threads: each clears vLLM's names from one registry, then registers its own."""
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: F401 -- whole, before threads ask for parts of it
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    original, lock = PrometheusStatLogger.__init__, threading.Lock()

    def one_at_a_time(self: Any, *args: Any, **kwargs: Any) -> None:
        with lock:
            original(self, *args, **kwargs)

    PrometheusStatLogger.__init__ = one_at_a_time
