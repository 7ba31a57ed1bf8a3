"""From logits of a layer's experts to those chosen and their weights, by the layer's own router, on its own ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from steercap.architectures.unembedding import rows_of
from steercap.core.messages import Choose, Chosen, NotCapturing
from steercap.errors import InvalidRequest

#: Gives the experts that a layer chooses by logits, [n, experts], and their weights, [n, k] each, or None where the
#: layer is on another stage. Raises `InvalidRequest` where logits do not say it.
Choosing: TypeAlias = "Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None]"


def chosen(choose: Choosing | None, asked: Choose, device: torch.device) -> Chosen | NotCapturing:
    """Answer of one rank, each of which has the whole router."""
    if choose is None:
        return NotCapturing()
    logits = rows_of(asked, device)
    try:
        found = choose(asked.layer, logits)
        if found is None:
            return NotCapturing()
        ids, weights = checked(*found, logits.shape[1])
    except InvalidRequest as error:
        return Chosen(refused=str(error))
    return Chosen(ids.cpu().numpy().tobytes(), weights.cpu().numpy().tobytes())


def checked(ids: torch.Tensor, weights: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights that can be a choice, as int64 and float32.

    Args:
        ids: [n, k].
        weights: [n, k].
        experts: how many there are to choose from.

    Raises:
        InvalidRequest: an expert that does not exist, one that is chosen twice, or a weight that is not finite.
    """
    ids, weights = ids.long(), weights.float()
    ordered = ids.sort(dim=1).values
    if bool((ids < 0).any() | (ids >= experts).any() | (ordered[:, 1:] == ordered[:, :-1]).any()):
        raise InvalidRequest(f"its router gives experts that are not different ones of {experts}")
    if not bool(weights.isfinite().all()):
        raise InvalidRequest("its router gives weights that are not finite: it chooses by more than logits of experts")
    return ids.contiguous(), weights.contiguous()
