"""Nemotron-H: a layer is one block, of attention, Mamba 2, feed-forward or experts."""

from steercap.architectures.families.base import Family

MEMBER = Family(
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
)
