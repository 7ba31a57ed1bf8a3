"""Check that vLLM's processes can import the main script again without starting an engine.

Without `if __name__ == "__main__":` each process would start an engine while it is being imported; Python stops that
with an error about freeze_support. The error here names the remedy, before any process is started.
"""

from __future__ import annotations

import ast
import inspect
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from steercap.core.protocols import AWAITED, CallStyle
from steercap.errors import MainGuardMissing

_ADVICE = "put the code that starts the engine behind the usual guard:\n"


def require_main_guard(call_style: CallStyle = AWAITED) -> None:
    """Check that a child process may import the running script again.

    Args:
        call_style: async or sync style of the script, whose example the error message shows.

    Raises:
        MainGuardMissing: the engine is being started at the top level of the main script, or in a child process that is
            importing it.
    """
    advice = _ADVICE + call_style.script
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        raise MainGuardMissing(f"this process was started by vLLM and is only importing the script; {advice}")
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None:  # a notebook or an interactive session: there is nothing to import again
        return
    for frame in _frames():
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            if frame.f_code.co_filename == script and not _is_guarded(Path(script), frame.f_lineno):
                raise MainGuardMissing(f"{script}, line {frame.f_lineno}, starts an engine at its top level; {advice}")
            return


def _frames() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        if frame.f_back is None:
            return
        frame = frame.f_back


def _is_guarded(script: Path, line: int) -> bool:
    try:
        tree = ast.parse(script.read_text())
    except (OSError, SyntaxError, UnicodeDecodeError):  # frozen or generated: Python's own check remains
        return True
    return any(
        isinstance(node, ast.If)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
        and "__name__" in ast.dump(node.test)
        for node in tree.body
    )
