"""Draws docs/pictures/processes.svg, the processes of one engine and what passes between them, from the data below.

    python scripts/docs_diagram.py

Numbers in the picture are those of the steps in docs/architecture.md. The picture brings its own background, and is
light or dark as the reader's system is.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal, TypeAlias

PICTURE: Final = Path(__file__).parent.parent / "docs" / "pictures" / "processes.svg"
WIDTH, HEIGHT = 1000, 560
TITLE: Final = "The processes of one engine: the client, vLLM's engine core, and a worker on each device"
#: Height of a part, radius of corners, distance between lines of text: all in pixels.
PART, CORNER, LEADING = 62, 8, 16

Point: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Process:
    """A process, drawn as a frame.

    Args:
        x, y, width, height: of the frame.
        name: of the process.
        count: how many there are.
    """

    x: int
    y: int
    width: int
    height: int
    name: str
    count: str


@dataclass(frozen=True)
class Part:
    """A part of a process.

    Args:
        x, y, width: of the box.
        name: of the part.
        does: its work.
        shared: whether it is memory that two processes map.
    """

    x: int
    y: int
    width: int
    name: str
    does: str
    shared: bool = False


@dataclass(frozen=True)
class Arrow:
    """What passes from one part to another.

    Args:
        path: corners of the line.
        label: lines of text.
        at: where the first of these stands.
        anchor: which end of a line of text stands there.
        both: whether something comes back.
    """

    path: tuple[Point, ...]
    label: tuple[str, ...]
    at: Point
    anchor: Literal["start", "middle", "end"] = "middle"
    both: bool = False


PROCESSES: Final = (
    Process(20, 20, 280, 520, "client process", "yours"),
    Process(405, 20, 190, 376, "engine core (vLLM)", "one per data-parallel rank"),
    Process(700, 20, 280, 520, "worker process (vLLM)", "one per device"),
)
PARTS: Final = (
    Part(40, 80, 240, "model", "calls: generate, read, stream"),
    Part(40, 190, 240, "requests", "check, plan, run, restart"),
    Part(40, 314, 240, "engine", "admission, slots, fetching"),
    Part(40, 458, 240, "captures", "handles, checks of every label"),
    Part(420, 190, 160, "scheduler", "batches, prefix cache"),
    Part(420, 314, 160, "RPC", "to all workers"),
    Part(720, 80, 240, "model runner", "lays out the batch; hooked"),
    Part(720, 190, 240, "model with taps", "edit and copy rows at each point"),
    Part(720, 314, 240, "runtime", "step tables, records, answers"),
    Part(720, 458, 240, "arena", "rows, by request and position", shared=True),
)
ARROWS: Final = (
    Arrow(((160, 142), (160, 190)), ("1 prompts, specs",), (172, 171), "start"),
    Arrow(((160, 252), (160, 314)), ("2 plan", "3 pages, a slot"), (172, 278), "start"),
    Arrow(((160, 376), (160, 458)), ("8 fetch",), (172, 422), "start", both=True),
    Arrow(((280, 221), (420, 221)), ("4 request", "with its plan", "", "", "tokens"), (352, 190), both=True),
    Arrow(((280, 345), (420, 345)), ("frames", "", "", "3 vectors", "7 receipts"), (352, 335), both=True),
    Arrow(((580, 345), (720, 345)), ("frames", "", "", "3 vectors", "7 receipts"), (648, 335), both=True),
    Arrow(((580, 221), (640, 221), (640, 111), (720, 111)), ("5 step",), (648, 101)),
    Arrow(((840, 142), (840, 190)), ("5 forward pass",), (852, 171), "start"),
    Arrow(((780, 314), (780, 252)), ("5 tables",), (770, 288), "end"),
    Arrow(((880, 252), (880, 314)), ("7 counts",), (888, 288), "start"),
    Arrow(((960, 221), (972, 221), (972, 489), (960, 489)), ("6 rows",), (938, 430), "middle"),
    Arrow(((720, 489), (280, 489)), ("8 rows, through shared memory: the client maps the arena",), (500, 479)),
)
STYLE: Final = """
  .ground { fill: #f6f7fb; }
  .process { fill: #ffffff; stroke: #5b6475; stroke-width: 1.5; }
  .part { fill: #e3e8f8; stroke: #4051b5; stroke-width: 1; }
  .shared { fill: #fbeccb; stroke: #9a6700; stroke-width: 1; }
  .line { fill: none; stroke: #3b4252; stroke-width: 1.6; }
  .head { fill: #3b4252; }
  text { fill: #1b1f2a; font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
  .name { font-weight: 600; font-size: 14px; }
  .small { fill: #4a5161; font-size: 12px; }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #171a23; }
    .process { fill: #20242f; stroke: #8f99ae; }
    .part { fill: #2b3355; stroke: #8c9eff; }
    .shared { fill: #4a3b14; stroke: #e0b050; }
    .line { stroke: #c8cfdd; }
    .head { fill: #c8cfdd; }
    text { fill: #eef1f7; }
    .small { fill: #b9c1d1; }
  }
"""
#: The head of an arrow.
HEAD: Final = (
    '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path class="head" d="M0 0 10 5 0 10z"/></marker>'
)


def drawn() -> str:
    """The picture as SVG."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(TITLE)}</title>",
        f"<style>{STYLE}</style>",
        f"<defs>{HEAD}</defs>",
        _rectangle("ground", (0, 0), WIDTH, HEIGHT),
        *(line for process in PROCESSES for line in _frame(process)),
        *(line for part in PARTS for line in _box(part)),
        *(line for arrow in ARROWS for line in _line(arrow)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _frame(process: Process) -> tuple[str, ...]:
    middle = process.x + process.width // 2
    return (
        _rectangle("process", (process.x, process.y), process.width, process.height),
        _text(process.name, (middle, process.y + 24), "middle", "name"),
        _text(process.count, (middle, process.y + 42), "middle", "small"),
    )


def _box(part: Part) -> tuple[str, ...]:
    middle = part.x + part.width // 2
    return (
        _rectangle("shared" if part.shared else "part", (part.x, part.y), part.width, PART),
        _text(part.name, (middle, part.y + 26), "middle", "name"),
        _text(part.does, (middle, part.y + 46), "middle", "small"),
    )


def _line(arrow: Arrow) -> tuple[str, ...]:
    path = "M" + " L".join(f"{x} {y}" for x, y in arrow.path)
    start = ' marker-start="url(#head)"' if arrow.both else ""
    x, y = arrow.at
    return (
        f'<path class="line" d="{path}" marker-end="url(#head)"{start}/>',
        *(_text(text, (x, y + LEADING * row), arrow.anchor, "") for row, text in enumerate(arrow.label) if text),
    )


def _rectangle(kind: str, at: Point, width: int, height: int) -> str:
    return f'<rect class="{kind}" x="{at[0]}" y="{at[1]}" width="{width}" height="{height}" rx="{CORNER}"/>'


def _text(text: str, at: Point, anchor: str, kind: str) -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{at[0]}" y="{at[1]}" text-anchor="{anchor}">{escape(text)}</text>'


def main() -> None:
    """Write the picture."""
    for arrow in ARROWS:
        assert all(a[0] == b[0] or a[1] == b[1] for a, b in pairwise(arrow.path)), "lines go along the axes"
    PICTURE.write_text(drawn())


if __name__ == "__main__":
    main()
