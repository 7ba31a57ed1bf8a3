"""Shared helpers of all file formats: atomic writes, safe reads, and errors that name the file."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import re
import shutil
import struct
import time
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from steercap.errors import InvalidFile, SteercapError
from steercap.files.fingerprint import nearest_path
from steercap.files.tensors import encoded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Errors of torch's restricted unpickler on damaged files, collected by changing and cutting bytes at random.
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


#: Errors that reading a damaged zip archive raises.
DAMAGED: Final = (zipfile.BadZipFile, OSError, ValueError, EOFError, KeyError, NotImplementedError)
#: Maximum number of file names that an error message lists.
SHOWN: Final = 6
#: Temporary name of a file that is still being written; it contains the id of the writing process and its `_place`.
_SCRATCH: Final = re.compile(r"\..+\.(?P<pid>[0-9a-f]{8})(?P<place>[0-9a-f]{8})[0-9a-f]{16}")
#: Seconds after its last change in which a temporary file of another place may still be written.
_LASTING: Final = 86_400
#: Names of the methods that write files, by extension, for messages.
WRITING_METHODS: Final = {
    ".safetensors": "`save` of a SteeringSpec, LayerVectors, a DirectionSet, a Sketch or a CaptureHandle",
    ".npz": "`save_npz` of a CaptureHandle",
    ".gguf": "`save_control_vector`",
    ".pt": "`save_layers_pt`, `save_levels`",
    ".parquet": "tables",
}


def check_extension(path: Path, extension: str) -> None:
    """Check that a file name ends in `extension`, a key of `WRITING_METHODS` with its dot.

    Raises:
        InvalidFile: the name has another extension, or none.
    """
    if path.suffix.lower() != extension:
        said = f"of {path.suffix}" if path.suffix else "without an extension"
        others = "; ".join(f"{one} is written by {how}" for one, how in WRITING_METHODS.items() if one != extension)
        raise InvalidFile(
            f"{path} is a file name {said}, and this call writes {extension}; give a name that ends in {extension} "
            f"({others})"
        )


def require_file(path: Path) -> None:
    """Check that a path is a non-empty file, so that the error is clearer than that of the library that reads it.

    Raises:
        InvalidFile: the path does not exist, is a folder, or is an empty file.
    """
    if path.is_dir():
        files = [file.name for file in path.iterdir() if file.suffix in WRITING_METHODS]
        names = sorted(name for name in files if not name.startswith("."))
        hint = f"give one of the files in it: {', '.join(names[:SHOWN])}" if names else "give a file"
        raise InvalidFile(f"{path} cannot be read: it is a folder; {hint}{' ...' * (len(names) > SHOWN)}")
    if not path.exists():
        raise InvalidFile(f"{path} cannot be read: there is no such file{nearest_path(path)}")
    if path.is_file() and not path.stat().st_size:
        raise InvalidFile(f"{path} cannot be read: it is empty; copy or save it again")


@contextmanager
def write_whole(path: Path, mode: int | None = None) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block succeeds, and is removed when it raises.

    Args:
        path: final path of the file, which replaces a symbolic link there; missing parent folders are created.
        mode: permissions of the file from the start; None for those that the umask leaves.

    Raises:
        OSError: the file cannot be written; errors of safetensors and torch are converted to this.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = _scratch(path)
    try:
        if mode is not None:
            scratch.touch(mode=mode)
        yield scratch
        scratch.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the first error is the one to report
            scratch.unlink(missing_ok=True)
        # safetensors and torch have errors of their own for a full disk.
        if isinstance(error, (SafetensorError, RuntimeError)) and not isinstance(error, SteercapError):
            raise OSError(f"{path} cannot be written: {_first_line(error)}") from error
        raise


def save_figure(figure: Figure, path: str | Path, dpi: int, **further: Any) -> Path:
    """Write a matplotlib figure to a file, whole or not at all, and return its path.

    The suffix sets the format, PNG without one. `dpi` is in dots per inch; `further` goes to `Figure.savefig`.
    """
    with write_whole(Path(path)) as scratch:
        figure.savefig(scratch, dpi=dpi, format=Path(path).suffix[1:] or "png", **further)
    return Path(path)


def sweep(folder: Path) -> None:
    """Remove temporary files that killed processes left in a folder and those below; files of living processes stay.

    Files of processes of other machines and containers, which cannot be seen, stay for `_LASTING` after their change.
    """
    for path in [*folder.rglob(".*")]:
        if (found := _SCRATCH.fullmatch(path.name)) is None:
            continue
        with contextlib.suppress(FileNotFoundError):  # by now it has its name
            written = path.stat().st_mtime > time.time() - _LASTING
            if found["place"] == _place():
                written = Path(f"/proc/{int(found['pid'], 16)}").exists()
            if not written and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif not written:
                path.unlink()


@functools.cache
def _place() -> str:
    """Return eight digits for the boot of this machine and the namespace of the process ids seen here."""
    seen = ""
    for read, path in ((Path.read_text, "/proc/sys/kernel/random/boot_id"), (Path.readlink, "/proc/self/ns/pid")):
        with contextlib.suppress(OSError):  # a sandbox may lack one
            seen += str(read(Path(path)))
    return hashlib.sha256(seen.encode()).hexdigest()[:8]


def write_tensors(
    path: Path, header: msgspec.Struct, tensors: dict[str, torch.Tensor], mode: int | None = None
) -> Path:
    """Write a safetensors file of steercap, whole or not at all; `header`, as JSON, is the metadata entry `steercap`.

    Returns the path; `mode` as for `write_whole`.

    Raises:
        InvalidFile: the name has another extension than .safetensors.
        OSError: the file cannot be written.
    """
    check_extension(path, ".safetensors")
    pieces = {name: (tensor,) for name, tensor in tensors.items()}
    with write_whole(path, mode) as scratch:
        try:
            with scratch.open("wb") as file:
                file.writelines(encoded(pieces, _metadata(header)))  # tensors may be mapped, and larger than memory
        except OSError as error:
            raise OSError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def encode_tensors(header: msgspec.Struct, tensors: dict[str, torch.Tensor]) -> bytes:
    """Return the bytes of the file that `write_tensors` would write."""
    return save(tensors, _metadata(header))


def _metadata(header: msgspec.Struct) -> dict[str, str]:
    return {"steercap": msgspec.json.encode(header).decode()}


def _scratch(path: Path) -> Path:
    """Return a unique temporary name beside `path`, which contains the process id and the place for `sweep`."""
    return path.with_name(f".{path.name}.{os.getpid():08x}{_place()}{uuid.uuid4().hex[:16]}")


def read_tensors(path: Path, *, tensors: bool = True) -> tuple[str, dict[str, torch.Tensor]]:
    """Read a safetensors file of steercap: its header as JSON text, and its tensors by name ({} without `tensors`).

    Raises:
        InvalidFile: the file is missing, truncated, or not of steercap.
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
    """Read index `place` of the first axis of the tensor `name` in a safetensors file, and nothing else.

    Raises:
        InvalidFile: the file is missing or truncated, or lacks this tensor or index.
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
    """Context manager that converts value and type errors of decoding to `InvalidFile` with the file's name.

    Raises:
        InvalidFile: the block raised a `ValueError`, as every `InvalidRequest` is, or a `TypeError`.
    """
    try:
        yield
    except InvalidFile:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidFile(f"{path} has content that is not valid: {error}") from error


def read_pt(path: Path, *, mapped: bool = False) -> Any:
    """Read a file that `torch.save` wrote, with its tensors on the CPU; no code in it is run.

    Args:
        path: the file.
        mapped: True to map the tensors' memory from the file, whose pages are then read on first use.

    Raises:
        InvalidFile: the file is missing, truncated, no `.pt`, or has more than tensors, numbers, text and containers.
    """
    require_file(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except _NO_PICKLE as error:
        raise InvalidFile(
            f"{path} cannot be read as a .pt file of tensors: {_first_line(error)}; fetch or save it again, "
            "as tensors, numbers, text, dicts and lists only (steercap runs no code from files)"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def array_shape(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, kinds: str = "f", text: str = "floating-point numbers"
) -> tuple[int, ...]:
    """Return the shape of an array in an `.npz`, from the array's header.

    Args:
        archive, member: the open `.npz`, and its entry for the array.
        kinds, text: kinds of dtype that are accepted, by NumPy's letters and in words.

    Raises:
        ValueError: the array has another dtype, or another size than its header declares.
    """
    with archive.open(member) as file:
        lib: Any = np.lib.format
        version = lib.read_magic(file)
        shape, _, dtype = (lib.read_array_header_1_0 if version == (1, 0) else lib.read_array_header_2_0)(file)
        size, header = int(np.prod(shape, dtype=object)) * dtype.itemsize, file.tell()
    if dtype.kind not in kinds:
        raise ValueError(f"{member.filename} is of {dtype}, but must be {text}")
    if header + size != member.file_size:
        raise ValueError(f"{member.filename} declares {size:,} bytes and has {member.file_size - header:,}")
    return tuple(shape)
