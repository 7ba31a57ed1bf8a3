"""One engine's life: start, probe, calls to the workers, admission, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary

from steercap.concurrency.loops import Home, finished, on_thread, over
from steercap.config import Settings
from steercap.core.budget import Ticket
from steercap.core.messages import (
    Answer,
    Attach,
    Attached,
    Call,
    Census,
    Collect,
    Collected,
    Configure,
    Configured,
    Counted,
    Failed,
    LineRange,
    Lines,
    NotCapturing,
    Owner,
    Parcel,
    Question,
    Read,
    Settle,
    Settled,
    SteeringRecord,
    Unknown,
    Wanted,
    decode_answer,
    encode,
)
from steercap.core.plan import CapturePlan, Plan
from steercap.core.rows import PageShape
from steercap.core.schema import PointSchema
from steercap.core.spec import CaptureSpec, Point, check_armed
from steercap.encodings import ENCODINGS
from steercap.encodings.reduced import accumulator_records
from steercap.engine.admission import Admission
from steercap.engine.batching import Batcher
from steercap.engine.configurations import Configurations
from steercap.engine.fetching import Delivery, Fetcher, Rank
from steercap.errors import EngineFailure, InvalidSpec, ModelClosed, WorkerFailure
from steercap.sites import SITES
from steercap.steering.lowering import Lowered, lower
from steercap.steering.projection import Projected, compile_projection, points_of
from steercap.steering.spec import SteeringSpec, spec_of
from steercap.transport.reader import open_reader

if TYPE_CHECKING:
    from steercap.adapters.engine import Rendered, VllmEngine
    from steercap.adapters.launch import Launch
    from steercap.adapters.types import RequestOutput, SamplingParams
    from steercap.edits.base import Edit

#: Seconds that rows given back may wait for company before an RPC of their own.
RELEASE_DELAY: Final = 0.05
#: Seconds that the end waits for what has nothing left to do: a start given up, tasks of a loop that may be blocked.
GIVE_UP_SECONDS: Final = 0.5

#: Bytes of an element of a vector.
_FLOAT_BYTES: Final = 4

Kind = TypeVar("Kind", bound=Answer)


class Engine:
    """A running engine with taps.

    Args:
        vllm: the engine behind its adapter.
        settings: steercap's settings.
    """

    def __init__(self, vllm: VllmEngine, settings: Settings) -> None:
        self.vllm = vllm
        self.settings = settings
        self.armed: Final = {point: index for index, point in enumerate(vllm.points)}
        self._name = uuid4().hex[:8]
        self._numbers = count()
        self._ranks: tuple[tuple[Rank, ...], ...] = ()  # engine by engine
        self._schemas: dict[Point, PointSchema] = {}
        self.reductions = 0  # reductions that can run along at once in each engine
        self.admission = Admission(0, 0, settings)
        self.configurations = Configurations(0, 0, settings, self._configure)
        self._captured: tuple[CaptureSpec, tuple[Point, ...], tuple[int, ...]] | None = None  # the last one
        # Directions, and what they were compiled to for some of their points: to hash megabytes takes milliseconds.
        self._projected: WeakKeyDictionary[Any, dict[tuple[Point, ...], Projected]] = WeakKeyDictionary()
        self._fetcher = Fetcher()
        self._lowered: WeakKeyDictionary[SteeringSpec | Edit, Lowered] = WeakKeyDictionary()
        self._settling: Batcher[tuple[Sequence[Wanted], bool], list[list[list[SteeringRecord | Unknown]]]] = Batcher(
            self._settle
        )
        self._given_back: dict[Owner, Ticket | None] = {}
        self._flush: asyncio.Task[None] | None = None
        self.home: Final = Home("this model")
        self._closed = False
        self._ending: Future[None] | None = None
        self._one_ends: Final = threading.Lock()

    @classmethod
    async def start(cls, model: str, settings: Settings, engine_args: Mapping[str, Any], launch: Launch) -> Engine:
        """Start vLLM with taps, and the workers' memory for rows and vectors.

        Args:
            model: path or name of the model.
            settings: steercap's settings.
            engine_args: vLLM's engine arguments.
            launch: a new one, by which the start can be given up from anywhere.

        Raises:
            InvalidSetting, ModelNotLoaded, UnsupportedModel, UnsupportedRunner: see `VllmEngine.start`.
        """
        starting = launch.begin(model, settings, engine_args)
        try:
            vllm = await asyncio.wrap_future(starting)
        except asyncio.CancelledError:
            await finished(on_thread(launch.give_up, "steercap end"))
            # It ends once it is out of an import, which can take many seconds, and has nothing to do by then.
            await over(starting, patience=GIVE_UP_SECONDS)
            raise
        engine = cls(vllm, settings)
        try:
            await engine._attach()
        except BaseException:
            await engine.aclose()
            raise
        return engine

    async def aclose(self) -> None:
        """Stop the engine; waiting requests fail. From any event loop, or after its own has ended. Idempotent."""
        with self._one_ends:
            first, self._closed = not self._closed, True
            if self._ending is None:
                self._ending = Future()
        if first:
            try:
                await self.home.run(self._wind_up, patience=GIVE_UP_SECONDS)
            finally:
                await finished(on_thread(self._end, "steercap end", self._ending))
        else:
            await finished(self._ending)

    async def _wind_up(self) -> None:
        """What belongs to the event loop of the engine."""
        self.admission.close()
        await self.configurations.aclose()
        await self._settling.aclose()
        if self._flush:
            self._flush.cancel()
            await asyncio.wait([self._flush])
        await self.vllm.quiesce()

    def _end(self) -> None:
        """What any thread can do, and must."""
        try:
            self._fetcher.close()
            for rank in self._all_ranks:
                rank.reader.close()
        finally:
            self.vllm.end()

    # Requests

    def new_key(self) -> str:
        """A name for a request, unique among all of this machine; without underscore, see `runner_v1.sample_of`."""
        return f"steercap-{self._name}-{next(self._numbers)}"

    def lowered(self, steering: Any) -> Lowered:
        """A spec, or one edit, compiled for this engine; once, as long as it lives.

        Raises:
            InvalidSpec, PointNotArmed: it is not one, or does not fit the model; see `steering.lower`.
        """
        spec = spec_of(steering)
        found = self._lowered.get(steering)
        if found is None:
            found = self._lowered[steering] = lower(
                spec,
                armed=self.armed,
                schemas=self.schemas,
                num_layers=self.vllm.num_layers,
                edits_per_point=self.settings.edits_per_point,
                exists=self.vllm.exists,
            )
        return found

    def captured(self, spec: CaptureSpec) -> tuple[tuple[Point, ...], tuple[int, ...]]:
        """The points of a spec, and their indices among the armed, ascending; once for all requests of a call.

        Raises:
            LayerOutOfRange, InvalidSpec: see `CaptureSpec.points`.
            UnknownName, PointNotArmed: see `check_armed`.
        """
        if self._captured is None or self._captured[0] is not spec:
            points = (
                spec.points(self.vllm.num_layers) if spec.project is None else points_of(spec, self.vllm.num_layers)
            )
            if isinstance(spec.layers, str):  # of all layers, those that have it: not every one has experts
                points = (
                    tuple(point for point in points if point.site not in SITES or self.vllm.exists(point)) or points
                )
            check_armed(points, self.armed, SITES)
            self._captured = spec, points, tuple(sorted(self.armed[point] for point in points))
        return self._captured[1:]

    def projected(self, spec: CaptureSpec) -> Projected | None:
        """What a spec projects rows on, compiled for this engine, once as long as the directions live; None for whole
        rows.

        Raises:
            InvalidSpec, InvalidVector: see `projection.compile_projection`.
        """
        if spec.project is None:
            return None
        points, _ = self.captured(spec)
        known = self._projected.setdefault(spec.project, {})
        if points not in known:
            found = compile_projection(spec, self.armed, self.schemas, num_layers=self.vllm.num_layers, points=points)
            self._check_records(found)
            known[points] = found
        return known[points]

    def _check_records(self, projected: Projected) -> None:
        """See that a token's projections fit a page of every arena."""
        for rank in self._all_ranks:
            most = PageShape(rank.attached.page_lines).page_bytes
            own = [rank.schemas[index] for point in projected.points if (index := self.armed[point]) in rank.schemas]
            wanted = sum(ENCODINGS["projected"].record(own, projected.plan.directions).sizes)
            if wanted > most:
                raise InvalidSpec(
                    f"project= asks for {wanted:,} bytes per token ({len(projected.points)} points × "
                    f"{projected.plan.directions} directions), and a page holds {most:,}; use fewer directions at once"
                )

    def pages_needed(self, plan: CapturePlan, rows: int) -> int:
        """Pages that `rows` rows of the plan, or their accumulator, take on the worker that holds most of them."""
        return max((_pages_on(rank, plan, rows) for rank in self._all_ranks), default=0)

    @property
    def schemas(self) -> Mapping[Point, PointSchema]:
        """What the tensor at each armed point is, layer by layer."""
        return self._schemas

    def generate(
        self,
        prompt: Rendered,
        params: SamplingParams,
        plan: Plan | None,
        *,
        ticket: Ticket | None = None,
        salt: str = "",
        partial: bool = False,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request; yields its outputs, the finished one last.

        Args:
            prompt: the rendered prompt.
            params: sampling parameters, which this call owns.
            plan: what the workers shall keep and change of it.
            ticket: where its rows have room; without one, vLLM balances the load.
            salt: what its keys and values depend on besides its tokens.
            partial: whether to yield the text so far at every step.
            **options: further arguments of vLLM's `generate`.
        """
        self.require_open()
        if ticket is not None and self.engines > 1:
            options["data_parallel_rank"] = ticket.engine
        key = plan.key if plan else self.new_key()
        return self.vllm.generate(prompt, params, key, plan, salt=salt, partial=partial, **options)

    @property
    def engines(self) -> int:
        """Engines behind this one: more than one with data parallelism."""
        return len(self._ranks)

    async def admit(self, pages: int, call: object, engine: int | None = None, reductions: int = 0) -> Ticket:
        """Reserve pages of an arena, waiting for room if need be; `generate` then runs the request where they are.

        Args:
            pages: pages of the arena.
            call: the `generate` call it is for.
            engine: the engine that must run the request, or None: one with room.
            reductions: how many run along with it.

        Raises:
            CaptureMemoryFull: there can be no room, or none came in time, or waiting is not wanted.
        """
        self.require_open()
        return await self.admission.claim(pages, call, engine, reductions)

    def finish(self, ticket: Ticket, parts: Sequence[int]) -> list[Ticket]:
        """A request ended: its claim becomes one ticket a handle, of so many pages each."""
        return self.admission.finish(ticket, parts)

    def abandon(self, plan: Plan, ticket: Ticket | None) -> None:
        """A request was cancelled or failed: free what it held, now and on the workers."""
        handles: list[Ticket | None] = [None] * plan.samples
        if ticket is not None:
            handles = [*self.finish(ticket, [ticket.pages, *[0] * (plan.samples - 1)])]
        for sample, handle in enumerate(handles):
            self.give_back(Owner(plan.key, sample), handle)

    def give_back(self, owner: Owner, ticket: Ticket | None) -> None:
        """Free a request's rows and records with the next RPC. Idempotent."""
        if self._closed:
            return
        self._given_back[owner] = ticket
        self._schedule_flush()

    def _schedule_flush(self) -> None:
        if self._flush is None or self._flush.done():
            self._flush = self.home.loop.create_task(self._release_soon())

    def give_back_from_any_thread(self, owner: Owner, ticket: Ticket) -> None:
        """`give_back` for who may be on any thread, after the loop, or a finalizer in the middle of anything."""
        if not self._closed:
            self.home.call(partial(self.give_back, owner, ticket))

    # Rows

    async def collect(self, wanted: Sequence[Wanted]) -> list[Delivery]:
        """Fetch finished requests' rows: one RPC for all, then the rows out of each arena.

        Raises:
            EngineFailure: the engine has died, or a worker cannot answer.
        """
        return await self._fetcher.deliver(self._ranks, await self.locate(wanted))

    async def locate(self, wanted: Sequence[Wanted]) -> list[list[list[Parcel | Unknown]]]:
        """Have finished requests' rows readable, and say where they are; one RPC for all.

        Returns:
            For each request, engine by engine, what each capturing worker has of it.

        Raises:
            EngineFailure: the engine has died, or a worker cannot answer.
        """
        engines = await self._ask(Collect(tuple(wanted)), Collected)
        return [[[answer.parcels[index] for answer in answers] for answers in engines] for index in range(len(wanted))]

    async def settle(self, wanted: Sequence[Wanted], *, ended: bool) -> list[list[list[SteeringRecord | Unknown]]]:
        """What the workers did to samples of a request so far; one RPC for all that ask meanwhile.

        Returns:
            For each sample, engine by engine, what each worker says of it.

        Raises:
            EngineFailure: the engine has died, or a worker cannot answer.
        """
        return await self._settling.ask((wanted, ended))

    async def _settle(
        self, asked: Sequence[tuple[Sequence[Wanted], bool]]
    ) -> list[list[list[list[SteeringRecord | Unknown]]]]:
        wanted = tuple(item for items, _ in asked for item in items)
        ended = tuple(end for items, end in asked for _ in items)
        engines = await self._ask(Settle(wanted, ended), Settled)
        records = iter(
            [[[answer.records[index] for answer in answers] for answers in engines] for index in range(len(wanted))]
        )
        return [[next(records) for _ in items] for items, _ in asked]

    async def _configure(self, question: Configure) -> list[Configured]:
        return [answer for answers in await self._ask(question, Configured) for answer in answers]

    async def census(self) -> list[list[Counted]]:
        """Engine by engine, what each capturing worker holds."""
        return await self._ask(Census(), Counted)

    async def _ask(self, question: Question, kind: type[Kind]) -> list[list[Kind]]:
        """Send one frame to all workers; returns the answers of those that capture, engine by engine.

        Rows given back since the last frame travel with it, and their memory is free when it returns.
        """
        self.require_open()
        given_back, self._given_back = self._given_back, {}
        try:
            frames = await self.vllm.rpc(encode(Call(tuple(given_back), question)))
        except BaseException:
            self._given_back = given_back | self._given_back
            if self._given_back and not self._closed:
                self._schedule_flush()
            raise
        for ticket in given_back.values():
            if ticket is not None:
                self.admission.release(ticket)
        if self._ranks and len(frames) != len(self._ranks):
            raise WorkerFailure(f"{len(frames)} engines answered where {len(self._ranks)} were started")
        return _answers(frames, kind)

    async def _attach(self) -> None:
        settings = self.settings
        engines = await self._ask(Attach(settings.capture_bytes), Attached)
        self._ranks = tuple(
            tuple(
                Rank(
                    index, attached, open_reader(attached, settings.transport, self._line_source(engine, index)), engine
                )
                for index, attached in enumerate(answers)
            )
            for engine, answers in enumerate(engines)
        )
        known = {index: schema for rank in self._all_ranks for index, schema in rank.schemas.items()}
        self._schemas = {point: known[index] for point, index in self.armed.items() if index in known}
        # Where ranks differ, a page is the largest of theirs: what is claimed is never less than what is used.
        page_bytes = max(PageShape(rank.attached.page_lines).page_bytes for rank in self._all_ranks)
        pages = min(rank.attached.pages for rank in self._all_ranks)
        self.reductions = min(rank.attached.reductions for rank in self._all_ranks)
        self.admission = Admission(pages, page_bytes, settings, self.engines, self.reductions)
        self.configurations = Configurations(
            settings.steering_slots, min(rank.attached.bank_rows for rank in self._all_ranks), settings, self._configure
        )

    @property
    def vector_bytes(self) -> int:
        """Bytes of a row of the vector bank, on the worker with the widest."""
        return max(rank.attached.bank_width for rank in self._all_ranks) * _FLOAT_BYTES

    @property
    def _all_ranks(self) -> list[Rank]:
        return [rank for ranks in self._ranks for rank in ranks]

    def _line_source(self, engine: int, rank: int) -> Any:
        """Asks one engine for lines; the others have nothing to say, and rows given back must reach them all."""

        async def ask(ranges: tuple[LineRange, ...]) -> bytes:
            self.require_open()
            frames = await self.vllm.rpc(encode(Call((), Read(ranges))), engine)
            return _answers(frames, Lines)[0][rank].data

        return ask

    async def _release_soon(self) -> None:
        with contextlib.suppress(EngineFailure):  # a dead engine holds nothing; who calls it next is told
            while self._given_back and not self._closed:
                if not self.admission.budget.waiting:
                    await asyncio.sleep(RELEASE_DELAY)
                if self._given_back:
                    await self._ask(Census(), Counted)

    def require_open(self) -> None:
        """See that the engine can be used from here.

        Raises:
            ModelClosed, WrongEventLoop: it was closed, or started in another event loop.
        """
        if self._closed:
            raise ModelClosed("this SteerModel is closed; make a new one")
        self.home.require()


def _pages_on(rank: Rank, plan: CapturePlan, rows: int) -> int:
    """Pages that `rows` rows of a plan, or their reduction, take on one worker."""
    schemas = [rank.schemas[point] for point in plan.points if point in rank.schemas]
    page = PageShape(rank.attached.page_lines)
    if not schemas:
        return 0
    if plan.accumulates:
        records = accumulator_records(schemas, rank.attached.held) if rows else 0
        return page.pages(records, ENCODINGS["raw"].record(schemas).lines)
    return page.pages(rows, ENCODINGS[plan.encoding].record(schemas, plan.numbers).lines)


def _answers(engines: Sequence[Sequence[bytes]], kind: type[Kind]) -> list[list[Kind]]:
    """The answers of the workers that capture, engine by engine.

    Raises:
        WorkerFailure: a worker could not answer, or said something else.
    """
    found: list[list[Kind]] = []
    for engine, frames in enumerate(engines):
        answers = [decode_answer(frame) for frame in frames]
        for worker, answer in enumerate(answers):
            if isinstance(answer, Failed):
                raise WorkerFailure(f"worker {worker} of engine {engine}: {answer.reason}")
        capturing = [answer for answer in answers if not isinstance(answer, NotCapturing)]
        found.append([answer for answer in capturing if isinstance(answer, kind)])
        if found[-1] != capturing:
            raise WorkerFailure(f"expected {kind.__name__}, got {', '.join(type(one).__name__ for one in capturing)}")
    return found
