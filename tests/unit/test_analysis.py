"""What vectors are made of: tables against NumPy and transformers, z-scores of random vectors, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import shutil
import warnings
from pathlib import Path

import matplotlib.style
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from cli_calls import call
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from safetensors.torch import load_file, save_file
from scipy import stats

from steercap import SAE, errors
from steercap.core.display import place_names
from steercap.core.spec import Point
from steercap.errors import InvalidSpec
from steercap.lab.directions import Contrast
from steercap.lab.mechanism import analysis
from steercap.lab.mechanism.analysis import ModelWeights, pictures
from steercap.lab.mechanism.analysis.components import explained_by
from steercap.lab.mechanism.analysis.given import LabelledRows
from steercap.lab.mechanism.patching import LogitDifference
from steercap.steering import DirectionSet, LayerVectors
from steercap.testing import Reference, tiny_checkpoint
from steercap.testing.saes import RandomSAE

WIDTH = 128
IDS = [3, 41, 5, 99, 200, 7]


def drawn(count: int, seed: int = 0, layers=(1,), width: int = WIDTH, **labels) -> DirectionSet:
    """Random vectors of several lengths, by the names v0, v1, ..."""
    generator = torch.Generator().manual_seed(seed)
    return DirectionSet(
        {
            f"v{one}": LayerVectors(
                {layer: torch.randn(width, generator=generator) * (1 + one % 3) for layer in layers}, **labels
            )
            for one in range(count)
        }
    )


def rows(directions: DirectionSet, layer: int = 1) -> np.ndarray:
    return directions.at(layer).double().numpy()


def column(table, wanted: str, /, **where) -> list:
    for key, value in where.items():
        table = table.filter(pc.equal(table[key], value))
    return table[wanted].to_pylist()


@pytest.fixture(scope="module")
def llama() -> ModelWeights:
    return ModelWeights.open(tiny_checkpoint("llama"))


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    """The tiny Llama's own file."""
    found = load_file(tiny_checkpoint("llama") / "model.safetensors")
    return {name: tensor.double().numpy() for name, tensor in found.items()}


# How they lie to each other


def test_cosines_are_numpys() -> None:
    """Every ordered pair at every layer, and what chance gives."""
    vectors = drawn(5, layers=(0, 3))
    table = analysis.cosines(vectors)
    assert table.num_rows == 2 * 5 * 5
    for layer in (0, 3):
        unit = rows(vectors, layer) / np.linalg.norm(rows(vectors, layer), axis=1, keepdims=True)
        np.testing.assert_allclose(column(table, "cosine", layer=layer), (unit @ unit.T).ravel(), atol=1e-6)
    assert analysis.about(table)["chance"] == math.sqrt(2 / (math.pi * WIDTH))
    many = analysis.cosines(drawn(60))
    apart = [abs(row["cosine"]) for row in many.to_pylist() if row["first"] != row["second"]]
    assert np.mean(apart) == pytest.approx(analysis.chance_cosine(WIDTH), rel=0.05)


def test_vectors_that_belong_together_are_found() -> None:
    """Three planted groups are the three clusters, lie beside each other in the tree, and are joined first."""
    generator = torch.Generator().manual_seed(3)
    centres = torch.randn(3, WIDTH, generator=generator)
    vectors = DirectionSet(
        {
            f"{group}{one}": LayerVectors({1: centres[number] + 0.3 * torch.randn(WIDTH, generator=generator)})
            for one in range(4)
            for number, group in enumerate("abc")
        }
    )
    table = analysis.clusters(vectors, 1, count=3)
    groups = {}
    for row in table.to_pylist():
        groups.setdefault(row["cluster"], []).append(row["name"][0])
    assert sorted("".join(sorted(set(names))) for names in groups.values()) == ["a", "b", "c"]
    assert table["cluster"].to_pylist() == sorted(table["cluster"].to_pylist())
    tree = analysis.merges(vectors, 1)
    assert analysis.about(tree)["order"] == table["name"].to_pylist()
    assert tree.num_rows == 11
    assert tree["distance"].to_pylist() == sorted(tree["distance"].to_pylist())
    assert max(tree["distance"].to_pylist()[:9]) < 0.5 < tree["distance"].to_pylist()[9]
    assert tree["size"].to_pylist()[-1] == 12
    first = tree.to_pylist()[0]
    unit = vectors.unit()
    assert first["distance"] == pytest.approx(1 - float(unit[first["left"]][1] @ unit[first["right"]][1]), abs=1e-5)


def test_a_group_of_the_tree_has_no_vectors_name() -> None:
    """Rows would name both alike."""
    vectors = {name: LayerVectors({1: torch.randn(WIDTH)}) for name in ("#0", "a", "b")}
    with pytest.raises(InvalidSpec, match="a vector is called '#0'"):
        analysis.merges(vectors, 1)


def test_short_vectors_are_as_good_as_long_ones() -> None:
    """A vector of length 1e-13 has a direction."""
    long = {name: LayerVectors({1: torch.randn(WIDTH)}) for name in "ab"}
    short = {name: vectors * 1e-14 for name, vectors in long.items()}
    wanted, found = (column(analysis.cosines(vectors), "cosine") for vectors in (long, short))
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    given = LabelledRows(("g",), ("a",), short["a"][1][None])
    assert float(given.units.norm()) == pytest.approx(1.0)


@pytest.mark.parametrize("how", [{"centred": "no"}, {"unit": "no"}, {"unit": 1}])
def test_flags_of_components_are_flags(how) -> None:
    """Text would count as True."""
    vectors = drawn(3, layers=(1,))
    for verb in (analysis.scree, analysis.scores, analysis.ends):
        with pytest.raises(InvalidSpec, match=f"{next(iter(how))}="):
            verb(vectors, 1, **how)
    with pytest.raises(InvalidSpec, match=f"{next(iter(how))}="):
        analysis.principal(vectors, **how)


def test_parallel_vectors_have_no_variance_once_they_are_of_one_length() -> None:
    """What float32 rounds differently is none."""
    drawn = torch.randn(96, generator=torch.Generator().manual_seed(5))
    vectors = {str(factor): LayerVectors({1: drawn * factor}) for factor in (1.0, 3.0, 0.7, 11.0)}
    with pytest.raises(InvalidSpec, match="all vectors are the same"):
        analysis.scree(vectors, 1, unit=True, random=10)
    rows = torch.stack([drawn * factor / (drawn * factor).norm() for factor in (1.0, 3.0, 0.7, 11.0)])
    given = LabelledRows(("g",) * 4, tuple("abcd"), rows)
    assert explained_by(given, LabelledRows(("g",), ("e",), torch.randn(1, 96))) == {"e": None}


