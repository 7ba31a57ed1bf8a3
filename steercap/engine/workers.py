"""Connection to the workers of all engines: questions as frames (encoded messages), batching, and releases of rows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

import torch

from steercap.concurrency.loops import OwnerLoop
from steercap.config import Settings
from steercap.core.messages import (
    Answer,
    Attach,
    Attached,
    Call,
    CapturedRows,
    Choose,
    Chosen,
    Collect,
    Collected,
    Configure,
    Configured,
    Counted,
    Engage,
    Engaged,
    Failed,
    GetStats,
    GetSteeringRecord,
    LineRange,
    Lines,
    Listen,
    Listening,
    NotCapturing,
    Owner,
    Project,
    ProjectedRows,
    Question,
    Read,
    SteeringRecord,
    SteeringRecords,
    Unembed,
    Unembedded,
    Unhooked,
    Unknown,
    Wanted,
    decode_answer,
    encode,
)
from steercap.engine.ranks import Rank, Ranks
from steercap.engine.spilling import folder_of
from steercap.errors import EngineFailure, ModelClosed, SteeringNotApplied, UnsupportedRunner, WorkerFailure
from steercap.worker.channel import Channel
from steercap.worker.memory import open_reader

if TYPE_CHECKING:
    from steercap.adapters.engine import VllmEngine

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batcher(Generic[Item, Result]):
    """Batcher of concurrent questions: those asked while a call of `send` runs are sent together in the next.

    Args:
        send: coroutine function that sends several questions and returns their answers in the same order.
    """

    def __init__(self, send: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]]) -> None:
        self._send = send
        self._pending: list[tuple[Item, asyncio.Future[Result]]] = []
        self._task: asyncio.Task[None] | None = None

    async def ask(self, item: Item) -> Result:
        """Ask one question and return its answer; it is sent even if the caller is cancelled.

        Raises:
            ModelClosed: the batcher was closed meanwhile.
            Whatever `send` raises.
        """
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._pending.append((item, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._drain(), name="steercap batch")
        return await answer

    async def aclose(self) -> None:
        """Fail all waiting callers with `ModelClosed`. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        closed = ModelClosed("the model was closed while a call to its workers ran")
        _fail([answer for _, answer in self._pending], closed)
        self._pending = []

    async def _drain(self) -> None:
        while self._pending:
            await asyncio.sleep(0)  # so that callers that are about to ask can join
            batch, self._pending = self._pending, []
            answers = [answer for _, answer in batch]
            try:
                results = await self._send([item for item, _ in batch])
                paired = list(zip(answers, results, strict=True))
            except Exception as error:  # noqa: BLE001 -- it is theirs who asked
                _fail(answers, error)
            except BaseException:
                _fail(answers, ModelClosed("the model was closed while a call to its workers ran"))
                raise
            else:
                for answer, result in paired:
                    if not answer.done():
                        answer.set_result(result)


def _fail(answers: Sequence[asyncio.Future[Result]], error: Exception) -> None:
    for answer in answers:
        if not answer.done():
            answer.set_exception(error)


#: Seconds that a release of rows waits to be sent along with a question before it is sent alone.
RELEASE_DELAY: Final = 0.05
#: Types of questions that each worker can answer by itself, between any two of its forward passes.
DIRECT: Final = (Collect, Configure, GetSteeringRecord, GetStats)
#: Seconds between checks that the engine is alive, while an answer is awaited.
LIVENESS_SECONDS: Final = 0.1
_FLOAT_BYTES: Final = 4
_INT_BYTES: Final = 8

Kind = TypeVar("Kind", bound=Answer)
#: Steering record of one sample (the edits made to its rows) from each worker, engine by engine.
Records: TypeAlias = list[list[SteeringRecord | Unknown]]


class _Settling(NamedTuple):
    """One call of `settle`: samples of a request whose steering records are wanted.

    Args:
        wanted: owner and number of input tokens of each sample.
        ended: True if the samples have ended.
        biased: True if their logits were biased.
    """

    wanted: Sequence[Wanted]
    ended: bool
    biased: bool


