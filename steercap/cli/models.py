"""`steercap models`: list of the verified architectures, with their accuracy."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from steercap.cli.command import command
from steercap.cli.terminal import Terminal


def register(app: typer.Typer) -> None:
    """Add the command."""

    @command(app, "models", examples=["steercap models", "steercap models qwen3 --json", "steercap models --refused"])
    async def models(
        terminal: Terminal,
        part: Annotated[str, typer.Argument(help="Part of the name of an architecture or of a layer's class.")] = "",
        *,
        refused: Annotated[
            bool, typer.Option("--refused", help="List architectures that are refused, and why.")
        ] = False,
    ) -> None:
        """List the proved architectures: a tiny model of each was compared with transformers at every site and for
        every operation; the worst row's error is shown. Others are served too, if they pass the checks at start.
        """
        from steercap.architectures.families.proved import TITLES, columns, records

        found = [
            one
            for one in records()
            if bool(one.refused) == refused
            and part.lower() in " ".join((one.name, one.architecture, *one.code)).lower()
        ]
        table = Table(box=None, padding=(0, 2, 0, 0))
        for title in ("architecture", "configuration", "why") if refused else TITLES:
            table.add_column(title, overflow="fold")
        for one in found:
            cells = (one.architecture, one.name, one.refused) if refused else columns(one)
            table.add_row(*map(Text, cells))
        terminal.show(found, table)
