"""A release is one version: that of the library, of the changelog and of the tag."""

from __future__ import annotations

import pytest
import release
from repositories import Repository


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Repository:
    """A repository of version 0.2.0, with its day, and no tag."""
    one = Repository(tmp_path, monkeypatch)
    one.write("steercap/__init__.py", '"""Docs."""\n__version__ = "0.2.0"\n')
    one.write("CHANGELOG.md", "# Changelog\n\n## [0.2.0] - 2026-11-27\n\n## [0.1.0] - 2026-01-01\n")
    one.write("changes/README.md", "How.\n")
    one.commit("Release")
    return one


def test_a_release_that_agrees_is_let_through(repository) -> None:
    """Without the tag as a dry run, with it as a release."""
    assert release.disagreements(repository.root) == []
    assert release.disagreements(repository.root, released=True) == ["HEAD does not carry the tag v0.2.0"]
    repository.git("tag", "v0.2.0")
    assert release.disagreements(repository.root, released=True) == []


@pytest.mark.parametrize("tag", ["v0.2.1", "v0.2", "v0.2.0rc1", "version-0.2.0"])
def test_a_tag_that_is_not_the_version_is_refused(tag, repository) -> None:
    """Alone, and beside the right one."""
    says = [f"HEAD carries the tag {tag}; that of version 0.2.0 is v0.2.0"]
    repository.git("tag", tag)
    assert release.disagreements(repository.root) == says
    repository.git("tag", "--annotate", "v0.2.0", "--message", "The right one")
    assert release.disagreements(repository.root) == says


def test_other_tags_do_not_count(repository) -> None:
    """Those of other commits, and those that do not begin with v."""
    repository.git("tag", "v0.1.9")
    repository.git("tag", "before-the-move")
    repository.write("docs/page.md", "Page.\n")
    repository.commit("A page")
    repository.git("tag", "after-the-move")
    assert release.disagreements(repository.root) == []


@pytest.mark.parametrize(
    ("changelog", "says"),
    [
        ("## [0.1.0] - 2026-01-01\n", "the newest heading of CHANGELOG.md is 0.1.0, and the version is 0.2.0"),
        ("## [0.2.0] - 2026-11-27\n\n## [0.2.0] - Unreleased\n", "several headings of 0.2.0"),
        ("# Changelog\n", "no heading"),
    ],
)
def test_a_changelog_of_another_version_is_refused(changelog, says, repository) -> None:
    """Older, twice the same, or none."""
    repository.write("CHANGELOG.md", changelog)
    (found,) = release.disagreements(repository.root)
    assert says in found


def test_what_is_tagged_is_finished(repository) -> None:
    """Its heading has a day, and its fragments are lines of the changelog; before, both may be as they are."""
    repository.write("CHANGELOG.md", "# Changelog\n\n## [0.2.0] - Unreleased\n")
    repository.write("changes/+new.added.md", "New.\n")
    repository.commit("Not yet")
    assert release.disagreements(repository.root) == []
    repository.git("tag", "v0.2.0")
    day, left = release.disagreements(repository.root)
    assert "says Unreleased in place of its day" in day
    assert "changes/ still has +new.added.md" in left


def test_nothing_uncommitted_is_released(repository) -> None:
    """It would be built, and no commit had it."""
    repository.git("tag", "v0.2.0")
    repository.write("steercap/new.py", "")
    assert release.disagreements(repository.root) == []
    assert release.disagreements(repository.root, released=True) == ["uncommitted:\n?? steercap/new.py"]


def test_a_library_without_a_version_is_refused(repository) -> None:
    """Nothing can be compared."""
    repository.write("steercap/__init__.py", "")
    assert release.disagreements(repository.root) == ['steercap/__init__.py has no line __version__ = "..."']
