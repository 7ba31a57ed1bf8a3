"""Registry of sites, the kinds of places where rows are captured and edited; module paths are sites too.

Sites are files with a `MEMBER`, or tables `MEMBERS`. The module path `model.layers.*.mlp.down_proj.input` is a site of
every layer, `model.norm.output` of the model; `adapters.observing` observes the shape of their rows in a pass.
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
    """Site at the input or output of any module, tapped on a copy: input edits reach that module alone.

    Args:
        name: path of the module, with `*` for the layer index if it is in a layer, then ".input" or ".output".
    """

    #: True, since keys and values of the module's own layer may depend on it.
    before_keys: ClassVar[bool] = True

    def __init__(self, name: str) -> None:
        whole, _, self.end = name.rpartition(".")
        before, _, behind = whole.partition(f".{EVERY}.")
        #: Path of the list of layers, "" for a module that is in no layer.
        self.layers = before if behind else ""
        #: Path of the module within a layer, or within the model.
        self.path = behind or whole
        self.of_model = None if behind else -1
        self.within = "layer" if behind else "model"

    @classmethod
    @cache
    def named(cls, name: str) -> ModuleSite:
        """Return the site for a module path with ".input" or ".output"; cached."""
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
    """Registry of sites by name; module paths are valid keys too (see `ModuleSite`), but are not iterated over."""

    def __getitem__(self, name: str) -> Site:
        if isinstance(name, str) and is_module(name):
            return ModuleSite.named(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and is_module(name))


SITES = Sites("site", sys.modules[__name__], Site)


def placed(points: Iterable[Point], num_layers: int) -> tuple[Point, ...]:
    """Return points without duplicates; those of a site that exists once in a model get that site's layer index.

    Raises:
        UnknownName: a site does not exist.
    """
    at = (Point(SITES[point.site].placed(point.layer, num_layers), point.site) for point in points)
    return tuple(dict.fromkeys(at))
