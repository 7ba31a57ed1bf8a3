"""Feed-forward neurons, and SAE features, that read a vector, or that write along it.

From weights alone, up to the scale of norms, as in `steercap.lab.mechanism.analysis.heads`. All numbers are scalar
products, whose distribution for random vectors is known in closed form, so z-scores need no sampling.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float

from steercap.core.spec import Layers, Point
from steercap.core.values import count_of, shown
from steercap.errors import InvalidSpec
from steercap.files.fingerprint import names_of, warn_of_other_model
from steercap.kernels.bits import exact_products
from steercap.lab.mechanism.analysis.given import Vectors, in_stream, named, origin, readers, units, writers
from steercap.lab.mechanism.analysis.tables import once, table_of
from steercap.lab.mechanism.weights.model import ModelWeights
from steercap.saes.sae import SAE
from steercap.steering.directions import DirectionSet

if TYPE_CHECKING:
    import pyarrow as pa


def neuron_reads(
    vectors: Vectors, weights: ModelWeights, layer: int, *, layers: Layers | None = None, top: int | None = 20
) -> pa.Table:
    """List the neurons whose gates or inputs read a vector most strongly, with either sign.

    Args:
        vectors: vectors in the basis of the residual stream.
        weights: weights of the vectors' model.
        layer: layer of the vectors.
        layers: layers of the neurons; by default all that read a vector added at the vectors' point.
        top: number of neurons of each vector and part, over all layers, by |z|; None for all.

    Returns:
        Columns `name`, `part` ("gate" and "up", or "in" if neurons have no gate), `layer`, `neuron`, `read` (product of
        the neuron's input direction with the vector at length 1, up to the norm's scale), `constant` (the neuron's
        input for a zero vector), `z`: √hidden · cos(vector, the neuron's input direction), standard normal for random
        vectors.

    Raises:
        InvalidSpec: the vectors have another width or basis, no layer reads them, or `top` is below 1.
        UnsupportedModel, LayerOutOfRange: as for `ModelWeights.neurons`.
    """
    directions = in_stream(vectors, weights)
    given, found = units(directions, layer), _FoundNeurons(directions, top)
    for at in readers(weights, directions.site, layer, "mlp", layers):
        for part, read in weights.neurons(at).reading.items():
            found.add(at, part, read.weight, given, read.constant)
    return found.table(("name", "part", "layer", "neuron", "read", "constant", "z"), at=layer)


def neuron_writes(
    vectors: Vectors, weights: ModelWeights, layer: int, *, layers: Layers | None = None, top: int | None = 20
) -> pa.Table:
    """List the neurons whose output directions are most strongly along a vector, with either sign.

    Args:
        vectors, weights, layer, top: arguments as for `neuron_reads`.
        layers: layers of the neurons; by default all that have written to the rows of the vectors' point.

    Returns:
        Columns `name`, `layer`, `neuron`, `written` (component along the vector of the output for an activation of 1,
        in units of the stream), `cosine` (of the neuron's output direction with the vector), `z`: √hidden · cosine.

    Raises:
        The errors of `neuron_reads`.
    """
    directions = in_stream(vectors, weights)
    given, found = units(directions, layer), _FoundNeurons(directions, top)
    for at in writers(weights, directions.site, layer, "mlp", layers):
        found.add(at, "down", weights.neurons(at).down, given, None)
    return found.table(("name", "layer", "neuron", "written", "cosine", "z"), at=layer)


class _FoundNeurons:
    """Collector of neurons over layers, which keeps the `top` of each vector and part by |z|, all for None."""

    def __init__(self, directions: DirectionSet, top: int | None) -> None:
        self._directions, self._top = directions, None if top is None else count_of(top, "top")
        self._rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self._compared = 0

    @exact_products()
    def add(
        self,
        layer: int,
        part: str,
        weight: Float[torch.Tensor, "neurons hidden"],
        given: Float[torch.Tensor, "names hidden"],
        constant: Float[torch.Tensor, " neurons"] | None,
    ) -> None:
        """Add the neurons of one layer and part, with the products of their `weight` rows and unit vectors `given`."""
        products, lengths = given @ weight.T, weight.norm(dim=1)
        cosines = torch.where(lengths > 0, products / lengths, 0.0)
        count = len(weight) if self._top is None else min(self._top, len(weight))
        best = cosines.abs().topk(count, dim=1).indices
        self._compared += len(weight)
        for number, name in enumerate(self._directions):
            self._rows.setdefault((name, part), []).extend(
                {
                    "name": name,
                    "part": part,
                    "layer": layer,
                    "neuron": neuron,
                    "read": float(products[number, neuron]),
                    "written": float(products[number, neuron]),
                    "constant": 0.0 if constant is None else float(constant[neuron]),
                    "cosine": float(cosines[number, neuron]),
                    "z": float(cosines[number, neuron]) * math.sqrt(weight.shape[1]),
                }
                for neuron in best[number].tolist()
            )

    def table(self, columns: tuple[str, ...], *, at: int) -> pa.Table:
        """Return the kept neurons as a table of some columns, by |z|; `at` is the layer of the vectors."""
        kept = [
            row
            for rows in self._rows.values()
            for row in sorted(rows, key=lambda row: -abs(row["z"]))[: self._top or len(rows)]
        ]
        made = origin(self._directions, at=at, compared=self._compared, once=once(self._compared))
        return table_of({name: [row[name] for row in kept] for name in columns}, **made)


@exact_products()
def nearest_features(vectors: Vectors, sae: SAE, *, top: int = 10, layer: int | None = None) -> pa.Table:
    """Find the features of an SAE whose decoder or encoder direction has the greatest |cosine| with a vector.

    Decoder directions, which features write, show the composition of a vector; encoder directions show the features
    that a vector activates. Centring of rows by the SAE is folded in. Thresholds and other features are ignored:
    `sae.encode` of a steered row returns the features that are really active.

    Args:
        vectors: vectors at the point that the SAE reads or, for a transcoder's decoder, writes.
        sae: SAE, as returned by `SAE.load`.
        top: number of features of each half, by |cosine|.
        layer: layer of the vectors, if other than the SAE's; a comparison across layers is yours to justify.

    Returns:
        Columns `name`, `layer`, `half` ("decoder" or "encoder"), `place`, `feature`, `cosine`, `z`: √width · cosine,
        standard normal for random vectors.

    Raises:
        InvalidSpec: the vectors have another width, site or layer than the SAE, or `top` is out of range.
        LayerOutOfRange, InvalidVector: as for `cosines`.
    """
    directions = named(vectors)
    if not isinstance(sae, SAE):
        raise InvalidSpec(f"sae={shown(sae)}; give SAE.load(...)")
    count = count_of(top, "top", 1, sae.d_sae)
    halves = {"decoder": (sae.output, sae.decoder), "encoder": (sae.input, _read_directions(sae))}
    fitting = {half: rows for half, (point, rows) in halves.items() if point.site == directions.site}
    at = _layer(directions.site, halves["encoder"][0], halves["decoder"][0], layer)
    fitting = {half: rows for half, rows in fitting.items() if layer is not None or halves[half][0].layer == at}
    if not fitting or any(rows.shape[1] != directions.width for rows in fitting.values()):
        raise InvalidSpec(
            f"vectors of {directions.site!r}, {directions.width} wide, and {sae!r} belong to different points"
        )
    warn_of_other_model("sae=", sae.model, names_of(directions.model), tuned=True)
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
    compared = sae.d_sae * len(fitting)
    made = origin(directions, sae=sae.name or repr(sae), compared=compared, once=once(compared))
    return table_of({name: [row[name] for row in rows] for name in columns}, **made)


def _read_directions(sae: SAE) -> Float[torch.Tensor, "d_sae d_in"]:
    """Return the direction of a row that each feature reads, up to a positive scale: [d_sae, d_in]."""
    rows = sae.encoder.weight.T
    centred = sae.encoder.centred or sae.encoder.normalisation == "layer_norm"
    return rows - rows.mean(dim=1, keepdim=True) if centred else rows


def _layer(site: str, reads: Point, writes: Point, layer: int | None) -> int:
    """Return the layer of the vectors to use: `layer`, or for None that of the SAE's point at their site."""
    if layer is not None:
        return layer
    return next((point.layer for point in (writes, reads) if point.site == site), writes.layer)
