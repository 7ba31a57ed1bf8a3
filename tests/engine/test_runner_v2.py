"""Model Runner V2 without a GPU: the tests of capture, steering and stress, with its kernels in Triton's interpreter.

vLLM takes V2 on CPU where Triton has a backend for CPU; `tests/triton_on_cpu` is one.
"""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from interpreted import with_triton_on_cpu

from steercap.cli.doctor.checks import check_runner
from steercap.cli.doctor.facts import gather

HERE = Path(__file__).parent
#: Files of tests, and how many each has at least.
FILES = {"test_capture.py": 40, "test_steering.py": 25, "test_stress.py": 10, "test_logits.py": 9}
#: vLLM's kernel of grammars does not run in Triton's interpreter; drafts are tried on CUDA (`verify_gpu.py --only bias`).
LEFT_OUT = {"test_logits.py": ["-k", "not grammar and not drafting"]}
SAYS = f"{Path(__file__).name}::test_the_doctor_names_the_runner_that_runs"


@pytest.mark.slow
async def test_the_doctor_names_the_runner_that_runs(tiny) -> None:
    """V2 where Triton has a backend for CPU, and V1 where it has none."""
    expected = "cpu" in entry_points(group="triton.backends").names
    assert tiny.engine.vllm_config.use_v2_model_runner is expected
    assert check_runner(gather(tiny.model, {})).found.startswith("V2" if expected else "V1")


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "file", [name if name == "test_capture.py" else pytest.param(name, marks=pytest.mark.extended) for name in FILES]
)
def test_what_holds_on_v1_holds_on_v2(tmp_path, record_property, file) -> None:
    """Rows, labels, samples, edits, receipts and scopes, through chunks, prefix hits and preemption, against
    transformers: every test of these files.
    """
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    done = subprocess.run(
        [*command, *(str(HERE / name) for name in (SAYS, file)), *LEFT_OUT.get(file, [])],
        env=with_triton_on_cpu(tmp_path),
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    suite = next(ET.parse(report).iter("testsuite"))
    record_property(f"{file} on V2", f"{suite.get('tests')} in {float(suite.get('time', 0)):.0f} s")
    assert int(suite.get("tests", 0)) >= FILES[file]
    assert suite.get("skipped") == "0"
