"""Names of a package that load their modules when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from importlib.util import find_spec

_ALWAYS = {"__doc__", "__file__", "__name__", "__path__", "__version__"}


def lazy_names(
    package: str, homes: Mapping[str, str], packages: Collection[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package.

    Args:
        package: its name.
        homes: module within the package that defines a name, by name.
        packages: modules within the package that are names of it themselves.
    """

    def load(name: str) -> object:
        if name in packages:
            return import_module(f"{package}.{name}")
        if name in homes:
            return getattr(import_module(f"{package}.{homes[name]}"), name)
        inner = not name.startswith("_") and find_spec(f"{package}.{name}") is not None
        hint = f" before it is imported; write import {package}.{name}" if inner else ""
        raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}", name=name, obj=sys.modules[package])

    def names() -> list[str]:
        """Return the names for completion, including those that are not loaded yet."""
        return sorted({*homes, *packages, *(_ALWAYS & vars(sys.modules[package]).keys())})

    return load, names