@pytest.mark.parametrize("centred", [True, False])
def test_components_are_those_of_the_covariance(centred) -> None:
    """Variances are NumPy's eigenvalues, scores are projections on the axes, and these are orthonormal."""
    vectors = drawn(7)
    given = rows(vectors) - rows(vectors).mean(0) * centred
    known = np.linalg.eigvalsh(given @ given.T / 7)[::-1]
    table = analysis.scree(vectors, 1, centred=centred, random=10)
    found = np.array(column(table, "variance"))
    np.testing.assert_allclose(found, known[: len(found)], rtol=1e-9)
    assert sum(column(table, "explained")) == pytest.approx(1)
    axes = analysis.principal(vectors, count=3, centred=centred).at(1).double()
    np.testing.assert_allclose(axes @ axes.T, np.eye(3), atol=1e-6)
    scores = analysis.scores(vectors, 1, count=3, centred=centred)
    for number in range(3):
        projected = dict(zip(vectors, (given @ axes[number].numpy()).tolist(), strict=True))
        for row in scores.filter(pc.equal(scores["component"], number + 1)).to_pylist():
            assert row["score"] == pytest.approx(projected[row["name"]], abs=1e-5)
        own = column(scores, "score", component=number + 1)
        assert own == sorted(own)
        assert own[-1] == max(map(abs, own))


def test_the_first_component_is_named_by_its_ends() -> None:
    """Vectors spread along one axis explain more than random ones, and the outermost names stand at its ends."""
    generator = torch.Generator().manual_seed(1)
    axis = torch.randn(WIDTH, generator=generator)
    vectors = DirectionSet(
        {
            name: LayerVectors({1: at * axis + torch.randn(WIDTH, generator=generator)})
            for name, at in (("cold", -2.0), ("cool", -1.0), ("mild", 0.1), ("warm", 1.0), ("hot", 2.4))
        }
    )
    first = analysis.scree(vectors, 1, random=50).to_pylist()[0]
    assert first["explained"] > first["random_high"] > first["random_mean"] > first["random_low"]
    ends = analysis.ends(vectors, 1, count=1, top=2)
    assert column(ends, "name", end="low") == ["cold", "cool"]
    assert column(ends, "name", end="high") == ["hot", "warm"]


def test_random_vectors_lie_in_the_band_of_random_vectors() -> None:
    """Of 40 sets about 95 % have a first component in the band; that is what the band says."""
    inside = 0
    for seed in range(40):
        first = analysis.scree(drawn(6, seed=100 + seed, width=32), 1, random=200, seed=seed).to_pylist()[0]
        inside += first["random_low"] <= first["explained"] <= first["random_high"]
    assert stats.binomtest(inside, 40, 0.95).pvalue > 0.01


# What they say


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "gemma2", "gpt2", "mistral", "granite", "cohere", "phi", "gpt_neox"]
)
def test_the_lens_of_a_captured_row_is_transformers_norm_and_head(family) -> None:
    """norm="applied" gives the model's own logits; "folded" the same up to one scale and the constants of the norm."""
    path = tiny_checkpoint(family)
    reference, weights = Reference(path), ModelWeights.open(path)
    last = weights.layers - 1
    row = reference.rows(IDS, [Point(last, "resid_post")])[Point(last, "resid_post")][-1]
    with torch.inference_mode():
        logits = reference.model(torch.tensor([IDS]), use_cache=False).logits[0, -1].double()
    vectors = LayerVectors({last: row}, name="row")
    applied = analysis.vector_lens(vectors, weights, norm="applied", top=5)
    best = logits.topk(5)
    assert column(applied, "token_id", end="raised") == best.indices.tolist()
    np.testing.assert_allclose(column(applied, "logit", end="raised"), best.values, rtol=1e-4)
    lowest = (-logits).topk(5)
    assert column(applied, "token_id", end="lowered") == lowest.indices.tolist()
    head = weights.unembedding
    uncapped = head._head(head._norm(row[None]))[0].double() * head._factor
    bias = 0 if head._head.bias is None else head._head.bias
    constant = (head.weight @ head.norm.constant + bias).double() * head._factor
    folded = head.read(row[None])[0].double()
    scaled = folded * float(head.norm.scales(row[None]))
    np.testing.assert_allclose(scaled + constant, uncapped.detach(), atol=2e-5 * float(uncapped.abs().max()))
    texts = column(applied, "token")
    assert texts == [weights.tokenizer.decode([token]) for token in column(applied, "token_id")]


def test_a_tokens_own_row_is_nearest_to_it(llama, tensors) -> None:
    """Of the unembedding and of the embedding, which differ; cosines are NumPy's."""
    for of, name in (("unembedding", "lm_head.weight"), ("embedding", "model.embed_tokens.weight")):
        vector = LayerVectors({1: torch.from_numpy(tensors[name][77]) * 3}, name="it")
        table = analysis.nearest_tokens(vector, llama, of=of, top=3)
        assert table["token_id"][0].as_py() == 77
        unit = tensors[name] / np.linalg.norm(tensors[name], axis=1, keepdims=True)
        known = np.sort(unit @ unit[77])[::-1][:3]
        np.testing.assert_allclose(column(table, "cosine"), known, atol=1e-6)


def test_tables_are_of_float32_whatever_the_process_has_set(llama, tmp_path) -> None:
    """Under autocast, whose products of bfloat16 are off by hundredths, they are what they are without."""
    vectors, sae = drawn(2), SAE.load(RandomSAE("standard", WIDTH, 300).write(tmp_path))

    def tables() -> list[pa.Table]:
        return [
            analysis.vector_lens(vectors, llama),
            analysis.nearest_tokens(vectors, llama),
            analysis.nearest_features(vectors, sae),
            analysis.neuron_reads(vectors, llama, 1),
            analysis.neuron_writes(vectors, llama, 1),
            analysis.head_reads(vectors, llama, 1),
            analysis.qk_circuit(vectors, llama, 1),
            analysis.ov_circuit(vectors, llama, 1),
            analysis.ov_tokens(vectors, llama, 1, [(1, 0)]),
        ]

    plain = tables()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = tables()
    assert [one.equals(other) for one, other in zip(again, plain, strict=True)] == [True] * 9
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            again = tables()
        finally:
            torch.set_default_dtype(torch.float32)
        assert [one.equals(other) for one, other in zip(again, plain, strict=True)] == [True] * 9


