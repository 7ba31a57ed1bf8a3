"""Parser of a request body's `steercap` field, from JSON to specs.

    {"capture": {"layers": [5, 10], "sites": "resid_post", "tokens": "generated", "codec": "full8"},
     "steering": {"edits": [{"op": "add", "vector": "calm", "layers": [10], "scale": 4.0}]},
     "deliver": "inline"}

A vector is a list of numbers or the name of uploaded vectors. Steering that is just a name stands for an uploaded spec,
or for uploaded vectors, which are added unscaled.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar, get_args

from steercap.core.display import span
from steercap.core.spec import CaptureSpec
from steercap.core.values import choices, shown
from steercap.errors import InvalidSpec
from steercap.server.call import Delivery, SteercapField
from steercap.server.library import Library
from steercap.steering.directions import DirectionSet
from steercap.steering.edits import EDITS, Edit
from steercap.steering.layers import LayerVectors
from steercap.steering.monitor import Monitor, monitors_of
from steercap.steering.spec import LogitBias, SteeringSpec

Made = TypeVar("Made")

#: Fields of `capture`: those of CaptureSpec that JSON can express; `project` and `sae` are names on the server.
CAPTURE: Final = (
    "layers",
    "sites",
    "at",
    "tokens",
    "reduce",
    "codec",
    "codec_k",
    "codec_seed",
    "before_edits",
    "attention",
    "allow_nonfinite",
    "project",
    "sae",
    "sae_k",
)
#: Fields of edits whose values are vectors, or the name of uploaded ones.
VECTORS: Final = ("vector", "probe", "read", "write", "rows", "encoder", "decoder", "decoder_bias")
#: Fields of the `steercap` field.
PARTS: Final = ("capture", "steering", "monitors", "codec", "deliver", "sketches")
#: `op` of a `LogitBias`; the others are the keys of `EDITS`.
LOGIT_BIAS: Final = "logit_bias"
DELIVERIES: Final = get_args(Delivery)
_ID: Final = re.compile(r"0|[1-9][0-9]{0,9}")
_SLICE: Final = re.compile(r"(-?\d{1,99})?:(-?\d{1,99})?(?::(-?\d{1,99}))?")


def parsed_field(body: Any, library: Library, owner: str) -> SteercapField:
    """Parse the `steercap` field of a request, whose `owner` (its API key's digest) may name vectors of the library.

    Raises:
        InvalidRequest: the field is invalid; the subclass and message say why.
    """
    given = _object(body, "steercap", PARTS)
    deliver = given.get("deliver", "fetch")
    if deliver not in DELIVERIES:
        raise InvalidSpec(f"steercap.deliver={shown(deliver)}; give {' or '.join(map(repr, DELIVERIES))}")
    if deliver == "folder" and not library.folder:
        raise InvalidSpec("steercap.deliver='folder': this server has no folder; `serve --folder` gives it one")
    capture = given.get("capture")
    if "deliver" in given and capture is None:
        raise InvalidSpec("steercap.deliver says how rows are handed over; give it beside capture=")
    if given.get("codec") is not None:
        if not isinstance(capture, Mapping) or "codec" in capture:
            raise InvalidSpec("steercap.codec is for rows; give it beside capture=, or within it, not both")
        capture = {**capture, "codec": given["codec"]}
    steering = given.get("steering")
    return SteercapField(
        None if capture is None else capture_of(capture, library, owner),
        None if steering is None else steering_of(steering, library, owner),
        deliver,
        monitors_of_json(given.get("monitors"), library, owner),
        sketches=_sketch_ids(given.get("sketches", [])),
    )


def _sketch_ids(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(map(_is_name, value)):
        raise InvalidSpec(f"steercap.sketches={shown(value)}; give a list of ids of sketches")
    return tuple(dict.fromkeys(value))


def capture_of(value: Any, library: Library, owner: str) -> CaptureSpec:
    """Parse a CaptureSpec from decoded JSON; True stands for the default one.

    Raises:
        InvalidSpec: the JSON is invalid.
    """
    if value is True:
        return CaptureSpec()
    given = dict(_object(value, "steercap.capture", CAPTURE))
    for name in ("layers", "tokens"):
        if name in given:
            given[name] = ranges(given[name])
    if isinstance(given.get("at"), Sequence) and not isinstance(given["at"], str):
        given["at"] = [tuple(one) if isinstance(one, list) else one for one in given["at"]]
    if (project := given.get("project")) is not None:
        given["project"] = directions_of(project, library, owner)
    if (saes := given.get("sae")) is not None:
        given["sae"] = [library.sae(name) for name in (saes if isinstance(saes, list) else [saes])]
    return CaptureSpec(**given)


def steering_of(value: Any, library: Library, owner: str) -> SteeringSpec:
    """Parse a SteeringSpec from decoded JSON: a name, an edit, a list of these, or an object with `edits`.

    Raises:
        InvalidSpec: the JSON is invalid.
    """
    if isinstance(value, Mapping) and "edits" in value:
        given = _object(value, "steercap.steering", ("edits", "preserve_norm"))
        if not isinstance(given["edits"], list):
            raise InvalidSpec(f"steercap.steering.edits={shown(given['edits'])}; give a list")
        edits = [one for edit in given["edits"] for one in _edits_of(edit, library, owner)]
        return SteeringSpec(edits, preserve_norm=given.get("preserve_norm", False))
    parts = value if isinstance(value, list) else [value]
    return SteeringSpec([one for part in parts for one in _edits_of(part, library, owner)])


def monitors_of_json(value: Any, library: Library, owner: str) -> tuple[Monitor, ...]:
    """Parse a list of monitors from decoded JSON, where a probe is a list of numbers or the name of vectors.

    Raises:
        InvalidSpec: the JSON is invalid.
    """
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidSpec(f"steercap.monitors={shown(value)}; give a list of objects")
    return monitors_of([_monitor_of(one, library, owner) for one in value])


def _monitor_of(value: Any, library: Library, owner: str) -> Monitor:
    known = [one.name for one in dataclasses.fields(Monitor)]
    given = dict(_object(value, "a monitor", known))
    if given.get("steering") is not None:
        given["steering"] = steering_of(given["steering"], library, owner)
    if "tokens" in given:
        given["tokens"] = ranges(given["tokens"])
    if _is_name(given.get("probe")):
        name, vectors = given["probe"], layer_vectors(given["probe"], library, owner)
        given.setdefault("site", vectors.site)
        given.setdefault("name", name)
        given.setdefault("model", vectors.model)
        if given.get("layer") is None:
            if len(vectors) > 1:
                raise InvalidSpec(
                    f"a monitor with probe={name!r}: there are vectors for layers {span(list(vectors))}; give layer="
                )
            (given["layer"],) = vectors
        given["probe"] = vectors.named(name)
    return _constructed(Monitor, Monitor, given)


def _edits_of(asked: Any, library: Library, owner: str) -> Sequence[Edit | LogitBias | SteeringSpec]:
    if isinstance(asked, str):
        content = library.get(asked.partition("/")[0], owner).content
        if isinstance(content, SteeringSpec) and "/" not in asked:
            return [content]
        return _edits_of({"op": "add", "vector": asked}, library, owner)
    if not isinstance(asked, Mapping):
        raise InvalidSpec(f"steering={shown(asked)}; give a name, or an object such as {{'op': 'add', ...}}")
    op = asked.get("op", "add")
    if op == LOGIT_BIAS:
        return [_bias_of(asked)]
    if op not in EDITS:
        raise InvalidSpec(f"op={shown(op)}; {choices(op, (*EDITS, LOGIT_BIAS))}")
    kind: type[Edit] = EDITS[op]
    known = [one.name for one in dataclasses.fields(kind) if one.init]
    given = dict(_object(asked, f"an edit {op!r}", ("op", *known)))
    given.pop("op", None)
    for name in ("layers", "tokens", "elements"):
        if name in given:
            given[name] = ranges(given[name])
    named = {name: given[name] for name in VECTORS if _is_name(given.get(name))}
    if not named:
        return [_constructed(kind, kind, given)]
    found = {name: layer_vectors(value, library, owner).named(value) for name, value in named.items()}
    return _constructed(
        kind,
        partial(SteeringSpec.by_layer, kind),
        {name: value for name, value in given.items() if value is not None} | found,
    ).edits


def _bias_of(value: Mapping[str, Any]) -> LogitBias:
    """Parse a logit bias, whose token ids are strings in JSON."""
    given = _object(value, f"an edit {LOGIT_BIAS!r}", ("op", "bias", "tokens"))
    bias: Any = given.get("bias")
    if isinstance(bias, Mapping):
        bias = {int(one) if _ID.fullmatch(str(one)) else one: add for one, add in bias.items()}
    return LogitBias(bias, **({"tokens": ranges(given["tokens"])} if "tokens" in given else {}))


def _constructed(kind: type, make: Callable[..., Made], given: Mapping[str, Any]) -> Made:
    try:
        return make(**given)
    except TypeError as error:  # something that it needs is missing
        raise InvalidSpec(f"{kind.__name__}: {str(error).partition(' ')[2]}") from error


def layer_vectors(name: str, library: Library, owner: str) -> LayerVectors:
    """Return the vectors of a name: "calm"; "traits", a set with one direction; or "traits/calm", one of several.

    Raises:
        InvalidSpec: the name is unknown, or does not stand for one direction.
    """
    first, slash, direction = name.partition("/")
    content = library.get(first, owner).content
    if isinstance(content, LayerVectors):
        if slash:
            raise InvalidSpec(
                f"{name!r}: {first!r} holds one vector for each layer, and no directions by name; give {first!r}"
            )
        return content
    if not isinstance(content, DirectionSet):
        raise InvalidSpec(f"{name!r} is not a vector: {first!r} holds steering; give the name of vectors")
    known = list(content)
    if not slash and len(known) == 1:
        return content[known[0]]
    if direction in content:
        return content[direction]
    why = f"{first!r} has no direction {direction!r}" if slash else f"{first!r} is not a vector: it holds directions"
    listed = "" if slash else f" {', '.join(known)}"
    raise InvalidSpec(f"{why}{listed}; give one of them, such as {f'{first}/{known[0]}'!r}")


def directions_of(name: Any, library: Library, owner: str) -> LayerVectors | DirectionSet:
    """Return the uploaded directions of a name, on which rows are projected.

    Raises:
        InvalidSpec: the name is unknown, or stands for something without directions.
    """
    if not _is_name(name):
        raise InvalidSpec(f"steercap.capture.project={shown(name)}; give the name of vectors that were uploaded")
    content = library.get(name.partition("/")[0], owner).content
    return content if isinstance(content, DirectionSet) and "/" not in name else layer_vectors(name, library, owner)


def ranges(value: Any) -> Any:
    """Return a JSON value with strings such as "4:12" and "::2" replaced by slices, in nested lists too."""
    if isinstance(value, str) and (matched := _SLICE.fullmatch(value)):
        return slice(*(None if part is None else int(part) for part in matched.groups()))
    return [ranges(item) for item in value] if isinstance(value, list) else value


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _object(value: Any, what: str, known: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidSpec(f"{what}={shown(value)}; give an object")
    if unknown := [name for name in value if name not in known]:
        raise InvalidSpec(f"{what} has an unknown field {shown(unknown[0])}; {choices(unknown[0], known)}")
    return value
