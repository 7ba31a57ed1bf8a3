"""Warm engines: how they are announced, found, told apart, kept from others and ended, with real processes and sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from cli_calls import call

import steercap
from steercap import SteerModel
from steercap.cli import preflight, up
from steercap.cli.doctor import answers
from steercap.cli.engines import ModelOptions, ReachOptions, unopened
from steercap.cli.explore import HOST, _forward
from steercap.cli.terminal import Output, Terminal
from steercap.config import Settings
from steercap.core.display import duration
from steercap.errors import InvalidFile, InvalidRequest, InvalidSetting, ServerFailure
from steercap.files import fingerprint, warm
from steercap.files.fingerprint import digest_of, files_of, surroundings
from steercap.files.warm import WarmEngine
from steercap.requests.serving import Serving
from steercap.server import server
from steercap.server.metrics import IDLE, IDLE_END, LOOKING, IdleClock
from steercap.server.server import ServerSettings

PYTHON = sys.executable
#: Stands for Python in `steercap up`: announces itself as `serve --warm` does, and answers as a server does. What it
#: is called with goes to a file, one line a start.
SERVER = """#!{python}
import http.server, json, os, signal, socketserver, sys, time
sys.path.insert(0, "{home}")
from dataclasses import asdict
from pathlib import Path
from steercap.config import Settings
from steercap.config.environment import KEYS
from steercap.files import warm
from steercap.files.fingerprint import digest_of, files_of, surroundings

words = sys.argv[sys.argv.index("serve") + 1:]
keys = [word for key in os.environ.pop(KEYS).split() for word in ("--api-key", key)]
with open("{calls}", "a") as calls:
    calls.write(" ".join(words) + "\\n")
if Path("{fails}").exists():
    sys.exit("ModelNotLoaded: the weights are no weights")
model = words[0]
path = warm.socket_of(model)
asked = [*keys, *(word for word in words[1:] if word not in ("--warm", "--no-record", "--"))]
engine = warm.WarmEngine(
    model=model, path=warm.identified(model), pid=os.getpid(), socket=str(path), code=warm.code(), named=not os.path.exists(model), asked=digest_of(asked), surroundings=surroundings(),
    settings=asdict(Settings()), arguments={{"dtype": "float32"}}, weights=files_of(model), keyed="--api-key" in asked,
)
points = [{{"layer": 0, "site": "resid_post", "shape": [8], "dtype": "float32"}}]
said = {{
    "/v1/models": {{"data": [{{"id": model, "max_model_len": 64}}]}},
    "/v1/steercap/model": {{"model": model, "revision": "", "dtype": "float32", "identity": {{}}, "num_layers": 1, "hidden_size": 8,
        "points": points, "engine": {{}}}},
    "/v1/steercap/idle": {{"idle_seconds": 3.0, "limit": 1800.0, "running": 0, "served": 7}},
    "/health": {{}},
    "/tokenize": {{"tokens": [1, 2]}},
    "/v1/completions": {{"id": "c", "object": "text_completion", "created": 0, "model": model, "choices": [
        {{"index": 0, "text": " warm", "token_ids": [5, 6], "prompt_token_ids": [1, 2], "finish_reason": "stop"}}]}},
}}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        body = json.dumps(said.get(self.path, {{}})).encode()
        self.send_response(200 if self.path in said else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_):
        pass

    def address_string(self):
        return ""


class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


def stop(*_):
    sys.exit(0)


signal.signal(signal.SIGTERM, stop)
with warm.announced(engine):
    print("Starting to load model", flush=True)
    while Path("{waits}").exists():
        time.sleep(0.02)
    with Server(str(path), Handler) as server:
        server.serve_forever(poll_interval=0.02)
