"""What an objective is: a number for each example, to be made small, of what the edited model makes of its tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol

import torch
from jaxtyping import Float, Int

from steercap.lab.training.batches import Batch, Padded
from steercap.lab.training.examples import Tokens
from steercap.lab.training.formula import Doses

#: Of each sequence the sum of the log probabilities of its response's tokens.
Sums = Float[torch.Tensor, " n"]


class Steered(Protocol):
    """The model with its edits, as objectives see it."""

    def logits(self, padded: Padded, doses: Doses = ...) -> Float[torch.Tensor, "counted vocabulary"]:
        """Logits in float32 where a token of a response is predicted, sequence by sequence."""

    def log_probs(self, padded: Padded, doses: Doses = ...) -> Sums:
        """Of each sequence the log probability of its response."""


class Objective(ABC):
    """What is made small. A member is frozen data, its fields the objective's settings."""

    #: The kind of examples it takes.
    example: ClassVar[type]
    #: Whether edits must write something from the beginning on, for their directions to be taken away.
    needs_direction: ClassVar[bool] = False

    @abstractmethod
    def tokens(self, tokenizer: Any, example: Any) -> tuple[Tokens, ...]:
        """The sequences that an example comes to, as many for each.

        Raises:
            InvalidPrompt: nothing to learn is in one.
        """

    @abstractmethod
    def losses(self, model: Steered, batch: Batch) -> Float[torch.Tensor, " examples"]:
        """The loss of each example."""


def unedited(padded: Padded) -> Doses:
    """Doses that leave every sequence as it is."""
    return Doses(factors=torch.zeros(len(padded.ids), device=padded.ids.device))


def lengths(padded: Padded) -> Int[torch.Tensor, " n"]:
    """Tokens of each response."""
    return padded.counted.sum(-1)


def mean_of(values: Float[torch.Tensor, " counted"], padded: Padded) -> Float[torch.Tensor, " n"]:
    """Of each sequence the mean of values of its counted tokens."""
    rows = padded.counted.nonzero()[:, 0]
    sums = torch.zeros(len(padded.ids), dtype=values.dtype, device=values.device).index_add(0, rows, values)
    return sums / lengths(padded)
