"""Effects of steering on answers in a role: the same requests with and without steering; changes with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from steercap.concurrency.loops import each_of
from steercap.core.spec import CaptureSpec
from steercap.errors import InvalidSpec
from steercap.lab.directions import Exchange
from steercap.lab.measures import Answered
from steercap.lab.measures.scores import Scored, make_scorer
from steercap.lab.measures.statistics import Estimate, cluster_means, estimate
from steercap.lab.measures.texts import Perplexity
from steercap.lab.personas.generate import Ends, answer_ids, ends_in, messages_of, sampling_of
from steercap.lab.personas.roles.axis import AssistantAxis
from steercap.lab.personas.roles.axis_capping import CapRecord, layers_in, projections_by_text
from steercap.lab.personas.roles.role import trait_of
from steercap.lab.personas.roles.settings import Case, RoleSettings
from steercap.steering.spec import Steering, SteeringSpec, spec_of

if TYPE_CHECKING:
    import torch

    from steercap.model import SteerModel

#: Name of the baseline condition.
PLAIN: Final = "plain"


async def compare_steering(
    model: SteerModel,
    axis: AssistantAxis,
    steering: Mapping[str, Steering],
    cases: Sequence[Case],
    settings: RoleSettings,
    *,
    layers: Sequence[int] | None = None,
    scorer: str | None = "minilm",
) -> list[CapRecord]:
    """Generate answers to cases without steering and under each steering spec, and measure the answers.

    Args:
        model: an open model.
        axis: axis to project rows on.
        steering: by name of the condition, each as for `SteerModel.generate`, such as `Capping.spec` and a control
            along random vectors.
        cases: cases to answer, with the same seeds under every condition.
        settings: settings of sampling, concurrency and the scorer; its roles include those of the cases.
        layers: layers to project at; None for all layers of the axis.
        scorer: name of the scorer of role play; None for no scores.

    Returns:
        A record for each condition, "plain" (no steering) first, and each case, in order.

    Raises:
        InvalidSpec: steering of another type, no cases, `settings.max_tokens` below 2, or a condition called "plain".
        InvalidSetting: the scorer needs a field that a role lacks.
        The errors of `SteerModel.run`.
    """
    if settings.max_tokens < 2:
        raise InvalidSpec("max_tokens=1, but the row of an answer's only token is never computed; give 2 or more")
    if not cases or PLAIN in steering:
        raise InvalidSpec(
            f"{len(cases)} cases, conditions {list(steering)}; give at least one case, and do not name a condition "
            f"{PLAIN!r}"
        )
    for name in {case.role for case in cases if case.role} if scorer else ():
        trait_of(settings.roles.role(name), settings.roles, scorer or "")
    conditions: dict[str, SteeringSpec | None] = {PLAIN: None} | {
        name: spec_of(one, f"steering[{name!r}]") for name, one in steering.items()
    }
    ends, wanted = ends_in(model), layers_in(axis.vectors, layers)
    asked = [(name, case) for name in conditions for case in cases]

    async def one(pair: tuple[str, Case]) -> _Answer:
        name, case = pair
        capture = CaptureSpec(project=axis.vectors, layers=list(wanted), tokens="generated")
        params = sampling_of(settings, case.seed)
        return await _answer(model, case, params, ends=ends, steering=conditions[name], capture=capture)

    answers = await each_of(asked, one, settings.concurrency)
    told = [(case, answer) for (_, case), answer in zip(asked, answers, strict=True)]
    read = await _read(model, axis, wanted, told)
    scores = await _scores(settings, scorer, told)
    surprise = await Perplexity().measure(model, [_answered(*pair) for pair in told])
    return [
        CapRecord(case, name, answer.text, len(answer.token_ids), answer.projection, again, score, perplexity)
        for (name, case), answer, again, score, perplexity in zip(asked, answers, read, scores, surprise, strict=True)
    ]


class _Answer(NamedTuple):
    """Answer to a case, with its tokens and projections.

    Args:
        text: text of the answer.
        prompt_token_ids, token_ids: token ids of the prompt, and of the answer.
        projection: mean projection on the axis over the answer's rows, by layer; NaN for an answer without rows.
    """

    text: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    projection: dict[int, float]


async def _answer(
    model: SteerModel,
    case: Case,
    params: Mapping[str, Any],
    *,
    ends: Ends,
    steering: SteeringSpec | None,
    capture: CaptureSpec,
) -> _Answer:
    messages = messages_of(case.system_prompt, case.text)
    found = await model.run(messages, dict(params), steering=steering, capture=capture)
    rows = (await found.handle.fetch()).captures
    (sample,) = found.samples
    ids = answer_ids(sample.token_ids, ends, str(sample.finish_reason), sample.stop_reason)
    projection = {point.layer: _mean(rows[point][: len(ids), 0]) for point in rows}
    found.handle.release()
    return _Answer(sample.text, found.handle.prompt_token_ids, ids, projection)


async def _read(
    model: SteerModel, axis: AssistantAxis, layers: Sequence[int], answered: Sequence[tuple[Case, _Answer]]
) -> list[dict[int, float]]:
    """Read the answers without steering; return each one's mean projection by layer, NaN without a token."""
    texts = [Exchange(list(answer.prompt_token_ids), answer.token_ids) for _, answer in answered if answer.token_ids]
    found = iter(await projections_by_text(model, axis, texts, layers=layers) if texts else [])
    nothing = dict.fromkeys(layers, math.nan)
    return [
        {layer: _mean(values) for layer, values in next(found).items()} if answer.token_ids else nothing
        for _, answer in answered
    ]


