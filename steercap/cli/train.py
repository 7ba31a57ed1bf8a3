"""`steercap train`: an edit trained by gradient descent on examples in JSONL, or one for each of many data sets."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from steercap.cli.command import command
from steercap.cli.contents import load
from steercap.cli.destinations import folder_ready
from steercap.cli.engines import SMOLLM2, ModelOptions, located
from steercap.cli.parsing import dtype_of, layers_of, names_of, numbers_of, refuse, tokens_of
from steercap.cli.prompts import examples_in
from steercap.cli.tables import facts, titled
from steercap.cli.terminal import Terminal
from steercap.errors import InvalidFile

if TYPE_CHECKING:
    from steercap.lab.training import ExampleFolder, Trained, TrainedDatasets
    from steercap.lab.training.training import AnyEdit
    from steercap.steering.spec import SteeringSpec

#: Makers of options for training steps, and for a folder of data sets.
_step = partial(typer.Option, rich_help_panel="Steps")
_of_set = partial(typer.Option, rich_help_panel="Folder of data sets")


class TrainableKind(enum.StrEnum):
    """Kinds of edit that can be trained from scratch."""

    ADD = "add"
    LOW_RANK = "low_rank"


@dataclass(frozen=True)
class StepOptions:
    """Options for training; those left out have the defaults of `TrainingSettings`."""

    steps: Annotated[int | None, _step(min=1, help="Maximum training steps (default 200).")] = None
    epochs: Annotated[
        float | None,
        _step(help="Passes over the examples, each followed by an evaluation, instead of --steps (folders: 5)."),
    ] = None
    batch_size: Annotated[int | None, _step(min=1, help="Batch size: examples of each trait per pass (default 8).")] = (
        None
    )
    accumulation: Annotated[int | None, _step(min=1, help="Passes whose gradients make one step (default 1).")] = None
    optimizer: Annotated[str | None, _step(help="Optimiser: adamw (default), adam, adagrad, rmsprop or sgd.")] = None
    scheduler: Annotated[
        str | None, _step(help="Schedule: constant (default), cosine (default for folders) or linear.")
    ] = None
    evaluate_every: Annotated[
        int | None, _step(min=1, help="Steps between evaluations on held-out examples (default 20).")
    ] = None
    patience: Annotated[
        int | None, _step(min=1, help="Evaluations without a lower loss before training stops (default 5; folders: 2).")
    ] = None
    norm_penalty: Annotated[float | None, _step(min=0, help="Weight of the L2 penalty (sum of squares).")] = None
    sparsity_penalty: Annotated[
        float | None, _step(min=0, help="Weight of the L1 penalty (sum of absolute values).")
    ] = None
    max_grad_norm: Annotated[float | None, _step(help="Maximum norm of the gradient (clipping).")] = None
    gate_width: Annotated[
        float | None, _step(min=0, help="Width of a trained gate's relaxed threshold, in the projection's units (1).")
    ] = None
    seed: Annotated[int | None, _step(help="Seed of training (default 0).")] = None
    device_map: Annotated[
        str | None, _step(help="Spread the model over several devices with accelerate: auto or balanced.")
    ] = None
    checkpointing: Annotated[
        bool | None,
        _step("--checkpointing", help="Recompute activations in the backward pass: less memory, more time."),
    ] = None

    def said(self) -> dict[str, Any]:
        """Return the options that were given, by name, as arguments of `TrainingSettings`."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class DatasetOptions:
    """Options for a folder of data sets; those left out have the defaults of `train_datasets`."""

    datasets: Annotated[str | None, _of_set(help="Pattern of the names, such as 'qwen-3-32b__trait__*'.")] = None
    label: Annotated[str | None, _of_set(help="Label of the lines to learn, such as pos, if they have any.")] = None
    rates: Annotated[str | None, _of_set(help="Learning rates (default 1,0.1,0.01,0.001,0.0001).")] = None
    training_tokens: Annotated[
        int | None, _of_set(min=1, help="Tokens to train on (default 100000); smaller data sets are skipped.")
    ] = None
    validation_tokens: Annotated[int | None, _of_set(min=1, help="Tokens to hold out (default 10000).")] = None

    def arguments(self, folder: Path) -> tuple[ExampleFolder, dict[str, Any]]:
        """Return the data sets in a folder, and `rates` and `budget`, arguments of `train_datasets`.

        Raises:
            typer.BadParameter: rates that are no numbers.
        """
        from steercap.lab.training import RATES, ExampleFolder, TokenBudget

        rates = RATES if self.rates is None else numbers_of(self.rates, "--rates")
        numbers = {"training": self.training_tokens, "validation": self.validation_tokens}
        budget = TokenBudget(**{name: value for name, value in numbers.items() if value is not None})
        return ExampleFolder(folder, self.datasets or "*", self.label), {"rates": rates, "budget": budget}


