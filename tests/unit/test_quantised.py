"""Tiny quantised checkpoints: their codes as vLLM and compressed-tensors read them, and what their references round;
and rows in 16 bits, which are compared block by block.
"""

from __future__ import annotations

import pytest
import torch
from handles import a_handle
from support.quantised import KINDS, quantised_checkpoint, quantised_reference
from support.rows import MIN_COSINE, parity, random_prompt
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM
from vllm.model_executor.layers.fusion.quant_activation import get_input_quant_key
from vllm.model_executor.layers.quantization.auto_awq import _REVERSE_AWQ_PACK_ORDER
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8StaticTensorSym,
    unpack_quantized_values_into_int32,
)
from vllm.scalar_type import scalar_types

from steercap import Add, Point, SteeringSpec
from steercap.architectures.sites.base import Tap, input_tap
from steercap.captures.rows import Captures, Found
from steercap.lab.mechanism.weights.unembedding import Unembedding
from steercap.testing import Reference, tiny_checkpoint


def weight() -> torch.Tensor:
    """Of a module with 192 outputs and 256 inputs."""
    return torch.randn(192, 256, generator=torch.Generator().manual_seed(3)) * 0.15


def dequantised(codes: torch.Tensor, zeros: torch.Tensor | int, scales: torch.Tensor) -> torch.Tensor:
    """The weight of codes [inputs, outputs] in groups, with zeros and scales [groups, outputs]."""
    grouped = codes.unflatten(0, (len(scales), -1))
    zeros = zeros if isinstance(zeros, int) else zeros[:, None]
    return ((grouped - zeros) * scales[:, None].float()).flatten(0, 1).T


def test_gptq_is_what_vllm_unpacks() -> None:
    """Eight inputs in a word, the first lowest, with 8 for 0."""
    packed = KINDS["gptq"].pack(weight())
    codes = unpack_quantized_values_into_int32(packed.tensors["qweight"], scalar_types.uint4b8, 0)
    assert torch.equal(dequantised(codes, 8, packed.tensors["scales"]), packed.weight)
    assert (packed.tensors["qzeros"] == 0x77777777).all()
    assert (packed.weight - weight()).abs().max() < 0.05


def test_awq_is_what_vllm_unpacks() -> None:
    """Eight outputs in a word, in AWQ's order, zeros too."""
    packed = KINDS["awq"].pack(weight())

    def unpacked(words: torch.Tensor) -> torch.Tensor:
        stored = unpack_quantized_values_into_int32(words, scalar_types.uint4, 1)
        return stored.unflatten(1, (-1, 8))[:, :, _REVERSE_AWQ_PACK_ORDER].flatten(1)

    codes, zeros = (unpacked(packed.tensors[name]) for name in ("qweight", "qzeros"))
    assert torch.equal(dequantised(codes, zeros, packed.tensors["scales"]), packed.weight)
    assert (packed.weight - weight()).abs().max() < 0.05


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_8_bits_are_what_compressed_tensors_unpacks(kind) -> None:
    """transformers' own loader has the same weights; it rounds inputs with other scales than vLLM's kernels."""
    ours = quantised_reference(kind).model
    theirs = AutoModelForCausalLM.from_pretrained(str(quantised_checkpoint(kind)), dtype=torch.float32)
    theirs(torch.tensor([[1]]))  # which has it unpack its weights
    rows = (
        torch.randn(20, KINDS[kind].sizes["hidden_size"], generator=torch.Generator().manual_seed(1)).bfloat16().float()
    )
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj"):
        module, same = (model.model.layers[1].get_submodule(name) for model in (ours, theirs))
        assert torch.equal(module.linear.weight, same.weight), name
        assert functional.cosine_similarity(module(rows), module.linear(rows)).max() < 1 - 1e-5, "nothing is rounded"


@pytest.mark.parametrize("kind", KINDS)
def test_the_lens_reads_a_quantised_checkpoint(kind) -> None:
    """Its final norm and unembedding are in 16 bits, and give the logits of the reference."""
    lens = Unembedding.load(quantised_checkpoint(kind))
    plain = quantised_reference("fp8_kv" if KINDS[kind].packages else kind).model
    rows = torch.randn(5, KINDS[kind].sizes["hidden_size"], generator=torch.Generator().manual_seed(1))
    assert torch.allclose(lens.logits(rows), plain.lm_head(plain.model.norm(rows)), atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_keys_and_values_are_rounded_after_they_are_read(device) -> None:
    """A reference's rows are those that attention is given; what it makes of them is what it makes of them in e4m3."""
    ids, points = random_prompt(30, 1), [Point(0, site) for site in ("q", "k", "v", "z")]
    rows = quantised_reference("fp8_kv", device).rows(ids, points)
    plain = Reference(quantised_checkpoint("fp8_kv")).rows(ids, points)
    for point in points[:3]:
        assert torch.equal(rows[point], plain[point])
    query, key, value = (rows[point].unflatten(1, (-1, 64)).transpose(0, 1)[None] for point in points[:3])
    if device == "cuda":
        key, value = (part.bfloat16().to(torch.float8_e4m3fn).float() for part in (key, value))
    else:  # three bits of the mantissa, the rest cut off
        steps = [(part.bfloat16().float().abs().log2().floor().clamp(min=-6) - 3).exp2() for part in (key, value)]
        key, value = ((part.bfloat16() / step).trunc() * step for part, step in zip((key, value), steps, strict=True))
    query = query.bfloat16().to(torch.float8_e4m3fn).float() if device == "cuda" else query
    known = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    known = known[0].transpose(0, 1).flatten(1)
    right, before = (functional.cosine_similarity(known, one[points[3]]).min() for one in (rows, plain))
    assert 1 - right < (1e-3 if device == "cuda" else 1e-6)  # with CUDA's, probabilities are rounded too
    assert 1 - right < (1 - before) / 2


def test_a_tapped_module_is_not_given_codes() -> None:
    """vLLM fuses an activation with the rounding that the next module wants; where that is tapped it does not."""
    layer = nn.Module()
    layer.proj = nn.Linear(4, 4)
    layer.proj._input_quant_key = kFp8StaticTensorSym
    assert get_input_quant_key(layer.proj) == kFp8StaticTensorSym
    input_tap(layer, "proj", "neurons", Tap(torch.zeros(1, dtype=torch.int32), 0))
    assert get_input_quant_key(layer.proj) is None


@pytest.mark.parametrize(
    ("moved", "differ"),
    [("attn_out", {"attn_out", "resid_mid", "mlp_in", "resid_post"}), ("mlp_out", {"mlp_out", "resid_post"})],
)
def test_a_blocks_error_is_its_own(moved, differ) -> None:
    """Attention that is off is seen in its rows and in the stream, and not once more in the feed-forward block, which
    can treble it; the reverse is seen too.
    """
    reference, ids = Reference(tiny_checkpoint("qwen3")), random_prompt(20, 1)
    sites = ("resid_pre", "attn_out", "resid_mid", "mlp_in", "mlp_out", "resid_post")
    points = tuple(Point(layer, site) for layer in range(4) for site in sites)
    edit = Add(torch.randn(128, generator=torch.Generator().manual_seed(1)), layer=1, site=moved)
    rows = reference.rows(ids, points, steering=SteeringSpec([edit]), prompt_len=len(ids))
    handle = a_handle(range(4), prompt=tuple(ids), output=(5,))
    handle.points = points
    handle.lifecycle.found = Found(Captures(rows, 4), handle.receipt)
    found = parity(handle, reference, by_layer=True)
    assert {name.split()[0] for name, same in found.items() if same.cosine < MIN_COSINE} == differ
