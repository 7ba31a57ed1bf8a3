"""`steercap analyse`: analysis of vectors by the weights of a checkpoint, without an engine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from steercap.cli.command import command
from steercap.cli.contents import directions_in, load
from steercap.cli.destinations import folder_ready
from steercap.cli.engines import SMOLLM2, located
from steercap.cli.parsing import base_of, names_of
from steercap.cli.tables import facts, titled
from steercap.cli.terminal import Terminal
from steercap.core.extras import require

if TYPE_CHECKING:
    import pyarrow as pa

    from steercap.lab.mechanism.analysis import Anatomy
    from steercap.saes.sae import SAE
    from steercap.steering.directions import DirectionSet

#: Column to sort a part's rows by, greatest absolute value first.
SORTED: Final = {"heads": "copied_z"}
#: Parts with one table for all vectors together.
OF_ALL: Final = frozenset({"scores", "ends"})


def table_of(part: str, table: pa.Table, rows: int) -> Table:
    """Return the first rows of each vector, or of the whole table if it covers all vectors."""
    from steercap.lab.mechanism.analysis import PARTS, about

    once = about(table).get("once")
    said = None if once is None else f"by chance one number of each vector is beyond |z| = {once:.1f}"
    words = {"name", "token", "first", "second", "end"}
    shown = titled(f"{part}: {PARTS[part]}", table.column_names, words=words, caption=said)
    for row in first_rows(part, table, rows):
        shown.add_row(*(_cell(name, row[name]) for name in table.column_names))
    return shown


def first_rows(part: str, table: pa.Table, rows: int) -> list[dict[str, Any]]:
    """Return the rows of a table to show: in parts of `SORTED` the greatest first, in all others in their order."""
    found: list[dict[str, Any]] = table.to_pylist()
    if part in SORTED:
        found.sort(key=lambda row: -abs(row[SORTED[part]]))
    if "name" not in table.column_names or part in OF_ALL:
        return found[: rows * 3]
    names, counts, kept = list(dict.fromkeys(table["name"].to_pylist())), Counter[Any](), []
    for row in found:
        group = tuple(row.get(mark) for mark in ("name", "end", "half", "part"))
        counts[group] += 1
        kept += [row] if counts[group] <= rows else []
    return sorted(kept, key=lambda row: names.index(row["name"]))


def _cell(column: str, value: Any) -> Text:
    if isinstance(value, float):
        return Text(f"{value:+.3f}")
    return Text(repr(value) if column == "token" else str(value), style="cyan" if column == "name" else "")


def written(found: Anatomy, out: Path | None) -> list[Path]:
    """Write every table and picture to a folder; return the paths."""
    from steercap.lab.mechanism.analysis import draw_anatomy, save_table

    if out is None:
        return []
    out.mkdir(parents=True, exist_ok=True)
    tables = [save_table(table, out / f"{part}.parquet") for part, table in found.tables.items()]
    return [*tables, *draw_anatomy(found.tables, out)]


def report(found: Anatomy, about: dict[str, Any], out: Path | None, terminal: Terminal, rows: int) -> None:
    """Write tables and pictures, and show the tables.

    Raises:
        OSError: the folder cannot be written.
    """
    files = written(found, out)
    document = {
        **about,
        "tables": {part: table.to_pylist() for part, table in found.tables.items()},
        "left_out": found.left_out,
        "files": list(map(str, files)),
    }
    shown = [table_of(part, table, rows) for part, table in found.tables.items()]
    said = {**about, **{f"no {part}": reason for part, reason in found.left_out.items()}, "files": out or ""}
    terminal.show(document, *shown, facts("", said))


def sae_of(path: Path | None) -> SAE | None:
    """Load the SAE in a folder; None if no folder is given."""
    if path is None:
        return None
    from steercap.saes.sae import SAE

    return SAE.load(path)


def one_layer(directions: DirectionSet, layer: int | None) -> int:
    """Return the given layer, or the middle one of the directions' layers."""
    at = directions.layers[len(directions.layers) // 2] if layer is None else layer
    (found,) = directions.at_layers([at]).layers  # raises an error that names the layers that exist
    return found


def register(app: typer.Typer) -> None:
    """Add the command."""

    @command(
        app,
        "analyse",
        examples=[
            "steercap analyse traits.safetensors --layer 16 --out out/anatomy",
            "steercap analyse poetic.safetensors --parts tokens,heads --top 5 --json",
            "steercap analyse poetic.safetensors --model Qwen/Qwen3-0.6B --sae saes/layer-16",
        ],
    )
    def analyse(
        file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="File of vectors or directions.")],
        terminal: Terminal,
        model: Annotated[
            str, typer.Option("--model", "-m", help="Model: hub name, path, or [cyan]smollm2[/cyan].")
        ] = SMOLLM2,
        layer: Annotated[int | None, typer.Option(help="Layer of the vectors (default: the middle one).")] = None,
        names: Annotated[str | None, typer.Option(help="Directions to use, separated by commas (default all).")] = None,
        parts: Annotated[
            str | None,
            typer.Option(
                help="Analyses (default all): cosines, tree, scree, scores, ends, tokens, nearest, heads, reads, "
                "writes, features."
            ),
        ] = None,
        sae: Annotated[
            Path | None, typer.Option(file_okay=False, help="Folder of an SAE of this layer and site.")
        ] = None,
        top: Annotated[int, typer.Option(min=1, help="Number of tokens, neurons and features listed per vector.")] = 8,
        random: Annotated[int, typer.Option(min=20, help="Number of random vectors to compare heads with.")] = 1000,
        seed: Annotated[int, typer.Option(help="Seed of the random vectors.")] = 0,
        base: Annotated[
            int | None, typer.Option(min=0, max=1, help="Index of layer 0 in a .pt tensor: 0 or 1.")
        ] = None,
        out: Annotated[
            Path | None, typer.Option(file_okay=False, help="Folder for all tables (Parquet) and pictures.")
        ] = None,
    ) -> None:
        """Analyse vectors by the weights of their model: their cosines, the tokens they promote, the heads that copy
        them, the neurons that read and write them, each in z-scores against random vectors of equal norm. No engine is
        started. Tables show the extreme rows; --out saves all of them, with pictures.
        """
        require("analysis")
        if out is not None:
            folder_ready(out)
        directions = directions_in(load(file, base=base_of(base)), file)
        directions = directions if names is None else directions.select(names_of(names))
        at = one_layer(directions, layer)
        with terminal.status(f"reading weights of {model}"):
            from steercap.lab.mechanism.analysis import ModelWeights, anatomy

            weights = ModelWeights.open(located(model))
            chosen = None if parts is None else names_of(parts)
            reads = sae_of(sae)
            found = anatomy(directions, weights, at, sae=reads, parts=chosen, top=top, random=random, seed=seed)
        about = {"model": weights.name, "site": directions.site, "layer": at, "random": random, "seed": seed}
        report(found, about, out, terminal, top)
