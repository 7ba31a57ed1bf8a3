"""The life of one handle's rows: in the worker, on disk, on their way, here, gone.

`NEXT` is the whole of it. Whoever fetches holds the rows' turn, so that a second fetch waits for the first, and waits
for rows that are on their way to disk; a release waits for nobody.
"""

from __future__ import annotations

import asyncio
import enum
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from steercap.captures.checks import Expected, received
from steercap.captures.rows import Captures, Found
from steercap.captures.spilled import Spilled
from steercap.core.idiom import AWAITED
from steercap.core.messages import Owner, Wanted
from steercap.core.ownership import Unshared
from steercap.errors import CaptureError, CaptureIncomplete, CaptureNotFetched, CaptureNotFinite, CaptureReleased

if TYPE_CHECKING:
    from steercap.core.budget import Ticket
    from steercap.engine.engine import Engine
    from steercap.files.spill import SpillFile


Value = TypeVar("Value")


class Stage(enum.Enum):
    """Where rows are."""

    KEPT = "in the worker"
    SPILLING = "on their way to disk"
    SPILLED = "on disk"
    COMING = "on their way"
    RETURNING = "on their way from disk"
    HERE = "here"
    LEAVING = "on their way, and released meanwhile"
    GONE = "released"


class Event(enum.Enum):
    """What happens to rows."""

    SPILL = "there is no room for others"
    STORE = "they are on disk, and right"
    FETCH = "they are asked for"
    ARRIVE = "they came, and are right"
    FAIL = "they did not get there, or are wrong"
    RELEASE = "nobody wants them"


#: Which stage follows which event. Other events cannot happen at a stage.
NEXT: Final[Mapping[tuple[Stage, Event], Stage]] = MappingProxyType(
    {
        (Stage.KEPT, Event.SPILL): Stage.SPILLING,
        (Stage.KEPT, Event.FETCH): Stage.COMING,
        (Stage.KEPT, Event.RELEASE): Stage.GONE,
        (Stage.SPILLING, Event.STORE): Stage.SPILLED,
        (Stage.SPILLING, Event.FAIL): Stage.KEPT,
        (Stage.SPILLING, Event.RELEASE): Stage.LEAVING,
        (Stage.SPILLED, Event.FETCH): Stage.RETURNING,
        (Stage.SPILLED, Event.RELEASE): Stage.GONE,
        (Stage.RETURNING, Event.ARRIVE): Stage.HERE,
        (Stage.RETURNING, Event.FAIL): Stage.SPILLED,
        (Stage.RETURNING, Event.RELEASE): Stage.LEAVING,
        (Stage.COMING, Event.ARRIVE): Stage.HERE,
        (Stage.COMING, Event.FAIL): Stage.KEPT,
        (Stage.COMING, Event.RELEASE): Stage.LEAVING,
        (Stage.LEAVING, Event.FAIL): Stage.GONE,
        (Stage.LEAVING, Event.RELEASE): Stage.LEAVING,
        (Stage.HERE, Event.RELEASE): Stage.GONE,
        (Stage.GONE, Event.RELEASE): Stage.GONE,
    }
)
#: Stages at which the worker no longer holds rows.
_FREED: Final = frozenset({Stage.SPILLED, Stage.RETURNING, Stage.HERE, Stage.GONE})
#: Stages at which the rows on disk, if any, are no longer needed.
_DROPPED: Final = frozenset({Stage.HERE, Stage.GONE})


class Lost(Protocol):
    """Rows that may be lost with the engine that has them; see `requests.again`."""

    @property
    def place(self) -> object:
        """See `Origin.place`."""

    def is_so(self) -> bool:
        """Whether they are, and another engine is to compute them."""

    async def surviving(self, work: Callable[[Engine], Awaitable[Value]]) -> Value:
        """Await something of the engine that lives."""

    async def rows(self) -> Found:
        """The rows, computed again by it."""


