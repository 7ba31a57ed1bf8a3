"""Settings of training, besides its examples and edits, and the penalties on a trait's parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from steercap.core.values import choices, index_of, number_of, parts_of, shown
from steercap.errors import InvalidSetting
from steercap.lab.training.trainable import TrainableSpec


@dataclass(frozen=True)
class Penalties:
    """Weights of the penalties on a trait's trained parameters.

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
        """Return the penalty, differentiable by torch."""
        values = torch.cat([value.flatten() for value in spec.values.values()])
        return self.norm * values.square().sum() + self.sparsity * values.abs().sum()


#: Function that makes an optimiser for the parameters of one trait.
MakeOptimizer: TypeAlias = "Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]"
#: Function that makes a scheduler, which is stepped with the optimiser.
MakeScheduler: TypeAlias = "Callable[[torch.optim.Optimizer], Any]"

#: Default optimiser.
ADAMW: Final = functools.partial(torch.optim.AdamW, lr=0.02, weight_decay=0.0)
#: Minimum of each whole number.
_LEAST: Final = {"steps": 1, "batch_size": 1, "evaluate_every": 1, "patience": 1}
#: Settings that may change when a run is resumed.
FREE: Final = frozenset({"device"})


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings of `train`.

    Args:
        fields: names of the edits' fields to train, such as "vector", "read" or "scale"; None for all vectors but a
            gate's `probe`.
        steps: maximum optimiser steps.
        batch_size: number of examples of each trait in a step.
        evaluate_every: steps between two validations; the most that a killed run loses.
        patience: number of validations without a lower loss until a trait is done.
        optimizer: function that makes an optimiser from an iterable of parameters: a class of `torch.optim`, or
            `functools.partial(torch.optim.SGD, lr=0.1)`. Each trait has one of its own.
        scheduler: function that makes a learning rate scheduler from an optimiser, stepped with it; None for none.
        norm_penalty, sparsity_penalty: weights of the sum of squares and of the sum of absolute values of the trained
            parameters, which are added to the loss.
        max_grad_norm: norm to which a trait's gradient is clipped; None for no bound.
        gate_width: width of the relaxation of trained thresholds, in the units of the projection: see
            `steercap.lab.training.formula.gate`.
        seed: seed of the split, the order of the examples, the draws of objectives, and the start.
        dtype: dtype of the model, if it is not loaded yet. The edits are trained in float32, or wider.
        device: device of the model, if it is not loaded yet; None for the first GPU, or the CPU.

    Raises:
        InvalidSetting: a value is not valid.
    """

    fields: Sequence[str] | None = None
    steps: int = 200
    batch_size: int = 8
    evaluate_every: int = 20
    patience: int = 5
    optimizer: MakeOptimizer = ADAMW
    scheduler: MakeScheduler | None = None
    norm_penalty: float = 0.0
    sparsity_penalty: float = 0.0
    max_grad_norm: float | None = None
    gate_width: float = 1.0
    seed: int = 0
    dtype: torch.dtype = torch.float32
    device: str | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if (index_of(getattr(self, name)) or 0) < least:
                raise InvalidSetting(f"{name}={shown(getattr(self, name))}; give a whole number, {least} or more")
        if index_of(self.seed) is None:
            raise InvalidSetting(f"seed={shown(self.seed)}; give a whole number")
        for name in ("gate_width", "max_grad_norm"):
            given = getattr(self, name)
            if given is not None and not (number_of(given) or 0) > 0:
                raise InvalidSetting(f"{name}={shown(given)}; give a number above 0")
        _ = self.penalties
        if self.fields is not None:
            names = [self.fields] if isinstance(self.fields, str) else parts_of(self.fields, "fields")
            if not names or not all(isinstance(name, str) for name in names):
                raise InvalidSetting(f"fields={shown(self.fields)}; give names of an edit's fields, such as ['vector']")
            object.__setattr__(self, "fields", tuple(names))

    @property
    def penalties(self) -> Penalties:
        """Penalties added to the losses."""
        return Penalties(self.norm_penalty, self.sparsity_penalty)

    def described(self) -> dict[str, str]:
        """Return the settings that affect results as text, by name."""
        return {field.name: described(getattr(self, field.name)) for field in fields(self) if field.name not in FREE}


def settings_of(given: dict[str, Any]) -> TrainingSettings:
    """Return settings from values by name.

    Raises:
        InvalidSetting: a name is unknown, or a value is not valid.
    """
    known = [field.name for field in fields(TrainingSettings)]
    if unknown := sorted(set(given) - set(known)):
        raise InvalidSetting(f"unknown settings of training {unknown}; {choices(unknown[0], known)}")
    return TrainingSettings(**given)


def described(value: Any) -> str:
    """Describe a value in text that is the same in any process: a function by name, a partial with its arguments."""
    if isinstance(value, functools.partial):
        arguments = [*map(described, value.args), *(f"{name}={described(v)}" for name, v in value.keywords.items())]
        return f"{described(value.func)}({', '.join(arguments)})"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)
