"""Which experts a layer chooses: vLLM's own router of it, asked outside of a pass.

A router is asked for what it computes, before experts are mapped to the copies that a load balancer has made of them,
and nothing is recorded of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from steercap.adapters.releases import importing, require
from steercap.architectures.families.base import Family, located
from steercap.errors import InvalidRequest, UnsupportedRunner
from steercap.worker.choice import Choosing

#: Classes of routers, by the kind of device, that choose by logits, and by nothing else unless they hold one of
#: `_TOKENS`. Others simulate routing, or compute the output of experts that add nothing on the side.
_ROUTERS: Final = {
    "cpu": ("CPURouter",),
    "cuda": ("CustomRoutingRouter", "FusedTopKBiasRouter", "FusedTopKRouter", "GroupedTopKRouter"),
}
#: What routers hold that choose by tokens: which experts each has, and another bias for those of pictures.
_TOKENS: Final = ("_hash_indices_table", "bias_vl")


def choosing(layers: Mapping[int, nn.Module], family: Family, dtype: torch.dtype) -> Choosing:
    """What chooses experts by the routers of the layers that were loaded.

    Args:
        layers: by their indices.
        family: how they are written.
        dtype: the model's.
    """

    def choose(index: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        if index not in layers:
            return None
        layer = layers[index]
        runner = _runner(layer, logits.device)
        rows = _as_given(layer.get_submodule(located(layer, family.router)), logits)
        # Routers read of hidden states how many there are. One that reads more gives weights that are no numbers.
        hidden = rows.new_full((1, 1), torch.nan, dtype=dtype).expand(len(rows), runner.moe_config.hidden_dim)
        weights, ids = runner.router._compute_routing(hidden, rows, None)  # noqa: SLF001 -- others record it
        count = runner.router.top_k  # behind them, a router may name the shared experts that vLLM fuses with the others
        return ids[:, :count], weights[:, :count].float() * _factor(runner, dtype)

    return choose


def _runner(layer: nn.Module, device: torch.device) -> Any:
    """What runs the experts of a layer, on a device.

    Raises:
        InvalidRequest: there is none, or logits do not say which experts it runs.
    """
    try:
        # Where they are used: what has no experts runs in releases that have moved them.
        with importing():
            from vllm.model_executor.layers.fused_moe.router.fused_moe_router import FusedMoERouter
            from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
        found: list[Any] = [one for one in layer.modules() if isinstance(getattr(one, "router", None), FusedMoERouter)]
        if len(found) != 1:
            raise InvalidRequest(f"a {type(layer).__name__} has {len(found)} routers of vLLM's")
        (runner,) = found
        require("a layer's experts", runner)
    except UnsupportedRunner as error:
        raise InvalidRequest(str(error)) from error
    router, name = runner.router, type(runner.router).__name__
    if not isinstance(runner, MoERunner) or type(runner).forward is not MoERunner.forward:
        raise InvalidRequest(f"its experts, a {type(runner).__name__}, are chosen by a module of transformers")
    if name not in _ROUTERS[device.type]:
        raise InvalidRequest(
            f"its router, a {name}, is not one that steercap knows to choose by logits on {device.type}"
        )
    if any(getattr(router, held, None) is not None for held in _TOKENS):
        raise InvalidRequest(f"its router, a {name}, chooses by the token, not by logits alone")
    return runner


def _as_given(gate: Any, logits: torch.Tensor) -> torch.Tensor:
    """Logits in the dtype that a gate gives them in, which some routers compute in.

    Raises:
        InvalidRequest: they are not logits of that dtype.
    """
    linear = getattr(gate, "base_layer", gate)
    dtype = getattr(linear, "out_dtype", None) or linear.params_dtype
    rows = logits.to(dtype)
    if not torch.equal(rows.float(), logits):
        raise InvalidRequest(f"its logits are {dtype} numbers, and these rows are not; give them as they are captured")
    return rows


def _factor(runner: Any, dtype: torch.dtype) -> float:
    """What is multiplied by behind the router, where that has not done it: nothing, where DeepSeek's layers divide the
    stream and what shared experts give instead, in float16.
    """
    one = torch.ones(1, dtype=dtype)
    shared = None if runner.shared_experts is None else one.clone()
    _, scaled = runner._maybe_apply_routed_scale_to_output(shared, one.clone())  # noqa: SLF001 -- no other name
    return 1.0 if torch.equal(scaled, one) else float(runner.routed_scaling_factor)
