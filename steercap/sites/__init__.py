"""WHERE: one file a site. To add one, add a file with a `MEMBER`."""

import sys

from steercap.core.registry import Registry
from steercap.sites.base import Site

SITES: Registry[Site] = Registry("site", sys.modules[__name__], Site)  # type: ignore[type-abstract]
