"""One prompt on its way: checked, admitted, run, and handed over as a text and its handles.

Number 2 and 3 in the life of a request, and its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from steercap.captures import Captures
from steercap.codecs import CODECS
from steercap.core.chat import MessageSpan
from steercap.core.messages import Owner, Wanted
from steercap.core.plan import Plan, compile_capture
from steercap.core.program import SteeringPlan, identity
from steercap.core.receipt import SteeringReceipt, check_edits
from steercap.core.rows import rows_selected
from steercap.core.spec import CaptureSpec, Point, check_armed
from steercap.core.tokens import Range, selected
from steercap.errors import InvalidSpec, ModelClosed, SteeringNotApplied
from steercap.handle import CaptureHandle, Expected, received
from steercap.sites import SITES
from steercap.steering import Lowered, scopes_of, spec_of

if TYPE_CHECKING:
    import torch
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

    from steercap.adapters.engine import Rendered
    from steercap.core.budget import Ticket
    from steercap.core.slots import Grant
    from steercap.engine import Engine


class Done(NamedTuple):
    """What one prompt gives.

    Args:
        output: vLLM's output.
        handles: a handle for each sample, None if nothing is kept.
        receipts: what was edited of each sample, None if nothing was to be.
    """

    output: RequestOutput
    handles: list[CaptureHandle] | None
    receipts: list[SteeringReceipt] | None


@dataclass(frozen=True)
class Change:
    """One prompt's steering.

    Args:
        lowered: the edits.
        scopes: positions of each token selection.
        replaced: positions of each replacement.
    """

    lowered: Lowered
    scopes: tuple[tuple[Range, ...], ...]
    replaced: tuple[tuple[int, ...], ...]


class Admitted(NamedTuple):
    """What a request holds while it runs.

    Args:
        plan: what the workers shall do, complete.
        ticket: its memory for rows, or None.
        salt: what its keys and values depend on, "" if on its tokens alone.
    """

    plan: Plan | None
    ticket: Ticket | None = None
    salt: str = ""


@dataclass(frozen=True)
class Job:
    """One prompt with its parameters and its plan.

    Args:
        engine: where it runs.
        prompt: the rendered prompt.
        params: sampling parameters, its own copy.
        options: further arguments of vLLM's `generate`.
        plan: what is kept and changed, or None; what is changed is not yet in its slot.
        points: the points that are kept.
        change: what is changed, or None.
        spans: positions of the messages, for `chat`.
    """

    engine: Engine
    prompt: Rendered
    params: SamplingParams
    options: dict[str, Any]
    plan: Plan | None
    points: tuple[Point, ...]
    change: Change | None = None
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
        steering: with the last chunk, what was edited; None where nothing was to be.
    """

    text: str
    token_ids: tuple[int, ...]
    captures: Captures | None
    positions: torch.Tensor | None
    finished: bool
    steering: SteeringReceipt | None = None


