"""`steercap persona run|levels|traits`: vectors of traits. Roles are in cli/roles.py, answers in cli/answers.py."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from steercap.cli import answers, roles
from steercap.cli.command import command, group_of
from steercap.cli.destinations import Force, folder_ready, may_replace
from steercap.cli.engines import ModelOptions, ReachOptions, pairs_of
from steercap.cli.parsing import layers_of
from steercap.cli.preflight import Preflight, check_sampling, preflight, reached
from steercap.cli.tables import document_of, facts, titled
from steercap.cli.terminal import Terminal
from steercap.core.extras import require
from steercap.core.values import choices

if TYPE_CHECKING:
    from steercap.cli.engines import ModelOptions
    from steercap.core.spec import Layers
    from steercap.lab.personas import PersonaResult, PersonaSettings, Trait

#: Maximum characters per line of a printed command.
FOLD: Final = 94


def sweeps_of(
    result: PersonaResult, settings: PersonaSettings, given: Mapping[str, str], model: ModelOptions
) -> list[str]:
    """Return a sweep command for each trait with a vector: at its best layer, on its questions, written to a file.

    `given` has the user's name or file of each trait, by trait name.

    Raises:
        OSError: the questions cannot be written to the folder of the run.
    """
    from steercap.files.base import write_whole

    found: list[str] = []
    for trait in settings.resolved():
        layer = result.outcomes[trait.name].best_layer
        if layer is None:
            continue
        questions = result.folder / "questions" / f"{trait.name}.jsonl"
        with write_whole(questions) as scratch:
            scratch.write_bytes(b"".join(msgspec.json.encode({"prompt": one}) + b"\n" for one in trait.questions))
        # A scorer with arguments, such as a judge, has no short name.
        scorer = [] if settings.scorer_args or settings.scorer == "minilm" else [settings.scorer]
        words: dict[str, object] = {
            "--vectors": result.folder / "directions.safetensors",
            "--names": trait.name,
            "--layers": layer,
            "--scales": "1,2",
            "--prompts": questions,
            "--measures": ":".join(["perplexity,score", given[trait.name], *scorer]),
            "--max-tokens": settings.max_tokens,
            "--out": f"{result.folder}-sweep/{trait.name}",
        }
        said = [str(word) for pair in words.items() for word in pair]
        found.append(shlex.join(["steercap", "sweep", *said, "--chat", *model.flags()]))
    return found


def folded(command: str) -> str:
    """Return a command as shell text of several lines; each begins with an option, its values on the same line."""
    parts: list[str] = []
    for word in shlex.split(command):
        if not parts or word.startswith("-"):
            parts.append(shlex.quote(word))
        else:
            parts[-1] += f" {shlex.quote(word)}"
    lines = parts[:1]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) < FOLD:
            lines[-1] += f" {part}"
        else:
            lines.append(f"  {part}")
    return " \\\n".join(lines)


@dataclass(frozen=True)
class SizeOptions(roles.AnswerOptions):
    """Options for the amount of answers of traits: questions, system prompts, samples and tokens."""

    n_questions: Annotated[int | None, roles.size_option(min=2, help="Number of questions of each trait.")] = None
    n_prompts: Annotated[
        int | None,
        roles.size_option(min=1, help="Number of pairs of system prompts of each trait."),
    ] = None


@dataclass(frozen=True)
class ScoreOptions:
    """Options for scoring answers, and for selecting those to keep."""

    scorer: Annotated[str | None, roles.scoring_option(help="Scorer: minilm, keywords or judge (default minilm).")] = (
        None
    )
    scorer_arg: roles.ScorerArguments = None
    threshold_high: Annotated[
        float | None, roles.scoring_option(min=0, max=100, help="Minimum score of an answer that shows the trait.")
    ] = None
    threshold_low: Annotated[
        float | None, roles.scoring_option(min=0, max=100, help="Maximum score of an answer that does not.")
    ] = None
    paired: Annotated[
        bool | None,
        roles.scoring_option("--paired/--unpaired", help="Keep an answer only if its counterpart is kept too."),
    ] = None
    min_kept: Annotated[int | None, roles.scoring_option(min=2, help="Minimum number of answers of each kind.")] = None


def trait_of(text: str) -> str | Trait:
    """Return the text, the name of a shipped trait; or the trait in a YAML file, if it names one.

    Raises:
        InvalidFile: the file holds no trait.
    """
    from steercap.lab.personas import load_trait

    return load_trait(text) if is_file(text) else text


def is_file(text: str) -> bool:
    """Return whether a trait is given as a YAML file, by the text's extension."""
    return text.endswith((".yaml", ".yml"))


