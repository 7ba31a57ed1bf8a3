"""SteerModel: what a user opens."""

from __future__ import annotations

import os
import warnings
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from steercap import environment
from steercap.collecting.collect import SHARD_BYTES, Asked, Collected, Progress, collect
from steercap.collecting.many import RayActors, collect_on_actors
from steercap.collecting.samples import TokenSample
from steercap.collecting.sources import Corpus, open_source
from steercap.collecting.streaming import ActivationStream, Streaming
from steercap.collecting.windows import Bos, Long
from steercap.config import Overflow, Preset, Settings, Transport, with_preset
from steercap.core.ownership import Unshared
from steercap.core.schema import PointSchema
from steercap.core.spec import CaptureSpec, Layers, Point
from steercap.core.tokens import Tokens, TokenSelection
from steercap.datasets.choosing import Join
from steercap.datasets.normalising import Normalise
from steercap.datasets.statistics import PointStatistics
from steercap.engine.stats import Stats, stats_of
from steercap.errors import InvalidSpec
from steercap.requests.answers import Answers
from steercap.requests.calls import Calls
from steercap.requests.context import FROM_CONTEXT, FromContext, by_word_or_context, joining, steered
from steercap.requests.fetching import fetch_all
from steercap.requests.handle import CaptureHandle, flat
from steercap.requests.lens import MOST_BYTES, Lens, unembed
from steercap.requests.proof import Claim
from steercap.requests.serving import Serving
from steercap.requests.sketching import RunningSketch, begun
from steercap.steering.spec import SteeringSpec
from steercap.vectors.calibration import Calibration, calibrate
from steercap.vectors.extraction import BUT_THE_FIRST, Text

if TYPE_CHECKING:
    from steercap.adapters.types import AsyncLLM
    from steercap.client import RemoteModel
    from steercap.edits.base import Edit
    from steercap.steering.logit_bias import LogitBias


#: What to do instead of a copy.
INSTEAD: Final = "an engine has one owner; make another SteerModel of the same path"


