"""Shards of random rows, which depend on their numbers alone, and a folder of them."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from steercap.core.schema import RAW, Coding, PointSchema
from steercap.core.spec import Point
from steercap.kernels.codecs import ENCODINGS
from steercap.kernels.codecs.coded import CodedRows
from steercap.lab.datasets import DatasetDefinition, DatasetFolder, Index, PointFormat, Shard, define

MODEL = {"name": "tiny", "weights": "0" * 64}
POINTS = {
    Point(1, "resid_post"): PointSchema((16,), "bfloat16"),
    Point(2, "z"): PointSchema((2, 4), "float32"),
}


def definition_of(coding: Coding = RAW, *, points=POINTS, documents: int = 4, every: int = 1) -> DatasetDefinition:
    return define(
        MODEL, points, coding=coding, documents_per_shard=documents, asked={"context": 8}, statistics_every=every
    )


def rows_of(known: PointFormat, count: int, seed: int) -> torch.Tensor | CodedRows:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn((count, *known.schema.shape), generator=generator) * 3 + 1
    if known.coding == RAW:
        return rows.to(getattr(torch, known.schema.dtype))
    codec = ENCODINGS[known.coding.encoding]
    matrix = codec.matrix(known.schema.width, known.coding)
    constants = {
        name: torch.rand(known.schema.width, generator=torch.Generator().manual_seed(9)) + 0.5
        for name in codec.constants
    }
    vectors = torch.stack(list(constants.values())) if constants else matrix
    stored = codec.encode(rows.flatten(1), known.schema, known.coding, vectors)
    return CodedRows(known.coding, known.schema, codec.parts(stored, known.schema, known.coding), constants=constants)


def shard_of(definition: DatasetDefinition, number: int, documents: int | None = None, *, pieces: int = 1) -> Shard:
    """A shard whose documents have 1 to 9 tokens, in windows of 8."""
    documents = definition.documents_per_shard if documents is None else documents
    first = number * definition.documents_per_shard
    lengths = [1 + (7 * document) % 9 for document in range(first, first + documents)]
    labels = [
        (first + n, t // 8, t % 8, (first + n) * 100 + t) for n, length in enumerate(lengths) for t in range(length)
    ]
    columns = np.array(labels, dtype=np.int64).reshape(-1, 4).T
    rows = {}
    for place, known in enumerate(definition.points):
        whole = rows_of(known, len(labels), seed=1000 * number + place)
        edges = np.linspace(0, len(labels), pieces + 1).astype(int)
        rows[known.point] = whole if pieces == 1 else [whole[a:b] for a, b in pairwise(edges)]
    digest = hashlib.sha256(repr(lengths).encode()).hexdigest()
    return Shard(number, documents, digest, len(labels), Index(*columns), rows)


def folder_of(
    path: Path | str, definition: DatasetDefinition, shards: int = 3, last: int = 2, *, complete: bool = True
) -> DatasetFolder:
    """A folder of so many shards, the last of which has `last` documents."""
    folder = DatasetFolder.begin(path, definition)
    for number in range(shards):
        folder.write(shard_of(definition, number, last if number == shards - 1 else None))
    if complete:
        folder.complete()
    return folder
