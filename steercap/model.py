"""The class `SteerModel`, by which users open a model."""

from __future__ import annotations

import os
import warnings
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from steercap.captures.fetching import fetch_all
from steercap.captures.handle import CaptureHandle
from steercap.captures.lens import MOST_BYTES, Lens, unembed
from steercap.captures.stacking import flat
from steercap.concurrency.heartbeat import progress_line
from steercap.config import Overflow, Preset, Settings, Transport, environment, with_preset
from steercap.core.display import described, sites_by_layers
from steercap.core.prompts import checked_special, tokens_of
from steercap.core.protocols import NonCopyable
from steercap.core.schema import PointSchema
from steercap.core.spec import CaptureSpec, Layers, Point
from steercap.core.values import shown
from steercap.engine.memory import MemoryNeed, check_memory
from steercap.errors import InvalidSetting, UnsupportedModel
from steercap.files.fingerprint import identity_of, model_name, tokenizer_of
from steercap.requests.answers import LocalBackend
from steercap.requests.calls import Calls
from steercap.requests.context import steered
from steercap.requests.equations import Claim
from steercap.requests.serving import Serving
from steercap.requests.stats import Stats, stats_of
from steercap.steering.spec import Steering, SteeringSpec

if TYPE_CHECKING:
    import torch

    from steercap.adapters import AsyncLLM
    from steercap.client import RemoteModel


#: Advice in the error of an attempted copy.
INSTEAD: Final = "an engine has one owner; make another SteerModel of the same path"


