"""Recomputation, on a restarted engine, of results that were lost when the previous engine died.

A request whose text was not yet returned is run anew under a new key. For lost rows the full token sequence is already
known, so prompt and output are read again with the same edits at the same positions, and the new rows pass the usual
checks. They differ from the lost rows as rows of different batches differ; their receipt has `recomputed=True`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from steercap.captures.rows import Found
from steercap.core.chat import MessageSpan
from steercap.core.spec import CaptureSpec
from steercap.engine.engine import Engine
from steercap.errors import EngineDied, InvalidRequest
from steercap.requests.call_types import READ
from steercap.requests.job import Job, Sample, run_job
from steercap.requests.preparing import OriginalLengths, prepare
from steercap.requests.serving import Serving
from steercap.requests.sketching import RunningSketch

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Arguments of one request, from which it can be prepared for any engine of its model.

    Args:
        serving: owner of the model's engine, which restarts it.
        prompt, params, spec, steering, options, spans, reading, sketches, encoding, monitors, original_lengths: see
            `prepare`.
    """

    serving: Serving
    prompt: Any
    params: Any
    spec: CaptureSpec | None
    steering: Any
    options: dict[str, Any] = field(default_factory=dict)
    spans: Sequence[MessageSpan] = ()
    reading: bool = False
    sketches: Sequence[RunningSketch] = ()
    encoding: bool = False
    monitors: Any = None
    original_lengths: OriginalLengths | None = None

    async def job(self) -> Job:
        """Prepare the request, checked and compiled, for the engine that is running now.

        Raises:
            InvalidRequest: see `prepare`.
            EngineFailure: the engine has died.
        """
        return await self.serving.with_restart(self.prepared)

    def with_restart(self, work: Callable[[Job], Awaitable[Value]], job: Job) -> Coroutine[Any, Any, Value]:
        """Run `work` on the job; if the engine dies meanwhile and is restarted, prepare and run it again.

        Args:
            work: coroutine function of the job; it must free all that it reserved if it fails.
            job: the request as already prepared, reused if its engine is still the running one.

        Raises:
            EngineDied: see `Serving.with_restart`.
            The errors of `work` and `prepare`.
        """

        def attempt(engine: Engine) -> Awaitable[Value]:
            return work(job) if job.engine is engine else self._prepared_and(engine, work)

        return self.serving.with_restart(attempt, job.engine)

    async def prepared(self, engine: Engine) -> Job:
        """Prepare the request for an engine; see `job`."""
        names = ("options", "spans", "reading", "sketches", "encoding", "monitors", "original_lengths")
        asked = {name: getattr(self, name) for name in names}
        job = await prepare(engine, self.prompt, self.params, self.spec, self.steering, **asked)
        return replace(job, recompute=partial(Recompute, self)) if self.serving.settings.restart else job

    async def _prepared_and(self, engine: Engine, work: Callable[[Job], Awaitable[Value]]) -> Value:
        return await work(await self.prepared(engine))


@dataclass(frozen=True)
class Recompute:
    """Finished sample whose rows can be recomputed if their engine dies, with its recipe and its job."""

    recipe: Recipe
    job: Job
    sample: Sample

    @property
    def place(self) -> object:
        """Identity of the model that the rows belong to; it stays the same across engine restarts."""
        return self.recipe.serving

    def can_recompute(self) -> bool:
        """Return whether the engine of the rows has died and another one can recompute them."""
        return self.recipe.serving.outlives(self.job.engine)

    async def with_restart(self, work: Callable[[Engine], Awaitable[Value]]) -> Value:
        """Return the result of `work` on the live engine, with restarts; for work that needs the model, not the rows.

        See `Serving.with_restart`.
        """
        return await self.recipe.serving.with_restart(work)

    async def rows(self) -> Found:
        """Recompute the rows by reading prompt and output again; return them with their receipt.

        Raises:
            EngineDied: the rows cannot be recomputed, or engines die again and again.
            CaptureIncomplete, CaptureNotFinite: see `checks.received`.
            SteeringNotApplied: a worker did not make every edit.
        """
        if reason := self._reason():
            raise EngineDied(f"{self.job.engine.death}; its rows cannot be recomputed, since {reason}")
        try:
            found = await self.recipe.serving.with_restart(self._read)
        except InvalidRequest as error:  # it was valid once: its adapter's files have changed since
            raise EngineDied(f"{self.job.engine.death}; its rows cannot be recomputed: {error}") from error
        return found._replace(receipt=replace(found.receipt, recomputed=True))

    def _reason(self) -> str:
        """Return the reason why recomputed rows would not equal the lost ones; "" if there is none."""
        if self.job.prompt.media:
            return "its prompt has images, and recomputing would read token ids only"
        if self.job.steering is not None and self.job.steering.held:
            return "a monitor started its steering while it ran"
        return ""

    def _reading(self) -> Recipe:
        """Return the recipe that reads prompt and output, without the last token, which was never an input."""
        assert self.job.plan is not None
        ids = self.job.prompt.token_ids
        given = self.recipe.prompt
        salt = {"cache_salt": given["cache_salt"]} if isinstance(given, Mapping) and given.get("cache_salt") else {}
        return replace(
            self.recipe,
            prompt={"prompt_token_ids": [*ids, *self.sample.token_ids[:-1]], **salt},
            params=self.recipe.params if self.recipe.encoding else READ,
            reading=True,
            sketches=(),
            monitors=None,
            original_lengths=OriginalLengths(len(ids), self.job.plan.limit),
        )

    async def _read(self, engine: Engine) -> Found:
        handle = (await run_job(await self._reading().prepared(engine), object())).handle
        try:
            await handle.fetch()
            return handle.lifecycle.require_here()
        finally:
            handle.release()
