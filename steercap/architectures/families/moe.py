"""Models with Llama's layer and experts in `mlp`, in all layers or in some, with the router `mlp.gate`."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=(
        "Dots1ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "ExaoneMoeForCausalLM",
        "Glm4MoeForCausalLM",
        "HYV3ForCausalLM",
        "HunYuanMoEV1ForCausalLM",
        "MellumForCausalLM",
        "MiMoV2FlashForCausalLM",
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
)
