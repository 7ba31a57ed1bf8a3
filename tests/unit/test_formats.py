"""Files of steering: what goes in comes out, and what is not what it says is refused by name."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from workers import known_schemas

from steercap import Calibration
from steercap.captures.handle import CaptureHandle
from steercap.captures.lens import TunedLens
from steercap.captures.manifest import Manifest
from steercap.captures.quantisation import Codes, Quantiser
from steercap.captures.sketch import Sketch
from steercap.cli.inspection import inspected
from steercap.core.program import Configuration
from steercap.core.spec import Point
from steercap.core.tokens import TokenSelection
from steercap.errors import InvalidFile, InvalidSpec, InvalidVector, LayerOutOfRange, UnknownName
from steercap.files.native import NativeHeader, _signed
from steercap.files.tables import read_table
from steercap.lab.datasets.dataset import ActivationDataset
from steercap.lab.personas import load_trait
from steercap.lab.personas.capture import load_rows
from steercap.lab.personas.roles import AssistantAxis, load_roles, load_roles_run
from steercap.lab.personas.roles.rows import read_rows_header
from steercap.saes.sae import SAE
from steercap.steering import DirectionSet, LayerVectors
from steercap.steering.edits import EDITS, Edit
from steercap.steering.edits.add import Add
from steercap.steering.edits.replace import Cap, Replace
from steercap.steering.formats import (
    load_capping,
    load_control_vector,
    load_layers_pt,
    read_header,
    save_control_vector,
    save_layers_pt,
)
from steercap.steering.lowering import lower
from steercap.steering.spec import SteeringSpec

WIDTH, LAYERS = 8, 6
SITES = ("resid_pre", "resid_post", "attn_out", "mlp_out")
#: Arguments that no default fits, by field; a new edit whose fields are vectors and numbers needs none.
ARGUMENTS: dict[str, Any] = {"low": -0.1, "high": 1 / 3, "positions": (2, -1), "elements": slice(1, None, 2)}
PLACES: list[dict[str, Any]] = [
    {"layer": -1},
    {"layer": np.int64(2), "site": "mlp_out"},
    {"layers": slice(None, None, 2)},
    {"layers": range(1, 4), "site": "resid_pre"},
    {"layers": [0, 5, -2]},
    {"layers": np.array([1, 2])},
    {"layers": "all", "site": "attn_out"},
]
TOKENS: list[Any] = ["all", ["prompt", 3, -1, slice(-5, None, 2)], range(4), slice(2, 7)]


def compiled(spec: SteeringSpec) -> Configuration:
    armed = {Point(layer, site): number for number, (layer, site) in enumerate(_points())}
    schemas = known_schemas(armed, WIDTH, LAYERS)
    return lower(spec, armed=armed, schemas=schemas, num_layers=LAYERS, edits_per_point=64).configuration


def selections(spec: SteeringSpec) -> list[TokenSelection]:
    return [edit.selection for edit in spec.flat()]


def _points() -> list[tuple[int, str]]:
    return [(layer, site) for layer in range(LAYERS) for site in SITES]


def an_edit(name: str, **where: Any) -> Edit:
    """One of every operation, with vectors and numbers for its fields."""
    kind = EDITS[name]
    rows = name in {"replace", "low_rank"}
    chosen: dict[str, Any] = dict(where)
    for field in dataclasses.fields(kind):
        if field.name in {"layer", "layers", "site", "tokens", "part", "model"}:
            continue
        if field.name in ARGUMENTS:
            chosen[field.name] = ARGUMENTS[field.name]
        elif "Vector" in str(field.type):
            shape = (2,) if name == "low_rank" and field.name == "bias" else (2, WIDTH) if rows else (WIDTH,)
            chosen[field.name] = torch.randn(shape)
        else:
            chosen[field.name] = True if "bool" in str(field.type) else 0.1
    return kind(**chosen)


def some_vectors(**labels: str) -> LayerVectors:
    return LayerVectors({4: torch.randn(WIDTH), 1: torch.randn(WIDTH)}, **labels)


def rewritten(path: Path, *, tensors: dict[str, torch.Tensor] | None = None, **header: Any) -> Path:
    """The same file with other tensors, or with other entries in its header, and the hash of that."""
    kept = load_file(path) if tensors is None else tensors
    with safe_open(path, framework="pt") as file:
        old = json.loads(file.metadata()["steercap"])
    new = old | header
    with contextlib.suppress(msgspec.ValidationError):  # whose hash nobody will look at
        new["sha256"] = _signed(msgspec.convert(new, NativeHeader), kept).sha256
    save_file(kept, path, {"steercap": json.dumps(new)})
    return path


@pytest.mark.parametrize("name", list(EDITS))
@pytest.mark.parametrize("number", range(len(PLACES)))
def test_a_spec_compiles_to_the_same_after_a_file(name, number, tmp_path) -> None:
    """Every edit, with all its fields, at every way to write a layer, comes back to the bit."""
    tokens = {} if name == "replace" else {"tokens": TOKENS[number % len(TOKENS)]}
    spec = SteeringSpec([an_edit(name, **PLACES[number], **tokens)])
    loaded = SteeringSpec.load(spec.save(tmp_path / "x.safetensors"))
    assert compiled(loaded).digest == compiled(spec).digest
    assert selections(loaded) == selections(spec)


def test_specs_inside_specs_keep_their_norms(tmp_path) -> None:
    """Nesting and preserve_norm survive, and an edit that is there twice is stored once."""
    add = an_edit("add", layer=1)
    inner = SteeringSpec([add, an_edit("cap", layers="all")], preserve_norm=True)
    spec = SteeringSpec([add, inner, SteeringSpec([an_edit("replace", layer=0)])])
    loaded = SteeringSpec.load(spec.save(tmp_path / "x.safetensors", model="tiny"))
    assert compiled(loaded).digest == compiled(spec).digest
    assert [type(edit) for edit in loaded.edits] == [Add, SteeringSpec, SteeringSpec]
    assert set(load_file(tmp_path / "x.safetensors")) == {
        "edits.0.vector",
        "edits.1.edits.1.vector",
        "edits.2.edits.0.rows",
    }
    assert read_header(tmp_path / "x.safetensors").model == "tiny"


def test_vectors_and_labels_come_back(tmp_path) -> None:
    """LayerVectors are equal after a file, equal vectors of two layers included."""
    vector = torch.randn(WIDTH)
    vectors = LayerVectors({3: vector, 0: vector}, name="evil", model="tiny", site="attn_out")
    assert LayerVectors.load(vectors.save(tmp_path / "new" / "x.safetensors")) == vectors
    assert read_header(tmp_path / "new" / "x.safetensors").model == "tiny"


def test_a_file_has_the_rights_of_any_other(tmp_path) -> None:
    """Colleagues may read what the umask lets them read."""
    (tmp_path / "other").touch()
    saved = some_vectors().save(tmp_path / "x.safetensors")
    assert saved.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_file_appears_whole_or_not_at_all(tmp_path, monkeypatch) -> None:
    """A write that fails leaves the old file, and nothing beside it."""
    path = some_vectors().save(tmp_path / "x.safetensors")
    old = path.read_bytes()

    def full(*_: Any) -> Iterator[bytes]:
        yield b"half of it"
        raise OSError("no space left on device")

    monkeypatch.setattr("steercap.files.base.encoded", full)
    with pytest.raises(OSError, match="no space"):
        some_vectors().save(path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


@dataclasses.dataclass(frozen=True, eq=False)
class Homemade(Add):
    """An edit that no other installation knows."""


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (Homemade(torch.ones(WIDTH), layer=0), "not one of steercap's edits"),
    ],
)
def test_what_a_file_cannot_say_is_not_saved(edit, says, tmp_path) -> None:
    """An edit or a field that could not be read again is an InvalidSpec, and there is no file."""
    with pytest.raises(InvalidSpec, match=says):
        SteeringSpec([edit]).save(tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("load", [SteeringSpec.load, LayerVectors.load, read_header])
def test_a_file_that_is_not_ours_is_refused(load, tmp_path) -> None:
    """Missing, empty, foreign and truncated files are InvalidFile with the path."""
    path = tmp_path / "x.safetensors"
    whole = some_vectors().save(tmp_path / "whole.safetensors").read_bytes()
    for content in (None, b"", b"not safetensors at all", whole[:40], whole[:-1]):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InvalidFile, match=r"x\.safetensors cannot be read"):
            load(path)
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(InvalidFile, match="not of steercap"):
        load(path)


def test_a_file_of_another_kind_says_how_to_read_it(tmp_path) -> None:
    """Steering, vectors and captures are told apart, each with the way to read it."""
    spec = SteeringSpec([an_edit("add", layer=0)]).save(tmp_path / "spec.safetensors")
    with pytest.raises(InvalidFile, match=r"holds vectors, not steering.*LayerVectors\.load"):
        SteeringSpec.load(some_vectors().save(tmp_path / "vectors.safetensors"))
    with pytest.raises(InvalidFile, match=r"holds steering, not vectors.*SteeringSpec\.load"):
        LayerVectors.load(spec)
    with pytest.raises(InvalidFile, match="spec"):
        CaptureHandle.load(spec)
    save_file({"a": torch.zeros(2)}, tmp_path / "captures", {"steercap": '{"version": 1, "request_id": "0"}'})
    with pytest.raises(InvalidFile, match=r"captures.*CaptureHandle\.load"):
        SteeringSpec.load(tmp_path / "captures")


LOADERS = {
    "captures": CaptureHandle.load,
    "vectors": LayerVectors.load,
    "directions": DirectionSet.load,
    "calibration": Calibration.load,
    "sketch": Sketch.load,
    "steering": SteeringSpec.load,
    "codes": Codes.load,
    "quantiser": Quantiser.load,
    "axis": AssistantAxis.load,
    "rows of a persona": load_rows,
    "rows of a role": lambda path: read_rows_header(Path(path)),
    "header": read_header,
    "layers.pt": lambda path: load_layers_pt(path, first_row=0),
    "control vector": load_control_vector,
    "capping": load_capping,
    "table": lambda path: read_table(path, msgspec.Struct),
    "trait": load_trait,
    "roles": load_roles,
    "run of roles": load_roles_run,
    "manifest": Manifest.load,
    "tuned lens": TunedLens.load,
    "SAE": SAE.load,
    "data set": ActivationDataset,
    "inspect": lambda path: inspected(Path(path)),
}
#: Those that read folders.
FOLDERS = {"roles", "run of roles", "manifest", "tuned lens", "SAE", "data set", "inspect"}


@pytest.mark.parametrize("name", LOADERS)
def test_what_cannot_be_loaded_is_an_error_that_says_what_is_there(name, tmp_path) -> None:
    """A folder, nothing, an empty file, noise, or a file of another kind: InvalidFile with the path, in plain words."""
    load = LOADERS[name]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ("here.safetensors" if name not in FOLDERS else "here.txt")).write_bytes(b"x")
    (tmp_path / "formal.safetensors").touch()
    (tmp_path / "noise.safetensors").write_bytes(b"no file of anybody's " * 20)
    (tmp_path / "noise.parquet").write_bytes(b"no file of anybody's " * 20)
    save_file({"a": torch.ones(2)}, tmp_path / "foreign.safetensors")
    torch.save({"a": 1}, tmp_path / "foreign.pt")
    SteeringSpec([Add(torch.ones(2), layer=1)]).save(tmp_path / "ours.safetensors")
    said = {}
    for path in (*tmp_path.iterdir(), tmp_path / "normal.safetensors", tmp_path / "none" / "there.gguf"):
        if path.name == "ours.safetensors" and name in {"steering", "header", "inspect"}:
            continue
        with pytest.raises(InvalidFile, match=re.escape(str(path))) as raised:
            load(path)
        said[path.name] = str(raised.value)
    if name not in FOLDERS:
        assert "it is a folder; give one of the files in it: here.safetensors" in said["folder"]
        assert "there is no such file" in said["normal.safetensors"]
        assert "formal.safetensors'?)" in said["normal.safetensors"]
        assert "nor a folder" in said["there.gguf"]
        assert "formal.safetensors cannot be read: it is empty" in said["formal.safetensors"]
    if name in {"captures", "vectors", "directions", "calibration", "sketch", "codes", "quantiser", "axis"}:
        assert f"holds steering, not {name}; read it with SteeringSpec.load" in said["ours.safetensors"]


def test_a_changed_tensor_is_noticed(tmp_path) -> None:
    """One bit of the tensors that is not as it was saved is an InvalidFile."""
    path = some_vectors().save(tmp_path / "x.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(InvalidFile, match=r"changed after it was saved.*copy"):
        LayerVectors.load(path)


def test_nan_in_a_file_is_refused(tmp_path) -> None:
    """A file is checked as a user's own tensors are, even when its hash is right."""
    path = SteeringSpec([an_edit("add", layer=0)]).save(tmp_path / "x.safetensors")
    rewritten(path, tensors={"edits.0.vector": torch.full((WIDTH,), float("nan"))})
    with pytest.raises(InvalidFile, match=r"x\.safetensors.*NaN"):
        SteeringSpec.load(path)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"version": 2}, r"version 2.*upgrade"),
        ({"kind": "pictures"}, r"'pictures'.*upgrade"),
        ({"version": "one"}, "cannot be read"),
        ({"convention": "layers count from 1"}, "counts layers in another way"),
        ({"content": {"type": "sharpen", "fields": {}}}, r"unknown edit 'sharpen'; known: 'ablate'.*upgrade"),
        ({"content": {"type": "add", "fields": {"vector": [1], "gamma": 1}}}, r"\['gamma'\].*upgrade"),
        ({"content": {"type": "add", "fields": {"layer": 1}}}, r"add lacks \['vector'\]"),
        ({"content": {"type": "add", "fields": {"vector": {"tensor": "x"}}}}, r"'tensor': 'x'"),
        ({"content": {"type": "add", "fields": {"vector": [1], "layer": 1, "tokens": {"tokens": ["odd"]}}}}, "'odd'"),
        ({"content": {"type": "add", "fields": {"vector": [1], "layers": {"range": ["a", 0, 1]}}}}, "is not valid"),
        ({"content": {"type": "SteeringSpec", "fields": {"edits": []}}}, "at least one edit"),
        ({"content": {"set": [1]}}, "this version of steercap does not know"),
        ({"content": {"type": "add", "fields": {"vector": [1.0], "layer": 1}}}, "says that it holds steering.*Add"),
    ],
)
def test_a_header_that_is_newer_or_broken_is_refused(header, says, tmp_path) -> None:
    """What this steercap does not know is named, with the remedy; nothing is left out silently."""
    path = rewritten(SteeringSpec([an_edit("add", layer=0)]).save(tmp_path / "x.safetensors"), **header)
    with pytest.raises(InvalidFile, match=f"x.safetensors.*{says}"):
        SteeringSpec.load(path)


