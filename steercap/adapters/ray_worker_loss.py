"""Termination of the engine core when a Ray worker dies.

vLLM's monitor of such workers notices within seconds, but the core may be waiting for that worker's answer on a socket,
and would wait for VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS: 5 minutes, in which requests hang. It relies on this: the monitor
sets `is_failed` before it calls `RayExecutorV2.shutdown`. It can go when waiting for answers ends with the executor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, Final

#: Seconds after which a core that has not ended by itself is killed.
GRACE: Final = 2.0


def hook_executor() -> None:
    """Hook the executor of this process, an engine core; safe to call again."""
    with contextlib.suppress(ImportError):  # where Ray's workers answer through Ray, it notices
        from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

        from steercap.adapters.hooks import wrap

        wrap(RayExecutorV2, "shutdown", _shut_down)


def _shut_down(original: Callable[[], Any], executor: Any, *_args: Any, **_options: Any) -> Any:
    if getattr(executor, "is_failed", False):
        end = threading.Timer(GRACE, os.kill, (os.getpid(), signal.SIGKILL))
        end.daemon = True
        end.start()
    return original()
