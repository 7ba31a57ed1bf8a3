"""Questions of the client to workers."""

from __future__ import annotations

from typing import TypeAlias

from steercap.core.framing import BoundedText, Data, Digest, Label, Large, Whole
from steercap.core.messages.base import EncoderShape, Joining, LineRange, Message, Owner, Placed, Vectors, Wanted


class Attach(Message, frozen=True):
    """First question after start-up: make the arena, and report the armed points.

    Args:
        capture_bytes: maximum size of the arena in bytes.
        spill_folder: folder of the file for rows that leave the arena while their request runs; "" for no such file.
        spill_bytes: maximum size of that file in bytes.
    """

    capture_bytes: Large
    spill_folder: BoundedText = ""
    spill_bytes: Large = 0


class Listen(Message, frozen=True):
    """Open a channel on which questions are answered beside RPCs (`worker.channel`); every rank answers."""


class Configure(Message, frozen=True):
    """Write vectors, then configurations, for requests about to come; every rank writes those of its points."""

    vectors: tuple[Vectors, ...]
    configurations: tuple[Placed, ...]


class GetSteeringRecord(Message, frozen=True):
    """Report the edits made to requests so far; every rank answers.

    Args:
        wanted: owner and number of inputs of each request.
        ended: True for each request that has ended and can be forgotten.
    """

    wanted: tuple[Wanted, ...]
    ended: tuple[bool, ...]


class Engage(Message, frozen=True):
    """Begin steering that was held back, from the first token that is not being computed yet; every rank answers."""

    owners: tuple[Owner, ...]


class Collect(Message, frozen=True):
    """Seal finished requests and report the location of their rows."""

    wanted: tuple[Wanted, ...]


class Unembed(Message, frozen=True):
    """Compute logits of rows of the residual stream.

    Args:
        rows: rows [count, hidden], as bytes.
        count: number of rows.
        dtype: torch name of their dtype.
        tokens: ids of the tokens whose logits are requested; None for all tokens.
        top: number of greatest logits requested.
        normed: True if the final norm has been applied to the rows.
    """

    rows: Data
    count: Whole
    dtype: Label
    tokens: tuple[Whole, ...] | None
    top: Whole = 0
    normed: bool = False


class Project(Message, frozen=True):
    """Apply the last projection of a layer's block to rows of its input.

    Args:
        layer: index of the layer.
        site: site of the rows: a name in `families.base.Family.projections`.
        rows: rows [count, width], of all ranks together, as bytes.
        count: number of rows.
        dtype: torch name of their dtype.
    """

    layer: Whole
    site: Label
    rows: Data
    count: Whole
    dtype: Label


class Choose(Message, frozen=True):
    """Compute the experts that a layer's router chooses from their logits.

    Args:
        layer: index of the layer.
        rows: logits [count, experts], as bytes.
        count: number of rows.
        dtype: torch name of their dtype.
    """

    layer: Whole
    rows: Data
    count: Whole
    dtype: Label


class Read(Message, frozen=True):
    """Send arena lines as bytes, for clients that cannot map the arena.

    Args:
        nonce: nonce of the arena, as in `Attached`; a worker whose arena has another one does not answer.
        lines: the lines.
    """

    nonce: Data
    lines: tuple[LineRange, ...]


class GetStats(Message, frozen=True):
    """Report the resources in use on the worker."""


class OpenSketch(Message, frozen=True):
    """Allocate the statistics of a sketch.

    Args:
        name: name of the sketch.
        kind: a name in `SKETCHES`.
        size: size of the sketch, 0 where its kind has none.
        points: indices into the engine's armed points.
        most_bytes: maximum bytes of all sketches of a worker.
    """

    name: Label
    kind: Label
    size: Whole
    points: tuple[Whole, ...]
    most_bytes: Large


class PrepareSketch(Message, frozen=True):
    """Seal finished requests, and check that their rows can be added to sketches; answered like `Collect`."""

    joining: tuple[Joining, ...]


class CommitSketch(Message, frozen=True):
    """Add the rows that `PrepareSketch` checked to their sketches. Idempotent."""

    joining: tuple[Joining, ...]


class ReadSketch(Message, frozen=True):
    """Send bytes `start` to `stop` of a sketch's tensors at a point, which are stored one after the other."""

    name: Label
    point: Whole
    start: Large
    stop: Large


class CloseSketch(Message, frozen=True):
    """Free a sketch; do nothing if there is none."""

    name: Label


class OpenSAE(Message, frozen=True):
    """Load an SAE's encoder, unless it is here; asked again until it is. Ranks without the point have nothing to do.

    Args:
        digest: see `saes.encoder.Encoder.digest`.
        point: index of the point that it reads, among the engine's armed ones.
        shape: shape of the encoder.
        path: path by which a process of the same machine can open the memory with its weights.
        nonce: first bytes of that memory.
        most_bytes: maximum bytes of all SAEs of a worker.
    """

    digest: Digest
    point: Whole
    shape: EncoderShape
    path: BoundedText
    nonce: Data
    most_bytes: Large


class CloseSAE(Message, frozen=True):
    """Free an SAE once no running request reads with it; do nothing if there is none."""

    digest: Digest
    point: Whole


Question: TypeAlias = (
    Attach
    | Listen
    | Collect
    | Read
    | GetStats
    | Configure
    | GetSteeringRecord
    | Engage
    | Unembed
    | Project
    | Choose
    | OpenSketch
    | PrepareSketch
    | CommitSketch
    | ReadSketch
    | CloseSketch
    | OpenSAE
    | CloseSAE
)


class Call(Message, frozen=True):
    """One RPC: the owners whose rows were released since the last one, then a question."""

    released: tuple[Owner, ...]
    question: Question