class Origin(Protocol):
    """Where rows come from: workers, or a server."""

    @property
    def place(self) -> object:
        """Rows of one place are fetched together."""

    @property
    def again(self) -> Lost | None:
        """What computes the rows again, if they are lost and that can be tried."""

    def require_open(self) -> None:
        """Check that it can be asked.

        Raises:
            ModelClosed, WrongEventLoop: it cannot.
        """

    async def collect(self, origins: Sequence[Any]) -> Sequence[Any]:
        """What comes for each of several origins of the same place."""

    def found(self, delivery: Any) -> Found:
        """What came for this one, checked against what must be.

        Raises:
            CaptureIncomplete, CaptureNotFinite, CaptureReleased: it is not that.
        """

    def give_back(self) -> None:
        """Free the rows there."""

    def give_back_from_any_thread(self) -> None:
        """The same, at any moment, of the garbage collector's choosing too."""


@dataclass(frozen=True)
class Source:
    """Rows in the workers of an engine.

    Args:
        engine: whose workers hold them.
        owner: whose they are there.
        ticket: the memory they take.
        expected: what must come; its last token has no row, since it was never an input.
        lost: what computes them again if the engine has died, or None.
    """

    engine: Engine
    owner: Owner
    ticket: Ticket
    expected: Expected
    lost: Lost | None = None

    @property
    def wanted(self) -> Wanted:
        """What to ask the workers for."""
        return Wanted(self.owner, len(self.expected.tokens) - 1)

    @property
    def place(self) -> object:
        return self.engine if self.lost is None else self.lost.place

    @property
    def again(self) -> Lost | None:
        return self.lost if self.lost is not None and self.lost.is_so() else None

    async def surviving(self, work: Callable[[Engine], Awaitable[Value]]) -> Value:
        """Await something of the engine, or of the one that took its place.

        Raises:
            EngineFailure: none lives.
            Whatever `work` raises.
        """
        return await (work(self.engine) if self.lost is None else self.lost.surviving(work))

    def require_open(self) -> None:
        if self.again is None:
            self.engine.require_open()
        else:
            self.engine.home.require()

    async def collect(self, origins: Sequence[Source]) -> Sequence[Any]:
        return await self.engine.collect([origin.wanted for origin in origins])

    def found(self, delivery: Any) -> Found:
        rows, receipt = received(self.expected, delivery, self.engine.vllm.points)
        return Found(Captures(rows, self.engine.vllm.num_layers), receipt)

    def give_back(self) -> None:
        give_back = self.engine.give_back if self.engine.home.is_here else self.engine.give_back_from_any_thread
        give_back(self.owner, self.ticket)

    def give_back_from_any_thread(self) -> None:
        self.engine.give_back_from_any_thread(self.owner, self.ticket)


