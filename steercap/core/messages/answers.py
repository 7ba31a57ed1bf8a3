"""Answers of workers to the client."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from steercap.core.attention import AttentionRule
from steercap.core.framing import BoundedText, Data, Digest, Label, Large, Whole, WholeOrNone
from steercap.core.messages.base import LineRange, Loaded, Message, Owner, TableBytes
from steercap.core.schema import Coding, PointSchema


class NotCapturing(Message, frozen=True):
    """Answer of a rank that captures nothing, since another rank captures all its rows."""


class Listening(Message, frozen=True):
    """Answer to Listen: the name of the channel's socket on the worker's machine; "" if it has none."""

    address: Label


class Attached(Message, frozen=True):
    """Answer to Attach: points, memory and layers of one capturing rank.

    Args:
        points: indices into the engine's armed points of those that this rank keeps.
        schemas: schemas of these points.
        shard: index of this rank's shard of points that are split.
        page_lines: lines of a page.
        pages: pages of the arena.
        bank_rows: rows of the vector bank.
        bank_width: elements of a bank row: those of the widest point on this rank.
        reductions: number of reductions that can run along at once.
        held: number of rows that such a reduction keeps apart, which go to the arena with it when its request has
            ended.
        path: path by which a process of the same machine can open the arena.
        nonce: first bytes of the arena, which identify it.
        loaded: decoder layers of this rank.
        attention: attention rule of this rank's heads, for each layer whose queries and keys are armed here.
        file: path by which a process of the same machine can open the file of rows that left the arena; "" for none.
        file_lines: lines of that file, which are numbered after those of the arena.
    """

    points: tuple[Whole, ...]
    schemas: tuple[PointSchema, ...]
    shard: Whole
    page_lines: Whole
    pages: Large
    bank_rows: Whole
    bank_width: Whole
    reductions: Whole
    held: Whole
    path: BoundedText
    nonce: Data
    loaded: Loaded = Loaded()
    attention: dict[Whole, AttentionRule] = msgspec.field(default_factory=dict)
    file: BoundedText = ""
    file_lines: Large = 0


class Unembedded(Message, frozen=True):
    """Answer to Unembed: logits of rows.

    Args:
        logits: logits of the requested tokens, float32 [n, tokens], as bytes.
        least: least logit of all tokens, for each row.
        most: greatest logit of all tokens, for each row.
        spread: standard deviation of the logits of all tokens, for each row.
        total: logarithm of the sum of the exponentials of all logits, for each row.
        top: tokens of the greatest logits, int64 [n, top], greatest first, as bytes.
        best: logits of these tokens, float32 [n, top], as bytes.
    """

    logits: Data
    least: tuple[float, ...]
    most: tuple[float, ...]
    spread: tuple[float, ...]
    total: tuple[float, ...]
    top: Data
    best: Data


class ProjectedRows(Message, frozen=True):
    """Answer to Project: rows of [n, hidden], float32, as bytes."""

    rows: Data


class Chosen(Message, frozen=True):
    """Answer to Choose.

    Args:
        ids, weights: of the experts, int64 and float32 [n, k], as bytes.
        refused: reason why logits alone do not determine the layer's experts, or "".
    """

    ids: Data = b""
    weights: Data = b""
    refused: BoundedText = ""


class CapturedRows(Message, frozen=True):
    """Location and labels of one request's rows on one rank.

    Args:
        owner: request and sample of the rows.
        coding: encoding of the rows.
        points: indices into the engine's armed points, in the order of a record.
        lines: lines of the records, in the order of the rows: of the arena, or of the file behind it.
        stored_rows: number of records in these lines: one for each row, or one for a reduction.
        positions: position of each row, -1 where none was written: int64, as bytes.
        token_ids: id of the token that the model read there: int64, as bytes.
        writes: number of rows written, recomputed ones counted again.
        failure: reason why the rows cannot be trusted, or None.
        nonfinite: first position with a row that is not finite, and the index of its point; None if all are finite.
    """

    owner: Owner
    coding: Coding
    points: tuple[Whole, ...]
    lines: tuple[LineRange, ...]
    stored_rows: Whole
    positions: Data
    token_ids: Data
    writes: Large
    failure: BoundedText | None
    nonfinite: tuple[Whole, Whole] | None = None


class Unknown(Message, frozen=True):
    """Answer for an owner without rows here: none were ever seen, or they were released."""

    owner: Owner


class Collected(Message, frozen=True):
    """Answer to Collect and PrepareSketch: for each owner asked for, in order, where its rows lie, or `Unknown`.

    Args:
        shares: rows of each request.
        unfinished: True if rows are not ready yet and `shares` is empty: ask again.
    """

    shares: tuple[CapturedRows | Unknown, ...]
    unfinished: bool = False


class Lines(Message, frozen=True):
    """Answer to Read: the bytes of the line ranges, one after the other."""

    data: Data


class Counted(Message, frozen=True):
    """Answer to GetStats: resources in use on one worker.

    The number of requests whose rows (`requests`) or steering record (`steered`) are held; pages; rows written and
    passes so far; sketches; SAEs; the bytes of tables; and True if the arena is pinned.
    """

    requests: Whole
    steered: Whole
    pages_in_use: Large
    pages_touched: Large
    pages: Large
    page_bytes: Large
    rows_written: Large
    steps: Large
    sketches: Whole
    sketch_bytes: Large
    saes: Whole
    sae_bytes: Large
    tables: TableBytes = TableBytes()
    arena_pinned: bool = False


class Configured(Message, frozen=True):
    """Answer to Configure.

    Args:
        refused: digests of the configurations that were not written, because a request that has ended for the
            client, but not yet left the engine, uses their slot or rows they need.
    """

    refused: tuple[Digest, ...]


class SteeringRecord(Message, frozen=True):
    """Record of the edits that one rank made to one request.

    Args:
        owner: request and sample.
        computed: bit `i` is set if position `i` was computed here, rather than read from the prefix cache.
        rows: number of rows that each edit touched, at all its points on this rank together.
        failure: reason why the edits cannot be trusted, or None.
        primary: True if these rows count in the receipt; the other ranks of a tensor-parallel group touch the same.
        biased: bit `i` is set if the logits of position `i` got their biases here; None where no logits are made.
        entries: number of logits biased, at all positions together.
    """

    owner: Owner
    computed: Data
    rows: tuple[Large, ...]
    failure: BoundedText | None
    primary: bool
    biased: Data | None = None
    entries: Large = 0


class SteeringRecords(Message, frozen=True):
    """Answer to GetSteeringRecord, in its order."""

    records: tuple[SteeringRecord | Unknown, ...]


class Engaged(Message, frozen=True):
    """Answer to Engage, in its order: the first position that is steered, None for a request that is not here."""

    positions: tuple[Whole | None, ...]


class SketchOpened(Message, frozen=True):
    """Answer to OpenSketch and CloseSketch: the reason why there is no room for the sketch, or ""."""

    refused: BoundedText


class SketchCommitted(Message, frozen=True):
    """Answer to CommitSketch, in its order: number of each request's rows in its sketches; -1 if none was prepared."""

    rows: tuple[WholeOrNone, ...]


