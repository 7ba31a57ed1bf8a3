"""GGUF control vectors in the format of repeng and llama.cpp, read and written with the package `gguf`.

Architecture "controlvector", keys `controlvector.model_hint` and `controlvector.layer_count`, tensors `direction.<N>`
[hidden], written in float32 and read in float16, float32 or float64. Both programs add direction.N to the output of
decoder layer N counted from 0: `resid_post` of layer N here. llama.cpp refuses a file with direction.0.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import numpy as np

from steercap.core.extras import extra
from steercap.errors import InvalidFile, InvalidSpec
from steercap.files.base import blame, check_extension, require_file, write_whole
from steercap.steering.layers import LayerVectors

ARCHITECTURE: Final = "controlvector"
#: Keys of the header for architecture, name and model.
TEXTS: Final = ("general.architecture", "general.name", "controlvector.model_hint")
#: Allowed dtypes of directions, named as in GGUF.
FLOATS: Final = ("F32", "F16", "F64")
#: Errors that gguf's reader raises on damaged files, found by changing and cutting bytes at random.
_NO_GGUF: Final = (OSError, ValueError, LookupError, TypeError, OverflowError, MemoryError)


def load_control_vector(path: str | Path) -> LayerVectors:
    """Read a GGUF control vector; `model` is the file's model hint, `name` its GGUF name, "" if it has none.

    Raises:
        InvalidFile: damaged, a GGUF file of something else, or a tensor that is no finite direction in F16, F32, F64.
    """
    with extra("gguf"):
        from gguf import GGUFReader

    path = Path(path)
    require_file(path)
    try:
        reader = GGUFReader(path)
        architecture, name, model = (_text(reader, key) for key in TEXTS)
    except _NO_GGUF as error:
        found = str(error).strip() or type(error).__name__
        raise InvalidFile(f"{path} cannot be read as a GGUF file: {found}; fetch or save it again") from error
    if architecture != ARCHITECTURE:
        raise InvalidFile(
            f"{path} is a GGUF file of architecture {architecture!r}; a control vector has {ARCHITECTURE!r}"
        )
    with blame(path), np.errstate(over="ignore"):  # what float32 cannot hold is refused as infinite
        directions = {_layer(path, tensor): np.array(tensor.data, dtype=np.float32) for tensor in reader.tensors}
        return LayerVectors(directions, name=name, model=model)


def save_control_vector(vectors: LayerVectors, path: str | Path, *, model_hint: str = "") -> Path:
    """Write a GGUF control vector, which repeng and llama.cpp can read; return its path.

    Args:
        vectors: vectors at `resid_post`, none at layer 0.
        path: the file.
        model_hint: the file's model hint, `vectors.model` if empty; repeng writes transformers' `model_type`, such as
            "llama".

    Raises:
        InvalidSpec: another site, a vector at layer 0, or neither hint nor model.
        InvalidFile: the name does not end in .gguf.
    """
    hint = model_hint or vectors.model
    _check_writable(vectors, hint)
    path = Path(path)
    check_extension(path, ".gguf")
    with write_whole(path) as scratch:
        _write(vectors, scratch, hint)
    return path


def _write(vectors: LayerVectors, path: Path, hint: str) -> None:
    with extra("gguf"):
        from gguf import GGUFWriter

    writer = GGUFWriter(path, ARCHITECTURE)
    try:
        writer.add_string("general.name", vectors.name)
        writer.add_string(f"{ARCHITECTURE}.model_hint", hint)
        writer.add_uint32(f"{ARCHITECTURE}.layer_count", len(vectors))
        for layer, vector in vectors.items():
            writer.add_tensor(f"direction.{layer}", vector.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _check_writable(vectors: LayerVectors, hint: str) -> None:
    named = f"the vectors {vectors.name}".rstrip()
    if vectors.site != "resid_post":
        raise InvalidSpec(
            f"{named} are at {vectors.site}, not at resid_post, the one site that GGUF control vectors have"
        )
    if 0 in vectors:
        raise InvalidSpec(
            f"{named} have a vector at layer 0, and llama.cpp refuses files with direction.0; leave it out "
            "with --layers 1: of `steercap vectors convert`, or vectors.at_layers(list(vectors)[1:]) in Python"
        )
    if not hint:
        raise InvalidSpec("repeng refuses a control vector without a model hint; give model_hint=, such as 'llama'")


def _text(reader: Any, key: str) -> str:
    """Return the text of a key in the header, "" if it is missing or not a text."""
    field = reader.get_field(key)
    found = field.contents() if field is not None else ""
    return found if isinstance(found, str) else ""


def _layer(path: Path, tensor: Any) -> int:
    """Return the layer in a direction's tensor name, after checking that the tensor is floats [hidden].

    Raises:
        InvalidFile: it is not, or has another name.
    """
    match = re.fullmatch(r"direction\.(0|[1-9]\d*)", tensor.name, re.ASCII)
    if not match:
        raise InvalidFile(
            f"{path} has a tensor {tensor.name!r}; those of a control vector are called direction.<layer>"
        )
    shape, kind = tuple(reversed(tensor.shape.tolist())), tensor.tensor_type.name
    if len(shape) != 1 or kind not in FLOATS:
        raise InvalidFile(f"{path}: {tensor.name} is {kind} {list(shape)}; expected {' or '.join(FLOATS)} [hidden]")
    return int(match[1])
