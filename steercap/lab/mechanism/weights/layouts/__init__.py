"""WHICH WEIGHTS: one file a way of naming them. To add one, add a file with a `MEMBER`.

Only dense weights that were checked against transformers' modules are here; all others are refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from steercap.core.registry import Registry
from steercap.errors import UnsupportedModel
from steercap.lab.mechanism.weights.layouts.base import Layout

LAYOUTS: Registry[Layout] = Registry("layout", sys.modules[__name__], Layout)


def layout_of(architectures: Sequence[str]) -> Layout:
    """How the first known of some architectures names its weights.

    Raises:
        UnsupportedModel: none is known; the message lists those that are.
    """
    for architecture in architectures:
        for layout in LAYOUTS.values():
            if architecture in layout.architectures:
                return layout
    known = sorted(name for layout in LAYOUTS.values() for name in layout.architectures)
    raise UnsupportedModel(
        f"the weights of {', '.join(architectures) or 'a model without architectures'} cannot be taken apart; those of "
        f"{', '.join(known)} can. A layout is one file in steercap/lab/mechanism/weights/layouts."
    )
