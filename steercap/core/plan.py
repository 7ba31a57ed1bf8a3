"""A request's capture, compiled for the worker: indices and ranges, nothing left to interpret.

Number 2 in the life of a request: the client compiles it, `SamplingParams.extra_args` carries it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from steercap.core.spec import CaptureSpec, Point, Reduction
from steercap.core.tokens import Range

#: The key of steercap's plan in `SamplingParams.extra_args`.
EXTRA_ARGS_KEY: Final = "steercap"


class CapturePlan(msgspec.Struct, frozen=True):
    """One request's capture, as the worker reads it.

    Args:
        key: steercap's own name of the request; the children of `n > 1` share it.
        points: indices into the engine's list of armed points, ascending.
        ranges: positions selected.
        prompt_len: prompt tokens.
        limit: number of positions that can be inputs of the model.
        reduce: how selected rows become one, or None.
        codec: name of the codec of the parcel.
        samples: `n` of the request: how many children share the key.
    """

    key: str
    points: tuple[int, ...]
    ranges: tuple[Range, ...]
    prompt_len: int
    limit: int
    reduce: Reduction | None
    codec: str
    samples: int

    @property
    def reads_prompt(self) -> bool:
        """Whether a row before the last prompt token is selected, so that it must really be computed.

        The last prompt token is computed even on a full hit of the prefix cache.
        """
        return any(item.start < self.prompt_len - 1 for item in self.ranges)

    def encode(self) -> bytes:
        """The plan as bytes."""
        return _ENCODER.encode(self)

    @staticmethod
    def decode(data: bytes) -> CapturePlan:
        """The plan from bytes."""
        return _DECODER.decode(data)


def compile_capture(
    spec: CaptureSpec,
    *,
    key: str,
    armed: dict[Point, int],
    num_layers: int,
    prompt_len: int,
    limit: int,
    samples: int,
) -> CapturePlan:
    """Compile `spec` for one request.

    Args:
        spec: what the user asks.
        key: steercap's name of the request.
        armed: index of every armed point.
        num_layers: decoder layers of the model.
        prompt_len: prompt tokens.
        limit: positions that can be inputs of the model: prompt + generated - 1 at most.
        samples: `n` of the request.

    Raises:
        InvalidSelection, EmptySelection: `tokens` does not fit the prompt.
    """
    points = tuple(sorted(armed[point] for point in spec.points(num_layers)))
    ranges = spec.selection.ranges(prompt_len, limit)
    return CapturePlan(key, points, ranges, prompt_len, limit, spec.reduce, spec.codec, samples)


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(CapturePlan)
