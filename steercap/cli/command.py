"""Decorator that makes functions commands: groups of options, examples in the help, error reports and exit codes.

Exit codes: 0 done, 1 it failed, 2 it was called wrongly, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

from steercap.cli.terminal import Output, Terminal
from steercap.config.environment import from_environment
from steercap.core.extras import extra
from steercap.errors import SteercapError
from steercap.files.fingerprint import nearest_path

FAILED: Final = 1

Function = TypeVar("Function", bound=Callable[..., Any])
#: Factory of event loops.
Loops = Callable[[], asyncio.AbstractEventLoop]

#: Context settings of every command: the options that show its help.
CONTEXT: Final = {"help_option_names": ["-h", "--help"]}


#: Message of typer for a path that does not exist.
_ABSENT: Final = re.compile(r"'(.+)' does not exist\.$")


class Command(TyperCommand):
    """Typer command without value types of flags in its help; its errors on absent paths name the most similar path."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if absent := _ABSENT.search(error.message):
                error.message = error.message.removesuffix(".") + nearest_path(absent[1])
            raise


class Group(TyperGroup):
    """Typer group whose help shows no value type for flags."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped(super().get_params(ctx))


def _untyped(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


def group_of(help_text: str, **settings: Any) -> typer.Typer:
    """Create a group of commands, which shows its help if called without one; `settings` are those of `typer.Typer`."""
    return typer.Typer(
        help=help_text,
        cls=Group,
        context_settings=CONTEXT,
        rich_markup_mode="rich",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        **settings,
    )


def uv_loops() -> Loops:
    """Return uvloop's factory of event loops, which vLLM's server uses too."""
    with extra("cuda", "cpu"):
        import uvloop

    return uvloop.new_event_loop


def command(
    app: typer.Typer, name: str, *, examples: Sequence[str], loops: Callable[[], Loops | None] = lambda: None
) -> Callable[[Function], Function]:
    """Return a decorator that makes a function a command of `app`; its docstring is the help.

    A parameter whose type is a dataclass of options stands for all of its fields. One of type `Terminal` receives the
    terminal, and adds the options of `Output`. Coroutines are run to their end.

    Args:
        app: typer application to add the command to.
        name: name of the command.
        examples: valid calls, one per line, shown after the options.
        loops: returns a factory of event loops for coroutines; None for asyncio's own.
    """

    def register(function: Function) -> Function:
        groups = _groups(function)

        def run(**given: Any) -> None:
            output = Output(**{field: given.pop(field) for field in _names(Output)})
            terminal = Terminal(output)
            for parameter, kind in groups.items():
                given[parameter] = (
                    terminal if kind is Terminal else kind(**{field: given.pop(field) for field in _names(kind)})
                )
            with _reported(terminal):
                from_environment()
                result = function(**given)
                if inspect.iscoroutine(result):
                    with asyncio.Runner(loop_factory=loops()) as runner:
                        runner.run(_until_stopped(result, terminal))

        _describe(run, function, groups)
        app.command(
            name, cls=Command, context_settings=CONTEXT, epilog=_epilog(examples), short_help=_first_sentence(function)
        )(run)
        return function

    return register


def _groups(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of the parameters that stand for the terminal or a group of options, by parameter name."""
    return {
        name: kind
        for name, kind in get_type_hints(function).items()
        if name != "return" and (kind is Terminal or is_dataclass(kind))
    }


def _describe(run: Any, function: Callable[..., Any], groups: Mapping[str, Any]) -> None:
    """Set the signature of `run` that typer reads to that of `function`, with each group replaced by its fields."""
    hints = get_type_hints(function, include_extras=True)
    own = [
        parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in groups
    ]
    spread = [_fields(Output if kind is Terminal else kind) for kind in groups.values()]
    parameters = [_narrow(parameter) for parameter in (*own, *(parameter for group in spread for parameter in group))]
    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = function.__doc__
    run.__name__ = function.__name__


def _narrow(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return the parameter with a short metavar, such as "N": typer's own are too wide for a help of 80 columns."""
    kind, *marks = get_args(parameter.annotation)
    optional = isinstance(kind, UnionType)
    inner = next(part for part in get_args(kind) if part is not type(None)) if optional else kind
    if get_origin(inner) is list:
        (inner,) = get_args(inner)
    words = {int: "N", float: "X", Path: "PATH", str: "TEXT"}
    if inner not in words or not isinstance(marks[0], OptionInfo) or marks[0].metavar:
        return parameter
    mark = copy(marks[0])
    mark.metavar = words[inner]
    return parameter.replace(annotation=Annotated[kind, mark])


def _fields(kind: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name]
        )


def _names(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


def _first_sentence(function: Callable[..., Any]) -> str:
    text = " ".join(inspect.cleandoc(function.__doc__ or "").split())
    return re.split(r"(?<=[.:]) ", text)[0].rstrip(":.") + "."


def _epilog(examples: Sequence[str]) -> str:
    # One paragraph per line: typer would join the lines of one.
    shown = (f"  [cyan]{example.replace('[', chr(92) + '[')}[/cyan]" for example in examples)
    return "\n\n".join(["[bold]Examples[/bold]", *shown])


@contextmanager
def _reported(terminal: Terminal) -> Iterator[None]:
    """Report errors of steercap and of files as one red line with exit code 1; with --debug, raise them."""
    try:
        yield
    except (KeyboardInterrupt, asyncio.CancelledError):
        terminal.say("interrupted")
        raise typer.Exit(130) from None
    except BrokenPipeError:  # the reader has closed the pipe; Python would flush once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise typer.Exit(FAILED) from None
    except (SteercapError, OSError, ExceptionGroup) as error:
        failure = _expected(error)
        if terminal.debug or failure is None:
            raise
        terminal.fail(failure)
        raise typer.Exit(FAILED) from None


def _expected(error: Exception) -> Exception | None:
    """Return the error to report: the first one of a group, or None if any error in it is unexpected."""
    if not isinstance(error, ExceptionGroup):
        return error if isinstance(error, (SteercapError, OSError)) else None
    found = [_expected(inner) for inner in error.exceptions]
    return None if None in found else found[0]


def _stop_at_once(number: int) -> None:
    """Kill the engine's processes, and exit at once with the code of signal `number`: 128 + `number`."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(128 + number)


async def _until_stopped(work: Coroutine[Any, Any, None], terminal: Terminal) -> None:
    """Run `work` to its end; SIGINT or SIGTERM cancels it, so that the engine stops, and a second one exits at once.

    Raises:
        KeyboardInterrupt: SIGINT was received.
        typer.Exit: SIGTERM was received.
    """
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    came: list[int] = []

    def stop(number: int) -> None:
        came.append(number)
        if len(came) > 1:
            _stop_at_once(number)
        terminal.say("stopping; press Ctrl-C again to stop at once")
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except BaseException:
        # Errors that follow from the interruption of the engine are not worth reporting.
        if not came:
            raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    if signal.SIGTERM in came:
        raise typer.Exit(128 + signal.SIGTERM)
    if came:
        raise KeyboardInterrupt
