"""Tiny quantised checkpoints in the formats that vLLM loads, and transformers on what they hold as their reference.

Weights are rounded to the nearest code: what is shown is that rows are those of the codes, and not how good these are.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import nn

from steercap.adapters import hardware
from steercap.core.extras import extra
from steercap.lab.demo import cached
from steercap.testing import INIT_STD, tiny_checkpoint
from steercap.testing.reference import Reference
from support.rows import MIN_COSINE_16

Weight: TypeAlias = Float[torch.Tensor, "outputs inputs"]
Rows: TypeAlias = Float[torch.Tensor, "*any width"]

#: Wide enough that no row hangs on the rounding of a few of its elements.
SIZES: Final = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
#: Sizes for a format without a kernel of its own: oneDNN's reference of FP8 products is a hundred times slower.
NARROW: Final = {
    **SIZES,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
}
#: What the models compute in, and their scales are stored in.
DTYPE: Final = torch.bfloat16
#: Weights of a row that share a scale, in 4 bits.
GROUP: Final = 64
#: Where AWQ puts the codes of eight outputs in a word of 32 bits, the lowest bits first.
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
#: Half of what 8 bits hold: without VNNI, oneDNN adds two products in 16 bits, which saturate. There vLLM's kernel has
#: rows at a cosine of 0.98 with random codes of 127 at most, and of 0.999998 with codes of 63.
MOST_INT8: Final = 63
E4M3: Final = torch.float8_e4m3fn
#: Of static FP8, whose weights are 0.875 at most and whose rows 448: the random models' are less.
SCALE: Final = 2.0**-9
INPUT_SCALE: Final = 1.0
#: FlashAttention 3 multiplies probabilities by it before it rounds them to e4m3.
OFFSET: Final = 256.0
#: A last bit of bfloat16 in the stream decides codes of 3 bits: transformers' own rows of these models are at
#: cosines of 0.9987 to each other when the stream is rounded to 16 bits, or moved by as much.
LEAST_E4M3: Final = 0.998


@dataclass(frozen=True)
class Packed:
    """A linear module in a format.

    Args:
        tensors: what the checkpoint holds of it, by the ends of their names.
        weight: what they stand for, float32 [outputs, inputs]; of what is not linear, of any shape.
    """

    tensors: Mapping[str, torch.Tensor]
    weight: Float[torch.Tensor, ...]


@dataclass(frozen=True)
class Kind:
    """A way to quantise a model.

    Args:
        config: of the checkpoint, its `quantization_config`; empty for a checkpoint in 16 bits.
        pack: a linear module of a layer in the format, from its weight.
        inputs: what becomes of the inputs of these modules; None where they stay in 16 bits.
        loading: what transformers is told when it loads the reference, by the engine's device.
        engine: arguments of the engine.
        family: of the model.
        packages: that vLLM needs for it besides its own, by the names that they are imported by.
        cpu: which CPUs vLLM has kernels for: "any", "AVX-512" or "none".
        least: cosine that the worst row is above.
        sizes: of the model.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    pack: Callable[[Weight], Packed] = lambda weight: Packed({"weight": weight.to(DTYPE)}, weight)
    inputs: Callable[[Rows], Rows] | None = None
    loading: Callable[[str], Mapping[str, Any]] = lambda _device: {}
    engine: Mapping[str, Any] = field(default_factory=dict)
    family: str = "qwen3"
    packages: tuple[str, ...] = ()
    cpu: str = "any"
    least: float = MIN_COSINE_16
    sizes: Mapping[str, int] = field(default_factory=lambda: SIZES)


def unfit(kind: str, device: str = "cpu") -> str:
    """Why vLLM cannot run a kind on this machine, or "".

    Args:
        kind: one of `KINDS`.
        device: of the engine, "cpu" or "cuda".

    Raises:
        KeyError: no such kind.
    """
    how = KINDS[kind]
    if missing := [name for name in how.packages if find_spec(name) is None]:
        return f"vLLM needs {' and '.join(missing)} for it, not installed here"
    if device != "cpu" or how.cpu == "any":
        return ""
    if how.cpu == "none":
        return "vLLM has kernels for CUDA alone"
    return "vLLM's kernel needs AVX-512" if hardware.library() == hardware.AVX2 else ""


def quantised_checkpoint(kind: str) -> Path:
    """A tiny Qwen 3 or Llama in bfloat16 with the linear modules of its layers quantised, as vLLM loads it.

    Raises:
        KeyError: no such kind.
    """
    return _written(kind) / "quantised"


def unquantised_checkpoint(kind: str) -> Path:
    """The same model with its weights as they were before.

    Raises:
        KeyError: no such kind.
    """
    return _written(kind) / "unquantised"


def quantised_reference(kind: str, device: str = "cpu") -> Reference:
    """transformers in float32 on the weights that the codes stand for, which rounds what the engine rounds.

    Args:
        kind: one of `KINDS`.
        device: of the engine: "cpu" or "cuda", whose attention rounds more.

    Raises:
        KeyError: no such kind.
    """
    how = KINDS[kind]
    reference = Reference(_written(kind) / "plain", **how.loading(device))
    if how.inputs is not None:
        for layer in reference.layers.values():
            _round_inputs(layer, how.inputs)
    return reference