def settings_of(traits: list[str], sizes: SizeOptions, scores: ScoreOptions, **further: Any) -> PersonaSettings:
    """Return the settings of a run that the flags describe; `traits` are names or YAML files.

    Raises:
        InvalidSetting, UnknownName: `PersonaSettings` refuses the values.
    """
    from steercap.lab.personas import PersonaSettings

    said = {name: value for name, value in (vars(sizes) | vars(scores) | further).items() if value is not None}
    small = said.pop("small")
    arguments = dict(pairs_of(said.pop("scorer_arg", []), "--scorer-arg"))
    if arguments:
        said["scorer_args"] = arguments
    found = tuple(trait_of(text) for text in traits)
    return PersonaSettings.small(*found, **said) if small else PersonaSettings(traits=found, **said)


def table_of(result: PersonaResult) -> Table:
    """Return a table with a row per trait: numbers of answers kept, mean scores, best layer, and the vector's AUC."""
    from steercap.lab.directions import chance_band

    layers = len(result.directions.layers)
    table = titled(
        f"{result.directions.model}, {result.directions.site}",
        ("trait", "kept", "of", "score", "layer", "AUC held out", "chance", "of a row"),
        words=("trait",),
        caption="score: mean, 0 to 100; AUC: at this layer, where it is highest; chance: 95 % range of the AUCs of "
        "vectors without meaning at all layers",
    )
    for name, one in result.outcomes.items():
        table.add_row(
            Text(name, style="cyan"),
            " / ".join(map(str, one.kept)),
            " / ".join(map(str, one.responses)),
            " / ".join(f"{score:.0f}" for score in one.mean_scores),
            "left out" if one.best_layer is None else str(one.best_layer),
            "" if one.auc is None else f"{one.auc:.2f}",
            "" if one.auc is None else "{:.2f} to {:.2f}".format(*chance_band(*one.held_out, best_of=layers)),
            "" if one.relative_norm is None else f"{one.relative_norm:.1%}",
        )
    return table


def left_out_of(result: PersonaResult) -> list[Table]:
    """Return a table of the reasons why traits have no vector; [] if all have one."""
    reasons = {name: one.left_out for name, one in result.outcomes.items() if one.left_out}
    return [facts("left out", reasons)] if reasons else []


def traits_table(traits: Mapping[str, Trait]) -> Table:
    """Return a table with a row per trait: description, and numbers of questions and system prompts."""
    table = Table()
    table.add_column("trait", style="cyan", no_wrap=True)
    table.add_column("description", ratio=1)
    table.add_column("questions", justify="right")
    table.add_column("prompts", justify="right")
    for name, trait in traits.items():
        table.add_row(
            name, Text(trait.description), str(len(trait.questions)), f"{len(trait.positive)} + {len(trait.negative)}"
        )
    return table


def trait_facts(trait: Trait) -> Table:
    """Return a table of the description, system prompts, questions and keywords of one trait."""
    lists = {
        "shown by system prompts": trait.positive,
        "and its opposite by": trait.negative,
        "questions": trait.questions,
        "keywords": (", ".join(trait.keywords),),
    }
    return facts(
        trait.name, {"description": trait.description} | {name: "\n".join(texts) for name, texts in lists.items()}
    )


def register(app: typer.Typer) -> None:
    """Add the group `persona` to `app`, with the commands of traits, roles and answers."""
    persona = group_of("Personas: from the description of a trait to its vector.")
    app.add_typer(persona, name="persona")
    _register_run(persona)
    _register_levels(persona)
    _register_traits(persona)
    roles.register(persona)
    answers.register(persona)


def _register_run(app: typer.Typer) -> None:
    @command(
        app,
        "run",
        examples=[
            "steercap persona run poetic --small --out out/poetic",
            "steercap persona run evil sycophantic my_trait.yaml -m Qwen/Qwen2.5-7B-Instruct --out out/traits",
        ],
    )
    async def run(
        traits: Annotated[list[str], typer.Argument(metavar="TRAIT", help="Names of shipped traits, or YAML files.")],
        sizes: SizeOptions,
        scores: ScoreOptions,
        model: ReachOptions,
        terminal: Terminal,
        out: Annotated[
            Path, typer.Option(file_okay=False, help="Folder of the run: answers, scores, vectors, a report.")
        ],
        layers: Annotated[str, typer.Option(help="Layers to read: all, 8, 8,16,-1 or 4:20:2.")] = "all",
        site: Annotated[
            str, typer.Option(help="Site to read: resid_pre, resid_post, attn_out or mlp_out.")
        ] = "resid_post",
        method: Annotated[str, typer.Option(help="Method of the vectors: difference, pca or probe.")] = "difference",
        held_out: Annotated[float, typer.Option(min=0.01, max=0.99, help="Fraction of the questions held out.")] = 0.25,
        read_system: roles.ReadSystem = True,
    ) -> None:
        """Find the vectors of traits by the method of persona vectors: the model answers under contrasting system
        prompts, answers are scored and filtered, read once more, and their mean rows compared. An interrupted run is
        resumed by the same call.
        """
        from steercap.core.spec import resolve_layers
        from steercap.lab.personas import run_persona

        model.require_there()
        folder_ready(out)
        further = {"site": site, "method": method, "held_out": held_out, "read_system": read_system}
        wanted, asked = layers_of(layers), settings_of(traits, sizes, scores, **further)
        check(asked, wanted, out, preflight(model, sites=site))
        async with reached(model, terminal, sites=site) as open_model:
            if wanted != "all":
                asked = msgspec.structs.replace(asked, layers=resolve_layers(wanted, open_model.num_layers))
            with terminal.progress() as tell:
                result = await run_persona(open_model, asked, out, progress=tell)
            report(
                result, asked, dict(zip((one.name for one in asked.resolved()), traits, strict=True)), model, terminal
            )


