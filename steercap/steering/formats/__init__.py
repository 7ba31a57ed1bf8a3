"""Files of steering vectors in other tools' formats, read into and written from steercap's types."""

from __future__ import annotations

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
    "load_steering_vector",
    "read_header",
    "save_control_vector",
    "save_default_levels",
    "save_layers_pt",
    "save_levels",
    "save_persona_capture",
    "save_steering_vector",
]
