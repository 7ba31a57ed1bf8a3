"""What commands see to before an engine is started, and that results are not lost where they cannot be written."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import itertools
import json
import os
import pty
import re
import shlex
import shutil
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import typer
from cli_calls import call, captured, directions, shell, vectors
from rich.console import Console
from rich.progress import Progress as Bars

from steercap import Add, CaptureSpec, Progress, SteeringSpec
from steercap.captures.handle import CaptureHandle
from steercap.captures.manifest import Manifest
from steercap.cli.app import app
from steercap.cli.captured import Store, arguments_of_call
from steercap.cli.engines import ModelOptions, ReachOptions
from steercap.cli.generate import PrintedAnswer, answer, report
from steercap.cli.persona import folded, sweeps_of
from steercap.cli.prompts import Prompt
from steercap.cli.sweep_file import measure_of, measures_in, read_settings
from steercap.cli.tables import facts, titled
from steercap.cli.terminal import Output, Terminal
from steercap.cli.vectors import report as extracted
from steercap.cli.vectors import sweep_around
from steercap.concurrency import heartbeat as heartbeats
from steercap.concurrency.heartbeat import heartbeat, line_of, progress_line
from steercap.engine.checkpoint import is_path, look_up, require_reachable, require_there
from steercap.errors import InvalidFile, ModelNotLoaded, WorkerFailure
from steercap.files.base import write_whole
from steercap.lab.personas import PersonaResult, PersonaSettings, shipped_traits
from steercap.lab.personas.folder import open_folder
from steercap.lab.personas.report import Outcome
from steercap.lab.studies.sweeps.grid import SweepDefinition
from steercap.lab.studies.trying import Tried, TriedLayers
from steercap.saes import SAE
from steercap.steering import DirectionSet
from steercap.testing.saes import RandomSAE

__all__ = ["directions"]  # a fixture

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 8}
CONFIG["max_position_embeddings"] = 64


@pytest.fixture
def here(tmp_path, directions, monkeypatch) -> Path:  # noqa: ARG001 -- makes a file
    """A folder with vectors, texts, and a model that has no weights: an engine for it could not be started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERMINAL_WIDTH", "300")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("one text\nanother text\n")
    (tmp_path / "single.txt").write_text("one text\n")
    vectors(layers=[2, 9]).save(tmp_path / "deep.safetensors")
    vectors(width=16).save(tmp_path / "wide.safetensors")
    captured(tmp_path / "rows" / "0000.safetensors")
    shutil.copytree(Path(__file__).parent.parent / "stored" / "roles", tmp_path / "roles")
    (tmp_path / "roles" / "axis-contrast.safetensors").write_text("kept")
    (tmp_path / "taken.safetensors").write_text("kept")
    torch.save(torch.ones(4, 8), tmp_path / "layers.pt")
    torch.save({"vectors": {"axis": {"vector": torch.ones(8), "layer": 2}}, "experiments": []}, tmp_path / "capping.pt")
    torch.save({"pos_3": torch.ones(4, 8)}, tmp_path / "levels.pt")
    (tmp_path / "methods.yaml").write_text("methods: {x: {file: deep.safetensors, first_row: 1}}\nquestions: [Who?]\n")
    (tmp_path / "examples.jsonl").write_text('{"prompt": "Hi", "response": "Ho"}\n')
    (tmp_path / "empty.yaml").touch()
    (tmp_path / "based.yaml").write_text("first_row: 1")
    (tmp_path / "far.yaml").write_text("first_row: 2")
    (tmp_path / "spoken.yaml").write_text("tokens: nowhere")
    (tmp_path / "hot.yaml").write_text("temperature: .inf")
    (tmp_path / "scored.yaml").write_text("measures: [formal]")
    (tmp_path / "drawn").mkdir()
    (tmp_path / "drawn" / "demo.png").write_text("kept")
    (tmp_path / "taken.jsonl").write_text("kept")
    return tmp_path


SERVE = "serve model --port 0 --vectors"
COMPARE = "compare model model --layer 2 --vectors"
PROBE = "collect a.txt -m model --out x --above 0 --probe"
SWEEP = "sweep --scales 1 --prompts a.txt --out s -m model --vectors"


