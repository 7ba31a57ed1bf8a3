"""Directions from rows: what every method must find, what is held out, and sets of directions with their origin."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest
import torch

from steercap.errors import InvalidFile, InvalidSpec, InvalidVector, UnknownName
from steercap.lab.directions import METHODS, suggested_layer
from steercap.lab.directions.contrast import Contrast, directions_of, separability
from steercap.steering import DirectionSet, LayerVectors, Provenance

WIDTH, LAYERS = 32, (2, 5)


def contrast(texts: int, shift: float, seed: int = 0, groups: int | None = None) -> tuple[Contrast, torch.Tensor]:
    """Normal rows in a few directions of unequal spread, the positive ones shifted along a known one."""
    drawn = torch.Generator().manual_seed(seed)
    spread = torch.linspace(0.2, 3, WIDTH)
    along = torch.randn(WIDTH, generator=drawn)
    along /= along.norm()
    rows = torch.randn(2 * texts, len(LAYERS), WIDTH, generator=drawn) * spread
    rows[:texts] += shift * along
    labels = [number % (groups or texts) for number in range(texts)]
    return Contrast(rows[:texts], rows[texts:], labels, labels), along


@pytest.mark.parametrize("method", list(METHODS))
def test_a_direction_tells_unseen_rows_apart_and_carries_mean_to_mean(method) -> None:
    """Added once to the negative rows it was made from, their mean lies where the positive ones' does along it."""
    given, _ = contrast(200, 6.0)
    found = directions_of("x", given, LAYERS, method=method, seed=3)
    seen, unseen = given.split(0.25, 3)
    assert found.provenance.rows["x"] == (150, 150)
    assert found.provenance.held_out["x"] == (50, 50)
    for at, layer in enumerate(LAYERS):
        vector = found["x"][layer].double()
        between = (seen.positive[:, at].double().mean(0) - seen.negative[:, at].double().mean(0)) @ vector
        torch.testing.assert_close(between, vector @ vector, rtol=1e-5, atol=1e-6)
        assert found.provenance.auc["x"][layer] > 0.95
    assert separability(found["x"], unseen, LAYERS) == found.provenance.auc["x"]


def test_the_probe_uses_how_rows_spread() -> None:
    """Where a shift hides in the direction of greatest spread, a probe finds it better than a difference of means."""
    aucs = {}
    for method in ("difference", "probe"):
        found = [directions_of("x", contrast(150, 2.5, seed)[0], LAYERS, method=method) for seed in range(8)]
        aucs[method] = sum(sum(one.provenance.auc["x"].values()) for one in found) / (8 * len(LAYERS))
    assert aucs["probe"] > aucs["difference"] + 0.01


def test_the_probe_does_not_see_the_rounding_of_a_constant() -> None:
    """An element that is constant but for float32 sums of texts of different lengths changes nothing."""
    given, _ = contrast(40, 2.0)
    drawn = torch.Generator().manual_seed(1)
    known = given.positive.clone(), given.negative.clone()
    for rows, plain in zip((given.positive, given.negative), known, strict=True):
        plain[..., 0] = 3.7
        for at in range(len(rows)):
            rows[at, :, 0] = torch.full((int(torch.randint(5, 300, (), generator=drawn)),), 3.7).mean()
    assert given.positive[..., 0].std() > 0
    found, expected = (
        directions_of("x", Contrast(*rows, range(40), range(40)), LAYERS, method="probe")["x"]
        for rows in ((given.positive, given.negative), known)
    )
    for layer in LAYERS:
        torch.testing.assert_close(found[layer], expected[layer], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", list(METHODS))
def test_rows_without_a_difference_are_not_told_apart(method) -> None:
    """With as many rows as elements any method separates what it has seen; what is held out says that it is chance."""
    seen, unseen = [], []
    for seed in range(10):
        given, _ = contrast(40, 0.0, seed)
        found = directions_of("x", given, LAYERS, method=method)
        seen += separability(found["x"], given.split(0.25, 0)[0], LAYERS).values()
        unseen += found.provenance.auc["x"].values()
    if method != "pca":  # which follows the spread of the rows, not their kind
        assert sum(seen) / len(seen) > 0.75
    # 20 areas of 10 against 10 texts: the mean of such areas has a standard deviation of 0.03 if it is chance.
    assert abs(sum(unseen) / len(unseen) - 0.5) < 0.12


@pytest.mark.parametrize("method", list(METHODS))
def test_a_layer_whose_rows_are_all_equal_has_a_vector_of_zeros(method) -> None:
    """Such as the embedding of one last token; the other layers are as without it."""
    given, _ = contrast(12, 2.0)
    known = directions_of("x", given, LAYERS, method=method)["x"]
    for rows in (given.positive, given.negative):
        rows[:, 0] = torch.linspace(-1, 1, WIDTH)
    found = directions_of("x", given, LAYERS, method=method)
    assert not found["x"][LAYERS[0]].any()
    assert torch.equal(found["x"][LAYERS[1]], known[LAYERS[1]])
    assert found.provenance.auc["x"][LAYERS[0]] == 0.5


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"method": "magic"}, UnknownName, "known: 'difference', 'pca', 'probe'"),
        ({"held_out": 1.0}, InvalidSpec, "share of the groups"),
        ({"groups": 1}, InvalidSpec, "1 groups have texts of both kinds"),
    ],
)
def test_what_cannot_be_extracted_is_said(change, error, says) -> None:
    """An unknown method, a share that leaves nothing, too few groups."""
    given, _ = contrast(8, 1.0, groups=change.pop("groups", None))
    with pytest.raises(error, match=says):
        directions_of("x", given, LAYERS, **change)


