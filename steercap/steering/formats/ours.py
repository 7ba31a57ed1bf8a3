"""Functions that read and write our own files, in the form of the other formats.

`save` and `load` of the classes do the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from steercap.steering.layers import LayerVectors
from steercap.steering.spec import SteeringSpec

if TYPE_CHECKING:
    from os import PathLike


def save_steering(spec: SteeringSpec, path: str | PathLike[str], *, model: str = "") -> Path:
    """Write a whole spec; see `SteeringSpec.save`."""
    return spec.save(Path(path), model=model)


def load_steering(path: str | PathLike[str]) -> SteeringSpec:
    """Read a file that `save_steering` wrote; see `SteeringSpec.load`."""
    return SteeringSpec.load(Path(path))


def save_vectors(vectors: LayerVectors, path: str | PathLike[str]) -> Path:
    """Write vectors and labels; see `LayerVectors.save`."""
    return vectors.save(Path(path))


def load_vectors(path: str | PathLike[str]) -> LayerVectors:
    """Read a file that `save_vectors` wrote: a vector for each layer, with its labels.

    Raises:
        InvalidFile: it is missing, damaged, of a newer version, or holds something else.
    """
    return LayerVectors.load(Path(path))
