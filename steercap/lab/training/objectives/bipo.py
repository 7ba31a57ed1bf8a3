"""Bidirectional preference optimisation (Cao et al. 2024, arXiv:2406.00045)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch.nn.functional import logsigmoid

from steercap.lab.training.batches import Batch
from steercap.lab.training.examples import ExampleTokens, Preference, tokens_of
from steercap.lab.training.formula import Doses
from steercap.lab.training.objectives import Objective, Steered, unedited


@dataclass(frozen=True)
class BiPO(Objective):
    """-log σ(d β (log p_d(c|x)/p(c|x) - log p_d(r|x)/p(r|x))): p_d has the edit times d, and d is 1 or -1, drawn.

    The edit makes the chosen response likelier, and its opposite the rejected one. If nothing is drawn, as in
    validation, the loss is the mean over both signs.

    Args:
        beta: coefficient β.
    """

    beta: float = 0.1
    example: ClassVar[type] = Preference

    def tokens(self, tokenizer: Any, example: Any) -> tuple[ExampleTokens, ...]:
        return pair(tokenizer, example)

    def losses(self, model: Steered, batch: Batch) -> Float[torch.Tensor, " examples"]:
        both = batch.roles[0] + batch.roles[1]
        with torch.no_grad():
            plain = model.log_probs(both, unedited(both))
        if batch.draws is None:
            signs = [torch.ones(len(batch.owners), device=both.ids.device)]
            signs.append(-signs[0])
        else:
            signs = [torch.where(batch.draws < 0.5, -1.0, 1.0)]
        losses = [self._signed(model.log_probs(both, Doses(torch.cat([d, d]))) - plain, d) for d in signs]
        return torch.stack(losses).mean(0)

    def _signed(self, gained: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
        chosen, rejected = gained.chunk(2)
        return -logsigmoid(sign * self.beta * (chosen - rejected))


def pair(tokenizer: Any, example: Preference) -> tuple[ExampleTokens, ExampleTokens]:
    """Tokenize the prompt with the chosen response, and with the rejected one."""
    chosen, rejected = (tokens_of(tokenizer, example.prompt, one) for one in (example.chosen, example.rejected))
    return chosen, rejected


MEMBER = BiPO()
