"""Injects every fault of `support.faults`, and writes what came of it into docs/faults.md.

    python scripts/faults.py                       # all: half an hour
    python scripts/faults.py core_killed cancelled # some
    python scripts/faults.py --kills 10            # besides, one engine killed ten times in a row

Each runs in a process of its own, which must end, and leave no process, no file in /dev/shm and no temporary file. What did
not come as it must is shown as WRONG, and the exit code is 1. The last result of each is kept in out/faults.json, and the page
is written from all of them; of a fault that is not there the page keeps what it says.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import beside_tests  # noqa: F401 -- support is there
import typer
from rich.console import Console
from support.faults import FAULTS, Fault
from support.kills import MARK, in_use, marked

console = Console(highlight=False, soft_wrap=True)
ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "faults.md"
RESULTS = ROOT / "out" / "faults.json"
BEGIN, END = "<!-- table: python scripts/faults.py -->\n", "<!-- table ends -->\n"
SHARED = Path("/dev/shm")
#: Seconds after which a fault counts as one that is never told.
PATIENCE = 900


@dataclass
class Row:
    """What came of one fault.

    Args:
        fault: which.
        outcomes: who got what.
        wrong: what did not come as it must, "" if all did.
        left: what was left of it.
        seconds: all of it took.
    """

    fault: Fault
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    wrong: str = ""
    left: str = "nothing"
    seconds: float = 0.0


def injected(name: str, fault: Fault) -> Row:
    """Inject one fault, in a process of its own, and look at what it leaves."""
    if reason := fault.missing():
        return Row(fault, wrong=f"not injected here: {reason}")
    mark, before, began = uuid4().hex, {*SHARED.iterdir()}, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as top:
        folder, temporary = Path(top, "work"), Path(top, "tmp")
        folder.mkdir()
        temporary.mkdir()
        environment = {**os.environ, MARK: mark, "TMPDIR": str(temporary)}
        words = [*fault.under, sys.executable, "-m", "support.faults", name, str(folder)]
        with (folder / "stdout").open("w+") as out, (folder / "stderr").open("w+") as err:
            process = subprocess.Popen(words, stdout=out, stderr=err, env=environment, start_new_session=True)
            try:
                code = process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                code = None
            seconds = time.monotonic() - began
            left = what_is_left(mark, before, temporary)
            for pid in marked(mark):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        said, complained = ((folder / one).read_text() for one in ("stdout", "stderr"))
    row = Row(fault, left=left or "nothing", seconds=seconds)
    if code != 0:
        end = f"ended with {code}" if code is not None else f"did not end within {PATIENCE} s"
        row.wrong = f"{end}: {last_error(complained)}"
        console.print(complained[-6000:], style="dim")
    else:
        row.outcomes = json.loads(said.strip().splitlines()[-1])
    return row


def last_error(text: str) -> str:
    """The last line of a log that is an error's, or the last."""
    lines = text.strip().splitlines() or ["no words"]
    return next(
        (line for line in reversed(lines) if re.match(r"[\w.]*(Error|Died|Exit|Full|Closed|Left)\b", line)),
        lines[-1],
    )


def what_is_left(mark: str, before: set[Path], temporary: Path) -> str:
    """What there still is of a process that has ended, and of what it started, after the seconds that its end may take."""
    until, found = time.monotonic() + 10, "?"
    while found and time.monotonic() < until:
        time.sleep(0.1)
        files = {path for path in SHARED.iterdir() if path not in before} - in_use()
        parts = {
            "processes": marked(mark),
            "in /dev/shm": sorted(path.name for path in files),
            "temporary files": sorted(
                path.name for path in temporary.iterdir() if path.name.startswith("steercap-") or path.is_socket()
            ),
        }
        found = "; ".join(f"{kind}: {known}" for kind, known in parts.items() if known)
    return found


def shown(row: Row) -> None:
    """A row on the terminal."""
    state = "[red]WRONG[/red]" if row.wrong or row.left != "nothing" else "[green]as it must[/green]"
    console.print(f"{state} {row.fault.title} ({row.seconds:.0f} s); left: {row.left}")
    for one in row.outcomes:
        console.print(f"    {one['who']}: {one['told']} {when(one)}", markup=False)
    if row.wrong:
        console.print(f"    {row.wrong}", markup=False)


def when(one: dict[str, Any]) -> str:
    """After how many seconds somebody was told."""
    return "" if one["seconds"] is None else f"({one['seconds']:.2f} s)"


def table(known: dict[str, dict[str, Any]], old: str) -> str:
    """What came of faults, as Markdown; of those that are not known, what an old table has."""
    kept = {line.split(" | ")[0]: line for line in old.splitlines()}
    lines = ["| fault | injected by | must | happened | left |", "|---|---|---|---|---|"]
    for name, fault in FAULTS.items():
        if name in known:
            row = known[name]
            came = "<br>".join(f"{one['who']}: {one['told']} {when(one)}".strip() for one in row["outcomes"])
            wrong = f"**{row['wrong']}**"
            cells = (fault.title, fault.how, fault.must, wrong if row["wrong"] else came, row["left"])
            lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
        elif line := kept.get(f"| {fault.title}"):
            lines.append(line)
    return "\n".join(lines) + "\n"


def write(known: dict[str, dict[str, Any]]) -> None:
    """Put the table where it belongs on the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    old, _, after = rest.partition(END)
    day = max(row["day"] for row in known.values())
    where = f"Written by `python scripts/faults.py`, last on {day}; tiny models, on CPU where no device is named.\n\n"
    PAGE.write_text(f"{before}{BEGIN}{where}{table(known, old)}{END}{after}")


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Which faults; all by default.")] = None,
    kills: Annotated[int, typer.Option(min=0, help="Besides, one engine killed so often.")] = 0,
) -> None:
    """Inject faults."""
    wrong = False
    for name in names or ([] if kills else FAULTS):
        row = injected(name, FAULTS[name])
        shown(row)
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        wrong |= bool(row.wrong) or row.left != "nothing"
        known[name] = {"outcomes": row.outcomes, "wrong": row.wrong, "left": row.left, "day": time.strftime("%Y-%m-%d")}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(known, indent=1))
        write(known)
    if kills:
        console.print(f"one engine killed {kills} times; seconds until all were answered: {in_a_row(kills)}")
    raise typer.Exit(int(wrong))


def in_a_row(times: int) -> list[float]:
    """Kill one engine many times."""
    import asyncio

    from support.faults.base import opened
    from support.faults.deaths import killed_in_a_row

    from steercap.testing import Reference, tiny_checkpoint

    async def run() -> list[float]:
        async with opened(restart=True) as model:
            return await killed_in_a_row(model, times, Reference(tiny_checkpoint("qwen3")))

    return [round(seconds, 1) for seconds in asyncio.run(run())]


if __name__ == "__main__":
    typer.run(main)
