"""Training loop: each trait has its own optimiser, and each forward pass of the model serves all traits."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from steercap.core.protocols import Progress, ProgressCallback
from steercap.errors import TrainingDiverged
from steercap.lab.training.batches import Batch, EncodedExamples, Picked, Steps, loader
from steercap.lab.training.examples import ExampleTokens
from steercap.lab.training.folder import TrainingState, TraitState, Validation, load_state, own, save_state
from steercap.lab.training.settings import TrainingSettings
from steercap.lab.training.steered import SteeredTraits
from steercap.lab.training.trainable import TrainableSpec


@dataclass(eq=False)
class TraitInTraining:
    """Trait in training: its trainable spec, tokenised examples, optimiser, best parameters and validations."""

    name: str
    spec: TrainableSpec
    examples: Sequence[tuple[ExampleTokens, ...]]
    held_out: Sequence[tuple[ExampleTokens, ...]]
    settings: TrainingSettings
    best: dict[str, torch.Tensor] = field(default_factory=dict)
    best_step: int = 0
    waited: int = 0
    history: list[Validation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = self.settings.make_optimizer(list(self.spec.parameters()))
        make = self.settings.make_scheduler
        self.scheduler = None if make is None else make(self.optimizer)

    @property
    def done(self) -> bool:
        """True if the held-out loss has not improved for `patience` validations."""
        return self.waited >= self.settings.patience

    def step(self) -> None:
        """Clip the gradient if asked to, and take one step of the optimiser and the scheduler."""
        if self.settings.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.spec.parameters(), self.settings.max_grad_norm)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def record_validation(self, step: int, loss: float | None, validation_loss: float) -> None:
        """Record a validation, and keep a copy of the parameters if its loss is the lowest so far.

        Args:
            step: number of steps taken.
            loss: mean training loss since the previous validation; None before the first step.
            validation_loss: mean loss of the held-out examples.

        Raises:
            TrainingDiverged: a loss or the norm of the parameters is not finite.
        """
        norm, lr = self.spec.norm(), float(self.optimizer.param_groups[0]["lr"])
        if not all(map(isfinite, (validation_loss, norm, 0.0 if loss is None else loss))):
            raise TrainingDiverged(
                f"{self.name}: after {step} steps the loss is {loss}, the validation loss {validation_loss}, and the "
                f"norm {norm}; lower the learning rate, or set max_grad_norm"
            )
        better = not self.history or validation_loss < min(one.validation_loss for one in self.history)
        self.history.append(Validation(step, loss, validation_loss, norm, lr))
        self.waited = 0 if better else self.waited + 1
        if better:
            self.best_step, self.best = step, self._values()

    def state(self) -> TraitState:
        """Return the trait's training state, for `restore`."""
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return TraitState(
            self._values(),
            self.best,
            self.best_step,
            self.waited,
            self.optimizer.state_dict(),
            scheduler,
            tuple(self.history),
        )

    def restore(self, state: TraitState) -> None:
        """Resume from a state: set parameters, best parameters, optimiser, scheduler and history."""
        self.spec.load_state_dict(state.values)
        self.best = own(state.best)
        self.best_step, self.waited, self.history = state.best_step, state.waited, list(state.history)
        self.optimizer.load_state_dict(own(state.optimizer))
        if self.scheduler is not None:
            self.scheduler.load_state_dict(own(state.scheduler))

    def _values(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.spec.state_dict().items()}