def check_options(examples: Path, of_file: Mapping[str, Any], of_folder: Mapping[str, Any]) -> None:
    """Check that options fit a file of examples, or a folder of data sets.

    Args:
        examples: the file or folder.
        of_file, of_folder: values of options for one of them alone, by name; None if left out.

    Raises:
        typer.BadParameter: an option is given that does not fit.
    """
    if wrong := [name for name, value in (of_file if examples.is_dir() else of_folder).items() if value is not None]:
        kind = "a file of examples, not a folder" if examples.is_dir() else "a folder of data sets, not a file"
        hint = "; give --rates" if wrong[0] == "lr" else ""
        raise typer.BadParameter(f"this option is for {kind}{hint}", param_hint=f"--{wrong[0].replace('_', '-')}")


def edit_of(edit: str, layers: str | None, **options: Any) -> AnyEdit:
    """Return the edit to start from: a new "add" or "low_rank" at some layers, or the steering in the file `edit`.

    Args:
        edit: kind, or path of a file.
        layers: value of --layers; None if left out.
        options: values of the other options of new edits, by name; None if left out.

    Raises:
        typer.BadParameter: no layers for a kind, or an option that the edit does not have.
        InvalidFile: the file holds no steering.
    """
    from steercap.lab.training import TrainableAdd, TrainableLowRank

    lacking = {"add": ["rank"], "low_rank": ["norm", "relative"]}.get(edit, ["layers", *options])
    every = {"layers": layers, **options}
    refuse(f"--edit {edit} has none, or its own", {f"--{name}": every[name] for name in lacking})
    if edit not in set(TrainableKind):
        return steering_of(Path(edit))
    if layers is None:
        raise typer.BadParameter("give layers such as 14, or 10,14", param_hint="--layers")
    said = {name: value for name, value in options.items() if value is not None}
    if "tokens" in said:
        said["tokens"] = tokens_of(said["tokens"])
    return (TrainableAdd if edit == TrainableKind.ADD else TrainableLowRank)(layers=layers_of(layers), **said)


def steering_of(path: Path) -> SteeringSpec:
    """Load the steering spec in a file.

    Raises:
        InvalidFile: it holds other content.
    """
    from steercap.steering.spec import SteeringSpec

    content = load(path)
    if not isinstance(content, SteeringSpec):
        raise InvalidFile(f"{path} holds vectors without edits; give a file of steering")
    return content


def report(trained: Mapping[str, Trained], terminal: Terminal) -> None:
    """Show each trait's losses on held-out examples, before training and at best, and the files of edits."""
    table = titled("held out", ("trait", "loss before", "loss", "step", "norm"), words=("trait",))
    for trait in trained.values():
        before, best = trait.history[0], min(trait.history, key=lambda one: one.validation_loss)
        numbers = (f"{before.validation_loss:.4f}", f"{best.validation_loss:.4f}", f"{best.step}", f"{best.norm:.4g}")
        table.add_row(Text(trait.name), *numbers)
    document = {
        trait.name: {
            "file": str(trait.file),
            "best_step": trait.best_step,
            "validation_loss": trait.validation_loss,
            "history": trait.history,
        }
        for trait in trained.values()
    }
    terminal.show(document, table, facts("", {f"{trait.name}": trait.file for trait in trained.values()}))


def report_datasets(trained: TrainedDatasets, terminal: Terminal) -> None:
    """Show each data set's best rate, loss and perplexities on held-out tokens, and reasons for skipped ones."""
    columns = ("data set", "rate", "loss", "perplexity", "unsteered", "prompted", "norm")
    table = titled("held out", columns, words=("data set",))
    for name, one in trained.results.items():
        loss = min(rate.validation_loss for rate in one.rates if rate.validation_loss is not None)
        known = [one.validation.get(label) for label in ("trained", "unsteered", "prompted")]
        perplexities = ["" if each is None else f"{each.perplexity:.4g}" for each in known]
        table.add_row(Text(name), f"{one.lr:g}", f"{loss:.4f}", *perplexities, f"{one.norm:.4g}")
    document = {"out": str(trained.out), "trained": trained.results, "skipped": trained.skipped}
    terminal.show(
        document, table, facts("skipped", trained.skipped) if trained.skipped else facts("", {"out": trained.out})
    )


