"""Routes under `/v1/steercap` for captures, vectors and the model; and `/explorer`, a web page to explore it.

The page needs no API key, as it reveals nothing of the model; its data comes from `/v1`, which keys guard.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import AsyncIterator, Mapping
from importlib import resources
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from steercap.errors import CaptureMemoryFull, SteercapError
from steercap.kernels.codecs import ENCODINGS
from steercap.server.folder import CaptureFolder, CaptureStore, owner_of
from steercap.server.library import Library, Named, read
from steercap.server.middleware import failure

if TYPE_CHECKING:
    from steercap.model import SteerModel

#: Bytes of a capture per part of an answer, so that a slow client's capture is not copied as a whole.
_PART: Final = 1 << 20
#: Message of the error for an unknown capture.
NOT_WAITING: Final = "no such capture is waiting: it was deleted, it has expired, or it is not yours"
_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
EXPLORER: Final = "/explorer"
PAGE: Final = "index.html"
#: Content types of the page's files, by extension; other files are not served.
KINDS: Final[Mapping[str, str]] = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
#: Content security policy: nothing is loaded from or sent to other hosts; no frames, inline scripts or styles.
POLICY: Final = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
PAGE_HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Routes:
    """Routes of one server for its model, captures and named vectors.

    Args:
        model: the open model.
        captures: store of captures that wait to be fetched.
        library: named vectors and steering.
        aliases: model names that stand for steering.
        folder: folder that rows are written to, None if the operator gave none.
        identity: the model's identity when it was opened; its files may change while it is served.
        description: other constant properties of the model, see `client.compiling.engine_description`.
    """

    def __init__(
        self,
        model: SteerModel,
        captures: CaptureStore,
        library: Library,
        aliases: tuple[str, ...],
        folder: CaptureFolder | None = None,
        *,
        identity: Mapping[str, str],
        description: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._identity, self._description = identity, description
        self._model = model
        self._captures = captures
        self._library = library
        self._aliases = aliases
        self._folder = folder

    @property
    def routes(self) -> list[Route]:
        """Starlette routes of this class's methods."""
        return [
            Route("/v1/steercap/model", self.model, methods=["GET"]),
            Route("/v1/steercap/captures", self.list_captures, methods=["GET"]),
            Route("/v1/steercap/captures/{name}", self.capture, methods=["GET", "HEAD"]),
            Route("/v1/steercap/captures/{name}", self.forget_capture, methods=["DELETE"]),
            Route("/v1/steercap/vectors", self.list_vectors, methods=["GET"]),
            Route("/v1/steercap/vectors/{name}", self.put_vector, methods=["PUT"]),
            Route("/v1/steercap/vectors/{name}", self.vector, methods=["GET"]),
            Route("/v1/steercap/vectors/{name}", self.forget_vector, methods=["DELETE"]),
        ]

    async def model(self, request: Request) -> Response:
        """Answer a GET with the model's properties, the limits, and the usage of the caller and of the engine."""
        owner, model = owner_of(request.headers.get("authorization", "")), self._model
        stats, folder = await model.stats(), self._folder
        points = [
            {"layer": point.layer, "site": point.site, **msgspec.structs.asdict(schema)}
            for point, schema in model.points.items()
        ]
        return JSONResponse(
            {
                "model": model.serving.model,
                **model.origin,
                "identity": dict(self._identity),
                **self._description,
                "num_layers": model.num_layers,
                "hidden_size": model.hidden_size,
                "points": points,
                "codecs": ["raw", *(name for name, codec in ENCODINGS.items() if codec.is_codec)],
                "presets": list(self._aliases),
                "folder": folder is not None,
                "limits": {
                    "unfetched_bytes": self._captures.most_of_a_key,
                    "unfetched_seconds": self._captures.time_to_live,
                    "vectors_bytes": self._library.most_of_a_key,
                    "folder_bytes": folder.most_of_a_key if folder is not None else 0,
                },
                "held": {
                    "unfetched_bytes": self._captures.waiting_bytes(owner),
                    "vectors": len(list(self._library.of(owner))),
                    "folder_bytes": folder.written(owner) if folder is not None else 0,
                },
                "engine": dataclasses.asdict(stats),
            }
        )

    async def list_captures(self, request: Request) -> Response:
        """Answer a GET with the caller's waiting captures: id, bytes and seconds until expiry."""
        owner = owner_of(request.headers.get("authorization", ""))
        found = [
            {"id": capture.name, "bytes": capture.size, "expires_in": round(self._captures.expires_in(capture), 1)}
            for capture in self._captures.captures_of(owner)
        ]
        return JSONResponse({"object": "list", "data": found})

    async def capture(self, request: Request) -> Response:
        """Answer a GET with a capture as a safetensors file, whole or the range of bytes of a `Range` header."""
        capture = self._captures.get(*_named(request))
        if capture is None:
            return refused(404, NOT_WAITING)
        tag = f'"{capture.name}"'
        headers = {"accept-ranges": "bytes", "etag": tag}
        asked = request.headers.get("range", "").lower()
        whole = request.method == "HEAD" or request.headers.get("if-range", tag) != tag
        # RFC 9110, 14.2: other units are ignored, and several ranges may be.
        if whole or not asked.startswith("bytes=") or "," in asked:
            return _file(capture.content, 0, capture.size, 200, headers)
        found = _range(asked, capture.size)
        if found is None:
            return Response(status_code=416, headers={"content-range": f"bytes */{capture.size}"})
        start, stop = found
        headers["content-range"] = f"bytes {start}-{stop - 1}/{capture.size}"
        return _file(capture.content, start, stop, 206, headers)

    async def forget_capture(self, request: Request) -> Response:
        """Answer a DELETE by deleting the caller's capture; 404 if there is none."""
        name, owner = _named(request)
        if not self._captures.remove(name, owner):
            return refused(404, NOT_WAITING)
        return JSONResponse({"id": name, "object": "steercap.capture", "deleted": True})

    async def list_vectors(self, request: Request) -> Response:
        """Answer a GET with descriptions of the caller's named content, and the operator's."""
        owner = owner_of(request.headers.get("authorization", ""))
        return JSONResponse({"object": "list", "data": [named.described() for named in self._library.of(owner)]})

    async def vector(self, request: Request) -> Response:
        """Answer a GET with the description of named vectors, directions or steering; 404 if the name is unknown."""
        try:
            return JSONResponse(self._library.get(*_named(request)).described())
        except SteercapError as error:
            return refused(404, str(error))

    async def put_vector(self, request: Request) -> Response:
        """Answer a PUT by storing the body, a file of vectors, directions or steering, under the name in the path."""
        try:
            found = await self._received(request, *_named(request))
        except ClientDisconnect:
            return Response(status_code=400)  # the client is gone
        except CaptureMemoryFull as error:
            return refused(429, str(error), type(error).__name__)
        except SteercapError as error:
            return refused(400, str(error), type(error).__name__)
        if found is None:
            return refused(413, f"the file is longer than {self._library.most_bytes:,} bytes")
        return JSONResponse(found.described(), 201)

    async def _received(self, request: Request, name: str, owner: str) -> Named | None:
        """Receive and store a file; return None if it is too long, without reading it to the end.

        Raises:
            SteercapError: it cannot be stored.
        """
        said = request.headers.get("content-length", "")
        length, counted, parts = 0, 0, list[bytes]()
        with self._library.receiving(name, owner) as came:
            if said.isdecimal():
                if len(said) > len(str(self._library.most_bytes)) or int(said) > self._library.most_bytes:
                    return None
                came(counted := int(said))
            async for part in request.stream():
                length += len(part)
                if length > self._library.most_bytes:
                    return None
                if length > counted:  # in steps, since counting goes through all stored files
                    came(counted := length + _PART)
                parts.append(part)
            content = await asyncio.to_thread(read, b"".join(parts))
            return self._library.keep(name, owner, content, length)

    async def forget_vector(self, request: Request) -> Response:
        """Answer a DELETE by deleting the caller's content of the name in the path; 404 if there is none."""
        name, owner = _named(request)
        if not self._library.remove(name, owner):
            return refused(404, "you have no vector or steering of this name")
        return JSONResponse({"name": name, "deleted": True})


