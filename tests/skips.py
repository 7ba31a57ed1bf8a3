"""Holds a run to the list of skips that are expected on this kind of machine, in `skips.toml`: any other is a failure.

It is a plug-in of pytest's, which works in the process that runs a test: under xdist in its workers.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final, TypeVar

import ceph
import machines
import pytest
import torch
from support.faults import FAULTS
from support.faults.base import for_root, for_two_workers

from steercap.adapters import hardware

HERE: Final = Path(__file__).parent
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


@dataclass(frozen=True)
class Skip:
    """An entry of `skips.toml`, whose head says what each of these is."""

    tests: Sequence[str]
    where: Sequence[str]
    instead: Sequence[str]
    sometimes: bool = False


SKIPS: Final = tuple(Skip(**entry) for entry in tomllib.loads((HERE / "skips.toml").read_text())["skip"])


def _no_mounts() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode != 0


#: Kinds of machines by their names, and whether this is one of them.
KINDS: Final[Mapping[str, Callable[[], bool]]] = {
    "any": lambda: True,
    "vLLM for GPUs": lambda: not hardware.library(),
    "vLLM for CPU": lambda: bool(hardware.library()),
    "AVX2 alone": lambda: hardware.library() == hardware.AVX2,
    "no AVX-512 with BF16": lambda: bool(hardware.unfit(["DeepseekV4ForCausalLM"], {})),
    "no GPU": lambda: not torch.cuda.is_available(),
    "one core": lambda: bool(for_two_workers()),
    "not root": lambda: bool(for_root()),
    "no mounts": _no_mounts,
    "no namespaces": lambda: not machines.can_be_had(),
    "no Ceph": lambda: not ceph.can_be_had(),
}


@functools.cache
def here(kind: str) -> bool:
    """Whether this machine is of a kind.

    Raises:
        KeyError: no such kind.
    """
    if kind in KINDS:
        return KINDS[kind]()
    what, _, name = kind.removeprefix("no ").partition(" ")
    there = {
        "module": lambda: find_spec(name) is not None,
        "program": lambda: any(map(shutil.which, name.split(" or "))),
        "fault": lambda: not FAULTS[name].missing(),
    }[what]()
    return there != kind.startswith("no ")


def of(test: str) -> list[Skip]:
    """The entries that a test within tests/ is in, on any machine."""
    return [skip for skip in SKIPS if any(re.fullmatch(pattern, test) for pattern in skip.tests)]


def wrong(test: str, *, skipped: bool) -> str:
    """What is wrong with a test that was skipped, or was not, on this machine; "" if that was to be expected."""
    expected = [skip for skip in of(test) if any(map(here, skip.where))]
    if skipped and not expected:
        known = sorted({kind for skip in of(test) for kind in skip.where})
        where = f"it is expected to be skipped where there is {' or '.join(known)}" if known else "it is in no entry"
        return f"skipped on a machine where tests/skips.toml does not expect it ({where})"
    if not skipped and any(not skip.sometimes for skip in expected):
        return f"ran on a machine where tests/skips.toml says that it is skipped ({', '.join(expected[0].where)})"
    return ""


def _held(report: Report, *, skipped: bool) -> Report:
    if not hasattr(report, "wasxfail") and (says := wrong(report.nodeid.removeprefix("tests/"), skipped=skipped)):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        report.outcome, report.longrepr = "failed", f"{report.nodeid} was {says}: {reason}".replace("was ran", "ran")
    return report


#: Tests of a run that their marks skip here and no entry expects, whether selected or not: `test_skips.py` fails on them.
UNEXPECTED: Final = pytest.StashKey[list[str]]()


def unexpected(items: Iterable[pytest.Item]) -> list[str]:
    """The tests that their marks skip here and that no entry expects, each with what is wrong with that."""
    return [
        f"{item.nodeid} is {says}"
        for item in items
        if any(any(mark.args) for mark in item.iter_markers("skipif"))
        and (says := wrong(item.nodeid.removeprefix("tests/"), skipped=True))
    ]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skip that nobody expects is a failure, and so is a test that runs and is listed."""
    report = yield
    if report.skipped or (report.when == "call" and report.passed):
        return _held(report, skipped=report.skipped)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same of a file that is skipped as a whole."""
    report = yield
    return _held(report, skipped=True) if report.skipped else report