def check(settings: PersonaSettings, layers: Layers, out: Path, planned: Preflight) -> None:
    """Check before a model starts that its rows can be captured and that the folder has no other run.

    Raises:
        typer.BadParameter: a sampling parameter is out of range.
        MissingExtra: the extra "personas" is not installed.
        RunDiffers, InvalidFile: the folder holds another run.
        UnknownName, LayerOutOfRange, PointNotArmed: rows cannot be captured at these layers or this site.
    """
    from steercap.core.spec import CaptureSpec
    from steercap.lab.personas.folder import check_same

    require("personas")
    check_sampling(temperature=settings.temperature, seed=settings.seed)
    planned.check_capture(CaptureSpec(layers=layers, sites=settings.site))
    check_same(out, settings)


def report(
    result: PersonaResult,
    settings: PersonaSettings,
    given: Mapping[str, str],
    model: ModelOptions,
    terminal: Terminal,
) -> None:
    """Show the result of a run, and the sweep commands that test whether its vectors cause their traits.

    Args:
        result: result of the run.
        settings: settings of the run.
        given: the user's name or file of each trait, by trait name.
        model: options for the model of the run.
        terminal: terminal for the output.

    Raises:
        OSError: the questions cannot be written; everything else has been shown.
    """
    failed = None
    try:
        commands = sweeps_of(result, settings, given, model)
    except OSError as error:
        commands, failed = [], error
    terminal.show(
        {
            "folder": str(result.folder),
            "report": str(result.report),
            "outcomes": result.outcomes,
            **document_of(result.directions),
            "next": commands,
        },
        table_of(result),
        *left_out_of(result),
        facts("", {"directions": result.folder / "directions.safetensors", "report": result.report}),
    )
    if commands and not terminal.json:
        terminal.write("\nA sweep tests whether a vector causes its trait, against random vectors:")
        for command in commands:  # not in a table, which would break the lines: it is meant for pasting
            terminal.write(folded(command))
    if failed is not None:
        raise failed


def _register_levels(app: typer.Typer) -> None:
    @command(app, "levels", examples=["steercap persona levels out/traits --out vectors"])
    def levels(
        terminal: Terminal,
        folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a finished `steercap persona run`.")],
        out: Annotated[Path, typer.Option(file_okay=False, help="Folder for NAME.pt of each trait.")],
        minimum: Annotated[
            int | None, typer.Option(min=1, help="Minimum number of pairs or answers of a level (default 1).")
        ] = None,
        force: Force = False,
    ) -> None:
        """Write the vectors of a run by level of score, pos_neg_50, pos_70 and others, in the files that other tools
        read. Levels of which some answers were not kept are absent. Starts no engine.
        """
        from steercap.lab.personas import write_levels

        folder_ready(out)
        may_replace(out, terminal, force=force, pattern="*.pt")
        written = write_levels(folder, out, minimum=minimum)
        table = titled(str(out), ("trait", "level", "answers", "left out"), words=("trait", "level", "left out"))
        for trait, reasons in written.left_out.items():
            for level in {**written.used.get(trait, {}), **reasons}:
                why = "; ".join(f"{reason}: {count}" for reason, count in reasons.get(level, {}).items())
                table.add_row(trait, level, str(written.used.get(trait, {}).get(level, 0)), why)
        terminal.show(written, table)


def _register_traits(app: typer.Typer) -> None:
    @command(
        app,
        "traits",
        examples=["steercap persona traits", "steercap persona traits poetic", "steercap persona traits --json"],
    )
    def traits(
        terminal: Terminal,
        names: Annotated[list[str] | None, typer.Argument(metavar="TRAIT", help="Traits to show in full.")] = None,
    ) -> None:
        """List the traits that come with steercap, or show some in full: their system prompts, questions and
        keywords. A trait of your own is a YAML file like those in steercap/lab/personas/shipped.
        """
        from steercap.errors import UnknownName
        from steercap.lab.personas import shipped_traits as shipped

        if not names:
            terminal.show(shipped(), traits_table(shipped()))
            return
        found: list[Trait] = []
        for name in names:
            trait = trait_of(name)
            if isinstance(trait, str) and trait not in shipped():
                raise UnknownName(f"unknown trait {name!r}; {choices(name, shipped())}")
            found.append(shipped()[trait] if isinstance(trait, str) else trait)
        terminal.show({trait.name: trait for trait in found}, *(trait_facts(trait) for trait in found))
