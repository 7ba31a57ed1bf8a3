"""`steercap persona roles|axis|cap`: many roles in one run, the assistant axis, and capping along it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer
from rich.table import Table
from rich.text import Text

from steercap.cli.command import command
from steercap.cli.destinations import Force, file_ready, folder_ready, may_replace, saved
from steercap.cli.engines import ReachOptions, pairs_of
from steercap.cli.parsing import layers_of
from steercap.cli.preflight import check_sampling, preflight, reached
from steercap.cli.tables import facts, titled
from steercap.cli.terminal import Terminal
from steercap.core.extras import require

if TYPE_CHECKING:
    from steercap.lab.personas.roles import AssistantAxis, RoleRun, RoleSet, RoleSettings, Stability


def along(axis: AssistantAxis, run: RoleRun, layer: int) -> Table:
    """Return a table of roles and assistant by projection on the axis at a layer, the least assistant-like first."""
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


def by_layer(axis: AssistantAxis, stability: Stability) -> Table:
    """Return a table of the axis at each layer: norm, principal component, and stability compared with chance."""
    shared = "questions" if stability.over == "questions" else "roles and questions"
    table = titled(
        f"the axis ({axis.how}) by layer",
        ("layer", "length", "cosine with PC1", "variance of PC1", "assistant on PC1", "halves", "dealt out", "random"),
        caption=f"halves: cosine of the axes of two halves of the {shared}, median and 90 % of {stability.splits} "
        "splits; dealt out: the same with the answers assigned to roles at random",
    )
    ways = [(stability.median(axis.how, of), stability.band(axis.how, of)) for of in ("found", "permuted", "random")]
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
    """Return a run's outcomes and its axis, without the vectors, as a document for JSON."""
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


#: Makers of options for sizes and for scoring, in the commands of traits and of roles.
size_option = partial(typer.Option, rich_help_panel="Sizes")
scoring_option = partial(typer.Option, rich_help_panel="Scoring")


#: Argument `folder` and option `--how` of the commands that read a run of roles.
RolesFolder: TypeAlias = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="Folder of a finished `steercap persona roles`.")
]
AxisKind: TypeAlias = Annotated[
    Literal["contrast", "pca"],
    typer.Option(help="Direction: assistant minus roles, or first component of the roles."),
]
#: Options `--read-system` and `--scorer-arg` of the commands of traits and of roles.
ReadSystem: TypeAlias = Annotated[
    bool, typer.Option("--read-system/--no-read-system", help="Read answers with the system prompt before them.")
]
ScorerArguments = Annotated[
    list[str] | None, scoring_option(metavar="KEY=VALUE", help="Argument of the scorer, value in JSON; repeatable.")
]


@dataclass(frozen=True)
class AnswerOptions:
    """Options for generating answers, of traits and of roles; defaults are the paper's, or with --small a laptop's."""

    small: Annotated[bool, size_option("--small", help="Sizes for a small model on a CPU: minutes, not hours.")] = False
    samples: Annotated[int | None, size_option(min=1, help="Number of answers per question.")] = None
    max_tokens: Annotated[int | None, size_option(min=1, help="Maximum tokens to generate.")] = None
    temperature: Annotated[float | None, size_option(min=0.0, help="Sampling temperature.")] = None
    seed: Annotated[int | None, size_option(help="Seed of sampling.")] = None
    concurrency: Annotated[int | None, size_option(min=1, help="Maximum concurrent requests (default 256).")] = None