def test_layer_vectors_are_a_mapping_of_copies() -> None:
    """Layers come sorted, tensors are float32 copies, and equality is that of labels and bits."""
    mine = torch.ones(WIDTH, dtype=torch.float64)
    vectors = LayerVectors({np.int64(5): mine, 2: np.ones(WIDTH)}, name="evil")
    mine.zero_()
    assert list(vectors) == [2, 5]
    assert torch.equal(vectors[5], torch.ones(WIDTH))
    assert (len(vectors), vectors.width, 3 in vectors) == (2, WIDTH, False)
    same = LayerVectors(dict(vectors), name="evil")
    assert vectors == same
    assert hash(vectors) == hash(same)
    assert vectors != LayerVectors(dict(vectors))
    assert vectors != LayerVectors({2: mine, 5: mine}, name="evil")
    assert vectors != dict(vectors)
    assert "layers=[2, 5], width=8, name='evil'" in repr(vectors)


@pytest.mark.parametrize(
    ("vectors", "labels", "error", "says"),
    [
        ({}, {}, InvalidSpec, "no vectors"),
        ([torch.ones(2)], {}, InvalidSpec, "mapping"),
        ({-1: torch.ones(2)}, {}, InvalidSpec, "count from 0"),
        ({True: torch.ones(2)}, {}, InvalidSpec, "integers"),
        ({"1": torch.ones(2)}, {}, InvalidSpec, "integers"),
        ({1: torch.ones(2)}, {"site": "resid"}, UnknownName, "resid_post"),
        ({1: torch.ones(2)}, {"name": 3}, InvalidSpec, "name=3"),
        ({1: "abc"}, {}, InvalidVector, "real numbers"),
        ({1: torch.ones(2, 2)}, {}, InvalidVector, r"\(2, 2\)"),
        ({1: torch.ones(0)}, {}, InvalidVector, r"\(0,\)"),
        ({1: torch.ones(2), 2: torch.ones(3)}, {}, InvalidVector, r"\{1: 2, 2: 3\}"),
        ({1: torch.tensor([1.0, float("inf")])}, {}, InvalidVector, "1 values of 2"),
    ],
)
def test_layer_vectors_that_cannot_be_are_refused(vectors, labels, error, says) -> None:
    """Each way to be wrong has its error, with what was got."""
    with pytest.raises(error, match=says):
        LayerVectors(vectors, **labels)


