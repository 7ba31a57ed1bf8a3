"""The check of codecs: its measures against scipy, NumPy and torch written plainly; its choice, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cli_calls import call

from steercap.captures.site_codecs import SiteCodecs, encoded
from steercap.cli.capture import RowOptions
from steercap.cli.codecs import labels_in
from steercap.core.schema import Coding
from steercap.core.spec import CaptureSpec, Point
from steercap.errors import InvalidRequest, InvalidSpec, SteercapError
from steercap.kernels.codecs.random_projection import signs
from steercap.lab.mechanism import codec_measures as measured
from steercap.lab.mechanism.codec_check import CodecCheck, check_codecs
from steercap.lab.mechanism.codec_judge import CodecMeasure
from steercap.steering import DirectionSet, LayerVectors
from steercap.testing.saes import RandomSAE

stats = pytest.importorskip("scipy.stats")

WIDTH, NEURONS = 96, 384


class Model:
    """A model whose rows follow from token ids: a signal of a label's direction, few large elements, and noise."""

    model = "m"
    num_layers = 4

    async def tokenize(self, text, *, add_special_tokens=True) -> list[int]:  # noqa: ARG002 -- the model's own
        return [0, *map(ord, text)] if isinstance(text, str) else list(text)

    async def read(self, prompts, *, capture, steering):
        assert steering is None
        return [self.handle(one["prompt_token_ids"], spec) for one, spec in zip(prompts, capture, strict=True)]

    async def fetch_captures_batch(self, handles) -> None: ...

    def handle(self, ids, spec):
        rows = {}
        for layer in spec.layers:
            for site in spec.sites:
                rows[layer, site] = rows_of(ids[1:], layer, site)
        return SimpleNamespace(captures=rows)


def rows_of(ids, layer, site) -> torch.Tensor:
    width = WIDTH if site == "resid_post" else NEURONS
    table = np.random.default_rng([layer, width]).standard_normal((256, width)) * np.linspace(0.1, 2, width)
    found = table[np.asarray(ids, dtype=np.int64)] if len(ids) else np.zeros((0, width))
    return torch.from_numpy(found).float()


def texts_of(count=40, length=40, seed=0) -> tuple[list[str], list[float]]:
    """Texts of two alphabets, by their label."""
    rng = np.random.default_rng(seed)
    labels = [float(one % 2) for one in range(count)]
    return ["".join(map(chr, rng.integers(33 + 30 * int(one), 93 + 30 * int(one), length))) for one in labels], labels


def check(*arguments, **named) -> CodecCheck:
    return asyncio.run(check_codecs(Model(), *arguments, **named))


def test_directions_of_another_model_are_warned_of() -> None:
    directions = DirectionSet({"a": LayerVectors({1: torch.ones(WIDTH)}, model="mistralai/Mistral-7B")})
    with pytest.warns(UserWarning, match="directions= says that it was made for model 'mistralai/Mistral-7B', .* 'm'"):
        check(texts_of()[0], directions=directions, layers=[1], sites="resid_post", candidates=["full8"])


@pytest.mark.parametrize("seed", range(6))
def test_measures_are_those_of_scipy(seed) -> None:
    rng = np.random.default_rng(seed)
    raw = rng.standard_normal((70, 40)) * rng.uniform(0.01, 3, 40)
    kept = np.where(np.abs(raw) > rng.uniform(0, 2), raw, 0.0)  # many ties
    ours, theirs = measured.CheckedRows(raw), measured.CheckedRows(kept)
    known = stats.spearmanr(np.abs(raw).mean(0), np.abs(kept).mean(0)).statistic
    assert measured.neuron_ranks(ours, theirs) == pytest.approx(known, abs=1e-12)
    one, other = raw[:, 0], raw[:, 1] + raw[:, 0]
    assert measured.correlation(one, other) == pytest.approx(stats.pearsonr(one, other).statistic, abs=1e-12)
    ties = rng.integers(0, 5, 50).astype(float)
    np.testing.assert_array_equal(measured.ranks(ties) + 1, stats.rankdata(ties))


