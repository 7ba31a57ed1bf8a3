"""Concurrent execution of jobs, each up to its output and handles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Coroutine, Sequence
from typing import Any

from steercap.captures.pooled import Encoded
from steercap.errors import ModelClosed, first_error
from steercap.requests.call_types import Generation
from steercap.requests.job import Job, enter_sketches, handles_of, memory_for, outputs_of, planned, receipts_of


async def run_all(
    jobs: AsyncIterable[Coroutine[Any, Any, Generation]], running: set[asyncio.Task[Any]]
) -> list[Generation]:
    """Run jobs concurrently, each as soon as it is prepared; the first error cancels the others.

    Args:
        jobs: coroutines of the jobs (`run_job`), in the order in which memory is claimed.
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
    """Run one job to its end on its engine; if that fails, nothing of it stays behind.

    The `output` of a pooling model's job is an `Encoded`.

    Args:
        job: the job.
        call: identity of the call that it is part of.
    """
    ticket = await memory_for(job, call)
    try:
        async with planned(job) as complete:
            output: Any = None
            async for output in outputs_of(job, complete, ticket, partial=False):  # noqa: B007 -- the last is wanted
                pass
            assert output is not None, "the engine ended a request without an output"
            found = job.samples_of(output)
            samples = [(sample.index, len(sample.token_ids)) for sample in found]
            receipts = await receipts_of(job, complete.plan, samples, ended=True)
        await enter_sketches(job, [(sample.index, sample.token_ids) for sample in found])
    except BaseException:
        if job.plan is not None:
            job.engine.abandon(job.plan, ticket)
        raise
    texts = tuple(sample.text for sample in found)
    reports = None if job.watch is None else tuple(job.watch.reports(sample.index) for sample in found)
    steering = None if receipts is None else tuple(receipts)
    if job.task is not None:
        receipt = steering[0] if steering else None
        output = Encoded(output.outputs.data, job.task, tuple(output.prompt_token_ids), receipt)
    handles = None
    if ticket is not None and job.plan is not None:
        if job.hands_over:
            handles = tuple(handles_of(job, found, ticket, receipts))
        else:
            job.engine.done_with(job.plan, ticket)
    return Generation(output, texts, handles, steering, reports)


def _release_done(tasks: Sequence[asyncio.Task[Generation]]) -> None:
    """Release the handles of the finished jobs of a failed call, which nobody will get."""
    for task in tasks:
        if task.done() and not task.cancelled() and task.exception() is None:
            for handle in task.result().handles or ():
                handle.release()
