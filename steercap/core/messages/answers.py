"""What a worker answers."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from steercap.core.attention import AttentionRule
from steercap.core.coding import Coding
from steercap.core.framing import Data, Digest, Large, Told, Whole, WholeOrNone
from steercap.core.messages.base import LineRange, Loaded, Message, Owner, TableBytes
from steercap.core.schema import PointSchema


class NotCapturing(Message, frozen=True, tag="NotCapturing"):
    """This rank captures nothing: another rank captures all its rows."""


class Attached(Message, frozen=True, tag="Attached"):
    """What one capturing rank holds.

    Args:
        points: indices into the engine's armed points of those that this rank keeps.
        schemas: of these points.
        shard: which shard of a point that is split this rank has.
        page_lines: lines of a page.
        pages: pages of the arena.
        bank_rows: rows of the vector bank.
        bank_width: elements of such a row: of the widest point on this rank.
        reductions: how many can run along at once.
        held: rows that such a reduction holds apart, which go to the arena with it once its request has ended.
        path: where a process of the same machine can open the arena.
        nonce: first bytes of the arena, which identify it.
        loaded: the layers of this rank.
        attention: of each layer whose queries and keys are armed here, how its heads on this rank weigh keys.
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
    path: Told
    nonce: Data
    loaded: Loaded = Loaded()
    attention: dict[Whole, AttentionRule] = msgspec.field(default_factory=dict)


class Unembedded(Message, frozen=True, tag="Unembedded"):
    """What logits rows give.

    Args:
        logits: of the tokens asked for, float32 [n, tokens], as bytes.
        least: of each row, the least logit of all tokens.
        most: of each row, the greatest.
        spread: of each row, the standard deviation of the logits of all tokens.
        total: of each row, the logarithm of the sum of their exponentials.
        top: of each row, the tokens of the greatest logits, int64 [n, top], greatest first, as bytes.
        best: their logits, float32 [n, top], as bytes.
    """

    logits: Data
    least: tuple[float, ...]
    most: tuple[float, ...]
    spread: tuple[float, ...]
    total: tuple[float, ...]
    top: Data
    best: Data


class Projected(Message, frozen=True, tag="Projected"):
    """Answer to Project: the bytes of [n, hidden], float32."""

    rows: Data


class Chosen(Message, frozen=True, tag="Chosen"):
    """Answer to Choose.

    Args:
        ids: of the experts, int64 [n, k], as bytes.
        weights: theirs, float32 [n, k], as bytes.
        refused: why logits alone do not say which experts the layer chooses, or "".
    """

    ids: Data = b""
    weights: Data = b""
    refused: Told = ""


class Parcel(Message, frozen=True, tag="Parcel"):
    """Where one request's rows are on one rank.

    Args:
        owner: whose rows.
        coding: how the rows are stored.
        points: indices into the engine's armed points, in the order of a record.
        lines: where the records are, in the order of the rows.
        stored_rows: records in these lines: the rows, or one for a reduction.
        positions: int64 bytes, position of each row, -1 where none was written.
        token_ids: int64 bytes, token the model read there.
        writes: rows written, recomputed ones counted again.
        failure: why the rows cannot be trusted, or None.
        nonfinite: the first position with a row that is not finite, and the index of its point; None if all are.
    """

    owner: Owner
    coding: Coding
    points: tuple[Whole, ...]
    lines: tuple[LineRange, ...]
    stored_rows: Whole
    positions: Data
    token_ids: Data
    writes: Large
    failure: Told | None
    nonfinite: tuple[Whole, Whole] | None = None


class Unknown(Message, frozen=True, tag="Unknown"):
    """No rows of this owner were ever seen, or they were given back."""

    owner: Owner


class Collected(Message, frozen=True, tag="Collected"):
    """Answer to Collect, in its order."""

    parcels: tuple[Parcel | Unknown, ...]


class Lines(Message, frozen=True, tag="Lines"):
    """Answer to Read: the ranges' bytes, one after the other."""

    data: Data


class Counted(Message, frozen=True, tag="Counted"):
    """Answer to Census: requests whose rows, or record of edits, are held; pages; rows and passes so far; sketches;
    SAEs; what tables take, and whether the arena is pinned.
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


class Configured(Message, frozen=True, tag="Configured"):
    """Answer to Configure.

    Args:
        refused: digests of the configurations that are not in place, because a request that has ended for the
            client, but not yet left the engine, uses their slot or rows they need.
    """

    refused: tuple[Digest, ...]


class SteeringRecord(Message, frozen=True, tag="SteeringRecord"):
    """What one rank did to one request.

    Args:
        owner: whose rows.
        computed: bit `i` says whether position `i` was computed here, rather than read from the prefix cache.
        rows: rows that each edit touched, all its points on this rank together.
        failure: why the edits cannot be trusted, or None.
        primary: whether these rows count in the receipt; the other ranks of a tensor-parallel group touch the same.
        biased: bit `i` says whether the logits of position `i` got their biases here; None where none are made.
        entries: how many logits these were, all positions together.
    """

    owner: Owner
    computed: Data
    rows: tuple[Large, ...]
    failure: Told | None
    primary: bool
    biased: Data | None = None
    entries: Large = 0


class Settled(Message, frozen=True, tag="Settled"):
    """Answer to Settle, in its order."""

    records: tuple[SteeringRecord | Unknown, ...]


class Engaged(Message, frozen=True, tag="Engaged"):
    """Answer to Engage, in its order: the first position that is steered, None of a request that is not here."""

    positions: tuple[Whole | None, ...]


class SketchOpened(Message, frozen=True, tag="SketchOpened"):
    """Answer to OpenSketch and CloseSketch: why there is no room for it, or ""."""

    refused: Told


class Folded(Message, frozen=True, tag="Folded"):
    """Answer to Fold, in its order: how many rows of each request are in its sketches; -1 where it was not weighed."""

    rows: tuple[WholeOrNone, ...]


class SketchPart(Message, frozen=True, tag="SketchPart"):
    """Answer to ReadSketch; see `sketches.base.State`. A rank that does not keep the point has no rows and no data.

    Args:
        kept: whether this rank has the point.
        rows, squares, filled: of its state.
        data: the bytes.
    """

    kept: bool
    rows: Large
    squares: float
    filled: Whole
    data: Data


class SAEOpened(Message, frozen=True, tag="SAEOpened"):
    """Answer to OpenSAE and CloseSAE.

    Args:
        coming: whether it is on its way, and to be asked for again.
        full: why there is no room for it, or "".
        unreachable: why this worker cannot read the client's memory, or "".
        refused: why what lies there cannot be loaded, or "".
    """

    coming: bool = False
    full: Told = ""
    unreachable: Told = ""
    refused: Told = ""


class Failed(Message, frozen=True, tag="Failed"):
    """The worker could not answer."""

    reason: Told


class Unhooked(Message, frozen=True, tag="Unhooked"):
    """No adapter could hook the worker's model runner."""

    reason: Told


Answer: TypeAlias = (
    NotCapturing
    | Attached
    | Collected
    | Lines
    | Counted
    | Configured
    | Settled
    | Engaged
    | SketchOpened
    | Folded
    | SketchPart
    | SAEOpened
    | Failed
    | Unembedded
    | Projected
    | Chosen
    | Unhooked
)
