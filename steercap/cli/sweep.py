"""`steercap sweep`: answers steered by vectors at layers and scales, with controls, from flags or a YAML file."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from steercap.cli.command import command
from steercap.cli.destinations import folder_ready
from steercap.cli.engines import ReachOptions
from steercap.cli.parsing import Concurrency, FirstRow, names_of, numbers_of
from steercap.cli.preflight import Preflight, preflight, reached
from steercap.cli.sweep_file import measure_of, measures_in, not_none, read_settings, sweep_of
from steercap.cli.tables import titled
from steercap.cli.terminal import Terminal
from steercap.core.extras import require

if TYPE_CHECKING:
    from steercap.lab.studies.sweeps import Effect, Measure, Sweep, SweepResults
    from steercap.lab.studies.sweeps.summaries import Mean
    from steercap.model import SteerModel


async def swept(
    model: SteerModel, sweep: Sweep, measures: list[str | Measure], out: Path, terminal: Terminal, **how: Any
) -> SweepResults:
    """Run a sweep in the folder `out` with progress bars, resuming earlier work; `how` is as for `run_sweep`.

    Raises:
        The errors of `run_sweep`.
    """
    from steercap.lab.studies.sweeps import run_sweep

    with terminal.progress() as tell:
        return await run_sweep(model, sweep, out=out, measures=measures, progress=tell, **how)


def check(sweep: Sweep, measures: list[str | Measure], out: Path, planned: Preflight) -> None:
    """Check before a model starts that a sweep, its measures and its folder are valid for the model of `planned`.

    Raises:
        MissingExtra: the extra "experiments" or "plots" is not installed.
        InvalidSpec: two measures have one name, or one has the name of another column of the table.
        RunDiffers, InvalidFile: the folder holds another sweep.
        PointNotArmed, InvalidVector: the vectors do not fit the model.
    """
    from steercap.lab.studies import check_same
    from steercap.lab.studies.running import measures_of
    from steercap.lab.studies.sweeps.grid import SWEEP
    from steercap.lab.studies.sweeps.summaries import Record

    require("experiments", "plots")
    measures_of(measures, Record.__struct_fields__)
    check_same(SWEEP, out, sweep)
    for name, vectors in sweep.vectors.items():
        planned.check_width(vectors.width, f"{name!r}")
        planned.check_layers({layer for layers in sweep.groups for layer in layers}, vectors.site)


def _layers(text: str | None) -> list[int | list[int]] | None:
    """Parse `--layers`: "10,10+12+14" becomes [10, [10, 12, 14]], whose inner list is steered at once."""
    if text is None:
        return None
    try:
        groups = [[int(part) for part in group.split("+")] for group in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}: give layers such as 10,14, or 10+12+14 at once", param_hint="--layers"
        ) from None
    return [group[0] if len(group) == 1 else group for group in groups]


def _parse_optional(text: str | None, parse: Callable[[str], Any]) -> Any:
    return None if text is None else parse(text)


def register(app: typer.Typer) -> None:
    """Add the command `sweep` to `app`."""

    @command(
        app,
        "sweep",
        examples=[
            "steercap sweep --vectors mood.safetensors --layers 12,18 --scales 1,2 --prompts p.txt --out out/mood",
            "steercap sweep sweep.yaml --out out/sweep --measures perplexity,score:optimistic",
        ],
    )
    async def sweep(
        model: ReachOptions,
        terminal: Terminal,
        out: Annotated[Path, typer.Option(file_okay=False, help="Folder for answers, results.parquet and pictures.")],
        config: Annotated[
            Path | None,
            typer.Argument(exists=True, dir_okay=False, metavar="YAML", help="Settings; flags take precedence."),
        ] = None,
        vectors: Annotated[
            Path | None, typer.Option(exists=True, dir_okay=False, help="File of vectors or directions.")
        ] = None,
        names: Annotated[str | None, typer.Option(help="Directions to use, separated by commas (default all).")] = None,
        layers: Annotated[str | None, typer.Option(help="Layers, each alone (10,14) or together (10+12+14).")] = None,
        scales: Annotated[str | None, typer.Option(help="Vector multipliers, such as 0.5,1,2.")] = None,
        operations: Annotated[str | None, typer.Option(help="Operations: add, ablate, cap, set_projection.")] = None,
        prompts: Annotated[
            Path | None, typer.Option(exists=True, dir_okay=False, help="File of prompts: one per line, or .jsonl.")
        ] = None,
        chat: Annotated[bool | None, typer.Option("--chat/--no-chat", help="Apply the chat template.")] = None,
        tokens: Annotated[str | None, typer.Option(help="Tokens to steer (default generated).")] = None,
        relative: Annotated[
            bool | None, typer.Option("--relative/--absolute", help="Scales are fractions of each row's norm.")
        ] = None,
        random: Annotated[
            int | None, typer.Option(min=0, help="Number of random control vectors of equal norm (default 20).")
        ] = None,
        negated: Annotated[
            bool | None, typer.Option("--negated/--no-negated", help="Also sweep negated scales.")
        ] = None,
        measures: Annotated[
            str | None,
            typer.Option(
                help="Measures, separated by commas: length, perplexity, repetition, score:TRAIT, score:FILE.yaml "
                "(default repetition)."
            ),
        ] = None,
        max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum tokens to generate (default 64).")] = None,
        temperature: Annotated[
            float | None, typer.Option(min=0.0, help="Sampling temperature (default 0: greedy).")
        ] = None,
        samples: Annotated[int | None, typer.Option(min=1, help="Number of answers per prompt (default 1).")] = None,
        seed: Annotated[int | None, typer.Option(help="Seed of sampling and of random vectors.")] = None,
        concurrency: Concurrency = None,
        first_row: FirstRow = None,
        plot: Annotated[bool, typer.Option("--plot/--no-plot", help="Plot each measure against the scale.")] = True,
    ) -> None:
        """Steer by each vector at each layer and scale, on the same prompts, and measure the answers. Controls run
        alongside: no steering, the negated vector, and random vectors of equal norm. An effect within their range is no
        effect. Finished work is kept in --out; an interrupted sweep is resumed by the same call. The YAML file has the
        keys of the flags.
        """
        flags: dict[str, Any] = {
            "vectors": _parse_optional(str(vectors) if vectors else None, str),
            "names": _parse_optional(names, names_of),
            "layers": _layers(layers),
            "scales": _parse_optional(scales, partial(numbers_of, option="--scales")),
            "operations": _parse_optional(operations, names_of),
            "prompts": _parse_optional(str(prompts) if prompts else None, str),
            "measures": _parse_optional(measures, measures_in),
            "negated": negated,
            "concurrency": concurrency,
        }
        same = {
            "chat": chat,
            "tokens": tokens,
            "relative": relative,
            "random": random,
            "first_row": first_row,
            "seed": seed,
        }
        flags |= {**same, "max_tokens": max_tokens, "temperature": temperature, "samples": samples}
        model.require_there()
        folder_ready(out)
        settings = read_settings(config, flags)
        asked, chosen = sweep_of(settings, flags), [measure_of(measure) for measure in settings.measures]
        site = next(iter(asked.vectors.values())).site
        check(asked, chosen, out, preflight(model, sites=site))
        terminal.say(f"{sum(1 for _ in asked.requests()):,} answers under {len(asked.conditions()):,} conditions")
        async with reached(model, terminal, sites=site) as open_model:
            results = await swept(open_model, asked, chosen, out, terminal, **not_none(settings, "concurrency"))
            report(results, out, terminal, plot=plot)


def table_of(results: SweepResults, measure: str) -> Table:
    """Return a table of one measure's means: a row per vector, operation, layers and scale, beside the controls."""
    effects = results.effects(measure)
    several = len({one.condition.vector for one in effects}) > 1, len({one.condition.operation for one in effects}) > 1
    varied = [name for shown, name in zip(several, ("vector", "operation"), strict=True) if shown]
    table = titled(
        measure,
        (*varied, "layers", "scale", "steered", "none", "negated", "random", "outside", "sd"),
        words=varied,
        caption="outside: distance beyond the range of the random vectors, in widths of that range; sd: distance "
        "from their mean, in their standard deviations",
    )
    for one in effects:
        at = one.condition
        table.add_row(
            *(text for shown, text in zip(several, (at.vector, at.operation), strict=True) if shown),
            "+".join(map(str, at.layers)),
            f"{at.scale:g}",
            Text(_number(one.steered.value), style="bold" if one.outside else ""),
            _number(one.plain.value),
            _number(one.negated.value) if one.negated is not None else "",
            f"{_number(min(one.random))} to {_number(max(one.random))}" if one.random else "",
            "" if math.isnan(one.outside) else f"{one.outside:.1f}×",
            "" if math.isnan(one.deviations) else f"{one.deviations:+.1f}",
        )
    return table


