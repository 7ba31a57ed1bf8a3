"""Shard of a data set: rows, index and statistics, and the receipt that commits it.

The receipt is written last: a shard exists if and only if its receipt does. Files without one are debris of a writer
that was killed; they are replaced when the shard is written again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from steercap.core.spec import Point
from steercap.errors import InvalidFile, InvalidRequest
from steercap.files.tensors import Buffer, encoded
from steercap.kernels.codecs.coded import CodedRows, Whole, parts_of
from steercap.lab.datasets.definition import VERSION, DatasetDefinition, PointFormat
from steercap.lab.datasets.statistics import drawn, named_tensors, statistics_of
from steercap.lab.datasets.storage import FileReceipt, Storage
from steercap.lab.datasets.tables import Index, encoded_index

FOLDER: Final = "shards"
ROWS, INDEX, STATISTICS, RECEIPT = ".safetensors", ".parquet", ".statistics.safetensors", ".json"


@dataclass(frozen=True, eq=False)
class Shard:
    """Content of one shard in memory, before it is written.

    Args:
        number: number of the shard; it holds documents [number × D, (number + 1) × D), D being the definition's.
        documents: number of documents; fewer than D only in the last shard.
        documents_sha256: hash of its documents, in hexadecimal, see `documents.digests`.
        tokens: number of tokens that the model read, kept or not.
        index: labels of the rows, in order of documents, windows and positions.
        rows: rows of each point of the definition, [rows, ...], or `CodedRows`; or consecutive pieces of them, which
            are written without being concatenated.

    Raises:
        InvalidRequest: a point's number of rows is not that of the index.
    """

    number: int
    documents: int
    documents_sha256: str
    tokens: int
    index: Index
    rows: Mapping[Point, Whole | Sequence[Whole]]

    def __post_init__(self) -> None:
        for point in self.rows:
            if (found := sum(len(piece) for piece in self.pieces(point))) != len(self.index):
                raise InvalidRequest(
                    f"{found} rows of {point}, and {len(self.index)} in the index of shard {self.number}"
                )

    def pieces(self, point: Point) -> Sequence[Whole]:
        """Return the rows of a point as consecutive pieces, [rows, ...] or `CodedRows` each."""
        rows = self.rows[point]
        return (rows,) if isinstance(rows, (torch.Tensor, CodedRows)) else rows


class ShardReceipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Receipt of a written shard: the file `shards/<number>.json`.

    Args:
        version: version of the format.
        number: number of the shard.
        definition: SHA-256 of the definition it belongs to, in hexadecimal.
        first, stop: range of its documents, [first, stop).
        tokens: number of tokens that the model read.
        rows: number of tokens whose rows were kept.
        documents_sha256: hash of its documents, in hexadecimal.
        files: receipts of its files by name suffix: ".safetensors", ".parquet", ".statistics.safetensors".

    Raises:
        ValueError: the file of rows or of the index is missing, or a number is impossible.
    """

    version: int
    number: int
    definition: str
    first: int
    stop: int
    tokens: int
    rows: int
    documents_sha256: str
    files: dict[str, FileReceipt]

    def __post_init__(self) -> None:  # msgspec's decoder makes a complaint about the file of it
        if not {ROWS, INDEX} <= set(self.files) <= {ROWS, INDEX, STATISTICS}:
            raise ValueError("its files are not those of a shard")
        if min(self.number, self.first, self.tokens, self.rows) < 0 or self.stop <= self.first:
            raise ValueError("it has a negative number of rows, tokens or documents")

    @property
    def documents(self) -> int:
        """Number of documents in the shard."""
        return self.stop - self.first

    @property
    def names(self) -> dict[str, FileReceipt]:
        """Receipts of the shard's files by name within the data set, without the file of this receipt."""
        return {name_of(self.number, end): file for end, file in self.files.items()}

    @property
    def bytes(self) -> int:
        """Total size of the shard's files in bytes."""
        return sum(file.bytes for file in self.files.values())


def name_of(number: int, end: str) -> str:
    """Return the name of a shard's file within the data set: "shards/000003.parquet" for 3 and ".parquet"."""
    return f"{FOLDER}/{number:06}{end}"


def read_checked(storage: Storage, receipt: ShardReceipt, end: str) -> bytes:
    """Read a small file of a shard whole, and compare its SHA-256 with its receipt.

    Raises:
        InvalidFile: the file cannot be read, or differs.
    """
    name = name_of(receipt.number, end)
    content, wanted = storage.read(name), receipt.files[end].sha256
    if (found := hashlib.sha256(content).hexdigest()) != wanted:
        raise InvalidFile(
            f"{storage.path(name)} has SHA-256 {found}, and its receipt says {wanted}; copy it again, or collect it "
            "again"
        )
    return content


