"""Destinations of results: checked before an engine is started, and replaced by a temporary file if writing fails; and
the options of what a server records, and where.
"""

from __future__ import annotations

import contextlib
import math
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from steercap.cli.parsing import layers_of, tokens_of
from steercap.cli.terminal import Terminal
from steercap.config.environment import PREFIX
from steercap.core.extras import require

if TYPE_CHECKING:
    from steercap.server.recording import RecordSettings

#: Extras that writing a file needs, by its extension.
BROUGHT: Final = {".gguf": ("gguf",), ".png": ("plots",)}


def file_ready(path: Path, *, extensions: Sequence[str], option: str = "--out", hint: str = "") -> None:
    """Check that a file can be written, by writing one beside it.

    Call `may_replace` last: it asks the user about an existing file.

    Raises:
        MissingExtra: an extra that writing such a file needs is not installed.
        typer.BadParameter: another extension, a folder, or an unwritable place.
    """
    if path.suffix.lower() not in extensions:
        known = ", ".join(extensions)
        raise typer.BadParameter(f"{path}: give a name that ends in {known}{hint}", param_hint=option)
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; give the name of a file", param_hint=option)
    require(*BROUGHT.get(path.suffix.lower(), ()))
    _try(path, option)


def folder_ready(path: Path, option: str = "--out") -> None:
    """Check that files can be written into a folder; the folder is created with the first file.

    Raises:
        typer.BadParameter: files cannot be written, or the path is a file.
    """
    if path.exists() and not path.is_dir():
        raise typer.BadParameter(f"{path} is a file; give a folder", param_hint=option)
    _try(path / "results", option)


def may_replace(path: Path, terminal: Terminal, *, force: bool, pattern: str = "", option: str = "--out") -> None:
    """Check that existing files may be overwritten: ask at a terminal; elsewhere `force` must allow it.

    The files are those of a pattern in the folder `path`, if there is one, and else `path` itself.

    Raises:
        typer.BadParameter: files exist, and there is no terminal to ask on.
        typer.Abort: the user said no.
    """
    there = any(path.glob(pattern)) if pattern else path.exists()
    if not there or force:
        return
    what = f"{path} has {pattern} in it already" if pattern else f"{path} is there already"
    if not (sys.stdin.isatty() and terminal.err.is_terminal):
        raise typer.BadParameter(f"{what}; give another name, or --force to write over it", param_hint=option)
    typer.confirm(f"{what}. Write over it?", abort=True, err=True)


def saved(path: Path, save: Callable[[Path], object], terminal: Terminal) -> tuple[Path | None, OSError | None]:
    """Write a result; if that fails, write it to a temporary folder.

    Returns:
        Path of the written file, None if it could not be written: then the caller prints the result; and the error of
        the first attempt, None if it worked, which the caller raises after showing everything else.
    """
    try:
        save(path)
    except OSError as error:
        try:
            rescue = Path(tempfile.mkdtemp(prefix="steercap-")) / path.name
            save(rescue)
        except OSError:
            terminal.say(f"{path} cannot be written; what was to be in it is on stdout")
            return None, error
        terminal.say(f"{path} cannot be written; it is {rescue}")
        return rescue, error
    return path, None


def _try(path: Path, option: str) -> None:
    """Create and remove a file of a similar name, leaving everything as it was."""
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
    """Return an option of a server's recordings, which its environment variable sets too."""
    variable = f"{PREFIX}{name.partition('/')[0].upper().replace('-', '_')}"
    flags = "/".join(f"--{part}" for part in name.split("/"))
    return typer.Option(flags, help=says, envvar=variable, show_envvar=False, rich_help_panel="Recording", **more)


@dataclass(frozen=True)
class RecordOptions:
    """Options for what is recorded of requests that ask for nothing."""

    record: Annotated[Path | None, _record("record", "Folder to record requests to.")] = None
    record_site: Annotated[
        list[str] | None,
        _record(
            "record-site", "Site to record, and its codec; repeatable (default resid_post).", metavar="SITE=CODEC,k=N"
        ),
    ] = None
    record_layers: Annotated[str, _record("record-layers", "Layers to record.")] = "all"
    record_tokens: Annotated[str, _record("record-tokens", "Tokens to record.")] = "all"
    record_fraction: Annotated[
        float, _record("record-fraction", "Fraction of the requests to record.", min=0, max=1)
    ] = 1
    record_gib: Annotated[float, _record("record-gib", "Maximum GiB of recordings.", min=0)] = 64
    record_full: Annotated[
        str, _record("record-full", "At the maximum: drop later requests, or rotate: remove the oldest.")
    ] = "drop"
    record_hours: Annotated[
        float | None, _record("record-hours", "Hours until recordings are removed (default: never).", min=0)
    ] = None
    record_prompts: Annotated[
        bool, _record("record-prompts/no-record-prompts", "Record the prompts' token ids beside rows.")
    ] = True

    def settings(self) -> RecordSettings | None:
        """Return the settings of the recorder; None without --record.

        Raises:
            typer.BadParameter: a folder that cannot be written, layers or tokens that cannot be parsed.
            InvalidSetting, InvalidSpec, UnknownName: something that does not fit.
        """
        if self.record is None:
            if self != RecordOptions():
                raise typer.BadParameter("nothing is recorded without it", param_hint="--record")
            return None
        from steercap.captures.recordings import RecordLimits
        from steercap.captures.site_codecs import SiteCodecs
        from steercap.server.recording import RecordSettings

        folder_ready(self.record, "--record")
        keep = None if self.record_hours is None else self.record_hours * 3600
        if not 0 < self.record_gib < math.inf:
            raise typer.BadParameter(f"{self.record_gib}; give a number above 0", param_hint="--record-gib")
        whole = int(self.record_gib * 2**30)
        limits = RecordLimits(
            most_bytes=whole,
            when_full=self.record_full,  # type: ignore[arg-type]  # it is checked there
            keep_seconds=keep,
            segment_bytes=max(1, min(RecordLimits.segment_bytes, whole // 8)),
            segment_seconds=min(RecordLimits.segment_seconds, keep or RecordLimits.segment_seconds),
        )
        return RecordSettings(
            self.record,
            SiteCodecs.parse(self.record_site or ["resid_post"]),
            layers_of(self.record_layers),
            tokens_of(self.record_tokens),
            fraction=self.record_fraction,
            prompts=self.record_prompts,
            limits=limits,
        )
