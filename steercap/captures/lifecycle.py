"""Lifecycle of one handle's rows: in the worker, on disk, in transit, in this process, released.

The table `NEXT` lists all transitions. A fetch holds the lock `turn`, so that a second fetch waits for the first; it
also waits until a move to disk has ended. A release waits for nothing.
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
from steercap.core.messages import Owner, Wanted
from steercap.core.protocols import AWAITED, NonCopyable
from steercap.errors import (
    CaptureError,
    CaptureIncomplete,
    CaptureNotFetched,
    CaptureNotFinite,
    CaptureReleased,
    InvalidRequest,
)

if TYPE_CHECKING:
    from steercap.core.budget import Reservation
    from steercap.core.spec import Point
    from steercap.engine.engine import Engine
    from steercap.files.spill import SpillFile


Value = TypeVar("Value")


class Stage(enum.Enum):
    """Stage of a handle's rows: where they are, or between which places they move."""

    KEPT = "in the worker"
    SPILLING = "on their way to disk"
    SPILLED = "on disk"
    COMING = "on their way"
    RETURNING = "on their way from disk"
    HERE = "here"
    LEAVING = "on their way, and released meanwhile"
    GONE = "released"


class Event(enum.Enum):
    """Event that moves a handle's rows to another stage, by the table `NEXT`."""

    SPILL = "there is no room for others"
    STORE = "they are on disk, and right"
    FETCH = "they are asked for"
    ARRIVE = "they came, and are right"
    FAIL = "they did not get there, or are wrong"
    RELEASE = "nobody wants them"


#: Next stage by stage and event. Other events cannot happen at a stage.
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
#: Stages on whose entry the worker frees the rows.
_FREED: Final = frozenset({Stage.SPILLED, Stage.RETURNING, Stage.HERE, Stage.GONE})
#: Stages on whose entry the rows on disk, if any, are dropped.
_DROPPED: Final = frozenset({Stage.HERE, Stage.GONE})


class Recomputable(Protocol):
    """Interface for recomputing rows that were lost with their engine; see `requests.recompute`."""

    @property
    def place(self) -> object:
        """Identity of the engine or server; see `Origin.place`."""

    def can_recompute(self) -> bool:
        """Return whether the rows are lost and another engine can recompute them."""

    async def with_restart(self, work: Callable[[Engine], Awaitable[Value]]) -> Value:
        """Return the result of `work`, awaited on the live engine."""

    async def rows(self) -> Found:
        """Recompute the rows on the live engine; return them with their receipt."""


class Origin(Protocol):
    """Interface of the origin of rows: the workers of an engine, or a server."""

    @property
    def place(self) -> object:
        """Identity of the engine or server; rows of one place are fetched together."""

    @property
    def recompute(self) -> Recomputable | None:
        """Object that recomputes the rows, if their engine has died and another can recompute them; else None."""

    def require_open(self) -> None:
        """Check that rows can be fetched from the origin.

        Raises:
            ModelClosed, WrongEventLoop: they cannot.
        """

    async def collect(self, origins: Sequence[Any]) -> Sequence[Any]:
        """Fetch the rows of several origins of the same place, unchecked; one delivery each, in order."""

    def checked(self, delivery: Any) -> Found:
        """Check fetched rows of this origin against the expected ones; return the rows with their receipt.

        Raises:
            CaptureIncomplete, CaptureNotFinite, CaptureReleased: rows are missing or wrong, not finite, or released.
        """

    def give_back(self) -> None:
        """Tell the workers or the server to free these rows."""

    def give_back_from_any_thread(self) -> None:
        """Do the same as `give_back`, from any thread at any moment; safe in a finalizer."""


