"""Stage "generate": every role and the assistant answer every question under each of their prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from steercap.concurrency.bounded import each_of
from steercap.files.tables import TableWriter, read_table, write_table
from steercap.lab.personas.progress import Count, Report
from steercap.lab.personas.roles.folder import RoleFolder
from steercap.lab.personas.roles.records import RoleRequest, RoleResponse, requests_of
from steercap.lab.personas.roles.settings import RoleSettings
from steercap.lab.personas.stages.generate import ends_in, messages_of, sampled, sampling_of

if TYPE_CHECKING:
    from steercap.model import SteerModel


async def answer(model: SteerModel, settings: RoleSettings, roles: Sequence[RoleFolder], report: Report | None) -> None:
    """Generate answers, and write `answers.parquet` of each role once all of its answers are there.

    Requests of all roles run concurrently; only answers of unfinished roles are in memory.

    Raises:
        The errors of `SteerModel.chat`.
    """
    todo = [role for role in roles if not role.holds("generate")]
    total = sum(settings.answers_of(role.name) for role in roles)
    count = Count("generate", total, total - sum(settings.answers_of(role.name) for role in todo), report)
    if not todo:
        return
    ends, under_way = ends_in(model), dict[str, _UnderWay]()

    def requests() -> Iterator[tuple[_UnderWay, RoleRequest]]:
        for role in todo:
            one = _UnderWay(settings, role)
            count.add(len(one.known))
            if not one.left:  # killed after its last answer
                one.close()
                continue
            under_way[role.name] = one
            yield from ((one, request) for request in one.left)

    async def ask(asked: tuple[_UnderWay, RoleRequest]) -> None:
        one, request = asked
        messages = messages_of(request.system_prompt, request.question_text)
        found = await sampled(model, messages, sampling_of(settings, request.seed), ends)
        response = RoleResponse(
            **msgspec.structs.asdict(request), answer=found.answer, token_ids=found.token_ids, finish=found.finish
        )
        if one.took(response):
            del under_way[one.role.name]
        count.add()

    try:
        await each_of(requests(), ask, settings.max_in_flight)
    finally:
        for one in under_way.values():
            one.parts.flush()


def answers_of(role: RoleFolder) -> list[RoleResponse]:
    """Read the answers of a finished role, in order.

    Raises:
        InvalidFile: the answers cannot be read.
    """
    return read_table(role.path / "answers.parquet", RoleResponse)


class _UnderWay:
    """Role with missing answers."""

    def __init__(self, settings: RoleSettings, role: RoleFolder) -> None:
        role.begin("generate")
        self.role = role
        self.parts = TableWriter(role.parts("generate"), RoleResponse)
        self.known = {response.id for response in self.parts.read()}
        self._order = [request.id for request in requests_of(settings, role.name)]
        self.left = [request for request in requests_of(settings, role.name) if request.id not in self.known]
        self._lacks = len(self.left)

    def took(self, response: RoleResponse) -> bool:
        """Store an answer; return True if it was the last."""
        self.parts.add(response)
        self._lacks -= 1
        if not self._lacks:
            self.close()
        return not self._lacks

    def close(self) -> None:
        """Write all answers as one table."""
        self.parts.flush()
        found = {response.id: response for response in self.parts.read()}
        write_table(self.role.path / "answers.parquet", [found[key] for key in self._order])
        self.role.finish("generate")
