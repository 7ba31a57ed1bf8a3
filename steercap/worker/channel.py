"""A channel between client and worker beside vLLM's RPCs: a Unix socket that carries the same frames.

An RPC goes through the queues of the engine's process, and waits for the passes that it has in flight. Questions about
requests that have ended need neither: the worker answers them on a thread, between two of its passes. The socket has an
abstract name, which the kernel frees with the process, and only processes of the same user are heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import torch

_LOG: Final = logging.getLogger(__name__)
#: Length of a frame, in front of it.
_LENGTH: Final = struct.Struct("<Q")
#: Process, user and group of a socket's peer.
_CREDENTIALS: Final = struct.Struct("3i")


class Listener:
    """The worker's end: answers one client after the other, on a thread that ends with the process.

    The thread queues its work on the stream of the thread that makes the listener.

    Args:
        answer: function that answers a frame.
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
        threading.Thread(target=self._serve, name="steercap answers", daemon=True).start()

    def _serve(self) -> None:
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)
        while True:
            client, _ = self._socket.accept()
            with client:
                try:
                    _require_same_user(client)
                    self._hear(client)
                except OSError:
                    _LOG.debug("a client has left", exc_info=True)

    def _hear(self, client: socket.socket) -> None:
        while (head := _received(client, _LENGTH.size)) and (frame := _received(client, *_LENGTH.unpack(head))):
            answer = self._answer(bytes(frame))
            client.sendall(_LENGTH.pack(len(answer)) + answer)


def _received(client: socket.socket, size: int) -> bytearray | None:
    """Receive `size` bytes; None if the client has left."""
    found = bytearray(size)
    view = memoryview(found)
    while view:
        if not (count := client.recv_into(view)):
            return None
        view = view[count:]
    return found


def _require_same_user(peer: socket.socket) -> None:
    """Check that a process of this user is at the other end.

    Raises:
        PermissionError: another user's is.
    """
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise PermissionError(f"the other end of a socket belongs to user {user}")


class Channel(asyncio.Protocol):
    """The client's end: any number of questions at once, answered in their order."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, address: str) -> Channel:
        """Connect to a worker of this machine.

        Raises:
            OSError: it is on another machine, or belongs to another user.
        """
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.connect(f"\0{address}")
            _require_same_user(connected)
            connected.setblocking(False)
            _, channel = await asyncio.get_running_loop().create_unix_connection(cls, sock=connected)
        except BaseException:
            connected.close()
            raise
        return channel

    def ask(self, frame: bytes) -> asyncio.Future[bytes]:
        """Send a frame; return its answer, or a ConnectionError if the worker has ended."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if self._transport is None or self._transport.is_closing():
            answer.set_exception(ConnectionError("the channel is closed"))
        else:
            self._waiting.append(answer)
            self._transport.writelines((_LENGTH.pack(len(frame)), frame))
        return answer

    def close(self) -> None:
        """Close the channel. Idempotent, from any thread once its event loop has ended."""
        if self._transport is not None:
            with contextlib.suppress(RuntimeError):  # its loop has ended, and the socket with it
                self._transport.abort()

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= _LENGTH.size:
            stop = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < stop:
                return
            answer = self._waiting.popleft()
            if not answer.done():  # its caller may have left
                answer.set_result(bytes(self._received[_LENGTH.size : stop]))
            del self._received[:stop]

    def connection_lost(self, exc: Exception | None) -> None:
        while self._waiting:
            if not (answer := self._waiting.popleft()).done():
                answer.set_exception(
                    exc if isinstance(exc, ConnectionError) else ConnectionError("the worker has left")
                )
