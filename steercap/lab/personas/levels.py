"""Levels of personas, vectors that are means of the rows of answers chosen by score, or differences of such means.

A role's answers are scored 0 to 3, a trait's 0 to 100; each answer has a key `LABEL_pPROMPT_qQUESTION`, label "pos",
"neg" or "default". `plan_levels` chooses by keys and scores alone; `LevelMeans` adds up rows one answer at a time.
"""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import torch
from jaxtyping import Float

from steercap.core.values import choices, count_of, number_of, shown
from steercap.errors import InvalidSpec, UnknownName

#: Kind of a persona.
PersonaKind: TypeAlias = Literal["role", "trait"]
#: Names of the levels of each kind of persona, in the order in which files have them.
LEVELS: Final[Mapping[str, tuple[str, ...]]] = {
    "role": ("pos_0", "pos_1", "pos_2", "pos_3", "pos_all", "default_1"),
    "trait": ("pos_neg", "pos_default", "pos_neg_50", "pos_default_50", "pos_70", "pos_40_70"),
}
#: Default minimum number of answers of a scored level of a role, or of pairs or answers of a trait's level, by kind.
MINIMUM: Final[Mapping[str, int]] = {"role": 50, "trait": 1}
#: Score of an answer that refuses to answer.
REFUSAL: Final = "REFUSAL"
#: Maximum number of keys that an error lists.
_SHOWN: Final = 5
_KEY: Final = re.compile(
    r"(?P<file>(?:.*/)?)(?P<label>pos|neg|default)_(?P<place>p(?:0|[1-9]\d*)_q(?:0|[1-9]\d*))", re.ASCII
)
_LABELS: Final = {"role": ("pos", "default"), "trait": ("pos", "neg", "default")}
#: Difference of scores beyond which a pair counts for the levels with "_50".
_APART: Final = 50


@dataclass(frozen=True)
class LevelPlan:
    """Choice of the answers whose rows are averaged in each level of one persona.

    Args:
        kind: "role" or "trait".
        answers: keys of all answers.
        weights: weight of each used answer, by level and key; a level is the weighted sum of the answers' rows. Levels
            without answers, or with fewer than the minimum, are absent.
        left_out: number of candidate answers, or pairs in levels of pairs, left out of each level, by level and reason.
        unused: number of answers, and of scores, that are in no level, by reason.
    """

    kind: PersonaKind
    answers: frozenset[str]
    weights: Mapping[str, Mapping[str, float]]
    left_out: Mapping[str, Mapping[str, int]]
    unused: Mapping[str, int]

    @property
    def needed(self) -> frozenset[str]:
        """Keys of the answers whose rows are needed."""
        return frozenset(key for weights in self.weights.values() for key in weights)


def plan_levels(
    kind: PersonaKind,
    keys: Iterable[str],
    scores: Mapping[str, float | str | None],
    *,
    minimum: int | None = None,
) -> LevelPlan:
    """Choose the answers that are averaged in each level of a persona.

    Roles: `pos_0` to `pos_3` are means of the positive answers of that score, `pos_all` of all that are scored;
    `default_1` of all default answers, whatever their number and scores. Traits: answers to one prompt and question
    are a pair. `pos_neg` and `pos_default` are differences of means over pairs of which both are scored,
    `pos_neg_50` and `pos_default_50` over pairs whose positive answer scores more than 50 above the other. `pos_70`
    and `pos_40_70` are means of positive answers that score 70 or more, or 40 to below 70. Refusals are left out.

    Args:
        kind: "role" or "trait".
        keys: keys of the answers, such as "pos_p0_q12". Keys of several files have the file's name in front:
            "0_default/default_p0_q12"; both answers of a pair are of one file.
        scores: score of each answer by key: a number, or "REFUSAL"; absent or None if it was not scored.
        minimum: minimum number of answers of a role's scored level, or of pairs or answers of a trait's level; None
            for 50 and 1.

    Raises:
        UnknownName: `kind` is neither.
        InvalidSpec: a key has another form or is given twice, a score is not valid for the kind, or `minimum` is not a
            positive integer.
    """
    if kind not in LEVELS:
        raise UnknownName(f"unknown kind {shown(kind)}; {choices(kind, LEVELS)}")
    least = MINIMUM[kind] if minimum is None else count_of(minimum, "minimum")
    answers = _answers(keys)
    told = {key: found for key, score in scores.items() if (found := _score(kind, key, score)) is not None}
    draft = _Draft(answers, told, least)
    (_add_role_levels if kind == "role" else _add_trait_levels)(draft)
    labels = Counter(match["label"] for match in answers.values())
    unused = {
        f"a {kind} has no level of {label!r} answers": labels[label] for label in labels.keys() - set(_LABELS[kind])
    }
    unused["scores without an answer"] = len(told.keys() - answers.keys())
    return LevelPlan(
        kind,
        frozenset(answers),
        draft.weights,
        {name: dict(counts) for name, counts in draft.left_out.items()},
        {reason: count for reason, count in unused.items() if count},
    )


