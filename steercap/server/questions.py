"""What questions about rows that wait have in common: their body, the rows, and errors as answers."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import torch
from starlette.requests import Request
from starlette.responses import Response

from steercap.captures.handle import CaptureHandle
from steercap.core.values import choices, index_of, shown
from steercap.errors import CaptureMemoryFull, InvalidRequest, InvalidSpec, SteercapError
from steercap.server.captures import Captures, owner_of
from steercap.server.routes import NOT_WAITING, refused

#: Bytes of a body, and entries named for each row.
MOST_BODY: Final = 1 << 20
MOST_TOP: Final = 50

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


class NotThereError(Exception):
    """No such capture."""


def answering(handler: Handler) -> Handler:
    """A handler whose errors are answers."""

    async def answered(request: Request) -> Response:
        try:
            return await handler(request)
        except NotThereError:
            return refused(404, NOT_WAITING)
        except InvalidRequest as error:
            return refused(400, str(error))
        except CaptureMemoryFull as error:
            return refused(429, str(error))
        except SteercapError as error:
            return refused(500, str(error))

    return answered


async def asked(request: Request, known: Sequence[str]) -> Mapping[str, Any]:
    """The body, an object.

    Raises:
        InvalidSpec: it is none, too long, or has what means nothing.
    """
    parts: list[bytes] = []
    length = 0
    async for part in request.stream():
        length += len(part)
        if length > MOST_BODY:
            raise InvalidSpec(f"the body is longer than {MOST_BODY:,} bytes")
        parts.append(part)
    try:
        given = msgspec.json.decode(b"".join(parts) or b"{}")
    except (ValueError, RecursionError) as error:  # msgspec's own, and bytes that are no UTF-8
        raise InvalidSpec(f"the body is no JSON: {error}") from error
    if not isinstance(given, dict) or (unknown := [name for name in given if name not in known]):
        if not isinstance(given, dict):
            raise InvalidSpec(f"the body is {shown(given)}; give an object with {', '.join(known)}")
        raise InvalidSpec(f"the body has an unknown field {shown(unknown[0])}; {choices(unknown[0], known)}")
    return given


async def rows_of(request: Request, captures: Captures) -> CaptureHandle:
    """The rows that a request names in its path, which are the caller's own.

    Raises:
        NotThereError: no such capture waits.
        InvalidRequest: it holds no rows of tokens.
    """
    owner = owner_of(request.headers.get("authorization", ""))
    one = captures.get(request.path_params["name"], owner)
    if one is None:
        raise NotThereError
    handle = await asyncio.to_thread(_read, one.content)
    if handle.directions or handle.receipt.reduce:
        raise InvalidRequest("the capture holds projections or reductions, not the rows of its tokens")
    return handle


def rows_at(handle: CaptureHandle, positions: Any) -> torch.Tensor:
    """Which of its rows are those of some positions, of all by default.

    Raises:
        InvalidSpec: not positions whose rows are there.
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
    """How many are to be named for each row.

    Raises:
        InvalidSpec: not a number that can be.
    """
    top = index_of(given)
    if top is None or not 1 <= top <= most:
        raise InvalidSpec(f"top={shown(given)}; give a number from 1 to {most}")
    return top


def _read(content: bytes) -> CaptureHandle:
    with tempfile.NamedTemporaryFile(prefix="steercap-look-", suffix=".safetensors") as file:
        file.write(content)
        file.flush()
        return CaptureHandle.load(file.name)
