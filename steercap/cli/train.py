"""`steercap train`: an edit trained by gradient descent on a file of examples in JSONL."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer
from rich.text import Text

from steercap.cli.command import command
from steercap.cli.contents import load
from steercap.cli.destinations import folder_ready
from steercap.cli.engines import SMOLLM2, located
from steercap.cli.parsing import layers_of, names_of, tokens_of
from steercap.cli.prompts import records_of
from steercap.cli.tables import facts, titled
from steercap.cli.terminal import Terminal
from steercap.errors import InvalidFile

if TYPE_CHECKING:
    from steercap.lab.training import Trained
    from steercap.lab.training.training import AnyEdit, AnyExample
    from steercap.steering.spec import SteeringSpec

STEPS: Final = "Steps"


class TrainableKind(enum.StrEnum):
    """Kinds of edit that can be trained from scratch."""

    ADD = "add"
    LOW_RANK = "low_rank"


@dataclass(frozen=True)
class StepOptions:
    """Options for training; those left out have the defaults of `TrainingSettings`."""

    steps: Annotated[
        int | None, typer.Option(min=1, help="Maximum training steps (default 200).", rich_help_panel=STEPS)
    ] = None
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Examples of each trait per step (default 8).", rich_help_panel=STEPS)
    ] = None
    evaluate_every: Annotated[
        int | None,
        typer.Option(min=1, help="Steps between evaluations on held-out examples (default 20).", rich_help_panel=STEPS),
    ] = None
    patience: Annotated[
        int | None,
        typer.Option(
            min=1, help="Evaluations without a lower loss before training stops (default 5).", rich_help_panel=STEPS
        ),
    ] = None
    norm_penalty: Annotated[
        float | None, typer.Option(min=0, help="Weight of the L2 penalty (sum of squares).", rich_help_panel=STEPS)
    ] = None
    sparsity_penalty: Annotated[
        float | None,
        typer.Option(min=0, help="Weight of the L1 penalty (sum of absolute values).", rich_help_panel=STEPS),
    ] = None
    max_grad_norm: Annotated[
        float | None, typer.Option(help="Maximum norm of the gradient (clipping).", rich_help_panel=STEPS)
    ] = None
    seed: Annotated[int | None, typer.Option(help="Random seed (default 0).", rich_help_panel=STEPS)] = None

    def said(self) -> dict[str, Any]:
        """Return the options that are given."""
        return {name: value for name, value in vars(self).items() if value is not None}


def edit_of(edit: str, layers: str | None, rank: int, norm: float, tokens: str) -> AnyEdit:
    """Return the edit to start from: a kind at some layers, or the steering in a file.

    Raises:
        typer.BadParameter: no layers for a kind, or layers for a file.
        InvalidFile: the file holds no steering.
    """
    from steercap.lab.training import TrainableAdd, TrainableLowRank

    if edit not in set(TrainableKind):
        if layers is not None:
            raise typer.BadParameter("a file says its own layers; leave it out", param_hint="--layers")
        return steering_of(Path(edit))
    if layers is None:
        raise typer.BadParameter("give layers such as 14, or 10,14", param_hint="--layers")
    where: dict[str, Any] = {"layers": layers_of(layers), "tokens": tokens_of(tokens)}
    return TrainableAdd(norm=norm, **where) if edit == TrainableKind.ADD else TrainableLowRank(rank=rank, **where)


def steering_of(path: Path) -> SteeringSpec:
    """Load the steering in a file.

    Raises:
        InvalidFile: it holds other content.
    """
    from steercap.steering.spec import SteeringSpec

    content = load(path)
    if not isinstance(content, SteeringSpec):
        raise InvalidFile(f"{path} holds vectors, and no edits that say what is done with them; give steering")
    return content


def dtype_of(text: str) -> Any:
    """Return a floating-point dtype by its name.

    Raises:
        typer.BadParameter: there is none of this name.
    """
    import torch

    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise typer.BadParameter(f"{text!r}; give float32, bfloat16 or float16", param_hint="--dtype")
    return found


@contextmanager
def together() -> Iterator[None]:
    """Join the process group of torchrun, if there is one, for the block."""
    import torch
    from torch import distributed

    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield
        return
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        distributed.destroy_process_group()


def report(found: Mapping[str, Trained], terminal: Terminal) -> None:
    """Show the training result of each trait."""
    table = titled("held out", ("trait", "loss before", "loss", "step", "norm"), words=("trait",))
    for trait in found.values():
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
        for trait in found.values()
    }
    terminal.show(document, table, facts("", {f"{trait.name}": trait.file for trait in found.values()}))


def register(app: typer.Typer) -> None:
    """Add the command."""

    @command(
        app,
        "train",
        examples=[
            "steercap train poetic.jsonl --layers 14 --out out/poetic",
            "steercap train pairs.jsonl --objective bipo --layers 14 --steps 400 --lr 0.01 --out out/pairs",
            "steercap train traits.jsonl --edit low_rank --rank 4 --layers 10,14 --out out/traits",
        ],
    )
    def train(
        examples: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Examples: JSONL, one per line.")],
        steps: StepOptions,
        terminal: Terminal,
        out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the run and the trained edits.")],
        objective: Annotated[
            str, typer.Option(help="Objective: likelihood, bipo, reps or distillation.")
        ] = "likelihood",
        edit: Annotated[
            str, typer.Option(help="Edit to train: add, low_rank, or a file of steering to start from.")
        ] = "add",
        layers: Annotated[str | None, typer.Option(help="Layers, each with its own vectors: 14, or 10,14.")] = None,
        rank: Annotated[int, typer.Option(min=1, help="Rank of --edit low_rank.")] = 4,
        norm: Annotated[float, typer.Option(min=0, help="Initial norm of --edit add; reps needs one above 0.")] = 0.0,
        tokens: Annotated[str, typer.Option(help="Tokens to edit.")] = "all",
        fields: Annotated[
            str | None, typer.Option(help="Fields of a file's edits to train, such as vector,probe.")
        ] = None,
        name: Annotated[str | None, typer.Option(help="Name of the trait (default: the folder's name).")] = None,
        validation: Annotated[
            float, typer.Option(min=0, max=1, help="Fraction of sources held out for validation.")
        ] = 0.2,
        lr: Annotated[float, typer.Option(min=0, help="Learning rate of AdamW, without weight decay.")] = 0.02,
        model: Annotated[str, typer.Option("--model", "-m", help="Model: hub name, path, or smollm2.")] = SMOLLM2,
        dtype: Annotated[str, typer.Option(help="dtype of the model.")] = "float32",
    ) -> None:
        """Train an edit by gradient, with the model frozen: on texts, on preferred and rejected answers, or to replace
        a system prompt. A line has prompt and response; prompt, chosen and rejected; or system, prompt and response.
        Examples of one source, such as a question, are held out together; trait says which of several is trained. An
        interrupted run is resumed by the same call. No engine is started; under torchrun several processes share the
        work.
        """
        import torch

        from steercap.lab.training import train_many

        folder_ready(out)
        given = examples_in(examples, out.name if name is None else name)
        start = edit_of(edit, layers, rank, norm, tokens)
        optimizer = partial(torch.optim.AdamW, lr=lr, weight_decay=0.0)
        said = {**steps.said(), "fields": None if fields is None else names_of(fields), "dtype": dtype_of(dtype)}
        with terminal.progress() as bar, together():
            task = bar.add_task("training", total=None)
            found = train_many(
                located(model),
                given,
                edit=start,
                out=out,
                objective=objective,
                validation=validation,
                optimizer=optimizer,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
                **said,
            )
        report(found, terminal)


#: Fields of a line for each kind of example, besides `source` and `trait`.
FORMS: Final = "{'prompt', 'response'}, {'prompt', 'chosen', 'rejected'} or {'system', 'prompt', 'response'}"


def examples_in(path: Path, name: str) -> dict[str, list[AnyExample]]:
    """Read the examples of a JSONL file, by trait; `name` is that of lines without `trait`.

    A line is an object with the fields of `Example`, `Preference` or `Prompted`, and a `trait` where several are
    trained.

    Raises:
        InvalidFile: it cannot be read, or a line is not an example.
    """
    found: dict[str, list[AnyExample]] = {}
    for number, value in records_of(str(path)):
        given = dict(value) if isinstance(value, dict) else {}
        trait = str(given.pop("trait", name))
        try:
            found.setdefault(trait, []).append(_kind(given)(**given))
        except (TypeError, LookupError, msgspec.ValidationError) as error:
            raise InvalidFile(
                f"{path}, line {number}: {value!r}; give {FORMS}, each with or without 'source'"
            ) from error
    return found


def _kind(given: dict[str, Any]) -> Callable[..., AnyExample]:
    """Return the class of an example with these fields.

    Raises:
        LookupError: no class has them.
    """
    from steercap.lab.training import Example, Preference, Prompted

    forms = {("prompt", "response"): Example, ("chosen", "prompt", "rejected"): Preference}
    return {**forms, ("prompt", "response", "system"): Prompted}[tuple(sorted(given.keys() - {"source"}))]
