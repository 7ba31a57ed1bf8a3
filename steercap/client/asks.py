"""Requests as JSON: specs and monitors as `steercap.server.asks` reads them; and events of a stream, parsed.

Specs that JSON cannot represent are uploaded, see `client.uploads`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import msgspec
import torch

from steercap.client.uploads import Uploads
from steercap.core.names import Name
from steercap.core.spec import CaptureSpec, resolve_layers
from steercap.core.tokens import TokenSelection
from steercap.core.values import Mask, shown
from steercap.errors import InvalidRequest, InvalidSpec, ServerFailure
from steercap.requests.monitoring import Crossing, MonitorReport
from steercap.requests.stream import Chunk
from steercap.steering.edits import EDITS, Edit
from steercap.steering.layers import LayerVectors
from steercap.steering.monitor import Monitor, labels_of
from steercap.steering.spec import LogitBias, SteeringSpec

#: Maximum number of vector elements in a request's body, where each takes 20 bytes. Larger vectors are uploaded, once.
MOST_NUMBERS: Final = 4096
#: Fields of a CaptureSpec that a server does not support, with advice.
_REFUSED: Final[Mapping[str, str]] = {
    "calibration": "a server codes rows without a calibration; leave it out",
    "sae": "a server uses its own SAEs, named in HTTP requests; capture the rows and use SAE.encode here",
    "gather": "a server returns whole rows; leave it out",
}


class NotAsJSON(Exception):
    """Signal that JSON cannot represent a spec, or only at length, so that it must be uploaded."""


def require_specs(spec: Any) -> None:
    """Check that one prompt's capture spec can be sent to a server; None is accepted.

    Raises:
        InvalidSpec: it is of another type.
        InvalidRequest: it has a field that a server does not support.
    """
    if spec is None:
        return
    if not isinstance(spec, CaptureSpec):
        raise InvalidSpec(f"capture={shown(spec)}; give a CaptureSpec, or capture_layers=")
    plain = CaptureSpec()
    for name, reason in _REFUSED.items():
        if getattr(spec, name) != getattr(plain, name):
            raise InvalidRequest(f"CaptureSpec({name}=) cannot be sent to a server: {reason}")


def capture_json(spec: CaptureSpec, project: str | None) -> dict[str, Any]:
    """Return a capture spec as JSON values, without fields at their defaults.

    Args:
        spec: the capture spec.
        project: name of the uploaded directions of `spec.project` on the server, or None.
    """
    plain = CaptureSpec()
    asked: dict[str, Any] = {} if project is None else {"project": project}
    for field in dataclasses.fields(CaptureSpec):
        given = getattr(spec, field.name)
        if field.name in {*_REFUSED, "project", "at"} or given == getattr(plain, field.name):
            continue
        asked[field.name] = value_json(given)
    if spec.at is not None:
        names: Any = spec.at
        asked["at"] = [_point_json(name) for name in names]
    return asked


def steering_json(spec: SteeringSpec) -> dict[str, Any]:
    """Return a steering spec as JSON values.

    Raises:
        NotAsJSON: its vectors are long, a nested spec preserves norms by itself, or a number is not finite.
    """
    if any(isinstance(edit, SteeringSpec) and edit.keeps_norm for edit in spec.edits):
        raise NotAsJSON
    edits = spec.flat()
    if sum(_numbers(edit) for edit in edits) > MOST_NUMBERS:
        raise NotAsJSON
    return {"edits": [_edit_json(edit) for edit in edits], "preserve_norm": spec.preserve_norm}


async def sent_steering(spec: SteeringSpec, uploads: Uploads, names: AsyncExitStack) -> Any:
    """Return a steering spec as JSON values, or upload it until `names` is closed and return its name."""
    try:
        return steering_json(spec)
    except NotAsJSON:
        return await names.enter_async_context(uploads.named(spec))


def _edit_json(edit: Edit | LogitBias) -> dict[str, Any]:
    if isinstance(edit, LogitBias):
        bias: Any = edit.bias
        if not isinstance(bias, Mapping):
            raise NotAsJSON
        said = {str(token): value_json(add) for token, add in bias.items()}
        return {"op": "logit_bias", "bias": said, "tokens": value_json(edit.selection)}
    asked: dict[str, Any] = {"op": next(op for op, kind in EDITS.items() if type(edit) is kind)}
    for field in dataclasses.fields(edit):
        given = getattr(edit, field.name)
        left_out = given is None or field.name in (("model", "tokens") if edit.replaced else ("model",))
        if field.init and not left_out:
            asked[field.name] = value_json(given)
    return asked


def value_json(value: Any) -> Any:
    """Return the value of a spec's field as JSON values, without loss.

    Raises:
        NotAsJSON: JSON cannot represent it.
    """
    found: Any
    match value:
        case None | bool() | int() | str():
            found = value
        case float() if math.isfinite(value):
            found = value
        case torch.Tensor():
            found = value.tolist()  # float32 is held by a float, and read back as the same
        case TokenSelection(terms):
            parts = [value_json(slice(*term) if isinstance(term, tuple) else term) for term in terms]
            found = parts[0] if len(parts) == 1 else parts
        case Mask():
            found = value.tolist()
        case slice():
            parts = [value.start, value.stop, *([] if value.step is None else [value.step])]
            found = ":".join("" if part is None else str(part) for part in parts)
        case list() | tuple() | range():
            found = [value_json(part) for part in value]
        case _:
            raise NotAsJSON
    return found


def _point_json(name: Name) -> Any:
    return name.site if name.layer is None else [name.layer, name.site]


def _numbers(edit: Edit | LogitBias) -> int:
    values = (getattr(edit, field.name) for field in dataclasses.fields(edit))
    return sum(value.numel() for value in values if isinstance(value, torch.Tensor))


#: Decoded JSON object, such as one monitor's report for a sample.
JSONObject = Mapping[str, Any]


async def monitors_json(
    monitors: Sequence[Monitor], num_layers: int, uploads: Uploads, names: AsyncExitStack
) -> list[dict[str, Any]]:
    """Return the field `monitors` of a request's body; long probes and steering are uploaded.

    Args:
        monitors: the monitors.
        num_layers: number of decoder layers of the model.
        uploads: uploads of the connection.
        names: exit stack that keeps the uploads on the server until it is closed.

    Raises:
        LayerOutOfRange: a layer that the model does not have.
        The errors of `Uploads.named`.
    """
    return [await _monitor_json(one, num_layers, uploads, names) for one in monitors]


async def _monitor_json(monitor: Monitor, num_layers: int, uploads: Uploads, names: AsyncExitStack) -> dict[str, Any]:
    (layer,) = resolve_layers(monitor.layer, num_layers)
    asked: dict[str, Any] = {
        "layer": layer,
        "site": monitor.site,
        "threshold": monitor.threshold,
        "above": monitor.above,
        "bias": monitor.bias,
        "tokens": value_json(monitor.selection),
        "do": monitor.do,
        "name": monitor.name,
    }
    if monitor.weights.numel() <= MOST_NUMBERS:
        asked["probe"] = value_json(monitor.weights)
    else:
        vectors = LayerVectors({layer: monitor.weights}, site=monitor.site)
        asked["probe"] = await names.enter_async_context(uploads.named(vectors))
    if isinstance(monitor.steering, SteeringSpec):
        asked["steering"] = await sent_steering(monitor.steering, uploads, names)
    return asked


def reports_of(monitors: Sequence[Monitor], reports: Sequence[JSONObject] | None) -> tuple[MonitorReport, ...]:
    """Parse the monitors' reports for one sample, in the order of `monitors`.

    Raises:
        ServerFailure: the server does not report exactly these monitors.
    """
    found = msgspec.convert(list(reports or ()), tuple[MonitorReport, ...])
    if tuple(one.monitor for one in found) != labels_of(monitors):
        raise ServerFailure(
            "the server does not report the monitors of this request; use the same version of steercap there"
        )
    return found


def crossings_of(crossings: Iterable[JSONObject]) -> tuple[Crossing, ...]:
    """Parse the crossings (tokens at which monitors fired) of a stream's event."""
    found = ({name: value for name, value in one.items() if name != "choice"} for one in crossings)
    return msgspec.convert(list(found), tuple[Crossing, ...])


