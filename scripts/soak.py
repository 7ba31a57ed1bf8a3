"""Everything at once, at twice the limits, for long.

    python scripts/soak.py --minutes 30 --picture docs/pictures/soak.svg
    python scripts/soak.py --minutes 10 --device cuda

Prints what was done and what came of it; with --picture, draws what was held over time. Exit code 1 if a row was wrong, a
request was not answered, or memory grew by more than a twentieth from the second quarter of the time to the last.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import beside_tests  # noqa: F401 -- support is there
import typer
from verify_gpu import environment

if TYPE_CHECKING:
    from support.soak import Report

MOST_GROWTH = 0.05


class Device(StrEnum):
    """What an engine runs on."""

    CPU = "cpu"
    CUDA = "cuda"


async def soak(minutes: float, seed: int, device: str, picture: Path | None, out: Path | None) -> bool:
    """Soak; whether nothing was found."""
    from support.soak import LIMITS, Soak

    from steercap import SteerModel
    from steercap.testing import Reference, tiny_checkpoint

    path = tiny_checkpoint("qwen3")
    # On a GPU with graphs, as engines are there; the rest of its memory is nobody's here.
    own = {"enforce_eager": False, "gpu_memory_utilization": 0.2} if device == "cuda" else {}
    async with SteerModel(str(path), **{**LIMITS, **own}) as model:
        soaked = Soak(model, Reference(path), seed, on_gpu=device == "cuda")
        telling = asyncio.create_task(tell(soaked.report))
        report = await soaked.run(60 * minutes)
        telling.cancel()
        stats = await model.stats()
    print(f"begun: {dict(report.began)}")
    print(f"ended: {dict(report.ended)}")
    print("worst rows: " + ", ".join(f"{name} {same.error:.1e}" for name, same in sorted(report.worst.items())))
    last = report.moments[-1]
    print(f"{last.answered} answered in {last.seconds:.0f} s, {stats.spill_bytes_written >> 20} MiB went to disk")
    print(f"memory: {last.memory >> 20} MiB, {last.device >> 20} MiB of the device's")
    print(f"{100 * report.growth:+.1f} % from the second quarter to the last")
    for failure in report.failures[:20]:
        print(f"FOUND {failure}")
    if out:
        out.write_text(json.dumps([asdict(moment) for moment in report.moments]))
    if picture:
        draw(report.moments, picture)
    return not report.failures and report.growth <= MOST_GROWTH


async def tell(report: Report) -> None:
    """How it goes, once a minute: who is cut off knows what there was."""
    while True:
        await asyncio.sleep(60)
        last = report.moments[-1]
        print(f"{last.seconds:.0f} s: {last.answered} answered, {len(report.failures)} found", flush=True)


def draw(moments: list[Any], picture: Path) -> None:
    """What was held over time, as a picture."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(3, 1, figsize=(7, 6), sharex=True, layout="constrained")
    minutes = [moment.seconds / 60 for moment in moments]
    for axis, title, names in (
        (axes[0], "memory of all processes, MiB", ("memory",)),
        (axes[1], "rows, MiB", ("shared", "spilled")),
        (axes[2], "requests", ("held", "waiting")),
    ):
        for name in names:
            scale = 1 if axis is axes[2] else 1 << 20
            label = {"shared": "in shared memory", "spilled": "on disk", "held": "not fetched"}.get(name, name)
            axis.plot(minutes, [getattr(moment, name) / scale for moment in moments], label=label, linewidth=1)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_ylim(bottom=0)
        if len(names) > 1:
            axis.legend(loc="lower right", bbox_to_anchor=(1, 0.98), ncols=2, fontsize=8, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("minutes")
    figure.savefig(picture)


def main(
    minutes: Annotated[float, typer.Option(help="For how long; what was begun is ended.")] = 30.0,
    seed: Annotated[int, typer.Option(help="What is drawn follows from it.")] = 0,
    device: Annotated[Device, typer.Option(help="What the engine runs on.")] = Device.CPU,
    picture: Annotated[Path | None, typer.Option(help="Draw what was held over time here.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write what was held over time here.")] = None,
) -> None:
    """Soak; exit code 1 if anything was found."""
    environment(device)
    raise typer.Exit(code=0 if asyncio.run(soak(minutes, seed, device, picture, out)) else 1)


if __name__ == "__main__":  # vLLM's processes import the script again
    typer.run(main)
