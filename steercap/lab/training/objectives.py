"""Training objectives: base class, members and registry. To add one, add a class, and an entry to `OBJECTIVES`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import torch
from jaxtyping import Float, Int
from torch.nn.functional import log_softmax, logsigmoid

from steercap.core.registry import Registry
from steercap.core.values import shown
from steercap.errors import InvalidSetting
from steercap.lab.training.batches import Batch, Padded
from steercap.lab.training.examples import Example, ExampleTokens, Preference, Prompted, conversation, tokens_of
from steercap.lab.training.formula import Doses

#: Sum of the log probabilities of the response's tokens, for each sequence, in nats.
Sums = Float[torch.Tensor, " n"]


class Steered(Protocol):
    """Interface of the model with trainable edits, as objectives call it."""

    def logits(self, padded: Padded, doses: Doses = ...) -> Float[torch.Tensor, "counted vocabulary"]:
        """Return float32 logits at the positions that predict a token of a response, sequence by sequence."""

    def log_probs(self, padded: Padded, doses: Doses = ...) -> Sums:
        """Return the log probability of each sequence's response, summed over its tokens, in nats."""


class Objective(ABC):
    """Training objective: a loss of examples. A member is a frozen dataclass, its fields the objective's settings."""

    #: Types of the examples that the objective accepts.
    example: ClassVar[tuple[type, ...]]
    #: True if initial edits must not be zero, because the loss removes their directions.
    needs_direction: ClassVar[bool] = False

    @abstractmethod
    def tokens(self, tokenizer: Any, example: Any) -> tuple[ExampleTokens, ...]:
        """Tokenize an example to the sequences that the loss needs, equally many for each example.

        Raises:
            InvalidPrompt: a sequence has no token to learn.
        """

    @abstractmethod
    def losses(self, model: Steered, batch: Batch) -> Float[torch.Tensor, " examples"]:
        """Return the loss of each example in the batch, with a gradient in the edits' parameters."""


def unedited(padded: Padded) -> Doses:
    """Return doses that leave every sequence unedited."""
    return Doses(factors=torch.zeros(len(padded.ids), device=padded.ids.device))


def lengths(padded: Padded) -> Int[torch.Tensor, " n"]:
    """Return the number of tokens of each sequence's response."""
    return padded.counted.sum(-1)


def mean_of(values: Float[torch.Tensor, " counted"], padded: Padded) -> Float[torch.Tensor, " n"]:
    """Return each sequence's mean of `values`, one per counted token, sequence by sequence."""
    rows = padded.counted.nonzero()[:, 0]
    sums = torch.zeros(len(padded.ids), dtype=values.dtype, device=values.device).index_add(0, rows, values)
    return sums / lengths(padded)


class PreferenceObjective(Objective):
    """Base class of objectives on pairs: the chosen and the rejected response are a sequence each."""

    example: ClassVar[tuple[type, ...]] = (Preference,)

    def tokens(self, tokenizer: Any, example: Any) -> tuple[ExampleTokens, ...]:
        return tuple(tokens_of(tokenizer, example.prompt, one) for one in (example.chosen, example.rejected))


@dataclass(frozen=True)
class BiPO(PreferenceObjective):
    """-log σ(d β (log p_d(c|x)/p(c|x) - log p_d(r|x)/p(r|x))): p_d has the edit times d, and d is 1 or -1, drawn.

    The edit makes the chosen response likelier, and its opposite the rejected one. If nothing is drawn, as in
    validation, the loss is the mean over both signs.

    Source: bidirectional preference optimisation, Cao et al. 2024 (arXiv:2406.00045).

    Args:
        beta: coefficient β.
    """

    beta: float = 0.1

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


@dataclass(frozen=True)
class RePS(PreferenceObjective):
    """-log σ(Δ⁺) - log σ(Δ⁻): the edit makes the chosen response likelier, removing its direction the rejected one.

        Δ⁺ = β⁺/|c| log p⁺(c|x) - 1/|r| log p⁺(r|x);   β⁺ = max(log p(r|x) - log p(c|x), 1)
        Δ⁻ = β⁻/|r| log p⁰(r|x) - 1/|c| log p⁰(c|x);   β⁻ = max(log p(c|x) - log p(r|x), 1)

    p⁺ has the edit times a drawn factor. p⁰ has `h <- h - relu(h·w) w / ‖w‖²` in place of the edit, for each direction
    w that it writes, so the edit must not begin at zero. p is the unedited model, without gradient.

    Source: reference-free preference steering, Wu et al. 2025 (arXiv:2505.20809).

    Args:
        factors: factors of the edit, one of which is drawn; if nothing is drawn, the loss is the mean over all.
    """

    factors: tuple[float, ...] = (1.0,)
    needs_direction: ClassVar[bool] = True

    def losses(self, model: Steered, batch: Batch) -> Float[torch.Tensor, " examples"]:
        both = batch.roles[0] + batch.roles[1]
        with torch.no_grad():
            chosen, rejected = model.log_probs(both, unedited(both)).chunk(2)
        known = torch.tensor(self.factors, device=chosen.device, dtype=chosen.dtype)
        if batch.draws is None:
            each = [known[number].expand(len(batch.owners)) for number in range(len(known))]
        else:
            each = [known[(batch.draws * len(known)).long()]]
        scaled = [_mean_log_probs(model, both, Doses(torch.cat([one, one]))) for one in each]
        up = (rejected - chosen).clamp(min=1)
        plus = torch.stack([-logsigmoid(up * ours - theirs) for ours, theirs in scaled]).mean(0)
        nulled = Doses(nulled=torch.ones_like(both.owners, dtype=torch.bool))
        ours, theirs = _mean_log_probs(model, both, nulled)
        return plus - logsigmoid((chosen - rejected).clamp(min=1) * theirs - ours)


def _mean_log_probs(model: Steered, both: Padded, doses: Doses) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean log probability per token of chosen and of rejected responses: float [examples] each."""
    chosen, rejected = (model.log_probs(both, doses) / lengths(both)).chunk(2)
    return chosen, rejected


@dataclass(frozen=True)
class Likelihood(Objective):
    """-1/|y| log p(y | x) of the edited model, in nats per token; of a `Prompted`, without its system prompt."""

    example: ClassVar[tuple[type, ...]] = (Example, Prompted)

    def tokens(self, tokenizer: Any, example: Any) -> tuple[ExampleTokens, ...]:
        prompt = conversation(example.prompt) if isinstance(example, Prompted) else example.prompt
        return (tokens_of(tokenizer, prompt, example.response),)

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
    example: ClassVar[tuple[type, ...]] = (Prompted,)

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


def objective_of(given: str | Objective) -> Objective:
    """Return the objective of a name, with its defaults, or the objective given.

    Raises:
        UnknownName: there is no such objective.
        InvalidSetting: the value is neither a name nor an objective, or is an objective whose repr holds an address: a
            folder could not tell it from another.
    """
    if isinstance(given, str):
        return OBJECTIVES[given]
    if not isinstance(given, Objective):
        raise InvalidSetting(f"objective={shown(given)}; give an objective, or a name: {', '.join(OBJECTIVES)}")
    if " at 0x" in repr(given):
        raise InvalidSetting(f"objective={given!r}; make {type(given).__name__} a frozen dataclass of plain values")
    return given


#: Every objective, with its default settings, by name.
OBJECTIVES: Final[Registry[Objective]] = Registry(
    "objective",
    {
        "bipo": BiPO(),
        "distillation": Distillation(),
        "likelihood": Likelihood(),
        "reps": RePS(),
    },
)
