"""Views: numbers by token, in notebooks, terminals and files."""

from steercap.lab.mechanism.views.attribution import LogitAttribution, logit_attribution
from steercap.lab.mechanism.views.heatmap import TokenHeatmap, heatmap_of, heatmap_of_layers
from steercap.lab.mechanism.views.lens import LogitLens, logit_lens
from steercap.lab.mechanism.weights.unembedding import Unembedding

__all__ = [
    "LogitAttribution",
    "LogitLens",
    "TokenHeatmap",
    "Unembedding",
    "heatmap_of",
    "heatmap_of_layers",
    "logit_attribution",
    "logit_lens",
]
