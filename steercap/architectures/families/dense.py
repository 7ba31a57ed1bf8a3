"""Families of decoders with dense feed-forward blocks, by name; fields not given are those of Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from steercap.architectures.families.base import Family, normed, whole


def _factor_before_norms(config: Any) -> float | None:
    return 1.0 if config.do_layer_norm_before else None


def _output_multiplier(config: Any) -> float:
    return float(config.output_multiplier)


MEMBERS: Final[Mapping[str, Family]] = {
    # BioGPT, by transformers' modules: the feed-forward block is no module and ends in `fc2`.
    "biogpt": Family(
        architectures=("BioGptForCausalLM",),
        classes=("biogpt.BioGptDecoderLayer",),
        layers="biogpt.layers",
        mlp_out="fc2",
        mlp_in="fc1",
        resid_mid="final_layer_norm",
        final_norm="biogpt.layer_norm",
        attn_proj="self_attn.out_proj",
        mlp_proj="fc2",
    ),
    # BitNet, by transformers' modules: a norm over all heads, and one over all neurons, before they are projected.
    "bitnet": Family(architectures=("BitNetForCausalLM",), classes=("bitnet.BitNetDecoderLayer",)),
    # BLOOM: layers take and return the whole stream; transformers adds it within the blocks, after their projections.
    # transformers passes its queries, keys and values to no attention function, so vLLM's cannot be compared with
    # them.
    "bloom": whole(
        architectures=("BloomForCausalLM",),
        classes=("bloom.BloomBlock",),
        layers="transformer.h",
        attn_out="self_attention.dense",
        mlp_out="mlp.dense_4h_to_h",
        attn_in="self_attention",
        mlp_in="mlp",
        final_norm="transformer.ln_f",
        attn_proj="self_attention.dense",
        attention="",
        mlp_proj="mlp.dense_4h_to_h",
    ),
    # EXAONE 4: a norm follows each block, and its output is what the block adds; layers return the whole stream
    # first.
    "exaone4": normed(
        architectures=("Exaone4ForCausalLM",),
        classes=("exaone4.Exaone4DecoderLayer",),
        resid_mid="mlp",
        residual_output=None,
        residual_input="",
    ),
    # Falcon 7B to 180B: layers take and return the whole stream.
    # transformers passes its queries, keys and values to no attention function, so vLLM's cannot be compared with
    # them.
    "falcon": whole(
        architectures=("FalconForCausalLM",),
        classes=("falcon.FalconDecoderLayer",),
        layers="transformer.h",
        attn_out="self_attention",
        resid_mid="",
        final_norm="transformer.ln_f",
        attn_proj="self_attention.dense",
        attention="",
        mlp_proj="mlp.dense_4h_to_h",
    ),
    # Gemma 1: embeddings scaled before the first layer; the stream is hidden + residual.
    "gemma": Family(
        architectures=("GemmaForCausalLM",),
        classes=("gemma.GemmaDecoderLayer",),
    ),
    # Gemma 2: a norm after each block, whose output is what the block adds; the stream is hidden + residual.
    "gemma2": normed(
        architectures=("Gemma2ForCausalLM",),
        classes=("gemma2.Gemma2DecoderLayer",),
        resid_mid="pre_feedforward_layernorm",
    ),
    # Gemma 3 (text): a norm after each block, whose output is what the block adds; the stream is hidden + residual.
    "gemma3": normed(
        architectures=("Gemma3ForCausalLM",),
        classes=("gemma3.Gemma3DecoderLayer",),
        resid_mid="pre_feedforward_layernorm",
    ),
    # GLM-4 0414: norms before and after each block; `post_attention_layernorm` is the one before the second.
    "glm4": Family(
        architectures=("Glm4ForCausalLM",),
        classes=("glm4.Glm4DecoderLayer",),
        attn_out="post_self_attn_layernorm",
        mlp_out="post_mlp_layernorm",
        attn_in="self_attn",
        mlp_in="mlp",
    ),
    # GPT-2: layers take and return the whole stream.
    "gpt2": whole(
        architectures=("GPT2LMHeadModel",),
        classes=("gpt2.GPT2Block",),
        layers="transformer.h",
        attn_out="attn",
        resid_mid="ln_2",
        final_norm="transformer.ln_f",
        attn_proj="attn.c_proj",
        attention="attn.attn",
        mlp_proj="mlp.c_proj",
    ),
    # SantaCoder and StarCoder 1, by transformers' modules: GPT-2 with one head of keys.
    "gpt_bigcode": Family(
        architectures=("GPTBigCodeForCausalLM",),
        classes=("gpt_bigcode.GPTBigCodeBlock",),
        layers="transformer.h",
        attn_out="attn",
        resid_mid="ln_2",
        final_norm="transformer.ln_f",
        attn_proj="attn.c_proj",
        attention="attn.attn",
        mlp_proj="mlp.c_proj",
    ),
    # GPT-NeoX and Pythia, by transformers' modules: attention and feed-forward side by side after a norm each.
    "gpt_neox": Family(
        architectures=("GPTNeoXForCausalLM",),
        classes=("gpt_neox.GPTNeoXLayer",),
        layers="gpt_neox.layers",
        attn_out="attention",
        resid_mid="",
        final_norm="gpt_neox.final_layer_norm",
        attn_proj="attention.dense",
        attention="attention.attn",
        mlp_proj="mlp.dense_4h_to_h",
    ),
    # GPT-J: attention and feed-forward side by side after one norm.
    # transformers passes its queries, keys and values to no attention function, so vLLM's cannot be compared with
    # them.
    "gptj": whole(
        architectures=("GPTJForCausalLM",),
        classes=("gpt_j.GPTJBlock", "gptj.GPTJBlock"),
        layers="transformer.h",
        attn_out="attn",
        resid_mid="",
        final_norm="transformer.ln_f",
        attn_proj="attn.out_proj",
        attention="",
        mlp_proj="mlp.fc_out",
    ),
    # Llama, and models with its layer: norms only before the blocks; the stream is hidden + residual.
    "llama": Family(
        architectures=(
            "LlamaForCausalLM",
            "LLaMAForCausalLM",
            "ApertusForCausalLM",
            "ArceeForCausalLM",
            "CwmForCausalLM",
            "Ernie4_5ForCausalLM",
            "GlmForCausalLM",
            "HeliumForCausalLM",
            "HunYuanDenseV1ForCausalLM",
            "IQuestCoderForCausalLM",
            "InternLM3ForCausalLM",
            "Jais2ForCausalLM",
            "NemotronForCausalLM",
            "OlmoForCausalLM",
            "Phi3ForCausalLM",
            "SeedOssForCausalLM",
            "SmolLM3ForCausalLM",
            "TeleChat2ForCausalLM",
            "TeleChat3ForCausalLM",
            "TeleFLMForCausalLM",
            "VaultGemmaForCausalLM",
        ),
        classes=(
            "llama.LlamaDecoderLayer",
            "apertus.ApertusDecoderLayer",
            "arcee.ArceeDecoderLayer",
            "cwm.CwmDecoderLayer",
            "ernie4_5.Ernie4_5DecoderLayer",
            "glm.GlmDecoderLayer",
            "helium.HeliumDecoderLayer",
            "hunyuan_v1_dense.HunYuanDenseV1DecoderLayer",
            "jais2.Jais2DecoderLayer",
            "nemotron.NemotronDecoderLayer",
            "olmo.OlmoDecoderLayer",
            "phi3.Phi3DecoderLayer",
            "seed_oss.SeedOssDecoderLayer",
            "smollm3.SmolLM3DecoderLayer",
            "vaultgemma.VaultGemmaDecoderLayer",
        ),
        resid_mid="post_attention_layernorm|feedforward_layernorm|pre_feedforward_layernorm",
        loops=("llama.LlamaModel",),
    ),
    # Mistral: Llama's layer with an optional fourth argument; the stream is hidden + residual.
    "mistral": Family(
        architectures=("MistralForCausalLM", "MinistralForCausalLM", "Ministral3ForCausalLM"),
        classes=("mistral.MistralDecoderLayer", "ministral.MinistralDecoderLayer", "ministral3.Ministral3DecoderLayer"),
        loops=("mistral.MistralModel",),
    ),
    # Muse Glimmer: a norm after each block, whose output is what the block adds, and a gate on the output of the heads;
    # layers return the whole stream first, and beside it the stream between their blocks.
    "muse_glimmer": normed(
        architectures=("MuseGlimmerForCausalLM", "MuseGlimmerForConditionalGeneration"),
        classes=("muse_glimmer.MuseGlimmerDecoderLayer", "muse_glimmer.MuseGlimmerTextDecoderLayer"),
        resid_mid="pre_feedforward_layernorm",
        residual_output=None,
        residual_input="",
        gated=True,
        logits=_output_multiplier,
    ),
    # nanochat, by transformers' modules: Llama's layer whose feed-forward block has no gate.
    "nanochat": Family(
        architectures=("NanoChatForCausalLM",),
        classes=("nanochat.NanoChatDecoderLayer",),
        norms_embeddings=True,
        mlp_proj="mlp.fc2",
    ),
    # OLMo 2 and 3: a norm follows each block, and its output is what the block adds.
    "olmo2": normed(
        architectures=("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
        classes=("olmo2.Olmo2DecoderLayer", "olmo3.Olmo3DecoderLayer"),
        resid_mid="mlp",
        residual_output=None,
        residual_input="",
    ),
    # OPT: layers take and return the whole stream; the feed-forward block ends in `fc2`.
    # OPT 350M has its norms after the blocks: a layer adds a block's output to the stream, and returns the norm of
    # that sum.
    "opt": whole(
        architectures=("OPTForCausalLM",),
        classes=("opt.OPTDecoderLayer",),
        layers="model.decoder.layers",
        mlp_out="fc2",
        mlp_in="fc1",
        resid_mid="final_layer_norm",
        final_norm="model.decoder.final_layer_norm",
        after_norm=("project_out",),
        attn_proj="self_attn.out_proj",
        mlp_proj="fc2",
        factor=_factor_before_norms,
    ),
    # Phi 1 and 2, by transformers' modules: attention and feed-forward side by side after one norm.
    "phi": Family(
        architectures=("PhiForCausalLM",),
        classes=("phi.PhiDecoderLayer",),
        resid_mid="",
        final_norm="model.final_layernorm",
        attn_proj="self_attn.dense",
        mlp_proj="mlp.fc2",
    ),
    # Qwen 2 and 2.5, and MiMo: the stream is hidden + residual.
    "qwen2": Family(
        architectures=("MiMoForCausalLM", "Qwen2ForCausalLM"),
        classes=("qwen2.Qwen2DecoderLayer",),
        loops=("qwen2.Qwen2Model",),
    ),
    # Qwen 3: the stream is hidden + residual.
    "qwen3": Family(
        architectures=("Qwen3ForCausalLM",),
        classes=("qwen3.Qwen3DecoderLayer", "qwen3_vl.Qwen3VLDecoderLayer"),
        loops=("qwen3.Qwen3Model",),
    ),
    # StableLM: layers return a pair, but its first half is already the whole stream.
    "stablelm": whole(
        architectures=(
            "StableLmForCausalLM",
            "StablelmForCausalLM",
        ),
        classes=("stablelm.StablelmDecoderLayer",),
    ),
    # StarCoder 2, by transformers' modules: Llama's layer whose feed-forward block has no gate.
    "starcoder2": Family(
        architectures=("Starcoder2ForCausalLM",),
        classes=("starcoder2.Starcoder2DecoderLayer",),
        mlp_proj="mlp.c_proj",
    ),
}
