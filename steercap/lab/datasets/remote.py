"""Storage of a data set behind a URL, by fsspec.

On an object store, a file appears when its upload ends. On other file systems, it is written to a scratch name and then
moved.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar
from uuid import uuid4

from steercap.core.extras import extra
from steercap.errors import InvalidRequest, SteercapError
from steercap.files.tensors import Buffer
from steercap.lab.datasets.storage import CHUNK, FileReceipt, LocalFolder, Storage, copied, unreadable

#: Names in fsspec of object stores, whose writes are atomic.
STORES: Final = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "az", "adl", "oss"})


#: Maximum attempts to list a folder whose files are renamed meanwhile.
LOOKS: Final = 100
#: Suffix of files that are being written, on file systems whose writes are not atomic.
SCRATCH: Final = ".scratch"

Found = TypeVar("Found")


class RemoteFolder(Storage):
    """Storage in a folder of an fsspec file system, named by its URL.

    Args:
        url: URL of the folder, such as "s3://bucket/run".
        options: options of the file system, such as `endpoint_url` for S3.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._url, self._options = url.rstrip("/"), options
        self._connect()

    def path(self, name: str) -> str:
        return f"{self._url}/{name}"

    def write(self, name: str, chunks: Iterable[Buffer]) -> FileReceipt:
        target = self._at(name)
        folder, _, last = target.rpartition("/")
        scratch = target if self._puts else f"{folder}/.{last}.{uuid4().hex}{SCRATCH}"
        try:
            with _as_os_error():
                return self._upload(scratch, target, chunks)
        except BaseException:
            if not self._puts and self._system.exists(scratch):
                self._system.rm_file(scratch)
            raise

    def read(self, name: str) -> bytes:
        return self._request(name, lambda: bytes(self._system.cat_file(self._at(name))))

    def sizes(self, folder: str = "") -> dict[str, int]:
        at = self._at(folder)
        for _ in range(LOOKS):
            self._system.invalidate_cache()
            with _as_os_error(), suppress(FileNotFoundError):
                found = self._system.ls(at, detail=True)
                return {one["name"].rpartition("/")[2]: int(one["size"]) for one in found if one["type"] == "file"}
            with _as_os_error():
                if not self._system.isdir(at):
                    return {}
        raise OSError(f"{self.path(folder)} cannot be listed: its files are renamed while they are listed")

    def sha256(self, name: str) -> str:
        def hashed() -> str:
            with self._system.open(self._at(name), "rb") as file:
                return _digest_of(file)

        return self._request(name, hashed)

    def remove(self, name: str) -> None:
        with _as_os_error():
            if self._system.exists(self._at(name)):
                self._system.rm_file(self._at(name))

    @contextmanager
    def fetched(self, name: str) -> Iterator[Path]:
        with tempfile.NamedTemporaryFile(prefix="steercap-") as there:
            self._request(name, lambda: self._system.get_file(self._at(name), there.name))
            yield Path(there.name)

    def sweep(self) -> None:
        """Remove all scratch files; whose they are is unknown, so only one call at a time may write to the folder."""
        if self._puts:
            return
        with _as_os_error():
            for path in self._system.find(self._root):
                name = path.rpartition("/")[2]
                if name.startswith(".") and name.endswith(SCRATCH):
                    self._system.rm_file(path)

    def _connect(self) -> None:
        with extra("datasets"):
            from fsspec.core import url_to_fs
        try:
            self._reached, self._root = url_to_fs(self._url, **self._options)
        except (ImportError, ValueError) as error:
            raise InvalidRequest(f"{self._url} cannot be reached: {error}") from error
        self._process = os.getpid()
        protocols = self._reached.protocol
        self._puts = bool(STORES & {protocols} if isinstance(protocols, str) else STORES & set(protocols))

    @property
    def _system(self) -> Any:
        """fsspec's file system, connected anew in a forked process: most cannot be used after a fork."""
        if self._process != os.getpid():
            self._connect()
        return self._reached

    def _upload(self, scratch: str, target: str, chunks: Iterable[Buffer]) -> FileReceipt:
        if not self._puts:
            self._system.makedirs(target.rpartition("/")[0], exist_ok=True)
        file = self._system.open(scratch, "wb")
        try:
            receipt = copied(chunks, file)
            file.close()
        except BaseException:
            if self._puts:  # its end would put what there is so far
                file.closed = True
                file.discard()
            else:
                file.close()
            raise
        if scratch != target:
            self._system.mv(scratch, target)
        return receipt

    def _request(self, name: str, what: Callable[[], Found]) -> Found:
        try:
            with _as_os_error():
                return what()
        except OSError as error:
            raise unreadable(self.path(name), error) from error

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def __getstate__(self) -> dict[str, Any]:
        """Return the URL and options, with which each DataLoader worker connects for itself."""
        return {"_url": self._url, "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._connect()


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Convert errors that a file system's library raises in the block, such as of connections, to OSError."""
    try:
        yield
    except (OSError, SteercapError):
        raise
    except Exception as error:  # the libraries' own
        raise OSError(f"{type(error).__name__}: {error}") from error


def storage_of(where: str | Path | Storage, **options: Any) -> Storage:
    """Return the storage for a path or a URL; a storage is returned as it is.

    Args:
        where: a folder, or a URL with "://".
        options: options of the URL's file system.

    Raises:
        InvalidRequest: there is no such file system, or options are given for a local folder.
    """
    if isinstance(where, Storage):
        return where
    if isinstance(where, str) and "://" in where:
        return RemoteFolder(where, **options)
    if options:
        raise InvalidRequest(f"{where} is a local folder, which has no options {', '.join(options)}; leave them out")
    return LocalFolder(where)


def _digest_of(file: Any) -> str:
    digest = hashlib.sha256()
    while part := file.read(CHUNK):
        digest.update(part)
    return digest.hexdigest()
