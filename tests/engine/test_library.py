"""Kernels that an engine runs: those of the library that this machine's processor has, in every process of it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil
from support.faults.base import processes

from steercap import SteerModel
from steercap.adapters import hardware

#: Set where another library than the processor's own is to be loaded, by `make test-avx2`.
WANTED = "STEERCAP_TEST_LIBRARY"


def libraries_of(process: psutil.Process) -> set[str]:
    """vLLM's libraries of kernels that a process has mapped."""
    return set(re.findall(r"/vllm/(_C(?:_\w+)?)\.", Path(f"/proc/{process.pid}/maps").read_text()))


async def test_the_engine_loads_the_library_of_this_processor(tiny: SteerModel) -> None:
    """Its worker maps that one and no other, and so does its core, wherever it maps any."""
    wanted = os.environ.get(WANTED, hardware.library())
    (core,) = processes(tiny, "EngineCore")
    found = [libraries_of(one) for one in (psutil.Process(core), *psutil.Process(core).children(recursive=True))]
    assert {wanted} in found
    assert not [one for one in found if one - {wanted}]
    assert hardware.library() == wanted
