"""Stage "generate": every role and the assistant answer every question under each of their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from steercap.files.tables import TableWriter, read_table, write_table
from steercap.lab.personas.progress import Count, Report
from steercap.lab.personas.records import RoleResponse
from steercap.lab.personas.roles.folder import RoleFolder
from steercap.lab.personas.roles.records import requests_of
from steercap.lab.personas.roles.settings import RoleSettings
from steercap.lab.personas.stages.generate import AnswerGroup, answer_groups

if TYPE_CHECKING:
    from steercap.model import SteerModel


async def answer(model: SteerModel, settings: RoleSettings, roles: Sequence[RoleFolder], report: Report | None) -> None:
    """Generate answers, and write `answers.parquet` of each role once all of its answers are there.

    Raises:
        The errors of `SteerModel.chat`.
    """
    todo = [role for role in roles if not role.holds("generate")]
    total = sum(settings.answers_of(role.name) for role in roles)
    count = Count("generate", total, total - sum(settings.answers_of(role.name) for role in todo), report)
    await answer_groups(model, settings, (_group(settings, role) for role in todo), RoleResponse, count)


def answers_of(role: RoleFolder) -> list[RoleResponse]:
    """Read the answers of a finished role, in order.

    Raises:
        InvalidFile: the answers cannot be read.
    """
    return read_table(role.path / "answers.parquet", RoleResponse)


def _group(settings: RoleSettings, role: RoleFolder) -> AnswerGroup[RoleResponse]:
    role.begin("generate")
    parts = TableWriter(role.parts("generate"), RoleResponse)
    return AnswerGroup(list(requests_of(settings, role.name)), parts, partial(_write, role))


def _write(role: RoleFolder, responses: Sequence[RoleResponse]) -> None:
    """Write all answers of a role as one table."""
    write_table(role.path / "answers.parquet", responses)
    role.finish("generate")
