"""Jobs: single prompts, checked and compiled, and the functions that run one or many of them to their results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from steercap.captures.checks import Expected
from steercap.captures.fetching import Arrived, arrived
from steercap.captures.handle import CaptureHandle
from steercap.captures.lifecycle import Lifecycle, Recomputable, Source
from steercap.captures.pooled import Encoded
from steercap.core.attention import AttentionRule
from steercap.core.chat import MessageSpan
from steercap.core.messages import Owner, Wanted
from steercap.core.plan import Plan
from steercap.core.program import SteeringPlan, identity
from steercap.core.receipt import SteeringReceipt, check_edits
from steercap.core.schema import RAW
from steercap.core.spec import Point
from steercap.core.tokens import Range, count_selected
from steercap.engine.sae_readers import Readers
from steercap.errors import ModelClosed, SteeringNotApplied, first_error
from steercap.requests.call_types import Generation
from steercap.requests.monitoring import Watch
from steercap.requests.sketching import RunningSketch, enter
from steercap.steering.calibration import Calibrated
from steercap.steering.lowering import CompiledProjection, Lowered

if TYPE_CHECKING:
    from steercap.adapters import PoolingParams, PoolingRequestOutput, RequestOutput, SamplingParams
    from steercap.adapters.prompts import Rendered
    from steercap.core.budget import Reservation
    from steercap.engine.engine import Engine


@dataclass(frozen=True)
class CompiledSteering:
    """Steering of one prompt, compiled to positions.

    Args:
        lowered: the compiled edits, without positions.
        scopes: positions of each token selection.
        replaced: positions of each replacement.
        biased: positions of each token selection of logit biases.
        held: key of the request if edits are held back until a monitor fires; else "".
    """

    lowered: Lowered
    scopes: tuple[tuple[Range, ...], ...]
    replaced: tuple[tuple[int, ...], ...]
    biased: tuple[tuple[Range, ...], ...] = ()
    held: str = ""

    def placed(self, slots: Mapping[bytes, int], epoch: int) -> SteeringPlan:
        """Return the steering plan for the workers, given slots by configuration digest.

        `epoch` is part of the identity of KV cache entries; it grows when edits have failed.
        """
        digest = self.lowered.digest
        name = identity(self.lowered.edits_digest or digest, self.scopes, self.replaced, epoch, self.held)
        return SteeringPlan(slots[digest], digest, name, self.scopes, self.replaced, self.biased, bool(self.held))


class Planned(NamedTuple):
    """Complete instructions of one request for the workers.

    Args:
        plan: the plan, with slots assigned; None if nothing is captured or edited.
        salt: salt of the prefix cache, if edits change keys and values; else "".
    """

    plan: Plan | None
    salt: str


@dataclass(frozen=True)
class Sample:
    """Finished sample of a request, with the field names of vLLM's `CompletionOutput`.

    The defaults are for a pooling model, which generates nothing: -1 is in place of the last token, which has no row.
    """

    index: int = 0
    text: str = ""
    token_ids: Sequence[int] = (-1,)


def ends_with_engine(_job: Job, _sample: Sample) -> Recomputable | None:
    """Return None: the rows of the job cannot be recomputed."""


@dataclass(frozen=True)
class Job:
    """One prompt, ready to run: parameters, capture plan and compiled steering.

    Args:
        engine: the engine that runs the job.
        prompt: the rendered prompt.
        params: sampling or pooling parameters, a copy of the user's.
        options: further arguments of vLLM's `generate` or `encode`.
        plan: the plan, without slots and steering, which `planned` adds. None if nothing is captured or edited.
        points: the captured points, layer by layer.
        projected: the directions that rows are projected on, or None.
        calibrated: the calibration that rows are coded by, or None.
        readers: the SAEs that read the rows, or None.
        steering: the compiled steering, or None.
        spans: positions of the messages, for `chat`.
        reading: True if the prompt is only read: the one token that vLLM must sample is hidden from the user.
        task: task of a pooling model; None for a model that generates.
        stops: True if a stop string or a monitor may end the text, which the workers do not see.
        sketches: the sketches that the rows are added to when the job has ended.
        hands_over: True if the user gets the rows; False if they are for sketches or monitors alone, or there are none.
        watch: the job's monitors, None if there are none.
        recompute: function that returns the object that can recompute a finished sample's rows, or None.
    """

    engine: Engine
    prompt: Rendered
    params: SamplingParams | PoolingParams
    options: dict[str, Any]
    plan: Plan | None
    points: tuple[Point, ...]
    projected: CompiledProjection | None = None
    calibrated: Calibrated | None = None
    readers: Readers | None = None
    steering: CompiledSteering | None = None
    spans: tuple[MessageSpan, ...] = ()
    reading: bool = False
    task: str | None = None
    stops: bool = False
    sketches: tuple[RunningSketch, ...] = ()
    hands_over: bool = True
    watch: Watch | None = None
    recompute: Callable[[Job, Sample], Recomputable | None] = ends_with_engine

    def samples_of(self, output: Any) -> Sequence[Sample]:
        """Return the samples of a vLLM output; for a pooling model one empty `Sample`."""
        found: Sequence[Sample] = output.outputs if self.task is None else (Sample(),)
        return found


async def enter_sketches(job: Job, samples: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Add the rows of a finished job to the sketches that it joined; do nothing if it joined none.

    Args:
        job: the finished request.
        samples: index and generated token ids of each sample.

    Raises:
        CaptureIncomplete, CaptureNotFinite, SketchClosed, SketchIncomplete: see `requests.sketching.enter`.
    """
    if job.sketches and job.plan is not None:
        expected = [(index, expected_of(job, job.plan, index, tokens)) for index, tokens in samples]
        wanted = [(Wanted(Owner(job.plan.key, index), len(one.tokens) - 1), one) for index, one in expected]
        await enter(job.engine, job.sketches, wanted)


