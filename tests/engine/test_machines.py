"""One engine over several machines, by vLLM's Ray executor: namespaces of this machine that share no memory.

The tests are in `across_machines.py`. vLLM's build for CPU has no Ray; with the plug-in of `tests/ray_on_cpu` it has,
which its processes must find when they start: so they run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
from machines import NETWORK, RAY_ENV, can_be_had, machines, ray_node

HERE = Path(__file__).parent
ADDRESS = f"{NETWORK}.1"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'steercap[ray]'"),
    pytest.mark.skipif(not can_be_had(), reason="needs root and iproute2, to make machines of namespaces"),
]


def run_across(folder: Path, workers: tuple[int, ...], test: str) -> str:
    """Run a test of `across_machines.py` with so many workers on each other machine; returns what it said."""
    paths = [str(HERE.parent / "ray_on_cpu"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, **RAY_ENV, "PYTHONPATH": os.pathsep.join(paths)}
    with ExitStack() as stack:
        others = stack.enter_context(machines(*(f"sc{number}" for number in range(len(workers)))))
        here = {**env, "VLLM_HOST_IP": ADDRESS, "RAY_ADDRESS": f"{ADDRESS}:6399"}
        head = ("--head", "--include-dashboard=false", "--port=6399", "--num-gpus=0", f"--node-ip-address={ADDRESS}")
        stack.enter_context(ray_node(folder, here, *head))
        for machine, count in zip(others, workers, strict=True):
            there = {**env, "VLLM_HOST_IP": machine.address, "GLOO_SOCKET_IFNAME": "eth0"}
            where = (f"--address={ADDRESS}:6399", f"--node-ip-address={machine.address}", f"--num-gpus={count}")
            stack.enter_context(ray_node(folder, there, *where, machine=machine))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"{HERE}/across_machines.py",
            "-k",
            test,
        ]
        done = subprocess.run(command, env=here, cwd=HERE.parent.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("workers", "test"),
    [
        pytest.param((1, 1), "rows and tensor_parallel_size", marks=pytest.mark.extended),
        pytest.param((1, 1), "rows and pipeline_parallel_size", marks=pytest.mark.extended),
        pytest.param((2,), "rows and tensor_parallel_size", marks=pytest.mark.extended),
        pytest.param((2,), "not_shared", marks=pytest.mark.extended),
        pytest.param((2,), "refuses", marks=pytest.mark.extended),
    ],
)
def test_workers_on_other_machines(tmp_path, workers, test) -> None:
    """Each test over a cluster of its own: the client's machine has no worker."""
    assert "1 passed" in run_across(tmp_path, workers, test)