@pytest.mark.parametrize(
    ("line", "code", "word"),
    [
        ("generate hi -m /no/such", 1, "there is no model at /no/such"),
        ("generate hi -m rows", 1, "has no config.json"),
        ("capture hi --out x -m ./nothing", 1, "there is no model at"),
        ("vectors extract a.txt b.txt --out x.safetensors -m some/other/model", 1, "there is no model at"),
        ("persona run poetic --out x -m ~/nothing", 1, "there is no model at"),
        ("sweep --out x -m /no/such", 1, "there is no model at /no/such"),
        ("generate hi -m model --out x.txt", 2, "ends in .jsonl"),
        ("generate hi -m model --out a.txt/x.jsonl", 2, "a.txt cannot be written to"),
        ("generate hi -m model --out /proc/nothing/x.jsonl", 2, "cannot be written to"),
        ("generate hi -m model --out taken.jsonl", 2, "there already; give another name, or --force"),
        ("generate hi -m model --temperature nan", 2, "greater than or equal to 0"),
        ("generate hi -m model --max-tokens 9999999999999999999", 2, "give a whole number from 1 to 2"),
        ("generate hi -m model --seed 99999999999999999999", 2, "64 bits"),
        ("generate hi -m model --seed 9223372036854775807 --samples 2 --temperature 1", 2, "to 9223372036854775806"),
        ("generate hi -m model --seed -2 --samples 2 --temperature 1", 2, "sample 1 would have the seed -1"),
        (
            "generate hi -m model --steer deep.safetensors --steer-layers 9",
            1,
            "layer 9 is outside this model of 4 layers",
        ),
        (
            "generate hi -m model --steer wide.safetensors --steer-layers 1",
            1,
            "width 16, the rows at resid_post[1] are 8 of ",
        ),
        ("generate hi -m model --steer deep.safetensors --steer-layers 2 --engine-arg layers=[1]", 1, "has no tap"),
        ("capture hi -m model --out x --layers 4", 1, "layer 4 is outside this model of 4 layers"),
        ("capture hi -m model --out x --sites nowhere", 1, "nowhere"),
        ("capture hi -m model --out x --tokens 1:2:0", 1, "step"),
        ("capture hi -m model --out x --at resid_post[1],z[4]", 1, "layer 4 is outside this model of 4 layers"),
        ("capture hi -m model --out x --at z[1] --layers 1", 1, "at= already names the points"),
        ("capture hi --url http://127.0.0.1:9 --out x --sae rows", 2, "--url: a server has its own SAEs"),
        ("capture hi -m model --out x --sae rows", 1, "rows"),
        (
            "capture hi -m model --out x --reduce mean --before-edits --allow-nonfinite --layers 4",
            1,
            "layer 4 is outside",
        ),
        ("persona roles -m model --out a.txt --no-read-system", 2, "is a file"),
        ("capture hi -m model --out a.txt", 2, "is a file"),
        ("capture hi -m model --out rows", 2, "already; give another name, or --force"),
        ("capture hi -m model --out x --project wide.safetensors", 1, "width 16"),
        ("capture hi -m model --out x --project traits.safetensors --heat-layer 7", 2, "layer 7 is not captured"),
        ("vectors extract a.txt b.txt -m model --out x.gguf", 2, "ends in .safetensors; steercap vectors convert"),
        ("vectors extract a.txt b.txt -m model --out wide.safetensors", 2, "there already"),
        ("vectors extract a.txt b.txt -m model --out x.safetensors --layers 7", 1, "outside this model of 4 layers"),
        ("vectors extract a.txt b.txt -m model --out x.safetensors --method guess", 1, "unknown method 'guess'"),
        ("vectors extract a.txt b.txt -m model --out x.safetensors --try x --try-scale nan", 2, "a multiplier above 0"),
        ("vectors extract a.txt b.txt -m model --out x.safetensors --try=", 2, "prompts that are not empty"),
        ("vectors extract single.txt b.txt -m model --out x.safetensors", 1, "to hold some out, at least 2"),
        ("vectors convert traits.safetensors --out wide.safetensors", 2, "there already"),
        ("persona run poetic -m model --out a.txt", 2, "is a file"),
        ("persona run poetic -m model --out x --layers 9", 1, "outside this model of 4 layers"),
        ("persona run poetical -m model --out x", 1, "unknown traits"),
        ("persona run mine.yaml -m model --out x", 1, "mine.yaml cannot be read: there is no such file"),
        ("persona run poetic -m model --out x --temperature inf", 2, "finite number"),
        ("persona answers rows rows --kind role -m model --out x", 1, "rows holds no answers"),
        ("persona cap roles -m model --out x.safetensors --layers 9", 1, "layer 9 is outside this model of 4 layers"),
        ("persona cap roles -m model --out taken.safetensors --layers 9", 1, "layer 9 is outside"),
        ("persona answers rows rows --kind rolle -m model --out x", 2, "'rolle' is not one of"),
        ("persona answers rows rows --kind role -m model --out x --dtype half --dtypes half", 2, "not both"),
        (f"{SWEEP} wide.safetensors --layers 1", 1, "width 16"),
        (f"{SWEEP} deep.safetensors --layers 9", 1, "outside this model"),
        (
            f"{SWEEP} deep.safetensors --layers 2 --measures score:mine.yaml",
            1,
            "mine.yaml cannot be read: there is no such file",
        ),
        (f"{SWEEP} deep.safetensors --layers 2 --measures length,length", 1, "two measures have the label"),
        (f"{SWEEP} deep.safetensors --layers 2 --temperature inf", 2, "finite number"),
        (f"{SERVE} nowhere=", 2, "give NAME=..."),
        (f"{SERVE} some=nowhere.safetensors", 1, "vectors some=nowhere.safetensors: No such file"),
        (f"{SERVE} some=a.txt", 1, "vectors some=a.txt: the file cannot be used"),
        (f"{SERVE} some=wide.safetensors", 1, "--vectors some: the vectors have width 16"),
        (f"{SERVE} a/b=deep.safetensors", 1, "give letters, digits, dots, dashes"),
        (f"{SERVE} some=deep.safetensors --preset posh=none", 1, "no vector or steering is called 'none'"),
        (f"{SERVE} some=deep.safetensors --preset a/b=some", 1, "preset 'a/b': give letters"),
        (f"{SERVE} some=deep.safetensors --preset posh=some", 1, "layer 9 is outside this model of 4 layers"),
        (f"{SERVE} some=traits.safetensors --preset posh=some", 1, "give one of them, such as 'some/kind'"),
        (f"{SERVE} some=traits.safetensors --preset posh=some/other", 1, "'some' has no direction 'other'"),
        (f"{SERVE} some=traits.safetensors --preset posh=some/kind --sites attn_out", 1, "has no tap"),
        (f"{SERVE} some=traits.safetensors --sae own=rows", 1, "rows"),
        ("explore model --vectors some=nowhere.safetensors", 1, "vectors some=nowhere.safetensors: No such file"),
        ("explore model --vectors some=wide.safetensors", 1, "--vectors some: the vectors have width 16"),
        ("demo --out a.txt", 2, "is a file"),
        ("demo --out drawn", 2, "drawn/demo.png is there already; give another name, or --force"),
        ("vectors extract a.txt b.txt -m model --out x.safetensors --try-scale 3", 2, "--try-scale: there is no --try"),
        ("vectors compare traits.safetensors deep.safetensors --dtype float16", 2, "--dtype: there is no --model"),
        ("vectors convert traits.safetensors --out x.gguf --name kind --bound low", 2, "--bound: traits.safetensors"),
        ("vectors convert layers.pt --first-row 0 --out x.gguf --bound low", 2, "--bound: layers.pt holds no capping"),
        (
            "vectors convert deep.safetensors --out x.pt --first-row 0 --model-hint llama",
            2,
            "--model-hint: x.pt is no GGUF",
        ),
        (
            "vectors convert deep.safetensors --out x.gguf --first-row 1",
            2,
            "--first-row: deep.safetensors says itself which",
        ),
        ("vectors show deep.safetensors --first-row 1", 2, "--first-row: deep.safetensors says itself which"),
        ("vectors show capping.pt --first-row 1", 2, "--first-row: capping.pt says itself which"),
        (
            "generate hi -m model --steer deep.safetensors --steer-layers 2 --first-row 1",
            2,
            "--first-row: deep.safetensors says",
        ),
        (f"{SWEEP} deep.safetensors --layers 2 --first-row 0", 2, "--first-row: deep.safetensors says itself which"),
        (f"{SWEEP} deep.safetensors --layers 2 based.yaml", 2, "for first_row: deep.safetensors says itself which"),
        (f"{SWEEP} deep.safetensors --layers 2 far.yaml", 1, "Invalid enum value 2"),
        (f"{SWEEP} deep.safetensors --layers 2 spoken.yaml", 2, "for tokens: 'nowhere'"),
        (f"{SWEEP} deep.safetensors --layers 2 spoken.yaml --tokens no", 2, "for --tokens: 'no'"),
        (f"{SWEEP} deep.safetensors --layers 2 hot.yaml", 2, "for temperature: inf; give a finite number"),
        (
            f"{SWEEP} deep.safetensors --layers 2 scored.yaml",
            1,
            "unknown measure 'formal'; did you mean 'score:formal'",
        ),
        (f"{SWEEP} wide.safetensors --layers 2 empty.yaml", 1, "the vectors have width 16"),
        (
            "evaluate methods.yaml -m model --out x",
            2,
            "for first_row of method 'x': deep.safetensors says itself which",
        ),
        (
            "compare model model --vectors deep.safetensors --layer 2 --first-row 0",
            2,
            "--first-row: deep.safetensors says",
        ),
        (
            f"{COMPARE} deep.safetensors --vectors layers.pt --first-row 0 --components nothing.pt",
            1,
            "nothing.pt cannot be",
        ),
        (
            f"{COMPARE} levels.pt --raw --vectors layers.pt --first-row 0 --components nothing.pt",
            1,
            "nothing.pt cannot be",
        ),
        (
            "compare model model --vectors levels.pt --layer 2 --first-row 0",
            2,
            "--first-row: levels.pt says itself which",
        ),
        (f"{COMPARE} deep.safetensors --level pos_3", 2, "--level: no group is of persona files NAME.pt; leave it out"),
        (f"{COMPARE} deep.safetensors --raw", 2, "--raw: no group is of persona files NAME.pt; leave it out"),
        ("collect a.txt -m model --out x --temperature 0", 2, "--temperature: nothing is generated without --max-tok"),
        ("collect a.txt -m model --out x --seed 1", 2, "--seed: nothing is generated without --max-tokens"),
        ("collect a.txt -m model --out x --sample-seed 1", 2, "--sample-seed: there is no --one-in"),
        ("train examples.jsonl -m model --out x --layers 9", 1, "layer 9 is outside this model of 4 layers"),
        ("train examples.jsonl -m /no/such --out x --layers 9", 1, "there is no model at /no/such"),
        ("collect a.txt -m model --out x --context 65", 1, "context=65, and this engine has room for prompts of 63"),
        ("collect a.txt -m model --out x --context 64", 1, "context=64, and this engine has room for prompts of 63"),
        ("collect a.txt -m model --out x --context 60 --max-tokens 5", 1, "room for prompts of 59 tokens; give less"),
        ("collect a.txt -m model --out x --context 32 --max-model-len 32", 1, "room for prompts of 31 tokens"),
        ("collect a.txt -m model --out x --context 0", 1, "context=0; give a whole number, 1 or more"),
        ("collect a.txt -m model --out x --long splt", 1, "long='splt'; give 'split' or 'cut' or 'refuse'"),
        ("collect a.txt -m model --out x --bos windw", 1, "bos='windw'; give 'document' or 'window' or 'none'"),
        ("collect a.txt -m model --out x --long split --max-tokens 5", 1, "long='split' with sampling_params="),
        ("collect a.txt -m model --out x --attention 2 --statistics-every 1", 1, "positions, which have no mean"),
        (f"{PROBE} deep.safetensors --layers 1 --probe-layer 2", 1, "resid_post[2], which is not collected"),
        (f"{PROBE} wide.safetensors --layers 1 --probe-layer 1", 1, "--probe: the vectors have width 16"),
        ("collect a.txt -m model --out x --ray 1 --api-key k", 2, "--api-key: actors start engines of their own"),
        ("serve model --folder-gib 1", 2, "--folder-gib: there is no folder to limit; give --folder"),
        ("up model --folder-gib-of-a-key 1", 2, "--folder-gib-of-a-key: there is no folder to limit; give --folder"),
        ("serve model --sites attn_out --engine-arg sites=mlp_out", 2, "--sites: --engine-arg gives sites too"),
        (f"{SERVE} some=deep.safetensors --vectors some=wide.safetensors", 2, "the name 'some' is given twice"),
        ("generate hi -m model --api-key k", 2, "--api-key: no engine is warm that would take it"),
        (
            "generate hi -m model --dtype float32 --engine-arg dtype=float16",
            2,
            "--engine-arg: an option gives dtype too",
        ),
        ("generate hi -m model --max-model-len 9 --engine-arg max-model-len=8", 2, "an option gives max_model_len too"),
        ("generate hi -m model --engine-arg seed=1 --engine-arg seed=2", 2, "--engine-arg: seed is given twice"),
        ("persona run poetic -m model --out x --scorer-arg a=1 --scorer-arg a=2", 2, "--scorer-arg: a is given twice"),
        (
            "persona answers rows rows --kind role -m model --out x --engine-arg dtype=half --dtypes half",
            2,
            "--dtypes: give --dtype, as such or by --engine-arg, or --dtypes, not both",
        ),
        ("persona answers rows rows --kind role --out x --engine-arg preset=cpu --dtypes half", 1, "rows"),
        ("persona answers rows rows --kind role -m model --out x --api-key k --dtypes half", 2, "engines of its own"),
        ("persona cap roles -m model --out x.safetensors --layers 1", 1, "the axis of roles: the vectors have width"),
        ("persona axis roles", 2, "for --force: roles has *-contrast.* in it already; give --force to write over it"),
        ("demo --out a.txt/folder", 2, "cannot be written to"),
    ],
)
def test_what_cannot_be_done_is_said_before_an_engine_starts(here, line, code, word) -> None:
    """Of a model without weights any start would fail otherwise; nothing is written, and what is there stays."""
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    done = call(*shlex.split(line))
    assert done.exit_code == code, done.output
    assert word in " ".join(done.stderr.replace("│", " ").split()), done.stderr
    assert done.stdout == ""
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before
    assert not (here / "x").exists()


