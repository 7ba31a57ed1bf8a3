"""Export of captures as NumPy's `.npz`, for other programs: plain arrays and one JSON text, no pickle.

Arrays: rows by point, `<site>.<layer>` (shards `<site>.<layer>.shard<number>`), for rows in a codec its parts,
`<site>.<layer>.q`, `.scale`, ...; `positions`, `token_ids`, `token_types` ("text" or "image", ...), `prompt_token_ids`,
`output_token_ids`; and `about`, a JSON text: model, request, texts, and for each point the codec with its parameters,
the formula and the dtypes of the rows.

Rows of full8 are written as others publish them: `row = (q - zero) * scale`. Codecs with another formula have `step`
and `least` in place of `scale` and `zero`, so that no reader applies the wrong one.

Files that others publish, `q`, `scale`, `zero` and `meta` alone, are read and written by `captures.published`.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch

from steercap.captures.files import Saved, constants_of, named, shape_of
from steercap.core.chat import types_at
from steercap.core.schema import Coding, PointSchema
from steercap.core.values import choices
from steercap.errors import InvalidFile
from steercap.files.base import DAMAGED, array_shape, blame, check_extension, require_file, write_whole
from steercap.kernels.codecs import ENCODINGS, Codec
from steercap.kernels.codecs.coded import CodedRows, coding_of, parts_of
from steercap.kernels.codecs.random_projection import FAMILY

#: Version 1 had `zero + scale * q` under the names of version 2.
VERSION: Final = 2
#: Names of the arrays in a file as others publish it.
PUBLISHED: Final = ("q", "scale", "zero", "meta")
#: Formula of a row from the parts of each codec, by the codec's name; computed in float64 and rounded once to float32.
FORMULAS: Final = {
    "raw": "row",
    "full8": "(q - zero) * scale, scale and zero of each row",
    "calibrated8": "centre + reach * (least + step * q), step and least of each row, centre and reach of each element "
    "of the whole row",
    "fp8": "scale * q, scale of each row; q was float8 e4m3 and is float32 here, exactly",
    "int4": "least + step * q in groups of 128 elements; two q share a byte, the earlier in the lower half",
    "topk8": "row[indices] = least + step * q; the other elements are at most rest, and count as 0",
    "features": "activations[indices] = q; an index of -1 stands for none; the other activations are at most rest, and "
    "count as 0; active says how many are above 0",
    "attention": "of each head: weights of the tokens at positions indices are q / 255 (65535: there is none), those "
    "of the first token and of a sink first / 255 and sink / 255; entropy in nats",
    "rp8": "scale * q in groups of 128: row @ signs.T / sqrt(k), signs from the seed: see `family`",
    "rp16": "scale * q in groups of 128: row @ signs.T / sqrt(k), signs from the seed: see `family`",
}
#: Names of a codec's parts in files of version 2, where they differ from the codec's own.
_NAMES: Final = {"scale": "step", "zero": "least"}
#: Dtypes that NumPy lacks; they are stored as float32, which is exact.
_WIDENED: Final = frozenset({torch.bfloat16, torch.float8_e4m3fn})


def write(saved: Saved, path: Path) -> Path:
    """Write a handle's rows, labels and texts to an `.npz`, whole or not at all, and return its path.

    Raises:
        InvalidFile: the name ends in something other than .npz.
    """
    check_extension(path, ".npz")
    arrays = {
        _name(name): _array(tensor)
        for point, rows in saved.rows.items()
        for name, tensor in _published(coding_of(shape_of(rows).first)[0], dict(named(point, rows))).items()
    }
    for name in ("positions", "token_ids", "prompt_token_ids", "output_token_ids"):
        arrays[name] = np.asarray(getattr(saved, name), dtype=np.int64)
    header = saved.header
    arrays["token_types"] = types_at(header.media, arrays["positions"])
    about = {
        "version": VERSION,
        "model": header.model,
        "request": header.request_id,
        "text": header.text,
        "reduce": header.reduce,
        "directions": header.directions,
        "points": {f"{point.site}.{point.layer}": _about(rows) for point, rows in saved.rows.items()},
    }
    arrays["about"] = np.array(msgspec.json.encode(about).decode())
    with write_whole(path) as scratch, scratch.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    return path


class _AboutPoint(msgspec.Struct, frozen=True):
    """Part of `about` for one point; see `_about`."""

    codec: str
    parameters: dict[str, int]
    dtypes: dict[str, str]
    shards: int
    row: tuple[int, ...]
    ranks: int


class _About(msgspec.Struct, frozen=True):
    """Fields of `about` that `read` uses."""

    version: int
    points: dict[str, _AboutPoint]


def read(path: str | Path) -> dict[str, torch.Tensor]:
    """Read the rows of a file that `write` wrote, of version 1 or 2; each has its own formulas for codes.

    Returns:
        Rows by the name of the point, such as "resid_post.8": raw rows in their dtype, codes decoded to float32;
        projections and features as in `CodedRows.decoded`. Shards are joined.

    Raises:
        InvalidFile: the file is missing, damaged, of a newer version, or was not written by `write`.
    """
    arrays = arrays_in(Path(path))
    if "about" not in arrays:
        raise InvalidFile(
            f"{path} has no 'about', so it is not a file of save_npz; a file with one of "
            f"{', '.join(map(repr, PUBLISHED))} is read by steercap.captures.published.PublishedRows.load"
        )
    with blame(Path(path)):
        about = msgspec.json.decode(str(arrays["about"]), type=_About)
        if not 1 <= about.version <= VERSION:
            raise InvalidFile(f"{path} is of version {about.version}; this reads versions 1 to {VERSION}")
        return {point: _read_point(arrays, point, facts, about.version) for point, facts in about.points.items()}


def _read_point(
    arrays: Mapping[str, np.ndarray[Any, Any]], point: str, facts: _AboutPoint, version: int
) -> torch.Tensor:
    """Return the decoded rows of one point, shards joined: [rows, ...].

    Raises:
        ValueError: parts are missing or do not fit.
    """
    ends = [f"{point}.shard{number}" for number in range(facts.shards)] or [point]
    if facts.codec == "raw":
        rows = torch.cat([torch.from_numpy(_part(arrays, end)) for end in ends], dim=1)
        return rows.to(getattr(torch, facts.dtypes["rows"]))
    codec = ENCODINGS.get(facts.codec)
    if not isinstance(codec, Codec):
        raise ValueError(f"{point} is in {facts.codec!r}; {choices(facts.codec, FORMULAS)}")  # noqa: TRY004 -- of a file
    coding = Coding(facts.codec, facts.parameters.get("k", 0), facts.parameters.get("seed", 0))
    schema = PointSchema(facts.row, "float32", shards=max(facts.shards, facts.ranks))
    constants = {name: torch.from_numpy(_part(arrays, f"{point}.{name}")) for name in codec.constants}
    found = []
    for number, end in enumerate(ends):
        parts = {name: _kept(arrays, end, name, facts, version) for name in _part_names(codec, schema, coding)}
        coded = CodedRows(coding, schema, parts, number if facts.shards else None, constants)
        if reason := coded.invalid_reason(len(parts["q"])):
            raise ValueError(f"{end}: {reason}")
        found.append(coded.numbers())
    return codec.joined(found)


def _part_names(codec: Codec, schema: PointSchema, coding: Coding) -> Iterable[str]:
    return codec.parts(torch.empty((0, codec.row_bytes(schema, coding)), dtype=torch.uint8), schema, coding)


def _kept(
    arrays: Mapping[str, np.ndarray[Any, Any]], end: str, name: str, facts: _AboutPoint, version: int
) -> torch.Tensor:
    """Return a part of a codec in the codec's own form, in which `zero` is the value of code 0."""
    own = _NAMES.get(name, name) if f"{end}.least" in arrays else name  # of a codec with a least value, version 2
    found = torch.from_numpy(_part(arrays, f"{end}.{own}"))
    if facts.codec == "full8" and version > 1 and name == "zero":
        found = -found * torch.from_numpy(_part(arrays, f"{end}.scale"))
    if facts.codec == "fp8" and name == "q":
        return found.to(torch.float8_e4m3fn)
    return found.float() if found.dtype == torch.float64 else found


