"""Engine with taps: start, admission, requests, shutdown."""

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

#: Maximum wait at shutdown, in seconds, for a cancelled start, or for tasks of a loop that may be blocked.
GIVE_UP_SECONDS: Final = 0.5

#: Minimum number of a sequence's rows that are in memory at once, where not all of them are.
CHUNK_TOKENS: Final = 128
#: Bytes of an element of a vector.
_FLOAT_BYTES: Final = 4


class Engine:
    """A running engine with taps.

    Args:
        vllm: vLLM's engine, behind its adapter.
        settings: steercap's settings.
        workers: connection to its workers.
        ranks: workers that capture, as they answered when they attached.

    Attributes:
        names: names of the model that may occur in files.
        model_label: its name in files that are written.
        workers: connection to the workers.
        compiler: compiler of the specs of requests.
        armed: index of every armed point.
        schemas: schema of every armed point, layer by layer.
        loaded: decoder layers that the workers have loaded.
        refused: reasons why layers that no family knows lack sites, by site.
        verified: True if rows of layers with exactly their code were compared with transformers'.
        reductions: number of reductions that can run along at once in each engine.
        attention: attention rules of the layers whose queries and keys are armed.
        home: event loop that the engine belongs to.
        admission: queue of requests that capture.
        spilling: mover of rows to disk with overflow="spill", else None.
        configurations: slots and the vector bank.
        sketching: sketches that the workers hold.
        saes: SAEs that the workers hold.
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
        #: Points to arm that the model turned out to have.
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
        self.admission.relief = self.spilling
        self._ending: Future[None] | None = None
        self._one_ends: Final = threading.Lock()
        self._death = ""

    @classmethod
    async def start(
        cls, model: str, settings: Settings, engine_args: Mapping[str, Any], launch: Launch, candidate: int = 0
    ) -> Engine:
        """Start vLLM with taps, and the workers' memory for rows and vectors.

        Args:
            model: path or name of the model.
            settings: steercap's settings.
            engine_args: vLLM's engine arguments.
            launch: a new launch, by which the start can be given up from anywhere.
            candidate: index of the family to try, among those that the layers may be of; see `families.families_of`.

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
        """Make an engine of a started vLLM, with memory for rows in its workers; if that fails, vLLM is stopped."""
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
        """True if it died before it was closed; outside of its event loop, True only once that was noticed."""
        return bool(self._death) or (self.home.is_here and self.vllm.died)

    @property
    def death(self) -> str:
        """Cause of death, "" if it lives."""
        return self._death

    def _lose(self, death: EngineDied) -> None:
        """Fail all waiting requests, since the engine has died, and mark its sketches as lost."""
        self._death = str(death)
        self.admission.fail(death)
        self.configurations.fail(death)
        self.sketching.lose(str(death))

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
        """Close all objects that belong to the event loop of the engine."""
        self.admission.close()
        if self.spilling is not None:
            await self.spilling.aclose()
        await self.configurations.aclose()
        await self.sketching.aclose()
        await self.saes.aclose()
        await self.workers.aclose()
        await self.vllm.quiesce()

    def _end(self) -> None:
        """Free the resources that need no event loop, from any thread, and end vLLM."""
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
        """Return a key for a request, unique on this machine; without underscore, see `runner_v1.sample_of`."""
        return f"steercap-{self._name}-{next(self._numbers)}"

    def pages_needed(self, plan: CapturePlan, rows: int) -> int:
        """Return the pages that `rows` rows of the plan, or their accumulator, take on the worker with most of them."""
        return max((rank.pages(plan, rows) for rank in self._all_ranks), default=0)

    def windowed(self, plan: CapturePlan, limit: int, samples: int, room: int | None = None) -> CapturePlan:
        """Return a plan whose rows leave memory while the request runs, if they do not all fit in there at once.

        With overflow="spill" alone. The rows of one pass must fit, since all of them are written before any can leave;
        a plan whose rows do not is returned as it is, and refused when it claims memory.

        Args:
            plan: plan of the rows of one sample.
            limit: number of positions that can be inputs of the model.
            samples: number of samples.
            room: number of pages that they may have; all by default.
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
        """Return the pages of memory, and the bytes on disk, that all rows of the samples of a plan can need."""
        capture = plan.capture
        if capture is None:
            return 0, 0
        rows, size = count_selected(capture.ranges, plan.limit), 0
        if capture.window:
            size = max(sum(rank.file_bytes(capture, rows) for rank in ranks) for ranks in self._ranks)
        return self.pages_needed(capture, min(rows, capture.window or rows)) * plan.samples, size * plan.samples

    async def admit_rows(self, plan: Plan, call: object, engine: int | None = None) -> Reservation:
        """Reserve memory, and with a window disk space, for all rows that the samples of a plan can get.

        Args:
            plan: plan with a capture.
            call, engine: as for `admit`.

        Raises:
            CaptureMemoryFull, EngineFailure: as for `admit`; or the quota on disk has no room.
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
        """Run one request; yields its outputs, the finished one last.

        Args:
            prompt: the rendered prompt.
            params: sampling or pooling parameters, which this call owns.
            plan: compiled capture and steering of the request, or None.
            reservation: reservation with the engine where its rows have room; without one, vLLM balances the load.
            salt: hash of all that its keys and values depend on besides its tokens.
            partial: True to yield the text so far at every step; None for the choice in `params`.
            **options: further arguments of vLLM's `generate` or `encode`.
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
        """Reserve pages of an arena, waiting for room if need be; `generate` runs the request with this reservation.

        Args:
            pages: number of pages of the arena.
            call: the `generate` call it is for.
            engine: index of the engine that must run the request, or None for one with room.
            reductions: number of reductions that run along with it.

        Raises:
            CaptureMemoryFull: there can be no room, or none came in time, or waiting is not wanted.
            EngineFailure: the engine has died.
        """
        self.require_open()
        with self.vllm.waiting():
            return await self.admission.claim(pages, call, engine, reductions)

    def abandon(self, plan: Plan, reservation: Reservation | None) -> None:
        """Free the memory of a request that was cancelled or failed, here and on the workers."""
        handles: list[Reservation | None] = [None] * plan.samples
        if reservation is not None:
            handles = [*self.admission.finish(reservation, [reservation.pages, *[0] * (plan.samples - 1)])]
        for sample, handle in enumerate(handles):
            self.give_back(Owner(plan.key, sample), handle)

    def done_with(self, plan: Plan, reservation: Reservation) -> None:
        """Free the rows of a finished request that nobody will fetch.

        The memory is free after the next call of the workers; until then the request counts as running.
        """
        *others, last = (Owner(plan.key, sample) for sample in range(plan.samples))
        for owner in others:
            self.give_back(owner, None)
        self.give_back(last, reservation)

    def give_back(self, owner: Owner, reservation: Reservation | None) -> None:
        """Free a request's rows and records with the next call of the workers. Idempotent."""
        freed = None if reservation is None else partial(self.admission.release, reservation)
        self.workers.give_back(owner, freed, soon=self.admission.budget.waiting > 0)

    def give_back_from_any_thread(self, owner: Owner, reservation: Reservation) -> None:
        """Call `give_back` from any thread, after the loop has ended, or from a finalizer at any moment."""
        if not self.workers.closed:
            self.home.call(partial(self.give_back, owner, reservation))

    # Rows

    def offer(self, reservation: Reservation, rows: Spillable) -> None:
        """Allow a handle's rows to be moved to disk when other requests need memory, as long as the handle lives."""
        if self.spilling is not None:
            self.spilling.offer(reservation, rows)

    async def read_spilled(self, work: Callable[[], Value]) -> Value:
        """Run `work`, which reads spilled rows, on a thread, and return its result.

        Raises:
            CaptureIncomplete: the file does not hold what was written.
            ModelClosed: the model was closed meanwhile.
        """
        assert self.spilling is not None, "they were moved there"
        return await self.spilling.read(work)

    def _spills(self) -> Spilling:
        workers, admission = self.workers, self.admission
        return Spilling(
            self.settings, admission.budget, admission.page_bytes, self.collect, workers.get_stats, admission.look_again
        )

    async def collect(self, wanted: Sequence[Wanted], *, growing: bool = False) -> list[Delivery]:
        """Fetch requests' rows: by one call for all, then the rows are read out of each arena.

        Args:
            wanted: owners and numbers of rows.
            growing: True if the requests still run, so that many callers will ask for a few rows each, again and again.

        Raises:
            EngineFailure: the engine has died, or a worker cannot answer.
        """
        found = await (self.workers.locate_growing(wanted) if growing else self.workers.locate(wanted))
        return await self._fetcher.deliver(self._ranks, found)

    @property
    def bank_row_bytes(self) -> int:
        """Bytes of a row of the vector bank, on the worker with the widest."""
        return max(rank.attached.bank_width for rank in self._all_ranks) * _FLOAT_BYTES

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype: that of the last rows of the stream, or of the streams."""
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
            engine: index of the engine to use.
            top: number of greatest logits to return.
            normed: True if the final norm has been applied to the rows.

        Raises:
            EngineFailure: the engine has died, or a worker cannot answer.
        """
        chosen = None if tokens is None else tuple(tokens)
        return await self.workers.unembed(rows, engine, tokens=chosen, top=top, normed=normed)

    @property
    def family(self) -> Family:
        """Family of the loaded layers; of a derived one, without the paths of its sites."""
        return FAMILIES[self.loaded.family] if self.loaded.family else DERIVED

    @property
    def end(self) -> Point:
        """Point of the last rows, from which the model makes its logits."""
        return Point(self.vllm.num_layers - 1, self.family.end)

    def exists(self, point: Point) -> bool:
        """Check if the model has a point: as found at start, or, where it was not to be armed, by its configuration."""
        return point in self.armed or (point not in self.vllm.points and self.vllm.exists(point))

    @property
    def absent(self) -> dict[str, list[int]]:
        """Layers that lack a site, by site; a site that all layers have is left out."""
        layers = range(self.vllm.num_layers)
        found = {site: [layer for layer in layers if not self.exists(Point(layer, site))] for site in SITES}
        return {site: lacking for site, lacking in found.items() if lacking}

    def drop(self, sites: Iterable[str], reason: str) -> None:
        """Take back the points of derived sites that the proof at start does not prove.

        Raises:
            UnsupportedModel: a site was asked for, and none of its points is left.
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
        """Reader of the arena lines of each capturing worker."""
        return [rank.reader for rank in self._all_ranks]

    @property
    def _all_ranks(self) -> list[Rank]:
        return [rank for ranks in self._ranks for rank in ranks]

    def require_open(self) -> None:
        """Check that the engine can be used from here.

        Raises:
            ModelClosed, WrongEventLoop: it was closed, or started in another event loop.
        """
        self.workers.require_open()
