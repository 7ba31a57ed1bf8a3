"""Routes `/v1/steercap/sketches` and `/v1/steercap/saes`: statistics of rows, and SAE features of captured rows."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from steercap.captures.sketch import Sketch
from steercap.core.names import require_upload_name
from steercap.core.spec import Point
from steercap.core.values import choices, shown
from steercap.errors import InvalidSpec
from steercap.requests.sketching import EngineSketches, RunningSketch, open_sketch
from steercap.saes import SAE
from steercap.server.asks import capture_of
from steercap.server.folder import CaptureStore, owner_of
from steercap.server.library import Library
from steercap.server.questions import MOST_TOP, answering, computing, read_body, rows_at, rows_of, top_of
from steercap.server.sketch_store import SketchStore

if TYPE_CHECKING:
    from steercap.model import SteerModel
    from steercap.saes.encoder import Features

#: Bytes of a file per part of an answer.
_PART: Final = 1 << 20
#: Fields of a request for a sketch that select its rows, as in `steercap.capture`.
ROWS: Final = ("layers", "sites", "tokens", "before_edits")


class SketchRoutes:
    """Routes that open, read and close sketches.

    Args:
        model: the open model.
        library: named content of the server.
        store: store of open sketches.
    """

    def __init__(self, model: SteerModel, library: Library, store: SketchStore) -> None:
        self._model, self._library, self._store = model, library, store

    @property
    def routes(self) -> list[Route]:
        """Starlette routes of this class's methods."""
        return [
            Route("/v1/steercap/sketches", computing(self.open), methods=["POST"]),
            Route("/v1/steercap/sketches/{name}", computing(self.sketch), methods=["GET"]),
            Route("/v1/steercap/sketches/{name}", answering(self.close), methods=["DELETE"]),
        ]

    async def open(self, request: Request) -> Response:
        """Answer a POST by opening a sketch, with 201 and its id; body: `{"kind": "moments", "layers": [4]}`."""
        given, owner = await read_body(request, ("kind", "size", *ROWS)), _owner(request)
        rows = {name: given[name] for name in ROWS if name in given}
        spec = capture_of({**rows, "codec": "raw"}, self._library, owner)
        running = await open_sketch(self._model.serving.here(), given.get("kind", "moments"), given.get("size"), spec)
        one = self._store.keep(running, owner)
        request.state.undo = partial(self._store.close, one)
        return JSONResponse({"id": one.name, "points": [list(point) for point in running.points]}, 201)

    async def sketch(self, request: Request) -> Response:
        """Answer a GET with a sketch's statistics, as `Sketch.save` writes them; `?points=0,3` selects some."""
        one = self._store.get(request.path_params["name"], _owner(request))
        points = _points(one.running, request.query_params.get("points"))
        async with AsyncExitStack() as held:
            held.enter_context(self._store.using(one))
            await held.enter_async_context(one.turn)
            one.running.record.require()
            found = await EngineSketches(self._model.serving.here()).fetch(one.running, points)
            file, size = await asyncio.to_thread(written, found)
            held.callback(file.close)
            kept = held.pop_all()
            request.state.undo = kept.aclose
            return _SketchFile(file, size, kept)

    async def close(self, request: Request) -> Response:
        """Answer a DELETE by freeing a sketch."""
        one = self._store.get(request.path_params["name"], _owner(request))
        await self._store.close(one)
        return JSONResponse({"id": one.name, "deleted": True})


class _SketchFile(StreamingResponse):
    """Answer that sends an open file of `size` bytes; `held`, which closes it, is closed however the sending ends."""

    def __init__(self, file: IO[bytes], size: int, held: AsyncExitStack) -> None:
        super().__init__(iter(lambda: file.read(_PART), b""), 200, {"content-length": str(size)})
        self.media_type = "application/octet-stream"
        self._held = held

    async def __call__(self, *args: Any) -> None:
        async with self._held:
            await super().__call__(*args)


def written(sketch: Sketch) -> tuple[IO[bytes], int]:
    """Write a sketch to a temporary file that is already unlinked; return the open file and its bytes."""
    with tempfile.TemporaryDirectory(prefix="steercap-sketch-") as folder:
        path = sketch.save(Path(folder, "it.safetensors"))
        return path.open("rb"), path.stat().st_size


