"""Factors by which the attention block's output is added to each stream: [streams], float32, 0 to 2."""

from steercap.architectures.sites.streams import Coefficients

MEMBER = Coefficients("mhc_attn_post_mix", "attn", output=0, axes=1)
