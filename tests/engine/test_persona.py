"""From traits to vectors on a real model: what a run does, that a kill loses little and changes nothing, and a real judge."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from persona_run import SETTINGS
from preloaded import killed

from steercap import Progress
from steercap.errors import RunDiffers
from steercap.files.tables import PART_RECORDS, read_table
from steercap.lab.demo import smollm2
from steercap.lab.directions import Exchange, extract
from steercap.lab.measures.scores import Scored, make_scorer
from steercap.lab.personas import PersonaResult, run_persona, shipped_traits
from steercap.lab.personas.capture import load_rows
from steercap.lab.personas.records import SIGNS, Kept, Response, Score
from steercap.steering import DirectionSet

SCRIPT = Path(__file__).parents[1] / "persona_run.py"
STAGES = ["generate", "score", "filter", "capture", "vectors", "report"]


def reached(reports: list[Progress]) -> dict[str, tuple[int, int, int]]:
    """The first and the last count of each stage, and of how many."""
    return {
        stage: (mine[0].done, mine[-1].done, mine[-1].total)
        for stage in STAGES
        if (mine := [report for report in reports if report.stage == stage])
    }


@pytest.fixture(scope="session")
async def whole(smol, tmp_path_factory) -> tuple[PersonaResult, list[Progress]]:
    """A run that nothing interrupts."""
    reports: list[Progress] = []
    return await run_persona(smol, SETTINGS, tmp_path_factory.mktemp("whole"), progress=reports.append), reports


def alike(ours: DirectionSet, theirs: DirectionSet) -> bool:
    """Equal but for rounding: other requests shared the batches, which changes the last bits of a float32 mean."""
    return list(ours) == list(theirs) and all(
        float((ours[name][layer] - theirs[name][layer]).norm()) <= 1e-5 * ours.provenance.row_norms[name][layer]
        for name in ours
        for layer in ours.layers
    )


async def test_a_run_writes_down_what_it_did(whole) -> None:
    """Every request is answered, scored, filtered and read once, in tables that agree; progress is told to the end."""
    result, reports = whole
    responses, scores, kept = (
        read_table(result.folder / f"{name}.parquet", kind)
        for name, kind in (("responses", Response), ("scores", Score), ("kept", Kept))
    )
    assert len(responses) == 2 * 5 * 4
    assert [one.id for one in responses] == [one.id for one in scores]
    assert {one.id for one in kept} == {one.id for one in scores if one.score is not None}
    assert all(len(one.token_ids) <= 8 for one in responses)
    assert len({one.answer for one in responses}) > 30
    header, rows = load_rows(result.folder / "rows" / "poetic.safetensors")
    assert list(header.ids) == [one.id for one in kept]
    assert rows.shape == (len(kept), 30, 576)
    assert DirectionSet.load(result.folder / "directions.safetensors") == result.directions
    assert not list((result.folder / "parts").iterdir())
    assert result.report.read_text().startswith("# Persona vectors of SmolLM2")
    assert reached(reports) == {
        "generate": (0, 40, 40),
        "score": (0, 40, 40),
        "filter": (0, 1, 1),
        "capture": (0, len(kept), len(kept)),
        "vectors": (0, 1, 1),
        "report": (0, 1, 1),
    }


async def test_a_vector_is_what_extract_finds_in_the_kept_answers(smol, whole) -> None:
    """System prompt, question and answer are read, answers to a question are held out together, origin is told."""
    result, _ = whole
    answers = {one.id: one for one in read_table(result.folder / "responses.parquet", Response)}
    kept = read_table(result.folder / "kept.parquet", Kept)
    mine = {sign: [answers[one.id] for one in kept if one.sign == sign] for sign in SIGNS}
    texts = {
        sign: [
            Exchange(
                [
                    {"role": "system", "content": getattr(shipped_traits()["poetic"], sign)[one.prompt]},
                    {"role": "user", "content": shipped_traits()["poetic"].questions[one.question]},
                ],
                one.token_ids,
            )
            for one in mine[sign]
        ]
        for sign in SIGNS
    }
    groups = {sign: [one.question for one in mine[sign]] for sign in SIGNS}
    found = await extract(
        smol,
        texts["positive"],
        texts["negative"],
        name="poetic",
        groups=groups["positive"],
        negative_groups=groups["negative"],
    )
    assert alike(result.directions, found)
    ours, theirs = result.directions.provenance, found.provenance
    assert (ours.prompts, ours.rows, ours.held_out, ours.tokens) == (
        theirs.prompts,
        theirs.rows,
        theirs.held_out,
        theirs.tokens,
    )
    assert sum(ours.held_out["poetic"]) <= 10  # one question of four
    assert max(abs(ours.auc["poetic"][layer] - auc) for layer, auc in theirs.auc["poetic"].items()) < 0.05


@pytest.mark.extended
async def test_a_run_that_is_killed_loses_little_and_changes_nothing(smol, whole, tmp_path) -> None:
    """Killed in the middle of generate and again in that of capture, it ends with the texts and vectors of one run."""
    result, _ = whole
    folder = tmp_path / "run"
    killed(SCRIPT, folder, "generate", 37)
    assert not (folder / "responses.parquet").exists()
    parts = [read_table(path, Response) for path in (folder / "parts").glob("generate-*/*.parquet")]
    assert 37 - PART_RECORDS < sum(map(len, parts)) <= 37
    killed(SCRIPT, folder, "capture", 8)
    assert not (folder / "directions.safetensors").exists()
    read = [len(load_rows(path)[0].ids) for path in (folder / "parts").glob("capture-*/*.safetensors")]
    assert sum(read) >= 8
    reports: list[Progress] = []
    again = await run_persona(smol, SETTINGS, folder, progress=reports.append)
    for name in ("responses", "scores", "kept"):
        ours, theirs = (place / f"{name}.parquet" for place in (folder, result.folder))
        assert ours.read_bytes() == theirs.read_bytes()
    assert reached(reports)["generate"] == (40, 40, 40)
    assert reached(reports)["capture"][0] == sum(read)
    assert alike(again.directions, result.directions)
    assert not list((folder / "parts").iterdir())


async def test_later_settings_leave_earlier_stages_as_they_are(smol, whole, tmp_path) -> None:
    """Another method asks the model nothing; another threshold reads only what was not kept before."""
    result, _ = whole
    folder = Path(shutil.copytree(result.folder, tmp_path / "run"))
    reports: list[Progress] = []
    changed = await run_persona(
        smol, msgspec.structs.replace(SETTINGS, method="probe"), folder, progress=reports.append
    )
    first = {stage: counts[0] for stage, counts in reached(reports).items()}
    assert (first["generate"], first["score"], first["vectors"]) == (40, 40, 0)
    assert first["capture"] == reached(reports)["capture"][2]
    assert changed.directions.provenance.method == "probe"
    assert not alike(changed.directions, result.directions)
    scores = read_table(folder / "scores.parquet", Score)
    low = sorted(one.score for one in scores if "/negative/" in one.id and one.score is not None)
    reports.clear()
    fewer = msgspec.structs.replace(SETTINGS, threshold_low=low[-4])
    await run_persona(smol, fewer, folder, progress=reports.append)
    assert reached(reports)["capture"][0] == reached(reports)["capture"][2] < 40
    reports.clear()
    back = await run_persona(smol, SETTINGS, folder, progress=reports.append)
    assert reached(reports)["capture"] == reached(whole[1])["capture"][1:2] * 2 + reached(whole[1])["capture"][2:]
    assert back.directions == result.directions
    with pytest.raises(RunDiffers, match="seed was 0, is 1"):
        await run_persona(smol, msgspec.structs.replace(SETTINGS, seed=1), folder)


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[str]:
    """vLLM's own server of SmolLM2; the URL of its interface."""
    arguments = ["--model", str(smollm2()), "--served-model-name", "smol", "--dtype", "float32"]
    sizes = ["--enforce-eager", "--max-model-len", "1024", "--kv-cache-memory-bytes", str(64 << 20)]
    said = tmp_path_factory.mktemp("server") / "log"
    for _ in range(3):  # another process may have taken the port by the time that the server listens
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments, *sizes, "--port", str(port)]
        with said.open("wb") as log:
            process = subprocess.Popen(command, start_new_session=True, stdout=log, stderr=subprocess.STDOUT)
        try:
            if _answers(process, url := f"http://127.0.0.1:{port}"):
                yield f"{url}/v1"
                return
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    pytest.fail(f"vLLM's server did not start; it ended with {process.returncode}: {said.read_text()[-4000:]}")


def _answers(process: subprocess.Popen[bytes], url: str) -> bool:
    """Whether a server comes up, within five minutes."""
    limit = time.monotonic() + 300
    while time.monotonic() < limit and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return True
        time.sleep(0.5)
    return False


@pytest.mark.extended  # a second engine; unit tests of the judge have replies of vLLM's form
async def test_a_judge_behind_vllms_own_server_scores(server) -> None:
    """Rubric, candidates and text come through a real endpoint; what this small a judge says means nothing."""
    told = [Scored("How will it go?", f"It will be fine, for the {place}th time.") for place in range(6)]
    for logprobs in (True, False):
        judge = make_scorer("judge", {"base_url": server, "model": "smol", "logprobs": logprobs})
        scores = await judge.score(shipped_traits()["optimistic"], told)
        assert len(scores) == 6
        assert all(score is None or 0 <= score <= 100 for score in scores)
        assert any(score is not None for score in scores)
