"""`steercap up`, `down` and `status`: engines kept running (warm) in the background for later commands."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

import steercap
from steercap.cli.command import command
from steercap.cli.engines import SMOLLM2, elsewhere, located
from steercap.cli.serve import ServedModel, ServeOptions, ServerFlags, checked, parted
from steercap.cli.tables import facts
from steercap.cli.terminal import Terminal
from steercap.config.environment import KEYS
from steercap.core.display import duration
from steercap.errors import EngineFailure, InvalidRequest, SteercapError
from steercap.files import warm
from steercap.files.fingerprint import digest_of
from steercap.files.warm import WarmEngine

#: Minutes without a request after which a warm engine ends by default; seconds after SIGTERM until it is killed.
IDLE_MINUTES: Final = 30.0
END_SECONDS: Final = 60.0
#: Remaining seconds of idle time below which `status` warns.
SOON: Final = 120
DAY: Final = 86_400
#: Patterns of lines in a server's log: of its start, written by `running` of `steercap serve`; of its end, `IDLE_END`.
STARTING: Final = r"starting (.+?): "
ENDED: Final = r"no request for ([\d.e+]+) s: the server ends"
#: Number of the log's last lines that are shown if a server does not start.
LINES: Final = 12


def register(app: typer.Typer) -> None:
    """Add the commands `up`, `down` and `status` to `app`."""
    _up(app)
    _down(app)
    _status(app)


def _up(app: typer.Typer) -> None:
    @command(
        app,
        "up",
        examples=[
            "steercap up",
            "steercap up Qwen/Qwen3-8B --sites resid_post,attn_out --idle 120",
            "steercap up Qwen/Qwen3-8B -- --max-model-len 4096",
        ],
    )
    async def up(
        terminal: Terminal,
        model: ServedModel = SMOLLM2,
        flags: ServerFlags = None,
        *,
        options: ServeOptions,
    ) -> None:
        """Keep a model warm: a server in the background that your other commands, and SteerModel.connect(), find.
        It listens on a socket that only you can open, and ends after --idle minutes without a request.
        """
        model, flags = parted(model, flags)
        options = replace(options, idle=IDLE_MINUTES if options.idle is None else options.idle)
        if any(key.split() != [key] for key in options.api_key or ()):
            raise typer.BadParameter("give keys without spaces, which are not empty", param_hint="--api-key")
        checked(options.settings(), model, flags, options.engine_arg, sites=options.sites.split(","))
        with terminal.status(f"looking for {model}"):
            path = warm.socket_of(str(await asyncio.to_thread(located, model)))
        asked, start = digest_of([*options.flags(), *flags]), time.monotonic()
        async with _turn(path, terminal):
            there = warm.engine_at(path)
            if there is not None and (reason := _unlike(there, asked)):
                raise InvalidRequest(f"{model} is up {reason}; end it with `steercap down {there.model}` first")
            child = None if there is not None else _started(model, options, flags, path)
            try:
                engine = await _ready(path, child, model, terminal)
            except BaseException:
                if child is not None:
                    await asyncio.shield(_ended(child, terminal))
                raise
        if child is not None:
            child.returncode = 0  # it lives on, and Popen would warn of that
        took = "was up already" if child is None else f"up after {time.monotonic() - start:.0f} s"
        idle = f"ends after {options.idle:g} min without a request" if options.idle else "stays until `steercap down`"
        terminal.say(f"{model} {took}; {idle}. Other commands find it; in Python: SteerModel.connect()")
        terminal.show({"model": engine.model, "url": engine.url, "pid": engine.pid, "log": str(engine.log)}, engine.url)


def _unlike(engine: WarmEngine, asked: str) -> str:
    """Describe how a warm engine differs from the one asked for (`asked`: digest of its options); "" if it does not."""
    if engine.asked != asked:
        return "with other options"
    if reason := warm.outdated(engine):
        return f"and outdated: {reason}"
    reason = elsewhere(engine)
    return reason and f"in other surroundings: {reason}"


@asynccontextmanager
async def _turn(path: Path, terminal: Terminal) -> AsyncIterator[None]:
    """Hold a lock in the block, so that no other `steercap up` starts the model of the socket `path`; wait for it."""
    lock = os.open(path.with_suffix(".up"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if not warm.locked(lock, fcntl.LOCK_EX):
            with terminal.status("another steercap up is starting it"):
                while not warm.locked(lock, fcntl.LOCK_EX):  # noqa: ASYNC110 -- the kernel tells nobody when
                    await asyncio.sleep(warm.PAUSE)
        yield
    finally:
        os.close(lock)


def _started(model: str, options: ServeOptions, flags: list[str], path: Path) -> subprocess.Popen[bytes]:
    """Start the server as a process in a session of its own, so that it outlives this command; `path` is its socket."""
    home = Path(steercap.__file__).parent.parent
    safe = [] if Path.cwd() == home else ["-P"]  # nothing in the working directory is taken for a module
    said = replace(options, api_key=None).flags()  # what is in a command line every user of the machine can read
    words = [sys.executable, *safe, "-m", "steercap", "serve", model, "--warm", "--no-record", *said]
    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    try:
        return subprocess.Popen(  # noqa: S603 -- this command's own words
            [*words, *(["--", *flags] if flags else [])],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, KEYS: " ".join(options.api_key or ())},
            start_new_session=True,
        )
    finally:
        os.close(log)


async def _ready(path: Path, child: subprocess.Popen[bytes] | None, model: str, terminal: Terminal) -> WarmEngine:
    """Wait until the server at the socket `path` listens, showing the stages of its start; return its record.

    Raises:
        EngineFailure: the server ended; the last lines of its log are shown.
    """
    log = path.with_suffix(".log")
    with terminal.status(f"starting {model}: Python and vLLM") as say:
        while True:
            engine = warm.engine_at(path)
            if engine is not None and warm.listening(path):
                return engine
            if (child is not None and child.poll() is not None) or (child is None and engine is None):
                break
            stages = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("starting ")]
            if stages:  # as `running` says them
                say(re.sub(r": \d+ s$", "", stages[-1]))
            await asyncio.sleep(warm.PAUSE)
    for line in log.read_text(errors="replace").splitlines()[-LINES:]:
        terminal.say(line)
    code = "" if child is None else f", exit code {child.returncode}"
    raise EngineFailure(f"{model} did not start{code}; the last lines of its log are above, all are in {log}")


async def _ended(child: subprocess.Popen[bytes], terminal: Terminal) -> None:
    """End a server process that this command started: by SIGTERM, and by SIGKILL after `END_SECONDS`."""
    if child.poll() is None:
        terminal.say("ending the server that was starting")
        child.terminate()
        until = time.monotonic() + END_SECONDS
        while child.poll() is None:
            if time.monotonic() > until:
                child.kill()
            await asyncio.sleep(warm.PAUSE)


def _down(app: typer.Typer) -> None:
    @command(app, "down", examples=["steercap down", "steercap down Qwen/Qwen3-8B", "steercap down --all"])
    async def down(
        terminal: Terminal,
        model: Annotated[str | None, typer.Argument(help="Model whose engine to end (default: the only one).")] = None,
        everything: Annotated[bool, typer.Option("--all", help="End all of them.")] = False,
    ) -> None:
        """End engines that steercap up keeps warm."""
        there = warm.engines()
        if model is not None:
            if everything:
                raise typer.BadParameter("give MODEL or --all, not both", param_hint="--all")
            there = warm.named_in(there, str(located(model)) if model == SMOLLM2 else model)
            if not there:
                raise warm.no_engine_error(warm.engines(), model)
        if len(there) > 1 and not everything:
            names = ", ".join(one.model for one in there)
            raise InvalidRequest(f"{len(there)} engines are warm: {names}; name one, or give --all")
        for engine in there:
            with terminal.status(f"ending {engine.model}"):
                await _end(engine)
            terminal.say(f"{engine.model} is down")
        if not there:
            terminal.say(f"no engine is warm, so there is none to end{_last_idle_end()}")
        terminal.show({"down": [one.model for one in there]})


async def _end(engine: WarmEngine) -> None:
    """End a warm engine and wait for it: by SIGTERM, and by SIGKILL after `END_SECONDS`."""
    until, path, number = time.monotonic() + END_SECONDS, Path(engine.socket), signal.SIGTERM
    # Another may have come in its place, and its process id may be another process's by now.
    while (there := warm.engine_at(path)) and (there.pid, there.started) == (engine.pid, engine.started):
        if number == signal.SIGTERM or time.monotonic() > until:
            with suppress(ProcessLookupError):
                os.kill(engine.pid, number)
            number = signal.SIGKILL
        await asyncio.sleep(warm.PAUSE)


def _status(app: typer.Typer) -> None:
    @command(app, "status", examples=["steercap status", "steercap status --json"])
    async def status(
        terminal: Terminal,
        api_key: Annotated[str | None, typer.Option(metavar="KEY", help="API key of engines that want one.")] = None,
    ) -> None:
        """Show the engines that steercap up keeps warm."""
        found = [await _described(engine, api_key) for engine in warm.engines()]
        terminal.show({"engines": found}, *(facts(one["model"], _in_words(one)) for one in found))
        for one in found:
            if (left := one.get("idle_left_seconds")) is not None and left < SOON:
                terminal.say(f"{one['model']} ends in {duration(left)}; any request to it begins its idle time anew")
        if not found:
            terminal.say(f"no engine is warm{_last_idle_end()}; start one with `steercap up MODEL`")


def _in_words(engine: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of `_described` as labels and values for a person to read."""
    found = {name: value for name, value in engine.items() if not name.endswith("_seconds") and name != "model"}
    limit, left = engine.get("ends_after_seconds"), engine.get("idle_left_seconds")
    state, shown = found.pop("state"), {}
    if "running" in found:
        idle = f"idle for {duration(engine['idle_seconds'])}"
        running, served = found.pop("running"), found.pop("served")
        shown["requests"] = f"{served:,} served, {f'{running} running' if running else idle}"
        shown["ends"] = "with `steercap down`" if limit is None else f"after {duration(limit)} without a request"
        if left is not None and not running:
            shown["idle time left"] = duration(left)
    return {"state": state, "up for": duration(engine["up_seconds"]), **shown, **found}


