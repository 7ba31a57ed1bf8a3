"""Families of encoders, and of decoders with mixed kinds of layers, several streams or scaled blocks, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from steercap.architectures.families.base import Family, unknown, whole


def logit_scale(config: Any) -> float:
    """Return the factor of the logits in Command models."""
    return float(config.logit_scale)


def multiplier(config: Any) -> float:
    """Return the factor of the blocks' outputs in Granite models."""
    return float(config.residual_multiplier)


def divisor(config: Any) -> float:
    """Return the factor of the logits in Granite models: 1 / `logits_scaling`."""
    return 1 / float(config.logits_scaling)


def _logits_scaling(config: Any) -> float:
    return float(config.logits_scaling)


def _depth_multiplier(config: Any) -> float:
    return float(config.scale_depth / config.num_hidden_layers**0.5)


def _width_divisor(config: Any) -> float:
    return float(config.dim_model_base / config.hidden_size)


def _lm_head_multiplier(config: Any) -> float:
    return float(config.lm_head_multiplier)


def _neurons_multiplier(config: Any) -> float:
    return float(config.mlp_multipliers[1])


MEMBERS: Final[Mapping[str, Family]] = {
    # BERT and RoBERTa: each block's sum with the stream is normed, and the norm's output is the stream from there on.
    # `resid_mid` is the sum of the attention block, before its norm, and `mlp_in` the output of that norm.
    # `resid_post` is the output of the second norm, as transformers' `hidden_states` are.
    "bert": whole(
        architectures=(
            "BertModel",
            "BertForMaskedLM",
            "BertForSequenceClassification",
            "BertForTokenClassification",
            "RobertaModel",
            "RobertaForMaskedLM",
            "RobertaForSequenceClassification",
            "RobertaForTokenClassification",
            "XLMRobertaModel",
            "XLMRobertaForSequenceClassification",
            "XLMRobertaForTokenClassification",
        ),
        classes=("bert.BertLayer", "roberta.RobertaLayer", "xlm_roberta.XLMRobertaLayer"),
        layers="encoder.layer",
        attn_out="attention.output.dense",
        mlp_out="output.dense",
        attn_in="attention.self",
        mlp_in="intermediate",
        resid_mid="attention.output.LayerNorm",
        final_norm="",
        norms={"resid_mid": "attention.output.LayerNorm", "mlp_out": "output.LayerNorm"},
        attn_proj="attention.output.dense",
        attention="attention.self.attn",
        mlp_proj="output.dense",
    ),
    # ModernBERT: layers of an encoder, with norms before the blocks; they take and return the whole stream.
    "modernbert": whole(
        architectures=("ModernBertModel", "ModernBertForSequenceClassification", "ModernBertForTokenClassification"),
        classes=("modernbert.ModernBertLayer", "modernbert.ModernBertEncoderLayer"),
        layers="layers",
        attn_out="attn",
        resid_mid="mlp_norm",
        final_norm="final_norm",
        attn_proj="attn.Wo",
        attention="attn.attn",
        mlp_proj="mlp.Wo",
    ),
    # DeepSeek-V4: several streams, which each layer collapses for its blocks and mixes after them; see
    # `sites.streams`.
    # It covers vLLM's layers on CPU, and on CUDA, where each block is fused with the mixing of streams before and
    # after it.
    "deepseek_v4": whole(
        architectures=("DeepseekV4ForCausalLM",),
        classes=(
            "deepseek_v4.cpu.model.DeepseekV4DecoderLayer",
            "deepseek_v4.nvidia.model.DeepseekV4DecoderLayer",
            "deepseek_v4.DeepseekV4DecoderLayer",
        ),
        attn_out="attn|self_attn",
        mlp_out="ffn|mlp",
        resid_mid="",
        mhc=True,
        hidden_input="x",
        attn_proj="",
        attention="",
        mlp_proj="",
        factor=unknown,
    ),
    # Falcon H1: attention beside Mamba 2 in every layer; the layer adds both, scaled, so no module outputs the sum.
    "falcon_h1": whole(
        architectures=("FalconH1ForCausalLM",),
        classes=("falcon_h1.FalconH1ParallelHybrid", "falcon_h1.FalconH1DecoderLayer"),
        attn_out="",
        mlp_out="feed_forward",
        resid_mid="pre_ff_layernorm",
        final_norm="model.final_layernorm",
        mlp_proj="feed_forward.down_proj",
        scaled=_neurons_multiplier,
        logits=_lm_head_multiplier,
    ),
    # Granite 4: Mamba 2 in place of attention in most layers; the layer adds the outputs of experts and a shared one.
    "granitemoehybrid": whole(
        architectures=("GraniteMoeHybridForCausalLM",),
        classes=(
            "granitemoehybrid.GraniteMoeHybridAttentionDecoderLayer",
            "granitemoehybrid.GraniteMoeHybridMambaDecoderLayer",
            "granitemoehybrid.GraniteMoeHybridDecoderLayer",
        ),
        attn_out="self_attn|mamba",
        mlp_out="",
        mlp_proj="",
        router="block_sparse_moe.gate|block_sparse_moe.router",
        factor=multiplier,
        logits=divisor,
        varied=True,
    ),
    # LFM 2: short convolutions in place of attention in most layers; vLLM passes them an output buffer.
    "lfm2": Family(
        architectures=("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"),
        classes=(
            "lfm2.Lfm2AttentionDecoderLayer",
            "lfm2.Lfm2ShortConvDecoderLayer",
            "lfm2.Lfm2DecoderLayer",
            "lfm2_moe.Lfm2MoeAttentionDecoderLayer",
            "lfm2_moe.Lfm2MoeShortConvDecoderLayer",
            "lfm2_moe.Lfm2MoeDecoderLayer",
        ),
        mlp_out="feed_forward",
        resid_mid="ffn_norm",
        final_norm="model.embedding_norm",
        attn_proj="self_attn.out_proj",
        mlp_proj="feed_forward.w2",
        router="feed_forward.gate",
        varied=True,
    ),
    # Mamba 2: a layer is one block, in the place of attention in other models.
    "mamba2": Family(
        architectures=("Mamba2ForCausalLM",),
        classes=("mamba2.Mamba2DecoderLayer", "mamba2.Mamba2Block"),
        layers="backbone.layers",
        attn_out="mixer",
        mlp_out="",
        resid_mid="",
        final_norm="backbone.norm_f",
        attn_proj="",
        attention="",
        mlp_proj="",
        single=True,
    ),
    # Zamba 2: Mamba 2, which in some layers also reads what attention and feed-forward, shared by them, give.
    "zamba2": whole(
        architectures=("Zamba2ForCausalLM",),
        classes=("zamba2.Zamba2HybridLayer", "zamba2.Zamba2MambaDecoderLayer"),
        attn_out="mamba|mamba_decoder.mamba",
        mlp_out="",
        resid_mid="",
        final_norm="model.final_layernorm",
        attn_proj="",
        attention="",
        mlp_proj="",
        single=True,
    ),
    # Mamba 1: a layer is one block, which vLLM passes an output buffer.
    "mamba": Family(
        architectures=("MambaForCausalLM", "FalconMambaForCausalLM"),
        classes=("mamba.MambaDecoderLayer", "mamba.MambaBlock", "falcon_mamba.FalconMambaBlock"),
        layers="backbone.layers",
        attn_out="mixer.out_proj",
        mlp_out="",
        attn_in="mixer",
        resid_mid="",
        final_norm="backbone.norm_f",
        attn_proj="",
        attention="",
        mlp_proj="",
        single=True,
    ),
    # Nemotron-H: a layer is one block, of attention, Mamba 2, feed-forward or experts.
    "nemotron_h": Family(
        architectures=("NemotronHForCausalLM",),
        classes=(
            "nemotron_h.NemotronHAttentionDecoderLayer",
            "nemotron_h.NemotronHMLPDecoderLayer",
            "nemotron_h.NemotronHMambaDecoderLayer",
            "nemotron_h.NemotronHMoEDecoderLayer",
            "nemotron_h.NemotronHBlock",
        ),
        attn_out="mixer.o_proj|mixer.out_proj",
        mlp_out="mixer.down_proj",
        attn_in="mixer",
        mlp_in="mixer",
        resid_mid="",
        final_norm="model.norm_f",
        attn_proj="mixer.o_proj",
        attention="mixer.attn",
        mlp_proj="mixer.down_proj",
        router="mixer.gate",
        varied=True,
        single=True,
    ),
    # OLMo Hybrid: gated delta networks, with norms before blocks, between layers of attention, with norms after them.
    "olmo_hybrid": whole(
        architectures=("OlmoHybridForCausalLM",),
        classes=(
            "olmo_hybrid.OlmoHybridDecoderLayer",
            "olmo_hybrid.OlmoHybridAttentionDecoderLayer",
            "olmo_hybrid.OlmoHybridLinearAttentionDecoderLayer",
        ),
        attn_out="linear_attn.o_proj|post_attention_layernorm",
        mlp_out="post_feedforward_layernorm|mlp",
        attn_in="linear_attn|self_attn",
        mlp_in="mlp",
        resid_mid="linear_attn?post_attention_layernorm|mlp",
        varied=True,
    ),
    # Qwen 3 Next: a gated delta network in place of attention in most layers, a gate on the heads' output in others.
    # Laguna has such a gate in all layers, and no network.
    "qwen3_next": Family(
        architectures=(
            "LagunaForCausalLM",
            "Qwen3NextForCausalLM",
            "Qwen3_5ForCausalLM",
            "Qwen3_5MoeForCausalLM",
        ),
        classes=(
            "laguna.LagunaDecoderLayer",
            "qwen3_next.Qwen3NextDecoderLayer",
            "qwen3_5.Qwen3_5DecoderLayer",
        ),
        attn_out="self_attn|linear_attn",
        gated=True,
        router="mlp.gate",
        varied=True,
    ),
    # Command R: attention and feed-forward side by side after one norm; layers return the whole stream first.
    "cohere": whole(
        architectures=("CohereForCausalLM", "Cohere2ForCausalLM"),
        classes=("commandr.CohereDecoderLayer", "cohere.CohereDecoderLayer", "cohere2.Cohere2DecoderLayer"),
        resid_mid="",
        logits=logit_scale,
    ),
    # Granite 3: the blocks' outputs are multiplied by a constant before they are added to the stream.
    "granite": whole(
        architectures=("GraniteForCausalLM", "GraniteSWAForCausalLM"),
        classes=("granite.GraniteDecoderLayer", "granite_swa.GraniteSWADecoderLayer"),
        factor=multiplier,
        logits=divisor,
    ),
    # HyperCLOVA X: the blocks' outputs are multiplied by a constant before they are added; layers return the stream.
    "hyperclovax": whole(
        architectures=("HyperCLOVAXForCausalLM",),
        classes=("hyperclovax.HyperCLOVAXDecoderLayer",),
        attn_out="post_norm1|self_attn",
        mlp_out="post_norm2|mlp",
        attn_in="self_attn",
        mlp_in="mlp",
        factor=multiplier,
        logits=_logits_scaling,
    ),
    # MiniCPM: the blocks' outputs are multiplied by a constant before they are added; layers return the whole stream.
    "minicpm": whole(
        architectures=("MiniCPMForCausalLM",),
        classes=("minicpm.MiniCPMDecoderLayer",),
        divisor="scale_width",
        factor=_depth_multiplier,
        logits=_width_divisor,
        varied=True,
    ),
    # MiniCPM 3: the blocks' outputs are multiplied by a constant before they are added; values are padded in
    # attention.
    "minicpm3": whole(
        architectures=("MiniCPM3ForCausalLM",),
        classes=("minicpm3.MiniCPM3DecoderLayer",),
        divisor="scale_width",
        attention="",
        factor=_depth_multiplier,
        logits=_width_divisor,
    ),
}