def expected_of(
    job: Job, plan: Plan, index: int, generated: Sequence[int], receipt: SteeringReceipt | None = None
) -> Expected:
    """Return the rows that the capture of one sample must have, with which fetched rows are compared.

    Args:
        job: the request.
        plan: plan of the request.
        index: index of the sample.
        generated: token ids that the sample generated.
        receipt: checked receipt of the sample's edits, None without.
    """
    name = plan.key if plan.samples == 1 else f"{plan.key}/{index}"
    constants = job.calibrated.constants if job.calibrated else {}
    tokens = (*job.prompt.token_ids, *generated)
    return Expected(
        name,
        plan,
        job.points,
        tokens,
        steering=receipt,
        constants=constants,
        read=job.readers.schemas if job.readers else {},
        verified=job.engine.verified,
    )


async def memory_for(job: Job, call: object) -> Reservation | None:
    """Reserve capture memory for the longest sequence that the job can reach; None if it captures nothing.

    Memory is reserved before the steering slot: a job that waits for a slot then waits only for running jobs, which
    wait for nothing. `call` is the identity of the call that the job is part of.
    """
    plan = job.plan
    if plan is None or plan.capture is None:
        return None
    return await job.engine.admit_rows(plan, call, job.options.get("data_parallel_rank"))


def pages_of(job: Job) -> int:
    """Return the maximum number of pages of capture memory that a job may need; 0 if it captures nothing."""
    return 0 if job.plan is None else job.engine.room_for(job.plan)[0]


def leaving(job: Job, room: int) -> Job:
    """Return the job, changed so that rows move to disk while it runs if they do not fit in `room` pages."""
    plan = job.plan
    if plan is None or plan.capture is None:
        return job
    capture = job.engine.windowed(plan.capture, plan.limit, plan.samples, room)
    return replace(job, plan=msgspec.structs.replace(plan, capture=capture))


