"""Routes under `/v1/steercap`: projections and logit lens of captured rows, and directions extracted from texts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from steercap.captures.handle import CaptureHandle
from steercap.client.uploads import encoded
from steercap.core.names import require_upload_name
from steercap.core.prompts import texts_of
from steercap.core.values import choices, index_of, shown
from steercap.errors import InvalidRequest, InvalidSpec
from steercap.lab.directions import extract
from steercap.server.asks import layer_vectors
from steercap.server.folder import CaptureStore, owner_of
from steercap.server.library import Library
from steercap.server.questions import computing, read_body, rows_at, rows_of, top_of
from steercap.steering.layers import LayerVectors

if TYPE_CHECKING:
    from steercap.model import SteerModel

#: Maximum rows per logit lens request, and maximum directions per request.
MOST_ROWS: Final = 1 << 13
MOST_DIRECTIONS: Final = 16
#: Maximum count of numbers in one answer.
MOST_NUMBERS: Final = 1 << 21
#: Maximum number of texts of each kind ("more", "less") that a direction is extracted from.
MOST_TEXTS: Final = 64
SITE: Final = "resid_post"


class InspectRoutes:
    """Routes that analyse captured rows, and extract directions.

    Args:
        model: the open model.
        captures: store of captures that wait to be fetched.
        library: named vectors and steering.
    """

    def __init__(self, model: SteerModel, captures: CaptureStore, library: Library) -> None:
        self._model = model
        self._captures = captures
        self._library = library

    @property
    def routes(self) -> list[Route]:
        """Starlette routes of this class's methods."""
        return [
            Route("/v1/steercap/captures/{name}/scores", computing(self.scores), methods=["POST"]),
            Route("/v1/steercap/captures/{name}/lens", computing(self.lens), methods=["POST"]),
            Route("/v1/steercap/vectors/{name}", computing(self.contrast), methods=["POST"]),
        ]

    async def scores(self, request: Request) -> Response:
        """Answer a POST with a capture's tokens, norms of its rows, and projections of the rows on named directions.

        The body is `{"directions": [names], "site": ...}`, both optional.
        """
        given = await read_body(request, ("directions", "site"))
        site, names = given.get("site", SITE), given.get("directions", [])
        if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise InvalidSpec(f"directions={shown(names)}; give a list of names")
        if len(names) > MOST_DIRECTIONS:
            raise InvalidSpec(f"{len(names)} directions; at most {MOST_DIRECTIONS} at once")
        owner = owner_of(request.headers.get("authorization", ""))
        directions = {name: layer_vectors(name, self._library, owner) for name in names}
        handle = await rows_of(request, self._captures)
        found = await asyncio.to_thread(scored, handle, site, directions)
        return JSONResponse(self._tokens(handle) | found)

    async def lens(self, request: Request) -> Response:
        """Answer a POST with the logit lens of a capture's rows: the tokens they make likeliest, with probabilities.

        The body is `{"layers": [...] or "all", "positions": [...], "top": 5, "site": ...}`, all optional.

        Raises:
            InvalidSpec: a layer was not captured, or too many rows are asked for.
        """
        given = await read_body(request, ("layers", "positions", "top", "site"))
        handle = await rows_of(request, self._captures)
        site, layers = given.get("site", SITE), given.get("layers", "all")
        known = _layers(handle, site)
        wanted = known if layers == "all" else layers
        if not isinstance(wanted, list) or any(index_of(layer) is None for layer in wanted):
            raise InvalidSpec(f"layers={shown(layers)}; give a list of layers, or 'all'")
        if missing := [layer for layer in wanted if layer not in known]:
            raise InvalidSpec(f"layer {shown(missing[0])} was not captured; captured: {known}")
        top = top_of(given.get("top", 5))
        at = rows_at(handle, given.get("positions"))
        if len(wanted) * len(at) > MOST_ROWS:
            raise InvalidSpec(f"{len(wanted)} layers × {len(at)} tokens; at most {MOST_ROWS} rows at once")
        rows = [handle.captures.elements((layer, site))[at] for layer in wanted]
        some = bool(rows) and len(at) > 0
        said = await self._model.unembed(torch.cat(rows), top=top, normed=site == "final_norm") if some else None
        return JSONResponse(
            {
                "layers": wanted,
                "positions": handle.positions[at].tolist(),
                "top": [] if said is None else self._named(said.token_ids, said.log_probs, len(at)),
            }
        )

    async def contrast(self, request: Request) -> Response:
        """Answer a POST: extract and store a direction from two kinds of texts, `{"more": [...], "less": [...]}`."""
        name, owner = request.path_params["name"], owner_of(request.headers.get("authorization", ""))
        given = await read_body(request, ("more", "less"))
        more, less = _texts("more", given.get("more")), _texts("less", given.get("less"))
        require_upload_name(name)
        made = await extract(self._model, more, less, name=name, held_out=0.0)
        content = await asyncio.to_thread(encoded, made[name])
        return JSONResponse(self._library.add(name, owner, content).described(), 201)

    def _tokens(self, handle: CaptureHandle) -> dict[str, Any]:
        """Return the tokens of a capture's rows as JSON, and as `rest` the texts of the tokens after the last row."""
        tokenizer, prompt = self._model.tokenizer, len(handle.prompt_token_ids)
        special = set(tokenizer.all_special_ids)
        ids, positions = handle.token_ids.tolist(), handle.positions.tolist()
        tokens = [
            {"id": token, "position": at, "text": text, "special": token in special, "generated": at >= prompt}
            for token, at, text in zip(ids, positions, texts_of(tokenizer, ids), strict=True)
        ]
        sequence = [*handle.prompt_token_ids, *handle.output_token_ids]
        rest = sequence[positions[-1] + 1 :] if positions else []
        return {"tokens": tokens, "rest": texts_of(tokenizer, [one for one in rest if one not in special])}

    def _named(self, token_ids: torch.Tensor, log_probs: torch.Tensor, rows: int) -> list[list[list[Any]]]:
        """Return the likeliest tokens as [text, probability], by layer and row, from tensors [layers * rows, top]."""
        distinct = token_ids.unique().tolist()
        texts = dict(zip(distinct, texts_of(self._model.tokenizer, distinct), strict=True))
        said = [
            [[texts[token], round(chance, 5)] for token, chance in zip(ids, chances, strict=True)]
            for ids, chances in zip(token_ids.tolist(), log_probs.exp().tolist(), strict=True)
        ]
        return [said[first : first + rows] for first in range(0, len(said), rows)]


