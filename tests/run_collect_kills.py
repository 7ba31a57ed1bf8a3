"""Collections of a corpus, killed at any moment: `python run_collect_kills.py FOLDER SEED KILLS [CONCURRENCY]`.

Each life is a process of its own, made by a fork, with an engine of its own. It goes on with the data set in FOLDER/killed, and is killed
by SIGKILL, its engine with it: in turn after a random time, and before a random operation on a file. After each kill the
folder is looked at: every shard that counts is whole by SHA-256, and bit for bit that of a run that nobody killed; and
none that counted before is gone. At the end nobody kills it, and all files are the same, byte for byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # a life must not import vLLM twice: there are many of them

from support.folders import digests
from support.rows import TINY_ENGINE

import steercap.adapters.engine  # noqa: F401 -- so that no life has to
from steercap import SteerModel
from steercap.lab.datasets import DatasetFolder
from steercap.lab.datasets.collecting import OneIn, collect
from steercap.testing import tiny_checkpoint

#: Documents of the corpus, and of a shard.
DOCUMENTS, EACH = 160, 6
#: Operations that Python tells of; writes to an open file are none of them.
EVENTS = frozenset({"open", "os.rename", "os.remove", "os.mkdir", "os.scandir", "fcntl.flock"})


def corpus(folder: Path) -> Path:
    """Documents of several lengths, some of several windows, some empty."""
    path = folder / "corpus.jsonl"
    with path.open("w") as file:
        for number in range(DOCUMENTS):
            file.write(json.dumps({"text": f"{number} is a number. " * (number % 23)}) + "\n")
    return path


async def live(folder: Path, name: str, concurrency: int | None, at: int | None) -> None:
    """One life: it says when it begins, and is killed before its `at`-th operation below the folder."""
    target, count = str(folder / name), 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        if event in EVENTS and arguments and target in str(arguments[0]):
            count += 1
            if count == at:
                os.killpg(os.getpgid(0), signal.SIGKILL)

    async with SteerModel(str(tiny_checkpoint("qwen3")), **TINY_ENGINE) as model:
        print("begins", flush=True)
        sys.addaudithook(hook)
        began = time.monotonic()
        await collect(
            model,
            folder / "corpus.jsonl",
            target,
            layers=[0, 2],
            tokens=OneIn(2),
            context=100,
            documents_per_shard=EACH,
            concurrency=concurrency,
        )
        print(f"done {time.monotonic() - began} {count}", flush=True)


def life(
    folder: Path, name: str, concurrency: int | None, *, after: float | None = None, at: int | None = None
) -> list[str]:
    """What one life said; it is killed some seconds after it begins, or before an operation."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        os.setsid()
        os.dup2(writing, 1)
        try:
            asyncio.run(live(folder, name, concurrency, at))
        finally:
            os.killpg(0, signal.SIGKILL)  # all has been said
    os.close(writing)
    said: list[str] = []
    with os.fdopen(reading) as lines:
        for line in lines:
            said.append(line.strip())
            if line.startswith("begins") and after is not None:
                time.sleep(after)
                os.killpg(process, signal.SIGKILL)
            if line.startswith("done"):
                break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return said


def counted(folder: Path) -> dict[int, object]:
    """The shards that count, each compared with its receipt by SHA-256."""
    if not (folder / "definition.json").exists():
        return {}
    opened = DatasetFolder.open(folder)
    receipts = opened.receipts()
    assert not opened.wrong(receipts.values(), content=True)
    return dict(receipts)


def main() -> None:
    folder, rng, kills = Path(sys.argv[1]), random.Random(int(sys.argv[2])), int(sys.argv[3])
    concurrency = int((*sys.argv, "1")[4]) or None
    folder.mkdir(parents=True, exist_ok=True)
    corpus(folder)
    whole, killed = folder / "whole", folder / "killed"
    shutil.rmtree(whole, ignore_errors=True)
    shutil.rmtree(killed, ignore_errors=True)
    (done,) = [line for line in life(folder, "whole", concurrency) if line.startswith("done")]
    seconds, operations = float(done.split()[1]), int(done.split()[2])
    reference, wanted = counted(whole), digests(whole)
    report = {"kills": 0, "by operation": 0, "runs": 1, "debris": 0, "shards at kills": []}
    before: set[int] = set()
    while report["kills"] < kills:
        by_operation = report["kills"] % 2 == 1
        left = 1 - len(before) / len(reference)
        how = (
            {"at": rng.randrange(1, int(operations * left) + 2)}
            if by_operation
            else {"after": rng.uniform(0, seconds * left)}
        )
        said = life(folder, "killed", concurrency, **how)
        if any(line.startswith("done") for line in said):
            assert digests(killed) == wanted
            shutil.rmtree(killed)
            before, report["runs"] = set(), report["runs"] + 1
            continue
        report["kills"] += 1
        report["by operation"] += by_operation
        receipts = counted(killed)
        assert before <= set(receipts), f"lost: {before - set(receipts)}"
        assert all(reference[number] == receipt for number, receipt in receipts.items())
        names = (
            {path.name.partition(".")[0] for path in (killed / "shards").glob("[0-9]*")} if killed.exists() else set()
        )
        report["debris"] += bool(names - {f"{number:06}" for number in receipts})
        before = set(receipts)
        report["shards at kills"].append(len(before))
        print(f"kill {report['kills']} {how}: {len(before)} of {len(reference)} shards", file=sys.stderr, flush=True)
    assert any(line.startswith("done") for line in life(folder, "killed", concurrency))
    assert digests(killed) == wanted
    left = [path.name for path in killed.rglob(".*") if path.name != ".lock"]
    assert not left, left
    print(json.dumps({**report, "shards": len(reference), "files": len(wanted), "seconds of a run": seconds}))


if __name__ == "__main__":
    main()