@pytest.mark.parametrize("legacy", [False, True])
def test_persona_vectors_skip_the_row_of_the_embeddings(legacy, tmp_path) -> None:
    """With first_row=1 row i is layer i - 1, with first_row=0 layer i, whatever floating dtype torch saved."""
    rows = torch.randn(LAYERS + 1, WIDTH).half()
    torch.save(rows, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    persona = load_layers_pt(tmp_path / "x.pt", first_row=1, name="evil", model="tiny")
    plain = load_layers_pt(tmp_path / "x.pt", first_row=0)
    assert (list(persona), list(plain)) == (list(range(LAYERS)), list(range(LAYERS + 1)))
    assert all(torch.equal(persona[layer], rows[layer + 1].float()) for layer in persona)
    assert all(torch.equal(plain[layer], rows[layer].float()) for layer in plain)
    assert (persona.name, persona.model, persona.site) == ("evil", "tiny", "resid_post")


@pytest.mark.parametrize("first_row", [0, 1])
def test_layers_are_written_as_they_are_read(first_row, tmp_path) -> None:
    """A tensor that torch.load reads has a row for each layer, after a row of zeros if first_row=1."""
    vectors = LayerVectors({layer: torch.randn(WIDTH) for layer in range(3)})
    path = save_layers_pt(vectors, tmp_path / "x.pt", first_row=first_row)
    rows = torch.load(path, weights_only=True)
    assert rows.shape == (3 + first_row, WIDTH)
    assert not rows[:first_row].any()
    assert load_layers_pt(path, first_row=first_row) == vectors


def test_a_base_is_given_and_a_gap_is_not_filled(tmp_path) -> None:
    """What row 0 means is never guessed, and a missing layer never becomes zeros."""
    torch.save(torch.ones(3, WIDTH), tmp_path / "x.pt")
    with pytest.raises(TypeError, match="first_row"):
        load_layers_pt(tmp_path / "x.pt")
    for first_row in (2, None, True, [0], 1.0, "1"):
        with pytest.raises(InvalidSpec, match="first_row="):
            load_layers_pt(tmp_path / "x.pt", first_row=first_row)
    with pytest.raises(InvalidSpec, match=r"layers \[0, 2, 3\]"):
        save_layers_pt(some_vectors(), tmp_path / "y.pt", first_row=0)
    assert not (tmp_path / "y.pt").exists()
    assert load_layers_pt(tmp_path / "x.pt", first_row=np.int64(1)) == load_layers_pt(tmp_path / "x.pt", first_row=1)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (torch.ones(3), r"a tensor \(3,\)"),
        (torch.ones(3, 4, dtype=torch.int64), "int64"),
        ({"vector": torch.ones(3, 4)}, "dict, not a tensor"),
        (torch.ones(1, 4), "leaves no layer"),
        (torch.ones(3, 0), r"shape \(0,\)"),
        (torch.full((3, 4), float("nan")), "NaN"),
    ],
)
def test_a_tensor_of_another_shape_is_refused(content, says, tmp_path) -> None:
    """What is in the file is named, and what should be."""
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(InvalidFile, match=rf"x\.pt.*{says}"):
        load_layers_pt(tmp_path / "x.pt", first_row=1)


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("load", [lambda path: load_layers_pt(path, first_row=0), load_capping])
def test_code_in_a_pt_file_is_refused_and_not_run(load, tmp_path) -> None:
    """A .pt file is read for its tensors only."""
    trap, sprung = Trap(tmp_path / "sprung"), tmp_path / "sprung"
    torch.save(trap, tmp_path / "x.pt")
    (tmp_path / "y.pt").write_bytes(pickle.dumps(trap, protocol=2))
    for name in ("x.pt", "y.pt"):
        with pytest.raises(InvalidFile, match=rf"{name}.*runs no code"):
            load(tmp_path / name)
    assert not sprung.exists()
    pickle.loads((tmp_path / "y.pt").read_bytes())
    assert sprung.exists(), "the trap does not work, so it shows nothing"


