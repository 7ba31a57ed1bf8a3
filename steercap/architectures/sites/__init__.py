"""Registry of sites: files with a `MEMBER`, or tables of sites that share code. Paths of modules are sites too."""

import sys
from collections.abc import Iterable

from steercap.architectures.sites.base import Site
from steercap.architectures.sites.modules import ModuleSite
from steercap.core.names import is_module
from steercap.core.registry import Registry
from steercap.core.spec import Point


class Sites(Registry[Site]):
    """Sites by name. Paths of modules are looked up too (see `modules`), but not listed."""

    def __getitem__(self, name: str) -> Site:
        if isinstance(name, str) and is_module(name):
            return ModuleSite.named(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and is_module(name))


SITES = Sites("site", sys.modules[__name__], Site)


def placed(points: Iterable[Point], num_layers: int) -> tuple[Point, ...]:
    """Return points as engines number them: a site that exists once in a model gets its one layer, whatever was given.

    Raises:
        UnknownName: a site that does not exist.
    """
    at = (Point(SITES[point.site].placed(point.layer, num_layers), point.site) for point in points)
    return tuple(dict.fromkeys(at))
