"""One prompt on its way: checked, admitted, run, and handed over as a text and its handles.

Number 2 and 3 in the life of a request, and its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from steercap.captures import Captures
from steercap.codecs import CODECS
from steercap.core.chat import MessageSpan
from steercap.core.messages import Owner, Wanted
from steercap.core.plan import CapturePlan, compile_capture
from steercap.core.rows import rows_selected
from steercap.core.spec import CaptureSpec, Point, check_armed
from steercap.core.tokens import selected
from steercap.errors import InvalidSpec, ModelClosed
from steercap.handle import CaptureHandle, Expected, received
from steercap.sites import SITES

if TYPE_CHECKING:
    import torch
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

    from steercap.adapters.engine import Rendered
    from steercap.core.budget import Ticket
    from steercap.engine import Engine

#: What one prompt gives: vLLM's output, and a handle for each sample if anything is kept.
Done: TypeAlias = "tuple[RequestOutput, list[CaptureHandle] | None]"


@dataclass(frozen=True)
class Job:
    """One prompt with its parameters and its plan.

    Args:
        engine: where it runs.
        prompt: the rendered prompt.
        params: sampling parameters, its own copy.
        options: further arguments of vLLM's `generate`.
        plan: what is kept, or None.
        points: the points of the plan.
        spans: positions of the messages, for `chat`.
    """

    engine: Engine
    prompt: Rendered
    params: SamplingParams
    options: dict[str, Any]
    plan: CapturePlan | None
    points: tuple[Point, ...]
    spans: tuple[MessageSpan, ...] = ()


@dataclass(frozen=True)
class Chunk:
    """What came since the last chunk of a stream.

    Args:
        text: new text.
        token_ids: new generated token ids.
        captures: new rows by point, [rows, hidden]; None where nothing is captured.
        positions: position of each new row, int64 [rows]; None where nothing is captured.
        finished: whether this is the last chunk.
    """

    text: str
    token_ids: tuple[int, ...]
    captures: Captures | None
    positions: torch.Tensor | None
    finished: bool


async def prepare(
    engine: Engine,
    prompt: Any,
    params: Any,
    spec: CaptureSpec | None,
    *,
    options: dict[str, Any],
    spans: Sequence[MessageSpan] = (),
) -> Job:
    """Check one request and compile its plan, before the engine hears of it.

    Raises:
        InvalidRequest: of the kind that says what is wrong.
    """
    vllm = engine.vllm
    points: tuple[Point, ...] = ()
    if spec is not None and not isinstance(spec, CaptureSpec):
        raise InvalidSpec(f"capture={spec!r}; give a CaptureSpec, or capture_layers= for layers alone")
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
    return Job(engine, rendered, sampling, options, plan, points, tuple(spans))


async def run_all(jobs: Sequence[Job], running: set[asyncio.Task[Any]]) -> list[Done]:
    """Run jobs at once; the first error cancels the others.

    Args:
        jobs: what to run.
        running: where the tasks are entered while they run; who cancels them there closes the model.

    Raises:
        ModelClosed: the tasks were cancelled through `running`.
    """
    call = object()
    tasks: list[asyncio.Task[Done]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                task = group.create_task(_run(job, call))
                tasks.append(task)
                running.add(task)
                task.add_done_callback(running.discard)
    except BaseException as error:  # noqa: BLE001 -- raised again, out of its group
        _release_done(tasks)
        raise _first(error) from None
    if any(task.cancelled() for task in tasks):
        _release_done(tasks)
        raise ModelClosed("the model was closed while this request ran")
    return [task.result() for task in tasks]


async def stream(job: Job) -> AsyncGenerator[Chunk, None]:
    """Run one job of one sample; yields text and rows as they come.

    Raises:
        CaptureIncomplete: rows are missing or belong to another token.
    """
    ticket = await _admit(job, object())
    tokens = rows = characters = 0
    try:
        async with aclosing(_outputs(job, partial=True)) as outputs:
            async for output in outputs:
                (sample,) = output.outputs
                captures, positions = await _new_rows(job, sample.token_ids, rows)
                rows += 0 if positions is None else len(positions)
                yield Chunk(
                    sample.text[characters:],
                    tuple(sample.token_ids[tokens:]),
                    captures,
                    positions,
                    output.finished,
                )
                tokens, characters = len(sample.token_ids), len(sample.text)
    finally:
        if job.plan is not None and ticket is not None:
            job.engine.abandon(job.plan, ticket)


async def _new_rows(job: Job, generated: Sequence[int], first: int) -> tuple[Captures | None, torch.Tensor | None]:
    """The rows from number `first` on of a sequence that has come so far."""
    if job.plan is None:
        return None, None
    total = job.plan.prompt_len + len(generated) - 1
    expected = Expected(job.plan.key, job.plan, job.points, (*job.prompt.token_ids, *generated), first)
    (delivery,) = await job.engine.collect([Wanted(Owner(job.plan.key, 0), total, first)])
    rows, receipt = received(expected, delivery, job.engine.vllm.points)
    import torch

    return Captures(rows, job.engine.vllm.num_layers), torch.from_numpy(receipt.positions)


async def _run(job: Job, call: object) -> Done:
    ticket = await _admit(job, call)
    try:
        output = await _last(_outputs(job, partial=False))
    except BaseException:
        if job.plan is not None and ticket is not None:
            job.engine.abandon(job.plan, ticket)
        raise
    return output, None if ticket is None else _handles(job, output, ticket)


async def _admit(job: Job, call: object) -> Ticket | None:
    """Reserve the memory of the longest the request can get."""
    if job.plan is None:
        return None
    rows = int(selected(job.plan.ranges, job.plan.limit).sum())
    return await job.engine.admit(job.engine.pages_needed(job.plan, rows) * job.plan.samples, call)


def _outputs(job: Job, *, partial: bool) -> AsyncGenerator[RequestOutput, None]:
    return job.engine.generate(job.prompt, job.params, job.plan, partial=partial, **job.options)


def _handles(job: Job, output: RequestOutput, ticket: Ticket) -> list[CaptureHandle]:
    """A handle for each sample, its claim cut down to what it holds."""
    assert job.plan is not None
    engine, plan = job.engine, job.plan
    tickets = engine.finish(ticket, [_pages_kept(job, len(sample.token_ids)) for sample in output.outputs])
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


def _pages_kept(job: Job, generated: int) -> int:
    """Pages a finished sample holds. A stop string is seen by the client alone: the worker may have gone on past it."""
    assert job.plan is not None
    plan = job.plan
    total = plan.limit if job.params.stop else plan.prompt_len + generated - 1
    return job.engine.pages_needed(plan, len(rows_selected(plan.ranges, plan.limit, total)))


async def _last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    last = None
    async for output in outputs:
        last = output
    assert last is not None, "the engine ended a request without an output"
    return last


def _release_done(tasks: Sequence[asyncio.Task[Done]]) -> None:
    """Free what the finished part of a failed call holds: nobody will ever get these handles."""
    for task in tasks:
        if task.done() and not task.cancelled() and task.exception() is None:
            for handle in task.result()[1] or ():
                handle.release()


def _first(error: BaseException) -> BaseException:
    """The error itself, or the first of a group that is no group."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
