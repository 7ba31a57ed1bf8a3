"""Logits of rows of the residual stream, by the model's own final norm and unembedding, on its own ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch

from steercap.core.messages import Choose, NotCapturing, Project, Unembed, Unembedded

#: Maximum number of rows that are unembedded at a time.
ROWS: Final = 64


@dataclass(frozen=True)
class Unembedding:
    """Functions from rows of the last layer, [n, hidden], to logits, [n, vocabulary], or a part of these.

    All ranks of a tensor-parallel group must call it together; the logits may be None on others than the first.

    Args:
        norm: the final norm.
        head: function from normed rows to logits.
    """

    norm: Callable[[torch.Tensor], torch.Tensor]
    head: Callable[[torch.Tensor], torch.Tensor | None]

    def logits(self, rows: torch.Tensor, *, normed: bool) -> Iterator[torch.Tensor]:
        """Yield logits, float32 [n, vocabulary], of at most `ROWS` rows at a time.

        Args:
            rows: rows [n, hidden].
            normed: True if the final norm has been applied to them.
        """
        for some in rows.split(ROWS):
            found = self.head(some if normed else self.norm(some))
            if found is not None:
                yield found.float().view(len(some), -1)


def unembedded(model: Unembedding | None, asked: Unembed, device: torch.device) -> Unembedded | NotCapturing:
    """Answer an Unembed question on one rank.

    Args:
        model: the model's unembedding; None where the model's end is on another pipeline stage.
        asked: the question.
        device: device where the model computes.
    """
    if model is None:
        return NotCapturing()
    tokens = slice(None) if asked.tokens is None else list(asked.tokens)
    found: list[tuple[torch.Tensor, ...]] = []
    for logits in model.logits(rows_of(asked, device), normed=asked.normed):
        best = logits.topk(min(asked.top, logits.shape[1]))
        edges = (*logits.aminmax(dim=1), logits.std(dim=1), logits.logsumexp(dim=1))
        found.append((logits[:, tokens], best.indices, best.values, *edges))
    if not found:
        return NotCapturing()
    chosen, top, values, *of_all = (torch.cat(parts).cpu() for parts in zip(*found, strict=True))
    least, most, spread, total = (tuple(one.tolist()) for one in of_all)
    return Unembedded(_bytes(chosen), least, most, spread, total, _bytes(top), _bytes(values))


def _bytes(found: torch.Tensor) -> bytes:
    return found.contiguous().numpy().tobytes()


def rows_of(asked: Unembed | Project | Choose, device: torch.device) -> torch.Tensor:
    """Return the rows of a question as a tensor [count, width] on the device."""
    found = torch.frombuffer(bytearray(asked.rows), dtype=getattr(torch, asked.dtype))
    return found.view(asked.count, -1).to(device)