@dataclass(frozen=True)
class RoleOptions(AnswerOptions):
    """Options of a run of roles: roles, questions, number of answers, and the scorer that selects answers."""

    questions: Annotated[
        Path | None, typer.Option(help="File of questions, in place of the folder's: .txt, .csv, .jsonl or .parquet.")
    ] = None
    role: Annotated[list[str] | None, typer.Option(help="Name of a role; repeatable (default: all).")] = None
    n_questions: Annotated[int | None, size_option("--n-questions", min=2, help="Number of questions to ask.")] = None
    n_prompts: Annotated[int | None, size_option(min=1, help="Number of system prompts of each role.")] = None
    scorer: Annotated[
        str | None,
        scoring_option(
            help="Scorer of how well an answer plays its role: minilm, keywords or judge (default: none, and all "
            "answers are kept)."
        ),
    ] = None
    scorer_arg: ScorerArguments = None
    threshold: Annotated[float | None, scoring_option(min=0, max=100, help="Minimum score of a kept answer.")] = None
    min_kept: Annotated[int | None, scoring_option(min=1, help="Minimum number of kept answers of a role.")] = None

    def settings(self, path: Path | None, **further: Any) -> RoleSettings:
        """Return the settings that the flags describe, for roles at `path` (None: those shipped); `further` override.

        Raises:
            InvalidFile, UnknownName, InvalidSetting: `load_roles` or `RoleSettings` refuse the values.
        """
        from steercap.lab.personas.roles import RoleSettings

        left_out = ("questions", "role", "small", "scorer_arg")
        said = {name: value for name, value in vars(self).items() if name not in left_out and value is not None}
        if self.scorer_arg:
            said["scorer_args"] = dict(pairs_of(self.scorer_arg, "--scorer-arg"))
        roles = self._roles(path)
        said |= further
        return RoleSettings.small(roles, **said) if self.small else RoleSettings(roles=roles, **said)

    def _roles(self, path: Path | None) -> RoleSet:
        from steercap.lab.personas.roles import load_roles, shipped_roles

        if path is None and self.questions is not None:
            raise typer.BadParameter(
                "the shipped roles have their own questions; give ROLES too", param_hint="--questions"
            )
        found = shipped_roles() if path is None else load_roles(path, questions=self.questions)
        return found.select(self.role) if self.role else found


def shard_of(text: str) -> tuple[int, int]:
    """Parse `--shard`, the part of the roles that this process runs, such as "0/2".

    Returns:
        Index of the part, from 0, and number of parts.

    Raises:
        typer.BadParameter: the text is not of this form.
    """
    which, slash, count = text.partition("/")
    if not slash or not which.isdecimal() or not count.isdecimal() or not int(which) < int(count):
        raise typer.BadParameter(f"{text!r}: give WHICH/OF, such as 0/4, 1/4, 2/4 and 3/4", param_hint="--shard")
    return int(which), int(count)


def register(persona: typer.Typer) -> None:
    """Add the commands `roles`, `axis` and `cap` to the group `persona`."""
    _register_roles(persona)
    _register_axis(persona)
    _register_cap(persona)


def _register_roles(app: typer.Typer) -> None:
    @command(
        app,
        "roles",
        examples=[
            "steercap persona roles --small --out out/roles",
            "steercap persona roles roles.csv --questions questions.txt -m Qwen/Qwen3-8B --shard 0/2 --out out/roles",
        ],
    )
    async def roles(
        options: RoleOptions,
        model: ReachOptions,
        terminal: Terminal,
        out: Annotated[Path, typer.Option(file_okay=False, help="Folder of the run: answers, scores, rows.")],
        path: Annotated[
            Path | None,
            typer.Argument(
                metavar="[ROLES]", help="Folder, or table (.csv, .parquet, .jsonl); 24 roles come with steercap."
            ),
        ] = None,
        layers: Annotated[str, typer.Option(help="Layers to read: all, 8, 8,16,-1 or 4:20:2.")] = "all",
        site: Annotated[
            str, typer.Option(help="Site to read: resid_pre, resid_post, attn_out or mlp_out.")
        ] = "resid_post",
        read_system: ReadSystem = True,
        shard: Annotated[
            str,
            typer.Option(metavar="WHICH/OF", help="Share of the roles, for one of several processes, each on its GPU."),
        ] = "0/1",
    ) -> None:
        """Have a model play roles: each role, and the default assistant, answers the same questions, and the rows of
        its answers are averaged. An interrupted run is resumed by the same call; several processes, each with another
        --shard, may share one --out. `steercap persona axis` shows the result.
        """
        from steercap.core.spec import CaptureSpec, resolve_layers
        from steercap.lab.personas.roles import run_roles_share
        from steercap.lab.personas.roles.folder import check_same, read_folder

        require("personas")
        model.require_there()
        folder_ready(out)
        share, wanted = shard_of(shard), layers_of(layers)
        asked = options.settings(path, site=site, read_system=read_system)
        check_sampling(temperature=asked.temperature, seed=asked.seed)
        preflight(model, sites=site).check_capture(CaptureSpec(layers=wanted, sites=site))
        check_same(out, asked)
        async with reached(model, terminal, sites=site) as open_model:
            if wanted != "all":
                import msgspec

                asked = msgspec.structs.replace(asked, layers=resolve_layers(wanted, open_model.num_layers))
            with terminal.progress() as tell:
                await run_roles_share(open_model, asked, out, shard=share, progress=tell)
        missing = read_folder(out).missing
        next_step = f"steercap persona axis {out}" if not missing else "the other shares"
        terminal.show(
            {"folder": str(out), "shard": shard, "missing": missing, "next": next_step},
            facts("", {"folder": out, "shard": shard, "roles missing": ", ".join(missing), "next": next_step}),
        )