class LevelMeans:
    """Accumulator of a plan's levels, in float64, to which answers' rows are added in any order.

    Args:
        plan: plan of the levels of one persona.
    """

    def __init__(self, plan: LevelPlan) -> None:
        self._plan = plan
        self._sums: dict[str, torch.Tensor] = {}
        self._added: set[str] = set()
        self._shape: torch.Size | None = None

    def add(self, key: str, mean: Float[torch.Tensor, "layers hidden"]) -> None:
        """Add the mean row of one answer; for an answer that no level needs, the row is only checked.

        Args:
            key: key of the answer in the plan.
            mean: mean of the answer's rows over its tokens, [layers, hidden], any floating dtype and device.

        Raises:
            UnknownName: the plan has no such answer.
            InvalidSpec: the answer was added before, or its rows are not finite floats of the shape of the others.
        """
        if key not in self._plan.answers:
            raise UnknownName(f"unknown answer {shown(key)}; {choices(key, sorted(self._plan.answers))}")
        if key in self._added:
            raise InvalidSpec(f"answer {key!r} is added twice")
        self._check(key, mean)
        self._added.add(key)
        rows = mean.detach().to("cpu", torch.float64)
        for level, weights in self._plan.weights.items():
            if key in weights:
                total = self._sums.setdefault(level, torch.zeros(rows.shape, dtype=torch.float64))
                total.add_(rows, alpha=weights[key])

    def means(self) -> dict[str, Float[torch.Tensor, "layers hidden"]]:
        """Return the plan's levels by name, float32 [layers, hidden], in the order of `LEVELS`.

        Raises:
            InvalidSpec: answers that the plan needs were not added, or a level is beyond the range of float32.
        """
        if missing := sorted(self._plan.needed - self._added):
            more = " ..." if len(missing) > _SHOWN else ""
            raise InvalidSpec(f"{len(missing)} needed answers were not added: {', '.join(missing[:_SHOWN])}{more}")
        found = {level: self._sums[level].float() for level in self._plan.weights}
        for level, rows in found.items():
            if not bool(rows.isfinite().all()):
                raise InvalidSpec(f"level {level!r} is beyond the range of float32")
        return found

    def _check(self, key: str, mean: Any) -> None:
        if not isinstance(mean, torch.Tensor) or mean.dim() != 2 or not mean.is_floating_point() or not mean.numel():
            told = f"{mean.dtype} {list(mean.shape)}" if isinstance(mean, torch.Tensor) else shown(mean)
            raise InvalidSpec(f"answer {key!r} has rows {told}; expected floats [layers, hidden]")
        self._shape = self._shape or mean.shape
        if mean.shape != self._shape:
            raise InvalidSpec(f"answer {key!r} has rows {list(mean.shape)}; those before it have {list(self._shape)}")
        if not bool(mean.isfinite().all()):
            raise InvalidSpec(f"answer {key!r} has NaN or infinity in its rows")


