"""Pictures of roles: positions on the axis, first two components, split-half stability, changes by steering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from steercap.core.display import COLOURS, GREY, ink, place_names
from steercap.errors import InvalidSpec
from steercap.lab.personas.pictures import canvas
from steercap.lab.personas.roles.axis import AssistantAxis, How, directions
from steercap.lab.personas.roles.axis_capping import CapRecord
from steercap.lab.personas.roles.effects import PLAIN
from steercap.lab.personas.roles.role import ASSISTANT
from steercap.lab.personas.roles.rows import RoleRows
from steercap.lab.personas.roles.settings import Case
from steercap.lab.personas.roles.split_half import OFS, Of, Stability

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROLE, HELPER, CHANCE, DEALT = COLOURS[0], COLOURS[1], GREY, COLOURS[4]
DPI: Final = 130
#: Maximum number of roles whose names are all written.
NAMED: Final = 60
_SHOWN: Final[Mapping[Of, tuple[str, str]]] = {
    "found": (ROLE, "the axis"),
    "permuted": (DEALT, "answers dealt out anew"),
    "random": (CHANCE, "random vectors"),
}


def plot_positions(axis: AssistantAxis, layer: int, to: str | Path | Axes) -> None:
    """Draw roles and assistant along the axis, in the units of the stream; 0 is the mean of the roles.

    Args:
        axis: axis, as returned by `assistant_axis`.
        layer: layer of the axis.
        to: file to write, whose suffix sets the format, or matplotlib axes.

    Raises:
        LayerOutOfRange: the axis has no vector at the layer.
    """
    ranked = axis.ranked(layer)
    with canvas(to, (5.2, 0.9 + 0.19 * min(len(ranked), NAMED)), dpi=DPI) as axes:
        places = np.arange(len(ranked))
        for place, (name, value) in zip(places, ranked, strict=True):
            colour = HELPER if name == ASSISTANT else ROLE
            axes.plot([0, value], [place, place], color=colour, linewidth=1, alpha=0.5)
            axes.plot(
                value, place, "*" if name == ASSISTANT else "o", color=colour, markersize=9 if name == ASSISTANT else 5
            )
        axes.axvline(0, color=ink(), linewidth=0.8)
        step = -(-len(ranked) // NAMED)
        helper = [place for place, (name, _) in enumerate(ranked) if name == ASSISTANT]
        named = [place for place in places[::step] if all(abs(place - one) >= step for one in helper)] + helper
        axes.set_yticks(named, [ranked[place][0] for place in named], fontsize=8)
        axes.margins(y=0.02)
        some = f"; every {step}th name and the assistant's are written" if step > 1 else ""
        axes.set(xlabel=f"projection on the assistant axis ({axis.how}), layer {layer}{some}")
        axes.grid(axis="x", alpha=0.25)


def plot_roles(rows: RoleRows, layer: int, to: str | Path | Axes) -> None:
    """Draw roles and assistant in the plane of the roles' first two principal components.

    The assistant is on the positive side of the first; an arrow from the roles' mean is the contrast, projected on the
    plane.

    Args:
        rows: rows of roles and assistant, three roles at least.
        layer: layer of the rows.
        to: file to write, whose suffix sets the format, or matplotlib axes.

    Raises:
        InvalidSpec: there are only two roles, which have one component.
        LayerOutOfRange: there are no rows of the layer.
    """
    import torch

    roles, assistant = rows.means(layer)
    if len(roles) < 3:
        raise InvalidSpec(f"{len(roles)} roles have one component; give three roles or more")
    found = directions(roles, assistant)
    centred = roles - roles.mean(0)
    _, _, components = torch.linalg.svd(centred, full_matrices=False)
    plane = torch.stack([found.pca, components[1]])
    places, helper = (centred @ plane.T).tolist(), (plane @ found.offset).tolist()
    with canvas(to, (6.2, 4.8), dpi=DPI) as axes:
        axes.axhline(0, color=ink(), linewidth=0.5)
        axes.axvline(0, color=ink(), linewidth=0.5)
        axes.annotate("", helper, (0, 0), arrowprops={"arrowstyle": "->", "color": HELPER, "alpha": 0.6})
        axes.plot(*zip(*places, strict=True), "o", color=ROLE, markersize=5)
        axes.plot(*helper, "*", color=HELPER, markersize=13)
        first, second = (100 * share for share in found.explained[:2].tolist())
        axes.set(
            xlabel=f"first component, {first:.0f} % of the roles' variance",
            ylabel=f"second component, {second:.0f} %",
            title=f"layer {layer}: cosine of contrast and first component {float(found.contrast @ found.pca):.2f}",
        )
        axes.title.set_fontsize(9)
        axes.margins(0.12)
        names = rows.names if len(roles) <= NAMED else ()
        place_names(axes, [ASSISTANT, *names], [helper, *places[: len(names)]], size=7.5)


def plot_stability(found: Stability, to: str | Path | Axes, *, how: How = "contrast") -> None:
    """Draw the cosine of both halves' axes by layer: median and central 90 % of the splits, and both chance levels.

    Args:
        found: result of `stability`.
        to: file to write, whose suffix sets the format, or matplotlib axes.
        how: method of the axis, "contrast" or "pca".

    Raises:
        InvalidSpec: `how` is unknown.
    """
    with canvas(to, (6.2, 3.6), dpi=DPI) as axes:
        for of in OFS:
            colour, label = _SHOWN[of]
            median, band = found.median(how, of), found.band(how, of)
            axes.plot(list(median), list(median.values()), color=colour, label=label, marker=".", linewidth=1.5)
            axes.fill_between(list(band), *zip(*band.values(), strict=True), color=colour, alpha=0.2, linewidth=0)
        axes.axhline(0, color=ink(), linewidth=0.5)
        shared = "no question" if found.over == "questions" else "neither role nor question"
        axes.set(
            xlabel="layer",
            ylabel="cosine of the halves' axes",
            title=f"{how}; the halves share {shared}",
            ylim=(-0.6, 1.05),
        )
        axes.title.set_fontsize(9)
        axes.legend(fontsize=8, frameon=False, loc="lower right")
        axes.grid(alpha=0.25)


def plot_changes(
    records: Sequence[CapRecord], layer: int, to: str | Path | Axes, *, condition: str, read: bool = False
) -> None:
    """Draw each role's mean projection before and after, over the cases that have both, as an arrow.

    Args:
        records: records, as returned by `compare_steering`.
        layer: layer of the projections.
        to: file to write, whose suffix sets the format, or matplotlib axes.
        condition: condition to compare with "plain".
        read: True to use projections of the answers when read without steering.

    Raises:
        InvalidSpec: there are no records of the condition, or no projections at the layer.
    """
    found = _by_role(records, layer, condition, read=read)
    if not found:
        raise InvalidSpec(f"no projections at layer {layer} of {PLAIN!r} and {condition!r} beside each other")
    names = sorted(found, key=found.__getitem__)
    before, after = ([found[name][side] for name in names] for side in (0, 1))
    with canvas(to, (5.2, 0.9 + 0.19 * len(names)), dpi=DPI) as axes:
        for place, (start, end) in enumerate(zip(before, after, strict=True)):
            arrow = {"arrowstyle": "->", "color": CHANCE, "linewidth": 1.2}
            axes.annotate("", (end, place), (start, place), arrowprops=arrow)
        axes.plot(before, range(len(names)), "o", color=ROLE, markersize=5, label=PLAIN)
        axes.plot(after, range(len(names)), "D", color=HELPER, markersize=4.5, label=condition)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        what = "of the text, read without steering" if read else "while it went on"
        axes.set(xlabel=f"projection {what}, layer {layer}")
        axes.legend(fontsize=8, frameon=False, loc="upper left")
        axes.grid(axis="x", alpha=0.25)
        axes.margins(y=0.02)


def _by_role(records: Sequence[CapRecord], layer: int, condition: str, *, read: bool) -> dict[str, tuple[float, float]]:
    """Return the mean projections before and after, over the cases that have both, by role, "drift" without one."""
    sides: dict[str, dict[Case, float]] = {PLAIN: {}, condition: {}}
    for record in records:
        value = (record.read if read else record.projection).get(layer, np.nan)
        if record.condition in sides and not np.isnan(value):
            sides[record.condition][record.case] = value
    groups: dict[str, list[tuple[float, float]]] = {}
    for case, value in sides[PLAIN].items():
        if case in sides[condition]:
            groups.setdefault(case.role or case.kind, []).append((value, sides[condition][case]))
    means = {name: np.mean(pairs, axis=0) for name, pairs in groups.items()}
    return {name: (float(before), float(after)) for name, (before, after) in means.items()}
