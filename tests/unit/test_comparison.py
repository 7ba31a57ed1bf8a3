"""Two checkpoints on the same vectors: every number against the formula written in NumPy, nulls, tests, resuming."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
import warnings
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from cli_calls import call
from pyarrow import parquet
from safetensors.torch import load_file, save_file
from scipy import stats
from support.checkpoints import Checkpoint, cosine

from steercap import errors
from steercap.lab.mechanism import analysis
from steercap.lab.mechanism.analysis import pictures
from steercap.lab.mechanism.analysis.given import LabelledRows, random_pairs
from steercap.lab.mechanism.comparison import CompareSettings, compare, draw_comparison, group_tests, partners
from steercap.lab.mechanism.comparison.attention import RandomPairs, RelationNull, attention_deltas
from steercap.lab.mechanism.weights.model import ModelWeights
from steercap.steering import DirectionSet, LayerVectors
from steercap.testing import tiny_checkpoint

WIDTH, LAYER = 128, 1
FAMILIES = ["llama", "qwen3", "gemma2", "qwen2"]
#: Float32 products of width 128, relative to the largest of an array.
NEAR = 2e-6


def altered(family: str, folder: Path) -> Path:
    """A copy of a tiny checkpoint with noise on all weights."""
    shutil.copytree(tiny_checkpoint(family), folder)
    generator = torch.Generator().manual_seed(5)
    for file in folder.glob("*.safetensors"):
        noisy = {
            name: tensor + 0.3 * tensor.abs().mean() * torch.randn(tensor.shape, generator=generator)
            for name, tensor in load_file(file).items()
        }
        save_file(noisy, file, {"format": "pt"})
    return folder


def drawn(count: int, prefix: str, seed: int) -> DirectionSet:
    generator = torch.Generator().manual_seed(seed)
    return DirectionSet(
        {
            f"{prefix}{at}": LayerVectors({LAYER: torch.randn(WIDTH, generator=generator) * (1 + at % 3)})
            for at in range(count)
        }
    )


GROUPS = {"roles": drawn(9, "r", 1), "traits": drawn(7, "t", 2)}
SETTINGS = CompareSettings(layers=[1, 2], feed_forward_layers=[0, 1, 2], nulls=100)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory) -> tuple[Checkpoint, Checkpoint]:
    """A tiny checkpoint and its altered copy, of one family."""
    folder = tmp_path_factory.mktemp(request.param)
    paths = tiny_checkpoint(request.param), altered(request.param, folder / "instruct")
    return tuple(Checkpoint(request.param, path) for path in paths)


@pytest.fixture(scope="module")
def found(pair):
    return compare(pair[0].weights, pair[1].weights, GROUPS, LAYER, settings=SETTINGS)


def length() -> float:
    norms = torch.cat([vectors.at(LAYER).norm(dim=1) for vectors in GROUPS.values()])
    return float(norms.mean())


def named_rows() -> dict[tuple[str, str], np.ndarray]:
    """Every vector at the common length, and the principal components of all."""
    rows = {
        (group, name): one.double().numpy()
        for group, vectors in GROUPS.items()
        for name, one in zip(vectors, vectors.at(LAYER), strict=True)
    }
    middle = np.array(list(rows.values()))
    middle = middle - middle.mean(0)
    axes = np.linalg.svd(middle)[2][:10]
    for at, axis in enumerate(axes):
        outermost = middle @ axis
        rows["components", f"PC{at + 1}"] = axis * np.sign(outermost[np.abs(outermost).argmax()])
    return {key: row / np.linalg.norm(row) * length() for key, row in rows.items()}


def near(found, known, tolerance: float = NEAR) -> None:
    known = np.asarray(known)
    np.testing.assert_allclose(np.asarray(found), known, rtol=0, atol=tolerance * np.abs(known).max())


def test_susceptibility_is_each_models_norm_and_raw_matrix(pair, found) -> None:
    """1 − cosine of both results, of five vectors of each group, all components and 20 random ones."""
    table, rows = found.tables["susceptibility"], named_rows()
    counts = {}
    for row in table.to_pylist():
        counts.setdefault((row["layer"], row["matrix"]), []).append(row["group"])
        if row["group"] == "random":
            continue
        vector = rows[row["group"], row["name"]]
        block = "attention" if row["matrix"] in "qkv" else "mlp"
        name = (
            f"model.layers.{row['layer']}.{'self_attn' if block == 'attention' else 'mlp'}.{row['matrix']}_proj.weight"
        )
        outputs = [one[name] @ one.before(vector, row["layer"], block) for one in pair]
        assert row["distance"] == pytest.approx(1 - cosine(*outputs), abs=1e-6)
    assert set(counts) == {(layer, matrix) for layer in (1, 2) for matrix in ("q", "k", "v", "gate", "up")}
    for groups in counts.values():
        assert [groups.count(one) for one in ("roles", "traits", "components", "random")] == [5, 5, 10, 20]
    assert "4 of 9" in found.left_out["roles through matrices"]
    turned = table.filter(pc.equal(table["group"], "random"))["distance"].to_numpy()
    assert turned.std() > 0


def test_weight_differences_are_those_of_the_files(pair, found) -> None:
    """Frobenius norm, the same relative to base, and the cosine of the flattened matrices."""
    for row in found.tables["matrices"].to_pylist():
        block = "self_attn" if row["matrix"] in "qkv" else "mlp"
        one, other = (own[f"model.layers.{row['layer']}.{block}.{row['matrix']}_proj.weight"].ravel() for own in pair)
        assert row["frobenius"] == pytest.approx(np.linalg.norm(other - one))
        assert row["relative"] == pytest.approx(np.linalg.norm(other - one) / np.linalg.norm(one))
        assert row["cosine"] == pytest.approx(cosine(one, other))


def test_feed_forward_blocks_are_compared_whole(pair, found) -> None:
    """Norms, activation and the norm behind: changes of the output, their summary, and the focus layers."""
    rows, table = named_rows(), found.tables["feed_forward"]
    known = {}
    for row in table.to_pylist():
        one, other = (own.feed_forward(rows[row["group"], row["name"]], row["layer"]) for own in pair)
        assert row["absolute"] == pytest.approx(np.linalg.norm(other - one), rel=1e-5)
        assert row["angular"] == pytest.approx(1 - cosine(one, other), abs=1e-6)
        assert (row["base_norm"], row["instruct_norm"]) == pytest.approx(
            (np.linalg.norm(one), np.linalg.norm(other)), rel=1e-5
        )
        for measure in ("absolute", "angular"):
            known.setdefault((row["group"], row["layer"], measure), []).append(row[measure])
    assert table.num_rows == 3 * len(rows)
    for row in found.tables["by_layer"].to_pylist():
        values = known.pop((row["group"], row["layer"], row["measure"]))
        assert (row["mean"], row["std"], row["max"], row["count"]) == pytest.approx(
            (np.mean(values), np.std(values, ddof=1), max(values), len(values))
        )
    assert not known
    for measure, layer in found.focus.items():
        means = {
            at: np.mean(
                [row[measure] for row in table.to_pylist() if (row["group"], row["layer"]) == ("components", at)]
            )
            for at in (0, 1, 2)
        }
        assert layer == max(means, key=means.get)
        listed = [row for row in found.tables["altered"].to_pylist() if row["measure"] == measure]
        for group, count in (("roles", 9), ("traits", 7)):
            own = [row for row in table.to_pylist() if (row["group"], row["layer"]) == (group, layer)]
            best = sorted(own, key=lambda row: -row[measure])[:count]
            assert [row["name"] for row in listed if row["group"] == group] == [row["name"] for row in best]


def test_outputs_are_decomposed_on_every_named_vector(pair, found) -> None:
    """At the focus layers, the 15 largest projections of both outputs and of the change; ± PC1 to PC5 along and across."""
    rows = named_rows()
    names = [key for key in rows if key[0] != "components"]
    units = np.array([rows[key] for key in names]) / length()
    listed = {}
    for row in found.tables["decomposition"].to_pylist():
        listed.setdefault((row["layer"], row["name"], row["output"]), []).append(row)
    assert set(listed) == {
        (layer, f"PC{at}", output)
        for layer in set(found.focus.values())
        for at in range(1, 11)
        for output in ("base", "instruct", "change")
    }
    for (layer, name, output), own in listed.items():
        base, instruct = (one.feed_forward(rows["components", name], layer) for one in pair)
        value = {"base": base, "instruct": instruct, "change": instruct - base}[output]
        projections = units @ value
        near([row["projection"] for row in own], projections[np.argsort(-abs(projections))[:15]], 1e-5)
        for row in own:
            target = rows[row["target_group"], row["target"]]
            assert row["cosine"] == pytest.approx(cosine(value, target), abs=1e-5)
    signs = found.tables["reinforcement"].to_pylist()
    assert len(signs) == 3 * 2 * 2 * 5
    for row in signs:
        vector = row["sign"] * rows["components", row["name"]]
        value = pair[row["model"] == "instruct"].feed_forward(vector, row["layer"])
        along = value @ vector / length()
        assert row["along"] == pytest.approx(along, abs=1e-4)
        assert row["across"] == pytest.approx(math.sqrt(value @ value - along**2), abs=1e-4)


def test_attention_is_scores_and_what_is_written(pair, found) -> None:
    """Numbers of both circuits by the formula; z by the same random pairs at exactly that cosine; deltas; what is shown."""
    rows, table = named_rows(), found.tables["attention"]
    drawn_first, across = (one.double().numpy() * length() for one in random_pairs(100, WIDTH, 0))
    seen = set()
    for row in table.to_pylist():
        source, target = rows[row["source_group"], row["source"]], rows[row["target_group"], row["target"]]
        target = -target if row["relation"] == "opposite" else target
        seen.add((row["circuit"], row["layer"], row["relation"], row["source"], row["target"]))
        at = float(cosine(source, target))
        assert row["cosine"] == pytest.approx(at, abs=1e-6)
        if not (row["layer"] == 1 and row["source"] in {"PC1", "PC2", "r0"}):
            continue
        second = at * drawn_first + math.sqrt(max(0.0, 1 - at**2)) * across
        for model, own in zip(("base", "instruct"), pair, strict=True):
            if row["circuit"] == "qk":
                value = own.scores(source[None], target[None], row["layer"])[0]
                random = own.scores(drawn_first, second, row["layer"])
            else:
                side = -1 if row["relation"] == "opposite" else 1  # here the source is the negated one
                value = cosine(own.writes(side * source[None], row["layer"]), side * target)[0]
                random = cosine(own.writes(drawn_first, row["layer"]), second)
            assert row[model] == pytest.approx(value, abs=1e-4 * (abs(value) + random.std()))
            assert row[f"{model}_z"] == pytest.approx((value - random.mean()) / random.std(ddof=1), abs=2e-3)
        assert row["delta"] == pytest.approx(row["instruct_z"] - row["base_z"])
    assert len(seen) == table.num_rows
    named, followed = len(rows) - 10, 10
    odd = pair[0].family != "qwen2"
    counts = {"same": len(rows), "opposite": 0 if odd else len(rows), "given": followed * (len(rows) - 1)}
    for relation, count in counts.items():
        for circuit in ("qk", "vo"):
            more = followed * named if relation == "given" else 0
            assert sum(key[:3] == (circuit, 2, relation) for key in seen) == count + more
    assert ("opposite" in found.left_out) == odd


def test_strongest_partners_and_components_come_from_the_deltas(found) -> None:
    """Means over layers of |delta|: the five greatest of each component, circuit and side; each component with itself."""
    rows = found.tables["attention"].to_pylist()
    for own in found.tables["components"].to_pylist():
        for circuit in ("qk", "vo"):
            known = [
                abs(row["delta"])
                for row in rows
                if (row["circuit"], row["relation"], row["source"]) == (circuit, "same", own["component"])
            ]
            assert own[circuit] == pytest.approx(np.mean(known))
            assert len(known) == 2
    middle = np.array([own for key, own in unscaled().items()])
    middle = middle - middle.mean(0)
    variances = np.linalg.svd(middle)[1] ** 2
    near(found.tables["components"]["explained"].to_pylist(), (variances / variances.sum())[:10], 1e-5)
    listed = found.tables["partners"].to_pylist()
    ends = (("target", "source"), ("source", "target"))
    for circuit, (side, other) in itertools.product(("qk", "vo"), ends):
        moved = {}
        for row in rows:
            if (row["circuit"], row["relation"], row[other]) == (circuit, "given", "PC1"):
                moved.setdefault(row[side], []).append(row["delta"])
        assert set(moved) == {name for _, name in named_rows()} - {"PC1"}, "named vectors on either side"
        best = sorted(moved, key=lambda name: -np.mean(np.abs(moved[name])))[:5]
        own = [row for row in listed if (row["circuit"], row["side"], row["name"]) == (circuit, side, "PC1")]
        assert [row["partner"] for row in own] == best
        near([row["delta"] for row in own], [np.mean(moved[name]) for name in best], 1e-6)
    for top in (0, -1, 1.5):
        with pytest.raises(errors.InvalidSpec, match=f"top={top}; give a whole number, 1 or more"):
            partners(found.tables["attention"], top=top)


def unscaled() -> dict[tuple[str, str], np.ndarray]:
    return {
        (group, name): one.double().numpy()
        for group, vectors in GROUPS.items()
        for name, one in zip(vectors, vectors.at(LAYER), strict=True)
    }


@pytest.mark.parametrize("at", [1.0, -1.0, 0.0, 0.3, -0.75])
def test_random_vectors_of_every_relation_have_standard_normal_z(pair, at) -> None:
    """Mean 0 and deviation 1, as near as 2,000 draws and a null of 2,000 pairs can tell: within five standard errors,
    that of a deviation by the fourth moment.
    """
    count, block = 2000, pair[0].weights.attention_block(2)
    pairs = RandomPairs.drawn(count, WIDTH, 3.0, 11)
    first, across = (3.0 * one for one in random_pairs(count, WIDTH, 21))
    second = at * first + math.sqrt(1 - at**2) * across
    queries, outputs = block.queries(pairs.first), block.forward(pairs.first)
    numbers = {
        "qk": (
            lambda keys: (queries * block.keys(keys)).sum((1, 2)),
            (block.queries(first) * block.keys(second)).sum((1, 2)),
        ),
        "vo": (
            lambda targets: torch.cosine_similarity(outputs, targets),
            torch.cosine_similarity(block.forward(first), second),
        ),
    }
    for number, values in numbers.values():
        z = RelationNull.drawn(number, pairs, "it").z(values.double().numpy(), np.full(count, at))
        error = math.sqrt(2 / count)  # of a mean of draws, against a mean of as many
        assert abs(z.mean()) < 5 * error
        assert abs(z.std() - 1) < 5 * error * math.sqrt((stats.kurtosis(z, fisher=False) - 1) / 4)


def test_an_opposite_has_the_scores_of_itself_negated(pair) -> None:
    """−v with −v is v with v, and v with −v its negative, where nothing is added; a bias breaks both."""
    block = pair[1].weights.attention_block(2)
    rows = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(8))

    def score(one, other):
        return (block.queries(one) * block.keys(other)).sum((1, 2))

    same, both, opposite = score(rows, rows), score(-rows, -rows), score(rows, -rows)
    assert block.is_odd == (pair[0].family != "qwen2")
    if block.is_odd:
        near(both, same)
        near(opposite, -same)
        near(block.forward(-rows), -block.forward(rows))
    else:
        assert (both - same).abs().min() > 1e-3
        assert (opposite + same).abs().min() > 1e-4
    given = LabelledRows(("a",) * 20, tuple(f"v{at}" for at in range(20)), rows)
    table = attention_deltas((block, block), given, given.where([]), RandomPairs.drawn(50, WIDTH, 11.0, 0))
    assert set(table["relation"].to_pylist()) == ({"same"} if block.is_odd else {"same", "opposite"})
    for circuit in ("qk", "vo"):  # nothing is shown twice
        numbers = [abs(row["base"]) for row in table.to_pylist() if row["circuit"] == circuit]
        assert len(np.unique(np.round(numbers, 6))) == len(numbers)
    assert not any(table["delta"].to_pylist())


def welch(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """Welch's t, and its two-sided p by the Welch–Satterthwaite degrees of freedom."""
    one, other = ours.var(ddof=1) / len(ours), theirs.var(ddof=1) / len(theirs)
    t = (ours.mean() - theirs.mean()) / math.sqrt(one + other)
    freedom = (one + other) ** 2 / (one**2 / (len(ours) - 1) + other**2 / (len(theirs) - 1))
    return t, 2 * stats.t.sf(abs(t), freedom)


