"""`steercap sweep`: vectors at layers and scales, with their controls, from flags or a YAML file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from steercap.cli.command import command
from steercap.cli.contents import directions_in, load
from steercap.cli.destinations import folder_ready
from steercap.cli.engines import ModelOptions, opened
from steercap.cli.foreseen import Foreseen, check_sampling, foreseen
from steercap.cli.persona import is_file, trait_of
from steercap.cli.prompts import PromptOptions
from steercap.cli.selections import names_of, numbers_of, tokens_of
from steercap.cli.steering import base_of
from steercap.cli.terminal import Terminal
from steercap.core.extras import extra, require
from steercap.errors import InvalidFile

if TYPE_CHECKING:
    from steercap.experiments import Effect, Measure, Sweep, SweepResults
    from steercap.experiments.summaries import Mean
    from steercap.model import SteerModel


class SweepFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a YAML file of a sweep holds; see `steercap.experiments.Sweep`. Flags say the same, and come first.

    Args:
        vectors: file of vectors or directions; a path from the folder of the YAML file.
        names: which of its directions; all if left out.
        base: of a `.pt`, the row of layer 0.
        layers: each alone, or several at once: `[10, [10, 12, 14]]`.
        scales: factors.
        prompts: a file of prompts, or texts.
        chat: whether prompts go through the chat template.
        operations, relative, random, reversed, seed, samples: as of `Sweep`.
        tokens: which are steered, as in the shell.
        max_tokens, temperature: of the sampling.
        measures: names in `MEASURES`; "score:evil" is the score of a trait, "score:evil:keywords" by another scorer; a
            trait of one's own is a file, "score:mine.yaml", its path from the folder of the YAML file.
    """

    vectors: str
    layers: tuple[int | tuple[int, ...], ...]
    scales: tuple[float, ...]
    prompts: str | tuple[str, ...]
    names: tuple[str, ...] | None = None
    base: int | None = None
    chat: bool = False
    operations: tuple[str, ...] = ("add",)
    tokens: str = "generated"
    relative: bool = False
    random: int = 20
    reversed: bool = True
    seed: int = 0
    samples: int = 1
    max_tokens: int = 64
    temperature: float = 0.0
    measures: tuple[str, ...] = ("repetition",)


def read_settings(path: Path | None, flags: Mapping[str, Any]) -> SweepFile:
    """The settings of a YAML file, if there is one, with what flags say in their place.

    Raises:
        InvalidFile: no YAML, or a key that is unknown or does not fit.
        typer.BadParameter: something that neither says.
    """
    with extra("experiments"):
        import yaml

    found: Any = {}
    if path is not None:
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise InvalidFile(f"{path} cannot be read as YAML: {error}") from error
        if not isinstance(found, dict):
            raise InvalidFile(f"{path} holds {type(found).__name__}; give keys and values, such as vectors: file")
        for name in ("vectors", "prompts"):
            if isinstance(found.get(name), str):
                found[name] = str(path.parent / found[name])
        if isinstance(found.get("measures"), list):
            found["measures"] = [_from(path.parent, measure) for measure in found["measures"]]
    found |= {name: value for name, value in flags.items() if value is not None}
    if missing := [name for name in ("vectors", "layers", "scales", "prompts") if name not in found]:
        raise typer.BadParameter(
            f"give --{missing[0]}, or a YAML file with {missing[0]}:", param_hint=f"--{missing[0]}"
        )
    try:
        return msgspec.convert(found, SweepFile)
    except msgspec.ValidationError as error:
        raise InvalidFile(f"{path or 'the flags'}: {error}; known: {', '.join(SweepFile.__struct_fields__)}") from error


def sweep_of(settings: SweepFile) -> Sweep:
    """The sweep that settings describe.

    Raises:
        InvalidFile: vectors or prompts that cannot be read.
        InvalidSpec: what `Sweep` refuses.
    """
    from steercap.experiments import Sweep

    path = Path(settings.vectors)
    directions = directions_in(load(path, base=base_of(settings.base)), path)
    if isinstance(settings.prompts, str):
        prompts = PromptOptions(file=settings.prompts, chat=settings.chat).read()
    else:
        prompts = PromptOptions(prompts=list(settings.prompts), chat=settings.chat).read()
    return Sweep(
        vectors=directions if settings.names is None else directions.select(settings.names),
        layers=settings.layers,
        scales=settings.scales,
        prompts=[prompt.content for prompt in prompts],
        operations=settings.operations,
        tokens=tokens_of(settings.tokens),
        relative=settings.relative,
        random=settings.random,
        reversed=settings.reversed,
        seed=settings.seed,
        sampling={"max_tokens": settings.max_tokens, "temperature": settings.temperature},
        samples=settings.samples,
    )


