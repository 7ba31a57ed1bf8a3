"""Checks, before an engine is started, that results can be written; their fallback to a temporary file; and the options
of a server's recordings.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, cast, get_args

import typer

from steercap.cli.parsing import layers_of, tokens_of
from steercap.cli.terminal import Terminal
from steercap.config.environment import PREFIX
from steercap.core.extras import require
from steercap.core.spec import CaptureSpec
from steercap.core.values import choices
from steercap.errors import SteercapError

if TYPE_CHECKING:
    from steercap.captures.recordings import RecordLimits, WhenFull
    from steercap.server.record_settings import RecordSettings

RECORDING: Final = "Recording"
#: Option of the commands that write files.
Force: TypeAlias = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]
#: Extras of steercap that writing a file needs, by the file's extension.
BROUGHT: Final = {".gguf": ("gguf",), ".png": ("plots",)}


def file_ready(path: Path, *, extensions: Sequence[str], hint: str = "") -> None:
    """Check that a file can be written, by creating and removing one beside it.

    Call `may_replace` last: it asks the user about an existing file.

    Raises:
        MissingExtra: an extra that writing such a file needs is not installed.
        typer.BadParameter: the extension is not in `extensions`, the path is a folder, or cannot be written to.
    """
    if path.suffix.lower() not in extensions:
        known = ", ".join(extensions)
        raise typer.BadParameter(f"{path}: give a name that ends in {known}{hint}", param_hint="--out")
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; give the name of a file", param_hint="--out")
    require(*BROUGHT.get(path.suffix.lower(), ()))
    _try(path, "--out")


def folder_ready(path: Path, option: str = "--out") -> None:
    """Check that files can be written into a folder, by creating and removing one, and any folders made for it.

    Raises:
        typer.BadParameter: files cannot be written, or the path is a file.
    """
    if path.exists() and not path.is_dir():
        raise typer.BadParameter(f"{path} is a file; give a folder", param_hint=option)
    _try(path / "results", option)


def may_replace(
    path: Path, terminal: Terminal, *, force: bool, pattern: str = "", option: Literal["--out", "--force"] = "--out"
) -> None:
    """Check that existing files may be overwritten: `force` allows it; else ask at a terminal, and refuse elsewhere.

    The files are those in the folder `path` that match the glob `pattern`; without a pattern, `path` itself. `option`,
    which the error names, is "--force" of a command that takes no other name.

    Raises:
        typer.BadParameter: files exist, and there is no terminal to ask on.
        typer.Abort: the user said no.
    """
    there = any(path.glob(pattern)) if pattern else path.exists()
    if not there or force:
        return
    what = f"{path} has {pattern} in it already" if pattern else f"{path} is there already"
    if not (sys.stdin.isatty() and terminal.err.is_terminal):
        advice = "--force" if option == "--force" else "another name, or --force"
        raise typer.BadParameter(f"{what}; give {advice} to write over it", param_hint=option)
    typer.confirm(f"{what}. Write over it?", abort=True, err=True)


def saved(path: Path, save: Callable[[Path], object], terminal: Terminal) -> tuple[Path | None, OSError | None]:
    """Write a result by calling `save` with `path`; if that fails, with a path in a temporary folder.

    Returns:
        Path of the written file, None if neither file could be written, so that the caller prints the result; and the
        error of writing to `path`, None if that worked, which the caller raises after showing everything else.
    """
    try:
        save(path)
    except OSError as error:
        try:
            rescue = Path(tempfile.mkdtemp(prefix="steercap-")) / path.name
            save(rescue)
        except OSError:
            terminal.say(f"{path} cannot be written; its content is on stdout")
            return None, error
        terminal.say(f"{path} cannot be written; it is {rescue}")
        return rescue, error
    return path, None


def _try(path: Path, option: str) -> None:
    """Check that a file can be created at a path, by creating one of a similar name; remove it and new folders."""
    missing = [folder for folder in path.parents if not folder.exists()]
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    made: list[Path] = []
    try:
        for folder in reversed(missing):
            folder.mkdir()
            made.append(folder)
        scratch.touch(exist_ok=False)
        scratch.unlink()
    except OSError as error:
        raise typer.BadParameter(
            f"{path.parent} cannot be written to: {error.strerror}; give another place", param_hint=option
        ) from error
    finally:
        for folder in reversed(made):
            with contextlib.suppress(OSError):  # another process has put something there meanwhile
                folder.rmdir()


def _record(name: str, says: str, **more: Any) -> Any:
    """Return a command-line option of a server's recordings, which an environment variable sets too."""
    variable = f"{PREFIX}{name.partition('/')[0].upper().replace('-', '_')}"
    flags = "/".join(f"--{part}" for part in name.split("/"))
    return typer.Option(flags, help=says, envvar=variable, show_envvar=False, rich_help_panel=RECORDING, **more)


