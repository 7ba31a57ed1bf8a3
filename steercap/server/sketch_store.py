"""Store of open sketches (running statistics of rows) of a server's clients.

A sketch belongs to one owner (API key), and is freed when no request has used it for a while.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from steercap.core.values import shown
from steercap.errors import SketchClosed
from steercap.requests.context import require_nested
from steercap.requests.sketching import RunningSketch
from steercap.server.folder import TIME_TO_LIVE


@dataclass
class HeldSketch:
    """Sketch that a client has open on the server.

    Args:
        name: unguessable id.
        owner: digest of the API key, see `server.folder.owner_of`.
        running: the sketch.
        until: time of expiry, in seconds of the store's clock.
        users: number of requests that use it now; it does not expire meanwhile.
        turn: lock held while its file is written and sent, so that there is at most one on disk.
        timer: timer of the next check for expiry.
    """

    name: str
    owner: str
    running: RunningSketch
    until: float
    users: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    timer: asyncio.TimerHandle | None = None


class SketchStore:
    """Store of the open sketches of a server's clients.

    Args:
        time_to_live: seconds until a sketch that no request uses expires.
        clock: function that returns the time in seconds.
    """

    def __init__(self, time_to_live: float = TIME_TO_LIVE, clock: Callable[[], float] = time.monotonic) -> None:
        self.time_to_live = time_to_live
        self._clock = clock
        self._held: dict[str, HeldSketch] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def keep(self, running: RunningSketch, owner: str) -> HeldSketch:
        """Add an owner's open sketch to the store, under a new id."""
        sketch = HeldSketch(f"sketch-{secrets.token_hex(16)}", owner, running, self._clock() + self.time_to_live)
        self._held[sketch.name] = sketch
        self._sweep_later(sketch)
        return sketch

    def get(self, name: str, owner: str) -> HeldSketch:
        """Return an owner's sketch by id.

        Raises:
            SketchClosed: there is none with this id, or it is another owner's.
        """
        sketch = self._held.get(name)
        if sketch is None or not secrets.compare_digest(sketch.owner, owner):
            raise SketchClosed(
                f"no sketch {shown(name)} is open: it was closed, it is not yours, or nothing used it for "
                f"{self.time_to_live:.0f} s; begin another one, or keep them longer by `--unfetched-seconds`"
            )
        return sketch

    @contextmanager
    def using(self, sketch: HeldSketch) -> Iterator[None]:
        """Prevent the expiry of a sketch while the block runs; its time to live starts again after it."""
        sketch.users += 1
        try:
            yield
        finally:
            sketch.users -= 1
            sketch.until = self._clock() + self.time_to_live
            self._sweep_later(sketch)

    @contextmanager
    def joined(self, names: Sequence[str], owner: str) -> Iterator[tuple[RunningSketch, ...]]:
        """Yield the sketches that a request's rows enter, in order; they do not expire while the block runs.

        Raises:
            SketchClosed: one of them is not open.
            InvalidRequest: they select different tokens.
        """
        found = [self.get(name, owner) for name in names]
        for sketch in found[1:]:
            require_nested(found[0].running, sketch.running)
        with ExitStack() as uses:
            for sketch in found:
                uses.enter_context(self.using(sketch))
            yield tuple(sketch.running for sketch in found)

    async def close(self, sketch: HeldSketch) -> None:
        """Free a sketch; running requests whose rows enter it fail."""
        self._held.pop(sketch.name, None)
        await sketch.running.aclose()

    def _sweep_later(self, sketch: HeldSketch) -> None:
        if sketch.timer is not None:
            sketch.timer.cancel()
        sketch.timer = asyncio.get_running_loop().call_later(self.time_to_live + 1, self.sweep)

    def sweep(self) -> None:
        """Remove expired sketches, and free each in a task."""
        now = self._clock()
        for sketch in [sketch for sketch in self._held.values() if not sketch.users and sketch.until <= now]:
            del self._held[sketch.name]
            task = asyncio.ensure_future(sketch.running.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