def _written(name: str) -> Path:
    """The folder of the checkpoints of a kind."""
    kind, source = KINDS[name], tiny_checkpoint(KINDS[name].family, **KINDS[name].sizes)
    code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]  # which decides all that is written
    return cached(f"quantised-{name}-{source.name}-{code}", partial(_write, kind, source))


def _write(kind: Kind, source: Path, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    packed, plain, whole = (dict[str, torch.Tensor]() for _ in range(3))
    for name, wide in load_file(source / "model.safetensors").items():
        module, _, part = name.rpartition(".")
        weight = (_power_of_two(wide) if wide.dim() == 1 else wide).to(DTYPE).float()
        linear = module.endswith("_proj")
        found = kind.pack(weight) if linear else Packed({part: weight.to(DTYPE)}, weight)
        packed |= {f"{module}.{end}": tensor.contiguous() for end, tensor in found.tensors.items()}
        plain[name], whole[name] = found.weight.contiguous(), weight
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    quantised = config | ({"quantization_config": kind.config} if kind.config else {})
    parts = (("quantised", packed, quantised), ("plain", plain, config), ("unquantised", whole, config))
    for part, tensors, settings in parts:
        shutil.copytree(source, folder / part)
        save_file(tensors, folder / part / "model.safetensors", metadata={"format": "pt"})
        (folder / part / "config.json").write_text(json.dumps(settings, indent=2))


def _power_of_two(norm: torch.Tensor) -> torch.Tensor:
    """A norm's weights as 0.5, 1 and 2: what is rounded after the norm is so whether it is rounded before them too."""
    return torch.exp2(((norm - 1) / INIT_STD).round().clamp(-1, 1))


# Weights


def _gptq(weight: Weight) -> Packed:
    """Symmetric, 4 bits: what is stored of the zero 8 is 7."""
    grouped = weight.unflatten(1, (-1, GROUP))
    scales = (grouped.abs().amax(2) / 7).to(DTYPE)
    codes = (grouped / scales[..., None]).round().clamp(-8, 7)
    inputs = torch.arange(weight.shape[1], dtype=torch.int32)
    tensors = {
        "qweight": _words(codes.flatten(1).T.int() + 8, 0),
        "qzeros": _words(torch.full_like(scales.T, 7, dtype=torch.int32), 1),
        "scales": scales.T,
        "g_idx": inputs // GROUP,
    }
    return Packed(tensors, (codes * scales[..., None].float()).flatten(1))


def _awq(weight: Weight) -> Packed:
    """4 bits with a zero for each group."""
    grouped = weight.unflatten(1, (-1, GROUP))
    least, most = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    scales = ((most - least) / 15).to(DTYPE)
    zeros = (-least / scales).round().clamp(0, 15)
    codes = ((grouped / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)

    def words(values: torch.Tensor) -> torch.Tensor:
        ordered = values.T.int().unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1)
        return _words(ordered, 1)

    tensors = {"qweight": words(codes.flatten(1)), "qzeros": words(zeros), "scales": scales.T}
    return Packed(tensors, ((codes - zeros[..., None]) * scales[..., None].float()).flatten(1))


def _words(codes: Int[torch.Tensor, "_rows _columns"], dim: int) -> Int[torch.Tensor, "_rows _columns"]:
    """Eight codes of 4 bits along `dim` in one word of 32 bits, the first in the lowest bits."""
    apart = codes.unflatten(dim, (-1, 8)).movedim(dim + 1, -1)
    words: torch.Tensor = (apart << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1, dtype=torch.int32)
    return words


def _int8(weight: Weight) -> Packed:
    """A scale for each output."""
    scales = (weight.abs().amax(1, keepdim=True) / MOST_INT8).to(DTYPE)
    codes = (weight / scales).round().clamp(-MOST_INT8, MOST_INT8)
    return Packed({"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales.float())


def _fp8(weight: Weight) -> Packed:
    """A scale for each output."""
    scales = (weight.abs().amax(1, keepdim=True) / torch.finfo(E4M3).max).to(DTYPE)
    codes = _to_e4m3(weight / scales)
    return Packed({"weight": codes, "weight_scale": scales}, codes.float() * scales.float())


def _fp8_static(weight: Weight) -> Packed:
    """One scale for all modules, as vLLM takes the greatest of those that it joins; and one for their inputs."""
    codes = _to_e4m3(weight / SCALE)
    scales = {"weight_scale": torch.tensor([SCALE]), "input_scale": torch.tensor([INPUT_SCALE])}
    return Packed({"weight": codes, **scales}, codes.float() * SCALE)


# What is rounded as it is computed


class _Rounded(nn.Module):
    """A linear module whose inputs are rounded."""

    def __init__(self, linear: nn.Module, inputs: Callable[[Rows], Rows]) -> None:
        super().__init__()
        self.linear = linear
        self._inputs = inputs

    def forward(self, rows: Rows) -> Float[torch.Tensor, "*any outputs"]:
        outputs: torch.Tensor = self.linear(self._inputs(rows))
        return outputs


def _round_inputs(layer: nn.Module, inputs: Callable[[Rows], Rows]) -> None:
    for name, linear in [item for item in layer.named_modules() if isinstance(item[1], nn.Linear)]:
        owner, _, own = name.rpartition(".")
        setattr(layer.get_submodule(owner), own, _Rounded(linear, inputs))


def _rows_int8(rows: Rows) -> Rows:
    """A scale for each token."""
    rows = rows.to(DTYPE).float()
    scales = rows.abs().amax(-1, keepdim=True) / 127
    return (rows / scales).round() * scales


def _rows_fp8(rows: Rows) -> Rows:
    """A scale for each token."""
    rows = rows.to(DTYPE).float()
    scales = rows.abs().amax(-1, keepdim=True) / torch.finfo(E4M3).max
    return _to_e4m3(rows / scales).float() * scales


def _rows_fp8_static(rows: Rows) -> Rows:
    return _to_e4m3(rows.to(DTYPE).float() / INPUT_SCALE).float() * INPUT_SCALE


def _to_e4m3(values: torch.Tensor) -> torch.Tensor:
    most = torch.finfo(E4M3).max
    return values.clamp(-most, most).to(E4M3)


def _e4m3(values: torch.Tensor) -> torch.Tensor:
    """With a scale of 1, as the cache has without one in the checkpoint."""
    return _to_e4m3(values.to(DTYPE)).to(values.dtype)


def _cut_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Towards zero: vLLM's kernel for CPU cuts bits off instead of rounding."""
    codes = _to_e4m3(values.to(DTYPE))
    beyond = codes.to(values.dtype).abs() > values.to(DTYPE).abs()
    return (codes.view(torch.uint8) - beyond.to(torch.uint8)).view(E4M3).to(values.dtype)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float,
    flash: bool,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' eager attention on keys and values in e4m3, [1, heads, tokens, head_dim].

    FlashAttention 3 multiplies in e4m3: with `flash`, queries are rounded to it too, and probabilities before they are
    divided by their sum.
    """
    cached = [(_e4m3 if flash else _cut_e4m3)(part) for part in (key, value)]
    repeated = [part.repeat_interleave(module.num_key_value_groups, dim=1) for part in cached]
    scores = (_e4m3(query) if flash else query) @ repeated[0].mT * scaling
    scores = scores if mask is None else scores + mask
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)
    weights = (_to_e4m3(weights * OFFSET).to(weights.dtype) / OFFSET if flash else weights) / total
    return (weights @ repeated[1]).transpose(1, 2).contiguous(), weights


def _fp8_attention(device: str) -> Mapping[str, Any]:
    """Have transformers compute attention as vLLM does on a device with a cache in e4m3."""
    with extra("cuda", "cpu"):
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask

    name = f"steercap_fp8_{device}"
    AttentionInterface.register(name, partial(_attention, flash=device == "cuda"))
    AttentionMaskInterface.register(name, eager_mask)
    return {"attn_implementation": name}


def _compressed(kind: str, *, static: bool = False) -> Mapping[str, Any]:
    """compressed-tensors' configuration of 8 bits, "int" or "float": a scale for each output, and each token; or else
    static ones.
    """
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    weights, inputs = {"strategy": "channel", "dynamic": False}, {"strategy": "token", "dynamic": True}
    if static:
        weights = inputs = {"strategy": "tensor", "dynamic": False}
    group = {"targets": ["Linear"], "weights": common | weights, "input_activations": common | inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


_FOUR_BITS: Final = {"bits": 4, "group_size": GROUP}
#: What the plug-in that brings bitsandbytes to vLLM (in no release since 0.28) makes of a plain checkpoint.
_NF4: Final = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "float32",
}

KINDS: Final[Mapping[str, Kind]] = {
    "gptq": Kind({"quant_method": "gptq", "desc_act": False, "sym": True, **_FOUR_BITS}, _gptq, cpu="AVX-512"),
    "awq": Kind({"quant_method": "awq", "version": "gemm", "zero_point": True, **_FOUR_BITS}, _awq, cpu="AVX-512"),
    "int8": Kind(_compressed("int"), _int8, inputs=_rows_int8),
    "fp8": Kind(_compressed("float"), _fp8, inputs=_rows_fp8, least=LEAST_E4M3, sizes=NARROW),
    "fp8_static": Kind(
        _compressed("float", static=True),
        _fp8_static,
        inputs=_rows_fp8_static,
        family="llama",
        cpu="none",
        least=LEAST_E4M3,
    ),
    "fp8_kv": Kind(loading=_fp8_attention, engine={"kv_cache_dtype": "fp8"}, cpu="AVX-512"),
    "bitsandbytes": Kind(
        loading=lambda _device: {"quantization_config": _NF4, "device_map": "cpu"},
        engine={"quantization": "bitsandbytes", "load_format": "bitsandbytes"},
        packages=("bitsandbytes", "vllm_bnb_plugin"),
    ),
}
