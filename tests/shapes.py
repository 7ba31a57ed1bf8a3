"""Shapes in signatures are checked by the tests: a wrong annotation, and a tensor of another shape, are errors.

jaxtyping's import hook rewrites modules as they are imported, so it is installed before any of them is, by importing this one. What
vLLM's workers run, in processes of their own, is not checked: the same modules are, in the tests of one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any, Final, get_args

import torch
from beartype import beartype
from beartype.vale import Is
from jaxtyping import AbstractArray, install_import_hook

#: Modules whose every function and dataclass is checked, with the packages within them.
CHECKED: Final = (
    "steercap.lab.mechanism.analysis",
    "steercap.lab.mechanism.comparison",
    "steercap.lab.datasets",
    "steercap.steering.edits",
    "steercap.captures.lens",
    "steercap.kernels.bits",
    "steercap.kernels.reference",
    "steercap.lab.mechanism.patching",
    "steercap.captures.quantisation",
    "steercap.kernels.attention",
    "steercap.captures.experts",
    "steercap.captures.lens",
    "steercap.captures.sketch",
    "steercap.lab.personas.roles",
    "steercap.saes",
    "steercap.kernels.sketches",
    "support.quantised",
    "steercap.lab.training",
    "steercap.steering.calibration",
    "steercap.lab.directions.extraction",
    "steercap.steering.formats.persona_files",
    "steercap.steering.layers",
    "steercap.lab.directions.methods",
    "steercap.lab.mechanism.views",
    "steercap.lab.mechanism.weights",
    "steercap.worker.arena",
    "steercap.worker.biasing",
    "steercap.worker.reduce",
    "steercap.worker.programs",
    "steercap.worker.taps",
)


#: What is not a tensor has no shape: whether it may be given is said by the function, in errors of its own.
NoTensor: Final = Annotated[object, Is[lambda value: not isinstance(value, torch.Tensor)]]


def shapes_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check what a signature says of tensors. The rest is mypy's: protocols and types that are not imported at run time."""
    said = function.__annotations__
    function.__annotations__ = {name: hint | NoTensor for name, hint in said.items() if _names_a_shape(hint)}
    return beartype(function) if function.__annotations__ else function


def _names_a_shape(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(map(_names_a_shape, get_args(hint)))


# Once, however often `conftest` is imported: by pytest, and by the tests that take something from it.
assert not set(CHECKED) & set(sys.modules), "what is imported already is not checked"
install_import_hook(list(CHECKED), "shapes.shapes_alone")
