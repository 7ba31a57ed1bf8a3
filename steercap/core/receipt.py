"""Receipts of captures and steering, and checks of the workers' records against the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from steercap.core.biases import bias_masks, entries_put
from steercap.core.display import brief, layers_by_site
from steercap.core.messages import SteeringRecord, Unknown
from steercap.core.plan import Plan
from steercap.core.program import Configuration, rows_touched, scope_masks
from steercap.core.rows import Ints
from steercap.core.spec import Point, Reduction
from steercap.core.tokens import Range
from steercap.errors import CaptureIncomplete, SteeringNotApplied

#: Ending of error messages: the text is withheld, and what to do.
_WITHHELD: Final = (
    "its text is withheld. Repeat the call: cached keys and values of this one are not reused. If it fails again, "
    "restart the engine and report it"
)


@dataclass(frozen=True)
class SteeringReceipt:
    """Receipt of one request's steering: the edits that the workers report to have made.

    Args:
        rows: number of rows to which each edit was applied, over all its layers, in the order of the spec's edits; a
            row counts even if its value did not change. For a `LogitBias`, the number of positions whose logits were
            biased.
        computed: number of tokens computed for this request.
        cached: number of tokens read from the prefix cache: written by an equally steered request, or by any request
            where no edit reaches a key or value.
        digest: SHA-256 of the compiled edits without the positions of their `tokens=`, in hexadecimal: equal edits have
            equal digests; "" in files of older versions.
    """

    rows: tuple[int, ...]
    computed: int
    cached: int
    digest: str = ""


@dataclass(frozen=True)
class Receipt:
    """Receipt of one request's capture: the rows that the workers report, and how they were checked.

    Args:
        points: captured points, by layer.
        positions: position of every row, int64 [rows].
        token_ids: id of the model's input token at each position, int64 [rows].
        writes: number of rows written, with recomputed rows counted again.
        reduce: name of the reduction applied in the worker, or None.
        steering: receipt of the edits, or None for a request without steering.
        verified: True if rows of layers with exactly this code were compared with transformers' (see
            `steercap models`); False if only the proof at start has checked them. None in files of older versions.
        recomputed: True if the rows were recomputed from the sequence, since the engine that had them died; see
            `SteerModel(restart=)`.
    """

    points: tuple[Point, ...]
    positions: Ints
    token_ids: Ints
    writes: int
    reduce: Reduction | None
    steering: SteeringReceipt | None = None
    verified: bool | None = None
    recomputed: bool = False

    __repr__ = brief

    @property
    def rows(self) -> int:
        """Number of rows captured at each point, before any reduction."""
        return len(self.positions)


def check_labels(request: str, expected: Ints, tokens: Sequence[int], positions: Ints, token_ids: Ints) -> None:
    """Check the labels of captured rows against the positions and tokens that the client knows.

    Args:
        request: name of the request, for error messages.
        expected: positions that must have rows, int64 [rows].
        tokens: prompt and generated token ids, by position.
        positions: positions that the worker recorded, -1 where no row was written: int64 [rows].
        token_ids: token ids that the worker recorded, int64 [rows].

    Raises:
        CaptureIncomplete: a row is missing, or belongs to another position or token.
    """
    if len(positions) != len(expected):
        raise CaptureIncomplete(f"{request}: {len(expected)} rows expected, the worker has {len(positions)}")
    missing = expected[positions != expected]
    if len(missing):
        raise CaptureIncomplete(
            f"{request}: {len(missing)} of {len(expected)} rows were never computed, the first at position {missing[0]}"
        )
    known = np.asarray(tokens, dtype=np.int64)[expected]
    wrong = np.flatnonzero(known != token_ids)
    if len(wrong):
        at = wrong[0]
        raise CaptureIncomplete(
            f"{request}: the row at position {expected[at]} was computed for token {token_ids[at]}, "
            f"but the sequence has token {known[at]} there; {len(wrong)} rows of {len(expected)} are wrong"
        )


def check_points(request: str, expected: Sequence[Point], captured: Sequence[Point]) -> None:
    """Check that the workers captured rows of every requested point.

    Raises:
        CaptureIncomplete: a point is missing.
    """
    there = set(captured)
    if missing := [str(point) for point in expected if point not in there]:
        raise CaptureIncomplete(f"{request}: no worker captured {', '.join(missing)}")


def knowing(records: Sequence[Sequence[object]]) -> tuple[int, ...]:
    """Return the indices of the engines in which a worker has a record of a request; there should be one."""
    return tuple(
        engine for engine, answers in enumerate(records) if any(not isinstance(answer, Unknown) for answer in answers)
    )


def check_edits(
    request: str,
    plan: Plan,
    configuration: Configuration,
    total: int,
    found: Sequence[Sequence[SteeringRecord | Unknown]],
    *,
    points: Sequence[Point] = (),
) -> SteeringReceipt:
    """Check the workers' steering records against the edits that the spec and the tokens require.

    Args:
        request: name of the request, for error messages.
        plan: plan of the request.
        configuration: compiled edits.
        total: number of model inputs of the sequence.
        found: the workers' answers, for each engine.
        points: the armed points, for error messages.

    Returns:
        The receipt of the steering.

    Raises:
        SteeringNotApplied: no engine or several ran the request, or a worker failed, has no record of the request, or
            edited other rows.
    """
    assert plan.steering is not None
    ran = knowing(found)
    if len(ran) > 1:
        raise SteeringNotApplied(
            f"{request}: engines {', '.join(map(str, ran))} all ran this request, and only one should have; {_WITHHELD}"
        )
    records = found[ran[0]] if ran else [answer for answers in found for answer in answers]
    known: list[SteeringRecord] = []
    for worker, record in enumerate(records):
        if isinstance(record, Unknown):
            raise SteeringNotApplied(
                f"{request}: worker {worker} never saw this request, and made none of its edits; {_WITHHELD}"
            )
        if record.failure:
            raise SteeringNotApplied(f"{request}: worker {worker}: {record.failure}; {_WITHHELD}")
        known.append(record)
    if total > plan.limit:
        raise SteeringNotApplied(
            f"{request}: the model read {total} tokens, and edits were planned for {plan.limit} at most; {_WITHHELD}"
        )
    for worker, record in enumerate(known):
        if len(record.computed) != -(-total // 8):
            raise SteeringNotApplied(
                f"{request}: the model read {total} tokens, and worker {worker} reports edits for "
                f"{8 * len(record.computed)} (in eights); {_WITHHELD}"
            )
    # Biases can be large, and would be kept as long as what is remembered.
    rows_expected = _rows_expected.__wrapped__ if configuration.biases else _rows_expected
    expected, computed = rows_expected(configuration, plan.steering.scopes, plan.limit, total, known[0].computed)
    counted = [record.rows for record in known if record.primary]
    touched = tuple(map(sum, zip(*counted, strict=True))) if len({len(rows) for rows in counted}) == 1 else ()
    if touched != expected or len({record.computed for record in known}) > 1:
        raise SteeringNotApplied(f"{request}: {_difference(configuration, expected, touched, points)}; {_WITHHELD}")
    biased = _check_biases(request, plan, configuration, total, known)
    touched = tuple(map(sum, zip(touched, biased, strict=True)))
    digest = plan.steering.configuration.hex()
    return SteeringReceipt(touched, computed, total - computed, digest)


def _difference(
    configuration: Configuration, expected: tuple[int, ...], touched: tuple[int, ...], points: Sequence[Point]
) -> str:
    """Describe the first edit that changed another number of rows than expected."""
    for edit, (wanted, changed) in enumerate(zip(expected, touched, strict=False)):
        if wanted != changed:
            at = sorted({point for entry in configuration.entries if entry.edit == edit for point in entry.points})
            where = f" at {layers_by_site(points[point] for point in at)}" if points else ""
            return (
                f"edit {edit + 1} of {len(expected)}{where} was to change {wanted} rows, over all its layers and "
                f"tokens, and changed {changed}"
            )
    return "the workers differ in which tokens they computed, or in how many edits they know"


@lru_cache(maxsize=256)
def _rows_expected(
    configuration: Configuration, scopes: tuple[tuple[Range, ...], ...], limit: int, total: int, computed: bytes
) -> tuple[tuple[int, ...], int]:
    """Return the number of rows that each edit must have changed, and the number of computed tokens.

    Args:
        configuration: compiled edits.
        scopes: position ranges of each scope.
        limit: maximum number of positions that become model inputs.
        total: number of model inputs of the sequence.
        computed: bit mask of the inputs that the workers computed, as bytes.
    """
    chosen = np.unpackbits(np.frombuffer(computed, dtype=np.uint8))[:total].astype(np.bool_)
    masks = scope_masks(scopes, limit)[:total][chosen]
    everywhere = {point for entry in configuration.entries for point in entry.points}
    return rows_touched(configuration, everywhere, masks), int(chosen.sum())


def _check_biases(
    request: str, plan: Plan, configuration: Configuration, total: int, records: Sequence[SteeringRecord]
) -> tuple[int, ...]:
    """Check that logit biases were added at exactly the required positions and tokens.

    Returns:
        For each edit, the number of positions whose logits it changed; 0 for edits of rows.

    Raises:
        SteeringNotApplied: a worker biased other logits, or no worker computes logits.
    """
    rows = [0] * configuration.edits
    if not configuration.biases or plan.steering is None:
        return tuple(rows)
    masks = bias_masks(plan.steering.biased, plan.prompt_len, plan.limit)[:total]
    expected, entries = np.packbits(masks != 0).tobytes(), entries_put(configuration.biases, masks[masks != 0])
    made = [record for record in records if record.biased is not None]
    for record in made:
        if (record.biased, record.entries) != (expected, entries):
            found = int(np.unpackbits(np.frombuffer(record.biased or b"", dtype=np.uint8))[:total].sum())
            raise SteeringNotApplied(
                f"{request}: {entries} logits at {int((masks != 0).sum())} positions should have been biased, "
                f"and a worker biased {record.entries} at {found}; {_WITHHELD}"
            )
    if not made:
        raise SteeringNotApplied(f"{request}: no worker makes logits, so none were biased; {_WITHHELD}")
    for bias in configuration.biases:
        rows[bias.edit] += int((masks >> bias.scope & 1).sum())
    return tuple(rows)
