"""SAEs trained in plain torch: against a formula written out in NumPy, folded back to the model's rows, and read again."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_calls import call
from full_disk import files_of_at_most
from shards import definition_of, folder_of, shard_of

from steercap import SAE
from steercap.core.schema import PointSchema
from steercap.core.spec import Point
from steercap.errors import InvalidFile, InvalidSpec, TrainingDiverged
from steercap.lab.datasets import ActivationDataset
from steercap.lab.datasets.folder import DatasetFolder
from steercap.lab.datasets.rows import Normalisation
from steercap.lab.training import SAETraining, save_sae, score_sae, train_sae
from steercap.testing.saes import RandomSAE

WIDTH, FEATURES, K = 12, 40, 3
POINT = Point(2, "resid_post")


def sparse_rows(count: int = 2048, seed: int = 0, *, scale: float = 1.0) -> torch.Tensor:
    """Rows made of two of twenty directions each, which a dictionary explains and a mean does not."""
    drawn = np.random.default_rng(seed)
    words = np.random.default_rng(99).standard_normal((20, WIDTH))
    codes = np.zeros((count, 20))
    for row in codes:
        row[drawn.choice(20, 2, replace=False)] = drawn.uniform(0.5, 2, 2)
    return torch.from_numpy(codes @ words * scale + 0.01 * drawn.standard_normal((count, WIDTH))).float()


def batches(rows: torch.Tensor, epochs: int, size: int = 128):
    for epoch in range(epochs):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch))
        yield from (rows[at] for at in order.split(size))


def test_training_explains_rows_it_has_not_seen() -> None:
    """More than the random dictionary that it began as, on rows held out; the same seed gives the same SAE."""
    held = sparse_rows(seed=5)
    start = score_sae(SAETraining(POINT, WIDTH, features=FEATURES, k=K).sae(), held)
    how = {"features": FEATURES, "k": K, "lr": 0.01, "rows": 12 * 2048}
    made = [train_sae(batches(sparse_rows(), 12), POINT, **how) for _ in range(2)]
    end = score_sae(made[0].sae(), held)
    assert start.explained < 0.6
    assert 0.85 < end.explained <= 1
    assert end.active <= K
    assert end.rows == len(held)
    assert torch.equal(made[0].sae().decoder, made[1].sae().decoder)
    assert made[0].curve[-1][0] == made[0].seen == 12 * 2048
    assert made[0].curve[-1][1] > made[0].curve[0][1]


def test_a_score_is_the_formula() -> None:
    """Explained variance, L0 and the share of features in use, written out in float64."""
    rows = sparse_rows(300)
    sae = train_sae(batches(rows, 1), POINT, features=FEATURES, k=K).sae()
    inputs, shift = rows.double().numpy(), sae.decoder_bias.double().numpy()
    before = (inputs - shift) @ sae.encoder.weight.double().numpy() + sae.encoder.bias.double().numpy()
    least = np.sort(before, axis=1)[:, -K, None]
    codes = np.where((before >= least) & (before > 0), before, 0)
    found = codes @ sae.decoder.double().numpy() + shift
    score = score_sae(sae, rows)
    wanted = 1 - np.square(inputs - found).sum() / np.square(inputs - inputs.mean(0)).sum()
    assert score.explained == pytest.approx(wanted, abs=1e-4)  # float32 against float64
    assert score.active == pytest.approx((codes > 0).sum(1).mean(), abs=0.02)
    assert score.used == pytest.approx((codes > 0).any(0).mean(), abs=2 / FEATURES)


@pytest.mark.parametrize("one", [False, True])
def test_a_normalisation_is_folded_in(one) -> None:
    """The SAE finds in the model's rows the features that the training found in the normalised ones."""
    rows = sparse_rows(scale=30) + torch.linspace(-50, 50, WIDTH)
    scale = torch.tensor([0.25]) if one else 1 / rows.std(0)
    normalisation = Normalisation(rows.mean(0), scale)
    given = (rows - normalisation.mean) * scale
    how = {"features": FEATURES, "k": K}
    plain = train_sae(batches(given, 2), POINT, **how).sae()
    training = train_sae(batches(given, 2), POINT, **how, normalisation=normalisation)
    folded = training.sae()
    assert torch.equal(training.sae(folded=False).decoder, plain.decoder)
    ours, theirs = plain.encode(given), folded.encode(rows)
    both = (ours > 0) & (theirs > 0)
    assert both.sum() >= 0.995 * (ours > 0).sum()  # a feature at the k-th place may change with rounding
    torch.testing.assert_close(theirs[both], ours[both], rtol=1e-3, atol=1e-3)
    assert score_sae(folded, rows).explained > 0.5


