"""Medians over passes of what `perf_hook` wrote, in microseconds.

    python scripts/step_report.py FOLDER [--json out.json]

A line for each process (a worker of an engine), kind of pass and number of requests; passes that are one CUDA graph apart.
Passes "with prompts" run in pieces; the others compute a token of each request, and one like them follows.

period    from the begin of a pass to that of the next
host      what the thread that launches spends on a pass: execute_model and sample_tokens
thread    processor time of that thread in a period; others: of the process's other threads
begin     of it, steercap's work before the pass; end: after it; launch: the launch of the graph
wait      between these two calls, and before the next pass: for the engine's core, or at work for it
prepare   on the device, from the begin of the pass to its graph; graph; tail: behind it (closing kernel, sampling)
gap       on the device, from the end of a pass to the begin of the next: above about 5 the device stands still, and a
          microsecond of the host is one of the period
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

COLUMNS = ("period", "host", "thread", "others", "begin", "end", "launch", "wait", "prepare", "graph", "tail", "gap")
#: The fewest passes whose median is shown.
LEAST = 20

#: Process, kind of pass, requests, whether it is one graph.
Key: TypeAlias = tuple[str, str, int, bool]


def of_pass(one: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """What a pass and the one after it say of the first, µs; what the device did not say is left out."""
    seconds = {
        "period": after["started"] - one["started"],
        "host": one["executed"] - one["started"] + one["ended"] - one["sampling"],
        "wait": one["sampling"] - one["executed"] + after["started"] - one["ended"],
        "thread": after["thread"] - one["thread"],
        "others": after["process"] - one["process"] - after["thread"] + one["thread"],
        **{name: one[name] for name in ("begin", "end", "launch")},
        **{name: one["stages"].get(name, 0.0) for name in one["stages"] | after["stages"]},
    }
    said = {name: one[name] for name in ("prepare", "graph", "tail", "gap") if name in one}
    return {name: 1e6 * value for name, value in seconds.items()} | said


def counted(lines: Iterable[str]) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """The kind of each pass that counts, the pass, and the one right after it.

    These are passes with prompts, and passes of one token a request if the next is of as many requests and alike.
    """
    for one, after in pairwise(map(json.loads, lines)):
        if "over" in one or "over" in after:
            continue
        if one["requests"] != one["tokens"]:
            if not one["replayed"]:  # else they are drafts
                yield f"{one['kind']} with prompts", one, after
        elif all(one[name] == after[name] for name in ("requests", "tokens", "kind", "replayed")):
            yield one["kind"], one, after


def summary(folder: Path, least: int = LEAST) -> dict[Key, dict[str, float]]:
    """Medians, and the number of passes, of each kind of pass of which there are at least so many.

    Raises:
        FileNotFoundError: nothing was written there.
    """
    found: dict[Key, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise FileNotFoundError(
            f"no times in {folder}: was PERF_TIMES={folder} set, and scripts/perf_hook on PYTHONPATH?"
        )
    for path in paths:
        for kind, one, after in counted(path.read_text().splitlines()):
            for name, value in of_pass(one, after).items():
                found[path.stem, kind, one["requests"], one["replayed"]][name].append(value)
    return {
        key: {"passes": len(numbers["period"]), **{name: _typical(name, all_) for name, all_ in numbers.items()}}
        for key, numbers in sorted(found.items())
        if len(numbers["period"]) >= least
    }


def _typical(name: str, numbers: Sequence[float]) -> float:
    """The median; of a stage the mean, since some have work in few passes."""
    return statistics.median(numbers) if name in COLUMNS else statistics.fmean(numbers)


def table_of(found: Mapping[Key, Mapping[str, float]]) -> Table:
    """The table to print."""
    return _table("µs, medians", ("passes", *COLUMNS), found, digits=0)


def _table(title: str, names: Sequence[str], found: Mapping[Key, Mapping[str, float]], digits: int) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("process", "kind", "requests", "one graph", *names):
        table.add_column(name, justify="right")
    for (process, kind, requests, replayed), numbers in found.items():
        cells = (f"{numbers[name]:.{digits}f}" if name in numbers else "" for name in names)
        table.add_row(process, kind, str(requests), "yes" if replayed else "no", *cells)
    return table


def stages_of(found: Mapping[Key, Mapping[str, float]]) -> Table | None:
    """The table of steercap's stages, means; None if none was timed."""
    names = list(
        dict.fromkeys(name for numbers in found.values() for name in numbers if name not in {*COLUMNS, "passes"})
    )
    return _table("µs of stages, means over all passes", names, found, digits=1) if names else None


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    found = summary(args.folder)
    for table in filter(None, (table_of(found), stages_of(found))):
        Console(width=170).print(table)
    if args.json:
        names = ("process", "kind", "requests", "one graph")
        args.json.write_text(
            json.dumps([dict(zip(names, key, strict=True)) | row for key, row in found.items()], indent=1)
        )


if __name__ == "__main__":
    main()