@pytest.mark.parametrize(
    ("more", "context"),
    [
        ({}, 64),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 64),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 0),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}, 0),
    ],
)
def test_a_scaled_context_is_not_known_before_a_start(more, context, tmp_path) -> None:
    """vLLM multiplies some by the factor, and not others, so nothing that has one is refused before it."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **more}))
    assert look_up(str(tmp_path)).context == context
    assert ReachOptions(str(tmp_path), max_model_len=32).room() == 32
    assert ReachOptions(str(tmp_path), engine_arg=["runner=pooling"]).room() == 0
    assert ReachOptions("smollm2", url="http://127.0.0.1:9").room() == 0


def test_a_missing_model_is_said_before_anything_heavy_is_imported() -> None:
    """Neither torch nor vLLM is needed to see that a folder is not there."""
    code = (
        "import sys; from steercap.cli.app import app\n"
        "try: app(['generate', 'hi', '-m', '/no/such'])\n"
        "except SystemExit as end: print(end.code, sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1 []"
    assert "Repo id" not in done.stderr


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("Qwen/Qwen3-8B", False),
        ("gpt2", False),
        ("a/b:Q4_K", False),
        ("a/b/c.gguf", False),
        ("s3://bucket/models/x", False),
        ("/models/x", True),
        ("./x", True),
        ("../x", True),
        ("~/x", True),
        (".", True),
        ("models/x/", True),
        ("a/b/c", True),
    ],
)
def test_a_name_that_no_hub_knows_is_a_path(name, path, tmp_path, monkeypatch) -> None:
    """And must be there; what may be a name on the hub is left to vLLM."""
    monkeypatch.chdir(tmp_path)
    assert is_path(name) == path
    if path:
        with pytest.raises(ModelNotLoaded, match=r"no model at|has no config\.json"):
            require_there(name)
    else:
        require_there(name)


async def test_a_missing_path_is_said_in_python_too() -> None:
    """Before vLLM is imported, and not as a malformed name on a hub."""
    from steercap import SteerModel

    with pytest.raises(ModelNotLoaded, match="there is no model at /no/such"):
        await SteerModel("/no/such").start()


def test_a_folder_that_holds_another_run_is_refused_first(here) -> None:
    """Of a sweep and of personas: what differs is known from the folder, whatever the model."""
    other = SweepDefinition(
        model={"model": "m"},
        vectors={"deep": "0"},
        layers=[[2]],
        scales=[3.0],
        operations=["add"],
        tokens="'generated'",
        relative=False,
        random=20,
        negated=True,
        seed=0,
        prompts=["one text"],
        sampling={},
        samples=1,
    )
    (here / "s").mkdir()
    (here / "s" / "sweep.json").write_bytes(msgspec.json.encode(other))
    done = call(*shlex.split(f"{SWEEP} deep.safetensors --layers 2"))
    assert (done.exit_code, "RunDiffers" in done.stderr) == (1, True), done.output
    open_folder(here / "p", {"model": "m"}, PersonaSettings.small("poetic", seed=5))
    done = call("persona", "run", "poetic", "--small", "-m", "model", "--out", "p")
    assert (done.exit_code, "RunDiffers" in done.stderr, "seed was 5, is 0" in done.stderr) == (1, True, True), (
        done.output
    )


# Where results go


def at_a_terminal(*arguments: str, says: str) -> tuple[int, str]:
    """Call the command at a terminal, and answer what it asks."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "steercap", *arguments], stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True
    ) as process:
        os.close(theirs)
        os.write(ours, says.encode())
        said = b""
        try:
            while part := os.read(ours, 4096):
                said += part
        except OSError:  # the other end is closed
            pass
        process.wait(timeout=60)
    os.close(ours)
    return process.returncode, said.decode()


