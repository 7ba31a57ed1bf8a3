"""Placeholders of torchvision, in a process of its own each."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")

IMPORTS = """
import importlib, importlib.util, sys
from steercap.adapters.torchvision import hook_imports
hook_imports()
hook_imports()
videos = importlib.import_module("transformers.models.qwen2_vl.video_processing_qwen2_vl")
from transformers.utils import is_torchvision_available
assert importlib.util.find_spec("torchvision") is None and "torchvision" not in sys.modules
assert not is_torchvision_available()
try:
    import torchvision
except ModuleNotFoundError:
    print("absent here")
assert videos.tvF.resize is videos.tvF.resize
assert isinstance(videos.tvF.InterpolationMode, type) and not isinstance(1, videos.tvF.InterpolationMode)
class Cropped(videos.tvF.Crop): pass
for used in (videos.tvF.resize, videos.tvF.InterpolationMode.BICUBIC, Cropped):
    try:
        used(1, size=2)
    except ModuleNotFoundError as error:
        print(error)
"""
INSPECTS = """
import sys
from vllm.model_executor.models import registry
from steercap.adapters.torchvision import hook
hook()
hook()
name = "vllm.model_executor.models.openpangu_vl"
child = "import sys; sys.modules['steercap'] = None; from vllm.model_executor.models.registry import _run; _run()"
registry._SUBPROCESS_COMMAND = [sys.executable, "-c", child]
print(registry._run_in_subprocess(lambda: __import__("importlib").import_module(name).v2.Resize.__qualname__))
"""


def said(code: str) -> list[str]:
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    return ran.stdout.splitlines()


def test_placeholders_are_for_those_alone_that_do_without() -> None:
    """transformers' and vLLM's modules import them and say what is missing when they are used; nobody else finds any."""
    assert said(IMPORTS) == [
        "absent here",
        *(
            f"torchvision is not installed, and torchvision.transforms.v2.functional.{name} is needed for pictures or "
            "videos; text alone is served"
            for name in ("resize", "InterpolationMode.BICUBIC", "Crop")
        ),
    ]


def test_a_process_that_inspects_a_model_has_placeholders() -> None:
    """vLLM imports the model's file in a fresh process first, which may not find steercap."""
    assert said(INSPECTS) == ["torchvision.transforms.v2.Resize"]
