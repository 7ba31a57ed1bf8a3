"""The commands' work on an open model, and the whole command once, as a shell calls it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from cli_calls import call
from pyarrow import parquet
from safetensors.torch import load_file
from support.rows import random_prompt
from support.specs import vector

from steercap import SAE, Add, CaptureSpec, Manifest, SteeringSpec
from steercap.captures.handle import CaptureHandle
from steercap.cli.capture import heatmaps_of
from steercap.cli.captured import capture_to
from steercap.cli.generate import answer
from steercap.cli.prompts import Prompt
from steercap.cli.sweep import document_of, drawn, swept, table_of
from steercap.cli.sweep_file import SweepFile, sweep_of
from steercap.cli.terminal import Output, Terminal
from steercap.cli.vectors import extract_from, texts_between
from steercap.errors import InvalidFile, InvalidSelection, InvalidSpec
from steercap.lab.demo import smollm2
from steercap.lab.directions import extract
from steercap.lab.studies.trying import try_layers
from steercap.steering import DirectionSet, LayerVectors
from steercap.testing import tiny_checkpoint

GREEDY = {"max_tokens": 6, "temperature": 0.0}
PRAISE = ["The film was wonderful", "I found the food excellent", "My day has been lovely", "This town is charming"]
COMPLAINT = ["The film was terrible", "I found the food awful", "My day has been dreadful", "This town is ugly"]


@pytest.fixture
def terminal() -> Terminal:
    return Terminal(Output())


def push(scale: float = 1.0) -> SteeringSpec:
    return SteeringSpec([Add(vector(576, seed=1) * 40, layer=15, scale=scale)])


# Whole commands come first: the engine that the others share would be one more beside theirs.


def command(*arguments: str | Path, warned: bool = True) -> subprocess.Popen[str]:
    """The command in a process group of its own, as a shell starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "steercap", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # vLLM leaves the contexts of its sockets to the garbage collector.
        env=os.environ | ({"PYTHONWARNINGS": "default,ignore:Unclosed context:ResourceWarning"} if warned else {}),
    )


def test_the_command_steers_and_prints_json_alone(tmp_path) -> None:
    """A real process with a real engine: one document on stdout, steered as asked, no word of vLLM's anywhere."""
    assert smollm2().exists()
    file = DirectionSet({"push": LayerVectors({15: vector(576, seed=1) * 40}, site="resid_post")}).save(
        tmp_path / "push.safetensors"
    )
    process = command(
        "generate",
        "The capital of France is",
        "--steer",
        file,
        "--scale",
        "1",
        "--compare",
        "--max-tokens",
        "6",
        "--json",
    )
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    (one,) = json.loads(out)["answers"]
    assert one["clean"] != one["steered"]
    assert one["rows_edited"] == [10]  # 5 prompt + 6 generated - 1
    ours = re.compile(r".*tokens/s|(loading|starting|stopping|generating).*: \d+ s(, \d of 1)?")  # now and then
    assert [line for line in err.splitlines() if not ours.fullmatch(line)] == []