def _register_axis(app: typer.Typer) -> None:
    @command(
        app,
        "axis",
        examples=["steercap persona axis out/roles", "steercap persona axis out/roles --how pca --over roles"],
    )
    def axis(
        terminal: Terminal,
        folder: RolesFolder,
        how: AxisKind = "contrast",
        layer: Annotated[
            int | None, typer.Option(help="Layer at which roles are ranked (default: the middle one).")
        ] = None,
        over: Annotated[
            Literal["questions", "roles"], typer.Option(help="Split into halves by questions, or by roles too.")
        ] = "questions",
        splits: Annotated[int, typer.Option(min=1, help="Number of random splits into halves.")] = 20,
        force: Force = False,
    ) -> None:
        """Compute the assistant axis of a run, and show where the roles lie on it, how much of their variance it
        explains, and how well it is found again in halves of the data, compared with chance. Starts no engine. Writes
        axis-HOW.safetensors and pictures into the folder.
        """
        from steercap.lab.personas.roles import (
            assistant_axis,
            load_roles_run,
            plot_positions,
            plot_stability,
            stability,
        )

        require("plots")
        run = load_roles_run(folder)
        may_replace(folder, terminal, force=force, pattern=f"*-{how}.*", option="--force")
        found = assistant_axis(run.rows, how)
        place = found.layers[len(found.layers) // 2] if layer is None else layer
        ranked, stable = along(found, run, place), stability(run.rows, over=over, splits=splits)
        files = {name: folder / f"{name}-{how}.png" for name in ("positions", "stability")}
        plot_positions(found, place, files["positions"])
        plot_stability(stable, files["stability"], how=how)
        written = found.save(folder / f"axis-{how}.safetensors")
        halves = {
            of: {"median": stable.median(how, of), "band": stable.band(how, of)}
            for of in ("found", "permuted", "random")
        }
        terminal.show(
            {**document_of(found, run), "axis": str(written), "over": over, "stability": halves},
            ranked,
            by_layer(found, stable),
            facts("", {"axis": written, **files}),
        )


def _register_cap(app: typer.Typer) -> None:
    @command(
        app,
        "cap",
        examples=["steercap persona cap out/roles --layers 12:18 --out cap.safetensors"],
    )
    async def cap(
        model: ReachOptions,
        terminal: Terminal,
        folder: RolesFolder,
        out: Annotated[Path, typer.Option(help="File for the steering: .safetensors.")],
        layers: Annotated[str, typer.Option(help="Layers to cap: 8, 8,16,-1 or 4:20:2.")],
        how: AxisKind = "contrast",
        percentile: Annotated[
            float, typer.Option(min=0, max=100, help="Percentile of the assistant's projections, per token.")
        ] = 25.0,
        force: Force = False,
    ) -> None:
        """Make steering that keeps rows from falling below the default assistant's usual place on the axis: its answers
        of the run are read again, their tokens projected on the axis, and a percentile becomes the floor at each layer.
        """
        from steercap.core.spec import resolve_layers
        from steercap.lab.personas.roles import assistant_axis, calibrated_capping, load_roles_run
        from steercap.steering.directions import DirectionSet

        model.require_there()
        file_ready(out, extensions=[".safetensors"])
        run = load_roles_run(folder)
        found, wanted = assistant_axis(run.rows, how), layers_of(layers)
        there = preflight(model, sites=run.settings.site)
        there.check_directions(DirectionSet({"axis": found.vectors}), wanted, f"the axis of {folder}")
        may_replace(out, terminal, force=force)  # last: it asks
        async with reached(model, terminal, sites=run.settings.site) as open_model:
            places = resolve_layers(wanted, open_model.num_layers)
            made = await calibrated_capping(open_model, run, found, layers=places, percentile=percentile)
        where, failed = saved(out, made.save, terminal)
        terminal.show(
            {
                "file": None if where is None else str(where),
                "floors": dict(made.floors),
                "provenance": dict(made.provenance),
            },
            facts("floors by layer", {str(layer): f"{floor:.3f}" for layer, floor in made.floors.items()}),
            facts("", {**made.provenance, "file": where or ""}),
        )
        if failed is not None:
            raise failed
