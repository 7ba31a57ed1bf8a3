"""Likelihood: the mean negative log probability of a response's tokens, the prompt's not counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float

from steercap.lab.training.batches import Batch
from steercap.lab.training.examples import Example, ExampleTokens, tokens_of
from steercap.lab.training.objectives import Objective, Steered, lengths


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


MEMBER = Likelihood()
