"""What the client asks of workers."""

from __future__ import annotations

from typing import TypeAlias

from steercap.core.framing import Data, Digest, Label, Large, Told, Whole
from steercap.core.messages.base import EncoderShape, Joining, LineRange, Message, Owner, Placed, Vectors, Wanted


class Attach(Message, frozen=True, tag="Attach"):
    """First frame after start-up: make the arena, say what is armed.

    Args:
        capture_bytes: most the arena may take.
    """

    capture_bytes: Large


class Configure(Message, frozen=True, tag="Configure"):
    """Write vectors, then configurations, for requests about to come; every rank does what it can."""

    vectors: tuple[Vectors, ...]
    configurations: tuple[Placed, ...]


class Settle(Message, frozen=True, tag="Settle"):
    """Say what was edited of requests so far; every rank answers.

    Args:
        wanted: whose edits, and how many inputs each sequence has.
        ended: whether each of them has ended, and can be forgotten.
    """

    wanted: tuple[Wanted, ...]
    ended: tuple[bool, ...]


class Engage(Message, frozen=True, tag="Engage"):
    """Let steering begin that was held back, with the first token that is not under way; every rank answers.

    Args:
        owners: whose.
    """

    owners: tuple[Owner, ...]


class Collect(Message, frozen=True, tag="Collect"):
    """Seal finished requests and say where their rows are."""

    wanted: tuple[Wanted, ...]


class Unembed(Message, frozen=True, tag="Unembed"):
    """Say what logits rows of the stream give.

    Args:
        rows: the bytes of [count, hidden].
        count: how many.
        dtype: of the rows, torch's name of it.
        tokens: whose logits are asked for; None for all tokens'.
        top: how many of the greatest are asked for.
        normed: whether the final norm is behind the rows.
    """

    rows: Data
    count: Whole
    dtype: Label
    tokens: tuple[Whole, ...] | None
    top: Whole = 0
    normed: bool = False


class Project(Message, frozen=True, tag="Project"):
    """Say what a block makes of what its last projection reads.

    Args:
        layer: whose.
        site: where the rows are read: a name in `families.base.Family.projections`.
        rows: the bytes of [count, width], of all ranks together.
        count: how many.
        dtype: of the rows, torch's name of it.
    """

    layer: Whole
    site: Label
    rows: Data
    count: Whole
    dtype: Label


class Choose(Message, frozen=True, tag="Choose"):
    """Say which experts a layer's router chooses by their logits.

    Args:
        layer: whose.
        rows: the bytes of [count, experts].
        count: how many.
        dtype: of the rows, torch's name of it.
    """

    layer: Whole
    rows: Data
    count: Whole
    dtype: Label


class Read(Message, frozen=True, tag="Read"):
    """Send lines as bytes, for clients that cannot map the arena."""

    lines: tuple[LineRange, ...]


class Census(Message, frozen=True, tag="Census"):
    """Count what the worker holds."""


class OpenSketch(Message, frozen=True, tag="OpenSketch"):
    """Make room for statistics of rows.

    Args:
        name: of the sketch.
        kind: a name in `SKETCHES`.
        size: of the sketch, 0 where its kind has none.
        points: indices into the engine's armed points.
        most_bytes: what all sketches of a worker may take.
    """

    name: Label
    kind: Label
    size: Whole
    points: tuple[Whole, ...]
    most_bytes: Large


class Weigh(Message, frozen=True, tag="Weigh"):
    """Seal finished requests, and say whether their rows can enter sketches; answered as `Collect` is."""

    joining: tuple[Joining, ...]


class Fold(Message, frozen=True, tag="Fold"):
    """Take the rows of requests that were weighed into their sketches, each once however often it is asked."""

    joining: tuple[Joining, ...]


class ReadSketch(Message, frozen=True, tag="ReadSketch"):
    """Send bytes `start` to `stop` of what a sketch holds of a point, its tensors one after the other."""

    name: Label
    point: Whole
    start: Large
    stop: Large


class CloseSketch(Message, frozen=True, tag="CloseSketch"):
    """Free a sketch; whether there is one does not matter."""

    name: Label


class OpenSAE(Message, frozen=True, tag="OpenSAE"):
    """Load an SAE's encoder, unless it is here; asked again until it is. Ranks without the point have nothing to do.

    Args:
        digest: see `saes.encoder.Encoder.digest`.
        point: index of the point that it reads, among the engine's armed ones.
        shape: of the encoder.
        path: where a process of the same machine can open the memory that holds it.
        nonce: first bytes of that memory.
        most_bytes: what all SAEs of a worker may take.
    """

    digest: Digest
    point: Whole
    shape: EncoderShape
    path: Told
    nonce: Data
    most_bytes: Large


class CloseSAE(Message, frozen=True, tag="CloseSAE"):
    """Free an SAE once no request that runs reads with it; whether there is one does not matter."""

    digest: Digest
    point: Whole


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


class Call(Message, frozen=True, tag="Call"):
    """One RPC: rows given back since the last one, then a question."""

    released: tuple[Owner, ...]
    question: Question
