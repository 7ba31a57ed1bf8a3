"""What must hold of the rows of a model whose layers are read rightly, whatever the model is.

A tap that fires once a pass and reads finite rows may still read something else than its name says: a stream counted
twice, a part of a sum, a norm's input for its output. These equations need no second implementation of the model:

- the end of a layer is the beginning of the next;
- what a layer's blocks add is what the stream grows by, times the family's factor if it has one;
- an edit changes the row of its own point by exactly what was added, and both equations hold of the edited rows;
- the lens closes: the model's own final norm and unembedding, given the last row of the stream, give the logits that
  the engine reports, with an edit of that row as well as without. Without, a norm would hide any factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from steercap.core.spec import Point

#: Where blocks read the stream and add to it.
STREAM: Final = ("resid_pre", "attn_out", "mlp_out", "resid_post")
#: Roundings to the rows' dtype, each of half an epsilon at most, in a row and in what is written of an edit; and in a
#: sum of rows of which each was rounded, and the stream between the blocks too.
_ROW: Final = 2.0
_SUM: Final = 4.0
#: The same for logits.
_LOGIT: Final = 2.0
#: How far rows and logits may differ that were computed in batches of other sizes: in float32, and in 16 bits.
_COMPUTED: Final = {torch.float32: 1e-3, torch.float64: 1e-3}
_COMPUTED_16: Final = 0.1


@dataclass(frozen=True)
class Claim:
    """One equation of the proof at start.

    Args:
        name: what must be what.
        error: by how much it is not, relative to the size of what is compared.
        allowed: how much may come of rounding.
    """

    name: str
    error: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether it is so."""
        return self.error <= self.allowed  # and not for NaN

    def __str__(self) -> str:
        return f"{self.name}: off by {self.error:.2g}, at most {self.allowed:.2g} can be rounding"


def equations(
    rows: Mapping[Point, torch.Tensor], factor: float | None, edit: tuple[Point, torch.Tensor] | None = None
) -> Iterator[Claim]:
    """What must hold among rows of the same pass, as far as the points are there.

    Args:
        rows: of each point, [n, hidden].
        factor: what blocks' outputs are multiplied by before they are added; None where layers do more than add them.
        edit: where rows were edited, and what was added to each, [n, hidden]; None for nowhere.
    """
    named = f", with an edit at {edit[0]}" if edit else ""

    def claim(name: str, at: Point, terms: Sequence[torch.Tensor], rounded: float) -> Claim:
        added = [edit[1]] if edit and edit[0] == at else []  # the row of a point is the edited one
        allowed = rounded * torch.finfo(rows[at].dtype).eps
        return Claim(name + named, _relative([rows[at]], [*terms, *added]), allowed)

    for point in rows:
        if point.site != "resid_post":
            continue
        here, following = point.layer, Point(point.layer + 1, "resid_pre")
        if following in rows:
            name = f"resid_pre[{here + 1}] is resid_post[{here}]"
            yield claim(name, following, [rows[point]], _ROW)
        before, *blocks = (Point(here, site) for site in STREAM[:3])
        if factor is not None and before in rows and all(block in rows for block in blocks):
            times = "" if factor == 1 else f"{factor:.4g} × "
            name = f"resid_post[{here}] is resid_pre + {times}(attn_out + mlp_out)"
            yield claim(name, point, [rows[before], *(factor * rows[block].double() for block in blocks)], _SUM)


def edited(point: Point, clean: torch.Tensor, found: torch.Tensor, added: torch.Tensor, dtype: torch.dtype) -> Claim:
    """An edit changes the row of its point by what was added, [n, width] each.

    Args:
        point: where.
        clean: its rows without the edit.
        found: those with it.
        added: what was added to each.
        dtype: the model's, in which rows of a router are computed too, though they are float32.
    """
    return Claim(f"{point} grows by what is added there", _relative([found], [clean, added]), computed(dtype))


def closes(
    named: str,
    reported: Sequence[float],
    found: Sequence[float],
    *,
    most: float,
    spread: float,
    size: float,
    dtype: torch.dtype,
) -> Claim:
    """The lens closes at one row.

    Args:
        named: what the row is of.
        reported: what the engine says of the most probable tokens: logits, or log probabilities.
        found: logits that the row gives for them.
        most: the greatest logit of all tokens that the row gives.
        spread: standard deviation of the logits of all tokens.
        size: the greatest magnitude among them.
        dtype: of the rows.
    """
    ours, theirs = torch.tensor(found).double(), torch.tensor(reported).double()
    # Logarithms of probabilities are logits less their total; a row's greatest logit must be among those of the best.
    error = min(float((ours - less - theirs).abs().max()) for less in (0.0, total))
    error = max(error, most - float(ours.max()))
    unit = max(spread, 1e-30)
    resolved = _LOGIT * torch.finfo(dtype).eps * max(size, float(theirs.abs().max())) / unit
    return Claim(f"the lens closes {named}", error / unit, computed(dtype) + resolved)


def computed(dtype: torch.dtype) -> float:
    """How far rows may differ, relative to their size, that were computed in batches of other sizes."""
    return _COMPUTED.get(dtype, _COMPUTED_16)


def worst(claims: Iterable[Claim]) -> Claim | None:
    """The claim that is furthest from holding, of those that do not."""
    wrong = [claim for claim in claims if not claim.holds]
    return max(wrong, key=lambda claim: claim.error / max(claim.allowed, 1e-30), default=None)


def _relative(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    """How far the sums of terms, [n, width] each, are apart: the worst row, relative to its greatest term."""
    terms = torch.stack([term.double().flatten(1) for term in (*left, *right)])
    apart = terms[: len(left)].sum(0) - terms[len(left) :].sum(0)
    return float((apart.norm(dim=1) / terms.norm(dim=2).amax(0).clamp(min=1e-30)).max())
    total: float,
        total: the logarithm of the sum of their exponentials.
