"""What the formats share: a file appears whole or not at all, and an error about one names it."""

from __future__ import annotations

import contextlib
import difflib
import os
import pickle
import re
import shutil
import struct
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

from steercap.errors import InvalidFile, SteercapError

#: What torch's restricted unpickler raises on damaged files: collected by changing and cutting bytes at random.
_NO_PICKLE: Final = (
    pickle.UnpicklingError,
    struct.error,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    OverflowError,
    MemoryError,
    RuntimeError,
    SafetensorError,  # by the name of the file, torch takes it for one of these
    TypeError,
    ValueError,
)


#: Names of files in a folder that a message lists.
SHOWN: Final = 6
#: The name of a file until it is whole, and the process that writes it.
_SCRATCH: Final = re.compile(r"\..+\.(?P<pid>[0-9a-f]{8})[0-9a-f]{24}")
#: What is written, by the extension of its file.
WRITTEN: Final = {
    ".safetensors": "`save` of a SteeringSpec, LayerVectors, a DirectionSet, a Sketch or a CaptureHandle",
    ".npz": "`save_npz` of a CaptureHandle",
    ".gguf": "`save_control_vector`",
    ".pt": "`save_layers_pt`",
    ".parquet": "tables",
}


def check_extension(path: Path, extension: str) -> None:
    """Check that the name of a file says what will be in it: every program that opens it goes by that.

    Args:
        path: the file.
        extension: of what will be written, one of `WRITTEN`.

    Raises:
        InvalidFile: the name says something else, or nothing.
    """
    if path.suffix.lower() != extension:
        said = f"of {path.suffix}" if path.suffix else "without an extension"
        others = "; ".join(f"{known} is written by {how}" for known, how in WRITTEN.items() if known != extension)
        raise InvalidFile(f"{path} is the name of a file {said}, and this writes {extension}: name it so ({others})")


def require_file(path: Path) -> None:
    """Check that a path is a file with something in it, before a library that reads it says so in words of its own.

    Raises:
        InvalidFile: nothing is there, or a folder, or an empty file.
    """
    if path.is_dir():
        names = sorted(one.name for one in path.iterdir() if one.suffix in WRITTEN and not one.name.startswith("."))
        hint = f"give one of the files in it: {', '.join(names[:SHOWN])}" if names else "give a file"
        more = " ..." if len(names) > SHOWN else ""
        raise InvalidFile(f"{path} cannot be read: it is a folder; {hint}{more}")
    if not path.exists():
        where = path.absolute().parent
        folder = "" if where.is_dir() else f", nor a folder {where}"
        near = difflib.get_close_matches(path.name, [one.name for one in where.glob(f"*{path.suffix}")], n=1)
        raise InvalidFile(
            f"{path} cannot be read: there is no such file{folder}" + (f"; did you mean {near[0]!r}?" if near else "")
        )
    if path.is_file() and not path.stat().st_size:
        raise InvalidFile(f"{path} cannot be read: it is empty; copy or save it again")


@contextmanager
def write_whole(path: Path) -> Iterator[Path]:
    """A path to write to that becomes `path` when the block ends well, and nothing when it does not.

    Raises:
        OSError: it cannot be written, whatever safetensors or torch call it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = _scratch(path)
    try:
        yield scratch
        scratch.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the first error is the one to report
            scratch.unlink(missing_ok=True)
        # safetensors and torch have errors of their own for a full disk.
        if isinstance(error, (SafetensorError, RuntimeError)) and not isinstance(error, SteercapError):
            raise OSError(f"{path} cannot be written: {_first_line(error)}") from error
        raise


def sweep(folder: Path) -> None:
    """Remove what killed processes had begun to write below a folder; what a process that lives writes now stays."""
    for path in [*folder.rglob(".*")]:
        found = _SCRATCH.fullmatch(path.name)
        if found is None or Path(f"/proc/{int(found['pid'], 16)}").exists():
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def write_tensors(path: Path, header: msgspec.Struct, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a safetensors file of steercap: its header is the metadata entry `steercap`, as JSON.

    Raises:
        InvalidFile: the name has another extension.
        OSError: it cannot be written.
    """
    check_extension(path, ".safetensors")
    with write_whole(path) as scratch, _room(path) as room:
        scratch.touch()
        mode = scratch.stat().st_mode  # safetensors would leave a file that only its owner can read
        save_file(tensors, room / path.name, _metadata(header))
        (room / path.name).chmod(mode)
        (room / path.name).replace(scratch)
    return path


def encode_tensors(header: msgspec.Struct, tensors: dict[str, torch.Tensor]) -> bytes:
    """What `write_tensors` writes."""
    return save(tensors, _metadata(header))


def _metadata(header: msgspec.Struct) -> dict[str, str]:
    return {"steercap": msgspec.json.encode(header).decode()}


@contextmanager
def _room(path: Path) -> Iterator[Path]:
    """A folder beside a file while it is written, for a library that writes under names of its own first."""
    room = _scratch(path)
    room.mkdir()
    try:
        yield room
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _scratch(path: Path) -> Path:
    """A name that nobody reads, by which `sweep` knows whose it is."""
    return path.with_name(f".{path.name}.{os.getpid():08x}{uuid.uuid4().hex[:24]}")


def read_tensors(path: Path, *, tensors: bool = True) -> tuple[str, dict[str, torch.Tensor]]:
    """The header and the tensors of a safetensors file of steercap.

    Args:
        path: the file.
        tensors: whether to read them.

    Raises:
        InvalidFile: missing, truncated, or not of steercap.
    """
    require_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if "steercap" not in metadata:
                raise InvalidFile(
                    f"{path} is a safetensors file, but not of steercap: its header has no 'steercap' entry"
                )
            names = file.keys() if tensors else ()
            return metadata["steercap"], {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise InvalidFile(
            f"{path} cannot be read as a safetensors file of steercap: {error}; copy or save it again"
        ) from error


def read_tensors_at(path: Path, name: str, place: int) -> torch.Tensor:
    """What one tensor of a safetensors file holds at one place of its first axis; the rest is not read.

    Args:
        path: the file.
        name: of the tensor.
        place: on its first axis.

    Raises:
        InvalidFile: missing, truncated, or without this tensor or place.
    """
    require_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            found: torch.Tensor = file.get_slice(name)[place]
            return found
    except (SafetensorError, OSError, IndexError) as error:
        raise InvalidFile(f"{path} cannot be read at {name!r}, {place}: {error}; copy or make it again") from error


@contextmanager
def blame(path: Path) -> Iterator[None]:
    """Report values in a file that our types refuse as an error of the file.

    Raises:
        InvalidFile: the block raised a `ValueError`, as every `InvalidRequest` is, or a `TypeError`.
    """
    try:
        yield
    except InvalidFile:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidFile(f"{path} holds something that does not fit: {error}") from error


def read_pt(path: Path) -> Any:
    """What `torch.save` wrote, tensors on the CPU; no code in it is run.

    Raises:
        InvalidFile: missing, truncated, no `.pt` file, or one with more than tensors, numbers, text and containers.
    """
    require_file(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except _NO_PICKLE as error:
        raise InvalidFile(
            f"{path} cannot be read as a .pt file of tensors: {_first_line(error)}; fetch or save it again, "
            "as tensors, numbers, text, dicts and lists only (steercap runs no code from files)"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
