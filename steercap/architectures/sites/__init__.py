"""Registry of sites: files with a `MEMBER`, or tables of sites that share code. Paths of modules are sites too.

`model.layers.*.mlp.down_proj.input` is one in every layer, `model.norm.output` one of the model. The shape of their
rows is observed in a pass before taps are installed, see `adapters.observing`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from steercap.architectures.sites.base import Act, RowShape, Site, Sizes, Tap, Visit, of_input, of_output, tapping
from steercap.core.names import EVERY, is_module
from steercap.core.registry import Registry
from steercap.core.spec import Point

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from steercap.architectures.families.base import Family


class ModuleSite(Site):
    """Tap on a copy of a module's input or output; edits affect only the module, or only those who read its output.

    Args:
        name: path of the module, with a `*` for the layer if it is in one, then ".input" or ".output".
    """

    #: The role of the module is unknown, so its keys and values may depend on it.
    before_keys: ClassVar[bool] = True

    def __init__(self, name: str) -> None:
        whole, _, self.end = name.rpartition(".")
        before, _, behind = whole.partition(f".{EVERY}.")
        #: Path of the list of layers, "" for a module that is in none.
        self.layers = before if behind else ""
        #: Path of the module, in a layer or in the model.
        self.path = behind or whole
        self.of_model = None if behind else -1
        self.within = "layer" if behind else "model"

    @classmethod
    @cache
    def named(cls, name: str) -> ModuleSite:
        """Return the site of a name."""
        return cls(name)

    def known(self, family: Family) -> bool:
        return True

    def rows(self, layer: nn.Module, family: Family, sizes: Sizes) -> RowShape:
        return sizes.observed(layer.get_submodule(self.path), self.end)

    def attach(self, layer: nn.Module, family: Family, tap: Tap) -> RemovableHandle:
        return self._hooked(layer, tapping(layer.get_submodule(self.path), self.end, tap))

    def visit(self, layer: nn.Module, family: Family, visit: Visit) -> RemovableHandle:
        return self._hooked(layer, lambda _, rows: visit(rows))

    def _hooked(self, layer: nn.Module, act: Act) -> RemovableHandle:
        module = layer.get_submodule(self.path)
        if self.end == "input":
            return module.register_forward_pre_hook(of_input(module, act), with_kwargs=True)
        return module.register_forward_hook(of_output(act))


class Sites(Registry[Site]):
    """Sites by name. Paths of modules are looked up too (see `ModuleSite`), but not listed."""

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
