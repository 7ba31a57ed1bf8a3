"""Admission: in order, never over the limit, never for ever."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from steercap.core.budget import Budget, Ticket

PAGES = 20


class BudgetMachine(RuleBasedStateMachine):
    """Claims, ends and releases in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = Budget(PAGES)
        self.waiting: list[Ticket] = []
        self.running: list[Ticket] = []
        self.finished: list[Ticket] = []

    def admitted(self, tickets: list[Ticket]) -> None:
        """Admission is in order of arrival."""
        assert tickets == self.waiting[: len(tickets)]
        del self.waiting[: len(tickets)]
        self.running += tickets

    @rule(pages=st.integers(0, PAGES), call=st.integers(0, 2))
    def claim(self, pages: int, call: int) -> None:
        ticket = Ticket(pages, call)
        self.waiting.append(ticket)
        self.admitted(self.budget.claim(ticket))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data) -> None:
        ticket = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        kept = data.draw(st.integers(0, ticket.pages))
        handles, admitted = self.budget.finish(ticket, [kept, ticket.pages - kept])
        self.finished += handles
        self.admitted(admitted)

    @precondition(lambda self: self.finished or self.waiting)
    @rule(data=st.data())
    def release(self, data) -> None:
        pool = data.draw(st.sampled_from([pool for pool in (self.finished, self.waiting) if pool]))
        ticket = pool.pop(data.draw(st.integers(0, len(pool) - 1)))
        self.admitted(self.budget.release(ticket))
        assert self.budget.release(ticket) == []

    @invariant()
    def never_over_the_limit(self) -> None:
        assert self.budget.reserved == sum(ticket.pages for ticket in self.running + self.finished) <= PAGES
        assert self.budget.running == len(self.running)
        assert self.budget.waiting == len(self.waiting)

    @invariant()
    def nobody_waits_while_there_is_room(self) -> None:
        assert not self.waiting or self.waiting[0].pages > self.budget.free

    @invariant()
    def hopeless_is_who_only_its_own_call_could_help(self) -> None:
        head = self.budget.hopeless()
        if head is not None:
            own = sum(ticket.pages for ticket in self.finished if ticket.call == head.call)
            assert not self.running
            assert head is self.waiting[0]
            assert head.pages + own > PAGES


BudgetMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestBudget = BudgetMachine.TestCase