def planned(job: Job) -> AbstractAsyncContextManager[Planned]:
    """Return a context manager that holds a job's slots and SAEs, and yields its `Planned` instructions."""
    wanted = [one.lowered for one in (job.steering, job.projected, job.calibrated) if one is not None]
    if job.plan is None or not (wanted or job.readers):
        return nullcontext(Planned(job.plan, ""))
    return _placed(job, job.plan, wanted)


@asynccontextmanager
async def _placed(job: Job, plan: Plan, wanted: Sequence[Lowered]) -> AsyncIterator[Planned]:
    configurations = job.engine.configurations
    async with job.engine.saes.holding(job.readers) as saes, configurations.holding(*wanted) as grants:
        slots = {grant.digest: grant.slot for grant in grants}
        capture = plan.capture and msgspec.structs.replace(plan.capture.placed(slots), saes=saes)
        steering = job.steering and job.steering.placed(slots, configurations.epoch)
        salt = steering.identity.hex() if steering and job.steering and job.steering.lowered.changes_kv else ""
        yield Planned(msgspec.structs.replace(plan, capture=capture, steering=steering), salt)


def outputs_of(
    job: Job, planned: Planned, reservation: Reservation | None, *, partial: bool | None
) -> AsyncGenerator[RequestOutput | PoolingRequestOutput, None]:
    """Run a job as planned with its reserved memory; yield vLLM's outputs, the finished one last.

    `partial=True` yields every output, with all tokens generated so far; `partial=False` yields only the finished
    output; None follows the job's own parameters. Monitors read the job's rows meanwhile, and may end it.
    """
    kind = "" if job.watch is None else cast("SamplingParams", job.params).output_kind.name
    final = partial is False or (partial is None and kind == "FINAL_ONLY")
    outputs: Any = job.engine.generate(
        job.prompt,
        job.params,
        planned.plan,
        reservation=reservation,
        salt=planned.salt,
        partial=partial if job.watch is None else True if final else partial,
        **job.options,
    )
    if job.watch is None:
        found: AsyncGenerator[RequestOutput | PoolingRequestOutput, None] = outputs
        return found
    return job.watch.outputs(
        outputs,
        lambda samples: rows_so_far(job, samples),
        lambda tokens: job.engine.vllm.text(job.prompt, cast("SamplingParams", job.params), tokens),
        lambda indices: job.engine.workers.engage([Owner(cast("Plan", job.plan).key, index) for index in indices]),
        new=partial is None and kind == "DELTA",
        final=final,
    )


async def rows_so_far(job: Job, samples: Mapping[int, tuple[Sequence[int], int]]) -> dict[int, Arrived]:
    """Fetch and check the new rows of samples of a running job; return them by sample index.

    Args:
        job: the request, which captures.
        samples: token ids generated so far and number of rows fetched before, by sample index.

    Raises:
        CaptureIncomplete, CaptureNotFinite: see `checks.received`.
    """
    plan = job.plan
    assert plan is not None
    wanted = [
        (Owner(plan.key, index), replace(expected_of(job, plan, index, tokens), first=first))
        for index, (tokens, first) in samples.items()
    ]
    return dict(zip(samples, await arrived(job.engine, wanted), strict=True)) if wanted else {}


async def receipts_of(
    job: Job, plan: Plan | None, samples: Sequence[tuple[int, int]], *, ended: bool
) -> list[SteeringReceipt] | None:
    """Return a receipt of the edits made so far for each sample, checked against the plan; None without steering.

    Args:
        job: the request.
        plan: completed plan of the request, None if nothing is captured or edited.
        samples: index and number of generated tokens of each sample.
        ended: True if the request has ended.

    Raises:
        SteeringNotApplied: the edits differ from the plan; KV cache entries written until now are never reused.
    """
    if plan is None or job.steering is None:
        return None
    configuration = job.steering.lowered.configuration
    wanted = [Wanted(Owner(plan.key, index), plan.prompt_len + length - 1) for index, length in samples]
    found = await job.engine.workers.settle(wanted, ended=ended, biased=bool(configuration.biases))
    try:
        return [
            check_edits(
                plan.key,
                _since(job, plan, item.owner.sample),
                configuration,
                item.total,
                said,
                points=job.engine.vllm.points,
            )
            for item, said in zip(wanted, found, strict=True)
        ]
    except SteeringNotApplied:
        job.engine.configurations.epoch += 1
        raise