def experiments(**changes: Any) -> dict[str, Any]:
    """A capping configuration as chatspace and the assistant axis save it, other keys included."""
    return {
        "vectors": {
            "L2": {"vector": torch.arange(1.0, WIDTH + 1).bfloat16(), "layer": 2, "note": "other keys"},
            "L3": {"vector": torch.ones(WIDTH), "layer": 3},
        },
        "experiments": [
            {"id": "one", "interventions": [{"vector": "L2", "cap": 1.5}], "seed": 0},
            {"id": "two", "interventions": [{"vector": "L3", "cap": -2}, {"vector": "L2", "cap": 0.25}]},
        ],
    } | changes


@pytest.mark.parametrize("bound", ["high", "low"])
def test_each_experiment_is_its_caps_in_order(bound, tmp_path) -> None:
    """An intervention is a Cap after its layer, at the bound that was asked for."""
    torch.save(experiments(), tmp_path / "x.pt")
    specs = load_capping(tmp_path / "x.pt", bound=bound)
    vector = torch.arange(1.0, WIDTH + 1)
    assert list(specs) == ["one", "two"]
    assert compiled(specs["one"]).digest == compiled(SteeringSpec([Cap(vector, **{bound: 1.5}, layer=2)])).digest
    both = [Cap(torch.ones(WIDTH), **{bound: -2.0}, layer=3), Cap(vector, **{bound: 0.25}, layer=2)]
    assert compiled(specs["two"]).digest == compiled(SteeringSpec(both)).digest