def test_a_features_own_rows_are_nearest_to_it(tmp_path) -> None:
    """Decoder and encoder; a vector of another point is refused, unless its layer is named."""
    sae = SAE.load(RandomSAE("standard", WIDTH, 300).write(tmp_path / "sae"))
    written = LayerVectors({1: sae.decoder[12] * 5}, name="written")
    table = analysis.nearest_features(written, sae, top=2)
    assert column(table, "feature", half="decoder")[0] == 12
    assert column(table, "cosine", half="decoder")[0] == pytest.approx(1, abs=1e-5)
    read = LayerVectors({1: -sae.encoder.weight[:, 7]}, name="read")
    found = analysis.nearest_features(read, sae, top=1)
    assert column(found, "feature", half="encoder") == [7]
    assert column(found, "cosine", half="encoder")[0] == pytest.approx(-1, abs=1e-5)
    elsewhere = LayerVectors({3: sae.decoder[12]}, name="late")
    with pytest.raises(errors.LayerOutOfRange, match="1 is not a layer"):
        analysis.nearest_features(elsewhere, sae)
    assert column(analysis.nearest_features(elsewhere, sae, layer=3, top=1), "feature", half="decoder") == [12]
    with pytest.raises(errors.InvalidSpec, match="belong to different points"):
        analysis.nearest_features(LayerVectors({1: torch.ones(5)}), sae)
    normed = RandomSAE("standard", WIDTH, 300, configuration=(("normalize_activations", "layer_norm"),))
    blind = analysis.nearest_features(LayerVectors({1: torch.ones(WIDTH)}), SAE.load(normed.write(tmp_path / "ln")))
    assert max(map(abs, column(blind, "cosine", half="encoder"))) < 1e-5  # rows are centred before they are read
    assert max(map(abs, column(blind, "cosine", half="decoder"))) > 0.1


# What they touch


def heads_of(tensors, layer: int) -> dict[str, np.ndarray]:
    """The tiny Llama's heads, out of its file by hand: 4 heads of queries, 2 of keys, 32 wide; gain folded in."""
    prefix = f"model.layers.{layer}."
    gain = tensors[f"{prefix}input_layernorm.weight"]
    found = {name: tensors[f"{prefix}self_attn.{name}_proj.weight"] * gain for name in "qkv"}
    found = {name: weight.reshape(-1, 32, WIDTH) for name, weight in found.items()}
    return found | {"o": tensors[f"{prefix}self_attn.o_proj.weight"].reshape(WIDTH, 4, 32).transpose(1, 0, 2)}


