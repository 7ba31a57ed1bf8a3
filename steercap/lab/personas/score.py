"""Stage "score": scores of how strongly each answer shows its trait, or plays its role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from steercap.files.tables import PART_RECORDS, TableWriter, read_table, write_table
from steercap.lab.measures.scores import Scored, Scorer, make_scorer
from steercap.lab.measures.trait import Trait
from steercap.lab.personas.folder import StageFolder
from steercap.lab.personas.progress import Count, Report
from steercap.lab.personas.records import Response, RoleResponse, Score
from steercap.lab.personas.settings import PersonaSettings


async def score(
    settings: PersonaSettings, folder: StageFolder, responses: Sequence[Response], report: Report | None
) -> list[Score]:
    """Return the scores of all answers, in order; None for those without a token or a word.

    Raises:
        The errors of the scorer.
    """
    path = folder.path / "scores.parquet"
    if not folder.is_done("score"):
        folder.begin("score")
    kept, ready = folder.traits_of("score"), folder.is_done("score")
    before = [score for score in read_table(path, Score) if score.trait in kept] if kept else []
    found = {score.id: score for score in before}
    todo = [trait for trait in settings.resolved() if trait.name not in kept]
    for trait in todo:
        found |= {score.id: score for score in TableWriter(folder.parts("score", trait.name), Score).read()}
    count = Count("score", len(responses), sum(response.id in found for response in responses), report)
    for trait in todo:
        mine = [response for response in responses if response.trait == trait.name]
        parts = TableWriter(folder.parts("score", trait.name), Score)
        found |= await scored(
            make_scorer(settings.scorer, settings.scorer_args), trait, mine, parts, known=found, count=count
        )
    scores = [found[response.id] for response in responses]
    if not ready:
        write_table(path, [*scores, *(one for one in before if one.trait not in folder.traits)])
        folder.finish("score")
    return scores


async def scored(
    scorer: Scorer,
    trait: Trait,
    responses: Sequence[Response | RoleResponse],
    parts: TableWriter[Score],
    *,
    known: Mapping[str, Score],
    count: Count,
) -> dict[str, Score]:
    """Score the answers of one trait or role that have no score yet, and write the scores to parts.

    Args:
        scorer: scorer of the answers.
        trait: trait to look for.
        responses: all answers, in order.
        parts: writer of the scores.
        known: scores that exist, by id.
        count: counter of answers.

    Raises:
        The errors of the scorer.
    """
    found = dict[str, Score]()
    # In chunks that do not depend on what was scored before: a batch decides rounding.
    for first in range(0, len(responses), PART_RECORDS):
        chunk = responses[first : first + PART_RECORDS]
        if all(response.id in known for response in chunk):
            continue
        asked = [response for response in chunk if response.token_ids and response.answer.strip()]
        told = await scorer.score(trait, [Scored(response.question_text, response.answer) for response in asked])
        said = {response.id: value for response, value in zip(asked, told, strict=True)}
        for response in chunk:
            found[response.id] = Score(response.id, said.get(response.id))
            parts.add(found[response.id])
        parts.flush()
        count.add(sum(response.id not in known for response in chunk))
    return found