@pytest.mark.parametrize(("says", "code"), [("n\n", 1), ("y\n", 0)])
def test_at_a_terminal_it_is_asked_whether_a_file_may_go(here, says, code) -> None:
    """And done as is answered."""
    before = (here / "wide.safetensors").read_bytes()
    found, said = at_a_terminal("vectors", "convert", "traits.safetensors", "--out", "wide.safetensors", says=says)
    assert "is there already. Write over it?" in said
    assert found == code, said
    assert ((here / "wide.safetensors").read_bytes() == before) == bool(code)


@pytest.mark.parametrize(("seed", "compare", "drawn"), [(None, True, True), (7, True, False), (None, False, False)])
async def test_what_is_compared_is_sampled_with_one_seed(seed, compare, drawn) -> None:
    """Which is drawn where none is given; two draws would differ without any steering."""
    seeds: list[int | None] = []

    class Sampler:
        async def run(self, _prompt: Any, params: dict[str, Any], **_how: Any) -> Any:
            seeds.append(params["seed"])
            return SimpleNamespace(samples=[SimpleNamespace(token_ids=[1])], texts=["a"], steering=None)

    model: Any = Sampler()
    asked, params = [Prompt("hi", special=True)], {"n": 1, "temperature": 1.0, "seed": seed}
    steering = SteeringSpec([Add(torch.ones(8), layer=0)])
    await answer(model, asked, params, Terminal(Output()), steering=steering, compare=compare)
    assert len(seeds) == 1 + compare
    assert len(set(seeds)) == 1
    assert (seeds[0] != seed) == drawn


@pytest.mark.usefixtures("here")
def test_force_writes_over_a_file() -> None:
    """Without a question."""
    assert call("vectors", "convert", "traits.safetensors", "--out", "wide.safetensors", "--force").exit_code == 0
    assert list(DirectionSet.load("wide.safetensors")) == ["kind", "formal"]