@pytest.mark.parametrize("point", [Point(15, "resid_post"), Point(0, "z"), Point(3, "attn_in"), Point(4, "neurons")])
def test_what_is_saved_is_read(point, tmp_path) -> None:
    """`SAE.load` finds the same numbers, point and labels, whatever the site is called elsewhere."""
    sae = train_sae(batches(sparse_rows(), 1), point, features=FEATURES, k=K).sae(name="n", model="gpt2")
    read = SAE.load(save_sae(sae, tmp_path / "deep" / "sae"))
    assert (read.input, read.output, read.architecture, read.encoder.k) == (point, point, "topk", K)
    assert (read.name, read.model) == ("n", "gpt2")
    rows = sparse_rows(50)
    torch.testing.assert_close(read.encode(rows), sae.encode(rows))
    torch.testing.assert_close(read.decode(read.encode(rows)), sae.decode(sae.encode(rows)))


def test_a_kill_between_the_files_leaves_no_mixture(tmp_path, monkeypatch) -> None:
    """An earlier configuration does not stay beside later weights; a full disk leaves the earlier SAE."""
    small, large = (train_sae(batches(sparse_rows(), 1), POINT, features=FEATURES, k=k).sae() for k in (K, 2 * K))
    save_sae(small, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with files_of_at_most(len(before["sae_weights.safetensors"]) // 2), pytest.raises(OSError, match="large"):
        save_sae(large, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    rename, named = Path.replace, []

    def killed(path: Path, to: Path) -> Path:
        named.append(Path(to).name)
        return rename(path, to) if len(named) < 2 else 1 / 0

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(ZeroDivisionError):
        save_sae(large, tmp_path)
    assert named == ["sae_weights.safetensors", "cfg.json"]
    with pytest.raises(InvalidFile):
        SAE.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"features": 0}, "features=0"),
        ({"features": 2.5}, "features=2.5"),
        ({"k": FEATURES + 1}, "k=41 of 40"),
        ({"k": True}, "k=True"),
        ({"lr": math.nan}, "lr=nan"),
        ({"lr": "fast"}, "lr='fast'"),
        ({"rows": -1}, "rows=-1"),
        ({"point": "resid_post"}, "point='resid_post'"),
        ({"point": None}, "point=None; give a layer from 0"),
        ({"point": (None, "resid_post")}, "give a layer from 0"),
        ({"point": (-1, "resid_post")}, "give a layer from 0"),
        ({"point": (True, "resid_post")}, "give a layer from 0"),
        ({"normalisation": Normalisation(torch.zeros(5), torch.ones(5))}, "5 elements for rows of 12"),
        ({"normalisation": Normalisation(torch.zeros(WIDTH), torch.zeros(WIDTH))}, "cannot be undone"),
    ],
)
def test_a_wrong_argument_is_told(changes, said) -> None:
    """Its name, its value, and what is accepted."""
    with pytest.raises(InvalidSpec, match=said.replace("(", r"\(")):
        SAETraining(**{"point": POINT, "width": WIDTH, "features": FEATURES, "k": K, **changes})


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (torch.zeros(4, WIDTH + 1), r"batch \[4, 13\]"),
        (torch.zeros(WIDTH), r"batch \[12\]"),
        (torch.ones(1, WIDTH), "two at least"),
        ([[1.0] * WIDTH], "give rows"),
        (torch.full((4, WIDTH), math.nan), "NaN or infinity"),
        (torch.ones(4, WIDTH), "4 equal rows"),
    ],
)
def test_a_wrong_batch_changes_nothing(batch, said) -> None:
    """It is refused, and the training goes on as if it had not come."""
    training = SAETraining(POINT, WIDTH, features=FEATURES, k=K)
    before = training.sae().decoder
    with pytest.raises(InvalidSpec, match=said):
        training.step(batch)
    assert torch.equal(training.sae().decoder, before)
    assert training.seen == 0


def test_it_trains_where_gradients_are_off() -> None:
    """As in a notebook that begins with torch.set_grad_enabled(False); gradients stay off around the step."""
    training = SAETraining(POINT, WIDTH, features=FEATURES, k=K)
    before = training.sae().decoder
    with torch.no_grad():
        training.step(sparse_rows(64))
        assert not torch.is_grad_enabled()
    assert not torch.equal(training.sae().decoder, before)


