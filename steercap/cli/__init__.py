"""Command line `steercap`: each command parses options and calls functions of the library."""

import atexit
import contextlib
import os
import signal
import sys
import threading
from typing import Final

from steercap.core.extras import require

require("cli")  # every module here imports packages of this extra

#: Exit codes of interrupted and terminated commands.
STOPPED: Final = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def main() -> None:
    """Run the command line `steercap` with the process's arguments, then exit the process."""
    try:
        from steercap.cli.app import app

        app(prog_name="steercap")
    except KeyboardInterrupt:  # before a command had begun
        _leave(STOPPED[0])
    except SystemExit as end:
        if end.code in STOPPED:
            _leave(int(end.code))
        if not end.code and "vllm" in sys.modules:  # libraries that it loads report their own leaks, at length
            threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 -- waits for threads, as Python's own end does
            _leave(0)
        raise
    finally:
        # Interpreter shutdown takes a moment with torch loaded; a traceback from a Ctrl-C in it helps nobody.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _leave(code: int) -> None:
    """Exit the process at once: Python would first collect a million objects of torch, for a second or more."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    atexit._run_exitfuncs()  # noqa: SLF001 -- the standard library has no other name for it
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its reader has gone
            stream.flush()
    os._exit(code)
