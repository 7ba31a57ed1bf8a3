"""Stage "score": scores of how well each answer plays its role, and the selection of kept answers."""

from __future__ import annotations

from collections.abc import Sequence

from steercap.files.tables import TableWriter, read_table, write_table
from steercap.lab.measures.scores import make_scorer
from steercap.lab.personas.progress import Count
from steercap.lab.personas.records import RoleResponse, Score
from steercap.lab.personas.roles.folder import RoleFolder
from steercap.lab.personas.roles.role import ASSISTANT, trait_of
from steercap.lab.personas.roles.settings import RoleSettings
from steercap.lab.personas.stages.score import scored


async def score(
    settings: RoleSettings, role: RoleFolder, responses: Sequence[RoleResponse]
) -> list[float | None] | None:
    """Return the scores of a role's answers, in order; None if nothing is scored, as for the assistant.

    Raises:
        The errors of the scorer.
    """
    if settings.scorer is None or role.name == ASSISTANT:
        return None
    path = role.path / "scores.parquet"
    if role.holds("score"):
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
    """Select the answers to use: those that have a token and a sufficient score.

    Args:
        settings: settings of the run.
        responses: answers of one role.
        scores: their scores, in the same order; None to keep all.
    """
    if scores is None:
        return [response for response in responses if response.token_ids]
    return [
        response
        for response, value in zip(responses, scores, strict=True)
        if response.token_ids and value is not None and value >= settings.threshold
    ]
