"""The disk is slow."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from steercap.captures.handle import CaptureHandle
from steercap.captures.manifest import Manifest
from steercap.captures.saving import save_run
from support.faults.base import SHORT, Fault, Outcome, fetched, for_root, opened, prompts

_GROUP = Path("/sys/fs/cgroup/blkio")
_RATE = 1 << 20


def missing() -> str:
    """Writes are slowed down by a group of version 1."""
    if reason := for_root():
        return reason
    return "" if (_GROUP / "blkio.throttle.write_bps_device").exists() else "no blkio cgroup of version 1"


@contextmanager
def slow(folder: Path) -> Iterator[Path]:
    """A file system that this process can write to at 1 MiB/s."""
    image, mount = folder / "image", folder / "slow"
    image.write_bytes(bytes(48 << 20))
    mount.mkdir()
    _run("mkfs.ext2", "-q", str(image))
    _run("mount", "-o", "loop,sync", str(image), str(mount))
    group = _GROUP / f"steercap-fault-{os.getpid()}"
    device = mount.stat().st_dev
    try:
        group.mkdir()
        (group / "blkio.throttle.write_bps_device").write_text(f"{os.major(device)}:{os.minor(device)} {_RATE}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield mount
    finally:
        (_GROUP / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()
        _run("umount", str(mount))


def _run(*words: str) -> None:
    subprocess.run(words, check=True)


async def inject(folder: Path) -> list[Outcome]:
    """Save captures to a slow disk, and generate meanwhile."""
    async with opened() as model:
        handles = await fetched(model, prompts(8, 200))
        prompt = prompts(1)[0]
        usual = [await _seconds(model.generate(prompt, SHORT)) for _ in range(20)]
        with slow(folder) as disk:
            began = time.monotonic()
            saving = asyncio.create_task(asyncio.to_thread(save_run, disk / "run", handles))
            meanwhile = []
            while not saving.done():
                meanwhile.append(await _seconds(model.generate(prompt, SHORT)))
            took, manifest = time.monotonic() - began, await saving
            _compare(manifest.folder, handles)
    assert took > 1.5, f"the disk was not slow: {took:.1f} s"
    worst, before = max(meanwhile), max(usual)
    assert len(meanwhile) > 10, meanwhile
    assert worst < before + 1.0, (meanwhile, usual)
    return [
        Outcome("8 captures, 3.3 MB, saved on a thread", "whole and right", took),
        Outcome(f"{len(meanwhile)} requests meanwhile, the slowest (before: {before:.2f} s)", "answered", worst),
    ]


def _compare(folder: Path, handles: Sequence[CaptureHandle]) -> None:
    """Check a saved run; here, as the disk is busy for as long as its rows are mapped."""
    for kept, handle in zip(Manifest.load(folder).handles(), handles, strict=True):
        assert all(torch.equal(kept.captures[point], handle.captures[point]) for point in kept.points)


async def _seconds(work: object) -> float:
    began = time.monotonic()
    await work  # type: ignore[misc]
    return time.monotonic() - began


MEMBER = Fault(
    title="a slow disk",
    how="ext2 on a loop device, mounted `sync`, written at 1 MiB/s (a blkio cgroup)",
    must="what is saved on a thread is whole, later; requests meanwhile take as long as ever",
    inject=inject,
    missing=missing,
)