@pytest.mark.parametrize("correction", ["holm", "bh", "none"])
def test_groups_are_tested_against_each_other(correction) -> None:
    """Welch's t of every two groups at every layer, and p corrected over all of them, as the definitions say."""
    draw = np.random.default_rng(3)
    rows = [
        {"group": group, "layer": layer, "x": float(draw.normal(shift * (layer == 1), spread))}
        for layer in (0, 1)
        for group, count, shift, spread in (("a", 12, 0, 1), ("b", 20, 2, 2), ("c", 15, 0.2, 1))
        for _ in range(count)
    ]
    table = analysis.tables.table_of({name: [row[name] for row in rows] for name in rows[0]})
    tested = group_tests(table, "x", correction=correction).to_pylist()
    assert [(row["layer"], row["first"], row["second"]) for row in tested] == [
        (layer, *names) for layer in (0, 1) for names in (("a", "b"), ("a", "c"), ("b", "c"))
    ]
    for row in tested:
        ours, theirs = (
            np.array([one["x"] for one in rows if (one["group"], one["layer"]) == (row[side], row["layer"])])
            for side in ("first", "second")
        )
        assert (row["t"], row["p"]) == pytest.approx(welch(ours, theirs))
        assert (row["first_mean"], row["second_mean"]) == pytest.approx((ours.mean(), theirs.mean()))
        assert (row["first_count"], row["second_count"]) == (len(ours), len(theirs))
    p = [row["p"] for row in tested]
    ranked, known = sorted(p), {}
    for rank, one in enumerate(ranked):
        if correction == "holm":
            known[one] = min(1, max((len(p) - before) * ranked[before] for before in range(rank + 1)))
        elif correction == "bh":
            known[one] = min(1, *(len(p) / (after + 1) * ranked[after] for after in range(rank, len(p))), 1)
        else:
            known[one] = one
    assert [row["adjusted"] for row in tested] == pytest.approx([known[one] for one in p])
    for wrong, error, said in (
        ({"value": "y"}, errors.UnknownName, "known: 'group'"),
        ({"correction": "hlm"}, errors.UnknownName, "holm"),
        ({"groups": ["a", "d"]}, errors.UnknownName, "'d'"),
        ({"groups": ["a"]}, errors.InvalidSpec, "two at least"),
        ({"groups": ["a", "b", "a"]}, errors.InvalidSpec, "each once"),
        ({"by": ("x",)}, errors.InvalidSpec, "two of each"),
    ):
        with pytest.raises(error, match=said):
            group_tests(table, **{"value": "x", **wrong})
    twice = table.append_column("name", [[f"n{at // 2}" for at in range(len(table))]])
    twice = twice.append_column("matrix", [["q", "k"] * (len(table) // 2)])
    with pytest.raises(
        errors.InvalidSpec, match=r"by=\['layer'\]: a vector has several rows .* add one of \['matrix'\]"
    ):
        group_tests(twice, "x")


@pytest.mark.filterwarnings("ignore:Precision loss occurred:RuntimeWarning")
def test_only_numbers_that_vary_are_tested() -> None:
    """Rounding is no spread; a missing number, NaN and inf are refused, but where their group is not tested."""

    def tested(last: float | None, **how) -> list[dict]:
        table = {
            "group": [*"aaabbbccc"],
            "layer": [0] * 9,
            "x": [0.1, 0.1, 0.1 + 1e-16, 0.3, 0.3, 0.3 + 1e-16, 1, 2, last],
        }
        return group_tests(analysis.tables.table_of(table), "x", **how).to_pylist()

    rows = {(row["first"], row["second"]): row for row in tested(4.0)}
    assert {(rows["a", "b"][name]) for name in ("t", "p", "adjusted")} == {None}
    assert rows["a", "c"]["p"] == pytest.approx(stats.ttest_ind([0.1] * 3, [1, 2, 4], equal_var=False).pvalue)
    for wrong in (None, math.nan, math.inf):
        with pytest.raises(errors.InvalidSpec, match="x of a or c has a number that is not finite, or none"):
            tested(wrong)
        assert len(tested(wrong, groups=["a", "b"])) == 1


def test_a_checkpoint_does_not_differ_from_itself() -> None:
    """All differences are 0, and a test of numbers without spread has no p."""
    weights = ModelWeights.open(tiny_checkpoint("llama"))
    found = compare(weights, weights, GROUPS, LAYER, settings=SETTINGS)
    for table, column in (("susceptibility", "distance"), ("matrices", "frobenius"), ("feed_forward", "absolute"),
                          ("feed_forward", "angular"), ("attention", "delta"), ("partners", "moved")):  # fmt: skip
        assert not any(found.tables[table][column].to_pylist())
    assert set(found.tables["matrices"]["cosine"].to_numpy().round(12)) == {1.0}
    assert {(row["t"], row["p"], row["adjusted"]) for row in found.tables["tests"].to_pylist()} == {(None,) * 3}


def test_an_interrupted_comparison_goes_on(tmp_path) -> None:
    """After any interruption the same tables come out, layers that were done are not read again, and other vectors,
    settings or checkpoints are refused.
    """
    base, instruct = tiny_checkpoint("gemma2"), altered("gemma2", tmp_path / "instruct")
    models = [ModelWeights.open(path) for path in (base, instruct)]
    known = compare(*models, GROUPS, LAYER, settings=SETTINGS)

    class Stop(Exception):
        pass

    def stopping(at):
        assert (at.stage, at.total) == ("layers", 5)
        if at.done == 3:
            raise Stop

    folder = tmp_path / "run"
    with pytest.raises(Stop):
        compare(*models, GROUPS, LAYER, settings=SETTINGS, folder=folder, progress=stopping)
    parts = {path: path.stat().st_mtime_ns for path in (folder / "parts").iterdir()}
    assert len([path for path in parts if path.suffix == ".json"]) == 3
    (folder / "parts" / "feed_forward-002-feed_forward.parquet").write_bytes(b"half of it")  # as a kill leaves it
    found = compare(*models, GROUPS, LAYER, settings=SETTINGS, folder=folder)
    assert {path: path.stat().st_mtime_ns for path in parts} == parts
    assert set(found.tables) == set(known.tables)
    for name, table in known.tables.items():
        assert found.tables[name] == table
        written = parquet.read_table(folder / f"{name}.parquet")
        assert written == table
        assert analysis.about(written) == analysis.about(table)
    assert analysis.about(found.tables["tests"])["focus"] == known.focus
    lost = folder / "parts" / "feed_forward-001-feed_forward.parquet"
    lost.unlink()  # it is computed again
    again = compare(*models, GROUPS, LAYER, settings=SETTINGS, folder=folder)
    assert lost.exists()
    assert again.tables == known.tables
    lost.write_bytes(b"PAR1")
    with pytest.raises(errors.InvalidFile, match=f"{lost.name} has content that is not valid: .*Parquet"):
        compare(*models, GROUPS, LAYER, settings=SETTINGS, folder=folder)
    for change in (
        {"groups": {**GROUPS, "traits": drawn(7, "t", 3)}},
        {"settings": CompareSettings(layers=[1, 2], feed_forward_layers=[0, 1, 2], nulls=101)},
        {"instruct": models[0]},
    ):
        given = {"base": models[0], "instruct": models[1], "groups": GROUPS, "settings": SETTINGS, **change}
        with pytest.raises(errors.RunDiffers):
            compare(layer=LAYER, folder=folder, **given)
    pictures = draw_comparison(found.tables, tmp_path / "pictures")
    assert [path.name for path in pictures] == ["altered.png", "components.png", "susceptibility.png"]
    assert all(path.stat().st_size > 5000 for path in pictures)


def test_experts_are_compared_as_whole_blocks(tmp_path) -> None:
    """Of a layer with experts the block is compared, by the experts of each row; its matrices are named as left out."""
    paths = tiny_checkpoint("qwen3_moe"), altered("qwen3_moe", tmp_path / "instruct")
    models = [ModelWeights.open(path) for path in paths]
    found = compare(*models, GROUPS, LAYER, settings=SETTINGS)
    assert "experts" in found.left_out["gate and up of layer 2"]
    matrices = {(row["layer"], row["matrix"]) for row in found.tables["matrices"].to_pylist()}
    assert matrices == {(1, one) for one in ("q", "k", "v", "gate", "up")} | {(2, one) for one in "qkv"}
    rows, row = named_rows(), found.tables["feed_forward"].to_pylist()[-1]
    assert row["layer"] == 2
    vector = torch.from_numpy(rows[row["group"], row["name"]])[None].float()
    one, other = (model.feed_forward(2).forward(vector)[0] for model in models)
    assert row["absolute"] == pytest.approx(float((other - one).norm()), rel=1e-5)


def test_components_and_layers_may_be_given() -> None:
    """Components of one's own take the place of principal ones; default layers are those around the vectors' layer."""
    weights = ModelWeights.open(tiny_checkpoint("llama"))
    own = drawn(3, "axis", 9)
    found = compare(weights, weights, {"roles": GROUPS["roles"]}, LAYER, components=own)
    assert found.tables["components"]["component"].to_pylist() == ["axis0", "axis1", "axis2"]
    assert "two groups" in found.left_out["tests"]
    assert "tests" not in found.tables
    assert set(found.tables["feed_forward"]["layer"].to_pylist()) == {0, 1, 2, 3}
    settings = CompareSettings()
    assert settings.resolved(22, 46).layers == list(range(17, 28))
    assert settings.resolved(22, 46).feed_forward_layers == list(range(15, 25))


def test_susceptibility_is_drawn_apart_from_that_of_random_vectors(found, tmp_path, monkeypatch) -> None:
    """A line of each matrix for the vectors, one for the components, and one for the random vectors: NumPy's means."""
    figures = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, *_rest: figures.append(figure))
    table = found.tables["susceptibility"]
    draw_comparison({"susceptibility": table}, tmp_path)
    (axes,) = figures[-1].axes
    drawn_lines = [line for line in axes.lines if len(line.get_xdata())]
    rows, kinds = table.to_pylist(), {"components": ":", "random": "--"}
    matrices, known = list(dict.fromkeys(row["matrix"] for row in rows)), {}
    for row in rows:
        place = (row["matrix"], kinds.get(row["group"], "-"))
        known.setdefault(place, {}).setdefault(row["layer"], []).append(row["distance"])
    assert len(drawn_lines) == len(known) == 3 * len(matrices)
    colours = {line.get_label(): line.get_color() for line in axes.lines}
    for (matrix, style), values in known.items():
        (line,) = [one for one in drawn_lines if (one.get_color(), one.get_linestyle()) == (colours[matrix], style)]
        assert list(line.get_xdata()) == sorted(values)
        near(line.get_ydata(), [np.mean(values[layer]) for layer in sorted(values)], 1e-12)


def test_components_of_one_vector_are_drawn_without_a_share(tmp_path, monkeypatch) -> None:
    """One vector has no variance to explain."""
    figures = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, *_rest: figures.append(figure))
    weights = ModelWeights.open(tiny_checkpoint("llama"))
    settings = CompareSettings(layers=[1], feed_forward_layers=[1], nulls=20)
    found = compare(weights, weights, {"a": drawn(1, "a", 3)}, LAYER, components=drawn(2, "axis", 9), settings=settings)
    assert found.tables["components"]["explained"].to_pylist() == [None, None]
    draw_comparison({"components": found.tables["components"]}, tmp_path)
    assert [label.get_text() for label in figures[-1].axes[0].get_xticklabels()] == ["axis0", "axis1"]


def test_numpys_integers_are_settings() -> None:
    """They are stored as they were given in Python's, so that tables and definitions can be written."""
    names = ("nulls", "random", "top", "per_group", "seed")
    settings = CompareSettings(**{name: np.int64(20) for name in names})
    assert [type(getattr(settings, name)) for name in names] == [int] * len(names)
    assert settings == CompareSettings(**dict.fromkeys(names, 20))


def test_what_cannot_be_compared_is_refused() -> None:
    """Errors name the argument and what is accepted."""
    base, wide = (ModelWeights.open(tiny_checkpoint(*one)) for one in (("llama",), ("gpt2",)))
    shallow = ModelWeights.open(tiny_checkpoint("llama", num_hidden_layers=2))
    narrow = ModelWeights.open(tiny_checkpoint("llama", intermediate_size=64))
    heads = ModelWeights.open(tiny_checkpoint("llama", num_key_value_heads=4))
    for instruct, groups, error, said in (
        (shallow, GROUPS, errors.InvalidSpec, "differ in size"),
        (wide, GROUPS, errors.UnsupportedModel, "architecture and size"),
        (narrow, GROUPS, errors.UnsupportedModel, "intermediate_size"),
        (heads, GROUPS, errors.UnsupportedModel, "num_key_value_heads . and 4"),
        (base, {}, errors.InvalidSpec, "groups="),
        (base, GROUPS["roles"], errors.InvalidSpec, "groups=DirectionSet"),
        (base, {"roles": GROUPS["roles"].select("r0")}, errors.InvalidSpec, "give components="),
        ("base", GROUPS, errors.InvalidSpec, "instruct='base'"),
        (base, {"components": GROUPS["roles"]}, errors.InvalidSpec, "rename"),
        (base, {"a": DirectionSet({"x": LayerVectors({1: [1.0, 2.0]})})}, errors.InvalidSpec, "width 2"),
    ):
        with pytest.raises(error, match=said):
            compare(base, instruct, groups, LAYER, settings=SETTINGS)
    aside = DirectionSet({"x": LayerVectors({LAYER: torch.ones(WIDTH)}, site="mlp_out")})
    with pytest.raises(errors.InvalidSpec, match="components are of mlp_out, and the groups of resid_post"):
        compare(base, base, GROUPS, LAYER, components=aside, settings=SETTINGS)
    with pytest.raises(errors.InvalidSpec, match="give CompareSettings"):
        compare(base, base, GROUPS, LAYER, settings={})
    with pytest.raises(errors.InvalidSpec, match="nulls=19; give a whole number, 20 or more"):
        CompareSettings(nulls=19)
    with pytest.raises(errors.LayerOutOfRange):
        compare(base, base, GROUPS, 3)
    for layer in (4, 6, 10):
        with pytest.raises(errors.LayerOutOfRange, match="outside this model of 4 layers"):
            compare(base, base, GROUPS, layer)


def test_groups_of_another_model_are_warned_of(tmp_path) -> None:
    """Of either checkpoint, or of its base or instruct model, is right; two groups of two models are not both."""
    base = ModelWeights.open(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "tiny-1b"))
    instruct = ModelWeights.open(altered("llama", tmp_path / "other-name"))
    settings = CompareSettings(layers=[1], feed_forward_layers=[1], nulls=20)

    def of(group: str, model: str) -> DirectionSet:
        return DirectionSet({name: dataclasses.replace(one, model=model) for name, one in GROUPS[group].items()})

    for models, count in ((("a/tiny-1b-it", "other-name"), 0), (("", ""), 0), (("tiny-1b", "b/tiny-8b"), 1)):
        groups = {group: of(group, model) for group, model in zip(GROUPS, models, strict=True)}
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            compare(base, instruct, groups, LAYER, settings=settings)
        assert [str(one.message) for one in seen if "'b/tiny-8b'" in str(one.message)] == [
            str(one.message) for one in seen
        ]
        assert len(seen) == count


