"""WHERE: one file a site. To add one, add a file with a `MEMBER`."""

import sys
from collections.abc import Iterable

from steercap.core.registry import Registry
from steercap.core.spec import Point
from steercap.sites.base import Site

SITES: Registry[Site] = Registry("site", sys.modules[__name__], Site)  # type: ignore[type-abstract]


def placed(points: Iterable[Point], num_layers: int) -> tuple[Point, ...]:
    """Points as engines number them: a site that the model has one of is at one layer, whichever was asked for.

    Raises:
        UnknownName: a site that does not exist.
    """
    at = (Point(SITES[point.site].placed(point.layer, num_layers), point.site) for point in points)
    return tuple(dict.fromkeys(at))
