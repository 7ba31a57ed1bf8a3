"""The encoding of a request's rows: its name and parameters."""

from __future__ import annotations

from typing import Final

import msgspec

from steercap.core.framing import Label, Numbers, Seed


class Coding(msgspec.Struct, frozen=True, array_like=True):
    """An encoding with its parameters.

    Args:
        encoding: name in `ENCODINGS`.
        k: number of values stored per row, for encodings with that parameter; 0 for others.
        seed: seed of the projection matrix, for encodings that have one; 0 for others.
    """

    encoding: Label = "raw"
    k: Numbers = 0
    seed: Seed = 0

    def __str__(self) -> str:
        named = [f"{name}={value}" for name, value in (("k", self.k), ("seed", self.seed)) if value]
        return f"{self.encoding}({', '.join(named)})" if named else self.encoding


#: Encodings of rows, bit for bit, and of reductions, in float32.
RAW: Final = Coding()
REDUCED: Final = Coding("reduced")