def test_the_published_cap_is_an_upper_bound(tmp_path) -> None:
    """Without `bound` a cap is the greatest projection."""
    torch.save(experiments(), tmp_path / "x.pt")
    (cap,) = load_capping(tmp_path / "x.pt")["one"].edits
    assert (cap.low, cap.high, cap.layer, cap.site) == (None, 1.5, 2, "resid_post")
    for wrong in ("cap", ["high"]):
        with pytest.raises(InvalidSpec, match="bound="):
            load_capping(tmp_path / "x.pt", bound=wrong)


def test_only_the_experiments_wanted_are_read(tmp_path) -> None:
    """One that is not whole does not stand in the way of another, and an unknown one is named."""
    broken = experiments()["experiments"] + [{"id": "bare", "interventions": []}]
    torch.save(experiments(experiments=broken), tmp_path / "x.pt")
    assert list(load_capping(tmp_path / "x.pt", experiments=["two"])) == ["two"]
    with pytest.raises(InvalidFile, match="'bare' has no interventions"):
        load_capping(tmp_path / "x.pt")
    with pytest.raises(UnknownName, match=r"'three'.*known: 'one', 'two', 'bare'"):
        load_capping(tmp_path / "x.pt", experiments=["three"])
    assert list(load_capping(tmp_path / "x.pt", experiments=iter(["two"]))) == ["two"]
    for wrong in (1, "two"):
        with pytest.raises(InvalidSpec, match=r"experiments=.*in a list"):
            load_capping(tmp_path / "x.pt", experiments=wrong)
    with pytest.raises(UnknownName, match="unknown experiment"):
        load_capping(tmp_path / "x.pt", experiments=[["two"]])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vectors": None}, "'vectors' that is NoneType"),
        ({"experiments": {}}, "'experiments' that is dict"),
        ({"experiments": [{"interventions": []}]}, "experiment 0 has no 'id'"),
        ({"experiments": [{"id": "one"}]}, "experiment 'one' has no 'interventions'"),
        ({"experiments": ["one"]}, "experiment 0 is str"),
        ({"experiments": experiments()["experiments"] * 2}, "'one' is there twice"),
        ({"experiments": [{"id": "one", "interventions": [{"vector": "L2"}]}]}, "'one', vector 'L2' has no 'cap'"),
        ({"experiments": [{"id": "one", "interventions": [{"vector": "L9", "cap": 1.0}]}]}, "'one' uses vector 'L9'"),
        ({"vectors": {"L2": {"vector": torch.ones(WIDTH)}}}, "vector 'L2' has no 'layer'"),
        ({"vectors": {"L2": {"layer": 2}}}, "vector 'L2' has no 'vector'"),
        ({"vectors": {"L2": {"vector": torch.ones(WIDTH), "layer": 2.0}}}, "'layer' that is float"),
        ({"vectors": {"L2": {"vector": torch.ones(WIDTH), "layer": -1}}}, "layer -1"),
        ({"vectors": {"L2": {"vector": torch.zeros(WIDTH), "layer": 1}}}, "vector is zero"),
        ({"vectors": {"L2": {"vector": torch.full((WIDTH,), float("nan")), "layer": 1}}}, "NaN"),
        ({"experiments": [{"id": "one", "interventions": [{"vector": "L2", "cap": float("nan")}]}]}, "nan"),
    ],
)
def test_a_capping_configuration_that_lacks_something_says_what(changes, says, tmp_path) -> None:
    """The experiment or vector is named; nothing is skipped."""
    torch.save(experiments(**changes), tmp_path / "x.pt")
    with pytest.raises(InvalidFile, match=rf"x\.pt.*{says}"):
        load_capping(tmp_path / "x.pt")


