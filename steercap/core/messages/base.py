"""Root and shared parts of the messages."""

from __future__ import annotations

import msgspec

from steercap.core.framing import BoundedText, Data, Digest, Label, Large, Whole
from steercap.core.program import Configuration


class Message(msgspec.Struct, frozen=True, tag_field="type", tag=True):
    """Root of the messages, each sent with the name of its class as its type."""


class Owner(msgspec.Struct, frozen=True, array_like=True):
    """Owner of rows: steercap's key of the request, and the index of the sample among its `n`."""

    key: Label
    sample: Whole


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """Rows to collect: their owner, the number of inputs of the sequence, and the number of rows already fetched."""

    owner: Owner
    total: Whole
    first: Whole = 0


class Joining(msgspec.Struct, frozen=True, array_like=True):
    """A finished request whose rows shall be added to sketches, by the sketches' names."""

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
        bank_rows: bank row of each vector.
        data: the float32 bytes.
    """

    digest: Digest
    bank_rows: tuple[Whole, ...]
    data: Data


class TableBytes(msgspec.Struct, frozen=True, array_like=True):
    """Memory of a worker's taps beside the arena, in bytes.

    Args:
        ring: device memory of rows on their way to the arena; 0 on CPU, where rows need no copy.
        ring_in_use: part of the ring with rows of passes that are not copied yet.
        bank: vector bank.
        accumulators: reductions that run along, and the rows that they keep apart.
        pinned: host memory that is locked in place for the device, that of the arena not included.
    """

    ring: Large = 0
    ring_in_use: Large = 0
    bank: Large = 0
    accumulators: Large = 0
    pinned: Large = 0


class Loaded(msgspec.Struct, frozen=True, array_like=True):
    """Decoder layers that a rank has loaded.

    Args:
        family: name of the family that knows their classes, "" where their inputs and outputs were derived.
        code: fingerprint of the code of `forward` of each of their classes, by the name that families use.
        candidates: number of families they may be of.
        refused: where the family was derived, the reason why layers lack a site, by site.
    """

    family: Label = ""
    code: dict[Label, Label] = {}
    candidates: Whole = 1
    refused: dict[Label, BoundedText] = {}


class EncoderShape(msgspec.Struct, frozen=True, array_like=True):
    """Shape and options of an SAE's encoder, without its weights; see `saes.encoder.Encoder`.

    Args:
        d_in: number of elements of a row.
        d_sae: number of features.
        k: maximum number of active features of a row, 0 for any number.
        normalisation: name of the normalisation applied to a row first.
        centred: True if the row's mean is subtracted before that.
        thresholds, shifts: True if the encoder has these.
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
