"""A release of vLLM that lacks something is refused with its name, whichever process it is missed in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from steercap.adapters import releases
from steercap.testing import tiny_checkpoint

#: A plugin of vLLM's, which it loads in each of its processes: from then on the release lacks a method.
LACKING = """
from steercap.adapters import releases

def load():
    releases.NEEDS[{kind!r}] += ("no_such_method",)
"""
SCRIPT = """
import asyncio, sys
from steercap import SteerModel, errors

async def main():
    try:
        async with SteerModel(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=8 << 20):
            print("started")
    except errors.UnsupportedRunner as error:
        print(error)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("kind", [pytest.param("Model Runner V1", marks=pytest.mark.extended), "VllmConfig"])
def test_what_a_release_lacks_is_named_by_the_start(kind, tmp_path) -> None:
    """In the worker, whose own log nobody need read for it, and in the client."""
    (tmp_path / "lacking.py").write_text(LACKING.format(kind=kind))
    told = tmp_path / "lacking-0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: lacking\nVersion: 0\n")
    (told / "entry_points.txt").write_text("[vllm.general_plugins]\nlacking = lacking:load\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    paths = [str(tmp_path), str(Path(__file__).parent.parent.parent), *os.environ.get("PYTHONPATH", "").split(":")]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tiny_checkpoint("qwen3"))],
        env={**os.environ, "PYTHONPATH": ":".join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"in vLLM {releases.installed()}, {kind} lacks no_such_method; steercap was tested" in done.stdout
