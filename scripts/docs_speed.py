"""Write the table of docs/speed.md from results of `bench_gpu.py`, which scripts/speed.json keeps in short.

python scripts/docs_speed.py                                   write the table
python scripts/docs_speed.py --note "..." out/bench.json ...   keep these results first, each workload in place of an older one
"""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from gpu_rounds import BASE, CONTROL, Workload, limits_of

KEPT = Path(__file__).parent / "speed.json"
PAGE = Path(__file__).parent.parent / "docs" / "speed.md"
MODES = {
    CONTROL: "plain vLLM again",
    "idle": "nothing captured or steered",
    "capture-all": "all layers, rows readable",
    "steer-1": "every layer steered, one spec",
    "steer-each": "a spec each",
}
START, END = "<!-- measured -->\n", "<!-- /measured -->"


def kept(path: Path, note: str) -> dict[str, Any]:
    """What is kept of one file of results: per workload its rounds and, of each mode, the median and range in per cent.

    Returns:
        By "shape workload", the entry; the shape ends in "-tp2" where two GPUs share each layer, and in the method of drafts.

    Raises:
        ValueError: the file has no round of any workload.
    """
    data = json.loads(path.read_text())
    words = data["argv"]
    shape = words[words.index("--shape") + 1] if "--shape" in words else "qwen3-8b"
    if (gpus := data["engine_args"].get("tensor_parallel_size", 1)) > 1:
        shape += f"-tp{gpus}"
    if drafts := data["engine_args"].get("speculative_config"):
        shape += f"-{drafts['method']}"
    date = dt.datetime.fromtimestamp(path.stat().st_mtime, dt.UTC).date().isoformat()
    card = data["machine"]["gpus"].splitlines()[-1].split(",")[0]
    about = {"date": date, "commit": data["machine"]["commit"][:8], "card": card, "note": note}
    found = {}
    for name, entry in data["workloads"].items():
        if entry["rounds"]:
            modes = {mode: spread(values["ratio"]) for mode, values in entry["summary"].items() if mode != BASE}
            found[f"{shape} {name}"] = {**about, "rounds": len(entry["rounds"]), "modes": modes}
    if not found:
        raise ValueError(f"{path} has no whole round of any workload")
    return found


def spread(ratio: dict[str, Any]) -> list[float]:
    """Median, least and greatest, per cent over plain vLLM."""
    return [round(100 * (ratio[name] - 1), 2) for name in ("median", "low", "high")]


def markdown(entries: dict[str, Any]) -> str:
    """A row for each workload: medians with their range, and the most that we allow ourselves."""
    lines = ["| | " + " | ".join(MODES.values()) + " |", "|---" * (len(MODES) + 1) + "|"]
    for name in sorted(entries):
        shape, _, load = name.partition(" ")
        workload, modes = Workload.parse(load), entries[name]["modes"]
        limits = limits_of(shape, workload)
        cells = []
        for mode in MODES:
            called = f"steer-{workload.requests}" if mode == "steer-each" else mode
            if called not in modes or (mode == "steer-each" and workload.requests == 1):
                cells.append("")
                continue
            median, low, high = modes[called]
            limit = f", aim {limits[called]:g}" if called in limits else ""
            cells.append(f"**{median:+.1f}** ({low:+.1f} to {high:+.1f}{limit})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines.append("")
    for name in sorted(entries):
        entry = entries[name]
        lines.append(
            f"- {name}: {entry['card']}, {entry['date']}, {entry['commit']}, {entry['rounds']} rounds. {entry['note']}".rstrip()
        )
    return "\n".join(lines) + "\n"


def main(
    results: Annotated[list[Path] | None, typer.Argument(help="Results of bench_gpu.py to keep.")] = None,
    note: Annotated[str, typer.Option(help="What to know of the machine or the run.")] = "",
) -> None:
    """Keep results, and write the table."""
    entries = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for path in results or []:
        entries |= kept(path, note)
    KEPT.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
    before, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(f"{before}{START}{markdown(entries)}{rest[rest.index(END) :]}")


if __name__ == "__main__":
    typer.run(main)
