"""Data sets of activations: a folder of shards that other tools open, and what training reads from it.

folder/
  definition.json                    what it is a data set of
  shards/000000.safetensors          rows of each point: `rows.<site>.<layer>`, or the parts of its codec
  shards/000000.parquet              one row a token: document, window, position, token, offset
  shards/000000.statistics.safetensors
  shards/000000.json                 the receipt, written last: sizes and SHA-256 of these
  points.parquet                     one row a tensor: point, codec, dtype, shape
  statistics.safetensors, dataset.json   when it is complete
"""

from steercap.datasets.batches import ActivationBatches
from steercap.datasets.dataset import ActivationDataset
from steercap.datasets.definition import Definition, PointFormat, define
from steercap.datasets.folder import DatasetFolder, Totals, verify
from steercap.datasets.normalising import Normalisation
from steercap.datasets.remote import RemoteFolder, storage_of
from steercap.datasets.rows import Labelled
from steercap.datasets.shards import Receipt, Shard, write_shard
from steercap.datasets.statistics import PointStatistics
from steercap.datasets.storage import LocalFolder, Storage
from steercap.datasets.tables import Index

__all__ = [
    "ActivationBatches",
    "ActivationDataset",
    "DatasetFolder",
    "Definition",
    "Index",
    "Labelled",
    "LocalFolder",
    "Normalisation",
    "PointFormat",
    "PointStatistics",
    "Receipt",
    "RemoteFolder",
    "Shard",
    "Storage",
    "Totals",
    "define",
    "storage_of",
    "verify",
    "write_shard",
]