async def prepare(
    engine: Engine,
    prompt: Any,
    params: Any,
    spec: CaptureSpec | None,
    steering: Any,
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
    edits = spec_of(steering)
    lowered = None if edits is None else engine.lowered(edits)
    sampling = vllm.sampling(params)
    rendered = await vllm.render(prompt)
    prompt_len = len(rendered.token_ids)
    limit = vllm.limit(prompt_len, sampling)
    capture = None
    if spec is not None:
        capture = compile_capture(
            spec, armed=engine.armed, num_layers=vllm.num_layers, prompt_len=prompt_len, limit=limit
        )
    change = None if lowered is None else Change(lowered, *scopes_of(lowered, prompt_len, limit))
    plan = None
    if capture is not None or change is not None:
        plan = Plan(engine.new_key(), prompt_len, limit, sampling.n, capture)
    return Job(engine, rendered, sampling, options, plan, points, change, tuple(spans))


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
        SteeringNotApplied: a worker did not make every edit; known when the last chunk is due.
    """
    tokens = rows = characters = 0
    async with (
        _admitted(job, object(), keep=False) as admitted,
        aclosing(_outputs(job, admitted, partial=True)) as outputs,
    ):
        async for output in outputs:
            (sample,) = output.outputs
            captures, positions = await _new_rows(job, sample.token_ids, rows)
            rows += 0 if positions is None else len(positions)
            receipts = await _receipts(job, admitted, output) if output.finished else None
            yield Chunk(
                sample.text[characters:],
                tuple(sample.token_ids[tokens:]),
                captures,
                positions,
                output.finished,
                receipts[0] if receipts else None,
            )
            tokens, characters = len(sample.token_ids), len(sample.text)


async def _new_rows(job: Job, generated: Sequence[int], first: int) -> tuple[Captures | None, torch.Tensor | None]:
    """The rows from number `first` on of a sequence that has come so far."""
    if job.plan is None or job.plan.capture is None:
        return None, None
    total = job.plan.prompt_len + len(generated) - 1
    expected = Expected(job.plan.key, job.plan, job.points, (*job.prompt.token_ids, *generated), first)
    (delivery,) = await job.engine.collect([Wanted(Owner(job.plan.key, 0), total, first)])
    rows, receipt = received(expected, delivery, job.engine.vllm.points)
    import torch

    return Captures(rows, job.engine.vllm.num_layers), torch.from_numpy(receipt.positions)


async def _run(job: Job, call: object) -> Done:
    async with _admitted(job, call, keep=True) as admitted:
        output = await _last(_outputs(job, admitted, partial=False))
        receipts = await _receipts(job, admitted, output)
    handles = None if admitted.ticket is None else _handles(job, output, admitted.ticket, receipts)
    return Done(output, handles, receipts)


@asynccontextmanager
async def _admitted(job: Job, call: object, *, keep: bool) -> AsyncIterator[Admitted]:
    """Hold the memory, then the slot that a request needs.

    In this order: who waits for a slot waits for running requests alone, and these wait for nobody.

    Args:
        job: the request.
        call: the call it belongs to.
        keep: whether its rows stay when it ends well, for handles.
    """
    if job.plan is None:
        yield Admitted(None)
        return
    ticket = await _memory(job, job.plan, call)
    kept = False
    try:
        if job.change is None:
            yield Admitted(job.plan, ticket)
        else:
            async with job.engine.equipment.holding(job.change.lowered) as grant:
                yield _steered(job, job.plan, job.change, grant, ticket)
        kept = keep
    finally:
        if not kept:
            job.engine.abandon(job.plan, ticket)


async def _memory(job: Job, plan: Plan, call: object) -> Ticket | None:
    """Reserve the memory of the longest the request can get."""
    if plan.capture is None:
        return None
    rows = int(selected(plan.capture.ranges, plan.limit).sum())
    return await job.engine.admit(job.engine.pages_needed(plan.capture, rows) * plan.samples, call)


def _steered(job: Job, plan: Plan, change: Change, grant: Grant, ticket: Ticket | None) -> Admitted:
    """The plan with its slot, and the salt that keeps its keys and values apart from all others'."""
    name = identity(grant.digest, change.scopes, change.replaced, job.engine.equipment.epoch)
    steering = SteeringPlan(grant.slot, grant.digest, name, change.scopes, change.replaced)
    salt = name.hex() if change.lowered.changes_kv else ""
    return Admitted(msgspec.structs.replace(plan, steering=steering), ticket, salt)


def _outputs(job: Job, admitted: Admitted, *, partial: bool) -> AsyncGenerator[RequestOutput, None]:
    return job.engine.generate(
        job.prompt, job.params, admitted.plan, salt=admitted.salt, partial=partial, **job.options
    )


async def _receipts(job: Job, admitted: Admitted, output: RequestOutput) -> list[SteeringReceipt] | None:
    """What was edited of each sample, compared with what must be.

    Raises:
        SteeringNotApplied: they differ; keys and values written until now are never read again.
    """
    plan = admitted.plan
    if plan is None or job.change is None:
        return None
    configuration = job.change.lowered.configuration
    wanted = [
        Wanted(Owner(plan.key, sample.index), plan.prompt_len + len(sample.token_ids) - 1) for sample in output.outputs
    ]
    async with asyncio.TaskGroup() as group:
        records = [group.create_task(job.engine.settle(item)) for item in wanted]
    try:
        return [
            check_edits(plan.key, plan, configuration, item.total, record.result())
            for item, record in zip(wanted, records, strict=True)
        ]
    except SteeringNotApplied:
        job.engine.equipment.epoch += 1
        raise


def _handles(
    job: Job, output: RequestOutput, ticket: Ticket, receipts: Sequence[SteeringReceipt] | None
) -> list[CaptureHandle]:
    """A handle for each sample, its claim cut down to what it holds."""
    assert job.plan is not None
    engine, plan = job.engine, job.plan
    tickets = engine.finish(ticket, [_pages_kept(job, plan, len(sample.token_ids)) for sample in output.outputs])
    handles = []
    for place, (sample, own) in enumerate(zip(output.outputs, tickets, strict=True)):
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
        owner = Owner(plan.key, sample.index)
        handles.append(handle._attach(engine, owner, plan, own, receipts[place] if receipts else None))
    return handles


def _pages_kept(job: Job, plan: Plan, generated: int) -> int:
    """Pages a finished sample holds. A stop string is seen by the client alone: the worker may have gone on past it."""
    assert plan.capture is not None
    total = plan.limit if job.params.stop else plan.prompt_len + generated - 1
    return job.engine.pages_needed(plan.capture, len(rows_selected(plan.capture.ranges, plan.limit, total)))


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
            for handle in task.result().handles or ():
                handle.release()


def _first(error: BaseException) -> BaseException:
    """The error itself, or the first of a group that is no group."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
