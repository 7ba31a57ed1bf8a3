"""Files of steering in our own and other tools' formats: one module per format, each read into our own types."""

from steercap.files.native import read_header
from steercap.steering.formats.capping import load_capping
from steercap.steering.formats.control_vector import load_control_vector, save_control_vector
from steercap.steering.formats.layers_pt import load_layers_pt, save_layers_pt
from steercap.steering.formats.ours import load_steering, load_vectors, save_steering, save_vectors

__all__ = [
    "load_capping",
    "load_control_vector",
    "load_layers_pt",
    "load_steering",
    "load_vectors",
    "read_header",
    "save_control_vector",
    "save_layers_pt",
    "save_steering",
    "save_vectors",
]