class _GivenBack(NamedTuple):
    """A release of rows that has not been sent to the workers yet.

    Args:
        freed: function to call once the memory is free, or None.
        soon: True if a request waits for the memory, so that the release is not delayed.
    """

    freed: Callable[[], None] | None
    soon: bool


class Workers:
    """Connection to the workers of all engines; it belongs to the event loop that it is made in.

    Args:
        vllm: vLLM's engine, behind its adapter.

    Attributes:
        home: the event loop.
        closed: True once no RPC may be sent any more.
    """

    def __init__(self, vllm: VllmEngine) -> None:
        self.home: Final = OwnerLoop("this model")
        self.closed = False
        self._vllm = vllm
        self._engines: int | None = None  # how many there are, once all have answered
        self._given_back: dict[Owner, _GivenBack] = {}
        self._flush: asyncio.Task[None] | None = None
        self._channels: list[list[Channel]] = []  # to each worker, engine by engine; none where one has none
        self._passed = 0  # aborted requests whose passes have begun, if they ever will
        self._settling: Batcher[_Settling, list[Records]] = Batcher(self._settle)
        self._growing: Batcher[Sequence[Wanted], list[list[list[CapturedRows | Unknown]]]] = Batcher(self._locate)

    def require_open(self) -> None:
        """Check that the connection is open and that this is its event loop.

        Raises:
            ModelClosed, WrongEventLoop: the model was closed, or started in another event loop.
        """
        if self.closed:
            raise ModelClosed("this SteerModel is closed; make a new one")
        self.home.require()

    async def aclose(self) -> None:
        """Fail all callers that wait for an answer, and close the channels. Idempotent."""
        self.closed = True
        await self._settling.aclose()
        await self._growing.aclose()
        if self._flush:
            self._flush.cancel()
            await asyncio.wait([self._flush])
        self._close_channels()

    def end(self) -> None:
        """Close the channels' sockets, from any thread, once `aclose` has run or the event loop has ended."""
        for channel in chain(*self._channels):
            channel.end()

    # Questions, each of which raises EngineFailure if the engine has died, or a worker cannot answer

    async def attach(self, settings: Settings) -> Ranks:
        """Make every worker allocate its memory for rows, and return the capturing workers; must be the first RPC."""
        spills = settings.overflow == "spill"
        folder = str(folder_of(settings).absolute()) if spills else ""
        question = Attach(settings.capture_bytes, folder, settings.spill_bytes if spills else 0)
        engines = await self.ask(question, Attached)
        self._engines = len(engines)
        if settings.transport != "wire":
            self._channels = await self._listened()

        def rank(engine: int, index: int, attached: Attached) -> Rank:
            reader = open_reader(attached, settings.transport, self.line_source(engine, attached.nonce))
            return Rank(index, attached, reader, engine)

        return tuple(
            tuple(rank(engine, index, attached) for index, attached in enumerate(answers))
            for engine, answers in enumerate(engines)
        )

    async def _listened(self) -> list[list[Channel]]:
        """Open a channel (socket) to each worker, engine by engine; return [] if one cannot be connected to."""
        found: list[list[Channel]] = []
        try:
            for answers in await self.ask(Listen(), Listening):
                found.append([])
                for answer in answers:
                    found[-1].append(Channel.open(answer.address))
        except OSError:
            for channel in chain(*found):
                channel.close()
            return []
        return found

    async def locate(self, wanted: Sequence[Wanted]) -> list[list[list[CapturedRows | Unknown]]]:
        """Make the rows of finished samples readable in the arenas, and return their locations.

        Args:
            wanted: owner, number of input tokens and number of rows already fetched of each sample.

        Returns:
            For each sample, the answer of each capturing worker, engine by engine.
        """
        engines = await self.ask(Collect(tuple(wanted)), Collected)
        while any(answer.unfinished for answers in engines for answer in answers):  # other requests run in between
            engines = await self.ask(Collect(tuple(wanted)), Collected)
        return [[[answer.shares[index] for answer in answers] for answers in engines] for index in range(len(wanted))]

    async def locate_growing(self, wanted: Sequence[Wanted]) -> list[list[list[CapturedRows | Unknown]]]:
        """Locate rows of requests that still run, as `locate` does; concurrent callers share a call of the workers."""
        return await self._growing.ask(wanted)

    async def _locate(self, wanted: Sequence[Sequence[Wanted]]) -> list[list[list[list[CapturedRows | Unknown]]]]:
        rows = iter(await self.locate([item for items in wanted for item in items]))
        return [[next(rows) for _ in items] for items in wanted]

    async def settle(self, wanted: Sequence[Wanted], *, ended: bool, biased: bool) -> list[Records]:
        """Return the steering records of a request's samples so far; concurrent callers share a call of the workers.

        Args:
            wanted: owner and number of input tokens of each sample.
            ended: True if the samples have ended.
            biased: True if their logits are biased: one worker may bias them after another has sampled, but not
                after an RPC.

        Returns:
            For each sample, the record of each worker, engine by engine.
        """
        return await self._settling.ask(_Settling(wanted, ended, biased))

    async def _settle(self, calls: Sequence[_Settling]) -> list[list[Records]]:
        wanted = tuple(item for call in calls for item in call.wanted)
        ended = tuple(call.ended for call in calls for _ in call.wanted)
        by_rpc = any(call.biased for call in calls)
        engines = await self.ask(GetSteeringRecord(wanted, ended), SteeringRecords, by_rpc=by_rpc)
        records = iter(
            [[[answer.records[index] for answer in answers] for answers in engines] for index in range(len(wanted))]
        )
        return [[next(records) for _ in call.wanted] for call in calls]

    async def engage(self, owners: Sequence[Owner]) -> list[int]:
        """Begin the steering of samples that waits for a monitor; return the first steered position of each.

        Raises:
            SteeringNotApplied: the workers begin to steer a sample at different positions.
        """
        engines = await self.ask(Engage(tuple(owners)), Engaged)
        starts = []
        for number, owner in enumerate(owners):
            known = [[answer.positions[number] for answer in answers] for answers in engines]
            found = [set(positions) for positions in known if any(one is not None for one in positions)]
            if len(found) != 1 or len(found[0]) != 1:
                raise SteeringNotApplied(
                    f"{owner.key}: a monitor's steering must begin at one position, and the workers of each engine "
                    f"begin at {known} (None: never); its text is withheld. Repeat the call"
                )
            (start,) = found[0]
            assert start is not None
            starts.append(start)
        return starts

    async def configure(self, question: Configure) -> list[Configured]:
        """Send vectors and the contents of slots to every worker; return the answers of all."""
        return [answer for answers in await self.ask(question, Configured) for answer in answers]

    async def unembed(self, rows: torch.Tensor, engine: int, **asked: Any) -> Unembedded:
        """Compute logits of rows [n, hidden] of the residual stream, in the model's dtype, on one engine.

        Args:
            rows: the rows.
            engine: index of the engine.
            **asked: further fields of `Unembed`.
        """
        found = await self._first(Unembed(*_sent(rows), **asked), Unembedded, engine, "the last layers of the model")
        for data, item in ((found.logits, _FLOAT_BYTES), (found.top, _INT_BYTES), (found.best, _FLOAT_BYTES)):
            _require_rows(data, len(rows), item)
        if any(len(edge) != len(rows) for edge in (found.least, found.most, found.spread, found.total)):
            raise WorkerFailure(f"a worker did not unembed exactly the {len(rows)} rows that it was sent")
        return found

    async def project(self, layer: int, site: str, rows: torch.Tensor, engine: int = 0) -> torch.Tensor:
        """Apply the last projection of a layer's attention or MLP, or a norm, to rows; returns float32 [n, hidden].

        Args:
            layer: index of the layer.
            site: site of the rows: "z" or "neurons" for a projection, or the norm's key in `Family.norms`.
            rows: rows [n, *shape of the point], in the model's dtype.
            engine: index of the engine that computes.
        """
        found = await self._first(Project(layer, site, *_sent(rows)), ProjectedRows, engine, f"layer {layer}")
        _require_rows(found.rows, len(rows), _FLOAT_BYTES)
        return torch.frombuffer(bytearray(found.rows), dtype=torch.float32).view(len(rows), -1)

    async def choose(self, layer: int, rows: torch.Tensor) -> Chosen:
        """Return the experts and weights that a layer's router chooses from logits, computed as the model does.

        Args:
            layer: index of the layer.
            rows: router logits, float32 [n, experts], as captured at `router`.
        """
        found = await self._first(Choose(layer, *_sent(rows)), Chosen, 0, f"layer {layer}")
        if not found.refused:
            _require_rows(found.ids, len(rows), _INT_BYTES)
            _require_rows(found.weights, len(rows), _FLOAT_BYTES)
        return found

    async def _first(self, question: Question, kind: type[Kind], engine: int, part: str) -> Kind:
        """Ask all workers, and return the first answer from an engine; `part` names its part of the model in errors."""
        answers = (await self.ask(question, kind))[engine]
        if not answers:
            raise WorkerFailure(f"no worker of engine {engine} has {part}")
        return answers[0]

    async def get_stats(self) -> list[list[Counted]]:
        """Return the memory and other resources in use on each capturing worker, engine by engine."""
        return await self.ask(GetStats(), Counted)

    def line_source(self, engine: int, nonce: bytes) -> Callable[[tuple[LineRange, ...]], Awaitable[bytes]]:
        """Return a coroutine function that reads ranges of arena lines from the worker whose arena has the nonce.

        It calls this worker's engine alone, so it sends no releases, which must reach all engines.
        """

        async def ask(ranges: tuple[LineRange, ...]) -> bytes:
            self.require_open()
            frames = await self._vllm.rpc(encode(Call((), Read(nonce, ranges))), engine)
            (found,) = _answers(frames, Lines)
            if len(found) != 1:
                raise WorkerFailure(f"{len(found)} workers of engine {engine} have the arena that holds these rows")
            return found[0].data

        return ask

    async def ask(self, question: Question, kind: type[Kind], *, by_rpc: bool = False) -> list[list[Kind]]:
        """Send a question to all workers; return the answers of those that capture, engine by engine.

        Releases that wait are sent with it, and their memory is free when this returns.

        Args:
            question: the question.
            kind: type of its answers.
            by_rpc: True if all workers must answer between the same two forward passes.

        Raises:
            EngineFailure: the model is closed, the engine has died, or a worker cannot answer.
        """
        self.require_open()
        given_back, self._given_back = self._given_back, {}
        # The first pass of an aborted request may not have begun: only what comes by RPC is known to come after it.
        aborted = self._vllm.aborted
        direct = self._channels and not by_rpc and isinstance(question, DIRECT) and aborted == self._passed
        try:
            frames = await (self._send if direct else self._vllm.rpc)(encode(Call(tuple(given_back), question)))
        except BaseException:
            self._given_back = given_back | self._given_back
            if self._given_back and not self.closed:
                self._schedule_flush()
            raise
        self._passed = max(self._passed, aborted)
        for item in given_back.values():
            if item.freed is not None:
                item.freed()
        if self._engines is not None and len(frames) != self._engines:
            raise WorkerFailure(f"{len(frames)} engines answered where {self._engines} were started")
        return _answers(frames, kind)

    async def _send(self, frame: bytes) -> list[list[bytes]]:
        """Send an encoded question through the channels of all workers; see `VllmEngine.rpc`.

        Raises:
            EngineFailure: the engine has died, or a worker closed its channel.
        """
        if any(channel.is_closed for channel in chain(*self._channels)):
            self._close_channels()
            return await self._vllm.rpc(frame)
        channels = self._channels
        asked = asyncio.gather(*(channel.ask(frame) for channel in chain(*channels)))
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())  # late errors are not reported
        try:
            while not (await asyncio.wait({asked}, timeout=LIVENESS_SECONDS))[0]:
                if self._vllm.died:
                    raise ConnectionAbortedError("the engine has died")
            answers = iter(asked.result())
        except ConnectionError as error:
            self._close_channels()
            await self._vllm.rpc(encode(Call((), GetStats())))  # raises the error of an engine that has died
            # Not asked again: a worker that has answered may have forgotten what it was asked for.
            raise WorkerFailure(f"a worker closed its channel during a call: {error}") from error
        finally:
            asked.cancel()
        return [[next(answers) for _ in engine] for engine in channels]

    def _close_channels(self) -> None:
        """Close all channels; from now on every question goes by RPC."""
        channels, self._channels = self._channels, []
        for channel in chain(*channels):
            channel.close()

    # Releases

    def give_back(self, owner: Owner, freed: Callable[[], None] | None, *, soon: bool) -> None:
        """Free one sample's rows and records with the next call of the workers, or soon by its own. Idempotent.

        Args:
            owner: request and sample.
            freed: function to call once the memory is free, or None.
            soon: True if a request waits for the memory.
        """
        if not self.closed:
            self._given_back[owner] = _GivenBack(freed, soon)
            self._schedule_flush()

    def _schedule_flush(self) -> None:
        if self._flush is None or self._flush.done():
            self._flush = self.home.loop.create_task(self._release_soon())

    async def _release_soon(self) -> None:
        with contextlib.suppress(EngineFailure):  # a dead engine holds nothing; its next caller is told
            while self._given_back and not self.closed:
                if not any(item.soon for item in self._given_back.values()):
                    await asyncio.sleep(RELEASE_DELAY)
                if self._given_back:
                    await self.get_stats()


