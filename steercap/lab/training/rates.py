"""Training of an edit on each of many data sets, at several learning rates, with one load of the model."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from torch import distributed

from steercap.core.protocols import Progress, ProgressCallback
from steercap.core.values import shown
from steercap.errors import InvalidRequest, InvalidSetting, InvalidSpec, TrainingDiverged
from steercap.files.base import write_whole
from steercap.files.folder import FolderKind, differences, locked
from steercap.lab.training.datasets import (
    HELD_OUT,
    RESULT,
    DatasetTrained,
    ExampleFolder,
    RateLoss,
    TextLoss,
    TokenBudget,
    TrainedDatasets,
    check_systems,
    read_result,
)
from steercap.lab.training.examples import Example, ExampleTokens, Prompted
from steercap.lab.training.folder import Trained, TrainingDefinition, check_name, in_real_numbers, write_trained
from steercap.lab.training.hooked import HookedModel
from steercap.lab.training.loop import rank, world
from steercap.lab.training.objectives import Objective, objective_of
from steercap.lab.training.settings import TrainingSettings, rates_of, settings_of
from steercap.lab.training.training import (
    AnyEdit,
    AnyExample,
    Sides,
    definition_of,
    encoded,
    hooked_of,
    perplexity_of,
    start_of,
    tokenizer_of,
    train,
)
from steercap.steering.formats import save_steering_vector
from steercap.steering.spec import SteeringSpec

#: Default learning rates.
RATES: Final = (1.0, 0.1, 0.01, 0.001, 0.0001)
#: Default numbers of tokens to train on and to hold out.
BUDGET: Final = TokenBudget()
#: Default settings of training; all others have the defaults of `train`.
DEFAULTS: Final[Mapping[str, Any]] = {"epochs": 5, "patience": 2, "scheduler": "cosine", "accumulation": 1}


class RatesDefinition(msgspec.Struct, frozen=True):
    """Everything that determines the result of training on a data set, compared when it is resumed.

    Args:
        training: definition of the training at any rate, without the rate.
        rates: learning rates.
    """

    training: TrainingDefinition
    rates: list[float]


def _differing(*both: RatesDefinition) -> list[str]:
    return differences(*(msgspec.structs.replace(one, training=in_real_numbers(one.training)) for one in both))


#: Kind of folder that holds the training on one data set: its definition's file and type.
RATES_FOLDER: Final = FolderKind("rates.json", RatesDefinition, "training at several rates", _differing)


def train_datasets(
    model: str | Path | HookedModel,
    datasets: Mapping[str, Sequence[AnyExample]],
    *,
    edit: AnyEdit,
    out: str | Path,
    rates: Sequence[float] = RATES,
    budget: TokenBudget = BUDGET,
    objective: str | Objective = "likelihood",
    progress: ProgressCallback | None = None,
    **settings: Any,
) -> TrainedDatasets:
    """Train an edit on each data set at each learning rate; keep each data set's edit of the lowest held-out loss.

    Args:
        model: model, as for `train`; loaded once.
        datasets: examples by name, such as `ExampleFolder("data", "qwen-3-32b__trait__*")`; each is read when its turn
            comes.
        edit: initial edit, as for `train`: `TrainableAdd(layers=[32])` begins at zero.
        out: folder of the run. After an interruption, the same call resumes.
        rates: learning rates.
        budget: tokens to train on and to hold out; data sets that have fewer are skipped.
        objective: objective, as for `train`. With "likelihood", responses of `Prompted` are learned without their
            system prompt.
        progress: function called with a `Progress` whenever the work advances.
        **settings: fields of `TrainingSettings`; by default 5 epochs, patience 2, a cosine schedule, accumulation 1.

    Raises:
        InvalidSetting: an argument is not valid; or no data set is large enough, and the message has their sizes.
        TrainingDiverged: losses of a data set are not finite at any rate.
        The errors of `train`, and `InvalidRequest` if another call writes to a data set's folder.
    """
    if "lr" in settings:
        raise InvalidSetting(f"lr={shown(settings['lr'])}: give rates=, learning rates to choose from")
    by_steps = {"steps", "evaluate_every"} & set(settings)
    defaults = {name: value for name, value in DEFAULTS.items() if not (by_steps and name == "epochs")}
    wanted = settings_of({**defaults, **settings})
    if not isinstance(datasets, Mapping) or not datasets:
        raise InvalidSetting(f"datasets={shown(datasets)}; give examples by the name of the data set")
    for name in datasets:
        check_name(name)
    if not isinstance(budget, TokenBudget):
        raise InvalidSetting(f"budget={shown(budget)}; give TokenBudget(training=..., validation=...)")
    run = RatesRun(hooked_of(model, wanted), objective_of(objective), wanted, edit, Path(out), rates_of(rates), budget)
    results, skipped = dict[str, DatasetTrained](), dict[str, str]()
    for at, (name, examples) in enumerate(datasets.items()):
        found = run.dataset(name, examples, partial(_report, progress, at, len(datasets), len(run.rates)))
        if isinstance(found, str):
            label = datasets.label if isinstance(datasets, ExampleFolder) else None
            skipped[name] = found if examples or label is None else f"no line has label={label!r}"
        else:
            results[name] = found
    if not results:
        raise InvalidSetting(f"no data set is large enough for {budget}: {shown(skipped)}")
    return TrainedDatasets(Path(out), results, skipped)


def _report(progress: ProgressCallback | None, at: int, datasets: int, rates: int, done: int) -> None:
    if progress is not None and rank() == 0:
        progress(Progress("trainings", at * rates + done, datasets * rates))


@dataclass(frozen=True, eq=False)
class RatesRun:
    """One call of `train_datasets`, with its arguments, which are common to all data sets, as fields."""

    model: HookedModel
    how: Objective
    settings: TrainingSettings
    edit: AnyEdit
    out: Path
    rates: list[float]
    budget: TokenBudget

    def dataset(self, name: str, examples: Sequence[AnyExample], report: Callable[[int], None]) -> DatasetTrained | str:
        """Train on a data set, or return the reason why it is skipped; `report` is called with the rates done."""
        tokens = self._encoded(name, examples)
        counts = [sum(len(one.ids) for one in each) for each in tokens]
        places = self.budget.draw(counts, [one.source for one in examples], self.settings.seed)
        used = [sum(counts[place] for place in side) for side in places]
        if used[0] < self.budget.training or used[1] < self.budget.validation:
            report(len(self.rates))
            size = f"{sum(counts):,} tokens in {len(examples)} examples, of {sum(astuple(self.budget)):,}"
            alone = len({one.source for one in examples}) == 1 and examples[0].source is not None
            return f"{size}; all have one source, which cannot be in both parts" if alone else size
        folder, parts = self.out / name, [[examples[place] for place in side] for side in places]
        with self._opened(folder, name, Sides(*([tokens[place] for place in side] for side in places))):
            if not (folder / RESULT).exists():
                self._train(folder, name, parts, used, count=len(examples), report=report)
            check_systems(folder, parts[1])
            found = read_result(folder)
            if rank() == 0:
                for rate in self.rates:  # a call that was killed while it removed them left some
                    shutil.rmtree(folder / _rate_folder(rate), ignore_errors=True)
        report(len(self.rates))
        return found

    def _encoded(self, name: str, examples: Sequence[AnyExample]) -> list[tuple[ExampleTokens, ...]]:
        """Tokenize the examples of a data set, naming the data set in errors."""
        try:
            return encoded(self.how, tokenizer_of(self.model), examples, self.model.vocabulary) if examples else []
        except InvalidRequest as error:
            raise type(error)(f"data set {name}: {error}") from error

    @contextmanager
    def _opened(self, folder: Path, name: str, sides: Sides) -> Iterator[None]:
        """Open a data set's folder for the block: process 0 writes and locks it; the others wait for it."""
        settings = self.settings.resolved({name: len(sides.seen)})
        start = start_of(self.edit, self.model, settings, name)
        definition = definition_of(self.model, self.how, settings, {name: start}, {name: sides})
        with ExitStack() as held:
            if rank() == 0:
                held.enter_context(locked(folder))
                wanted = RatesDefinition(definition, self.rates)
                if RATES_FOLDER.open(folder, wanted) is None:
                    RATES_FOLDER.write(folder, wanted)
            if world() > 1:
                distributed.barrier()
            yield
            if world() > 1:
                distributed.barrier()

    def _train(
        self,
        folder: Path,
        name: str,
        parts: Sequence[Sequence[AnyExample]],
        used: Sequence[int],
        *,
        count: int,
        report: Callable[[int], None],
    ) -> None:
        """Train at each rate on the first of `parts`, which have `used` tokens; write the best edit with the result."""
        best, rates = self._at_each_rate(folder, name, parts, report)
        found = DatasetTrained(
            name=name,
            model=best.model,
            lr=float(best.provenance["lr"]),
            norm=next(one.norm for one in best.history if one.step == best.best_step),
            rates=rates,
            examples=len(parts[0]),
            held_out=len(parts[1]),
            left_out=count - len(parts[0]) - len(parts[1]),
            tokens=used[0],
            held_out_tokens=used[1],
            validation=self._validated(best.spec, parts[1]),
        )
        if rank() == 0:
            self._keep(folder, best, found, parts[1])
        if world() > 1:
            distributed.barrier()

    def _at_each_rate(
        self, folder: Path, name: str, parts: Sequence[Sequence[AnyExample]], report: Callable[[int], None]
    ) -> tuple[Trained, list[RateLoss]]:
        """Train at each rate; return the result of the lowest held-out loss, and the losses of every rate."""
        best: Trained | None = None
        rates: list[RateLoss] = []
        for done, rate in enumerate(self.rates):
            report(done)
            trained = self._at_rate(rate, folder, name, parts)
            if trained is None:
                rates.append(RateLoss(rate))
                continue
            rates.append(RateLoss(rate, trained.validation_loss, trained.best_step, trained.history[-1].step))
            if best is None or trained.validation_loss < best.validation_loss:
                best = replace(trained, provenance={**trained.provenance, "lr": rate})
        if best is None:
            raise TrainingDiverged(f"{name}: losses are not finite at any of the rates {self.rates}; give smaller ones")
        if not best.best_step:
            says = f"{name}: no rate lowered the validation loss, {best.validation_loss:.4g}, so the edit is "
            warnings.warn(f"{says}the one that training began with", stacklevel=5)
        return best, rates

    def _at_rate(self, rate: float, folder: Path, name: str, parts: Sequence[Sequence[AnyExample]]) -> Trained | None:
        """Train at one rate, and return the result; None if losses are not finite."""
        left_out = {"steps", "evaluate_every"} if self.settings.epochs is not None else set()
        settings = {key: value for key, value in vars(self.settings).items() if key not in left_out}
        with warnings.catch_warnings(), suppress(TrainingDiverged):
            warnings.filterwarnings("ignore", message=".*no step lowered the validation loss", category=UserWarning)
            return train(
                self.model,
                parts[0],
                edit=self.edit,
                out=folder / _rate_folder(rate),
                objective=self.how,
                name=name,
                held_out=parts[1],
                **settings | {"lr": rate},
            )
        return None

    def _validated(self, spec: SteeringSpec, held_out: Sequence[Any]) -> dict[str, TextLoss]:
        """Return losses of held-out responses, unsteered, trained, and prompted if possible; {} for preferences."""
        if not all(isinstance(example, (Example, Prompted)) for example in held_out):
            return {}
        read = partial(perplexity_of, self.model, held_out, batch_size=self.settings.batch_size)
        found = {"unsteered": read(), "trained": read(spec)}
        if all(isinstance(example, Prompted) for example in held_out):
            found["prompted"] = read(prompted=True)
        return found

    def _keep(self, folder: Path, best: Trained, found: DatasetTrained, held_out: Sequence[AnyExample]) -> None:
        """Write the best edit, the held-out examples, and last the result."""
        trained = replace(best, file=folder / f"{best.name}.safetensors")
        write_trained(trained)
        with suppress(InvalidSpec):  # it is not one vector of the stream
            start = start_of(self.edit, self.model, self.settings, best.name).of_rows()[0].lower()[0].write
            save_steering_vector(trained.directions[best.name], folder, init_scale=float(start.norm()))
        with write_whole(folder / HELD_OUT) as scratch:
            scratch.write_bytes(b"".join(msgspec.json.encode(example) + b"\n" for example in held_out))
        with write_whole(folder / RESULT) as scratch:
            scratch.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2))


def _rate_folder(rate: float) -> str:
    return f"lr_{rate!r}"
