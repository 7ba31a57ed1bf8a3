"""Folder of a model's rows of existing answers: what is done, and the rows of personas that are being read.

Those are in a file for each persona, so that neither memory nor a kill matters. It has a record for each answer, in
their order: 16 bytes (a mark, the CRC-32 of the rows), then the rows. The head is written after the rows, so a record
that was cut short by a kill has no mark, and one that a crash of the machine tore has another checksum; such answers
are read again. 2,400 answers of 64 layers × 5,120 float32 take 3.1 GB, none of which is kept in memory: pages of the
file are mapped when they are needed, and the kernel may drop them.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from steercap.errors import InvalidFile, RunDiffers
from steercap.files.base import read_pt, write_whole
from steercap.lab.personas.answer_files import PersonaFiles
from steercap.lab.personas.levels import LevelMeans, LevelPlan, PersonaKind, plan_levels

_MARK: Final = int.from_bytes(b"rows", "little")
_HEAD: Final = struct.Struct("<II8x")
#: Level of a role's default answers.
DEFAULT: Final = "default_1"
#: Names of the dtypes in which rows can be stored.
STORED: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class RowsFile:
    """File of the rows of one persona's answers, written in any order. Close it when done.

    Args:
        path: the file; created if it is missing, else resumed.
        keys: keys of the answers, in the order of their records.
        shape: (layers, hidden).
        dtype: dtype of the stored rows.

    Attributes:
        missing: indices of the answers whose rows are not there, ascending.

    Raises:
        OSError: it cannot be opened, or there is no room for it.
    """

    def __init__(self, path: Path, keys: Sequence[str], shape: tuple[int, int], dtype: torch.dtype) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._keys, self._shape, self._dtype = path, keys, shape, dtype
        self._size = _HEAD.size + math.prod(shape) * dtype.itemsize
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.ftruncate(self._file, len(keys) * self._size)
        self.missing = [index for index in range(len(keys)) if not self._is_whole(index)]

    def _is_whole(self, index: int) -> bool:
        mark, checksum = _HEAD.unpack(os.pread(self._file, _HEAD.size, index * self._size))
        if mark != _MARK:
            return False
        data = os.pread(self._file, self._size - _HEAD.size, index * self._size + _HEAD.size)
        return bool(checksum == zlib.crc32(data))

    def put(self, index: int, rows: torch.Tensor) -> None:
        """Write the rows of an answer, rounded to the stored dtype; a kill at any moment loses at most these.

        Args:
            index: index of the answer.
            rows: float32 [layers, hidden], on the CPU.

        Raises:
            InvalidFile: a row is beyond the range of the stored dtype.
            OSError: they cannot be written.
        """
        assert rows.shape == self._shape, "each layer has a tap"
        stored = rows.to(self._dtype).contiguous()
        if not bool(torch.isfinite(stored).all()):
            raise InvalidFile(f"{self.path}: rows of {self._keys[index]} are beyond {self._dtype}; store float32")
        data = stored.view(torch.uint8).flatten().numpy().data
        start = index * self._size
        _write(self._file, data, start + _HEAD.size)
        _write(self._file, memoryview(_HEAD.pack(_MARK, zlib.crc32(data))), start)

    def rows(self) -> dict[str, torch.Tensor]:
        """Return the rows of all answers, each [layers, hidden] with a storage of its own, mapped from the file."""
        mapped = mmap.mmap(self._file, 0, access=mmap.ACCESS_COPY)
        starts = range(_HEAD.size, len(mapped), self._size)
        flat = (torch.frombuffer(mapped, dtype=self._dtype, count=math.prod(self._shape), offset=at) for at in starts)
        return {key: rows.view(self._shape) for key, rows in zip(self._keys, flat, strict=True)}

    def close(self) -> None:
        """Close the file, which stays to be resumed; `rows` that were mapped stay readable."""
        os.close(self._file)


def _write(file: int, data: memoryview, start: int) -> None:
    while data:
        written = os.pwrite(file, data, start)
        data, start = data[written:], start + written


def save_pt(path: Path, content: Mapping[str, Any]) -> None:
    """Write a dict of tensors as a `.pt`, atomically; equal tensors give equal bytes.

    Given the name of a file, `torch.save` would write that of the temporary one into it.

    Raises:
        OSError: it cannot be written.
    """
    with write_whole(path) as scratch, scratch.open("wb") as file:
        torch.save(dict(content), file)


def load_rows_pt(path: Path, keys: Sequence[str]) -> dict[str, torch.Tensor]:
    """Map the file of the rows of answers.

    Args:
        path: the file.
        keys: keys that it must hold, in their order.

    Returns:
        Mean row [layers, hidden] of each answer, by key.

    Raises:
        InvalidFile: the file is damaged, or has other keys.
    """
    found = read_pt(path, mapped=True)
    if not isinstance(found, dict) or list(found) != list(keys):
        raise InvalidFile(f"{path} does not hold the rows of these answers; remove it to read them again")
    return found


class PersonaReceipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Receipt of a finished persona.

    Args:
        responses, scores: SHA-256 of the answers' file and of the scores, in hexadecimal.
        minimum: as given to `read_answers`.
        answers: number of answers, each of which has its mean.
        levels: number of answers that each level is made of.
        left_out: number of answers, or pairs, that a level could have had, by level and reason.
        unused: number of answers that no level is made of, by reason.
    """

    responses: str
    scores: str
    minimum: int | None
    answers: int
    levels: dict[str, int]
    left_out: dict[str, dict[str, int]]
    unused: dict[str, int]


