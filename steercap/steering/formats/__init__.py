"""Files of steering in our own and other tools' formats: one module per format, each read into our own types."""

from steercap.files.native import read_header
from steercap.steering.formats.capping import load_capping
from steercap.steering.formats.control_vector import load_control_vector, save_control_vector
from steercap.steering.formats.layers_pt import (
    SteeringConfig,
    load_layers_pt,
    load_steering_vector,
    save_layers_pt,
    save_steering_vector,
)
from steercap.steering.formats.ours import load_steering, load_vectors, save_steering, save_vectors
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
