"""Choice of experts: from a layer's router logits to expert ids and weights, by the layer's own router."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from steercap.architectures.unembedding import rows_of
from steercap.core.messages import Choose, Chosen, NotCapturing
from steercap.errors import InvalidRequest

#: Function of a layer index and logits, [n, experts], that returns the ids and weights of the experts that the layer's
#: router chooses, [n, k] each, or None if the layer is on another pipeline stage. Raises `InvalidRequest` where the
#: logits alone do not determine the choice.
Choosing: TypeAlias = "Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None]"


def chosen(choose: Choosing | None, asked: Choose, device: torch.device) -> Chosen | NotCapturing:
    """Answer a `Choose` call on one rank, each of which has the whole router."""
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
    """Check the experts and weights of a choice; return them as int64 and float32.

    Args:
        ids: expert ids, [n, k].
        weights: expert weights, [n, k].
        experts: number of experts of the layer.

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
