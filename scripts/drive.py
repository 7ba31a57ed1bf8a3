"""Adversarial drivers, in random order, until the time is over: rows, edits, overflows, wrong arguments, kills.

    python scripts/drive.py --minutes 60 [--seed 7] [--only steered,types] [--json out/drive.json]

Each round draws a driver and a seed. All of `steercap.testing`'s drivers compare what comes with an oracle of their own
(transformers for rows), so that a round ends well or is a finding: a wrong row, a text that should have been an error, an
error of another kind, something left over, or no end at all. A finding is printed with its driver and seed, the engines are
started anew, and the exit code is 1.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import beside_tests  # noqa: F401 -- support is there
import typer
from rich.console import Console
from rich.table import Table
from support import stress
from support.kills import kills
from support.loops import loops
from support.overflow import overflowing_edits
from support.rows import ALL_SITES, CRAMPED
from support.structure import structured_outputs
from support.wrong import wrong_types

from steercap import CaptureSpec, SteerModel
from steercap.testing import Reference, tiny_checkpoint

console = Console(highlight=False, soft_wrap=True)
LAYERS = 4
#: Seconds after which a round counts as one that does not end.
PATIENCE = 900.0
#: Seconds until nothing of a killed client may be left, on a machine that does other work too.
KILL_BOUND = 60.0


@dataclass(frozen=True)
class Engines:
    """What the drivers drive.

    Args:
        single: tiny qwen3 in float32, with little room.
        half: the same in float16.
        reference: transformers on the same checkpoint.
    """

    single: SteerModel
    half: SteerModel
    reference: Reference


async def _captured(engines: Engines, rng: random.Random) -> dict[str, int]:
    return (await stress.everything_at_once(engines.single, engines.reference, seed=rng.randrange(1 << 30))).facts


async def _steered(engines: Engines, rng: random.Random) -> dict[str, int]:
    seed = rng.randrange(1 << 30)
    return (await stress.steered_requests_at_once(engines.single, engines.reference, seed=seed)).facts


async def _overflow(engines: Engines, rng: random.Random) -> dict[str, int]:
    model = rng.choice((engines.single, engines.half))
    capture = CaptureSpec(sites=ALL_SITES)
    return await overflowing_edits(model, rng, rounds=2, capture=capture, layers=LAYERS, sites=ALL_SITES)


async def _types(engines: Engines, rng: random.Random) -> dict[str, int]:
    return await wrong_types(engines.single, engines.reference, rng=rng, count=240)


async def _structures(engines: Engines, rng: random.Random) -> dict[str, int]:
    return await structured_outputs(engines.single, rng=rng, count=96)


async def _loops(engines: Engines, rng: random.Random) -> dict[str, int]:
    return await loops(engines.single, rng, 60)


async def _kills(_engines: Engines, rng: random.Random) -> dict[str, int]:
    report = await asyncio.to_thread(kills, rng, 1, bound=KILL_BOUND)
    return dict(report.ends)


DRIVERS: dict[str, Callable[[Engines, random.Random], Awaitable[dict[str, int]]]] = {
    "captured": _captured,
    "steered": _steered,
    "overflow": _overflow,
    "types": _types,
    "structures": _structures,
    "loops": _loops,
    "kills": _kills,
}


async def drive(names: list[str], minutes: float, seed: int, out: Path | None) -> bool:
    """Drive until the time is over; whether nothing was found."""
    rng, end = random.Random(seed), time.monotonic() + 60 * minutes
    rounds: Counter[str] = Counter()
    facts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    findings: list[dict[str, Any]] = []
    reference = Reference(tiny_checkpoint("qwen3"))
    while time.monotonic() < end:
        async with AsyncExitStack() as stack:
            single, half = [
                await stack.enter_async_context(
                    SteerModel(str(tiny_checkpoint("qwen3")), sites=ALL_SITES, **CRAMPED | {"dtype": dtype})
                )
                for dtype in ("float32", "float16")
            ]
            engines = Engines(single, half, reference)
            while time.monotonic() < end:
                name, number = rng.choice(names), rng.randrange(1 << 30)
                began = time.monotonic()
                try:
                    async with asyncio.timeout(PATIENCE):
                        found = await DRIVERS[name](engines, random.Random(number))
                except Exception as error:  # noqa: BLE001 -- whatever it is, it is a finding
                    findings.append({"driver": name, "seed": number, "error": f"{type(error).__name__}: {error}"})
                    console.print(f"[red]FOUND[/red] {name}, seed {number}:")
                    traceback.print_exception(error)
                    break
                rounds[name] += 1
                facts[name].update(found)
                console.print(f"{name}, seed {number}: {found} ({time.monotonic() - began:.0f} s)")
                _write(out, rounds, facts, findings)
    _write(out, rounds, facts, findings)
    _show(rounds, facts)
    return not findings


def _write(out: Path | None, rounds: Counter[str], facts: dict[str, Counter[str]], findings: list[Any]) -> None:
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"rounds": rounds, "facts": facts, "findings": findings}, indent=2))


def _show(rounds: Counter[str], facts: dict[str, Counter[str]]) -> None:
    table = Table("driver", "rounds", "counts")
    for name, count in sorted(rounds.items()):
        table.add_row(name, str(count), ", ".join(f"{fact} {number:,}" for fact, number in facts[name].items()))
    console.print(table)


def main(
    minutes: Annotated[float, typer.Option(help="For how long; the last round is finished.")] = 60.0,
    seed: Annotated[int, typer.Option(help="What is drawn follows from it.")] = 0,
    only: Annotated[str, typer.Option(help="Drivers, with commas between; all by default.")] = "",
    out: Annotated[
        Path | None, typer.Option("--json", help="Write counts and findings here, after every round.")
    ] = None,
) -> None:
    """Drive; exit code 1 if anything was found."""
    for name, value in {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)
    names = [name.strip() for name in only.split(",") if name.strip()] or list(DRIVERS)
    if unknown := [name for name in names if name not in DRIVERS]:
        raise typer.BadParameter(f"unknown drivers {unknown}; known: {', '.join(DRIVERS)}")
    raise typer.Exit(code=0 if asyncio.run(drive(names, minutes, seed, out)) else 1)


if __name__ == "__main__":  # vLLM's processes import the script again
    typer.run(main)
