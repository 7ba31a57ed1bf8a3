"""ModernBERT: layers of an encoder, with norms before the blocks; they take and return the whole stream."""

from steercap.architectures.families.base import Family

MEMBER = Family(
    architectures=("ModernBertModel", "ModernBertForSequenceClassification", "ModernBertForTokenClassification"),
    classes=("modernbert.ModernBertLayer", "modernbert.ModernBertEncoderLayer"),
    layers="layers",
    attn_out="attn",
    resid_mid="mlp_norm",
    final_norm="final_norm",
    residual_output=None,
    residual_input="",
    attn_proj="attn.Wo",
    attention="attn.attn",
    mlp_proj="mlp.Wo",
)
