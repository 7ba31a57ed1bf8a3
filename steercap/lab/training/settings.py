"""Settings of training other than examples and edits, and the penalties on a trait's parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from math import ceil, inf
from typing import Any, Final, TypeAlias

import torch

from steercap.core.hints import dataclass
from steercap.core.registry import Registry
from steercap.core.values import choices, count_of, index_of, number_of, parts_of, shown
from steercap.errors import InvalidSetting
from steercap.lab.training.trainable import TrainableSpec


@dataclass(frozen=True)
class Penalties:
    """Weights of the penalties on a trait's trained parameters, which are added to the loss.

    Args:
        norm: weight of the sum of squares.
        sparsity: weight of the sum of absolute values, whose gradient moves small elements towards zero, to within a
            step.

    Raises:
        InvalidSetting: a weight is below 0.
    """

    norm: float = 0.0
    sparsity: float = 0.0

    def __post_init__(self) -> None:
        if not (self.norm >= 0 and self.sparsity >= 0):
            raise InvalidSetting(f"norm_penalty={self.norm}, sparsity_penalty={self.sparsity}; give 0 or more")

    def of(self, spec: TrainableSpec) -> torch.Tensor:
        """Return `norm` · sum of squares + `sparsity` · sum of absolute values, over all trainable elements.

        Returns:
            Scalar tensor with a gradient.
        """
        values = torch.cat([value.flatten() for value in spec.values.values()])
        return self.norm * values.square().sum() + self.sparsity * values.abs().sum()


#: Function that returns an optimiser for the parameters of one trait.
MakeOptimizer: TypeAlias = "Callable[..., torch.optim.Optimizer]"
#: Function that returns a learning rate scheduler for an optimiser; each is stepped once per optimiser step.
MakeScheduler: TypeAlias = "Callable[[torch.optim.Optimizer], Any]"

#: Default learning rate.
LR: Final = 0.02
#: Default optimiser.
ADAMW: Final = functools.partial(torch.optim.AdamW, lr=LR, weight_decay=0.0)
#: Optimisers by name, with their defaults.
OPTIMIZERS: Final[Registry[MakeOptimizer]] = Registry(
    "optimizer",
    {
        "adagrad": functools.partial(torch.optim.Adagrad, lr=LR),
        "adam": functools.partial(torch.optim.Adam, lr=LR),
        "adamw": ADAMW,
        "rmsprop": functools.partial(torch.optim.RMSprop, lr=LR),
        "sgd": functools.partial(torch.optim.SGD, lr=LR),
    },
)
#: Schedules by name: a function from the number of optimiser steps to the maker of a scheduler, or None for none.
SCHEDULES: Final[Registry[Callable[[int], MakeScheduler | None]]] = Registry(
    "schedule",
    {
        "constant": lambda _: None,
        "cosine": lambda steps: functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=steps),
        "linear": lambda steps: functools.partial(
            torch.optim.lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.0, total_iters=steps
        ),
    },
)
#: Minimum of each setting that is a whole number.
_LEAST: Final = {"steps": 1, "batch_size": 1, "evaluate_every": 1, "patience": 1, "accumulation": 1}
#: Settings that may differ when a run is resumed.
FREE: Final = frozenset({"device", "device_map", "checkpointing"})
#: Settings that are contained in others: `steps` and `evaluate_every` (see `TrainingSettings.resolved`), `optimizer`.
_RESOLVED: Final = frozenset({"epochs", "lr"})


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings of training, for `train`, `train_many` and `train_datasets`.

    Args:
        fields: names of the edits' fields to train, such as "vector", "read" or "scale"; None for all vectors but a
            gate's `probe`.
        steps: maximum optimiser steps.
        epochs: passes over the training examples, at most, instead of `steps` and `evaluate_every`: a validation after
            the step in which the first ends, and each time after as many steps. This step is filled up with examples
            of the next epoch, so there may be fewer validations than epochs where a step takes a large part of the
            examples. Traits trained together then have equally many steps in an epoch.
        batch_size: number of examples of each trait in a pass of the model.
        accumulation: number of passes in an optimiser step, whose gradients are added up: a step is of
            `batch_size * accumulation` examples of each trait.
        evaluate_every: steps between two validations; the most that a killed run loses.
        patience: number of validations without a lower loss until a trait is done.
        optimizer: a name in `OPTIMIZERS`, or a function that makes an optimiser from an iterable of parameters: a class
            of `torch.optim`, or `functools.partial(torch.optim.SGD, lr=0.1)`. Each trait has one of its own.
        lr: learning rate, given to the optimiser; None for its own, 0.02 of those in `OPTIMIZERS`.
        scheduler: a name in `SCHEDULES`, which begin at the learning rate and, but for "constant", end at 0 after the
            last step; or a function that makes a learning rate scheduler from an optimiser, stepped with it; None for
            none.
        norm_penalty, sparsity_penalty: weights of the sum of squares and of the sum of absolute values of the trained
            parameters, which are added to the loss.
        max_grad_norm: norm to which a trait's gradient is clipped; None for no bound.
        gate_width: width of the relaxation of trained thresholds, in the units of the projection: see
            `steercap.lab.training.formula.gate`.
        seed: seed of the split, the order of the examples, the draws of objectives, and the start.
        dtype: dtype of the model, if it is not loaded yet. The edits are trained in float32, or wider.
        device: device of the model, if it is not loaded yet; None for the first GPU, or the CPU.
        device_map: transformers' placement of the model over several devices, if it is not loaded yet: "auto",
            "balanced", or a dict of module to device; needs accelerate. None for one device.
        checkpointing: True to keep only the inputs of decoder layers without an edit for the backward pass, and compute
            these layers again: less memory, more time, the same gradients.

    Raises:
        InvalidSetting: a value is not valid.
        UnknownName: there is no such optimiser or schedule.
    """

    fields: Sequence[str] | None = None
    steps: int = 200
    epochs: float | None = None
    batch_size: int = 8
    accumulation: int = 1
    evaluate_every: int = 20
    patience: int = 5
    optimizer: MakeOptimizer | str = ADAMW
    lr: float | None = None
    scheduler: MakeScheduler | str | None = None
    norm_penalty: float = 0.0
    sparsity_penalty: float = 0.0
    max_grad_norm: float | None = None
    gate_width: float = 1.0
    seed: int = 0
    dtype: torch.dtype = torch.float32
    device: str | None = None
    device_map: str | dict[str, Any] | None = None
    checkpointing: bool = False

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            count_of(getattr(self, name), name, least, wrong=InvalidSetting)
        if index_of(self.seed) is None:
            raise InvalidSetting(f"seed={shown(self.seed)}; give a whole number")
        for name in ("gate_width", "max_grad_norm", "epochs", "lr"):
            given = getattr(self, name)
            if given is not None and not inf > (number_of(given) or 0) > 0:
                raise InvalidSetting(f"{name}={shown(given)}; give a number above 0")
        if self.device is not None and self.device_map is not None:
            raise InvalidSetting(f"device={shown(self.device)}, device_map={shown(self.device_map)}; give one of them")
        _ = self.penalties, self.make_optimizer, self.make_scheduler
        if self.fields is not None:
            names = [self.fields] if isinstance(self.fields, str) else parts_of(self.fields, "fields")
            if not names or not all(isinstance(name, str) for name in names):
                raise InvalidSetting(f"fields={shown(self.fields)}; give names of an edit's fields, such as ['vector']")
            object.__setattr__(self, "fields", tuple(names))

    @property
    def penalties(self) -> Penalties:
        """Weights of the penalties on parameters, which are added to the loss."""
        return Penalties(self.norm_penalty, self.sparsity_penalty)

    @property
    def make_optimizer(self) -> MakeOptimizer:
        """Function that returns an optimiser for parameters, at `lr` if that is given."""
        make = OPTIMIZERS[self.optimizer] if isinstance(self.optimizer, str) else self.optimizer
        if not callable(make):
            raise InvalidSetting(f"optimizer={shown(make)}; give a function of parameters, or {', '.join(OPTIMIZERS)}")
        return make if self.lr is None else functools.partial(make, lr=float(self.lr))

    @property
    def make_scheduler(self) -> MakeScheduler | None:
        """Function that returns a scheduler for an optimiser, over `steps` if named; None for none."""
        make = SCHEDULES[self.scheduler](self.steps) if isinstance(self.scheduler, str) else self.scheduler
        if make is not None and not callable(make):
            raise InvalidSetting(f"scheduler={shown(make)}; give a function of an optimiser, or {', '.join(SCHEDULES)}")
        return make

    def resolved(self, sizes: Mapping[str, int]) -> TrainingSettings:
        """Return the settings with `steps` and `evaluate_every` computed from `epochs`, if that is given.

        Args:
            sizes: number of training examples of each trait, by name.

        Raises:
            InvalidSetting: traits have different numbers of steps in an epoch.
        """
        if self.epochs is None:
            return self
        size = self.batch_size * self.accumulation
        steps = {name: (ceil(self.epochs * count / size), ceil(count / size)) for name, count in sizes.items()}
        if len(set(steps.values())) > 1:
            raise InvalidSetting(
                f"epochs={self.epochs}: traits of {shown(sizes)} examples end their epochs at different steps; give "
                "steps= and evaluate_every=, or train each by itself"
            )
        total, each = next(iter(steps.values()))
        return replace(self, steps=total, evaluate_every=each, epochs=None)

    def described(self) -> dict[str, str]:
        """Return the settings that affect results as text, by name.

        `accumulation` is left out if it is 1, as in folders that were written before it existed.

        Raises:
            InvalidSetting: the optimiser or the scheduler has no name that is the same in another process.
        """
        left_out = FREE | _RESOLVED | ({"accumulation"} if self.accumulation == 1 else set())
        found = {field.name: described(getattr(self, field.name)) for field in fields(self)}
        made = {"optimizer": described(self.make_optimizer), "scheduler": described(self.make_scheduler)}
        for name, text in made.items():
            if "<" in text:  # a lambda, a function within another, or an object without a repr of its own
                raise InvalidSetting(
                    f"{name}={text}: a run that is resumed could not tell it from another; give a function of a "
                    "module, or functools.partial of one with its numbers"
                )
        found |= made
        return {name: text for name, text in found.items() if name not in left_out}