class SteerModel(Unshared, Calls[CaptureHandle], instead=INSTEAD):
    """A model served by vLLM whose activations can be read and changed while it generates, embeds or classifies.

    Args:
        model: path or name of the model, as vLLM takes it.
        preset: "cpu" for engine arguments that suit a small model on a CPU: `dtype="float32"`, `enforce_eager=True`,
            `max_model_len=1024`, `kv_cache_memory_bytes=256 MiB`. Those given beside it take precedence. It does not
            choose the device: vLLM does.
        sites: sites to arm, one name or several: those of `steercap.sites`.
        layers: layers to arm them at; all by default.
        codec: how rows are stored where a `CaptureSpec` does not say; "raw" by default. This and what follows is
            taken from the environment where it is left out (`STEERCAP_CODEC`, ...), or else from `Settings`.
        codec_k, codec_seed: its `k` and `seed`, for codecs that have them, where a `CaptureSpec` does not say.
        capture_bytes: most shared memory that captured rows may take on each capturing worker, in bytes; taken when
            it is used, on CUDA pinned at the start.
        overflow: what a request does when it finds no room, or no slot: "wait" for its turn, or "error"; with "spill"
            it waits while rows that nobody has fetched yet go to disk, from where `fetch` brings them back.
        overflow_timeout: seconds that requests wait while no request runs that could make room.
        spill_folder: folder on disk that rows spill to; `TMPDIR` or /var/tmp by default. No file can be left there.
        spill_bytes: most bytes that may be there.
        transport: how rows reach this process: "auto", "shared" or "wire".
        steering_slots: different steering configurations in use at once; a request that brings one more waits.
        vector_bytes: memory for the vectors of all configurations on each worker, in bytes, float32.
        edits_per_point: rank-one edits that one spec may have at one layer and site.
        arena_bytes: on CUDA, device memory on each capturing worker for rows on their way to shared memory; see
            `Settings`.
        reduce_bytes: most device memory on each capturing worker for reductions that run along with their requests,
            in bytes; see `Settings`.
        sketch_bytes: most device memory on each capturing worker for sketches, in bytes; see `Settings`.
        sae_bytes: most device memory on each capturing worker for SAEs, in bytes; see `Settings`.
        restart: whether an engine that has died is started again, and what was not handed over runs again; see
            `Settings`.
        **engine_args: vLLM's `AsyncEngineArgs`.

    Raises:
        InvalidSetting, InvalidSpec, UnknownName: a setting that does not fit, here or in the environment.

    Use it as an async context manager, or `await start()` and `await aclose()`. Calls may run concurrently; vLLM
    batches them.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        preset: Preset | None = None,
        sites: str | Sequence[str] = ("resid_post",),
        layers: Layers = "all",
        codec: str | None = None,
        codec_k: int | None = None,
        codec_seed: int | None = None,
        capture_bytes: int | None = None,
        overflow: Overflow | None = None,
        overflow_timeout: float | None = None,
        spill_folder: str | os.PathLike[str] | None = None,
        spill_bytes: int | None = None,
        transport: Transport | None = None,
        steering_slots: int | None = None,
        vector_bytes: int | None = None,
        edits_per_point: int | None = None,
        arena_bytes: int | None = None,
        reduce_bytes: int | None = None,
        sketch_bytes: int | None = None,
        sae_bytes: int | None = None,
        restart: bool | None = None,
        **engine_args: Any,
    ) -> None:
        self.model = str(model)
        self.settings = environment.settings(
            sites=sites,
            layers=layers,
            codec=codec,
            codec_k=codec_k,
            codec_seed=codec_seed,
            capture_bytes=capture_bytes,
            overflow=overflow,
            overflow_timeout=overflow_timeout,
            spill_folder=spill_folder,
            spill_bytes=spill_bytes,
            transport=transport,
            steering_slots=steering_slots,
            vector_bytes=vector_bytes,
            edits_per_point=edits_per_point,
            arena_bytes=arena_bytes,
            reduce_bytes=reduce_bytes,
            sketch_bytes=sketch_bytes,
            sae_bytes=sae_bytes,
            restart=restart,
        )
        arguments, own = with_preset(preset, engine_args), "max_model_len" in engine_args
        self.serving = Serving(self.model, self.settings, arguments, cut=not own)
        self._answers = Answers(self.serving)

    @staticmethod
    def connect(
        url: str, *, api_key: str | None = None, model: str | None = None, timeout: float | None = None
    ) -> RemoteModel:
        """A model that `steercap serve` has open elsewhere, with the same verbs: `SteerModel.connect(url)` in place of
        `SteerModel(name)`.

        Args:
            url: of the server, such as "http://127.0.0.1:8000".
            api_key: the key, if the server wants one.
            model: its name for the server, an adapter or a preset such as "smollm2+calm"; the first that it lists if
                left out.
            timeout: seconds that the server may be silent for before an answer; None for any.

        Returns:
            A `RemoteModel`, not started: a context manager, as a `SteerModel` is.

        Raises:
            InvalidSetting: the url is none.
        """
        from steercap.client import RemoteModel

        return RemoteModel(url, api_key=api_key, model=model, timeout=timeout)

    # Life

    async def start(self) -> SteerModel:
        """Start the engine and prove that its taps work; takes half a minute or more.

        Raises:
            MainGuardMissing: the script would start engine after engine.
            MissingExtra: vLLM is not installed.
            ModelNotLoaded, UnsupportedModel, UnsupportedRunner: the model cannot be served with taps.
            TapsNotInstalled: a tap does not read, or its edits have no effect.
            ModelClosed: the model was closed, before or meanwhile.
            WrongEventLoop: it was started, or is being started, in another event loop.
        """
        await self.serving.start()
        return self

    async def aclose(self) -> None:
        """Cancel what runs or starts, free what is held, stop the engine; within a few seconds. Idempotent.

        It may be called from any event loop, also after the one that the model was started in has ended.
        """
        await self.serving.aclose()

    def __del__(self) -> None:
        if (serving := getattr(self, "serving", None)) is not None and serving.engine is not None:
            warnings.warn(
                f"a SteerModel of {self.model} was dropped and not closed: its engine runs until this process ends; "
                "use `async with SteerModel(...)`, or await its aclose()",
                ResourceWarning,
                stacklevel=2,
            )

    async def __aenter__(self) -> SteerModel:
        return await self.start()

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()

    # Work

    @asynccontextmanager
    async def steered(self, steering: SteeringSpec | Edit | LogitBias) -> AsyncIterator[SteeringSpec]:
        """Steer every call inside that does not pass `steering=` itself: `async with model.steered(spec): ...`.

        When nested, its edits come after those of the outer one. Tasks started inside inherit it; other tasks
        do not see it.

        Args:
            steering: a SteeringSpec, one edit, or a LogitBias.

        Yields:
            The spec in force, outer ones included.

        Raises:
            InvalidSpec: not a spec, or one that does not fit the model.
        """
        engine = self.serving.here()
        with steered(self, steering) as spec:
            engine.lowered(spec)
            yield spec

    @asynccontextmanager
    async def sketch(
        self,
        kind: str = "moments",
        *,
        layers: Layers = "all",
        sites: str | Sequence[str] = ("resid_post",),
        tokens: Tokens | TokenSelection = "all",
        before_edits: bool = False,
        size: int | None = None,
    ) -> AsyncIterator[RunningSketch]:
        """Take the rows of every request inside into statistics, in the workers: `async with model.sketch(...) as s:`.

        Tasks started inside join it; other tasks do not see it. Sketches inside each other are all joined, and must be
        of the same tokens. A request inside that also captures for itself must keep the same tokens, at least the same
        points, and raw rows. The statistics are freed when the block ends: `fetch()` before.

        Args:
            kind: "moments" (mean and covariance), "variances" (mean and variance of each element), or
                "frequent_directions" (few rows that stand for all): a name in `steercap.sketches.SKETCHES`.
            layers, sites, tokens, before_edits: whose rows; as for `CaptureSpec`.
            size: of "frequent_directions", how many rows; 64 if left out.

        Yields:
            A `RunningSketch`.

        Raises:
            UnknownName, InvalidSpec, InvalidSelection, PointNotArmed: something is asked for wrongly.
            PointSplit: the kind needs whole rows, and those of a point are split over tensor-parallel ranks.
            SketchMemoryFull: there is no room for it.
        """
        spec = CaptureSpec(layers=layers, sites=sites, tokens=tokens, codec="raw", before_edits=before_edits)
        running = await self.serving.surviving(lambda engine: begun(engine, kind, size, spec))
        try:
            with joining(self, running):
                yield running
        finally:
            await running.aclose()

    async def calibrate(
        self,
        texts: Sequence[Text],
        *,
        layers: Layers = "all",
        sites: str | Sequence[str] = ("resid_post",),
        tokens: Tokens | TokenSelection = BUT_THE_FIRST,
        progress: Callable[[int], None] | None = None,
    ) -> Calibration:
        """What `CaptureSpec(codec="full8", calibration=)` takes, found in the rows of texts that the model reads.

        See `steercap.vectors.calibrate`.
        """
        return await calibrate(self, texts, layers=layers, sites=sites, tokens=tokens, progress=progress)

    async def unembed(
        self,
        rows: torch.Tensor,
        *,
        normed: bool = False,
        top: int = 10,
        ids: Sequence[int] = (),
        full: bool = False,
        max_bytes: int = MOST_BYTES,
    ) -> Lens:
        """What rows of the stream would say next, by the model's own final norm and unembedding, on its workers.

        Args:
            rows: [rows, hidden], of any floating-point dtype; they are rounded to the model's.
            normed: whether the final norm is behind them already, as for rows of "final_norm".
            top: how many tokens to name.
            ids: tokens whose log probabilities are wanted.
            full: whether the logits of all tokens are.
            max_bytes: the most that these may take.

        Raises:
            InvalidRequest: something that is not such rows, numbers or tokens, or logits beyond `max_bytes`.
            EngineFailure: the engine has died or was closed.
        """
        asked: Any = {"normed": normed, "top": top, "ids": ids, "full": full, "max_bytes": max_bytes}
        return await self.serving.surviving(lambda engine: unembed(engine, rows, **asked))

    async def fetch_captures_batch(self, handles: Sequence[Any]) -> None:
        """Fetch many handles with one RPC. Nested lists and None are allowed; handles already fetched are left alone.

        Raises:
            CaptureIncomplete: some rows are missing or wrong; the other handles are still fetched.
            CaptureReleased: one of the handles was released.
        """
        await fetch_all([handle.lifecycle for handle in flat(handles)])

    async def collect(
        self,
        corpus: Corpus,
        folder: str | os.PathLike[str],
        *,
        layers: Layers | None = None,
        sites: str | Sequence[str] | None = None,
        codec: str | None = None,
        k: int | None = None,
        capture: CaptureSpec | None = None,
        tokens: Tokens | TokenSelection | TokenSample = "all",
        context: int | None = None,
        long: Long | None = None,
        bos: Bos = "document",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        seed: int = 0,
        steering: SteeringSpec | Edit | LogitBias | FromContext | None = FROM_CONTEXT,
        shard_bytes: int = SHARD_BYTES,
        documents_per_shard: int | None = None,
        statistics_every: int | None = None,
        concurrency: int | None = None,
        verify: bool = False,
        progress: Callable[[Progress], object] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        ray: RayActors | None = None,
    ) -> Collected:
        """Read a corpus into a data set of activations on disk, which `steercap.datasets` and other tools open.

        A call that ends before the corpus does, however it ends, loses the shards that were not written; the same call
        goes on. Every document is in the data set once. With `concurrency=1` the data set is the same, bit for bit,
        whenever and however often it was interrupted; otherwise rows may differ in their last bits, as they do from
        batch to batch.

        Args:
            corpus: a file, a folder or a pattern, or any iterable or async iterable of documents: str, token ids,
                messages, or mappings that hold one of these; or an opened `Source`: see
                `steercap.collecting.open_source`.
            folder: where it goes: a path, or the URL of an fsspec file system.
            layers, sites, codec, k: what is kept: shorthand for `capture=CaptureSpec(layers=..., ...)`.
            capture: the same, with all that a `CaptureSpec` may say but for its tokens, `reduce`, `project` and `sae`.
            tokens: which tokens' rows are kept: a selection as for `CaptureSpec`, or `OneIn`, `ByProbe`, `ByPredicate`.
                They count in each window by itself.
            context: most tokens of a window, by default as many as the engine takes.
            long: what becomes of longer documents: they are "split" into windows, which are read each by itself, "cut"
                off, or "refuse"d. By default "split"; "refuse" where something is generated.
            bos: where the token goes that begins a text: as the tokenizer puts it before a "document", before each
                "window" too, or "none".
            chat_template_kwargs: further arguments of the chat template. A conversation that ends with the assistant's
                message is read as it is; any other with what invites the reply.
            params: sampling parameters, if the model is to go on with each document; its rows are collected too.
            seed: of all sampling: each document has a seed of its own, made of this one and its number.
            steering: what is changed, as for `generate`.
            shard_bytes: of rows that a shard should have; three to seven shards are in memory, by the number of cores.
            documents_per_shard: by default as many of the first few documents as come to `shard_bytes`.
            statistics_every: of so many rows one is looked at for statistics; 0 for none. By default 8 for each point:
                many points are looked at in no more time than one.
            concurrency: windows under way at once; by default as many as the engine has use for, within memory.
            verify: whether the shards that are there are compared with their hashes, rather than their sizes alone;
                what is damaged is collected again.
            progress: called with a `Progress` now and then.
            storage_options: of the URL's file system.
            ray: over which actors of Ray's the corpus is spread. Each starts an engine of this model's arguments; this
                one need not be started. Shards are the same, whoever makes them; the folder is one that all machines
                reach. `concurrency` is of each engine.

        Returns:
            What the data set holds.

        Raises:
            RunDiffers: the folder holds another data set, or one of another corpus.
            CollectionStopped: it cannot be written to, such as on a full disk, or actors were lost too often.
            InvalidFile: a file of the corpus cannot be read, or holds something that is no document.
            InvalidRequest: something is asked for that does not fit, or another process writes to the folder.
            The errors of `generate`.
        """
        asked = Asked(
            capture=self._collected(capture, layers=layers, sites=sites, codec=codec, k=k),
            tokens=tokens,
            context=context,
            long=long,
            bos=bos,
            template=chat_template_kwargs or {},
            params=params,
            seed=seed,
            steering=by_word_or_context(self, steering),
            shard_bytes=shard_bytes,
            documents_per_shard=documents_per_shard,
            statistics_every=statistics_every,
            concurrency=concurrency,
            verify=verify,
            progress=progress,
            storage_options=storage_options or {},
        )
        if ray is not None:
            return await collect_on_actors(self._another, corpus, os.fspath(folder), asked, ray)
        engine = self.serving.here()
        return await self.serving.run(lambda: collect(self, engine, corpus, os.fspath(folder), asked))

    def activations(
        self,
        corpus: Corpus,
        *,
        layers: Layers | None = None,
        sites: str | Sequence[str] | None = None,
        codec: str | None = None,
        k: int | None = None,
        capture: CaptureSpec | None = None,
        tokens: Tokens | TokenSelection | TokenSample = "all",
        context: int | None = None,
        long: Long | None = None,
        bos: Bos = "document",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        steering: SteeringSpec | Edit | LogitBias | FromContext | None = FROM_CONTEXT,
        concurrency: int | None = None,
        batch_size: int = 4096,
        buffer: int = 1 << 16,
        seed: int = 0,
        join: Join = "dict",
        normalise: Normalise = "none",
        statistics: Mapping[str, PointStatistics] | None = None,
        dtype: torch.dtype | None = torch.float32,
        labels: bool = False,
        drop_last: bool = False,
    ) -> ActivationStream:
        """Rows of a corpus in shuffled batches, straight from the engine into a training, without a disk.

        What it gives is an iterator, and a context manager that closes it: `async with model.activations(...) as rows`.
        The engine works ahead while the training computes, as far as `buffer` allows. Each row comes once; a corpus is
        read once, and to read it again is another stream. Closing the stream ends what runs.

        Args:
            corpus: as for `collect`.
            layers, sites, codec, k, capture, tokens: which rows, and how they come from the engine; as for `collect`.
            context, long, bos, chat_template_kwargs, params, steering, concurrency: as for `collect`.
            batch_size: rows of a batch.
            buffer: rows that a batch is drawn from; at least `batch_size`. A quarter more may wait before it.
            seed: of the draws, and of sampling with `params`.
            join: of several points: "dict", by name; "concatenate", [n, sum of widths]; "mix", each row of each point
                by itself.
            normalise: "none", "mean", "standard" or "norm", as for `ActivationDataset`.
            statistics: of each point by its name, such as those of a data set; by default of the rows in the first
                full buffer. `normalisations` of the stream says what was found.
            dtype: of the rows; None for that of the model, and of decoded codecs float32.
            labels: whether batches come as `steercap.datasets.Labelled`.
            drop_last: leave out the last batch if it is short.

        Returns:
            An asynchronous iterator of rows [batch, *shape of the point], or dicts of them by the points' names.

        Raises:
            InvalidRequest: something is asked for that does not fit.
        """
        asked = Asked(
            capture=self._collected(capture, layers=layers, sites=sites, codec=codec, k=k),
            tokens=tokens,
            context=context,
            long=long,
            bos=bos,
            template=chat_template_kwargs or {},
            params=params,
            seed=seed,
            steering=by_word_or_context(self, steering),
            concurrency=concurrency,
        )
        how = Streaming(
            batch_size=batch_size,
            buffer=buffer,
            seed=seed,
            join=join,
            normalise=normalise,
            statistics=statistics,
            dtype=dtype,
            labels=labels,
            drop_last=drop_last,
        )
        return ActivationStream(self, asked.reading(self, self.serving.here()), open_source(corpus), how)

    @staticmethod
    def _collected(capture: CaptureSpec | None, **shorthand: Any) -> CaptureSpec:
        """What is kept, in full or by the shorthand for it."""
        given = {name: value for name, value in shorthand.items() if value is not None}
        if capture is not None and given:
            raise InvalidSpec(f"capture= beside {', '.join(given)}; give one of them")
        return CaptureSpec(**given) if capture is None else capture

    @property
    def _another(self) -> partial[SteerModel]:
        """Makes a model of the same arguments, on any machine."""
        serving = self.serving
        model = str(Path(self.model).resolve()) if Path(self.model).exists() else self.model
        return partial(_alike, model, self.settings, serving.engine_args, serving.cut)

    async def stats(self) -> Stats:
        """What the model holds now, and its limits."""
        return await self.serving.surviving(lambda engine: stats_of(engine, self.serving.restarts))

    # What is reachable

    @property
    def engine(self) -> AsyncLLM:
        """The AsyncLLM that serves the model, vLLM's own."""
        return self.serving.opened().vllm.llm

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.serving.opened().vllm.tokenizer

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model."""
        return self.serving.opened().vllm.num_layers

    @property
    def hidden_size(self) -> int:
        """Elements of a row of the residual stream; `points` has the shape at every other site."""
        return self.serving.opened().vllm.hidden_size

    @property
    def layers(self) -> Mapping[str, str]:
        """Classes of the decoder layers that were loaded, and a fingerprint of the code of each one's `forward`."""
        return self.serving.opened().loaded.code

    @property
    def verified(self) -> bool:
        """Whether rows of layers of just this code were compared with transformers'; see `steercap models`.

        If not, the proof at start is what stands for them.
        """
        return self.serving.opened().verified

    @property
    def proof(self) -> tuple[Claim, ...]:
        """What was proved of the rows and edits of this engine when it started, and how exactly."""
        return self.serving.proof

    @property
    def points(self) -> Mapping[Point, PointSchema]:
        """Points that have a tap, layer by layer, and what the tensor at each of them is."""
        return self.serving.opened().schemas


def _alike(model: str, settings: Settings, engine_args: Mapping[str, Any], cut: bool) -> SteerModel:
    """A model that is not started, with settings that another one has."""
    found = SteerModel(model)
    found.settings = settings
    found.serving = Serving(model, settings, engine_args, cut=cut)
    found._answers = Answers(found.serving)  # noqa: SLF001 -- of this class
    return found
