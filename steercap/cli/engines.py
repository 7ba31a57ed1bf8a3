"""Options of every command that starts an engine, and the start of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from steercap.cli.terminal import Terminal
from steercap.concurrency.heartbeat import watching
from steercap.config import CPU, with_preset
from steercap.core.values import shown
from steercap.errors import InvalidFile, InvalidSetting
from steercap.files import warm
from steercap.files.fingerprint import surroundings

if TYPE_CHECKING:
    from steercap.engine.checkpoint import Checkpoint
    from steercap.model import SteerModel

_model = partial(typer.Option, rich_help_panel="Model")
SMOLLM2: Final = "smollm2"


@dataclass(frozen=True)
class ModelOptions:
    """Options for the model, and how vLLM serves it."""

    model: Annotated[
        str,
        _model(
            "--model", "-m", help="Model: hub name, path, or [cyan]smollm2[/cyan]: SmolLM2-135M from a PyPI package."
        ),
    ] = SMOLLM2
    dtype: Annotated[
        str | None, _model(help="dtype of the model: float32, bfloat16, ... (default: vLLM's choice).")
    ] = None
    max_model_len: Annotated[int | None, _model(min=2, help="Maximum tokens of prompt and answer together.")] = None
    eager: Annotated[bool | None, _model("--eager/--no-eager", help="Run without compilation and CUDA graphs.")] = None
    restart: Annotated[
        bool | None,
        _model("--restart/--no-restart", help="Restart an engine that died, and rerun its unanswered requests."),
    ] = None
    engine_arg: Annotated[
        list[str] | None,
        _model(
            "--engine-arg",
            metavar="KEY=VALUE",
            help="Argument of vLLM's engine or SteerModel, value in JSON; repeatable.",
        ),
    ] = None

    def flags(self) -> list[str]:
        """Return command-line flags that give the same options, such as ["--dtype", "float16"]."""
        found = [] if self.model == SMOLLM2 else ["--model", self.model]
        for name, value in (("--dtype", self.dtype), ("--max-model-len", self.max_model_len)):
            found += [] if value is None else [name, str(value)]
        found += [] if self.eager is None else ["--eager" if self.eager else "--no-eager"]
        found += [] if self.restart is None else ["--restart" if self.restart else "--no-restart"]
        return found + [word for argument in self.engine_arg or () for word in ("--engine-arg", argument)]

    def require_there(self) -> None:
        """Check that the model exists, if it can only be on this machine; imports nothing heavy.

        Raises:
            ModelNotLoaded: there is no such model.
        """
        if self.model != SMOLLM2:
            from steercap.engine.checkpoint import require_there

            require_there(self.model)

    def look_up(self) -> Checkpoint:
        """Return what is known of the model's checkpoint without starting an engine.

        Raises:
            ModelNotLoaded: the model can only be on this machine, and is not.
        """
        from steercap.engine.checkpoint import look_up
        from steercap.lab.demo import DONE, NAME, cache_root

        self.require_there()
        folder = cache_root() / NAME
        return look_up(self.model, folder if self.model == SMOLLM2 and (folder / DONE).exists() else None)

    def room(self) -> int:
        """Return the maximum tokens of a sequence as far as they are known before a start; 0 if they are not."""
        if self.engine_arg:
            return 0
        given = self.said() if is_warm() else self.arguments()  # a warm engine may have another length
        return min(filter(None, (given.get("max_model_len"), self.look_up().context)), default=0)

    def said(self) -> dict[str, Any]:
        """Return the arguments of `SteerModel` that the user gave, by name, besides the model.

        Raises:
            typer.BadParameter: an --engine-arg without "=", or an argument that is given twice.
            InvalidSetting: an unknown preset.
        """
        found: dict[str, Any] = {"dtype": self.dtype, "max_model_len": self.max_model_len, "enforce_eager": self.eager}
        found = {name: value for name, value in {**found, "restart": self.restart}.items() if value is not None}
        further = dict(pairs_of(self.engine_arg or (), "--engine-arg"))
        if twice := found.keys() & further.keys():
            raise typer.BadParameter(f"an option gives {min(twice)} too; leave one out", param_hint="--engine-arg")
        found |= further
        return with_preset(found.pop("preset", None), found)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `SteerModel` by name, besides the model: the user's, and commands' defaults.

        Raises:
            The errors of `said`.
        """
        return {"use_tqdm_on_load": False, **(CPU if self.model == SMOLLM2 else {}), **self.said()}


@dataclass(frozen=True)
class ReachOptions(ModelOptions):
    """Options of commands that can also use a running server: a warm engine, or the server at --url."""

    url: Annotated[
        str | None,
        _model(metavar="URL", help="Use this server instead of an engine: http://HOST:PORT, or unix:SOCKET."),
    ] = None
    api_key: Annotated[str | None, _model(metavar="KEY", help="API key of --url, or of the warm engine.")] = None

    def flags(self) -> list[str]:
        return super().flags() + (["--url", self.url] if self.url else [])

    def require_there(self) -> None:
        """Check that the model exists on this machine, if it can only be there; a server's is not checked."""
        if self.url is None:
            super().require_there()

    def room(self) -> int:
        """Return the maximum tokens of a sequence as far as they are known; 0 for a server."""
        return super().room() if self.url is None else 0

    def look_up(self) -> Checkpoint:
        """Return what is known of the model's checkpoint; for a server, only its URL as the name."""
        if self.url is None:
            return super().look_up()
        from steercap.engine.checkpoint import Checkpoint

        return Checkpoint(self.url)


