"""Runs `pip install`, and says how far it is: one line that changes on a terminal, a line now and then elsewhere.

    python scripts/install.py --no-deps -r requirements/cpu.txt

pip by itself either says nothing for minutes or some hundreds of lines. All that it says is shown if it fails. Only the
standard library is there when this runs.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TextIO

#: Seconds between lines where there is no terminal.
SECONDS: Final = 15.0
#: Back to the beginning of a terminal's line, which is emptied.
ANEW: Final = "\r\033[K"
#: What pip says when it turns to a package, when it fetches one, and when all are here.
TURNS: Final = re.compile(r"Collecting ([\w.\-]+)|Requirement already satisfied: ([\w.\-]+)")
FETCHES: Final = re.compile(r"Downloading \S*?([\w.\-]+?)-\d\S* \(([^)]+)\)")


class Told:
    """How far pip is.

    Args:
        packages: how many are asked for; those that they depend on are beside them.
    """

    def __init__(self, packages: int) -> None:
        self._packages = packages
        self._seen: set[str] = set()
        self._doing = "looking"

    def take(self, line: str) -> None:
        """Read a line of pip's."""
        if turned := TURNS.search(line):
            self._seen.add(turned[1] or turned[2])
            self._doing = turned[1] or turned[2]
        elif fetched := FETCHES.search(line):
            self._doing = f"{fetched[1]}, {fetched[2]}"
        elif line.startswith("Installing collected packages"):
            self._doing = "unpacking"

    def line(self, what: str, seconds: float) -> str:
        """What is under way, in a line."""
        of = f" of {self._packages}" if len(self._seen) <= self._packages else ""
        return f"installing {what}: {len(self._seen)}{of} packages, {seconds:.0f} s, {self._doing}"


def counted(arguments: Sequence[str]) -> tuple[str, int]:
    """What is installed, in a word, and how many packages the lists among pip's arguments name."""
    lists = [Path(after) for before, after in itertools.pairwise(arguments) if before == "-r"]
    named = [line for path in lists for line in path.read_text().splitlines() if re.match(r"\s*[A-Za-z0-9]", line)]
    return " and ".join(path.stem for path in lists) or "packages", len(named)


def install(arguments: Sequence[str], out: TextIO, *, seconds: float = SECONDS) -> int:
    """Run pip to its end.

    Args:
        arguments: of `pip install`.
        out: where to say how far it is.
        seconds: between lines where that is not a terminal.

    Returns:
        pip's exit status.
    """
    what, packages = counted(arguments)
    told, begun, ended = Told(packages), time.monotonic(), threading.Event()
    loud = out.isatty()

    def tell() -> None:
        while not ended.wait(0.2 if loud else seconds):
            line = told.line(what, time.monotonic() - begun)
            width = os.get_terminal_size(out.fileno()).columns if loud else len(line)
            out.write(f"{ANEW}{line[: width - 1]}" if loud else f"{line}\n")
            out.flush()

    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--progress-bar",
        "off",
        *arguments,
    ]
    if not loud:
        out.write(f"installing {what}\n")
        out.flush()
    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    said: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            said.append(line)
            told.take(line)
    ended.set()
    teller.join()
    state = "installed" if not pip.returncode else "could not install"
    out.write(f"{ANEW if loud else ''}{state} {what} in {time.monotonic() - begun:.0f} s\n")
    if pip.returncode:
        out.writelines(said)
    out.flush()
    return pip.returncode


if __name__ == "__main__":
    sys.exit(install(sys.argv[1:], sys.stderr))
