"""`steercap serve`: vLLM's own server, with capture and steering."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from steercap.cli.command import command, uv_loops
from steercap.cli.destinations import RecordOptions
from steercap.cli.engines import SMOLLM2, ModelOptions, located, pairs_of
from steercap.cli.parsing import named, steering_in
from steercap.cli.preflight import HIDDEN_WIDTH_SITES, preflight
from steercap.cli.terminal import Terminal
from steercap.config import CPU
from steercap.config.environment import KEYS
from steercap.engine.checkpoint import require_reachable, require_there
from steercap.files.fingerprint import digest_of

if TYPE_CHECKING:
    from steercap.server.server import Names, ServerSettings

_kept = partial(typer.Option, rich_help_panel="Vectors and captures")
#: Arguments `model` and `flags`, and option `--engine-arg`, of the commands that start a server.
ServedModel: TypeAlias = Annotated[str, typer.Argument(help="Model: hub name, path, or smollm2.")]
ServerFlags: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="[-- FLAG...]", help="Flags of `vllm serve`, after --.")
]
EngineArguments: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="Argument of vLLM's engine or SteerModel, value in JSON; repeatable."),
]
#: Default host address and port to listen on.
HOST, PORT = "127.0.0.1", 8000
#: Flags of vLLM that override a model's config.json.
CHANGING: Final = ("--hf-overrides", "--hf-config-path", "--hf_overrides", "--hf_config_path")


@dataclass(frozen=True)
class ServeOptions:
    """Options for a server, whether it runs in the foreground or is kept warm in the background."""

    api_key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="API key that clients may use; repeatable.", envvar=KEYS, show_envvar=False),
    ] = None
    sites: Annotated[str, typer.Option(help="Sites that requests can read and edit, separated by commas.")] = (
        "resid_post"
    )
    engine_arg: EngineArguments = None
    idle: Annotated[
        float | None,
        typer.Option(min=0, help="Minutes without a request until it ends; 0: never (default 0, for up 30)."),
    ] = None
    vectors: Annotated[
        list[str] | None,
        _kept(metavar="NAME=FILE", help="File of vectors or steering that every client may use; repeatable."),
    ] = None
    sae: Annotated[
        list[str] | None,
        _kept(
            metavar="NAME=FOLDER",
            help="SAE whose features requests capture by this name, and the explorer shows; repeatable.",
        ),
    ] = None
    preset: Annotated[
        list[str] | None,
        _kept(
            metavar="NAME=STEERING", help="Serve MODEL+NAME with this steering: a name of --vectors, or edits in JSON."
        ),
    ] = None
    unfetched_seconds: Annotated[float, _kept(min=1, help="Seconds that unfetched rows are kept.")] = 600
    unfetched_gib: Annotated[float, _kept(min=0, help="Maximum GiB of unfetched rows.")] = 4
    unfetched_gib_of_a_key: Annotated[float, _kept(min=0, help="Maximum GiB of unfetched rows per API key.")] = 1
    folder: Annotated[Path | None, _kept(metavar="PATH", help="Folder to which requests may have rows written.")] = None
    folder_gib: Annotated[float, _kept(min=0, help="Maximum GiB of files in --folder.")] = 64
    folder_gib_of_a_key: Annotated[float, _kept(min=0, help="Maximum GiB of files in --folder per API key.")] = 16

    def settings(self, **more: Any) -> ServerSettings:
        """Return the settings of the server from these options; `more` are further fields of `ServerSettings`.

        Raises:
            typer.BadParameter: a text that is not NAME=VALUE, a number that is not finite, limits of a folder without
                one, or sites that --engine-arg gives too.
        """
        from steercap.server.server import ServerSettings

        for name, value in asdict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise typer.BadParameter(f"{value}; give a finite number", param_hint=f"--{name.replace('_', '-')}")
        for name in ("folder_gib", "folder_gib_of_a_key") if self.folder is None else ():
            if getattr(self, name) != getattr(ServeOptions, name):
                option = f"--{name.replace('_', '-')}"
                raise typer.BadParameter("there is no folder to limit; give --folder PATH", param_hint=option)
        if self.sites != ServeOptions.sites and "sites" in dict(pairs_of(self.engine_arg or (), "--engine-arg")):
            raise typer.BadParameter("--engine-arg gives sites too; leave one out", param_hint="--sites")
        return ServerSettings(
            vectors={name: Path(file) for name, file in named(self.vectors or (), "--vectors")},
            saes={name: Path(folder) for name, folder in named(self.sae or (), "--sae")},
            presets={name: steering_in(said) for name, said in named(self.preset or (), "--preset")},
            unfetched_seconds=self.unfetched_seconds,
            unfetched_bytes=int(self.unfetched_gib * 2**30),
            unfetched_bytes_of_a_key=int(self.unfetched_gib_of_a_key * 2**30),
            folder=self.folder,
            folder_bytes=int(self.folder_gib * 2**30),
            folder_bytes_of_a_key=int(self.folder_gib_of_a_key * 2**30),
            idle_seconds=self.idle * 60 if self.idle else None,
            **more,
        )

    def flags(self) -> list[str]:
        """Return command-line flags that give the same options, such as ["--idle", "30.0"]; defaults are left out."""
        found = []
        for field in fields(self):
            value = getattr(self, field.name)
            for one in [] if value == field.default else value if isinstance(value, list) else [value]:
                found += [f"--{field.name.replace('_', '-')}", str(one)]
        return found


def register(app: typer.Typer) -> None:
    """Add the command `serve` to `app`."""

    @command(
        app,
        "serve",
        examples=[
            "steercap serve",
            "steercap serve Qwen/Qwen3-8B --sites resid_post,attn_out --port 8000 --api-key KEY",
            """steercap serve MODEL --vectors calm=calm.gguf --preset 'calm={"vector": "calm", "layers": [18]}'""",
            "steercap serve Qwen/Qwen3-8B -- --enable-auto-tool-choice --tool-call-parser hermes",
            "steercap serve Qwen/Qwen3-8B --record ROWS --record-site resid_post=rp8,k=512 --record-tokens 0:4096",
        ],
        loops=uv_loops,
    )
    async def serve(
        terminal: Terminal,
        model: ServedModel = SMOLLM2,
        flags: ServerFlags = None,
        *,
        host: Annotated[str, typer.Option(help="Host address to listen on.")] = HOST,
        port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = PORT,
        warm: Annotated[
            bool, typer.Option("--warm", help="Listen on a socket that your commands find, as steercap up does.")
        ] = False,
        options: ServeOptions,
        record: RecordOptions,
    ) -> None:
        """Serve a model with vLLM's own OpenAI-compatible server; requests capture and steer through the field
        `steercap`.
        """
        os.environ.pop(KEYS, None)  # typer has read it; neither the engine's processes nor the digest need it
        model, flags = parted(model, flags)
        recorded = record.settings()
        asked = digest_of([*options.flags(), *flags]) if warm else None
        settings = options.settings(record=recorded, warm=asked)
        armed = list(dict.fromkeys([*options.sites.split(","), *(recorded.codecs.sites if recorded else ())]))
        names = checked(settings, model, flags, options.engine_arg, sites=armed)
        if warm and (host, port) != (HOST, PORT):
            raise typer.BadParameter("--warm listens on a socket; leave --host and --port out", param_hint="--warm")
        own = {"sites": armed, **dict(pairs_of(options.engine_arg or (), "--engine-arg"))}
        said = (
            ["--served-model-name", model]
            if warm
            else ["--host", host, "--port", str(port), "--served-model-name", model]
        )
        said += ["--api-key", *options.api_key] if options.api_key else []

        def up(address: str, name: str) -> str:
            base, page = (address, "") if warm else (f"{address}/v1", f"{address}/explorer")
            terminal.show({"model": name, "url": address, "base_url": base, "page": page or None})
            if warm:
                return f"SteerModel.connect({address!r}) and other commands use it"
            return f"{base} is the base_url of OpenAI clients, {page} the page; Ctrl-C ends it"

        await running(terminal, model, [*said, *flags], settings, names, up, **own)


async def running(
    terminal: Terminal,
    model: str,
    flags: Sequence[str],
    settings: ServerSettings,
    names: Names,
    up: Callable[[str, str], str],
    **own: Any,
) -> None:
    """Serve a model until the process is told to end; report on stderr the stages of its start, and its address.

    Args:
        terminal: terminal to report to.
        model: model as the user named it: hub name, path or "smollm2".
        flags: flags of vLLM's server.
        settings: settings of the server.
        names: result of `checked`.
        up: called with the server's address and the model's name; returns the end of the line "NAME is up after N s: ".
        **own: arguments of SteerModel.
    """
    from steercap.server.server import serve

    began = time.monotonic()
    with ExitStack() as shown:
        say = shown.enter_context(terminal.status(f"preparing {model}"))
        with terminal.alone():
            path = str(await asyncio.to_thread(located, model))
        say(f"starting {model}: importing vLLM")
        told = dict[str, None]()

        def stage(running: str) -> None:
            say(f"starting {model}: {running}")
            if settings.warm is not None and running not in told:  # for `steercap up`, which reads the log
                terminal.say(f"starting {model}: {running}")
                told[running] = None

        def ready(address: str, name: str) -> None:
            shown.close()
            terminal.say(f"{name} is up after {time.monotonic() - began:.0f} s: {up(address, name)}")

        quiet = [] if terminal.wants_log() else ["--uvicorn-log-level", "warning"]
        usual: dict[str, Any] = {"use_tqdm_on_load": terminal.wants_log(), **(CPU if model == SMOLLM2 else {})}
        await serve(path, [*quiet, *flags], settings, names, stage=stage, up=ready, usual=usual, **own)
    terminal.say(f"{model} is down")


def parted(model: str, flags: Sequence[str] | None) -> tuple[str, list[str]]:
    """Split a command's positional arguments into model and flags of vLLM; the model defaults to `SMOLLM2`."""
    given = list(flags or ())
    return (SMOLLM2, [model, *given]) if model.startswith("-") else (model, given)


