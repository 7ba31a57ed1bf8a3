"""Data sets of activations on disk: a folder of shards in open formats, read by training loops.

folder/
  definition.json                    model, points, codecs and settings of the data set
  shards/000000.safetensors          rows of each point: `rows.<site>.<layer>`, or the parts of its codec
  shards/000000.parquet              one row a token: document, window, position, token, offset
  shards/000000.statistics.safetensors
  shards/000000.json                 receipt, written last: sizes and SHA-256 of the shard's files
  points.parquet                     one row a tensor: point, codec, dtype, shape
  statistics.safetensors, dataset.json   written when the data set is complete
"""

from steercap.lab.datasets.batches import ActivationBatches
from steercap.lab.datasets.dataset import ActivationDataset
from steercap.lab.datasets.definition import DatasetDefinition, PointFormat, define
from steercap.lab.datasets.folder import DatasetFolder, Totals, verify
from steercap.lab.datasets.remote import RemoteFolder, storage_of
from steercap.lab.datasets.rows import Labelled, Normalisation
from steercap.lab.datasets.shards import Shard, ShardReceipt, write_shard
from steercap.lab.datasets.statistics import PointStatistics
from steercap.lab.datasets.storage import LocalFolder, Storage
from steercap.lab.datasets.tables import Index

__all__ = [
    "ActivationBatches",
    "ActivationDataset",
    "DatasetDefinition",
    "DatasetFolder",
    "Index",
    "Labelled",
    "LocalFolder",
    "Normalisation",
    "PointFormat",
    "PointStatistics",
    "RemoteFolder",
    "Shard",
    "ShardReceipt",
    "Storage",
    "Totals",
    "define",
    "storage_of",
    "verify",
    "write_shard",
]
