"""Llama, and models with its layer: norms only before the blocks; the stream is hidden + residual."""

from steercap.architectures.families.base import Family

MEMBER = Family(
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
        "InternLM3ForCausalLM",
        "Jais2ForCausalLM",
        "NemotronForCausalLM",
        "OlmoForCausalLM",
        "Phi3ForCausalLM",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
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
)
