"""Change fragments: those that are here, and the script that asks for them, in repositories of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import check_change
import pytest
from repositories import Repository

FRAGMENTS = check_change.fragments(check_change.ROOT)


def test_every_fragment_has_a_kind_and_says_something() -> None:
    """Whatever lies in changes/, but its README."""
    assert [fault for path in FRAGMENTS if (fault := check_change.fault_of(path))] == []


def test_kinds_are_those_of_the_changelog() -> None:
    """The six of Keep a Changelog; the README explains each, in the order in which they are compiled."""
    kinds = ["added", "changed", "deprecated", "removed", "fixed", "security"]
    assert check_change.kinds() == kinds
    readme = (check_change.ROOT / "changes" / "README.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", readme, re.MULTILINE) == kinds


def test_the_changelog_has_one_place_for_new_lines() -> None:
    """Right above its newest heading."""
    text = (check_change.ROOT / "CHANGELOG.md").read_text()
    before, mark, after = text.partition("<!-- towncrier release notes start -->\n")
    assert mark
    assert "## " not in before
    assert after.startswith("\n## [")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("+one-thing.added.md", "One thing.", ""),
        ("12.security.md", "Another.\n", ""),
        ("+one.misc.md", "One.", "misc is no kind; known: added, "),
        ("one.added.md", "One.", "the name is not"),
        ("+one.added.txt", "One.", "the name is not"),
        ("+one.fixed.md", " \n", "nothing in it"),
    ],
)
def test_a_fragment_has_a_name_a_kind_and_a_text(name, text, says, tmp_path) -> None:
    """Anything else is named with its reason."""
    path = tmp_path / name
    path.write_text(text)
    fault = check_change.fault_of(path)
    assert says in fault
    assert bool(says) == bool(fault)


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Repository:
    """A repository with a library, whose base is tagged `base`."""
    one = Repository(tmp_path, monkeypatch)
    one.write("steercap/__init__.py", '"""Docs."""\n__version__ = "0.1.0"\n')
    one.write("steercap/rows.py", "ROWS = 1\n")
    one.write("changes/README.md", "How.\n")
    one.write("changes/+old.added.md", "Old.\n")
    one.commit("Begin")
    one.git("tag", "base")
    return one


def check(repository: Repository) -> str:
    """Compare with the base."""
    return check_change.check(repository.root, "base")


def test_a_change_of_the_library_asks_for_a_fragment(repository) -> None:
    """Committed or not, new files and deletions too; a fragment of before does not count, a new one does."""
    assert check(repository) == ""
    repository.write("docs/page.md", "Page.\n")
    repository.commit("Pages are no part of the library")
    assert check(repository) == ""
    repository.write("steercap/new.py", "NEW = 1\n")
    assert "steercap/new.py: changed since base without a fragment" in check(repository)
    (repository.root / "steercap" / "rows.py").unlink()
    assert "steercap/new.py, steercap/rows.py: changed" in check(repository)
    repository.commit("Change")
    assert "steercap/new.py, steercap/rows.py: changed" in check(repository)
    repository.write("changes/README.md", "How else.\n")
    assert "without a fragment" in check(repository)
    repository.write("changes/+new.fixed.md", "")
    assert check(repository) == "+new.fixed.md: there is nothing in it"
    repository.write("changes/+new.fixed.md", "New.\n")
    assert check(repository) == ""
    repository.commit("Fragment")
    assert check(repository) == ""


def test_changes_of_others_do_not_count(repository) -> None:
    """The base may have gone on: only what is new on this side asks for a fragment."""
    repository.git("switch", "--quiet", "--create", "mine")
    repository.write("docs/page.md", "Page.\n")
    repository.commit("Mine")
    repository.git("switch", "--quiet", "main")
    repository.write("steercap/rows.py", "ROWS = 2\n")
    repository.commit("Theirs")
    repository.git("switch", "--quiet", "mine")
    assert check_change.check(repository.root, "main") == ""


def test_a_commit_may_say_why_it_needs_none(repository) -> None:
    """Each one that touches the library, in a trailer with a reason; and nothing is left uncommitted."""
    repository.write("steercap/rows.py", "ROWS = 2\n")
    repository.commit("Rename\n\nNo-fragment: private names only")
    assert check(repository) == ""
    repository.write("docs/page.md", "Page.\n")
    repository.commit("A page needs no reason")
    assert check(repository) == ""
    repository.write("steercap/rows.py", "ROWS = 3\n")
    assert "without a fragment" in check(repository)
    repository.commit("Rename again\n\nNo-fragment:")
    assert "without a fragment" in check(repository)


def test_a_release_needs_none(repository) -> None:
    """Its fragments became lines of the changelog; with anything else in the library it does."""
    (repository.root / "changes" / "+old.added.md").unlink()
    repository.write("steercap/__init__.py", '"""Docs."""\n__version__ = "0.2.0"\n')
    repository.commit("Release 0.2.0")
    assert check(repository) == ""
    repository.write("steercap/__init__.py", '"""Other docs."""\n__version__ = "0.2.0"\n')
    assert "without a fragment" in check(repository)
    repository.write("steercap/__init__.py", '"""Docs."""\n__version__ = "0.2.0"\n')
    repository.write("steercap/rows.py", "ROWS = 2\n")
    assert "without a fragment" in check(repository)


def test_a_base_that_is_not_there_is_an_error(repository) -> None:
    """As in a clone without history; nothing passes unseen."""
    with pytest.raises(SystemExit, match="merge-base nowhere HEAD"):
        check_change.check(repository.root, "nowhere")


def test_the_command_ends_with_its_answer(repository) -> None:
    """Status 1 and the reason, or 0."""
    (repository.root / "scripts").mkdir()
    script = repository.root / "scripts" / "check_change.py"
    script.write_text(Path(check_change.__file__).read_text())
    (repository.root / "pyproject.toml").write_text((check_change.ROOT / "pyproject.toml").read_text())

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, script, "base"], capture_output=True, text=True, check=False)

    assert run().returncode == 0
    repository.write("steercap/rows.py", "ROWS = 2\n")
    done = run()
    assert done.returncode == 1
    assert done.stderr.startswith("steercap/rows.py: changed since base without a fragment")
