"""Checks a release, and builds what would be published. Publishes nothing.

    python scripts/release.py --dry-run [--pip-args "--index-url ..."]      # on any commit; keeps nothing
    python scripts/release.py                                               # on the tagged commit; keeps out/dist

The version of steercap/__init__.py, the newest heading of CHANGELOG.md and the tags of HEAD that begin with v must
agree. Then sdist and wheel are built and read by twine, in an environment of their own: neither build nor twine is
among the pinned versions. The wheel must hold the library and nothing else, no tests, and it must be imported, without
any other library, from an empty environment. scripts/check_wheel.py goes on from there, with all that it needs
installed. Without --dry-run HEAD must carry the tag, and nothing may be uncommitted. Takes some minutes; needs git and a
package index, and nothing installed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import check_change
from check_wheel import Checks, check_content

ROOT: Final = Path(__file__).resolve().parent.parent
#: The place of what is to be published.
DIST: Final = ROOT / "out" / "dist"
HEADING: Final = re.compile(r"^## \[([^\]]+)\] - (.+)$", re.MULTILINE)


def disagreements(root: Path, *, released: bool = False) -> list[str]:
    """Compare a repository's version with its changelog and its tags.

    Args:
        root: the repository.
        released: whether HEAD must carry the tag, with nothing uncommitted. A tag alone asks for the same of the
            changelog: a day, and no fragment left.

    Returns:
        One sentence for each thing that does not agree.
    """
    version = check_change.VERSION.search((root / "steercap" / "__init__.py").read_text())
    if version is None:
        return ['steercap/__init__.py has no line __version__ = "..."']
    wanted = f"v{version[1]}"
    tags = check_change.git(root, "tag", "--points-at", "HEAD", "--list", "v*").split()
    found = [f"HEAD carries the tag {tag}; that of version {version[1]} is {wanted}" for tag in tags if tag != wanted]
    if released and wanted not in tags:
        found.append(f"HEAD does not carry the tag {wanted}")
    if released and (dirty := check_change.git(root, "status", "--porcelain").rstrip()):
        found.append(f"uncommitted:\n{dirty}")
    return found + _of_changelog(root, version[1], dated=released or bool(tags))


def _of_changelog(root: Path, version: str, *, dated: bool) -> list[str]:
    """Compare the version with the headings of the changelog."""
    headings = HEADING.findall((root / "CHANGELOG.md").read_text())
    if not headings:
        return ["CHANGELOG.md has no heading ## [VERSION] - DAY"]
    found = []
    newest, day = headings[0]
    if newest != version:
        found.append(f"the newest heading of CHANGELOG.md is {newest}, and the version is {version}")
    if [one for one, _ in headings].count(version) > 1:
        found.append(f"CHANGELOG.md has several headings of {version}: make one of them")
    if dated and not re.fullmatch(r"\d{4}-\d\d-\d\d", day):
        found.append(f"HEAD is a release, and the newest heading of CHANGELOG.md says {day} in place of its day")
    if dated and (left := check_change.fragments(root)):
        found.append(f"HEAD is a release, and changes/ still has {', '.join(path.name for path in left)}")
    return found


def build(folder: Path, pip_arguments: Sequence[str]) -> list[Path]:
    """Build sdist and wheel, and see that the wheel holds what it must and can be imported.

    Args:
        folder: for everything that is made.
        pip_arguments: of every pip call.

    Raises:
        SystemExit: something fails.
    """
    checks = Checks(folder, pip_arguments)
    wheel = checks.built()
    check_content(wheel)
    commands = checks.environment("fresh")
    checks.install(commands, "--no-deps", wheel)
    said = checks.run(commands / "python", "-c", "import steercap; print(steercap.__version__, steercap.__file__)")
    version, place = said.strip().split(" ", 1)
    if not place.startswith(str(commands.parent)):
        sys.exit(f"steercap is imported from {place}")
    if not wheel.name.startswith(f"steercap-{version}-"):
        sys.exit(f"{wheel.name} holds steercap {version}")
    return sorted(wheel.parent.iterdir())


def main() -> None:
    """Check the repository that this script is in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="of any commit, tagged or not; keep nothing")
    parser.add_argument("--pip-args", default="", help="further arguments of every pip call")
    given = parser.parse_args()
    if found := disagreements(ROOT, released=not given.dry_run):
        sys.exit("\n".join(found))
    with tempfile.TemporaryDirectory(prefix="steercap-release-") as scratch:
        made = build(Path(scratch).resolve(), given.pip_args.split())
        names = ", ".join(path.name for path in made)
        if given.dry_run:
            print(f"{names} could be published; nothing is kept")
            return
        shutil.rmtree(DIST, ignore_errors=True)
        DIST.mkdir(parents=True)
        for path in made:
            shutil.copy2(path, DIST)
    print(f"{names}: in {DIST.relative_to(ROOT)}, to be published")


if __name__ == "__main__":
    main()
