"""Compiled steering and projections: every operation as a sequence of rank-one edits.

One edit is `h <- h + f(u·h + b) w` of a row h, or replaces the row. Legend: blob = bank rows that are sent and kept
together, one vector or the rows of a replacement; scope = positions that one token selection selects.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import inf
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from steercap.core.biases import Bias
from steercap.core.framing import Digest, Whole, WholeOrNone
from steercap.core.tokens import Range, selected

#: Index for none: of an entry without a read vector, a replacement or a norm group.
NONE: Final = -1
#: Element of a replacement that keeps the row's own value, so that one head of several can be replaced. It is the
#: greatest number of float32, which no edited row may hold; finite, since kernels multiply vectors by zero.
HOLE: Final = float(np.finfo(np.float32).max)
#: Maximum number of different `tokens=` of one configuration: each is a bit of a token's int32 mask.
MAX_SCOPES: Final = 31
#: Maximum number of replacements of one configuration: columns of a step's table of replacements.
MAX_REPLACEMENTS: Final = 256


class Response(msgspec.Struct, frozen=True, array_like=True):
    """Response function f: length of a row's step along the write direction w, given its projection p = u·h + bias.

        f(p) = g s (clamp(gain q + offset, low, high) - minus q)
        q = max(p, floor);  g = 0 if p <= threshold and threshold > -inf else 1;  s = ‖h‖ if relative else 1

    One formula covers every operation, so that one kernel runs them all.
    """

    bias: float = 0.0
    gain: float = 0.0
    offset: float = 0.0
    minus: float = 0.0
    low: float = -inf
    high: float = inf
    floor: float = -inf
    threshold: float = -inf
    relative: bool = False

    @property
    def numbers(self) -> tuple[float, ...]:
        """Numeric parameters, in the order of `RESPONSE_NUMBERS`."""
        return tuple(getattr(self, name) for name in RESPONSE_NUMBERS)


#: Names of the columns of the workers' table of responses.
RESPONSE_NUMBERS: Final = ("bias", "gain", "offset", "minus", "low", "high", "floor", "threshold")


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One rank-one edit, or one replacement of rows, at some points and positions.

    Args:
        edit: index of the user's edit from which it was compiled.
        points: indices into the engine's armed points.
        scope: index of its token selection among the scopes of the configuration.
        write: index of the blob with the write vector w, or with the replacement rows.
        read: index of the blob with the read vector u; NONE for a response that needs no projection.
        response: response function f.
        joined: True to project the row from before the preceding entry, as the parts of one low-rank edit do.
        replacement: index among the configuration's replacements; NONE for a rank-one edit.
        norm: number of a group of entries that together preserve a row's norm, which is measured before the group's
            first entry at a point and restored after its last; NONE where the norm may change.
    """

    edit: Whole
    points: tuple[Whole, ...]
    scope: Whole
    write: Whole
    read: WholeOrNone = NONE
    response: Response = Response()
    joined: bool = False
    replacement: WholeOrNone = NONE
    norm: WholeOrNone = NONE


class Blob(msgspec.Struct, frozen=True, array_like=True):
    """Rows of the vector bank that belong together, identified by their content.

    Args:
        digest: digest of the content, see `blob_digest`.
        rows: number of rows.
    """

    digest: Digest
    rows: Whole


def blob_digest(data: bytes, rows: int) -> bytes:
    """Return the SHA-256 of the number of rows and their float32 bytes.

    The number is included since 2 rows of 64 zeros are not 1 row of 128.
    """
    return hashlib.sha256(rows.to_bytes(8, "little") + data).digest()


class Configuration(msgspec.Struct, frozen=True, cache_hash=True):
    """Content of a slot, independent of any prompt: the edits of a spec, or the vectors of an encoding.

    Args:
        entries: entries in the order in which they are applied.
        blobs: the vectors that the entries use.
        scopes: number of different token selections.
        replacements: number of entries that replace rows.
        reads: armed points that an encoding's vectors are for; the one blob has equally many rows for each, in this
            order. () for edits.
        biases: compiled logit biases.
    """

    entries: tuple[Entry, ...]
    blobs: tuple[Blob, ...]
    scopes: Whole
    replacements: Whole
    reads: tuple[Whole, ...] = ()
    biases: tuple[Bias, ...] = ()

    @property
    def digest(self) -> bytes:
        """SHA-256 of all fields; equal configurations share a slot."""
        return hashlib.sha256(_ENCODER.encode(self)).digest()

    @property
    def edits(self) -> int:
        """Number of the user's edits, including logit biases."""
        numbers = [entry.edit for entry in self.entries] + [bias.edit for bias in self.biases]
        return 1 + max(numbers, default=NONE)

    @property
    def rows(self) -> int:
        """Number of bank rows of all blobs."""
        return sum(blob.rows for blob in self.blobs)

    @property
    def bias_bytes(self) -> int:
        """Number of bytes of all logit biases."""
        return sum(len(bias.ids) + len(bias.values) for bias in self.biases)

    def at(self, point: int) -> tuple[Entry, ...]:
        """Return the entries of the point with this armed index, in order."""
        return tuple(entry for entry in self.entries if point in entry.points)


