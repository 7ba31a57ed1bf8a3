"""A plug-in of vLLM's, loaded in each of its processes, without which DeepSeek-V4 does not run in its build for CPU.

With `DEEPSEEK_V4_FORWARD=nvidia` the layers and the model on CPU run the `forward` that vLLM has for NVIDIA, fused with
what mixes the streams, over kernels in PyTorch in place of those in TileLang.
"""

from __future__ import annotations

import os
from types import FunctionType
from typing import Any

import torch

FORWARD = "DEEPSEEK_V4_FORWARD"


def plug_in() -> None:
    """Mend what is broken, and choose the forward; safe to call again."""
    from vllm.models.deepseek_v4.cpu import cpu_mla

    builder: Any = cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder
    if getattr(builder, "mended", False):
        return
    builder.mended = True
    planned = builder.build_tile_scheduler
    # vLLM 0.31 to 0.33: its caller reads two more keys, and the first step dies of a KeyError.
    builder.build_tile_scheduler = lambda self, tokens: {"c1a": None, "c2a": None, **planned(self, tokens)}
    if os.environ.get(FORWARD) == "nvidia":
        run_as_on_nvidia()


def run_as_on_nvidia() -> None:
    """Give the classes for CPU the `forward` of those for NVIDIA."""
    from vllm.models.deepseek_v4.cpu import model as cpu
    from vllm.models.deepseek_v4.nvidia import model as nvidia

    for name in ("DeepseekV4DecoderLayer", "DeepseekV4Model"):
        getattr(cpu, name).forward = over_kernels(getattr(nvidia, name).forward)
    layer: Any = cpu.DeepseekV4DecoderLayer
    layer.use_sequence_parallel = cpu.DeepseekV4Model.use_sequence_parallel = False
    layer.hc_attn_fn_broadcast = torch.empty(0)  # what the kernel for embeddings in PyTorch does not need
    cpu.DeepseekV4Model.use_native_mega_moe = False
    experts: Any = cpu.DeepseekV4MoE.forward
    cpu.DeepseekV4MoE.forward = lambda self, hidden_states, input_ids=None, _routing=None: experts(
        self, hidden_states, input_ids
    )


def over_kernels(forward: Any) -> FunctionType:
    """A function of vLLM's file for NVIDIA, over kernels in PyTorch."""
    from vllm.model_executor.kernels.mhc.cpu import hc_head_fused_cpu
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch

    kernels = {
        "mhc_pre_tilelang": pre,
        "mhc_pre_broadcast_tilelang": pre_broadcast,
        "mhc_fused_post_pre_tilelang": fused_post_pre,
        "mhc_post_tilelang": mhc_post_torch,
        "hc_head_fused_kernel_tilelang": hc_head_fused_cpu,
    }
    return FunctionType(
        forward.__code__,
        {**forward.__globals__, **kernels},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )


def pre(  # noqa: PLR0917 -- as TileLang's function
    residual: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`mhc_pre_tilelang`, the norm of what the block reads included."""
    from vllm import ir
    from vllm.model_executor.kernels.mhc.torch import mhc_pre_torch

    numbers = rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat
    post, res, read = mhc_pre_torch(residual, fn, hc_scale, hc_base, *numbers, n_splits)
    return post, res, read if norm_weight is None else ir.ops.rms_norm(read, norm_weight, norm_eps)


def pre_broadcast(  # noqa: PLR0917 -- likewise
    residual: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    fn_broadcast: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """`mhc_pre_broadcast_tilelang`: of an embedding, which all streams begin with."""
    assert fn_broadcast is not None
    streams = residual.unsqueeze(1).repeat(1, fn.shape[1] // residual.shape[1], 1)
    numbers = rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat
    return (streams, *pre(streams, fn, hc_scale, hc_base, *numbers, n_splits, norm_weight, norm_eps))


def fused_post_pre(  # noqa: PLR0917 -- likewise
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    tile_n: int = 1,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[torch.Tensor, ...]:
    """`mhc_fused_post_pre_tilelang`."""
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch

    assert tile_n == 1
    streams = mhc_post_torch(x, residual, post_layer_mix, comb_res_mix)
    numbers = rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat
    return (streams, *pre(streams, fn, hc_scale, hc_base, *numbers, n_splits, norm_weight, norm_eps))
