"""Repairs of vLLM's code for CPU, made in each worker.

They concern seeds of chunked prompts, requests without an adapter beside others with one, the temperature, top-k and
top-p of drafted tokens, prompts of one token in gated delta networks, experts chosen by sigmoids or biased scores,
attention of RNJ-1, and the right to use a processor's AMX. Each part says what it relies on, and when it can go.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from vllm import _custom_ops
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from steercap.adapters.hooks import class_of, wrap
from steercap.adapters.releases import require

#: Attribute of a model runner: generators, by batch index, of requests whose sampled token is discarded.
_WITHHELD: Final = "steercap_withheld_generators"
#: vLLM's operators that pick an adapter's weights for each row by its index.
_BY_INDEX: Final = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
_MASKED: Final = "__steercap_masked__"
#: vLLM's operator of the short convolution in gated delta networks.
_CONVOLUTION: Final = "causal_conv1d_fwd_cpu"
_STRIDED: Final = "__steercap_strided__"
#: Module and name of vLLM's class of routers; absent in earlier releases.
_ROUTER: Final = "vllm.model_executor.layers.fused_moe.router.cpu_router", "CPURouter"
#: Module and name of vLLM's class of attention on CPU.
_ATTENTION: Final = "vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackendImpl"


def hook() -> None:
    """Install all repairs in this process's vLLM classes and operators; a second call does nothing."""
    _use_amx()
    require("Model Runner V1's sampling", GPUModelRunner)
    require("lora_ops", lora_ops)
    require("rejection_sampler", rejection_sampler)
    wrap(GPUModelRunner, "_sample", _sample)
    wrap(GPUModelRunner, "_bookkeeping_sync", _bookkeeping_sync)
    wrap(rejection_sampler, "expand_batch_to_tokens", _for_each_draft)
    wrap(rejection_sampler, "apply_sampling_constraints", _constrained)
    operator = getattr(_custom_ops, _CONVOLUTION, None)  # absent in earlier releases
    if operator is not None and not hasattr(operator, _STRIDED):
        setattr(_custom_ops, _CONVOLUTION, for_single_tokens(operator))
    if (router := class_of(*_ROUTER)) is not None:
        wrap(router, "__init__", _in_one_group)
    if (attention := class_of(*_ATTENTION)) is not None:
        wrap(attention, "__init__", _in_no_chunks)
    for name in _BY_INDEX:
        operator = getattr(lora_ops, name)
        if not hasattr(operator, _MASKED):
            masked = _without_rows_of_none(operator)
            for module in (lora_ops, punica_cpu):
                setattr(module, name, masked)


def _use_amx() -> None:
    """Ask the Linux kernel for the AMX registers, where the processor has them.

    vLLM's attention in bfloat16 uses AMX without asking, and Linux kills a process that did not ask: the worker dies at
    its first request (signal 4). Can go when vLLM asks.
    """
    if torch.cpu._is_amx_tile_supported():  # noqa: SLF001 -- torch has no public name for either
        torch.cpu._init_amx()  # noqa: SLF001


def _sample(original: Callable[[], Any], runner: Any, *_args: Any, **_options: Any) -> Any:
    """Sample without the generators of requests whose prompt continues in the next step.

    vLLM samples a token for such a request too, discards it, and resets the request's generator by its offset, which a
    CPU generator does not have: the worker crashes. Relies on `_sample` and `_bookkeeping_sync` reading
    `input_batch.generators` by index, and on `discard_request_mask`. Can go when vLLM resets CPU generators.
    """
    if runner.device.type != "cpu":
        return original()
    batch = runner.input_batch
    discarded = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]).tolist()
    withheld = {index: batch.generators.pop(index) for index in discarded if index in batch.generators}
    setattr(runner, _WITHHELD, withheld)
    try:
        return original()
    except BaseException:
        batch.generators.update(withheld)
        raise


def _bookkeeping_sync(original: Callable[[], Any], runner: Any, *_args: Any, **_options: Any) -> Any:
    try:
        return original()
    finally:
        runner.input_batch.generators.update(runner.__dict__.pop(_WITHHELD, {}))