class SteerModel(NonCopyable, Calls[CaptureHandle], instead=INSTEAD):
    """Model served by vLLM whose activations can be read and changed while it generates, embeds or classifies.

    Args:
        model: path or name of the model, as vLLM takes it.
        preset: "cpu" for engine arguments that suit a small model on a CPU: `dtype="float32"`, `enforce_eager=True`,
            `max_model_len=1024`, `kv_cache_memory_bytes=256 MiB`, `use_tqdm_on_load=False`. Those given beside it take
            precedence. It does not choose the device: vLLM does.
        sites: sites to arm, that is, to give taps: one name or several of `steercap.architectures.sites`.
        layers: layers at which the sites are armed; all by default.
        codec: codec of captured rows for a `CaptureSpec` without one; "raw" by default. This and the following
            arguments are taken from the environment if left out (`STEERCAP_CODEC`, ...), or else from `Settings`.
        codec_k, codec_seed: default `k` and `seed` of codecs that have these parameters.
        capture_bytes: maximum shared memory for captured rows on each capturing worker, in bytes; allocated when it is
            used, on CUDA pinned at the start.
        overflow: action of a request without room or a free slot: "wait" for its turn, or "error"; with "spill" it
            waits while rows that nobody has fetched yet go to disk, from where `fetch` brings them back.
        overflow_timeout: seconds that requests wait while no request runs that could make room.
        spill_folder: folder for rows moved to disk; `TMPDIR` or /var/tmp by default. No file can be left there.
        spill_bytes: maximum bytes of rows on disk.
        transport: transport of rows to this process: "shared" memory, "wire" (RPC), or "auto" for the best possible.
        steering_slots: maximum number of distinct steering configurations in use at once; see `overflow`.
        vector_bytes: memory for the vectors of all configurations on each worker, in bytes, float32.
        edits_per_point: maximum number of rank-one edits of a spec at one layer and site.
        device_ring_bytes: on CUDA, device memory on each capturing worker for rows on their way to shared memory; see
            `Settings`.
        reduce_bytes: maximum device memory on each capturing worker for the running reductions of `reduce=` requests,
            in bytes; see `Settings`.
        sketch_bytes: maximum device memory on each capturing worker for sketches, in bytes; see `Settings`.
        sae_bytes: maximum device memory on each capturing worker for SAEs, in bytes; see `Settings`.
        restart: True to restart an engine that has died, and to repeat work whose results were not returned yet; see
            `Settings`.
        **engine_args: vLLM's `AsyncEngineArgs`.

    Attributes:
        model: path or name of the model.
        settings: settings of steercap.
        serving: lifecycle of the engine.

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
        device_ring_bytes: int | None = None,
        reduce_bytes: int | None = None,
        sketch_bytes: int | None = None,
        sae_bytes: int | None = None,
        restart: bool | None = None,
        **engine_args: Any,
    ) -> None:
        self.model: str = str(model)
        self.settings: Settings = environment.settings(
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
            device_ring_bytes=device_ring_bytes,
            reduce_bytes=reduce_bytes,
            sketch_bytes=sketch_bytes,
            sae_bytes=sae_bytes,
            restart=restart,
        )
        for name, value in (("spill_folder", spill_folder), ("spill_bytes", spill_bytes)):
            if value is not None and self.settings.overflow != "spill":
                raise InvalidSetting(
                    f"{name}={shown(value)} has no effect with overflow={self.settings.overflow!r}; give "
                    "overflow='spill' too, or leave it out"
                )
        arguments, own = with_preset(preset, engine_args), "max_model_len" in engine_args
        self.serving: Serving = Serving(self.model, self.settings, arguments, cut=not own)
        self._backend = LocalBackend(self.serving)

    @staticmethod
    def connect(
        url: str | None = None, *, api_key: str | None = None, model: str | None = None, timeout: float | None = None
    ) -> RemoteModel:
        """Return a client of a model that `steercap serve` or `steercap up` has open, with the methods of a local
        one.

        Args:
            url: address of the server, such as "http://127.0.0.1:8000", or "unix:" and the path of its Unix socket. If
                left out, the warm engine that `steercap up` started: the only one running, or the one of `model`.
            api_key: API key, if the server requires one.
            model: name of a model, adapter or preset ("smollm2+calm") that the server lists; the first one if left out.
            timeout: maximum seconds of the server's silence before an answer; None for no limit.

        Returns:
            A `RemoteModel` that is not started: an async context manager like a `SteerModel`.

        Raises:
            InvalidSetting: `url` is not an address of these forms.
            InvalidRequest: `url` is left out, and there is no warm engine, or several, or it runs another version of
                steercap, or the model's files have changed since its start.
        """
        from steercap.client import RemoteModel
        from steercap.files import warm

        if url is None:
            found = warm.only_engine(model)
            steered = model is not None and not warm.named_in([found], model)
            named = f"{found.model}+{str(model).rpartition('+')[2]}" if steered else None
            return RemoteModel(found.url, api_key=api_key, model=named, timeout=timeout)
        return RemoteModel(url, api_key=api_key, model=model, timeout=timeout)

    # Life

    async def start(self) -> SteerModel:
        """Start the engine and prove that its taps work; takes half a minute or more.

        In a terminal and in a notebook, one line on stderr shows the progress; not with `STEERCAP_PROGRESS=0`, nor if
        vLLM logs at level INFO or DEBUG.

        Raises:
            MainGuardMissing: the script lacks `if __name__ == "__main__":`; vLLM's processes would start engines too.
            MissingExtra: vLLM is not installed.
            ModelNotLoaded, UnsupportedModel, UnsupportedRunner: the model cannot be served with taps.
            ModelTooLarge: the model's weights alone need more memory than is free.
            TapsNotInstalled: a tap does not read, or its edits have no effect.
            ModelClosed: the model was closed, before or meanwhile.
            WrongEventLoop: it was started, or is being started, in another event loop.
        """
        async with progress_line(model_name(self.model), lambda: self.serving.stage):
            await self.serving.start()
        return self

    async def aclose(self) -> None:
        """Cancel running calls or a start, free memory and files, and stop the engine, in a few seconds. Idempotent.

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

    def __repr__(self) -> str:
        state, engine = self.serving.state, self.serving.engine
        if engine is None or state == "closed":
            sites = ", ".join(self.settings.sites)
            return f"SteerModel({self.model!r}, {state}; sites: {sites}, layers: {described(self.settings.layers)})"
        dtype = str(engine.vllm.llm.model_config.dtype).removeprefix("torch.")
        size = f"{engine.vllm.num_layers} layers × {engine.vllm.hidden_size}, {dtype}"
        return f"SteerModel({self.model!r}, {state}: {size}; taps at {sites_by_layers(engine.schemas)})"

    async def __aenter__(self) -> SteerModel:
        return await self.start()

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()

    # Work

    @asynccontextmanager
    async def steered(self, steering: Steering) -> AsyncIterator[SteeringSpec]:
        """Steer every call inside that does not pass `steering=` itself: `async with model.steered(spec): ...`.

        When nested, its edits come after the outer spec's. Tasks started inside inherit the steering; other tasks are
        not steered.

        Args:
            steering: a SteeringSpec, an edit, a LogitBias or LayerVectors, as for `generate`.

        Yields:
            The spec in force, outer ones included.

        Raises:
            InvalidSpec: not a spec, or one that does not fit the model.
        """
        engine = self.serving.here()
        with steered(self, steering) as spec:
            engine.compiler.lowered(spec)
            yield spec

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
        """Return next-token predictions for rows of the residual stream, by the model's final norm and unembedding.

        Args:
            rows: [rows, hidden], of any floating-point dtype; they are rounded to the model's.
            normed: True if the final norm has been applied to the rows, as to those of the site "final_norm".
            top: number of most probable tokens to return for each row.
            ids: ids of tokens whose log probabilities to return.
            full: True to return the logits of all tokens.
            max_bytes: maximum size of these logits in bytes.

        Raises:
            InvalidRequest: an argument of another type, shape or range, or logits larger than `max_bytes`.
            EngineFailure: the engine has died or was closed.
        """
        asked: Any = {"normed": normed, "top": top, "ids": ids, "full": full, "max_bytes": max_bytes}
        return await self.serving.with_restart(lambda engine: unembed(engine, rows, **asked))

    async def fetch_captures_batch(self, handles: Sequence[Any]) -> None:
        """Fetch many handles' rows at once, into the handles. Nested lists and None are allowed; fetched ones stay.

        Raises:
            CaptureIncomplete: some rows are missing or wrong; the other handles are still fetched.
            CaptureReleased: a handle was released.
        """
        await fetch_all([handle.lifecycle for handle in flat(handles)])

    @property
    def factory(self) -> Callable[[], SteerModel]:
        """Function that returns a new `SteerModel` with the same arguments, not started; it can be pickled."""
        serving = self.serving
        model = str(Path(self.model).resolve()) if Path(self.model).exists() else self.model
        return partial(_alike, model, self.settings, serving.engine_args, serving.cut)

    async def tokenize(self, text: Any, *, add_special_tokens: bool | None = None) -> list[int]:
        """Return the token ids of a prompt as the model reads it.

        Args:
            text: a str, token ids, which are returned, or a conversation of {"role", "content"} dicts, put through the
                chat template.
            add_special_tokens: True to add the tokenizer's special tokens to a str, as for `generate`.

        Raises:
            InvalidSpec: `text` is of another type.
            InvalidRequest: the model has no chat template, or the template refuses the conversation.
        """
        if isinstance(text, str):
            return self.serving.opened().vllm.text_ids(text, checked_special(add_special_tokens))
        return tokens_of(self.tokenizer, text, special=True)

    def check_capture(self, spec: CaptureSpec) -> tuple[Point, ...]:
        """Check a capture spec against this model as a call would, before anything runs.

        Args:
            spec: the capture spec.

        Returns:
            The points that it captures, by layer, or in the order of `at`.

        Raises:
            InvalidSpec, LayerOutOfRange, UnknownName, PointNotArmed: the spec does not fit the model.
            ModelClosed: the model was never started, or is closed.
            WrongEventLoop: it was started in another event loop, whose requests compile specs too.
        """
        return self.serving.here().compiler.captured(spec)[0]

    def check_memory(self) -> MemoryNeed:
        """Compare the memory that the model needs with the free memory, without starting an engine.

        Returns:
            Bytes needed and available, None where unknown, such as for a model that is not on this machine.

        Raises:
            ModelTooLarge: the model does not fit in the dtype asked for.
        """
        return check_memory(self.model, self.serving.engine_args)

    def identity(self) -> dict[str, str]:
        """Return everything that the model's answers depend on, which must be equal when a run is resumed.

        Returns:
            Strings by name, "" where something is not set: name, revision, dtype, quantization; weights, a commit of
            the hub or a SHA-256; tensors, generation, chat_template and tokenizer, SHA-256; kv_cache_dtype.
        """
        config = self.engine.vllm_config
        found = identity_of(self.model, config.model_config, tokenizer_of(self))
        return {**found, "kv_cache_dtype": str(config.cache_config.cache_dtype)}

    async def stats(self) -> Stats:
        """Return the current use of the model's memory and slots, and the limits."""
        return await self.serving.with_restart(lambda engine: stats_of(engine, self.serving.restarts))

    # Attributes

    @property
    def engine(self) -> AsyncLLM:
        """vLLM's `AsyncLLM` that runs the model."""
        return self.serving.opened().vllm.llm

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the model: one of transformers, or of vLLM's own."""
        return self.serving.opened().vllm.tokenizer

    @property
    def origin(self) -> Mapping[str, str]:
        """Mapping with the model's `revision`, "" if none was asked for, and the `dtype` that it computes in."""
        config = self.engine.model_config
        return {"revision": config.revision or "", "dtype": str(config.dtype).removeprefix("torch.")}

    @property
    def checkpoint(self) -> tuple[str, str | None]:
        """Name or path of the checkpoint, and its revision, None if none was asked for.

        Raises:
            UnsupportedModel: the weights are random (`load_format="dummy"`), and in no checkpoint.
        """
        config = self.engine.vllm_config
        if config.load_config.load_format == "dummy":
            raise UnsupportedModel(f'load_format="dummy" gave {self.model} weights that no checkpoint holds')
        return self.model, config.model_config.revision

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """Content of the checkpoint's generation_config.json, such as its `eos_token_id`; empty if it has none."""
        found: Mapping[str, Any] = self.engine.model_config.try_get_generation_config()
        return found

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and answer together."""
        return self.serving.opened().vllm.max_model_len

    @property
    def num_layers(self) -> int:
        """Number of decoder layers of the model."""
        return self.serving.opened().vllm.num_layers

    @property
    def hidden_size(self) -> int:
        """Number of elements of a row of the residual stream; `points` has the shape at every other site."""
        return self.serving.opened().vllm.hidden_size

    @property
    def layer_code(self) -> Mapping[str, str]:
        """Fingerprint of the code of `forward`, by class name of the decoder layers that were loaded."""
        return self.serving.opened().loaded.code

    @property
    def verified(self) -> bool:
        """True if layers with exactly this code were compared row by row with transformers'; see `steercap models`.

        If False, only the proof at start shows that rows are right.
        """
        return self.serving.opened().verified

    @property
    def proof(self) -> tuple[Claim, ...]:
        """Claims about rows and edits that were proved at the start, each with its measured numerical error."""
        return self.serving.proof

    @property
    def refused(self) -> Mapping[str, str]:
        """Reasons, by site name, why a model of no known family lacks a site, or a model of any family "final_norm"."""
        return self.serving.opened().refused

    @property
    def points(self) -> Mapping[Point, PointSchema]:
        """Points that have a tap, layer by layer, with the shape and dtype of their rows."""
        return self.serving.opened().schemas


def _alike(model: str, settings: Settings, engine_args: Mapping[str, Any], cut: bool) -> SteerModel:
    """Return a model that is not started, with the given settings and vLLM arguments; see `SteerModel.factory`."""
    found = SteerModel(model)
    found.settings = settings
    found.serving = Serving(model, settings, engine_args, cut=cut)
    found._backend = LocalBackend(found.serving)  # noqa: SLF001 -- of this class
    return found
