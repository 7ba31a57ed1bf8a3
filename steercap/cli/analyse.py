"""`steercap analyse`, `steercap compare`: analysis of vectors by the weights of one or two models, without engine."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from steercap.cli.command import command
from steercap.cli.contents import FILES, directions_in, group_in, kind_of, load
from steercap.cli.destinations import Force, folder_ready, may_replace
from steercap.cli.engines import SMOLLM2, located
from steercap.cli.parsing import FirstRow, Level, first_row_of, layers_of, names_of, refuse
from steercap.cli.tables import facts, titled
from steercap.cli.terminal import Terminal
from steercap.core.extras import require

if TYPE_CHECKING:
    import pyarrow as pa

    from steercap.lab.mechanism.analysis import Anatomy
    from steercap.lab.mechanism.comparison import CheckpointComparison
    from steercap.saes.sae import SAE
    from steercap.steering.directions import DirectionSet

#: Column by which an analysis's table is sorted, greatest absolute value first, by name of the analysis.
SORTED: Final = {"heads": "copied_z"}
#: Names of analyses with one table for all vectors together.
OF_ALL: Final = frozenset({"scores", "ends"})


def table_of(part: str, table: pa.Table, rows: int) -> Table:
    """Return the terminal table of the analysis `part`, with the rows of `first_rows`."""
    from steercap.lab.mechanism.analysis import PARTS, about

    once = about(table).get("once")
    said = None if once is None else f"by chance, one number per vector is beyond |z| = {once:.1f}"
    words = {"name", "token", "first", "second", "end"}
    shown = titled(f"{part}: {PARTS[part]}", table.column_names, words=words, caption=said)
    for row in first_rows(part, table, rows):
        shown.add_row(*(_cell(name, row[name]) for name in table.column_names))
    return shown


def first_rows(part: str, table: pa.Table, rows: int) -> list[dict[str, Any]]:
    """Return the first rows of an analysis, in `SORTED` the greatest.

    There are at most `rows` per vector and group; in analyses of all vectors together, at most 3 × `rows`.
    """
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


def written(anatomy: Anatomy, out: Path | None) -> list[Path]:
    """Write the tables (Parquet) and pictures of an analysis to a folder; return their paths, [] if `out` is None."""
    from steercap.lab.mechanism.analysis import draw_anatomy, save_table

    if out is None:
        return []
    out.mkdir(parents=True, exist_ok=True)
    tables = [save_table(table, out / f"{part}.parquet") for part, table in anatomy.tables.items()]
    return [*tables, *draw_anatomy(anatomy.tables, out)]


def report(anatomy: Anatomy, about: dict[str, Any], out: Path | None, terminal: Terminal, rows: int) -> None:
    """Write the tables and pictures of an analysis to `out`, unless None, and show `rows` rows of each vector.

    Raises:
        OSError: the folder cannot be written.
    """
    files = written(anatomy, out)
    tables = {part: table.to_pylist() for part, table in anatomy.tables.items()}
    document = {**about, "tables": tables, "left_out": anatomy.left_out, "files": list(map(str, files))}
    shown = [table_of(part, table, rows) for part, table in anatomy.tables.items()]
    said = {**about, **{f"no {part}": reason for part, reason in anatomy.left_out.items()}, "files": out or ""}
    terminal.show(document, *shown, facts("", said))


def sae_of(path: Path | None) -> SAE | None:
    """Load the SAE in a folder; None if no folder is given."""
    if path is None:
        return None
    from steercap.saes.sae import SAE

    return SAE.load(path)


def one_layer(directions: DirectionSet, layer: int | None) -> int:
    """Return `layer`, or if it is None the middle one of the directions' layers; refuse one without directions."""
    at = directions.layers[len(directions.layers) // 2] if layer is None else layer
    (found,) = directions.at_layers([at]).layers  # raises an error that names the layers that exist
    return found


def group_name(path: Path) -> str:
    """Return a group's name: its file's or folder's, or the parent's of a folder `vectors` or `vectors_vllm_...`."""
    held = path.absolute()
    return held.parent.name if held.name == "vectors" or held.name.startswith("vectors_vllm_") else held.stem


def compared(comparison: CheckpointComparison, out: Path, terminal: Terminal) -> None:
    """Draw a comparison's pictures into `out`; show its components, and its groups at the layers in focus."""
    from steercap.lab.mechanism.comparison import draw_comparison

    pictures = draw_comparison(comparison.tables, out)
    files = [out / f"{name}.parquet" for name in comparison.tables] + pictures
    document = {"focus": comparison.focus, "left_out": comparison.left_out, "files": list(map(str, files))}
    words = {"component", "group", "measure"}
    shown = []
    for name in ("components", "by_layer"):
        table = titled(name.replace("_", " "), comparison.tables[name].column_names, words=words)
        for row in comparison.tables[name].to_pylist():
            if name == "components" or row["layer"] == comparison.focus[row["measure"]]:
                table.add_row(*(_cell(column, value) for column, value in row.items()))
        shown.append(table)
    said = {f"no {part}": reason for part, reason in comparison.left_out.items()}
    terminal.show(document, *shown, facts("", {**said, "files": out}))


def has_tensor(path: Path) -> bool:
    """Return whether a file, or one in a folder, is a `.pt` tensor of layers, which --first-row is for."""
    import torch

    from steercap.files.base import read_pt

    if path.is_dir():
        return any(has_tensor(one) for one in path.iterdir() if one.suffix in FILES)
    return kind_of(path) == "pt" and isinstance(read_pt(path), torch.Tensor)


def register_comparison(app: typer.Typer) -> None:
    """Add the command `compare` of two checkpoints to `app`."""

    @command(
        app,
        "compare",
        examples=[
            "steercap compare google/gemma-2-27b google/gemma-2-27b-it --vectors roles --vectors traits --layer 22",
            "steercap compare base/ instruct/ --vectors traits.safetensors --layer 22 --layers 17:28 --per-group 20",
        ],
    )
    def compare(
        base: Annotated[str, typer.Argument(help="First checkpoint: hub name or path.")],
        instruct: Annotated[str, typer.Argument(help="Second checkpoint, of the same architecture and size.")],
        terminal: Terminal,
        vectors: Annotated[
            list[Path],
            typer.Option(help="File or folder of vectors, or of persona files: a group, named after it."),
        ],
        layer: Annotated[int, typer.Option(min=0, help="Layer of the vectors.")],
        components: Annotated[
            Path | None,
            typer.Option(help="Vectors to follow in detail (default: ten principal components)."),
        ] = None,
        layers: Annotated[
            str | None,
            typer.Option(help="Layers of matrices and attention (default: from five before --layer to five after)."),
        ] = None,
        feed_forward_layers: Annotated[
            str | None,
            typer.Option(help="Layers of feed-forward blocks (default: from seven before --layer to two after)."),
        ] = None,
        per_group: Annotated[int, typer.Option(min=0, help="Vectors of each group to multiply by matrices.")] = 5,
        random: Annotated[int, typer.Option(min=2, help="Number of random vectors to multiply by matrices.")] = 20,
        nulls: Annotated[int, typer.Option(min=20, help="Random pairs of vectors to compare attention with.")] = 200,
        seed: Annotated[int, typer.Option(help="Seed of the random draws.")] = 0,
        correction: Annotated[str, typer.Option(help="Correction of the tests: holm, bh or none.")] = "holm",
        level: Level = None,
        raw: Annotated[bool, typer.Option("--raw", help="Do not subtract the default of persona files.")] = False,
        first_row: FirstRow = None,
        out: Annotated[
            Path, typer.Option(file_okay=False, help="Folder for tables (Parquet) and pictures; resumed.")
        ] = Path("out/comparison"),
    ) -> None:
        """Compare two checkpoints on the same vectors by their weights, layer by layer: how their matrices, whole
        feed-forward blocks and attention transform them. No engine is started; an interrupted run is resumed by the
        same call.
        """
        require("analysis")
        folder_ready(out)
        if first_row is not None and not any(
            map(has_tensor, [*vectors, *([] if components is None else [components])])
        ):
            why = f"{vectors[0]} says itself which layers it has; leave it out"
            raise typer.BadParameter(why, param_hint="--first-row")
        personas: list[str] = []  # what was read of persona files
        reading = partial(
            group_in, layer=layer, first_row=first_row_of(first_row), say=personas.append, level=level, raw=raw
        )
        groups = {group_name(path): reading(path) for path in vectors}
        axes = None if components is None else reading(components)
        if not personas:
            refuse("no group is of persona files NAME.pt", {"--level": level, "--raw": raw or None})
        for told in personas:
            terminal.say(told)
        if len(groups) < len(vectors):
            raise typer.BadParameter("two files or folders have the same name; rename one", param_hint="--vectors")
        from steercap.lab.mechanism.analysis import ModelWeights
        from steercap.lab.mechanism.comparison import CompareSettings
        from steercap.lab.mechanism.comparison import compare as run

        settings = CompareSettings(
            layers=None if layers is None else layers_of(layers),
            feed_forward_layers=None
            if feed_forward_layers is None
            else layers_of(feed_forward_layers, "--feed-forward-layers"),
            per_group=per_group,
            random=random,
            nulls=nulls,
            seed=seed,
            correction=correction,  # type: ignore[arg-type]
        )
        first, second = (ModelWeights.open(located(one)) for one in (base, instruct))
        with terminal.progress() as tell:
            found = run(first, second, groups, layer, components=axes, settings=settings, folder=out, progress=tell)
        compared(found, out, terminal)


def register(app: typer.Typer) -> None:
    """Add the commands `compare` and `analyse` to `app`."""
    register_comparison(app)

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
            Path | None, typer.Option(file_okay=False, help="SAE of this layer and site: its folder.")
        ] = None,
        top: Annotated[int, typer.Option(min=1, help="Number of tokens, neurons and features listed per vector.")] = 10,
        random: Annotated[int, typer.Option(min=20, help="Number of random vectors to compare heads with.")] = 1000,
        seed: Annotated[int, typer.Option(help="Seed of the random vectors.")] = 0,
        first_row: FirstRow = None,
        out: Annotated[
            Path | None, typer.Option(file_okay=False, help="Folder for all tables (Parquet) and pictures.")
        ] = None,
        force: Force = False,
    ) -> None:
        """Analyse vectors by the weights of their model: their cosines, the tokens they promote, the heads that copy
        them, the neurons that read and write them, each in z-scores against random vectors of equal norm. No engine is
        started. Tables show the extreme rows; --out saves all of them, with pictures.
        """
        require("analysis")
        if out is not None:
            folder_ready(out)
            may_replace(out, terminal, force=force, pattern="*.parquet")
        directions = directions_in(load(file, first_row=first_row_of(first_row)), file)
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
