"""Points by the names of other libraries: TransformerLens's hooks, and paths of transformers' modules.

A name whose rows differ from those of every point is not guessed at: it has no point.
"""

from __future__ import annotations

import re
from typing import Final

from steercap.core.names import TRANSFORMER_LENS
from steercap.core.spec import Point

#: Sites of the inputs and outputs of a layer's modules in transformers, by the name behind `model.layers.<layer>.`.
MODULES: Final = {
    "output": "resid_post",
    "self_attn.o_proj.input": "z",
    "mlp.down_proj.input": "neurons",
    "pre_feedforward_layernorm.output": "mlp_in",
    "post_feedforward_layernorm.output": "mlp_out",
}
_BLOCK: Final = re.compile(r"blocks\.(\d{1,4})\.(.+)")
_LAYER: Final = re.compile(r"model\.(?:language_model\.)?layers\.(\d{1,4})\.(.+)")


def point_of(name: object) -> Point | None:
    """Return the point of a hook, or of a module's input or output; None if no point has its rows."""
    if not isinstance(name, str):
        return None
    for pattern, sites in ((_BLOCK, TRANSFORMER_LENS), (_LAYER, MODULES)):
        if (found := pattern.fullmatch(name)) and found[2] in sites:
            return Point(int(found[1]), sites[found[2]])
    return None