def test_a_correlation_is_never_nan() -> None:
    flat, rows = np.ones(5), np.arange(5.0)
    assert (measured.correlation(flat, flat), measured.correlation(flat, rows), measured.correlation(rows, flat)) == (
        1,
        0,
        0,
    )


@pytest.mark.parametrize("coding", [Coding("rp8", 64, 3), Coding("rp16", 200, 0)])
def test_projections_are_compared_in_their_own_space(coding) -> None:
    """Cosines with a direction, errors of cosines, and rounding, as written with the matrix of the seed."""
    rows = torch.from_numpy(np.random.default_rng(1).standard_normal((90, WIDTH))).float()
    raw, kept = measured.CheckedRows.of(rows, Coding()), measured.CheckedRows.of(rows, coding)
    matrix = signs(coding.k, WIDTH, coding.seed).double().numpy() / np.sqrt(coding.k)
    exact, coded = rows.double().numpy() @ matrix.T, encoded(rows, coding).decoded().double().numpy()
    direction = np.random.default_rng(2).standard_normal((2, WIDTH))
    for number, along in enumerate(direction @ matrix.T):
        known = [row @ along / np.linalg.norm(row) / np.linalg.norm(along) for row in coded]
        np.testing.assert_allclose(measured.cosines_with(kept, direction)[:, number], known, atol=1e-12)

    def cosines(values):
        return np.array([[a @ b / np.linalg.norm(a) / np.linalg.norm(b) for b in values] for a in values])

    pairs = np.triu_indices(90, 1)
    error = (cosines(rows.double().numpy()) - cosines(coded))[pairs]
    assert measured.cosine_error(raw, kept, 0) == pytest.approx(np.sqrt((error**2).mean()), rel=1e-9)
    assert 0.3 < measured.cosine_error(raw, kept, 0) * np.sqrt(coding.k) < 1.1
    least, _ = measured.rounding(raw, kept)
    known = min(a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(exact, coded, strict=True))
    assert least == pytest.approx(known, abs=1e-12)
    assert measured.neuron_ranks(raw, kept) is None


def test_steps_of_each_number_are_frozen_before_they_are_judged() -> None:
    """Rows that grow in the second half are clipped, and the cosine says so."""
    rows = torch.ones(40, WIDTH)
    rows[20:] *= torch.linspace(1, 50, WIDTH)
    kept = measured.CheckedRows.of(rows, Coding("rp8", 64, 0))
    exact = rows.double().numpy() @ kept.matrix.T
    step = np.abs(exact[:20]).max(0) / 127
    step[step == 0] = 1
    clipped = np.clip(np.round(exact[20:] / step), -127, 127) * step
    known = (clipped * exact[20:]).sum(1) / np.linalg.norm(clipped, axis=1) / np.linalg.norm(exact[20:], axis=1)
    group, number = measured.rounding(measured.CheckedRows(rows.double().numpy()), kept)
    assert number == pytest.approx(known.min(), abs=1e-12)
    assert number < 0.9
    assert group > 0.999


@pytest.mark.parametrize("seed", range(3))
def test_probes_are_ridge_regressions_that_never_see_their_texts(seed) -> None:
    """Against the primal normal equations; and labels in random order are not predicted."""
    rng = np.random.default_rng(seed)
    texts = np.sort(rng.integers(0, 16, 300))
    texts = np.unique(texts, return_inverse=True)[1]
    rows, labels = rng.standard_normal((300, 20)), rng.standard_normal(texts[-1] + 1)
    scores, of_texts = measured.concept_scores(rows, texts, labels)
    means = np.stack([rows[texts == one].mean(0) for one in range(texts[-1] + 1)])
    order = np.argsort(np.argsort(labels, kind="stable"), kind="stable") % 4
    for text in range(len(labels)):
        known = order != order[text]
        centre, offset = means[known].mean(0), labels[known].mean()
        inside = means[known] - centre
        penalty = 0.1 * np.trace(inside @ inside.T) / known.sum()
        weight = np.linalg.solve(inside.T @ inside + penalty * np.eye(20), inside.T @ (labels[known] - offset))
        np.testing.assert_allclose(scores[texts == text], (rows[texts == text] - centre) @ weight + offset, atol=1e-9)
        assert of_texts[text] == pytest.approx((means[text] - centre) @ weight + offset, abs=1e-9)