def _part(arrays: Mapping[str, np.ndarray[Any, Any]], name: str) -> np.ndarray[Any, Any]:
    if name not in arrays:
        raise ValueError(f"there is no {name!r}; {choices(name, arrays)}")
    return arrays[name]


def arrays_in(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Read the arrays of an `.npz`, by name; nothing is unpickled, and sizes are checked before arrays are read.

    Raises:
        InvalidFile: the file is missing, damaged, or holds something other than numbers and text.
    """
    require_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            for one in archive.infolist():
                array_shape(archive, one, "fiubU", "numbers or text")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: np.array(arrays[name]) for name in arrays}
    except (*DAMAGED, TypeError, zlib.error, MemoryError) as error:
        raise InvalidFile(f"{path} cannot be read as an .npz of plain arrays: {error}; fetch it again") from error


def _about(rows: Any) -> dict[str, Any]:
    """Return the JSON description of one point's rows: codec, formula, dtypes and shapes."""
    first, shards, row, ranks = shape_of(rows)
    codec, parameters = coding_of(first)
    projected = isinstance(first, CodedRows) and first.is_projected
    formula = FORMULAS[codec]
    if ranks > 1:
        axis = "add them up" if projected else "put their rows side by side"
        formula += f"; the second axis is that of {ranks} ranks, each with a part of the row of its own: {axis}"
    if codec != "raw":
        formula += "; in float64, rounded once to float32"
    arrays = _published(codec, {**parts_of(first), **constants_of(rows)})
    dtypes = {name: str(part.dtype).removeprefix("torch.") for name, part in arrays.items()}
    return {
        "codec": codec,
        "parameters": parameters,
        "formula": formula,
        "dtypes": dtypes,
        "shards": shards,
        "row": list(row),
        "ranks": ranks,
        "family": FAMILY if projected else "",
    }


def _published(codec: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a codec's parts under the names and values that `FORMULAS` uses.

    Args:
        codec: name of the codec.
        tensors: tensors by name: "scale", or "scale.resid_post.8" in a file.
    """
    if codec == "full8":
        return {name: _of_full8(name, tensor, tensors) for name, tensor in tensors.items()}
    if not any(name.partition(".")[0] == "zero" for name in tensors):
        return dict(tensors)
    split = {name: name.partition(".") for name in tensors}
    return {"".join((_NAMES.get(part, part), *rest)): tensors[name] for name, (part, *rest) in split.items()}


def _of_full8(name: str, tensor: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Convert a part of the form `zero + scale * q` to `(q - zero) * scale`, float64; a scale of 0 becomes 1."""
    part, *rest = name.partition(".")
    if part == "q":
        return tensor
    scale = tensors["".join(("scale", *rest))].double()
    scale = torch.where(scale == 0, 1.0, scale)
    return scale if part == "scale" else tensor.double().neg().div(scale)


def _name(name: str) -> str:
    """Return the array name of a tensor: `rows.resid_post.8` is `resid_post.8`, `q.resid_post.8` `resid_post.8.q`."""
    part, _, point = name.partition(".")
    return point if part == "rows" else f"{point}.{part}"


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = (tensor.float() if tensor.dtype in _WIDENED else tensor).numpy()
    return found