async def _scores(
    settings: RoleSettings, scorer: str | None, answered: Sequence[tuple[Case, _Answer]]
) -> list[float | None]:
    """Score how well each answer plays its role, 0 to 100; None without a role, text or scorer."""
    found: list[float | None] = [None] * len(answered)
    if scorer is None:
        return found
    scoring = make_scorer(scorer, settings.scorer_args if scorer == settings.scorer else None)
    for name in dict.fromkeys(case.role for case, _ in answered if case.role):
        trait = trait_of(settings.roles.role(name), settings.roles, scorer)
        mine = [place for place, (case, answer) in enumerate(answered) if case.role == name and answer.text.strip()]
        scored = await scoring.score(
            trait, [Scored(answered[place][0].text, answered[place][1].text) for place in mine]
        )
        for place, value in zip(mine, scored, strict=True):
            found[place] = value
    return found


def _answered(case: Case, answer: _Answer) -> Answered:
    return Answered(
        prompt=case.text,
        prompt_token_ids=answer.prompt_token_ids,
        text=answer.text,
        output_token_ids=answer.token_ids,
    )


def _mean(values: torch.Tensor) -> float:
    return float(values.double().mean()) if len(values) else math.nan


#: Minimum score of an answer that counts as in its role.
IN_ROLE: Final = 50.0


class Change(msgspec.Struct, frozen=True):
    """Change in the mean of a measure under a condition.

    Args:
        kind: kind of the cases.
        condition: condition compared with "plain".
        measure: "projection" (after the edits), "projection read", "in role" (share of the answers), "tokens" or
            "perplexity", whose mean is the geometric one and whose change is a factor.
        before, after: means under "plain" and under the condition, over questions of the mean over their answers.
        change: after minus before; for perplexity, after over before.
        low, high: bootstrap 95 % interval of the change, over questions; NaN for a single question. See
            `steercap.lab.measures.statistics.estimate`.
        count: number of pairs of answers.
    """

    kind: str
    condition: str
    measure: str
    before: float
    after: float
    change: float
    low: float
    high: float
    count: int


def changes(records: Sequence[CapRecord], layer: int, *, in_role: float = IN_ROLE, seed: int = 0) -> list[Change]:
    """Compute the change in the mean of every measure for each kind of case and each condition.

    Answers are paired by case, which has one sampling seed. A pair counts if both answers have a value.

    Args:
        records: records, as returned by `compare_steering`.
        layer: layer of the projections.
        in_role: minimum score of an answer that counts as in its role.
        seed: seed of the bootstrap.

    Raises:
        InvalidSpec: there are no projections at the layer, or an answer has no counterpart under "plain".
    """
    if not records:
        raise InvalidSpec("records=[]; give the records of `compare_steering`")
    if any(layer not in record.projection for record in records):
        raise InvalidSpec(f"no projections at layer {layer}; there are those of {sorted(records[0].projection)}")
    plain = {record.case: record for record in records if record.condition == PLAIN}
    if lost := [record for record in records if record.case not in plain]:
        raise InvalidSpec(f"{len(lost)} answers have no counterpart under {PLAIN!r}, such as to {lost[0].case}")
    groups: dict[tuple[str, str], list[CapRecord]] = {}
    for record in records:
        if record.condition != PLAIN:
            groups.setdefault((record.case.kind, record.condition), []).append(record)
    return [
        change
        for (kind, condition), mine in groups.items()
        for measure, (read, factor) in _measures(layer, in_role).items()
        if (change := _change(kind, condition, measure, [(plain[one.case], one) for one in mine], read, factor, seed))
    ]


def _measures(layer: int, in_role: float) -> Mapping[str, tuple[Callable[[CapRecord], float], bool]]:
    """Return, by measure, the function that reads its value from a record, and True if its change is a factor."""
    return {
        "projection": (lambda record: record.projection[layer], False),
        "projection read": (lambda record: record.read[layer], False),
        "in role": (lambda record: math.nan if record.score is None else float(record.score >= in_role), False),
        "tokens": (lambda record: float(record.tokens), False),
        "perplexity": (lambda record: record.perplexity, True),
    }


def _change(  # noqa: PLR0917 -- a column each
    kind: str,
    condition: str,
    measure: str,
    pairs: Sequence[tuple[CapRecord, CapRecord]],
    read: Callable[[CapRecord], float],
    factor: bool,
    seed: int,
) -> Change | None:
    """Return the change of one measure over (before, after) pairs, or None if no pair has two values."""
    known: dict[int, list[tuple[float, float]]] = {}
    for before, after in pairs:
        pair = read(before), read(after)
        if not math.isnan(sum(pair)):
            known.setdefault(before.case.question, []).append(pair)
    if not known:
        return None

    def mean(number: Callable[[float, float], float]) -> Estimate:
        clusters = [[number(*pair) for pair in own] for own in known.values()]
        return estimate(cluster_means(clusters, log=factor), seed=seed, log=factor)

    first, later = mean(lambda one, _: one), mean(lambda _, other: other)
    moved = mean(lambda one, other: other / one if factor else other - one)
    count = sum(map(len, known.values()))
    return Change(kind, condition, measure, first.value, later.value, moved.value, moved.low, moved.high, count)
