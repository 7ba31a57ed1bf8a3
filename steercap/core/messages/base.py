"""Base class and shared parts of the messages between client and workers."""

from __future__ import annotations

import msgspec

from steercap.core.framing import BoundedText, Data, Digest, Label, Large, Whole
from steercap.core.program import Configuration


class Message(msgspec.Struct, frozen=True, tag_field="type", tag=True):
    """Base class of the messages; each is sent with its class name in the field "type"."""


class Owner(msgspec.Struct, frozen=True, array_like=True):
    """Owner of rows: steercap's key of the request, and the sample's index among the request's `n`."""

    key: Label
    sample: Whole


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """Rows to collect: owner, number of model inputs of the sequence (`total`), number of rows already fetched."""

    owner: Owner
    total: Whole
    first: Whole = 0


class Joining(msgspec.Struct, frozen=True, array_like=True):
    """A finished request and the names of the sketches to which its rows are to be added."""

    wanted: Wanted
    sketches: tuple[Label, ...]


class LineRange(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive lines of the arena: index of the first, and number."""

    start: Large
    count: Large


class Vectors(msgspec.Struct, frozen=True, array_like=True):
    """Float32 vectors to write into rows of the vector bank.

    Args:
        digest: digest of `data`, see `core.program.blob_digest`.
        bank_rows: index of the bank row of each vector.
        data: float32 [vectors, width], as bytes.
    """

    digest: Digest
    bank_rows: tuple[Whole, ...]
    data: Data


class TableBytes(msgspec.Struct, frozen=True, array_like=True):
    """Memory of a worker's taps besides the arena, in bytes.

    Args:
        ring: device memory of the ring buffer for rows on their way to the arena; 0 on CPU.
        ring_in_use: part of the ring with rows that are not copied yet.
        bank: vector bank.
        accumulators: reductions that are updated in each pass, with the rows that they keep apart.
        pinned: pinned host memory, without the arena's.
    """

    ring: Large = 0
    ring_in_use: Large = 0
    bank: Large = 0
    accumulators: Large = 0
    pinned: Large = 0


class Loaded(msgspec.Struct, frozen=True, array_like=True):
    """Decoder layers that a rank has loaded, and their `Family`: where in such a layer the sites are.

    Args:
        family: name of the family; "" if no known one fits, and the sites were derived from the layers' modules.
        code: fingerprint of the code of `forward` by class of the layers, such as "llama.LlamaDecoderLayer".
        candidates: number of families that fit the layers; the proof at start tries one after the other.
        refused: reason why layers lack a site, by site: it was not derived, or the final norm runs with the logits.
    """

    family: Label = ""
    code: dict[Label, Label] = {}
    candidates: Whole = 1
    refused: dict[Label, BoundedText] = {}


class EncoderShape(msgspec.Struct, frozen=True, array_like=True):
    """Shape and options of an SAE's encoder, without weights; see `saes.encoder.Encoder`.

    Args:
        d_in: number of elements of a row.
        d_sae: number of features.
        k: number of greatest pre-activations kept per row, 0 for all.
        normalisation: name of the normalisation applied to a row first.
        centred: True if a row's mean is subtracted before normalisation.
        thresholds, shifts: True if the encoder has these tensors.
    """

    d_in: Whole
    d_sae: Whole
    k: Whole
    normalisation: Label
    centred: bool
    thresholds: bool
    shifts: bool


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """A steering configuration, its slot, and the bank rows of the vectors of each of its blobs."""

    slot: Whole
    configuration: Configuration
    bank_rows: tuple[tuple[Whole, ...], ...]