def test_circuits_are_products_of_the_files_matrices(llama, tensors) -> None:
    """Strengths, scores and what is copied, by NumPy: 2 query heads share a key and a value."""
    vectors = drawn(2)
    unit = rows(vectors) / np.linalg.norm(rows(vectors), axis=1, keepdims=True)
    reads = analysis.head_reads(vectors, llama, 1, random=50)
    scores = analysis.qk_circuit(vectors, llama, 1, random=50)
    copied = analysis.ov_circuit(vectors, llama, 1, random=50)
    assert sorted(set(reads["layer"].to_pylist())) == [2, 3]  # what reads resid_post of layer 1
    for layer in (2, 3):
        heads = heads_of(tensors, layer)
        for number, name in enumerate(vectors):
            for part in "qkv":
                known = np.linalg.norm(heads[part] @ unit[number], axis=1)
                found = column(reads, "strength", layer=layer, part=part, name=name)
                np.testing.assert_allclose(found, known, rtol=1e-5)
            for head in range(4):
                out = heads["o"][head] @ (heads["v"][head // 2] @ unit[number])
                (row,) = copied.filter(
                    pc.and_(
                        pc.and_(pc.equal(copied["layer"], layer), pc.equal(copied["head"], head)),
                        pc.equal(copied["name"], name),
                    )
                ).to_pylist()
                assert row["strength"] == pytest.approx(np.linalg.norm(out), rel=1e-5)
                assert row["copied"] == pytest.approx(out @ unit[number], abs=1e-5)
                assert row["cosine"] == pytest.approx(out @ unit[number] / np.linalg.norm(out), abs=1e-5)
        for one, query in enumerate(vectors):
            for other, key in enumerate(vectors):
                known = [(heads["q"][h] @ unit[one]) @ (heads["k"][h // 2] @ unit[other]) for h in range(4)]
                found = column(scores, "score", layer=layer, query=query, key=key)
                np.testing.assert_allclose(found, known, atol=1e-5)


def test_what_a_head_makes_of_a_vector_is_read_by_the_unembedding(llama, tensors) -> None:
    """The tokens of a head are those that the folded lens finds in what it writes, and their z is a closed form."""
    vectors = drawn(1)
    table = analysis.ov_tokens(vectors, llama, 1, [(3, 2)], top=4)
    heads = heads_of(tensors, 3)
    through = heads["o"][2] @ heads["v"][1]
    reader = tensors["lm_head.weight"] * tensors["model.norm.weight"]
    logits = reader @ through @ rows(vectors)[0]
    assert column(table, "token_id") == np.argsort(-logits)[:4].tolist()
    np.testing.assert_allclose(column(table, "logit"), np.sort(logits)[::-1][:4], rtol=1e-4)
    spread = np.linalg.norm(reader @ through, axis=1) * np.linalg.norm(rows(vectors)[0]) / math.sqrt(WIDTH)
    np.testing.assert_allclose(column(table, "z"), (logits / spread)[column(table, "token_id")], rtol=1e-4)


def test_neurons_are_products_of_the_files_matrices(llama, tensors) -> None:
    """Gates, inputs and outputs of every neuron that comes after the point, or before it."""
    vectors = drawn(1)
    unit = rows(vectors)[0] / np.linalg.norm(rows(vectors)[0])
    reads, writes = (how(vectors, llama, 1, top=None) for how in (analysis.neuron_reads, analysis.neuron_writes))
    assert (set(reads["layer"].to_pylist()), set(writes["layer"].to_pylist())) == ({2, 3}, {0, 1})
    for layer in (2, 3):
        prefix = f"model.layers.{layer}."
        for part in ("gate", "up"):
            weight = tensors[f"{prefix}mlp.{part}_proj.weight"] * tensors[f"{prefix}post_attention_layernorm.weight"]
            own = reads.filter(pc.and_(pc.equal(reads["layer"], layer), pc.equal(reads["part"], part))).to_pylist()
            assert len(own) == 256
            for row in own:
                reader = weight[row["neuron"]]
                assert row["read"] == pytest.approx(reader @ unit, abs=1e-5)
                assert row["z"] == pytest.approx(reader @ unit / np.linalg.norm(reader) * math.sqrt(WIDTH), abs=1e-4)
    for row in writes.to_pylist()[:300:7]:
        written = tensors[f"model.layers.{row['layer']}.mlp.down_proj.weight"][:, row["neuron"]]
        assert row["written"] == pytest.approx(written @ unit, abs=1e-5)
    few = analysis.neuron_reads(vectors, llama, 1, top=3)
    assert few.num_rows == 6
    assert column(few, "z", part="up") == column(reads, "z", part="up")[:3]
    assert sorted(map(abs, column(few, "z", part="gate"))) == sorted(map(abs, column(few, "z", part="gate")))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.slow
def test_z_scores_of_random_vectors_are_standard_normal(family) -> None:
    """A number of each of 300 random vectors, of every function that gives a z: Kolmogorov and Smirnov find nothing.

    Norms differ threefold, and change nothing.
    """
    weights = ModelWeights.open(tiny_checkpoint(family))
    vectors, many = drawn(300, seed=5), {"random": 2000, "seed": 1}
    head = weights.unembedding
    from steercap.lab.mechanism.analysis.tokens import z_of

    given = vectors.at(1)
    found = {"lens": z_of(head.read(given), head.reading_lengths, given)[:, 44].tolist()}
    reads = analysis.neuron_reads(vectors, weights, 1, layers=[2], top=None)
    part = reads["part"][0].as_py()
    found["reads"] = column(reads, "z", neuron=9, part=part)
    found["writes"] = column(analysis.neuron_writes(vectors, weights, 1, layers=[0], top=None), "z", neuron=3)
    circuit = analysis.ov_circuit(vectors, weights, 1, layers=[2], **many)
    found["strength"] = column(circuit, "strength_z", head=1)
    found["copied"] = column(circuit, "copied_z", head=2)
    found["q"] = column(analysis.head_reads(vectors, weights, 1, layers=[2], **many), "z", head=0, part="q")
    for name, scores in found.items():
        assert len(scores) == 300
        assert stats.kstest(scores, "norm").pvalue > 1e-3, name


@pytest.fixture(scope="module")
def attending_to_itself(tmp_path_factory) -> ModelWeights:
    """A Llama whose heads 0 and 2 of layer 3 score a vector with itself high: their keys are their queries."""
    path = tmp_path_factory.mktemp("models") / "itself"
    shutil.copytree(tiny_checkpoint("llama"), path)
    tensors = load_file(path / "model.safetensors")
    queries = tensors["model.layers.3.self_attn.q_proj.weight"]
    tensors["model.layers.3.self_attn.k_proj.weight"] = torch.cat([queries[:32], queries[64:96]])
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return ModelWeights.open(path)


@pytest.mark.parametrize("relation", ["same", "equal", "opposite", "0.6", "independent"])
def test_qk_z_is_standard_normal_whatever_query_and_key_have_in_common(attending_to_itself, relation) -> None:
    """Both are random; what they are compared with has their cosine. Four heads of each of 60 pairs."""
    generator, scores = torch.Generator().manual_seed(11), []
    for seed in range(4):
        named = {}
        for number in range(15):
            query, other = torch.randn(2, WIDTH, generator=generator)
            across = other - (other @ query) / (query @ query) * query
            keys = {"equal": 2 * query, "opposite": -3 * query, "independent": other}
            keys["0.6"] = 0.6 * query / query.norm() + 0.8 * across / across.norm()
            named |= {
                f"q{number}": LayerVectors({1: query}),
                f"k{number}": LayerVectors({1: keys.get(relation, other)}),
            }
        table = analysis.qk_circuit(DirectionSet(named), attending_to_itself, 1, layers=[3], random=1000, seed=seed)
        key = "q" if relation == "same" else "k"
        scores += [z for one in range(15) for z in column(table, "z", query=f"q{one}", key=f"{key}{one}")]
    assert len(scores) == 240
    assert abs(np.mean(scores)) < 0.26  # four standard errors
    assert np.std(scores) == pytest.approx(1, abs=0.2)
    assert stats.kstest(scores, "norm").pvalue > 1e-3


def test_a_planted_vector_is_found(tmp_path) -> None:
    """A head that copies one direction alone, and a neuron that reads it, are the outermost of all."""
    path = tmp_path / "planted"
    shutil.copytree(tiny_checkpoint("llama"), path)
    tensors = load_file(path / "model.safetensors")
    vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(8))
    gain = tensors["model.layers.3.input_layernorm.weight"]
    tensors["model.layers.3.self_attn.v_proj.weight"][32:64][5] = 8 * vector / gain / vector.norm()
    tensors["model.layers.3.self_attn.o_proj.weight"][:, 3 * 32 + 5] = 4 * vector / vector.norm()
    gain = tensors["model.layers.2.post_attention_layernorm.weight"]
    tensors["model.layers.2.mlp.gate_proj.weight"][100] = -vector / gain
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    weights, vectors = ModelWeights.open(path), LayerVectors({0: vector}, name="planted")
    best = max(analysis.ov_circuit(vectors, weights, 0).to_pylist(), key=lambda row: row["copied_z"])
    assert (best["layer"], best["head"]) == (3, 3)
    assert best["copied_z"] > 10
    assert best["copied"] == pytest.approx(32, rel=0.2)
    first = analysis.neuron_reads(vectors, weights, 0).to_pylist()[0]
    assert (first["layer"], first["neuron"], first["part"]) == (2, 100, "gate")
    assert first["z"] == pytest.approx(-math.sqrt(WIDTH), abs=1e-3)


def test_a_table_says_how_many_numbers_of_a_vector_were_compared(tmp_path, llama) -> None:
    """Of all parts and layers together; one of so many standard normal numbers is beyond `once` on average."""
    vectors, sae = drawn(2), SAE.load(RandomSAE("standard", WIDTH, 300).write(tmp_path / "sae"))
    for table in (
        analysis.head_reads(vectors, llama, 1, random=20),
        analysis.ov_circuit(vectors, llama, 1, random=20),
        analysis.neuron_reads(vectors, llama, 1, top=None),
        analysis.neuron_writes(vectors, llama, 1, top=None),
        analysis.nearest_features(vectors, sae, top=300),
    ):
        known = analysis.about(table)
        assert known["compared"] == table.num_rows / 2
        assert known["once"] == pytest.approx(stats.norm.isf(0.5 / known["compared"]))
    few = analysis.about(analysis.neuron_reads(vectors, llama, 1, layers=[2, 3], top=3))
    assert few["compared"] == 2 * 2 * 256


# How alike methods are


def contrast(effect: float, texts: int = 24, width: int = 32, seed: int = 0) -> Contrast:
    """Rows that differ along one direction by so much, in noise of standard deviation 1."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(width, generator=generator)
    direction *= effect / direction.norm()
    positive, negative = (torch.randn(texts, 2, width, generator=generator) for _ in range(2))
    return Contrast(positive + direction, negative, list(range(texts)), list(range(texts)))


def test_methods_agree_where_there_is_something_and_not_beyond_their_data() -> None:
    """A strong difference: all agree, on different halves as well as each with itself. None: nothing agrees on different
    halves, and what agreement there is on the same rows, shuffled labels give as well.
    """
    clear = analysis.method_similarity(contrast(6), [4, 5])
    for row in clear.to_pylist():
        assert row["cosine"] > 0.9
        assert row["apart"] == pytest.approx(row["ceiling"], abs=0.05)
        assert row["chance"] == analysis.chance_cosine(32)
    nothing = analysis.method_similarity(contrast(0), [4, 5], methods=("difference", "probe"))
    for row in nothing.to_pylist():
        assert max(abs(row["apart"]), row["ceiling"]) < 0.35
        assert abs(row["cosine"]) == pytest.approx(row["shuffled"], abs=0.25)
    for row in analysis.method_similarity(contrast(8), [4, 5], methods=("difference", "pca", "probe")).to_pylist():
        paired = "pca" in {row["first"], row["second"]}  # which no shuffled labels change but in its sign
        assert math.isnan(row["shuffled"]) is paired
    trained = LayerVectors({4: torch.ones(32), 5: torch.ones(32)})
    table = analysis.method_similarity(contrast(2), [4, 5], methods=("difference",), others={"trained": trained})
    (first, _) = table.to_pylist()
    assert (first["first"], first["second"]) == ("difference", "trained")
    assert math.isnan(first["ceiling"])
    found = contrast(2).positive[:, 0].double().mean(0) - contrast(2).negative[:, 0].double().mean(0)
    assert first["cosine"] == pytest.approx(float(found.sum() / found.norm() / math.sqrt(32)), abs=1e-6)
    for wrong in ({"methods": ("difference",)}, {"halves": 0}, {"others": {"x": LayerVectors({4: torch.ones(31)})}}):
        with pytest.raises(errors.InvalidSpec):
            analysis.method_similarity(contrast(1), [4, 5], **wrong)


# What is refused


def changed(family: str, folder, **config):
    path = folder / family
    shutil.copytree(tiny_checkpoint(family), path)
    known = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(known | config))
    return path


def test_what_cannot_be_taken_apart_is_refused_by_name(tmp_path) -> None:
    """Experts, unknown architectures, unknown weights within a known one, and missing files."""
    with pytest.raises(errors.UnsupportedModel, match="layer 2 of MixtralForCausalLM has experts"):
        ModelWeights.open(tiny_checkpoint("mixtral")).neurons(2)
    assert ModelWeights.open(tiny_checkpoint("mixtral")).attention(2).heads == 4
    moe = ModelWeights.open(tiny_checkpoint("qwen3_moe"))
    with pytest.raises(errors.UnsupportedModel, match="has experts"):
        analysis.neuron_reads(drawn(1), moe, 1)
    assert moe.neurons(1).gate is not None  # the layer without experts
    with pytest.raises(errors.UnsupportedModel, match=r"FalconForCausalLM cannot be taken apart; those of .*Llama"):
        ModelWeights.open(tiny_checkpoint("falcon"))
    odd = ModelWeights.open(changed("stablelm", tmp_path, qk_layernorm=True))
    with pytest.raises(errors.UnsupportedModel, match=r"has self_attn\.q_layernorm\.norms\.0\.weight.* not know"):
        odd.attention(0)
    parallel = ModelWeights.open(tiny_checkpoint("stablelm", use_parallel_residual=True))
    assert parallel.is_parallel
    with pytest.raises(errors.UnsupportedModel, match="has no post_attention_layernorm in layer 0"):
        parallel.feed_forward(0)
    quantised = changed("mistral", tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(errors.UnsupportedModel, match=r"its weights are quantised .*gptq"):
        ModelWeights.open(quantised).attention(0)
    tensors = load_file((path := changed("llama", tmp_path)) / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(errors.UnsupportedModel, match="float8_e4m3fn, which is not the plain weight"):
        ModelWeights.open(path).attention(0)
    with pytest.raises(errors.ModelNotLoaded, match="no configuration"):
        ModelWeights.open(tmp_path / "nothing")
    with pytest.raises(errors.LayerOutOfRange, match="layers 0 to 3"):
        ModelWeights.open(tiny_checkpoint("llama")).attention(4)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("layers.2.self_attn.o_proj.weight", analysis.ov_circuit),
        ("layers.2.mlp.gate_proj.weight", analysis.neuron_reads),
    ],
)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_damaged_checkpoint_is_named_with_its_tensor(name, how, number, tmp_path) -> None:
    """One number of one head or neuron is enough; its z would be 0, and it would never be among the first."""
    tensors = load_file((path := changed("llama", tmp_path)) / "model.safetensors")
    tensors[f"model.{name}"][3, 5] = number
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(errors.InvalidFile, match=f"{name} has numbers that are not finite; is the checkpoint damaged"):
        how(drawn(1), ModelWeights.open(path), 1)


@pytest.mark.parametrize("parallel", [False, True])
def test_blocks_one_after_the_other_read_each_other_whatever_the_family_does(parallel) -> None:
    """RedPajama-INCITE is a GPT-NeoX whose feed-forward block reads what the attention block of its layer has added."""
    weights = ModelWeights.open(tiny_checkpoint("gpt_neox", use_parallel_residual=parallel))
    found = analysis.neuron_reads(drawn(1, site="attn_out"), weights, 1)
    assert set(found["layer"].to_pylist()) == ({2, 3} if parallel else {1, 2, 3})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (lambda: drawn(2, width=64), "vectors have width 64"),
        (lambda: drawn(2, site="z"), "'z' are not in the basis of the stream"),
        (lambda: [LayerVectors({1: torch.ones(WIDTH)})] * 2, "give each one of its own"),
        (lambda: "vectors", "give a DirectionSet"),
        (lambda: {"a": LayerVectors({1: torch.ones(WIDTH)}), "b": LayerVectors({2: torch.ones(WIDTH)})}, "layers"),
    ],
)
def test_vectors_that_do_not_fit_are_refused(given, says, llama) -> None:
    """Of another width or basis, without names, of different layers."""
    with pytest.raises(errors.InvalidSpec, match=says):
        analysis.vector_lens(given(), llama)


def warned_of(how, *given, **named) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        how(*given, **named)
    return [str(one.message) for one in seen]


def test_vectors_of_another_model_are_warned_of(llama, tmp_path) -> None:
    """By every function that takes weights, whatever the width; not of one's own, nor of vectors without a label."""
    calls = {
        "lens": lambda given: analysis.vector_lens(given, llama, top=1),
        "nearest": lambda given: analysis.nearest_tokens(given, llama, top=1),
        "head_reads": lambda given: analysis.head_reads(given, llama, 1, random=3),
        "qk": lambda given: analysis.qk_circuit(given, llama, 1, random=3),
        "ov": lambda given: analysis.ov_circuit(given, llama, 1, random=3),
        "ov_tokens": lambda given: analysis.ov_tokens(given, llama, 1, [(2, 0)], top=1),
        "reads": lambda given: analysis.neuron_reads(given, llama, 1, top=1),
        "writes": lambda given: analysis.neuron_writes(given, llama, 1, top=1),
        "anatomy": lambda given: analysis.anatomy(given, llama, 1, parts=["tree"]),
    }
    other = drawn(2, model="meta-llama/Llama-3.1-8B")
    for name, one in calls.items():
        assert any("'meta-llama/Llama-3.1-8B', and this one is" in said for said in warned_of(one, other)), name
        for given in (drawn(2), drawn(2, model=str(llama.name)), drawn(2, model="/other/" + Path(llama.name).name)):
            assert warned_of(one, given) == []
    sae = SAE.load(RandomSAE("standard", WIDTH, 30).write(tmp_path / "sae"))
    for label, count in (("mistralai/Mistral-7B", 1), ("meta-llama/Llama-3.1-8B-Instruct", 0), ("", 0)):
        labelled = dataclasses.replace(sae, model=label)
        assert len(warned_of(analysis.nearest_features, other, labelled)) == count


def test_questions_without_an_answer_are_refused(llama) -> None:
    """No layer reads the last stream, zero has no direction, one vector has no components, words are of the list."""
    last = drawn(1, layers=(3,))
    for how in (analysis.ov_circuit, analysis.head_reads, analysis.qk_circuit, analysis.neuron_reads):
        with pytest.raises(errors.InvalidSpec, match="reads what is added at resid_post of layer 3"):
            how(last, llama, 3)
    assert set(analysis.ov_circuit(last, llama, 3, layers=[0])["layer"].to_pylist()) == {0}
    assert set(analysis.ov_tokens(drawn(1), llama, 1, [(-1, 2)], top=1)["layer"].to_pylist()) == {3}
    with pytest.raises(errors.InvalidSpec, match="writes to attn_out"):
        analysis.neuron_writes(drawn(1, site="attn_out"), llama, 1)
    assert set(analysis.neuron_writes(drawn(1, site="mlp_out"), llama, 1)["layer"].to_pylist()) == {1}
    with pytest.raises(errors.InvalidVector, match="zero"):
        analysis.cosines(LayerVectors({1: torch.zeros(WIDTH)}, name="none"))
    with pytest.raises(errors.InvalidSpec, match="two vectors at least"):
        analysis.scree(drawn(1), 1)
    with pytest.raises(errors.InvalidSpec, match="all vectors are the same"):
        analysis.scree({"a": drawn(1)["v0"], "b": drawn(1)["v0"]}, 1)
    for wrong in (
        lambda: analysis.merges(drawn(3), 1, linkage="ward"),
        lambda: analysis.clusters(drawn(3), 1, count=4),
        lambda: analysis.scores(drawn(3), 1, count=3),
        lambda: analysis.vector_lens(drawn(1), llama, norm="frozen"),
        lambda: analysis.vector_lens(drawn(1), llama, top=0),
        lambda: analysis.nearest_tokens(drawn(1), llama, of="head"),
        lambda: analysis.ov_tokens(drawn(1), llama, 1, [(2, 4)]),
        lambda: analysis.ov_circuit(drawn(1), llama, 1, random=1),
        lambda: analysis.neuron_reads(drawn(1), llama, 1, top=0),
        lambda: analysis.cosines(drawn(2), layers=[0]),
        lambda: analysis.vector_lens(drawn(1), "llama"),
    ):
        with pytest.raises(errors.InvalidSpec):
            wrong()


# Tables, pictures, the command


def test_a_table_says_what_it_was_made_of(tmp_path) -> None:
    """After it was filtered, sorted, written and read; another table says that it does not."""
    import pyarrow as pa
    from pyarrow import parquet

    table = analysis.cosines(drawn(3, model="tiny"))
    known = analysis.about(table)
    assert (known["model"], known["site"], known["width"]) == ("tiny", "resid_post", WIDTH)
    assert analysis.about(table.filter(pc.equal(table["first"], "v0")).sort_by("cosine")) == known
    assert analysis.about(parquet.read_table(analysis.save_table(table, tmp_path / "c.parquet"))) == known
    assert analysis.save_table(table, tmp_path / "c.csv").read_text().startswith('"layer","first"')
    with pytest.raises(errors.InvalidFile, match="must end in one of"):
        analysis.save_table(table, tmp_path / "c.xlsx")
    with pytest.raises(errors.InvalidSpec, match="not a table of steercap"):
        analysis.about(pa.table({"a": [1]}))
    lines = analysis.as_text(table, 4).splitlines()
    assert lines[0].split() == ["layer", "first", "second", "cosine"]
    assert lines[-1] == "… 5 more rows"
    assert len({len(line) for line in lines[:-1]}) == 1


def test_numpys_integers_are_integers(llama) -> None:
    """As layers, counts and seeds: the tables and what they say of themselves are the same."""
    vectors, one = drawn(3), np.int64(1)
    for how in (
        lambda of: analysis.ov_circuit(vectors, llama, of(1), random=of(30), seed=of(3)),
        lambda of: analysis.qk_circuit(vectors, llama, of(1), random=of(30), seed=of(3)),
        lambda of: analysis.neuron_reads(vectors, llama, of(1), top=of(2)),
        lambda of: analysis.scree(vectors, of(1), random=of(20)),
        lambda of: analysis.merges(vectors, of(1)),
        lambda of: analysis.scores(vectors, of(1)),
    ):
        plain, theirs = how(int), how(np.int64)
        assert theirs.equals(plain)
        assert analysis.about(theirs) == analysis.about(plain)
    assert analysis.anatomy(vectors, llama, one, random=np.int64(30)).tables
    with pytest.raises(errors.InvalidSpec, match=r"seed=1\.5; give a whole number"):
        analysis.ov_circuit(vectors, llama, 1, seed=1.5)


@pytest.mark.slow
def test_each_table_is_drawn_and_no_other(tmp_path, llama) -> None:
    """Every picture is a file of its format; of another table, or of several layers, none is made."""
    vectors = drawn(4, layers=(0, 1))
    found = analysis.anatomy(vectors, llama, 1, random=40, top=3)
    files = analysis.draw_anatomy(found.tables, tmp_path)
    assert [path.stem for path in files] == ["cosines", "scree", "scores", "tokens", "heads", "reads", "writes"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)
    assert list(found.left_out) == ["features"]
    (pdf,) = analysis.draw_anatomy({"scree": found.tables["scree"]}, tmp_path, suffix=".pdf")
    assert pdf.read_bytes().startswith(b"%PDF")
    similar = analysis.method_similarity(contrast(2), [4, 5], methods=("difference", "pca"), halves=1, shuffles=1)
    assert analysis.plot_methods(similar, tmp_path / "methods.png").exists()
    reads = analysis.head_reads(vectors, llama, 1, random=40)
    assert analysis.plot_heads(reads, tmp_path / "reads.png", part="q").exists()
    assert analysis.plot_heads(analysis.qk_circuit(vectors, llama, 1, random=40), tmp_path / "qk.png").exists()
    for wrong, says in (
        (lambda path: analysis.plot_tokens(found.tables["scree"], path), "takes a table of vector_lens"),
        (lambda path: analysis.plot_cosines(analysis.cosines(vectors), path), "this picture is of one"),
        (lambda path: analysis.plot_cosines(analysis.cosines(drawn(2)), path, tree=found.tables["tree"]), "the tree"),
        (lambda path: analysis.plot_heads(reads, path), "this picture is of one"),
        (lambda path: analysis.plot_heads(found.tables["heads"], path, value="loudness"), "column of numbers"),
        (lambda path: analysis.plot_scree(found.tables["scree"].slice(0, 0), path), "has no rows"),
    ):
        with pytest.raises(errors.InvalidSpec, match=says):
            wrong(tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
    with pytest.raises(errors.UnknownName, match=r"unknown part 'hands'; did you mean 'heads'\? known: 'cosines'"):
        analysis.anatomy(vectors, llama, 1, parts=["hands"])


@pytest.mark.parametrize(
    ("scales", "without"),
    [((1, 2, -1), {"scores", "ends"}), ((1, 1), {"scree", "scores", "ends"})],
)
def test_an_anatomy_has_all_parts_that_vectors_on_one_line_have(llama, scales, without) -> None:
    """They have one principal component, or none if they are the same; a part that is asked for is an error."""
    vector = drawn(1)["v0"]
    vectors = DirectionSet({f"v{at}": scale * vector for at, scale in enumerate(scales)})
    found = analysis.anatomy(vectors, llama, 1, random=40, top=3)
    assert set(found.left_out) == {"features", *without}
    assert set(found.tables) == set(analysis.PARTS) - set(found.left_out)
    with pytest.raises(errors.InvalidSpec, match=re.escape(found.left_out["scores"])):
        analysis.anatomy(vectors, llama, 1, parts=["scores"])


def test_a_picture_and_an_anatomy_are_of_one_layer(llama, tmp_path) -> None:
    """A tree, or an SAE, of another layer is refused."""
    vectors = drawn(3, layers=(0, 1, 2))
    with pytest.raises(errors.InvalidSpec, match="the tree is of layer 2, and layer=0 is drawn"):
        analysis.plot_cosines(analysis.cosines(vectors), tmp_path / "c.png", tree=analysis.merges(vectors, 2), layer=0)
    assert analysis.plot_cosines(
        analysis.cosines(vectors), tmp_path / "c.png", tree=analysis.merges(vectors, 2)
    ).exists()
    path = RandomSAE("standard", WIDTH, 30).write(tmp_path / "sae")
    for parts in (None, ["features"]):
        with pytest.raises(errors.InvalidSpec, match=r"is of layer 0, and the vectors are of layer 1; .*, layer=1\)"):
            analysis.anatomy(vectors, llama, 1, sae=SAE.load(path, input=(0, "resid_post")), parts=parts, random=20)
    own = analysis.anatomy(vectors, llama, 1, sae=SAE.load(path), parts=["features"]).tables["features"]
    assert set(own["layer"].to_pylist()) == {1}


@pytest.mark.parametrize(
    ("family", "config", "site", "layer", "without"),
    [
        ("mixtral", {}, "resid_post", 1, {"reads", "writes"}),
        ("gpt_neox", {"use_parallel_residual": True}, "attn_out", 3, {"heads", "reads", "writes"}),
        ("gpt_neox", {"use_parallel_residual": False}, "attn_out", 3, {"heads", "writes"}),
        ("llama", {}, "resid_mid", 0, {"writes"}),
    ],
)
def test_an_anatomy_leaves_out_what_a_model_has_not(family, config, site, layer, without) -> None:
    """Neurons of experts, and blocks that read or write nothing there; what is asked for is an error."""
    weights, vectors = ModelWeights.open(tiny_checkpoint(family, **config)), drawn(3, layers=(layer,), site=site)
    found = analysis.anatomy(vectors, weights, layer, random=20, top=2)
    assert set(found.left_out) == {"features", *without}
    assert set(found.tables) == set(analysis.PARTS) - set(found.left_out)
    for part in without:
        with pytest.raises(errors.SteercapError, match=re.escape(found.left_out[part])):
            analysis.anatomy(vectors, weights, layer, parts=[part], random=20)


def outlying(table, column: str, value: float = 1e5):
    """The table, with its first value far out."""
    values = [value, *table[column].to_pylist()[1:]]
    return table.set_column(table.column_names.index(column), column, pa.array(values, table[column].type))


def test_an_outlier_does_not_flatten_a_picture(tmp_path, llama, monkeypatch) -> None:
    """The axes end where the others do; the outlier is at the edge, with its number, and the axis says how far it is."""
    figures = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, *_rest: figures.append(figure))
    vectors = drawn(4, layers=(0, 1))
    found = analysis.anatomy(vectors, llama, 1, random=40, top=3, parts=["scores", "tokens", "reads"]).tables
    for name, draw, column in (
        ("scores", analysis.plot_scores, "score"),
        ("tokens", analysis.plot_tokens, "z"),
        ("reads", analysis.plot_neurons, "z"),
    ):
        draw(outlying(found[name], column), tmp_path / "picture.png")
        axes = figures[-1].axes[0]
        ends = np.abs([*axes.get_xlim(), *axes.get_ylim()])
        assert ends.max() < 1e3, name
        assert any("1e+05" in text.get_text() for one in figures[-1].axes for text in one.texts), name


def test_a_picture_of_methods_holds_all_of_its_lines(tmp_path, monkeypatch) -> None:
    """Also what different halves agree in below zero, and beside a layer where nothing is known."""
    figures = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, *_rest: figures.append(figure))
    similar = analysis.method_similarity(contrast(2), [4, 5], methods=("difference", "pca"), halves=1, shuffles=1)
    analysis.plot_methods(outlying(outlying(similar, "apart", -0.7), "ceiling", math.nan), tmp_path / "picture.png")
    (axes,) = figures[-1].axes
    low, high = axes.get_ylim()
    lines = [line.get_ydata() for line in axes.lines]
    assert low <= min(np.nanmin(line) for line in lines if not np.isnan(line).all()) == -0.7
    assert high >= 1


@pytest.mark.parametrize(("count", "said"), [(30, " (the first 20 of 29)"), (9, "")])
def test_a_scree_says_how_many_components_it_leaves_out(count, said, tmp_path, monkeypatch) -> None:
    figures = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, *_rest: figures.append(figure))
    analysis.plot_scree(analysis.scree(drawn(count), 1), tmp_path / "picture.png")
    (axes,) = figures[-1].axes
    assert len(axes.lines[-1].get_xdata()) == min(20, count - 1)
    assert axes.get_xlabel() == f"principal component{said}"


def test_a_picture_of_positions_is_of_the_prompt_that_is_asked_for(tmp_path, monkeypatch) -> None:
    """Not of the only one there is, if another is named; without a name, of that one."""
    figures = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, *_rest: figures.append(figure))
    each = [
        {
            "name": "v",
            "control": 0,
            "layer": 0,
            "prompt": prompt,
            "position": 0,
            "token": "a",
            "difference": prompt + 1.0,
        }
        for prompt in (0, 3)
    ]
    both, last = pa.Table.from_pylist(each), pa.Table.from_pylist(each[1:])
    for table, prompt, value in ((both, None, 1.0), (both, 3, 4.0), (last, None, 4.0), (last, 3, 4.0)):
        analysis.plot_position_sweep(table, tmp_path / "picture.png", prompt=prompt)
        assert figures[-1].axes[0].images[0].get_array().tolist() == [[value]]
    for table in (both, last):
        with pytest.raises(errors.InvalidSpec, match="prompt=7; the table has prompts"):
            analysis.plot_position_sweep(table, tmp_path / "picture.png", prompt=7)
    with pytest.raises(errors.InvalidSpec, match="prompt=0; the table has prompts"):
        analysis.plot_position_sweep(last, tmp_path / "picture.png", prompt=0)


def test_pictures_follow_the_style_of_matplotlib(tmp_path, llama, monkeypatch) -> None:
    """On a dark page, texts and lines that are dark without a style are light; texts on cells keep their own."""
    figures = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, *_rest: figures.append(figure))
    vectors = drawn(4, layers=(0, 1))
    found = analysis.anatomy(vectors, llama, 1, random=40, top=3, parts=["scores", "tokens", "reads", "tree"]).tables
    with matplotlib.style.context("dark_background"):
        for name, draw in (
            ("scores", analysis.plot_scores),
            ("tokens", analysis.plot_tokens),
            ("reads", analysis.plot_neurons),
        ):
            draw(found[name], tmp_path / "picture.png")
            assert to_rgb(figures[-1].get_facecolor()) == (0, 0, 0)
            for text in figures[-1].findobj(Text):
                assert to_rgb(text.get_color()) == (1, 1, 1), (name, text)
            for axes in figures[-1].axes:
                assert all(sum(to_rgb(line.get_color())) > 0.5 for line in axes.lines), name


