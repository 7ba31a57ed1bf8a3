"""`steercap smoke`: check of a running server by one captured chat."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from steercap.cli.command import FAILED, command
from steercap.cli.doctor import table_of
from steercap.cli.serve import answers
from steercap.cli.terminal import Terminal
from steercap.errors import SteercapError

if TYPE_CHECKING:
    from steercap.cli.doctor.checks import Check

MESSAGES: Final = [{"role": "user", "content": "Say hello."}]
TOKENS: Final = 4


async def examine_server(url: str, *, key: str | None, model: str | None, seconds: float) -> list[Check]:
    """Check health, models and one captured chat, up to the first that fails.

    Args:
        url: address of the server, with or without /v1.
        key: API key, None for none.
        model: name of the model for the server; the first that it lists if None.
        seconds: seconds that the server may be silent for.
    """
    from steercap.cli.doctor.checks import Check
    from steercap.model import SteerModel

    address = url.rstrip("/").removesuffix("/v1")
    remote = SteerModel.connect(address, api_key=key, model=model, timeout=seconds)
    if not await asyncio.to_thread(answers, f"{address}/health"):
        found = f"{address}/health does not answer with status 200"
        return [Check("health", "problem", found, "wait until the server is up, or start it with `steercap serve`")]
    checks = [Check("health", "ok", f"{address} answers")]
    try:
        async with remote:
            shape = f"{remote.num_layers} layers × {remote.hidden_size}"
            checks.append(Check("models", "ok", f"{remote.model}: {shape}, rows at {len(remote.points)} points"))
            checks.append(await _chat(remote))
    except SteercapError as error:
        name = "models" if len(checks) == 1 else "captured chat"
        checks.append(Check(name, "problem", f"{type(error).__name__}: {error}"))
    return checks


async def _chat(remote: Any) -> Check:
    """Check that the rows of a chat at one point are there, one for each token that was read, and are finite."""
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
    """Add the command."""

    @command(app, "smoke", examples=["steercap smoke http://127.0.0.1:8000", "steercap smoke URL --api-key KEY --json"])
    async def smoke(
        terminal: Terminal,
        url: Annotated[str, typer.Argument(help="Address of a server that `steercap serve` runs.")],
        *,
        api_key: Annotated[str | None, typer.Option(help="API key, if the server wants one.")] = None,
        model: Annotated[str | None, typer.Option("--model", "-m", help="Model (default: the first listed).")] = None,
        seconds: Annotated[float, typer.Option(min=1, help="Seconds that the server may be silent.")] = 60,
    ) -> None:
        """Check a running server: its health, its models, and one captured chat. The exit code is 1 if one fails."""
        with terminal.status(f"asking {url}"):
            checks = await examine_server(url, key=api_key, model=model, seconds=seconds)
        terminal.show({"checks": checks}, table_of(checks))
        if any(check.state != "ok" for check in checks):
            raise typer.Exit(FAILED)
