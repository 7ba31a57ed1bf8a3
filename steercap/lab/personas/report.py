"""Outcome of a run for each trait, in numbers, and the run's report, Markdown with pictures in the same folder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from steercap.files.base import write_whole
from steercap.lab.directions import chance_band
from steercap.lab.directions.methods import middle_of_best
from steercap.lab.personas.pictures import draw_all
from steercap.lab.personas.records import SIGNS, Records
from steercap.lab.personas.settings import PersonaSettings
from steercap.steering.directions import DirectionSet

#: Number of answers with the highest, and the lowest, scores in a report; maximum characters of each.
SHOWN, LENGTH = 2, 400
_LIMITS: Final = """
- **The AUC is of held-out questions, but of the same system prompts.** {reading}
- **Only kept answers count in it.** Where few are kept, as of a trait that the model hardly shows, the vector is of
  those that happened to pass the scorer.
- **The best layer was chosen on the answers it is reported for.** So its AUC is somewhat too good; with few
  answers held out many layers tie, and the middle of the longest run of these is named. The band in which 95 of 100
  worthless directions lie is given beside it.
- **A score is what the scorer makes of a text.** {scorer}
- **A small model shows little.** Below some billion parameters a system prompt changes words and tone more than what
  is argued: register or verse come out, flattery or invention hardly do. A vector from such answers is one of tone.
  Whether it *causes* the trait is not shown here; that takes steering with it, against random vectors of its length.