def test_collect_keeps_the_tokens_it_is_told(tmp_path) -> None:
    """Generated tokens alone: their rows, by their labels, and what the data set says of itself."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"tokens": random_prompt(length, length)}) + "\n" for length in (9, 4, 12)))
    done = call(
        *("collect", corpus, "--out", tmp_path / "rows", "--layers", "1", "--tokens", "generated", "--max-tokens", "4"),
        *("-m", tiny_checkpoint("qwen3"), "--dtype", "float32", "--eager", "--max-model-len", "64", "--json"),
        *("--engine-arg", f"kv_cache_memory_bytes={4 << 20}"),
    )
    assert done.exit_code == 0, done.output
    index = parquet.read_table(tmp_path / "rows" / "shards" / "000000.parquet")
    assert index["position"].to_pylist() == [9, 10, 11, 4, 5, 6, 12, 13, 14]  # the last one that is sampled has no row
    rows = load_file(tmp_path / "rows" / "shards" / "000000.safetensors")["rows.resid_post.1"]
    assert rows.shape == (9, 128)
    assert json.loads(done.stdout)["totals"]["rows"] == 9


def test_a_small_sae_is_trained_on_what_a_model_reads(tmp_path) -> None:
    """A corpus, read once, without a disk: each step is scored before it; the SAE reads the model's own rows."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"tokens": random_prompt(24, seed)}) + "\n" for seed in range(40)))
    done = call(
        *("sae", "train", corpus, "--layer", "1", "--features", "64", "--k", "8", "--batch-size", "32", "--json"),
        *("-m", tiny_checkpoint("qwen3"), "--dtype", "float32", "--eager", "--max-model-len", "64"),
        *("--engine-arg", f"kv_cache_memory_bytes={4 << 20}", "--out", tmp_path / "sae"),
    )
    assert done.exit_code == 0, done.output
    said, sae = json.loads(done.stdout), SAE.load(tmp_path / "sae")
    assert said["rows"] == 40 * 23 // 32 * 32
    assert said["scored_on"].startswith("the last 3 batches")
    assert -1 < said["explained"] < 1
    assert (sae.input, sae.d_in, sae.d_sae, sae.name) == ((1, "resid_post"), 128, 64, "sae")


def test_an_interrupted_command_leaves_nothing_behind() -> None:
    """Ctrl-C while the engine starts: exit code 130, no traceback, no process."""
    process = command("generate", "The capital of France is")
    parent = psutil.Process(process.pid)
    while not parent.children(recursive=True):  # until vLLM's process is there
        assert process.poll() is None, process.communicate()
    children = parent.children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to everybody
    _, err = process.communicate(timeout=400)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


def test_a_server_says_one_line_and_ends_at_ctrl_c() -> None:
    """What a normal start says, and where the server is; Ctrl-C ends it within seconds with success, and its processes."""
    assert smollm2().exists()
    process = command("serve", "--port", "0", "--no-record", "--json", warned=False)
    lines: list[str] = []
    while not lines or " is up after " not in lines[-1]:
        line = process.stderr.readline()
        assert line, process.communicate()
        lines.append(line.rstrip("\n"))
    there = re.fullmatch(
        r"smollm2 is up after \d+ s: (http://127.0.0.1:\d+)/v1 is the base_url of OpenAI clients, \1/explorer the page; "
        r"Ctrl-C ends it",
        lines[-1],
    )
    assert there is not None, lines[-1]
    waits = re.compile(r"(preparing|starting) smollm2(: [a-zA-Z ]+)?: \d+ s")  # now and then
    assert [line for line in lines[:-1] if not waits.fullmatch(line)] == []
    models = httpx.get(f"{there[1]}/v1/models").raise_for_status().json()
    assert models["data"][0]["id"] == "smollm2"
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to everybody
    out, err = process.communicate(timeout=400)
    assert time.monotonic() - began < 20
    assert (process.returncode, err) == (0, "smollm2 is down\n")
    assert json.loads(out) == {
        "model": "smollm2",
        "url": there[1],
        "base_url": f"{there[1]}/v1",
        "page": f"{there[1]}/explorer",
    }
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


async def test_answers_are_those_of_the_model(smol, terminal) -> None:
    """Clean and steered texts are what `generate` and `chat` give, and a steered one names the rows edited."""
    prompts = [Prompt("The capital of France is"), Prompt([{"role": "user", "content": "Say hello."}])]
    found = await answer(smol, prompts, {**GREEDY, "n": 1}, terminal, steering=push(), compare=True)
    clean = [await smol.generate(prompts[0].content, GREEDY), await smol.chat(prompts[1].content, GREEDY)]
    steered = await smol.generate(prompts[0].content, GREEDY, steering=push())
    assert [one.clean for one in found] == clean
    assert found[0].steered == steered != found[0].clean
    assert found[1].prompt == "Say hello."
    (rows,) = found[0].rows_edited
    assert rows == len(smol.tokenizer.encode(prompts[0].content)) + 6 - 1
    only = await answer(smol, prompts[:1], {**GREEDY, "n": 1}, terminal, steering=push())
    assert (only[0].clean, only[0].steered) == (None, steered)