@pytest.mark.parametrize("how", [False, True])
@pytest.mark.usefixtures("here")
def test_answers_that_cannot_be_written_are_printed(how, capfd) -> None:
    """All of what was to be in the file, a line an answer, or the document with --json; and the error is raised."""
    found = [PrintedAnswer("hi", 0, clean="there\n  you are"), PrintedAnswer("hi", 1, clean="again")]
    with pytest.raises(OSError, match=r"a\.txt"):
        report("m", found, Path("a.txt/folder/out.jsonl"), Terminal(Output(json=how)))
    out = capfd.readouterr().out
    told = json.loads(out)["answers"] if how else [json.loads(line) for line in out.splitlines()]
    assert [msgspec.convert(one, PrintedAnswer) for one in told] == found


@pytest.mark.parametrize("how", [False, True])
async def test_vectors_that_cannot_be_written_are_elsewhere_or_printed(here, how, monkeypatch, capfd) -> None:
    """Beneath the temporary folder, which is named; where that fails too, every number is on stdout."""
    known, terminal = DirectionSet.load("traits.safetensors").select("kind"), Terminal(Output(json=how))
    spare = here / "spare"
    spare.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(spare))
    with pytest.raises(OSError, match=r"a\.txt"):
        await extracted(known, "kind", Path("a.txt/x.safetensors"), terminal)
    (rescued,) = spare.rglob("*.safetensors")
    assert DirectionSet.load(rescued) == known
    assert str(rescued) in capfd.readouterr().err.replace("\n", "")
    with monkeypatch.context() as patch:  # pytest needs the folder when the test ends
        patch.setattr("tempfile.tempdir", str(here / "a.txt"))
        with pytest.raises(OSError, match=r"a\.txt"):
            await extracted(known, "kind", Path("a.txt/x.safetensors"), terminal)
    out = capfd.readouterr().out
    numbers = json.loads(out)["vectors"] if how else json.loads(out.splitlines()[-1])["kind"]
    assert torch.tensor(numbers["2"]).equal(known["kind"][2])
    await extracted(known, "kind", here / "fine.safetensors", terminal)
    assert DirectionSet.load(here / "fine.safetensors") == known


def test_captures_of_other_rows_are_another_run(tmp_path) -> None:
    """Points, edits and SAEs are compared with a folder's; a run of before these options has none of their names."""
    sae = SAE.load(RandomSAE("topk", 8, 16, k=4).write(tmp_path))

    def asked(**arguments: Any) -> dict[str, Any]:
        return arguments_of_call([Prompt("a")], {}, CaptureSpec(**arguments))

    found = [asked(), asked(at="z[1]"), asked(at="z[2]"), asked(before_edits=True), asked(sae=sae)]
    assert [sum(one == other for other in found) for one in found] == [1] * 5
    assert set(found[0]) == {"prompts", "sampling", "layers", "sites", "tokens", "reduce"}
    assert asked(allow_nonfinite=True) == found[0]
    assert [*map(json.loads, map(json.dumps, found))]


def test_captures_go_on_elsewhere_when_their_folder_cannot_be_written_to(here, monkeypatch, capfd) -> None:
    """The rows that are there, and those to come, are kept; the error is told at the end."""
    spare = here / "spare"
    spare.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(spare))
    handle = CaptureHandle.load(here / "rows" / "0000.safetensors")
    store = Store(here / "a.txt" / "rows", Terminal(Output()))
    with store.opened(model="tiny"):
        found = [store.save(handle, f"{number:04}.safetensors") for number in range(2)]
    assert isinstance(store.error, OSError)
    (folder,) = {folder for folder, *_ in found}
    assert spare in folder.parents
    assert [handle.text for handle in Manifest.load(folder).handles()] == ["there"] * 2
    assert "the captures so far are in" in capfd.readouterr().err


def test_a_full_disk_is_an_oserror_in_every_format(tmp_path) -> None:
    """safetensors and torch have errors of their own for it, which would pass as faults of ours; nothing is left."""
    code = """
import resource, sys, torch
from steercap.steering.formats import save_control_vector, save_layers_pt
from steercap.steering import LayerVectors
found = LayerVectors({1: torch.randn(9000), 0: torch.randn(9000)}, model="m")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for save in (lambda: found.save("a.safetensors"), lambda: save_layers_pt(found, "a.pt", first_row=0),
             lambda: save_control_vector(LayerVectors({1: found[1]}, model="m"), "a.gguf")):
    try:
        save()
    except OSError as error:
        print("OSError")
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
    )
    assert done.stdout.split() == ["OSError"] * 3, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path) -> None:
    """What was there stays until the new one is complete."""
    path = tmp_path / "x.txt"
    path.write_text("old")

    def half() -> None:
        with write_whole(path) as scratch:
            scratch.write_text("half")
            raise ModelNotLoaded("ours")

    with pytest.raises(ModelNotLoaded, match="ours"):
        half()
    assert (path.read_text(), len(list(tmp_path.iterdir()))) == ("old", 1)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"HF_ENDPOINT": "{dead}"}, "and {dead} cannot be reached"),
        ({"HF_ENDPOINT": "{dead}", "http_proxy": "{live}", "no_proxy": "127.0.0.1"}, "and {dead} cannot be reached"),
        ({"https_proxy": "{dead}"}, "and the proxy before https://huggingface.co, {dead_at}, cannot be reached"),
        ({"all_proxy": "{dead}"}, "and the proxy before https://huggingface.co, {dead_at}, cannot be reached"),
        (
            {"HF_HUB_OFFLINE": "1"},
            "neither a folder nor in {cache}, and HF_HUB_OFFLINE=1 forbids to fetch it; unset it",
        ),
        ({"HF_ENDPOINT": "{live}"}, ""),
        ({"https_proxy": "{live}"}, ""),
        ({"HF_ENDPOINT": "{dead}", "http_proxy": "nonsense"}, ""),
        ({"HF_ENDPOINT": "{dead}", "VLLM_USE_MODELSCOPE": "true"}, ""),
        ({"HF_ENDPOINT": "{dead}", "name": "here/cached"}, ""),
        ({"HF_HUB_OFFLINE": "1", "name": "here/cached"}, ""),
        ({"HF_HUB_OFFLINE": "1", "name": "here/in_parts"}, ""),
        ({"HF_HUB_OFFLINE": "1", "name": "nobody/nothing:Q4_K_M"}, ""),
    ],
)
def test_a_model_that_cannot_be_had_is_an_error_at_once(settings, says, tmp_path, monkeypatch) -> None:
    """The hub's library tries six times, for 23 s, and vLLM imports for longer; where one may answer, they are let."""
    from huggingface_hub import constants

    (tmp_path / "models--here--cached" / "snapshots" / "1").mkdir(parents=True)
    (tmp_path / "models--here--cached" / "snapshots" / "1" / "config.json").write_text("{}")
    (tmp_path / "models--here--cached" / "refs").mkdir()
    (tmp_path / "models--here--cached" / "refs" / "main").write_text("1")
    (tmp_path / "models--here--in_parts").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        dead = server.getsockname()[1]  # nobody listens there once it is closed
    with socket.create_server(("127.0.0.1", 0)) as server:
        told = {"dead": f"http://127.0.0.1:{dead}", "dead_at": f"127.0.0.1:{dead}", "cache": str(tmp_path)}
        told["live"] = f"http://127.0.0.1:{server.getsockname()[1]}"
        given = {"HF_ENDPOINT": "https://huggingface.co", **settings}
        given = {name: value.format_map(told) for name, value in given.items()}
        name = given.pop("name", "nobody/nothing")
        for variable in [*os.environ]:
            if "proxy" in variable.lower():
                monkeypatch.delenv(variable)
        for variable, value in given.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setattr(constants, "ENDPOINT", given["HF_ENDPOINT"])  # read when the library was imported
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", "HF_HUB_OFFLINE" in given)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        if not says:
            require_reachable(name)
            return
        with pytest.raises(
            ModelNotLoaded, match=r"^'nobody/nothing' is not on .*hf download nobody/nothing$"
        ) as raised:
            require_reachable(name)
    assert says.format_map(told) in str(raised.value)


