"""Writes tests/door.txt: what people may rely on, the names of `steercap`, its `steering`, `captures` and `errors`, with members and signatures.

    python scripts/door.py           # after a change that CHANGELOG.md announces

A test compares the file with the library, so that nothing of it changes unannounced.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import steercap
import steercap.captures
import steercap.errors
import steercap.steering

FILE: Final = Path(__file__).parent.parent / "tests" / "door.txt"


def door() -> str:
    """List the names of `steercap` and its public packages, a line each, and under a class its members."""
    lines: list[str] = []
    for package, prefix in ((steercap, ""), (steercap.steering, "steering."), (steercap.captures, "captures.")):
        for name in sorted(package.__all__):
            public = getattr(package, name)
            lines.append(prefix + name + (_signature(public) if callable(public) else ""))
            if inspect.isclass(public):
                lines += [f"    {member}" for member in _members(public)]
    tree = [public for public in vars(steercap.errors).values() if inspect.isclass(public)]
    lines += sorted(f"errors.{error.__name__}" for error in tree if issubclass(error, steercap.errors.SteercapError))
    return "\n".join(lines) + "\n"


def _members(public: type) -> Iterator[str]:
    """The public members that steercap defines, by name: methods with their signatures, properties, fields."""
    own = [kind for kind in public.__mro__ if kind.__module__.startswith("steercap.")]
    names = {name for kind in own for name in (*vars(kind), *vars(kind).get("__annotations__", {}))}
    for name in sorted(names):
        if name.startswith("_"):
            continue
        found = inspect.getattr_static(public, name, None)
        if isinstance(found, (staticmethod, classmethod)) or inspect.isfunction(found):
            awaited = inspect.iscoroutinefunction(inspect.unwrap(getattr(public, name)))
            yield f"{'async ' * awaited}{name}{_signature(getattr(public, name))}"
        else:
            yield name


def _signature(public: Any) -> str:
    """Arguments with their kinds and defaults. Annotations are left to the type checker."""
    found = inspect.signature(public)
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in found.parameters.values()]
    said = str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r"<function (\S+) at 0x\w+>", r"\1", said)


if __name__ == "__main__":
    FILE.write_text(door())