async def test_several_answers_are_all_there(smol, terminal) -> None:
    """`-n 3` gives three a prompt, in the order of the prompts."""
    params = {"max_tokens": 4, "temperature": 1.0, "n": 3, "seed": 1}
    found = await answer(smol, [Prompt("One"), Prompt("Two")], params, terminal)
    assert [(one.prompt, one.sample) for one in found] == [
        (name, sample) for name in ("One", "Two") for sample in range(3)
    ]
    assert len({one.clean for one in found}) > 1


def lost_and_cut(lost: Path, cut: Path, kept: Path) -> int:
    """Remove one file and cut another; return the time of the last change of a third, in nanoseconds."""
    lost.unlink()
    cut.write_bytes(cut.read_bytes()[:-8])
    return kept.stat().st_mtime_ns


async def test_captures_are_written_as_they_come(smol, terminal, tmp_path) -> None:
    """One file per prompt, in their order, with the rows that `generate` captures; the workers hold none afterwards."""
    prompts = [Prompt(text) for text in PRAISE]
    spec = CaptureSpec(layers=[3, 20], tokens="prompt")
    found = await capture_to(smol, prompts, GREEDY, spec, tmp_path, terminal)
    assert [one.prompt for one in found] == PRAISE
    for one, text in zip(found, PRAISE, strict=True):
        handle = CaptureHandle.load(one.file)
        assert smol.tokenizer.decode(handle.prompt_token_ids) == text
        assert handle.text == one.text
        assert (one.points, one.rows, one.hidden) == (2, len(handle.prompt_token_ids), 576)
        assert one.bytes == 2 * one.rows * 576 * 4
    kept = lost_and_cut(*(Path(one.file) for one in found[:3]))
    again = await capture_to(smol, prompts, GREEDY, spec, tmp_path, terminal)  # a lost file, and one that was cut
    assert [(one.file, one.prompt, one.text) for one in again] == [(one.file, one.prompt, one.text) for one in found]
    assert len([*Manifest.load(tmp_path).handles()]) == len(PRAISE)
    assert os.stat(found[2].file).st_mtime_ns == kept  # noqa: PTH116
    _, known = await smol.generate(PRAISE[0], GREEDY, capture=spec)
    await known.fetch()
    rows = CaptureHandle.load(found[0].file).captures[20]
    # Batched otherwise, so not bit for bit: float32 rounding over 20 layers.
    torch.testing.assert_close(rows, known.captures[20], rtol=1e-3, atol=1e-3 * float(rows.norm(dim=-1).max()))
    known.release()


async def test_projections_are_captured_and_shown_token_by_token(smol, terminal, tmp_path) -> None:
    """Two numbers a token in the file, and a heat map of each prompt with its words."""
    directions = DirectionSet({name: LayerVectors({20: vector(576, seed=at)}) for at, name in enumerate("ab")})
    found = await capture_to(
        smol, [Prompt(text) for text in PRAISE], GREEDY, CaptureSpec(project=directions), tmp_path, terminal
    )
    assert {one.hidden for one in found} == {2}
    shown = heatmaps_of(found, directions, 20, smol.tokenizer)
    assert [one.title for one in shown] == PRAISE
    assert "".join(shown[0].tokens).startswith(PRAISE[0])
    assert shown[0].values.shape == (found[0].rows, 2)


async def test_a_failure_of_one_prompt_is_the_error(smol, terminal, tmp_path) -> None:
    """A selection that does not fit one of the prompts ends the command; nothing stays behind in the workers."""
    spec = CaptureSpec(layers=3, tokens=5)
    with pytest.raises(InvalidSelection, match="position 5 is outside"):
        await capture_to(
            smol,
            [Prompt("One two three four five six seven"), Prompt("One")],
            {"max_tokens": 1},
            spec,
            tmp_path,
            terminal,
        )
    assert (await smol.stats()).handles_held == 0


