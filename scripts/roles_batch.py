"""Roles on several GPUs: `python scripts/roles_batch.py --devices 0,1 --out out/roles -- roles.csv --questions questions.txt -m Qwen/Qwen3-8B`.

Each device has a process with an engine of its own, which is `steercap persona roles` with what stands after `--` and its
share of the roles. They work in one folder; cut off, they go on when they are called again. What a process prints is in
`share-WHICH.log` in the folder. When all are done, `steercap persona axis` says what it comes to.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

CPU: Final = "cpu"
#: Seconds that a process has to stop its engine when it is told to.
GRACE: Final = 60.0


def command_of(arguments: Sequence[str], which: int, count: int, out: Path) -> list[str]:
    """The command of one share."""
    share = ["--shard", f"{which}/{count}", "--out", str(out), "--json"]
    return [sys.executable, "-m", "steercap", "persona", "roles", *arguments, *share]


def environment_of(device: str) -> Mapping[str, str]:
    """The environment of a process on one device."""
    return {**os.environ, **({} if device == CPU else {"CUDA_VISIBLE_DEVICES": device})}


async def share(arguments: Sequence[str], which: int, devices: Sequence[str], out: Path) -> int:
    """Run one share to its end, and give its exit code; a process that outlives us is told to stop."""
    with (out / f"share-{which}.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command_of(arguments, which, len(devices), out),
            env=environment_of(devices[which]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # an interrupt is ours to pass on
        )
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                await asyncio.shield(_stopped(process))


async def _stopped(process: Any) -> None:
    os.killpg(process.pid, signal.SIGINT)
    try:
        async with asyncio.timeout(GRACE):
            await process.wait()
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def run_all(arguments: Sequence[str], devices: Sequence[str], out: Path) -> list[int]:
    """All shares at once; one that fails stops no other."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(share(arguments, which, devices, out)) for which in range(len(devices))]
    return [task.result() for task in tasks]


def main(
    arguments: Annotated[list[str], typer.Argument(help="Those of `steercap persona roles`, after --.")],
    out: Annotated[Path, typer.Option(help="Folder of the run.")],
    devices: Annotated[str, typer.Option(help="GPUs, such as 0,1,2; or cpu, once for each process.")] = CPU,
) -> None:
    """Have several processes, each with an engine on its device, play their shares of the roles."""
    if {"--shard", "--out"} & set(arguments):
        raise typer.BadParameter("--shard and --out are given here, and not after --")
    names = [name.strip() for name in devices.split(",")]
    out.mkdir(parents=True, exist_ok=True)
    codes = asyncio.run(run_all(arguments, names, out.resolve()))
    for which, code in enumerate(codes):
        print(
            f"share {which}/{len(names)} on {names[which]}: {'done' if code == 0 else f'exit code {code}, see {out}/share-{which}.log'}"
        )
    raise typer.Exit(1 if any(codes) else 0)


if __name__ == "__main__":
    typer.run(main)
