"""Families of encoders: by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from steercap.architectures.families.base import Family

MEMBERS: Final[Mapping[str, Family]] = {
    # BERT and RoBERTa: each block's sum with the stream is normed, and the norm's output is the stream from there on.
    # `resid_mid` is the sum of the attention block, before its norm, and `mlp_in` the output of that norm.
    # `resid_post` is the output of the second norm, as transformers' `hidden_states` are.
    "bert": Family(
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
        residual_output=None,
        residual_input="",
        attn_proj="attention.output.dense",
        attention="attention.self.attn",
        mlp_proj="output.dense",
    ),
    # ModernBERT: layers of an encoder, with norms before the blocks; they take and return the whole stream.
    "modernbert": Family(
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
    ),
}
