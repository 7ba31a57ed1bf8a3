"""Checks that a change of the library comes with a change fragment.

    python scripts/check_change.py BASE      # a commit, such as origin/main

A change of the library is anything in steercap/ that differs from the commit where this branch left BASE, files that
are not committed yet included. A fragment is a file of changes/ that is new or other since then; changes/README.md has
its form. None is needed where every commit that touches steercap/ says `No-fragment: REASON` in a line of its own at
the end of its message, or where nothing but the version is new: a release turns fragments into lines of CHANGELOG.md.
Needs git and the standard library alone.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
#: Files of changes/ that are no fragments.
BESIDE: Final = frozenset({"README.md"})
VERSION: Final = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


def kinds() -> list[str]:
    """Kinds of changes, as pyproject.toml has them for towncrier."""
    return [
        kind["directory"] for kind in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
    ]


def fault_of(fragment: Path) -> str:
    """Reason why a file is no fragment, or nothing."""
    match = re.fullmatch(r"(?:\+[\w-]+|\d+)\.(\w+)\.md", fragment.name)
    if match is None:
        return f"{fragment.name}: the name is not +words.KIND.md or NUMBER.KIND.md"
    if match[1] not in kinds():
        return f"{fragment.name}: {match[1]} is no kind; known: {', '.join(kinds())}"
    if not fragment.read_text().strip():
        return f"{fragment.name}: there is nothing in it"
    return ""


def fragments(root: Path) -> list[Path]:
    """Files of changes/ that are to be fragments."""
    return sorted(path for path in (root / "changes").iterdir() if path.name not in BESIDE)


def check(root: Path, base: str) -> str:
    """Compare a working tree with the commit where it left another.

    Args:
        root: the repository.
        base: that other commit.

    Returns:
        Reason why the change is not complete, or nothing.

    Raises:
        SystemExit: there is no such commit, or the two have none in common.
    """
    left = git(root, "merge-base", base, "HEAD").strip()
    touched = _changed(root, left, "steercap")
    if not touched:
        return ""
    new = [root / name for name in _changed(root, left, "changes")]
    new = [path for path in new if path.exists() and path.name not in BESIDE]
    if faults := [fault for path in new if (fault := fault_of(path))]:
        return "\n".join(faults)
    if new or _is_release(root, left, touched) or _is_excused(root, left):
        return ""
    return (
        f"{', '.join(touched)}: changed since {base} without a fragment in changes/ (changes/README.md). Where no user "
        "notices the change, end the message of its commit with the line No-fragment: REASON"
    )


def _is_release(root: Path, left: str, touched: list[str]) -> bool:
    """Tell whether the version is new and all else in the library is as it was."""
    before = git(root, "show", f"{left}:steercap/__init__.py") if touched == ["steercap/__init__.py"] else ""
    now = (root / "steercap" / "__init__.py").read_text() if before else ""
    return before != now and VERSION.sub("", before) == VERSION.sub("", now)


def _is_excused(root: Path, left: str) -> bool:
    """Tell whether each commit that touches the library gives its reason, and nothing is uncommitted."""
    if git(root, "status", "--porcelain", "--", "steercap").strip():
        return False
    commits = git(root, "rev-list", "--no-merges", f"{left}..HEAD", "--", "steercap").split()
    form = "--format=%(trailers:key=No-fragment,valueonly)"
    return bool(commits) and all(git(root, "show", "--no-patch", form, one).strip() for one in commits)


def _changed(root: Path, left: str, folder: str) -> list[str]:
    """Files of a folder that differ from those of a commit, or are new."""
    differ = git(root, "diff", "--name-only", "--no-renames", "-z", left, "--", folder)
    new = git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", folder)
    return sorted(filter(None, (differ + new).split("\0")))


def git(root: Path, *words: str) -> str:
    """Run git in a repository and return what it prints.

    Raises:
        SystemExit: it fails.
    """
    done = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"git {' '.join(words)}: {done.stderr.strip() or 'nothing found'}")
    return done.stdout


def main() -> None:
    """Check the working tree that this script is in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="BASE", help="the commit that the change is to be merged into")
    if reason := check(ROOT, parser.parse_args().base):
        sys.exit(reason)


if __name__ == "__main__":
    main()