def _since(job: Job, plan: Plan, index: int) -> Plan:
    """Return the plan of a sample, with held-back steering limited to the positions from which it was applied."""
    if job.watch is None or plan.steering is None or not plan.steering.held:
        return plan
    return msgspec.structs.replace(plan, steering=plan.steering.since(job.watch.steered(index)))


def handles_of(
    job: Job, samples: Sequence[Sample], reservation: Reservation, receipts: Sequence[SteeringReceipt] | None
) -> list[CaptureHandle]:
    """Return a handle for each sample, and reduce the job's reservation to the pages that are in use."""
    assert job.plan is not None
    engine, plan = job.engine, job.plan
    reservations = engine.admission.finish(
        reservation, [_pages_kept(job, plan, len(sample.token_ids)) for sample in samples]
    )
    adapter = getattr(job.options.get("lora_request"), "lora_name", "")
    handles = []
    for index, (sample, own) in enumerate(zip(samples, reservations, strict=True)):
        stop = plan.prompt_len + len(sample.token_ids)
        reply = (MessageSpan("assistant", None, plan.prompt_len, stop),) if job.spans else ()
        receipt = receipts[index] if receipts else None
        expected = expected_of(job, plan, sample.index, sample.token_ids, receipt)
        handle = CaptureHandle(
            request_id=expected.name,
            model=engine.vllm.model_name,
            text="" if job.reading else sample.text,
            prompt_token_ids=job.prompt.token_ids,
            output_token_ids=() if job.reading else sample.token_ids,
            points=job.points,
            num_layers=engine.vllm.num_layers,
            lifecycle=Lifecycle(expected.name, source=_source(job, plan, sample, own, expected)),
            messages=job.spans + reply,
            media=job.prompt.media,
            directions=job.projected.names if job.projected else (),
            marks=job.projected.marks if job.projected else {},
            attention_rules=_rules_of(job),
            adapter=adapter,
        )
        engine.offer(own, handle.lifecycle)
        handles.append(handle)
    return handles


def _source(job: Job, plan: Plan, sample: Sample, reservation: Reservation, expected: Expected) -> Source:
    """Return the source that the rows of a sample are fetched from."""
    edits = job.steering.lowered.configuration.entries if job.steering else ()
    numbers = {number for entry in edits for number in entry.points}
    edited = frozenset(point for point, number in job.engine.armed.items() if number in numbers)
    return Source(job.engine, Owner(plan.key, sample.index), reservation, expected, job.recompute(job, sample), edited)


def _rules_of(job: Job) -> Mapping[int, AttentionRule]:
    """Return the attention rules of the layers whose queries and keys a job captures.

    A rule is marked `unknown` with the reason if the captured rows are not those that the layer itself reads.
    """
    plan = job.plan.capture if job.plan else None
    if plan is None or not job.engine.attention:
        return {}
    points = set(job.points)
    found = {
        layer: rule for layer, rule in job.engine.attention.items() if {Point(layer, "q"), Point(layer, "k")} <= points
    }
    reasons = {
        f"its rows are reduced, by {plan.reduce!r}": plan.reduce,
        "its rows are projections": job.projected,
        (
            f"its rows are kept as {plan.coding}, and attention computed from codes differs from that of the model"
        ): plan.coding != RAW,
        "its rows are those before the edits of their points": plan.before_edits and job.steering,
    }
    unknown = "; ".join(reason for reason, holds in reasons.items() if holds)
    return {layer: msgspec.structs.replace(rule, unknown=rule.unknown or unknown) for layer, rule in found.items()}