async def lines_of(parts: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield the lines of a stream of bytes, which only a line feed ends, without it.

    httpx's `aiter_lines` also ends lines at U+2028, U+0085 and the like, which JSON text may contain unescaped.
    """
    held = b""
    async for part in parts:
        *lines, held = (held + part).split(b"\n")
        for line in lines:
            yield line
    if held:
        yield held


class Streamed:
    """One streamed sample, accumulated from its events.

    Attributes:
        document: the answer so far, in the form of an answer without streaming.
        crossings: tokens at which monitors fired since the last chunk.
        finish_reason: reason why the text ended, None before.
    """

    def __init__(self) -> None:
        self._choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": []}
        self.document: dict[str, Any] = {"choices": [self._choice]}
        self.crossings: tuple[Crossing, ...] = ()
        self.finish_reason: str | None = None

    @property
    def reads_prompt(self) -> bool:
        """True once the token ids of the prompt have been received."""
        return bool(self._choice.get("prompt_token_ids"))

    def take(self, event: Mapping[str, Any]) -> Chunk | None:
        """Add an event; return its chunk of text and token ids, or None if it has neither."""
        said = event.get("steercap") or {}
        self.crossings += crossings_of(said.get("crossings", ()))
        if "results" in said:
            self.document["steercap"] = said
        text, ids = "", tuple[int, ...]()
        for one in event.get("choices", ()):
            self._choice["prompt_token_ids"] = one.get("prompt_token_ids") or self._choice.get("prompt_token_ids")
            self._choice["finish_reason"] = self.finish_reason = one.get("finish_reason") or self.finish_reason
            text, ids = text + one["text"], (*ids, *(one.get("token_ids") or ()))
        self._choice["text"] += text
        self._choice["token_ids"] += ids
        if not (text or ids):
            return None
        crossings, self.crossings = self.crossings, ()
        return Chunk(text, ids, None, None, finished=False, crossings=crossings)
