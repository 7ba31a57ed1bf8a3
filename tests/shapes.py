"""Shapes in signatures are checked by the tests: a wrong annotation, and a tensor of another shape, are errors.

jaxtyping's import hook rewrites modules as they are imported, so it is installed before any of them is. What vLLM's
workers run, in processes of their own, is not checked: the same modules are, in the tests of one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, get_args

from beartype import beartype
from jaxtyping import AbstractArray, install_import_hook

#: Modules whose every function and dataclass is checked, with the packages within them.
CHECKED: Final = (
    "steercap.edits",
    "steercap.kernels.finite",
    "steercap.kernels.reference",
    "steercap.vectors",
    "steercap.views",
    "steercap.worker.arena",
    "steercap.worker.reduce",
    "steercap.worker.taps.base",
    "steercap.worker.taps.host",
)


def checked(modules: tuple[str, ...]) -> Any:
    """Install the hook for these modules."""
    assert not set(modules) & set(sys.modules), "what is imported already is not checked"
    return install_import_hook(list(modules), "shapes.shapes_alone")


def shapes_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check what a signature says of tensors. The rest is mypy's: protocols and types that are not imported at run time."""
    said = function.__annotations__
    function.__annotations__ = {name: hint for name, hint in said.items() if _names_a_shape(hint)}
    return beartype(function) if function.__annotations__ else function


def _names_a_shape(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(map(_names_a_shape, get_args(hint)))
