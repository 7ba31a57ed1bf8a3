"""Training objectives, one file each: base class and registry. To add one, add a file with a `MEMBER`."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol

import torch
from jaxtyping import Float, Int

from steercap.core.registry import Registry
from steercap.lab.training.batches import Batch, Padded
from steercap.lab.training.examples import ExampleTokens
from steercap.lab.training.formula import Doses

#: Sum of the log probabilities of the response's tokens, for each sequence.
Sums = Float[torch.Tensor, " n"]


class Steered(Protocol):
    """Interface of the model with its edits, for objectives."""

    def logits(self, padded: Padded, doses: Doses = ...) -> Float[torch.Tensor, "counted vocabulary"]:
        """Return float32 logits at positions that predict a token of a response, sequence by sequence."""

    def log_probs(self, padded: Padded, doses: Doses = ...) -> Sums:
        """Return the log probability of each sequence's response."""


class Objective(ABC):
    """Training objective. A member is frozen data, its fields the objective's settings."""

    #: The kind of examples it takes.
    example: ClassVar[type]
    #: True if edits must write something from the start, because their directions are removed in the loss.
    needs_direction: ClassVar[bool] = False

    @abstractmethod
    def tokens(self, tokenizer: Any, example: Any) -> tuple[ExampleTokens, ...]:
        """Tokenize an example to its sequences, equally many for each example.

        Raises:
            InvalidPrompt: a sequence has no token to learn.
        """

    @abstractmethod
    def losses(self, model: Steered, batch: Batch) -> Float[torch.Tensor, " examples"]:
        """Return the loss of each example."""


def unedited(padded: Padded) -> Doses:
    """Return doses that leave every sequence unedited."""
    return Doses(factors=torch.zeros(len(padded.ids), device=padded.ids.device))


def lengths(padded: Padded) -> Int[torch.Tensor, " n"]:
    """Return the number of tokens of each response."""
    return padded.counted.sum(-1)


def mean_of(values: Float[torch.Tensor, " counted"], padded: Padded) -> Float[torch.Tensor, " n"]:
    """Return the mean of values over each sequence's counted tokens."""
    rows = padded.counted.nonzero()[:, 0]
    sums = torch.zeros(len(padded.ids), dtype=values.dtype, device=values.device).index_add(0, rows, values)
    return sums / lengths(padded)


#: Every objective, with its defaults, by the name of its file.
OBJECTIVES: Registry[Objective] = Registry("objective", sys.modules[__name__], Objective)