def test_the_one_row_that_an_epoch_ends_with_is_left_out() -> None:
    """One row has no spread; the training goes on with the next epoch."""
    rows = torch.randn(65, WIDTH, generator=torch.Generator().manual_seed(0))
    found = train_sae([*rows.split(16), *rows.split(16)], POINT, features=FEATURES, k=K)
    assert (len(found.curve), found.seen) == (8, 128)
    with pytest.raises(InvalidSpec, match="no batches of two rows or more"):
        train_sae(rows.split(1), POINT, features=FEATURES, k=K)


def test_no_batches_and_huge_rows_are_told(tmp_path) -> None:
    """An iterator that is spent; rows whose squares overflow; an SAE of another kind."""
    with pytest.raises(InvalidSpec, match="no batches"):
        train_sae(iter(()), POINT, features=FEATURES)
    with pytest.raises(TrainingDiverged, match="smaller lr"):
        train_sae([torch.randn(8, WIDTH) * 1e30], POINT, features=FEATURES, k=K)
    other = SAE.load(RandomSAE("standard", WIDTH, FEATURES).write(tmp_path))
    with pytest.raises(InvalidSpec, match="top-k"):
        save_sae(other, tmp_path / "b")
    with pytest.raises(InvalidSpec, match="variance"):
        score_sae(other, torch.ones(4, WIDTH))
    with pytest.raises(InvalidSpec, match="rows that it reads"):
        score_sae(other, torch.ones(4, WIDTH + 1))


