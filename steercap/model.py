"""SteerModel: what a user holds.

Number 1 in the life of a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from steercap.codecs import CODECS
from steercap.config import Overflow, Settings, Transport
from steercap.core.chat import MessageSpan, message_spans
from steercap.core.messages import Owner
from steercap.core.plan import CapturePlan, compile_capture
from steercap.core.rows import rows_selected
from steercap.core.spec import CaptureSpec, Layers, Point, check_armed
from steercap.core.tokens import selected
from steercap.engine import Engine
from steercap.errors import InvalidPrompt, InvalidRequest, InvalidSpec, ModelClosed
from steercap.guard import require_main_guard
from steercap.handle import CaptureHandle, fetch_all
from steercap.sites import SITES

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from steercap.adapters.engine import Rendered

#: What one prompt gives: vLLM's output, and a handle for each sample if anything is kept.
_Done: TypeAlias = "tuple[RequestOutput, list[CaptureHandle] | None]"


@dataclass(frozen=True)
class Stats:
    """What the model holds, and what it may hold; bytes and counts.

    Args:
        capture_bytes: most memory that rows may take on each capturing worker.
        capture_bytes_claimed: of that, claimed by running requests and unfetched handles.
        capture_bytes_in_use: of that, filled with rows, on the fullest worker.
        requests_waiting: requests that wait for capture memory.
        handles_held: requests whose rows a worker holds.
        rows_captured: rows written since the start, all requests together.
        steps: forward passes run.
    """

    capture_bytes: int
    capture_bytes_claimed: int
    capture_bytes_in_use: int
    requests_waiting: int
    handles_held: int
    rows_captured: int
    steps: int


@dataclass(frozen=True)
class _Job:
    """One prompt on its way: rendered, with its parameters and its plan."""

    prompt: Rendered
    params: SamplingParams
    plan: CapturePlan | None
    points: tuple[Point, ...]
    spans: tuple[MessageSpan, ...] = field(default=())


class SteerModel:
    """A model served by vLLM whose activations can be read while it generates.

    Args:
        model: path or name of the model, as vLLM takes it.
        sites: sites to arm: "resid_pre", "resid_post", "attn_out", "mlp_out".
        layers: layers to arm them at; all by default.
        capture_bytes: most shared memory that captured rows may take on each capturing worker, in bytes.
        overflow: what a request does that finds no room: "wait" for its turn, or "error".
        overflow_timeout: seconds that requests wait while no request runs that could make room.
        transport: how rows reach this process: "auto", "shared" or "wire".
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
        )
        self._engine_args = engine_args
        self._engine: Engine | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    # Life

    async def start(self) -> SteerModel:
        """Start the engine and prove that its taps fire; takes half a minute or more.

        Raises:
            MainGuardMissing: the script would start engines without end.
            ModelNotLoaded, UnsupportedModel, UnsupportedRunner: the model cannot be served with taps.
            TapsNotInstalled: a tap does not fire.
            ModelClosed: the model was closed before.
        """
        if self._closed:
            raise ModelClosed("this SteerModel was closed; make a new one")
        if self._engine is None:
            require_main_guard()
            self._engine = await Engine.start(self.model, self.settings, self._engine_args)
        return self

    async def aclose(self) -> None:
        """Cancel what runs, free what is held, stop the engine. Idempotent."""
        self._closed = True
        for task in self._running:
            task.cancel()
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.aclose()

    async def __aenter__(self) -> SteerModel:
        return await self.start()

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()

    # Work

    async def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Mapping[str, Any] | Sequence[Any] | None = None,
        *,
        capture_layers: Layers | None = None,
        capture: CaptureSpec | Sequence[CaptureSpec | None] | None = None,
        raw_output: bool = False,
    ) -> Any:
        """Generate text, keeping the activations asked for.

        Args:
            prompts: a str, token ids, one of vLLM's prompt dicts, or a list of these.
            sampling_params: vLLM's SamplingParams or a dict of its fields, for all prompts or one each.
            capture_layers: shorthand for `capture=CaptureSpec(layers=capture_layers)`.
            capture: what to keep, for all prompts, or one each (None keeps nothing).
            raw_output: return vLLM's RequestOutput in place of each text.

        Returns:
            The text, or a list of texts for a list of prompts; with `n > 1`, a list of n texts for each prompt. If
            anything is captured, the pair (texts, handles), where handles has the shape of texts and holds a
            `CaptureHandle` for each text, None where nothing is kept.

        Rows captured are prompt + generated - 1: the last sampled token is never an input of the model. Layer `i` of
        "resid_post" is transformers' `hidden_states[i + 1]`, before the final norm for the last layer.

        Raises:
            InvalidPrompt, InvalidSpec, InvalidSelection, PointNotArmed: before anything runs.
            CaptureMemoryFull: there is no room for the rows.
            ModelClosed: the model is not open.
        """
        many, listed = _listed(prompts)
        spec = _capture(capture_layers, capture)
        engine = self._open_engine()
        params = _each(sampling_params, len(listed), "sampling_params")
        specs = _each(spec, len(listed), "capture")
        jobs = [await self._prepare(engine, *item) for item in zip(listed, params, specs, strict=True)]
        return await self._run(engine, jobs, many=many, captured=spec is not None, raw_output=raw_output)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Mapping[str, Any] | Sequence[Any] | None = None,
        *,
        capture_layers: Layers | None = None,
        capture: CaptureSpec | Sequence[CaptureSpec | None] | None = None,
        raw_output: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Generate the next message of a conversation, or of each of several.

        Args:
            messages: one conversation, a list of {"role", "content"} dicts, or a list of conversations.
            sampling_params, capture_layers, capture, raw_output: as for `generate`.
            chat_template_kwargs: further arguments of the tokenizer's chat template.

        Returns:
            As `generate`. Handles know which rows belong to which message: `handle.messages`, `handle.rows_of(0)`,
            `handle.rows_of("assistant")`.

        Raises:
            InvalidRequest: the tokenizer has no chat template, or it refuses the messages.
            The errors of `generate`.
        """
        if isinstance(messages, Mapping) or not messages or not all(messages):
            raise InvalidPrompt(
                f"messages={messages!r}; give a list of {{'role', 'content'}} dicts, or a list of such lists"
            )
        many = not isinstance(messages[0], Mapping)
        conversations: list[Any] = list(messages) if many else [messages]
        spec = _capture(capture_layers, capture)
        engine = self._open_engine()
        params = _each(sampling_params, len(conversations), "sampling_params")
        specs = _each(spec, len(conversations), "capture")
        jobs = []
        for conversation, one_params, one_spec in zip(conversations, params, specs, strict=True):
            token_ids, spans = _templated(engine.vllm.tokenizer, conversation, dict(chat_template_kwargs or {}))
            jobs.append(await self._prepare(engine, {"prompt_token_ids": token_ids}, one_params, one_spec, spans))
        return await self._run(engine, jobs, many=many, captured=spec is not None, raw_output=raw_output)

    async def fetch_captures_batch(self, handles: Sequence[Any]) -> None:
        """Fetch many handles with one RPC; nested lists and None are welcome, fetched handles are left alone.

        Raises:
            CaptureIncomplete: some rows are missing or wrong; the other handles are fetched all the same.
            CaptureReleased: one of the handles was released.
        """
        await fetch_all(_flat(handles))

    async def stats(self) -> Stats:
        """What the model holds now, against its limits."""
        engine = self._open_engine()
        counts = await engine.census()
        budget, page_bytes = engine.admission.budget, engine.admission.page_bytes
        return Stats(
            capture_bytes=budget.pages * page_bytes,
            capture_bytes_claimed=budget.reserved * page_bytes,
            capture_bytes_in_use=max(count.pages_in_use * count.page_bytes for count in counts),
            requests_waiting=budget.waiting,
            handles_held=max(count.requests for count in counts),
            rows_captured=sum(count.rows_written for count in counts),
            steps=max(count.steps for count in counts),
        )

    # What is reachable

    @property
    def engine(self) -> AsyncLLM:
        """VLLM's own engine."""
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
    def points(self) -> tuple[Point, ...]:
        """Points that have a tap, in the order of the forward pass."""
        return self._open_engine().vllm.points

    # How it is done

    async def _prepare(
        self, engine: Engine, prompt: Any, params: Any, spec: CaptureSpec | None, spans: Sequence[MessageSpan] = ()
    ) -> _Job:
        """Check one request and compile its plan, before the engine hears of it."""
        vllm = engine.vllm
        points: tuple[Point, ...] = ()
        if spec is not None:
            points = spec.points(vllm.num_layers)
            check_armed(points, vllm.points, SITES)
            CODECS[spec.codec]  # an unknown one is an error here, not in the worker
        sampling = vllm.sampling(params)
        rendered = await vllm.render(prompt)
        plan = None
        if spec is not None:
            plan = compile_capture(
                spec,
                key=engine.new_key(),
                armed=engine.armed,
                num_layers=vllm.num_layers,
                prompt_len=len(rendered.token_ids),
                limit=vllm.limit(len(rendered.token_ids), sampling),
                samples=sampling.n,
            )
        return _Job(rendered, sampling, plan, points, tuple(spans))

    async def _run(self, engine: Engine, jobs: Sequence[_Job], *, many: bool, captured: bool, raw_output: bool) -> Any:
        call = object()
        done = await self._together([partial(self._run_one, engine, job, call) for job in jobs])
        texts = [output if raw_output else _texts(output) for output, _ in done]
        handles = [_unnested(found, job) for (_, found), job in zip(done, jobs, strict=True)]
        if not many:
            return (texts[0], handles[0]) if captured else texts[0]
        return (texts, handles) if captured else texts

    async def _together(self, works: Sequence[Callable[[], Coroutine[Any, Any, _Done]]]) -> list[_Done]:
        """Run all at once; the first error cancels the others. Closing the model ends them with ModelClosed."""
        tasks: list[asyncio.Task[_Done]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for work in works:
                    task = group.create_task(work())
                    tasks.append(task)
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)
        except BaseException as error:  # noqa: BLE001 -- raised again, out of its group
            _release_done(tasks)
            raise _first(error) from None
        if any(task.cancelled() for task in tasks):
            _release_done(tasks)
            raise ModelClosed("the model was closed while this request ran")
        return [task.result() for task in tasks]

    async def _run_one(self, engine: Engine, job: _Job, call: object) -> _Done:
        if job.plan is None:
            return await _last(engine.generate(job.prompt, job.params, None)), None
        plan = job.plan
        rows = int(selected(plan.ranges, plan.limit).sum())
        ticket = await engine.admit(engine.pages_needed(plan, rows) * plan.samples, call)
        try:
            output = await _last(engine.generate(job.prompt, job.params, plan))
        except BaseException:
            engine.abandon(plan, ticket)
            raise
        return output, self._handles(engine, job, output, ticket)

    def _handles(self, engine: Engine, job: _Job, output: RequestOutput, ticket: Any) -> list[CaptureHandle]:
        assert job.plan is not None
        plan = job.plan
        kept = [
            len(rows_selected(plan.ranges, plan.limit, plan.prompt_len + len(sample.token_ids) - 1))
            for sample in output.outputs
        ]
        tickets = engine.finish(ticket, [engine.pages_needed(plan, rows) for rows in kept])
        handles = []
        for sample, own in zip(output.outputs, tickets, strict=True):
            stop = plan.prompt_len + len(sample.token_ids)
            reply = (MessageSpan("assistant", None, plan.prompt_len, stop),) if job.spans else ()
            handle = CaptureHandle(
                request_id=plan.key if plan.samples == 1 else f"{plan.key}/{sample.index}",
                model=engine.vllm.model_name,
                text=sample.text,
                prompt_token_ids=job.prompt.token_ids,
                output_token_ids=sample.token_ids,
                points=job.points,
                num_layers=engine.vllm.num_layers,
                messages=job.spans + reply,
            )
            handles.append(handle._attach(engine, Owner(plan.key, sample.index), plan, own))
        return handles

    def _open_engine(self) -> Engine:
        if self._engine is None:
            state = "is closed" if self._closed else "was never started"
            raise ModelClosed(f"this SteerModel {state}; use it inside `async with SteerModel(...) as model:`")
        return self._engine


