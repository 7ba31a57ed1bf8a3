"""All messages between client and workers: a closed, tagged set of msgspec frames.

Arrays travel as raw little-endian bytes, rows as line numbers of shared memory, or as bytes where memory cannot be
shared. Nothing is pickled.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from steercap.core.attention import AttentionRule
from steercap.core.coding import Coding
from steercap.core.program import Configuration
from steercap.core.schema import PointSchema


class Message(msgspec.Struct, frozen=True, tag=True):
    """Root of the frames."""


class Owner(msgspec.Struct, frozen=True, array_like=True):
    """Whose rows: steercap's key of the request and the index of the sample among its `n`."""

    key: str
    sample: int


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """Rows to collect: whose, how many inputs the sequence has, and how many rows the client has already."""

    owner: Owner
    total: int
    first: int = 0


class Joining(msgspec.Struct, frozen=True, array_like=True):
    """A finished request whose rows shall enter sketches, by their names."""

    wanted: Wanted
    sketches: tuple[str, ...]


class LineRange(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive lines of the arena."""

    start: int
    count: int


class Vectors(msgspec.Struct, frozen=True, array_like=True):
    """Rows for the vector bank.

    Args:
        digest: see `core.program.blob_digest`.
        bank_rows: the row of each.
        data: the float32 bytes.
    """

    digest: bytes
    bank_rows: tuple[int, ...]
    data: bytes


class Loaded(msgspec.Struct, frozen=True, array_like=True):
    """What decoder layers a rank has loaded.

    Args:
        family: that knows their classes, "" where what they take and give was derived.
        code: their classes, as families name them, and the fingerprint of the code of each one's `forward`.
        candidates: how many families they may be of.
    """

    family: str = ""
    code: dict[str, str] = {}
    candidates: int = 1


class EncoderShape(msgspec.Struct, frozen=True, array_like=True):
    """All of an SAE's encoder but its numbers; see `saes.encoder.Encoder`.

    Args:
        d_in: elements of a row.
        d_sae: features.
        k: the most features of a row that are active, 0 for any number.
        normalisation: what is done to a row first.
        centred: whether its mean is subtracted before that.
        thresholds, shifts: whether it has these.
    """

    d_in: int
    d_sae: int
    k: int
    normalisation: str
    centred: bool
    thresholds: bool
    shifts: bool


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """A configuration, its slot, and the bank rows of each of its blobs."""

    slot: int
    configuration: Configuration
    bank_rows: tuple[tuple[int, ...], ...]


# Questions of the client


class Attach(Message, frozen=True):
    """First frame after start-up: make the arena, say what is armed.

    Args:
        capture_bytes: most the arena may take.
    """

    capture_bytes: int


class Configure(Message, frozen=True):
    """Write vectors, then configurations, for requests about to come; every rank does what it can."""

    vectors: tuple[Vectors, ...]
    configurations: tuple[Placed, ...]


class Settle(Message, frozen=True):
    """Say what was edited of requests so far; every rank answers.

    Args:
        wanted: whose edits, and how many inputs each sequence has.
        ended: whether each of them has ended, and can be forgotten.
    """

    wanted: tuple[Wanted, ...]
    ended: tuple[bool, ...]


class Engage(Message, frozen=True):
    """Let steering begin that was held back, with the first token that is not under way; every rank answers.

    Args:
        owners: whose.
    """

    owners: tuple[Owner, ...]


class Collect(Message, frozen=True):
    """Seal finished requests and say where their rows are."""

    wanted: tuple[Wanted, ...]


class Unembed(Message, frozen=True):
    """Say what logits rows of the stream give.

    Args:
        rows: the bytes of [count, hidden].
        count: how many.
        dtype: of the rows, torch's name of it.
        tokens: whose logits are asked for; None for all tokens'.
        top: how many of the greatest are asked for.
        normed: whether the final norm is behind the rows.
    """

    rows: bytes
    count: int
    dtype: str
    tokens: tuple[int, ...] | None
    top: int = 0
    normed: bool = False


class Project(Message, frozen=True):
    """Say what a block makes of what its last projection reads.

    Args:
        layer: whose.
        site: where the rows are read: a name in `families.base.Family.projections`.
        rows: the bytes of [count, width], of all ranks together.
        count: how many.
        dtype: of the rows, torch's name of it.
    """

    layer: int
    site: str
    rows: bytes
    count: int
    dtype: str


class Choose(Message, frozen=True):
    """Say which experts a layer's router chooses by their logits.

    Args:
        layer: whose.
        rows: the bytes of [count, experts].
        count: how many.
        dtype: of the rows, torch's name of it.
    """

    layer: int
    rows: bytes
    count: int
    dtype: str


class Read(Message, frozen=True):
    """Send lines as bytes, for clients that cannot map the arena."""

    lines: tuple[LineRange, ...]


class Census(Message, frozen=True):
    """Count what the worker holds."""


class OpenSketch(Message, frozen=True):
    """Make room for statistics of rows.

    Args:
        name: of the sketch.
        kind: a name in `SKETCHES`.
        size: of the sketch, 0 where its kind has none.
        points: indices into the engine's armed points.
        most_bytes: what all sketches of a worker may take.
    """

    name: str
    kind: str
    size: int
    points: tuple[int, ...]
    most_bytes: int


class Weigh(Message, frozen=True):
    """Seal finished requests, and say whether their rows can enter sketches; answered as `Collect` is."""

    joining: tuple[Joining, ...]


class Fold(Message, frozen=True):
    """Take the rows of requests that were weighed into their sketches, each once however often it is asked."""

    joining: tuple[Joining, ...]


class ReadSketch(Message, frozen=True):
    """Send bytes `start` to `stop` of what a sketch holds of a point, its tensors one after the other."""

    name: str
    point: int
    start: int
    stop: int


class CloseSketch(Message, frozen=True):
    """Free a sketch; whether there is one does not matter."""

    name: str


class OpenSAE(Message, frozen=True):
    """Load an SAE's encoder, unless it is here; asked again until it is. Ranks without the point have nothing to do.

    Args:
        digest: see `saes.encoder.Encoder.digest`.
        point: index of the point that it reads, among the engine's armed ones.
        shape: of the encoder.
        path: where a process of the same machine can open the memory that holds it.
        nonce: first bytes of that memory.
        most_bytes: what all SAEs of a worker may take.
    """

    digest: bytes
    point: int
    shape: EncoderShape
    path: str
    nonce: bytes
    most_bytes: int


class CloseSAE(Message, frozen=True):
    """Free an SAE once no request that runs reads with it; whether there is one does not matter."""

    digest: bytes
    point: int


Question: TypeAlias = (
    Attach
    | Collect
    | Read
    | Census
    | Configure
    | Settle
    | Engage
    | Unembed
    | Project
    | Choose
    | OpenSketch
    | Weigh
    | Fold
    | ReadSketch
    | CloseSketch
    | OpenSAE
    | CloseSAE
)


class Call(Message, frozen=True):
    """One RPC: rows given back since the last one, then a question."""

    released: tuple[Owner, ...]
    question: Question


# Answers of a worker


class NotCapturing(Message, frozen=True):
    """This rank captures nothing: another rank captures all its rows."""


class Attached(Message, frozen=True):
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

    points: tuple[int, ...]
    schemas: tuple[PointSchema, ...]
    shard: int
    page_lines: int
    pages: int
    bank_rows: int
    bank_width: int
    reductions: int
    held: int
    path: str
    nonce: bytes
    loaded: Loaded = Loaded()
    attention: dict[int, AttentionRule] = {}


class Unembedded(Message, frozen=True):
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

    logits: bytes
    least: tuple[float, ...]
    most: tuple[float, ...]
    spread: tuple[float, ...]
    total: tuple[float, ...]
    top: bytes
    best: bytes


class Projected(Message, frozen=True):
    """Answer to Project: the bytes of [n, hidden], float32."""

    rows: bytes


class Chosen(Message, frozen=True):
    """Answer to Choose.

    Args:
        ids: of the experts, int64 [n, k], as bytes.
        weights: theirs, float32 [n, k], as bytes.
        refused: why logits alone do not say which experts the layer chooses, or "".
    """

    ids: bytes = b""
    weights: bytes = b""
    refused: str = ""


class Parcel(Message, frozen=True):
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
    points: tuple[int, ...]
    lines: tuple[LineRange, ...]
    stored_rows: int
    positions: bytes
    token_ids: bytes
    writes: int
    failure: str | None
    nonfinite: tuple[int, int] | None = None


class Unknown(Message, frozen=True):
    """No rows of this owner were ever seen, or they were given back."""

    owner: Owner


class Collected(Message, frozen=True):
    """Answer to Collect, in its order."""

    parcels: tuple[Parcel | Unknown, ...]


class Lines(Message, frozen=True):
    """Answer to Read: the ranges' bytes, one after the other."""

    data: bytes


class Counted(Message, frozen=True):
    """Answer to Census: requests whose rows, or record of edits, are held; pages; rows and passes so far; sketches;
    SAEs.
    """

    requests: int
    steered: int
    pages_in_use: int
    pages_touched: int
    pages: int
    page_bytes: int
    rows_written: int
    steps: int
    sketches: int
    sketch_bytes: int
    saes: int
    sae_bytes: int


class Configured(Message, frozen=True):
    """Answer to Configure.

    Args:
        refused: digests of the configurations that are not in place, because a request that has ended for the
            client, but not yet left the engine, uses their slot or rows they need.
    """

    refused: tuple[bytes, ...]


class SteeringRecord(Message, frozen=True):
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
    computed: bytes
    rows: tuple[int, ...]
    failure: str | None
    primary: bool
    biased: bytes | None = None
    entries: int = 0


class Settled(Message, frozen=True):
    """Answer to Settle, in its order."""

    records: tuple[SteeringRecord | Unknown, ...]


class Engaged(Message, frozen=True):
    """Answer to Engage, in its order: the first position that is steered, None of a request that is not here."""

    positions: tuple[int | None, ...]


class SketchOpened(Message, frozen=True):
    """Answer to OpenSketch and CloseSketch: why there is no room for it, or ""."""

    refused: str


class Folded(Message, frozen=True):
    """Answer to Fold, in its order: how many rows of each request are in its sketches; -1 where it was not weighed."""

    rows: tuple[int, ...]


class SketchPart(Message, frozen=True):
    """Answer to ReadSketch; see `sketches.base.State`. A rank that does not keep the point has no rows and no data.

    Args:
        kept: whether this rank has the point.
        rows, squares, filled: of its state.
        data: the bytes.
    """

    kept: bool
    rows: int
    squares: float
    filled: int
    data: bytes


class SAEOpened(Message, frozen=True):
    """Answer to OpenSAE and CloseSAE.

    Args:
        coming: whether it is on its way, and to be asked for again.
        full: why there is no room for it, or "".
        unreachable: why this worker cannot read the client's memory, or "".
        refused: why what lies there cannot be loaded, or "".
    """

    coming: bool = False
    full: str = ""
    unreachable: str = ""
    refused: str = ""


class Failed(Message, frozen=True):
    """The worker could not answer."""

    reason: str


class Unhooked(Message, frozen=True):
    """No adapter could hook the worker's model runner."""

    reason: str


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

_ENCODER: Final = msgspec.msgpack.Encoder()
_CALLS: Final = msgspec.msgpack.Decoder(Call)
_ANSWERS: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)


def encode(message: Message) -> bytes:
    """A frame as bytes."""
    return _ENCODER.encode(message)


def decode_call(frame: bytes) -> Call:
    """The client's frame.

    Raises:
        msgspec.MsgspecError: bytes that are not a frame.
    """
    return _CALLS.decode(frame)


def decode_answer(frame: bytes) -> Answer:
    """A worker's frame.

    Raises:
        msgspec.MsgspecError: bytes that are not a frame.
    """
    return _ANSWERS.decode(frame)