def test_weights_that_were_changed_in_place_are_not_those_of_the_folder(tmp_path) -> None:
    """A checkpoint trained further between two calls, its files' sizes and ends the same, is another comparison."""
    checkpoint = altered("llama", tmp_path / "instruct")
    base, file = ModelWeights.open(tiny_checkpoint("llama")), next(Path(checkpoint).glob("*.safetensors"))
    compare(base, ModelWeights.open(checkpoint), GROUPS, LAYER, settings=SETTINGS, folder=tmp_path / "out")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(errors.RunDiffers):
        compare(base, ModelWeights.open(checkpoint), GROUPS, LAYER, settings=SETTINGS, folder=tmp_path / "out")


def test_the_command_writes_what_the_library_finds(tmp_path) -> None:
    """Groups from a file and from a folder of files; tables and pictures in a folder; wrong calls name what is wrong."""
    base, instruct = tiny_checkpoint("llama"), altered("llama", tmp_path / "instruct")
    (tmp_path / "traits").mkdir()
    for name, vectors in GROUPS["traits"].items():
        vectors.save(tmp_path / "traits" / f"{name}.safetensors")
    GROUPS["roles"].save(tmp_path / "roles.safetensors")
    given = ["--vectors", tmp_path / "roles.safetensors", "--vectors", tmp_path / "traits"]
    layers = ["--layers", "1,2", "--feed-forward-layers", "0:3", "--nulls", "100"]
    out = tmp_path / "out"
    done = call("compare", base, instruct, *given, "--layer", LAYER, *layers, "--out", out, "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    known = compare(ModelWeights.open(base), ModelWeights.open(instruct), GROUPS, LAYER, settings=SETTINGS)
    assert (document["focus"], document["left_out"]) == (known.focus, known.left_out)
    assert {Path(file).name for file in document["files"]} >= {"attention.parquet", "altered.png"}
    for name, table in known.tables.items():
        assert parquet.read_table(out / f"{name}.parquet") == table
    rows = {
        group: {name: torch.stack([torch.zeros(WIDTH), one[LAYER]]) for name, one in vectors.items()}
        for group, vectors in GROUPS.items()
    }
    for group, level in (("roles", "pos_3"), ("traits", "pos_neg_50")):
        for name, own in rows[group].items():
            path = tmp_path / "people" / group / "vectors" / f"{name}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({level: own + (level == "pos_3")}, path)
    torch.save(
        {"activations": {"default_1": torch.ones(2, WIDTH)}}, tmp_path / "people" / "roles" / "default_vectors.pt"
    )
    torch.save({"pos_2": torch.ones(2, WIDTH)}, tmp_path / "people" / "roles" / "vectors" / "ghost.pt")
    people = [f"--vectors={tmp_path / 'people' / group / 'vectors'}" for group in GROUPS]
    read = call("compare", base, instruct, *people, "--layer", LAYER, *layers, "--out", tmp_path / "people" / "out")
    assert read.exit_code == 0, read.output
    assert "pos_3 - default_1 of 9 of 10 files; 1 left out" in " ".join(read.stderr.split())
    found = parquet.read_table(tmp_path / "people" / "out" / "feed_forward.parquet")
    assert found["group"] == known.tables["feed_forward"]["group"]
    near(found["absolute"].to_numpy(), known.tables["feed_forward"]["absolute"].to_numpy(), 1e-4)
    shown = call("compare", base, instruct, *given, "--layer", LAYER, *layers, "--out", out)
    assert "PC1" in shown.stdout
    assert "absolute" in shown.stdout
    for wrong, said in (
        (["--vectors", tmp_path / "instruct"], "not of steercap"),
        ([*given, "--layer", "2"], "layers [2]"),
        ([*given, "--correction", "hlm"], "holm"),
        ([*given, *given], "same name"),
        ([*people, "--level", "pos3"], "did you mean 'pos_3'"),
        ([*people, "--first-row", "1"], "for --first-row"),
    ):
        bad = call("compare", base, instruct, *wrong, *([] if "--layer" in wrong else ["--layer", "1"]), "--out", out)
        assert bad.exit_code in {1, 2}
        assert said in " ".join(bad.output.split()), bad.output
