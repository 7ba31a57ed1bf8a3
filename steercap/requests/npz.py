"""Captures as NumPy's `.npz`, for people with readers of their own: plain arrays and one JSON text, nothing pickled.

Arrays: rows by point, `<site>.<layer>` (shards `<site>.<layer>.shard<number>`), of rows in a codec its parts,
`<site>.<layer>.q`, `.scale`, ...; `positions`, `token_ids`, `token_types` ("text" or "image", ...), `prompt_token_ids`,
`output_token_ids`; and `about`, a text of JSON: model, request, texts, and of each point the codec with its parameters,
the formula and the dtypes of the rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch

from steercap.core.media import types_at
from steercap.encodings.coded import CodedRows, coding_of, parts_of
from steercap.encodings.random_projection import FAMILY
from steercap.files.base import check_extension, write_whole
from steercap.requests.files import Saved, constants_of, named, shape_of

VERSION: Final = 1
#: What a row is, of the parts of each codec, computed in float64 and rounded once to float32.
FORMULAS: Final = {
    "raw": "row",
    "full8": "zero + scale * q, scale and zero of each row",
    "calibrated8": "centre + reach * (zero + scale * q), scale and zero of each row, centre and reach of each element "
    "of the whole row",
    "fp8": "scale * q, scale of each row; q was float8 e4m3 and is float32 here, exactly",
    "int4": "zero + scale * q in groups of 128 elements; two q share a byte, the earlier in the lower half",
    "topk8": "row[indices] = zero + scale * q; the other elements are at most rest, and count as 0",
    "features": "activations[indices] = q; an index of -1 stands for none; the other activations are at most rest, and "
    "count as 0; active says how many are above 0",
    "rp8": "scale * q in groups of 128: row @ signs.T / sqrt(k), signs from the seed: see `family`",
    "rp16": "scale * q in groups of 128: row @ signs.T / sqrt(k), signs from the seed: see `family`",
}
#: dtypes that NumPy lacks, and float32 holds exactly.
_WIDENED: Final = frozenset({torch.bfloat16, torch.float8_e4m3fn})


def write(saved: Saved, path: Path) -> Path:
    """Write a handle; the file appears whole or not at all. See `CaptureHandle.save_npz`.

    Raises:
        InvalidFile: the name ends in something other than .npz.
    """
    check_extension(path, ".npz")
    arrays = {_name(name): _array(tensor) for point, rows in saved.rows.items() for name, tensor in named(point, rows)}
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


def _about(rows: Any) -> dict[str, Any]:
    """What is to be known of one point."""
    first, shards, row, ranks = shape_of(rows)
    codec, parameters = coding_of(first)
    projected = isinstance(first, CodedRows) and first.is_projected
    formula = FORMULAS[codec]
    if ranks > 1:
        axis = "add them up" if projected else "put their rows side by side"
        formula += f"; the second axis is that of {ranks} ranks, each with a part of the row of its own: {axis}"
    if codec != "raw":
        formula += "; in float64, rounded once to float32"
    arrays = {**parts_of(first), **constants_of(rows)}
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


def _name(name: str) -> str:
    """`resid_post.8` of the name `rows.resid_post.8` in a file of ours, `resid_post.8.q` of `q.resid_post.8`."""
    part, _, point = name.partition(".")
    return point if part == "rows" else f"{point}.{part}"


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = (tensor.float() if tensor.dtype in _WIDENED else tensor).numpy()
    return found
