"""The end of a process of an engine is seen at once, whoever its parent is, and said as it was."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steercap.adapters import process_exit as death
from steercap.adapters.process_exit import FOLDER, recorded_error


def _until(condition) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + 20
        time.sleep(0.002)
    return time.monotonic() - began


def _sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"])


def _place_of(pid: int) -> str:
    return f"{death.place().rpartition(' ')[0]} {pid}"


def test_a_process_that_ends_is_seen_and_one_of_another_machine_is_not_looked_for(tmp_path) -> None:
    """By its number here; a number of elsewhere may be anybody's."""
    process = _sleeper()
    processes, others = death.Processes(tmp_path), death.Processes(tmp_path)
    processes.watch([_place_of(process.pid), _place_of(process.pid)])
    others.watch([f"another-boot pid:[1] {process.pid}", ""])
    assert not processes.ended()
    process.kill()
    _until(processes.ended)
    process.wait()
    assert processes.first_exit_message == f"its process {process.pid} has ended"
    assert not processes.exit_message({})
    assert not others.ended()
    assert not others.first_exit_message
    for one in (processes, others):
        one.close()
        one.close()


class Executor:
    """What vLLM's executor is to `record_exit_codes`."""

    def __init__(self, workers) -> None:
        self.workers = workers
        self.is_failed = False
        self.ended = False

    def shutdown(self) -> None:
        self.ended = True


class Handle:
    def __init__(self, proc) -> None:
        self.proc = proc


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, None])
def test_word_is_left_of_how_a_worker_ended(number, tmp_path, monkeypatch) -> None:
    """Of the one that ended before it should, with its signal or exit code; of an end in order there is none."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    context = multiprocessing.get_context("fork")
    ends, lives = (
        context.Process(target=time.sleep, args=(100,), name="A"),
        context.Process(target=time.sleep, args=(100,)),
    )
    if number is None:
        ends = context.Process(target=os._exit, args=(3,), name="A")
    for process in (lives, ends):  # the start of another one reaps a child that has ended
        process.start()
    kind = type("Executor", (Executor,), {})
    death.record_exit_codes(kind)
    executor = kind([Handle(ends), Handle(lives)])
    executor.shutdown()
    assert executor.ended
    assert not [*tmp_path.iterdir()]
    processes = death.Processes(tmp_path)
    processes.watch([_place_of(ends.pid)])
    if number is not None:
        os.kill(ends.pid, number)
    _until(lambda: not Path(f"/proc/{ends.pid}").exists() or ends.exitcode is not None)
    executor.is_failed = True
    executor.shutdown()
    assert processes.ended()
    said = "ended with exit code 3" if number is None else f"was killed by {number.name}"
    assert processes.exit_message({"EngineCore": 1}).startswith(f"A (process {ends.pid}) {said}")
    processes.close()
    lives.kill()
    lives.join()
    ends.join()


def test_an_engine_core_that_ends_says_why(tmp_path, monkeypatch) -> None:
    """By its exit code; if it raised an error, by that."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    processes = death.Processes(tmp_path)
    assert processes.exit_message({"EngineCore_DP0": -9}).startswith("EngineCore_DP0 was killed by SIGKILL (")
    assert processes.exit_message({"EngineCore_DP0": 1}) == "EngineCore_DP0 ended with exit code 1"
    assert processes.exit_message({"EngineCore_DP0": -34}) == "EngineCore_DP0 was killed by SIGRTMIN"
    with pytest.raises(KeyError), recorded_error():
        raise KeyError("x")
    assert processes.exit_message({"EngineCore_DP0": 1}) == "EngineCore_DP0 ended with KeyError: 'x'"


def test_an_engine_core_without_its_worker_does_not_say_why(tmp_path, monkeypatch) -> None:
    """The worker's exit code does, which is written a moment after the engine core's error."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    processes = death.Processes(tmp_path)
    with pytest.raises(RuntimeError), recorded_error():
        raise RuntimeError("Executor failed.")
    assert processes.exit_message({}) == ""
    (tmp_path / "ended.json").write_text('[["Worker", 7, -9]]')
    assert processes.exit_message({}).startswith("Worker (process 7) was killed by SIGKILL")
