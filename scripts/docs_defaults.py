"""For the reference: a default that is a name, such as `Settings.capture_bytes`, is shown as its value."""

import builtins
import importlib
from typing import Any

import griffe


class Defaults(griffe.Extension):
    """Looks the value up in the module where the function is written."""

    def on_function(self, *, func: griffe.Function, **_kwargs: Any) -> None:
        """Called for every function that was read."""
        for parameter in func.parameters:
            if isinstance(parameter.default, (griffe.ExprName, griffe.ExprAttribute)):
                parameter.default = shown(value_of(str(parameter.default), func.module.path))

    def on_class_instance(self, *, cls: griffe.Class, **_kwargs: Any) -> None:
        """Called for every class as it is read; griffe knows the standard library's `dataclass` alone, by its path."""
        made = cls.module.members.get("dataclass")
        if isinstance(made, griffe.Alias) and made.target_path == "steercap.core.hints.dataclass":
            made.target_path = "dataclasses.dataclass"

    def on_class(self, *, cls: griffe.Class, **_kwargs: Any) -> None:
        """Called for every class; a dataclass has its arguments' defaults as values of its attributes."""
        if not any("dataclass" in str(decorator.value) for decorator in cls.decorators):
            return
        for attribute in cls.attributes.values():
            if isinstance(attribute.value, (griffe.ExprName, griffe.ExprAttribute)):
                attribute.value = shown(value_of(str(attribute.value), cls.module.path))


def value_of(expression: str, module: str) -> Any:
    """The value of a dotted name in a module, or of Python's own."""
    name, *rest = expression.split(".")
    names = vars(builtins) | vars(importlib.import_module(module))
    found = names[name]
    for part in rest:
        found = getattr(found, part)
    return found


def shown(value: Any) -> str:
    """A value as one would write it: powers of two by their shift, slices without what they leave out."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1 << 20 and value % (1 << 20) == 0:
        unit = 30 if value % (1 << 30) == 0 else 20
        return f"{value >> unit} << {unit}"
    if isinstance(value, slice) and value.step is None:
        return f"slice({value.start!r}, {value.stop!r})"
    return repr(value)
