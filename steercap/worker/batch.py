"""Layout of one forward pass, as a runner adapter describes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from steercap.core.rows import Ints


@dataclass(frozen=True)
class BatchRows:
    """Layout of one forward pass: request by request, tokens of a request consecutive.

    Args:
        request_ids: the runner's ids, in batch order.
        starts: position of each request's first token in this pass: int64 [requests].
        counts: tokens of each request in this pass: int64 [requests].
        token_ids: the ids the model reads, [tokens] at least, on the model's device.
        positions: the positions the model reads, [tokens] at least, on the model's device.
    """

    request_ids: Sequence[str]
    starts: Ints
    counts: Ints
    token_ids: torch.Tensor
    positions: torch.Tensor