def _points(running: RunningSketch, given: str | None) -> Sequence[Point]:
    """Return the points of a sketch that comma-separated indices name, in their order; all points if None.

    Raises:
        InvalidSpec: the sketch has no point of an index, or fewer points than there are indices.
    """
    if given is None:
        return running.points
    numbers = given.split(",", len(running.points))
    if len(numbers) > len(running.points):
        raise InvalidSpec(f"points={shown(given)}; the sketch has {len(running.points)} points, give each once at most")
    known = {str(number): point for number, point in enumerate(running.points)}
    if unknown := [number for number in numbers if number not in known]:
        raise InvalidSpec(f"points={shown(given)}; the sketch has no point {unknown[0][:20]!r}, but {', '.join(known)}")
    return [known[number] for number in numbers]


def _owner(request: Request) -> str:
    return owner_of(request.headers.get("authorization", ""))


#: Maximum number of rows per request.
MOST_ROWS: Final = 1 << 13


def loaded(folders: Mapping[str, Path]) -> dict[str, SAE]:
    """Load SAEs from folders, by name.

    Raises:
        InvalidSpec, InvalidFile: an invalid name, or a folder that does not contain an SAE.
    """
    for name in folders:
        require_upload_name(name, "SAE")
    return {name: SAE.load(folder) for name, folder in folders.items()}


def require_fitting(saes: Mapping[str, SAE], model: SteerModel) -> None:
    """Check that the model has a tap with rows of the right width at each SAE's input.

    Raises:
        InvalidSpec: an SAE reads a point that is not armed, or rows of another width.
    """
    for name, sae in saes.items():
        schema = model.points.get(sae.input)
        if schema is None:
            raise InvalidSpec(f"SAE {name!r} reads {sae.input}, which is not armed; see --sites")
        if schema.width != sae.d_in:
            raise InvalidSpec(f"SAE {name!r} reads rows of {sae.d_in}, and those of {sae.input} have {schema.width}")


class FeaturesOfRows:
    """Routes that encode captured rows with SAEs.

    Args:
        captures: store of captures that wait to be fetched.
        saes: the operator's SAEs, by name.
    """

    def __init__(self, captures: CaptureStore, saes: Mapping[str, SAE]) -> None:
        self._captures = captures
        self._saes = saes

    @property
    def routes(self) -> list[Route]:
        """Starlette routes of this class's methods."""
        return [
            Route("/v1/steercap/saes", self.list_saes, methods=["GET"]),
            Route("/v1/steercap/captures/{name}/features", computing(self.features), methods=["POST"]),
        ]

    async def list_saes(self, _request: Request) -> Response:
        """Answer a GET with the operator's SAEs: name, point and number of features."""
        data = [
            {"name": name, "layer": sae.input.layer, "site": sae.input.site, "features": sae.d_sae, "label": sae.name}
            for name, sae in self._saes.items()
        ]
        return JSONResponse({"object": "list", "data": data})

    async def features(self, request: Request) -> Response:
        """Answer a POST with the most active features of rows: `{"sae": name, "positions": [...], "top": 8}`."""
        given = await read_body(request, ("sae", "positions", "top"))
        name = given.get("sae")
        sae = self._saes.get(name) if isinstance(name, str) else None
        if sae is None:
            raise InvalidSpec(f"sae={shown(name)}; {choices(name, self._saes)}")
        top = top_of(given.get("top", 8), min(MOST_TOP, sae.d_sae))
        handle = await rows_of(request, self._captures)
        if sae.input not in handle.points:
            raise InvalidSpec(f"{name!r} reads {sae.input}, which was not captured")
        at = rows_at(handle, given.get("positions"))
        if len(at) > MOST_ROWS:
            raise InvalidSpec(f"{len(at)} tokens; at most {MOST_ROWS} rows at once")
        rows = handle.captures.elements(sae.input)[at]
        found = await asyncio.to_thread(sae.strongest, rows, top)
        said = {
            "sae": name,
            "layer": sae.input.layer,
            "site": sae.input.site,
            "positions": handle.positions[at].tolist(),
        }
        return JSONResponse(said | described(found))


def described(features: Features) -> dict[str, Any]:
    """Return features as JSON values: per row, pairs of index and activation, greatest first, and the number active."""
    pairs = [
        [[feature, float(f"{value:.6g}")] for feature, value in zip(ids, values, strict=True) if feature >= 0]
        for ids, values in zip(features.ids.tolist(), features.values.tolist(), strict=True)
    ]
    return {"features": pairs, "active": features.active.tolist()}
