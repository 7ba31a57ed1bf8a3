"""Event loop in a thread of its own, for blocking callers."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from steercap.errors import ModelClosed, WrongEventLoop

Value = TypeVar("Value")

#: Seconds that `stop` waits for running tasks to clean up.
STOP_SECONDS: Final = 3.0


class LoopThread:
    """Event loop in a daemon thread, running until it is stopped or the interpreter ends."""

    def __init__(self) -> None:
        self.loop: Final = asyncio.new_event_loop()
        self._open = True
        self._entering: Final = threading.Lock()
        self._process: Final = os.getpid()
        self._thread: Final = threading.Thread(target=self._serve, name="steercap-sync", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # or it would still run during the interpreter's shutdown

    def run(self, work: Coroutine[Any, Any, Value]) -> Value:
        """Run a coroutine to its end, from any other thread; an interrupt cancels it.

        Raises:
            ModelClosed: the loop was stopped, before or during the call.
            WrongEventLoop: called from within the loop, or in a fork of the process.
        """
        try:
            self._require_elsewhere()
            with self._entering:  # so that `stop` sees everything that was begun
                self._require_open()
                future = asyncio.run_coroutine_threadsafe(work, self.loop)
        except BaseException:
            work.close()
            raise
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise ModelClosed("the model was closed while this call ran") from None
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel running tasks, end the loop and its thread; from any other thread. Idempotent."""
        with self._entering:
            first, self._open = self._open, False
        atexit.unregister(self.stop)
        if os.getpid() != self._process:
            return
        if first:  # a second stop would interrupt the clean-up
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(2 * STOP_SECONDS)

    def _serve(self) -> None:
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(_cancel_others())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()

    def _require_open(self) -> None:
        if not self._open:
            raise ModelClosed("the model was closed; rows that were not fetched are gone")

    def _require_elsewhere(self) -> None:
        if threading.current_thread() is self._thread:
            raise WrongEventLoop(
                "a call of steercap.sync from within its own event loop would wait for itself; "
                "call it from another thread, or use steercap.SteerModel, which belongs in an event loop"
            )
        if os.getpid() != self._process:
            raise WrongEventLoop(
                f"the model was started in process {self._process}, and this is process {os.getpid()}, a fork of it; "
                "start one in each process that needs one"
            )


async def _cancel_others() -> None:
    """Cancel all running tasks, such as an interrupted start, and wait for their clean-up."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=STOP_SECONDS)
