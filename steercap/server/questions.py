"""Shared parts of the routes under `/v1/steercap`: bodies, rows, errors as answers, and cancelling for lost clients."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import torch
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from steercap.captures.handle import CaptureHandle
from steercap.core.values import choices, index_of, shown
from steercap.errors import (
    CaptureMemoryFull,
    InvalidRequest,
    InvalidSpec,
    SketchClosed,
    SketchMemoryFull,
    SteercapError,
)
from steercap.server.folder import CaptureStore, owner_of
from steercap.server.middleware import replayed
from steercap.server.routes import NOT_WAITING, refused

#: Maximum bytes of a request's body, and maximum of `top`, entries per row.
MOST_BODY: Final = 1 << 20
MOST_TOP: Final = 50

#: HTTP status of errors by class; 500 for others.
_STATUS: Final[Sequence[tuple[Any, int]]] = (
    (InvalidRequest, 400),
    (SketchClosed, 404),
    ((CaptureMemoryFull, SketchMemoryFull), 429),
)

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


class CaptureNotFoundError(Exception):
    """Error of a handler for an unknown capture, answered with status 404."""


def answering(handler: Handler) -> Handler:
    """Return a handler that calls `handler` and turns the steercap errors it raises into HTTP error answers."""

    async def answered(request: Request) -> Response:
        try:
            return await handler(request)
        except CaptureNotFoundError:
            return refused(404, NOT_WAITING)
        except SteercapError as error:
            return refused(_status_of(error), str(error), type(error).__name__)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it

    return answered


def computing(handler: Handler, most: int = MOST_BODY) -> Handler:
    """Wrap a handler of long work like `answering`, and cancel it when the client disconnects.

    A handler that stores something for the client does so after its last await, and sets `request.state.undo` to a
    coroutine function that deletes it: the client may disconnect at that moment.

    Args:
        handler: handler to wrap.
        most: maximum bytes of a body.
    """

    async def computed(request: Request) -> Response:
        try:
            body = await _body(request, most)  # first: what is received later is the end of the connection
        except InvalidSpec as error:
            return refused(413, str(error), type(error).__name__)
        inner = Request(request.scope, replayed(body, request.receive))
        work = asyncio.ensure_future(handler(inner))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if not gone.done():
                return work.result()
            if work.done() and hasattr(inner.state, "undo"):
                await inner.state.undo()
            raise ClientDisconnect
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.wait([work, gone])
            if not work.cancelled():
                work.exception()  # or asyncio would report that it was never retrieved

    return answering(computed)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _status_of(error: SteercapError) -> int:
    for kinds, status in _STATUS:
        if isinstance(error, kinds):
            return status
    return 500


def as_json(said: Mapping[str, Any]) -> Response:
    """Return an HTTP answer whose body is a value encoded by msgspec as JSON."""
    return Response(msgspec.json.encode(said), media_type="application/json")


async def _body(request: Request, most: int) -> bytes:
    """Read a request's whole body.

    Raises:
        InvalidSpec: it has more than `most` bytes.
        ClientDisconnect: the client has gone.
    """
    parts: list[bytes] = []
    length = 0
    async for part in request.stream():
        length += len(part)
        if length > most:
            raise InvalidSpec(f"the body is longer than {most:,} bytes")
        parts.append(part)
    return b"".join(parts)


async def read_body(request: Request, known: Sequence[str]) -> Mapping[str, Any]:
    """Return the decoded body of a request, a JSON object with no fields but `known`; {} for an empty body.

    A browser sends application/json to another origin only if that allows it, and other types without asking.

    Raises:
        InvalidSpec: it is no such object, or its Content-Type is not application/json.
    """
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise InvalidSpec(
            f"the body's Content-Type is {shown(kind)}; send JSON as application/json, {{}} for the defaults"
        )
    try:
        given = msgspec.json.decode(await request.body() or b"{}")
    except (ValueError, RecursionError) as error:  # msgspec's own, and bytes that are no UTF-8
        raise InvalidSpec(f"the body is not JSON: {error}") from error
    if not isinstance(given, dict) or (unknown := [name for name in given if name not in known]):
        if not isinstance(given, dict):
            raise InvalidSpec(f"the body is {shown(given)}; give an object with {', '.join(known)}")
        raise InvalidSpec(f"the body has an unknown field {shown(unknown[0])}; {choices(unknown[0], known)}")
    return given


async def rows_of(request: Request, captures: CaptureStore) -> CaptureHandle:
    """Load the capture named in a request's path, which must be the caller's.

    Raises:
        CaptureNotFoundError: there is no such capture.
        InvalidRequest: it contains projections or reductions, not rows of tokens.
    """
    owner = owner_of(request.headers.get("authorization", ""))
    one = captures.get(request.path_params["name"], owner)
    if one is None:
        raise CaptureNotFoundError
    handle = await asyncio.to_thread(_loaded_handle, one.content)
    if handle.directions or handle.receipt.reduce:
        raise InvalidRequest("the capture holds projections or reductions, not the rows of its tokens")
    return handle


def rows_at(handle: CaptureHandle, positions: Any) -> torch.Tensor:
    """Return the indices of a handle's rows at token positions, int64 [n]; all rows if None.

    Raises:
        InvalidSpec: `positions` is not a list of positions that have rows.
    """
    if positions is None:
        return torch.arange(len(handle.positions))
    given = positions if isinstance(positions, list) else [None]
    row = {position: at for at, position in enumerate(handle.positions.tolist())}
    for one in given:
        if index_of(one) is None or one not in row:
            raise InvalidSpec(f"positions={shown(positions)}; give a list of positions whose rows were captured")
    return torch.tensor([row[one] for one in given], dtype=torch.int64)


def top_of(given: Any, most: int = MOST_TOP) -> int:
    """Return the number of entries per row that a request asks for, after checking it.

    Raises:
        InvalidSpec: not a whole number from 1 to `most`.
    """
    top = index_of(given)
    if top is None or not 1 <= top <= most:
        raise InvalidSpec(f"top={shown(given)}; give a number from 1 to {most}")
    return top


def _loaded_handle(content: bytes) -> CaptureHandle:
    with tempfile.NamedTemporaryFile(prefix="steercap-look-", suffix=".safetensors") as file:
        file.write(content)
        file.flush()
        return CaptureHandle.load(file.name)
