"""Families of decoders with experts, by name; fields not given are those of Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from steercap.architectures.families.base import Family, normed, unknown, whole
from steercap.architectures.families.hybrids import divisor, logit_scale, multiplier


def _sparse_qwen3(config: Any, layer: int) -> bool:
    dense = layer in (config.mlp_only_layers or ())
    return not dense and config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0


MEMBERS: Final[Mapping[str, Family]] = {
    # Trinity: norms before and after each block, a gate on the output of the heads, experts in most layers.
    "afmoe": Family(
        architectures=("AfmoeForCausalLM",),
        classes=("afmoe.AfmoeDecoderLayer",),
        attn_out="post_attention_layernorm",
        mlp_out="post_mlp_layernorm",
        attn_in="self_attn",
        mlp_in="mlp",
        resid_mid="pre_mlp_layernorm",
        gated=True,
        router="mlp.gate|mlp.router",
        varied=True,
    ),
    # A.X K1: DeepSeek's layer with a norm after the experts; dense layers have that norm too, but do not call it.
    # So no path names the feed-forward block's output in every layer.
    "axk1": Family(
        architectures=("AXK1ForCausalLM",),
        classes=("AXK1.AXK1DecoderLayer", "axk1.AXK1DecoderLayer"),
        mlp_out="",
        attention="",
        router="mlp.gate",
        varied=True,
    ),
    # Ling and Sarvam 30B: Llama's layer with experts, by other names for attention.
    "bailing_moe": Family(
        architectures=("BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "SarvamMoEForCausalLM"),
        classes=("bailing_moe.BailingMoeBlock",),
        attn_out="attention",
        attn_proj="attention.dense",
        attention="attention.attn",
        router="mlp.gate",
        router_rounded=True,
        varied=True,
    ),
    # Command A with experts: Command R's layer, in some layers with experts.
    "cohere2_moe": whole(
        architectures=("Cohere2MoeForCausalLM",),
        classes=("cohere2_moe.Cohere2MoeDecoderLayer",),
        resid_mid="",
        router="mlp.gate",
        logits=logit_scale,
        varied=True,
    ),
    # DeepSeek V2, V3, R1 and models with their layer: multi-head latent attention, so keys and values are never made.
    "deepseek_v2": Family(
        architectures=(
            "DeepseekForCausalLM",
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "Glm4MoeLiteForCausalLM",
            "MistralLarge3ForCausalLM",
            "SarvamMLAForCausalLM",
        ),
        classes=(
            "deepseek_v2.DeepseekV2DecoderLayer",
            "deepseek_v3.DeepseekV3DecoderLayer",
            "glm4_moe_lite.Glm4MoeLiteDecoderLayer",
            "sarvam.SarvamMLABlock",
        ),
        attention="",
        router="mlp.gate",
        varied=True,
    ),
    # FlexOlmo, by transformers' modules: OLMo 2's layer with experts.
    "flex_olmo": normed(
        architectures=("FlexOlmoForCausalLM",),
        classes=("flex_olmo.FlexOlmoDecoderLayer",),
        resid_mid="mlp",
        mlp_proj="",
        router="mlp.gate",
        varied=True,
    ),
    # Gemma 4 (text): a norm after each block, whose output is what the block adds.
    # The layer then adds an embedding that it looks up by token, if any, and multiplies the whole stream by a
    # constant of its own.
    "gemma4": whole(
        architectures=("Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"),
        classes=(
            "gemma4.Gemma4DecoderLayer",
            "gemma4.Gemma4TextDecoderLayer",
            "gemma4_unified.Gemma4UnifiedTextDecoderLayer",
        ),
        attn_out="post_attention_layernorm",
        mlp_out="post_feedforward_layernorm",
        attn_in="self_attn",
        mlp_in="",
        resid_mid="pre_feedforward_layernorm",
        router="router.proj",
        factor=unknown,
        varied=True,
    ),
    # gpt-oss: attention with sinks, and experts in every layer; vLLM's module names differ from transformers'.
    "gpt_oss": Family(
        architectures=("GptOssForCausalLM",),
        classes=("gpt_oss.TransformerBlock", "gpt_oss.GptOssDecoderLayer"),
        attn_out="attn|self_attn",
        attn_proj="attn.o_proj|self_attn.o_proj",
        attention="attn.attn|self_attn.attn",
        mlp_proj="",
        router="mlp.router",
        varied=True,
    ),
    # Granite 3 with experts: otherwise as Granite.
    "granitemoe": whole(
        architectures=("GraniteMoeForCausalLM",),
        classes=("granitemoe.GraniteMoeDecoderLayer",),
        mlp_out="block_sparse_moe",
        mlp_proj="",
        router="block_sparse_moe.gate|block_sparse_moe.router",
        factor=multiplier,
        logits=divisor,
        varied=True,
    ),
    # Granite with experts and a shared one: the layer adds the two itself, so no module outputs the sum.
    "granitemoeshared": whole(
        architectures=("GraniteMoeSharedForCausalLM", "GraniteMoeSWAForCausalLM"),
        classes=("granitemoeshared.GraniteMoeSharedDecoderLayer", "granitemoe_swa.GraniteMoeSWADecoderLayer"),
        mlp_out="",
        mlp_proj="",
        router="block_sparse_moe.gate|block_sparse_moe.router",
        factor=multiplier,
        logits=divisor,
        varied=True,
    ),
    # Llama 4 (text): Llama's layer, the feed-forward block of some layers with experts.
    # vLLM orders the elements of queries and keys differently, so they cannot be compared with transformers'.
    "llama4": Family(
        architectures=("Llama4ForCausalLM",),
        classes=("llama4.Llama4DecoderLayer", "llama4.Llama4TextDecoderLayer"),
        mlp_out="feed_forward",
        attention="",
        mlp_proj="feed_forward.down_proj",
        router="feed_forward.router",
        varied=True,
    ),
    # Mixtral and MiniMax M2: Llama's layer with experts, whose modules have different names in vLLM and transformers.
    "mixtral": Family(
        architectures=("MiniMaxM2ForCausalLM", "MixtralForCausalLM"),
        classes=("minimax_m2.MiniMaxM2DecoderLayer", "mixtral.MixtralDecoderLayer"),
        mlp_out="block_sparse_moe|mlp",
        mlp_proj="",
        router="block_sparse_moe.gate|mlp.gate",
        varied=True,
    ),
    # Models with Llama's layer and experts in `mlp`, in all layers or in some, with the router `mlp.gate`.
    "moe": Family(
        architectures=(
            "Dots1ForCausalLM",
            "Ernie4_5_MoeForCausalLM",
            "ExaoneMoEForCausalLM",
            "ExaoneMoeForCausalLM",
            "Glm4MoeForCausalLM",
            "HYV3ForCausalLM",
            "HunYuanMoEV1ForCausalLM",
            "MellumForCausalLM",
            "MiMoV2FlashForCausalLM",
            "MiMoV2ForCausalLM",
            "OlmoeForCausalLM",
            "Qwen2MoeForCausalLM",
            "SolarOpenForCausalLM",
        ),
        classes=(
            "dots1.Dots1DecoderLayer",
            "ernie45_moe.Ernie4_5_MoeDecoderLayer",
            "ernie4_5_moe.Ernie4_5_MoeDecoderLayer",
            "exaone_moe.ExaoneMoeDecoderLayer",
            "glm4_moe.Glm4MoeDecoderLayer",
            "hunyuan_v1_moe.HunYuanMoEV1DecoderLayer",
            "hy_v3.HYV3DecoderLayer",
            "mellum.MellumDecoderLayer",
            "mimo_v2.MiMoV2FlashDecoderLayer",
            "mimo_v2_flash.MiMoV2FlashDecoderLayer",
            "olmoe.OlmoeDecoderLayer",
            "qwen2_moe.Qwen2MoeDecoderLayer",
            "solar_open.SolarOpenDecoderLayer",
        ),
        router="mlp.gate",
        varied=True,
    ),
    # Param 2: Llama's layer with Ling's experts.
    "param2_moe": Family(
        architectures=("Param2MoEForCausalLM",),
        classes=("param2moe.Param2MoEDecoderLayer",),
        router="mlp.gate",
        router_rounded=True,
        varied=True,
    ),
    # Phi 3.5 with experts: layers return the whole stream first.
    "phimoe": whole(
        architectures=("PhiMoEForCausalLM", "PhimoeForCausalLM"),
        classes=("phimoe.PhiMoEDecoderLayer", "phimoe.PhimoeDecoderLayer"),
        mlp_out="block_sparse_moe|mlp",
        mlp_proj="",
        router="block_sparse_moe.gate|mlp.router",
        varied=True,
    ),
    # Qwen 3 with a mixture of experts: the stream is hidden + residual; some layers may be dense.
    "qwen3_moe": Family(
        architectures=("Qwen3MoeForCausalLM",),
        classes=("qwen3_moe.Qwen3MoeDecoderLayer",),
        loops=("qwen3_moe.Qwen3MoeModel",),
        router="mlp.gate",
        sparse=_sparse_qwen3,
    ),
    # DBRX: attention and both norms are in a module of their own; layers take and return the whole stream.
    "dbrx": whole(
        architectures=("DbrxForCausalLM",),
        classes=("dbrx.DbrxBlock",),
        layers="transformer.blocks",
        attn_out="norm_attn_norm.attn",
        mlp_out="ffn",
        resid_mid="norm_attn_norm.norm_2",
        final_norm="transformer.norm_f",
        attn_proj="norm_attn_norm.attn.out_proj",
        attention="norm_attn_norm.attn.attn",
        mlp_proj="",
        router="ffn.router.layer",
        varied=True,
    ),
    # Step 3: a layer with experts adds their output and that of a shared one, so that no module outputs the sum.
    "step3_text": Family(
        architectures=("Step3TextForCausalLM",),
        classes=("step3_text.Step3TextDecoderLayer",),
        router="moe.gate",
        varied=True,
    ),
    # Jamba: Mamba 1 in place of attention in most layers. vLLM's layers hold attention's modules themselves.
    "jamba": Family(
        architectures=("JambaForCausalLM",),
        classes=("jamba.JambaAttentionDecoderLayer", "jamba.JambaMambaDecoderLayer"),
        attn_out="mamba.out_proj|self_attn|o_proj",
        mlp_out="feed_forward",
        attn_in="mamba|self_attn|qkv_proj",
        resid_mid="pre_ff_layernorm",
        final_norm="model.final_layernorm",
        attn_proj="self_attn.o_proj|o_proj",
        attention="self_attn.attn|attn",
        mlp_proj="feed_forward.down_proj",
        router="feed_forward.router",
        varied=True,
    ),
}