def pairs_of(texts: Iterable[str], option: str) -> Iterator[tuple[str, Any]]:
    """Parse KEY=VALUE texts to pairs of a key, "-" replaced by "_", and a value in JSON, or else the text itself.

    Raises:
        typer.BadParameter: a text without "=", or a key that is given twice.
    """
    seen = set[str]()
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise typer.BadParameter(
                f"{text!r}: give KEY=VALUE with the value in JSON, such as seed=3", param_hint=option
            )
        name = key.strip().replace("-", "_")
        if name in seen:
            raise typer.BadParameter(f"{name} is given twice; leave one out", param_hint=option)
        seen.add(name)
        try:
            yield name, msgspec.json.decode(value)
        except msgspec.DecodeError:
            yield name, value


def located(model: str) -> Path | str:
    """Return the path or name of a model as given; for `smollm2` the folder of SmolLM2, converted on first use.

    Raises:
        ModelNotLoaded: the package with SmolLM2 is not installed.
    """
    if model != SMOLLM2:
        return model
    from steercap.lab.demo import smollm2

    return smollm2()


async def until_ready(engine: warm.WarmEngine) -> str | None:
    """Wait until a warm engine listens, and return its URL; None if the engine ends before."""
    path = Path(engine.socket)
    while not warm.listening(path):
        if warm.engine_at(path) is None:
            return None
        await asyncio.sleep(warm.PAUSE)
    return engine.url


def elsewhere(engine: warm.WarmEngine) -> str:
    """Describe the first setting of `surroundings` that differs between an engine and this process; "" if none does."""
    here, there = surroundings(), engine.surroundings
    for name in sorted({*here, *there}):
        if here.get(name) != there.get(name):
            return f"{name}: {there.get(name, 'none')} there, {here.get(name, 'none')} here"
    return ""


def differing(engine: warm.WarmEngine, requested: Mapping[str, Any], left_out: frozenset[str]) -> str:
    """Describe the first of vLLM's engine arguments that differs between an engine and a request; "" if none does.

    Args:
        engine: the warm engine.
        requested: engine arguments that are asked for, by name.
        left_out: names of arguments that may differ if they are not asked for.
    """
    plain, there = as_stored(dict(requested)), {**engine.defaults, **engine.arguments}
    for name in sorted({*plain, *engine.arguments} - (left_out - plain.keys())):
        here, known = plain.get(name, engine.defaults.get(name)), there.get(name)
        if here != known:
            its = shown(known) if name in engine.arguments else "the default"
            return f"{name}: {its} there, {shown(here) if name in plain else 'not'} asked for"
    return ""


def as_stored(value: Any) -> Any:
    """Return a value as a warm engine's record has it: through JSON, with lists in place of tuples."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=str))


async def unopened(
    options: ModelOptions, terminal: Terminal, *, reason: str | None = None, **settings: Any
) -> SteerModel:
    """Return the model without starting its engine; arguments as for `opened`.

    Raises:
        The errors of `SteerModel`.
    """
    say_why(terminal, reason)
    with terminal.status(f"loading {options.model}"):
        from steercap.model import SteerModel

        path = await asyncio.to_thread(located, options.model)
        return SteerModel(str(path), **{**settings, **options.arguments()})


def say_why(terminal: Terminal, reason: str | None = None) -> None:
    """Report on stderr why an engine is started: `reason`, or if None and one is warm, that it cannot be used."""
    if reason is None and is_warm():
        reason = "this command needs the model in its own process, and cannot ask a warm engine"
    if reason:
        terminal.say(f"starting an engine: {reason}")


def is_warm() -> bool:
    """Return whether this user has a warm engine, False if that cannot be found out."""
    try:
        return bool(warm.engines())
    except (InvalidFile, InvalidSetting, OSError):
        return False


@asynccontextmanager
async def opened(
    options: ModelOptions, terminal: Terminal, *, reason: str | None = None, **settings: Any
) -> AsyncIterator[SteerModel]:
    """Open the model for the block; meanwhile all other output to the terminal is redirected.

    Args:
        options: options for the model.
        terminal: terminal for status messages.
        reason: reason, shown to the user, why no warm engine is used; None if the command cannot use any.
        settings: settings of SteerModel that the command needs; the user's own take precedence.

    Raises:
        The errors of `SteerModel` and its `start`.
    """
    with terminal.alone():
        model = await unopened(options, terminal, reason=reason, **settings)
        try:
            with terminal.status(f"starting {options.model}") as say:
                async with watching(lambda: model.serving.stage, lambda at, _: say(f"starting {options.model}: {at}")):
                    await model.serving.start()
            yield model
        finally:
            with terminal.status("stopping vLLM"):
                await model.aclose()
