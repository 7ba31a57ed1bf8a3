"""Analysis of vectors: geometry; tokens, heads and neurons related to a vector; effects by layer and position.

Most functions return pyarrow Tables, which the functions that draw accept. All but the sweeps need no engine; those of
tokens, heads and neurons read weights of a checkpoint.
"""

from steercap.lab.mechanism.analysis.anatomy import PARTS, Anatomy, anatomy, draw_anatomy
from steercap.lab.mechanism.analysis.components import ends, principal, scores, scree
from steercap.lab.mechanism.analysis.geometry import chance_cosine, clusters, cosines, merges, method_similarity
from steercap.lab.mechanism.analysis.heads import head_reads, ov_circuit, ov_tokens, qk_circuit
from steercap.lab.mechanism.analysis.neurons import nearest_features, neuron_reads, neuron_writes
from steercap.lab.mechanism.analysis.pictures import plot_layer_sweep, plot_position_sweep
from steercap.lab.mechanism.analysis.pictures.blocks import plot_heads, plot_neurons, plot_tokens
from steercap.lab.mechanism.analysis.pictures.cosines import plot_cosines, plot_methods, plot_scores, plot_scree
from steercap.lab.mechanism.analysis.sweeps import layer_sweep, position_sweep
from steercap.lab.mechanism.analysis.tables import about, as_text, save_table
from steercap.lab.mechanism.analysis.tokens import nearest_tokens, vector_lens
from steercap.lab.mechanism.weights.model import ModelWeights

__all__ = [
    "PARTS",
    "Anatomy",
    "ModelWeights",
    "about",
    "anatomy",
    "as_text",
    "chance_cosine",
    "clusters",
    "cosines",
    "draw_anatomy",
    "ends",
    "head_reads",
    "layer_sweep",
    "merges",
    "method_similarity",
    "nearest_features",
    "nearest_tokens",
    "neuron_reads",
    "neuron_writes",
    "ov_circuit",
    "ov_tokens",
    "plot_cosines",
    "plot_heads",
    "plot_layer_sweep",
    "plot_methods",
    "plot_neurons",
    "plot_position_sweep",
    "plot_scores",
    "plot_scree",
    "plot_tokens",
    "position_sweep",
    "principal",
    "qk_circuit",
    "save_table",
    "scores",
    "scree",
    "vector_lens",
]
