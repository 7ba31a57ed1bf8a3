"""Results of a run over roles, as tables and for JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from steercap.cli.tables import titled

if TYPE_CHECKING:
    from steercap.lab.personas.roles import AssistantAxis, RoleRun, Stability


def along(axis: AssistantAxis, run: RoleRun, layer: int) -> Table:
    """Return a table of roles and assistant along the axis, the assistant's end last."""
    table = titled(
        f"along the assistant axis ({axis.how}), layer {layer}",
        ("role", "projection", "kept", "of", "score"),
        words=("role",),
        caption="projection: of the mean row, less the mean of the roles",
    )
    for name, place in axis.ranked(layer):
        one = run.outcomes[name]
        score = "" if one.mean_score is None else f"{one.mean_score:.0f}"
        table.add_row(Text(name, style="cyan"), f"{place:+.2f}", str(one.kept), str(one.responses), score)
    return table


def by_layer(axis: AssistantAxis, found: Stability) -> Table:
    """Return a table of the axis at each layer, with its stability beside chance."""
    shared = "questions" if found.over == "questions" else "roles and questions"
    table = titled(
        f"the axis ({axis.how}) by layer",
        ("layer", "length", "cosine with PC1", "variance of PC1", "assistant on PC1", "halves", "dealt out", "random"),
        caption=f"halves: cosine of the axes of two halves of the {shared}, median and 90 % of {found.splits} splits; "
        "dealt out: the same with the answers assigned to roles at random",
    )
    ways = [(found.median(axis.how, of), found.band(axis.how, of)) for of in ("found", "permuted", "random")]
    for layer, length in axis.vectors.norms().items():
        cells = (f"{median[layer]:+.2f} ({band[layer][0]:+.2f} to {band[layer][1]:+.2f})" for median, band in ways)
        table.add_row(
            str(layer),
            f"{length:.3g}",
            f"{axis.cosine[layer]:.2f}",
            f"{axis.explained[layer][0]:.0%}",
            f"{axis.standing[layer]:.1f} SD",
            *cells,
        )
    return table


def document_of(axis: AssistantAxis, run: RoleRun) -> dict[str, Any]:
    """Return the axis without its vectors, for JSON."""
    return {
        "folder": str(run.folder),
        "model": axis.vectors.model,
        "how": axis.how,
        "outcomes": run.outcomes,
        "positions": {name: dict(by_layer) for name, by_layer in axis.positions.items()},
        "explained": dict(axis.explained),
        "cosine": dict(axis.cosine),
        "standing": dict(axis.standing),
    }