async def test_extracting_from_files_is_extracting_from_texts(smol, terminal, tmp_path) -> None:
    """The same direction as `extract` finds in the lists, with the file's name for a name."""
    positive, negative = tmp_path / "praise.txt", tmp_path / "complaint.txt"
    positive.write_text("\n".join(PRAISE))
    negative.write_text("\n".join(COMPLAINT))
    how = {"layers": [10, 20], "held_out": 0.25, "seed": 3}
    found = await extract_from(smol, texts_between(positive, negative), terminal, name="praise", **how)
    known = await extract(smol, PRAISE, COMPLAINT, name="praise", **how)
    assert found.provenance.prompts == known.provenance.prompts
    assert min(found["praise"].cosine(known["praise"]).values()) > 0.9999  # float32, batched otherwise
    negative.write_text(json.dumps({"text": "a", "group": "g"}))
    with pytest.raises(InvalidFile, match="has groups"):
        texts_between(positive, negative.rename(tmp_path / "c.jsonl"))


async def test_layers_are_tried_by_the_replies_of_their_edits(smol) -> None:
    """Replies are those of `generate` with the edit; effects are read from all rows of the reply, without steering."""
    found, asked = await extract(smol, PRAISE, COMPLAINT, name="praise", layers=[10, 18]), "My day at work was"
    tried = await try_layers(smol, found, [asked], layers=[10, 18], max_tokens=8)
    vector = found["praise"][tried.read_at].double()
    places = []
    for one in tried.replies:
        edit = None
        if one.layer is not None:
            edit = Add(found["praise"][one.layer], one.scale, layer=one.layer, tokens="generated")
        own = (await smol.run(asked, {"max_tokens": 8, "temperature": 0}, steering=edit)).output
        assert own.outputs[0].text == one.text
        ids = [*own.prompt_token_ids, *own.outputs[0].token_ids]
        handle = await smol.read(ids, capture_layers=[tried.read_at])
        assert "not fetched, resid_post: " in repr(handle)
        async with handle:
            rows = handle.captures[tried.read_at][len(own.prompt_token_ids) :].double()
            assert f"{handle.captures.as_kept(tried.read_at).nbytes:,} bytes" in repr(handle)
        assert "released" in repr(handle)
        places.append(float(rows.mean(0) @ vector / vector.square().sum()))
    assert [one.effect for one in tried.replies] == pytest.approx([at - places[0] for at in places], abs=1e-3)
    assert "open: 30 layers × 576, float32; taps at " in repr(smol)


async def test_a_sweep_is_run_shown_and_drawn(smol, terminal, tmp_path) -> None:
    """Effects beside their controls as tables, as JSON and as a picture; a second call asks nothing again."""
    file = LayerVectors({15: vector(576, seed=1) * 40}, name="push").save(tmp_path / "push.safetensors")
    settings = SweepFile(
        vectors=str(file),
        layers=(15,),
        scales=(1.0,),
        prompts=("My day at work was", "The film was"),
        random=2,
        max_tokens=5,
    )
    sweep, out = sweep_of(settings), tmp_path / "out"
    results = await swept(smol, sweep, ["length"], out, terminal)
    (effect,) = document_of(results, out)["effects"]["length"]
    assert (effect["vector"], effect["layers"], len(effect["random"])) == ("push", (15,), 2)
    assert table_of(results, "length").row_count == 1
    (picture,) = drawn(results, out)
    assert picture.read_bytes().startswith(b"\x89PNG")
    before = (await smol.stats()).steps
    again = await swept(smol, sweep, ["length"], out, terminal)
    assert (await smol.stats()).steps == before
    assert [record.text for record in again.records] == [record.text for record in results.records]
    with pytest.raises(InvalidSpec, match="no vectors for layers"):
        sweep_of(SweepFile(vectors=str(file), layers=(16,), scales=(1.0,), prompts=("a",)))
