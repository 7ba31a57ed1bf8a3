"""WHAT: one file per model family. To add one, add a file with a `MEMBER`."""

import sys
from collections.abc import Iterable

from steercap.core.registry import Registry
from steercap.errors import UnsupportedModel
from steercap.families.base import Family

FAMILIES: Registry[Family] = Registry("family", sys.modules[__name__], Family)


def family_of(architectures: Iterable[str]) -> Family:
    """The family that serves the first known of `architectures`.

    Raises:
        UnsupportedModel: none is known; the message lists those that are.
    """
    asked = tuple(architectures)
    for architecture in asked:
        for family in FAMILIES.values():
            if architecture in family.architectures:
                return family
    known = sorted(name for family in FAMILIES.values() for name in family.architectures)
    raise UnsupportedModel(
        f"steercap does not know the layers of {', '.join(asked) or 'a model without architectures'}; "
        f"known: {', '.join(known)}. A family is one file in steercap/families."
    )