def test_a_trained_sae_explains_rows_of_few_directions() -> None:
    """Sparse sums of 32 directions: most of the variance of rows that it has not seen; and none of noise's."""
    rng = np.random.default_rng(0)
    basis = rng.standard_normal((32, WIDTH))
    active = rng.uniform(0.5, 1.5, (1200, 32)) * (rng.uniform(size=(1200, 32)) < 0.1)
    rows = 3 * active @ basis + 5
    sae = measured.trained_sae(rows[:900], Point(1, "resid_post"), 0)
    assert measured.explained(sae, rows[900:], rows[900:]) > 0.8
    assert measured.explained(sae, rows[900:], rows[900:][::-1].copy()) < 0.3
    again = measured.trained_sae(rows[:900], Point(1, "resid_post"), 0)
    assert torch.equal(again.decoder, sae.decoder)


def test_the_cheapest_that_passes_at_every_layer_is_chosen(tmp_path) -> None:
    """Of rows with labels and a direction; the file has the choice and all measures, and says it again."""
    texts, labels = texts_of()
    vectors = {one: torch.randn(WIDTH, generator=torch.Generator().manual_seed(one)) for one in range(4)}
    directions = DirectionSet({"way": LayerVectors(vectors, name="way", model="m", site="resid_post")})
    found = check(
        texts, labels={"alphabet": labels}, directions=directions, candidates=["full8", "int4", "topk8,k=4", "rp8,k=64"]
    )
    table = found.table()
    for site in ("resid_post", "neurons"):
        own = [one for one in table if one["site"] == site]
        assert [one["bytes"] for one in own] == sorted(one["bytes"] for one in own)
        assert [one["codec"] for one in own][-1] == "raw"
        (chosen,) = [one for one in own if one["chosen"]]
        assert chosen is next(one for one in own if not one["failed"])
    few = next(one for one in table if (one["site"], one["codec"]) == ("neurons", "topk8,k=4"))
    assert "neuron_ranks" in few["failed"]
    by_layer = [one.value for one in found.measures if (one.codec, one.measure) == ("topk8,k=4", "neuron_ranks")]
    assert (len(by_layer), few["neuron_ranks"]) == (3, min(by_layer))
    settled = SiteCodecs.load(found.save(tmp_path / "codecs.json"))
    assert settled == found.codecs == SiteCodecs.parse([f"@{tmp_path / 'codecs.json'}"])
    assert set(settled.codings) == {"resid_post", "neurons"}
    raw = [one for one in found.measures if one.codec == "raw"]
    assert {one.value for one in raw if one.measure in {"neuron_ranks", "concept", "direction"}} == {1.0}
    assert {one.value for one in raw if one.measure == "cosine_error"} == {0.0}
    error = [one for one in found.measures if (one.codec, one.measure) == ("rp8,k=64", "cosine_error")]
    assert {(one.bar, one.at_most) for one in error} == {(0.125, True)}
    assert min(one.value for one in raw if one.measure == "concept_fit") > 0.8


@pytest.mark.parametrize(
    ("value", "bar", "at_most", "passes"),
    [
        (0.95, 0.95, False, True),
        (0.94, 0.95, False, False),
        (0.1, 0.125, True, True),
        (0.126, 0.125, True, False),
        (None, 0.95, False, False),
        (None, None, False, True),
        (-3.0, None, False, True),
        (float("nan"), 0.95, False, False),
        (float("nan"), 0.95, True, False),
    ],
)
def test_a_measure_passes_its_bar(value, bar, at_most, passes) -> None:
    known = {"site": "z", "layer": 0, "codec": "int4", "bytes": 1, "measure": "m"}
    assert CodecMeasure(**known, value=value, bar=bar, at_most=at_most).passes is passes