def test_the_lowest_panel_of_each_column_has_the_scale(tmp_path, llama, monkeypatch) -> None:
    """Four panels are three and one: the second and third, with nothing below them, are labelled too."""
    figures = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, *_rest: figures.append(figure))
    said = analysis.vector_lens(drawn(4), llama, layers=[1], top=3)
    analysis.plot_tokens(said, tmp_path / "picture.png")
    panels = figures[-1].axes
    labelled = [
        (bool(axes.get_xlabel()), any(text.get_visible() for text in axes.get_xticklabels())) for axes in panels
    ]
    assert labelled[:4] == [(False, False), (True, True), (True, True), (True, True)]


def test_names_beside_points_do_not_overlap() -> None:
    axes = Figure(layout="constrained").subplots()
    points = [(0.01 * number, 0.0) for number in range(4)] + [(0.3, 0.3)]
    axes.scatter(*zip(*points, strict=True))
    place_names(axes, ["detective", "chef", "comedian", "gambler", "toddler"], points)
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 5
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_a_name_at_an_edge_stays_in_the_axes() -> None:
    """The name of a point between two others, at the upper edge and at the lower."""
    for height in (1.0, 0.0):
        axes = Figure(layout="constrained").subplots()
        axes.set(xlim=(0, 1), ylim=(0, 1))
        place_names(axes, ["middle", "", ""], [(0.5, height), (0.48, height), (0.52, height)])
        box, frame = axes.texts[0].get_window_extent(), axes.get_window_extent()
        assert frame.y0 <= box.y0
        assert box.y1 <= frame.y1


