"""Plan of a request: its capture and steering, compiled to indices and ranges for the worker.

The client compiles it, `SamplingParams.extra_args` carries it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from steercap.core.framing import Digest, Label, Whole, framed, read
from steercap.core.program import SteeringPlan
from steercap.core.schema import ATTENTION, REDUCED, Coding
from steercap.core.spec import CaptureSpec, Reduction
from steercap.core.tokens import Range

#: Key of steercap's plan in `SamplingParams.extra_args`.
EXTRA_ARGS_KEY: Final = "steercap"


class InSlot(msgspec.Struct, frozen=True, array_like=True):
    """Reference to the vectors that the encoding of a request's rows needs: directions, or a calibration.

    Args:
        slot: slot of the configuration with them, NONE until it has one.
        configuration: digest of the configuration that must be in the slot.
    """

    slot: Whole
    configuration: Digest


class AttentionPlan(msgspec.Struct, frozen=True, array_like=True):
    """Summary of attention that leaves the workers in place of queries and keys.

    Args:
        top: number of targets of each head and token.
        layers: for each layer its index, and the indices of its queries and of its keys among the armed points.
    """

    top: Whole
    layers: tuple[tuple[Whole, Whole, Whole], ...]


class CapturePlan(msgspec.Struct, frozen=True):
    """Compiled capture of one request.

    Args:
        points: indices into the engine's list of armed points, ascending.
        ranges: positions selected.
        reduce: reduction of the selected rows to one, or None.
        coding: encoding of the rows of each token.
        before_edits: True to keep rows as they were before the edits of their point.
        accumulates: True if the reduction runs along with the rows, which are then never kept; otherwise all rows are
            kept until the client says where the sequence ends.
        vectors: vectors that the encoding needs, or None.
        allow_nonfinite: True to hand over rows that are not finite.
        gather: True if the client joins shards.
        saes: digests of the encoders that read the rows of each point, or ().
        window: number of records that are in the arena at once, while the others are in the worker's file; 0 where all
            of them are in the arena.
        attention: the summary that is made of the rows, or None.
    """

    points: tuple[Whole, ...]
    ranges: tuple[Range, ...]
    reduce: Reduction | None
    coding: Coding
    before_edits: bool = False
    accumulates: bool = False
    vectors: InSlot | None = None
    allow_nonfinite: bool = False
    gather: bool = True
    saes: tuple[Digest, ...] = ()
    window: Whole = 0
    attention: AttentionPlan | None = None

    @property
    def sent(self) -> Coding:
        """Encoding of the rows as they leave the worker."""
        if self.attention is not None:
            return Coding(ATTENTION, self.attention.top)
        return self.coding if self.reduce is None else REDUCED

    def placed(self, slots: Mapping[bytes, int]) -> CapturePlan:
        """Return the plan with the slot of its vectors filled in, if it has some."""
        if self.vectors is None:
            return self
        slot = slots[self.vectors.configuration]
        return msgspec.structs.replace(self, vectors=msgspec.structs.replace(self.vectors, slot=slot))


class Plan(msgspec.Struct, frozen=True):
    """Compiled request, as the worker reads it.

    Args:
        key: steercap's own name of the request; the children of `n > 1` share it.
        prompt_len: number of prompt tokens.
        limit: number of positions that can be inputs of the model: prompt + generated - 1 at most.
        samples: `n` of the request: number of children that share the key.
        capture: compiled capture, or None.
        steering: compiled steering, or None.
    """

    key: Label
    prompt_len: Whole
    limit: Whole
    samples: Whole = 1
    capture: CapturePlan | None = None
    steering: SteeringPlan | None = None

    @property
    def reads_prompt(self) -> bool:
        """True if a row before the last prompt token is kept, which must be computed and not read from the cache.

        The last prompt token is computed even on a full hit of the prefix cache.
        """
        return self.capture is not None and any(item.start < self.prompt_len - 1 for item in self.capture.ranges)

    def encode(self) -> bytes:
        """Return the plan as a frame."""
        return framed(_ENCODER.encode(self))

    @staticmethod
    def decode(data: bytes) -> Plan:
        """Read a plan from a frame.

        Raises:
            InvalidFrame: not a plan of this version, damaged, or out of bounds.
        """
        found: Plan = read(_DECODER, data, "a plan")
        return found


def compile_capture(
    spec: CaptureSpec,
    points: tuple[int, ...],
    coding: Coding,
    *,
    prompt_len: int,
    limit: int,
    accumulates: bool,
    vectors: InSlot | None = None,
    attention: AttentionPlan | None = None,
) -> CapturePlan:
    """Compile `spec` for one request.

    Args:
        spec: the user's spec.
        points: indices of its points among the armed, ascending.
        coding: encoding of its rows.
        prompt_len: number of prompt tokens.
        limit: number of positions that can be inputs of the model: prompt + generated - 1 at most.
        accumulates: True if a reduction may run along.
        vectors: vectors that its encoding needs, or None.
        attention: the summary that is made of its rows, or None.

    Raises:
        InvalidSelection, EmptySelection: `tokens` does not fit the prompt.
    """
    ranges = spec.selection.ranges(prompt_len, limit)
    accumulates = accumulates and spec.reduce is not None
    return CapturePlan(
        points,
        ranges,
        spec.reduce,
        coding,
        spec.before_edits,
        accumulates,
        vectors,
        spec.allow_nonfinite,
        spec.gather,
        attention=attention,
    )


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Plan)
