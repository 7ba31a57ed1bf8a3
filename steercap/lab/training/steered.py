"""Frozen model with the edits of several traits, each sequence edited by its own trait's, for training objectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from jaxtyping import Float
from torch import nn

from steercap.core.spec import Point
from steercap.core.tokens import TokenSelection
from steercap.errors import InvalidVector
from steercap.lab.training.batches import Batch, Padded
from steercap.lab.training.formula import Doses, Part, changed, stacked
from steercap.lab.training.hooked import HookedModel, firsts
from steercap.lab.training.objectives import Objective
from steercap.lab.training.settings import Penalties
from steercap.lab.training.trainable import TrainableSpec

#: Doses with which every sequence's edits have the factor 1.
ONCE = Doses()


@dataclass(frozen=True, eq=False)
class _ForwardPass:
    """Inputs of the current forward pass, for the hooks: sequences, factors, and the parts of each edit."""

    padded: Padded
    doses: Doses
    lowered: Sequence[Sequence[Part]]


class SteeredTraits(nn.Module):
    """Frozen model with the trainable specs of one or several traits of one form.

    The module's parameters are those of the specs alone: the model is no submodule, so DistributedDataParallel and
    accelerate accept the module as it is. `forward` returns the sum of the traits' losses.

    Args:
        model: the frozen model.
        specs: spec of each trait: the same edits at the same points and tokens, with different vectors.
        objective: training objective.
        penalties: penalties added to the objective.
        gate_width: width of relaxed thresholds, see `steercap.lab.training.formula.gate`.
        checkpointing: True to compute layers without an edit again in the backward pass, instead of keeping their rows.
    """

    def __init__(
        self,
        model: HookedModel,
        specs: Sequence[TrainableSpec],
        objective: Objective,
        penalties: Penalties,
        gate_width: float,
        *,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.specs = nn.ModuleList(specs)  # so that torch knows their parameters
        self._specs = tuple(specs)
        self._held = (model,)  # a tuple hides it from torch
        self._objective, self._penalties, self._gate_width = objective, penalties, gate_width
        self._edits, self._keepers = specs[0].edits, specs[0].keepers
        #: Distinct token selections of the edits, in the order of `Padded.scopes`.
        self.selections: tuple[TokenSelection, ...] = tuple(dict.fromkeys(edit.selection for edit in self._edits))
        self._points = [edit.points(len(model.layers)) for edit in self._edits]
        edited = {point.layer for points in self._points for point in points}
        self._checkpointed = [layer for layer in model.layers if layer not in edited] if checkpointing else []
        self._now: _ForwardPass | None = None

    def forward(self, batch: Batch, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the loss of a batch of examples, with penalties, and each trait's share.

        Args:
            batch: examples of any traits.
            size: number of examples of each trait in the whole step, of which the batch may be a part.

        Returns:
            The loss to minimise, and for each trait the sum of these examples' losses divided by `size`, detached:
            float [traits].
        """
        with self.hooked():
            losses = self._objective.losses(self, batch)
        means = torch.zeros(len(self.specs), dtype=losses.dtype, device=losses.device)
        means = means.index_add(0, batch.owners, losses / size)
        penalties = [self._penalties.of(spec) for spec in self._specs]
        shares = torch.bincount(batch.owners, minlength=len(self.specs)) / size
        weighed = sum(share * penalty for share, penalty in zip(shares, penalties, strict=True))
        return means.sum() + weighed, means.detach()

    def losses(self, batch: Batch) -> Float[torch.Tensor, " examples"]:
        """Return the loss of each example in the batch, without penalties and without gradient."""
        with torch.no_grad(), self.hooked():
            return self._objective.losses(self, batch)

    def logits(self, padded: Padded, doses: Doses = ONCE) -> Float[torch.Tensor, "counted vocabulary"]:
        """Return logits at the positions that predict a token of a response, sequence by sequence.

        Their dtype is float32, or the model's if that is wider. `doses` has the factors of each sequence's edits.
        """
        (model,) = self._held
        found = [spec.lowered() for spec in self._specs]
        self._now = _ForwardPass(padded, doses, [stacked(edits) for edits in zip(*found, strict=True)])
        try:
            with _counted_only(model, padded):
                logits = model.model(input_ids=padded.ids, use_cache=False).logits
        finally:
            self._now = None
        return _wide(logits.flatten(0, -2).to(padded.ids.device))

    def log_probs(self, padded: Padded, doses: Doses = ONCE) -> Float[torch.Tensor, " n"]:
        """Return each sequence's log probability of its response, summed over tokens, in nats."""
        logits = self.logits(padded, doses)
        each = -nn.functional.cross_entropy(logits, padded.targets[padded.counted], reduction="none")
        rows = padded.counted.nonzero()[:, 0]
        return torch.zeros(len(padded.ids), dtype=each.dtype, device=each.device).index_add(0, rows, each)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Install hooks that apply the edits in each forward pass, and remove them after the block."""
        (model,) = self._held
        points = dict.fromkeys(point for points in self._points for point in points)
        visits = [(point, partial(self._change, point)) for point in points]
        with ExitStack() as hooks:
            hooks.enter_context(model.checkpointed(self._checkpointed))
            model.visit(hooks, [*firsts(visits, first=True), *firsts(visits, first=False)])
            yield

    def _change(self, point: Point, hidden: torch.Tensor) -> None:
        """Edit the rows of a point in place; computed on a copy, so that tensors saved by autograd stay unchanged."""
        now = self._now
        if now is None:
            return
        rows = _wide(hidden.clone().reshape(*now.padded.ids.shape, -1))
        edits = [number for number, points in enumerate(self._points) if point in points]
        for keeper, numbers in groupby(edits, key=lambda number: self._keepers[number]):
            before = rows
            for number in numbers:
                rows = self._edited(number, rows, now)
            if keeper is not None:
                rows = _restored(rows, before)
        hidden.copy_(rows.to(hidden.dtype).reshape(hidden.shape))

    def _edited(self, number: int, rows: torch.Tensor, now: _ForwardPass) -> torch.Tensor:
        """Return rows [n, t, width] after edit number `number`, applied to whole rows or to its part of each row."""
        edit, parts = self._edits[number], now.lowered[number]
        scope = now.padded.scopes[self.selections.index(edit.selection)].to(rows.device)
        width = parts[0].write.shape[-1]
        change = partial(
            changed,
            parts=[part.to(rows.device) for part in parts],
            owners=now.padded.owners.to(rows.device),
            doses=now.doses.to(rows.device),
            gate_width=self._gate_width,
        )
        if edit.part is None:
            if width != rows.shape[-1]:
                raise InvalidVector(f"{edit}: the vector has width {width}, the rows are {rows.shape[-1]} wide")
            return change(rows, scope=scope)
        if rows.shape[-1] % width:
            raise InvalidVector(f"{edit}: the vector has width {width}, and its rows are {rows.shape[-1]} wide")
        pieces = list(rows.split(width, dim=-1))
        for place in range(len(pieces)) if edit.part == "each" else [edit.part]:
            pieces[place] = change(pieces[place], scope=scope)
        return torch.cat(pieces, dim=-1)


def _wide(rows: torch.Tensor) -> torch.Tensor:
    """Convert rows to float32, unless their dtype is wider: taps compute in float32 too."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _restored(rows: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Scale each row to the norm of its row in `before`; a row of zeros stays zero."""
    had, now = (torch.linalg.vector_norm(one, dim=-1, keepdim=True) for one in (before, rows))
    return rows * torch.where(now > 0, had / now.clamp(min=torch.finfo(now.dtype).tiny), 1.0)


@contextmanager
def _counted_only(model: HookedModel, padded: Padded) -> Iterator[None]:
    """Compute logits in the block only at positions that predict a response: all would need the most memory."""
    head = model.model.get_output_embeddings()

    def hook(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        rows = args[0].reshape(*padded.ids.shape, -1)
        return (rows[padded.counted.to(rows.device)][None], *args[1:])

    handle = head.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()
