"""Messages by which the client asks workers to do or report something."""

from __future__ import annotations

from typing import TypeAlias

from steercap.core.framing import BoundedText, Data, Digest, Label, Large, Whole
from steercap.core.messages.base import EncoderShape, Joining, LineRange, Message, Owner, Placed, Vectors, Wanted


class Attach(Message, frozen=True):
    """First question after start-up: allocate the arena, and report the armed points.

    Args:
        capture_bytes: maximum size of the arena in bytes.
        spill_folder: folder of the file for rows that leave the arena while their request runs; "" for no such file.
        spill_bytes: maximum size of that file in bytes.
    """

    capture_bytes: Large
    spill_folder: BoundedText = ""
    spill_bytes: Large = 0


class Listen(Message, frozen=True):
    """Open a socket on which questions are answered without RPCs (`worker.channel`); every rank answers."""


class Configure(Message, frozen=True):
    """Write vectors, then steering configurations, for coming requests; every rank writes those of its points."""

    vectors: tuple[Vectors, ...]
    configurations: tuple[Placed, ...]


class GetSteeringRecord(Message, frozen=True):
    """Report the edits made to requests so far; every rank answers.

    Args:
        wanted: owner and number of model inputs of each request.
        ended: for each of `wanted`, True if the request has ended and its record can be dropped.
    """

    wanted: tuple[Wanted, ...]
    ended: tuple[bool, ...]


class Engage(Message, frozen=True):
    """Start the held-back steering of requests from the next position not yet being computed; every rank answers."""

    owners: tuple[Owner, ...]


class Collect(Message, frozen=True):
    """Seal finished requests, so that no row is added any more, and report the location of their rows."""

    wanted: tuple[Wanted, ...]


class Unembed(Message, frozen=True):
    """Compute logits of residual stream rows by the model's final norm and head.

    Args:
        rows: rows [count, hidden] of `dtype`, as bytes.
        count: number of rows.
        dtype: torch name of the rows' dtype, such as "bfloat16".
        tokens: ids of the tokens whose logits are requested; None for all tokens.
        top: number of greatest logits to return for each row.
        normed: True if the final norm has been applied to the rows.
    """

    rows: Data
    count: Whole
    dtype: Label
    tokens: tuple[Whole, ...] | None
    top: Whole = 0
    normed: bool = False


class Project(Message, frozen=True):
    """Apply the output projection of a layer's block, or the norm of a sum (`Family.norms`), to rows of its input.

    Args:
        layer: layer index.
        site: "z" or "neurons" for the projection that reads that site; "resid_mid" or "mlp_out" for a norm.
        rows: rows [count, width] of `dtype`, width over all ranks, as bytes.
        count: number of rows.
        dtype: torch name of the rows' dtype.
    """

    layer: Whole
    site: Label
    rows: Data
    count: Whole
    dtype: Label


class Choose(Message, frozen=True):
    """Compute the experts that a layer's router chooses for given logits.

    Args:
        layer: layer index.
        rows: router logits [count, experts] of `dtype`, as bytes.
        count: number of rows.
        dtype: torch name of the logits' dtype.
    """

    layer: Whole
    rows: Data
    count: Whole
    dtype: Label


class Read(Message, frozen=True):
    """Return the bytes of arena lines, for clients that cannot map the arena.

    Args:
        nonce: nonce of the arena, as in `Attached`; a worker whose arena has another one answers NotCapturing.
        lines: the lines.
    """

    nonce: Data
    lines: tuple[LineRange, ...]


class GetStats(Message, frozen=True):
    """Report the resources in use on the worker."""


class OpenSketch(Message, frozen=True):
    """Allocate the statistics of a sketch at some points.

    Args:
        name: name of the sketch.
        kind: kind of sketch, a name in `kernels.sketches.SKETCHES`.
        size: size of the sketch, as the kind defines it; 0 for kinds without.
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
    """Add the rows that `PrepareSketch` has checked to their sketches. Idempotent."""

    joining: tuple[Joining, ...]


class ReadSketch(Message, frozen=True):
    """Return bytes `start` to `stop` of a sketch's tensors at one point, concatenated."""

    name: Label
    point: Whole
    start: Large
    stop: Large


class CloseSketch(Message, frozen=True):
    """Free a sketch by name; no error if it does not exist."""

    name: Label


class OpenSAE(Message, frozen=True):
    """Load an SAE's encoder from shared memory in the background; repeated until it is loaded.

    Args:
        digest: digest of the encoder, `saes.encoder.Encoder.digest`.
        point: index, among the engine's armed points, of the point that it reads; ranks without it load nothing.
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
    """Free an SAE's encoder once no running request reads with it; no error if it is not loaded."""

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
    """One RPC: the owners whose rows were released since the last RPC, and a question."""

    released: tuple[Owner, ...]
    question: Question
