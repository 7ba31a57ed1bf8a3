"""Stages "score" and "filter": scores of how strongly each answer shows its trait or role, and selection by scores."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from steercap.core.protocols import Count, ProgressCallback
from steercap.errors import TooFewKept
from steercap.files.tables import PART_RECORDS, TableWriter, read_table, write_table
from steercap.lab.measures.scores import Scored, Scorer, Trait, make_scorer
from steercap.lab.personas.folder import StageFolder
from steercap.lab.personas.records import SIGNS, Kept, Response, RoleResponse, Score
from steercap.lab.personas.settings import PersonaSettings


async def score(
    settings: PersonaSettings, folder: StageFolder, responses: Sequence[Response], report: ProgressCallback | None
) -> list[Score]:
    """Score all answers that are not scored yet, write `scores.parquet`, and return all scores in the order of answers.

    An answer without a token or without text has the score None.

    Raises:
        The errors of the scorer.
    """
    path = folder.path / "scores.parquet"
    if not folder.is_done("score"):
        folder.begin("score")
    kept, ready = folder.traits_of("score"), folder.is_done("score")
    before = [item for item in read_table(path, Score) if item.trait in kept] if kept else []
    found = {item.id: item for item in before}
    todo = [trait for trait in settings.resolved() if trait.name not in kept]
    for trait in todo:
        found |= {item.id: item for item in TableWriter(folder.parts("score", trait.name), Score).read()}
    count = Count("score", len(responses), sum(response.id in found for response in responses), report)
    for trait in todo:
        mine = [response for response in responses if response.trait == trait.name]
        parts = TableWriter(folder.parts("score", trait.name), Score)
        found |= await scored(
            make_scorer(settings.scorer, settings.scorer_args), trait, mine, parts, known=found, count=count
        )
    scores = [found[response.id] for response in responses]
    if not ready:
        write_table(path, [*scores, *(item for item in before if item.trait not in folder.traits)])
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
    """Score the answers of one trait or role, except chunks with all ids in `known`; return the new scores by id.

    Scores are written to `parts`, and counted by `count`.

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


def keep(
    settings: PersonaSettings,
    responses: Sequence[Response],
    scores: Sequence[Score],
    room: Mapping[str, int] | None = None,
) -> tuple[list[Kept], dict[str, str]]:
    """Select the answers to use: positive ones from `threshold_high` up, negative ones up to `threshold_low`.

    Source: Chen et al., Persona Vectors, who keep pairs (`paired`), and of these the coherent ones. Scores are in the
    order of the answers. `room` is the number of readable tokens of each answer, by id, see `room_of`: answers with 0
    are dropped. None is no limit.

    Returns:
        The kept answers of traits with enough of them; and the reasons why other traits are left out, by name.

    Raises:
        TooFewKept: every trait has fewer than `min_kept` of a sign, or fewer than two questions with both signs.
    """
    said = {item.id: item.score for item in scores}
    shown = {response.id for response in responses if _shown(settings, response, said[response.id])}
    full = {response.id for response in responses if room is not None and room[response.id] < 1} & shown
    shown -= full
    if settings.paired:
        shown = {response.id for response in responses if {response.id, response.counterpart} <= shown}
    kept = [
        Kept(response.id, response.trait, response.sign, response.question, value)
        for response in responses
        if response.id in shown and (value := said[response.id]) is not None
    ]
    names = [trait.name for trait in settings.resolved()]
    told = {name: _too_few(settings, name, responses, scores, kept=kept, full=full) for name in names}
    left_out = {name: why for name, why in told.items() if why}
    if len(left_out) == len(names):
        raise TooFewKept("; ".join(f"{name}: {why}" for name, why in left_out.items()))
    return [item for item in kept if item.trait not in left_out], left_out


def _shown(settings: PersonaSettings, response: Response, value: float | None) -> bool:
    if value is None or not response.token_ids:
        return False
    return value >= settings.threshold_high if response.sign == "positive" else value <= settings.threshold_low


def _too_few(
    settings: PersonaSettings,
    trait: str,
    responses: Sequence[Response],
    scores: Sequence[Score],
    *,
    kept: Sequence[Kept],
    full: Collection[str],
) -> str:
    """Return the reason why a trait cannot have a vector, "" if it can."""
    mine = {sign: [one for one in kept if (one.trait, one.sign) == (trait, sign)] for sign in SIGNS}
    asked = {sign: sum((one.trait, one.sign) == (trait, sign) for one in responses) for sign in SIGNS}
    silent = sum(one.score is None and one.trait == trait for one in scores)
    told = ", ".join(f"{len(mine[sign])} of {asked[sign]} {sign}" for sign in SIGNS)
    if long := sum(response.trait == trait and response.id in full for response in responses):
        told += f" (without {long} whose prompt leaves the context no room to read them; raise max_model_len)"
    bounds = (
        f"positive ones score {settings.threshold_high:g} or more, negative ones {settings.threshold_low:g} or less"
    )
    if min(map(len, mine.values())) < settings.min_kept:
        return (
            f"kept {told} answers, {silent} had no score; {settings.min_kept} of each are needed, "
            f"where {bounds}; ask more (samples, n_questions), move the thresholds, lower min_kept, or take a model "
            "that shows the trait"
        )
    both = {one.question for one in mine["positive"]} & {one.question for one in mine["negative"]}
    if len(both) < 2:
        return f"kept {told} answers, but only {len(both)} questions have both kinds; two are needed to hold one out"
    return ""
