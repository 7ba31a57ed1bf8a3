"""Capturing workers (ranks) of an engine: their points and memory, and the memory that a request takes there."""

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
    """A worker that captures rows.

    Args:
        index: index among the capturing workers of its engine.
        attached: the worker's answer to `Attach`: its points, page size and limits.
        reader: reader of the worker's arena, in lines of 64 bytes.
        engine: index of its engine.
    """

    index: int
    attached: Attached
    reader: LineReader
    engine: int = 0

    @cached_property
    def schemas(self) -> dict[int, PointSchema]:
        """Schemas (shape, dtype, shards) of this worker's points, by index among the engine's armed points."""
        return dict(zip(self.attached.points, self.attached.schemas, strict=True))

    @property
    def page(self) -> PageShape:
        """Page shape of this worker's arena."""
        return PageShape(self.attached.page_lines)

    def schemas_in(self, captured_rows: CapturedRows) -> list[PointSchema]:
        """Return the schemas of `captured_rows.points`, in their order."""
        return [self.schemas[point] for point in captured_rows.points]

    def invalid_reason(self, captured_rows: CapturedRows) -> str | None:
        """Return why an answer cannot describe this worker's rows, or None; checked before memory is allocated.

        Positions and token ids are compared with the request's later, by the caller that takes the rows.
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
        """Return the schemas of those point indices in `points` that this worker captures, in their order."""
        return [self.schemas[point] for point in points if point in self.schemas]

    def pages(self, plan: CapturePlan, rows: int) -> int:
        """Return the arena pages that `rows` rows of a plan, or with `reduce=` their accumulator, take here."""
        schemas = self.kept(plan.points)
        if not schemas:
            return 0
        if plan.accumulates:
            records = accumulator_records(schemas, self.attached.held) if rows else 0
            return self.page.pages(records, record_of(schemas).lines)
        return self.page.pages(rows, self._record_lines(plan.points, plan.coding))

    def file_bytes(self, plan: CapturePlan, rows: int) -> int:
        """Return the maximum bytes that `rows` rows of a plan take in this worker's spill file, in whole blocks."""
        lines = self._record_lines(plan.points, plan.coding) if self.kept(plan.points) else 0
        return -(-rows * lines * LINE_BYTES // BLOCK_BYTES) * BLOCK_BYTES

    @cached_property
    def _record_lines(self) -> Callable[[tuple[int, ...], Coding], int]:
        """Cached function (point indices, coding) -> arena lines of one row's record on this worker."""
        return lru_cache(maxsize=256)(lambda points, coding: record_of(self.kept(points), coding).lines)


def attention_of(ranks: Sequence[Rank]) -> dict[int, AttentionRule]:
    """Return each layer's rule for attention weights, joined over the tensor-parallel shards of one engine."""
    parts: dict[int, list[AttentionRule]] = {}
    for rank in sorted(ranks, key=lambda rank: rank.attached.shard):
        for layer, rule in rank.attached.attention.items():
            parts.setdefault(layer, []).append(rule)
    return {layer: joined(rules) for layer, rules in sorted(parts.items())}


def loaded_of(engines: Sequence[Sequence[Rank]]) -> Loaded:
    """Join the reports of all workers of all engines on the decoder layers that they loaded.

    Raises:
        WorkerFailure: workers report different families.
    """
    each = [rank.attached.loaded for ranks in engines for rank in ranks]
    if len({one.family for one in each}) > 1:
        raise WorkerFailure(f"workers have loaded layers of different families: {', '.join(map(str, each))}")
    refused = {site: reason for one in reversed(each) for site, reason in one.refused.items()}
    code = same_code(one.code for one in each)
    return Loaded(each[0].family, code, max(one.candidates for one in each), refused)


#: Capturing workers: a sequence per engine.
Ranks: TypeAlias = Sequence[Sequence[Rank]]
