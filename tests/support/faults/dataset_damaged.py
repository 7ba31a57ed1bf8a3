"""Files of a data set of activations are cut off, and changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from steercap.lab.datasets import ActivationDataset, verify
from steercap.lab.datasets.collecting import collect
from support.faults.base import COLLECTED, Fault, Outcome, opened, prompts
from support.faults.corrupted import BITS, CUTS, Try, changed, cut, damaged
from support.folders import digests


async def inject(folder: Path) -> list[Outcome]:
    """Damage each file of a shard; then collect again."""
    corpus, whole = prompts(12, 20), folder / "whole"
    async with opened() as model:
        await collect(model, corpus, whole, **COLLECTED)
        rows, index, receipt = (f"shards/000001.{end}" for end in ("safetensors", "parquet", "json"))
        tries: dict[str, Try] = {
            f"a shard cut off, at {CUTS} lengths, opened": (rows, ActivationDataset, cut),
            f"its index cut off, at {CUTS} lengths, opened": (index, ActivationDataset, cut),
            f"its receipt cut off, at {CUTS} lengths, opened": (receipt, ActivationDataset, cut),
            f"a shard with a bit changed, at {BITS} places, verified": (rows, verify, changed),
            f"its index with a bit changed, at {BITS} places, verified": (index, verify, changed),
        }
        found = damaged(whole, folder / "damaged", tries)
        for name in (rows, index, receipt):
            halved = shutil.copytree(whole, folder / f"halved{Path(name).suffix}")
            os.truncate(halved / name, (halved / name).stat().st_size // 2)
            assert (await collect(model, corpus, halved, **COLLECTED)).mended == 1
            assert digests(halved) == digests(whole)
    return [*found, Outcome("collect, called again", "the shard is collected again; the data set is that of before")]


MEMBER = Fault(
    title="a data set's shard cut off or changed",
    how="files of a collected shard cut to many lengths when the data set is opened, single bits changed when it is "
    "verified; then the same `collect` over a shard of which one file was cut in half",
    must="`InvalidFile` that names the file, each time; `collect` collects that shard again, and no other",
    inject=inject,
)
