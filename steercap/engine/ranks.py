"""Capturing workers of an engine: their points and memory, and the memory that a request takes there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, TypeAlias

from steercap.architectures.families.proved import same_code
from steercap.core.attention import AttentionRule, joined
from steercap.core.messages import Attached, CapturedRows, Loaded
from steercap.core.plan import CapturePlan
from steercap.core.rows import PageShape
from steercap.core.schema import LINE_BYTES, Coding, PointSchema
from steercap.errors import WorkerFailure
from steercap.files.spill import BLOCK_BYTES
from steercap.kernels.codecs import ENCODINGS, record_of
from steercap.kernels.codecs.floats import accumulator_records
from steercap.worker.memory import LineReader

#: Bytes of a position or a token id.
_LABEL_BYTES: Final = 8


@dataclass(frozen=True)
class Rank:
    """A capturing worker.

    Args:
        index: index among the capturing workers of its engine.
        attached: its answer to Attach.
        reader: reader of its arena lines.
        engine: index of its engine.
    """

    index: int
    attached: Attached
    reader: LineReader
    engine: int = 0

    @cached_property
    def schemas(self) -> dict[int, PointSchema]:
        """Schemas of the points that it keeps, by their indices among the engine's armed points."""
        return dict(zip(self.attached.points, self.attached.schemas, strict=True))

    @property
    def page(self) -> PageShape:
        """Page shape of its arena."""
        return PageShape(self.attached.page_lines)

    def of(self, captured_rows: CapturedRows) -> list[PointSchema]:
        """Return the schemas of the points of captured rows."""
        return [self.schemas[point] for point in captured_rows.points]

    def damage(self, captured_rows: CapturedRows) -> str | None:
        """Return the reason why captured rows cannot be this worker's, or None; checked before memory is allocated.

        The caller that takes the rows compares their positions and token ids with those of the request.
        """
        if unknown := [point for point in captured_rows.points if point not in self.schemas]:
            return f"rows of points {unknown} came, which the worker does not capture"
        encoding = ENCODINGS.get(captured_rows.coding.encoding)
        if encoding is None or not encoding.takes(captured_rows.coding):
            return f"rows came as {captured_rows.coding!r}, which is not an encoding"
        if len(captured_rows.positions) != len(captured_rows.token_ids) or len(captured_rows.positions) % _LABEL_BYTES:
            positions, tokens = len(captured_rows.positions), len(captured_rows.token_ids)
            return f"rows came with {positions} bytes of positions, {tokens} of tokens"
        lines = max(self.attached.pages * self.attached.page_lines, self.attached.file_lines)
        if (captured_rows.points and captured_rows.stored_rows > lines) or sum(
            one.count for one in captured_rows.lines
        ) > lines:
            return f"the worker names more lines than its limit of {lines:,}"
        return None

    def kept(self, points: Sequence[int]) -> list[PointSchema]:
        """Return the schemas of those of `points` that this worker keeps."""
        return [self.schemas[point] for point in points if point in self.schemas]

    def pages(self, plan: CapturePlan, rows: int) -> int:
        """Return the pages of this worker's arena that `rows` rows of a plan take, or the running reduction of them."""
        schemas = self.kept(plan.points)
        if not schemas:
            return 0
        if plan.accumulates:
            records = accumulator_records(schemas, self.attached.held) if rows else 0
            return self.page.pages(records, record_of(schemas).lines)
        return self.page.pages(rows, self._record_lines(plan.points, plan.coding))

    def file_bytes(self, plan: CapturePlan, rows: int) -> int:
        """Return the most bytes that `rows` rows of a plan take in its file."""
        lines = self._record_lines(plan.points, plan.coding) if self.kept(plan.points) else 0
        return -(-rows * lines * LINE_BYTES // BLOCK_BYTES) * BLOCK_BYTES

    @cached_property
    def _record_lines(self) -> Callable[[tuple[int, ...], Coding], int]:
        """Function that returns the arena lines of a record of points; requests mostly keep what others keep too."""
        return lru_cache(maxsize=256)(lambda points, coding: record_of(self.kept(points), coding).lines)


def attention_of(ranks: Sequence[Rank]) -> dict[int, AttentionRule]:
    """Return the attention rule of each layer, joined over the workers of one engine."""
    parts: dict[int, list[AttentionRule]] = {}
    for rank in sorted(ranks, key=lambda rank: rank.attached.shard):
        for layer, rule in rank.attached.attention.items():
            parts.setdefault(layer, []).append(rule)
    return {layer: joined(rules) for layer, rules in sorted(parts.items())}


def loaded_of(engines: Sequence[Sequence[Rank]]) -> Loaded:
    """Join the reports on decoder layers of all ranks of all engines.

    Raises:
        WorkerFailure: they are of different families.
    """
    each = [rank.attached.loaded for ranks in engines for rank in ranks]
    if len({one.family for one in each}) > 1:
        raise WorkerFailure(f"workers have loaded layers of different families: {', '.join(map(str, each))}")
    refused = {site: reason for one in reversed(each) for site, reason in one.refused.items()}
    code = same_code(one.code for one in each)
    return Loaded(each[0].family, code, max(one.candidates for one in each), refused)


#: Workers that capture, engine by engine.
Ranks: TypeAlias = Sequence[Sequence[Rank]]
