"""From rows of the last layer to logits, by the model's own final norm and unembedding, on its own ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from steercap.core.messages import NotCapturing, Project, Unembed, Unembedded


def unembedded(
    unembed: Callable[[torch.Tensor], torch.Tensor | None] | None, asked: Unembed, device: torch.device
) -> Unembedded | NotCapturing:
    """Answer of one rank; the ranks of a tensor-parallel group compute it together.

    Rows go one by one, as those of a decode pass with one request: what is kept of the last pass, of which LoRA's
    kernels read how many rows there are, fits that.

    Args:
        unembed: see `worker.decoder.Decoder.unembedding`; None where the model's end is on another pipeline stage.
        asked: what to answer.
        device: where the model computes.
    """
    if unembed is None:
        return NotCapturing()
    rows = rows_of(asked, device)
    found = [logits.float().flatten() for row in rows if (logits := unembed(row[None])) is not None]
    if not found:
        return NotCapturing()
    logits = torch.stack(found)
    chosen = logits[:, list(asked.tokens)].cpu().numpy().astype(np.float32, copy=False)
    least, most = (tuple(edge.tolist()) for edge in logits.aminmax(dim=1))
    spread, total = (tuple(of_all.tolist()) for of_all in (logits.std(dim=1), logits.logsumexp(dim=1)))
    return Unembedded(chosen.tobytes(), least, most, spread, total)


def rows_of(asked: Unembed | Project, device: torch.device) -> torch.Tensor:
    """The rows of a question, [count, width]."""
    found = torch.frombuffer(bytearray(asked.rows), dtype=getattr(torch, asked.dtype))
    return found.view(asked.count, -1).to(device)