def settings_of(given: dict[str, Any]) -> TrainingSettings:
    """Return the settings of training from values by field name.

    Raises:
        InvalidSetting: a name is unknown, or a value is not valid.
    """
    known = [field.name for field in fields(TrainingSettings)]
    if unknown := sorted(set(given) - set(known)):
        raise InvalidSetting(f"unknown settings of training {unknown}; {choices(unknown[0], known)}")
    if given.get("epochs") is not None and (both := sorted({"steps", "evaluate_every"} & set(given))):
        raise InvalidSetting(f"epochs={shown(given['epochs'])} and {both[0]}={shown(given[both[0]])}; give one of them")
    return TrainingSettings(**given)


def described(value: Any) -> str:
    """Return a text of a value that is the same in any process: a function's name, a partial's with its arguments."""
    if isinstance(value, functools.partial):
        arguments = [*map(described, value.args), *(f"{name}={described(v)}" for name, v in value.keywords.items())]
        return f"{described(value.func)}({', '.join(arguments)})"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)


def rates_of(rates: Sequence[float]) -> list[float]:
    """Return learning rates as a list of floats, in the order given.

    Raises:
        InvalidSetting: there are none, a rate is not above 0 or not finite, or a rate is given twice.
    """
    found = [number_of(rate) for rate in parts_of(rates, "rates") or ()]
    if not found or not all(rate is not None and 0 < rate < float("inf") for rate in found):
        raise InvalidSetting(f"rates={shown(rates)}; give learning rates above 0, one at least")
    if len(set(found)) < len(found):
        raise InvalidSetting(f"rates={shown(rates)}; give each once")
    return [float(rate) for rate in found if rate is not None]
