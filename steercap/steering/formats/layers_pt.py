"""Vectors in one `.pt` tensor [layers, hidden], the format of persona vectors (Chen et al. 2025, arXiv:2507.21509).

Such a file does not say which layer row 0 is, so the caller must: `base` is the row of our layer 0.

    base=0    row i is layer i
    base=1    row i is layer i - 1; row 0, the embeddings, is not a layer and is left out

persona_vectors stacks transformers' `hidden_states`, whose entry 0 is the embeddings: base=1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from steercap.errors import InvalidFile, InvalidSpec
from steercap.files.base import blame, check_extension, read_pt, write_whole
from steercap.steering.layers import LayerVectors


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
        raise InvalidFile(f"{path} has {len(rows)} rows, which with base={base} leaves no layer; is base right?")
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


def _check_base(base: object) -> None:
    if base not in {0, 1} or isinstance(base, bool):
        raise InvalidSpec(f"base={base!r}; give 0 if row 0 is layer 0, or 1 if row 0 is the embeddings")


def _shown(found: object) -> str:
    if isinstance(found, torch.Tensor):
        return f"a tensor {tuple(found.shape)} of {found.dtype}"
    return f"{type(found).__name__}, not a tensor"