"""


@pytest.fixture
def folder(monkeypatch):
    """A folder for sockets of this test alone, with a short path; all that is warm in it is ended after the test."""
    with tempfile.TemporaryDirectory(prefix="up") as path:
        monkeypatch.setenv("XDG_RUNTIME_DIR", path)
        monkeypatch.setattr(warm, "PAUSE", 0.02)
        yield Path(path) / "steercap"
        monkeypatch.setenv("XDG_RUNTIME_DIR", path)
        for engine in warm.engines() if (Path(path) / "steercap").is_dir() else ():
            os.kill(engine.pid, signal.SIGKILL)


@pytest.fixture
def model(folder, tmp_path) -> str:  # noqa: ARG001 -- it is where sockets are
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    return str(made)


class Python:
    """The executable that `steercap up` starts in this test in place of Python."""

    def __init__(self, path: Path) -> None:
        self.path, self.calls, self.fails, self.waits = (path / name for name in ("python", "calls", "fails", "waits"))
        self.write()

    def write(self) -> None:
        names = {name: getattr(self, name) for name in ("calls", "fails", "waits")}
        names["home"] = Path(steercap.__file__).parent.parent
        self.path.write_text(SERVER.format(python=PYTHON, **names))
        self.path.chmod(0o755)

    @property
    def starts(self) -> list[str]:
        return self.calls.read_text().splitlines()


@pytest.fixture
def python(tmp_path, monkeypatch) -> Python:
    found = Python(tmp_path)
    monkeypatch.setattr("steercap.cli.up.sys.executable", str(found.path))
    return found


def engine_of(model: str, **more) -> WarmEngine:
    path = warm.identified(model)
    known = {"pid": os.getpid(), "code": warm.code(), "settings": json.loads(json.dumps(vars_of(Settings())))}
    known |= {"named": path == model, "weights": files_of(path), "surroundings": surroundings()}
    return WarmEngine(model=model, path=path, socket=str(warm.socket_of(path)), **{**known, **more})


def vars_of(settings: Settings) -> dict:
    return {name: value for name, value in vars(settings).items() if not name.startswith("_")}


SETTINGS = json.loads(json.dumps(vars_of(Settings())))


def held(model: str, rest: str) -> subprocess.Popen:
    """A process that announces an engine, says so, and then does the rest."""
    text = (
        "import os, sys, time\nfrom steercap.files import warm\n"
        f"engine = warm.WarmEngine(model={model!r}, path={model!r}, pid=os.getpid(), code=warm.code(),"
        f" socket=str(warm.socket_of({model!r})))\n"
        f"with warm.announced(engine):\n    open(engine.socket, 'w').close()\n    {rest}\n"
        "    print('there', flush=True)\n    time.sleep(600)\n"
    )
    found = subprocess.Popen([PYTHON, "-c", text], stdout=subprocess.PIPE, text=True)
    assert found.stdout is not None
    assert found.stdout.readline() == "there\n"
    return found


@pytest.mark.parametrize("rest", ["pass", "os.fork() or time.sleep(600)"], ids=["alone", "with a fork"])
@pytest.mark.usefixtures("folder")
def test_a_killed_server_leaves_nothing_that_counts(rest) -> None:
    """Not even where a process that it forked lives on, as an engine's may."""
    process = held("org/name", rest)
    children = psutil.Process(process.pid).children()
    try:
        (engine,) = warm.engines()
        assert (engine.model, engine.pid) == ("org/name", process.pid)
        assert warm.engine_at(Path(engine.socket)) == engine
        process.kill()
        process.wait()
        assert Path(engine.socket).exists()
        assert warm.engines() == []
        assert not Path(engine.socket).exists()
        assert not Path(engine.socket).with_suffix(".json").exists()
        with warm.announced(engine):
            assert warm.engines() == [engine]
        assert warm.engines() == []
        assert all(child.is_running() for child in children)
    finally:
        for child in children:
            child.kill()
        process.communicate()