class _Draft:
    """Plan of levels while it is built; `put` and `put_scored` add levels.

    Args:
        answers: matches of all keys, by key.
        scores: scores by key; NaN for a refusal.
        minimum: minimum number of answers or pairs of a level.
    """

    def __init__(self, answers: Mapping[str, re.Match[str]], scores: Mapping[str, float], minimum: int) -> None:
        self.answers, self.scores, self.minimum = answers, scores, minimum
        self.weights: dict[str, dict[str, float]] = {}
        self.left_out: dict[str, Counter[str]] = {}

    def of(self, label: str) -> dict[str, str]:
        """Return the keys of a label's answers, by their file, prompt and question as one text, such as "p0_q12"."""
        return {match["file"] + match["place"]: key for key, match in self.answers.items() if match["label"] == label}

    def lack(self, key: str) -> str:
        """Return the reason why an answer has no numeric score, "" if it has one."""
        if key not in self.scores:
            return "not scored"
        return "refusal" if math.isnan(self.scores[key]) else ""

    def put(self, level: str, used: Sequence[tuple[str, ...]], left_out: Counter[str], minimum: int) -> None:
        """Add a level, the mean over first keys of `used` minus, for pairs, that over second keys, if not too few."""
        if 0 < len(used) < minimum:
            left_out[f"fewer than {minimum}"] += len(used)
        elif used:
            signs = (1 / len(used), -1 / len(used))
            self.weights[level] = {key: sign for one in used for key, sign in zip(one, signs, strict=False)}
        self.left_out[level] = left_out

    def put_scored(self, level: str, fits: Callable[[float], bool]) -> None:
        """Add a level, the mean of the positive answers for whose score `fits` returns True."""
        used, left_out = [], Counter[str]()
        for key in self.of("pos").values():
            if reason := self.lack(key) or ("" if fits(self.scores[key]) else "another score"):
                left_out[reason] += 1
            else:
                used.append((key,))
        self.put(level, used, left_out, self.minimum)


def _add_role_levels(draft: _Draft) -> None:
    for level in range(4):
        draft.put_scored(f"pos_{level}", partial(operator.eq, level))
    draft.put_scored("pos_all", lambda _: True)
    default = list(draft.of("default").values())
    kept = [(key,) for key in default if draft.lack(key) != "refusal"]
    draft.put("default_1", kept, Counter({"refusal": len(default) - len(kept)}) + Counter(), 1)


def _add_trait_levels(draft: _Draft) -> None:
    """Add the levels of a trait to a draft."""
    for name, least in (("", None), (f"_{_APART}", _APART)):
        for label in ("neg", "default"):
            _pairs(draft, f"pos_{label}{name}", label, least)
    draft.put_scored("pos_70", lambda score: score >= 70)
    draft.put_scored("pos_40_70", lambda score: 40 <= score < 70)


def _pairs(draft: _Draft, level: str, label: str, apart: float | None) -> None:
    """Add a level of positive minus `label` answers, over pairs whose positive scores over `apart` higher, if given."""
    first, second = draft.of("pos"), draft.of(label)
    used, left_out = [], Counter({"no partner": len(first.keys() ^ second.keys())}) + Counter[str]()
    for place in (place for place in first if place in second):
        pair = (first[place], second[place])
        lacks = [reason for key in pair if (reason := draft.lack(key))]
        if lacks:
            left_out["refusal" if "refusal" in lacks else lacks[0]] += 1
        elif apart is not None and not draft.scores[pair[0]] - draft.scores[pair[1]] > apart:
            left_out[f"scores not more than {apart} apart"] += 1
        else:
            used.append(pair)
    draft.put(level, used, left_out, draft.minimum)


def _answers(keys: Iterable[str]) -> dict[str, re.Match[str]]:
    found: dict[str, re.Match[str]] = {}
    for key in keys:
        match = _KEY.fullmatch(key) if isinstance(key, str) else None
        if match is None:
            raise InvalidSpec(
                f"answer {shown(key)}; a key is pos, neg or default with prompt and question: 'pos_p0_q12'"
            )
        if key in found:
            raise InvalidSpec(f"answer {key!r} is there twice")
        found[key] = match
    return found


def _score(kind: str, key: str, score: Any) -> float | None:
    """Check a score by the kind of persona and return it; NaN for a refusal, None for no score."""
    if score is None:
        return None
    if isinstance(score, str) and score == REFUSAL:
        return math.nan
    number, most = number_of(score), 3 if kind == "role" else 100
    if number is None or not 0 <= number <= most or (kind == "role" and number % 1):
        known = "0, 1, 2 or 3" if kind == "role" else "0 to 100"
        raise InvalidSpec(f"answer {key!r} has score {shown(score)}; a {kind} has {known}, or {REFUSAL!r}")
    return number
