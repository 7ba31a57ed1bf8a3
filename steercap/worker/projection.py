"""Computations by the model's own modules, on its own ranks: a block's last projection, its norm, its experts.

A projection turns the input of a block's last projection into the block's output; a norm is applied to a sum.
A layer's own router chooses experts from its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from steercap.architectures.decoder import rows_of
from steercap.architectures.families.base import Family, located
from steercap.architectures.sites.base import part_of
from steercap.core.messages import Choose, Chosen, NotCapturing, Project, Projected
from steercap.errors import InvalidRequest

#: Function of a layer index, a site and rows, [n, width], of all ranks; it returns the output of that layer's block,
#: or None if the layer is on another pipeline stage.
Projecting: TypeAlias = "Callable[[int, str, torch.Tensor], torch.Tensor | None]"


def projecting(layers: Mapping[int, nn.Module], family: Family, shard: int) -> Projecting:
    """Return a function that projects rows by the modules of the loaded layers.

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
    """Return the first output of a module; `forward` is called directly, so that taps on the module do not run."""
    found = module.forward(rows.contiguous())
    first: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return first


def projected(project: Projecting | None, asked: Project, device: torch.device) -> Projected | NotCapturing:
    """Answer a `Project` call on one rank; rows are projected one by one, see `architectures.decoder`."""
    if project is None:
        return NotCapturing()
    found = [project(asked.layer, asked.site, row[None]) for row in rows_of(asked, device)]
    made = [one.float().cpu() for one in found if one is not None]
    return Projected(torch.cat(made).numpy().tobytes()) if made else NotCapturing()


#: Function of a layer index and logits, [n, experts], that returns the ids and weights of the experts that the layer's
#: router chooses, [n, k] each, or None if the layer is on another pipeline stage. Raises `InvalidRequest` where the
#: logits alone do not determine the choice.
Choosing: TypeAlias = "Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None]"


def chosen(choose: Choosing | None, asked: Choose, device: torch.device) -> Chosen | NotCapturing:
    """Answer a `Choose` call on one rank; every rank of a layer's pipeline stage has its whole router."""
    if choose is None:
        return NotCapturing()
    logits = rows_of(asked, device)
    try:
        found = choose(asked.layer, logits)
        if found is None:
            return NotCapturing()
        ids, weights = checked(*found, logits.shape[1])
    except InvalidRequest as error:
        return Chosen(refused=str(error))
    return Chosen(ids.cpu().numpy().tobytes(), weights.cpu().numpy().tobytes())


def checked(ids: torch.Tensor, weights: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Check the experts and weights of a choice; return them as int64 and float32.

    Args:
        ids: expert ids, [n, k].
        weights: expert weights, [n, k].
        experts: number of experts of the layer.

    Raises:
        InvalidRequest: an expert that does not exist, one that is chosen twice, or a weight that is not finite.
    """
    ids, weights = ids.long(), weights.float()
    ordered = ids.sort(dim=1).values
    if bool((ids < 0).any() | (ids >= experts).any() | (ordered[:, 1:] == ordered[:, :-1]).any()):
        raise InvalidRequest(f"its router must choose different experts below {experts}, and did not")
    if not bool(weights.isfinite().all()):
        raise InvalidRequest("its router gives weights that are not finite: it chooses by more than logits of experts")
    return ids.contiguous(), weights.contiguous()