class SketchPart(Message, frozen=True):
    """Answer to ReadSketch; see `kernels.sketches.SketchState`. A rank without the point has no rows and no data.

    Args:
        kept: True if this rank has the point.
        rows, squares, filled: fields of the state.
        data: range of bytes that ReadSketch asked for, of the state's tensors stored one after the other.
    """

    kept: bool
    rows: Large
    squares: float
    filled: Whole
    data: Data


class SAEOpened(Message, frozen=True):
    """Answer to OpenSAE and CloseSAE.

    Args:
        coming: True if the encoder is still being loaded; ask again.
        full: reason why there is no room for it, or "".
        unreachable: reason why this worker cannot read the client's memory, or "".
        refused: reason why the encoder in that memory cannot be loaded, or "".
    """

    coming: bool = False
    full: BoundedText = ""
    unreachable: BoundedText = ""
    refused: BoundedText = ""


class Failed(Message, frozen=True):
    """Answer of a worker that failed to answer, with the reason."""

    reason: BoundedText


class Unhooked(Message, frozen=True):
    """Answer of a worker whose model runner no adapter could hook, with the reason."""

    reason: BoundedText


Answer: TypeAlias = (
    NotCapturing
    | Listening
    | Attached
    | Collected
    | Lines
    | Counted
    | Configured
    | SteeringRecords
    | Engaged
    | SketchOpened
    | SketchCommitted
    | SketchPart
    | SAEOpened
    | Failed
    | Unembedded
    | ProjectedRows
    | Chosen
    | Unhooked
)