def scored(handle: CaptureHandle, site: Any, directions: Mapping[str, LayerVectors]) -> dict[str, Any]:
    """Compute norms of rows by layer, and their projections on and cosines with directions, as JSON values.

    A projection is the scalar product with the unit vector.

    Args:
        handle: fetched capture of rows.
        site: site of the rows.
        directions: directions by name.

    Raises:
        InvalidRequest: directions of another site or width, rows that were not captured, or too many numbers.
    """
    layers = _layers(handle, site)
    numbers = len(layers) * len(handle.positions) * (1 + 2 * len(directions))
    if numbers > MOST_NUMBERS:
        raise InvalidRequest(
            f"{len(layers)} layers × {len(handle.positions)} tokens and {len(directions)} directions make {numbers:,} "
            f"numbers, and an answer holds {MOST_NUMBERS:,}; capture fewer, or ask for fewer directions"
        )
    rows = {layer: handle.captures.elements((layer, site)).double() for layer in layers}
    norms = {layer: one.norm(dim=-1) for layer, one in rows.items()}
    found: dict[str, Any] = {}
    units = {}
    for name, vectors in directions.items():
        if vectors.site != site:
            raise InvalidSpec(f"{name!r} is of {vectors.site}, and these rows are of {site}")
        if vectors.width != next(iter(rows.values())).shape[-1]:
            raise InvalidSpec(f"{name!r} has width {vectors.width}, which is not that of this model")
        units[name] = vectors.unit()
        of = [layer for layer in layers if layer in vectors]
        along = {layer: rows[layer] @ units[name][layer].double() for layer in of}
        found[name] = {
            "layers": of,
            "norms": _short([vectors[layer].double().norm() for layer in of]),
            "projection": [_short(along[layer]) for layer in of],
            "cosine": [_short(along[layer] / norms[layer].clamp_min(1e-30)) for layer in of],
        }
    alike = {}
    if len(units) > 1:
        (one, first), (two, second), *_ = units.items()
        shared = [layer for layer in layers if layer in first and layer in second]
        alike = {"of": [one, two], "layers": shared, "cosine": _short([first[at] @ second[at] for at in shared])}
    return {
        "site": site,
        "layers": layers,
        "norms": [_short(norms[layer]) for layer in layers],
        "directions": found,
        "alike": alike,
    }


def _layers(handle: CaptureHandle, site: Any) -> list[int]:
    found = sorted(point.layer for point in handle.points if point.site == site)
    if not found:
        sites = sorted({point.site for point in handle.points})
        raise InvalidSpec(f"site={shown(site)} was not captured; {choices(site, sites)}")
    return found


def _texts(what: str, given: Any) -> Sequence[str]:
    if not (isinstance(given, list) and given and all(isinstance(one, str) and one.strip() for one in given)):
        raise InvalidSpec(f"{what}={shown(given)}; give a list of texts, none of them empty")
    if len(given) > MOST_TEXTS:
        raise InvalidSpec(f"{what} holds {len(given)} texts; at most {MOST_TEXTS}")
    return given


def _short(values: Sequence[Any] | torch.Tensor) -> list[float | None]:
    """Convert numbers to JSON, with six significant digits, and None for NaN and infinity."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in map(float, values)]