@dataclass(frozen=True)
class AnswersFolder:
    """Folder of the results, with the names of its files.

    Args:
        path: the folder.
        suffix: end of the names of its subfolders, such as "_vllm_bfloat16".
        kind: "trait" or "role".
        minimum: minimum number of answers of a level, None for the kind's own.
    """

    path: Path
    suffix: str
    kind: PersonaKind
    minimum: int | None

    def activations(self, name: str) -> Path:
        """Return the file of a persona's answers: `LABEL_pP_qQ` to the mean [layers, hidden]."""
        return self.path / f"response_activations{self.suffix}" / f"{name}.pt"

    def vectors(self, name: str) -> Path:
        """Return the file of a persona's levels: level to float32 [layers, hidden]."""
        return self.path / f"vectors{self.suffix}" / f"{name}.pt"

    @property
    def default_vectors(self) -> Path:
        """File of `default_1`, the mean of all answers of a role's default files."""
        return self.path / f"default_vectors{self.suffix}.pt"

    def part(self, files: PersonaFiles) -> Path:
        """Return the path of the file of the rows of a persona that is not finished."""
        return self.path / f"parts{self.suffix}" / f"{files.name}-{files.digest[:16]}.rows"

    def receipt(self, files: PersonaFiles) -> PersonaReceipt | None:
        """Return the receipt of a persona, None if its rows are not there.

        Raises:
            RunDiffers: its answers have changed since they were read.
            InvalidFile: the receipt cannot be read.
        """
        path = self._receipt(files.name)
        if (found := _read_receipt(path)) is None:
            return None
        if found.responses != files.digest:
            raise RunDiffers(
                f"{files.responses} has changed since its answers were read into {self.path}; give another folder, or "
                f"remove {path} to read them again"
            )
        return found if self.activations(files.name).exists() else None

    def perhaps_default(self) -> list[str]:
        """Return the names of the personas that were read and have no levels but that of default answers."""
        receipts = {path.stem: _read_receipt(path) for path in self._receipt("*").parent.glob("*.json")}
        return [name for name, found in receipts.items() if found is not None and not found.levels.keys() - {DEFAULT}]

    def _receipt(self, name: str) -> Path:
        return self.path / f"receipts{self.suffix}" / f"{name}.json"

    def finish(self, files: PersonaFiles, rows: RowsFile) -> None:
        """Write the files of a persona from the rows of all its answers, and remove the file of `part`."""
        found = rows.rows()
        save_pt(self.activations(files.name), found)
        self._save_levels(files, found)
        rows.path.unlink(missing_ok=True)

    def renew(self, files: PersonaFiles) -> PersonaReceipt:
        """Return the receipt of a finished persona; recompute its levels if its scores or `minimum` have changed."""
        found = self.receipt(files)
        assert found is not None, "its answers are read first"
        self.part(files).unlink(missing_ok=True)  # a call that was killed may have left it
        there = self.vectors(files.name).exists() or not found.levels
        if there and (found.scores, found.minimum) == (files.scores_digest, self.minimum):
            return found
        return self._save_levels(files, load_rows_pt(self.activations(files.name), files.keys))

    def _save_levels(self, files: PersonaFiles, rows: Mapping[str, torch.Tensor]) -> PersonaReceipt:
        """Write a persona's receipt and levels.

        Levels without their receipt would pass for those of the receipt before, once its scores are given again. So
        the former ones are removed first, and the new ones, which are made again if they are missing, come last.
        """
        plan = plan_levels(self.kind, files.keys, files.scores or {}, minimum=self.minimum)
        means = means_of(plan, rows.items()) if plan.weights else {}
        self.vectors(files.name).unlink(missing_ok=True)
        levels = {level: len(weights) for level, weights in plan.weights.items()}
        left_out = {level: dict(counts) for level, counts in plan.left_out.items() if counts}
        said = (levels, left_out, dict(plan.unused))
        receipt = PersonaReceipt(files.digest, files.scores_digest, self.minimum, len(files.keys), *said)
        with write_whole(self._receipt(files.name)) as scratch:
            scratch.write_bytes(msgspec.json.format(msgspec.json.encode(receipt), indent=2))
        if means:
            save_pt(self.vectors(files.name), means)
        return receipt

    def save_default(self, files: Sequence[PersonaFiles]) -> int:
        """Write the mean of all answers of finished default files, unscored, and return their number."""
        rows = (
            (f"{one.name}/{key}", mean)
            for one in files
            for key, mean in load_rows_pt(self.activations(one.name), one.keys).items()
        )
        keys = [f"{one.name}/{key}" for one in files for key in one.keys]
        if keys:
            means = means_of(plan_levels("role", keys, {}), rows)
            save_pt(self.default_vectors, {"activations": {DEFAULT: means[DEFAULT]}})
        return len(keys)


def _read_receipt(path: Path) -> PersonaReceipt | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=PersonaReceipt)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidFile(f"{path} cannot be read: {error}; remove it to read the answers again") from error


def means_of(plan: LevelPlan, rows: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the weighted mean of the answers' rows [layers, hidden] for each level: float32, by level."""
    means = LevelMeans(plan)
    for key, mean in rows:
        means.add(key, mean)
    return means.means()
