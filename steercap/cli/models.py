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
        refused: Annotated[bool, typer.Option("--refused", help="Those that are not served, and why.")] = False,
    ) -> None:
        """Say which architectures were proved: a tiny model of each, every site and every operation against
        transformers, with the worst row's error. Others are served too, if the proof at start holds for them.
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