def test_one_server_of_a_model(folder, monkeypatch) -> None:
    monkeypatch.setattr(warm, "LOCK_SECONDS", 0.1)
    engine = engine_of("org/name")
    with warm.announced(engine), warm.announced(engine_of("org/other")):
        with pytest.raises(InvalidRequest, match=r"org/name is up already"), warm.announced(engine):
            pass
        assert [one.model for one in warm.engines()] == ["org/name", "org/other"]
        assert Path(engine.socket).with_suffix(".json").stat().st_mode & 0o777 == 0o600
        Path(engine.socket).with_suffix(".json").write_text("{")
        with pytest.raises(InvalidFile, match=r"name-\w+\.json"):
            warm.engines()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_made_or_enter_is_refused(folder, tmp_path, monkeypatch) -> None:
    folder.mkdir()
    folder.chmod(0o750)
    with pytest.raises(InvalidSetting, match=r"mode 0700; this is a folder of user \d+ with mode 0750"):
        warm.runtime_folder()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidSetting, match="no folder"):
        warm.runtime_folder()
    folder.unlink()
    folder.mkdir(mode=0o700)
    me = os.geteuid()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / f"steercap-{me + 1}").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)  # XDG_RUNTIME_DIR is then of another user, as after su
    with pytest.raises(InvalidSetting, match=f"folder of user {me + 1} with mode 0700; this is a folder of user {me}"):
        warm.runtime_folder()
    monkeypatch.setattr(os, "geteuid", lambda: me)
    for given in ("", str(tmp_path / "missing")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", given)
        assert warm.runtime_folder() == tmp_path / "tmp" / f"steercap-{me}"


def test_the_path_of_a_socket_fits(folder, tmp_path, monkeypatch) -> None:
    names = ["a" * 300, "ä ö/ü:x" * 9, "org/name", "other/name", "smollm2", "."]
    found = [warm.socket_of(name) for name in names]
    assert len(set(found)) == len(names)
    assert all(path.parent == folder for path in found)
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with pytest.raises(
        InvalidSetting, match=r"at most 107; set XDG_RUNTIME_DIR, or TMPDIR, to a folder with a shorter"
    ):
        warm.socket_of("org/name")


@pytest.mark.usefixtures("folder")
async def test_connect_finds_the_only_engine(tmp_path) -> None:
    with pytest.raises(InvalidRequest, match=r"no warm engine; start one with `steercap up MODEL`"):
        SteerModel.connect()
    with warm.announced(engine_of("org/name")):
        assert SteerModel.connect().url == SteerModel.connect(model="org/name+calm").url == engine_of("org/name").url
        with pytest.raises(InvalidRequest, match="did you mean 'org/name'"):
            SteerModel.connect(model="org/nam")
        with warm.announced(engine_of("org/other")):
            with pytest.raises(InvalidRequest, match=r"2 warm engines: org/name at unix:.*, org/other at unix:"):
                SteerModel.connect()
            assert SteerModel.connect(model="org/other").url == engine_of("org/other").url
    with (
        warm.announced(engine_of("org/name", code="0.0.1 in /there")),
        pytest.raises(InvalidRequest, match=r"runs steercap 0.0.1 in /there, and this process .*; renew it with"),
    ):
        SteerModel.connect()
    with pytest.raises(ServerFailure, match="cannot be reached: No such file"):
        await SteerModel.connect(f"unix:{tmp_path}/none").start()
    (tmp_path / "socket").touch()
    with pytest.raises(ServerFailure, match="ConnectError"):
        await SteerModel.connect(f"{tmp_path}/socket").start()


def test_a_path_means_its_own_folder_alone(folder, tmp_path, monkeypatch) -> None:  # noqa: ARG001 -- where sockets are
    for name in ("a/ckpt", "b/ckpt", "a/ckpt+b", "c"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a")
    engine = engine_of("./ckpt")
    with warm.announced(engine), warm.announced(engine_of("org/name")):
        assert SteerModel.connect(model="./ckpt").url == SteerModel.connect(model="ckpt").url == engine.url
        steered = SteerModel.connect(model=f"{engine.path}+calm")
        assert (steered.url, steered.connection._name) == (engine.url, "./ckpt+calm")
        for where, model in (("b", "./ckpt"), ("c", "./ckpt"), ("c", "ckpt"), ("a", "ckpt+b"), ("b", "../a/ckpt+b")):
            monkeypatch.chdir(tmp_path / where)
            with pytest.raises(InvalidRequest, match="no warm engine of"):
                SteerModel.connect(model=model)
            assert "no warm engine of" in call("down", model).stderr
        assert "no warm engine of" in call("down", f"{engine.path}+none").stderr
        assert len(warm.engines()) == 2


def test_what_up_was_given_is_compared_by_content(tmp_path, monkeypatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "sae").mkdir(parents=True)
        (tmp_path / name / "v.st").write_bytes(b"one")
        (tmp_path / name / "sae" / "cfg.json").write_bytes(b"one")
    seen = set()
    words = ["--vectors", "v=v.st", "--sae", "s=sae", "--folder", "rows"]
    monkeypatch.chdir(tmp_path / "b")
    seen.add(digest_of(words))
    monkeypatch.chdir(tmp_path / "a")
    seen.add(digest_of(words))
    (tmp_path / "a" / "rows").mkdir()
    (tmp_path / "a" / "rows" / "1").touch()
    assert digest_of(words) in seen
    stamp = Path("v.st").stat()
    Path("v.st").write_bytes(b"two")
    os.utime("v.st", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    seen.add(digest_of(words))
    Path("sae/cfg.json").write_bytes(b"two")
    seen.add(digest_of(words))
    monkeypatch.setenv("STEERCAP_CODEC", "full8")
    seen.add(digest_of(words))
    assert len(seen) == 5


async def test_down_ends_no_other_process(model, monkeypatch) -> None:
    """Neither one that came in the engine's place, nor is one that is gone an error."""
    killed: list[tuple[int, int]] = []
    engine = engine_of(model, pid=2**22 + 1)
    monkeypatch.setattr(os, "kill", lambda *words: killed.append(words))
    with warm.announced(engine_of(model)):
        await up._end(engine)
    assert killed == []
    there = [engine, engine, None]
    monkeypatch.setattr(warm, "engine_at", lambda _path: there.pop(0))

    def gone(*words) -> None:
        killed.append(words)
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", gone)
    await up._end(engine)
    assert killed == [(engine.pid, signal.SIGTERM)]


async def test_a_socket_of_another_user_is_not_asked(tmp_path, monkeypatch) -> None:
    (tmp_path / "socket").touch()
    monkeypatch.setattr(os, "geteuid", lambda me=os.geteuid(): me + 1)
    with pytest.raises(ServerFailure, match=r"belongs to user \d+, and this process to user \d+"):
        await SteerModel.connect(f"unix:{tmp_path}/socket").start()


@pytest.mark.parametrize(
    ("options", "settings", "there", "differs"),
    [
        ({}, {}, {}, ""),
        ({"dtype": "float32"}, {}, {"arguments": {"dtype": "float32", "max_model_len": 64}}, ""),
        (
            {"dtype": "bfloat16"},
            {},
            {"arguments": {"dtype": "float32"}},
            "dtype: 'float32' there, 'bfloat16' asked for",
        ),
        ({"max_model_len": 99}, {}, {}, "max_model_len: the default there, 99 asked for"),
        ({"eager": False}, {}, {"defaults": {"enforce_eager": False}}, ""),
        (
            {"engine_arg": ["enable_prefix_caching=false"]},
            {},
            {"defaults": {"enable_prefix_caching": None}},
            "enable_prefix_caching: the default there, False asked for",
        ),
        ({"engine_arg": ["disable_cascade_attn=false"]}, {}, {"defaults": {"disable_cascade_attn": True}}, "disable_"),
        ({"engine_arg": ["seed=0"]}, {}, {"arguments": {"seed": 3}, "defaults": {"seed": 0}}, "seed: 3 there, 0 asked"),
        ({"engine_arg": ["seed=0"]}, {}, {"defaults": {"seed": 0}}, ""),
        ({}, {}, {"arguments": {"seed": 0}, "defaults": {"seed": 0}}, ""),
        ({}, {}, {"arguments": {"seed": 0}, "defaults": {"seed": 1}}, "seed: 0 there, not asked for"),
        ({"engine_arg": ["quantization=null"]}, {}, {"arguments": {"quantization": "fp8"}}, "quantization: 'fp8'"),
        ({}, {}, {"arguments": {"quantization": "fp8"}}, "quantization: 'fp8' there, not asked for"),
        ({"engine_arg": ["load_format=dummy"]}, {}, {"arguments": {"load_format": "dummy"}}, ""),
        ({"restart": True}, {}, {}, "restart: False there, True asked for"),
        ({}, {"sites": ("z", "attn_out")}, {}, "it has no site attn_out, z; start it by `steercap up` with --sites"),
        ({}, {"capture_bytes": 5}, {}, "capture_bytes: 4294967296 there, 5 asked for"),
        ({"engine_arg": ["codec=full8"]}, {}, {}, "codec: 'raw' there, 'full8' asked for"),
        ({"engine_arg": ["layers=[1]"]}, {}, {}, ""),
        ({"engine_arg": ["layers=[3,5]"]}, {}, {"settings": {**SETTINGS, "layers": [3, 5]}}, ""),
        ({"engine_arg": ["layers=[3]"]}, {}, {"settings": {**SETTINGS, "layers": [3, 5]}}, "layers: [3, 5] there, [3]"),
        ({}, {}, {"settings": vars_of(Settings(codec="full8"))}, "codec: 'full8' there, 'raw' asked for"),
        ({}, {}, {"keyed": True}, "it wants an API key; give --api-key"),
        ({"api_key": "mine"}, {}, {"keyed": True}, ""),
        ({}, {}, {"code": "0.0.1 in /there"}, "it runs steercap 0.0.1 in /there, and this process"),
        ({}, {}, {"surroundings": {"vLLM": "0.1"}}, "there, "),
        ({}, {}, {"flags": ["chat_template"]}, "it was started with --chat-template, which commands do not expect"),
        ({}, {}, {"weights": "another"}, "have changed since its start"),
    ],
)
def test_an_engine_that_differs_is_not_taken(model, options, settings, there, differs) -> None:
    found = preflight._mismatch(engine_of(model, **there), ReachOptions(model, **options), settings)
    assert differs in found
    assert bool(differs) == bool(found)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_files_edited_in_place_are_noticed(model, name) -> None:
    """In the middle of a file, with its size and its ends as they were."""
    (Path(model) / name).write_bytes(bytes(1 << 18))
    engine = engine_of(model)
    assert preflight._mismatch(engine, ReachOptions(model), {}) == ""
    with (Path(model) / name).open("r+b") as file:
        file.seek(1 << 17)
        file.write(b"other")
    found = preflight._mismatch(engine, ReachOptions(model), {})
    assert "have changed since its start" in found


def test_up_and_connect_refuse_an_engine_of_changed_files(model, python) -> None:
    assert call("up", model).exit_code == 0
    assert SteerModel.connect().url == engine_of(model).url
    (Path(model) / "tokenizer.json").write_text("{}")
    found = call("up", model)
    assert found.exit_code == 1
    assert "have changed since its start; end it with `steercap down" in " ".join(found.stderr.split())
    assert len(python.starts) == 1
    with pytest.raises(InvalidRequest, match=r"have changed since its start; renew it with .*, or give its url, unix:"):
        SteerModel.connect(model=model)


async def test_files_that_change_while_they_are_loaded(model, monkeypatch) -> None:
    """Nobody knows which of them the server would serve."""

    async def started(opened: SteerModel) -> SteerModel:
        (Path(model) / "config.json").write_text("{ }")
        return opened

    monkeypatch.setattr(Serving, "start", started)
    with pytest.raises(InvalidFile, match="its files changed while they were loaded; start the server again"):
        await server.serve(model, [], ServerSettings(warm="digest"))
    assert warm.engines() == []


@pytest.mark.usefixtures("folder")
def test_another_commit_of_a_name_on_the_hub_is_noticed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cache = tmp_path / "models--org--name"
    (cache / "refs").mkdir(parents=True)
    assert files_of("org/name") == ""
    for commit in ("first", "second"):
        (cache / "snapshots" / commit).mkdir(parents=True)
        (cache / "snapshots" / commit / "config.json").write_text("{}")
        os.utime(cache / "snapshots" / commit / "config.json", ns=(1, 1))
    (cache / "refs" / "main").write_text("first")
    engine = engine_of("org/name", arguments={"revision": "main"})
    options = ReachOptions("org/name", engine_arg=["revision=main"])
    assert preflight._mismatch(engine, options, {}) == ""
    assert files_of("org/name", "first") == engine.weights
    (cache / "refs" / "main").write_text("second")
    assert "org/name have changed since its start" in preflight._mismatch(engine, options, {})
    assert files_of("org/name", "first") == engine.weights


def test_variables_of_vllm_are_compared(model, monkeypatch) -> None:
    """Those that change answers, by commands and by `up`; keys and logs are neither recorded nor compared."""
    engine = engine_of(model)
    for name in ("VLLM_API_KEY", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS", "VLLM_CACHE_ROOT", "VLLM_PORT"):
        monkeypatch.setenv(name, "secret")
        assert name not in surroundings()
    assert preflight._mismatch(engine, ReachOptions(model), {}) == up._unlike(engine, engine.asked) == ""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert preflight._mismatch(engine, ReachOptions(model), {}) == "VLLM_BATCH_INVARIANT: none there, 1 here"
    assert "VLLM_BATCH_INVARIANT: none there, 1 here" in up._unlike(engine, engine.asked)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    for where, name, value in ((sys, "prefix", "0.1"), (fingerprint, "version", lambda _name: "0.1")):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            assert preflight._mismatch(engine, ReachOptions(model), {}).endswith("there, 0.1 here")


def test_the_environment_counts_as_asked_for(model, monkeypatch) -> None:
    monkeypatch.setenv("STEERCAP_CODEC", "full8")
    found = preflight._mismatch(engine_of(model), ReachOptions(model), {})
    assert found == "codec: 'raw' there, 'full8' asked for"


def test_up_generate_status_and_down(model, python) -> None:
    """From the start to the end, over a real socket; what is asked of the server is asked of it alone."""
    found = call("up", model, "--json")
    assert found.exit_code == 0, found.output
    assert "up after" in found.stderr
    assert "ends after 30 min without a request" in found.stderr
    assert call("up", model).exit_code == 0
    assert len(python.starts) == 1
    assert python.starts == [f"{model} --warm --no-record --idle 30.0"]
    other = call("up", model, "--api-key", "secret")
    assert other.exit_code == 1
    assert "is up with other options" in other.stderr
    assert "secret" not in other.stderr
    assert len(python.starts) == 1

    answer = call("generate", "Hello", "--model", model, "--json", "--max-tokens", "2")
    assert answer.exit_code == 0, answer.output
    assert (
        json.loads(answer.stdout)["answers"][0] | {"prompt": "Hello", "clean": " warm", "tokens": 2}
        == json.loads(answer.stdout)["answers"][0]
    )
    assert "using unix:" in answer.stderr
    there = json.loads(found.stdout)["url"]
    assert call("generate", "Hello", "--url", there, "--max-tokens", "2").exit_code == 0

    (said,) = json.loads(call("status", "--json").stdout)["engines"]
    assert (said["state"], said["dtype"], said["max_model_len"], said["idle_seconds"]) == ("ready", "float32", 64, 3)
    assert (said["sites"], said["url"], said["model"]) == ("resid_post", there, model)
    assert (said["served"], said["running"], said["idle_left_seconds"]) == (7, 0, 1797)
    shown = call("status").stdout
    for words in ("ready", "7 served, idle for 3 s", "after 30 min without a request", "29 min"):
        assert words in shown

    assert call("down", "another").exit_code == 1
    assert json.loads(call("down", "--json").stdout) == {"down": [model]}
    assert warm.engines() == []
    assert json.loads(call("status", "--json").stdout) == {"engines": []}
    assert call("down").exit_code == 0


async def forwarded(engine: WarmEngine, capsys) -> tuple[asyncio.Task[None], int]:
    """The explorer of a warm engine: its task, and the port that it chose and said."""
    task, said = asyncio.create_task(_forward(engine, 0, Terminal(Output()), browser=False)), ""
    while not (found := re.search(rf"http://{HOST}:(\d+)/explorer", said)):
        assert not task.done(), task
        await asyncio.sleep(0)
        said += capsys.readouterr().err
    return task, int(found[1])


@pytest.mark.usefixtures("python")
def test_the_explorer_of_a_warm_engine(model, capsys) -> None:
    """Its page is forwarded; several at once, one that gives up, and one after an engine that is gone."""
    assert call("up", model).exit_code == 0
    (engine,) = warm.engines()

    async def look() -> None:
        task, port = await forwarded(engine, capsys)
        address = f"http://{HOST}:{port}"
        assert await asyncio.to_thread(answers, f"{address}/health")
        _, given_up = await asyncio.open_connection(HOST, port)
        given_up.close()
        await given_up.wait_closed()
        async with SteerModel.connect(address) as one, SteerModel.connect(address) as two:
            assert one.served_name == two.served_name == model
        os.kill(engine.pid, signal.SIGKILL)
        while await asyncio.to_thread(answers, f"{address}/health"):
            pass
        assert not task.done(), task
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(look())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_explorer_of_a_warm_engine_ends_with_success(model, python, number) -> None:
    """One line says where it is; Ctrl-C ends it without a traceback, and the engine stays up, whose key the page asks
    for.
    """
    assert call("up", model, "--api-key", "secret").exit_code == 0
    assert call("up", model, "--api-key", "secret").exit_code == 0
    assert python.starts == [f"{model} --warm --no-record --idle 30.0"], "every user of the machine can read it"
    words = [PYTHON, "-m", "steercap", "explore", model, "--no-browser", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        said = process.stderr.readline()
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    page = json.loads(out)["page"]
    assert (page in said, err) == (True, ""), said
    assert [one.model for one in warm.engines()] == [model]


async def test_the_explorer_asks_for_no_other_user(folder, monkeypatch, capsys) -> None:  # noqa: ARG001 -- where sockets are
    engine, asked = engine_of("org/name"), []

    async def answer(reader, writer) -> None:
        asked.append(await reader.read(1))
        writer.write(b"!")
        writer.close()

    async with await asyncio.start_unix_server(answer, engine.socket):
        task, port = await forwarded(engine, capsys)
        for user, expected in ((os.geteuid(), b"!"), (os.geteuid() + 1, b"")):
            monkeypatch.setattr(os, "geteuid", lambda user=user: user)
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(b"?")
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == expected
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()  # or its socket is collected, with a warning, in a later test
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert asked == [b"?"]


@pytest.mark.usefixtures("python")
def test_an_end_that_is_near_is_said(model, monkeypatch) -> None:
    monkeypatch.setattr(up, "SOON", 2000)
    assert call("up", model).exit_code == 0
    found = call("status")
    assert f"{model} ends in 29 min; any request to it begins its idle time anew" in found.stderr


def test_an_end_that_has_passed_is_said(folder) -> None:
    """By the log of the engine that ended last because nobody asked it; not by that of one that was ended."""
    assert "no engine is warm; start one with `steercap up MODEL`" in call("status").stderr
    folder.mkdir(mode=0o700)
    now = time.time()
    for name, last, ago in (("a", IDLE_END % 1800, 720), ("b", IDLE_END % 60, 7200), ("c", "smollm2 is down", 5)):
        log = folder / f"{name}.log"
        log.write_text(f"starting org/{name}: loading weights\n{last}\n")
        os.utime(log, (now - ago, now - ago))
    words = "no engine is warm; the one of org/a ended 12 min ago, after 30 min without a request; start one with"
    assert words in call("status").stderr
    assert "the one of org/a ended 12 min ago" in call("down").stderr
    log = folder / "a.log"
    os.utime(log, (now - 2 * up.DAY, now - 2 * up.DAY))
    assert "the one of org/b ended 2 h 0 min ago, after 1 min without a request" in call("status").stderr


@pytest.mark.parametrize(("seconds", "words"), [(0, "0 s"), (59.4, "59 s"), (60, "1 min"), (12000, "3 h 20 min")])
def test_durations_in_words(seconds, words) -> None:
    assert duration(seconds) == words


def test_a_failed_start_says_why(model, python) -> None:
    python.fails.touch()
    found = call("up", model)
    assert found.exit_code == 1
    assert "the weights are no weights" in found.stderr
    assert "did not start, exit code 1" in found.stderr


def test_two_at_once_start_one(model, python) -> None:
    python.waits.touch()
    driver = f"import sys; import steercap.cli.up as up; up.sys.executable = {str(python.path)!r}; import steercap.cli.app as a; a.app()"
    processes = [
        subprocess.Popen([PYTHON, "-c", driver, "up", model], stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    while not warm.engines():
        assert all(process.poll() is None for process in processes), [process.communicate() for process in processes]
        time.sleep(0.02)
    (said,) = json.loads(call("status", "--json").stdout)["engines"]
    assert said["state"] == "starting"
    python.waits.unlink()
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert len(python.starts) == 1
    assert sorted("was up already" in error for error in errors) == [False, True]


def test_ctrl_c_ends_what_was_starting(model, python) -> None:
    python.waits.touch()
    driver = (
        f"import steercap.cli.up as up; up.sys.executable = {str(python.path)!r}; import steercap.cli.app as a; a.app()"
    )
    process = subprocess.Popen([PYTHON, "-c", driver, "up", model], stderr=subprocess.PIPE, text=True)
    while not warm.engines():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 130, error
    assert "ending the server that was starting" in error
    assert warm.engines() == []


@pytest.mark.parametrize("option", ["--dtype=float32", "--max-model-len=9", "--engine-arg=seed=3", "--eager"])
def test_options_of_an_engine_beside_an_address(option) -> None:
    found = call("generate", "Hello", "--url", "http://127.0.0.1:1", option)
    assert found.exit_code == 2, found.output
    assert "the server at --url decides this; leave it out" in " ".join(found.stderr.replace("│", " ").split())


@pytest.mark.parametrize("option", ["--overflow=error", "--capture-bytes=5", "--transport=wire", "--spill-folder=/x"])
@pytest.mark.parametrize("words", [["capture", "Hello"], ["collect", "texts.jsonl"]])
def test_memory_for_rows_beside_an_address(words, option, tmp_path) -> None:
    """Which is the server's, and was decided when it started."""
    (tmp_path / "texts.jsonl").write_text('{"text": "Hello"}\n')
    words = [str(tmp_path / word) if word.endswith(".jsonl") else word for word in words]
    found = call(*words, "--out", tmp_path / "out", "--url", "http://127.0.0.1:1", option)
    assert found.exit_code == 2, found.output
    assert "the server at --url decides this; leave it out" in " ".join(found.stderr.replace("│", " ").split())
    assert option.partition("=")[0] in found.stderr


def test_what_is_wrong_is_said_before_anything_starts(model, python, tmp_path) -> None:
    for words in (
        ["up", str(tmp_path / "none")],
        ["up", model, "--vectors", "calm=none.safetensors"],
        ["up", model, "--idle", "-1"],
        ["up", model, "--idle", "nan"],
        ["up", model, "--api-key", "two words"],
        ["up", model, "--engine-arg", "seed"],
        ["up", model, "--sites", "resid_pots"],
        ["down", "--all", model],
    ):
        found = call(*words)
        assert found.exit_code in {1, 2}, (words, found.output)
    assert not python.calls.exists()


async def test_a_server_ends_when_it_is_idle_and_not_while_it_works(monkeypatch) -> None:
    """Looking at it does not count; a request that runs does, however long, and one that fails."""
    ends: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *words: ends.append(words))
    begun, go = asyncio.Event(), asyncio.Event()

    async def app(scope, _receive, _send) -> None:
        if scope["path"] == "/v1/completions":
            begun.set()
            await go.wait()
            raise ConnectionError

    async def ask(path: str, method: str = "POST") -> list[dict]:
        sent: list[dict] = []

        async def send(message: dict) -> None:
            sent.append(message)

        await clock({"type": "http", "method": method, "path": path}, None, send)
        return sent

    clock = IdleClock(app, 0.0)
    working = asyncio.create_task(ask("/v1/completions"))
    await begun.wait()
    ending = asyncio.create_task(clock.end())
    for path in LOOKING:
        await ask(path, "GET")
    assert json.loads((await ask(IDLE, "GET"))[1]["body"]) == {
        "idle_seconds": 0.0,
        "limit": 0.0,
        "running": 1,
        "served": 0,
    }
    ended = asyncio.create_task(IdleClock(app, 0.0).end())
    await ended
    assert ends == [(os.getpid(), signal.SIGTERM)]
    ends.clear()
    with contextlib.suppress(ConnectionError):
        go.set()
        await working
    await ending
    assert ends == [(os.getpid(), signal.SIGTERM)]
    await IdleClock(app, None).end()
    assert len(ends) == 1


def test_a_command_that_needs_its_own_engine_says_so(model, folder, capsys) -> None:
    terminal = Terminal(Output())

    def said(**given) -> str:
        asyncio.run(unopened(ModelOptions(model), terminal, **given))
        return capsys.readouterr().err

    assert said() == ""
    with warm.announced(engine_of(model)):
        assert "starting an engine: this command needs the model in its own process" in said()
        assert "starting an engine: it differs" in said(reason="it differs")
        assert said(reason="") == ""
    folder.chmod(0o755)
    assert said() == ""
    found, reason = preflight.fitting(ReachOptions(model), {})
    assert found is None
    assert "mode 0700" in reason
    folder.chmod(0o700)


def test_looking_makes_no_folder(folder) -> None:
    assert call("status").exit_code == 0
    assert call("down").exit_code == 0
    assert warm.engines() == []
    assert not folder.exists()


async def test_a_server_announces_itself_while_it_lives(model, monkeypatch) -> None:
    """With the settings that commands compare; its socket is the user's alone, and an interrupted start leaves nothing."""
    seen: list[WarmEngine] = []

    async def started(_serving: Serving) -> None:
        (engine,) = warm.engines()
        assert (await asyncio.to_thread(os.stat, engine.socket)).st_mode & 0o777 == 0o600
        assert not warm.listening(Path(engine.socket))

    async def application(*_words, **_named) -> SimpleNamespace:
        return SimpleNamespace(router=SimpleNamespace(middleware_stack=None))

    async def serve(app, _sock, _flags, _up) -> None:
        assert isinstance(app.router.middleware_stack, IdleClock)
        seen.extend(warm.engines())
        raise KeyboardInterrupt

    monkeypatch.setattr(Serving, "start", started)
    monkeypatch.setattr("steercap.server.server.application", application)
    monkeypatch.setattr("steercap.adapters.server.serve", serve)
    settings, flags = ServerSettings(warm="digest", idle_seconds=9.0), ["--dtype", "float32", "--api-key", "secret"]
    own = {"sites": ["z"], "max_model_len": 9, "capture_bytes": 5}
    with pytest.raises(KeyboardInterrupt):  # flags come before what is usual
        await server.serve(model, flags, settings, usual={"dtype": "bfloat16", "max_model_len": 7}, **own)
    assert warm.engines() == []
    (engine,) = seen
    assert not await asyncio.to_thread(os.path.exists, engine.socket)
    assert (engine.asked, engine.keyed, engine.pid, engine.code) == ("digest", True, os.getpid(), warm.code())
    assert (engine.path, engine.weights) == (warm.identified(model), files_of(model))
    given = {name: value for name, value in engine.arguments.items() if value}
    assert given == engine.arguments == {"dtype": "float32", "max_model_len": 9}
    assert (engine.defaults["enforce_eager"], engine.defaults["max_logprobs"]) == (False, 20)
    assert engine.settings == {**vars_of(Settings()), "sites": ["z"], "capture_bytes": 5}
    for options, differs in (({}, ""), ({"dtype": "float16"}, "dtype"), ({"max_model_len": 8}, "max_model_len")):
        found = preflight._mismatch(engine, ReachOptions(model, api_key="secret", **options), {"sites": "z"})
        assert found.partition(":")[0] == differs
    for more, names in (
        (["--chat-template", "{{ messages }}"], ["chat_template"]),
        (["--default-chat-template-kwargs", '{"a": 1}', "--reasoning-parser", "x"], ["default_chat_template_kwargs"]),
        (["--uvicorn-log-level", "error", "--allowed-origins", '["x"]'], []),
    ):
        with pytest.raises(KeyboardInterrupt):
            await server.serve(model, [*flags, *more], settings, **own)
        assert seen[-1].flags == names
        assert seen[-1].arguments.get("reasoning_parser") == ("x" if "x" in more else None)
    with pytest.raises(InvalidSetting, match="a warm engine has a socket of its own"):
        await server.serve(model, [*flags, "--uds", "/tmp/x"], settings)
    with pytest.raises(InvalidSetting, match="restart=True"):
        await server.serve(model, flags, settings, restart=True)
    assert warm.engines() == []
