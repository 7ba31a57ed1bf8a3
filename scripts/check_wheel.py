"""Does the wheel work where the repository is not?

    python scripts/check_wheel.py [--pip-args "--index-url ..."] [--folder DIR] [--no-engine]

Builds sdist and wheel of what git tracks, has twine read them, and installs the wheel in a fresh environment, in two
steps. With the base dependencies alone, what capture and steering need works, and the rest says which extra it needs.
With everything that `make setup` installs, the command and the demo run. Versions are the pinned ones, all commands run
in an empty folder. Takes some minutes; needs a package index, and no GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
#: What the base dependencies need themselves.
BESIDE: Final = ("wadler-lindig",)
#: What must work with the base alone, and what must say which extra it needs; argv: a folder. Also run by
#: tests/unit/test_extras.py, where the other libraries are hidden.
BASE_ONLY: Final = """
import asyncio
import sys
from pathlib import Path
import torch
import steercap
from steercap import *
from steercap.lab.mechanism import analysis, views
from steercap.steering import edits, formats
from steercap import errors, sync, testing
from steercap.lab.studies import sweeps as experiments
from steercap.lab import personas as persona, directions as vectors
from steercap.errors import MissingExtra
from steercap.captures.quantisation import Quantiser
from steercap.lab.directions import Contrast, directions_of
from steercap.steering import DirectionSet, LayerVectors

out = Path(sys.argv[1])
rows = torch.randn(8, 2, 4)
contrast = Contrast(rows + 1, rows - 1, range(8), range(8))
found = directions_of("warm", contrast, [1, 2])
assert set(found.provenance.auc["warm"]) == {1, 2}
found.save(out / "warm.safetensors")
loaded = DirectionSet.load(out / "warm.safetensors")
SteeringSpec([Add(loaded["warm"][1], layer=1), Cap(loaded["warm"][2], layers=[2], high=1.0)]).save(out / "spec.safetensors")
CaptureSpec(layers=[1, 2], tokens="prompt")
model, blocking = SteerModel("some/model"), sync.SteerModel("some/model")
heat = views.TokenHeatmap(["a", "b"], [0.5, 1.0])
assert "<span" in heat._repr_html_()

def says(extra, work):
    try:
        work()
    except MissingExtra as error:
        assert f"pip install 'steercap[{extra}]'" in str(error), error
    else:
        raise AssertionError(f"{extra} was not missed")

says("plots", lambda: heat.plot(out / "heat.png"))
says("gguf", lambda: formats.save_control_vector(loaded["warm"], out / "warm.gguf", model_hint="llama"))
says("probes", lambda: directions_of("warm", contrast, [1, 2], method="probe"))
says("probes", lambda: vectors.contrast.check_groups(range(8), range(8), method="probe", held_out=0.25))
says("quantisation", lambda: Quantiser(Point(0, "z"), torch.zeros(2, 2, 4)).encode(torch.zeros(1, 8)))
says("personas", lambda: persona.load_trait(out / "trait.yaml"))
says("personas", lambda: persona.shipped_traits())
says("experiments", lambda: asyncio.run(experiments.run_sweep(None, None, out=out)))
says("personas", lambda: asyncio.run(persona.run_persona(None, None, out=out)))
says("cuda", lambda: asyncio.run(model.start()))
says("cuda", lambda: views.Unembedding.load("some/model"))
says("cuda", lambda: testing.Reference(out))
says("cli", lambda: __import__("steercap.cli.app"))
print("all of it")
"""


class Checks:
    """One run.

    Args:
        folder: for everything that is made.
        pip_arguments: of every pip call.
    """

    def __init__(self, folder: Path, pip_arguments: Sequence[str]) -> None:
        self._folder, self._pip = folder, list(pip_arguments)
        self._empty = folder / "empty"
        self._empty.mkdir()
        # Nothing of the repository, and none of the variables that this very process may have been given for it.
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self._environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

    def run(self, *command: str | Path, at: Path | None = None, code: int = 0) -> str:
        """Run a command in the empty folder; what it says.

        Raises:
            SystemExit: it ends with another code.
        """
        began, shown = time.monotonic(), " ".join(str(part).splitlines()[0] for part in command if str(part).strip())
        done = subprocess.run(
            list(map(str, command)),
            cwd=at or self._empty,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != code:
            sys.exit(f"{shown}\nended with {done.returncode}, not {code}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        print(f"{time.monotonic() - began:6.1f} s  {shown[:150]}", flush=True)
        return done.stdout + done.stderr

    def environment(self, name: str) -> Path:
        """A new virtual environment; its folder of commands."""
        self.run(sys.executable, "-m", "venv", self._folder / name)
        return self._folder / name / "bin"

    def install(self, commands: Path, *what: str | Path) -> None:
        """Have pip install something."""
        self.run(
            commands / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *self._pip, *what
        )

    def built(self) -> Path:
        """The wheel, of a copy of what git knows: an old build/ beside it must not get in."""
        source, dist = self._folder / "source", self._folder / "dist"
        listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, text=True)
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, source / name)
        tools = self.environment("tools")
        self.install(tools, "build", "twine")
        self.run(tools / "python", "-m", "build", "--outdir", dist, source)
        self.run(tools / "twine", "check", "--strict", *sorted(dist.iterdir()))
        (wheel,) = dist.glob("*.whl")
        return wheel


def base_requirements() -> list[str]:
    """The base dependencies but torch, as pinned."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[<>=!~ ]", one)[0] for one in project["dependencies"]] + list(BESIDE)
    lists = "".join((ROOT / "requirements" / name).read_text() for name in ("cpu.txt", "dev.txt"))
    pinned = dict(line.split("==") for line in lists.split())
    return [f"{name}=={pinned[name]}" for name in names if name != "torch"]


