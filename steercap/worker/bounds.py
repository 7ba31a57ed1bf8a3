"""Validation of the client's calls on this rank: sizes and indices are checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Final

from steercap.core.messages import Configure, Placed, Vectors
from steercap.core.plan import AttentionPlan, CapturePlan, Plan
from steercap.core.program import MAX_REPLACEMENTS, MAX_SCOPES, Configuration
from steercap.core.schema import RAW, REDUCED, Coding
from steercap.core.spec import MOST_TARGETS
from steercap.core.tokens import Range
from steercap.errors import WorkerFailure
from steercap.kernels.codecs import ENCODINGS
from steercap.worker.taps import TapSizes

_FLOAT_BYTES: Final = 4


def check_configure(message: Configure, sizes: TapSizes) -> None:
    """Check that the vectors and steering configurations of a call fit the vector bank, the slots and each other.

    Raises:
        WorkerFailure: they do not fit.
    """
    wrong = chain(
        (reason for vectors in message.vectors for reason in _vectors(vectors, sizes)),
        (reason for placed in message.configurations for reason in _placed(placed, sizes)),
    )
    if reason := next(wrong, None):
        raise WorkerFailure(f"a configuration is not valid: {reason}")


def check_plan(plan: Plan, longest: int) -> None:
    """Check that a request's plan is valid for this model, whose sequences have at most `longest` tokens.

    Raises:
        WorkerFailure: the plan is invalid.
    """
    if reason := next(_plan(plan, longest), None):
        raise WorkerFailure(f"a plan is not valid: {reason}")


def check_vectors(configuration: Configuration, coding: Coding) -> None:
    """Check that a configuration has as many vectors for each point as an encoding of captured rows needs.

    Raises:
        WorkerFailure: the numbers differ.
    """
    found = configuration.rows // max(len(configuration.reads), 1) if configuration.reads else 0
    if found != (wanted := ENCODINGS[coding.encoding].vectors(coding)):
        raise WorkerFailure(f"a plan is not valid: {found} vectors for each point, where {coding} needs {wanted}")


def _vectors(vectors: Vectors, sizes: TapSizes) -> Iterator[str]:
    rows = len(vectors.bank_rows)
    if not rows or max(vectors.bank_rows) >= sizes.bank_rows or len(set(vectors.bank_rows)) < rows:
        yield f"vectors for rows outside the {sizes.bank_rows} of the bank, or twice for one row"
    elif not vectors.data or len(vectors.data) % (rows * _FLOAT_BYTES):
        yield f"{len(vectors.data)} bytes of {rows} vectors"


def _placed(placed: Placed, sizes: TapSizes) -> Iterator[str]:
    if placed.slot >= sizes.slots:
        yield f"slot {placed.slot} of {sizes.slots}"
    wanted = [blob.rows for blob in placed.configuration.blobs]
    if wanted != [len(rows) for rows in placed.bank_rows] or 0 in wanted:
        yield "blobs whose numbers of rows differ from those in the bank"
    if any(row >= sizes.bank_rows for rows in placed.bank_rows for row in rows):
        yield f"rows of the bank beyond its {sizes.bank_rows}"
    yield from _configuration(placed.configuration, sizes)


def _configuration(configuration: Configuration, sizes: TapSizes) -> Iterator[str]:
    if configuration.scopes > MAX_SCOPES or configuration.replacements > MAX_REPLACEMENTS:
        yield f"{configuration.scopes} scopes and {configuration.replacements} replacements"
    blobs, counts = len(configuration.blobs), dict[int, int]()
    for entry in configuration.entries:
        if max(entry.read, entry.write) >= blobs or entry.scope >= configuration.scopes:
            yield "an entry that names a blob or scope that does not exist"
        if entry.replacement >= configuration.replacements:
            yield "an entry that names a replacement that does not exist"
        for point in set(entry.points):
            counts[point] = counts.get(point, 0) + 1
    if counts and max(counts.values()) > sizes.entries:
        yield f"{max(counts.values())} entries at a point that has room for {sizes.entries}"
    if configuration.reads and (blobs != 1 or configuration.blobs[0].rows % len(configuration.reads)):
        yield "points whose vectors are not in one blob with equal counts"
    for bias in configuration.biases:
        if bias.scope >= MAX_SCOPES or not bias.ids or len(bias.ids) % 4 or len(bias.ids) != len(bias.values):
            yield "a bias with unequal numbers of ids and values"


def _plan(plan: Plan, longest: int) -> Iterator[str]:
    if not (plan.prompt_len <= longest and plan.limit <= longest):
        yield f"{plan.limit} tokens, {plan.prompt_len} of them of the prompt, in a context of {longest}"
    if (kept := plan.capture) is not None:
        yield from _stored(kept)
        if not kept.ranges or not any(map(_nonempty, kept.ranges)):
            yield "no token is kept"
        if kept.attention is not None:
            yield from _attention(kept, kept.attention)
        if kept.saes and len(kept.saes) != len(kept.points):
            yield f"{len(kept.saes)} SAEs for {len(kept.points)} points"
    if (steering := plan.steering) is not None:
        if max(len(steering.scopes), len(steering.biased)) > MAX_SCOPES or len(steering.replaced) > MAX_REPLACEMENTS:
            yield "too many scopes or replacements"
        if any(position >= plan.limit for positions in steering.replaced for position in positions):
            yield "a replacement after the end"


def _attention(kept: CapturePlan, plan: AttentionPlan) -> Iterator[str]:
    if kept.coding != RAW or kept.reduce is not None or not 1 <= plan.top <= MOST_TARGETS:
        yield f"attention={plan.top} of rows as {kept.coding}, reduce={kept.reduce}"
    points = [point for _, *pair in plan.layers for point in pair]
    if sorted(points) != sorted(kept.points):
        yield f"attention of points {points}, but points {kept.points} are captured"


def _stored(kept: CapturePlan) -> Iterator[str]:
    coding = kept.coding
    if coding.encoding not in ENCODINGS or not ENCODINGS[coding.encoding].takes(coding) or coding == REDUCED:
        yield f"rows as {coding!r}"
    elif bool(ENCODINGS[coding.encoding].vectors(coding)) != (kept.vectors is not None):
        yield f"{coding} with vectors that it does not take, or without those that it needs"
    if (kept.accumulates and kept.reduce is None) or (kept.reduce is not None and coding != RAW):
        yield f"reduce={kept.reduce} of rows as {coding}"


def _nonempty(positions: Range) -> bool:
    return positions.stop is None or positions.stop > positions.start
