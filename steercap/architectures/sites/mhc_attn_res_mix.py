"""Matrix that mixes the streams after the attention block: [from, to], float32, rows and columns of sum 1."""

from steercap.architectures.sites.streams import Coefficients

MEMBER = Coefficients("mhc_attn_res_mix", "attn", output=1, axes=2)
