"""LFM 2: short convolutions in place of attention in most layers; vLLM passes them an output buffer."""

from steercap.architectures.families.base import Family

MEMBER = Family(
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
)
