"""Facts read from vLLM's modules in the loaded model: attention rules of layers, and router choices of experts.

For attention it relies, besides the names in `releases`, on this: the backends in `_KNOWN` compute a causal softmax
from their `scale`, `logits_soft_cap`, `sinks` and the module's `sliding_window`, and from nothing else but options that
are refused.

The router's computation is called before experts are mapped to the copies that a load balancer has made of them,
and vLLM records nothing of the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType

from steercap.adapters.releases import importing, require
from steercap.architectures.families.base import Family, located
from steercap.core.attention import AttentionRule
from steercap.core.spec import Point
from steercap.errors import InvalidRequest, UnsupportedRunner
from steercap.worker.install import Choosing

#: Backends whose source code was checked for their arithmetic.
_KNOWN: Final = frozenset({"CPU_ATTN", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"})


def attention_rules(
    layers: Mapping[int, nn.Module], family: Family, points: Sequence[Point], model_config: Any
) -> dict[int, AttentionRule]:
    """Return the attention rule of each layer whose queries and keys are both tapped, by layer."""
    at = {site: {point.layer for point in points if point.site == site} for site in ("q", "k")}
    if model_config.rswa_window is not None:
        return dict.fromkeys(at["q"] & at["k"], AttentionRule(0.0, unknown="its window depends on the prompt (R-SWA)"))
    return {
        layer: rule_of(layers[layer].get_submodule(located(layers[layer], family.attention)))
        for layer in sorted(at["q"] & at["k"])
    }


def rule_of(attention: Any) -> AttentionRule:
    """Return the softmax rule of a vLLM attention module; one that cannot be expressed has the reason in `unknown`."""
    if unknown := _unsupported(attention):
        return AttentionRule(0.0, unknown=unknown)
    impl = attention.impl
    sinks = getattr(impl, "sinks", None)
    return AttentionRule(
        float(impl.scale),
        None if attention.sliding_window is None else int(attention.sliding_window),
        float(impl.logits_soft_cap) if impl.logits_soft_cap else None,
        () if sinks is None else tuple(sinks.float().tolist()),
    )


def _unsupported(attention: Any) -> str:
    """List the features of an attention module that an `AttentionRule` cannot express, joined by "; "; "" if none."""
    if type(attention) is not Attention:
        return f"its attention is vLLM's {type(attention).__name__}"
    require("Attention", attention)
    if (backend := attention.attn_backend.get_name()) not in _KNOWN:
        return f"its attention backend is {backend}; known: {', '.join(sorted(_KNOWN))}"
    found = {
        f"its attention is of kind {AttentionType(attention.attn_type).value}": attention.attn_type
        != AttentionType.DECODER,
        (
            f"it reads the keys of another layer, {attention.kv_sharing_target_layer_name}"
        ): attention.kv_sharing_target_layer_name,
        f"its keys are cached as {attention.kv_cache_dtype}": attention.kv_cache_torch_dtype != attention.dtype,
        "it adds ALiBi's slopes": attention.impl.alibi_slopes is not None or attention.use_alibi_sqrt,
        "tokens of its prompts attend to later ones": attention.use_mm_prefix,
        "it attends in chunks": getattr(attention.impl, "chunk_lookback", -1) > -1,
    }
    return "; ".join(reason for reason, holds in found.items() if holds)


#: Router classes, by device type, that choose by logits alone unless they have an attribute of `_TOKENS`. Others
#: simulate routing, or compute the output of experts that add nothing on the side.
_ROUTERS: Final = {
    "cpu": ("CPURouter",),
    "cuda": ("CustomRoutingRouter", "FusedTopKBiasRouter", "FusedTopKRouter", "GroupedTopKRouter"),
}
#: Attributes of routers that choose by token: a table of experts by token id, or a bias for image tokens.
_TOKENS: Final = ("_hash_indices_table", "bias_vl")


def choosing(layers: Mapping[int, nn.Module], family: Family, dtype: torch.dtype) -> Choosing:
    """Return a function from (layer index, logits [rows, experts]) to the router's choice (ids, weights) [rows, k].

    The function returns None for a layer of another pipeline stage, and raises InvalidRequest as `_runner` does.
    """

    def choose(index: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        if index not in layers:
            return None
        layer = layers[index]
        runner = _runner(layer, logits.device)
        rows = _as_given(layer.get_submodule(located(layer, family.router)), logits)
        if family.router_rounded:
            rows = rows.to(dtype)
        if cap := _cap(layer, family):
            rows = torch.tanh(rows.float() / cap) * cap
        # Routers use only the number of hidden states. One that used their values would return weights of NaN.
        hidden = rows.new_full((1, 1), torch.nan, dtype=dtype).expand(len(rows), runner.moe_config.hidden_dim)
        weights, ids = runner.router._compute_routing(hidden, rows, None)  # noqa: SLF001 -- others record it
        count = runner.router.top_k  # after them may come shared experts, which vLLM fuses with the others
        return ids[:, :count], weights[:, :count].float() * _factor(runner, dtype)

    return choose


def _runner(layer: nn.Module, device: torch.device) -> Any:
    """Return the module that runs a layer's experts, which has their router.

    Raises:
        InvalidRequest: the layer has no router of vLLM's, or logits alone do not determine the chosen experts.
    """
    try:
        # Imported here, so that models without experts run in releases that have moved these modules.
        with importing():
            from vllm.model_executor.layers.fused_moe.router.fused_moe_router import FusedMoERouter
            from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
        found: list[Any] = [one for one in layer.modules() if isinstance(getattr(one, "router", None), FusedMoERouter)]
        if len(found) != 1:
            raise InvalidRequest(f"expected one of vLLM's routers in a {type(layer).__name__}, found {len(found)}")
        (runner,) = found
        require("a layer's experts", runner)
    except UnsupportedRunner as error:
        raise InvalidRequest(str(error)) from error
    router, name = runner.router, type(runner.router).__name__
    if not isinstance(runner, MoERunner) or type(runner).forward is not MoERunner.forward:
        raise InvalidRequest(
            f"its experts, a {type(runner).__name__}, are chosen by a module of transformers, not by one of vLLM's "
            "routers"
        )
    if name not in _ROUTERS[device.type]:
        raise InvalidRequest(
            f"its router, a {name}, is not one that steercap knows to choose by logits on {device.type}"
        )
    if any(getattr(router, held, None) is not None for held in _TOKENS):
        raise InvalidRequest(f"its router, a {name}, chooses by the token, not by logits alone")
    return runner


def _as_given(gate: Any, logits: torch.Tensor) -> torch.Tensor:
    """Convert router logits, [rows, experts], to the dtype of the gate's output.

    Raises:
        InvalidRequest: the logits are not exact in that dtype.
    """
    linear = getattr(gate, "base_layer", gate)
    dtype = getattr(linear, "out_dtype", None) or linear.params_dtype
    rows = logits.to(dtype)
    if not torch.equal(rows.float(), logits):
        raise InvalidRequest(
            f"its router's logits are {dtype}, which cannot hold these rows exactly; give rows as they were captured"
        )
    return rows


def _cap(layer: nn.Module, family: Family) -> float:
    """Return the bound of a layer's soft-capped router logits, as Laguna's may be; 0 if they are not capped."""
    block = layer.get_submodule(located(layer, family.router).rpartition(".")[0])
    return float(getattr(getattr(block, "config", None), "moe_router_logit_softcapping", None) or 0)


def _factor(runner: Any, dtype: torch.dtype) -> float:
    """Return the factor by which the experts' weights are yet to be multiplied; 1 if the router has applied it.

    In float16 it is 1 where vLLM divides the shared experts' output by the factor instead.
    """
    one = torch.ones(1, dtype=dtype)
    shared = None if runner.shared_experts is None else one.clone()
    _, scaled = runner._maybe_apply_routed_scale_to_output(shared, one.clone())  # noqa: SLF001 -- no other name
    return 1.0 if torch.equal(scaled, one) else float(runner.routed_scaling_factor)