def test_the_command_shows_and_keeps_what_the_library_finds(tmp_path, llama) -> None:
    """Tables for people, JSON for programs, Parquet and pictures in the folder; nothing but the asked parts."""
    model = str(tiny_checkpoint("llama"))
    vectors = drawn(2, layers=(0, 1, 2), model=model)
    file = vectors.save(tmp_path / "two.safetensors")
    done = call("analyse", file, "--model", model, "--out", tmp_path / "out", "--random", "40", "--top", "3", "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["layer"] == 1
    assert document["left_out"] == {"features": "no SAE was given"}
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"heads.parquet", "tokens.png", "cosines.png", "writes.parquet"} <= names
    known = analysis.vector_lens(vectors, llama, layers=[1], top=3).to_pylist()
    assert document["tables"]["tokens"] == json.loads(json.dumps(known))
    shown = call("analyse", file, "--model", model, "--layer", "2", "--names", "v1", "--parts", "heads", "--top", "2")
    assert shown.exit_code == 0, shown.output
    assert "copied_z" in shown.stdout
    assert "tokens:" not in shown.stdout
    assert call("analyse", file, "--model", model, "--parts", "hands").exit_code == 1
    assert call("analyse", file, "--model", model, "--layer", "7").exit_code == 1


def test_a_sweep_is_checked_before_anything_runs() -> None:
    """Scales, numbers of random vectors and layers that mean nothing."""
    import asyncio

    metric = LogitDifference((17, 99))
    for wrong in ({"scale": 0}, {"scale": math.nan}, {"random": -1}, {"layers": [2]}, {"tokens": "some"}):
        with pytest.raises(errors.InvalidRequest):
            asyncio.run(analysis.layer_sweep(None, drawn(1), "text", metric=metric, **wrong))
