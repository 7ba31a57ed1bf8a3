"""Score: how strongly each answer shows its trait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from steercap.persona.folder import RunFolder
from steercap.persona.progress import Count, Report
from steercap.persona.records import Response, Score
from steercap.persona.scores import Scored, make_scorer
from steercap.persona.settings import PersonaSettings
from steercap.tables import PART_RECORDS, Parts, read_table, write_table


async def score(
    settings: PersonaSettings, folder: RunFolder, responses: Sequence[Response], report: Report | None
) -> list[Score]:
    """The scores of all answers, in their order; None for those without a token or a word.

    Raises:
        The errors of the scorer.
    """
    path = folder.path / "scores.parquet"
    if folder.is_done("score"):
        Count("score", len(responses), len(responses), report)
        return read_table(path, Score)
    folder.begin("score")
    known, scorer = (
        {trait.name: trait for trait in settings.resolved()},
        make_scorer(settings.scorer, settings.scorer_args),
    )
    with Parts(folder.parts("score"), Score) as parts:
        found = {score.id: score for score in parts.read()}
        count = Count("score", len(responses), len(found), report)
        for chunk in _chunks(responses):
            if all(response.id in found for response in chunk):
                continue
            asked = [response for response in chunk if response.token_ids and response.answer.strip()]
            told = await scorer.score(
                known[chunk[0].trait], [Scored(response.question_text, response.answer) for response in asked]
            )
            said = {response.id: value for response, value in zip(asked, told, strict=True)}
            for response in chunk:
                found[response.id] = Score(response.id, said.get(response.id))
                parts.add(found[response.id])
            parts.flush()
            count.add(len(chunk))
    scores = [found[response.id] for response in responses]
    write_table(path, scores)
    folder.finish("score")
    return scores


def _chunks(responses: Sequence[Response]) -> Iterator[list[Response]]:
    """Answers of one trait, in an order that does not depend on what was scored before: a batch decides rounding."""
    for name in dict.fromkeys(response.trait for response in responses):
        mine = [response for response in responses if response.trait == name]
        for first in range(0, len(mine), PART_RECORDS):
            yield mine[first : first + PART_RECORDS]
