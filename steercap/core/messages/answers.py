"""Messages with which workers answer the client's questions."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from steercap.core.attention import AttentionRule
from steercap.core.framing import BoundedText, Data, Digest, Label, Large, Whole, WholeOrNone
from steercap.core.messages.base import LineRange, Loaded, Message, Owner, TableBytes
from steercap.core.schema import Coding, PointSchema


class NotCapturing(Message, frozen=True):
    """Answer of a rank without what was asked for: it keeps no rows, or lacks the layer, the head or the arena."""


class Listening(Message, frozen=True):
    """Answer to Listen: name of the channel's Unix socket on the worker's machine; "" if it has none."""

    address: Label


class Attached(Message, frozen=True):
    """Answer to Attach: armed points, arena and loaded layers of one capturing rank.

    Args:
        points: points whose rows this rank keeps, as indices into the engine's armed points.
        schemas: shape and dtype of the rows of each of `points`.
        shard: index of this rank's part of rows that are split over ranks.
        page_lines: number of arena lines of a page.
        pages: number of pages of the arena.
        bank_rows: number of rows of the vector bank.
        bank_width: number of elements of a bank row, that of the widest point on this rank.
        reductions: maximum number of reductions that can be updated in passes at once.
        held: maximum number of newest rows that such a reduction keeps apart until their tokens are final.
        path: path by which a process of the same machine can open the arena.
        nonce: first bytes of the arena, which identify it.
        loaded: decoder layers of this rank.
        attention: attention rule of this rank's heads, by layer whose queries and keys are armed here.
        file: path by which a process of the same machine can open the file of rows that left the arena; "" for none.
        file_lines: number of lines of that file, which are numbered after those of the arena.
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
    """Answer to Unembed: logits and statistics of n rows.

    Args:
        logits: logits of the requested tokens, float32 [n, tokens], as bytes.
        least: minimum logit over the vocabulary, for each row.
        most: maximum logit over the vocabulary, for each row.
        spread: standard deviation of the logits over the vocabulary, for each row.
        total: log-sum-exp of the logits over the vocabulary, for each row.
        top: ids of the tokens with the greatest logits, descending, int64 [n, top], as bytes.
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
    """Answer to Project: projected rows, float32 [n, hidden], as bytes."""

    rows: Data


class Chosen(Message, frozen=True):
    """Answer to Choose: the experts that a router chose for n rows.

    Args:
        ids, weights: expert indices, int64 [n, k], and their weights, float32 [n, k], as bytes.
        refused: reason why logits alone do not determine the layer's experts, or "".
    """

    ids: Data = b""
    weights: Data = b""
    refused: BoundedText = ""


class CapturedRows(Message, frozen=True):
    """Location and labels of one request's captured rows on one rank.

    Args:
        owner: request and sample of the rows.
        coding: encoding of the stored rows.
        points: indices into the engine's armed points, in the order in which a record has them.
        lines: line ranges of the records, in the order of the rows, in the arena or the file of rows that left it.
        stored_rows: number of records in these lines: one for each position, or one for a reduction.
        positions: position of each row, -1 if none was written: int64 [rows], as bytes.
        token_ids: id of the model's input token at that position: int64 [rows], as bytes.
        writes: number of rows written, with recomputed rows counted again.
        failure: reason why the rows are invalid, or None.
        nonfinite: first position with a row that is not finite, and the armed index of its point; None for none.
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
    """Answer for an owner of whom this worker has no rows or steering record: none were made, or they were released."""

    owner: Owner


class Collected(Message, frozen=True):
    """Answer to Collect and PrepareSketch: the location of each wanted owner's rows, in order.

    Args:
        shares: location of each owner's rows, or `Unknown`.
        unfinished: True if rows are not ready yet; `shares` is empty, and the client must ask again.
    """

    shares: tuple[CapturedRows | Unknown, ...]
    unfinished: bool = False


class Lines(Message, frozen=True):
    """Answer to Read: the bytes of all line ranges, concatenated."""

    data: Data


class Counted(Message, frozen=True):
    """Answer to GetStats: resources in use on one worker.

    Requests with stored rows (`requests`) or a steering record (`steered`); arena pages in use, ever used and in total;
    rows written and passes (`steps`) so far; sketches and SAEs, with bytes; `TableBytes`; True if the arena is pinned.
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
    """Answer to Configure: the configurations that were not written.

    Args:
        refused: digests of configurations whose slot or bank rows are still used by a request that has ended for the
            client, but not yet left the engine.
    """

    refused: tuple[Digest, ...]


class SteeringRecord(Message, frozen=True):
    """Record of the edits that one rank made to one request.

    Args:
        owner: request and sample.
        computed: bit `i` is set if position `i` was computed here, rather than read from the prefix cache.
        rows: number of rows that each edit changed, over all its points on this rank.
        failure: reason why the edits are invalid, or None.
        primary: True if these rows count in the receipt; False if another tensor-parallel rank edits the same rows.
        biased: bit `i` is set if biases were added to the logits of position `i` here; None on ranks without logits.
        entries: number of biased logits, over all positions.
    """

    owner: Owner
    computed: Data
    rows: tuple[Large, ...]
    failure: BoundedText | None
    primary: bool
    biased: Data | None = None
    entries: Large = 0


class SteeringRecords(Message, frozen=True):
    """Answer to GetSteeringRecord: a record for each wanted owner, in order."""

    records: tuple[SteeringRecord | Unknown, ...]


class Engaged(Message, frozen=True):
    """Answer to Engage: for each owner, in order, the first position to be steered; None for an unknown request."""

    positions: tuple[Whole | None, ...]


class SketchOpened(Message, frozen=True):
    """Answer to OpenSketch and CloseSketch: the reason why the sketch has no room, or ""."""

    refused: BoundedText


class SketchCommitted(Message, frozen=True):
    """Answer to CommitSketch: for each request, in order, the number of rows in its sketches; -1 if not prepared."""

    rows: tuple[WholeOrNone, ...]


class SketchPart(Message, frozen=True):
    """Answer to ReadSketch: part of a sketch's state at one point; empty on a rank without the point.

    Args:
        kept: True if this rank has the point.
        rows, squares, filled: fields of `kernels.sketches.SketchState`.
        data: requested range of the bytes of the state's tensors, concatenated.
    """

    kept: bool
    rows: Large
    squares: float
    filled: Whole
    data: Data


class SAEOpened(Message, frozen=True):
    """Answer to OpenSAE and CloseSAE; without any field, the encoder is loaded or freed, or not wanted on this rank.

    Args:
        coming: True if the encoder is still being loaded; the client must ask again.
        full: reason why there is no room for the encoder, or "".
        unreachable: reason why this worker cannot read the client's memory, or "".
        refused: reason why the encoder in that memory cannot be loaded, or "".
    """

    coming: bool = False
    full: BoundedText = ""
    unreachable: BoundedText = ""
    refused: BoundedText = ""


class Failed(Message, frozen=True):
    """Answer of a worker in which a question raised an error, with the error's text."""

    reason: BoundedText


class Unhooked(Message, frozen=True):
    """Answer of a worker whose model runner has no adapter or could not be hooked, with the reason."""

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
