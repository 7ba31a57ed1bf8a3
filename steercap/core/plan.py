"""Plan of a request: its capture and steering, compiled to point indices and position ranges for the workers.

The client compiles it; vLLM passes it to the workers in `SamplingParams.extra_args`.
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
    """Reference to a configuration in a worker's slot, whose vectors an encoding needs: directions or a calibration.

    Args:
        slot: index of the slot; a placeholder until `CapturePlan.placed` fills it in.
        configuration: digest of the configuration that the slot must have.
    """

    slot: Whole
    configuration: Digest


class AttentionPlan(msgspec.Struct, frozen=True, array_like=True):
    """Summary of attention weights that workers send in place of queries and keys.

    Args:
        top: number of most attended positions kept for each head and token.
        layers: (layer index, armed index of its queries, armed index of its keys) for each layer.
    """

    top: Whole
    layers: tuple[tuple[Whole, Whole, Whole], ...]


class CapturePlan(msgspec.Struct, frozen=True):
    """Compiled capture of one request, as the workers read it.

    Args:
        points: indices into the engine's list of armed points, ascending.
        ranges: ranges of selected positions.
        reduce: reduction of the selected rows to one per point, or None.
        coding: encoding of each position's rows.
        before_edits: True to keep rows from before the edits at their point.
        accumulates: True to update the reduction in each pass, without keeping rows; False to keep all rows until the
            client reports the sequence's end.
        vectors: reference to vectors that the encoding needs, or None.
        allow_nonfinite: True to return rows with NaN or infinity.
        gather: True if the client concatenates the parts of rows that are split over ranks.
        saes: digest of the SAE encoder that reads each point's rows; () for none.
        window: number of records in the arena at a time, while the others are in the worker's file; 0 if all are in the
            arena.
        attention: summary of attention to compute from the rows, or None.
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
        """Encoding in which rows leave the worker."""
        if self.attention is not None:
            return Coding(ATTENTION, self.attention.top)
        return self.coding if self.reduce is None else REDUCED

    def placed(self, slots: Mapping[bytes, int]) -> CapturePlan:
        """Return the plan with its vectors' slot filled in, given the slot of each configuration by digest."""
        if self.vectors is None:
            return self
        slot = slots[self.vectors.configuration]
        return msgspec.structs.replace(self, vectors=msgspec.structs.replace(self.vectors, slot=slot))


class Plan(msgspec.Struct, frozen=True):
    """Compiled request, as the workers read it.

    Args:
        key: steercap's key of the request, shared by the samples of `n > 1`.
        prompt_len: number of prompt tokens.
        limit: maximum number of positions that become model inputs: prompt + generated - 1.
        samples: number of samples of the request, `n`.
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
        """True if a row before the last prompt token is captured, which the prefix cache would leave out.

        The last prompt token is computed even on a full hit of the prefix cache.
        """
        return self.capture is not None and any(item.start < self.prompt_len - 1 for item in self.capture.ranges)

    def encode(self) -> bytes:
        """Encode the plan as a frame."""
        return framed(_ENCODER.encode(self))

    @staticmethod
    def decode(data: bytes) -> Plan:
        """Decode a plan from a frame.

        Raises:
            InvalidFrame: the frame is no plan, of another version, damaged, or has a value out of bounds.
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
    """Compile a capture spec for one request.

    Args:
        spec: the user's spec.
        points: the spec's points, as indices into the armed points, ascending.
        coding: encoding of the rows.
        prompt_len: number of prompt tokens.
        limit: maximum number of positions that become model inputs: prompt + generated - 1.
        accumulates: True if a reduction may be updated in each pass.
        vectors: reference to vectors that the encoding needs, or None.
        attention: summary of attention to compute from the rows, or None.

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
