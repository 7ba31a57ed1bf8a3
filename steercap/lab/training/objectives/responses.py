"""Objectives of single responses: their likelihood, and distillation of a system prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from jaxtyping import Float
from torch.nn.functional import log_softmax

from steercap.lab.training.batches import Batch
from steercap.lab.training.examples import Example, ExampleTokens, Prompted, conversation, tokens_of
from steercap.lab.training.objectives import Objective, Steered, lengths, mean_of, unedited


@dataclass(frozen=True)
class Likelihood(Objective):
    """-1/|y| log p(y | x) of the edited model, in nats per token."""

    example: ClassVar[type] = Example

    def tokens(self, tokenizer: Any, example: Any) -> tuple[ExampleTokens, ...]:
        return (tokens_of(tokenizer, example.prompt, example.response),)

    def losses(self, model: Steered, batch: Batch) -> Float[torch.Tensor, " examples"]:
        (texts,) = batch.roles
        loss: torch.Tensor = -model.log_probs(texts) / lengths(texts)
        return loss


@dataclass(frozen=True)
class Distillation(Objective):
    """Mean over a response's tokens of KL(p(·|system, x, y) ‖ p_edited(·|x, y)), in nats.

    Hinton et al. 2015 (arXiv:1503.02531); for prompts: Snell et al. 2022 (arXiv:2209.15189).

    Args:
        temperature: temperature of both distributions; the loss is multiplied by its square, as in Hinton et al.
    """

    temperature: float = 1.0
    example: ClassVar[type] = Prompted

    def tokens(self, tokenizer: Any, example: Any) -> tuple[ExampleTokens, ...]:
        return tuple(
            tokens_of(tokenizer, conversation(example.prompt, system), example.response)
            for system in (None, example.system)
        )

    def losses(self, model: Steered, batch: Batch) -> Float[torch.Tensor, " examples"]:
        ours, prompted = batch.roles
        with torch.no_grad():
            wanted = log_softmax(model.logits(prompted, unedited(prompted)) / self.temperature, dim=-1)
        found = log_softmax(model.logits(ours) / self.temperature, dim=-1)
        away = (wanted.exp() * (wanted - found)).sum(-1)
        return self.temperature**2 * mean_of(away, ours)


MEMBERS: Final[Mapping[str, Objective]] = {
    "distillation": Distillation(),
    "likelihood": Likelihood(),
}
