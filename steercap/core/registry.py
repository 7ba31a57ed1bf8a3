"""Registry of plug-ins by name, discovered in a folder of modules or given as a table."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Generic, TypeVar

from steercap.core.values import choices, shown
from steercap.errors import UnknownName

Member = TypeVar("Member")


class Registry(Mapping[str, Member], Generic[Member]):
    """Read-only mapping from names to the members of one plug-in axis, sorted by name.

    Args:
        axis: name of the axis, for error messages, such as "site".
        source: a table of members by name; or a package, whose modules each have a global `MEMBER`, named like the
            module, or a table `MEMBERS`, by name. They are imported on first use.
        kind: type of a `MEMBER`; globals of other types are ignored.

    Raises:
        UnknownName: on look-up of an unknown name; the message lists the known ones.
    """

    def __init__(self, axis: str, source: ModuleType | Mapping[str, Member], kind: type[Any] = object) -> None:
        self._axis = axis
        self._source = source
        self._kind = kind
        self._members: dict[str, Member] | None = None

    def _loaded(self) -> dict[str, Member]:
        """Return the members by name, sorted; the first call imports them."""
        if self._members is None:
            found = self._discover(self._source) if isinstance(self._source, ModuleType) else self._source.items()
            self._members = dict(sorted(found))
        return self._members

    def _discover(self, package: ModuleType) -> Iterator[tuple[str, Member]]:
        for module in pkgutil.iter_modules(package.__path__):
            found = importlib.import_module(f"{package.__name__}.{module.name}")
            member = getattr(found, "MEMBER", None)
            if isinstance(member, self._kind):
                yield module.name, member
            yield from getattr(found, "MEMBERS", {}).items()

    def __getitem__(self, name: str) -> Member:
        members = self._loaded()
        if name not in self:
            raise UnknownName(f"unknown {self._axis} {shown(name)}; {choices(name, members)}")
        return members[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._loaded()

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded())

    def __len__(self) -> int:
        return len(self._loaded())
