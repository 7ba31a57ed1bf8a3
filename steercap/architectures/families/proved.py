"""Class names and code fingerprints of decoder layers, and records of the architectures that were verified.

An architecture may be run by vLLM's own file or by transformers' modules, and the file changes between releases. The
class of the loaded layers identifies the family; the fingerprint of `forward` says if exactly this code was verified.
`scripts/prove_models.py` writes the results to `proved.json`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

#: Prefixes of the modules that define models in vLLM and transformers.
_HOMES: Final = ("vllm.model_executor.models.", "vllm.models.", "transformers.models.")
#: Fields of syntax tree nodes that do not affect the computation.
_SAID: Final = ("annotation", "returns", "type_comment", "type_params")


def name_of(layer: type) -> str:
    """Return a layer class's name as families write it, such as "llama.LlamaDecoderLayer", for both libraries."""
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
    """Return 12 hex digits of a SHA-256 of `forward`'s code without types and docstrings; "" if it has no source.

    It covers the code that runs: a `forward` set on the instance, and every function wrapped around it.

    Args:
        layer: a layer or a class of layers.
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
    """Yield a function and the functions that it wraps, outermost first."""
    inspect.unwrap(forward)  # raises ValueError if it wraps itself
    while True:
        forward = getattr(forward, "__func__", forward)
        yield forward
        if not hasattr(forward, "__wrapped__"):
            return
        forward = forward.__wrapped__


@functools.cache
def _code_of(function: Any) -> str:
    """Return a function's syntax tree as text; cached, since layers share functions."""
    if not inspect.isfunction(function):  # a callable object has the source of its class, not of its call
        raise TypeError(function)
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    return _written(tree)


def _written(node: Any) -> str:
    """Return a syntax tree as text that is equal in all Python versions that have the syntax."""
    if isinstance(node, list):
        return "[" + ",".join(map(_written, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: value for name, value in ast.iter_fields(node) if name not in _SAID and value not in (None, [])}
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    return type(node).__name__ + "(" + ",".join(f"{name}={_written(value)}" for name, value in fields.items()) + ")"


PATH: Final = Path(__file__).parent / "proved.json"


class Agreement(msgspec.Struct, frozen=True):
    """Agreement of a site's rows with transformers' rows, for the worst row.

    Args:
        cosine: minimum cosine similarity of a row.
        error: maximum error of an element, divided by the norm of transformers' row.
    """

    cosine: float
    error: float


class ProvedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Record of verifying one tiny model of an architecture.

    Args:
        name: name of the model's configuration in `testing.architectures`.
        model_type, architecture: transformers' names of the model.
        device: "cpu" or "cuda".
        vllm: version of vLLM.
        family: name of the family of the layers; "" where it was derived.
        code: fingerprint of `forward` of each class of layers, by `name_of` the class.
        dtype: dtype of the run.
        sites: names of the sites that can be read and edited.
        lens: error of the logit lens in the proof at start, relative to the standard deviation of the logits.
        rows: agreement with transformers, by site and part of the sequence; {} if they could not be compared.
        edits: maximum error after edits over all sites, by operation; {} likewise.
        refused: reason why the model cannot be served; "" if it can.
    """

    name: str
    model_type: str = ""
    architecture: str = ""
    device: str = "cpu"
    vllm: str = ""
    family: str = ""
    code: dict[str, str] = {}
    dtype: str = ""
    sites: tuple[str, ...] = ()
    lens: float = 0.0
    rows: dict[str, Agreement] = {}
    edits: dict[str, float] = {}
    refused: str = ""

    @property
    def against_transformers(self) -> bool:
        """True if captured rows were compared with transformers' rows."""
        return bool(self.rows)

    @property
    def worst(self) -> Agreement | None:
        """Minimum cosine and maximum error over all sites; None if there was no comparison."""
        if not self.rows:
            return None
        found = self.rows.values()
        return Agreement(min(record.cosine for record in found), max(record.error for record in found))


@cache
def records() -> tuple[ProvedModel, ...]:
    """Read all records of `proved.json`, once a process; () if the file does not exist."""
    return tuple(msgspec.json.decode(PATH.read_bytes(), type=list[ProvedModel])) if PATH.exists() else ()


def verified(code: Mapping[str, str]) -> bool:
    """Check if layers with exactly this code were compared with transformers; False for unknown code.

    Args:
        code: fingerprint of `forward` of each class of layers, by `name_of` the class.
    """
    known = {pair for record in records() if record.against_transformers for pair in record.code.items()}
    return bool(code) and all(code.values()) and set(code.items()) <= known


def cells_of(record: ProvedModel) -> tuple[str, ...]:
    """Return the cells of a record as text, one for each column of `TITLES`."""
    if record.refused:
        said = ("refused", "", "", "", "")
    else:
        worst = record.worst
        rows = f"{worst.error:.0e}" if worst else "lens alone"
        edits = f"{max(record.edits.values()):.0e}" if record.edits else ""
        said = (record.family or "derived", ", ".join(record.sites), rows, edits, f"{record.lens:.0e}")
    where = f"{record.vllm} {record.device}".strip()
    return (record.architecture or record.name, ", ".join(record.code), *said, record.dtype, where)


TITLES: Final = ("architecture", "layers", "family", "sites", "rows", "edits", "lens", "dtype", "vLLM")


def markdown(models: Sequence[ProvedModel]) -> str:
    """Format records as Markdown tables: models that can be served, then the others with the reason."""
    served, refused = _parted(models)
    lines = ["| " + " | ".join(TITLES) + " |", "|" + "---|" * len(TITLES)]
    lines += ["| " + " | ".join(cells_of(one)) + " |" for one in served]
    if refused:
        lines += ["", "| architecture | configuration | refused or not proved, and why |", "|---|---|---|"]
    lines += [f"| {one.architecture or one.model_type} | {one.name} | {_in_a_cell(one.refused)} |" for one in refused]
    return "\n".join(lines) + "\n"


def _parted(models: Iterable[ProvedModel]) -> tuple[list[ProvedModel], list[ProvedModel]]:
    ordered = sorted(models, key=lambda model: (model.architecture.lower(), model.name, model.device))
    return [model for model in ordered if not model.refused], [model for model in ordered if model.refused]


def _in_a_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:300]