def _listed(prompts: Any) -> tuple[bool, list[Any]]:
    """Whether several prompts were given, and the list of them."""
    if isinstance(prompts, (str, Mapping)):
        return False, [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidPrompt(f"prompts={prompts!r}; give a str, token ids, a prompt dict, or a list of these")
    if not prompts:
        raise InvalidPrompt("prompts=[] holds no prompt; give at least one")
    if all(isinstance(token, int) and not isinstance(token, bool) for token in prompts):
        return False, [{"prompt_token_ids": list(prompts)}]
    return True, [
        prompt if isinstance(prompt, (str, Mapping)) else {"prompt_token_ids": list(prompt)} for prompt in prompts
    ]


def _capture(layers: Layers | None, capture: Any) -> Any:
    if layers is not None and capture is not None:
        raise InvalidSpec("give capture_layers= or capture=, not both")
    return CaptureSpec(layers=layers) if layers is not None else capture


def _each(value: Any, count: int, name: str) -> list[Any]:
    """One value for each prompt."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{name} has {len(value)} entries for {count} prompts; give one for all, or one each")
    return list(value)


def _templated(
    tokenizer: Any, conversation: Sequence[Mapping[str, Any]], kwargs: dict[str, Any]
) -> tuple[list[int], list[MessageSpan]]:
    """Token ids of a conversation that invites a reply, and where its messages lie."""

    def ids(messages: Sequence[Mapping[str, Any]], *, invite: bool) -> list[int]:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, **{"add_generation_prompt": invite, **kwargs}
        )
        return list(tokenizer.encode(text, add_special_tokens=False))

    try:
        full = ids(conversation, invite=True)
        prefixes = [ids(conversation[: end + 1], invite=False) for end in range(len(conversation))]
    except Exception as error:
        raise InvalidRequest(f"the chat template refuses {conversation!r}: {error}") from error
    return full, message_spans([str(message.get("role")) for message in conversation], prefixes, full)


def _texts(output: RequestOutput) -> str | list[str]:
    texts = [sample.text for sample in output.outputs]
    return texts[0] if len(texts) == 1 else texts


def _unnested(handles: list[CaptureHandle] | None, job: _Job) -> Any:
    return handles[0] if handles is not None and job.params.n == 1 else handles


def _flat(handles: Any) -> list[CaptureHandle]:
    if handles is None:
        return []
    if isinstance(handles, CaptureHandle):
        return [handles]
    return [handle for group in handles for handle in _flat(group)]


async def _last(outputs: Any) -> RequestOutput:
    last = None
    async for output in outputs:
        last = output
    assert last is not None, "the engine ended a request without an output"
    return last


def _release_done(tasks: Sequence[asyncio.Task[_Done]]) -> None:
    """Free what the finished part of a failed call holds: nobody will ever get these handles."""
    for task in tasks:
        if task.done() and not task.cancelled() and task.exception() is None:
            for handle in task.result()[1] or ():
                handle.release()


def _first(error: BaseException) -> BaseException:
    """The error itself, or the first of a group that is no group."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