def test_a_model_that_cannot_be_had_is_one_line_in_a_shell() -> None:
    """Nothing of vLLM's log is there, which was not asked."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = shell("generate", "hi", "-m", "nobody/nothing", env=environment)
    assert done.returncode == 1
    assert "ModelNotLoaded: 'nobody/nothing' is not on this machine" in done.stderr
    slow = "loading nobody/nothing: "  # on a slow machine
    assert len([line for line in done.stderr.splitlines() if not line.startswith(slow)]) == 1


# Traits of one's own, and what comes after a run


def own_trait(path: Path, name: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.yaml.encode(msgspec.structs.replace(shipped_traits()["poetic"], name=name)))
    return path


def test_a_trait_of_ones_own_is_a_measure(tmp_path, monkeypatch) -> None:
    """A file in the place of its name, with a scorer or without, in flags and in the YAML file of a sweep."""
    own = own_trait(tmp_path / "o:n" / "mine.yaml", "mine")
    assert measure_of(f"score:{own}").trait.name == "mine"
    scored = measure_of(f"score:{own}:keywords")
    assert (scored.label, type(scored.scorer).__name__) == ("mine", "Keywords")
    with pytest.raises(InvalidFile, match=r"other\.yaml cannot be read: there is no such file"):
        measure_of("score:other.yaml")
    comma = own_trait(tmp_path / "a, length" / "b,c.yml", "comma")
    assert measures_in(f"length, score:{comma},score:{own}:keywords ,score:evil,repetition,wit") == (
        "length",
        f"score:{comma}",
        f"score:{own}:keywords",
        "score:evil",
        "repetition",
        "wit",
    )
    assert measures_in("score:evil,wit") == ("score:evil", "wit")
    with pytest.raises(typer.BadParameter, match="holds no name; give names separated by commas"):
        measures_in(" ")
    config = own.parent / "sweep.yaml"
    config.write_text(
        "vectors: v\nlayers: [1]\nscales: [1]\nprompts: [a]\nmeasures: [length, 'score:mine.yaml:keywords', 'score:evil']"
    )
    monkeypatch.chdir("/")
    found = read_settings(config, {}).measures
    assert found == ("length", f"score:{own}:keywords", "score:evil")
    assert measure_of(found[1]).label == "mine"


def test_a_run_of_personas_ends_with_the_sweep_to_go_on_with(here, tmp_path) -> None:
    """A command that parses, whose files are there and whose measure is the trait's, own or shipped."""
    own = own_trait(tmp_path / "my -x trait.yaml", "mine")
    settings = PersonaSettings.small(
        msgspec.yaml.decode(own.read_bytes(), type=type(shipped_traits()["poetic"])), "formal"
    )
    outcome = Outcome((6, 6), (0, 0), (6, 6), (80.0, 20.0), best_layer=2, auc=1.0)
    run = here / "run"
    run.mkdir()
    directions = DirectionSet({"mine": vectors(0), "formal": vectors(1)})
    directions.save(run / "directions.safetensors")
    left_out = Outcome((6, 6), (6, 6), (0, 0), (0.0, 0.0), left_out="too few")
    result = PersonaResult(directions, {"mine": outcome, "formal": left_out}, run, run / "report.md")
    options = ModelOptions(model="model", eager=True, engine_arg=["seed=3"])
    (line,) = sweeps_of(result, settings, {"mine": str(own), "formal": "formal"}, options)
    (served,) = sweeps_of(result, settings, {"mine": str(own), "formal": "formal"}, ReachOptions(url="http://host:1"))
    assert shlex.split(served)[-2:] == ["--url", "http://host:1"]
    words = shlex.split(line)
    pasted = folded(line)
    assert len(pasted.splitlines()) > 3
    assert subprocess.check_output(["bash", "-c", f"steercap() {{ printf '%s\\n' \"$@\"; }}; {pasted}"], text=True) == (
        "".join(f"{word}\n" for word in words[1:])
    )
    assert words[:2] == ["steercap", "sweep"]
    command: Any = typer.main.get_command(app).get_command(None, "sweep")  # type: ignore[attr-defined,arg-type]
    said = command.make_context("sweep", words[2:]).params
    assert (said["layers"], said["names"], said["chat"], said["eager"], said["model"]) == (
        "2",
        "mine",
        True,
        True,
        "model",
    )
    assert measure_of(said["measures"].split(",")[1]).label == "mine"
    prompts = [json.loads(text)["prompt"] for text in said["prompts"].read_text().splitlines()]
    assert prompts == list(shipped_traits()["poetic"].questions)


# What a folder is, and tables at 80 columns


