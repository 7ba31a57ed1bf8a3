"""A test that never ends says where it stands, and ends the run; a failure is shown when it happens.

The engines' tests share one event loop. What pytest-timeout throws into it from a signal may reach any task, and what
the test waited for stays in the loop of all tests that follow. And a run that is killed never comes to its summary.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import sys
import threading
from typing import Any

import pytest

_TIMERS: dict[str, threading.Timer] = {}


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """A test begins: watch it, if it runs in the event loop (a hook of pytest-timeout's, which watches the others)."""
    if not item.get_closest_marker("asyncio"):
        return None
    timer = _TIMERS[item.nodeid] = threading.Timer(settings.timeout, _give_up, (item, settings.timeout))
    timer.daemon = True
    timer.start()
    return True


def pytest_timeout_cancel_timer(item: pytest.Item) -> bool | None:
    """It has ended (a hook of pytest-timeout's)."""
    if timer := _TIMERS.pop(item.nodeid, None):
        timer.cancel()
        return True
    return None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once why a test failed."""
    if report.failed:
        sys.stdout.write(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext}\n")
        sys.stdout.flush()


def _give_up(item: pytest.Item, seconds: float) -> None:
    """Show every task of asyncio and every thread, and end the process; engines end with it."""
    if capture := item.config.pluginmanager.getplugin("capturemanager"):
        capture.suspend_global_capture(in_=True)
    for task in gc.get_objects():
        if isinstance(task, asyncio.Task) and not task.done():
            task.print_stack(file=sys.__stderr__)
    faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
    print(
        f"\n{item.nodeid} has not ended after {seconds:.0f} s: this process ends here.", file=sys.__stderr__, flush=True
    )
    os._exit(1)
