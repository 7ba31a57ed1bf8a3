"""Folder of a data set: created with a definition, filled shard by shard in any order, then completed."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load

from steercap.core.spec import Point
from steercap.errors import InvalidFile, InvalidRequest, RunDiffers
from steercap.files.tensors import Buffer, encoded, metadata_of
from steercap.lab.datasets import definition as definitions
from steercap.lab.datasets.definition import DATASET, VERSION, DatasetDefinition
from steercap.lab.datasets.remote import storage_of
from steercap.lab.datasets.shards import (
    FOLDER,
    RECEIPT,
    STATISTICS,
    Shard,
    ShardReceipt,
    header_of,
    name_of,
    read_checked,
    write_shard,
)
from steercap.lab.datasets.statistics import PointStatistics, named_tensors, no_rows, read_named
from steercap.lab.datasets.storage import Storage
from steercap.lab.datasets.tables import encoded_points, holds_points

TOTALS: Final = "dataset.json"
MERGED: Final = "statistics.safetensors"
POINTS: Final = "points.parquet"
#: Advice in errors about a file that was changed since it was written.
AGAIN: Final = "copy it again, or collect it again"
#: Errors of decoding a truncated or changed file.
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


Document = TypeVar("Document", "Totals", ShardReceipt)


class Totals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Totals of a complete data set: the file `dataset.json`.

    Args:
        version: version of the format.
        shards, documents: number of shards and of documents.
        tokens: number of tokens that the model read.
        rows: number of tokens whose rows were kept.
        bytes: size of the files of all shards.
        sha256: hash over the receipts of all shards, in order, which hold the SHA-256 of their files; two data sets
            with the same hash are equal.
    """

    version: int
    shards: int
    documents: int
    tokens: int
    rows: int
    bytes: int
    sha256: str


