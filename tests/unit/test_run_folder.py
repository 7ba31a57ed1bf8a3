"""A run goes on in its own folder alone, and finds there what was whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from steercap import Add, CaptureSpec, LogitBias, Replace, SteeringSpec
from steercap.captures.manifest import CAPTURES, Document
from steercap.cli.captured import arguments_of_model
from steercap.client.compiling import RemoteEngine
from steercap.core.schema import PointSchema
from steercap.core.spec import Point
from steercap.errors import InvalidFile, RunDiffers
from steercap.files import base
from steercap.files.base import write_whole
from steercap.files.folder import NAMED, FolderKind, differences
from steercap.lab.datasets.collecting.reading import CollectArguments
from steercap.lab.datasets.definition import DATASET, define
from steercap.lab.personas.folder import RUN
from steercap.lab.studies.sweeps.grid import SWEEP


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run says of itself here."""

    model: str
    numbers: dict[str, int] = {}
    later: int = 0


def differing(found: Told, wanted: Told) -> list[str]:
    """The model and the numbers count; `later` does not."""
    names = [name for name in wanted.numbers if found.numbers[name] != wanted.numbers[name]]
    return [*(["model"] if found.model != wanted.model else []), *names]


KIND = FolderKind("told.json", Told, "walk", differing)


def test_a_folder_is_made_and_found_again(tmp_path) -> None:
    """New, it says nothing; then what was written, whatever is wanted that does not count."""
    folder = tmp_path / "a" / "b"
    assert KIND.check_same(folder, lambda found: found) is None
    assert not folder.exists()
    assert KIND.open(folder, Told("m")) is None
    KIND.write(folder, Told("m", later=1))
    assert KIND.open(folder, Told("m", later=2)) == Told("m", later=1) == KIND.read(folder)


def test_another_run_is_refused_before_anything_changes(tmp_path) -> None:
    """With what differs, of much the first of it; what is not known yet is taken from the folder."""
    numbers = {f"n{number}": number for number in range(NAMED + 2)}
    KIND.write(tmp_path, Told("m", numbers))
    half = tmp_path / f".x.json.{'0' * 32}"
    half.touch()
    with pytest.raises(RunDiffers, match=r"holds another walk: model; give another folder, or the walk"):
        KIND.open(tmp_path, Told("other", numbers))
    with pytest.raises(RunDiffers, match=r"walk: n1; n2; n3; n4; n5; and 1 more; give"):
        KIND.open(tmp_path, Told("m", {name: 2 * number for name, number in numbers.items()}))
    assert half.exists()
    assert KIND.check_same(tmp_path, lambda found: Told(found.model)) == Told("m", numbers)


def test_differences_are_said_by_field() -> None:
    """Entries of mappings one by one, None is not absence, a tuple is a list, and what may differ is left out."""
    found = {"model": {"name": "a"}, "layers": (1, 2), "sampling": {"stop": {"at": 1}}, "seed": 0, "later": 1}
    wanted = {"model": {"name": "b"}, "layers": [1, 2], "sampling": {"stop": {"at": 2}, "n": None}, "seed": 0}
    assert differences(found, wanted, but=("later",)) == [
        "model.name was 'a', is 'b'",
        "sampling.stop.at was 1, is 2",
        "sampling.n was not set, is None",
    ]
    assert differences(Told("m", {"a": 1}), Told("m", {"a": 1})) == []


def test_what_cannot_be_read_is_a_bad_file(tmp_path) -> None:
    """Broken, of other fields, or lacking what is compared: it is not taken for a new folder."""
    for content in (b"{", b'{"model": "m", "new": 1}', b'{"model": "\xff"}'):
        (tmp_path / "told.json").write_bytes(content)
        with pytest.raises(InvalidFile, match=r"told\.json cannot be read as the definition of a walk: .*; choose"):
            KIND.open(tmp_path, Told("m"))
    KIND.write(tmp_path, Told("m"))
    with pytest.raises(InvalidFile, match=r"told\.json lacks settings .*KeyError: 'n'.*choose another folder"):
        KIND.open(tmp_path, Told("m", {"n": 1}))


def test_half_written_files_of_the_dead_go_and_those_of_the_living_stay(tmp_path) -> None:
    """Another process that was started on the folder by mistake does not lose what it is writing."""
    script = "import os, sys; from pathlib import Path; from steercap.files.base import write_whole\n"
    script += "with write_whole(Path(sys.argv[1])) as scratch: scratch.touch(); os._exit(0)"
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "parts" / "dead")], check=True)
    (dead,) = (tmp_path / "parts").iterdir()
    (tmp_path / ".hidden").touch()
    with write_whole(tmp_path / "parts" / "living") as scratch:
        scratch.touch()
        assert KIND.open(tmp_path, Told("m")) is None
        assert scratch.exists()
    assert not dead.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "parts"]
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["living"]


