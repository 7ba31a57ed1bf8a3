"""SAE features nearest to a vector, by what they read and what they write."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float

from steercap.core.spec import Point
from steercap.core.values import index_of, shown
from steercap.errors import InvalidSpec
from steercap.lab.mechanism.analysis.given import Vectors, named, origin, units
from steercap.lab.mechanism.analysis.tables import once, table_of
from steercap.saes.sae import SAE

if TYPE_CHECKING:
    import pyarrow as pa


def nearest_features(vectors: Vectors, sae: SAE, *, top: int = 10, layer: int | None = None) -> pa.Table:
    """Find the features of an SAE whose decoder or encoder has the greatest cosine with a vector, of either sign.

    Decoder directions (what features write) tell the composition of a vector; encoder directions, the features a vector
    turns on. Centring of rows by the SAE is folded in. Thresholds and other features are ignored: `sae.encode` of a
    steered row gives the features it really turns on.

    Args:
        vectors: vectors at the point that the SAE reads or, for a transcoder's decoder, writes.
        sae: SAE, as returned by `SAE.load`.
        top: number of features of each half, by |cosine|.
        layer: layer of the vectors, if other than the SAE's; it is up to you to justify comparing across layers.

    Returns:
        Columns `name`, `layer`, `half` ("decoder" or "encoder"), `place`, `feature`, `cosine`, `z`: √width · cosine,
        standard normal for random vectors.

    Raises:
        InvalidSpec: vectors of another width, site or layer than the SAE's, or `top` that does not fit.
        LayerOutOfRange, InvalidVector: as for `cosines`.
    """
    directions = named(vectors)
    count = index_of(top)
    if not isinstance(sae, SAE):
        raise InvalidSpec(f"sae={shown(sae)}; give SAE.load(...)")
    if count is None or not 1 <= count <= sae.d_sae:
        raise InvalidSpec(f"top={shown(top)}; give a number of features, from 1 to {sae.d_sae:,}")
    halves = {"decoder": (sae.output, sae.decoder), "encoder": (sae.input, _read(sae))}
    fitting = {half: rows for half, (point, rows) in halves.items() if point.site == directions.site}
    at = _layer(directions.site, halves["encoder"][0], halves["decoder"][0], layer)
    fitting = {half: rows for half, rows in fitting.items() if layer is not None or halves[half][0].layer == at}
    if not fitting or any(rows.shape[1] != directions.width for rows in fitting.values()):
        raise InvalidSpec(f"vectors of {directions.site!r}, {directions.width} wide, and {sae!r} are not of one point")
    given = units(directions, at)
    rows: list[dict[str, Any]] = []
    for half, features in fitting.items():
        lengths = features.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
        found = given @ features.T / lengths
        best = found.abs().topk(count, dim=1).indices
        for number, name in enumerate(directions):
            for place, feature in enumerate(best[number].tolist()):
                cosine = float(found[number, feature])
                z = cosine * math.sqrt(directions.width)
                rows.append(
                    {"name": name, "layer": at, "half": half, "place": place, "feature": feature,
                     "cosine": cosine, "z": z}
                )  # fmt: skip
    columns = ("name", "layer", "half", "place", "feature", "cosine", "z")
    made = origin(directions, sae=sae.name or repr(sae), compared=sae.d_sae, once=once(sae.d_sae))
    return table_of({name: [row[name] for row in rows] for name in columns}, **made)


def _read(sae: SAE) -> Float[torch.Tensor, "d_sae d_in"]:
    """Return the direction each feature reads of a row, up to a positive scale: [d_sae, d_in]."""
    rows = sae.encoder.weight.T
    centred = sae.encoder.centred or sae.encoder.normalisation == "layer_norm"
    return rows - rows.mean(dim=1, keepdim=True) if centred else rows


def _layer(site: str, reads: Point, writes: Point, layer: int | None) -> int:
    """Return the layer of the vectors to use: the given one, else the SAE's."""
    if layer is not None:
        return layer
    return next((point.layer for point in (writes, reads) if point.site == site), writes.layer)