def test_a_table_shows_its_columns_at_80_columns(tmp_path, monkeypatch) -> None:
    """Names and types in full, values cut; on a terminal of 80 columns and in a pipe."""
    from steercap.files.tables import write_table
    from steercap.lab.studies.sweeps.summaries import Record

    one = Record(
        number=0,
        vector="v",
        operation="add",
        layers=(18,),
        scale=1.0,
        control="",
        prompt_index=0,
        sample=0,
        prompt="a prompt " * 20,
        prompt_token_ids=tuple(range(50)),
        text="an answer " * 20,
        output_token_ids=tuple(range(50)),
        finish_reason="length",
    )
    file = write_table(tmp_path / "x.parquet", [one] * 3)
    monkeypatch.setenv("COLUMNS", "80")
    done = shell("inspect", file, env={**os.environ, "COLUMNS": "80"})
    assert max(map(len, done.stdout.splitlines())) <= 80
    for name in Record.__struct_fields__:
        assert f" {name} " in done.stdout
    assert "list<int64>" in done.stdout


def test_inspect_says_what_a_folder_is(here) -> None:
    """Runs of personas, sweeps, captures, models and other files; one with nothing known is an error."""
    open_folder(here / "p", {"model": "m"}, PersonaSettings.small("poetic", "evil"))
    definition = SweepDefinition(
        model={"model": "m"},
        vectors={"praise": "0"},
        layers=[[2]],
        scales=[1.0, 2.0],
        operations=["add"],
        tokens="'generated'",
        relative=False,
        random=3,
        negated=True,
        seed=0,
        prompts=["a", "b"],
        sampling={},
        samples=2,
    )
    (here / "s").mkdir()
    (here / "s" / "sweep.json").write_bytes(msgspec.json.encode(definition))
    (here / "mixed").mkdir()
    vectors().save(here / "mixed" / "v.safetensors")
    torch.save(torch.ones(2, 2), here / "mixed" / "v.pt")
    found = {
        name: json.loads(call("inspect", here / name, "--json").stdout) for name in ("p", "s", "rows", "model", "mixed")
    }
    assert (found["p"]["kind"], found["p"]["traits"]) == ("run of personas", "poetic, evil")
    assert (found["s"]["kind"], found["s"]["answers"], found["s"]["asked"]) == ("sweep", 0, (1 + 2 * 5) * 2 * 2)
    assert (found["rows"]["kind"], found["rows"]["texts"]) == ("captures", {"0000.safetensors": "there"})
    assert (found["model"]["kind"], found["model"]["layers"], found["model"]["width"]) == ("model", 4, 8)
    assert found["mixed"]["files"] == {"v.safetensors": "vectors", "v.pt": ".pt of torch"}
    for name in found:
        assert call("inspect", here / name).exit_code == 0
    (here / "empty").mkdir()
    done = call("inspect", here / "empty")
    assert (done.exit_code, "no file in it that steercap knows" in done.stderr) == (1, True)
    for name in ("p/settings.json", "s/sweep.json"):
        (here / name).write_text("{}")
        assert "InvalidFile" in call("inspect", (here / name).parent).stderr


# Off a terminal, and the help


def test_off_a_terminal_what_is_under_way_is_said_now_and_then() -> None:
    """A line with the seconds and how far it is; none of what is over, and none on a terminal."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=False, width=80)
    with Bars(console=console, disable=True) as bar, heartbeat(bar, console, seconds=0.01):
        bar.add_task("reading", total=4, completed=1)
        for _ in itertools.takewhile(lambda _: "reading" not in written.getvalue(), itertools.count()):
            pass
    assert "s, 1 of 4" in written.getvalue()
    bar.update(bar.tasks[0].id, completed=4)
    assert line_of(bar.tasks) == ""
    bar.add_task("training", total=None)
    assert line_of(bar.tasks) == "training: 0 s"
    bar.update(bar.tasks[1].id, completed=1200)
    assert line_of(bar.tasks) == "training: 0 s, 1,200 so far"
    loud = Console(file=io.StringIO(), force_terminal=True, force_interactive=True)
    with Bars(console=loud, disable=True) as bar, heartbeat(bar, loud, seconds=0.01):
        bar.add_task("reading", total=4)
    assert loud.file.getvalue() == ""  # type: ignore[attr-defined]


def test_each_stage_is_a_bar_with_its_details(monkeypatch) -> None:
    """Until a call reports its first stage, it is preparing."""
    monkeypatch.setenv("TERM", "xterm")  # with "dumb" no bar is drawn before the end
    terminal, written = Terminal(Output()), io.StringIO()
    monkeypatch.setattr(terminal, "err", Console(file=written, force_terminal=True, force_interactive=True, width=200))
    with terminal.progress() as tell:
        tell(Progress("reading", 1, 4, {"loss": 0.5}))
        tell(Progress("judging", 2, None))
    _, before, shown = written.getvalue().rpartition("preparing")
    assert before
    assert re.search("reading, loss 0.5 .*1/4.*\n.*judging .*2/[?]", shown)


def test_no_bar_is_drawn_on_a_terminal_that_cannot_move_its_cursor(monkeypatch, capsys) -> None:
    """As Emacs's shell and many a CI's: no bar, and no empty line in place of one."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("FORCE_COLOR", "1")
    terminal = Terminal(Output())
    with terminal.status("reading"), terminal.progress() as tell:
        tell(Progress("counting", 1, 4))
    terminal.say("done")
    assert capsys.readouterr().err == "done\n"