class DatasetFolder:
    """Folder of a data set of activations; made by `begin` or `open`. Methods may be called from any thread.

    Args:
        storage: storage of the folder's files.
        definition: definition of the data set.
    """

    def __init__(self, storage: Storage, definition: DatasetDefinition) -> None:
        self.storage, self.definition = storage, definition
        self._completing, self._without_totals = threading.Lock(), False

    def __reduce__(self) -> tuple[type[DatasetFolder], tuple[Storage, DatasetDefinition]]:
        """Pickle storage and definition alone, for DataLoader workers: a lock belongs to one process."""
        return DatasetFolder, (self.storage, self.definition)

    @staticmethod
    def begin(where: str | Path | Storage, definition: DatasetDefinition, **options: Any) -> DatasetFolder:
        """Return a folder to write to: a new one, or an existing one of an equal definition, without scratch files.

        Args:
            where: a folder, or a URL with "://".
            definition: definition of the run.
            options: options of the URL's file system.

        Raises:
            RunDiffers: the folder holds another run, or other files.
            InvalidFile: its definition cannot be read, or is of another version.
        """
        storage = storage_of(where, **options)
        there = storage.sizes()
        if definitions.FILE in there:
            found = definitions.decode(storage.read(definitions.FILE), storage.path(definitions.FILE))
            DATASET.check(found, lambda _: definition, str(storage))
            storage.sweep()
            return DatasetFolder(storage, found)
        if foreign := sorted(name for name in there if not name.startswith(".")):
            raise RunDiffers(
                f"{storage} holds {foreign[0]!r}, so it is not a data set of activations; give another folder"
            )
        storage.sweep()
        storage.write(definitions.FILE, [msgspec.json.format(msgspec.json.encode(definition))])
        return DatasetFolder(storage, definition)

    @staticmethod
    def open(where: str | Path | Storage, **options: Any) -> DatasetFolder:
        """Open an existing folder of a run, without changing it.

        Args:
            where, options: as for `begin`.

        Raises:
            InvalidFile: there is no definition, it cannot be read, or is of another version.
        """
        storage = storage_of(where, **options)
        found = definitions.decode(storage.read(definitions.FILE), storage.path(definitions.FILE))
        return DatasetFolder(storage, found)

    # Shards

    def write(self, shard: Shard) -> ShardReceipt:
        """Write a shard and return its receipt; the data set is then incomplete until `complete`. See `write_shard`."""
        self._remove_totals()
        return write_shard(self.storage, self.definition, shard)

    def receipts(self) -> dict[int, ShardReceipt]:
        """Return the receipts of existing shards, by number, ascending; `wrong` checks their files.

        Raises:
            InvalidFile: a receipt cannot be read, or is of another data set.
        """
        found, unreadable = self.readable_receipts()
        for why in unreadable.values():
            raise InvalidFile(why)
        return found

    def readable_receipts(self) -> tuple[dict[int, ShardReceipt], dict[int, str]]:
        """Return the readable receipts, and the reasons why others are not (truncated or changed), by shard number.

        Raises:
            InvalidFile: a receipt is of another version or data set, or its file name has no shard number.
        """
        names = sorted(name for name in self.storage.sizes(FOLDER) if name.endswith(RECEIPT) and name[0] != ".")
        found: dict[int, ShardReceipt] = {}
        unreadable: dict[int, str] = {}
        for name in (f"{FOLDER}/{name}" for name in names):
            try:
                receipt = self._receipt(name)
            except UNREADABLE as error:
                unreadable[self._number_of(name)] = _unreadable(self.storage.path(name), error)
            else:
                found[receipt.number] = receipt
        return dict(sorted(found.items())), unreadable

    def wrong(self, receipts: Iterable[ShardReceipt], *, content: bool = False) -> dict[int, str]:
        """Check the files of shards; return the problems by shard number, each naming the file, or {}.

        Args:
            receipts: receipts of the shards.
            content: True to compare SHA-256 too, which reads all files; False for sizes alone.
        """
        sizes = self.storage.sizes(FOLDER)
        found = {receipt.number: self._wrong(receipt, sizes, content=content) for receipt in receipts}
        return {number: why for number, why in found.items() if why}

    def sound(self, *, content: bool = False) -> dict[int, ShardReceipt]:
        """Check the files of all shards and return their receipts, by number.

        Args:
            content: True to compare SHA-256 too, which reads all files; False for sizes alone.

        Raises:
            InvalidFile: a file of a shard is missing, truncated or changed, or a receipt cannot be read.
        """
        receipts = self.receipts()
        for why in self.wrong(receipts.values(), content=content).values():
            raise InvalidFile(why)
        return receipts

    def discard(self, number: int) -> None:
        """Remove a shard's receipt, so that the shard is collected again; the data set is then incomplete."""
        self._remove_totals()
        self.storage.remove(name_of(number, RECEIPT))

    def _remove_totals(self) -> None:
        """Remove `dataset.json` before a receipt changes; once only: each removal is a request to an object store."""
        with self._completing:
            if not self._without_totals:
                self.storage.remove(TOTALS)
                self._without_totals = True

    # The whole

    def totals(self) -> Totals | None:
        """Return the totals of a complete data set; None for an incomplete one.

        Raises:
            InvalidFile: `dataset.json` cannot be read.
        """
        if TOTALS not in self.storage.sizes():
            return None
        return _decode(self.storage.read(TOTALS), Totals, self.storage.path(TOTALS))

    def altered(self, receipts: Iterable[ShardReceipt]) -> bool:
        """Return whether the totals of a complete data set cannot be read, or differ from the sum of its receipts.

        Args:
            receipts: receipts of all existing shards, in order; if their number differs from the totals', the result is
                False.
        """
        known = list(receipts)
        try:
            totals = self.totals()
        except InvalidFile:
            return True
        return totals is not None and totals.shards == len(known) and totals != self.sum_of(known)

    def complete(self) -> Totals:
        """Complete the data set: merge statistics, and write `dataset.json` last; return its totals.

        Raises:
            InvalidRequest: shard numbers have a gap, or a shard other than the last has too few documents.
            InvalidFile: a file is missing or truncated.
        """
        receipts = list(self.sound().values())
        self._check_whole(receipts)
        totals = self.sum_of(receipts)
        if self.definition.statistics_every:
            tensors = {name: [tensor] for name, tensor in self._merged(receipts).items()}
            header = header_of(self.definition.digest, shards=totals.sha256)
            if not self._holds(MERGED, encoded(tensors, {"steercap": header_of(self.definition.digest)})):
                self.storage.write(MERGED, encoded(tensors, {"steercap": header}))
        self.storage.write(POINTS, [encoded_points(self.definition.points)])
        with self._completing:
            self._without_totals = False
            self.storage.write(TOTALS, [msgspec.json.format(msgspec.json.encode(totals))])
        return totals

    def statistics(self, point: Point) -> PointStatistics:
        """Return the statistics of a point's rows, for a complete data set.

        Raises:
            InvalidRequest, InvalidFile: as for `merged`.
        """
        return self.merged([point])[point]

    def merged(
        self, points: Iterable[Point], receipts: Sequence[ShardReceipt] | None = None
    ) -> dict[Point, PointStatistics]:
        """Return the statistics of points' rows by point, merged over shards; each file is read once.

        Args:
            points: points of the definition.
            receipts: receipts of the shards to include, in order; None for all of a complete data set.

        Raises:
            InvalidRequest: the data set was collected without statistics, or is not complete.
            InvalidFile: a statistics file cannot be read.
        """
        if not self.definition.statistics_every:
            raise InvalidRequest(f"{self.storage} was collected without statistics; collect it with statistics_every=")
        wanted = list(points)
        if receipts is None:
            if (totals := self.totals()) is None:
                raise InvalidRequest(f"{self.storage} is not complete, and has no statistics of all its rows yet")
            content = self.storage.read(MERGED)
            tensors = self._tensors(content, MERGED)
            self._check_merged(content, totals)
            return self._chosen(tensors, MERGED, wanted)
        files = (self._of_shard(receipt, wanted) for receipt in receipts)
        found = next(files, None)
        if found is None:
            return {point: no_rows(self.definition.format_of(point).decoded_width) for point in wanted}
        for more in files:
            found = {point: found[point].merged(more[point]) for point in wanted}
        return found

    def wrong_whole(self, receipts: Sequence[ShardReceipt], *, content: bool = True) -> str:
        """Check what follows from the shards of a complete data set; return the problem, or "".

        Args:
            receipts: receipts of all shards, in order.
            content: True to compare `points.parquet` and the merged statistics too, computed again from the definition
                and the shards, which must be sound; False for the totals alone, which needs the receipts alone.
        """
        totals, found = self.totals(), self.sum_of(receipts)
        if totals is not None and totals != found:
            return (
                f"{self.storage.path(TOTALS)} is of {totals.shards} shards with SHA-256 {totals.sha256}, but the "
                f"receipts are of {found.shards} shards with {found.sha256}; {AGAIN}"
            )
        return self._wrong_merged(receipts) if content else ""

    def _wrong_merged(self, receipts: Sequence[ShardReceipt]) -> str:
        try:
            if not holds_points(self.storage.read(POINTS), self.definition.points):
                return f"{self.storage.path(POINTS)} names other tensors than the definition does; {AGAIN}"
            if not self.definition.statistics_every:
                return ""
            found, wanted = self._tensors(self.storage.read(MERGED), MERGED), self._merged(receipts)
        except InvalidFile as error:
            return str(error)
        if found.keys() != wanted.keys() or not all(_alike(found[name], wanted[name]) for name in wanted):
            return f"{self.storage.path(MERGED)} does not hold the statistics of the shards; {AGAIN}"
        return ""

    def _merged(self, receipts: Sequence[ShardReceipt]) -> dict[str, torch.Tensor]:
        """Return the merged statistics of all points, as tensors by their names in a file."""
        found = self.merged((known.point for known in self.definition.points), receipts)
        tensors: dict[str, torch.Tensor] = {}
        for known in self.definition.points:
            tensors |= named_tensors(known.end, found[known.point])
        return tensors

    def _of_shard(self, receipt: ShardReceipt, points: Iterable[Point]) -> dict[Point, PointStatistics]:
        name = name_of(receipt.number, STATISTICS)
        return self._chosen(self._tensors(read_checked(self.storage, receipt, STATISTICS), name), name, points)

    def _holds(self, name: str, content: Iterable[Buffer]) -> bool:
        """Return True if a file has this content, such as that of an older version."""
        try:
            return self.storage.read(name) == b"".join(content)
        except (InvalidFile, OSError):
            return False

    def _check_merged(self, content: bytes, totals: Totals) -> None:
        """Raise InvalidFile for merged statistics of another data set; older files name their definition alone."""
        digest = self.definition.digest
        if metadata_of(content).get("steercap") not in {header_of(digest, shards=totals.sha256), header_of(digest)}:
            raise InvalidFile(f"{self.storage.path(MERGED)} holds the statistics of another data set; {AGAIN}")

    def _chosen(
        self, tensors: Mapping[str, torch.Tensor], name: str, points: Iterable[Point]
    ) -> dict[Point, PointStatistics]:
        """Return the statistics of points from the file called `name`; raise InvalidFile if it lacks one."""
        try:
            return {point: read_named(self.definition.format_of(point).end, tensors) for point in points}
        except KeyError as error:
            raise InvalidFile(f"{self.storage.path(name)} lacks {error}; collect the data set again") from error

    def _tensors(self, content: bytes, name: str) -> Mapping[str, torch.Tensor]:
        try:
            return load(content)
        except SafetensorError as error:
            raise InvalidFile(
                f"{self.storage.path(name)} cannot be read: {error}; collect the data set again"
            ) from error

    def _receipt(self, name: str) -> ShardReceipt:
        receipt = _understood(self.storage.read(name), ShardReceipt, self.storage.path(name))
        if receipt.definition != self.definition.digest or name_of(receipt.number, RECEIPT) != name:
            raise InvalidFile(
                f"{self.storage.path(name)} is the receipt of another data set, or of another shard; remove it"
            )
        return receipt

    def _number_of(self, name: str) -> int:
        """Return the shard number in a receipt's file name; raise InvalidFile if it has none."""
        stem = name.removeprefix(f"{FOLDER}/").removesuffix(RECEIPT)
        if not stem.isdecimal() or name_of(int(stem), RECEIPT) != name:
            raise InvalidFile(f"{self.storage.path(name)} is the receipt of no shard; remove it")
        return int(stem)

    def _wrong(self, receipt: ShardReceipt, sizes: Mapping[str, int], *, content: bool) -> str:
        for name, file in receipt.names.items():
            path, size = self.storage.path(name), sizes.get(name.removeprefix(f"{FOLDER}/"))
            if size is None:
                return f"{path} is missing; {AGAIN}"
            if size != file.bytes:
                return f"{path} has {size:,} bytes, and its receipt says {file.bytes:,}; {AGAIN}"
            if content and (found := self.storage.sha256(name)) != file.sha256:
                return f"{path} has SHA-256 {found}, and its receipt says {file.sha256}; {AGAIN}"
        return ""

    def _check_whole(self, receipts: list[ShardReceipt]) -> None:
        numbers = [receipt.number for receipt in receipts]
        if missing := sorted(set(range(len(numbers))) - set(numbers)):
            raise InvalidRequest(f"{self.storage} lacks shard {missing[0]}; collect it before it is complete")
        for receipt in receipts[:-1]:
            if receipt.documents != self.definition.documents_per_shard:
                raise InvalidRequest(
                    f"shard {receipt.number} of {self.storage} has too few documents, and is not the last"
                )

    @staticmethod
    def sum_of(receipts: Sequence[ShardReceipt]) -> Totals:
        """Return the totals of shards with these receipts, in order."""
        digest = hashlib.sha256()
        for receipt in receipts:
            digest.update(msgspec.json.encode(receipt))
        return Totals(
            VERSION,
            len(receipts),
            receipts[-1].stop if receipts else 0,
            sum(receipt.tokens for receipt in receipts),
            sum(receipt.rows for receipt in receipts),
            sum(receipt.bytes for receipt in receipts),
            digest.hexdigest(),
        )