@pytest.mark.parametrize(
    ("layers", "names"), [("all", [0]), (0, [0]), (range(7, 8), [7]), ([7], [7]), (np.int64(7), [7])]
)
def test_layers_are_named_as_everywhere(layers, names) -> None:
    """An index, several, a range, or "all" from 0; of vectors "all" is theirs; another number than of rows is refused."""
    given, unseen = (
        Contrast(one.positive[:, :1], one.negative[:, :1], range(8), range(8))
        for one, _ in (contrast(8, 1.0, seed=seed) for seed in (0, 1))
    )
    found = directions_of("x", given, layers, held_out=0)
    assert list(found["x"]) == names
    assert separability(found["x"], unseen, "all") == separability(found["x"], unseen, names)
    for wrong in ([1, 2], range(3), []):
        with pytest.raises(InvalidSpec, match="for rows of 1 layers; give one each"):
            directions_of("x", given, wrong, held_out=0)
        with pytest.raises(InvalidSpec, match="for rows of 1 layers; give one each"):
            separability(found["x"], unseen, wrong)
    both = Contrast(*(torch.randn(8, 2, 4) for _ in range(2)), range(8), range(8))
    with pytest.raises(InvalidSpec, match=r"layers=\[7, 7\] for rows of 2 layers; give one each, all different"):
        directions_of("x", both, [7, 7], held_out=0)  # the rows of one would be taken for both
    with pytest.raises(InvalidSpec, match="layers='one'; give 'all', an index"):
        directions_of("x", given, "one", held_out=0)


def some_set(seed: int = 0, **provenance) -> DirectionSet:
    drawn = torch.Generator().manual_seed(seed)
    vectors = {
        f"d{seed}{name}": LayerVectors({layer: torch.randn(WIDTH, generator=drawn) for layer in LAYERS}, model="tiny")
        for name in "ab"
    }
    return DirectionSet(vectors, Provenance(**provenance))


def test_a_set_projects_and_compares_as_its_vectors_do() -> None:
    """Products with unit vectors, cosines of every two, orthogonal ones: against the vectors themselves."""
    found = some_set()
    rows = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(9))
    a, b = (vectors[5] / vectors[5].norm() for vectors in found.values())
    torch.testing.assert_close(found.project(rows, 5), torch.stack([rows @ a, rows @ b], dim=1))
    torch.testing.assert_close(found.units(5), torch.stack([a, b]))
    assert torch.equal(found.units(5), found.unit().at(5))
    with pytest.raises(InvalidVector, match=r"\['nothing'\] at layer 5 are zero"):
        DirectionSet({"nothing": 0 * found["d0a"]}).units(5)
    assert found.cosines(5)[0, 1] == pytest.approx(float(a @ b), abs=1e-6)
    assert found.cosines(5).diagonal().tolist() == pytest.approx([1, 1])
    assert found.orthogonal().cosines(5)[0, 1] == pytest.approx(0, abs=1e-6)
    assert found.orthogonal()["d0a"] == found["d0a"]
    assert list(found.select(["d0b"])) == ["d0b"]
    assert found.at_layers([5]).layers == found.at_layers(5).layers == found.at_layers(slice(5, 6)).layers == (5,)
    assert found.at_layers("all").layers == found.layers
    with pytest.raises(InvalidSpec, match=r"'d0c'; did you mean 'd0b'.*known: 'd0a', 'd0b'"):
        found.select("d0c")
    with pytest.raises(InvalidSpec, match=r"layers \[3\]"):
        found.at_layers([3])


def test_products_are_of_float32_whatever_the_process_has_set() -> None:
    """Not of bfloat16, as under autocast, or as processors with instructions for it make products at "medium"."""
    drawn = torch.Generator().manual_seed(9)
    found = DirectionSet({name: LayerVectors({5: torch.randn(4096, generator=drawn)}) for name in ("a", "b")})
    rows = torch.randn(64, 4096, generator=drawn)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            products = found.project(rows, 5)
    finally:
        torch.set_float32_matmul_precision(before)
    known = np.stack([found[name][5].double().numpy() for name in found])
    known /= np.linalg.norm(known, axis=1, keepdims=True)
    np.testing.assert_allclose(products.numpy(), rows.double().numpy() @ known.T, atol=1e-5)


