"""`/v1/steercap/saes`: sparse autoencoders that the operator loaded, and features of captured rows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from steercap.core.values import choices, shown
from steercap.errors import InvalidSpec
from steercap.saes import SAE
from steercap.server.folder import CaptureStore
from steercap.server.library import NAME
from steercap.server.questions import MOST_TOP, answering, asked, rows_at, rows_of, top_of

if TYPE_CHECKING:
    from steercap.model import SteerModel
    from steercap.saes.encoder import Features

#: Maximum rows per request.
MOST_ROWS: Final = 1 << 13


def loaded(folders: Mapping[str, Path]) -> dict[str, SAE]:
    """Load SAEs by name.

    Raises:
        InvalidSpec: an invalid name.
        InvalidFile: a folder holds no SAE.
    """
    for name in folders:
        if not NAME.fullmatch(name):
            raise InvalidSpec(f"SAE {name!r}: give letters, digits, dots, dashes and underscores")
    return {name: SAE.load(folder) for name, folder in folders.items()}


def require_fitting(saes: Mapping[str, SAE], model: SteerModel) -> None:
    """Check that the model has the rows that SAEs read.

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
    """Routes that read captured rows with SAEs.

    Args:
        captures: captures that wait to be fetched.
        saes: SAEs by name.
    """

    def __init__(self, captures: CaptureStore, saes: Mapping[str, SAE]) -> None:
        self._captures = captures
        self._saes = saes

    @property
    def routes(self) -> list[Route]:
        """All routes of this class."""
        return [
            Route("/v1/steercap/saes", self.list_saes, methods=["GET"]),
            Route("/v1/steercap/captures/{name}/features", answering(self.features), methods=["POST"]),
        ]

    async def list_saes(self, _request: Request) -> Response:
        """List the loaded SAEs, with their points and numbers of features."""
        data = [
            {"name": name, "layer": sae.input.layer, "site": sae.input.site, "features": sae.d_sae, "label": sae.name}
            for name, sae in self._saes.items()
        ]
        return JSONResponse({"object": "list", "data": data})

    async def features(self, request: Request) -> Response:
        """Answer with the most active features of rows: `{"sae": name, "positions": [...], "top": 8}`."""
        given = await asked(request, ("sae", "positions", "top"))
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


def described(found: Features) -> dict[str, Any]:
    """Return each row's features as pairs of index and activation, greatest first, and its number of active ones."""
    pairs = [
        [[feature, float(f"{value:.6g}")] for feature, value in zip(ids, values, strict=True) if feature >= 0]
        for ids, values in zip(found.ids.tolist(), found.values.tolist(), strict=True)
    ]
    return {"features": pairs, "active": found.active.tolist()}
