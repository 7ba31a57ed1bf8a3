"""Stage "filter": selection of the answers that show what their prompt asks for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from steercap.errors import TooFewKept
from steercap.lab.personas.records import SIGNS, Kept, Response, Score
from steercap.lab.personas.settings import PersonaSettings


def keep(
    settings: PersonaSettings,
    responses: Sequence[Response],
    scores: Sequence[Score],
    room: Mapping[str, int] | None = None,
) -> tuple[list[Kept], dict[str, str]]:
    """Select the answers to use: positive ones from `threshold_high` up, negative ones up to `threshold_low`.

    Source: Chen et al., Persona Vectors, who keep pairs (`paired`), and of these the coherent ones.

    Args:
        settings: settings of the run.
        responses, scores: answers to all requests and their scores, in the same order.
        room: number of tokens of each answer that can be read, by id; answers without room are not kept. None for no
            limit.

    Returns:
        The kept answers of traits with enough of them; and the reasons for the others, by name.

    Raises:
        TooFewKept: every trait has fewer than `min_kept` of a kind, or fewer than two questions with both kinds.
    """
    said = {score.id: score.score for score in scores}
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
    told = {name: _lack(settings, name, responses, scores, kept=kept, full=full) for name in names}
    left_out = {name: why for name, why in told.items() if why}
    if len(left_out) == len(names):
        raise TooFewKept("; ".join(f"{name}: {why}" for name, why in left_out.items()))
    return [one for one in kept if one.trait not in left_out], left_out


def _shown(settings: PersonaSettings, response: Response, score: float | None) -> bool:
    if score is None or not response.token_ids:
        return False
    return score >= settings.threshold_high if response.sign == "positive" else score <= settings.threshold_low


def _lack(
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
    silent = sum(score.score is None and score.trait == trait for score in scores)
    told = ", ".join(f"{len(mine[sign])} of {asked[sign]} {sign}" for sign in SIGNS)
    if long := sum(response.trait == trait and response.id in full for response in responses):
        told += f" (without {long} whose prompt leaves the context no room to read them; raise max_model_len)"
    bounds = (
        f"positive ones score {settings.threshold_high:g} or more, negative ones {settings.threshold_low:g} or less"
    )
    if min(map(len, mine.values())) < settings.min_kept:
        return (
            f"kept {told} answers, {silent} had no score; {settings.min_kept} of each are needed, "
            f"where {bounds}; ask more (n_samples, n_questions), move the thresholds, lower min_kept, or take a model "
            "that shows the trait"
        )
    both = {one.question for one in mine["positive"]} & {one.question for one in mine["negative"]}
    if len(both) < 2:
        return f"kept {told} answers, but both kinds of {len(both)} questions alone; two are needed to hold one out"
    return ""
