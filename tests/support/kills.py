"""Kills real clients at random moments of their lives, and looks at what is left of them: nothing may be.

python -m support.kills COUNT [SEED]
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from uuid import uuid4

#: What a client says when it begins with something, and the seconds that this takes at most on an idle machine.
PHASES: Final = {
    "imports": 2.0,
    "starts": 20.0,
    "generates": 4.0,
    "fetches": 1.0,
    "saves": 0.5,
    "closes": 0.5,
    "closed": 0.5,
}
#: Seconds until a client that was interrupted has ended, and all that belongs to it, on a machine that is not busy.
BOUND: Final = 3.0
MARK: Final = "STEERCAP_KILLS"
_ENGINE: Final = ("--dtype", "float32", "--eager", "--max-model-len", "256", "--engine-arg")
_SHARED: Final = Path("/dev/shm")
#: Of multiprocessing. Its creator maps such a semaphore under a name of before, so all that come are looked at.
_SEMAPHORES: Final = "sem.mp-*"
#: Lines of a log, or a traceback, that another process than the client wrote.
_STORM: Final = re.compile(
    r"\((EngineCore|Worker|VllmWorker)\S* pid=\d+\) ERROR|^Process \S+:$|^Exception ignored", re.MULTILINE
)


@dataclass(frozen=True)
class Kill:
    """One client's end.

    Args:
        command: whether the client is the command line, or a script.
        phase: what it is about to do when it happens.
        delay: seconds from then.
        signals: what it is sent.
        everybody: whether they go to all of its process group, as a terminal's do, or to it alone.
    """

    command: bool
    phase: str
    delay: float
    signals: tuple[signal.Signals, ...]
    everybody: bool

    @classmethod
    def drawn(cls, rng: random.Random) -> Kill:
        """A random one."""
        phase = rng.choice(list(PHASES))
        number = rng.choice([signal.SIGKILL, signal.SIGINT, signal.SIGINT, signal.SIGTERM])
        twice = number == signal.SIGINT and rng.random() < 0.3
        return cls(
            command=rng.random() < 0.4,
            phase=phase,
            delay=rng.uniform(0, PHASES[phase]),
            signals=(number,) * (2 if twice else 1),
            # A whole group that is terminated ends by itself; an interrupt of all is what Ctrl+C is.
            everybody=number == signal.SIGINT and rng.random() < 0.8,
        )

    @property
    def codes(self) -> set[int]:
        """The exit codes that it may have, 0 if it was done before."""
        (number, *_) = self.signals
        return {0, -number, 128 + number} if self.command else {0, -number}


@dataclass
class Report:
    """What came of some kills.

    Args:
        ends: how many, by signal, phase and whether it was a script or a command.
        slowest: seconds until everything was gone, at worst.
        cpu: seconds of the processor that the client used after it was interrupted, at worst.
    """

    ends: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    cpu: float = 0.0


class Left(AssertionError):
    """A client left something, or did not end as it must."""


def kills(rng: random.Random, count: int, *, bound: float = BOUND, seconds: float | None = None) -> Report:
    """Start clients one after the other, and kill each at a random moment.

    Args:
        rng: what decides.
        count: how many, at most.
        bound: seconds until nothing of a client may be left.
        seconds: for how long, at most; None for as long as it takes.

    Raises:
        Left: a process or a file in shared memory remains, or a client ended late, in another way, or in a storm of
            messages.
    """
    report, end = Report(), time.monotonic() + (seconds if seconds is not None else float("inf"))
    for _ in range(count):
        if time.monotonic() > end:
            break
        end_one(Kill.drawn(rng), report, bound=bound)
    return report


def end_one(kill: Kill, report: Report, *, bound: float = BOUND) -> None:
    """Start one client, and kill it.

    Raises:
        Left: see `kills`.
    """
    mark, own, before = uuid4().hex, set[Path](), set(_SHARED.glob(_SEMAPHORES))
    # As a script: `python -m` ends with 1 where a script that is interrupted ends by the signal.
    words = _command() if kill.command else [sys.executable, "-P", __file__]
    client = subprocess.Popen(
        ["env", "--default-signal=INT", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, MARK: mark, "HF_HUB_OFFLINE": "1"},
    )
    said: list[str] = []
    reached = threading.Event()

    def listen() -> None:
        assert client.stdout is not None
        with client.stdout:
            for line in client.stdout:
                said.append(line)
                if line.strip() == kill.phase:
                    reached.set()
        reached.set()

    listening = threading.Thread(target=listen, daemon=True)
    listening.start()
    try:
        if kill.command:  # it says nothing of its phases; so its whole life is drawn from
            end = time.monotonic() + kill.delay + sum(PHASES[phase] for phase in PHASES if phase < kill.phase)
        else:
            while not reached.wait(0.2):
                own |= _mapped(mark)
            end = time.monotonic() + kill.delay
        while client.poll() is None and time.monotonic() < end:
            own |= _mapped(mark)
            time.sleep(min(0.2, max(0.0, end - time.monotonic())))
        own |= _mapped(mark)
        began = time.monotonic()
        for number in kill.signals:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if kill.everybody else os.kill)(client.pid, number)
            time.sleep(0.2 if len(kill.signals) > 1 else 0)
        found = "not looked at"
        while found and time.monotonic() < began + bound:
            time.sleep(0.02)
            own |= _mapped(mark)
            found = _left(client, mark, own | set(_SHARED.glob(_SEMAPHORES)) - before)
        took = time.monotonic() - began
        if found:
            raise Left(f"{kill}: after {took:.1f} s there is still {found}; it said:\n{''.join(said)}")
        listening.join(bound)
        text = "".join(said)
        if client.returncode not in kill.codes or (kill.signals[0] == signal.SIGINT and _STORM.search(text)):
            raise Left(f"{kill}: it ended with {client.returncode} and said:\n{text}")
        report.slowest = max(report.slowest, took)
        report.ends[f"{kill.signals[0].name} {'command' if kill.command else kill.phase}"] += 1
    finally:
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        client.wait()
        listening.join(bound)


def _mapped(mark: str) -> set[Path]:
    """Files of shared memory that a client's processes map now: what others make beside it is theirs."""
    from steercap.adapters.reaper import mapped, named

    processes = marked(mark)
    return {Path(path) for path in mapped(processes, written=True) | named(processes)}