@dataclass(frozen=True)
class Source:
    """Rows in the workers of an engine.

    Args:
        engine: engine whose workers hold the rows.
        owner: key of the rows in the workers.
        reservation: worker memory that is reserved for the rows.
        expected: the expected rows; the last token has no row, since it was never an input.
        recomputable: object that can recompute the rows once the engine has died, or None.
        edited: points that the request's steering edits.
    """

    engine: Engine
    owner: Owner
    reservation: Reservation
    expected: Expected
    recomputable: Recomputable | None = None
    edited: frozenset[Point] = frozenset()

    @property
    def wanted(self) -> Wanted:
        """Message that asks the workers for these rows."""
        return Wanted(self.owner, len(self.expected.tokens) - 1, self.expected.first)

    @property
    def divisible(self) -> bool:
        """True if the rows can be fetched in parts: they are neither reduced nor summarised as attention."""
        capture = self.expected.plan.capture
        return capture is not None and capture.reduce is None and capture.attention is None

    @property
    def encoders(self) -> dict[Point, bytes]:
        """Digest of the SAE encoder that read each point's rows; empty without `sae=`."""
        capture = self.expected.plan.capture
        if capture is None or not capture.saes:
            return {}
        armed = self.engine.vllm.points
        return {armed[index]: digest for index, digest in zip(capture.points, capture.saes, strict=True)}

    def require_own(self, point: Point, behind: Point | None, purpose: str = "lens") -> None:
        """Check that rows of a point are those that the model made its logits of.

        Args:
            point: the point, at the end of the last layer or behind the final norm; or an earlier one.
            behind: the point behind the final norm; None for an earlier `point`, which that norm does not read.
            purpose: name of the call, for the error.

        Raises:
            InvalidRequest: they are from before their edits, or before the norm whose rows were edited.
        """
        capture = self.expected.plan.capture
        if capture is not None and capture.before_edits and point in self.edited:
            raise InvalidRequest(
                f"{purpose}: rows of {point} are from before their edits, so the model predicted from others; capture "
                f"without before_edits=, or read them as they are by handle.lens(layer={point.layer})"
            )
        if behind is not None and point != behind and behind in self.edited:
            raise InvalidRequest(
                f"{purpose}: the request edits {behind}, so the model predicted from other rows than the norm makes of "
                f"{point}; capture {behind.site!r} for handle.lens(), or read these without that edit by "
                f"handle.lens(layer={point.layer})"
            )

    @property
    def place(self) -> object:
        return self.engine if self.recomputable is None else self.recomputable.place

    @property
    def recompute(self) -> Recomputable | None:
        return self.recomputable if self.recomputable is not None and self.recomputable.can_recompute() else None

    async def with_restart(self, work: Callable[[Engine], Awaitable[Value]]) -> Value:
        """Return the result of `work`, awaited on the engine or on the one that replaced it.

        Raises:
            EngineFailure: the engine has died and none replaced it.
            The errors of `work`.
        """
        return await (work(self.engine) if self.recomputable is None else self.recomputable.with_restart(work))

    def require_open(self) -> None:
        if self.recompute is None:
            self.engine.require_open()
        else:
            self.engine.home.require()

    async def collect(self, origins: Sequence[Source]) -> Sequence[Any]:
        return await self.engine.collect([origin.wanted for origin in origins])

    def checked(self, delivery: Any) -> Found:
        rows, receipt = received(self.expected, delivery, self.engine.vllm.points)
        return Found(Captures(rows, self.engine.vllm.num_layers), receipt)

    def give_back(self) -> None:
        give_back = self.engine.give_back if self.engine.home.is_here else self.engine.give_back_from_any_thread
        give_back(self.owner, self.reservation)

    def give_back_from_any_thread(self) -> None:
        self.engine.give_back_from_any_thread(self.owner, self.reservation)


