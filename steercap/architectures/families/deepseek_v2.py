"""DeepSeek V2, V3, R1 and models with their layer: multi-head latent attention, so keys and values are never made."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"),
    classes=(
        "deepseek_v2.DeepseekV2DecoderLayer",
        "deepseek_v3.DeepseekV3DecoderLayer",
        "glm4_moe_lite.Glm4MoeLiteDecoderLayer",
    ),
    attention="",
    router="mlp.gate",
    varied=True,
)
