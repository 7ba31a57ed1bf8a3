"""Folders that an earlier version wrote: the same call goes on in them, and asks for what is missing alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from pyarrow import parquet
from stored_runs import RUNS, STORED, chatting, copied

from steercap import Manifest, Progress, SteerModel
from steercap.lab.datasets import ActivationDataset
from steercap.steering import DirectionSet
from steercap.testing import tiny_checkpoint

#: Made from the rest whenever a run ends: tables, a report and its pictures, and the totals of a data set.
MADE_ANEW = {
    "results.parquet",
    "kept.parquet",
    "directions.safetensors",
    "report.md",
    "dataset.json",
    ".lock",
    "auc.png",
    "cosines.png",
    "scores.png",
}


@pytest.fixture
def model(tiny) -> Iterator[SteerModel]:
    """The tiny engine, whose tokenizer knows conversations."""
    with chatting(tiny):
        yield tiny


def here(name: str, folder: Path, model: SteerModel) -> Path:
    return copied(name, folder, tiny_checkpoint("qwen3"), model.tokenizer)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file that a finished run leaves alone."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in MADE_ANEW)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def captures(found) -> None:
    assert [(one.prompt, one.text, one.rows, one.points) for one in found] == [
        ("One two three", "", 4, 4),
        ("Hello", "", 4, 4),
        ("Four", '"', 4, 4),
    ]


def dataset(found) -> None:
    totals = found.totals
    assert (totals.documents, totals.shards, totals.tokens, totals.rows) == (3, 2, 27, 10)
    assert (found.resumed, found.tokens) == (2, 0)


def sweep(found) -> None:
    assert [one.number for one in found.records] == list(range(14))
    assert [one.output_token_ids for one in found.records][:3] == [
        (228, 382, 65, 43),
        (446, 418, 489, 290),
        (228, 382, 65, 419),
    ]
    assert list(found.values) == ["length", "repetition", "perplexity"]
    assert found.values["length"] == [4.0] * 14
    assert found.values["perplexity"][:2] == [19.481650145236546, 11.894392447912784]


def evaluation(found) -> None:
    assert [(one.number, one.method, one.dose, one.turn) for one in found.answers] == [
        (0, "none", 1.0, 0),
        (2, "none", 1.0, 0),
        (3, "none", 1.0, 1),
        (4, "noise", 0.5, 0),
        (6, "noise", 0.5, 0),
        (7, "noise", 0.5, 1),
        (8, "noise", 1.0, 0),
        (10, "noise", 1.0, 0),
        (11, "noise", 1.0, 1),
        (12, "prompt", 1.0, 0),
        (14, "prompt", 1.0, 0),
        (15, "prompt", 1.0, 1),
    ]
    assert [one.text for one in found.answers[:3]] == ["", "u", "u`e"]
    assert found.values == {"length": [4.0] * 12}
    readings = {
        label: {(one.method, one.dose): values for one, values in by.items()} for label, by in found.readings.items()
    }
    assert readings == {
        "neutral": {
            ("none", 1.0): [4060.835325912386],
            ("noise", 0.5): [3974.703798237984],
            ("noise", 1.0): [3890.5876947916267],
            ("prompt", 1.0): [4013.5107209036105],
        },
        "choices": {("none", 1.0): [0.0], ("noise", 0.5): [0.0], ("noise", 1.0): [0.0], ("prompt", 1.0): [0.0]},
    }


def persona(found) -> None:
    outcome = found.outcomes["calm"]
    assert (outcome.responses, outcome.unscored, outcome.kept, outcome.left_out) == ((3, 3), (1, 0), (2, 3), "")
    known = DirectionSet.load(STORED / "persona" / "directions.safetensors")["calm"]
    for layer, vector in found.directions["calm"].items():
        torch.testing.assert_close(
            vector, known[layer], rtol=1e-4, atol=1e-4
        )  # means, which processors round otherwise


def roles(found) -> None:
    assert {name: (one.responses, one.kept) for name, one in found.outcomes.items()} == {
        "assistant": (2, 2),
        "ghost": (2, 2),
        "king": (2, 2),
    }
    assert found.rows.layers == (0, 1, 2, 3)
    assert found.rows.names == ("ghost", "king")


FOUND: dict[str, Callable[..., None]] = {
    "captures": captures,
    "dataset": dataset,
    "sweep": sweep,
    "evaluation": evaluation,
    "persona": persona,
    "roles": roles,
}


@pytest.mark.parametrize("name", RUNS)
async def test_a_finished_run_is_read_and_nothing_is_asked(name, model, tmp_path) -> None:
    """It is taken for the same run, its numbers are those that were stored, and no pass is run for it."""
    folder = here(name, tmp_path / name, model)
    before, steps = contents(folder), (await model.stats()).steps
    found = await RUNS[name](model, folder)
    assert (await model.stats()).steps == steps
    FOUND[name](found)
    assert contents(folder) == before


def without(path: Path, key: str, value: object, to: Path | None = None) -> None:
    """Leave one row out of a table, as if it had never come."""
    table = parquet.read_table(path)
    kept = [row for row, found in enumerate(table[key].to_pylist()) if found != value]
    assert len(kept) == table.num_rows - 1
    (to or path).parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table.take(kept), to or path)
    if to is not None:
        path.unlink()


async def test_captures_go_on(model, tmp_path) -> None:
    """The one that the manifest does not list is asked for, the others stay as they are."""
    folder = here("captures", tmp_path / "run", model)
    said = json.loads((folder / "manifest.json").read_text())
    gone = said["requests"].pop()
    (folder / "manifest.json").write_text(json.dumps(said))
    steps = (await model.stats()).steps
    found = await RUNS["captures"](model, folder)
    assert (await model.stats()).steps > steps
    assert len(found) == 3
    one, two, new = Manifest.load(folder).requests
    assert [(old.file, old.id, old.sha256) for old in (one, two)] == [
        (old["file"], old["id"], old["sha256"]) for old in said["requests"]
    ]
    assert new.id != gone["id"]
    assert (new.file, new.prompt_sha256, new.rows) == (gone["file"], gone["prompt_sha256"], gone["rows"])
    assert new.steering == gone["steering"]


async def test_a_data_set_goes_on(model, tmp_path) -> None:
    """The shard without its receipt is made again, of the same tokens, and the other stays as it is."""
    folder = here("dataset", tmp_path / "run", model)
    (folder / "shards" / "000001.json").unlink()
    before = contents(folder)
    found = await RUNS["dataset"](model, folder)
    assert found.resumed == 1
    assert (found.totals.documents, found.totals.rows, found.tokens) == (3, 10, 11)
    after = contents(folder)
    assert {name for name in before if before[name] != after[name]} <= {
        name for name in before if "000001" in name or name == "statistics.safetensors"
    }
    index = "shards/000001.parquet"
    assert parquet.read_table(folder / index) == parquet.read_table(STORED / "dataset" / index)
    rows = (ActivationDataset(path)[6:10] for path in (folder, STORED / "dataset"))
    torch.testing.assert_close(*rows, rtol=1e-4, atol=1e-4)  # of weights that processors round otherwise


async def test_a_sweep_goes_on(model, tmp_path) -> None:
    """One answer is asked for; the others, and what was measured of them, stay."""
    folder = here("sweep", tmp_path / "run", model)
    (part,) = (folder / "answers").iterdir()
    without(part, "number", 6)
    reports: list[Progress] = []
    found = await RUNS["sweep"](model, folder, progress=reports.append)
    assert [at for at in reports if at.stage == "answers"] == [Progress("answers", done, 14) for done in (13, 14)]
    assert [one.number for one in found.records] == list(range(14))
    stored = {row["number"]: row["text"] for row in parquet.read_table(STORED / "sweep" / "answers").to_pylist()}
    assert {one.number: one.text for one in found.records if one.number != 6}.items() <= stored.items()


async def test_an_evaluation_goes_on(model, tmp_path) -> None:
    """The second turn of a conversation is asked for, and the fixed texts of one condition are read."""
    folder = here("evaluation", tmp_path / "run", model)
    (part,) = (folder / "answers").iterdir()
    without(part, "number", 11)
    (part,) = (folder / "tasks" / "neutral-0afa0e91").iterdir()
    without(part, "number", 2)
    reports: list[Progress] = []
    found = await RUNS["evaluation"](model, folder, progress=reports.append)
    done = {name: {at.done for at in reports if at.stage == name} for name in ("answers", "choices", "neutral")}
    assert done["answers"] == {11, 12}
    assert 4 in done["choices"]
    assert done["neutral"] == {3, 4}
    stored = {row["number"]: row["text"] for row in parquet.read_table(STORED / "evaluation" / "answers").to_pylist()}
    assert {one.number: one.text for one in found.answers if one.number != 11}.items() <= stored.items()


async def test_a_run_of_personas_goes_on(model, tmp_path) -> None:
    """As a process that was killed while the model answered left it: the answer that lacks is asked for."""
    folder = here("persona", tmp_path / "run", model)
    said = json.loads((folder / "settings.json").read_text())
    parts = folder / "parts" / f"generate-calm-{said['done']['generate/calm'][:16]}"
    without(folder / "responses.parquet", "id", "calm/negative/0/2/0", parts / "00000-0a1b2c3d.parquet")
    (folder / "settings.json").write_text(json.dumps(said | {"done": {}}))
    for path in ("scores.parquet", "kept.parquet", "directions.safetensors", "rows/calm.safetensors", "report.md"):
        (folder / path).unlink()
    reports: list[Progress] = []
    await RUNS["persona"](model, folder, progress=reports.append)
    assert [at for at in reports if at.stage == "generate"] == [Progress("generate", done, 6) for done in (0, 5, 6)]
    answers = parquet.read_table(folder / "responses.parquet").to_pylist()
    stored = parquet.read_table(STORED / "persona" / "responses.parquet").to_pylist()
    assert answers[:-1] == stored[:-1]
    assert [answers[-1][name] for name in ("id", "seed", "question_text")] == [
        stored[-1][name] for name in ("id", "seed", "question_text")
    ]


async def test_a_run_over_roles_goes_on(model, tmp_path) -> None:
    """As a process that was killed while the king answered left it: one answer is asked for, and the king's are read."""
    folder = here("roles", tmp_path / "run", model)
    king = folder / "roles" / "king"
    said = json.loads((king / "state.json").read_text())
    without(
        king / "answers.parquet",
        "id",
        "king/0/1/0",
        king / "parts" / f"generate-{said['done']['generate'][:16]}" / "00000-0a1b2c3d.parquet",
    )
    (king / "state.json").write_text('{"done": {}, "outcome": null}')
    (king / "rows.safetensors").unlink()
    before = contents(folder)
    reports: list[Progress] = []
    found = await RUNS["roles"](model, folder, progress=reports.append)
    assert [at for at in reports if at.stage == "generate"] == [Progress("generate", done, 6) for done in (4, 5, 6)]
    first = "roles/king/answers.parquet"
    answers = (parquet.read_table(path / first).to_pylist()[0] for path in (folder, STORED / "roles"))
    assert next(answers) == next(answers)
    after = contents(folder)
    assert {name for name in before if after.get(name) != before[name]} == {
        name for name in before if name.startswith("roles/king")
    }
    assert found.outcomes["king"].responses == 2
