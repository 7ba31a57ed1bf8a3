"""Site `embed`: the input of the first layer, a token's embedding after any scale and position embedding.

It equals transformers' `hidden_states[0]`, and `resid_pre` of layer 0.
"""

from __future__ import annotations

from typing import ClassVar

from steercap.architectures.sites.resid_pre import ResidPre


class Embed(ResidPre):
    """Tap on the first layer's input, before that of `resid_pre`; on the first pipeline stage."""

    name: ClassVar[str] = "embed"
    of_model = 0
    first: ClassVar[bool] = True


MEMBER = Embed()
