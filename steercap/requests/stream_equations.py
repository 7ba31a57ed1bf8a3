"""Equations that must hold among rows of layers with several residual streams (mHC), beside those of `equations`.

The inputs and outputs of the stream operators are captured separately; these equations connect them:

- behind a block, each stream is the sum of the streams before it, mixed by the residual mix, and of the block's output
  times its post mix; the streams behind a layer are those before the next, and behind the last the final ones;
- the residual mix sends from one stream to another, so the weights into each stream add up to 1 (last Sinkhorn step).

They do not check that a block reads the collapsed streams, since the collapse weights are no point. An edit of the
streams shows it, since the block then adds another row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from steercap.core.spec import Point
from steercap.requests.equations import Claim, relative

#: Sites of a layer's two blocks: streams before the block, post mix, residual mix, block output.
BLOCKS: Final = (
    ("mhc_streams_pre_attn", "mhc_attn_post_mix", "mhc_attn_res_mix", "attn_out"),
    ("mhc_streams_pre_mlp", "mhc_ffn_post_mix", "mhc_ffn_res_mix", "mlp_out"),
)
#: All of these sites, and that of the final streams.
STREAMS: Final = (*BLOCKS[0], *BLOCKS[1], "mhc_streams_final")
#: Roundings to the rows' dtype in a mixed stream: of the block's output, of the streams, and of their sum.
_MIXED: Final = 4.0
#: Allowed distance from 1 of the weights into a stream: each Sinkhorn step adds an epsilon of 1e-6 to its divisor.
_STOCHASTIC: Final = 1e-4


def mixes(
    rows: Mapping[Point, torch.Tensor], end: Point, edit: tuple[Point, torch.Tensor] | None = None
) -> Iterator[Claim]:
    """Yield the claims that must hold among rows of one forward pass, for the points that are present.

    Args:
        rows: rows of each point, [n, *shape of the point].
        end: the point of the final streams.
        edit: the edited point and the vectors added to each of its rows, [n, width]; None without an edit.
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