def repeng_export(
    path: Path, directions: dict[Any, np.ndarray], *, hint: str = "llama", arch: str = "controlvector"
) -> Path:
    """What repeng's `ControlVector.export_gguf` does."""
    writer = GGUFWriter(path, arch)
    writer.add_string(f"{arch}.model_hint", hint)
    writer.add_uint32(f"{arch}.layer_count", len(directions))
    for layer, direction in directions.items():
        writer.add_tensor(f"direction.{layer}", direction)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_control_vector_of_repeng_is_read_layer_for_layer(dtype, tmp_path) -> None:
    """direction.N is added after decoder layer N counted from 0: layer N of resid_post."""
    directions = {layer: np.random.default_rng(layer).normal(size=WIDTH).astype(dtype) for layer in (5, 1, 3)}
    vectors = load_control_vector(repeng_export(tmp_path / "x.gguf", directions))
    assert list(vectors) == [1, 3, 5]
    assert all(np.array_equal(vectors[layer].numpy(), directions[layer].astype(np.float32)) for layer in directions)
    assert (vectors.name, vectors.model, vectors.site) == ("", "llama", "resid_post")


def test_a_control_vector_is_written_as_repeng_does(tmp_path) -> None:
    """The header and tensors are those of an export, and reading gives back what was written."""
    vectors = some_vectors(name="evil", model="tiny")
    path = save_control_vector(vectors, tmp_path / "x.gguf")
    assert load_control_vector(path) == vectors
    reader = GGUFReader(path)
    fields = {key: reader.get_field(f"controlvector.{key}").contents() for key in ("model_hint", "layer_count")}
    assert fields == {"model_hint": "tiny", "layer_count": 2}
    assert {tensor.name: tensor.tensor_type.name for tensor in reader.tensors} == {
        "direction.1": "F32",
        "direction.4": "F32",
    }
    assert load_control_vector(save_control_vector(vectors, path, model_hint="llama")).model == "llama"


