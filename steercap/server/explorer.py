"""`/explorer`: web page for exploring a model, and its assets, served from the package alone.

The page needs no key, as it reveals nothing of the model; its data comes from `/v1`, which keys guard.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PATH: Final = "/explorer"
PAGE: Final = "index.html"
#: Content types of the assets, by extension; other files are not served.
KINDS: Final[Mapping[str, str]] = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
#: Nothing is loaded from or sent to other hosts, no frames, no inline scripts or styles.
POLICY: Final = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def routes() -> list[Route]:
    """Return the routes of the page and its assets."""
    parts = assets()

    async def page(_request: Request) -> Response:
        return Response(parts[PAGE], 200, dict(HEADERS), KINDS["html"])

    async def part(request: Request) -> Response:
        name = request.path_params["name"]  # looked up among the assets: it never becomes part of a path
        if name not in parts:
            return Response("no such part of the page", 404, media_type="text/plain")
        return Response(parts[name], 200, dict(HEADERS), KINDS[name.rpartition(".")[2]])

    return [Route(PATH, page, methods=["GET", "HEAD"]), Route(f"{PATH}/{{name}}", part, methods=["GET", "HEAD"])]


def assets() -> dict[str, bytes]:
    """Return the contents of the page's files, by name."""
    folder = resources.files("steercap.server") / "assets"
    return {one.name: one.read_bytes() for one in folder.iterdir() if one.name.rpartition(".")[2] in KINDS}