def _file(content: bytes, start: int, stop: int, status: int, headers: Mapping[str, str]) -> Response:
    """Return an answer with bytes `start` to `stop` of a file, sent in parts as fast as the client reads."""

    async def parts() -> AsyncIterator[memoryview]:
        for first in range(start, stop, _PART):
            yield memoryview(content)[first : min(first + _PART, stop)]

    kept = {**headers, "content-length": str(stop - start)}
    return StreamingResponse(parts(), status, kept, "application/octet-stream")


def _named(request: Request) -> tuple[str, str]:
    return request.path_params["name"], owner_of(request.headers.get("authorization", ""))


def _range(header: str, size: int) -> tuple[int, int] | None:
    """Return start and stop of a `Range` header for a file of `size` bytes; None if invalid or empty."""
    found = _RANGE.fullmatch(header.strip())
    if found is None or not any(found.groups()):
        return None
    first, last = (int(part) if part else None for part in found.groups())
    if first is None:
        assert last is not None
        start, stop = max(0, size - last), size
    else:
        start, stop = first, size if last is None else min(size, last + 1)
    return (start, stop) if start < stop else None


def refused(status: int, message: str, error: str = "") -> Response:
    """Build an error answer for OpenAI's clients; `error` is the class name of a steercap error to raise, or ""."""
    body, headers = failure(status, message, error)
    return Response(body, status, headers)


def explorer_routes() -> list[Route]:
    """Return the Starlette routes of the explorer's page and its files."""
    parts = assets()

    async def page(_request: Request) -> Response:
        return Response(parts[PAGE], 200, dict(PAGE_HEADERS), KINDS["html"])

    async def part(request: Request) -> Response:
        name = request.path_params["name"]  # looked up among the assets: it never becomes part of a path
        if name not in parts:
            return Response("the page has no such part", 404, media_type="text/plain")
        return Response(parts[name], 200, dict(PAGE_HEADERS), KINDS[name.rpartition(".")[2]])

    return [
        Route(EXPLORER, page, methods=["GET", "HEAD"]),
        Route(f"{EXPLORER}/{{name}}", part, methods=["GET", "HEAD"]),
    ]


def assets() -> dict[str, bytes]:
    """Return the contents of the explorer's files, by file name."""
    folder = resources.files("steercap.server") / "assets"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in KINDS}