class Lifecycle(NonCopyable, instead="its rows have one owner"):
    """State of one handle's rows, and the transitions between the stages.

    When the object is garbage-collected with its handle, the rows in the worker are freed.

    Args:
        name: name of the request, for messages.
        source: origin of the rows, None for rows that are in this process from the start, as those of a file.
        found: the rows, if they are in this process.

    Attributes:
        stage: current stage of the rows.
        turn: lock held by a fetch.
        spilled: rows on disk, or the error of their check when they were moved there; None otherwise.
        in_chunks: True while a loop over `chunks` reads the rows.
        call_style: call style, with or without `await`, in which messages show code.
    """

    def __init__(self, name: str, *, source: Origin | None = None, found: Found | None = None) -> None:
        self.name = name
        self.source = source
        self.found = found
        self.stage = Stage.KEPT if found is None else Stage.HERE
        self.turn = asyncio.Lock()
        self.spilled: Spilled | CaptureError | None = None
        self.in_chunks = False
        self._rested = asyncio.Event()  # they are not, or no longer, on their way to disk
        self._rested.set()
        self.call_style = AWAITED
        self._finalizer: weakref.finalize[..., Lifecycle] | None = None
        if source is not None:
            self._finalizer = weakref.finalize(self, source.give_back_from_any_thread)
            self._finalizer.atexit = False

    def require_here(self) -> Found:
        """Return the fetched rows with their receipt.

        Raises:
            CaptureNotFetched: the rows are not fetched.
            CaptureReleased: the rows were released.
        """
        self.require_wanted()
        if self.found is None:
            raise CaptureNotFetched(
                f"{self.name} is not fetched; `{self.call_style.call}handle.fetch()`, or "
                f"`{self.call_style.call}model.fetch_captures_batch(handles)` for many at once"
            )
        return self.found

    def require_wanted(self) -> None:
        """Check that the rows were not released.

        Raises:
            CaptureReleased: they were released.
        """
        if self.stage in {Stage.LEAVING, Stage.GONE}:
            raise CaptureReleased(f"{self.name} was released; its rows are gone. Fetch and read before releasing")

    def fetch(self) -> None:
        """Mark the rows as being fetched."""
        self._advance(Event.FETCH)

    def arrive(self, delivery: Any) -> None:
        """Check fetched rows and keep them; drop them if they were released meanwhile.

        Raises:
            CaptureIncomplete, CaptureNotFinite, CaptureReleased: see `Origin.checked`; the rows stay in the worker.
        """
        if self.stage is Stage.COMING and self.source is not None:
            self.take(self.source.checked(delivery))

    def take(self, found: Found) -> None:
        """Keep checked rows; rows released meanwhile are dropped."""
        if self.stage in {Stage.COMING, Stage.RETURNING}:
            self.found = found
            self._advance(Event.ARRIVE)

    async def read_back(self) -> None:
        """Read the rows from disk, and keep them; rows released meanwhile are dropped.

        Raises:
            CaptureIncomplete: the file differs from what was written, or the rows were incomplete when moved to disk.
            CaptureNotFinite: a row was not finite when moved to disk.
            ModelClosed: the model was closed meanwhile.
        """
        if isinstance(self.spilled, CaptureError):
            raise type(self.spilled)(str(self.spilled))
        assert self.spilled is not None
        assert isinstance(self.source, Source)
        self.take(await self.source.engine.read_spilled(self.spilled.read))

    def end_fetch(self) -> None:
        """End a fetch; if it failed, the rows stay in the worker or on disk, and are freed there if released."""
        if self.stage in {Stage.COMING, Stage.RETURNING, Stage.LEAVING}:
            self._advance(Event.FAIL)

    @property
    def recompute(self) -> Recomputable | None:
        """Object that recomputes the rows, if their engine has died and another can recompute them; else None."""
        return None if self.source is None else self.source.recompute

    # On the way to disk, for whoever makes room

    @property
    def movable(self) -> bool:
        """True if the rows can be moved to disk now: they are in the worker, and no fetch is under way."""
        return self.stage is Stage.KEPT

    @property
    def wanted(self) -> Wanted:
        """Message that asks the workers for these rows."""
        assert isinstance(self.source, Source)
        return self.source.wanted

    def spill(self) -> None:
        """Mark the rows as being moved to disk; a fetch waits until the move has ended."""
        self._advance(Event.SPILL)
        self._rested.clear()

    def write(self, delivery: Any, file: SpillFile, dropped: Callable[[], object]) -> Spilled | CaptureError:
        """Check fetched rows against the expected ones and write them to disk; blocking, for a thread.

        Returns:
            The rows on disk; or the error of the check, which is then kept in their place.

        Raises:
            CaptureMemoryFull, ModelClosed, OSError: see `SpillFile.put`; the rows stay in the worker.
        """
        assert self.source is not None
        try:
            found = self.source.checked(delivery)
        except (CaptureIncomplete, CaptureNotFinite) as error:
            return error
        return Spilled.write(found, file, dropped)

    def stored(self, spilled: Spilled | CaptureError) -> None:
        """Mark the rows as on disk; rows released meanwhile are dropped."""
        if self.stage is Stage.SPILLING:
            self.spilled = spilled
            self._advance(Event.STORE)
        self.end_spill()

    def end_spill(self) -> None:
        """End a move to disk: rows that did not reach the disk stay in the worker, or are freed there if released."""
        if not self._rested.is_set():
            self._rested.set()
            if self.stage in {Stage.SPILLING, Stage.LEAVING}:
                self._advance(Event.FAIL)

    async def wait_for_move(self) -> None:
        """Wait until no move of the rows to disk is under way."""
        while self.stage is Stage.SPILLING:
            await self._rested.wait()

    def release(self) -> None:
        """Release the rows; if a fetch is under way, they are freed when it ends. Idempotent."""
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
