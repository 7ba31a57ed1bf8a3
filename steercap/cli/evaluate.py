"""Commands `evaluate`, which compares methods on the same questions, and `rollouts`, for many sets of questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from steercap.cli.command import command
from steercap.cli.destinations import folder_ready
from steercap.cli.engines import ModelOptions, ReachOptions
from steercap.cli.evaluation_file import EvaluationFile, RolloutFile, read_evaluation, read_rollouts
from steercap.cli.parsing import Concurrency, names_of, sites_of
from steercap.cli.preflight import Preflight, preflight, reached
from steercap.cli.sweep_file import measures_in, not_none
from steercap.cli.tables import rollouts_table, titled
from steercap.cli.terminal import Terminal
from steercap.core.extras import require
from steercap.core.protocols import Progress
from steercap.errors import InvalidSpec

if TYPE_CHECKING:
    from steercap.lab.studies.evaluation import Evaluation, EvaluationResults, Matched
    from steercap.lab.studies.rollout_tables import RolloutSummary
    from steercap.model import SteerModel

#: Options of both commands, which take precedence over the YAML file.
MaxTokens: TypeAlias = Annotated[int | None, typer.Option(min=1, help="Maximum tokens to generate (default 64).")]
Temperature: TypeAlias = Annotated[
    float | None, typer.Option(min=0.0, help="Sampling temperature (default 0: greedy).")
]
Samples: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="Number of answers, or conversations, per question (default 1).")
]
Seed: TypeAlias = Annotated[int | None, typer.Option(help="Seed of sampling.")]


async def evaluated(
    model: SteerModel, evaluation: Evaluation, settings: EvaluationFile, out: Path, terminal: Terminal
) -> EvaluationResults:
    """Run an evaluation, with the measures and tasks of `settings` and progress bars, resuming earlier work in `out`.

    Raises:
        The errors of `steercap.lab.studies.evaluation.evaluate`.
    """
    from steercap.lab.studies.evaluation import evaluate

    with terminal.progress() as tell:
        how: dict[str, Any] = {"tasks": settings.tasks, **not_none(settings, "concurrency")}
        return await evaluate(model, evaluation, out=out, measures=settings.all_measures(), progress=tell, **how)


def check(evaluation: Evaluation, settings: EvaluationFile, out: Path, planned: Preflight) -> None:
    """Check before a model starts that an evaluation, its measures, tasks and folder are valid for the model.

    Raises:
        MissingExtra: the extra "evaluation" is not installed.
        InvalidSpec, UnknownName: a measure or task does not exist or cannot be used, or `settings.by` is none of them.
        RunDiffers, InvalidFile: the folder holds another evaluation.
        The errors of `SteeringSpec` against a model.
    """
    from steercap.lab.studies.evaluation.running import COLUMNS, tasks_of
    from steercap.lab.studies.running import measures_of

    require("evaluation")
    taken: tuple[Any, ...] = (*measures_of(settings.all_measures(), COLUMNS), *tasks_of(settings.tasks))
    settings.check_by([one.label for one in taken])
    check_conditions(evaluation, out, planned)


def check_conditions(evaluation: Evaluation, out: Path, planned: Preflight) -> None:
    """Check that `out` has no other evaluation, and that the edits of all conditions fit the model.

    Raises:
        The errors of `studies.check_same`, and those of `SteeringSpec` against a model.
    """
    from steercap.lab.studies import check_same
    from steercap.lab.studies.evaluation.definition import FOLDER

    check_same(FOLDER, out, evaluation)
    for condition in evaluation.conditions():
        planned.check_steering(evaluation.spec(condition))


def sites_in(evaluation: Evaluation) -> tuple[str, ...]:
    """Return the sites that the methods edit, to arm in the engine; ("resid_post",) if there are none."""
    specs = [evaluation.spec(condition) for condition in evaluation.conditions()]
    return tuple(dict.fromkeys(site for spec in specs for site in sites_of(spec))) or ("resid_post",)


def report(results: EvaluationResults, settings: EvaluationFile, out: Path, terminal: Terminal, *, plot: bool) -> None:
    """Show tables of all methods, at every dose and at equal cost; write the first and, if `plot`, a picture to `out`.

    Raises:
        InvalidSpec: `settings.by` is not a column of the results.
        OSError: a file cannot be written; the tables have been shown.
    """
    by = settings.by or next(iter(results.tasks), None)
    at = settings.at
    if by and at is None:
        with suppress(InvalidSpec):  # no method costs more than no steering, so there is no cost to compare at
            at = results.reached_by_all(by)
    matched = results.matched(by=by, at=at) if by and at is not None else []
    shown = [summary_table(results), *([matched_table(results, matched, f"{by} {at:.3g}")] if matched else [])]
    document = {
        "out": str(out),
        "summary": results.summary(),
        "matched": {"by": by, "at": at, "methods": matched} if matched else None,
    }
    terminal.show(_plain(document), *shown, f"{out}/methods.md")
    results.save_summary(out / "methods.parquet")
    results.save_summary(out / "methods.md")
    if plot and by and matched and len(results.columns) > 1:
        from steercap.lab.studies.evaluation.plots import plot_methods

        plot_methods(results, out / "methods.png", by=by, at=at)


def summary_table(results: EvaluationResults) -> Table:
    """Return a table with a row per method and dose: means of all columns, with 95 % intervals."""
    table = titled(
        "every dose; in brackets 95 % over questions", ["method", "dose", *results.columns], words=["method"]
    )
    for line in results.summary():
        table.add_row(
            Text(line.method, style="dim" if line.control_of else ""), f"{line.dose:g}", *_cells(line, results.columns)
        )
    return table


def matched_table(results: EvaluationResults, matched: Sequence[Matched], where: str) -> Table:
    """Return a table with a row per method, at equal cost `where`: means of all columns, between doses."""
    table = titled(f"at {where}, between doses", ["method", "dose", *results.columns], words=["method"])
    for line in matched:
        dose = f"{line.dose:.3g}" if line.how == "interpolated" else f"{line.dose:.3g}, {line.how}"
        table.add_row(Text(line.method, style="dim" if line.control_of else ""), dose, *_cells(line, results.columns))
    return table


async def rolled(model: SteerModel, settings: RolloutFile, out: Path, terminal: Terminal) -> list[RolloutSummary]:
    """Run rollouts with a progress bar for each kind of work, resuming earlier work; return a summary per data set.

    Raises:
        The errors of `steercap.lab.studies.rollouts.run_rollouts`.
    """
    from steercap.lab.studies.rollouts import run_rollouts

    whole = dict[str, int]()
    with terminal.progress() as tell:

        def report(at: Progress) -> None:
            kind = at.stage.partition(": ")[2]
            whole[kind] = whole.get(kind, 0) + (at.done == at.total)
            tell(Progress(f"data sets, {kind}", whole[kind], len(settings.data_sets)))

        how: dict[str, Any] = {"judge": settings.make_judge(), **not_none(settings, "concurrency")}
        return await run_rollouts(model, settings.sets(), out=out, progress=report, **how)


def check_rollouts(settings: RolloutFile, out: Path, model: ModelOptions) -> tuple[str, ...]:
    """Check before a model starts that rollouts can be run; return the sites that they edit.

    Raises:
        ModelNotLoaded: the model does not exist, or the sentence encoder is not installed.
        InvalidSpec: no data set, one twice, one without a rubric for the judge; and errors of `check_conditions`.
    """
    from steercap.lab.measures.scores.minilm import encoder_folder
    from steercap.lab.studies.rollouts import checked_sets

    model.require_there()
    require("evaluation")
    encoder_folder()
    sites = dict[str, None]()
    for one in checked_sets(settings.sets(), settings.make_judge()):
        own = sites_in(one.evaluation)
        check_conditions(one.evaluation, out / one.name, preflight(model, sites=own))
        sites |= dict.fromkeys(own)
    if not sites:
        raise InvalidSpec("data_sets names no data set; give one at least")
    return tuple(sites)


def _cells(line: Any, columns: Sequence[str]) -> list[str]:
    from steercap.lab.studies.evaluation.tables import interval

    return [interval(line.means[column]).replace(" (", "\n(") for column in columns]


def _plain(value: Any) -> Any:
    """Convert structs, dicts and sequences to JSON data, with NaN and infinity as null."""
    match value:
        case msgspec.Struct():
            return _plain(msgspec.structs.asdict(value))
        case dict():
            return {name: _plain(one) for name, one in value.items()}
        case list() | tuple():
            return [_plain(one) for one in value]
        case float():
            return value if math.isfinite(value) else None
    return value


def register(app: typer.Typer) -> None:
    """Add the commands `evaluate` and `rollouts` to `app`."""

    @command(
        app,
        "evaluate",
        examples=[
            "steercap evaluate evaluation.yaml --out out/evaluation",
            "steercap evaluate evaluation.yaml --out out/evaluation --measures score:poetic,refusal --tasks passages",
        ],
    )
    async def evaluate(
        model: ReachOptions,
        terminal: Terminal,
        out: Annotated[Path, typer.Option(file_okay=False, help="Folder for answers, tables and a picture.")],
        config: Annotated[
            Path,
            typer.Argument(exists=True, dir_okay=False, metavar="YAML", help="Methods, questions and settings."),
        ],
        measures: Annotated[
            str | None,
            typer.Option(help="Measures of answers, as in sweep (default perplexity, repetition, refusal)."),
        ] = None,
        tasks: Annotated[str | None, typer.Option(help="Tasks of fixed texts (default passages, choices).")] = None,
        max_tokens: MaxTokens = None,
        temperature: Temperature = None,
        samples: Samples = None,
        seed: Seed = None,
        concurrency: Concurrency = None,
        by: Annotated[str | None, typer.Option(help="Column to match methods by (default neutral).")] = None,
        at: Annotated[
            float | None, typer.Option(help="Value of --by to match at (default: one that all methods reach).")
        ] = None,
        plot: Annotated[bool, typer.Option("--plot/--no-plot", help="Plot methods.png.")] = True,
    ) -> None:
        """Compare system prompts, vectors and trained edits on the same questions, by what they achieve and what they
        cost: perplexity of neutral prose, a multiple-choice task, repetition, refusals. Methods are compared at every
        dose, and where they cost the same, with intervals over questions. Finished work is kept in --out; the same call
        resumes an interrupted evaluation, also with further methods.
        """
        flags: dict[str, Any] = {
            "measures": None if measures is None else measures_in(measures),
            "tasks": None if tasks is None else names_of(tasks),
        }
        flags |= {"max_tokens": max_tokens, "temperature": temperature, "samples": samples, "seed": seed}
        flags |= {"concurrency": concurrency, "by": by, "at": at}
        model.require_there()
        folder_ready(out)
        settings = read_evaluation(config, flags)
        evaluation = settings.evaluation()
        sites = sites_in(evaluation)
        check(evaluation, settings, out, preflight(model, sites=sites))
        terminal.say(f"{len(evaluation.conditions()):,} conditions, {len(evaluation.questions):,} questions each")
        async with reached(model, terminal, sites=sites) as open_model:
            results = await evaluated(open_model, evaluation, settings, out, terminal)
            report(results, settings, out, terminal, plot=plot)

    @command(app, "rollouts", examples=["steercap rollouts rollouts.yaml --out out/rollouts"])
    async def rollouts(
        model: ReachOptions,
        terminal: Terminal,
        out: Annotated[
            Path, typer.Option(file_okay=False, help="Folder for the results, one in it for each data set.")
        ],
        config: Annotated[
            Path, typer.Argument(exists=True, dir_okay=False, metavar="YAML", help="Data sets, vectors.")
        ],
        max_tokens: MaxTokens = None,
        temperature: Temperature = None,
        samples: Samples = None,
        seed: Seed = None,
        concurrency: Annotated[
            int | None, typer.Option(min=1, help="Maximum concurrent requests of a data set (default 128).")
        ] = None,
    ) -> None:
        """Steer by the vectors of many data sets, at fixed norms and at the learned one, ask each data set's questions,
        and score the answers by its classifier and by a judge. Tables go to one folder per data set; an interrupted run
        is resumed by the same call.
        """
        folder_ready(out)
        flags = {"max_tokens": max_tokens, "temperature": temperature, "samples": samples, "seed": seed}
        settings = read_rollouts(config, {**flags, "concurrency": concurrency})
        sites = check_rollouts(settings, out, model)
        async with reached(model, terminal, sites=sites) as open_model:
            found = await rolled(open_model, settings, out, terminal)
        terminal.show(_plain({"out": str(out), "data_sets": found}), rollouts_table(found), f"{out}")
