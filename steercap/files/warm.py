"""Warm engines: servers that `steercap up` keeps in the background, each on a Unix socket of the user.

A folder that only the user can enter holds four files for each: NAME.sock, the socket; NAME.json, a `WarmEngine`;
NAME.log; and NAME.lock, which the server keeps locked while it lives. The kernel frees the lock of a killed process,
whose files are removed by the next reader.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import socket as sockets
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from steercap.core.values import choices, shown
from steercap.errors import InvalidFile, InvalidRequest, InvalidSetting
from steercap.files.fingerprint import files_of

#: Maximum bytes of a socket's path: `sun_path` of Linux without the final zero.
PATH_BYTES: Final = 107
#: Scheme of a socket's address.
SCHEME: Final = "unix:"
#: Maximum letters of a model's name in file names; a digest follows.
LETTERS: Final = 24
#: Seconds that a server waits for the lock, which readers take for an instant to see whether a server holds it.
LOCK_SECONDS: Final = 2.0
#: Seconds between two checks of a server that starts or ends.
PAUSE: Final = 0.2


class WarmEngine(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a warm engine, as its server wrote it to a file.

    Args:
        model: model, as given to `steercap up`.
        path: absolute path of the model, or its name on the hub.
        named: False if `model` was a path, which may be relative to the server's folder.
        pid: process id of the server.
        socket: path of the server's socket.
        code: version of steercap, and the folder of its code.
        weights: digest `fingerprint.files_of` of the model, when the server started.
        started: time when the server started, in seconds since the machine started.
        keyed: True if the server requires an API key.
        asked: digest of the options that were given to `steercap up`; the options themselves may hold keys.
        settings: steercap's settings, by name.
        arguments: vLLM's engine arguments that differ from their defaults, by name.
        surroundings: `fingerprint.surroundings` of the server's process.
        defaults: vLLM's defaults of engine arguments, by name.
        flags: names of further flags of `vllm serve` that change answers, such as "chat_template".
    """

    model: str
    path: str
    pid: int
    socket: str
    code: str
    named: bool = True
    weights: str = ""
    started: float = 0.0
    keyed: bool = False
    asked: str = ""
    settings: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    surroundings: dict[str, str] = {}
    defaults: dict[str, Any] = {}
    flags: list[str] = []

    @property
    def url(self) -> str:
        """Address of the engine, for `SteerModel.connect` and `--url`."""
        return f"{SCHEME}{self.socket}"

    @property
    def log(self) -> Path:
        """Path of the server's log."""
        return Path(self.socket).with_suffix(".log")


def code() -> str:
    """Return the version of steercap and the folder of its code, which a warm engine must share."""
    package = sys.modules["steercap"]  # its import here would be a circle
    return f"{package.__version__} in {Path(__file__).parent.parent}"


def identified(model: str) -> str:
    """Return the absolute path of a model that is a folder or file; a name on the hub is returned unchanged."""
    there = os.path.exists(model)  # noqa: PTH110 -- False for what can be no path, where Path raises
    return str(Path(model).resolve()) if there else model