@pytest.mark.parametrize("point", [None, "resid_post", ("2", "resid_post"), (2,), Point(-1, "z"), (2, None)])
def test_an_sae_without_a_point_is_not_saved(point, tmp_path) -> None:
    """The field is named, with what is accepted, before anything is written; a plain pair will do."""
    sae = SAETraining(POINT, WIDTH, features=FEATURES, k=K).sae()
    with pytest.raises(InvalidSpec, match=r"save_sae: sae\.input=.*; give a layer from 0 up and a site: \(12"):
        save_sae(replace(sae, input=point, output=point), tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(InvalidSpec, match=r"sae\.output=.*resid_mid.*output is its input, resid_post"):
        save_sae(replace(sae, output=Point(2, "resid_mid")), tmp_path / "none")
    pair = save_sae(replace(sae, input=(2, "resid_post"), output=(2, "resid_post")), tmp_path)
    assert SAE.load(pair).input == POINT


def test_something_that_is_no_sae_is_told(tmp_path) -> None:
    """A training itself, a file's name, None: with the argument's name."""
    training = SAETraining(POINT, WIDTH, features=FEATURES, k=K)
    for given in (training, "sae", None):
        with pytest.raises(InvalidSpec, match=r"save_sae: sae=.*give an SAE"):
            save_sae(given, tmp_path)
        with pytest.raises(InvalidSpec, match=r"score_sae: sae=.*give an SAE"):
            score_sae(given, sparse_rows(50))


# How far it is, and the command


def test_every_step_is_told() -> None:
    """Rows, the loss and the explained variance of each batch before its step."""
    rows, told = sparse_rows(512), []
    training = train_sae(batches(rows, 2), POINT, features=FEATURES, k=K, rows=1024, progress=told.append)
    assert [(at.done, at.total) for at in told] == [(128 * (n + 1), 1024) for n in range(8)]
    assert [(at.done, at.details["explained"]) for at in told] == training.curve
    first = next(iter(batches(rows, 1)))
    assert told[0].details["loss"] == pytest.approx(
        (1 - training.curve[0][1]) * float(first.var(dim=0, correction=0).mean())
    )
    assert re.fullmatch(r"training rows, loss [\d.]+, explained 0\.\d+: 1,024 of 1,024", str(told[-1]))


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_one_line(terminal, monkeypatch) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    stream = Stream()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    train_sae(batches(sparse_rows(512), 2), POINT, features=FEATURES, k=K)
    said = stream.getvalue()
    assert ("SAE: training rows, loss " in said) is terminal
    assert said.count("\n") == int(terminal)
    assert bool(said) is terminal


@pytest.fixture
def dataset(tmp_path):
    """Rows of one layer, random, of twelve shards."""
    point = {Point(1, "resid_post"): PointSchema((16,), "float32")}
    folder_of(tmp_path / "rows", definition_of(points=point), 12, 3)
    return tmp_path / "rows"


def test_the_command_trains_on_a_data_set(dataset, tmp_path) -> None:
    """The SAE is written as SAELens does; it was normalised by the rows it read, and is scored on other documents."""
    out = tmp_path / "sae"
    words = ("sae", "train", dataset, "--out", out, "--features", "24", "--k", "4", "--batch-size", "32", "--json")
    found = call(*words, "--epochs", "30", "--skip", "0", "--lr", "0.01")
    assert found.exit_code == 0, found.output
    said, sae = json.loads(found.stdout), SAE.load(out)
    assert (sae.d_sae, sae.d_in, sae.encoder.k, sae.input, sae.name) == (24, 16, 4, Point(1, "resid_post"), "sae")
    whole = ActivationDataset(dataset, labels=True)[:]
    documents = int(whole.document.max()) + 1
    held = whole.document >= documents - round(0.1 * documents)
    score = score_sae(sae, whole.rows[held])
    assert said["explained"] == pytest.approx(score.explained, abs=1e-5)
    assert said["scored_on"] == f"{int(held.sum()):,} rows of documents held out"
    assert said["rows"] == 30 * (int((~held).sum()) // 32) * 32
    assert score_sae(sae, whole.rows[~held]).explained > score.explained > 0
    again = call(*words)
    assert again.exit_code == 2
    assert "has cfg.json in it already" in " ".join(again.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("more", "code", "word"),
    [
        (("--batch-size", "4096"), 1, "fewer than two steps of 4,096"),
        (("--layer", "2"), 1, "layer 2 is outside this model of 2 layers"),
        (("-m", "other"), 2, "a data set has its rows already"),
        (("--url", "http://127.0.0.1:1"), 2, "a data set has its rows already"),
        (("--api-key", "k"), 2, "a data set has its rows already"),
        (("--k", "99", "--features", "24", "--batch-size", "32"), 1, "k=99 of 24 features"),
    ],
)
def test_what_cannot_be_trained_is_said(dataset, tmp_path, more, code, word) -> None:
    found = call("sae", "train", dataset, "--out", tmp_path / "sae", *more)
    assert found.exit_code == code
    assert word in " ".join(found.stderr.replace("│", " ").split())
    assert not (tmp_path / "sae" / "cfg.json").exists()


@pytest.mark.parametrize("option", [("--epochs", "1"), ("--held-out", "0.1")])
def test_what_a_corpus_has_no_use_for_is_refused(tmp_path, option) -> None:
    found = call("sae", "train", tmp_path / "texts.jsonl", "--layer", "1", "--out", tmp_path / "sae", *option)
    assert found.exit_code == 2
    assert "a corpus is read once" in " ".join(found.stderr.replace("│", " ").split())


@pytest.fixture
def small(tmp_path):
    """Data set of four documents, of 1, 8, 6 and 4 rows, and the call that trains on it, at its URL."""

    def train(*more, spoilt: bool = False):
        point = Point(1, "resid_post")
        folder = DatasetFolder.begin(tmp_path / "rows", definition_of(points={point: PointSchema((16,), "float32")}))
        shard = shard_of(folder.definition, 0)
        if spoilt:
            shard.rows[point][-1, 0] = float("nan")
        folder.write(shard)
        folder.complete()
        words = ("--features", "24", "--k", "4", "--batch-size", "4", "--skip", "0", *more)
        return call("sae", "train", f"file://{tmp_path}/rows", "--out", tmp_path / "sae", *words)

    return train


@pytest.mark.parametrize(
    ("more", "scored"),
    [((), "4 rows of documents held out"), (("--held-out", "0"), "nothing: 0 rows are held out, of two at least")],
)
def test_one_of_few_documents_is_held_out_or_it_is_said(small, more, scored) -> None:
    """A tenth of four documents is none."""
    said = json.loads(small("--json", *more).stdout)
    assert (said["scored_on"], "explained" in said) == (scored, not more)


def test_the_mean_of_active_features_is_no_percentage(small) -> None:
    """Shares are; at most k of 24 features are active."""
    said = small().stdout
    shares = re.findall(r"^(?:explained|used) +(\S+) *$", said, re.MULTILINE)
    assert [share[-1] for share in shares] == ["%", "%"]
    (active,) = re.findall(r"^active +(\S+) *$", said, re.MULTILINE)
    assert 0 < float(active) <= 4


def test_rows_that_cannot_be_scored_do_not_cost_the_training(small, tmp_path) -> None:
    found = small(spoilt=True)
    assert found.exit_code == 1
    assert "is written, and cannot be scored: score_sae: the variance of 4 rows is nan" in " ".join(
        found.stderr.split()
    )
    assert SAE.load(tmp_path / "sae").d_sae == 24