def _pages_kept(job: Job, plan: Plan, generated: int) -> int:
    """Return the number of arena pages in use by a finished sample with `generated` tokens.

    The worker may have run past the sample's end: any distance past a stop string, which only the client sees, and
    otherwise as far as vLLM runs ahead.
    """
    assert plan.capture is not None
    if plan.capture.window:
        return 0  # all of them are in the workers' files
    total = plan.prompt_len + generated - 1 + job.engine.vllm.overshoot
    total = plan.limit if job.stops else min(plan.limit, total)
    return job.engine.pages_needed(plan.capture, count_selected(plan.capture.ranges, total))


async def run_all(
    jobs: AsyncIterable[Coroutine[Any, Any, Generation]], running: set[asyncio.Task[Any]]
) -> list[Generation]:
    """Run jobs concurrently, each once it is prepared; return results in order. The first error cancels the others.

    Args:
        jobs: coroutines of the jobs (`run_job`), in the order in which memory is reserved.
        running: set that holds the tasks while they run; closing the model cancels the tasks in it.

    Raises:
        ModelClosed: the tasks were cancelled through `running`.
    """
    tasks: list[asyncio.Task[Generation]] = []
    try:
        async with asyncio.TaskGroup() as group:
            async for job in jobs:
                task = group.create_task(job)
                tasks.append(task)
                running.add(task)
                task.add_done_callback(running.discard)
    except BaseException as failed:  # noqa: BLE001 -- raised again, out of its group
        _release_done(tasks)
        error = first_error(failed)
        raise error from error.__cause__  # it keeps its own cause, and the group is none
    if any(task.cancelled() for task in tasks):
        _release_done(tasks)
        raise ModelClosed("the model was closed while this request ran")
    return [task.result() for task in tasks]


async def run_job(job: Job, call: object) -> Generation:
    """Run one job to its end on its engine; if that fails, all that it reserved is freed.

    The `output` of a pooling model's job is an `Encoded`.

    Args:
        job: the job to run.
        call: identity of the call that the job is part of.
    """
    reservation = await memory_for(job, call)
    try:
        async with planned(job) as complete:
            output: Any = None
            async for output in outputs_of(job, complete, reservation, partial=False):  # noqa: B007 -- the last is wanted
                pass
            assert output is not None, "the engine ended a request without an output"
            found = job.samples_of(output)
            samples = [(sample.index, len(sample.token_ids)) for sample in found]
            receipts = await receipts_of(job, complete.plan, samples, ended=True)
        await enter_sketches(job, [(sample.index, sample.token_ids) for sample in found])
    except BaseException:
        if job.plan is not None:
            job.engine.abandon(job.plan, reservation)
        raise
    texts = tuple(sample.text for sample in found)
    reports = None if job.watch is None else tuple(job.watch.reports(sample.index) for sample in found)
    steering = None if receipts is None else tuple(receipts)
    if job.task is not None:
        receipt = steering[0] if steering else None
        output = Encoded(output.outputs.data, job.task, tuple(output.prompt_token_ids), receipt)
    handles = None
    if reservation is not None and job.plan is not None:
        if job.hands_over:
            handles = tuple(handles_of(job, found, reservation, receipts))
        else:
            job.engine.done_with(job.plan, reservation)
    return Generation(output, texts, handles, steering, reports)


def _release_done(tasks: Sequence[asyncio.Task[Generation]]) -> None:
    """Release the handles of the finished jobs of a failed call, which the user will not get."""
    for task in tasks:
        if task.done() and not task.cancelled() and task.exception() is None:
            for handle in task.result().handles or ():
                handle.release()