class SteeringPlan(msgspec.Struct, frozen=True):
    """Compiled steering of one request, as the worker reads it.

    Args:
        slot: slot of the request's configuration.
        configuration: digest of the configuration that the slot must have.
        identity: hash of everything besides tokens that the request's KV depends on; see `identity`.
        scopes: position ranges of each scope of edits.
        replaced: positions of each replacement, one for each of its rows, in order.
        biased: position ranges of each scope of logit biases.
        held: True to edit nothing until the client sends `messages.Engage`.
    """

    slot: Whole
    configuration: Digest
    identity: Digest
    scopes: tuple[tuple[Range, ...], ...]
    replaced: tuple[tuple[Whole, ...], ...]
    biased: tuple[tuple[Range, ...], ...] = ()
    held: bool = False

    def since(self, position: int | None) -> SteeringPlan:
        """Return the plan with edits restricted to positions from `position` on; None for no position at all."""
        scopes = tuple(() if position is None else _since(ranges, position) for ranges in self.scopes)
        return msgspec.structs.replace(self, scopes=scopes)


def _since(ranges: Sequence[Range], position: int) -> tuple[Range, ...]:
    """Restrict ranges to positions from `position` on."""
    found = []
    for one in ranges:
        steps = max(0, -(-(position - one.start) // one.step))
        found.append(Range(one.start + steps * one.step, one.stop, one.step))
    return tuple(found)


def identity(
    configuration: bytes,
    scopes: Sequence[Sequence[Range]],
    replaced: Sequence[Sequence[int]],
    epoch: int,
    hashed: str = "",
) -> bytes:
    """Return the SHA-256 of everything besides tokens that the KV of a steered request depends on.

    Resolved positions are part of it: `tokens="prompt"` means other positions for a longer prompt, which may share its
    first blocks with the generated tokens of a shorter one.

    Args:
        configuration: digest of the edits, without logit biases, which affect no KV.
        scopes: position ranges of each scope.
        replaced: positions of each replacement.
        epoch: counter that increases whenever steering fails, so that earlier KV is never reused.
        hashed: key of a request whose steering begins at a position not known yet, whose KV is not shared; else "".
    """
    return hashlib.sha256(_ENCODER.encode((configuration, scopes, replaced, epoch, hashed))).digest()


@lru_cache(maxsize=256)
def scope_masks(scopes: tuple[tuple[Range, ...], ...], limit: int) -> npt.NDArray[np.int32]:
    """Return bit masks of the scopes that select each position: bit `i` of entry `p` for scope `i`, int32 [limit]."""
    masks = np.zeros(limit, dtype=np.int32)
    for bit, ranges in enumerate(scopes):
        masks |= selected(ranges, limit).astype(np.int32) << bit
    masks.flags.writeable = False
    return masks


def rows_touched(configuration: Configuration, points: Iterable[int], masks: npt.NDArray[np.int32]) -> tuple[int, ...]:
    """Count the rows that each of the user's edits changes, over its points among `points`.

    A row counts once for an edit, however many entries it has: parts of a low-rank edit, or heads.

    Args:
        configuration: configuration with the edits.
        points: indices of the points to count at.
        masks: bit masks of the scopes that select each computed token: int32 [tokens].
    """
    tokens = [int(((masks >> scope) & 1).sum()) for scope in range(configuration.scopes)]
    known, rows = set(points), [0] * configuration.edits
    touched = {(entry.edit, point): entry.scope for entry in configuration.entries for point in known & {*entry.points}}
    for (edit, _point), scope in touched.items():  # all entries of an edit have its token selection
        rows[edit] += tokens[scope]
    return tuple(rows)


_ENCODER: Final = msgspec.msgpack.Encoder()
