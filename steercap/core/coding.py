"""How a request's rows are stored: the encoding's name, and what it leaves open."""

from __future__ import annotations

from typing import Final

import msgspec

from steercap.core.framing import Label, Numbers, Seed


class Coding(msgspec.Struct, frozen=True, array_like=True):
    """An encoding with its parameters.

    Args:
        encoding: its name in `ENCODINGS`.
        k: how many numbers stand for a row, where the encoding leaves that open; 0 elsewhere.
        seed: of the matrix that rows are projected with, where there is one; 0 elsewhere.
    """

    encoding: Label = "raw"
    k: Numbers = 0
    seed: Seed = 0

    def __str__(self) -> str:
        named = [f"{name}={value}" for name, value in (("k", self.k), ("seed", self.seed)) if value]
        return f"{self.encoding}({', '.join(named)})" if named else self.encoding


#: Rows bit for bit, and reductions in float32.
RAW: Final = Coding()
REDUCED: Final = Coding("reduced")
