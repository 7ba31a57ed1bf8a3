"""Small git repositories, for tests of scripts that ask git."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

IDENTITY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "Somebody"), ("EMAIL", "somebody@example.org"))
}


class Repository:
    """One repository, on its branch main, that knows nothing of this machine's settings of git.

    Args:
        root: an empty folder.
        monkeypatch: of the test, whose scripts get the same environment.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        for name in [name for name in os.environ if name.startswith("GIT_")]:
            monkeypatch.delenv(name)  # a hook of git runs with those of its own repository
        for name, value in {**IDENTITY, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}.items():
            monkeypatch.setenv(name, value)
        self.git("init", "--quiet", "--initial-branch", "main")

    def git(self, *words: str) -> str:
        """Run git; what it prints."""
        return subprocess.check_output(["git", *words], cwd=self.root, text=True)

    def write(self, name: str, text: str) -> None:
        """Make a file, with its folders."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def commit(self, message: str) -> None:
        """Commit all that differs."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", message)
