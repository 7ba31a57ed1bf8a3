"""The disk is full while a handle, a run of captures or a data set is written."""

from __future__ import annotations

import errno
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from steercap.captures.handle import CaptureHandle
from steercap.captures.manifest import Manifest
from steercap.captures.saving import CaptureRun
from steercap.errors import CollectionStopped
from steercap.lab.datasets import DatasetFolder
from steercap.lab.datasets.collecting import collect
from support.faults.base import (
    COLLECTED,
    SHORT,
    Fault,
    Outcome,
    fetched,
    for_root,
    opened,
    prompts,
    said,
    told,
)
from support.folders import digests

if TYPE_CHECKING:
    from steercap.model import SteerModel


@contextmanager
def disk(folder: Path, kib: int) -> Iterator[Path]:
    """A file system that holds so many KiB."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


async def inject(folder: Path) -> list[Outcome]:
    """Write to a disk that is too small."""
    async with opened() as model:
        handles = await fetched(model, prompts(8, 60))
        with disk(folder / "small", 64) as small:
            first = _full(lambda: handles[0].save(small / "rows.safetensors"), "handle.save")
            assert not [*small.iterdir()], "half of a file is left"
        with disk(folder / "run", 600) as small:
            second = _run(handles, small / "run")
        third = await _collected(model, folder)
        assert len(await model.generate(prompts(1), SHORT)) == 1
    return [first, second, third]


def _full(write: object, who: str) -> Outcome:
    began = time.monotonic()
    try:
        write()  # type: ignore[operator]
    except OSError as error:
        assert error.errno == errno.ENOSPC or "No space left" in str(error), repr(error)
        return Outcome(who, said(error), time.monotonic() - began)
    raise AssertionError(f"{who} wrote more than there is room for")


def _run(handles: list[CaptureHandle], folder: Path) -> Outcome:
    """A run that meets the end of the disk: what it had listed is there, and it goes on once there is room."""
    run = CaptureRun(folder, model=handles[0].model)
    told = _full(lambda: [run.add(handle) for handle in handles], "a run of captures")
    listed = len(run.requests)
    assert 0 < listed < len(handles)
    run.close()
    there = list(Manifest.load(folder).handles())
    assert len(there) == listed == len([*folder.glob("*.safetensors")])
    for kept, handle in zip(there, handles, strict=False):
        assert all(torch.equal(kept.captures[point], handle.captures[point]) for point in kept.points)
    with CaptureRun(folder, model=handles[0].model) as again:
        assert len(again.requests) == listed
    return Outcome(told.who, f"{told.told}; its {listed} captures before are listed, whole and right", told.seconds)


async def _collected(model: SteerModel, folder: Path) -> Outcome:
    """A collection that meets the end of the disk goes on once there is room."""
    corpus, whole = prompts(24, 60), folder / "whole"
    await collect(model, corpus, whole, **COLLECTED)
    with disk(folder / "data set", 900) as small:
        there, began = small / "there", time.monotonic()
        outcome = await told(
            "collect", collect(model, corpus, there, **COLLECTED), began, CollectionStopped, "No space"
        )
        shards = len(DatasetFolder.open(there).sound())
        assert 0 < shards < 6, f"{shards} shards are there"
        subprocess.run(["mount", "-o", "remount,size=9000k", small], check=True)  # noqa: ASYNC221
        assert (await collect(model, corpus, there, **COLLECTED)).resumed == shards
        assert digests(there) == digests(whole)
    says = f"{outcome.told}; with more room it goes on, to the data set of a disk that was never full"
    return Outcome(outcome.who, says, outcome.seconds)


MEMBER = Fault(
    title="the disk full",
    how="a tmpfs of 64 KiB under `handle.save`, of 600 KiB under a `CaptureRun`, of 900 KiB under `collect`",
    must="OSError that names the file; nothing half-written is left; what a run had listed is there, whole, and the "
    "run can be opened again. `CollectionStopped`, and the same call goes on",
    inject=inject,
    missing=for_root,
)
