"""A request's capture and steering, compiled for the worker: indices and ranges, nothing left to interpret.

The client compiles it, `SamplingParams.extra_args` carries it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from steercap.core.coding import Coding
from steercap.core.framing import Digest, Label, Whole, framed, read
from steercap.core.program import SteeringPlan
from steercap.core.spec import CaptureSpec, Reduction
from steercap.core.tokens import Range

#: The key of steercap's plan in `SamplingParams.extra_args`.
EXTRA_ARGS_KEY: Final = "steercap"


class InSlot(msgspec.Struct, frozen=True, array_like=True):
    """Vectors that the encoding of a request's rows needs: directions, or a calibration.

    Args:
        slot: where its configuration is, NONE while it has none.
        configuration: digest of what must be there.
    """

    slot: Whole
    configuration: Digest


class CapturePlan(msgspec.Struct, frozen=True):
    """What is kept of a request.

    Args:
        points: indices into the engine's list of armed points, ascending.
        ranges: positions selected.
        reduce: how selected rows become one, or None.
        coding: how the rows of each token are stored.
        before_edits: whether rows are kept as they were before the edits of their point.
        accumulates: whether the reduction runs along with the rows, which are then never kept; otherwise they all are,
            until the client says where the sequence ends.
        vectors: what the encoding needs besides the rows, or None.
        allow_nonfinite: whether rows that are not finite are handed over.
        gather: whether the client joins shards.
        saes: digests of the encoders that read the rows of each point, or ().
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

    def placed(self, slots: Mapping[bytes, int]) -> CapturePlan:
        """The plan with the slot of its vectors, if it has some.

        Args:
            slots: where each configuration is, by its digest.
        """
        if self.vectors is None:
            return self
        slot = slots[self.vectors.configuration]
        return msgspec.structs.replace(self, vectors=msgspec.structs.replace(self.vectors, slot=slot))


class Plan(msgspec.Struct, frozen=True):
    """One request, as the worker reads it.

    Args:
        key: steercap's own name of the request; the children of `n > 1` share it.
        prompt_len: prompt tokens.
        limit: number of positions that can be inputs of the model: prompt + generated - 1 at most.
        samples: `n` of the request: how many children share the key.
        capture: what is kept, or None.
        steering: what is changed, or None.
    """

    key: Label
    prompt_len: Whole
    limit: Whole
    samples: Whole = 1
    capture: CapturePlan | None = None
    steering: SteeringPlan | None = None

    @property
    def reads_prompt(self) -> bool:
        """Whether a row before the last prompt token is kept, which must then be computed and not read from the cache.

        The last prompt token is computed even on a full hit of the prefix cache.
        """
        return self.capture is not None and any(item.start < self.prompt_len - 1 for item in self.capture.ranges)

    def encode(self) -> bytes:
        """The plan as bytes."""
        return framed(_ENCODER.encode(self))

    @staticmethod
    def decode(data: bytes) -> Plan:
        """The plan from bytes.

        Raises:
            InvalidFrame: they are no plan of this version, damaged, or out of bounds.
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
) -> CapturePlan:
    """Compile `spec` for one request.

    Args:
        spec: what the user asks.
        points: indices of its points among the armed, ascending.
        coding: how its rows are stored.
        prompt_len: prompt tokens.
        limit: positions that can be inputs of the model: prompt + generated - 1 at most.
        accumulates: whether a reduction may run along.
        vectors: what its encoding needs besides the rows, or None.

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
    )


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Plan)
