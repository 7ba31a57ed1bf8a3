"""One prompt on its way: checked, admitted, run, and handed over as a text and its handles."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import msgspec

from steercap.captures.arriving import Arrived, arrived
from steercap.captures.checks import Expected
from steercap.captures.handle import CaptureHandle
from steercap.captures.lifecycle import Lifecycle, Lost, Source
from steercap.core.attention import AttentionRule
from steercap.core.chat import MessageSpan
from steercap.core.coding import RAW
from steercap.core.messages import Owner, Wanted
from steercap.core.plan import Plan
from steercap.core.receipt import SteeringReceipt, check_edits
from steercap.core.rows import rows_selected
from steercap.core.spec import Point
from steercap.core.tokens import selected
from steercap.errors import SteeringNotApplied
from steercap.requests.change import Change, Planned
from steercap.requests.monitoring import Watch
from steercap.requests.sketching import RunningSketch, enter
from steercap.saes.compiling import Readers
from steercap.steering.calibrating import Calibrated
from steercap.steering.projection import Projected

if TYPE_CHECKING:
    from steercap.adapters.prompts import Rendered
    from steercap.adapters.types import PoolingParams, PoolingRequestOutput, RequestOutput, SamplingParams
    from steercap.core.budget import Ticket
    from steercap.engine.engine import Engine

Value = TypeVar("Value")


@dataclass(frozen=True)
class Sample:
    """One sample of a request that has ended, by vLLM's names of a `CompletionOutput`.

    As it is by default, it is what a pooling model generates: nothing, in the place of the one token that has no row.

    Args:
        index: which one.
        text: its text.
        token_ids: its generated tokens.
    """

    index: int = 0
    text: str = ""
    token_ids: Sequence[int] = (-1,)


class Recipe(Protocol):
    """How a request is made again, for an engine that takes the place of one that has died."""

    async def surviving(self, work: Callable[[Job], Awaitable[Value]], job: Job | None = None) -> Value:
        """Do something with the request, with the next engine if one dies meanwhile; see `requests.again`."""

    def lost(self, job: Job, sample: Sample) -> Lost | None:
        """What computes rows of a finished sample again, or None."""


@dataclass(frozen=True)
class Job:
    """One prompt with its parameters and its plan.

    Args:
        engine: where it runs.
        prompt: the rendered prompt.
        params: sampling or pooling parameters, its own copy.
        options: further arguments of vLLM's `generate` or `encode`.
        plan: what is kept, without a slot, and nothing of what is changed: `planned` completes it. None if there is
            neither.
        points: the points that are kept.
        projected: what rows are projected on, or None.
        calibrated: what they are coded by, or None.
        readers: the SAEs that read them, or None.
        change: what is changed, or None.
        spans: positions of the messages, for `chat`.
        reading: whether the prompt alone counts; the token that vLLM must sample is kept from the user.
        task: what a pooling model does; None of one that generates.
        stops: whether a stop string or a monitor, which the client alone sees, may end it.
        sketches: what its rows enter when it has ended.
        hands_over: whether the user gets its rows; else they are for sketches or monitors alone, if there are any.
        watch: its monitors, None if there are none.
        recipe: how it is made again, or None.
    """

    engine: Engine
    prompt: Rendered
    params: SamplingParams | PoolingParams
    options: dict[str, Any]
    plan: Plan | None
    points: tuple[Point, ...]
    projected: Projected | None = None
    calibrated: Calibrated | None = None
    readers: Readers | None = None
    change: Change | None = None
    spans: tuple[MessageSpan, ...] = ()
    reading: bool = False
    task: str | None = None
    stops: bool = False
    sketches: tuple[RunningSketch, ...] = ()
    hands_over: bool = True
    watch: Watch | None = None
    recipe: Recipe | None = None

    def samples_of(self, output: Any) -> Sequence[Sample]:
        """What was generated, as vLLM gives it."""
        found: Sequence[Sample] = output.outputs if self.task is None else (Sample(),)
        return found


async def enter_sketches(job: Job, samples: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Let the rows of a job that has ended enter the sketches that it joined.

    Args:
        job: the request.
        samples: index and generated tokens of each sample.

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
    """What must come of a sample.

    Args:
        job: the request.
        plan: what is kept of it.
        index: of the sample.
        generated: its tokens.
        receipt: what is known to have been edited.
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


async def memory_for(job: Job, call: object) -> Ticket | None:
    """Reserve the memory of the longest the request can get.

    It comes before the slot: a request that waits for a slot waits only for running requests, and these wait for
    nothing.
    """
    plan = job.plan
    if plan is None or plan.capture is None:
        return None
    rows = int(selected(plan.capture.ranges, plan.limit).sum())
    pages = job.engine.pages_needed(plan.capture, rows) * plan.samples
    reductions = plan.samples if plan.capture.accumulates else 0
    return await job.engine.admit(pages, call, job.options.get("data_parallel_rank"), reductions)


@asynccontextmanager
async def planned(job: Job) -> AsyncIterator[Planned]:
    """Hold the slots and the SAEs that a request needs, if it needs any, and complete its plan with them."""
    async with job.engine.saes.holding(job.readers) as saes, _placed(job) as found:
        if found.plan is None or found.plan.capture is None or not saes:
            yield found
            return
        capture = msgspec.structs.replace(found.plan.capture, saes=saes)
        yield found._replace(plan=msgspec.structs.replace(found.plan, capture=capture))


