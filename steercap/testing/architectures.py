"""Tiny configurations of transformers' architectures, each as small as exercises all parts of its layers.

`FAMILY_CONFIGS` has the families that are tested at every change, `ARCHITECTURES` further ones. For these further ones
plain vLLM gives the log probabilities of transformers on CPU, in float32 unless `ENGINES` differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: Sizes of most tiny models: 4 layers of width 128, 4 heads of 32, the least that vLLM's CPU attention accepts.
SHAPE: Final = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
#: The same sizes, named as in GPT-2's configuration.
GPT: Final = {"vocab_size": 512, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 512}
#: Sizes with grouped key and value heads and an MLP, as in most architectures.
TINY: Final = {**SHAPE, "intermediate_size": 256, "num_key_value_heads": 2, "tie_word_embeddings": False}
#: Tied embeddings and an explicit head size, as in Gemma.
GEMMA: Final = {"tie_word_embeddings": True, "head_dim": 32}
#: Granite's factors of residual branches and attention scores.
GRANITE: Final = {"residual_multiplier": 0.5, "attention_multiplier": 0.2}
#: Layers with sliding-window and with full attention, alternating.
SLIDING: Final = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
#: Routed experts, named as in Qwen's configuration (first) and in DeepSeek's (the others).
EXPERTS: Final = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ROUTED: Final = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GROUPED: Final = {"n_shared_experts": 1, "n_group": 1, "topk_group": 1}
#: Experts that are all chosen, since near ties in bfloat16 would be broken differently.
ALL_EXPERTS: Final = {**EXPERTS, "num_experts_per_tok": 8}
#: Gated delta networks between attention layers. A head's output can be almost zero before its norm, mainly on
#: embeddings: so many heads, in later layers.
DELTA: Final = {
    "head_dim": 32,
    "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
#: Multi-head latent attention, of the smallest sizes that vLLM's kernels accept.
LATENT: Final = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}
#: Short convolutions between attention layers, as in LFM2.
SHORT: Final = {"layer_types": ["conv", "full_attention"] * 2, "conv_dim": 128, "conv_dim_out": 128}
#: Mamba-2 layers with 8 heads of 32.
MAMBA: Final = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}

#: Configurations tested at every change: arguments of transformers' `AutoConfig.for_model`, by steercap's family.
FAMILY_CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma": {"model_type": "gemma", **TINY, **GEMMA},
    "gemma2": {"model_type": "gemma2", **TINY, **GEMMA, "sliding_window": 24},
    "gemma3": {"model_type": "gemma3_text", **TINY, **GEMMA, **SLIDING},
    "gpt2": {"model_type": "gpt2", **GPT},
    "llama": {"model_type": "llama", **TINY},
    "mistral": {"model_type": "mistral", **TINY, "sliding_window": 24},
    "olmo2": {"model_type": "olmo2", **TINY},
    "opt": {"model_type": "opt", **SHAPE, "ffn_dim": 256, "word_embed_proj_dim": 128},
    "qwen2": {"model_type": "qwen2", **TINY},
    "qwen3": {"model_type": "qwen3", **TINY, "head_dim": 32},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **TINY,
        "head_dim": 32,
        **EXPERTS,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "stablelm": {"model_type": "stablelm", **TINY},
}

_DBRX: Final = {"vocab_size": 512, "d_model": 128, "n_heads": 4, "n_layers": 4, "max_seq_len": 512}
_JAMBA: Final = {"mamba_d_state": 16, "mamba_dt_rank": 8, "attn_layer_period": 3, "attn_layer_offset": 1}
_SCANNED: Final = {"vocab_size": 512, "hidden_size": 128, "state_size": 16, "num_hidden_layers": 4, "time_step_rank": 8}
_LONGCAT: Final = {"ffn_hidden_size": 256, "expert_ffn_hidden_size": 64, "zero_expert_num": 4, "moe_topk": 12}
#: Of latent attention on CUDA, whose kernels have no smaller ones; and two blocks of attention in each of 4 layers.
_WIDE_HEADS: Final = {"qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 8, "num_hidden_layers": 8}
_HYBRID: Final = {
    "model_type": "granitemoehybrid",
    **TINY,
    **MAMBA,
    "num_local_experts": 8,
    "shared_intermediate_size": 64,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    **GRANITE,
    "position_embedding_type": "rope",
}
_NEMOTRON: Final = {
    "model_type": "nemotron_h",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "head_dim": 32,
    "layers_block_type": ["full_attention", "mlp", "full_attention", "mlp"],
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 1,
    "chunk_size": 32,
}
#: Further configurations: arguments of transformers' `AutoConfig.for_model`, by a name of the configuration.
ARCHITECTURES: Final[Mapping[str, Mapping[str, Any]]] = {
    "cohere": {"model_type": "cohere", **TINY, "tie_word_embeddings": True},
    "gemma4_text": {
        "model_type": "gemma4_text",
        **TINY,
        **SLIDING,
        **GEMMA,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 32,
    },
    "phi": {"model_type": "phi", **TINY},
    "phi3": {"model_type": "phi3", **TINY},
    "cohere2": {
        "model_type": "cohere2",
        **TINY,
        "tie_word_embeddings": True,
        "head_dim": 32,
        "sliding_window": 256,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    "olmo": {"model_type": "olmo", **TINY},
    "olmo3": {"model_type": "olmo3", **TINY, **SLIDING},
    "granite": {"model_type": "granite", **TINY, **GRANITE, "embedding_multiplier": 2.0, "logits_scaling": 2.0},
    "granite_swa": {
        "model_type": "granite_swa",
        **TINY,
        **SLIDING,
        "residual_multiplier": 0.5,
        "layer_rope_theta": [10000.0, 10000.0, 10000.0, 10000.0],
    },
    "falcon": {
        "model_type": "falcon",
        **SHAPE,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 2,
    },
    "falcon_7b": {"model_type": "falcon", **SHAPE},
    "gptj": {"model_type": "gptj", **GPT, "rotary_dim": 16},
    "gpt_neox": {"model_type": "gpt_neox", **SHAPE, "intermediate_size": 256},
    "gpt_bigcode": {"model_type": "gpt_bigcode", **GPT},
    "bloom": {"model_type": "bloom", "vocab_size": 512, "hidden_size": 128, "n_layer": 4, "n_head": 4},
    "starcoder2": {"model_type": "starcoder2", **TINY, "sliding_window": 24},
    "smollm3": {"model_type": "smollm3", **TINY},
    "glm": {"model_type": "glm", **TINY, "head_dim": 32},
    "glm4": {"model_type": "glm4", **TINY, "head_dim": 32},
    "ernie4_5": {"model_type": "ernie4_5", **TINY, "head_dim": 32},
    "exaone4": {"model_type": "exaone4", **TINY, **SLIDING, "head_dim": 32, "sliding_window_pattern": 2},
    "hunyuan_v1_dense": {"model_type": "hunyuan_v1_dense", **TINY, "head_dim": 32},
    "seed_oss": {"model_type": "seed_oss", **TINY, "head_dim": 32},
    "arcee": {"model_type": "arcee", **TINY, "head_dim": 32},
    "nemotron": {"model_type": "nemotron", **TINY, "head_dim": 32},
    "ministral": {"model_type": "ministral", **TINY, **SLIDING, "head_dim": 32},
    "ministral3": {"model_type": "ministral3", **TINY, "head_dim": 32},
    "jais2": {"model_type": "jais2", **TINY, "head_dim": 32},
    "cwm": {"model_type": "cwm", **TINY, **SLIDING, "head_dim": 32},
    "helium": {"model_type": "helium", **TINY, "head_dim": 32},
    "hyperclovax": {"model_type": "hyperclovax", **TINY, "head_dim": 32, "residual_multiplier": 0.5},
    "nanochat": {"model_type": "nanochat", **TINY, "head_dim": 32},
    "vaultgemma": {"model_type": "vaultgemma", **TINY, **SLIDING, **GEMMA, "query_pre_attn_scalar": 32},
    "bitnet": {"model_type": "bitnet", **TINY},
    "biogpt": {"model_type": "biogpt", **SHAPE, "intermediate_size": 256},
    "minicpm3": {
        "model_type": "minicpm3",
        **TINY,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "scale_depth": 1.4,
        "scale_emb": 2,
        "dim_model_base": 64,
    },
    "mixtral": {"model_type": "mixtral", **TINY, "num_local_experts": 8},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **TINY,
        **EXPERTS,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [1],
    },
    "olmoe": {"model_type": "olmoe", **TINY, "num_experts": 8, "num_experts_per_tok": 2},
    "flex_olmo": {"model_type": "flex_olmo", **TINY, "num_experts": 8, "num_experts_per_tok": 2},
    "granitemoe": {"model_type": "granitemoe", **TINY, "num_local_experts": 8, **GRANITE},
    "granitemoeshared": {
        "model_type": "granitemoeshared",
        **TINY,
        "num_local_experts": 8,
        "shared_intermediate_size": 64,
        **GRANITE,
    },
    "granitemoe_swa": {
        "model_type": "granitemoe_swa",
        **TINY,
        **SLIDING,
        "num_local_experts": 8,
        "shared_intermediate_size": 64,
        **GRANITE,
        "layer_rope_theta": [10000.0, 10000.0, 10000.0, 10000.0],
    },
    "glm4_moe": {"model_type": "glm4_moe", **TINY, **ROUTED, **GROUPED, "head_dim": 32, "first_k_dense_replace": 1},
    "glm4_moe_lite": {
        "model_type": "glm4_moe_lite",
        **TINY,
        **ROUTED,
        **GROUPED,
        **LATENT,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_experts_per_tok": 3,  # of an edited row, the second and the third score are alike to 2e-7
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        **TINY,
        **ROUTED,
        **GROUPED,
        **LATENT,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **TINY,
        **ROUTED,
        **GROUPED,
        **LATENT,
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "longcat_flash": {"model_type": "longcat_flash", **SHAPE, **LATENT, **_LONGCAT, **_WIDE_HEADS},
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        **TINY,
        "moe_num_experts": 4,
        "moe_k": 4,
        "moe_intermediate_size": 64,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 3,
    },
    "exaone_moe": {
        "model_type": "exaone_moe",
        **TINY,
        **SLIDING,
        **EXPERTS,
        "head_dim": 32,
        "sliding_window_pattern": 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "llama4_text": {
        "model_type": "llama4_text",
        **TINY,
        "head_dim": 32,
        "num_local_experts": 8,
        "intermediate_size_mlp": 256,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 128,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **TINY,
        **SLIDING,
        "head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "dots1": {
        "model_type": "dots1",
        **TINY,
        **ROUTED,
        **GROUPED,
        "head_dim": 32,
        "first_k_dense_replace": 1,
        "layer_types": ["full_attention", "full_attention", "full_attention", "full_attention"],
        "sliding_window": None,
    },
    "afmoe": {
        "model_type": "afmoe",
        **TINY,
        **SLIDING,
        **EXPERTS,
        "head_dim": 32,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "global_attn_every_n_layers": 2,
        "score_func": "sigmoid",
        "route_norm": True,
        "n_group": 1,
        "topk_group": 1,
    },
    "hy_v3": {
        "model_type": "hy_v3",
        **TINY,
        **EXPERTS,
        "head_dim": 32,
        "num_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "first_k_dense_replace": 1,
        "route_norm": True,
        "expert_hidden_dim": 64,
        "use_qk_norm": True,
        "qk_norm": True,
    },
    "hunyuan_v1_moe": {"model_type": "hunyuan_v1_moe", **TINY, "head_dim": 32, "num_experts": 8, "moe_topk": 2},
    "mellum": {
        "model_type": "mellum",
        **TINY,
        **SLIDING,
        "head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    "solar_open": {"model_type": "solar_open", **TINY, **ROUTED, "head_dim": 32, "n_shared_experts": 1},
    "cohere2_moe": {
        "model_type": "cohere2_moe",
        **TINY,
        "tie_word_embeddings": True,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 256,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    "mimo_v2_flash": {
        "model_type": "mimo_v2_flash",
        **TINY,
        **SLIDING,
        **ROUTED,
        "head_dim": 32,
        "v_head_dim": 32,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "layernorm_epsilon": 1e-05,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
        "sliding_window_size": 24,
        "rope_theta": 5000000.0,
        "swa_rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "add_swa_attention_sink_bias": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    },
    "axk1": {"model_type": "axk1", **TINY, **ROUTED, **GROUPED, **LATENT, "first_k_dense_replace": 0},
    "gemma4_moe": {
        "model_type": "gemma4_text",
        **TINY,
        **SLIDING,
        **GEMMA,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 32,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
    "qwen3_next": {"model_type": "qwen3_next", **TINY, **DELTA, **ALL_EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_5": {"model_type": "qwen3_5_text", **TINY, **DELTA},
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text",
        **TINY,
        **DELTA,
        **ALL_EXPERTS,
        "shared_expert_intermediate_size": 64,
    },
    "granitemoehybrid": _HYBRID,
    "granitemoehybrid_attn": {**_HYBRID, "layer_types": ["full_attention"] * 4},
    "falcon_h1": {"model_type": "falcon_h1", **TINY, **MAMBA, "head_dim": 32, "mamba_d_ssm": 256},
    "nemotron_h": {
        **_NEMOTRON,
        "layers_block_type": ["mamba", "mlp", "full_attention", "mlp"],
        "time_step_min": 1e-9,  # lower bound of steps, which transformers applies when it runs, and vLLM does not
    },
    "nemotron_h_attn": _NEMOTRON,
    "mamba2": {
        "model_type": "mamba2",
        "vocab_size": 512,
        "hidden_size": 128,
        "state_size": 16,
        "num_hidden_layers": 4,
        "num_heads": 8,
        "head_dim": 32,
        "n_groups": 1,
        "chunk_size": 32,
    },
    "llama_tf": {"model_type": "llama", **TINY},
    "qwen3_moe_tf": {
        "model_type": "qwen3_moe",
        **TINY,
        **EXPERTS,
        "head_dim": 32,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    "gemma2_tf": {"model_type": "gemma2", **TINY, **SLIDING, **GEMMA},
    "gemma4_text_ple": {
        "model_type": "gemma4_text",
        **TINY,
        **SLIDING,
        **GEMMA,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 512,
        "global_head_dim": 64,
        "num_kv_shared_layers": 2,
    },
    "apertus_bf16": {"model_type": "apertus", **TINY},
    "gemma4_unified_text": {
        "model_type": "gemma4_unified_text",
        **TINY,
        **SLIDING,
        **GEMMA,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 32,
    },
    "gemma3n_text": {  # four residual streams, which steercap refuses
        "model_type": "gemma3n_text",
        **TINY,
        **SLIDING,
        "intermediate_size": [256] * 4,
        "tie_word_embeddings": True,
        "head_dim": 32,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 512,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 16,
    },
    "lfm2": {
        "model_type": "lfm2",
        **TINY,
        **SHORT,
        "tie_word_embeddings": True,
        "block_auto_adjust_ff_dim": False,
        "block_dim": 128,
        "block_ff_dim": 256,
        "conv_use_xavier_init": True,
    },
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        **TINY,
        **EXPERTS,
        **SHORT,
        "tie_word_embeddings": True,
        "num_dense_layers": 1,
    },
    "phimoe": {"model_type": "phimoe", **TINY, "num_local_experts": 8, "attention_bias": True, "lm_head_bias": False},
    "zamba2": {
        "model_type": "zamba2",
        **TINY,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_d_state": 16,
        "mamba_ngroups": 1,
        "chunk_size": 32,
        "attention_head_dim": 64,
        "use_mamba_kernels": False,
        "num_mem_blocks": 1,
        "time_step_min": 1e-9,  # as in `nemotron_h`
    },
    "olmo_hybrid": {"model_type": "olmo_hybrid", **TINY, "linear_key_head_dim": 32, "linear_value_head_dim": 64},
    "dbrx": {
        "model_type": "dbrx",
        **_DBRX,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 128, "ffn_hidden_size": 64, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "mamba": {"model_type": "mamba", **_SCANNED},
    "falcon_mamba": {"model_type": "falcon_mamba", **_SCANNED},
    "jamba": {"model_type": "jamba", **TINY, **_JAMBA, "num_experts": 8},
    "minimax_m2": {
        "model_type": "minimax_m2",
        **TINY,
        "intermediate_size": 64,
        "head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rotary_dim": 16,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "laguna": {
        "model_type": "laguna",
        **TINY,
        **SLIDING,
        **EXPERTS,
        "head_dim": 32,
        "shared_expert_intermediate_size": 64,
        "moe_routed_scaling_factor": 1.7,
    },
}

#: Engine arguments without vLLM's CPU kernel for rotary embeddings, which rotates 3-D queries wrongly (0.32).
_PLAIN_ROTARY: Final = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
_TRANSFORMERS: Final = {"model_impl": "transformers"}
#: Engine arguments for gated delta networks, which vLLM runs on CPU in bfloat16 alone.
_DELTA: Final = {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"}
#: Engine arguments that some configurations need, by name of the configuration.
ENGINES: Final[Mapping[str, Mapping[str, Any]]] = {
    "apertus_bf16": {"dtype": "bfloat16"},
    "axk1": _PLAIN_ROTARY,
    "deepseek_v2": _PLAIN_ROTARY,
    "deepseek_v3": _PLAIN_ROTARY,
    "gemma2_tf": _TRANSFORMERS,
    "glm4_moe_lite": _PLAIN_ROTARY,
    "lfm2": _PLAIN_ROTARY,
    "lfm2_moe": _PLAIN_ROTARY,
    "llama_tf": _TRANSFORMERS,
    "nemotron_h_attn": {"enable_prefix_caching": False},  # it would need states of Mamba layers
    "phimoe": {"hf_overrides": {"architectures": ["PhiMoEForCausalLM"]}},  # vLLM's spelling, not transformers'
    "olmo_hybrid": _DELTA,
    "qwen3_moe_tf": _TRANSFORMERS,
    "qwen3_5": _DELTA,
    "qwen3_5_moe": _DELTA,
    "qwen3_next": _DELTA,
}

#: Further engine arguments on CUDA, where vLLM's latent attention supports 16-bit dtypes only, by name.
ON_CUDA: Final[Mapping[str, Mapping[str, Any]]] = {
    name: {"dtype": "bfloat16"}
    for name in ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3")
}
