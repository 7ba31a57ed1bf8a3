"""Comparison of folders of vectors, and of trained with averaged vectors."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_calls import call
from pyarrow import parquet

from steercap import Add
from steercap.errors import InvalidFile, InvalidSpec, RunDiffers, UnknownName
from steercap.lab.training import (
    Example,
    HookedModel,
    TokenBudget,
    TrainableAdd,
    compare_trained,
    compare_vectors,
    comparing,
    perplexity_of,
    train_datasets,
)
from steercap.steering import DirectionSet, LayerVectors
from steercap.steering.formats import save_default_levels, save_levels, save_steering_vector
from steercap.testing import tiny_checkpoint

WIDTH = 12


def drawn(seed: int, layers: int = 3, width: int = WIDTH, **labels: str) -> LayerVectors:
    rows = np.random.default_rng(seed).normal(size=(layers, width)).astype(np.float32)
    return LayerVectors(dict(enumerate(torch.from_numpy(rows))), **labels)


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    one, other = one.double().numpy(), other.double().numpy()
    return float(one @ other / np.sqrt((one @ one) * (other @ other)))


def test_an_unlabelled_vector_compares_with_a_labelled_one() -> None:
    """Cosine and scalar product need equal models only where both are named; algebra needs them always."""
    named, unnamed, other = drawn(0, model="a"), drawn(1), drawn(1, model="b")
    for first, second in ((named, unnamed), (unnamed, named)):
        assert first.cosine(second) == pytest.approx({layer: cosine(first[layer], second[layer]) for layer in first})
        assert first.dot(second) == pytest.approx({at: float(first[at].double() @ second[at].double()) for at in first})
    with pytest.raises(InvalidSpec, match="differ in model: 'a' and 'b'"):
        named.cosine(other)
    with pytest.raises(InvalidSpec, match="differ in model: 'a' and ''"):
        named + unnamed


@pytest.mark.parametrize("seed", range(8))
def test_two_folders_are_compared_by_name_and_layer(tmp_path, seed) -> None:
    """Random folders of roles, each with defaults of its own, of bfloat16 or float32, and names that one alone has."""
    draw = random.Random(seed)
    names = {folder: [*draw.sample("abcdefgh", draw.randint(3, 8)), "z"] for folder in ("first", "second")}
    rows, defaults = {}, {}
    for number, folder in enumerate(names):
        defaults[folder] = drawn(100 * seed + 90 + number)
        save_default_levels({"default_1": defaults[folder]}, tmp_path / folder / "default_vectors.pt")
        for name in names[folder]:
            rows[folder, name] = drawn(100 * seed + 10 * ord(name) + number)
            save_levels(
                {"pos_3": rows[folder, name], "pos_2": drawn(seed)}, tmp_path / folder / "vectors" / f"{name}.pt"
            )
    save_levels({"pos_2": drawn(seed)}, tmp_path / "first" / "vectors" / "ghost.pt")
    found = compare_vectors(tmp_path / "first" / "vectors", tmp_path / "second" / "vectors")
    common = sorted(set(names["first"]) & set(names["second"]))
    assert [(row.name, row.layer) for row in found.rows] == [(name, layer) for name in common for layer in range(3)]
    ghost = {f"{tmp_path}/first/vectors/ghost.pt": "no pos_3 or pos_neg_50 or contrast, or only zeros"}
    assert found.left_out == ghost | {
        name: f"only in the {folder}" for folder in names for name in names[folder] if name not in common
    }
    for row in found.rows:
        one, other = (rows[folder, row.name][row.layer] - defaults[folder][row.layer] for folder in names)
        assert row.cosine == pytest.approx(cosine(one, other), abs=1e-6)
        assert row.norm == pytest.approx(float(one.norm()), rel=1e-5)
        assert row.norm_ratio == pytest.approx(float(other.norm() / one.norm()), rel=1e-5)
    table = parquet.read_table(found.save(tmp_path / "table.parquet")).to_pylist()
    assert [(row["name"], row["layer"], row["norm_ratio"]) for row in table] == [
        (row.name, row.layer, row.norm_ratio) for row in found.rows
    ]
    raw = compare_vectors(tmp_path / "first" / "vectors", tmp_path / "second" / "vectors", raw=True, layers=[1])
    assert {row.layer for row in raw.rows} == {1}
    assert raw.rows[0].norm == pytest.approx(float(rows["first", common[0]][1].norm()))
    assert f"{len(found.rows)} pairs; cosine" in str(found)
    assert f"{len(found.left_out)} left out" in str(found)


def test_other_sources_are_compared_too_and_zeros_are_said(tmp_path) -> None:
    """Files of directions, folders of trained vectors, mappings; a vector of zeros has no cosine, which is not NaN."""
    one, zero = drawn(1, model="m"), LayerVectors({1: torch.zeros(WIDTH)}, model="m")
    save_steering_vector(one.at_layers([1]), tmp_path / "trained" / "a")
    save_steering_vector(zero, tmp_path / "trained" / "b")
    DirectionSet({"a": one, "b": drawn(2, model="m")}).save(tmp_path / "set.safetensors")
    found = compare_vectors(tmp_path / "trained", tmp_path / "set.safetensors")
    assert [(row.name, row.layer) for row in found.rows] == [("a", 1), ("b", 1)]
    assert found.rows[0].cosine == pytest.approx(1)
    assert (found.rows[1].cosine, found.rows[1].norm, found.rows[1].norm_ratio) == (None, 0, None)
    assert "1 with a vector of zeros" in str(found)
    assert found.left_out == {"layers of a and 1 more": "2 only in the second, 0 to 2"}
    back = compare_vectors({"b": drawn(2, model="other")}, tmp_path / "trained")
    assert back.left_out == {"a": "only in the second", "layers of b": "2 only in the first, 0 to 2"}
    assert (back.rows[0].cosine, back.rows[0].norm_ratio) == (None, 0)
    assert parquet.read_table(found.save(tmp_path / "t.parquet")).to_pylist()[1]["cosine"] is None


def test_what_cannot_be_compared_is_named(tmp_path) -> None:
    """Names, widths, sites and layers; folders without vectors; levels that are misspelt."""
    mine = {"kind": drawn(1)}
    with pytest.raises(UnknownName, match=r"no name in common: .*'kind'; .*'kinds'"):
        compare_vectors(mine, {"kinds": drawn(1)})
    for other in (drawn(1, width=5), drawn(1, site="mlp_out"), LayerVectors({7: torch.ones(WIDTH)})):
        with pytest.raises(InvalidSpec, match=r"kind: .* differ in site, width, or have no layer in common"):
            compare_vectors(mine, {"kind": other})
    with pytest.raises(InvalidSpec, match="give LayerVectors by name"):
        compare_vectors(mine, {"kind": torch.ones(3)})
    with pytest.raises(InvalidSpec, match="give LayerVectors by name"):
        compare_vectors({}, mine)
    (tmp_path / "none").mkdir()
    with pytest.raises(InvalidFile, match=r"none holds no vectors; give a folder of NAME\.pt"):
        compare_vectors(mine, tmp_path / "none")
    with pytest.raises(InvalidSpec, match=r"is not a folder of persona files NAME\.pt; leave out level=$"):
        compare_vectors(mine, tmp_path / "none", level="pos_3")
    with pytest.raises(InvalidFile, match=r"missing"):
        compare_vectors(mine, tmp_path / "missing")
    save_levels({"pos_3": drawn(1)}, tmp_path / "vectors" / "kind.pt")
    with pytest.raises(UnknownName, match="did you mean 'pos_3'"):
        compare_vectors(mine, tmp_path / "vectors", level="pos3")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[HookedModel, Path]:
    """A model, and the folder of two data sets that were trained on it, without a chat template."""
    model, out = HookedModel(tiny_checkpoint("qwen3")), tmp_path_factory.mktemp("trained")
    data = {
        f"tiny__trait__{name}": [Example(f"Say {at}. ", f"{name} moon {at % 5}") for at in range(40)]
        for name in ("wind", "rain", "snow")
    }
    how = {
        "edit": TrainableAdd(layers=[1], tokens="prompt"),
        "budget": TokenBudget(300, 100),
        "rates": [0.1],
        "epochs": 1,
    }
    train_datasets(model, data, out=out, **how)
    return model, out


def test_trained_and_averaged_vectors_are_in_one_table(trained, monkeypatch) -> None:
    """Cosine, norms, losses and perplexities of each data set, in Parquet; computed once; what has no partner is said."""
    model, out = trained
    averaged = {name: drawn(at, width=model.width) for at, name in enumerate(("rain", "tiny__trait__wind", "wind"))}
    opened: list[str] = []
    read = comparing.read_result
    monkeypatch.setattr(comparing, "read_result", lambda folder: opened.append(folder.name) or read(folder))
    found = compare_trained(model, out, averaged)
    assert opened == ["tiny__trait__rain", "tiny__trait__wind"]  # once each: the result is that of one moment
    assert [(row.dataset, row.averaged) for row in found.rows] == [
        ("tiny__trait__rain", "rain"),
        ("tiny__trait__wind", "tiny__trait__wind"),
    ]
    assert found.left_out == {"tiny__trait__snow": "no averaged vector 'snow'"}
    table = parquet.read_table(out / "steering_vector_comparison.parquet").to_pylist()
    for row in table:
        folder = out / row["dataset"]
        vector = torch.load(folder / "steering_vector.pt", weights_only=True)["steering_vector"]
        other = averaged[row["averaged"]][1]
        assert row["cosine"] == pytest.approx(cosine(vector, other), abs=1e-6)
        assert row["norm_trained"] == pytest.approx(float(vector.norm()), rel=1e-5)
        assert row["norm_averaged"] == pytest.approx(float(other.norm()), rel=1e-5)
        result = json.loads((folder / "result.json").read_text())
        assert (
            row["loss_trained"]
            == result["validation"]["trained"]["loss"]
            == pytest.approx(result["rates"][0]["validation_loss"], rel=1e-4)
        )
        held = [Example(**json.loads(line)) for line in (folder / "held_out.jsonl").read_text().splitlines()]
        alone = perplexity_of(model, held, Add(other, layer=1, tokens="prompt"))
        assert (row["loss_averaged"], row["perplexity_averaged"]) == (alone.loss, alone.perplexity)
        assert row["perplexity_prompted"] is None
        assert row["perplexity_unsteered"] > row["perplexity_trained"] > 1
        assert all(not isinstance(value, float) or math.isfinite(value) for value in row.values())
    monkeypatch.setattr("steercap.lab.training.comparing.perplexity_of", None)
    assert compare_trained(model, out, averaged).rows == found.rows
    with pytest.raises(TypeError):  # another vector is computed anew
        compare_trained(model, out, {"rain": drawn(9, width=model.width)})


def test_trained_vectors_that_do_not_fit_are_named(trained, tmp_path) -> None:
    """Another model, no data set, no partner, another width, other edits, a damaged file."""
    model, out = trained
    with pytest.raises(InvalidFile, match="holds no data set that was trained"):
        compare_trained(model, tmp_path, {"rain": drawn(1)})
    with pytest.raises(UnknownName, match=r"no averaged vector 'rain'.*did you mean|no averaged vector 'rain'"):
        compare_trained(model, out, {"rains": drawn(1, width=model.width)})
    with pytest.raises(InvalidSpec, match="differ in site, width"):
        compare_trained(model, out, {"rain": drawn(1)})
    with pytest.raises(UnknownName, match="has no layer 1"):
        compare_trained(model, out, {"rain": LayerVectors({0: torch.ones(model.width)})})
    with pytest.raises(RunDiffers, match=r"was trained on another model: model\.dtype was 'float32', is 'float64'"):
        compare_trained(HookedModel(model.path, torch.float64), out, {"rain": drawn(1, width=model.width)})
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    averaged = {"rain": drawn(77, width=model.width)}
    (copy / "tiny__trait__rain" / "averaged.json").write_text("{}")
    with pytest.raises(InvalidFile, match=r"averaged\.json"):
        compare_trained(model, copy, averaged)
    (copy / "tiny__trait__rain" / "averaged.json").unlink()
    held_out = copy / "tiny__trait__rain" / "held_out.jsonl"
    whole = held_out.read_text()
    held_out.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    with pytest.raises(InvalidFile, match=r"held_out\.jsonl.*examples are there, of"):
        compare_trained(model, copy, averaged)
    held_out.write_text(whole)
    (copy / "tiny__trait__wind" / "result.json").unlink()
    left_out = compare_trained(model, copy, averaged).left_out
    assert left_out["tiny__trait__wind"] == "not finished; call train_datasets again"
    (copy / "tiny__trait__rain" / "averaged.json").unlink()
    held_out.write_text('{"prompt": ')
    with pytest.raises(InvalidFile, match=r"held_out\.jsonl"):
        compare_trained(model, copy, averaged)


def test_the_command_compares_folders(trained, tmp_path, monkeypatch) -> None:
    """The table of the call, as JSON and Parquet; with a model, losses too; what does not fit is said."""
    model, out = trained
    monkeypatch.chdir(tmp_path)
    for folder, number in (("first", 1), ("second", 2)):
        save_levels({"pos_neg_50": drawn(number, width=model.width)}, tmp_path / folder / "rain.pt")
    done = call("vectors", "compare", "first", "second", "--out", "table.parquet", "--json")
    assert done.exit_code == 0, done.output
    found = compare_vectors("first", "second")
    assert json.loads(done.stdout)["rows"] == parquet.read_table("table.parquet").to_pylist()
    assert [row["cosine"] for row in json.loads(done.stdout)["rows"]] == [row.cosine for row in found.rows]
    shutil.copytree(out, "copy")
    done = call("vectors", "compare", "copy", "second", "--model", model.path)
    assert done.exit_code == 0, done.output
    assert "tiny__trait__snow" in done.stdout
    (row,) = parquet.read_table("copy/steering_vector_comparison.parquet").to_pylist()
    assert row["loss_averaged"] == compare_trained(model, "copy", "second").rows[0].loss_averaged
    for more in (["--level", "pos_3"], ["--out", "table.csv"], ["--model", model.path]):
        assert call("vectors", "compare", "first", "second", *more).exit_code in {1, 2}
