"""Writes the outputs in docs/command-line.md: runs the commands of its marked blocks, one after another, in one folder.

    python scripts/docs_command_line.py            # all; each command with an engine takes a minute
    python scripts/docs_command_line.py --static   # those that need no engine and no file

A block under `<!-- output: run -->` or `<!-- output: static -->` is a command and what it prints. A test compares the
static ones with what the commands print now.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = ROOT / "docs" / "command-line.md"
#: Columns of a block on the page.
WIDTH: Final = 100
#: Rows of a table that are shown at each end, where it has more than twice as many and some.
SHOWN: Final = 3
BLOCK: Final = re.compile(
    r"^<!-- output: (?P<kind>run|static) -->\n```console\n\$ (?P<command>[^\n]+)\n(?P<output>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
FILE: Final = re.compile(r"^```\w+ title=\"(?P<name>[^\"]+)\"\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Output:
    """A command on the page, and what stands below it.

    Args:
        kind: "run", or "static" where no engine and no file is needed.
        command: as a user types it.
        text: what it prints.
    """

    kind: str
    command: str
    text: str


def outputs(page: str) -> Iterator[Output]:
    """The marked blocks of the page, in their order."""
    for found in BLOCK.finditer(page):
        yield Output(found["kind"], found["command"], found["output"])


def printed(command: str, folder: Path) -> str:
    """What a command prints, as it stands on the page.

    Args:
        command: as a user types it; run by this Python, with this steercap.
        folder: where.

    Raises:
        SystemExit: the command failed.
    """
    program = f"'{sys.executable}' -m steercap"
    environment = {**os.environ, "COLUMNS": str(WIDTH), "TERMINAL_WIDTH": str(WIDTH), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        re.sub(r"^steercap\b", program, command),
        shell=True,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{command!r} ended with {done.returncode}")
    text = done.stdout.replace(str(Path.home()), "~")
    lines = "\n".join(line.rstrip() for line in text.splitlines()).strip("\n").split("\n")
    return "".join(f"{line}\n" for line in _cut(lines))


def _cut(lines: list[str]) -> list[str]:
    """Lines, of a long table with a line a row its first and last rows alone."""
    rows = [place for place, line in enumerate(lines) if re.match(r"│ +\d+ │", line)]
    if len(rows) <= 4 * SHOWN or rows[-1] - rows[0] != len(rows) - 1:
        return lines
    return [*lines[: rows[SHOWN]], "...", *lines[rows[-SHOWN] :]]


def rewritten(page: str, *, static: bool) -> str:
    """The page with what its commands print now.

    Args:
        page: as it is.
        static: whether to leave those alone that need an engine or files.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in FILE.finditer(page):
            (folder / file["name"]).write_text(file["text"])

        def run(found: re.Match[str]) -> str:
            if static and found["kind"] != "static":
                return found[0]
            print(f"$ {found['command']}", file=sys.stderr, flush=True)
            text = printed(found["command"], folder)
            return f"<!-- output: {found['kind']} -->\n```console\n$ {found['command']}\n{text}```"

        return BLOCK.sub(run, page)


def main() -> None:
    """Rewrite the page."""
    parser = argparse.ArgumentParser(description="Write the outputs in docs/command-line.md.")
    parser.add_argument("--static", action="store_true", help="those that need no engine and no file")
    static = parser.parse_args().static
    PAGE.write_text(rewritten(PAGE.read_text(), static=static))


if __name__ == "__main__":
    main()
