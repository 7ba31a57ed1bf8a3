"""Channel between client and worker beside vLLM's RPCs: a Unix socket that carries the same frames.

An RPC passes through the queues of the engine's process, and waits for the passes in flight there. Calls about ended
requests need neither: the worker answers them on a thread, between two of its passes. The socket has an abstract
name, which the kernel frees with the process, and accepts only processes of the same user.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import torch

from steercap.core.framing import MOST_BYTES

_LOG: Final = logging.getLogger(__name__)
#: Prefix of each frame: the number of bytes that follow.
_LENGTH: Final = struct.Struct("<Q")
#: Seconds to wait before accepting clients again after `accept` has failed.
ACCEPT_SECONDS: Final = 0.1
#: Maximum bytes received in one call.
RECEIVED_BYTES: Final = 1 << 20
#: Process, user and group of a socket's peer.
_CREDENTIALS: Final = struct.Struct("3i")


class Listener:
    """Worker's end of the channel: answers each client on a thread of its own, until the process ends.

    The threads queue their CUDA work on the stream that is current where the listener is created.

    Args:
        answer: function from a client's frame to the answering frame.
        device: the model's device.

    Attributes:
        address: abstract name of the socket, without its leading zero byte.

    Raises:
        OSError: this machine refuses such sockets.
    """

    def __init__(self, answer: Callable[[bytes], bytes], device: torch.device) -> None:
        self.address: Final = f"steercap-{secrets.token_hex(16)}"
        self._answer = answer
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen()
        threading.Thread(target=self._serve, name="steercap channel", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:  # too many files are open
                time.sleep(ACCEPT_SECONDS)
            else:
                threading.Thread(target=self._hear, args=(client,), name="steercap answers", daemon=True).start()

    def _hear(self, client: socket.socket) -> None:
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)
        with client:
            try:
                _require_same_user(client)
                while (head := _received(client, _LENGTH.size)) and (frame := _received(client, *_LENGTH.unpack(head))):
                    answer = self._answer(bytes(frame))
                    client.sendall(_LENGTH.pack(len(answer)) + answer)
            except OSError:
                _LOG.debug("a client has left", exc_info=True)


def _received(client: socket.socket, size: int) -> bytearray | None:
    """Receive exactly `size` bytes; None if the peer closed the connection before.

    Raises:
        OSError: the connection broke, or `size` exceeds the maximum of a frame.
    """
    if size > MOST_BYTES:
        raise OSError(f"a frame of {size:,} bytes is too large")
    found = bytearray(size)
    view = memoryview(found)
    while view:
        if not (count := client.recv_into(view)):
            return None
        view = view[count:]
    return found


def _require_same_user(peer: socket.socket) -> None:
    """Check that the process at the other end of a Unix socket belongs to this user.

    Raises:
        PermissionError: it belongs to another user.
    """
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise PermissionError(f"the other end of a socket belongs to user {user}")


class Channel:
    """Client's end of the channel: any number of frames may wait for answers, which come in the order of the frames.

    A channel belongs to the event loop that it was opened in. It uses a plain socket: a transport can only be closed by
    its loop, which may have ended.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._received, self._unsent = bytearray(), bytearray()
        self._loop.add_reader(connected, self._read)

    @classmethod
    def open(cls, address: str) -> Channel:
        """Connect to a worker's listener on this machine, by its `address`; call within an event loop.

        Raises:
            OSError: the worker is on another machine, or belongs to another user.
        """
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.connect(f"\0{address}")
            _require_same_user(connected)
            connected.setblocking(False)
            return cls(connected)
        except BaseException:
            connected.close()
            raise

    @property
    def is_closed(self) -> bool:
        """True if the channel was closed, at either end."""
        return self._socket.fileno() < 0

    def ask(self, frame: bytes) -> asyncio.Future[bytes]:
        """Send a frame; return a future of the answering frame, which fails with ConnectionError if the worker ends."""
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting.append(answer)
        self._unsent += _LENGTH.pack(len(frame)) + frame
        self._write()
        return answer

    def close(self) -> None:
        """Close the channel, and fail all pending answers with ConnectionError. Idempotent."""
        if not self.is_closed:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
        while self._waiting:
            if not (answer := self._waiting.popleft()).done():
                answer.set_exception(ConnectionError("the channel to a worker is closed"))

    def end(self) -> None:
        """Close the socket alone, from any thread; no answer may be pending. Idempotent."""
        self._socket.close()

    def _write(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
            self._loop.remove_writer(self._socket)
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._write)
        except (OSError, ValueError):  # ValueError: it is closed
            self.close()

    def _read(self) -> None:
        try:
            data = self._socket.recv(RECEIVED_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
        self._received += data
        while len(self._received) >= _LENGTH.size:
            stop = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < stop:
                return
            answer = self._waiting.popleft()
            if not answer.done():  # its caller may have left
                answer.set_result(bytes(self._received[_LENGTH.size : stop]))
            del self._received[:stop]