def _sent(rows: torch.Tensor) -> tuple[bytes, int, str]:
    """Encode rows [n, ...] for a question: their bytes, number and dtype name."""
    flat = rows.flatten(1).contiguous()
    return flat.view(torch.uint8).numpy().tobytes(), len(rows), str(rows.dtype).removeprefix("torch.")


def _require_rows(data: bytes, rows: int, item: int) -> None:
    """Check that `data` divides into `rows` rows of whole items of `item` bytes.

    Raises:
        WorkerFailure: it does not.
    """
    if len(data) % (rows * item):
        raise WorkerFailure(f"a worker answered {len(data):,} bytes for {rows} rows")


def _answers(engines: Sequence[Sequence[bytes]], kind: type[Kind]) -> list[list[Kind]]:
    """Decode the answers of the workers that capture, engine by engine.

    Raises:
        UnsupportedRunner: a worker runs a model runner that no adapter can hook.
        WorkerFailure: a worker could not answer, or sent an answer of another type than `kind`.
    """
    found: list[list[Kind]] = []
    for engine, frames in enumerate(engines):
        answers = [decode_answer(frame) for frame in frames]
        for worker, answer in enumerate(answers):
            if isinstance(answer, Unhooked):
                raise UnsupportedRunner(f"worker {worker} of engine {engine}: {answer.reason}")
            if isinstance(answer, Failed):
                raise WorkerFailure(f"worker {worker} of engine {engine}: {answer.reason}")
        capturing = [answer for answer in answers if not isinstance(answer, NotCapturing)]
        found.append([answer for answer in capturing if isinstance(answer, kind)])
        if found[-1] != capturing:
            raise WorkerFailure(f"expected {kind.__name__}, got {', '.join(type(one).__name__ for one in capturing)}")
    return found