def _last_idle_end() -> str:
    """Describe the warm engine that last ended for want of requests, within a day; "" if none did."""
    logs = warm.folder_path().glob("*.log")
    gone = [log for log in logs if warm.engine_at(log.with_suffix(".sock")) is None]
    for log in sorted(gone, key=lambda path: path.stat().st_mtime, reverse=True):
        lines, ago = log.read_text(errors="replace").splitlines(), time.time() - log.stat().st_mtime
        ended = next((one for line in lines if (one := re.search(ENDED, line))), None)
        model = next((one[1] for line in lines if (one := re.match(STARTING, line))), None)
        if ended and model and ago < DAY:
            idle = duration(float(ended[1]))
            return f"; the one of {model} ended {duration(ago)} ago, after {idle} without a request"
    return ""


async def _described(engine: WarmEngine, api_key: str | None) -> dict[str, Any]:
    """Return facts about a warm engine for JSON; fewer while it starts, or if it refuses the API key."""
    from steercap.model import SteerModel

    said: dict[str, Any] = {"state": "starting"}
    if warm.listening(Path(engine.socket)):
        try:
            async with SteerModel.connect(engine.url, api_key=api_key, timeout=10) as model:
                idle = await model.connection.ask("GET", "/v1/steercap/idle")
                said = {"state": "ready", "dtype": model.origin["dtype"], "max_model_len": model.max_model_len}
                said |= {"running": idle["running"], "served": idle["served"]}
                said |= {"idle_seconds": round(idle["idle_seconds"]), "ends_after_seconds": idle["limit"]}
                if idle["limit"] is not None:
                    said["idle_left_seconds"] = max(round(idle["limit"] - idle["idle_seconds"]), 0)
        except SteercapError as error:
            said = {"state": f"ready, but: {error}"}
    return {
        "model": engine.model,
        **said,
        "sites": ", ".join(engine.settings["sites"]),
        "up_seconds": round(time.monotonic() - engine.started),
        "steercap": engine.code,
        "pid": engine.pid,
        "url": engine.url,
        "log": str(engine.log),
    }
