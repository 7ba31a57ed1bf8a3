"""The list of expected skips: what it says is so, and what is not on it fails a run."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import skips
from skips import HERE, SKIPS, UNEXPECTED, Skip, here, of, unexpected, wrong


def functions(file: Path) -> set[str]:
    """Names of the tests in a file."""
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("skip", SKIPS, ids=lambda skip: skip.tests[0])
def test_every_entry_names_tests_that_there_are(skip) -> None:
    """And kinds of machines that are known; tests that hold the rule are there, and no machine skips them."""
    assert skip.where
    assert all(isinstance(here(kind), bool) for kind in skip.where)
    for pattern in skip.tests:
        path, name = re.fullmatch(r"(\w+/\w+)\\\.py(?:::(\w+))?.*", pattern).groups()
        assert not name or name in functions(HERE / f"{path}.py"), pattern
    assert skip.instead, "no rule is held by tests alone that some machine skips"
    for test in skip.instead:
        path, _, name = test.partition("::")
        assert name.partition("[")[0] in functions(HERE / path), test
        assert not [other for other in of(test) if not other.sometimes], f"{test} is skipped itself on some machine"


def test_only_what_is_listed_may_be_skipped(monkeypatch) -> None:
    """And only on a machine of its kind, where it must be, unless it may be."""
    kinds = {"this": lambda: True, "other": lambda: False}
    monkeypatch.setattr(skips, "KINDS", kinds)
    here.cache_clear()
    entries = [
        Skip([r"a\.py::one"], ["this"], ["x"]),
        Skip([r"a\.py::two\[.*\]"], ["other", "this"], ["x"]),
        Skip([r"a\.py::three"], ["other"], ["x"]),
        Skip([r"a\.py::four"], ["this"], ["x"], sometimes=True),
    ]
    monkeypatch.setattr(skips, "SKIPS", entries)
    found = {
        name: (bool(wrong(name, skipped=True)), bool(wrong(name, skipped=False)))
        for name in ("a.py::one", "a.py::two[x]", "a.py::two", "a.py::three", "a.py::four", "a.py::five")
    }
    here.cache_clear()
    assert found == {
        "a.py::one": (False, True),
        "a.py::two[x]": (False, True),
        "a.py::two": (True, False),
        "a.py::three": (True, False),
        "a.py::four": (False, False),
        "a.py::five": (True, False),
    }


def test_marks_skip_only_what_is_listed(request) -> None:
    """Also tests of this run's files that are not selected: a tier of quick tests fails for the slow ones."""
    assert not request.config.stash[UNEXPECTED]


def test_a_mark_that_skips_a_test_unexpectedly_is_found(request) -> None:
    """One that does not hold here is none."""
    item = request.node
    assert not unexpected([item])
    item.add_marker(pytest.mark.skipif(False, reason="holds elsewhere"))
    assert not unexpected([item])
    item.add_marker(pytest.mark.skipif(True, reason="holds here"))
    (found,) = unexpected([item])
    assert re.search("unexpectedly_is_found is skipped on a machine .* in no entry", found)


@pytest.mark.slow
def test_a_skip_that_nobody_expects_fails_the_run(tmp_path) -> None:
    """Of a test, of what it needs, and of a whole file; in a process of xdist's, as in pytest's own."""
    (tmp_path / "test_a.py").write_text(
        "import pytest\n"
        "@pytest.fixture\n"
        "def needed(): pytest.skip('no such machine')\n"
        "def test_setup(needed): pass\n"
        "@pytest.mark.skipif(True, reason='never')\n"
        "def test_mark(): pass\n"
        "def test_call(): pytest.skip('not today')\n"
        "@pytest.mark.xfail\n"
        "def test_expected(): assert False\n"
        "def test_right(): pass\n"
    )
    (tmp_path / "test_b.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "skips",
        "-p",
        "no:cacheprovider",
        "-n",
        "1",
        str(tmp_path),
    ]
    options = [
        f"--rootdir={tmp_path}",
        "--continue-on-collection-errors",
        "-o",
        "asyncio_default_fixture_loop_scope=function",
    ]
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, *options], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert "1 xfailed" in done.stdout
    assert "1 failed" in done.stdout
    assert "3 errors" in done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1]
    for name, reason in [
        ("test_a.py::test_setup", "no such machine"),
        ("test_a.py::test_mark", "never"),
        ("test_b.py", "no_such_module"),
    ]:
        assert re.search(rf"{re.escape(name)} was skipped on a machine where .* in no entry.*{reason}", done.stdout), (
            done.stdout
        )