def _without_rows_of_none(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a LoRA operator on CPU so that it adds nothing to rows whose adapter index is -1 (no adapter).

    vLLM's operator uses -1 as an index, which selects the weights of the last slot. Relies on the arguments `inputs`
    first and `lora_indices_tensor` fourth, in `lora_ops` and in `punica_cpu`, which imports them by name. Can go when
    vLLM's operators leave such rows alone, as its GPU kernels do.
    """

    @functools.wraps(operator)
    def masked(inputs: Any, weights: Any, output: Any, indices: torch.Tensor, *args: Any, **options: Any) -> Any:
        return operator(torch.where(indices[:, None] < 0, 0, inputs), weights, output, indices, *args, **options)

    setattr(masked, _MASKED, True)
    return masked


def for_single_tokens(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap vLLM's short convolution over prompts on CPU so that it accepts an input of one token.

    vLLM's operator refuses `x`, [channels, tokens], unless the stride between tokens is the number of channels. Qwen
    3.5 slices it from a wider tensor, and `contiguous()` leaves one row as it is: the worker dies at a prompt, or a
    prompt's first chunk, of one token. Relies on the argument `x`, by name. Can go when vLLM's operator accepts any
    stride where there is one token.
    """

    @functools.wraps(operator)
    def strided(*, x: torch.Tensor, **options: Any) -> Any:
        return operator(x=x.T.clone(memory_format=torch.contiguous_format).T if x.shape[1] == 1 else x, **options)

    setattr(strided, _STRIDED, True)
    return strided


def _in_one_group(original: Callable[[], Any], router: Any, *_args: Any, **_options: Any) -> None:
    """Put all experts into one group, in a router with sigmoid or biased scores.

    Without groups vLLM's router asserts that scores are softmax (MiniMax M2, Laguna and Step 3.5 fail in their first
    pass) and ignores the scores' bias (ERNIE 4.5 chooses other experts). Relies on the attributes below, read in each
    pass. Can go when vLLM's router supports both without groups.
    """
    original()
    scores, bias = getattr(router, "scoring_func", ""), getattr(router, "e_score_correction_bias", None)
    others = getattr(router, "use_grouped_topk", True) or getattr(router, "custom_routing_function", None) is not None
    if not others and (scores == "sigmoid" or (scores == "softmax" and bias is not None)):
        router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1


def _in_no_chunks(original: Any, attention: Any, *args: Any, **options: Any) -> Any:
    """Initialise attention without the argument `chunk_lookback` if it is -1, which stands for no chunks.

    vLLM passes it for RNJ-1, and only another backend takes it (0.32): the model does not load. Relies on
    `original.func`, the method, and on -1 for no chunks; RNJ-1 with chunks is refused as before. Can go when vLLM's
    backend for CPU takes the argument.
    """
    if options.get("chunk_lookback") != -1:
        return original()
    return original.func(attention, *args, **{name: one for name, one in options.items() if name != "chunk_lookback"})


def _constrained(original: Callable[[], Any], logits: torch.Tensor, *_args: Any, **_options: Any) -> Any:
    """Apply temperature, top-k and top-p to the logits of drafted tokens; return empty logits unchanged.

    With speculative decoding, vLLM verifies drafts also in passes of prompts alone, which have none. On CPU its
    `apply_top_k_only` then takes the maximum of no values: the worker crashes on the first request with top-k. Can go
    when that accepts zero rows.
    """
    return original() if len(logits) else logits


def _for_each_draft(
    original: Callable[[], Any],
    values: torch.Tensor,
    ends: torch.Tensor,
    _drafts: int,
    replace_from: float = 0,
    replace_to: float = 0,
    *_args: Any,
    **_options: Any,
) -> Any:
    """Repeat each request's temperature, top-k or top-p once for each token drafted for the request.

    vLLM's operator for CPU writes into a copy of its output, as int64, and leaves the output uninitialised. So if any
    request of a batch samples at random, the logits of every draft are divided by arbitrary values. Relies on `values`,
    [requests], and on `ends`, [requests], the cumulative number of drafted tokens. Can go when vLLM's
    `_expand_kernel_impl` writes its output.
    """
    if values.device.type != "cpu":
        return original()
    counts = ends.diff(prepend=ends.new_zeros(1))
    return values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts)