def measure_of(text: str) -> str | Measure:
    """A measure by name, or the score of a trait: "score:evil", "score:evil:keywords", "score:mine.yaml".

    Raises:
        UnknownName: no such measure, trait or scorer.
        InvalidFile: a YAML file that holds no trait.
        typer.BadParameter: a score without a trait.
    """
    from steercap.experiments import MEASURES
    from steercap.experiments.measures.score import Score

    name, colon, rest = text.partition(":")
    trait, scorer = _scored(rest)
    if name == "score" and trait:
        return Score(trait_of(trait), *scorer)
    if name == "score" or colon:
        raise typer.BadParameter(
            f"{text!r}: give a measure, or score:TRAIT, or score:TRAIT:SCORER, where TRAIT is a name or a YAML file",
            param_hint="--measures",
        )
    _ = MEASURES[name]
    return name


def _scored(text: str) -> tuple[str, list[str]]:
    """The trait of a score, and its scorer if one is named; a path may hold colons."""
    trait, colon, scorer = text.rpartition(":")
    return (trait, [scorer]) if colon and not is_file(text) else (text, [])


def _from(folder: Path, measure: Any) -> Any:
    """A measure whose trait is a file, its path from a folder."""
    if not isinstance(measure, str) or not measure.startswith("score:"):
        return measure
    trait, scorer = _scored(measure.removeprefix("score:"))
    return ":".join(["score", str(folder / trait), *scorer]) if is_file(trait) else measure


