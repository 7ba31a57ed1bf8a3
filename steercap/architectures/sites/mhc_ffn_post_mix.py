"""Factors by which the feed-forward block's output is added to each stream: [streams], float32, 0 to 2."""

from steercap.architectures.sites.streams import Coefficients

MEMBER = Coefficients("mhc_ffn_post_mix", "ffn", output=0, axes=1)