def verify(where: str | Path, *, content: bool = True, **options: Any) -> Totals | None:
    """Check every file of a data set against its receipt.

    Args:
        where: path or URL of the folder.
        content: True to compare SHA-256 too, which reads all files; False for sizes alone.
        options: options of the URL's file system.

    Returns:
        Totals of a complete data set, None for an incomplete one.

    Raises:
        InvalidFile: a file is missing, truncated or changed, or the totals do not match the shards; the message names
            the file.
    """
    folder = DatasetFolder.open(where, **options)
    receipts = list(folder.sound(content=content).values())
    totals = folder.totals()
    if totals is not None and (why := folder.wrong_whole(receipts, content=content)):
        raise InvalidFile(why)
    return totals


def _alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bits."""
    kinds = (first.dtype, first.shape) == (second.dtype, second.shape)
    return kinds and first.numpy().tobytes() == second.numpy().tobytes()


def _decode(content: bytes, kind: type[Document], path: str) -> Document:
    """Decode a JSON file of the current format version to the type `kind`; `path` is its name in errors.

    Raises:
        InvalidFile: the file cannot be read, or is of another version.
    """
    try:
        return _understood(content, kind, path)
    except UNREADABLE as error:
        raise InvalidFile(_unreadable(path, error)) from error


def _understood(content: bytes, kind: type[Document], path: str) -> Document:
    """Decode a JSON file of the current format version to the type `kind`; `path` is its name in errors.

    Raises:
        InvalidFile: the file is of another version.
        One of UNREADABLE: the file cannot be read.
    """
    said = msgspec.json.decode(content)
    version = said.get("version") if isinstance(said, dict) else None
    if isinstance(version, int) and version != VERSION:  # another version may say other things
        raise InvalidFile(f"{path} is of format version {version}; this steercap reads version {VERSION}; upgrade it")
    return msgspec.convert(said, kind)


def _unreadable(path: str, error: Exception) -> str:
    return f"{path} cannot be read: {error}; {AGAIN}"
