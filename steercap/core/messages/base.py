"""What frames are made of."""

from __future__ import annotations

import msgspec

from steercap.core.framing import Data, Digest, Label, Large, Whole
from steercap.core.program import Configuration


class Message(msgspec.Struct, frozen=True, tag_field="type"):
    """Root of the frames."""


class Owner(msgspec.Struct, frozen=True, array_like=True):
    """Whose rows: steercap's key of the request and the index of the sample among its `n`."""

    key: Label
    sample: Whole


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """Rows to collect: whose, how many inputs the sequence has, and how many rows the client has already."""

    owner: Owner
    total: Whole
    first: Whole = 0


class Joining(msgspec.Struct, frozen=True, array_like=True):
    """A finished request whose rows shall enter sketches, by their names."""

    wanted: Wanted
    sketches: tuple[Label, ...]


class LineRange(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive lines of the arena."""

    start: Large
    count: Large


class Vectors(msgspec.Struct, frozen=True, array_like=True):
    """Rows for the vector bank.

    Args:
        digest: see `core.program.blob_digest`.
        bank_rows: the row of each.
        data: the float32 bytes.
    """

    digest: Digest
    bank_rows: tuple[Whole, ...]
    data: Data


class TableBytes(msgspec.Struct, frozen=True, array_like=True):
    """What taps take beside the arena, in bytes.

    Args:
        ring: device memory of rows on their way to the arena; 0 on CPU, where rows need no copy.
        ring_in_use: of that, rows of passes that are not copied yet.
        bank: the vector bank.
        accumulators: reductions that run along, and the rows that they hold apart.
        pinned: memory of the host that is locked in place for the device, that of the arena not included.
    """

    ring: Large = 0
    ring_in_use: Large = 0
    bank: Large = 0
    accumulators: Large = 0
    pinned: Large = 0


class Loaded(msgspec.Struct, frozen=True, array_like=True):
    """What decoder layers a rank has loaded.

    Args:
        family: that knows their classes, "" where what they take and give was derived.
        code: their classes, as families name them, and the fingerprint of the code of each one's `forward`.
        candidates: how many families they may be of.
    """

    family: Label = ""
    code: dict[Label, Label] = {}
    candidates: Whole = 1


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

    d_in: Whole
    d_sae: Whole
    k: Whole
    normalisation: Label
    centred: bool
    thresholds: bool
    shifts: bool


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """A configuration, its slot, and the bank rows of each of its blobs."""

    slot: Whole
    configuration: Configuration
    bank_rows: tuple[tuple[Whole, ...], ...]