def test_a_trial_ends_with_the_sweep_to_go_on_with(here) -> None:
    """The command that is printed runs as it is: layers around the best, and the prompts in their order."""
    prompts = ('It\'s "odd"', "a \\n $(b)")
    replies = [Tried(place, None, 0.0, "", 0.0, 2.0) for place in (0, 1)]
    replies += [Tried(place, at, by, "", at * by, 2.0) for place in (0, 1) for at in (1, 2) for by in (3.0, -3.0)]
    tried = TriedLayers("formal", prompts, 3.0, 2, tuple(replies))
    command = sweep_around(tried, [1, 2, 9], Path("deep.safetensors"), ["-m", "model"])
    assert command is not None
    (here / "steercap").write_text('#!/bin/sh\ncat > said\nprintf "%s\\n" "$@" >> said\n')
    (here / "steercap").chmod(0o755)
    subprocess.run(["/bin/sh", "-c", command], check=True, env={"PATH": f"{here}:/usr/bin:/bin"})
    *asked, words = [*(here / "said").read_text().split("\n", 2)]
    assert asked == [*prompts]
    line = words.split()
    assert line[:7] == ["sweep", "--vectors", "deep.safetensors", "--layers", "1,2", "--scales", "1.5,3"]
    assert line[-4:] == ["--out", "deep-sweep", "-m", "model"]
    assert "perplexity,score:formal" in line
    assert sweep_around(dataclasses.replace(tried, prompts=("a\nb",)), [2], Path("x.safetensors"), []) is None
    assert sweep_around(dataclasses.replace(tried, replies=()), [2], Path("x.safetensors"), []) is None


def test_brackets_and_colons_in_names_and_paths_are_shown(monkeypatch, capsys) -> None:
    """They are no styles, no end of one, and no pictures: in lines, and in every part of a table."""
    monkeypatch.setenv("COLUMNS", "80")
    table = titled("perplexity [log]", ("vector", "calm [pos]"), words=("vector",), caption="of [all]")
    table.add_row("calm [neg]", "1")
    Terminal(Output()).show({}, facts("out/[v1]", {"[a]": "x"}), table, "out/[/v1]/:100:.parquet")
    said = capsys.readouterr().out
    for word in (
        "out/[v1]",
        "[a]",
        "perplexity [log]",
        "calm [pos]",
        "of [all]",
        "calm [neg]",
        "out/[/v1]/:100:.parquet",
    ):
        assert word in said, word


class Told(io.StringIO):
    """A stderr that is a terminal, a notebook's or neither."""

    terminal = True

    def isatty(self) -> bool:
        return self.terminal


class NotebooksOwn(Told):
    terminal = False


NotebooksOwn.__module__ = "ipykernel.iostream"


@pytest.mark.parametrize("kind", [Told, NotebooksOwn])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_start_says_how_far_it_is(kind, fails, monkeypatch) -> None:
    """One line, rewritten, that ends with the seconds of each stage, or with the one that failed."""
    monkeypatch.setattr(sys, "stderr", written := kind())
    monkeypatch.setattr(heartbeats, "LOOK_SECONDS", 0.001)
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    stage = ""
    with pytest.raises(OSError, match="lost") if fails else contextlib.nullcontext():
        async with progress_line("m", lambda: stage):
            for stage in ("importing", "loading"):
                while f"m: {stage}" not in written.getvalue():
                    await asyncio.sleep(0)
                await asyncio.sleep(0.02)  # some more looks
            if fails:
                raise OSError("lost")
    *before, last = written.getvalue().rstrip("\n").split("\r")
    assert all(re.fullmatch(r"(m: (importing|loading), \d+ s)? *", line) for line in before)
    assert len(set(before)) == len(before), "a line is written again, though nothing of it has changed"
    said = re.sub(r"\d+ s", "N s", last.rstrip())  # a slow machine takes some
    assert said == f"m {'did not start' if fails else 'is ready'} after N s: importing N s, loading N s"


@pytest.mark.parametrize(
    "quiet", [{"STEERCAP_PROGRESS": "0"}, {"VLLM_LOGGING_LEVEL": "INFO"}, {"VLLM_LOGGING_LEVEL": "debug"}, {}]
)
async def test_a_start_says_nothing_where_nobody_reads_it(quiet, monkeypatch) -> None:
    """Asked to be quiet, beside a log that says it, and where stderr is a file; nor of a model that is open already."""
    monkeypatch.setattr(sys, "stderr", written := Told())
    monkeypatch.setattr(heartbeats, "LOOK_SECONDS", 0.001)
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    for name, value in quiet.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(written, "terminal", bool(quiet))
    async with progress_line("m", lambda: "importing"):
        await asyncio.sleep(0.01)
    monkeypatch.setattr(written, "terminal", True)
    async with progress_line("m", lambda: ""):
        await asyncio.sleep(0.01)
    assert written.getvalue() == ""


@pytest.mark.parametrize("command", [[], ["generate"], ["vectors"], ["persona", "run"]], ids=" ".join)
def test_help_is_short_and_shows_no_type_of_a_flag(command, monkeypatch) -> None:
    """-h is --help, and a flag takes nothing."""
    monkeypatch.setenv("TERMINAL_WIDTH", "100")
    short, long = call(*command, "-h"), call(*command, "--help")
    assert short.exit_code == 0
    assert short.stdout == long.stdout
    assert "bool" not in short.stdout


@pytest.mark.parametrize("how", [[], ["--json"]])
@pytest.mark.parametrize("writable", [True, False])
def test_a_trial_that_fails_leaves_the_direction(here, how, writable, monkeypatch) -> None:
    """It is in its file before a layer is tried, or in another; the report names it, and the trial's error is told."""
    known, there = DirectionSet.load("traits.safetensors").select("kind"), here / "kept" / "x.safetensors"

    @asynccontextmanager
    async def reached(*_arguments: Any, **_options: Any):
        yield None

    async def extract_from(*_arguments: Any, **_options: Any) -> DirectionSet:
        if not writable:
            there.parent.write_text("a file")
        return known

    async def try_layers(*_arguments: Any, **_options: Any) -> None:
        assert there.exists() == writable
        raise WorkerFailure("out of luck")

    monkeypatch.setattr("steercap.cli.vectors.reached", reached)
    monkeypatch.setattr("steercap.cli.vectors.extract_from", extract_from)
    monkeypatch.setattr("steercap.lab.studies.trying.try_layers", try_layers)
    monkeypatch.setattr("tempfile.tempdir", str(here))
    line = "vectors extract a.txt b.txt -m model --name kind --try hi --out"
    result = call(*line.split(), there, *how)
    file = there if writable else next(here.glob("steercap-*/x.safetensors"))
    assert (result.exit_code, DirectionSet.load(file)) == (1, known)
    assert str(file) in "".join(result.stdout.split())
    assert "WorkerFailure: out of luck" in result.stderr
    assert writable or f"{there} cannot be written; it is {file}" in result.stderr.replace("\n", "")