def _left(client: subprocess.Popen[str], mark: str, own: set[Path]) -> str:
    """What there still is of a client, in words; empty if nothing."""
    if client.poll() is None:
        return "the client itself"
    if found := marked(mark):
        return f"processes {[_shown(pid) for pid in found]}"
    if files := {path for path in own if path.exists()} - in_use():
        return f"shared memory {sorted(map(str, files))}"
    return ""


def marked(mark: str) -> list[int]:
    """Processes that carry the mark, zombies aside."""
    from steercap.adapters.reaper import pids

    needle, found = f"{MARK}={mark}".encode(), []
    for pid in pids():
        with contextlib.suppress(OSError):
            if needle in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def in_use() -> set[Path]:
    """Files of shared memory that some process maps, or is named in: other programs run beside this one."""
    from steercap.adapters.reaper import mapped, named, pids

    return {Path(path) for path in mapped(pids()) | named(pids())}


def _shown(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"{pid} {Path(f'/proc/{pid}/cmdline').read_bytes().replace(bytes(1), b' ').decode()[:100]}"
    return str(pid)


def _command() -> list[str]:
    from steercap.testing import tiny_checkpoint

    model = ("-m", str(tiny_checkpoint("qwen3")), *_ENGINE, "kv_cache_memory_bytes=33554432")
    return [sys.executable, "-m", "steercap", "generate", "Once upon a time", "--max-tokens", "200", *model]


async def _live() -> None:
    """A client's life, said aloud."""
    from steercap.captures.saving import save_run
    from steercap.model import SteerModel
    from steercap.testing import tiny_checkpoint
    from support.rows import TINY_ENGINE, random_prompt

    print("starts", flush=True)
    async with SteerModel(str(tiny_checkpoint("qwen3")), **TINY_ENGINE) as model:
        print("generates", flush=True)
        prompts = [random_prompt(40, seed) for seed in range(16)]
        params = {"max_tokens": 200, "temperature": 0.0, "ignore_eos": True}
        _, handles = await model.generate(prompts, params, capture_layers="all")
        print("fetches", flush=True)
        await model.fetch_captures_batch(handles)
        print("saves", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            save_run(folder, handles)
        print("closes", flush=True)
    print("closed", flush=True)


def main() -> None:
    """A client; with arguments, the driver."""
    if len(sys.argv) > 1:
        print(kills(random.Random(int((*sys.argv, "0")[2])), int(sys.argv[1])))
        return
    print("imports", flush=True)
    asyncio.run(_live())


if __name__ == "__main__":
    main()
