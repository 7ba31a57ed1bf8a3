"""DeepSeek-V4: several streams, which each layer collapses for its blocks and mixes after them; see `sites.streams`.

It covers vLLM's layers on CPU, and on CUDA, where each block is fused with the mixing of streams before and after it.
"""

from steercap.architectures.families.base import Family, unknown

MEMBER = Family(
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
    residual_output=None,
    residual_input="",
    attn_proj="",
    attention="",
    mlp_proj="",
    factor=unknown,
)
