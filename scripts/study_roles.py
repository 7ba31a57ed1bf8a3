"""24 roles on SmolLM2 and a CPU: the assistant axis, whether it is found again, what capping along it changes.

`python scripts/study_roles.py --out out/roles` writes the run's folder, `axis.safetensors`, `cap.safetensors`, `records.jsonl`,
`study.json` and pictures there, and prints JSON lines. Cut off, it goes on where it was.

The axis is made of the first twelve questions and two prompts of each role; capping is tried on six other questions and the
third prompt, which it has not seen, and on prompts that ask for no role.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from steercap import SteerModel
from steercap.lab.demo import smollm2
from steercap.lab.directions import random_like
from steercap.lab.personas.roles import (
    ASSISTANT,
    AssistantAxis,
    CapRecord,
    RoleRows,
    RoleRun,
    RoleSettings,
    assistant_axis,
    calibration_texts,
    capping,
    cases_of,
    changes,
    compare_steering,
    drift_cases,
    plot_changes,
    plot_positions,
    plot_roles,
    plot_stability,
    run_roles,
    shipped_roles,
    stability,
    token_projections,
)

#: Where rows are held: the middle of the model, and where Lu et al. cap larger ones (three quarters of the depth).
MIDDLE: Final = tuple(range(12, 18))
LATE: Final = tuple(range(20, 26))
#: Where projections are reported: after the last layer that is held in the middle, and of those held late.
LAYER: Final = 18
LOOKED_AT: Final = (14, 18, 24, 28)


def settings_of(questions: int, max_tokens: int) -> RoleSettings:
    """What the axis is made of."""
    return RoleSettings.small(shipped_roles(), n_questions=questions, n_prompts=2, max_tokens=max_tokens)


def unseen(settings: RoleSettings, questions: int) -> RoleSettings:
    """The same roles by a prompt, and questions, that the axis was not made of."""
    used = settings.n_questions or 0
    roles = [msgspec.structs.replace(role, prompts=role.prompts[2:]) for role in settings.roles.roles]
    others = settings.roles.questions[used : used + questions]
    changed = msgspec.structs.replace(settings.roles, roles=tuple(roles), questions=others)
    return msgspec.structs.replace(settings, roles=changed, n_questions=None, n_prompts=1, min_kept=1)


def told_of(found: RoleRun, axis: AssistantAxis, other: AssistantAxis) -> dict[str, Any]:
    """The axis in numbers."""
    layers = [layer for layer in axis.layers if layer % 4 == 2]
    return {
        "outcomes": {name: [one.kept, one.responses] for name, one in found.outcomes.items()},
        "explained": {layer: [round(share, 3) for share in axis.explained[layer][:3]] for layer in layers},
        "cosine_contrast_pca": {layer: round(axis.cosine[layer], 3) for layer in layers},
        "assistant_on_pca_sd": {layer: round(axis.standing[layer], 2) for layer in layers},
        "ranked": [[name, round(place, 2)] for name, place in axis.ranked(LAYER)],
        "ranked_pca": [[name, round(place, 2)] for name, place in other.ranked(LAYER)],
        "length_of_axis": {layer: round(norm, 2) for layer, norm in axis.vectors.norms().items() if layer in layers},
    }


def stable(found: RoleRun, out: Path) -> dict[str, Any]:
    """How stable both axes are, beside chance; with pictures."""
    told: dict[str, Any] = {}
    for over in ("questions", "roles"):
        halves = stability(found.rows, over=over, splits=40)
        for how in ("contrast", "pca"):
            plot_stability(halves, out / f"stability-{over}-{how}.png", how=how)
            told[f"{over}/{how}"] = {
                of: {
                    layer: [round(value, 3) for value in (halves.median(how, of)[layer], *halves.band(how, of)[layer])]
                    for layer in (2, 10, 14, 18, 22, 26, 29)
                }
                for of in ("found", "permuted", "random")
            }
    return told


async def capped(
    model: SteerModel, found: RoleRun, axis: AssistantAxis, settings: RoleSettings, out: Path
) -> tuple[list[CapRecord], dict[str, Any]]:
    """Answers without and with capping, and with capping along random directions by the same percentile."""
    texts, specs, told = calibration_texts(found), {}, dict[str, Any]()
    for name, layers, vectors in (
        ("capped, middle", MIDDLE, axis),
        ("capped, late", LATE, axis),
        ("random, middle", MIDDLE, random_like(axis.vectors, 0, seed=0)),
    ):
        made = capping(vectors, await token_projections(model, vectors, texts, layers=layers))
        made.save(out / f"cap-{name.replace(', ', '-')}.safetensors")
        specs[name] = made.spec
        told[name] = {layer: round(floor, 2) for layer, floor in made.floors.items()}
    cases = [*cases_of(settings), *drift_cases(samples=2)]
    records = await compare_steering(model, axis, specs, cases, settings, layers=LOOKED_AT)
    return records, told


def draw(axis: AssistantAxis, rows: RoleRows, to: Path) -> None:
    """Draw roles along the axis, and beside it on their first two components, as docs/pictures/roles.png is."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.35))
    plot_positions(axis, LAYER, left)
    plot_roles(rows, LAYER, right)
    figure.savefig(to, dpi=130)


async def main(out: Path, questions: int, unseen_questions: int, max_tokens: int) -> None:
    settings, times, begun = settings_of(questions, max_tokens), dict[str, float](), time.monotonic()

    def lap(name: str) -> None:
        nonlocal begun
        times[name], begun = round(time.monotonic() - begun, 1), time.monotonic()

    async with SteerModel(smollm2(), preset="cpu") as model:
        lap("start_s")
        found = await run_roles(model, settings, out)
        lap("run_s")
        axis, other = assistant_axis(found.rows), assistant_axis(found.rows, "pca")
        axis.save(out / "axis.safetensors")
        study = {"axis": told_of(found, axis, other), "stability": stable(found, out)}
        lap("axis_s")
        print(json.dumps(study), flush=True)
        records, floors = await capped(model, found, axis, unseen(settings, unseen_questions), out)
        lap("capping_s")
    (out / "records.jsonl").write_bytes(b"\n".join(msgspec.json.encode(record) for record in records))
    differences = changes(records, LAYER)
    study |= {"floors": floors, "changes": msgspec.to_builtins(differences), "times": times}
    (out / "study.json").write_text(json.dumps(study, indent=1))
    draw(axis, found.rows, out / "roles.png")
    for name in floors:
        for read in (False, True):
            file = f"changes-{name.replace(', ', '-')}{'-read' if read else ''}.png"
            plot_changes(records, LAYER, out / file, condition=name, read=read)
    for one in differences:
        print(
            json.dumps(
                {
                    key: round(value, 3) if isinstance(value, float) else value
                    for key, value in msgspec.to_builtins(one).items()
                }
            )
        )
    print(json.dumps({"times": times, "assistant": [one for one in axis.ranked(LAYER) if one[0] == ASSISTANT]}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--unseen-questions", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=24)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.out, arguments.questions, arguments.unseen_questions, arguments.max_tokens))
