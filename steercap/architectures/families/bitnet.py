"""BitNet, by transformers' modules: a norm over all heads, and one over all neurons, before they are projected."""

from steercap.architectures.families.base import Family

MEMBER = Family(architectures=("BitNetForCausalLM",), classes=("bitnet.BitNetDecoderLayer",))
