"""Vectors in one `.pt` tensor: [layers, hidden], or a trained vector [hidden] with its configuration beside it.

The first is the format of persona vectors (Chen et al. 2025, arXiv:2507.21509). Such a file does not say which layer
row 0 is, so the caller must: `base` is the row of our layer 0.

    base=0    row i is layer i
    base=1    row i is layer i - 1; row 0, the embeddings, is not a layer and is left out

persona_vectors stacks transformers' `hidden_states`, whose entry 0 is the embeddings: base=1.

The second is a folder: `steering_vector.pt` holds "steering_vector", `steering_config.json` names the model and the
layer, from 0, to whose output the vector is added.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec
import torch

from steercap.errors import InvalidFile, InvalidSpec
from steercap.files.base import blame, check_extension, read_pt, require_file, write_whole
from steercap.steering.layers import LayerVectors

#: Names of the files of a trained vector.
VECTOR: Final = "steering_vector.pt"
CONFIG: Final = "steering_config.json"


def load_layers_pt(
    path: str | Path, *, base: Literal[0, 1], name: str = "", model: str = "", site: str = "resid_post"
) -> LayerVectors:
    """Read a tensor [layers, hidden] of any floating dtype.

    Args:
        path: the file.
        base: the row of layer 0: 1 for persona vectors, whose row 0 is the embeddings.
        name, model, site: labels, which the file does not hold.

    Raises:
        InvalidSpec: another base.
        InvalidFile: damaged, not such a tensor, or holding NaN or inf.
    """
    _check_base(base)
    path = Path(path)
    rows = read_pt(path)
    if not isinstance(rows, torch.Tensor) or rows.dim() != 2 or not rows.is_floating_point():
        raise InvalidFile(f"{path} holds {_shown(rows)}; expected one floating-point tensor [layers, hidden]")
    if len(rows) <= base:
        raise InvalidFile(f"{path} has {len(rows)} rows, which with base={base} leaves no layer; check base=")
    with blame(path):
        return LayerVectors(dict(enumerate(rows[base:])), name=name, model=model, site=site)


def save_layers_pt(vectors: LayerVectors, path: str | Path, *, base: Literal[0, 1]) -> Path:
    """Write a float32 tensor [layers, hidden]; with base=1 its row 0, of the embeddings, is zero.

    Raises:
        InvalidSpec: another base, or a layer missing below the last, for which a row of zeros would be a lie.
        InvalidFile: the name has another extension.
    """
    _check_base(base)
    missing = sorted(set(range(max(vectors))) - set(vectors))
    if missing:
        raise InvalidSpec(
            f"{vectors!r} has no vector for layers {missing}, and a tensor has a row for each from 0; "
            "save it with LayerVectors.save, which keeps any layers"
        )
    rows = torch.stack([torch.zeros(vectors.width)] * base + list(vectors.values()))
    path = Path(path)
    check_extension(path, ".pt")
    with write_whole(path) as scratch:
        torch.save(rows, scratch)
    return path


class SteeringConfig(msgspec.Struct, frozen=True):
    """Contents of `steering_config.json`.

    Args:
        model_name: the model.
        target_layer: layer from 0 whose output the vector is added to.
        init_scale: scale of the random vector that training began with; 0 for none.
    """

    model_name: str
    target_layer: int
    init_scale: float = 0.0


def load_steering_vector(folder: str | Path) -> tuple[LayerVectors, SteeringConfig]:
    """Read a trained vector, `steering_vector.pt` and `steering_config.json` in one folder.

    Returns:
        The vector at `resid_post` of its layer, with its model and the folder's name; and the rest.

    Raises:
        InvalidFile: a file is missing or damaged, or lacks something.
    """
    folder = Path(folder)
    require_file(folder / CONFIG)
    with blame(folder / CONFIG):
        config = msgspec.json.decode((folder / CONFIG).read_bytes(), type=SteeringConfig)
    found = read_pt(folder / VECTOR)
    vector = found.get("steering_vector") if isinstance(found, dict) else None
    if not isinstance(vector, torch.Tensor) or not vector.is_floating_point():
        raise InvalidFile(f"{folder / VECTOR} holds {_shown(found)}; expected a 'steering_vector' [hidden]")
    with blame(folder / VECTOR):
        vectors = LayerVectors(
            {config.target_layer: vector.detach()}, name=folder.absolute().name, model=config.model_name
        )
    return vectors, config


def save_steering_vector(vectors: LayerVectors, folder: str | Path, *, init_scale: float = 0.0) -> Path:
    """Write a vector of one layer in the form that `load_steering_vector` reads; the configuration last.

    Raises:
        InvalidSpec: several layers, another site, or no model.
    """
    if len(vectors) != 1 or vectors.site != "resid_post" or not vectors.model:
        raise InvalidSpec(f"{vectors!r}; give the vector of one layer at resid_post, with its model's name")
    ((layer, vector),) = vectors.items()
    path = Path(folder) / CONFIG
    with write_whole(path.with_name(VECTOR)) as scratch:
        torch.save({"steering_vector": vector}, scratch)
    with write_whole(path) as scratch:
        config = SteeringConfig(vectors.model, layer, init_scale)
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(config)) + b"\n")
    return path.parent


def _check_base(base: object) -> None:
    if base not in {0, 1} or isinstance(base, bool):
        raise InvalidSpec(f"base={base!r}; give 0 if row 0 is layer 0, or 1 if row 0 is the embeddings")


def _shown(found: object) -> str:
    if isinstance(found, torch.Tensor):
        return f"a tensor {tuple(found.shape)} of {found.dtype}"
    return f"{type(found).__name__}, not a tensor"
