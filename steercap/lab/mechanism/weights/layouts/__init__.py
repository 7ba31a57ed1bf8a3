"""Registry of weight layouts, one file per naming scheme. To add one, add a file with a `MEMBER`.

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
    """Return the weight layout of the first known architecture.

    Raises:
        UnsupportedModel: no architecture is known; the message lists those that are.
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
