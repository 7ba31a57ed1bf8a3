"""Conversion of specs to JSON, as `steercap.server.asks` reads them.

Specs that JSON cannot hold are uploaded, see `client.uploads`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final

import torch

from steercap.core.names import Name
from steercap.core.spec import CaptureSpec
from steercap.core.tokens import TokenSelection
from steercap.core.values import Mask, shown
from steercap.errors import InvalidRequest, InvalidSpec
from steercap.steering.edits import EDITS, Edit
from steercap.steering.spec import LogitBias, SteeringSpec

#: Maximum numbers of vectors in a request's body: as text they take 20 bytes each. More of them are uploaded, once.
MOST_NUMBERS: Final = 4096
#: Fields of a CaptureSpec that a server does not support, with advice.
_REFUSED: Final[Mapping[str, str]] = {
    "calibration": "a server codes rows without a calibration; leave it out",
    "sae": "a server uses its own SAEs, named in HTTP requests; capture the rows and use SAE.encode here",
    "gather": "a server returns whole rows; leave it out",
}


class NotAsJSON(Exception):
    """Signal that a spec does not fit into JSON and must be uploaded."""


def require_specs(spec: Any) -> None:
    """Check that the capture spec of one prompt, if it has any, can be sent to a server.

    Raises:
        InvalidSpec: something else than a CaptureSpec.
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


def capture_asked(spec: CaptureSpec, project: str | None) -> dict[str, Any]:
    """Return a capture spec as JSON, without fields that have their default.

    Args:
        spec: the capture spec.
        project: name, on the server, of the directions that its rows are projected on.
    """
    plain = CaptureSpec()
    asked: dict[str, Any] = {} if project is None else {"project": project}
    for field in dataclasses.fields(CaptureSpec):
        given = getattr(spec, field.name)
        if field.name in {*_REFUSED, "project", "at"} or given == getattr(plain, field.name):
            continue
        asked[field.name] = value_asked(given)
    if spec.at is not None:
        names: Any = spec.at
        asked["at"] = [_point_asked(name) for name in names]
    return asked


def steering_asked(spec: SteeringSpec) -> dict[str, Any]:
    """Return a steering spec as JSON.

    Raises:
        NotAsJSON: its vectors are long, a spec within it preserves norms by itself, or a number of it is infinite.
    """
    if any(isinstance(edit, SteeringSpec) and edit.keeps_norm for edit in spec.edits):
        raise NotAsJSON
    edits = spec.flat()
    if sum(_numbers(edit) for edit in edits) > MOST_NUMBERS:
        raise NotAsJSON
    return {"edits": [_edit_asked(edit) for edit in edits], "preserve_norm": spec.preserve_norm}


def _edit_asked(edit: Edit | LogitBias) -> dict[str, Any]:
    if isinstance(edit, LogitBias):
        bias: Any = edit.bias
        if not isinstance(bias, Mapping):
            raise NotAsJSON
        said = {str(token): value_asked(add) for token, add in bias.items()}
        return {"op": "logit_bias", "bias": said, "tokens": value_asked(edit.selection)}
    asked: dict[str, Any] = {"op": next(op for op, kind in EDITS.items() if type(edit) is kind)}
    for field in dataclasses.fields(edit):
        given = getattr(edit, field.name)
        left_out = given is None or field.name in (("model", "tokens") if edit.replaced else ("model",))
        if field.init and not left_out:
            asked[field.name] = value_asked(given)
    return asked


def value_asked(value: Any) -> Any:
    """Return a field's value as JSON, without loss.

    Raises:
        NotAsJSON: JSON does not hold it.
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
            parts = [value_asked(slice(*term) if isinstance(term, tuple) else term) for term in terms]
            found = parts[0] if len(parts) == 1 else parts
        case Mask():
            found = value.tolist()
        case slice():
            parts = [value.start, value.stop, *([] if value.step is None else [value.step])]
            found = ":".join("" if part is None else str(part) for part in parts)
        case list() | tuple() | range():
            found = [value_asked(part) for part in value]
        case _:
            raise NotAsJSON
    return found


def _point_asked(name: Name) -> Any:
    return name.site if name.layer is None else [name.layer, name.site]


def _numbers(edit: Edit | LogitBias) -> int:
    values = (getattr(edit, field.name) for field in dataclasses.fields(edit))
    return sum(value.numel() for value in values if isinstance(value, torch.Tensor))