def test_neuron_ranks_of_the_check_are_those_of_rows_encoded_apart() -> None:
    texts, _ = texts_of(30, 50)
    found = check(texts, sites="neurons", layers=[2], candidates=["topk8,k=32"], most_rows=1000)
    ids = [ord(one) for text in texts for one in text][:1000]
    rows = rows_of(ids, 2, "neurons")
    kept = torch.zeros_like(rows)
    strong = rows.abs().topk(32, dim=1).indices
    kept.scatter_(1, strong, rows.gather(1, strong))
    known = stats.spearmanr(rows.abs().mean(0).numpy(), kept.abs().mean(0).numpy()).statistic
    (measure,) = [one for one in found.measures if (one.codec, one.measure) == ("topk8,k=32", "neuron_ranks")]
    assert measure.value == pytest.approx(known, abs=2e-3)
    assert (found.rows, found.texts) == (1000, 20)
    assert found.notes["texts"] == "10 left out: 10 after the last row, 0 without rows"


def test_what_makes_a_check_doubtful_is_said() -> None:
    texts, _ = texts_of(8, 12)
    found = check(["", *texts, "x"], sites="resid_post", layers=[0], candidates=["rp8,k=512", "full8"])
    assert found.notes["rp8,k=512 at resid_post"] == "left out: k is above the 96 elements of a row"
    assert found.notes["rows"].startswith("97; with fewer than 1,000")
    assert found.notes["texts"] == "1 left out: 0 after the last row, 1 without rows"
    assert {one for one in found.notes if " at " in one} == {"rp8,k=512 at resid_post"}
    assert {one.name for one in found.measures if one.measure == "direction"} == {
        f"pc{number}" for number in range(1, 9)
    }


def test_saes_are_given_what_codecs_keep() -> None:
    """One that is given, whose explained variance is computed here by hand; and those trained on raw and top-k rows."""
    texts, labels = texts_of(30, 40)
    ids = [ord(one) for text in texts for one in text]
    rows = rows_of(ids, 1, "resid_post")
    sae = measured.trained_sae(rows.double().numpy(), Point(1, "resid_post"), 3)
    codecs = ["topk8,k=16", "rp8,k=32"]
    found = check(
        texts, sites="resid_post", layers=[1], candidates=codecs, labels={"a": labels}, sae=sae, train_sae=True
    )
    values = {(one.codec, one.measure): one.value for one in found.measures}
    kept = encoded(rows, Coding("topk8", 16)).decoded()
    pre = (kept - sae.encoder.shift) @ sae.encoder.weight + sae.encoder.bias
    best = pre.topk(16, dim=1)
    active = torch.zeros_like(pre).scatter(1, best.indices, best.values.relu())
    back = (active @ sae.decoder + sae.decoder_bias).double()
    whole = rows.double()
    known = 1 - (whole - back).square().sum() / (whole - whole.mean(0)).square().sum()
    assert values["topk8,k=16", "sae_explained"] == pytest.approx(float(known), abs=1e-4)
    assert values["rp8,k=32", "sae_explained"] is None
    assert values["rp8,k=32", "sae_probe_delta"] is None
    assert values["raw", "sae_probe_delta"] == values["raw", "trained_sae_probe_delta"] == 0
    assert values["raw", "sae_explained"] > values["topk8,k=16", "sae_explained"]
    assert values["raw", "trained_sae_explained"] > values["topk8,k=16", "trained_sae_explained"]
    assert ("rp8,k=32", "trained_sae_explained") not in values


