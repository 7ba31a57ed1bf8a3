"""Files of steering in our own and other tools' formats: one module per format, each read into our own types.

`save` and `load` of the classes do the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from steercap.files.native import read_header
from steercap.steering.formats.control_vector import load_control_vector, save_control_vector
from steercap.steering.formats.persona_files import (
    PersonaComponents,
    PersonaFolder,
    load_components,
    load_levels,
    load_personas,
    save_default_levels,
    save_levels,
    save_persona_capture,
)
from steercap.steering.formats.pt_files import (
    SteeringConfig,
    load_capping,
    load_layers_pt,
    load_steering_vector,
    save_layers_pt,
    save_steering_vector,
)
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


__all__ = [
    "PersonaComponents",
    "PersonaFolder",
    "SteeringConfig",
    "load_capping",
    "load_components",
    "load_control_vector",
    "load_layers_pt",
    "load_levels",
    "load_personas",
    "load_steering",
    "load_steering_vector",
    "load_vectors",
    "read_header",
    "save_control_vector",
    "save_default_levels",
    "save_layers_pt",
    "save_levels",
    "save_persona_capture",
    "save_steering",
    "save_steering_vector",
    "save_vectors",
]
