"""Filter: which answers show what they were asked to show."""

from __future__ import annotations

from collections.abc import Sequence

from steercap.errors import TooFewKept
from steercap.persona.records import SIGNS, Kept, Response, Score
from steercap.persona.settings import PersonaSettings


def keep(settings: PersonaSettings, responses: Sequence[Response], scores: Sequence[Score]) -> list[Kept]:
    """The answers that are used: positive ones from `threshold_high` up, negative ones up to `threshold_low`.

    Source: Chen et al., Persona Vectors, who keep pairs (`paired`), and of these the coherent ones.

    Args:
        settings: of the run.
        responses, scores: of all requests, in one order.

    Raises:
        TooFewKept: a trait has fewer than `min_kept` of a kind, or fewer than two questions with both kinds.
    """
    said = {score.id: score.score for score in scores}
    shown = {response.id for response in responses if _shown(settings, response, said[response.id])}
    if settings.paired:
        shown = {response.id for response in responses if {response.id, response.counterpart} <= shown}
    kept = [
        Kept(response.id, response.trait, response.sign, response.question, value)
        for response in responses
        if response.id in shown and (value := said[response.id]) is not None
    ]
    for trait in settings.resolved():
        _check(settings, trait.name, responses, scores, kept)
    return kept


def _shown(settings: PersonaSettings, response: Response, score: float | None) -> bool:
    if score is None or not response.token_ids:
        return False
    return score >= settings.threshold_high if response.sign == "positive" else score <= settings.threshold_low


def _check(
    settings: PersonaSettings, trait: str, responses: Sequence[Response], scores: Sequence[Score], kept: Sequence[Kept]
) -> None:
    mine = {sign: [one for one in kept if (one.trait, one.sign) == (trait, sign)] for sign in SIGNS}
    asked = {sign: sum((one.trait, one.sign) == (trait, sign) for one in responses) for sign in SIGNS}
    silent = sum(score.score is None and score.id.startswith(f"{trait}/") for score in scores)
    told = ", ".join(f"{len(mine[sign])} of {asked[sign]} {sign}" for sign in SIGNS)
    bounds = (
        f"positive ones score {settings.threshold_high:g} or more, negative ones {settings.threshold_low:g} or less"
    )
    if min(map(len, mine.values())) < settings.min_kept:
        raise TooFewKept(
            f"{trait}: kept {told} answers, {silent} had no score; {settings.min_kept} of each are needed, "
            f"where {bounds}; ask more (n_samples, n_questions), move the thresholds, lower min_kept, or take a model "
            "that shows the trait"
        )
    both = {one.question for one in mine["positive"]} & {one.question for one in mine["negative"]}
    if len(both) < 2:
        raise TooFewKept(
            f"{trait}: kept {told} answers, but both kinds of {len(both)} questions alone; two are needed to hold "
            "one out"
        )