TEXTS, LABELS = texts_of()
WIDE = LayerVectors({0: torch.ones(5)}, name="a", model="m", site="resid_post")
FAR = LayerVectors({0: torch.ones(WIDTH)}, name="a", model="m", site="resid_post")


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"candidates": ["rp9"]}, "unknown codec 'rp9'"),
        ({"candidates": "rp8"}, "candidates='rp8'; give codecs in a list"),
        ({"candidates": ["attention=8"]}, "unknown codec"),
        ({"candidates": None}, "candidates=None; give codecs in a list"),
        ({"labels": {"a": 3}}, r"labels\['a'\]=3; give a finite number"),
        ({"labels": [3]}, r"labels=\[3\]; give numbers by the name of a concept"),
        ({"labels": {"a": [1, 2]}}, r"labels\['a'\]=\[1, 2\]; give a finite number for each of the 40 texts"),
        ({"labels": {"a": [float("nan")] * 40}}, "give a finite number for each"),
        ({"labels": {"a": "b" * 40}}, "give a finite number for each"),
        ({"labels": {"a": [1.0] * 40}}, r"labels\['a'\]: 40 texts, with labels \[1.0\]; a probe needs 8 texts"),
        ({"labels": {"a": LABELS}, "most_rows": 200}, "5 texts, with labels"),
        ({"most_rows": 3}, "most_rows=3; give a whole number from 64"),
        ({"most_rows": True}, "most_rows=True"),
        ({"seed": -1}, "seed=-1; give a whole number from 0"),
        ({"directions": FAR}, "directions=.*; give a DirectionSet, or None"),
        ({"sae": "x"}, "sae='x'; give a SAE, or None"),
        ({"directions": DirectionSet({"a": FAR}), "layers": [1]}, "layer"),
        ({"directions": DirectionSet({"a": FAR}), "sites": "neurons", "layers": [0]}, "directions at 'resid_post'"),
        ({"directions": DirectionSet({"a": WIDE})}, "directions of width 5; rows at .* have 96 elements"),
        ({"directions": DirectionSet({"a": LayerVectors({0: torch.zeros(WIDTH)}, name="a", site="resid_post")})}, "zero"),
        ({"layers": [9]}, "layer"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(named, says) -> None:
    with pytest.raises(SteercapError, match=says):
        check(TEXTS, **named)


def test_rows_that_are_all_equal_choose_nothing(monkeypatch) -> None:
    """Any codec would keep them, and pass."""
    monkeypatch.setitem(globals(), "rows_of", lambda ids, *_: torch.ones(len(ids), WIDTH))
    with pytest.raises(InvalidRequest, match=r"all 1,600 rows at .* are equal"):
        check(TEXTS)


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="the texts have 4 rows; give texts of 1,000 to 2,000 tokens"):
        check(["abcd"])
    with pytest.raises(InvalidSpec, match="give several in a list"):
        check("abcd")


LINE = {"text": "How are you?", "labels": {"calm": 1}}


