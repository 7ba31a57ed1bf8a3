"""Tiny models of architectures that transformers lacks, with the weights of another that computes the same.

Their checkpoints name tensors otherwise, or join several: vLLM reads those, and transformers the others.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from steercap.lab.demo import cached
from steercap.testing import tiny_checkpoint
from steercap.testing.architectures import ENGINES
from steercap.testing.reference import Reference

Tensors: TypeAlias = "dict[str, torch.Tensor]"
#: Pairs of a pattern and what takes its place.
Names: TypeAlias = "tuple[tuple[str, str], ...]"

_QKV: Final = re.compile(r"(.*\.self_attn\.)q_proj(\.weight|\.bias)")


def _joined(name: str, join: Callable[..., torch.Tensor], names: Names) -> Callable[[Tensors], Tensors]:
    """Return a function that joins queries, keys and values in one tensor, and renames the others."""

    def made(tensors: Tensors) -> Tensors:
        left = dict(tensors)
        for found in filter(None, map(_QKV.fullmatch, tensors)):
            parts = [left.pop(f"{found[1]}{part}_proj{found[2]}") for part in "qkv"]
            left[f"{found[1]}{name}{found[2]}"] = join(*parts)
        return _renamed(left, names)

    return made


def _renamed(tensors: Tensors, names: Names) -> Tensors:
    found = {}
    for name, tensor in tensors.items():
        other = name
        for pattern, instead in names:
            other = re.sub(pattern, instead, other)
        found[other] = tensor
    return found


def _in_turn(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.cat([queries, keys, values])


def _by_group(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, groups: int = 2) -> torch.Tensor:
    """Join the queries, the key and the value of each head of keys."""
    each = [part.view(groups, -1, part.shape[-1]) for part in (queries, keys, values)]
    return torch.cat(each, dim=1).reshape(-1, queries.shape[-1])


def _telechat2(tensors: Tensors) -> Tensors:
    """Join the key and the value of each head, and add the biases that two of a layer's projections have."""
    left = dict(tensors)
    for found in filter(None, map(_QKV.fullmatch, tensors)):
        keys, values = (left.pop(f"{found[1]}{part}_proj.weight").view(4, -1, 128) for part in "kv")
        left[f"{found[1]}key_value.weight"] = torch.cat([keys, values], dim=1).reshape(-1, 128)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            left[name.replace("weight", "bias")] = torch.zeros(128)
    return _renamed(left, _TELECHAT2)


def _pangu_sandwich(tensors: Tensors) -> Tensors:
    """Scale the embeddings, add to norms the 1 that vLLM does not, and make the last layer's MLP the only expert."""
    left = {name: one + 1 if name.endswith("norm.weight") else one for name, one in tensors.items()}
    left["model.embed_tokens.weight"] = left["model.embed_tokens.weight"] * 128**0.5
    left["model.layers.3.mlp.gate.weight"] = torch.zeros(1, 128)
    return _renamed(
        left,
        (
            (r"pre_feedforward_layernorm", "pre_mlp_layernorm"),
            (r"post_feedforward_layernorm", "post_mlp_layernorm"),
            (r"(layers\.3\.mlp)\.(\w+_proj)", r"\1.experts.0.\2"),
        ),
    )