def check_content(wheel: Path) -> None:
    """See that the wheel holds all of the package, and nothing else."""
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "steercap"], cwd=ROOT, text=True)
    wanted = {name for name in listed.splitlines() if (ROOT / name).is_file()}
    if held != wanted:
        sys.exit(f"the wheel lacks {sorted(wanted - held)}, and has {sorted(held - wanted)} beside the package")


def check_base(checks: Checks, commands: Path, results: Path) -> None:
    """See that the base works by itself, and names what it lacks."""
    if "all of it" not in checks.run(commands / "python", "-c", BASE_ONLY, results):
        sys.exit("the base did not do all that it must")
    said = checks.run(commands / "steercap", "--help", code=1)
    if not re.fullmatch(r"steercap: this needs \w+, which is not installed: pip install 'steercap\[cli\]'\n", said):
        sys.exit(f"steercap without its extra says:\n{said}")


def check_all(checks: Checks, commands: Path, results: Path, *, engine: bool) -> None:
    """See that the command and the demo work, from the wheel."""
    home = checks.run(commands / "python", "-c", "import steercap; print(steercap.__file__)")
    if not home.startswith(str(commands.parent)):
        sys.exit(f"steercap is imported from {home}")
    print(checks.run(commands / "steercap", "--version").strip())
    checks.run(commands / "steercap", "persona", "traits")
    checks.run(commands / "steercap", "doctor")
    if not engine:
        return
    checks.run(commands / "steercap", "demo", "--out", results / "demo")
    if not (results / "demo" / "demo.png").stat().st_size:
        sys.exit("the demo drew nothing")
    print(checks.run(commands / "steercap", "generate", "The capital of France is", "--max-tokens", "8").strip())


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pip-args", default="", help="further arguments of every pip call")
    parser.add_argument("--folder", type=Path, help="a new folder to work in, which is kept")
    parser.add_argument("--no-engine", action="store_true", help="leave out what starts an engine")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="steercap-wheel-") as scratch:
        folder = given.folder.resolve() if given.folder else Path(scratch)
        results = folder / "results"
        results.mkdir(parents=True)
        checks = Checks(folder, given.pip_args.split())
        wheel = checks.built()
        check_content(wheel)
        commands, requirements = checks.environment("fresh"), ROOT / "requirements"
        checks.install(commands, "-r", requirements / "torch.txt")
        checks.install(commands, "--no-deps", *base_requirements())
        checks.install(commands, "--no-deps", wheel)
        check_base(checks, commands, results)
        for name in ("cpu.txt", "dev.txt"):
            checks.install(commands, "--no-deps", "-r", requirements / name)
        check_all(checks, commands, results, engine=not given.no_engine)
    print("the wheel works without the repository")


if __name__ == "__main__":
    main()
