"""A path that does not exist is refused with the nearest one that does, wherever a path is given."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click import unstyle
from typer.testing import CliRunner

import steercap
from steercap import Calibration
from steercap.captures.lens import TunedLens
from steercap.captures.manifest import Manifest
from steercap.captures.sketch import Sketch
from steercap.cli.app import app
from steercap.engine.checkpoint import require_there
from steercap.files.fingerprint import nearest_path
from steercap.lab.datasets.collecting.sources import _files
from steercap.lab.datasets.dataset import ActivationDataset
from steercap.lab.personas.roles import load_roles
from steercap.saes import SAE
from steercap.steering.directions import DirectionSet
from steercap.steering.formats import load_control_vector, load_personas
from steercap.steering.layers import LayerVectors


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("vectors/clam.safetensors", " (did you mean 'vectors/calm.safetensors'?)"),
        ("vector/calm.safetensors", ", nor a folder {here}/vector (did you mean 'vectors/calm.safetensors'?)"),
        ("vectors/nothing-like-it", ""),
        ("other/folder/file", ", nor a folder {here}/other"),
        ("vectors/calm.safetensors", ""),
    ],
)
def test_a_path_that_does_not_exist_has_the_nearest_named(tmp_path, monkeypatch, given: str, hint: str) -> None:
    """In the form in which it was given; the first folder that is missing is said."""
    (tmp_path / "vectors").mkdir()
    (tmp_path / "vectors" / "calm.safetensors").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    assert nearest_path(given) == hint.format(here=tmp_path)
    assert nearest_path(tmp_path / given) == hint.format(here=tmp_path).replace("'vectors", f"'{tmp_path}/vectors")


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "vectors": ("calm.safetensors", LayerVectors.load),
    "directions": ("calm.safetensors", DirectionSet.load),
    "steering": ("calm.safetensors", steercap.SteeringSpec.load),
    "a calibration": ("calm.safetensors", Calibration.load),
    "a sketch": ("calm.safetensors", Sketch.load),
    "a capture": ("calm.safetensors", steercap.CaptureHandle.load),
    "a control vector": ("calm.gguf", load_control_vector),
    "persona vectors": ("calm.pt", load_personas),
    "a data set": ("wiki", ActivationDataset),
    "a run of captures": ("wiki", Manifest.load),
    "an SAE": ("wiki", SAE.load),
    "a tuned lens": ("wiki", TunedLens.load),
    "roles": ("wiki", load_roles),
    "a corpus": ("wiki.jsonl", lambda path: _files(str(path), None, None)),
    "a model": ("wiki", lambda path: require_there(str(path))),
}


@pytest.mark.parametrize("kind", READERS)
def test_who_reads_a_path_says_the_nearest(tmp_path, kind: str) -> None:
    name, read = READERS[kind]
    (tmp_path / name).mkdir()
    wrong = tmp_path / name.replace("wiki", "wkii").replace("calm", "clam")
    with pytest.raises(steercap.errors.SteercapError, match=rf"did you mean '{re.escape(str(tmp_path / name))}"):
        read(wrong)


@pytest.mark.parametrize(
    "words",
    [
        ["vectors", "show", "{wrong}"],
        ["inspect", "{wrong}"],
        ["generate", "hi", "--steer", "{wrong}"],
        ["generate", "hi", "--model", "{folder}/modle"],
        ["up", "{folder}/modle"],
        ["serve", "{folder}/modle"],
        ["serve", "{folder}/model", "--vectors", "calm={wrong}"],
    ],
)
def test_a_command_says_the_nearest(tmp_path, words: list[str]) -> None:
    """Before it starts anything, on a terminal of any width, which breaks a path where a line ends."""
    (tmp_path / "model").mkdir()
    (tmp_path / "calm.safetensors").write_bytes(b"x")
    given = [word.format(wrong=tmp_path / "clam.safetensors", folder=tmp_path) for word in words]
    found = CliRunner().invoke(app, given)
    right = "model" if "modle" in "".join(words) else "calm.safetensors"
    said = f"{found.output} {found.exception}"
    assert found.exit_code
    assert f"didyoumean'{tmp_path}/{right}'?" in re.sub(r"[\s│]+", "", unstyle(said)), said


def test_a_path_that_may_not_be_looked_at_has_no_hint() -> None:
    """Names of 300 letters are an OSError, as are folders that the user may not read."""
    assert nearest_path("a" * 300) == ""
