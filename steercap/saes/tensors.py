"""Readers of other programs' tensor files: shapes are known before tensors are read, and nothing is unpickled."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from steercap.errors import InvalidFile
from steercap.files.base import DAMAGED, array_shape, read_pt

#: Maximum number of bytes of a configuration file; usual ones have 1,000 to 2,000.
MOST_CONFIGURATION: Final = 1 << 20
#: Allowed dtypes of an SAE's tensors, by safetensors' names.
FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
#: Names of tensors that dictionary_learning saves for training alone.
OF_TRAINING: Final = frozenset({"k", "group_sizes", "group_indices", "active_groups"})


class Tensors(NamedTuple):
    """Tensors of one file, read on demand.

    Args:
        path: path of the file.
        shapes: shape of each tensor, by name.
        read: function that returns a tensor by name, as contiguous float32; raises InvalidFile if it is not finite.
    """

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], torch.Tensor]


def read_configuration(path: Path) -> dict[str, object]:
    """Read a JSON object from a configuration file.

    Raises:
        InvalidFile: the file cannot be read, is no JSON object, or is larger than `MOST_CONFIGURATION`.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MOST_CONFIGURATION + 1)
        if len(text) > MOST_CONFIGURATION:
            raise InvalidFile(f"{path} has more than {MOST_CONFIGURATION:,} bytes, too many for a configuration")
        return msgspec.json.decode(text, type=dict[str, object])
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise InvalidFile(f"{path} cannot be read as a JSON object: {error}") from error


def read_safetensors(path: Path) -> Tensors:
    """Open a safetensors file; its tensors are read on demand.

    Raises:
        InvalidFile: the file is missing or damaged, or a tensor is not floating-point.
    """
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 -- it is no mapping
            shapes = {name: tuple(one.get_shape()) for name, one in slices.items()}
            others = sorted(name for name, one in slices.items() if one.get_dtype() not in FLOATS)
    except (SafetensorError, OSError) as error:
        raise InvalidFile(f"{path} cannot be read as a safetensors file: {error}; fetch it again") from error
    if others:
        raise InvalidFile(f"{path}: {', '.join(others)} must be floating-point numbers")

    def read(name: str) -> torch.Tensor:
        try:
            with safe_open(path, framework="pt") as file:
                return _finite(path, name, file.get_tensor(name))
        except (SafetensorError, OSError) as error:
            raise InvalidFile(f"{path}: {name} cannot be read: {error}") from error

    return Tensors(path, shapes, read)


def read_npz(path: Path) -> Tensors:
    """Open an `.npz` file; its arrays are read on demand.

    Raises:
        InvalidFile: the file is missing or damaged, or an array is not floating-point.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            shapes = {one.filename.removesuffix(".npy"): array_shape(archive, one) for one in archive.infolist()}
    except DAMAGED as error:
        raise InvalidFile(f"{path} cannot be read as an .npz of plain arrays: {error}; fetch it again") from error

    def read(name: str) -> torch.Tensor:
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return _finite(path, name, torch.from_numpy(np.array(arrays[name])))
        except (*DAMAGED, TypeError, zlib.error) as error:
            raise InvalidFile(f"{path}: {name} cannot be read: {error}") from error

    return Tensors(path, shapes, read)


def read_pt_tensors(path: Path) -> Tensors:
    """Open a `.pt` file with a dictionary of tensors, without those of `OF_TRAINING`; no code in it is run.

    Raises:
        InvalidFile: the file is missing or damaged, has another object, or a tensor is not floating-point.
    """
    found = read_pt(path)
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise InvalidFile(f"{path} holds {type(found).__name__}; expected a dictionary of tensors by name")
    kept = {name: one for name, one in found.items() if name not in OF_TRAINING}
    if others := sorted(
        name
        for name, one in kept.items()
        if not isinstance(one, torch.Tensor) or not one.is_floating_point() or one.layout != torch.strided
    ):
        raise InvalidFile(f"{path}: {', '.join(others)} must be floating-point numbers")
    shapes = {name: tuple(one.shape) for name, one in kept.items()}
    return Tensors(path, shapes, lambda name: _finite(path, name, kept[name]))


def _finite(path: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Convert a tensor to contiguous float32, checked to be finite.

    Raises:
        InvalidFile: it has NaN, infinity, or a number beyond float32.
    """
    found = tensor.to(torch.float32).contiguous()
    if found.numel() and not all(bool(end.isfinite()) for end in found.aminmax()):
        raise InvalidFile(f"{path}: {name} holds NaN, infinity or a number beyond float32")
    return found
