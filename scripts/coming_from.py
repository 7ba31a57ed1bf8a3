"""Run other tools' own scripts of docs/from/*.md, and keep their numbers, which tests compare with ours.

    python scripts/coming_from.py                    # all pages; some minutes, and a package index
    python scripts/coming_from.py transformer-lens   # one

A block of a page under `<!-- not run: here; scripts/coming_from.py runs it with PACKAGE==VERSION -->` is the other tool's
way. It runs in an environment of its own, out/coming_from/PAGE, which has that package and torch. It is given `folder`,
SmolLM2-135M-Instruct in float32 on disk, and runs where out/sae is an SAE in SAELens's format. `numbers` of each of its variables named in KEPT go to scripts/coming_from.json,
and the block of ours on the same page leaves variables of the same names.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
NUMBERS: Final = ROOT / "scripts" / "coming_from.json"
PAGES: Final = ROOT / "docs" / "from"
BLOCK: Final = re.compile(
    r"<!-- not run: here; scripts/coming_from\.py runs it with (?P<needs>[^>]+) -->\n```python\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
#: Variables that both blocks of a page may leave: tensors, lists of words, texts.
KEPT: Final = {"rows", "lens", "vector", "plain", "steered", "features", "strongest"}
TORCH: Final = "torch==2.13.0"
#: Every so many elements of a row are kept, beside its norm.
STEP: Final = 24


def numbers(value: Any) -> Any:
    """Return what JSON holds of a variable: of rows [tokens, width] or a vector the shape, norms and some elements."""
    if isinstance(value, str | list):
        return value
    rows = value.detach().float().reshape(-1, value.shape[-1])
    kept = [[round(element, 6) for element in row[::STEP].tolist()] for row in rows]
    return {"shape": list(value.shape), "norms": [round(float(row.norm()), 5) for row in rows], "elements": kept}


def block_of(page: Path) -> re.Match[str]:
    """Return the other tool's block on a page, with the groups `needs` and `text`.

    Raises:
        SystemExit: there is none.
    """
    found = BLOCK.search(page.read_text()) if page.exists() else None
    if found is None:
        known = ", ".join(sorted(other.stem for other in PAGES.glob("*.md") if BLOCK.search(other.read_text())))
        raise SystemExit(f"{page.stem}: docs/from has no such page with a block to run; known: {known}")
    return found


def needs_of(page: Path) -> list[str]:
    """Return the packages, with versions, of the environment of a page's other tool."""
    return block_of(page)["needs"].split()


def run(page: Path) -> dict[str, Any]:
    """Return the numbers of the other tool's block on a page, by variable, with the packages that it ran with."""
    from steercap.lab.demo import smollm2
    from steercap.testing.saes import RandomSAE

    python = environment(page.stem, needs_of(page))
    with tempfile.TemporaryDirectory() as scratch:
        script, out = Path(scratch) / "theirs.py", Path(scratch) / "numbers.json"
        RandomSAE("jumprelu", 576, 4096).write(Path(scratch) / "out" / "sae")
        script.write_text(block_of(page)["text"])
        command = [str(part) for part in (python, __file__, "--block", script, "--checkpoint", smollm2(), "--out", out)]
        subprocess.run(command, check=True, cwd=scratch, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        return {"with": needs_of(page), **json.loads(out.read_text())}


def environment(name: str, needs: list[str]) -> Path:
    """Return the interpreter of an environment that has these packages, made where it is not there."""
    folder = ROOT / "out" / "coming_from" / name
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", TORCH, *needs], check=True)
    return python


def run_block(script: Path, checkpoint: str, out: Path) -> None:
    """Run a block in this interpreter, and write the numbers of its variables."""
    import torch

    torch.manual_seed(0)
    namespace: dict[str, Any] = {"folder": checkpoint, "__name__": "theirs"}
    exec(compile(script.read_text(), str(script), "exec"), namespace)
    out.write_text(json.dumps({name: numbers(namespace[name]) for name in sorted(KEPT & namespace.keys())}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="stems of pages in docs/from (default: all that have such a block)")
    parser.add_argument("--block", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.block:
        run_block(given.block, given.checkpoint, given.out)
        return
    kept = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    for page in [PAGES / f"{stem}.md" for stem in given.pages] or sorted(PAGES.glob("*.md")):
        if given.pages or BLOCK.search(page.read_text()):
            kept[page.stem] = run(page)
            lines = [f"{json.dumps(name)}: {json.dumps(kept[name], sort_keys=True)}" for name in sorted(kept)]
            NUMBERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
            print(f"{page.stem}: {', '.join(kept[page.stem])}")


if __name__ == "__main__":
    main()
