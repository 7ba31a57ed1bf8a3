"""Writers of a run of captures, killed at any moment: `python run_kills.py FOLDER (each | random SEED KILLS)`.

Each writer is a process of its own, made by a fork. It goes on with the run in FOLDER until it has all captures, seals
it, opens it again, and is killed by SIGKILL on the way: `each`, before the first operation on a file, in the next run
before the second, and so on; `random`, after a random time. After each kill a reader looks at the folder: every listed
file is whole and holds what belongs to its name, and what had been told to be listed before still is.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from handles import a_handle

from steercap.captures.manifest import JOURNAL, Manifest
from steercap.captures.saving import CaptureRun

#: Captures of a run, and after how many a writer seals it and opens it again.
CAPTURES, SESSION = 6, 4
#: Operations that Python tells of; writes to an open file are none of them.
EVENTS = frozenset({"open", "os.rename", "os.remove", "os.truncate", "os.mkdir", "os.listdir", "fcntl.flock"})


def handle_of(number: int):
    """The capture of a number: another layout each third, so that layouts are listed on the way too."""
    return a_handle(layers=(0, 1, 2)[: 1 + number % 3], output=(8, number))


def write(folder: Path, told: int) -> None:
    """Go on with the run; each capture is told once it is listed, so that nothing that was told may be lost."""
    missing = [n for n in range(CAPTURES) if f"{n:06}.safetensors" not in names(folder)]
    while True:
        with CaptureRun(folder, model="m") as run:
            for number in missing[:SESSION]:
                request = run.add(handle_of(number), f"{number:06}.safetensors")
                os.write(told, f"{request.file}\n".encode())
            missing = missing[SESSION:]
        if not missing:
            return


def names(folder: Path) -> set[str]:
    """What a reader sees listed; nothing before a run has begun."""
    return {one.file for one in Manifest.load(folder).requests} if (folder / "manifest.json").exists() else set()


def check(folder: Path, told: set[str]) -> set[str]:
    """Look at the folder as a reader does; returns what is listed."""
    listed = names(folder)
    assert told <= listed, f"lost: {told - listed}"
    if listed:
        manifest = Manifest.load(folder)
        for request, handle in zip(manifest.requests, manifest.handles(), strict=True):
            known = handle_of(int(request.file[:6]))
            assert handle.output_token_ids == known.output_token_ids
            assert all(torch.equal(handle.captures[p], known.captures[p]) for p in known.points)
            assert [(p.layer, p.site) for p in manifest.layout_of(request).points] == list(known.points)
    return listed


def killed(folder: Path, told: set[str], *, at: int | None = None, after: float | None = None) -> bool:
    """One writer, killed before its `at`-th operation or `after` seconds; False if it was done before."""
    reading, writing = os.pipe()
    writer = os.fork()
    if not writer:
        os.close(reading)
        if at is not None:
            count = 0

            def hook(event: str, _arguments: tuple) -> None:
                nonlocal count
                if event in EVENTS:
                    count += 1
                    if count == at:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
        try:
            write(folder, writing)
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
    os.close(writing)
    if after is not None:
        time.sleep(after)
        os.kill(writer, signal.SIGKILL)
    with os.fdopen(reading) as lines:
        told |= {line.strip() for line in lines if line.endswith("\n")}
    _, status = os.waitpid(writer, 0)
    assert os.waitstatus_to_exitcode(status) in {0, -signal.SIGKILL}, "the writer failed"
    return os.WIFSIGNALED(status)


def whole(folder: Path) -> None:
    """What a run must be that was not killed: all there, sealed, and no file more."""
    assert len(check(folder, set())) == CAPTURES
    there = {path.name for path in folder.iterdir()}
    assert there == {"manifest.json", *(f"{n:06}.safetensors" for n in range(CAPTURES))}, there


def seconds_of(folder: Path) -> float:
    """How long a writer takes that nobody kills; before it, one imports what writers need, or each would by itself."""
    with Path(os.devnull).open("w") as nowhere:
        for _ in range(2):
            shutil.rmtree(folder, ignore_errors=True)
            began = time.monotonic()
            write(folder, nowhere.fileno())
            took = time.monotonic() - began
            whole(folder)
    return took


def main() -> None:
    folder, how = Path(sys.argv[1]), sys.argv[2]
    kills, halves, journals = 0, 0, 0
    torch.set_num_threads(1)  # no thread is there to be missed by a fork
    seconds = seconds_of(folder)

    def looked_at(told: set[str]) -> None:
        nonlocal halves, journals
        listed = check(folder, told)
        halves += bool(folder.exists() and {p.name for p in folder.glob("0*.safetensors")} - listed)
        journals += (folder / JOURNAL).exists()

    if how == "each":
        at, going = 1, True
        while going:
            shutil.rmtree(folder, ignore_errors=True)
            told: set[str] = set()
            going = killed(folder, told, at=at)
            looked_at(told)
            kills += going
            # Killed once more at the same place of going on, and then not.
            kills += killed(folder, told, at=at)
            looked_at(told)
            assert not killed(folder, told)
            whole(folder)
            at += 1
    else:
        rng, count = random.Random(int(sys.argv[3])), int(sys.argv[4])
        while kills < count:
            shutil.rmtree(folder, ignore_errors=True)
            told, in_a_row = set(), 0
            while killed(folder, told, after=rng.uniform(0.0, seconds)):
                kills, in_a_row = kills + 1, in_a_row + 1
                if not in_a_row % 20:  # a machine that was quiet and is busy now would never be done
                    seconds *= 2
                looked_at(told)
            whole(folder)
    print(json.dumps({"kills": kills, "halves of records": halves, "journals left": journals}))


if __name__ == "__main__":
    main()
