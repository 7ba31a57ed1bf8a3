"""Engine of vLLM with taps in its forward pass: start, admission, requests, shutdown."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import uuid4

import msgspec

from steercap.architectures.families import FAMILIES
from steercap.architectures.families.base import Family
from steercap.architectures.families.derived import DERIVED
from steercap.architectures.families.proved import verified
from steercap.architectures.sites import SITES
from steercap.concurrency.loops import end_within, finished, on_thread
from steercap.config import Settings
from steercap.core.budget import Reservation
from steercap.core.messages import Owner, Unembedded, Wanted
from steercap.core.plan import CapturePlan, Plan
from steercap.core.schema import PointSchema
from steercap.core.spec import Point
from steercap.core.tokens import count_selected
from steercap.engine.admission import Admission
from steercap.engine.compiler import Compiler
from steercap.engine.configurations import Configurations
from steercap.engine.fetching import Delivery, Fetcher
from steercap.engine.ranks import Rank, Ranks, attention_of, loaded_of
from steercap.engine.saes import Dictionaries
from steercap.engine.sketching import Sketching
from steercap.engine.spilling import Spillable, Spilling, require_place
from steercap.engine.workers import Workers
from steercap.errors import EngineDied, UnsupportedModel
from steercap.files.fingerprint import model_name, names_of
from steercap.kernels.codecs import dtype_of
from steercap.worker.memory import LineReader

if TYPE_CHECKING:
    import torch

    from steercap.adapters import PoolingParams, PoolingRequestOutput, RequestOutput, SamplingParams
    from steercap.adapters.engine import VllmEngine
    from steercap.adapters.launch import Launch
    from steercap.adapters.prompts import Rendered

Value = TypeVar("Value")

#: Maximum seconds to wait for a cancelled start, or at shutdown for the tasks of an event loop that may be blocked.
GIVE_UP_SECONDS: Final = 0.5

#: Preferred minimum of rows of a sequence in memory at once, when its rows leave memory while it runs.
CHUNK_TOKENS: Final = 128
#: Bytes of an element of a vector.
_FLOAT_BYTES: Final = 4


class Engine:
    """A running vLLM engine whose forward pass has taps that capture and edit rows.

    Args:
        vllm: vLLM's engine, behind its adapter.
        settings: steercap's settings.
        workers: connection to the workers.
        ranks: capturing workers, engine by engine, from their answers to `Attach`.

    Attributes:
        names: names by which files, such as those of vectors, may refer to the model.
        model_label: name of the model in files that steercap writes.
        workers: connection to the workers.
        compiler: compiler of the specs of requests.
        armed: index of every armed point, that is, one with a tap.
        schemas: shape and dtype of the rows at every armed point, layer by layer.
        loaded: decoder layers that the workers have loaded.
        refused: reasons why the model lacks a site, by site name.
        verified: True if rows of layers with exactly this code were compared with transformers'.
        reductions: number of reductions (samples of requests with `reduce=`) that can run at once in each engine.
        attention: attention rules, by layer, of the layers whose queries and keys are armed.
        home: event loop that the engine belongs to.
        admission: queue of requests that capture.
        spilling: mover of rows to disk with overflow="spill", else None.
        configurations: slots and the vector bank.
        sketching: sketches (running statistics of rows) on the workers.
        saes: SAEs loaded on the workers.
    """

    def __init__(self, vllm: VllmEngine, settings: Settings, workers: Workers, ranks: Ranks) -> None:
        self.vllm = vllm
        self.settings = settings
        self.names: Final = (*names_of(vllm.model_name), *vllm.model_types)
        self.model_label: Final = model_name(vllm.model_name)
        self.home: Final = workers.home
        self.workers: Final = workers
        self._ranks = ranks
        self._name = uuid4().hex[:8]
        self._numbers = count()
        known = {index: schema for rank in self._all_ranks for index, schema in rank.schemas.items()}
        #: Index of each point to arm that the loaded model has.
        self.armed: Final = {point: index for index, point in enumerate(vllm.points) if index in known}
        self.schemas: Final[dict[Point, PointSchema]] = {point: known[index] for point, index in self.armed.items()}
        self.loaded: Final = loaded_of(ranks)
        self.refused: Final = dict(self.loaded.refused)
        self.verified: Final = verified(self.loaded.code)
        self._require_sites()
        self.attention: Final = attention_of(ranks[0])
        self.compiler: Final = Compiler(
            self.armed,
            self.schemas,
            self._all_ranks,
            num_layers=vllm.num_layers,
            settings=settings,
            exists=self.exists,
            refused=self.refused,
            vocabulary=vllm.vocabulary,
            names=self.names,
        )
        attached = [rank.attached for rank in self._all_ranks]
        self.reductions: Final = min(one.reductions for one in attached)
        # Where ranks differ, a page is the largest of theirs: claims are never smaller than the memory used.
        page_bytes = max(rank.page.page_bytes for rank in self._all_ranks)
        self.admission: Final = Admission(
            min(one.pages for one in attached), page_bytes, settings, self.engines, self.reductions
        )
        self.configurations: Final = Configurations(
            settings.steering_slots, min(one.bank_rows for one in attached), settings, workers.configure
        )
        self.sketching: Final = Sketching(workers, ranks, settings.sketch_bytes)
        self.saes: Final = Dictionaries(workers, settings.sae_bytes)
        self._fetcher = Fetcher()
        self.spilling = self._spills() if settings.overflow == "spill" else None
        self.admission.spilling = self.spilling
        self._ending: Future[None] | None = None
        self._one_ends: Final = threading.Lock()
        self._death = ""

    @classmethod
    async def start(
        cls, model: str, settings: Settings, engine_args: Mapping[str, Any], launch: Launch, candidate: int = 0
    ) -> Engine:
        """Start vLLM with taps, and allocate the workers' memory for rows and vectors.

        Args:
            model: path or name of the model.
            settings: steercap's settings.
            engine_args: vLLM's engine arguments.
            launch: an unused launch, by which the start can be cancelled from any thread.
            candidate: index of the family to try, among those that fit the layers; see `families.families_of`.

        Raises:
            InvalidSetting, ModelNotLoaded, UnsupportedModel, UnsupportedRunner: see `VllmEngine.start`.
        """
        try:
            require_place(settings)
        except BaseException:
            launch.end()
            raise
        starting = on_thread(lambda: launch.run(model, settings, engine_args, candidate), "steercap start")
        try:
            vllm = await asyncio.wrap_future(starting)
        except asyncio.CancelledError:
            await finished(on_thread(launch.give_up, "steercap end"))
            # It ends after its current import, which can take many seconds, and then does nothing more.
            await end_within(starting, patience=GIVE_UP_SECONDS)
            await finished(on_thread(launch.end, "steercap end"))  # one that had just started
            raise
        return await cls.attach(vllm, settings)

    @classmethod
    async def attach(cls, vllm: VllmEngine, settings: Settings) -> Engine:
        """Make an engine of a started vLLM and allocate its workers' memory for rows; on failure vLLM is stopped."""
        workers = Workers(vllm)
        try:
            engine = cls(vllm, settings, workers, await workers.attach(settings))
            await vllm.watch(engine._lose)
        except BaseException:
            try:
                await workers.aclose()
                await vllm.quiesce()
            finally:
                await finished(on_thread(vllm.end, "steercap end"))
            raise
        return engine

    @property
    def died(self) -> bool:
        """True if the engine died before it was closed; from other event loops, True only once that was noticed."""
        return bool(self._death) or (self.home.is_here and self.vllm.died)

    @property
    def death(self) -> str:
        """Cause of the engine's death, "" while it lives."""
        return self._death

    def _lose(self, death: EngineDied) -> None:
        """Fail all waiting requests with `death`, and mark the engine's sketches as lost."""
        self._death = str(death)
        self.admission.fail(death)
        self.configurations.fail(death)
        self.sketching.mark_broken(str(death))

    async def aclose(self) -> None:
        """Stop the engine; waiting requests fail. Works from any event loop, or after its own has ended. Idempotent."""
        with self._one_ends:
            first = self._ending is None
            ending = self._ending = self._ending or Future()
            self.workers.closed = True
        if first:
            try:
                await self.home.run(self._wind_up, patience=GIVE_UP_SECONDS)
            finally:
                await finished(on_thread(self._end, "steercap end", ending))
        else:
            await finished(ending)

    async def _wind_up(self) -> None:
        """Close what needs the engine's event loop: queues, spilling, sketches, SAEs and the workers' connection."""
        self.admission.close()
        if self.spilling is not None:
            await self.spilling.aclose()
        await self.configurations.aclose()
        await self.sketching.aclose()
        await self.saes.aclose()
        await self.workers.aclose()
        await self.vllm.quiesce()

    def _end(self) -> None:
        """Free what needs no event loop: files, threads, sockets and shared memory; then end vLLM. For any thread."""
        try:
            if self.spilling is not None:
                self.spilling.end()
            self._fetcher.close()
            self.workers.end()
            for rank in self._all_ranks:
                rank.reader.close()
        finally:
            self.vllm.end()

    # Requests

    def new_key(self) -> str:
        """Return a request id for vLLM, unique on this machine; it has no underscore, see `runner_v1.sample_of`."""
        return f"steercap-{self._name}-{next(self._numbers)}"

    def pages_needed(self, plan: CapturePlan, rows: int) -> int:
        """Return the arena pages of `rows` rows of the plan, or of their accumulator, on the worker that needs most."""
        return max((rank.pages(plan, rows) for rank in self._all_ranks), default=0)

    def windowed(self, plan: CapturePlan, limit: int, samples: int, room: int | None = None) -> CapturePlan:
        """Return the plan with a window, rows that are in memory at once, if its rows do not all fit in the arena.

        Rows outside the window move to disk while the request runs. This needs overflow="spill", and the rows of one
        forward pass must fit; else the plan is returned unchanged, and refused when it claims memory.

        Args:
            plan: plan of the rows of one sample.
            limit: maximum number of input tokens of a sample.
            samples: number of samples.
            room: number of pages that the samples may use together; by default the whole arena.
        """
        rows = count_selected(plan.ranges, limit)
        room = self.admission.budget.pages if room is None else room
        has_files = self.spilling is not None and all(rank.attached.file for rank in self._all_ranks)
        if not has_files or plan.reduce or plan.attention or self.pages_needed(plan, rows) * samples <= room:
            return plan
        windows = (max(CHUNK_TOKENS, self.vllm.batch_tokens), self.vllm.batch_tokens)
        fitting = (one for one in windows if one < rows and self.pages_needed(plan, one) * samples <= room)
        return msgspec.structs.replace(plan, window=next(fitting, 0))

    def room_for(self, plan: Plan) -> tuple[int, int]:
        """Return the arena pages and the bytes on disk that all rows of all samples of a plan can need at most."""
        capture = plan.capture
        if capture is None:
            return 0, 0
        rows, size = count_selected(capture.ranges, plan.limit), 0
        if capture.window:
            size = max(sum(rank.file_bytes(capture, rows) for rank in ranks) for ranks in self._ranks)
        return self.pages_needed(capture, min(rows, capture.window or rows)) * plan.samples, size * plan.samples

    async def admit_rows(self, plan: Plan, call: object, engine: int | None = None) -> Reservation:
        """Reserve arena pages, and disk space for a plan with a window, for all rows that a plan's samples can produce.

        Args:
            plan: plan with a capture.
            call, engine: as for `admit`.

        Raises:
            CaptureMemoryFull, EngineFailure: as for `admit`; or `spill_bytes`, the limit on disk, has no room.
        """
        assert plan.capture is not None
        (pages, size), reductions = self.room_for(plan), plan.samples if plan.capture.accumulates else 0
        disk = self.spilling.reserve(size) if size and self.spilling is not None else None
        try:
            reservation = await self.admit(pages, call, engine, reductions)
            reservation.disk = disk
        finally:
            del disk  # the frame of an error may live on
        return reservation

    def generate(
        self,
        prompt: Rendered,
        params: SamplingParams | PoolingParams,
        plan: Plan | None,
        *,
        reservation: Reservation | None = None,
        salt: str = "",
        partial: bool | None = False,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput | PoolingRequestOutput, None]:
        """Run one request; yield vLLM's outputs, the finished one last.

        Args:
            prompt: the rendered prompt.
            params: sampling or pooling parameters, which this call may change.
            plan: compiled capture and steering of the request, or None.
            reservation: reservation of arena pages, whose engine runs the request; without one, vLLM balances the load.
            salt: salt of the prefix cache: a hash of everything but the tokens that the request's keys and values
                depend on.
            partial: True to yield the text so far at every step, False for the final one; None for the choice in
                `params`.
            **options: further arguments of vLLM's `generate` or `encode`.

        Raises:
            ModelClosed, WrongEventLoop: see `require_open`.
        """
        self.require_open()
        if reservation is not None and self.engines > 1:
            options["data_parallel_rank"] = reservation.engine
        key = plan.key if plan else self.new_key()
        return self.vllm.generate(prompt, params, key, plan, salt=salt, partial=partial, **options)

    @property
    def engines(self) -> int:
        """Number of vLLM engines: more than one with data parallelism."""
        return len(self._ranks)

    async def admit(self, pages: int, call: object, engine: int | None = None, reductions: int = 0) -> Reservation:
        """Reserve arena pages for a request, waiting for room if need be; pass the reservation to `generate`.

        Args:
            pages: number of pages of the arena.
            call: the `generate` call that the request belongs to.
            engine: index of the engine that must run the request, or None for one with room.
            reductions: number of reductions (`reduce=`) that run in the request, one per sample.

        Raises:
            CaptureMemoryFull: the arena is too small, or held by calls that wait themselves; it is full and
                overflow="error"; or nothing was freed in time.
            EngineFailure: the engine has died.
        """
        self.require_open()
        with self.vllm.waiting():
            return await self.admission.claim(pages, call, engine, reductions)

    def abandon(self, plan: Plan, reservation: Reservation | None) -> None:
        """Free the memory of a cancelled or failed request, on the client and on the workers."""
        handles: list[Reservation | None] = [None] * plan.samples
        if reservation is not None:
            handles = [*self.admission.finish(reservation, [reservation.pages, *[0] * (plan.samples - 1)])]
        for sample, handle in enumerate(handles):
            self.give_back(Owner(plan.key, sample), handle)

    def done_with(self, plan: Plan, reservation: Reservation) -> None:
        """Free the rows of a finished request that nobody will fetch.

        The workers free them at their next call; until then the request counts as running.
        """
        *others, last = (Owner(plan.key, sample) for sample in range(plan.samples))
        for owner in others:
            self.give_back(owner, None)
        self.give_back(last, reservation)

    def give_back(self, owner: Owner, reservation: Reservation | None) -> None:
        """Free one sample's rows and records at the next call of the workers, then its reservation. Idempotent."""
        freed = None if reservation is None else partial(self.admission.release, reservation)
        self.workers.give_back(owner, freed, soon=self.admission.budget.waiting > 0)

    def give_back_from_any_thread(self, owner: Owner, reservation: Reservation) -> None:
        """Schedule `give_back`; safe from any thread, in a finalizer, and after the event loop has ended."""
        if not self.workers.closed:
            self.home.call(partial(self.give_back, owner, reservation))

    # Rows

    def offer(self, reservation: Reservation, rows: Spillable) -> None:
        """Allow a living handle's rows to be moved to disk when other requests need memory."""
        if self.spilling is not None:
            self.spilling.offer(reservation, rows)

    async def read_spilled(self, work: Callable[[], Value]) -> Value:
        """Run `work`, a function that reads spilled rows, on a thread, and return its result.

        Raises:
            CaptureIncomplete: the file does not contain the rows that were written.
            ModelClosed: the model was closed meanwhile.
        """
        assert self.spilling is not None, "they were moved there"
        return await self.spilling.read(work)

    def _spills(self) -> Spilling:
        workers, admission = self.workers, self.admission
        return Spilling(
            self.settings,
            admission.budget,
            admission.page_bytes,
            self.collect,
            workers.get_stats,
            admission.admit_waiting,
        )

    async def collect(self, wanted: Sequence[Wanted], *, growing: bool = False) -> list[Delivery]:
        """Fetch the rows of many requests: one call locates all of them, then they are copied out of each arena.

        Args:
            wanted: owner (request and sample), number of input tokens and number of rows already fetched of each.
            growing: True for requests that still run; concurrent callers then share one call of the workers.

        Returns:
            A delivery per item of `wanted`, in order; a failure of one request is in its delivery.

        Raises:
            EngineFailure: the engine has died, or a worker cannot answer.
        """
        found = await (self.workers.locate_growing(wanted) if growing else self.workers.locate(wanted))
        return await self._fetcher.deliver(self._ranks, found)

    @property
    def bank_row_bytes(self) -> int:
        """Bytes of one vector in the workers' vector bank, on the worker with the widest rows."""
        return max(rank.attached.bank_width for rank in self._all_ranks) * _FLOAT_BYTES

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype: that of the residual stream after the last layer."""
        return dtype_of(self.schemas[self.end])

    async def unembed(
        self,
        rows: torch.Tensor,
        tokens: Sequence[int] | None,
        engine: int = 0,
        *,
        top: int = 0,
        normed: bool = False,
    ) -> Unembedded:
        """Compute logits of rows of the residual stream with the model's own unembedding.

        Args:
            rows: rows [n, hidden], in the model's dtype.
            tokens: ids of the tokens whose logits are returned; None for all.
            engine: index of the engine that computes.
            top: number of greatest logits to return besides.
            normed: True if the final norm has already been applied to the rows.

        Raises:
            EngineFailure: the engine has died, or a worker cannot answer.
        """
        chosen = None if tokens is None else tuple(tokens)
        return await self.workers.unembed(rows, engine, tokens=chosen, top=top, normed=normed)

    @property
    def family(self) -> Family:
        """Family of the loaded layers; if none matched, the placeholder `DERIVED`, without paths of sites."""
        return FAMILIES[self.loaded.family] if self.loaded.family else DERIVED

    @property
    def end(self) -> Point:
        """Point after the last layer, from whose rows the model computes its logits."""
        return Point(self.vllm.num_layers - 1, self.family.end)

    def exists(self, point: Point) -> bool:
        """Return whether the model has a point: as the start found it or, if not to be armed, by the configuration."""
        return point in self.armed or (point not in self.vllm.points and self.vllm.exists(point))

    @property
    def absent(self) -> dict[str, list[int]]:
        """Layers that lack a site, by site name; sites that all layers have are left out."""
        layers = range(self.vllm.num_layers)
        found = {site: [layer for layer in layers if not self.exists(Point(layer, site))] for site in SITES}
        return {site: lacking for site, lacking in found.items() if lacking}

    def drop(self, sites: Iterable[str], reason: str) -> None:
        """Disarm the points of derived sites that the proof at start does not prove.

        Args:
            sites: site names.
            reason: reason, kept in `refused`.

        Raises:
            UnsupportedModel: the settings ask for a site of which no point is left.
        """
        for point in [point for point in self.armed if point.site in sites]:
            self.refused[point.site] = reason
            del self.armed[point], self.schemas[point]
        self._require_sites()

    def _require_sites(self) -> None:
        asked = () if self.settings.every_site else self.settings.sites
        if missing := sorted(set(asked) - {point.site for point in self.armed}):
            why = "".join(f"; {site}: {self.refused[site]}" for site in missing if site in self.refused)
            raise UnsupportedModel(
                f"steercap knows no {', '.join(missing)} in layers of {', '.join(self.loaded.code)}{why}; "
                "leave it out of SteerModel(..., sites=)"
            )

    @property
    def line_readers(self) -> list[LineReader]:
        """Arena reader of each capturing worker, engine by engine."""
        return [rank.reader for rank in self._all_ranks]

    @property
    def _all_ranks(self) -> list[Rank]:
        return [rank for ranks in self._ranks for rank in ranks]

    def require_open(self) -> None:
        """Check that the engine is open and that this is its event loop.

        Raises:
            ModelClosed, WrongEventLoop: it was closed, or started in another event loop.
        """
        self.workers.require_open()