def write_shard(storage: Storage, definition: DatasetDefinition, shard: Shard) -> ShardReceipt:
    """Write a shard's files, then its receipt; return the receipt. Several threads may write shards at once.

    The same shard gives the same files, whichever process writes it and however often.

    Args:
        storage: storage of the folder.
        definition: definition of the data set.
        shard: shard to write; its rows are neither changed nor copied.

    Raises:
        InvalidRequest: rows do not have the definition's format, or the index is impossible.
        OSError: a file cannot be written, such as on a full disk; the shard then does not exist.
    """
    _check(definition, shard)
    storage.remove(name_of(shard.number, RECEIPT))  # or a rewritten shard would count as complete half-way
    files = {
        ROWS: storage.write(name_of(shard.number, ROWS), _rows(definition, shard)),
        INDEX: storage.write(name_of(shard.number, INDEX), [encoded_index(shard.index)]),
    }
    if definition.statistics_every:
        files[STATISTICS] = storage.write(name_of(shard.number, STATISTICS), _statistics(definition, shard))
    first = shard.number * definition.documents_per_shard
    stop = first + shard.documents
    receipt = ShardReceipt(
        VERSION,
        shard.number,
        definition.digest,
        first,
        stop,
        shard.tokens,
        len(shard.index),
        shard.documents_sha256,
        files,
    )
    storage.write(name_of(shard.number, RECEIPT), [msgspec.json.format(msgspec.json.encode(receipt))])
    return receipt


def _rows(definition: DatasetDefinition, shard: Shard) -> Iterator[Buffer]:
    tensors = {
        f"{part}{known.end}": pieces
        for known in definition.points
        for part, pieces in _parts(known, shard.pieces(known.point)).items()
    }
    return encoded(tensors, {"steercap": header_of(definition.digest, shard=shard.number)})


def _parts(known: PointFormat, pieces: Sequence[Whole]) -> dict[str, Sequence[torch.Tensor]]:
    """Group the tensors of all pieces by the name of their part; constants of the point are included once."""
    by_piece = [parts_of(piece) for piece in pieces] or [known.nothing()]
    found: dict[str, Sequence[torch.Tensor]] = {name: [parts[name] for parts in by_piece] for name in by_piece[0]}
    return found | {name: [constant] for name, constant in _constants(known, pieces).items()}


def _constants(known: PointFormat, pieces: Sequence[Whole]) -> Mapping[str, torch.Tensor]:
    first = pieces[0] if pieces else None
    return (
        first.constants
        if isinstance(first, CodedRows)
        else {name: torch.zeros(known.schema.width) for name in known.constants}
    )


def _statistics(definition: DatasetDefinition, shard: Shard) -> Iterator[Buffer]:
    tensors: dict[str, Sequence[torch.Tensor]] = {}
    chosen = drawn(len(shard.index), definition.statistics_every, shard.number)  # the same at all points
    for known in definition.points:
        found = statistics_of(shard.pieces(known.point), known.decoded_width, chosen)
        tensors |= {name: [tensor] for name, tensor in named_tensors(known.end, found).items()}
    return encoded(tensors, {"steercap": header_of(definition.digest, shard=shard.number)})


def header_of(definition: str, **further: int | str) -> str:
    """Return the header of a file of tensors of a data set, as JSON: its definition's SHA-256, and `further`."""
    said = {"kind": "activations", "version": VERSION, "definition": definition, **further}
    return msgspec.json.encode(said).decode()


def _check(definition: DatasetDefinition, shard: Shard) -> None:
    if not shard.number >= 0 or not 1 <= shard.documents <= definition.documents_per_shard:
        raise InvalidRequest(
            f"shard {shard.number} of {shard.documents} documents; shards count from 0, and have 1 to "
            f"{definition.documents_per_shard} documents"
        )
    wanted = {known.point for known in definition.points}
    if set(shard.rows) != wanted:
        raise InvalidRequest(
            f"rows of {sorted(map(str, shard.rows))}, and the definition has {sorted(map(str, wanted))}"
        )
    for known in definition.points:
        for piece in shard.pieces(known.point):
            known.check(piece)
        _check_constants(known, shard.pieces(known.point))
    _check_order(definition, shard)


def _check_constants(known: PointFormat, pieces: Sequence[Whole]) -> None:
    given = [piece.constants for piece in pieces if isinstance(piece, CodedRows)]
    for name in known.constants:
        if not all(one[name] is given[0][name] or torch.equal(one[name], given[0][name]) for one in given):
            raise InvalidRequest(
                f"rows of {known.point} were coded with several {name!r}; give those of one calibration"
            )


def _check_order(definition: DatasetDefinition, shard: Shard) -> None:
    """Check that rows belong to the shard's own documents, each token once and in order."""
    index, first = shard.index, shard.number * definition.documents_per_shard
    if not len(index):
        return
    if not first <= index.document.min() <= index.document.max() < first + shard.documents:
        raise InvalidRequest(f"shard {shard.number} has rows of documents that are not its own")
    document, window, position = (np.diff(column) for column in (index.document, index.window, index.position))
    ascending: NDArray[np.bool_] = (document > 0) | (
        (document == 0) & ((window > 0) | ((window == 0) & (position > 0)))
    )
    if not ascending.all():
        at = int(np.argmin(ascending)) + 1
        raise InvalidRequest(
            f"row {at} of shard {shard.number} is out of order; sort rows by document, window and position"
        )
