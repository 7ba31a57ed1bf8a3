"""Output of a command: results on stdout, as tables or as one JSON document, everything else on stderr."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.text import Text

from steercap.concurrency.heartbeat import heartbeat
from steercap.core.protocols import Progress, ProgressCallback
from steercap.errors import CaptureError, EngineFailure, SteeringError

_output = partial(typer.Option, rich_help_panel="Output")


@dataclass(frozen=True)
class Output:
    """Output options of every command: --json, --verbose and --debug."""

    json: Annotated[bool, _output("--json", help="Print only a JSON document on stdout.")] = False
    verbose: Annotated[bool, _output("--verbose", help="Show vLLM's log and every warning on stderr.")] = False
    debug: Annotated[bool, _output("--debug", help="Show the traceback of an error.")] = False


class _Rate(ProgressColumn):
    """Progress column with steps per second."""

    def render(self, task: Task) -> Text:
        seconds = task.finished_time or task.elapsed
        speed = task.completed / seconds if seconds else 0.0
        return Text(f"{speed:,.1f}/s" if speed else "", style="progress.data.speed")


def _is_engines(error: Exception) -> bool:
    """Return whether the engine's log may explain an error; a group counts if any of its errors does."""
    if isinstance(error, ExceptionGroup):
        return any(map(_is_engines, error.exceptions))
    return isinstance(error, (EngineFailure, CaptureError, SteeringError))


def _plain(value: object) -> object:
    """Convert a mapping to a dict and a path to a string, which msgspec can encode; refuse other values."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{value!r} cannot be written as JSON")


class Terminal:
    """Writer of one command's output: results to stdout, remarks, errors and progress to stderr."""

    def __init__(self, output: Output) -> None:
        self.json = output.json
        self.debug = output.debug
        self.verbose = output.verbose
        if self.verbose:  # a level that is set keeps the warnings that are left out else
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        # Names and paths may have [x] and :x: in them.
        plain: Any = {"highlight": False, "markup": False, "emoji": False}
        self.out = Console(**plain)
        self.err = Console(stderr=True, **plain)
        #: Path of vLLM's log, if an engine failed.
        self.log: Path | None = None

    def wants_log(self) -> bool:
        """Return whether the user asked, by --verbose or VLLM_LOGGING_LEVEL, for the log of normal runs too."""
        return self.verbose or os.environ.get("VLLM_LOGGING_LEVEL", "").upper() in {"INFO", "DEBUG"}

    def show(self, document: Any, *tables: RenderableType) -> None:
        """Print the result on stdout: with --json the document, which msgspec can encode, else the tables."""
        if self.json:
            self.write(msgspec.json.format(msgspec.json.encode(document, enc_hook=_plain), indent=2).decode())
            return
        for table in tables:
            self.out.print(table)

    def write(self, line: str) -> None:
        """Write a line to stdout as it is, without wrapping or styles."""
        self.out.file.write(line + "\n")
        self.out.file.flush()

    def say(self, message: str) -> None:
        """Print a remark on stderr, dimmed."""
        self.err.print(Text(message, style="dim"), soft_wrap=True)

    def fail(self, error: Exception) -> None:
        """Print an error as one red line on stderr, then the path of vLLM's log if there is one."""
        message = " ".join(str(error).split()) or type(error).__name__
        self.err.print(Text(f"{type(error).__name__}: {message}", style="red"), soft_wrap=True)
        if self.log is not None:
            self.say(f"vLLM's log: {self.log}")

    @contextmanager
    def progress(self) -> Iterator[ProgressCallback]:
        """Yield a callback whose stages are bars on stderr, with rate and remaining time; without a terminal, lines."""
        bars = Bars(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            _Rate(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.err,
            disable=not self.err.is_interactive,
            redirect_stdout=False,  # output of others goes where `alone` redirects it
            redirect_stderr=False,
        )
        tasks, beginning = dict[str, TaskID](), bars.add_task("preparing", total=None)

        def tell(at: Progress) -> None:
            if not tasks:
                bars.remove_task(beginning)
            if at.stage not in tasks:
                tasks[at.stage] = bars.add_task(at.stage, total=None)
            bars.update(tasks[at.stage], description=at.label, completed=at.done, total=at.total)

        with bars, heartbeat(bars, self.err):
            yield tell

    @contextmanager
    def status(self, message: str) -> Iterator[Callable[[str], None]]:
        """Yield a function that changes `message`, which is shown on stderr with the elapsed time during the block."""
        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        with Bars(
            *columns,
            console=self.err,
            disable=not self.err.is_interactive,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as bar:
            task = bar.add_task(message, total=None)
            with heartbeat(bar, self.err):
                yield lambda said: bar.update(task, description=said)

    @contextmanager
    def warned(self) -> Iterator[None]:
        """Print the user warnings of the block on stderr, also where `alone` redirects it."""
        found: list[warnings.WarningMessage] = []
        try:
            with warnings.catch_warnings(record=True) as found:
                yield
        finally:
            for text in dict.fromkeys(str(one.message) for one in found if issubclass(one.category, UserWarning)):
                self.err.print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)
            for one in found:
                if not issubclass(one.category, UserWarning):
                    warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Redirect all output except this terminal's in the block: to stderr with --verbose, else to a log.

        The log is kept if the engine fails.

        vLLM's processes, and libraries in C, write to file descriptors 1 and 2 regardless of Python's streams.
        """
        with tempfile.TemporaryFile() as log:  # unnamed, so that a killed command leaves no file
            try:
                with contextlib.ExitStack() as stack:
                    target = 2 if self.verbose else log.fileno()
                    for stream, number, console in ((sys.stdout, 1, self.out), (sys.stderr, 2, self.err)):
                        stack.enter_context(_diverted(stream, number, console, target))
                    yield
            except Exception as error:
                if not self.verbose and _is_engines(error):
                    self.log = _kept(log.fileno()) if os.fstat(log.fileno()).st_size else None
                raise


def _kept(descriptor: int) -> Path:
    """Copy the unnamed log with this file descriptor to a new file in the temporary folder; return its path."""
    kept, name = tempfile.mkstemp(prefix="steercap-vllm-", suffix=".log")
    # Opened anew: processes that still write to it share the file position of our descriptor.
    with Path(f"/proc/self/fd/{descriptor}").open("rb") as log, os.fdopen(kept, "wb") as file:
        shutil.copyfileobj(log, file)
    return Path(name)


@contextmanager
def _diverted(stream: Any, number: int, console: Console, target: int) -> Iterator[None]:
    """Redirect descriptor `number` of a stream to `target` in the block; `console` still writes to the old target."""
    try:
        real = stream.fileno() == number
    except (AttributeError, io.UnsupportedOperation):
        real = False
    if not real:  # the stream was replaced by one that no other process writes to
        yield
        return
    stream.flush()
    width, file = console.width, console._file  # noqa: SLF001 -- None where it follows the stream, which no name tells
    ours = os.fdopen(os.dup(number), "w", encoding=stream.encoding, errors=stream.errors)
    try:
        console.file, console.width = ours, width
        os.dup2(target, number)
        yield
    finally:
        stream.flush()
        ours.flush()
        os.dup2(ours.fileno(), number)
        console._file = file  # noqa: SLF001 -- as above: `console.file = None` is not a file
        ours.close()
