"""SteerModel: what a user holds.

Number 1 in the life of a request.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from steercap.concurrency.loops import Home, finished, on_thread
from steercap.config import Overflow, Preset, Settings, Transport, with_preset
from steercap.core.chat import MessageSpan
from steercap.core.idiom import AWAITED
from steercap.core.ownership import Unshared
from steercap.core.prompts import Ask, conversations_in, each, flag_asked, listed, template_arguments, templated
from steercap.core.spec import CaptureSpec, Layers, Point
from steercap.core.values import shown
from steercap.engine.checkpoint import look_up, require_there
from steercap.engine.engine import Engine
from steercap.engine.guard import require_main_guard
from steercap.engine.stats import Stats, stats_of
from steercap.errors import InvalidRequest, ModelClosed
from steercap.requests.context import FROM_CONTEXT, FromContext, by_word_or_context, steered
from steercap.requests.handle import CaptureHandle, fetch_all
from steercap.requests.job import Done, Job, prepare, run_all
from steercap.requests.probe import probe
from steercap.requests.stream import Chunk, stream
from steercap.steering.spec import SteeringSpec

if TYPE_CHECKING:
    from steercap.adapters.launch import Launch
    from steercap.adapters.types import AsyncLLM, RequestOutput, SamplingParams
    from steercap.edits.base import Edit

#: Sampling parameters of `read`: vLLM runs no prompt without sampling one token, which has no row.
READ: Final = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
#: Lists within lists of handles: deeper ones hold themselves.
DEEPEST: Final = 8
#: What one prompt's `steering=` may be.
Steering: TypeAlias = "SteeringSpec | Edit | None"


class SteerModel(Unshared):
    """A model served by vLLM whose activations can be read and changed while it generates.

    Args:
        model: path or name of the model, as vLLM takes it.
        preset: "cpu" for engine arguments that suit a small model on a CPU: `dtype="float32"`, `enforce_eager=True`,
            `max_model_len=1024`, `kv_cache_memory_bytes=256 MiB`. Those given beside it take precedence. It does not
            choose the device: vLLM does.
        sites: sites to arm: "resid_pre", "resid_post", "attn_out", "mlp_out".
        layers: layers to arm them at; all by default.
        capture_bytes: most shared memory that captured rows may take on each capturing worker, in bytes; taken when
            it is used, on CUDA pinned at the start.
        overflow: what a request does when it finds no room, or no slot: "wait" for its turn, or "error".
        overflow_timeout: seconds that requests wait while no request runs that could make room.
        transport: how rows reach this process: "auto", "shared" or "wire".
        steering_slots: different steering configurations in use at once; a request that brings one more waits.
        vector_bytes: memory for the vectors of all configurations on each worker, in bytes, float32.
        edits_per_point: rank-one edits that one spec may have at one layer and site.
        arena_bytes: on CUDA, device memory on each capturing worker for rows on their way to shared memory; see
            `Settings`.
        **engine_args: vLLM's `AsyncEngineArgs`.

    Raises:
        InvalidSetting, InvalidSpec, UnknownName: a setting that does not fit.

    Use it as an async context manager, or `await start()` and `await aclose()`. Calls may run concurrently; vLLM
    batches them.
    """

    _instead = "an engine has one owner; make another SteerModel of the same path"

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        preset: Preset | None = None,
        sites: str | Sequence[str] = ("resid_post",),
        layers: Layers = "all",
        capture_bytes: int = Settings.capture_bytes,
        overflow: Overflow = "wait",
        overflow_timeout: float = Settings.overflow_timeout,
        transport: Transport = "auto",
        steering_slots: int = Settings.steering_slots,
        vector_bytes: int = Settings.vector_bytes,
        edits_per_point: int = Settings.edits_per_point,
        arena_bytes: int | None = Settings.arena_bytes,
        reduce_bytes: int = Settings.reduce_bytes,
        **engine_args: Any,
    ) -> None:
        self.model = str(model)
        self.settings = Settings(
            sites=sites,
            layers=layers,
            capture_bytes=capture_bytes,
            overflow=overflow,
            overflow_timeout=overflow_timeout,
            transport=transport,
            steering_slots=steering_slots,
            vector_bytes=vector_bytes,
            edits_per_point=edits_per_point,
            arena_bytes=arena_bytes,
            reduce_bytes=reduce_bytes,
        )
        self._engine_args = with_preset(preset, engine_args)
        self._longest = "max_model_len" in engine_args  # the user's own, which a preset's is not
        self._engine: Engine | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._home: Home | None = None
        self._life = asyncio.Lock()
        self._idiom = AWAITED
        self._starting: asyncio.Task[Engine] | None = None
        self._launch: Launch | None = None

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
        require_main_guard(self._idiom)
        if self._home is None:
            self._home, self._life = Home("this model"), asyncio.Lock()
        self._home.require()
        async with self._life:
            self._require_not_closed()
            if self._engine is None:
                self._home = self._home or Home("this model")  # who had the lock before may have failed
                self._starting = asyncio.ensure_future(self._start())
                try:
                    self._engine = await self._starting
                except asyncio.CancelledError:
                    if self._closed and (task := asyncio.current_task()) and not task.cancelling():
                        self._require_not_closed()
                    raise
                finally:
                    if self._engine is None:
                        self._home = None
        return self

    async def _start(self) -> Engine:
        from steercap.adapters.launch import Launch

        if "hf_config_path" not in self._engine_args:
            require_there(self.model)  # before vLLM is imported, which takes long
        arguments = dict(self._engine_args)
        if "max_model_len" in arguments and not self._longest and (context := look_up(self.model).context):
            arguments["max_model_len"] = min(arguments["max_model_len"], context)
        self._launch = Launch()
        engine = await Engine.start(self.model, self.settings, arguments, self._launch)
        try:
            await probe(engine)
        except BaseException:
            await engine.aclose()
            raise
        return engine

    async def aclose(self) -> None:
        """Cancel what runs or starts, free what is held, stop the engine; within a few seconds. Idempotent.

        It may be called from any event loop, also after the one that the model was started in has ended.
        """
        self._closed = True
        home, launch = self._home, self._launch
        if home is not None and home.is_here:
            self._cancel_all()
            async with self._life:  # a start that was cancelled cleans up first
                pass
        elif home is not None:
            home.call(self._cancel_all)
            if self._engine is None and launch is not None:
                await finished(on_thread(launch.give_up, "steercap end"))
        if self._engine is not None:
            await self._engine.aclose()
            self._engine = None

    def _cancel_all(self) -> None:
        for task in self._running:
            task.cancel()
        if self._starting is not None:
            self._starting.cancel()

    def __del__(self) -> None:
        if getattr(self, "_engine", None) is not None:
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

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Mapping[str, Any] | Sequence[Any] | None = None,
        *,
        capture_layers: Layers | None = None,
        capture: CaptureSpec | Sequence[CaptureSpec | None] | None = None,
        steering: Steering | Sequence[Steering] | FromContext = FROM_CONTEXT,
        raw_output: bool = False,
        lora_request: Any = None,
        priority: int = 0,
    ) -> Coroutine[Any, Any, Any]:
        """Generate text, keeping the activations asked for.

        Args:
            prompts: a str, token ids, one of vLLM's prompt dicts, or a list of these.
            sampling_params: vLLM's SamplingParams or a dict of its fields, for all prompts or one each.
            capture_layers: shorthand for `capture=CaptureSpec(layers=capture_layers)`.
            capture: what to keep, for all prompts, or one each (None keeps nothing).
            steering: what to change: a SteeringSpec (or one edit) for all prompts, or one each; None changes
                nothing. Left out, it is what `model.steered` says around the call.
            raw_output: return vLLM's RequestOutput in place of each text; its attribute `steering` then holds a
                `SteeringReceipt` for each sample, None where nothing was to be changed.
            lora_request: vLLM's LoRARequest, for an engine started with `enable_lora=True`.
            priority: vLLM's request priority, for an engine started with `scheduling_policy="priority"`.

        Returns:
            The text, or a list of texts for a list of prompts; with `n > 1`, a list of n texts for each prompt. If
            anything is captured, the pair (texts, handles), where handles is nested like texts and holds a
            `CaptureHandle` for each text, None where nothing is kept.

        There are prompt + generated - 1 rows: the last sampled token is never an input to the model. Layer `i` of
        "resid_post" is transformers' `hidden_states[i + 1]`, before the final norm for the last layer.

        Raises:
            InvalidPrompt, InvalidSpec, InvalidSelection, PointNotArmed: before anything runs.
            CaptureMemoryFull, SteeringSlotsFull: there is no room.
            SteeringNotApplied: a worker did not make every edit; the text is withheld.
            ModelClosed: the model is not open.
        """
        options = {"lora_request": lora_request, "priority": priority}
        ask = Ask(
            sampling_params, capture_layers, capture, by_word_or_context(self, steering), options, raw_output=raw_output
        )
        return self._generate(prompts, ask)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Mapping[str, Any] | Sequence[Any] | None = None,
        *,
        capture_layers: Layers | None = None,
        capture: CaptureSpec | Sequence[CaptureSpec | None] | None = None,
        steering: Steering | Sequence[Steering] | FromContext = FROM_CONTEXT,
        raw_output: bool = False,
        lora_request: Any = None,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Generate the next message of a conversation, or of each of several.

        Args:
            messages: one conversation, a list of {"role", "content"} dicts, or a list of conversations.
            sampling_params, capture_layers, capture, steering, raw_output, lora_request, priority: as for `generate`.
            chat_template_kwargs: further arguments of the tokenizer's chat template.

        Returns:
            As for `generate`. Handles know which rows belong to which message, the template's own tokens to none:
            `handle.messages`, `handle.rows_of(0)`, `handle.rows_of("assistant")`.

        Raises:
            InvalidRequest: the tokenizer has no chat template, or it refuses the messages.
            The errors of `generate`.
        """
        options = {"lora_request": lora_request, "priority": priority}
        ask = Ask(
            sampling_params, capture_layers, capture, by_word_or_context(self, steering), options, raw_output=raw_output
        )
        return self._chat(messages, ask, chat_template_kwargs)

    def read(
        self,
        prompts: Any,
        *,
        capture_layers: Layers | None = None,
        capture: CaptureSpec | Sequence[CaptureSpec | None] | None = None,
        steering: Steering | Sequence[Steering] | FromContext = FROM_CONTEXT,
        lora_request: Any = None,
        priority: int = 0,
    ) -> Coroutine[Any, Any, Any]:
        """Have the model read texts and keep their activations, without generating.

        Args:
            prompts: a str, token ids, one of vLLM's prompt dicts, or a list of these; each at least one token shorter
                than `max_model_len`.
            capture_layers, capture: as for `generate`; left out, all layers at "resid_post".
            steering, lora_request, priority: as for `generate`.

        Returns:
            A `CaptureHandle`, or a list of them for a list of prompts (None where nothing is kept), with a row for
            every token selected, the last one included. `handle.text` and `handle.output_token_ids` are empty.

        Raises:
            EmptySelection: `tokens="generated"`: nothing is generated.
            The errors of `generate`.
        """
        options = {"lora_request": lora_request, "priority": priority}
        spec = CaptureSpec() if capture_layers is None and capture is None else capture
        ask = Ask(READ, capture_layers, spec, by_word_or_context(self, steering), options, reading=True)
        return self._read(prompts, ask)

    def stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        capture_layers: Layers | None = None,
        capture: CaptureSpec | None = None,
        steering: Steering | FromContext = FROM_CONTEXT,
        lora_request: Any = None,
        priority: int = 0,
    ) -> AsyncGenerator[Chunk, None]:
        """Generate text for one prompt, yielding text and rows as they come.

        Args:
            prompt: one prompt, as for `generate`.
            sampling_params, capture_layers, capture, steering, lora_request, priority: as for `generate`, for one
                sample.

        Yields:
            Chunks whose texts, token ids and rows, one after the other, are those of the whole; the first one brings
            the rows of the prompt. Closing the generator (`contextlib.aclosing`, or
            dropping it after leaving the loop) cancels the request.

        Raises:
            InvalidRequest: several prompts, `n > 1`, or a reduction, which needs the whole sequence.
            The errors of `generate`, and CaptureIncomplete. SteeringNotApplied comes in place of the last chunk.
        """
        options = {"lora_request": lora_request, "priority": priority}
        ask = Ask(sampling_params, capture_layers, capture, by_word_or_context(self, steering), options)
        return self._stream(prompt, ask)

    @asynccontextmanager
    async def steered(self, steering: SteeringSpec | Edit) -> AsyncIterator[SteeringSpec]:
        """Steer every call inside that does not pass `steering=` itself: `async with model.steered(spec): ...`.

        When nested, its edits come after those of the outer one. Tasks started inside inherit it; other tasks
        do not see it.

        Args:
            steering: a SteeringSpec, or one edit.

        Yields:
            The spec in force, outer ones included.

        Raises:
            InvalidSpec: not a spec, or one that does not fit the model.
        """
        engine = self._engine_here()
        with steered(self, steering) as spec:
            engine.lowered(spec)
            yield spec

    async def fetch_captures_batch(self, handles: Sequence[Any]) -> None:
        """Fetch many handles with one RPC. Nested lists and None are allowed; handles already fetched are left alone.

        Raises:
            CaptureIncomplete: some rows are missing or wrong; the other handles are still fetched.
            CaptureReleased: one of the handles was released.
        """
        await fetch_all(_flat(handles))

    async def stats(self) -> Stats:
        """What the model holds now, and its limits."""
        return await stats_of(self._engine_here())

    # What is reachable

    @property
    def engine(self) -> AsyncLLM:
        """The AsyncLLM that serves the model, vLLM's own."""
        return self._open_engine().vllm.llm

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._open_engine().vllm.tokenizer

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model."""
        return self._open_engine().vllm.num_layers

    @property
    def hidden_size(self) -> int:
        """Elements of a row: the model's hidden size."""
        return self._open_engine().vllm.hidden_size

    @property
    def points(self) -> tuple[Point, ...]:
        """Points that have a tap, layer by layer."""
        return self._open_engine().vllm.points

    async def _generate(self, prompts: Any, ask: Ask) -> Any:
        self._engine_here()
        many, given = listed(prompts)
        return await self._answer([(prompt, []) for prompt in given], ask, many=many)

    async def _read(self, prompts: Any, ask: Ask) -> Any:
        _, handles = await self._generate(prompts, ask)
        return handles

    async def _chat(self, messages: Any, ask: Ask, template_kwargs: Any) -> Any:
        self._engine_here()
        many, conversations = conversations_in(messages)
        tokenizer, spans, arguments = self.tokenizer, ask.spec is not None, template_arguments(template_kwargs)
        rendered = [templated(tokenizer, conversation, arguments, spans=spans) for conversation in conversations]
        return await self._answer([({"prompt_token_ids": ids}, found) for ids, found in rendered], ask, many=many)

    async def _answer(self, prompts: Sequence[tuple[Any, list[MessageSpan]]], ask: Ask, *, many: bool) -> Any:
        """Run prompts, with the spans of their messages, and give back what the user gets."""
        engine, captured, raw = self._engine_here(), ask.spec is not None, flag_asked("raw_output", ask.raw_output)
        params = each(ask.sampling_params, len(prompts), "sampling_params")
        specs = each(ask.spec, len(prompts), "capture")
        edits = each(ask.steering, len(prompts), "steering")
        jobs = [
            await prepare(engine, prompt, *asked, options=ask.options, spans=spans, reading=ask.reading)
            for (prompt, spans), *asked in zip(prompts, params, specs, edits, strict=True)
        ]
        done = await run_all(jobs, self._running)
        texts = [_raw(one) if raw else _texts(one.output) for one in done]
        handles = [_unnested(one.handles, job) for one, job in zip(done, jobs, strict=True)]
        if not many:
            return (texts[0], handles[0]) if captured else texts[0]
        return (texts, handles) if captured else texts

    async def _stream(self, prompt: Any, ask: Ask) -> AsyncGenerator[Chunk, None]:
        many, given = listed(prompt)
        spec = ask.spec
        if many or isinstance(spec, (list, tuple)) or (isinstance(spec, CaptureSpec) and spec.reduce):
            raise InvalidRequest("stream takes one prompt, and rows rather than their reduction; use generate")
        engine = self._engine_here()
        job = await prepare(engine, given[0], ask.sampling_params, spec, ask.steering, options=ask.options)
        if job.params.n != 1:
            raise InvalidRequest(f"stream gives one sample, not n={job.params.n}; use generate")
        chunks = stream(job)
        try:
            while (chunk := await self._next(chunks)) is not None:
                yield chunk
        finally:
            if engine.home.is_here:
                with suppress(RuntimeError):  # a loop that ends closes all generators at once, this one too
                    await chunks.aclose()
            else:  # what it waits for there cannot be awaited here
                engine.home.call(lambda: asyncio.ensure_future(chunks.aclose()))

    async def _next(self, chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
        """The next chunk, None after the last; closing the model ends the wait with ModelClosed."""
        if self._closed:
            raise ModelClosed("the model was closed while this request ran")
        self._engine_here()

        async def step() -> Chunk | None:
            return await anext(chunks, None)

        task = asyncio.ensure_future(step())
        self._running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._closed:
                raise ModelClosed("the model was closed while this request ran") from None
            raise
        finally:
            self._running.discard(task)

    def _engine_here(self) -> Engine:
        """The engine, for who is about to await something of it."""
        engine = self._open_engine()
        engine.home.require()
        return engine

    def _open_engine(self) -> Engine:
        self._require_not_closed()
        if self._engine is None:
            raise ModelClosed(
                f"this SteerModel was never started; use it inside `{self._idiom.manager} SteerModel(...) as model:`"
            )
        return self._engine

    def _require_not_closed(self) -> None:
        if self._closed:
            raise ModelClosed(
                f"this SteerModel is closed; use it inside `{self._idiom.manager} SteerModel(...) as model:`"
            )


def _raw(done: Done) -> RequestOutput:
    done.output.steering = done.receipts
    return done.output


def _texts(output: RequestOutput) -> str | list[str]:
    texts = [sample.text for sample in output.outputs]
    return texts[0] if len(texts) == 1 else texts


def _unnested(handles: list[CaptureHandle] | None, job: Job) -> Any:
    return handles[0] if handles is not None and job.params.n == 1 else handles


def _flat(handles: Any, depth: int = 0) -> list[CaptureHandle]:
    if handles is None:
        return []
    if isinstance(handles, CaptureHandle):
        return [handles]
    if not isinstance(handles, (list, tuple)) or depth > DEEPEST:
        raise InvalidRequest(f"handles={shown(handles)}; give handles of generate or chat, in lists as they came")
    return [handle for group in handles for handle in _flat(group, depth + 1)]
