"""What `pip install steercap` brings is enough for capture and steering; what else is needed is named by its extra."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch
from check_wheel import BASE_ONLY

import steercap
from steercap.core.extras import EXTRAS, extra, require
from steercap.errors import InvalidVector, MissingExtra
from steercap.lab.directions.contrast import area

ROOT = Path(steercap.__file__).parent
PROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
#: Where libraries may be imported as if they were there, and why.
BEHIND = {
    "cli/": ({"rich", "typer"}, "steercap.cli requires its extra before any module of the room is imported"),
    "adapters/": (
        {*EXTRAS["cuda"], "cloudpickle"},  # vLLM requires it
        "the start of an engine imports what needs them under extra('cuda', 'cpu')",
    ),
    "server/": ({"starlette", "prometheus_client"}, "the server imports it under extra('cuda', 'cpu')"),
    "kernels/triton_": ({"triton"}, "PyTorch brings it wherever there is a GPU to run it on"),
}


def name_of(requirement: str) -> str:
    """The distribution that a requirement asks for."""
    return re.split(r"[\[<>=!~ ]", requirement)[0].lower()


@cache
def installed() -> dict[str, list[str]]:
    """The distributions that bring each module, for each: asking takes a second."""
    return dict(packages_distributions())


def modules_of(distribution: str) -> set[str]:
    """What a distribution is imported as; its own name where it is not installed here."""
    found = {module for module, names in installed().items() if distribution in {n.lower() for n in names}}
    return {module for module in found if module.isidentifier()} or {distribution.replace("-", "_")}


def brought_by(name: str) -> set[str]:
    """The distributions of an extra, those of the extras that it names included."""
    found: set[str] = set()
    for requirement in PROJECT["optional-dependencies"][name]:
        if requirement.startswith("steercap["):
            found |= {one for part in requirement[len("steercap[") : -1].split(",") for one in brought_by(part)}
        else:
            found.add(name_of(requirement))
    return found


BASE = {module for requirement in PROJECT["dependencies"] for module in modules_of(name_of(requirement))}


class Imports(ast.NodeVisitor):
    """The imports of a module that are not of its own types: what is imported, under which extras, and whether late."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str, tuple[str, ...], bool]] = []
        self._extras: tuple[str, ...] = ()
        self._late = False

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [(node.lineno, alias.name.partition(".")[0], self._extras, self._late) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.found.append((node.lineno, (node.module or "").partition(".")[0], self._extras, self._late))

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        before = self._extras
        call = node.items[0].context_expr
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "extra":
            self._extras = tuple(one.value for one in call.args if isinstance(one, ast.Constant))
        self.generic_visit(node)
        self._extras = before

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        before, self._late = self._late, True
        self.generic_visit(node)
        self._late = before

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815


def optional_imports() -> Iterator[tuple[str, str, tuple[str, ...], bool]]:
    """Every import in the package of a library that the base does not bring: where, what, under which extras, if late."""
    for path in sorted(ROOT.rglob("*.py")):
        walk = Imports()
        walk.visit(ast.parse(path.read_text()))
        place = str(path.relative_to(ROOT))
        for line, library, extras, late in walk.found:
            if library in {*sys.stdlib_module_names, *BASE, "steercap"}:
                continue
            if not any(place.startswith(room) and library in known for room, (known, _) in BEHIND.items()):
                yield f"{place}:{line}", library, extras, late


def test_every_optional_library_is_imported_late_and_under_its_extra() -> None:
    """None is forgotten: what the base does not bring is imported where it is used, in a block that names its extra."""
    found = list(optional_imports())
    assert {library for _, library, _, _ in found} > {"matplotlib", "sklearn", "gguf", "pyarrow", "yaml", "httpx"}
    wrong = [
        (place, library)
        for place, library, extras, late in found
        if not (late and extras and all(library in EXTRAS[name] for name in extras))
    ]
    assert not wrong


def test_the_rooms_behind_an_extra_are_asked_for_under_it() -> None:
    """The command's room requires its own; vLLM's is imported under vLLM's by whoever is not in it."""
    assert 'require("cli")' in (ROOT / "cli" / "__init__.py").read_text()
    begun = 'with extra("cuda", "cpu"), releases.importing():\n                from steercap.adapters.engine import VllmEngine'
    assert begun in (ROOT / "adapters" / "launch.py").read_text()


def test_the_extras_are_those_of_the_package() -> None:
    """pyproject.toml brings, under each name, what the code believes it brings; `all` is all but engines, tools and Ray."""
    for name, libraries in EXTRAS.items():
        if name not in {"cpu", "cuda"}:
            brought = {module for one in brought_by(name) for module in modules_of(one)}
            assert set(libraries) <= brought, name
            assert len({*libraries}) == len(brought_by(name)), name
    assert {*EXTRAS, "all", "docs", "notebooks"} == set(PROJECT["optional-dependencies"])
    everything = {library for name in set(EXTRAS) - {"cpu", "cuda", "demo", "ray"} for library in EXTRAS[name]}
    assert everything <= {module for one in brought_by("all") for module in modules_of(one)}


def test_what_is_missing_is_named_by_its_extra() -> None:
    """A library of the extra; anything else that is missing is a broken installation, and shown as what it is."""
    with (
        pytest.raises(MissingExtra, match=r"needs matplotlib, .*: pip install 'steercap\[plots\]'$") as raised,
        extra("plots"),
    ):
        raise ModuleNotFoundError(name="matplotlib.figure")
    assert raised.value.name == "matplotlib"
    assert isinstance(raised.value, ImportError)
    with (
        pytest.raises(MissingExtra, match=r"'steercap\[cuda\]' or pip install 'steercap\[cpu\]'"),
        extra("cuda", "cpu"),
    ):
        raise ModuleNotFoundError(name="vllm")
    with pytest.raises(ModuleNotFoundError, match="No module named 'pyparsing'"), extra("plots"):
        raise ModuleNotFoundError("No module named 'pyparsing'", name="pyparsing")
    require("cli", "plots", "probes", "gguf", "experiments", "personas")


#: Run where nothing but the base can be imported.
BARE = f"""
import sys
for library in {sorted({library for names in EXTRAS.values() for library in names})}:
    sys.modules[library] = None  # as if it were not installed
"""


def bare(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python with the base alone."""
    command = [sys.executable, "-c", BARE + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment or None)


def test_the_base_is_enough_for_capture_and_steering(tmp_path) -> None:
    """Public names, specs, edits, directions and their files; the rest says which extra it needs, before it begins."""
    done = bare(BASE_ONLY, str(tmp_path), HOME=str(tmp_path), PYTHONPATH=str(ROOT.parent))
    assert done.stdout.strip() == "all of it", done.stderr


def test_the_command_without_its_extra_says_so_in_a_line() -> None:
    """No traceback, and an exit code that is not 0."""
    done = bare("import runpy; sys.argv = ['it']; runpy.run_module('steercap', run_name='__main__')")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.match(r"steercap: this needs \w+, which is not installed: ", line)
    assert line.endswith("pip install 'steercap[cli]'")


@pytest.mark.parametrize("seed", range(5))
def test_the_area_under_the_curve_is_scikit_learns(seed) -> None:
    """Also where numbers are equal, and there is one of a kind; NaN is not a number."""
    from sklearn.metrics import roc_auc_score

    torch.manual_seed(seed)
    positive, negative = torch.randn(1 + 7 * seed).double() + 0.5, torch.randn(9).double()
    if seed % 2:
        positive, negative = positive.round(), negative.round()
    kinds = [1] * len(positive) + [0] * len(negative)
    expected = roc_auc_score(kinds, torch.cat([positive, negative]).numpy())
    assert area(positive, negative) == pytest.approx(expected, abs=1e-12)
    with pytest.raises(InvalidVector, match="NaN or infinity"):
        area(positive, torch.tensor([0.0, torch.nan]).double())
