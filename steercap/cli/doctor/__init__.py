"""`steercap doctor`: check of this machine, with advice."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

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
MARKS: Final = {"ok": "✓", "warning": "!", "problem": "✗"}


def table_of(checks: Sequence[Check]) -> Table:
    """Return a table with a row per check; advice stands below the facts."""
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
    """Start the engine, which probes every tap; return the result as a check."""
    from steercap.cli.doctor.checks import Check

    begun = time.monotonic()
    try:
        async with opened(model, terminal) as open_model:
            seconds = time.monotonic() - begun
            runner = "V2" if open_model.engine.vllm_config.use_v2_model_runner else "V1"
            points = len(open_model.points)
            layers = ", ".join(f"{name} {code or 'of unknown code'}" for name, code in open_model.layers.items())
            known = "compared with transformers'" if open_model.verified else "not compared with transformers', proved"
            claims = len(open_model.proof)
    except SteercapError as error:
        log = f" Log: {terminal.log}" if terminal.log else ""
        return Check("start", "problem", f"{type(error).__name__}: {error}", f"run again with --verbose.{log}")
    found = f"in {seconds:.0f} s, model runner {runner}; all {points} taps read and change, {claims} equations hold"
    return Check("start", "ok", f"{found}; layers {layers}: {known}")


def register(app: typer.Typer) -> None:
    """Add the command."""

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
        """Check what would not work here, and what to do about it: Python, torch, vLLM, GPUs, memory, caches, and the
        model asked for. Nothing is started unless you say --start. The exit code is 1 if there is a problem.
        """
        with terminal.status("looking around"):
            from steercap.cli.doctor.checks import examine
            from steercap.cli.doctor.facts import gather

            checks = examine(gather(model.model, model.arguments()))
        if begin:
            checks.append(await start(model, terminal))
        counts = {state: sum(check.state == state for check in checks) for state in STYLES}
        summary = ", ".join(f"[{STYLES[state]}]{count} {state}[/]" for state, count in counts.items() if count)
        terminal.show({"checks": checks, **counts}, table_of(checks), summary)
        if counts["problem"]:
            raise typer.Exit(FAILED)
