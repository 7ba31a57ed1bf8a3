"""Admission: in order, never over the limit, never for ever."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from steercap.config import Settings
from steercap.core.budget import Budget, Reservation
from steercap.core.schema import RAW
from steercap.engine.admission import Admission
from steercap.errors import CaptureMemoryFull

PAGES, ENGINES, REDUCTIONS = 20, 3, 4


class BudgetMachine(RuleBasedStateMachine):
    """Claims, ends and releases in any order, on several engines."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = Budget(PAGES, ENGINES, REDUCTIONS)
        self.waiting: list[Reservation] = []
        self.running: list[Reservation] = []
        self.finished: list[Reservation] = []
        self.demanded: dict[Reservation, int | None] = {}

    def admitted(self, reservations: list[Reservation]) -> None:
        """Admission is in order of arrival, where it was demanded."""
        assert reservations == self.waiting[: len(reservations)]
        assert all(
            reservation.engine in {self.demanded[reservation]} - {None} or self.demanded[reservation] is None
            for reservation in reservations
        )
        del self.waiting[: len(reservations)]
        self.running += reservations

    def claimed(self, engine: int) -> int:
        """Pages of this engine that are held."""
        return sum(reservation.pages for reservation in self.running + self.finished if reservation.engine == engine)

    def reducing(self, engine: int) -> int:
        """Reductions that run on this engine."""
        return sum(reservation.reductions for reservation in self.running if reservation.engine == engine)

    @rule(
        pages=st.integers(0, PAGES),
        call=st.integers(0, 2),
        engine=st.none() | st.integers(0, ENGINES - 1),
        reductions=st.integers(0, REDUCTIONS),
    )
    def claim(self, pages: int, call: int, engine: int | None, reductions: int) -> None:
        reservation = Reservation(pages, call, engine=engine, reductions=reductions)
        self.demanded[reservation] = engine
        self.waiting.append(reservation)
        self.admitted(self.budget.claim(reservation))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data) -> None:
        reservation = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        kept = data.draw(st.integers(0, reservation.pages))
        handles, admitted = self.budget.finish(reservation, [kept, reservation.pages - kept])
        assert {handle.engine for handle in handles} == {reservation.engine}
        self.finished += handles
        self.admitted(admitted)

    @precondition(lambda self: self.finished or self.waiting)
    @rule(data=st.data())
    def release(self, data) -> None:
        pool = data.draw(st.sampled_from([pool for pool in (self.finished, self.waiting) if pool]))
        reservation = pool.pop(data.draw(st.integers(0, len(pool) - 1)))
        self.admitted(self.budget.release(reservation))
        assert self.budget.release(reservation) == []

    @invariant()
    def never_over_the_limit(self) -> None:
        assert all(self.claimed(engine) + self.budget.free(engine) == PAGES for engine in range(ENGINES))
        assert all(0 <= self.budget.free(engine) <= self.budget.free() for engine in range(ENGINES))
        assert self.budget.reserved == max(map(self.claimed, range(ENGINES)))
        assert all(self.reducing(engine) <= REDUCTIONS for engine in range(ENGINES))
        assert self.budget.reducing == max(map(self.reducing, range(ENGINES)))
        assert self.budget.running == len(self.running)
        assert self.budget.waiting == len(self.waiting)

    @invariant()
    def nobody_waits_while_there_is_room(self) -> None:
        if self.waiting:
            head = self.waiting[0]
            for engine in range(ENGINES) if head.engine is None else [head.engine]:
                full = head.pages + self.claimed(engine) > PAGES
                assert full or head.reductions + self.reducing(engine) > REDUCTIONS

    @invariant()
    def hopeless_is_who_only_calls_that_wait_could_help(self) -> None:
        head = self.budget.hopeless()
        if head is not None:
            assert not self.running
            assert head is self.waiting[0]
            calls = {reservation.call for reservation in self.waiting}
            for engine in range(ENGINES) if head.engine is None else [head.engine]:
                held = [
                    reservation
                    for reservation in self.finished
                    if reservation.engine == engine and reservation.call in calls
                ]
                assert head.pages + sum(reservation.pages for reservation in held) > PAGES


BudgetMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestBudget = BudgetMachine.TestCase


def test_requests_spread_over_engines() -> None:
    """N arenas hold N times one: claims go where fewest run, and wait only when no engine has room."""
    budget = Budget(PAGES, ENGINES)
    reservations = [Reservation(PAGES // 2, call=0) for _ in range(2 * ENGINES + 1)]
    for reservation in reservations:
        budget.claim(reservation)
    assert [reservation.engine for reservation in reservations] == [0, 1, 2, 0, 1, 2, None]
    budget.release(reservations[4])
    assert reservations[-1].engine == 1


def test_a_finished_request_pays_for_what_ran_past_its_end() -> None:
    """The end is known to vLLM's scheduler a pass late: the row of that pass takes a page too, up to the request's limit."""
    from types import SimpleNamespace

    from steercap.core.plan import CapturePlan, Plan
    from steercap.core.tokens import Range
    from steercap.requests.job import _pages_kept

    def kept(generated: int, overshoot: int, stop: list[str] | None = None) -> int:
        engine = SimpleNamespace(vllm=SimpleNamespace(overshoot=overshoot), pages_needed=lambda _plan, rows: rows)
        job = SimpleNamespace(engine=engine, stops=bool(stop))
        plan = Plan("r", 10, 20, capture=CapturePlan((0,), (Range(0, None),), None, RAW))
        return _pages_kept(job, plan, generated)

    assert [kept(3, 0), kept(3, 1), kept(3, 4), kept(11, 4)] == [12, 13, 16, 20]
    assert kept(3, 1, stop=["x"]) == 20


async def test_an_error_instead_of_waiting_is_for_memory_alone() -> None:
    """With overflow="error", a claim that only a reduction is missing for waits for it; one without room fails."""
    admission = Admission(PAGES, 1, Settings(overflow="error"), reductions=1)
    first = await admission.claim(1, object(), reductions=1)
    second = asyncio.create_task(admission.claim(1, object(), reductions=1))
    await asyncio.sleep(0)
    with pytest.raises(CaptureMemoryFull):
        await admission.claim(PAGES - 1, object())
    assert not second.done()
    admission.finish(first, [1])
    assert (await second).phase == "running"


async def soon(claimed: asyncio.Future[Reservation]) -> Reservation:
    """Return a claim's reservation, long before the time-out of the arena, an hour."""
    async with asyncio.timeout(10):
        return await claimed


def nothing_left(admission: Admission) -> bool:
    budget = admission.budget
    return (budget.reserved, budget.waiting, budget.running) == (0, 0, 0)


async def test_a_call_that_can_end_goes_before_a_head_that_waits_for_it() -> None:
    """Its last request fits, and the head once its handles are released: nobody is refused."""
    admission = Admission(10, 1, Settings(overflow_timeout=3600))
    holder, other = object(), object()
    (handle,) = admission.finish(await admission.claim(6, holder), [6])
    head, last = (asyncio.ensure_future(admission.claim(pages, call)) for pages, call in ((5, other), (1, holder)))
    (second,) = admission.finish(await soon(last), [1])
    assert not head.done()
    admission.release(handle)
    admission.release(await soon(head))
    admission.release(second)
    assert nothing_left(admission)


async def test_calls_that_would_starve_each_other_fail_one_by_one() -> None:
    """Each fits alone; the first gives back what it holds, and the other goes on at once."""
    admission = Admission(10, 1, Settings(overflow_timeout=3600))
    first, second = object(), object()

    async def held(call: object) -> Reservation:
        (handle,) = admission.finish(await admission.claim(4, call), [4])
        return handle

    handle, other = await held(first), await held(second)
    asked = ((6, first), (3, first), (6, second))
    *refused, waiting = [asyncio.ensure_future(admission.claim(pages, call)) for pages, call in asked]
    for one in refused:
        with pytest.raises(CaptureMemoryFull, match="handles of this call and others that wait"):
            await soon(one)
    assert not waiting.done()
    admission.release(handle)
    admission.release(await soon(waiting))
    admission.release(other)
    assert nothing_left(admission)
