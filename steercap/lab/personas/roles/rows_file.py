"""File of a role's rows, from which one layer can be read without the others."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import torch

from steercap.errors import InvalidFile
from steercap.files.base import read_tensors, read_tensors_at
from steercap.lab.personas.roles.folder import RoleFolder

VERSION: Final = 1


class RoleRowsHeader(msgspec.Struct, frozen=True):
    """Header of a file of a role's rows.

    Args:
        version: version of the file.
        role: name of the role.
        layers: layers along the first axis of both tensors: `means`, float32 [layers, questions, hidden], and `norms`,
            the mean norm of the answers' rows, float32 [layers, questions].
        questions: indices of questions along the second axis, ascending.
        counts: number of answers averaged for each question.
        prompts: SHA-256 of the tokens read for each question, in hexadecimal.
    """

    version: int
    role: str
    layers: tuple[int, ...]
    questions: tuple[int, ...]
    counts: tuple[int, ...]
    prompts: tuple[str, ...]


def rows_path(role: RoleFolder) -> Path:
    """Return the path of a role's rows."""
    return role.path / "rows.safetensors"


def read_rows_header(path: Path) -> RoleRowsHeader:
    """Read the header of a file of rows.

    Raises:
        InvalidFile: the file is missing, holds no rows, or is of another version.
    """
    return _header(path, read_tensors(path, tensors=False)[0])


def load_part(path: Path) -> tuple[RoleRowsHeader, torch.Tensor, torch.Tensor]:
    """Read a whole file: its header, and both tensors.

    Raises:
        InvalidFile: as for `read_rows_header`.
    """
    text, tensors = read_tensors(path)
    header = _header(path, text)
    _check(path, header, tuple(tensors["means"].shape[:2]) if {"means", "norms"} <= tensors.keys() else ())
    return header, tensors["means"], tensors["norms"]


def load_layer(path: Path, header: RoleRowsHeader, layer: int) -> torch.Tensor:
    """Read the rows of one layer alone: float32 [questions, hidden].

    Args:
        path: the file.
        header: header of the file.
        layer: layer in the header.

    Raises:
        InvalidFile: the rows cannot be read.
    """
    found = read_tensors_at(path, "means", header.layers.index(layer))
    _check(path, header, (len(header.layers), len(found)))
    return found


def _check(path: Path, header: RoleRowsHeader, shape: tuple[int, ...]) -> None:
    if shape != (len(header.layers), len(header.questions)):
        raise InvalidFile(f"{path} does not hold the rows that its header names; remove the role's folder")


def _header(path: Path, text: str) -> RoleRowsHeader:
    try:
        header = msgspec.json.decode(text, type=RoleRowsHeader)
    except msgspec.MsgspecError as error:
        raise InvalidFile(f"{path} holds no rows of a role: {error}") from error
    if header.version != VERSION:
        raise InvalidFile(f"{path} holds rows in version {header.version}; this steercap reads {VERSION}")
    return header
