"""Matrix that mixes the streams after the feed-forward block: [from, to], float32, rows and columns of sum 1."""

from steercap.architectures.sites.streams import Coefficients

MEMBER = Coefficients("mhc_ffn_res_mix", "ffn", output=1, axes=2)