@pytest.mark.parametrize(
    ("lines", "options", "expected"),
    [
        ([LINE], "--out codecs.txt", (2, "codecs.txt: give a name that ends in .json")),
        (
            [LINE, {"text": "a"}],
            "--out c.json",
            (1, "line 2: labels=None; give each text a finite number by the same names: calm"),
        ),
        ([LINE, {**LINE, "labels": {"x": 1}}], "--out c.json", (1, "line 2: labels={'x': 1}; give each")),
        ([{**LINE, "labels": {"calm": "x"}}], "--out c.json", (1, "line 1: labels={'calm': 'x'}; give each")),
        ([{**LINE, "labels": 3}], "--out c.json", (1, "line 1: labels=3; give each")),
        ([{"words": "a"}], "--out c.json", (1, "line 1")),
        ([LINE], "--out c.json --codec rp9", (1, "unknown codec 'rp9'")),
        (["a"], "--out c.json --sites nowhere", (1, "nowhere")),
        ([LINE], "--out c.json --layers x", (2, "'x'")),
        ([LINE] * 20, "--out c.json", (1, "labels['calm']: 20 texts, with labels [1.0]; a probe needs 8 texts")),
        ([LINE, {**LINE, "labels": {"calm": 0}}], "--out c.json", (1, "labels['calm']: 2 texts")),
        ([LINE], "--out c.json --rows 63", (2, "greater than or equal to 64")),
        (["a"], "--out c.json --directions wide.safetensors", (1, "rows of smollm2 have 576")),
        (["a"], "--out c.json --directions far.safetensors", (1, "LayerOutOfRange")),
        (["a"], "--out c.json --directions good.safetensors --layers 3", (1, "3")),
        (
            ["a"],
            "--out c.json --sites attn_out --sae sae",
            (2, "give an SAE, not a transcoder, of one of --sites, attn_out"),
        ),
        ([LINE], "--out /proc/no/c.json", (2, "cannot be written to")),
    ],
)
def test_the_command_checks_what_it_is_given_before_an_engine_starts(
    lines, options, expected, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, layer, width in (("wide", 2, 8), ("far", 30, 576), ("good", 2, 576)):
        DirectionSet({"a": LayerVectors({layer: torch.ones(width)})}).save(f"{name}.safetensors")
    RandomSAE("standard", 576, 8).write(Path("sae"))
    result = call("codecs", "check", "texts.jsonl", *options.split())
    assert result.exit_code == expected[0], result.output
    assert expected[1] in re.sub(r"[\s│]+", " ", result.output)


def test_labels_are_read_beside_their_texts(tmp_path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "a", "labels": {"x": 1, "y": 0.5}}\n\n{"text": "b", "labels": {"y": -2, "x": true}}\n')
    assert labels_in(path) == {"x": [1.0, 1.0], "y": [0.5, -2.0]}
    path.write_text('"a"\n{"text": "b"}\n')
    assert labels_in(path) is None


def test_the_file_is_the_codec_of_a_capture(tmp_path) -> None:
    path = SiteCodecs.parse(["resid_post=rp8,k=64", "neurons=topk8,k=32", "mlp_out=rp8,k=64"]).save(tmp_path / "c.json")
    assert RowOptions(f"@{path}").coding(["resid_post", "mlp_out"]) == {
        "codec": "rp8",
        "codec_k": 64,
        "codec_seed": None,
    }
    assert RowOptions(f"@{path}").coding(["neurons"]) == {"codec": "topk8", "codec_k": 32, "codec_seed": None}
    assert RowOptions("rp8", 16, 2).coding(["neurons"]) == {"codec": "rp8", "codec_k": 16, "codec_seed": 2}
    seeded = SiteCodecs.parse(["z=rp16,k=8,seed=5", "q=raw"]).save(tmp_path / "d.json")
    assert RowOptions(f"@{seeded}").coding(["z"]) == {"codec": "rp16", "codec_k": 8, "codec_seed": 5}
    assert CaptureSpec(**RowOptions(f"@{seeded}").coding(["q"])).codec == "raw"
    (tmp_path / "a.txt").write_text("a")
    for command in (("capture", "a", "--out", "o"), ("collect", str(tmp_path / "a.txt"), "--out", "o")):
        result = call(*command, "--codec", f"@{path}", "--sites", "resid_post,neurons")
        assert (result.exit_code, "sites have different codecs" in result.output) == (1, True), result.output
        result = call(*command, "--codec", f"@{path}", "--codec-k", "3")
        assert (result.exit_code, "leave --codec-k and" in re.sub(r"[\s│]+", " ", result.output)) == (2, True), (
            result.output
        )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--attention", "0"), "attention=0; give an integer from 1 to 128"),
        (("--attention", "4", "--tokens", "generated"), "give 'all' as tokens, or a slice from 0"),
        (("--attention", "4", "--one-in", "3"), "leave --one-in and --probe out"),
        (("--attention", "4", "--codec", "rp8"), "leave codec= out"),
        (("--attention", "4", "--sites", "z"), "leave sites= out"),
    ],
)
def test_targets_of_attention_that_cannot_be_collected_are_told_before_a_start(tmp_path, given, says) -> None:
    (tmp_path / "a.txt").write_text("a")
    result = call("collect", str(tmp_path / "a.txt"), "--out", str(tmp_path / "o"), *given)
    assert (result.exit_code in {1, 2}, says in re.sub(r"[\s│]+", " ", result.output)) == (True, True), result.output
    assert not (tmp_path / "o").exists()