def _plamo3(tensors: Tensors) -> Tensors:
    """Join gates with what they gate, scale the embeddings, and leave out of norms what vLLM adds as it loads them."""
    left = dict(tensors)
    for name in tensors:
        if name.endswith("gate_proj.weight"):
            parts = [left.pop(name.replace("gate_proj", part)) for part in ("gate_proj", "up_proj")]
            left[name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
        elif name.endswith("post_attention_layernorm.weight"):
            left[name] = left[name] + 1 - 1 / 5
        elif name.endswith("post_feedforward_layernorm.weight"):
            left[name] = left[name] + 1 - 5**-1.5
    left["model.embed_tokens.weight"] = left["model.embed_tokens.weight"] * 128**0.5
    return _joined("qkv_proj", _in_turn, _PLAMO3)(left)


def _k2_horizon(tensors: Tensors) -> Tensors:
    """Give each head norms of its own, and name the bias by which experts are chosen as the router's."""
    left = dict(tensors)
    for name in tensors:
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            left[name] = left[name].repeat(4 if "q_norm" in name else 2)
    return _renamed(left, ((r"gate\.e_score_correction_bias", "gate.bias"),))


def _step3(tensors: Tensors) -> Tensors:
    """Make queries by two projections with a norm between, and join experts; the shared one has no gate: it is open."""
    left = {name: one for name, one in tensors.items() if not name.endswith("shared_expert_gate.weight")}
    for name, tensor in tensors.items():
        layer = name.removesuffix(".self_attn.q_proj.weight")
        if layer != name:
            norm = tensors[f"{layer}.input_layernorm.weight"]
            parts = zip(("q_proj", "inter_norm", "wq"), _queries(tensor, norm), strict=True)
            left |= {f"{layer}.self_attn.{part}.weight": one.clone() for part, one in parts}
        elif found := re.fullmatch(r"(.*)\.mlp\.experts\.0\.(\w+_proj\.weight)", name):
            each = [left.pop(name.replace("experts.0", f"experts.{expert}")) for expert in range(8)]
            left[f"{found[1]}.moe.{found[2]}"] = torch.stack(each)
    return _renamed(left, ((r"mlp\.shared_expert\.", "share_expert."), (r"mlp\.gate\.", "moe.gate.")))


def _queries(weight: torch.Tensor, norm: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the weights of Step 3's queries, a projection, a norm and a projection, as parts of others'."""
    half = len(weight) // 2
    return weight[:half], norm[:half], weight[:, :half]


def _step3p5(tensors: Tensors) -> Tensors:
    """Leave out of norms the 1 that vLLM adds, and name experts as published."""
    left = {name: one - 1 if name.endswith("norm.weight") else one for name, one in tensors.items()}
    return _renamed(left, _STEP3P5)


def _longcat(tensors: Tensors) -> Tensors:
    """Leave out what transformers writes for the experts that compute nothing."""
    found = {name: re.search(r"\.experts\.(\d+)\.", name) for name in tensors}
    return {name: tensors[name] for name, expert in found.items() if expert is None or int(expert[1]) < 8}


def _olmo_hybrid(tensors: Tensors) -> Tensors:
    """Name norms as vLLM does, and split the joint convolution by its parts' sizes, which transformers splits in three."""
    left = dict(tensors)
    for name in tensors:
        if name.endswith("q_conv1d.weight"):
            each = [name.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
            sizes = [len(tensors[one.replace("conv1d", "proj")]) for one in each]
            left |= zip(each, torch.cat([tensors[one] for one in each]).split(sizes), strict=True)
    return _renamed(
        left, (("feedforward_layer_norm", "post_attention_layernorm"), ("attention_layer_norm", "input_layernorm"))
    )


_STEP3P5: Final = (
    (r"mlp\.gate\.e_score_correction_bias", "moe.router_bias"),
    (r"mlp\.shared_experts", "share_expert"),
    (r"mlp\.(experts|gate\.)", r"moe.\1"),
)
_PLAMO3: Final = (
    (r"^model\.layers", "model.layers.layers"),
    (r"self_attn", "mixer"),
    (r"input_layernorm", "pre_mixer_norm"),
    (r"post_attention_layernorm", "post_mixer_norm"),
    (r"pre_feedforward_layernorm", "pre_mlp_norm"),
    (r"post_feedforward_layernorm", "post_mlp_norm"),
)
_TELECHAT2: Final = (
    (r"^model\.embed_tokens", "transformer.word_embeddings"),
    (r"^model\.layers", "transformer.h"),
    (r"^model\.norm", "transformer.ln_f"),
    (r"self_attn\.o_proj", "self_attention.dense"),
    (r"self_attn\.q_proj", "self_attention.query"),
    (r"self_attn", "self_attention"),
)
#: From Mixtral's names of experts.
_EXPERTS: Final = (
    (r"block_sparse_moe", "mlp"),
    (r"(experts\.\d+)\.w1", r"\1.gate_proj"),
    (r"(experts\.\d+)\.w2", r"\1.down_proj"),
    (r"(experts\.\d+)\.w3", r"\1.up_proj"),
)
_BAILING: Final = _joined(
    "query_key_value",
    _in_turn,
    (
        *_EXPERTS,
        (r"embed_tokens", "word_embeddings"),
        (r"self_attn\.o_proj", "attention.dense"),
        (r"self_attn\.q_norm", "attention.query_layernorm"),
        (r"self_attn\.k_norm", "attention.key_layernorm"),
        (r"self_attn", "attention"),
        (r"e_score_correction_bias", "expert_bias"),
    ),
)
_CHATGLM: Final = _joined(
    "query_key_value",
    _in_turn,
    (
        (r"^model\.embed_tokens", "transformer.embedding.word_embeddings"),
        (r"^model\.layers", "transformer.encoder.layers"),
        (r"^model\.norm", "transformer.encoder.final_layernorm"),
        (r"^lm_head", "transformer.output_layer"),
        (r"self_attn\.o_proj", "self_attention.dense"),
        (r"self_attn", "self_attention"),
        (r"mlp\.gate_up_proj", "mlp.dense_h_to_4h"),
        (r"mlp\.down_proj", "mlp.dense_4h_to_h"),
    ),
)
_PANGU: Final = partial(_renamed, names=((r"gate\.(e_score_correction_bias)", r"\1"),))


@dataclass(frozen=True)
class Twin:
    """A tiny model that vLLM runs as an architecture of its own.

    Args:
        architecture: vLLM's name.
        of: tiny model of transformers with the same weights.
        changes: changes to its configuration, with what vLLM reads besides.
        tensors: what becomes of the tensors that transformers writes.
        overrides: what vLLM reads of a configuration that transformers' does not keep.
    """

    architecture: str
    of: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    tensors: Callable[[Tensors], Tensors] = dict
    overrides: Mapping[str, Any] = field(default_factory=dict)


_LING: Final = {
    "use_qk_norm": True,
    "use_rmsnorm": True,
    "embedding_dropout": 0.0,
    "use_bias": False,
    "use_qkv_bias": False,
    "partial_rotary_factor": 0.5,
    "num_experts": 8,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
_GLM: Final = {
    "num_layers": 4,
    "padded_vocab_size": 512,
    "ffn_hidden_size": 256,
    "seq_length": 512,
    "layernorm_epsilon": 1.5625e-07,
    "rmsnorm": True,
    "original_rope": True,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "kv_channels": 32,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "attention_bias": True,
    "hidden_dropout": 0.0,
    "post_layer_norm": True,
    "fp32_residual_connection": False,
    "apply_residual_connection_post_layernorm": False,
}
#: Granite's factors of attention and of the stream, as Llama has them.
_NO_FACTORS: Final = {"attention_multiplier": 32**-0.5, "residual_multiplier": 1.0, "embedding_multiplier": 1.0}
_SOFTMAX: Final = {
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
}
#: What vLLM reads of each layer, as objects, since the published configuration makes these.
_BLOCK: Final = SimpleNamespace(
    attention=SimpleNamespace(no_op=False, n_heads_in_group=2), ffn=SimpleNamespace(no_op=False, intermediate_size=256)
)
#: By name.
TWINS: Final[Mapping[str, Twin]] = {
    "llama_published": Twin("LLaMAForCausalLM", "llama"),
    "nemotron_nas": Twin("DeciLMForCausalLM", "llama", overrides={"block_configs": [_BLOCK] * 4}),
    "internlm3": Twin("InternLM3ForCausalLM", "llama", {"attention_bias": True}),
    "iquest_coder": Twin("IQuestCoderForCausalLM", "llama", {"head_dim": 32}),
    "telechat3": Twin("TeleChat3ForCausalLM", "llama", {"mlp_bias": True}),
    "pangu_embedded": Twin("PanguEmbeddedForCausalLM", "llama", {"attention_bias": True}),
    "teleflm": Twin(
        "TeleFLMForCausalLM",
        "granite",
        {**_NO_FACTORS, "logits_scaling": 2.0, "use_mup": True, "output_mult": 2.0, "mup_scale_factor": 4.0},
    ),
    "minicpm": Twin(
        "MiniCPMForCausalLM",
        "granite",
        {
            **_NO_FACTORS,
            "residual_multiplier": 0.7,
            "embedding_multiplier": 2.0,
            "logits_scaling": 2.0,
            "scale_depth": 1.4,
            "scale_emb": 2.0,
            "dim_model_base": 64,
        },
    ),
    "mimo": Twin("MiMoForCausalLM", "qwen2", {"num_nextn_predict_layers": 1}),
    "mimo_v2": Twin("MiMoV2ForCausalLM", "mimo_v2_flash"),
    "orion": Twin("OrionForCausalLM", "stablelm", {"partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5}),
    "rnj1": Twin("Rnj1ForCausalLM", "gemma3", {"layer_types": ["full_attention"] * 4}),
    "exaone_moe_published": Twin("ExaoneMoEForCausalLM", "exaone_moe"),
    "mistral_large_3": Twin("MistralLarge3ForCausalLM", "deepseek_v3"),
    "pangu_ultra_moe": Twin("PanguUltraMoEForCausalLM", "deepseek_v3", {"router_enable_expert_bias": True}, _PANGU),
    "pangu_pro_moe_v2": Twin(
        "PanguProMoEV2ForCausalLM",
        "glm4_moe",
        {"router_enable_expert_bias": True, "partial_rotary_factor": 1.0},
        _PANGU,
    ),
    "pangu_sandwich": Twin(  # with norms after blocks
        "PanguProMoEV2ForCausalLM",
        "gemma2",
        {
            "tie_word_embeddings": False,
            "hidden_activation": "silu",
            "hidden_act": "silu",
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": ["full_attention"] * 4,
            "sandwich_norm": True,
            "n_routed_experts": 1,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 256,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
        _pangu_sandwich,
        {"n_shared_experts": None, "sliding_window": None},
    ),
    "sarvam_mla": Twin(
        "SarvamMLAForCausalLM",
        "deepseek_v3",
        {"q_lora_rank": None, "num_experts": 8, "num_shared_experts": 1, "score_function": "sigmoid"},
    ),
    "internlm2": Twin(
        "InternLM2ForCausalLM",
        "llama",
        {},
        _joined(
            "wqkv",
            _by_group,
            (
                (r"embed_tokens", "tok_embeddings"),
                (r"^lm_head", "output"),
                (r"self_attn\.o_proj", "attention.wo"),
                (r"self_attn", "attention"),
                (r"mlp\.gate_proj", "feed_forward.w1"),
                (r"mlp\.down_proj", "feed_forward.w2"),
                (r"mlp\.up_proj", "feed_forward.w3"),
                (r"input_layernorm", "attention_norm"),
                (r"post_attention_layernorm", "ffn_norm"),
            ),
        ),
    ),
    "exaone": Twin(
        "ExaoneForCausalLM",
        "llama",
        {"activation_function": "silu", "layer_norm_epsilon": 1e-6},
        partial(
            _renamed,
            names=(
                (r"^model\.embed_tokens", "transformer.wte"),
                (r"^model\.layers", "transformer.h"),
                (r"^model\.norm", "transformer.ln_f"),
                (r"self_attn\.o_proj", "attn.attention.out_proj"),
                (r"self_attn", "attn.attention"),
                (r"mlp\.gate_proj", "mlp.c_fc_0"),
                (r"mlp\.up_proj", "mlp.c_fc_1"),
                (r"mlp\.down_proj", "mlp.c_proj"),
                (r"input_layernorm", "ln_1"),
                (r"post_attention_layernorm", "ln_2"),
            ),
        ),
    ),
    "telechat2": Twin(
        "TeleChat2ForCausalLM",
        "llama",
        {"num_key_value_heads": 4, "n_layer": 4, "n_head": 4, "ffn_hidden_size": 256, "layer_norm_epsilon": 1e-6},
        _telechat2,
    ),
    "chatglm": Twin("ChatGLMForConditionalGeneration", "glm", _GLM, _CHATGLM),
    "chatglm_model": Twin("ChatGLMModel", "glm", _GLM, _CHATGLM),
    "bailing_moe": Twin(
        "BailingMoeForCausalLM",
        "mixtral",
        {
            **_SOFTMAX,
            "num_experts": 8,
            "num_shared_experts": 0,
            "embedding_dropout": 0.0,
            "use_bias": False,
            "use_qkv_bias": False,
            "head_dim": 32,
        },
        _BAILING,
    ),
    "bailing_moe_v2": Twin("BailingMoeV2ForCausalLM", "glm4_moe", _LING, _BAILING),
    "sarvam_moe": Twin("SarvamMoEForCausalLM", "glm4_moe", _LING, _BAILING),
    "param2_moe": Twin(
        "Param2MoEForCausalLM",
        "glm4_moe",
        {**_LING, "partial_rotary_factor": 1.0},
        _BAILING,
        {"rope_theta": 10000.0},
    ),
    "k2_horizon": Twin(
        "K2HorizonForCausalLM",
        "glm4_moe",
        {
            "use_qk_norm": True,
            "query_key_norm": True,
            "partial_rotary_factor": 1.0,
            "rope_head_dim": 32,
            "num_experts": 8,
            "num_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.7,
            "router_scaling_factor": 1.7,
            "router_score_func": "sigmoid",
            "moe_gate_bias": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [0],
            "mova_num_experts": 0,
            "layernorm_num_groups": 1,
        },
        _k2_horizon,
        {"attention_gate_func": None},
    ),
    "step3p5": Twin(
        "Step3p5ForCausalLM",
        "glm4_moe",
        {
            "use_qk_norm": True,
            "partial_rotary_factor": 1.0,
            "num_attention_groups": 2,
            "moe_num_experts": 8,
            "moe_top_k": 2,
            "share_expert_dim": 64,
            "routed_scaling_factor": 1.7,
            "moe_router_scaling_factor": 1.7,
            "moe_router_activation": "sigmoid",
        },
        _step3p5,
        {"model_type": "step3p5", "rope_theta": 10000.0},
    ),
    "step3_text": Twin(
        "Step3TextForCausalLM",
        "qwen2_moe",
        {
            "num_key_value_heads": 1,
            "qkv_bias": False,
            "head_dim": 32,
            "norm_topk_prob": True,
            "norm_expert_weight": True,
            "moe_num_experts": 8,
            "moe_top_k": 2,
            "moe_layers_enum": "0,2,3",
            "share_expert_dim": 64,
            "share_q_dim": 64,
            "max_position_embedding": 512,
        },
        _step3,
    ),
    "longcat_flash": Twin(
        "LongcatFlashForCausalLM",
        "longcat_flash",
        {
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "zero_expert_type": "identity",
            "moe_intermediate_size": 64,
        },
        _longcat,
    ),
    "olmo_hybrid": Twin("OlmoHybridForCausalLM", "olmo_hybrid", {}, _olmo_hybrid),
    "plamo3": Twin(
        "Plamo3ForCausalLM",
        "gemma3",
        {
            "tie_word_embeddings": False,
            "hidden_activation": "silu",
            "query_pre_attn_scalar": 32,
            "interleaved_sliding_window": [24, None, 24, None],
        },
        _plamo3,
    ),
    "nemotron_h_puzzle": Twin("NemotronHPuzzleForCausalLM", "nemotron_h"),
    "solar": Twin(  # streams of earlier layers are mixed in between layers, as in Solar Pro, which steercap refuses
        "SolarForCausalLM",
        "llama",
        {"bskcn_1": [1], "bskcn_2": [], "bskcn_3": [3], "bskcn_4": [], "bskcn_tv": [0.9, 0.8]},
    ),
    "deepseek": Twin(
        "DeepseekForCausalLM",
        "mixtral",
        {**_SOFTMAX, "n_routed_experts": 8, "n_shared_experts": None},
        partial(_renamed, names=_EXPERTS),
    ),
}


def transformers_checkpoint(name: str) -> Path:
    """The checkpoint of a tiny model that transformers reads."""
    twin = TWINS.get(name)
    return tiny_checkpoint(twin.of, **twin.changes) if twin else tiny_checkpoint(name)


def published_checkpoint(name: str) -> Path:
    """The checkpoint of a tiny model that vLLM reads."""
    plain = transformers_checkpoint(name)
    if name not in TWINS or TWINS[name].tensors is dict:
        return plain
    digest = hashlib.sha256(f"{name} {Path(__file__).read_text()}".encode()).hexdigest()[:8]
    return cached(f"published-{name}-{digest}", partial(_write, TWINS[name], plain))


def reference_of(name: str) -> Reference:
    """transformers on a tiny model.

    Bloom has vLLM's GELU, which is exact: transformers' own, by tanh, is not. Step 3 has its queries and shared expert.
    """
    reference = Reference(transformers_checkpoint(name))
    for layer in reference.layers.values():
        if name == "bloom":
            layer.get_submodule("mlp").gelu_impl = nn.GELU()
        elif name == "step3_text":
            _as_step3(layer)
    return reference


def _as_step3(layer: Any) -> None:
    """Give a layer of Qwen 2 with experts what `_step3` writes."""
    first, norm, second = _queries(layer.self_attn.q_proj.weight, layer.input_layernorm.weight)
    middle = nn.RMSNorm(len(norm), eps=layer.input_layernorm.variance_epsilon)
    ends = [nn.Linear(one.shape[1], one.shape[0], bias=False) for one in (first, second)]
    made: Any = nn.Sequential(ends[0], middle, ends[1])
    layer.self_attn.q_proj = made.requires_grad_(requires_grad=False)
    for module, weight in zip(made, (first, norm, second), strict=True):
        module.weight.copy_(weight)
    if hasattr(layer.mlp, "shared_expert_gate"):
        del layer.mlp.shared_expert_gate
        layer.mlp.shared_expert_gate = lambda rows: rows.new_full((len(rows), 1), torch.inf)


def engine_of(name: str) -> Mapping[str, Any]:
    """The engine arguments that a tiny model needs."""
    twin = TWINS.get(name)
    if twin is None:
        return ENGINES.get(name, {})
    return {**ENGINES.get(twin.of, {}), "hf_overrides": {"architectures": [twin.architecture], **twin.overrides}}


def _write(twin: Twin, plain: Path, folder: Path) -> None:
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    file = folder / "model.safetensors"
    save_file({key: one.contiguous() for key, one in twin.tensors(load_file(file)).items()}, file, {"format": "pt"})