async def swept(
    model: SteerModel, sweep: Sweep, measures: list[str | Measure], out: Path, terminal: Terminal
) -> SweepResults:
    """Run a sweep with a bar; what was done before is done no more.

    Args:
        model: an open model.
        sweep: what is asked.
        measures: of the answers.
        out: folder of answers, values and results.
        terminal: for the bar.

    Raises:
        The errors of `run_sweep`.
    """
    from steercap.experiments import run_sweep

    with terminal.progress() as bar:
        task = bar.add_task("answering", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            if done == total:
                bar.add_task("measuring", total=None)

        return await run_sweep(model, sweep, out=out, measures=measures, progress=progress)


def table_of(results: SweepResults, measure: str) -> Table:
    """A row a vector and scale, beside its controls."""
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
    """Effects by measure, for JSON; NaN is null there."""

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
    """A picture a vector, in the folder of the sweep."""
    names = {name: "".join(letter if letter.isalnum() else "_" for letter in name) for name in results.sweep.vectors}
    return [results.plot(out / f"{safe}.png", vector=name) for name, safe in names.items()] if results.values else []


def check(sweep: Sweep, measures: list[str | Measure], out: Path, planned: Foreseen) -> None:
    """See that a sweep can be run.

    Args:
        sweep: what is asked.
        measures: of the answers.
        out: its folder.
        planned: the engine.

    Raises:
        MissingExtra: the extra "experiments" or "plots" is not installed.
        InvalidSpec: two measures of one name, or one called as a column of the table.
        RunDiffers, InvalidFile: the folder holds another sweep.
        PointNotArmed, InvalidVector: the vectors do not fit the model.
    """
    from steercap.experiments.running import measures_of
    from steercap.experiments.store import check_same

    require("experiments", "plots")
    measures_of(measures)
    check_same(out, sweep)
    for name, vectors in sweep.vectors.items():
        planned.check_width(vectors.width, f"{name!r}")
        planned.check_layers({layer for layers in sweep.groups for layer in layers}, vectors.site)


def report(results: SweepResults, out: Path, terminal: Terminal, *, plot: bool) -> None:
    """Show the effects, and draw them.

    Raises:
        OSError: a picture cannot be written; all else has been shown.
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


def _layers(text: str | None) -> list[int | list[int]] | None:
    """Layers from "10,14", each alone, or "10,10+12+14", the last three at once."""
    if text is None:
        return None
    try:
        groups = [[int(part) for part in group.split("+")] for group in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}: give layers such as 10,14, or 10+12+14 at once", param_hint="--layers"
        ) from None
    return [group[0] if len(group) == 1 else group for group in groups]


def _given(text: str | None, how: Callable[[str], Any]) -> Any:
    return None if text is None else how(text)


def register(app: typer.Typer) -> None:
    """Add the command."""

    @command(
        app,
        "sweep",
        examples=[
            "steercap sweep --vectors mood.safetensors --layers 12,18 --scales 1,2 --prompts p.txt --out out/mood",
            "steercap sweep sweep.yaml --out out/sweep --measures perplexity,score:optimistic",
        ],
    )
    async def sweep(
        model: ModelOptions,
        terminal: Terminal,
        out: Annotated[Path, typer.Option(file_okay=False, help="Folder of answers, results.parquet and pictures.")],
        config: Annotated[
            Path | None,
            typer.Argument(exists=True, dir_okay=False, metavar="YAML", help="Settings; flags come first."),
        ] = None,
        vectors: Annotated[
            Path | None, typer.Option(exists=True, dir_okay=False, help="Vectors or directions.")
        ] = None,
        names: Annotated[str | None, typer.Option(help="Which of the directions; all if left out.")] = None,
        layers: Annotated[str | None, typer.Option(help="Each alone: 10,14; or together: 10+12+14.")] = None,
        scales: Annotated[str | None, typer.Option(help="Such as 0.5,1,2.")] = None,
        operations: Annotated[str | None, typer.Option(help="add, ablate, cap, set_projection.")] = None,
        prompts: Annotated[
            Path | None, typer.Option(exists=True, dir_okay=False, help="A prompt a line, or .jsonl.")
        ] = None,
        chat: Annotated[bool | None, typer.Option("--chat/--no-chat", help="Use the chat template.")] = None,
        tokens: Annotated[str | None, typer.Option(help="Which are steered; generated if left out.")] = None,
        relative: Annotated[
            bool | None, typer.Option("--relative/--absolute", help="Scales are shares of a row.")
        ] = None,
        random: Annotated[
            int | None, typer.Option(min=0, help="Random vectors of the same norm; 20 if left out.")
        ] = None,
        turned: Annotated[bool | None, typer.Option("--reversed/--no-reversed", help="The other sign too.")] = None,
        measures: Annotated[
            str | None,
            typer.Option(
                help="length, perplexity, repetition, score:TRAIT, score:FILE.yaml; several with commas; repetition "
                "if left out."
            ),
        ] = None,
        max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")] = None,
        temperature: Annotated[float | None, typer.Option(min=0.0, help="0 takes the likeliest.")] = None,
        samples: Annotated[int | None, typer.Option(min=1, help="Answers to each prompt.")] = None,
        seed: Annotated[int | None, typer.Option(help="Of the draws.")] = None,
        base: Annotated[int | None, typer.Option(min=0, max=1, help="Of a .pt tensor: the row of layer 0.")] = None,
        plot: Annotated[bool, typer.Option("--plot/--no-plot", help="Draw each vector's doses.")] = True,
    ) -> None:
        """Steer by each vector at each layer and scale, on the same prompts, and measure the answers. Beside each
        stand its controls: no steering, the other sign, and random vectors of the same norm. An effect inside
        their range is none. What is done is kept in --out, so that a sweep that was interrupted goes on when it is
        called again. The YAML file has the keys of the flags.
        """
        flags: dict[str, Any] = {
            "vectors": _given(str(vectors) if vectors else None, str),
            "names": _given(names, names_of),
            "layers": _layers(layers),
            "scales": _given(scales, numbers_of),
            "operations": _given(operations, names_of),
            "prompts": _given(str(prompts) if prompts else None, str),
            "measures": _given(measures, names_of),
            "reversed": turned,
        }
        same = {"chat": chat, "tokens": tokens, "relative": relative, "random": random, "base": base, "seed": seed}
        flags |= {**same, "max_tokens": max_tokens, "temperature": temperature, "samples": samples}
        model.require_there()
        folder_ready(out)
        settings = read_settings(config, flags)
        check_sampling(temperature=settings.temperature, max_tokens=settings.max_tokens)
        asked, chosen = sweep_of(settings), [measure_of(measure) for measure in settings.measures]
        site = next(iter(asked.vectors.values())).site
        check(asked, chosen, out, foreseen(model, sites=site))
        terminal.say(f"{sum(1 for _ in asked.requests()):,} answers under {len(asked.conditions()):,} conditions")
        async with opened(model, terminal, sites=site) as open_model:
            results = await swept(open_model, asked, chosen, out, terminal)
            report(results, out, terminal, plot=plot)
