"""`steercap explore`: a model served to this machine only, with the explorer page in a browser."""

from __future__ import annotations

import asyncio
import socket
import urllib.error
import urllib.request
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from steercap.cli.command import command
from steercap.cli.engines import SMOLLM2, located, pairs_of
from steercap.cli.serve import checked, named, parted, uv_loops
from steercap.cli.terminal import Terminal
from steercap.config import CPU

HOST: Final = "127.0.0.1"
#: Seconds between two checks for the server.
PAUSE: Final = 0.5


def register(app: typer.Typer) -> None:
    """Add the command."""

    @command(
        app,
        "explore",
        examples=[
            "steercap explore",
            "steercap explore Qwen/Qwen3-8B --vectors calm=calm.safetensors",
            "steercap explore --no-browser --port 8000",
        ],
        loops=uv_loops,
    )
    async def explore(
        terminal: Terminal,
        model: Annotated[str, typer.Argument(help="Model: hub name, path, or smollm2.")] = SMOLLM2,
        flags: Annotated[
            list[str] | None, typer.Argument(metavar="[-- FLAG...]", help="Flags of `vllm serve`, after --.")
        ] = None,
        *,
        port: Annotated[int, typer.Option(min=0, max=65535, help="Port (default: a free one).")] = 0,
        browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
        engine_arg: Annotated[
            list[str] | None,
            typer.Option(metavar="KEY=VALUE", help="Argument of SteerModel, value in JSON; repeatable."),
        ] = None,
        vectors: Annotated[
            list[str] | None, typer.Option(metavar="NAME=FILE", help="Vectors to project on and to steer with.")
        ] = None,
        sae: Annotated[
            list[str] | None, typer.Option(metavar="NAME=FOLDER", help="SAE whose features are shown.")
        ] = None,
    ) -> None:
        """Explore a model in the browser: coloured tokens, layers by tokens, the logit lens, steering by a slider."""
        from steercap.server.server import ServerSettings
        from steercap.server.server import serve as run

        model, flags = parted(model, flags)
        settings = ServerSettings(
            vectors={name: Path(file) for name, file in named(vectors or (), "--vectors")},
            saes={name: Path(folder) for name, folder in named(sae or (), "--sae")},
        )
        names = checked(settings, model, flags, engine_arg)
        path, chosen = str(located(model)), port or free_port()
        own: dict[str, Any] = dict(CPU) if model == SMOLLM2 else {}
        said = ["--host", HOST, "--port", str(chosen), "--served-model-name", model, *flags]
        terminal.say(f"starting {model}; the page opens once it is up, in a minute or so")
        page = asyncio.create_task(opening(terminal, f"http://{HOST}:{chosen}", browser=browser))
        try:
            await run(path, said, settings, names, **(own | dict(pairs_of(engine_arg or (), "--engine-arg"))))
        finally:
            page.cancel()
            with suppress(asyncio.CancelledError):
                await page


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.create_server((HOST, 0)) as server:
        found: int = server.getsockname()[1]
        return found


async def opening(terminal: Terminal, address: str, *, browser: bool) -> None:
    """Wait for the server, announce the page's address, and open the page in a browser if wanted."""
    while not await asyncio.to_thread(_answers, f"{address}/health"):  # noqa: ASYNC110 -- vLLM tells nobody when
        await asyncio.sleep(PAUSE)
    page = f"{address}/explorer"
    terminal.say(f"the explorer: {page}   (Ctrl-C ends it)")
    if browser and not await asyncio.to_thread(webbrowser.open, page):
        terminal.say("no browser could be opened from here; open the address yourself")


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=2) as answer:  # noqa: S310 -- an address of our own
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
