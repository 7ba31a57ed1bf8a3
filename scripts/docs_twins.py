"""For the reference: what `steercap.sync` makes of a coroutine function is shown as a function, with its arguments."""

import copy
import importlib
import inspect
import re
from typing import Any

import griffe

MAKERS = ("blocking", "calling", "iterating")


class Twins(griffe.Extension):
    """Puts a copy of the function that is awaited in the place of its twin, without what is awaited."""

    def on_package(self, *, pkg: griffe.Module, **_kwargs: Any) -> None:
        """Called when all of steercap was read."""
        if pkg.name != "steercap":
            return
        for place in (
            "sync.model.SteerModel",
            "sync.directions",
            "sync.collecting",
            "sync.evaluation",
            "sync.sweeps",
            "sync.patching",
            "sync.analysis",
            "sync.personas",
            "sync.roles",
        ):
            owner = pkg[place]
            for name, member in list(owner.members.items()):
                made = member.value if not member.is_alias and member.is_attribute else None
                if isinstance(made, griffe.ExprCall) and str(made.function) in MAKERS:
                    owner.set_member(name, twin(pkg, owner, name))
        there = pkg["model.SteerModel"].members["__init__"]
        pkg["sync.model.SteerModel"].members["__init__"].parameters = there.parameters


def twin(pkg: griffe.Module, owner: griffe.Module | griffe.Class, name: str) -> griffe.Function:
    """The function that a twin was made of, as it is called there."""
    if owner.is_class:
        found = getattr(getattr(importlib.import_module(owner.module.path), owner.name), name)
    else:
        found = getattr(importlib.import_module(owner.path), name)
    work = inspect.unwrap(found)
    there = pkg[f"{work.__module__}.{work.__qualname__}".removeprefix("steercap.")]
    here: griffe.Function = copy.copy(there)
    here.parent = owner
    here.labels = there.labels - {"async"}
    gives = re.sub(r"^Coroutine\[Any, Any, (.*)\]$", r"\1", str(there.returns))
    here.returns = re.sub(r"^AsyncGenerator\[(.*), None\]$", r"Generator[\1, None, None]", gives)
    return here