class Lifecycle(Unshared, instead="its rows have one owner"):
    """Where the rows of one handle are, and what may become of them.

    Dropped with its handle, it frees what the worker holds.

    Args:
        name: of the request, for messages.
        source: where the rows come from, None for those that are here.
        found: the rows, if they are here.

    Attributes:
        stage: where they are now.
        turn: held by whoever fetches.
        spilled: the rows, if they are on disk; or what was found wrong with them on the way there.
        idiom: how messages show code.
    """

    def __init__(self, name: str, *, source: Origin | None = None, found: Found | None = None) -> None:
        self.name = name
        self.source = source
        self.found = found
        self.stage = Stage.KEPT if found is None else Stage.HERE
        self.turn = asyncio.Lock()
        self.spilled: Spilled | CaptureError | None = None
        self._rested = asyncio.Event()  # they are not, or no longer, on their way to disk
        self._rested.set()
        self.idiom = AWAITED
        self._finalizer: weakref.finalize[..., Lifecycle] | None = None
        if source is not None:
            self._finalizer = weakref.finalize(self, source.give_back_from_any_thread)
            self._finalizer.atexit = False

    def require_here(self) -> Found:
        """The rows.

        Raises:
            CaptureNotFetched: they have not come yet.
            CaptureReleased: they are gone.
        """
        self.require_wanted()
        if self.found is None:
            raise CaptureNotFetched(
                f"{self.name} is not fetched; `{self.idiom.call}handle.fetch()`, or "
                f"`{self.idiom.call}model.fetch_captures_batch(handles)` for many at once"
            )
        return self.found

    def require_wanted(self) -> None:
        """Check that nobody has released them.

        Raises:
            CaptureReleased: somebody has.
        """
        if self.stage in {Stage.LEAVING, Stage.GONE}:
            raise CaptureReleased(f"{self.name} was released; its rows are gone. Fetch and read before releasing")

    def fetch(self) -> None:
        """They are asked for."""
        self._advance(Event.FETCH)

    def arrive(self, delivery: Any) -> None:
        """Check what came against what must be, and take it; what was released meanwhile is dropped.

        Raises:
            CaptureIncomplete, CaptureNotFinite, CaptureReleased: see `Origin.found`; they stay where they are.
        """
        if self.stage is Stage.COMING and self.source is not None:
            self.take(self.source.found(delivery))

    def take(self, found: Found) -> None:
        """Take rows that are right; those released meanwhile are dropped."""
        if self.stage in {Stage.COMING, Stage.RETURNING}:
            self.found = found
            self._advance(Event.ARRIVE)

    async def come_back(self) -> None:
        """Read the rows that are on disk, and take them; what is released meanwhile is dropped.

        Raises:
            CaptureIncomplete: the file does not hold what was written; or what was found wrong with them before.
            CaptureNotFinite: likewise.
            ModelClosed: the model was closed meanwhile.
        """
        if isinstance(self.spilled, CaptureError):
            raise type(self.spilled)(str(self.spilled))
        assert self.spilled is not None
        assert isinstance(self.source, Source)
        self.take(await self.source.engine.read_spilled(self.spilled.read))

    def end_fetch(self) -> None:
        """The fetch is over: what did not come stays where it was, or is freed there if it was released."""
        if self.stage in {Stage.COMING, Stage.RETURNING, Stage.LEAVING}:
            self._advance(Event.FAIL)

    @property
    def again(self) -> Lost | None:
        """What computes the rows again, if they died with their engine."""
        return None if self.source is None else self.source.again

    # On the way to disk, for whoever makes room

    @property
    def movable(self) -> bool:
        """Whether the rows can be moved to disk now: they lie in the worker, and nobody fetches them."""
        return self.stage is Stage.KEPT

    @property
    def wanted(self) -> Wanted:
        """What to ask the workers for."""
        assert isinstance(self.source, Source)
        return self.source.wanted

    def spill(self) -> None:
        """They are to be moved; a fetch waits until they are, or stay."""
        self._advance(Event.SPILL)
        self._rested.clear()

    def write(self, delivery: Any, file: SpillFile, dropped: Callable[[], object]) -> Spilled | CaptureError:
        """Check what came against what must be, and write it; on a thread.

        Returns:
            The rows on disk; or why they are no rows, which is all that is left of them to say.

        Raises:
            CaptureMemoryFull, ModelClosed, OSError: see `SpillFile.put`; they stay in the worker.
        """
        assert self.source is not None
        try:
            found = self.source.found(delivery)
        except (CaptureIncomplete, CaptureNotFinite) as error:
            return error
        return Spilled.write(found, file, dropped)

    def stored(self, spilled: Spilled | CaptureError) -> None:
        """They are on disk; what was released meanwhile is dropped."""
        if self.stage is Stage.SPILLING:
            self.spilled = spilled
            self._advance(Event.STORE)
        self.end_spill()

    def end_spill(self) -> None:
        """The move is over: what did not get there stays with the worker, or is freed there if it was released."""
        if not self._rested.is_set():
            self._rested.set()
            if self.stage in {Stage.SPILLING, Stage.LEAVING}:
                self._advance(Event.FAIL)

    async def rested(self) -> None:
        """Wait until they are not on their way to disk."""
        while self.stage is Stage.SPILLING:
            await self._rested.wait()

    def release(self) -> None:
        """They are no longer wanted; a fetch under way still reads them, and frees them when it is done."""
        self.found = None
        self._advance(Event.RELEASE)

    def _advance(self, event: Event) -> None:
        self.stage = NEXT[self.stage, event]
        if self.stage in _DROPPED:
            self.spilled = None
        if self.stage in _FREED and self._finalizer is not None and self.source is not None:
            self._finalizer.detach()
            self._finalizer = None
            self.source.give_back()
