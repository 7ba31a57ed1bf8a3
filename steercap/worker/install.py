"""Installation of the taps in a loaded model, with the schema of the tensor at each.

It happens once, after the weights are loaded and before vLLM traces the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from steercap.architectures.decoder import Decoder
from steercap.architectures.families.base import Family
from steercap.architectures.families.code import name_of
from steercap.architectures.sites import SITES
from steercap.architectures.sites.base import Sizes, Tap
from steercap.architectures.sites.residual import norm_tap
from steercap.core.names import is_module
from steercap.core.schema import PointSchema
from steercap.core.spec import Point
from steercap.errors import UnsupportedModel
from steercap.worker.taps.base import Installed


def install_taps(
    decoder: Decoder,
    family: Family,
    armed: Sequence[Point],
    sizes: Sizes,
    dtype: torch.dtype,
    *,
    shard: int,
    num_layers: int,
    device: torch.device,
    norms: type[nn.Module] | None = None,
) -> Installed:
    """Attach taps to the layers that this rank holds.

    Args:
        decoder: the loaded layers.
        family: architecture family of the layers.
        armed: all armed points of the engine, layer by layer; those that a layer does not have are left out.
        sizes: row sizes of the model.
        dtype: the model's dtype.
        shard: index of this rank in its tensor-parallel group.
        num_layers: number of layers of the whole model.
        device: the model's device.
        norms: class of norms that a tap before them can be one kernel with; None to have every tap apart.

    Raises:
        UnsupportedModel: a layer does not have the structure that its family describes.
    """
    found = {
        index: schema
        for index, point in enumerate(armed)
        if point.layer in decoder.layers
        if (schema := schema_of(decoder.holder(point), family, point, sizes, dtype, num_layers))
    }
    local, schemas = tuple(found), tuple(found.values())
    kept = tuple(schema.shards > 1 or shard == 0 for schema in schemas)
    at = tuple(torch.tensor([number], dtype=torch.int32, device=device) for number in range(len(local)))
    installed = Installed(local, schemas, kept, shard, tuple(armed[index].layer for index in local), at)
    kinds = {kind: number for number, kind in enumerate(installed.kinds)}
    numbers = sorted(range(len(local)), key=lambda number: not SITES[armed[local[number]].site].first)
    for number in numbers:
        index, schema = local[number], schemas[number]
        tap = Tap(at[number], kinds[installed.kind_of(schema)], len(schema.shape))
        norm = norm_after(armed[index], decoder, family, armed, num_layers)
        if norms is not None and type(norm) is norms and _plain(norm, dtype):
            norm_tap(norm, tap)
        else:
            SITES[armed[index].site].attach(decoder.holder(armed[index]), family, tap)
    return installed


def norm_after(
    point: Point, decoder: Decoder, family: Family, armed: Iterable[Point], num_layers: int
) -> nn.Module | None:
    """Return the norm whose input is the stream at a point: that of the next layer, or the one after the last layer.

    Returns:
        The norm; None if the point is not the end of a layer, if this rank does not hold the norm, or if something else
        reads the stream between the layer and the norm.
    """
    loop = decoder.parent
    if point.site != "resid_post" or name_of(type(loop)) not in family.loops:
        return None
    if getattr(loop, "aux_hidden_state_layers", ()):  # streams that a drafting model reads between layers
        return None
    following = point.layer + 1
    holder, path = decoder.layers.get(following), "input_layernorm"
    if following == num_layers:
        holder, path = loop, family.norm
    if any((one.site == "resid_pre" and one.layer == following) or one.site.endswith(f"{path}.input") for one in armed):
        return None
    return getattr(holder, path, None)


def _plain(norm: Any, dtype: torch.dtype) -> bool:
    """Check that one of vLLM's RMSNorm norms whole rows, with weights of the model's dtype."""
    whole = norm.has_weight and norm.variance_size_override is None
    return whole and norm.weight.dtype == dtype and hasattr(norm, "_forward_method")


def schema_of(  # noqa: PLR0917 -- a module, and where it is in its model
    module: nn.Module, family: Family, point: Point, sizes: Sizes, dtype: torch.dtype, num_layers: int
) -> PointSchema | None:
    """Return the schema of the tensor at a point; None if this layer has no such site.

    Raises:
        UnsupportedModel: the layer does not have the structure that its family describes.
    """
    site = SITES[point.site]
    if not site.known(family):
        return None
    try:
        rows = site.rows(module, family, sizes)
    except AttributeError as error:
        if not is_module(point.site) and (family.varied or family.sparse is not None or site.of_model is not None):
            return None
        raise UnsupportedModel(f"{point} is not in this model, a {type(module).__name__}: {error}") from error
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{point} cannot be a site: {error}") from error
    return PointSchema(
        shape=rows.shape,
        dtype=rows.dtype or str(dtype).removeprefix("torch."),
        shards=rows.shards,
        writable=site.writable,
        changes_kv=site.before_keys or point.layer < num_layers - 1,
    )
