"""Names and fingerprints of the code that computes a layer.

The same architecture moves between vLLM's own file and transformers' modules, and its file changes between releases.
The class of the loaded layers identifies the family; the fingerprint of their `forward` says if just this code was
verified.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

#: Packages of the models in vLLM and transformers.
_HOMES: Final = ("vllm.model_executor.models.", "vllm.models.", "transformers.models.")
#: Fields of syntax trees that do not affect the computation.
_SAID: Final = ("annotation", "returns", "type_comment", "type_params")


def name_of(layer: type) -> str:
    """Return the name of a class in families: "llama.LlamaDecoderLayer", both in vLLM and in transformers."""
    module = layer.__module__
    for home in _HOMES:
        if module.startswith(home):
            module = module.removeprefix(home)
            break
    first, _, last = module.rpartition(".")
    return f"{first if last.startswith('modeling_') else module}.{layer.__qualname__}"


def is_transformers(layer: type) -> bool:
    """Check if a class is transformers' own."""
    return layer.__module__.startswith("transformers.")


def fingerprint_of(layer: Any) -> str:
    """Return 12 hexadecimal digits that identify the code of `forward`, without types and docstrings; "" if unknown.

    It covers the code that runs: a `forward` that replaces the class's own, and every function wrapped around it.

    Args:
        layer: a layer, which may have a `forward` of its own, or a class of layers.
    """
    try:
        written = [_code_of(function) for function in _around(layer.forward)]
    except (AttributeError, OSError, TypeError, ValueError, SyntaxError):
        return ""
    return hashlib.sha256("".join(written).encode()).hexdigest()[:12]


def same_code(each: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Merge fingerprints by class; "" for a class whose layers do not all run the same code.

    Args:
        each: fingerprints by class, for each layer or group of layers.
    """
    found: dict[str, str] = {}
    for layers in each:
        for name, digest in layers.items():
            found[name] = digest if found.get(name, digest) == digest else ""
    return dict(sorted(found.items()))


def _around(forward: Any) -> Iterator[Any]:
    """Yield a function and those that it wraps, outermost first."""
    inspect.unwrap(forward)  # raises ValueError if it wraps itself
    while True:
        forward = getattr(forward, "__func__", forward)
        yield forward
        if not hasattr(forward, "__wrapped__"):
            return
        forward = forward.__wrapped__


@functools.cache
def _code_of(function: Any) -> str:
    """Return a function's syntax tree as text; cached, since the layers of a model share it."""
    if not inspect.isfunction(function):  # a callable object has the source of its class, not of its call
        raise TypeError(function)
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    return _written(tree)


def _written(node: Any) -> str:
    """Return a syntax tree as text that is the same in every version of Python that has the syntax."""
    if isinstance(node, list):
        return "[" + ",".join(map(_written, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: value for name, value in ast.iter_fields(node) if name not in _SAID and value not in (None, [])}
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    return type(node).__name__ + "(" + ",".join(f"{name}={_written(value)}" for name, value in fields.items()) + ")"
