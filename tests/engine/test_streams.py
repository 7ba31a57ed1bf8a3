"""DeepSeek-V4's streams on CPU: with vLLM's forward for CPU, and with that for NVIDIA, fused with what mixes streams.

The tests are in `streams_on_cpu.py`. vLLM's build for CPU runs the model with Triton's interpreter and the plug-in of
`tests/deepseek_v4_on_cpu`, both of which its processes must find when they start: so they run in a process of their own.
"""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from interpreted import with_triton_on_cpu

from steercap.adapters import hardware

HERE = Path(__file__).parent

#: How many tests `streams_on_cpu.py` has at least.
TESTS = 17


@pytest.mark.timeout(900)
@pytest.mark.parametrize("forward", ["cpu", pytest.param("nvidia", marks=pytest.mark.extended)])
def test_streams_are_read_and_steered(tmp_path, record_property, forward) -> None:
    """Every test of `streams_on_cpu.py`, over one engine."""
    if reason := hardware.unfit(["DeepseekV4ForCausalLM"], {}):
        pytest.skip(reason)
    found = with_triton_on_cpu(tmp_path)
    found["PYTHONPATH"] = f"{HERE.parent / 'deepseek_v4_on_cpu'}:{found['PYTHONPATH']}"
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    done = subprocess.run(
        [*command, str(HERE / "streams_on_cpu.py")],
        env={**found, "DEEPSEEK_V4_FORWARD": forward},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    suite = next(ET.parse(report).iter("testsuite"))
    for said in suite.iter("property"):
        record_property(f"{forward}: {said.get('name')}", str(said.get("value")))
    assert int(suite.get("tests", 0)) >= TESTS
    assert suite.get("skipped") == "0"
