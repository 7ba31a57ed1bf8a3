"""The file of a role's rows, of which one layer can be read without the others."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import torch

from steercap.errors import InvalidFile
from steercap.files.base import read_tensors, read_tensors_at
from steercap.lab.personas.roles.folder import RoleFolder

VERSION: Final = 1


class RowsHeader(msgspec.Struct, frozen=True):
    """The header of a file of a role's rows.

    Args:
        version: of the file.
        role: whose they are.
        layers: what the first axis of both tensors is: `means`, float32 [layers, questions, hidden], and `norms`,
            the mean length of the answers' rows, float32 [layers, questions].
        questions: what the second axis is: places of questions, ascending.
        counts: how many answers are behind each.
        prompts: SHA-256 of what was read for each, in hexadecimal.
    """

    version: int
    role: str
    layers: tuple[int, ...]
    questions: tuple[int, ...]
    counts: tuple[int, ...]
    prompts: tuple[str, ...]


def rows_path(role: RoleFolder) -> Path:
    """Where the rows of a role are."""
    return role.path / "rows.safetensors"


def read_rows_header(path: Path) -> RowsHeader:
    """What a file of rows says of itself.

    Raises:
        InvalidFile: no such file, or not of rows, or of another version.
    """
    return _header(path, read_tensors(path, tensors=False)[0])


def load_part(path: Path) -> tuple[RowsHeader, torch.Tensor, torch.Tensor]:
    """All of a file: its header, and both tensors.

    Raises:
        InvalidFile: as for `read_rows_header`.
    """
    text, tensors = read_tensors(path)
    header = _header(path, text)
    _check(path, header, tuple(tensors["means"].shape[:2]) if {"means", "norms"} <= tensors.keys() else ())
    return header, tensors["means"], tensors["norms"]


def load_layer(path: Path, header: RowsHeader, layer: int) -> torch.Tensor:
    """The rows of one layer, and no others: float32 [questions, hidden].

    Args:
        path: the file.
        header: its own.
        layer: one of the header's.

    Raises:
        InvalidFile: they cannot be read.
    """
    found = read_tensors_at(path, "means", header.layers.index(layer))
    _check(path, header, (len(header.layers), len(found)))
    return found


def _check(path: Path, header: RowsHeader, shape: tuple[int, ...]) -> None:
    if shape != (len(header.layers), len(header.questions)):
        raise InvalidFile(f"{path} does not hold the rows that its header names; remove the role's folder")


def _header(path: Path, text: str) -> RowsHeader:
    try:
        header = msgspec.json.decode(text, type=RowsHeader)
    except msgspec.MsgspecError as error:
        raise InvalidFile(f"{path} holds no rows of a role: {error}") from error
    if header.version != VERSION:
        raise InvalidFile(f"{path} holds rows in version {header.version}; this steercap reads {VERSION}")
    return header
