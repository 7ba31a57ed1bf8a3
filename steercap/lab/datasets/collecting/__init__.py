"""Collection of activations from a corpus: documents, windows of tokens, token samples, and engine runs."""

from steercap.lab.datasets.collecting.calls import activations, collect
from steercap.lab.datasets.collecting.many import RayActors
from steercap.lab.datasets.collecting.samples import ByPredicate, ByProbe, OneIn
from steercap.lab.datasets.collecting.sources import DocumentSource, open_source

__all__ = ["ByPredicate", "ByProbe", "DocumentSource", "OneIn", "RayActors", "activations", "collect", "open_source"]
