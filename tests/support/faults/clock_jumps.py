"""The wall clock jumps."""

from __future__ import annotations

import asyncio
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from steercap.captures.manifest import Manifest
from steercap.captures.saving import save_run
from steercap.errors import CaptureMemoryFull
from support.faults.base import LONG, Fault, Outcome, opened, prompts, said

if TYPE_CHECKING:
    from steercap.model import SteerModel

#: Moves what programs read of the wall clock by as many seconds as a file says, and nothing else.
_SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long offset(void) {
  static volatile long *at;
  const char *path = getenv("FAULTS_CLOCK");
  if (!at && path) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    void *found = file < 0 ? MAP_FAILED : mmap(0, sizeof *at, PROT_READ, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    if (found == MAP_FAILED) return 0;
    at = found;
  }
  return at ? *at : 0;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
  int failed = syscall(SYS_clock_gettime, clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset();
  return failed;
}
int gettimeofday(struct timeval *now, void *zone) {
  int failed = syscall(SYS_gettimeofday, now, zone);
  if (!failed && now) now->tv_sec += offset();
  return failed;
}
time_t time(time_t *now) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (now) *now = found.tv_sec;
  return found.tv_sec;
}
int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
  struct timespec real = *until;
  int (*wait)(sem_t *, const struct timespec *) = dlsym(RTLD_NEXT, "sem_timedwait");
  real.tv_sec -= offset();
  return wait(semaphore, &real);
}
"""
_FOLDER = Path("/tmp", f"faults-clock-{os.getuid()}")
_LIBRARY, _CLOCK = _FOLDER / "clock.so", _FOLDER / "offset"
_YEARS = 3650 * 86400
_JUMPS = (_YEARS, -_YEARS, 0)


def missing() -> str:
    """A compiler makes the library that moves the clock."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return "no C compiler"
    _FOLDER.mkdir(exist_ok=True)
    (_FOLDER / "clock.c").write_text(_SHIM)
    words = [compiler, "-shared", "-fPIC", "-O2", "-o", str(_LIBRARY), str(_FOLDER / "clock.c"), "-ldl"]
    subprocess.run(words, check=True)
    _set(0)
    return ""


def _set(seconds: int) -> None:
    """Put the clock so many seconds ahead, or back, for all processes that began under the library."""
    if not _CLOCK.exists():
        _CLOCK.write_bytes(bytes(8))
    with _CLOCK.open("r+b", buffering=0) as file:
        file.write(struct.pack("q", seconds))


async def inject(folder: Path) -> list[Outcome]:
    """Jump ten years ahead and back while requests run, wait, are fetched and are saved."""
    assert str(_LIBRARY) in os.environ.get("LD_PRELOAD", ""), "run by scripts/faults.py, which preloads the library"
    _set(0)
    async with opened(capture_bytes=2 << 20, overflow_timeout=2.0) as model:
        steady, began = await model.generate(prompts(4), LONG), time.time()
        for jump in _JUMPS:
            asked = asyncio.create_task(model.generate(prompts(4), LONG, capture_layers="all"))
            await asyncio.sleep(0.1)
            _set(jump)
            await asyncio.sleep(0)
            away = abs(time.time() - began)
            assert (away > _YEARS / 2) == (jump != 0), f"the clock is {away:.0f} s away after {jump}"
            texts, handles = await asked
            assert texts == steady
            await model.fetch_captures_batch(handles)
            assert len([*Manifest.load(save_run(folder / f"at {jump}", handles).folder).handles()]) == 4
        waited = await _waiting(model)
    return [
        Outcome("requests, fetches and runs, at +10 years, -10 years and back", "as without a jump"),
        waited,
    ]


async def _waiting(model: SteerModel) -> Outcome:
    """A request that waits for memory which nobody frees is refused after its 2 s, whatever the clock says."""
    held: list[object] = []
    try:
        while True:
            asked = asyncio.create_task(model.read(prompts(1, 200, len(held))[0], capture_layers="all"))
            began = time.monotonic()
            await asyncio.sleep(1.0)
            _set(_JUMPS[len(held) % 2])
            held.append(await asked)
    except CaptureMemoryFull as error:
        took = time.monotonic() - began
        assert 1.9 < took < 6, took
        return Outcome("a request that waits 2 s at most (`overflow_timeout`)", said(error), took)


MEMBER = Fault(
    title="the clock jumps",
    how="a preloaded library moves CLOCK_REALTIME of the client and its engine by 10 years, ahead and back, while "
    "requests run, wait, are fetched and saved",
    must="nothing happens: all that waits goes by the monotonic clock",
    inject=inject,
    missing=missing,
    under=("env", f"LD_PRELOAD={_LIBRARY}", f"FAULTS_CLOCK={_CLOCK}"),
)