def checked(
    settings: ServerSettings, model: str, flags: Sequence[str], engine_arg: Sequence[str] | None, **own: Any
) -> Names:
    """Return the server's vectors and presets by name, checked, with what is recorded, against the model's config.json.

    Args:
        settings: settings of the server.
        model: name or path of the model.
        flags: flags of vLLM; if one overrides config.json, nothing is checked against it.
        engine_arg: the command's --engine-arg values.
        **own: settings of SteerModel.

    Raises:
        InvalidSpec, InvalidFile: files or presets that cannot be used.
        ModelNotLoaded: there is no such model, here or, as far as can be seen, on the hub.
        InvalidVector, LayerOutOfRange, PointNotArmed: vectors or presets do not fit the model or its armed sites.
        typer.BadParameter: recorded layers or sites that the model does not have.
    """
    from steercap.server.library import OPERATOR
    from steercap.server.server import Names
    from steercap.steering.spec import SteeringSpec

    names = Names.of(settings)
    if model != SMOLLM2:
        require_there(model)
        require_reachable(model)
    if any(flag.startswith(CHANGING) for flag in flags):
        return names
    there = preflight(ModelOptions(model, engine_arg=list(engine_arg or ())), **own)
    for name in settings.vectors:
        content = names.library.get(name, OPERATOR).content
        if not isinstance(content, SteeringSpec) and content.site in HIDDEN_WIDTH_SITES:
            there.check_width(content.width, f"--vectors {name}")
    for steering in names.presets.values():
        there.check_steering(steering)
    if settings.record is not None:
        there.check_recorded(settings.record)
    return names