"""
_READING: Final = {
    True: (
        "The rows were read with the system prompt before the answer, as in the paper, so a vector may in part tell "
        "prompts apart and not answers; `read_system=False` reads answers after their question alone."
    ),
    False: "The rows were read after the question alone, without the system prompt: they show what the answer holds.",
}
_SCORERS: Final = {
    "minilm": (
        "`minilm` is a classifier on a trait's example sentences, no judge: it knows tone and words, and not whether "
        "something is true."
    ),
    "keywords": "`keywords` counts words, whatever they are used for.",
    "judge": "`judge` is another model's opinion, with its own leanings.",
}


@dataclass(frozen=True)
class Outcome:
    """Outcome of one trait in numbers; pairs are for answers under (positive, negative) system prompts.

    A trait that was left out has no vector: its `best_layer`, `auc` and `relative_norm` are None.

    Args:
        responses: number of answers.
        unscored: number of answers that the scorer could not score.
        kept: number of answers used for the vector.
        mean_scores: mean over all answers with a score, 0 to 100; NaN if none has one.
        best_layer: layer with the highest AUC; for ties see `steercap.lab.directions.methods`.
        auc: AUC at that layer on held-out questions; 0.5 is chance. It is optimistic, as the layer was chosen on the
            same answers.
        held_out: number of answers from which the AUC was computed.
        relative_norm: norm of the vector at that layer, as a share of the mean norm of the answers' mean rows.
        left_out: reason why there is no vector, "" if there is one.
    """

    responses: tuple[int, int]
    unscored: tuple[int, int]
    kept: tuple[int, int]
    mean_scores: tuple[float, float]
    best_layer: int | None = None
    auc: float | None = None
    held_out: tuple[int, int] = (0, 0)
    relative_norm: float | None = None
    left_out: str = ""


def outcomes(
    directions: DirectionSet, records: Records, left_out: Mapping[str, str] = MappingProxyType({})
) -> Mapping[str, Outcome]:
    """Return numbers of answers, scores and the direction of each trait, by name, in the order of its first answer.

    `left_out` has the reason by trait without a direction; a trait with neither has no outcome.
    """
    names = [
        name for name in dict.fromkeys(one.trait for one in records.responses) if {name} & {*directions, *left_out}
    ]
    return {name: _outcome(name, directions, records, left_out.get(name, "")) for name in names}


def relative_norms(directions: DirectionSet, name: str) -> dict[int, float]:
    """Return a direction's norm by layer, as a share of the mean norm of its answers' mean rows at that layer."""
    rows = directions.provenance.row_norms[name]
    return {layer: norm / rows[layer] for layer, norm in directions[name].norms().items()}


def _outcome(name: str, directions: DirectionSet, records: Records, left_out: str) -> Outcome:
    found = [records.of(name, sign) for sign in SIGNS]
    scored = [[value for _, value in mine if value is not None] for mine in found]
    used = [len(records.kept_of(name, sign)) for sign in SIGNS]
    means = [sum(mine) / len(mine) if mine else float("nan") for mine in scored]
    told = Outcome(
        responses=(len(found[0]), len(found[1])),
        unscored=(len(found[0]) - len(scored[0]), len(found[1]) - len(scored[1])),
        kept=(used[0], used[1]),
        mean_scores=(means[0], means[1]),
        left_out=left_out,
    )
    if left_out:
        return told
    auc = directions.provenance.auc[name]
    best = middle_of_best(auc)
    return replace(
        told,
        best_layer=best,
        auc=auc[best],
        held_out=directions.provenance.held_out[name],
        relative_norm=relative_norms(directions, name)[best],
    )


def write_report(
    folder: Path,
    settings: PersonaSettings,
    directions: DirectionSet,
    results: Mapping[str, Outcome],
    records: Records,
) -> Path:
    """Write `report.md` and its pictures into a folder, and return the path of the report."""
    layer = common_layer(directions)
    pictures = draw_all(folder, settings, directions, records, layer)
    parts = [
        f"# Persona vectors of {directions.model}\n\n",
        (
            f"Each vector is found at every layer, by the method `{settings.method}`, from answers that show a trait "
            "and answers that show its opposite.\n"
        ),
        *_table(directions, results),
        f"\n## AUC by layer\n\n![AUC by layer]({pictures['auc'].name})\n",
        f"\n## Scores\n\n![Scores]({pictures['scores'].name})\n",
        f"\n## Vectors against each other, layer {layer}\n\n![Cosines]({pictures['cosines'].name})\n",
        "\n## Answers\n",
        *_samples(settings, records),
        "\n## What this can and cannot show\n",
        _LIMITS.format(
            reading=_READING[settings.read_system],
            scorer=_SCORERS.get(settings.scorer, f"`{settings.scorer}` says what."),
        ),
        "\n## Origin\n\n",
        *_origin(settings, directions),
    ]
    path = folder / "report.md"
    with write_whole(path) as scratch:
        scratch.write_text("".join(parts), encoding="utf-8")
    return path


def common_layer(directions: DirectionSet) -> int:
    """Return the layer with the highest mean AUC over traits; for ties see `steercap.lab.directions.methods`."""
    auc = directions.provenance.auc
    return middle_of_best({layer: sum(found[layer] for found in auc.values()) for layer in directions.layers})


def _table(directions: DirectionSet, results: Mapping[str, Outcome]) -> Iterator[str]:
    yield (
        "\nPairs are *positive / negative*. Scores are means of all answers, 0 to 100. The length is the vector's, "
        "as a share of the rows' mean length at that layer.\n\n"
        "| trait | answers | without score | kept | mean score | best layer | AUC there, held out | from answers "
        "| chance, 95 % of all layers | length |\n"
        "|---|---|---|---|---|---|---|---|---|---|\n"
    )
    for name, one in results.items():
        if one.auc is None:
            yield (
                f"| {name} | {_pair(one.responses)} | {_pair(one.unscored)} | {_pair(one.kept)} "
                f"| {_means(one)} | left out | | | | |\n"
            )
            continue
        low, high = chance_band(*one.held_out, best_of=len(directions.layers))
        yield (
            f"| {name} | {_pair(one.responses)} | {_pair(one.unscored)} | {_pair(one.kept)} "
            f"| {_means(one)} | {one.best_layer} "
            f"| {one.auc:.2f} | {_pair(one.held_out)} | {low:.2f} to {high:.2f} "
            f"| {one.relative_norm:.2f} |\n"
        )
    for name, one in results.items():
        if one.left_out:
            yield f"\n**{name}** was left out: {_flat(one.left_out)}.\n"
    first, last = directions.layers[0], directions.layers[-1]
    yield f"\n`directions.safetensors` holds them: layers {first} to {last} of {directions.site}.\n"


def _means(outcome: Outcome) -> str:
    return " / ".join("none" if math.isnan(mean) else f"{mean:.0f}" for mean in outcome.mean_scores)


def _pair(numbers: tuple[int, int]) -> str:
    return f"{numbers[0]} / {numbers[1]}"


def _samples(settings: PersonaSettings, records: Records) -> Iterator[str]:
    used = {one.id for one in records.kept}
    for trait in settings.resolved():
        yield f"\n### {trait.name}\n\n{trait.description}\n\n"
        for sign in SIGNS:
            mine = [(value, one) for one, value in records.of(trait.name, sign) if value is not None]
            mine.sort(key=lambda pair: (pair[0], pair[1].id))
            ends = {"highest": mine[::-1][:SHOWN], "lowest": mine[: min(SHOWN, max(0, len(mine) - SHOWN))]}
            for end, pairs in ends.items():
                for value, one in pairs:
                    state = "kept" if one.id in used else "dropped"
                    yield f"- {sign} prompt, {end}: **{value:.0f}**, {state}. *{one.question_text}*\n"
                    yield f"  > {_flat(one.answer)}\n"


def _flat(text: str) -> str:
    """Return a text on one line, truncated, with Markdown and HTML escaped."""
    line = " ".join(text.split())
    line = line if len(line) <= LENGTH else f"{line[:LENGTH]} ..."
    for mark in "\\`*_<>[]#|":
        line = line.replace(mark, f"\\{mark}")
    return line


def _origin(settings: PersonaSettings, directions: DirectionSet) -> Iterator[str]:
    origin = directions.provenance
    told: dict[str, Any] = {
        "model": directions.model,
        "revision": origin.revision or "not known",
        "dtype": origin.dtype,
        "method": origin.method,
        "rows": f"mean over the answer's tokens, {directions.site}",
        "answers behind each vector": ", ".join(f"{name} {_pair(rows)}" for name, rows in origin.rows.items()),
    }
    plain = msgspec.structs.asdict(settings)
    plain["traits"] = [trait.name for trait in settings.resolved()]
    yield "| | |\n|---|---|\n"
    for name, value in {**told, **plain}.items():
        yield f"| {name} | {value} |\n"
    for name, digest in origin.prompts.items():
        yield f"| SHA-256 of what was read, {name} | `{digest}` |\n"
    yield "\nThe traits in full are in `settings.json`; texts, scores and what was kept in the Parquet tables.\n"