def register(app: typer.Typer) -> None:
    """Add the command `train` to `app`."""

    @command(
        app,
        "train",
        examples=[
            "steercap train poetic.jsonl --layers 14 --out out/poetic",
            "steercap train pairs.jsonl --objective bipo --layers 14 --steps 400 --lr 0.01 --out out/pairs",
            "steercap train traits.jsonl --edit low_rank --rank 4 --layers 10,14 --out out/traits",
            "steercap train data --datasets 'qwen-3-32b__trait__*' --layers 32 --device-map auto --out out/sweep",
        ],
    )
    def train(
        examples: Annotated[
            Path, typer.Argument(exists=True, help="Examples: JSONL, one per line; or a folder of NAME.jsonl.")
        ],
        steps: StepOptions,
        folder: DatasetOptions,
        terminal: Terminal,
        out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the run and the trained edits.")],
        objective: Annotated[
            str, typer.Option(help="Objective: likelihood, bipo, reps or distillation.")
        ] = "likelihood",
        edit: Annotated[
            str, typer.Option(help="Edit to train: add, low_rank, or a file of steering to start from.")
        ] = "add",
        layers: Annotated[str | None, typer.Option(help="Layers, each with its own vectors: 14, or 10,14.")] = None,
        rank: Annotated[int | None, typer.Option(min=1, help="Rank of --edit low_rank (default 4).")] = None,
        norm: Annotated[
            float | None, typer.Option(min=0, help="Initial norm of --edit add (default 0); reps needs one above 0.")
        ] = None,
        relative: Annotated[
            bool | None,
            typer.Option(
                "--relative", help="Scales of --edit add are fractions of each row's norm; needs a --norm above 0."
            ),
        ] = None,
        site: Annotated[str | None, typer.Option(help="Site to edit (default resid_post).")] = None,
        tokens: Annotated[str | None, typer.Option(help="Tokens to edit (default all).")] = None,
        fields: Annotated[
            str | None, typer.Option(help="Fields of a file's edits to train, such as vector,probe.")
        ] = None,
        name: Annotated[str | None, typer.Option(help="Name of the trait (default: the folder's name).")] = None,
        held_out: Annotated[
            float | None,
            typer.Option(min=0, max=1, help="Fraction of sources held out for validation (default 0.2)."),
        ] = None,
        lr: Annotated[
            float | None, typer.Option(min=0, help="Learning rate (default 0.02; AdamW without weight decay).")
        ] = None,
        model: Annotated[str, typer.Option("--model", "-m", help="Model: hub name, path, or smollm2.")] = SMOLLM2,
        dtype: Annotated[str, typer.Option(help="dtype of the model.")] = "float32",
    ) -> None:
        """Train an edit by gradient, with the model frozen: on texts, on preferred and rejected answers, or to replace
        a system prompt. A line has prompt and response; prompt, chosen and rejected; or system, prompt and response.
        Examples of one source, such as a question, are held out together; trait says which of several is trained. An
        interrupted run is resumed by the same call. No engine is started; under torchrun several processes share the
        work. Given a folder, it trains on each data set NAME.jsonl at each of --rates, and keeps the best vector.
        """
        from steercap.core.spec import resolve_layers
        from steercap.lab.training import train_datasets, train_many
        from steercap.lab.training.loop import together

        folder_ready(out)
        check_options(examples, {"name": name, "held_out": held_out, "lr": lr}, vars(folder))
        if (known := ModelOptions(model).look_up().layers) and layers is not None:
            resolve_layers(layers_of(layers), known)
        if steps.gate_width is not None and edit in set(TrainableKind):
            raise typer.BadParameter(f"--edit {edit} has no gate; leave it out", param_hint="--gate-width")
        said = {
            **steps.said(),
            "edit": edit_of(edit, layers, rank=rank, norm=norm, relative=relative, site=site, tokens=tokens),
            "out": out,
            "objective": objective,
            "fields": None if fields is None else names_of(fields),
            "dtype": dtype_of(dtype),
        }
        with terminal.progress() as said["progress"], together():
            if examples.is_dir():
                datasets, more = folder.arguments(examples)
                swept = train_datasets(located(model), datasets, **more, **said)
            else:
                given = examples_in(examples, out.name if name is None else name)
                share: dict[str, Any] = {} if held_out is None else {"held_out": held_out}
                found = train_many(located(model), given, lr=lr, **share, **said)
        if examples.is_dir():
            report_datasets(swept, terminal)
        else:
            report(found, terminal)
