"""Conversion of monitors to JSON, as `steercap.server.asks` reads them, and of the server's reports from JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from steercap.client.asks import MOST_NUMBERS, NotAsJSON, steering_asked, value_asked
from steercap.client.uploads import Uploads
from steercap.core.spec import resolve_layers
from steercap.errors import ServerFailure
from steercap.requests.monitoring import Crossing, MonitorReport
from steercap.steering.layers import LayerVectors
from steercap.steering.monitor import Monitor, labels_of
from steercap.steering.spec import SteeringSpec

#: Report of one monitor for a sample, as JSON.
Said = Mapping[str, Any]


async def monitors_asked(
    monitors: Sequence[Monitor], num_layers: int, uploads: Uploads, names: AsyncExitStack
) -> list[dict[str, Any]]:
    """Return the field `monitors` of a request's body, and upload long probes and steering.

    Args:
        monitors: the monitors.
        num_layers: decoder layers of the model.
        uploads: uploads of the connection.
        names: exit stack that keeps the uploads on the server until it is closed.

    Raises:
        LayerOutOfRange: a layer that the model does not have.
        The errors of `Uploads.named`.
    """
    return [await _asked(one, num_layers, uploads, names) for one in monitors]


async def _asked(one: Monitor, num_layers: int, uploads: Uploads, names: AsyncExitStack) -> dict[str, Any]:
    (layer,) = resolve_layers(one.layer, num_layers)
    asked: dict[str, Any] = {
        "layer": layer,
        "site": one.site,
        "threshold": one.threshold,
        "above": one.above,
        "bias": one.bias,
        "tokens": value_asked(one.selection),
        "do": one.do,
        "name": one.name,
    }
    if one.weights.numel() <= MOST_NUMBERS:
        asked["probe"] = value_asked(one.weights)
    else:
        vectors = LayerVectors({layer: one.weights}, site=one.site)
        asked["probe"] = await names.enter_async_context(uploads.named(vectors))
    if isinstance(one.steering, SteeringSpec):
        try:
            asked["steering"] = steering_asked(one.steering)
        except NotAsJSON:
            asked["steering"] = await names.enter_async_context(uploads.named(one.steering))
    return asked


def reports_of(monitors: Sequence[Monitor], said: Sequence[Said] | None) -> tuple[MonitorReport, ...]:
    """Return the reports of all monitors for one sample.

    Raises:
        ServerFailure: the server says nothing of one that it was asked for.
    """
    found = msgspec.convert(list(said or ()), tuple[MonitorReport, ...])
    if tuple(one.monitor for one in found) != labels_of(monitors):
        raise ServerFailure(
            "the server does not report the monitors of this request; use the same version of steercap there"
        )
    return found


def crossings_of(said: Iterable[Said]) -> tuple[Crossing, ...]:
    """Return the crossings of an event of a stream."""
    found = ({name: value for name, value in one.items() if name != "choice"} for one in said)
    return msgspec.convert(list(found), tuple[Crossing, ...])