@dataclass(eq=False)
class Loop:
    """Loop over the optimiser steps of a training run of one or several traits.

    Args:
        traits: traits to train.
        module: frozen model with the traits' edits.
        settings: settings of the training.
        folder: folder to which the state is written at each validation.
        model: name of the model.
        device: device of the computation.
        progress: as for `train`; the stage is "training steps".
    """

    traits: Sequence[TraitInTraining]
    module: SteeredTraits
    settings: TrainingSettings
    folder: Path
    model: str
    device: torch.device
    progress: ProgressCallback | None = None

    def __post_init__(self) -> None:
        self.rank, self.world = rank(), world()
        self._losses = torch.zeros(len(self.traits), dtype=torch.float64)
        self._counted = 0

    def run(self) -> None:
        """Take the remaining steps, from the state in the folder; stop early once all traits are done."""
        start = self._resume()
        wrapped: Any = DistributedDataParallel(self.module) if self.world > 1 else self.module
        sizes = {trait.name: len(trait.examples) for trait in self.traits}
        size, steps, passes = self.settings.batch_size, self.settings.steps, self.settings.accumulation
        share = {"rank": self.rank, "world": self.world}
        order = Steps(
            sizes, size, self.settings.seed, start=start * passes, stop=steps * passes, live=self._live, **share
        )
        examples = EncodedExamples([trait.examples for trait in self.traits])
        if not self._live():
            self._report(steps)
            return
        batches = iter(loader(examples, order, self.module.selections, self.device))
        for step in range(start + 1, steps + 1):
            self._step(wrapped, islice(batches, passes))
            if step % self.settings.evaluate_every == 0 or step == steps:
                self._evaluate(step)
                if not self._live():
                    break
            self._report(step)
        self._report(steps)

    @torch.enable_grad()
    def _step(self, wrapped: Any, batches: Iterable[Batch]) -> None:
        for trait in self.traits:
            trait.spec.zero_grad()
        for batch in batches:
            loss, means = wrapped(batch, self.settings.batch_size * self.settings.accumulation)
            (loss * self.world).backward()  # DistributedDataParallel takes the mean over processes
            self._losses += means.double().cpu()
        self._counted += 1
        for number in self._live():
            self.traits[number].step()

    def _evaluate(self, step: int) -> None:
        """Validate the traits still in training after `step` steps; process 0 writes the state."""
        live = self._live()
        found = self._held_out(live)
        losses = _summed(self._losses) / max(self._counted, 1)
        for number in live:
            loss = float(losses[number]) if self._counted else None
            self.traits[number].record_validation(step, loss, found[number])
        self._losses.zero_()
        self._counted = 0
        if self.rank == 0:
            save_state(
                self.folder, TrainingState(step, {trait.name: trait.state() for trait in self.traits}), self.model
            )
        if self.world > 1:
            distributed.barrier()

    def _held_out(self, live: Sequence[int]) -> dict[int, float]:
        """Return the mean held-out loss of each trait in `live`, by trait index, over all processes."""
        picked = [Picked(number, place, None) for number in live for place in range(len(self.traits[number].held_out))]
        mine, size = picked[self.rank :: self.world], self.settings.batch_size * len(live)
        chunks = [mine[at : at + size] for at in range(0, len(mine), size)]
        sums = torch.zeros(len(self.traits), dtype=torch.float64)
        examples = EncodedExamples([trait.held_out for trait in self.traits])
        for batch in loader(examples, chunks, self.module.selections, self.device):
            sums.index_add_(0, batch.owners.cpu(), self.module.losses(batch).double().cpu())
        sums = _summed(sums)
        return {number: float(sums[number]) / len(self.traits[number].held_out) for number in live}

    def _resume(self) -> int:
        """Restore the traits, and return the number of steps taken; in a new run, validate first and return 0."""
        state = load_state(self.folder)
        if state is None:
            self._evaluate(0)
            return 0
        for trait in self.traits:
            trait.restore(state.traits[trait.name])
        return state.step

    def _live(self) -> list[int]:
        return [number for number, trait in enumerate(self.traits) if not trait.done]

    def _report(self, step: int) -> None:
        if self.progress is not None and self.rank == 0:
            self.progress(Progress("training steps", step, self.settings.steps))


def rank() -> int:
    """Return the rank of this process in `torch.distributed`; 0 if it is not initialised."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def world() -> int:
    """Return the number of processes in `torch.distributed`; 1 if it is not initialised."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


@contextmanager
def together() -> Iterator[None]:
    """Join torchrun's process group for the block, if WORLD_SIZE is 2 or more."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield
        return
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        distributed.destroy_process_group()


def _summed(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over all processes, on the CPU."""
    if world() == 1:
        return values
    on = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    sent = values.to(on)
    distributed.all_reduce(sent)
    return sent.cpu()
