"""`steercap doctor`: checks of this machine, with advice. `steercap smoke`: checks of a running server."""

from __future__ import annotations

import asyncio
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from steercap.cli.command import FAILED, command
from steercap.cli.engines import ModelOptions, opened
from steercap.cli.terminal import Terminal
from steercap.errors import SteercapError

if TYPE_CHECKING:
    from steercap.cli.doctor.checks import Check

STYLES: Final = {"ok": "green", "warning": "yellow", "problem": "red"}
MESSAGES: Final = [{"role": "user", "content": "Say hello."}]
#: Number of tokens to generate in the chat by which a server is checked.
TOKENS: Final = 4
MARKS: Final = {"ok": "✓", "warning": "!", "problem": "✗"}


def table_of(checks: Sequence[Check]) -> Table:
    """Return a table with a row per check: state, name, and findings with the advice below them."""
    table = Table(show_header=False, box=None, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        style = STYLES[check.state]
        said = Text(check.found)
        if check.advice:
            said.append(f"\n{check.advice}", style=style)
        table.add_row(Text(f"{MARKS[check.state]} {check.state}", style=style), Text(check.name, style="bold"), said)
    return table


async def start(model: ModelOptions, terminal: Terminal) -> Check:
    """Start the engine, which probes every tap, and stop it; return the result as a check, also if it fails."""
    from steercap.cli.doctor.checks import Check

    begun = time.monotonic()
    try:
        async with opened(model, terminal) as open_model:
            seconds = time.monotonic() - begun
            runner = "V2" if open_model.engine.vllm_config.use_v2_model_runner else "V1"
            points = len(open_model.points)
            layers = ", ".join(f"{name} {code or 'of unknown code'}" for name, code in open_model.layer_code.items())
            known = "compared with transformers'" if open_model.verified else "not compared with transformers', proved"
            claims = len(open_model.proof)
    except SteercapError as error:
        log = f" Log: {terminal.log}" if terminal.log else ""
        return Check("start", "problem", f"{type(error).__name__}: {error}", f"run again with --verbose.{log}")
    found = f"in {seconds:.0f} s, model runner {runner}; all {points} taps read and change, {claims} equations hold"
    return Check("start", "ok", f"{found}; layers {layers}: {known}")


async def examine_server(url: str, *, key: str | None, model: str | None, seconds: float) -> list[Check]:
    """Check a server's health, its models and one captured chat, up to the first failure; return the results.

    Args:
        url: address of the server, with or without /v1.
        key: API key, None for none.
        model: name of the model on the server; None for the first that the server lists.
        seconds: maximum seconds without any data from the server.
    """
    from steercap.cli.doctor.checks import Check
    from steercap.model import SteerModel

    address = url.rstrip("/").removesuffix("/v1")
    remote = SteerModel.connect(address, api_key=key, model=model, timeout=seconds)
    checks = list[Check]()
    if "://" in address:  # of a warm engine's socket the client asks by itself
        if not await asyncio.to_thread(answers, f"{address}/health", seconds):
            found = f"{address}/health does not answer with status 200"
            return [Check("health", "problem", found, "wait until the server is up, or start it with `steercap serve`")]
        checks.append(Check("health", "ok", f"{address} answers"))
    try:
        async with remote:
            shape = f"{remote.num_layers} layers × {remote.hidden_size}"
            checks.append(Check("models", "ok", f"{remote.model}: {shape}, rows at {len(remote.points)} points"))
            checks.append(await _chat(remote))
    except SteercapError as error:
        name = "captured chat" if any(one.name == "models" for one in checks) else "models"
        checks.append(Check(name, "problem", f"{type(error).__name__}: {error}"))
    return checks


async def _chat(remote: Any) -> Check:
    """Check that a chat returns rows at one point, one for each token that was read, and that they are finite."""
    from steercap.cli.doctor.checks import Check
    from steercap.core.spec import CaptureSpec

    point = list(remote.points)[-1]
    params = {"max_tokens": TOKENS, "temperature": 0}
    text, handle = await remote.chat(MESSAGES, params, capture=CaptureSpec(at=[str(point)], codec="raw"))
    async with handle:
        rows, read = handle.captures[str(point)], len(handle.prompt_token_ids) + len(handle.output_token_ids) - 1
        found = f"{text!r}, {len(rows)} rows of {point} for {read} tokens"
        if len(rows) != read or not rows.isfinite().all():
            return Check("captured chat", "problem", found, "rows are missing or not finite: report it")
        return Check("captured chat", "ok", found)


def register(app: typer.Typer) -> None:
    """Add the commands `doctor` and `smoke` to `app`."""

    @command(
        app,
        "doctor",
        examples=[
            "steercap doctor",
            "steercap doctor -m Qwen/Qwen3-8B --engine-arg tensor_parallel_size=2",
            "steercap doctor --start --json",
        ],
    )
    async def doctor(
        model: ModelOptions,
        terminal: Terminal,
        begin: Annotated[
            bool, typer.Option("--start", help="Also start the engine, with its checks at start.")
        ] = False,
    ) -> None:
        """Check this machine for problems, and show a remedy for each: Python, torch, vLLM, GPUs, memory, caches, and
        the model asked for. Nothing is started unless you say --start. The exit code is 1 if there is a problem.
        """
        with terminal.status("looking around"):
            from steercap.cli.doctor.checks import examine
            from steercap.cli.doctor.facts import gather

            checks = examine(gather(model.model, model.arguments()))
        if begin:
            checks.append(await start(model, terminal))
        counts = {state: sum(check.state == state for check in checks) for state in STYLES}
        words = [Text(f"{count} {state}", style=STYLES[state]) for state, count in counts.items() if count]
        terminal.show({"checks": checks, **counts}, table_of(checks), Text(", ").join(words))
        if counts["problem"]:
            raise typer.Exit(FAILED)

    @command(app, "smoke", examples=["steercap smoke http://127.0.0.1:8000", "steercap smoke URL --api-key KEY --json"])
    async def smoke(
        terminal: Terminal,
        url: Annotated[str, typer.Argument(help="Address of a server that `steercap serve` runs.")],
        *,
        api_key: Annotated[str | None, typer.Option(metavar="KEY", help="API key, if the server wants one.")] = None,
        model: Annotated[str | None, typer.Option("--model", "-m", help="Model (default: the first listed).")] = None,
        seconds: Annotated[
            float, typer.Option("--timeout", min=1, help="Seconds to wait for each answer of the server.")
        ] = 60,
    ) -> None:
        """Check a running server: its health, its models, and one captured chat. The exit code is 1 if one
        of them fails.
        """
        with terminal.status(f"asking {url}"):
            checks = await examine_server(url, key=api_key, model=model, seconds=seconds)
        terminal.show({"checks": checks}, table_of(checks))
        if any(check.state != "ok" for check in checks):
            raise typer.Exit(FAILED)


def answers(address: str, seconds: float = 2) -> bool:
    """Return whether an address answers a GET with status 200, with at most `seconds` without any data."""
    try:
        with urllib.request.urlopen(address, timeout=seconds) as answer:  # noqa: S310 -- an address that the user gave
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        error.close()  # it is the answer, with its connection
        return False
    except (OSError, ValueError, http.client.HTTPException):  # nothing there, no address, or another protocol
        return False
