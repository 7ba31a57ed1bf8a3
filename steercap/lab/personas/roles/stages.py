"""Stages of a run over roles: "generate", "score" and "read".

The model answers every question under each system prompt of each role and of the assistant; answers are scored by how
well they play the role; kept answers are read, and averaged to one row per question and layer: the mean over its
answers of each answer's mean row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from steercap.concurrency.loops import each_of
from steercap.core.protocols import Count, ProgressCallback
from steercap.files.base import write_tensors
from steercap.files.tables import TableWriter, read_table, write_table
from steercap.lab.measures.scores import make_scorer
from steercap.lab.personas.capture import VERSION, answer_rows
from steercap.lab.personas.generate import AnswerGroup, answer_groups
from steercap.lab.personas.records import RoleResponse, Score
from steercap.lab.personas.roles.folder import RoleFolder
from steercap.lab.personas.roles.role import ASSISTANT, trait_of
from steercap.lab.personas.roles.rows import RoleRowsHeader, load_part, rows_path
from steercap.lab.personas.roles.settings import RoleSettings, requests_of
from steercap.lab.personas.score import scored

if TYPE_CHECKING:
    from steercap.model import SteerModel


async def answer(
    model: SteerModel, settings: RoleSettings, roles: Sequence[RoleFolder], report: ProgressCallback | None
) -> None:
    """Generate the missing answers of roles, and write a role's `answers.parquet` once all its answers exist.

    Raises:
        The errors of `SteerModel.run`.
    """
    todo = [role for role in roles if not role.is_done("generate")]
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
    """Write all answers of a role as one table, and mark its stage "generate" as done."""
    write_table(role.path / "answers.parquet", responses)
    role.finish("generate")


async def score(
    settings: RoleSettings, role: RoleFolder, responses: Sequence[RoleResponse]
) -> list[float | None] | None:
    """Score a role's answers and write `scores.parquet`, or load the scores that an earlier run wrote.

    Returns:
        A score of 0 to 100 for each answer, None if it could not be scored; None in place of the list if there is no
        scorer or the role is the assistant.

    Raises:
        The errors of the scorer.
    """
    if settings.scorer is None or role.name == ASSISTANT:
        return None
    path = role.path / "scores.parquet"
    if role.is_done("score"):
        return [one.score for one in read_table(path, Score)]
    role.begin("score")
    parts = TableWriter(role.parts("score"), Score)
    found = {one.id: one for one in parts.read()}
    scorer = make_scorer(settings.scorer, settings.scorer_args)
    trait = trait_of(settings.roles.role(role.name), settings.roles, settings.scorer)
    count = Count("score", len(responses), len(found), None)
    found |= await scored(scorer, trait, responses, parts, known=found, count=count)
    scores = [found[response.id] for response in responses]
    write_table(path, scores)
    role.finish("score")
    return [one.score for one in scores]


def kept_of(
    settings: RoleSettings, responses: Sequence[RoleResponse], scores: Sequence[float | None] | None
) -> list[RoleResponse]:
    """Return the answers of a role that have a token and, unless `scores` is None, at least the threshold's score."""
    if scores is None:
        return [response for response in responses if response.token_ids]
    return [
        response
        for response, value in zip(responses, scores, strict=True)
        if response.token_ids and value is not None and value >= settings.threshold
    ]


async def read(
    model: SteerModel,
    settings: RoleSettings,
    role: RoleFolder,
    kept: Sequence[RoleResponse],
    *,
    room: Mapping[str, int],
    count: Count,
) -> None:
    """Read a role's kept answers, each of which fits the context, with the model, and write `rows.safetensors`.

    Each answer is averaged to one row per layer in the workers, and the answers to a question to one row here, before
    the next are read, so that memory does not grow with their number. `room` is as for `answer_rows`.

    Raises:
        The errors of `SteerModel.read`.
    """
    parts = [(_part(role, batch, room), batch) for batch in _batches(settings, kept)]

    async def one(part: tuple[Path, Sequence[RoleResponse]]) -> None:
        path, batch = part
        if not path.exists():
            write_tensors(path, *await _means(model, settings, batch, room))
        count.add(len(batch))

    at_once = 1 if settings.read_together == 1 else 2  # one by one, nothing else may be in the batch
    await each_of(parts, one, at_once)
    found = [load_part(path) for path, _ in parts]
    headers = [header for header, _, _ in found]
    whole = RoleRowsHeader(
        VERSION,
        role.name,
        headers[0].layers,
        tuple(question for header in headers for question in header.questions),
        tuple(number for header in headers for number in header.counts),
        tuple(digest for header in headers for digest in header.prompts),
    )
    tensors = {
        "means": torch.cat([means for _, means, _ in found], 1),
        "norms": torch.cat([norms for _, _, norms in found], 1),
    }
    write_tensors(rows_path(role), whole, tensors)


def _part(role: RoleFolder, batch: Sequence[RoleResponse], room: Mapping[str, int]) -> Path:
    """Return the path of a batch's rows, which names what is read, since that depends on the model's context too."""
    read = "".join(f"{one.id}:{room[one.id]};" for one in batch)
    return role.parts("read") / f"{batch[0].question:06}-{hashlib.sha256(read.encode()).hexdigest()[:16]}.safetensors"


def _batches(settings: RoleSettings, kept: Sequence[RoleResponse]) -> Iterator[list[RoleResponse]]:
    """Yield batches of answers to whole questions, `read_together` or more but in the last; the same in every run."""
    ordered = sorted(kept, key=lambda response: response.question)  # stable: by prompt and sample within a question
    batch: list[RoleResponse] = []
    for _, answers in groupby(ordered, key=lambda response: response.question):
        batch += answers
        if len(batch) >= settings.read_together:
            yield batch
            batch = []
    if batch:
        yield batch


async def _means(
    model: SteerModel, settings: RoleSettings, batch: Sequence[RoleResponse], room: Mapping[str, int]
) -> tuple[RoleRowsHeader, dict[str, torch.Tensor]]:
    """Read the answers to some questions; return a header, and the tensors `means` and `norms`, by question."""
    pieces = [batch[at : at + settings.read_together] for at in range(0, len(batch), settings.read_together)]
    read = [await answer_rows(model, settings, piece, room) for piece in pieces]
    rows = torch.cat([one.values for one in read]).double()
    prompts = [digest for one in read for digest in one.prompts]
    places: dict[int, list[int]] = {}
    for place, one in enumerate(batch):
        places.setdefault(one.question, []).append(place)
    header = RoleRowsHeader(
        VERSION,
        batch[0].role,
        read[0].layers,
        tuple(places),
        tuple(map(len, places.values())),
        tuple(_digest(prompts, mine) for mine in places.values()),
    )
    means = torch.stack([rows[mine].mean(0) for mine in places.values()], 1)
    norms = torch.stack([rows[mine].norm(dim=-1).mean(0) for mine in places.values()], 1)
    return header, {"means": means.float().contiguous(), "norms": norms.float().contiguous()}


def _digest(prompts: Sequence[bytes], places: Sequence[int]) -> str:
    return hashlib.sha256(b"".join(prompts[place] for place in places)).hexdigest()
