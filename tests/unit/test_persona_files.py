"""Files of personas in people's formats, written here by plain torch and read by steercap, and the other way round."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steercap.cli.contents import group_in
from steercap.errors import InvalidFile, InvalidSpec, LayerOutOfRange, UnknownName
from steercap.steering.formats import (
    load_components,
    load_levels,
    load_personas,
    load_steering_vector,
    save_default_levels,
    save_levels,
    save_persona_capture,
    save_steering_vector,
)
from steercap.steering.layers import LayerVectors

LAYERS, HIDDEN = 4, 6
ROLE, TRAIT = ("pos_0", "pos_3", "pos_all"), ("pos_neg", "pos_default", "pos_neg_50", "pos_default_50", "pos_70")


def rows(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a drawn [layers, hidden]."""
    return torch.randn(LAYERS, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def vectors_of(tensor: torch.Tensor, name: str = "", model: str = "") -> LayerVectors:
    """Return vectors of which row i is layer i."""
    return LayerVectors(dict(enumerate(tensor)), name=name, model=model)


def roles(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, dict[str, torch.Tensor]]:
    """Write a folder of three roles, with defaults beside it, by plain torch."""
    (folder / "vectors").mkdir(parents=True)
    found = {
        name: {level: rows(10 * place + at, dtype) for at, level in enumerate(ROLE)} for place, name in enumerate("abc")
    }
    for name, levels in found.items():
        torch.save(levels, folder / "vectors" / f"{name}.pt")
    default = {
        "activations": {"default_1": rows(99, dtype), "all_1": rows(98)},
        "metadata": {"counts": {"default_1": 7}},
    }
    torch.save(default, folder / "default_vectors.pt")
    return found


class TestFolders:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_roles_are_their_difference_from_the_default(self, dtype: torch.dtype, tmp_path: Path) -> None:
        """A role is pos_3 - default_1; row i is the output of layer i."""
        found = roles(tmp_path, dtype)
        read = load_personas(tmp_path / "vectors", model="m")
        assert read.level == "pos_3 - default_1"
        assert list(read.directions) == ["a", "b", "c"]
        assert (read.directions.site, read.directions.model) == ("resid_post", "m")
        for name, levels in found.items():
            wanted = levels["pos_3"].double() - rows(99, dtype).double()
            for layer in range(LAYERS):
                np.testing.assert_array_equal(read.directions[name][layer].numpy(), wanted[layer].float().numpy())
        assert read.left_out == {}
        assert read.found == dict.fromkeys(ROLE, 3)
        assert str(read) == "pos_3 - default_1 of 3 of 3 files"

    def test_traits_are_pos_neg_50(self, tmp_path: Path) -> None:
        """A trait is pos_neg_50, and needs no defaults."""
        levels = {level: rows(place) for place, level in enumerate(TRAIT)}
        torch.save(levels, tmp_path / "evil.pt")
        read = load_personas(tmp_path)
        assert read.level == "pos_neg_50"
        assert read.directions["evil"] == vectors_of(levels["pos_neg_50"], "evil")
        assert load_personas(tmp_path, level="pos_default").directions["evil"] == vectors_of(
            levels["pos_default"], "evil"
        )
        assert load_personas(tmp_path, level="pos_70", raw=True).directions["evil"] == vectors_of(
            levels["pos_70"], "evil"
        )
        with pytest.raises(InvalidFile, match=r"no .*default_vectors.pt; give default="):
            load_personas(tmp_path, level="pos_70")

    def test_raw_other_levels_and_layers(self, tmp_path: Path) -> None:
        """Means are given as they are on request, other levels too, and some layers alone."""
        found = roles(tmp_path)
        raw = load_personas(tmp_path / "vectors", raw=True)
        assert raw.level == "pos_3"
        assert raw.directions["b"] == vectors_of(found["b"]["pos_3"], "b")
        other = load_personas(tmp_path / "vectors", level="pos_all", minus="all_1", layers=[2, 0])
        assert other.level == "pos_all - all_1"
        assert other.directions.layers == (0, 2)
        np.testing.assert_allclose(other.directions["c"][2], found["c"]["pos_all"][2] - rows(98)[2], atol=1e-6)
        (tmp_path / "default_vectors.pt").rename(tmp_path / "elsewhere.pt")
        beside = load_personas(tmp_path / "vectors", default=tmp_path / "elsewhere.pt")
        assert beside.directions["a"][1].tolist() == (found["a"]["pos_3"] - rows(99))[1].tolist()
        with pytest.raises(LayerOutOfRange, match=r"\[4\]"):
            load_personas(tmp_path / "vectors", raw=True, layers=[4])
        once = load_personas(tmp_path / "vectors", raw=True, layers=iter([2, 0]))
        assert once.directions == load_personas(tmp_path / "vectors", raw=True, layers=[2, 0]).directions
        levels = load_levels(tmp_path / "vectors" / "c.pt", layers=iter([1]))
        assert levels == load_levels(tmp_path / "vectors" / "c.pt", layers=[1])
        assert len(levels) > 1
        for read in (load_levels, load_personas):
            for wrong in (1, "1"):
                with pytest.raises(InvalidSpec, match=r"layers=.*in a list"):
                    read(tmp_path / "vectors" / "c.pt", layers=wrong)

    def test_one_file_is_read_as_in_its_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """With the defaults beside its folder, by a relative path too; `steercap compare --vectors` takes it."""
        roles(tmp_path)
        monkeypatch.chdir(tmp_path / "vectors")
        whole = load_personas(tmp_path / "vectors")
        for path in (tmp_path / "vectors" / "b.pt", Path("b.pt")):
            alone = load_personas(path)
            assert (list(alone.directions), alone.level, alone.left_out) == (["b"], whole.level, {})
            assert alone.directions["b"] == whole.directions["b"]
            said: list[object] = []
            group = group_in(path, layer=2, first_row=None, say=said.append)
            assert group["b"] == whole.directions["b"].at_layers([2])
            assert said == [f"{path}: pos_3 - default_1 of 1 of 1 files"]
        with pytest.raises(UnknownName, match=r"b.pt has .*pos_3 \(1 files\).* no pos_4; did you mean 'pos_"):
            load_personas(Path("b.pt"), level="pos_4")
        with pytest.raises(InvalidFile, match=r"d\.pt cannot be read: there is no such file"):
            load_personas(Path("d.pt"))

    def test_captures_give_their_contrast(self, tmp_path: Path) -> None:
        """A file of a capture gives its contrast, and its means on request."""
        torch.save({"activations": rows(0), "contrast": rows(1), "metadata": {"control": "default"}}, tmp_path / "a.pt")
        assert load_personas(tmp_path).directions["a"] == vectors_of(rows(1), "a")
        assert load_personas(tmp_path, level="activations", raw=True).directions["a"] == vectors_of(rows(0), "a")

    def test_a_wrong_level_lists_what_there_is(self, tmp_path: Path) -> None:
        """A misspelt level gives an error, not nothing; so does a level of the other kind."""
        roles(tmp_path)
        with pytest.raises(UnknownName, match=r"pos_0 \(3 files\), pos_3 \(3 files\).* no pos_4; did you mean 'pos_"):
            load_personas(tmp_path / "vectors", level="pos_4")
        with pytest.raises(UnknownName, match="no pos_neg_50"):
            load_personas(tmp_path / "vectors", level="pos_neg_50")
        with pytest.raises(UnknownName, match="no level 'default1'; did you mean 'default_1'"):
            load_personas(tmp_path / "vectors", minus="default1")

    def test_what_is_left_out_is_counted(self, tmp_path: Path) -> None:
        """Files without the level, levels of zeros and other files are named with the reason."""
        roles(tmp_path)
        folder = tmp_path / "vectors"
        torch.save({"pos_0": rows(1)}, folder / "few.pt")
        torch.save({"pos_0": rows(1), "pos_3": torch.zeros(LAYERS, HIDDEN)}, folder / "zeros.pt")
        (folder / "notes.txt").write_text("x")
        (folder / "more").mkdir()
        read = load_personas(folder)
        assert set(read.directions) == {"a", "b", "c"}
        reason = "no pos_3 or pos_neg_50 or contrast, or only zeros"
        assert read.left_out == {
            "few.pt": reason,
            "zeros.pt": reason,
            "notes.txt": "no .pt file",
            "more": "no .pt file",
        }
        assert str(read) == (
            "pos_3 - default_1 of 3 of 7 files; 2 left out: no .pt file; "
            "2 left out: no pos_3 or pos_neg_50 or contrast, or only zeros"
        )
        assert "pos_3" not in load_levels(folder / "zeros.pt")

    def test_folders_of_two_kinds_and_of_none(self, tmp_path: Path) -> None:
        """Roles and traits in one folder, no folder, and a folder without personas are errors."""
        roles(tmp_path)
        torch.save({"pos_neg_50": rows(1)}, tmp_path / "vectors" / "evil.pt")
        with pytest.raises(UnknownName, match=r"more than one .*give level="):
            load_personas(tmp_path / "vectors")
        assert set(load_personas(tmp_path / "vectors", level="pos_neg_50").left_out) == {"a.pt", "b.pt", "c.pt"}
        with pytest.raises(InvalidFile, match="there is no such file"):
            load_personas(tmp_path / "nowhere")
        (tmp_path / "empty").mkdir()
        with pytest.raises(InvalidFile, match="is no folder of NAME"):
            load_personas(tmp_path / "empty")

    def test_files_of_other_shapes(self, tmp_path: Path) -> None:
        """A persona of another model's width, NaN, and files of other things are errors that name the file."""
        roles(tmp_path)
        folder = tmp_path / "vectors"
        for wrong, told in [
            ({"pos_3": torch.randn(LAYERS, HIDDEN + 1)}, "differ in width"),
            ({"pos_3": torch.randn(LAYERS + 1, HIDDEN)}, "has layers"),
        ]:
            torch.save(wrong, folder / "d.pt")
            for raw in (True, False):
                with pytest.raises(InvalidFile, match=told):
                    load_personas(folder, raw=raw)
        for one, told in [
            ({"pos_3": torch.full((2, 2), float("nan"))}, "d.pt"),
            ({"pos_3": torch.randn(LAYERS)}, r"level 'pos_3' is torch.float32 \[4\]"),
            ({"pos_3": torch.ones(2, 2, dtype=torch.int64)}, "torch.int64"),
            ({"pos_3": rows(1), "note": "x"}, "level 'note' is 'x'"),
            ({"pos_3": rows(1), "pos_0": rows(1)[:2]}, r"level 'pos_0' is torch.float32 \[2, 6\]"),
            (rows(1), "expected a dict of levels"),
            ({}, "expected a dict of levels"),
            ({"metadata": {}}, "expected a dict of levels"),
        ]:
            torch.save(one, folder / "d.pt")
            with pytest.raises(InvalidFile, match=told):
                load_personas(folder)
        (folder / "d.pt").write_bytes(b"PK\x03\x04")
        with pytest.raises(InvalidFile, match=r"d\.pt"):
            load_personas(folder)


class TestWritten:
    def test_levels(self, tmp_path: Path) -> None:
        """Plain torch, without pickled code, loads what is written: a dict of float32 [layers, hidden]."""
        levels = {level: vectors_of(rows(place), level) for place, level in enumerate(ROLE)}
        path = save_levels(levels, tmp_path / "vectors" / "a.pt")
        plain = torch.load(path, weights_only=True)
        assert {level: one.dtype for level, one in plain.items()} == dict.fromkeys(ROLE, torch.float32)
        assert all(torch.equal(plain[level], rows(place)) for place, level in enumerate(ROLE))
        assert load_levels(path) == levels

    def test_defaults(self, tmp_path: Path) -> None:
        """Defaults have their levels under "activations"."""
        path = save_default_levels({"default_1": vectors_of(rows(1))}, tmp_path / "d.pt", metadata={"counts": {"x": 1}})
        plain = torch.load(path, weights_only=True)
        assert torch.equal(plain["activations"]["default_1"], rows(1))
        assert plain["metadata"] == {"counts": {"x": 1}}
        assert load_levels(path)["default_1"] == vectors_of(rows(1), "default_1")

    def test_captures(self, tmp_path: Path) -> None:
        """A capture holds means, their difference from the control, and the control's name; of 64 layers, 2.6 MB."""
        persona, control = (torch.randn(64, 5120, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
        path = save_persona_capture(
            vectors_of(persona), vectors_of(control, "default"), tmp_path / "a.pt", metadata={"dtype": "bfloat16"}
        )
        plain = torch.load(path, weights_only=True)
        assert list(plain) == ["activations", "contrast", "metadata"]
        assert torch.equal(plain["activations"], persona)
        assert torch.equal(plain["contrast"], (persona.double() - control.double()).float())
        assert plain["metadata"] == {"dtype": "bfloat16", "control": "default"}
        assert 2_621_440 < path.stat().st_size < 2_640_000
        with pytest.raises(InvalidSpec, match="has no name"):
            save_persona_capture(vectors_of(rows(1)), vectors_of(rows(2)), path)

    def test_what_cannot_be_written(self, tmp_path: Path) -> None:
        """Other sites, missing layers, no levels and other extensions are refused before a file appears."""
        for vectors in (LayerVectors({1: rows(0)[0]}), LayerVectors({0: rows(0)[0]}, site="mlp_out")):
            with pytest.raises(InvalidSpec, match="a row for the output of every layer"):
                save_levels({"pos_3": vectors}, tmp_path / "a.pt")
        with pytest.raises(InvalidSpec, match="no levels to write"):
            save_levels({}, tmp_path / "a.pt")
        with pytest.raises(InvalidSpec, match="no levels to write"):
            save_default_levels({}, tmp_path / "a.pt")
        with pytest.raises(InvalidFile, match=r"\.pt"):
            save_levels({"pos_3": vectors_of(rows(0))}, tmp_path / "a.npz")
        assert not list(tmp_path.iterdir())


class TestSteeringVector:
    def test_there_and_back(self, tmp_path: Path) -> None:
        """The vector is added to the output of the layer that the configuration names, counted from 0."""
        vectors = LayerVectors({22: rows(1)[0]}, model="Qwen/Qwen3-32B")
        save_steering_vector(vectors, tmp_path / "evil", init_scale=0.5)
        plain = torch.load(tmp_path / "evil" / "steering_vector.pt", weights_only=True)
        assert list(plain) == ["steering_vector"]
        assert torch.equal(plain["steering_vector"], rows(1)[0])
        told = json.loads((tmp_path / "evil" / "steering_config.json").read_text())
        assert told == {"model_name": "Qwen/Qwen3-32B", "target_layer": 22, "init_scale": 0.5}
        read, config = load_steering_vector(tmp_path / "evil")
        assert read == vectors.named("evil")
        assert config.init_scale == 0.5

    def test_people_write_parameters_and_more(self, tmp_path: Path) -> None:
        """A parameter in half precision, and further entries of both files, are no obstacle."""
        torch.save({"steering_vector": torch.nn.Parameter(rows(1)[0].bfloat16())}, tmp_path / "steering_vector.pt")
        told = {"model_name": "m", "target_layer": 3, "init_scale": 0.0, "tensor_parallel_size": 1}
        (tmp_path / "steering_config.json").write_text(json.dumps(told))
        read, _ = load_steering_vector(tmp_path)
        assert read[3].tolist() == rows(1)[0].bfloat16().float().tolist()

    @pytest.mark.parametrize(
        ("vector", "config", "told"),
        [
            ({"vector": torch.ones(2)}, '{"model_name": "m", "target_layer": 1}', "expected a 'steering_vector'"),
            ({"steering_vector": torch.ones(2, 2)}, '{"model_name": "m", "target_layer": 1}', "steering_vector.pt"),
            ({"steering_vector": torch.ones(2)}, '{"model_name": "m"}', "steering_config.json.*target_layer"),
            ({"steering_vector": torch.ones(2)}, '{"model_name": "m", "target_layer": -1}', "layer -1"),
            ({"steering_vector": torch.ones(2)}, "{", "steering_config.json"),
        ],
    )
    def test_errors(self, vector: Any, config: str, told: str, tmp_path: Path) -> None:
        """A file that lacks something is named."""
        torch.save(vector, tmp_path / "steering_vector.pt")
        (tmp_path / "steering_config.json").write_text(config)
        with pytest.raises(InvalidFile, match=told):
            load_steering_vector(tmp_path)
        with pytest.raises(InvalidSpec, match="one layer at resid_post"):
            save_steering_vector(vectors_of(rows(0)), tmp_path)


class PCA:
    """Stands for scikit-learn's class in the files of these tests, under its name."""


PCA.__module__ = "sklearn.decomposition._pca"


@pytest.fixture
def pca(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return an object that is pickled as scikit-learn's PCA is: by the name of its class, and its attributes."""
    module = types.ModuleType(PCA.__module__)
    module.PCA = PCA  # type: ignore[attr-defined]
    for name in ("sklearn", "sklearn.decomposition"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, PCA.__module__, module)
    found = PCA()
    x = np.random.default_rng(0).normal(size=(5, HIDDEN))
    mean = x.mean(0)
    _, sizes, components = np.linalg.svd(x - mean, full_matrices=False)
    found.__dict__.update(components_=components[:3], mean_=mean, n_components=3, _sklearn_version="1.5.0")
    found.__dict__.update(
        explained_variance_ratio_=(sizes**2 / (sizes**2).sum())[:3], random_state=np.random.RandomState(0)
    )
    return found


def components_file(pca: Any, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the contents of a file of components, as people write them."""
    vectors = {"pos_2": [rows(n).bfloat16() for n in range(2)], "pos_3": [rows(n + 5).bfloat16() for n in range(3)]}
    found = {
        "pca": pca,
        "variance_explained": pca.explained_variance_ratio_,
        "layer": 2,
        "vectors": vectors,
        "roles": {"pos_2": ["a", "b"], "pos_3": ["a", "b", "c"]},
        "scaler": None,
    }
    return {name: value for name, value in {**found, **(changes or {})}.items() if value is not ...}


class TestComponents:
    @pytest.mark.parametrize("legacy", [False, True])
    def test_components_of_roles(self, legacy: bool, pca: Any, tmp_path: Path) -> None:
        """All parts of the file are read, vectors at its layer, whether scikit-learn is there or not."""
        path = tmp_path / "layer2_pos23.pt"
        torch.save(components_file(pca), path, _use_new_zipfile_serialization=not legacy)
        read = load_components(path)
        assert (read.kind, read.layer, read.further) == ("role", 2, ("scaler",))
        np.testing.assert_array_equal(read.components, pca.components_)
        np.testing.assert_array_equal(read.mean, pca.mean_)
        np.testing.assert_array_equal(read.variance_explained, pca.explained_variance_ratio_)
        assert read.names == {"pos_2": ("a", "b"), "pos_3": ("a", "b", "c")}
        wanted = torch.stack([rows(n + 5).bfloat16()[2] for n in range(3)]).float()
        assert torch.equal(read.vectors["pos_3"], wanted)

    def test_traits_of_one_layer(self, pca: Any, tmp_path: Path) -> None:
        """Vectors may be of the one layer already, stacked or of NumPy; float32 components are exact."""
        pca.components_ = pca.components_.astype(np.float32)
        changes = {"vectors": {"pos_neg_50": rows(1)[:2]}, "traits": {"pos_neg_50": ["x", "y"]}, "roles": ...}
        torch.save(components_file(pca, changes), tmp_path / "a.pt")
        read = load_components(tmp_path / "a.pt")
        assert read.kind == "trait"
        assert torch.equal(read.vectors["pos_neg_50"], rows(1)[:2])
        np.testing.assert_array_equal(read.components, pca.components_.astype(np.float64))
        arrays = {"vectors": {"x": [rows(1)[0].numpy()]}, "roles": {"x": ["one"]}}
        torch.save(components_file(pca, arrays), tmp_path / "a.pt")
        assert load_components(tmp_path / "a.pt").vectors["x"].tolist() == rows(1)[:1].tolist()

    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({"roles": ...}, "no traits; it has pca"),
            ({"layer": ..., "vectors": ...}, "no layer, vectors"),
            ({"layer": -1}, "layer -1"),
            ({"layer": LAYERS}, "of another width"),
            ({"layer": "2"}, "layer '2'"),
            ({"pca": {"components_": 1}}, "got None"),
            ({"variance_explained": np.ones(2)}, r"components \[3, 6\]"),
            ({"variance_explained": np.full(3, np.nan)}, "finite floats"),
            ({"roles": {"pos_2": ["a"], "pos_3": ["a", "b", "c"]}}, r"2 vectors of names \['a'\]"),
            ({"roles": {"pos_2": ["a", "b"]}}, "expected both by level"),
            ({"vectors": [rows(1)]}, "expected both by level"),
            ({"roles": {"pos_2": ["a", ["b"]], "pos_3": ["a", "b", "c"]}}, "2 vectors of names"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, changes: dict[str, Any], told: str, pca: Any, tmp_path: Path) -> None:
        """A file that lacks something, or whose parts do not fit one another, is refused by name."""
        torch.save(components_file(pca, changes), tmp_path / "a.pt")
        with pytest.raises(InvalidFile, match=f"a.pt.*{told}"):
            load_components(tmp_path / "a.pt")

    def test_other_files(self, tmp_path: Path) -> None:
        """A file of something else is refused."""
        torch.save([1], tmp_path / "a.pt")
        with pytest.raises(InvalidFile, match=r"a\.pt"):
            load_components(tmp_path / "a.pt")
