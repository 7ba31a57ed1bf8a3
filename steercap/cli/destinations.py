"""Where results go: seen to before an engine is started, and saved elsewhere if writing fails all the same."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import typer

from steercap.cli.terminal import Terminal
from steercap.core.extras import require

#: What writes a file, by its extension, where it is an extra.
BROUGHT: Final = {".gguf": ("gguf",), ".png": ("plots",)}


def file_ready(path: Path, *, extensions: Sequence[str], option: str = "--out", hint: str = "") -> None:
    """Check that a file can be written, by writing one beside it; whether one that is there may go is asked last, by
    `may_replace`.

    Args:
        path: the file.
        extensions: those of what is written, such as ".safetensors".
        option: what the user gave the path by.
        hint: what else to say where the extension is another.

    Raises:
        MissingExtra: what writes such a file is not installed.
        typer.BadParameter: another extension, a folder, or a place where nothing can be written.
    """
    if path.suffix.lower() not in extensions:
        known = ", ".join(extensions)
        raise typer.BadParameter(f"{path}: give a name that ends in {known}{hint}", param_hint=option)
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; give the name of a file", param_hint=option)
    require(*BROUGHT.get(path.suffix.lower(), ()))
    _try(path, option)


def folder_ready(path: Path, option: str = "--out") -> None:
    """Check that files can be written into a folder, which is made when the first is.

    Raises:
        typer.BadParameter: they cannot, or it is a file.
    """
    if path.exists() and not path.is_dir():
        raise typer.BadParameter(f"{path} is a file; give a folder", param_hint=option)
    _try(path / "results", option)


def may_replace(path: Path, terminal: Terminal, *, force: bool, pattern: str = "", option: str = "--out") -> None:
    """Check that nothing is written over that is to stay. Whether it may go is asked at a terminal;
    elsewhere `force` must say it.

    Args:
        path: a file, or a folder.
        terminal: where to ask.
        force: whether what is there may be written over.
        pattern: of the files of a folder that would be.
        option: what the user gave the path by.

    Raises:
        typer.BadParameter: something is there that is to stay.
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
    """Write a result; where that fails, beneath the temporary folder.

    Args:
        path: the file.
        save: writes one.
        terminal: for what is said.

    Returns:
        Where it is, None if nowhere: then the caller prints it; and why it is not where it should be, None if it is,
        which the caller raises when all else has been shown.
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
    """Write a file of a like name, and leave everything as it was."""
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
            with contextlib.suppress(OSError):  # somebody else has put something there meanwhile
                folder.rmdir()
