"""Installation of the taps in a loaded model, and computations by the model's own projections, norms and routers.

A tap reads and edits the tensor at one point (a site of a layer). Taps are installed once, after the weights are
loaded and before vLLM traces the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from steercap.architectures.decoder import Decoder, rows_of
from steercap.architectures.families.base import Family, located
from steercap.architectures.families.proved import name_of
from steercap.architectures.sites import SITES
from steercap.architectures.sites.base import Sizes, Tap, part_of
from steercap.architectures.sites.residual import norm_tap
from steercap.core.messages import Choose, Chosen, NotCapturing, Project, ProjectedRows
from steercap.core.names import is_module
from steercap.core.schema import PointSchema
from steercap.core.spec import Point
from steercap.errors import InvalidRequest, UnsupportedModel
from steercap.worker.taps import Installed

#: Function of a layer index, a site and rows, [n, width], with the features of all ranks. It returns the output of the
#: site's block in that layer, [n, hidden], or None if the layer is on another pipeline stage.
Projecting: TypeAlias = "Callable[[int, str, torch.Tensor], torch.Tensor | None]"


def projecting(layers: Mapping[int, nn.Module], family: Family, shard: int) -> Projecting:
    """Return a function that applies the last projection of a block, or a norm, of the loaded layers to rows.

    Args:
        layers: modules of the layers, by layer index.
        family: architecture family of the layers.
        shard: index of this rank in its tensor-parallel group, all of which must project together.
    """

    def project(index: int, site: str, rows: torch.Tensor) -> torch.Tensor | None:
        if index not in layers:
            return None
        layer = layers[index]
        if site in family.norms:  # of whole rows, on every rank
            return _called(layer.get_submodule(family.norms[site]), rows)
        paths = [located(layer, path) for path in family.projections[site]]
        modules = [layer.get_submodule(path) for path in paths]
        whole, shards = part_of(modules[0])
        width = whole // shards
        hidden = _called(modules[0], rows[:, shard * width :][:, :width] if shards > 1 else rows)
        # The last module of a block is the block itself, or the projection, or a norm behind it.
        behind = not f"{paths[0]}.".startswith(f"{paths[1]}.") and not any(modules[1].children())
        return _called(modules[1], hidden) if behind else hidden

    return project


def _called(module: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return the first output of a module for rows; `forward` is called directly, so that taps on it do not run."""
    found = module.forward(rows.contiguous())
    first: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return first


def projected(project: Projecting | None, request: Project, device: torch.device) -> ProjectedRows | NotCapturing:
    """Answer a `Project` call row by row (see `architectures.decoder`); NotCapturing if this rank lacks the layer."""
    if project is None:
        return NotCapturing()
    found = [project(request.layer, request.site, row[None]) for row in rows_of(request, device)]
    made = [one.float().cpu() for one in found if one is not None]
    return ProjectedRows(torch.cat(made).numpy().tobytes()) if made else NotCapturing()


#: Function of a layer index and logits, [n, experts], that returns the ids and weights of the experts that the layer's
#: router chooses, [n, k] each, or None if the layer is on another pipeline stage. Raises `InvalidRequest` where the
#: logits alone do not determine the choice.
Choosing: TypeAlias = "Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None]"


def chosen(choose: Choosing | None, request: Choose, device: torch.device) -> Chosen | NotCapturing:
    """Answer a `Choose` call by this rank's whole router; NotCapturing if this rank lacks the layer."""
    if choose is None:
        return NotCapturing()
    logits = rows_of(request, device)
    try:
        found = choose(request.layer, logits)
        if found is None:
            return NotCapturing()
        ids, weights = checked(*found, logits.shape[1])
    except InvalidRequest as error:
        return Chosen(refused=str(error))
    return Chosen(ids.cpu().numpy().tobytes(), weights.cpu().numpy().tobytes())


def checked(ids: torch.Tensor, weights: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Check the experts that a router chose and their weights; return both, [n, k], as int64 and float32.

    Args:
        ids: expert ids, [n, k].
        weights: expert weights, [n, k].
        experts: number of experts of the layer.

    Raises:
        InvalidRequest: an expert does not exist or is chosen twice for one token, or a weight is not finite.
    """
    ids, weights = ids.long(), weights.float()
    ordered = ids.sort(dim=1).values
    if bool((ids < 0).any() | (ids >= experts).any() | (ordered[:, 1:] == ordered[:, :-1]).any()):
        raise InvalidRequest(f"its router must choose different experts below {experts}, and did not")
    if not bool(weights.isfinite().all()):
        raise InvalidRequest("its router gives weights that are not finite: it chooses by more than logits of experts")
    return ids.contiguous(), weights.contiguous()


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
    """Attach a tap at each armed point of the layers that this rank holds, and return their description.

    Args:
        decoder: the loaded layers.
        family: architecture family of the layers.
        armed: all armed points of the engine, layer by layer; those that a layer does not have are left out.
        sizes: row sizes of the model.
        dtype: the model's dtype.
        shard: index of this rank in its tensor-parallel group.
        num_layers: number of layers of the whole model.
        device: the model's device.
        norms: class of the norms whose kernel can be fused with that of a tap before them; None to fuse none.

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
        if norms is not None and type(norm) is norms and _is_plain_norm(norm, dtype):
            norm_tap(norm, tap)
        else:
            SITES[armed[index].site].attach(decoder.holder(armed[index]), family, tap)
    return installed


def norm_after(
    point: Point, decoder: Decoder, family: Family, armed: Iterable[Point], num_layers: int
) -> nn.Module | None:
    """Return the norm that reads the residual stream at a point: the next layer's, or the one after the last layer.

    Returns:
        The norm; None if the point is not the end of a layer, if this rank does not hold the norm, if the norm runs
        with the logits, or if something else reads the stream between the layer and the norm.
    """
    loop = decoder.parent
    if point.site != "resid_post" or name_of(type(loop)) not in family.loops:
        return None
    if getattr(loop, "aux_hidden_state_layers", ()):  # streams that a drafting model reads between layers
        return None
    following = point.layer + 1
    holder, path = decoder.layers.get(following), "input_layernorm"
    if following == num_layers:
        if family.norms_late:
            return None
        holder, path = loop, family.norm
    if any((one.site == "resid_pre" and one.layer == following) or one.site.endswith(f"{path}.input") for one in armed):
        return None
    return getattr(holder, path, None)


def _is_plain_norm(norm: Any, dtype: torch.dtype) -> bool:
    """Return whether a vLLM RMSNorm normalises whole rows and has weights of the model's dtype."""
    whole = norm.has_weight and norm.variance_size_override is None
    return whole and norm.weight.dtype == dtype and hasattr(norm, "_forward_method")


def schema_of(  # noqa: PLR0917 -- a module, and where it is in its model
    module: nn.Module, family: Family, point: Point, sizes: Sizes, dtype: torch.dtype, num_layers: int
) -> PointSchema | None:
    """Return the schema (row shape, dtype, shards) of the tensor at a point; None if its layer has no such site.

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