@pytest.mark.parametrize(
    ("vectors", "says"),
    [
        (LayerVectors({0: [1.0], 1: [1.0]}, model="tiny"), r"direction\.0"),
        (LayerVectors({1: [1.0]}), "model_hint="),
        (LayerVectors({1: [1.0]}, model="tiny", site="mlp_out"), "not at resid_post"),
    ],
)
def test_a_control_vector_nobody_could_use_is_not_written(vectors, says, tmp_path) -> None:
    """Layer 0, another site and no hint are errors before there is a file."""
    with pytest.raises(InvalidSpec, match=says):
        save_control_vector(vectors, tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())


def test_a_layer_that_gguf_cannot_have_is_left_out_as_the_error_says(tmp_path) -> None:
    """Of many layers the rest are written, under their own numbers."""
    vectors = LayerVectors({layer: [1.0 + layer, 2.0] for layer in range(12)}, name="joy", model="llama")
    with pytest.raises(InvalidSpec, match=r"leave it out .*vectors\.at_layers\(list\(vectors\)\[1:\]\)"):
        save_control_vector(vectors, tmp_path / "v.gguf")
    rest = vectors.at_layers(list(vectors)[1:])
    assert load_control_vector(save_control_vector(rest, tmp_path / "v.gguf")) == rest
    assert rest == LayerVectors({layer: vectors[layer] for layer in range(1, 12)}, name="joy", model="llama")
    with pytest.raises(LayerOutOfRange, match=r"no vectors for layers \[12\]; they are for \[0, 1,"):
        vectors.at_layers([3, 12])