def document_of(results: SweepResults, out: Path) -> dict[str, Any]:
    """Return the effects of conditions by measure as a document for JSON, with NaN and infinity as null."""

    def plain(effect: Effect) -> dict[str, Any]:
        negated: Mean | None = effect.negated
        return {
            **msgspec.to_builtins(effect.condition),
            "steered": effect.steered,
            "none": effect.plain,
            "negated_mean": negated,
            "random": effect.random,
            "outside": effect.outside if math.isfinite(effect.outside) else None,
            "deviations": effect.deviations if math.isfinite(effect.deviations) else None,
        }

    effects = {measure: [plain(effect) for effect in results.effects(measure)] for measure in results.values}
    return {"out": str(out), "answers": len(results.records), "effects": effects}


def drawn(results: SweepResults, out: Path) -> list[Path]:
    """Draw a picture per vector into the folder `out`; return their paths, [] if nothing was measured.

    A picture has the vector's name with "_" for all but letters and digits, and a number where another has that too.
    """
    names: dict[str, str] = {}
    for vector in results.sweep.vectors if results.values else ():
        safe = "".join(letter if letter.isalnum() else "_" for letter in vector)
        numbered = (f"{safe}_{number}" for number in count(2))
        names[next(name for name in chain([safe], numbered) if name not in names)] = vector
    return [results.plot(out / f"{name}.png", vector=vector) for name, vector in names.items()]


def report(results: SweepResults, out: Path, terminal: Terminal, *, plot: bool) -> None:
    """Show the effects on stdout; with `plot`, draw them into the folder `out` first.

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