def test_what_was_measured_of_a_direction_goes_with_it() -> None:
    """The AUC of another direction is nobody's: not of one made orthogonal, nor of one that took its name."""
    measured = {"d0a": {2: 0.9}, "d0b": {2: 0.98}}
    mine = some_set(0, auc=measured, prompts={"d0a": "a", "d0b": "b"}, rows={"d0a": (5, 5)}, held_out={"d0a": (2, 2)})
    assert mine.orthogonal().provenance == dataclasses.replace(mine.provenance, auc={"d0a": {2: 0.9}})
    other = DirectionSet({"d0a": some_set(1)["d1a"]}, Provenance(prompts={"d0a": "other"}))
    assert (mine | other)["d0a"] == other["d0a"]
    joined = (mine | other).provenance
    assert (joined.auc, joined.prompts) == ({"d0b": {2: 0.98}}, {"d0a": "other", "d0b": "b"})
    assert (joined.rows, joined.held_out) == ({}, {})
    # what a part of a set still says of the others does not reach directions of their names
    assert (mine.select("d0b") | other).provenance.auc == {"d0b": {2: 0.98}}
    assert (other | mine.select("d0b")).provenance.auc == {"d0b": {2: 0.98}}


def test_what_was_measured_at_a_layer_goes_with_it() -> None:
    """So a set of some layers has no AUC of the others, and none of them is suggested."""
    measured = {"d0a": {2: 0.9, 5: 0.6}}
    mine = some_set(auc=measured, row_norms=measured, held_out={"d0a": (4, 4)})
    some = mine.at_layers([5])
    assert (some.provenance.auc, some.provenance.row_norms) == ({"d0a": {5: 0.6}}, {"d0a": {5: 0.6}})
    for one in (some, dataclasses.replace(some, provenance=mine.provenance)):  # the latter as in files of before
        found = suggested_layer(one, "d0a")
        assert found is not None
        assert (found.layer, found.layer_count) == (5, 1)


def test_sets_are_joined_only_if_they_were_made_alike() -> None:
    """Both their directions and what is known of each; another method, or another model, is refused."""
    mine = some_set(0, method="pca", auc={"d0a": {2: 0.5}}, row_norms={"d0a": {2: 10.0, 5: 20.0}})
    theirs = some_set(1, method="pca", auc={"d1a": {2: 0.9}}, row_norms={"d1a": {2: 90.0, 5: 20.0}})
    both = mine | theirs
    assert list(both) == ["d0a", "d0b", "d1a", "d1b"]
    assert both.provenance.auc == {"d0a": {2: 0.5}, "d1a": {2: 0.9}}
    assert both.provenance.row_norms == {"d0a": {2: 10.0, 5: 20.0}, "d1a": {2: 90.0, 5: 20.0}}
    with pytest.raises(InvalidSpec, match="method is 'pca' for some, 'probe' for others"):
        _ = mine | some_set(1, method="probe")
    other = {name: dataclasses.replace(vectors, model="large") for name, vectors in some_set(1).items()}
    with pytest.raises(InvalidSpec, match="differ in model"):
        _ = some_set(0) | DirectionSet(other)


def test_a_set_comes_back_from_its_file(tmp_path) -> None:
    """Vectors bit for bit and provenance whole; a file of something else names what reads it."""
    given, _ = contrast(16, 2.0)
    found = directions_of("x", given, LAYERS)
    path = found.save(tmp_path / "x.safetensors")
    assert DirectionSet.load(path) == found
    with pytest.raises(InvalidFile, match=r"holds directions, not vectors; read it with DirectionSet\.load"):
        LayerVectors.load(path)
    with pytest.raises(InvalidSpec, match="at least one"):
        DirectionSet({})


def test_a_text_whose_row_decides_the_direction_is_named() -> None:
    """At the layers where its row is far longer than the others'; not where many are, as with `tokens="all"`."""
    whole, _ = contrast(8, 4.0)
    rows = whole.negative.clone()
    rows[5, 1] *= 40
    given = Contrast(whole.positive, rows, range(8), range(8))
    with pytest.warns(UserWarning, match=rf"x: at layers {LAYERS[1]} the rows of negative\[5\] .*attention sink"):
        directions_of("x", given, LAYERS, held_out=0)
    rows[::2, 1] *= 40
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        directions_of("x", whole, LAYERS, held_out=0)
        directions_of("x", Contrast(whole.positive, rows, range(8), range(8)), LAYERS, held_out=0)


@pytest.mark.parametrize(("positive", "negative", "left"), [(16, 13, 3), (13, 16, 3), (12, 12, 0)])
def test_texts_without_a_partner_are_named_where_pairs_are_compared(positive, negative, left) -> None:
    """Methods that compare pairs say how many texts they leave out; those that compare means leave none out."""
    whole, _ = contrast(16, 4.0)
    given = Contrast(whole.positive[:positive], whole.negative[:negative], range(positive), range(negative))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        directions_of("x", given, LAYERS, held_out=0)
        if not left:
            directions_of("x", given, LAYERS, method="pca", held_out=0)
    if left:
        says = f"x: method='pca' compares pairs, and leaves out {left} of {positive} positive and {negative} negative texts"
        with pytest.warns(UserWarning, match=says):
            found = directions_of("x", given, LAYERS, method="pca", held_out=0)
        assert found.provenance.rows["x"] == (13, 13)