def folder_path() -> Path:
    """Return the path of `runtime_folder`, whether it exists or not."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    if given and os.path.isdir(given) and os.stat(given).st_uid == os.geteuid():  # noqa: PTH112, PTH116 -- it may be no path
        return Path(given).absolute() / "steercap"
    return Path(tempfile.gettempdir()).absolute() / f"steercap-{os.geteuid()}"


def runtime_folder() -> Path:
    """Return the folder of this user's warm engines; create it if it is missing.

    It is `steercap` in `$XDG_RUNTIME_DIR` if this user owns that, or else `steercap-UID` in the temporary folder.

    Raises:
        InvalidSetting: the path belongs to another user, others can enter it, or it is no folder.
        OSError: it cannot be created.
    """
    folder = folder_path()
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise InvalidSetting(
            f"{folder}: sockets of warm engines must be in a folder of user {os.geteuid()} with mode 0700; this is "
            f"{'a folder' if stat.S_ISDIR(found.st_mode) else 'no folder'} of user {found.st_uid} with mode "
            f"{stat.S_IMODE(found.st_mode):04o}; remove it, or set XDG_RUNTIME_DIR to another folder"
        )
    return folder


def socket_of(model: str) -> Path:
    """Return the path of the socket of a model's warm engine, running or not.

    Args:
        model: path of the model, or its name on the hub.

    Raises:
        InvalidSetting: the path is too long for a socket; or as for `runtime_folder`.
    """
    path = identified(model)
    name = re.sub(r"[^A-Za-z0-9.]+", "-", Path(path).name)[-LETTERS:].strip("-.")
    found = runtime_folder() / f"{name}-{hashlib.sha256(path.encode()).hexdigest()[:8]}.sock"
    if (length := len(os.fsencode(found))) > PATH_BYTES:
        raise InvalidSetting(
            f"{found}: {length} bytes, and the path of a Unix socket has at most {PATH_BYTES}; set XDG_RUNTIME_DIR, or "
            "TMPDIR, to a folder with a shorter path"
        )
    return found


@contextmanager
def announced(engine: WarmEngine) -> Iterator[None]:
    """Context manager that lets others find an engine; at the end its socket and record are removed.

    Processes that are forked meanwhile do not share the lock.

    Raises:
        InvalidRequest: another server runs the model.
        OSError: the folder cannot be written to.
    """
    path = Path(engine.socket)
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    held = ExitStack()
    held.callback(os.close, lock)
    os.register_at_fork(after_in_child=held.close)
    try:
        until = time.monotonic() + LOCK_SECONDS
        while not locked(lock, fcntl.LOCK_EX):
            if time.monotonic() > until:
                raise InvalidRequest(f"{engine.model} is up already, or starting; `steercap status` shows it")
            time.sleep(LOCK_SECONDS / 40)
        _remove(path)
        try:
            write(engine)
            yield
        finally:
            _remove(path)
    finally:
        held.close()


def write(engine: WarmEngine) -> None:
    """Write or replace an engine's record; the caller must hold the lock.

    Raises:
        OSError: the folder cannot be written to.
    """
    from steercap.files.base import write_whole

    with write_whole(Path(engine.socket).with_suffix(".json"), mode=0o600) as scratch:
        scratch.write_bytes(msgspec.json.encode(engine, enc_hook=str))


def engines() -> list[WarmEngine]:
    """Return this user's warm engines, sorted by model; remove the files of killed servers.

    Raises:
        InvalidFile: the record of a running server cannot be read.
        InvalidSetting, OSError: as for `runtime_folder`.
    """
    if not os.path.lexists(folder_path()):
        return []
    found = [_living(path.with_suffix(".sock")) for path in sorted(runtime_folder().glob("*.lock"))]
    return sorted((one for one in found if one is not None), key=lambda one: one.model)


def engine_at(socket: Path) -> WarmEngine | None:
    """Return the warm engine with the socket at a path, None if there is none."""
    return _living(socket) if socket.with_suffix(".lock").exists() else None


def only_engine(model: str | None = None) -> WarmEngine:
    """Return this user's only warm engine, or the only one of a model.

    Args:
        model: model as given to `steercap up`, with or without "+" and a preset, or its path; None for any.

    Raises:
        InvalidRequest: there is none, there are several, or the engine is `outdated`.
    """
    there = engines()
    named = there if model is None else named_in(there, model)
    if model is not None and not os.path.exists(model):  # noqa: PTH110
        named = named or named_in(there, model.rpartition("+")[0])
    if not named:
        raise no_engine_error(there, str(model))
    if len(named) > 1:
        listed = ", ".join(f"{one.model} at {one.url}" for one in named)
        raise InvalidRequest(f"{len(named)} warm engines: {listed}; give the url of one")
    if reason := outdated(named[0]):
        raise InvalidRequest(
            f"the warm engine of {named[0].model} is outdated: {reason}; renew it with `steercap down "
            f"{named[0].model}` and `steercap up {named[0].model}`, or give its url, {named[0].url}"
        )
    return named[0]


def outdated(engine: WarmEngine) -> str:
    """Return the reason why an engine's answers may differ from those of one that started now; "" if they do not."""
    if engine.code != code():
        return f"it runs steercap {engine.code}, and this process {code()}"
    if engine.weights != files_of(engine.path, engine.arguments.get("revision")):
        return f"the files of {engine.path} have changed since its start"
    return ""


def named_in(engines: Sequence[WarmEngine], model: str) -> list[WarmEngine]:
    """Return the engines of a model: for an existing path those with that path; else those with that name or path."""
    if os.path.exists(model):  # noqa: PTH110 -- it may be no path
        return [one for one in engines if one.path == identified(model)]
    return [one for one in engines if model == one.path or (one.named and model == one.model)]


def no_engine_error(engines: Sequence[WarmEngine], model: str) -> InvalidRequest:
    """Return the error for a model that no engine runs."""
    if not engines:
        return InvalidRequest("no warm engine; start one with `steercap up MODEL`, or give the url of a server")
    names = [one.model if one.named else one.path for one in engines]
    return InvalidRequest(f"no warm engine of {shown(model)}; {choices(str(model), names)}")


def listening(path: Path) -> bool:
    """Return whether a server accepts connections on a Unix socket, as it does once it is ready."""
    with sockets.socket(sockets.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


def _living(socket: Path) -> WarmEngine | None:
    """Return the engine whose server holds the lock of a socket; if none does, remove its files and return None."""
    lock = os.open(socket.with_suffix(".lock"), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if locked(lock, fcntl.LOCK_SH):  # shared: of two who look at once, neither takes the other for the server
            _remove(socket)
            return None
        return msgspec.json.decode(socket.with_suffix(".json").read_bytes(), type=WarmEngine)
    except FileNotFoundError:  # it has the lock and not yet its record, or no longer
        return None
    except msgspec.MsgspecError as error:
        raise InvalidFile(f"{socket.with_suffix('.json')}: {error}; end the process that holds it") from error
    finally:
        os.close(lock)


def locked(lock: int, kind: int) -> bool:
    """Try to take a lock, `fcntl.LOCK_EX` or `LOCK_SH`, on a file descriptor; return whether it was free."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(socket: Path) -> None:
    """Remove a socket and its record; the caller must hold the lock."""
    for suffix in (".sock", ".json"):
        socket.with_suffix(suffix).unlink(missing_ok=True)
