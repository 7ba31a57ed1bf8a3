"""`steercap explore`: the explorer of a model in a browser, served on this machine only."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import typer

from steercap.cli.command import command, uv_loops
from steercap.cli.engines import SMOLLM2, ReachOptions, is_warm, pairs_of, until_ready
from steercap.cli.preflight import fitting
from steercap.cli.serve import EngineArguments, ServedModel, ServeOptions, ServerFlags, checked, parted, running
from steercap.cli.terminal import Terminal
from steercap.errors import InvalidSetting
from steercap.files import warm

#: Host address that the explorer listens on.
HOST: Final = "127.0.0.1"
#: Maximum number of bytes forwarded at once.
PART: Final = 1 << 16


def register(app: typer.Typer) -> None:
    """Add the command `explore` to `app`."""

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
        model: ServedModel = SMOLLM2,
        flags: ServerFlags = None,
        *,
        port: Annotated[int, typer.Option(min=0, max=65535, help="Port (default: a free one).")] = 0,
        browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
        engine_arg: EngineArguments = None,
        vectors: Annotated[
            list[str] | None,
            typer.Option(metavar="NAME=FILE", help="File of vectors to project on and to steer with; repeatable."),
        ] = None,
        sae: Annotated[
            list[str] | None, typer.Option(metavar="NAME=FOLDER", help="SAE whose features are shown.")
        ] = None,
    ) -> None:
        """Explore a model in the browser: coloured tokens, layers by tokens, the logit lens, steering by a slider. It
        uses the warm engine, if one fits and has everything that is asked for, and then only you can use the page.
        Otherwise it starts an engine, which every user of this machine can use, unless you give a key: -- --api-key
        KEY.
        """
        model, flags = parted(model, flags)
        if not (flags or vectors or sae):
            asked = ReachOptions(model, engine_arg=engine_arg, api_key="")  # the page asks for a key
            engine, reason = await asyncio.to_thread(fitting, asked, {})
        else:
            engine, reason = (
                None,
                ("vectors, SAEs and vLLM's flags can be given only to a new server") if is_warm() else "",
            )
        if engine is not None and await until_ready(engine) is not None:
            await _forward(engine, port, terminal, browser=browser)
            return
        if reason:
            terminal.say(f"starting an engine: {reason}")
        settings = ServeOptions(vectors=vectors, sae=sae).settings()
        names = checked(settings, model, flags, engine_arg)
        said = ["--host", HOST, "--port", str(port), "--served-model-name", model, *flags]
        pages = list[asyncio.Task[None]]()

        def up(address: str, name: str) -> str:
            page = f"{address}/explorer"
            terminal.show({"model": name, "url": address, "page": page})
            pages.append(asyncio.create_task(opened(terminal, page, browser=browser)))
            return f"the explorer is at {page}; Ctrl-C ends it"

        own = dict(pairs_of(engine_arg or (), "--engine-arg"))
        await running(terminal, model, said, settings, names, up, **own)


async def _forward(engine: warm.WarmEngine, port: int, terminal: Terminal, *, browser: bool) -> None:
    """Forward a TCP port of this machine to a warm engine's socket, and open the page, until SIGINT or SIGTERM.

    Connections of other users are closed.

    Raises:
        InvalidSetting: the system does not tell which user opened a connection.
        OSError: the port is in use.
    """
    if not await asyncio.to_thread(os.path.exists, "/proc/net/tcp"):
        raise InvalidSetting(
            "this system does not tell which user opens a connection, so the page cannot keep others from your warm "
            f"engine of {engine.model}; end that with `steercap down`, and the explorer starts an engine that every "
            "user of this machine can use"
        )

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ours = writer.get_extra_info("sockname"), writer.get_extra_info("peername")
        try:
            if await asyncio.to_thread(user_of, *ours) == os.geteuid():  # the socket is this user's alone
                with suppress(OSError):  # the engine is gone
                    there, back = await asyncio.open_unix_connection(engine.socket)
                    await asyncio.gather(_copied(reader, back), _copied(there, writer))
        finally:
            writer.close()

    server, ended = await asyncio.start_server(join, HOST, port), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # the usual end of a page, and no interruption
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        page = f"http://{HOST}:{server.sockets[0].getsockname()[1]}/explorer"
        terminal.show({"model": engine.model, "url": page.removesuffix("/explorer"), "page": page})
        terminal.say(
            f"{engine.model} is up already: the explorer is at {page}; Ctrl-C ends it, and leaves the engine up"
        )
        await opened(terminal, page, browser=browser)
        await ended.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)
        server.close()  # without waiting: a browser keeps its connections


def user_of(ours: tuple[str, int], theirs: tuple[str, int]) -> int | None:
    """Return the id of the user that connected from the address `theirs` to `ours`, (host, port) each; None if unknown.

    Linux lists the sockets of a machine: the client's is the one whose own address is `theirs`, and whose peer is
    `ours`.
    """
    wanted = [
        f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}" for host, port in (theirs, ours)
    ]
    with suppress(OSError):
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            if words[1:3] == wanted:
                return int(words[7])
    return None


async def _copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward bytes from `reader` to `writer` until the connection is closed; then close `writer`."""
    try:
        while data := await reader.read(PART):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass  # this end is gone, and the other is told so by the close
    finally:
        writer.close()


async def opened(terminal: Terminal, page: str, *, browser: bool) -> None:
    """Open the page in a browser if `browser`; say so if there is none."""
    if browser and not await asyncio.to_thread(webbrowser.open, page):
        terminal.say("no browser could be opened from here; open the address yourself")