@contextlib.contextmanager
def _named(option: str) -> Iterator[None]:
    """Re-raise errors of the block as errors of the value of an option, named `option`."""
    try:
        yield
    except (typer.BadParameter, SteercapError) as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


@dataclass(frozen=True)
class RecordOptions:
    """Options for what a server records of requests that do not ask for captures."""

    record: Annotated[str | None, _record("record", "Folder to record requests to.", metavar="PATH")] = None
    no_record: Annotated[
        bool,
        typer.Option("--no-record", help="Record nothing, whatever the environment says.", rich_help_panel=RECORDING),
    ] = False
    record_site: Annotated[
        list[str] | None,
        _record(
            "record-site", "Site to record, and its codec; repeatable (default resid_post).", metavar="SITE=CODEC,k=N"
        ),
    ] = None
    record_layers: Annotated[str, _record("record-layers", "Layers to record.")] = "all"
    record_tokens: Annotated[str, _record("record-tokens", "Tokens to record.")] = "all"
    record_fraction: Annotated[
        float, _record("record-fraction", "Fraction of the prompts to record, with all their samples.", min=0, max=1)
    ] = 1
    record_gib: Annotated[float, _record("record-gib", "Maximum GiB of recordings.", min=0)] = 64
    record_full: Annotated[
        str, _record("record-full", "At the maximum: drop later prompts, or rotate: remove the oldest.")
    ] = "drop"
    record_hours: Annotated[
        float | None, _record("record-hours", "Hours until recordings are removed (default: never).", min=0)
    ] = None
    record_prompts: Annotated[
        bool, _record("record-prompts/no-record-prompts", "Record the prompts' token ids beside rows.")
    ] = True

    def settings(self) -> RecordSettings | None:
        """Return the settings of the recorder; None without --record, or with --no-record.

        Raises:
            typer.BadParameter: the value of an option, which the error names, is not valid.
        """
        if self.no_record:
            if self.record is not None and self.record != os.environ.get(f"{PREFIX}RECORD"):
                raise typer.BadParameter("give --record or --no-record, not both", param_hint="--no-record")
            return None
        if self.record is None:
            if self != RecordOptions():
                raise typer.BadParameter("the other --record-... options need it; give a folder", param_hint="--record")
            return None
        from steercap.architectures.sites import SITES
        from steercap.captures.site_codecs import SiteCodecs
        from steercap.server.record_settings import RecordSettings

        if not self.record.strip():
            raise typer.BadParameter(f"{self.record!r}; give the path of a folder", param_hint="--record")
        folder = Path(self.record)
        folder_ready(folder, "--record")
        with _named("--record-site"):
            codecs = SiteCodecs.parse(self.record_site or ["resid_post"])
            for site in codecs.sites:
                SITES[site]
        with _named("--record-layers"):
            layers = layers_of(self.record_layers)
            codecs.spec(layers=layers)
        with _named("--record-tokens"):
            tokens = tokens_of(self.record_tokens)
            generated = codecs.spec(tokens=tokens).tokens == CaptureSpec(tokens="generated").tokens
        if not 0 < self.record_fraction <= 1:
            raise _refused("fraction", self.record_fraction, "a number above 0, up to 1")
        if not (self.record_prompts or generated):
            said = "rows of prompts are recorded; give --record-tokens generated beside it"
            raise typer.BadParameter(said, param_hint="--no-record-prompts")
        asked: dict[str, Any] = {"fraction": self.record_fraction, "prompts": self.record_prompts}
        return RecordSettings(folder, codecs, layers, tokens, limits=self._limits(), **asked)

    def _limits(self) -> RecordLimits:
        """Return the limits of the folder of recordings: total size, age, and size and age of a segment."""
        from steercap.captures.recordings import RecordLimits, WhenFull

        if not 1 <= self.record_gib * 2**30 < math.inf:
            raise _refused("gib", self.record_gib, "a number of at least 1e-9")
        if self.record_hours is not None and not self.record_hours > 0:
            raise _refused("hours", self.record_hours, "a number above 0")
        if self.record_full not in get_args(WhenFull):
            hint = choices(self.record_full, get_args(WhenFull))
            raise typer.BadParameter(f"{self.record_full!r}; {hint}", param_hint="--record-full")
        keep = None if self.record_hours is None else self.record_hours * 3600
        whole = int(self.record_gib * 2**30)
        return RecordLimits(
            most_bytes=whole,
            when_full=cast("WhenFull", self.record_full),
            keep_seconds=keep,
            segment_bytes=max(1, min(RecordLimits.segment_bytes, whole // 8)),
            segment_seconds=min(RecordLimits.segment_seconds, keep or RecordLimits.segment_seconds),
        )


def _refused(name: str, value: float, accepted: str) -> typer.BadParameter:
    """Return the error for a number that the option `--record-NAME` does not accept."""
    return typer.BadParameter(f"{value}; give {accepted}", param_hint=f"--record-{name}")
