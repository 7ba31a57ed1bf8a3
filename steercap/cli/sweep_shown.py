"""Results of a sweep: a table per measure, a JSON document, a picture per vector."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.table import Table
from rich.text import Text

from steercap.cli.terminal import Terminal

if TYPE_CHECKING:
    from steercap.lab.studies.sweeps import Effect, SweepResults
    from steercap.lab.studies.sweeps.summaries import Mean


def table_of(results: SweepResults, measure: str) -> Table:
    """Return a table with a row per vector and scale, beside its controls."""
    effects = results.effects(measure)
    table = Table(
        title=measure,
        title_justify="left",
        title_style="bold",
        caption="outside: beyond the range of the random vectors, in widths of it; sd: from their mean, in their "
        "standard deviations",
        caption_justify="left",
    )
    several = len({one.condition.vector for one in effects}) > 1, len({one.condition.operation for one in effects}) > 1
    for shown, name in zip((*several, True, True), ("vector", "operation", "layers", "scale"), strict=True):
        if shown:
            table.add_column(name, justify="left" if name in {"vector", "operation"} else "right")
    for name in ("steered", "none", "reversed", "random", "outside", "sd"):
        table.add_column(name, justify="right")
    for one in effects:
        at = one.condition
        table.add_row(
            *(text for shown, text in zip(several, (at.vector, at.operation), strict=True) if shown),
            "+".join(map(str, at.layers)),
            f"{at.scale:g}",
            Text(_number(one.steered.value), style="bold" if one.outside else ""),
            _number(one.plain.value),
            _number(one.turned.value) if one.turned is not None else "",
            f"{_number(min(one.random))} to {_number(max(one.random))}" if one.random else "",
            "" if math.isnan(one.outside) else f"{one.outside:.1f}×",
            "" if math.isnan(one.deviations) else f"{one.deviations:+.1f}",
        )
    return table


def document_of(results: SweepResults, out: Path) -> dict[str, Any]:
    """Return the effects by measure, for JSON, with NaN as null."""

    def plain(effect: Effect) -> dict[str, Any]:
        turned: Mean | None = effect.turned
        return {
            **msgspec.to_builtins(effect.condition),
            "steered": effect.steered,
            "none": effect.plain,
            "reversed_mean": turned,
            "random": effect.random,
            "outside": effect.outside if math.isfinite(effect.outside) else None,
            "deviations": effect.deviations if math.isfinite(effect.deviations) else None,
        }

    effects = {measure: [plain(effect) for effect in results.effects(measure)] for measure in results.values}
    return {"out": str(out), "answers": len(results.records), "effects": effects}


def drawn(results: SweepResults, out: Path) -> list[Path]:
    """Draw a picture per vector in the folder of the sweep; return the paths."""
    names = {name: "".join(letter if letter.isalnum() else "_" for letter in name) for name in results.sweep.vectors}
    return [results.plot(out / f"{safe}.png", vector=name) for name, safe in names.items()] if results.values else []


def report(results: SweepResults, out: Path, terminal: Terminal, *, plot: bool) -> None:
    """Show the effects, and draw them.

    Raises:
        OSError: a picture cannot be written; everything else has been shown.
    """
    pictures, failed = [], None
    try:
        pictures = drawn(results, out) if plot else []
    except OSError as error:
        failed = error
    document = {**document_of(results, out), "pictures": list(map(str, pictures))}
    terminal.show(document, *(table_of(results, measure) for measure in results.values), f"{out}/results.parquet")
    if failed is not None:
        raise failed


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3g}"
