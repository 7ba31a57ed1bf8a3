"""Folder of a model's mean rows of existing answers: results and receipts of personas, and rows still being read.

While a persona's answers are read, their rows are in a file of its own, with a record for each answer, in order: a
header of 16 bytes (a mark and the CRC-32 of the rows), then the rows. The header is written last, so a record that a
kill cut short has no mark, and one damaged by a crash of the machine fails the checksum; such answers are read again.
2,400 answers of 64 layers × 5,120 float32 take 3.1 GB, none of which is kept in memory: the file is mapped, and the
kernel may drop its pages.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
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
#: Name of the level of a role's default answers.
DEFAULT: Final = "default_1"
#: Dtypes in which rows can be stored, by name.
STORED: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class RowsFile:
    """File of the mean rows of one persona's answers, which can be written in any order. Close it when done.

    Args:
        path: the file; created if it is missing, else resumed.
        keys: keys of the answers, in the order of their records.
        shape: shape of an answer's rows, (layers, hidden).
        dtype: dtype of the stored rows.

    Attributes:
        missing: indices of the answers whose rows were not in the file when it was opened, ascending.

    Raises:
        OSError: the file cannot be opened or created.
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
        """Write the rows of an answer, rounded to the stored dtype; if the process is killed, only these can be lost.

        Args:
            index: index of the answer.
            rows: float32 [layers, hidden], on the CPU.

        Raises:
            InvalidFile: an element of a row is beyond the range of the stored dtype.
            OSError: the rows cannot be written.
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
        """Return the rows of each answer by key: [layers, hidden], stored dtype, own storage, mapped from the file."""
        mapped = mmap.mmap(self._file, 0, access=mmap.ACCESS_COPY)
        starts = range(_HEAD.size, len(mapped), self._size)
        flat = (torch.frombuffer(mapped, dtype=self._dtype, count=math.prod(self._shape), offset=at) for at in starts)
        return {key: rows.view(self._shape) for key, rows in zip(self._keys, flat, strict=True)}

    def close(self) -> None:
        """Close the file, without removing it; tensors returned by `rows` stay readable."""
        os.close(self._file)


def _write(file: int, data: memoryview, start: int) -> None:
    while data:
        written = os.pwrite(file, data, start)
        data, start = data[written:], start + written


def save_pt(path: Path, content: Mapping[str, Any]) -> None:
    """Write a dict of tensors as a `.pt`, atomically; equal tensors give equal bytes.

    `torch.save` is given an open file: given a path, it would store the temporary file's name in the archive.

    Raises:
        OSError: it cannot be written.
    """
    with write_whole(path) as scratch:
        _save_to(scratch, content)


def _save_to(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("wb") as file:
        torch.save(dict(content), file)


def load_rows_pt(path: Path, keys: Sequence[str]) -> dict[str, torch.Tensor]:
    """Load the mean rows of a persona's answers from a `.pt`, memory-mapped.

    Args:
        path: the file.
        keys: keys that the file must contain, in this order.

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
    """Receipt of a finished persona, stored as JSON: its inputs, and counts of the results.

    Args:
        responses, scores: SHA-256 of the answers' file and of the scores, in hexadecimal.
        minimum: minimum number of answers of a level, as given to `read_answers`.
        answers: number of answers, each with a mean row per layer.
        levels: number of answers averaged in each level, by level.
        left_out: number of candidate answers, or pairs of them, left out of each level, by level and reason.
        unused: number of answers in no level, by reason.
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
    """Folder of results of `read_answers`: paths of its files, and methods that write them.

    Args:
        path: the folder.
        suffix: end of the names of its subfolders, such as "_vllm_bfloat16".
        kind: "trait" or "role".
        minimum: minimum number of answers of a level, None for the kind's default.
    """

    path: Path
    suffix: str
    kind: PersonaKind
    minimum: int | None

    def activations(self, name: str) -> Path:
        """Return the path of a persona's mean rows: a `.pt`, answer key `LABEL_pP_qQ` to [layers, hidden]."""
        return self.path / f"response_activations{self.suffix}" / f"{name}.pt"

    def vectors(self, name: str) -> Path:
        """Return the path of a persona's levels: a `.pt`, name of the level to float32 [layers, hidden]."""
        return self.path / f"vectors{self.suffix}" / f"{name}.pt"

    @property
    def default_vectors(self) -> Path:
        """Path of the `.pt` with `default_1`, the mean of all answers of the default files of roles."""
        return self.path / f"default_vectors{self.suffix}.pt"

    def part(self, files: PersonaFiles) -> Path:
        """Return the path of the `RowsFile` of a persona whose answers are still being read."""
        return self.path / f"parts{self.suffix}" / f"{files.name}-{files.digest[:16]}.rows"

    def receipt(self, files: PersonaFiles) -> PersonaReceipt | None:
        """Return the receipt of a persona, None if it is not finished.

        Raises:
            RunDiffers: the file of the persona's answers has changed since it was read.
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
        """Return the names of finished personas with no level other than that of default answers, `default_1`."""
        receipts = {path.stem: _read_receipt(path) for path in self._receipt("*").parent.glob("*.json")}
        return [name for name, found in receipts.items() if found is not None and not found.levels.keys() - {DEFAULT}]

    def _receipt(self, name: str) -> Path:
        return self.path / f"receipts{self.suffix}" / f"{name}.json"

    def finish(self, files: PersonaFiles, rows: RowsFile) -> None:
        """Write a persona's mean rows, levels and receipt from the rows of all its answers; remove the file `rows`."""
        found = rows.rows()
        save_pt(self.activations(files.name), found)
        self._save_levels(files, found)
        rows.path.unlink(missing_ok=True)

    def renew(self, files: PersonaFiles) -> PersonaReceipt:
        """Return the receipt of a finished persona, after recomputing levels if scores or `minimum` have changed."""
        found = self.receipt(files)
        assert found is not None, "its answers are read first"
        self.part(files).unlink(missing_ok=True)  # a call that was killed may have left it
        there = self.vectors(files.name).exists() or not found.levels
        if there and (found.scores, found.minimum) == (files.scores_digest, self.minimum):
            return found
        return self._save_levels(files, load_rows_pt(self.activations(files.name), files.keys))

    def _save_levels(self, files: PersonaFiles, rows: Mapping[str, torch.Tensor]) -> PersonaReceipt:
        """Compute a persona's levels from its rows, write them and the receipt, and return the receipt.

        Once all is written, old levels are removed first and new ones named last, so that a killed process leaves no
        levels beside the receipt of others; missing levels are computed again by `renew`.
        """
        plan = plan_levels(self.kind, files.keys, files.scores or {}, minimum=self.minimum)
        means = means_of(plan, rows.items()) if plan.weights else {}
        levels = {level: len(weights) for level, weights in plan.weights.items()}
        left_out = {level: dict(counts) for level, counts in plan.left_out.items() if counts}
        said = (levels, left_out, dict(plan.unused))
        receipt = PersonaReceipt(files.digest, files.scores_digest, self.minimum, len(files.keys), *said)
        with ExitStack() as whole:
            if means:
                _save_to(whole.enter_context(write_whole(self.vectors(files.name))), means)
            scratch = whole.enter_context(write_whole(self._receipt(files.name)))
            scratch.write_bytes(msgspec.json.format(msgspec.json.encode(receipt), indent=2))
            self.vectors(files.name).unlink(missing_ok=True)
        return receipt

    def save_default(self, files: Sequence[PersonaFiles]) -> int:
        """Write the mean of all answers of the given finished default files to `default_vectors`; return their number.

        Scores are ignored; without an answer, nothing is written.
        """
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
    """Return each level of a plan, float32 [layers, hidden] by name, from (key, mean row) of its answers."""
    means = LevelMeans(plan)
    for key, mean in rows:
        means.add(key, mean)
    return means.means()
