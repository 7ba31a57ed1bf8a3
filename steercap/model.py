"""SteerModel: what a user holds.

Number 1 in the life of a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from steercap.config import Overflow, Settings, Transport
from steercap.context import FROM_CONTEXT, FromContext, by_word_or_context, steered
from steercap.core.chat import MessageSpan
from steercap.core.spec import CaptureSpec, Layers, Point
from steercap.engine import Engine
from steercap.errors import InvalidPrompt, InvalidRequest, ModelClosed
from steercap.guard import require_main_guard
from steercap.handle import CaptureHandle, fetch_all
from steercap.job import Done, Job, prepare, run_all
from steercap.probe import probe
from steercap.prompts import Ask, each, listed, templated
from steercap.stats import Stats, stats_of
from steercap.steering import SteeringSpec
from steercap.stream import Chunk, stream

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from steercap.edits.base import Edit

#: What one prompt's `steering=` may be.
Steering: TypeAlias = "SteeringSpec | Edit | None"


class SteerModel:
    """A model served by vLLM whose activations can be read and changed while it generates.

    Args:
        model: path or name of the model, as vLLM takes it.
        sites: sites to arm: "resid_pre", "resid_post", "attn_out", "mlp_out".
        layers: layers to arm them at; all by default.
        capture_bytes: most shared memory that captured rows may take on each capturing worker, in bytes; taken when
            it is used, on CUDA pinned at the start.
        overflow: what a request does that finds no room, or no slot: "wait" for its turn, or "error".
        overflow_timeout: seconds that requests wait while no request runs that could make room.
        transport: how rows reach this process: "auto", "shared" or "wire".
        steering_slots: different steering configurations in use at once; a request that brings one more waits.
        vector_bytes: memory for the vectors of all configurations on each worker, in bytes, float32.
        edits_per_point: rank-one edits that one spec may have at one layer and site.
        arena_bytes: on CUDA, device memory on each capturing worker for rows on their way to shared memory; see
            `Settings`.
        **engine_args: vLLM's `AsyncEngineArgs`.

    Raises:
        InvalidSetting, UnknownName: a setting that does not fit.

    Use it as an async context manager, or `await start()` and `await aclose()`. Calls may run concurrently; vLLM
    batches them.
    """

    def __init__(
        self,
        model: str,
        *,
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
        self._engine_args = engine_args
        self._engine: Engine | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._life = asyncio.Lock()

    # Life

    async def start(self) -> SteerModel:
        """Start the engine and prove that its taps fire; takes half a minute or more.

        Raises:
            MainGuardMissing: the script would start engines without end.
            ModelNotLoaded, UnsupportedModel, UnsupportedRunner: the model cannot be served with taps.
            TapsNotInstalled: a tap does not fire, or its edits have no effect.
            ModelClosed: the model was closed before.
        """
        require_main_guard()
        async with self._life:
            if self._closed:
                raise ModelClosed("this SteerModel was closed; make a new one")
            if self._engine is None:
                engine = await Engine.start(self.model, self.settings, self._engine_args)
                try:
                    await probe(engine)
                except BaseException:
                    await engine.aclose()
                    raise
                self._engine = engine
        return self

    async def aclose(self) -> None:
        """Cancel what runs, free what is held, stop the engine. Idempotent."""
        self._closed = True
        for task in self._running:
            task.cancel()
        async with self._life:  # a start that is under way ends first
            engine, self._engine = self._engine, None
            if engine is not None:
                await engine.aclose()

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
            anything is captured, the pair (texts, handles), where handles has the shape of texts and holds a
            `CaptureHandle` for each text, None where nothing is kept.

        Rows captured are prompt + generated - 1: the last sampled token is never an input of the model. Layer `i` of
        "resid_post" is transformers' `hidden_states[i + 1]`, before the final norm for the last layer.

        Raises:
            InvalidPrompt, InvalidSpec, InvalidSelection, PointNotArmed: before anything runs.
            CaptureMemoryFull, SteeringSlotsFull: there is no room.
            SteeringNotApplied: a worker did not make every edit; the text is not handed over.
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
            As `generate`. Handles know which rows are whose words (the template's own tokens are nobody's):
            `handle.messages`, `handle.rows_of(0)`, `handle.rows_of("assistant")`.

        Raises:
            InvalidRequest: the tokenizer has no chat template, or it refuses the messages.
            The errors of `generate`.
        """
        options = {"lora_request": lora_request, "priority": priority}
        ask = Ask(
            sampling_params, capture_layers, capture, by_word_or_context(self, steering), options, raw_output=raw_output
        )
        return self._chat(messages, ask, dict(chat_template_kwargs or {}))

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
        """Steer every call inside that does not give `steering=` itself: `async with model.steered(spec): ...`.

        Inside another, its edits come after those of the other. Tasks started inside inherit it; tasks beside it
        do not see it.

        Args:
            steering: a SteeringSpec, or one edit.

        Yields:
            The spec in force, outer ones included.

        Raises:
            InvalidSpec: not a spec, or one that does not fit the model.
        """
        with steered(self, steering) as spec:
            self._open_engine().lowered(spec)
            yield spec

    async def fetch_captures_batch(self, handles: Sequence[Any]) -> None:
        """Fetch many handles with one RPC; nested lists and None are welcome, fetched handles are left alone.

        Raises:
            CaptureIncomplete: some rows are missing or wrong; the other handles are fetched all the same.
            CaptureReleased: one of the handles was released.
        """
        await fetch_all(_flat(handles))

    async def stats(self) -> Stats:
        """What the model holds now, against its limits."""
        return await stats_of(self._open_engine())

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
        """Elements of a row."""
        return self._open_engine().vllm.hidden_size

    @property
    def points(self) -> tuple[Point, ...]:
        """Points that have a tap, layer by layer."""
        return self._open_engine().vllm.points

    async def _generate(self, prompts: Any, ask: Ask) -> Any:
        many, given = listed(prompts)
        return await self._answer([(prompt, []) for prompt in given], ask, many=many)

    async def _chat(self, messages: Any, ask: Ask, template_kwargs: dict[str, Any]) -> Any:
        if isinstance(messages, Mapping) or not messages or not all(messages):
            raise InvalidPrompt(
                f"messages={messages!r}; give a list of {{'role', 'content'}} dicts, or a list of such lists"
            )
        many = not isinstance(messages[0], Mapping)
        tokenizer, spans = self.tokenizer, ask.spec is not None
        rendered = [
            templated(tokenizer, conversation, template_kwargs, spans=spans)
            for conversation in (messages if many else [messages])
        ]
        return await self._answer([({"prompt_token_ids": ids}, found) for ids, found in rendered], ask, many=many)

    async def _answer(self, prompts: Sequence[tuple[Any, list[MessageSpan]]], ask: Ask, *, many: bool) -> Any:
        """Run prompts, with the spans of their messages, and give back what the user gets."""
        engine, captured = self._open_engine(), ask.spec is not None
        params = each(ask.sampling_params, len(prompts), "sampling_params")
        specs = each(ask.spec, len(prompts), "capture")
        edits = each(ask.steering, len(prompts), "steering")
        jobs = [
            await prepare(engine, prompt, *asked, options=ask.options, spans=spans)
            for (prompt, spans), *asked in zip(prompts, params, specs, edits, strict=True)
        ]
        done = await run_all(jobs, self._running)
        texts = [_raw(one) if ask.raw_output else _texts(one.output) for one in done]
        handles = [_unnested(one.handles, job) for one, job in zip(done, jobs, strict=True)]
        if not many:
            return (texts[0], handles[0]) if captured else texts[0]
        return (texts, handles) if captured else texts

    async def _stream(self, prompt: Any, ask: Ask) -> AsyncGenerator[Chunk, None]:
        many, given = listed(prompt)
        spec = ask.spec
        if many or isinstance(spec, (list, tuple)) or (isinstance(spec, CaptureSpec) and spec.reduce):
            raise InvalidRequest("stream takes one prompt, and rows rather than their reduction; use generate")
        engine = self._open_engine()
        job = await prepare(engine, given[0], ask.sampling_params, spec, ask.steering, options=ask.options)
        if job.params.n != 1:
            raise InvalidRequest(f"stream gives one sample, not n={job.params.n}; use generate")
        async with aclosing(stream(job)) as chunks:
            while (chunk := await self._next(chunks)) is not None:
                yield chunk

    async def _next(self, chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
        """The next chunk, None after the last; closing the model ends the wait with ModelClosed."""
        if self._closed:
            raise ModelClosed("the model was closed while this request ran")

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

    def _open_engine(self) -> Engine:
        if self._engine is None:
            state = "is closed" if self._closed else "was never started"
            raise ModelClosed(f"this SteerModel {state}; use it inside `async with SteerModel(...) as model:`")
        return self._engine


def _raw(done: Done) -> RequestOutput:
    done.output.steering = done.receipts
    return done.output


def _texts(output: RequestOutput) -> str | list[str]:
    texts = [sample.text for sample in output.outputs]
    return texts[0] if len(texts) == 1 else texts


def _unnested(handles: list[CaptureHandle] | None, job: Job) -> Any:
    return handles[0] if handles is not None and job.params.n == 1 else handles


def _flat(handles: Any) -> list[CaptureHandle]:
    if handles is None:
        return []
    if isinstance(handles, CaptureHandle):
        return [handles]
    return [handle for group in handles for handle in _flat(group)]