def test_half_written_files_of_other_machines_stay_for_a_day(tmp_path, monkeypatch) -> None:
    """A process of another machine or container writes to the folder: its id says nothing here."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    with monkeypatch.context() as there:
        there.setattr("os.getpid", lambda: gone.pid)
        there.setattr(base, "_place", lambda: "0" * 8, raising=False)
        young, old = (base._scratch(tmp_path / name) for name in ("young", "old"))
    for scratch, days in ((young, 0.9), (old, 1.1)):
        scratch.touch()
        os.utime(scratch, times=(then := time.time() - days * 86_400, then))
    assert KIND.open(tmp_path, Told("m")) is None
    assert [*tmp_path.iterdir()] == [young]


#: As steercap 0.1.0 wrote them.
OLD_SWEEP = {
    "model": {"name": "m", "weights": "1f"},
    "vectors": {"warm": "9c"},
    "layers": [[1, 2]],
    "scales": [0.0, 1.0],
    "operations": ["add"],
    "tokens": "generated",
    "relative": False,
    "random": 3,
    "reversed": True,
    "seed": 0,
    "prompts": ["My day"],
    "sampling": {"max_tokens": 8},
    "samples": 1,
}
OLD_RUN = {"version": 1, "model": {"name": "m"}, "settings": {"traits": {}}, "done": {"generate/warm": "1f"}}


@pytest.mark.parametrize(("kind", "old"), [(SWEEP, OLD_SWEEP), (RUN, OLD_RUN)])
def test_old_folders_are_read_as_they_are(kind, old, tmp_path: Path) -> None:
    """The file's name, its fields, and how it is laid out; what is read is written as it was."""
    text = json.dumps(old, indent=2)
    (tmp_path / kind.file).write_text(text)
    found = kind.read(tmp_path)
    assert msgspec.to_builtins(found) == old
    kind.write(tmp_path, found)
    assert json.loads((tmp_path / kind.file).read_text()) == old


POINT, SCHEMA = Point(1, "resid_post"), PointSchema((8,), "float32")
ENGINE = RemoteEngine(
    {
        "armed": [0],
        "absent": {},
        "refused": {},
        "settings": {"codec": "raw", "codec_k": None, "codec_seed": 0, "edits_per_point": 8},
        "vllm": {
            "model_name": "m",
            "names": ["m"],
            "num_layers": 2,
            "max_model_len": 64,
            "vocabulary": 100,
            "batch_tokens": 64,
            "tokenizes": False,
            "pools": False,
        },
        "engines": 1,
    },
    {POINT: SCHEMA},
    1 << 20,
)


def collecting(steering: Any) -> dict[str, Any]:
    asked = CollectArguments(capture=CaptureSpec(layers=[1]), steering=steering)
    return asked.reading(SimpleNamespace(tokenizer=None), ENGINE).described()


def capturing(steering: Any) -> dict[str, Any]:
    model = SimpleNamespace(identity=lambda: {"name": "m"}, serving=SimpleNamespace(here=lambda: ENGINE))
    spec = None if steering is None else SteeringSpec([steering])
    return arguments_of_model(model, CaptureSpec(layers=[1]), spec)


def dataset(asked: dict[str, Any]) -> Any:
    return define({"name": "m"}, {POINT: SCHEMA}, documents_per_shard=1, asked=asked)


@pytest.mark.parametrize(
    ("kind", "described", "made"),
    [(DATASET, collecting, dataset), (CAPTURES, capturing, lambda asked: Document(1, "captures", "m", asked))],
    ids=["collect", "capture"],
)
@pytest.mark.parametrize(
    "steering",
    [
        lambda place: Add(torch.ones(8), layer=1, tokens=slice(place, None)),
        lambda place: LogitBias({3: 1.0}, tokens=["last_prompt", place]),
        lambda place: Replace(torch.ones(1, 8), [place], layer=1),
    ],
    ids=["edit", "bias", "replacement"],
)
def test_steering_at_other_tokens_is_another_run(kind, described, made, steering, tmp_path) -> None:
    """Their digest is one. Folders with steering from before its tokens were written go on, plain ones only plain."""
    first, other, plain = described(steering(1)), described(steering(2)), described(None)
    assert first["steering"] == other["steering"]
    kind.write(tmp_path, made(first))
    kind.open(tmp_path, made(described(steering(1))))
    for wanted in (other, plain):
        with pytest.raises(RunDiffers, match="steer"):
            kind.open(tmp_path, made(wanted))
    kind.write(tmp_path, made({name: first[name] for name in plain}))
    kind.open(tmp_path, made(other))
    kind.write(tmp_path, made(plain))
    with pytest.raises(RunDiffers, match="steering was "):
        kind.open(tmp_path, made(first))
