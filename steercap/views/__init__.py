"""Views: numbers by token, in notebooks, terminals and files."""

from steercap.views.heatmap import TokenHeatmap, heatmap_of, heatmap_of_layers

__all__ = ["TokenHeatmap", "heatmap_of", "heatmap_of_layers"]
