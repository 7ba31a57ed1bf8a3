"""Files of a data set of activations are cut off, and changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from steercap.datasets import ActivationDataset, verify
from steercap.errors import InvalidFile
from steercap.testing.faults.base import Fault, Outcome, opened, prompts
from steercap.testing.faults.corrupted import BITS, CUTS, changed, cut
from steercap.testing.folders import digests


async def inject(folder: Path) -> list[Outcome]:
    """Damage each file of a shard; then collect again."""
    corpus = prompts(12, 20)
    whole, damaged = folder / "whole", folder / "damaged"
    async with opened() as model:
        asked: dict[str, Any] = {"layers": [1, 3], "documents_per_shard": 4, "concurrency": 1}
        await model.collect(corpus, whole, **asked)
        rows, index, receipt = (f"shards/000001.{end}" for end in ("safetensors", "parquet", "json"))
        tries: dict[str, tuple[str, Callable[[Path], object], Callable[[bytes], Iterator[bytes]]]] = {
            f"a shard cut off, at {CUTS} lengths, opened": (rows, ActivationDataset, cut),
            f"its index cut off, at {CUTS} lengths, opened": (index, ActivationDataset, cut),
            f"its receipt cut off, at {CUTS} lengths, opened": (receipt, ActivationDataset, cut),
            f"a shard with a bit changed, at {BITS} places, verified": (rows, verify, changed),
            f"its index with a bit changed, at {BITS} places, verified": (index, verify, changed),
        }
        found = [_damaged(who, whole, damaged, *one) for who, one in tries.items()]
        shutil.rmtree(damaged)
        shutil.copytree(whole, damaged)
        content = (damaged / rows).read_bytes()
        (damaged / rows).write_bytes(content[: len(content) // 2])
        mended = (await model.collect(corpus, damaged, **asked)).mended
        assert mended == 1
        assert digests(damaged) == digests(whole)
    return [*found, Outcome("collect, called again", "the shard is collected again; the data set is that of before")]


def _damaged(
    who: str,
    whole: Path,
    folder: Path,
    name: str,
    read: Callable[[Path], object],
    damages: Callable[[bytes], Iterator[bytes]],
) -> Outcome:
    """Damage a file in many ways, and read the data set: each must be found."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    told = ""
    for content in damages((whole / name).read_bytes()):
        (folder / name).write_bytes(content)
        try:
            read(folder)
        except InvalidFile as error:
            told = str(error).replace(str(folder), "...").splitlines()[0]
            continue
        raise AssertionError(f"{who}: damage was not found")
    return Outcome(who, f"all found, the last as InvalidFile: {told}")


MEMBER = Fault(
    title="a data set's shard cut off or changed",
    how="files of a collected shard cut to many lengths when the data set is opened, single bits changed when it is "
    "verified; then the same `collect` over a shard cut in half",
    must="`InvalidFile` that names the file, each time; `collect` collects that shard again, and no other",
    inject=inject,
)
