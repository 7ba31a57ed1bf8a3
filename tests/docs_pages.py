"""What stands in the pages of README.md, CONTRIBUTING.md, docs/*.md and docs/from/*.md: their fenced blocks, and which of them are run.

The rule. A page begins, after its front matter, with `<!-- model: smol -->` (or `tiny`, `heads`, `seeing` or `encoder`): the open model its blocks call `model`.
```python   runs, after the blocks before it, in one namespace; one with a main guard is a script and runs as one.
```sh       a command a line; ```console the same after "$ ", with what it prints between. `steercap` commands are parsed,
            and run where they start no engine.
title="x"   is written to the file x beside the page's other files first; x may be in a folder.
A block under `<!-- not run: reason -->` is not run; `NOT_RUN` in tests/unit/test_docs.py counts them.
```yaml, ```toml, ```text hold data and output. Any other fence is a mistake.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
GUARD: Final = 'if __name__ == "__main__":'
#: Commands that read files or this machine, and start no engine.
CHEAP: Final = (
    "-h",
    "--help",
    "--version",
    "doctor",
    "inspect",
    "vectors show",
    "vectors convert",
    "persona traits",
)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Args:
        page, line: where it stands.
        language: of the fence.
        title: the file it is, or "".
        text: what is in it.
        reason: why it is not run, or "".
    """

    page: str
    line: int
    language: str
    title: str
    text: str
    reason: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    def write(self, folder: Path) -> Path:
        """Make the file that it is."""
        path = folder / self.title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.text)
        return path

    @property
    def is_script(self) -> bool:
        """Whether it is a whole script, which opens a model itself."""
        return self.language == "python" and GUARD in self.text

    @property
    def commands(self) -> list[list[str]]:
        """The commands of a block of shell, as words."""
        joined = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            return [shlex.split(line[2:], comments=True) for line in joined if line.startswith("$ ")]
        return [words for line in joined if (words := shlex.split(line, comments=True))]


def pages() -> list[Path]:
    """README.md, CONTRIBUTING.md, and every page of the documentation that is written by hand."""
    docs = ROOT / "docs"
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(docs.glob("*.md")), *sorted(docs.glob("from/*.md"))]


def model_of(page: Path) -> str | None:
    """Name of the fixture that a page's blocks call `model`."""
    found = re.match(r"(?:---\n.*?^---\n)?<!-- model: (\w+) -->\n", page.read_text(), re.MULTILINE | re.DOTALL)
    return found[1] if found else None


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in their order."""
    pattern = re.compile(
        r"(?:^<!-- not run: (?P<reason>.+?) -->\n)?^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n"
        r"(?P<text>.*?)^```$",
        re.MULTILINE | re.DOTALL,
    )
    text = page.read_text()
    return [
        Block(
            page.name,
            text.count("\n", 0, match.start("language")) + 1,
            match["language"],
            match["title"] or "",
            match["text"],
            match["reason"] or "",
        )
        for match in pattern.finditer(text)
    ]


def steercap_commands(block: Block) -> list[list[str]]:
    """The arguments of the `steercap` commands of a block."""
    return [words[1:] for words in block.commands if words[0] == "steercap"]


def is_cheap(arguments: list[str]) -> bool:
    """Whether a command can be run without an engine, on the model that tests have."""
    said = " ".join(arguments)
    return "--start" not in arguments and "-m" not in arguments and said.startswith(CHEAP)
