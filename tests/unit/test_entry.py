"""vLLM's processes begin quietly, and what a user says of vLLM's log is done."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys

import pytest

from steercap.adapters.entry import CHOICES, ENGINE_CORE, STREAM, ProcessEntry, quieten
from steercap.adapters.process_exit import FOLDER

#: What a process says that comes to life as vLLM's do: it unpickles its entry, then imports vLLM and speaks.
SPEAKS = """
import logging, pickle, sys, warnings
entry = pickle.loads(bytes.fromhex(sys.argv[1]))
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging, init_logger
import vllm.triton_utils
init_logger("vllm.triton_utils.importing").warning("Triton is installed, but")
configure_logging(LoggingConfig())
logger = init_logger("vllm.steercap_test")
logger.info("an info")
logger.warning("a warning")
logger.error("an error")
warnings.warn("`torch.distributed.reduce_op` is deprecated", FutureWarning)
print("a result")
"""

#: What a process says of the garbage collector before and in its target function.
COLLECTS = """
import gc, pickle, sys
frozen = gc.get_freeze_count()  # Python 3.12 begins with some
class Target:
    run = staticmethod(lambda: print(gc.isenabled(), gc.get_freeze_count() > frozen))
entry = pickle.loads(bytes.fromhex(sys.argv[1]))
print(gc.isenabled(), gc.get_freeze_count() > frozen)
entry()
"""


#: What an engine core has recorded of an error in its loop before it says that it is dead.
RAISES = """
import os
from pathlib import Path
from steercap.adapters.entry import ENGINE_CORE, ProcessEntry
from steercap.adapters.process_exit import FOLDER, STARTUP_ERROR
def run():
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc
    for core in (EngineCoreProc, DPEngineCoreProc):
        try:
            core.run_busy_loop(object())
        except AttributeError:
            written = Path(os.environ[FOLDER], STARTUP_ERROR)
            print(written.read_text())
            written.unlink()
ProcessEntry(ENGINE_CORE, run)()
"""


def test_an_error_in_an_engine_core_s_loop_is_recorded_at_once(tmp_path) -> None:
    """Not once its workers have ended, which takes seconds: the client hears of its death before."""
    environment = os.environ | {FOLDER: str(tmp_path)}
    said = subprocess.check_output([sys.executable, "-c", RAISES], text=True, env=environment).splitlines()
    assert len(said) == 2
    assert all(line.startswith('["AttributeError", "\'object\' object has no attribute') for line in said)


def test_no_garbage_is_collected_while_a_process_imports() -> None:
    """From its entry's unpickling until its function runs, and what was imported then is never looked through."""
    entry = pickle.dumps(ProcessEntry(("__main__", "Target", "run"))).hex()
    command = [sys.executable, "-c", COLLECTS, entry]
    assert subprocess.check_output(command, text=True) == "False False\nTrue True\n"


@pytest.mark.parametrize(
    ("chosen", "log", "heard"),
    [
        ({}, True, {"a warning", "an error"}),
        ({"VLLM_LOGGING_LEVEL": "ERROR"}, False, {"an error"}),
        ({"VLLM_LOGGING_LEVEL": "INFO"}, False, {"an info", "a warning", "an error", "Triton is installed, but"}),
    ],
)
@pytest.mark.slow
def test_a_process_of_vllm_says_what_was_asked_for(monkeypatch, chosen, log, heard) -> None:
    """Results alone on stdout; on stderr warnings and errors, or what the user's level lets through."""
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    entry = pickle.dumps(ProcessEntry(ENGINE_CORE, print, log=log)).hex()
    process = subprocess.run(
        [sys.executable, "-c", SPEAKS, entry], capture_output=True, text=True, timeout=300, check=True
    )
    assert process.stdout == "a result\n"
    said = {"an info", "a warning", "an error", "Triton is installed, but", "reduce_op"}
    assert {line for line in said if line in process.stderr} == heard


def test_an_entry_that_is_forked_runs_the_function_it_was_made_with() -> None:
    """Where nothing is unpickled nothing is looked up, or the entry would find itself."""
    ran = []
    ProcessEntry(("os", "path", "join"), lambda *args, **kwargs: ran.append((args, kwargs)))(1, two=2)
    assert ran == [((1,), {"two": 2})]


def test_warnings_that_no_user_can_act_on_are_left_out(monkeypatch, caplog) -> None:
    """Those alone, of their own logger, and no error; with a level of the user's all are kept."""
    for name in (*CHOICES, STREAM):
        monkeypatch.delenv(name, raising=False)
    logger, other = logging.getLogger("vllm.config.vllm"), logging.getLogger("vllm.config.model")
    monkeypatch.setattr(logger, "filters", [])
    for one in (logger, other):
        monkeypatch.setattr(one, "propagate", True)
        one.addHandler(caplog.handler)
    before = logging.getLogger("vllm").level
    try:
        for log, kept in ((False, 4), (True, 3)):
            monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
            quieten(log=log)
            caplog.clear()
            logger.warning("Enforce eager set, disabling torch.compile")
            logger.warning("another warning of %s", "its own")
            logger.error("Enforce eager set, disabling all")
            other.warning("Enforce eager set, disabling torch.compile")
            assert len({record.getMessage() + record.name + record.levelname for record in caplog.records}) == kept
    finally:
        logging.getLogger("vllm").setLevel(before)
        for one in (logger, other):
            one.removeHandler(caplog.handler)


#: A client that ends while its start runs code in which nearly every moment is a finaliser's, as some imports do.
FINALISING = """
import threading, time
from steercap.adapters.launch import Launch

class Slow:
    def __del__(self):
        sum(range(20_000))

def importing():
    launch._thread = threading.current_thread()
    while True:
        Slow()

launch = Launch()
threading.Thread(target=importing, daemon=True).start()
time.sleep(0.2)
"""


def test_a_start_that_is_stopped_within_a_finaliser_says_nothing() -> None:
    """Python prints what a finaliser raises; a start is stopped by an exception, in whatever it does."""
    done = subprocess.run([sys.executable, "-c", FINALISING], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
