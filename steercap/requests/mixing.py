"""What must hold of the rows of layers that carry several streams, beside what is in `proof`.

What the operators take and give is read one by one; these equations bind it together:

- behind a block each stream is the streams before it, mixed by the residual mix, and the block's output times its post
  mix; behind a layer these are the streams before the next, behind the last the final ones;
- the residual mix is from one stream to another, so that what is sent to each adds up to 1 (the last Sinkhorn step).

That a block reads what its operator makes of the streams is not among them: by what streams are collapsed is no point.
An edit of the streams shows it, since the block adds another row then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from steercap.core.spec import Point
from steercap.requests.proof import Claim, relative

#: By a layer's blocks: where streams are before them, by what they are mixed behind them, and what is added.
BLOCKS: Final = (
    ("mhc_streams_pre_attn", "mhc_attn_post_mix", "mhc_attn_res_mix", "attn_out"),
    ("mhc_streams_pre_mlp", "mhc_ffn_post_mix", "mhc_ffn_res_mix", "mlp_out"),
)
#: All of them, and where the streams end.
STREAMS: Final = (*BLOCKS[0], *BLOCKS[1], "mhc_streams_final")
#: Roundings to the rows' dtype in a mixed stream: of what a block adds, of the streams, and of their sum.
_MIXED: Final = 4.0
#: By how much what is sent to a stream may miss 1: each Sinkhorn step adds an epsilon of 1e-6 to what it divides by.
_STOCHASTIC: Final = 1e-4


def mixes(
    rows: Mapping[Point, torch.Tensor], end: Point, edit: tuple[Point, torch.Tensor] | None = None
) -> Iterator[Claim]:
    """What must hold among rows of the same pass, as far as the points are there.

    Args:
        rows: of each point, [n, *shape of the point].
        end: where the streams end.
        edit: where rows were edited, and what was added to each, [n, width]; None for nowhere.
    """
    named = f", with an edit at {edit[0]}" if edit else ""
    layers = sorted({point.layer for point in rows})
    for layer in layers:
        for (before, *terms), following in zip(BLOCKS, (Point(layer, BLOCKS[1][0]), _behind(layer, end)), strict=True):
            found = [rows.get(Point(layer, site)) for site in (before, *terms)]
            streams, post, res, added = found
            if res is not None:
                missed = (res.double().sum(1) - 1).abs().max()
                yield Claim(f"what {terms[1]}[{layer}] sends to a stream is 1{named}", float(missed), _STOCHASTIC)
            if streams is None or post is None or res is None or added is None or following not in rows:
                continue
            parts = torch.einsum("nij,nid->nijd", res.double(), streams.double())
            given = torch.einsum("nj,nd->njd", post.double(), added.double())
            own = [edit[1].view_as(given)] if edit and edit[0] == following else []
            error = relative([rows[following]], [*parts.unbind(1), given, *own])
            name = f"{following} is {before}, mixed, and {terms[2]}{named}"
            yield Claim(name, error, _MIXED * torch.finfo(rows[following].dtype).eps)


def _behind(layer: int, end: Point) -> Point:
    return end if layer == end.layer else Point(layer + 1, BLOCKS[0][0])
