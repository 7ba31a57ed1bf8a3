"""The code that a layer computes with: what it is called, and a fingerprint that a change of it changes.

The same architecture moves between vLLM's own file and transformers' modules, and its file changes between releases. A
family is known by the class of the layers that were loaded, and how well it is known by the code of their `forward`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

#: Where vLLM and transformers keep their models.
_HOMES: Final = ("vllm.model_executor.models.", "vllm.models.", "transformers.models.")
#: What does not change what is computed.
_SAID: Final = ("annotation", "returns", "type_comment", "type_params")


def name_of(layer: type) -> str:
    """What a family calls a class: "llama.LlamaDecoderLayer", in vLLM and in transformers."""
    module = layer.__module__
    for home in _HOMES:
        if module.startswith(home):
            module = module.removeprefix(home)
            break
    first, _, last = module.rpartition(".")
    return f"{first if last.startswith('modeling_') else module}.{layer.__qualname__}"


def is_transformers(layer: type) -> bool:
    """Whether a class is transformers' own."""
    return layer.__module__.startswith("transformers.")


def fingerprint_of(layer: Any) -> str:
    """12 hexadecimal digits of the syntax tree of `forward`, without types and docstrings; "" if unknown.

    It is of what runs: of a `forward` that was put in place of the class's own, and of every function around it.

    Args:
        layer: a layer, which may have a `forward` of its own, or a class of layers.
    """
    try:
        written = [_code_of(function) for function in _around(layer.forward)]
    except (AttributeError, OSError, TypeError, ValueError, SyntaxError):
        return ""
    return hashlib.sha256("".join(written).encode()).hexdigest()[:12]


def same_code(each: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The fingerprint of each class, "" of one whose layers do not all run the same code.

    Args:
        each: of some layers, fingerprints by class.
    """
    found: dict[str, str] = {}
    for layers in each:
        for name, digest in layers.items():
            found[name] = digest if found.get(name, digest) == digest else ""
    return dict(sorted(found.items()))


def _around(forward: Any) -> Iterator[Any]:
    """A function, and those that it wraps, outermost first."""
    inspect.unwrap(forward)  # raises ValueError if it wraps itself
    while True:
        forward = getattr(forward, "__func__", forward)
        yield forward
        if not hasattr(forward, "__wrapped__"):
            return
        forward = forward.__wrapped__


@functools.cache
def _code_of(function: Any) -> str:
    """Read once: a model's layers have it in common."""
    if not inspect.isfunction(function):  # of a class or module that is called there is a source, and not of the call
        raise TypeError(function)
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    return _written(tree)


def _written(node: Any) -> str:
    """A syntax tree as text that is the same in every version of Python that has the syntax."""
    if isinstance(node, list):
        return "[" + ",".join(map(_written, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: value for name, value in ast.iter_fields(node) if name not in _SAID and value not in (None, [])}
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    return type(node).__name__ + "(" + ",".join(f"{name}={_written(value)}" for name, value in fields.items()) + ")"