@pytest.mark.parametrize(
    ("directions", "arch", "says"),
    [
        ({1: np.ones(WIDTH, np.float32)}, "llama", "architecture 'llama'"),
        ({"one": np.ones(WIDTH, np.float32)}, "controlvector", r"'direction\.one'"),
        ({"01": np.ones(WIDTH, np.float32)}, "controlvector", r"'direction\.01'"),
        ({1: np.ones((2, WIDTH), np.float32)}, "controlvector", r"F32 \[2, 8\]"),
        ({1: np.ones(WIDTH, np.int8)}, "controlvector", r"I8 \[8\]; expected F32 or F16 or F64"),
        ({1: np.full(WIDTH, 1e300)}, "controlvector", "inf"),
        ({1: np.full(WIDTH, np.nan, np.float32)}, "controlvector", "NaN"),
        ({1: np.ones(2, np.float32), 2: np.ones(3, np.float32)}, "controlvector", "widths"),
        ({}, "controlvector", "no vectors"),
    ],
)
def test_a_gguf_file_of_something_else_is_refused(directions, arch, says, tmp_path) -> None:
    """A model, tensors that are no directions, and numbers that are none say so."""
    with pytest.raises(InvalidFile, match=rf"x\.gguf.*{says}"):
        load_control_vector(repeng_export(tmp_path / "x.gguf", directions, arch=arch))


@pytest.mark.parametrize(
    ("save", "load", "name"),
    [
        (save_control_vector, load_control_vector, "whole.gguf"),
        (
            lambda vectors, path: save_layers_pt(vectors, path, first_row=1),
            lambda path: load_layers_pt(path, first_row=1),
            "whole.pt",
        ),
        (lambda _, path: torch.save(experiments(), path), load_capping, "whole.pt"),
        (
            lambda _, path: SteeringSpec([an_edit("low_rank", layer=0)]).save(path),
            SteeringSpec.load,
            "whole.safetensors",
        ),
    ],
)
def test_a_truncated_file_is_refused_wherever_it_ends(save, load, name, tmp_path) -> None:
    """Missing, foreign and cut files are InvalidFile with the path, in every format."""
    layers = range(1 if load is load_control_vector else 0, 3)
    save(LayerVectors({layer: torch.randn(WIDTH) for layer in layers}, model="tiny"), tmp_path / name)
    content, path = (tmp_path / name).read_bytes(), tmp_path / "cut"
    with pytest.raises(InvalidFile, match="cut cannot be read"):
        load(path)
    cuts = [content[:size] for size in range(0, len(content) * 9 // 10, max(len(content) // 60, 1))]
    for cut in [*cuts, b"something else altogether"]:
        path.write_bytes(cut)
        with pytest.raises(InvalidFile, match="cut cannot be read"):
            load(path)


def test_a_replacement_keeps_its_positions(tmp_path) -> None:
    """The tokens of a Replace are its positions, and are not stored beside them."""
    spec = SteeringSpec([Replace(torch.ones(WIDTH), -1, layer=0)])
    (edit,) = SteeringSpec.load(spec.save(tmp_path / "x.safetensors")).edits
    assert edit.replaced == (-1,)


def test_a_number_changed_in_the_header_is_noticed(tmp_path) -> None:
    """The hash covers scales and layers too, not the tensors alone."""
    path = SteeringSpec([Add(torch.ones(WIDTH), 2.5, layer=0)]).save(tmp_path / "x.safetensors")
    path.write_bytes(path.read_bytes().replace(b'\\"scale\\":2.5', b'\\"scale\\":9.5'))
    with pytest.raises(InvalidFile, match="was changed after it was saved"):
        SteeringSpec.load(path)