@asynccontextmanager
async def _placed(job: Job) -> AsyncIterator[Planned]:
    wanted = [one.lowered for one in (job.change, job.projected, job.calibrated) if one is not None]
    if job.plan is None or not wanted:
        yield Planned(job.plan, "")
        return
    configurations = job.engine.configurations
    async with configurations.holding(*wanted) as grants:
        slots = {grant.digest: grant.slot for grant in grants}
        capture = None if job.plan.capture is None else job.plan.capture.placed(slots)
        steering = None if job.change is None else job.change.placed(slots, configurations.epoch)
        salt = steering.identity.hex() if steering and job.change and job.change.lowered.changes_kv else ""
        yield Planned(msgspec.structs.replace(job.plan, capture=capture, steering=steering), salt)


def outputs_of(
    job: Job, planned: Planned, ticket: Ticket | None, *, partial: bool | None
) -> AsyncGenerator[RequestOutput | PoolingRequestOutput, None]:
    """Run a job as planned, where its rows have room; yields vLLM's outputs, the finished one last.

    They hold all that came so far with `partial`, come once without, and are what its parameters say with None. Where
    the job has monitors, they read its rows meanwhile, and may end it.
    """
    kind = "" if job.watch is None else cast("SamplingParams", job.params).output_kind.name
    final = partial is False or (partial is None and kind == "FINAL_ONLY")
    outputs: Any = job.engine.generate(
        job.prompt,
        job.params,
        planned.plan,
        ticket=ticket,
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
        lambda indices: job.engine.engage([Owner(cast("Plan", job.plan).key, index) for index in indices]),
        new=partial is None and kind == "DELTA",
        final=final,
    )


async def rows_so_far(job: Job, samples: Mapping[int, tuple[Sequence[int], int]]) -> dict[int, Arrived]:
    """The rows that came of samples of a job that runs, each checked.

    Args:
        job: the request, which captures.
        samples: by index, the tokens generated so far, and how many rows came before.

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
    """What was edited of each sample so far, compared with what must be.

    Args:
        job: the request.
        plan: its plan.
        samples: index and generated tokens of each sample.
        ended: whether the request has ended.

    Raises:
        SteeringNotApplied: they differ; keys and values written until now are never read again.
    """
    if plan is None or job.change is None:
        return None
    configuration = job.change.lowered.configuration
    wanted = [Wanted(Owner(plan.key, index), plan.prompt_len + length - 1) for index, length in samples]
    found = await job.engine.settle(wanted, ended=ended)
    try:
        return [
            check_edits(plan.key, _since(job, plan, item.owner.sample), configuration, item.total, said)
            for item, said in zip(wanted, found, strict=True)
        ]
    except SteeringNotApplied:
        job.engine.configurations.epoch += 1
        raise


def _since(job: Job, plan: Plan, index: int) -> Plan:
    """The plan of a sample whose steering was held back, with the positions at which it has not been."""
    if job.watch is None or plan.steering is None or not plan.steering.held:
        return plan
    return msgspec.structs.replace(plan, steering=plan.steering.since(job.watch.steered(index)))


def handles_of(
    job: Job, samples: Sequence[Sample], ticket: Ticket, receipts: Sequence[SteeringReceipt] | None
) -> list[CaptureHandle]:
    """A handle for each sample, its claim cut down to what it holds."""
    assert job.plan is not None
    engine, plan = job.engine, job.plan
    tickets = engine.finish(ticket, [_pages_kept(job, plan, len(sample.token_ids)) for sample in samples])
    handles = []
    for index, (sample, own) in enumerate(zip(samples, tickets, strict=True)):
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
        )
        engine.offer(own, handle.lifecycle)
        handles.append(handle)
    return handles


def _source(job: Job, plan: Plan, sample: Sample, ticket: Ticket, expected: Expected) -> Source:
    """Where the rows of a sample are."""
    lost = None if job.recipe is None else job.recipe.lost(job, sample)
    return Source(job.engine, Owner(plan.key, sample.index), ticket, expected, lost)


def _rules_of(job: Job) -> Mapping[int, AttentionRule]:
    """How the layers weigh keys of which a job captures queries and keys, as far as its rows are what they read."""
    plan = job.plan.capture if job.plan else None
    sites: dict[int, set[str]] = {}
    for point in job.points:
        sites.setdefault(point.layer, set()).add(point.site)
    found = {layer: rule for layer, rule in job.engine.attention.items() if {"q", "k"} <= sites.get(layer, set())}
    if plan is None:
        return found
    reasons = {
        f"its rows are reduced, by {plan.reduce!r}": plan.reduce,
        "its rows are projections": job.projected,
        f"its rows are kept as {plan.coding}, and weights of codes differ from the model's": plan.coding != RAW,
        "its rows are those before the edits of their points": plan.before_edits and job.change,
    }
    unknown = "; ".join(reason for reason, holds in reasons.items() if holds)
    return {layer: msgspec.structs.replace(rule, unknown=rule.unknown or unknown) for layer, rule in found.items()}


def _pages_kept(job: Job, plan: Plan, generated: int) -> int:
    """Pages a finished sample holds. The worker may have gone on past its end: any way past a stop string, which the
    client alone sees, and otherwise as far as vLLM runs ahead.
    """
    assert plan.capture is not None
    total = plan.prompt_len + generated - 1 + job.engine.vllm.overshoot
    total = plan.limit if job.stops else min(plan.limit, total)
    return job.engine.pages_needed(plan.capture, len(rows_selected(plan.capture.ranges, plan.limit, total)))
