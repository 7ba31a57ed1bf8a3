"""A runtime without a model, whose rows say whose they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from workers import assemble, batch, device_of, some_runtime, tap

from steercap.core.messages import (
    Attach,
    Attached,
    Call,
    CapturedRows,
    Collect,
    Collected,
    Owner,
    Wanted,
    decode_answer,
    encode,
)
from steercap.core.plan import CapturePlan, Plan
from steercap.core.schema import RAW
from steercap.core.spec import Reduction
from steercap.core.tokens import Range
from steercap.kernels.codecs import dtype_of
from steercap.worker.memory import open_reader

WIDTH, POINTS = 8, 3


class Bench:
    """A runtime, and a stream of rows whose values say whose they are: request × 1000 + position + point / 10."""

    kind = "host"
    width = WIDTH

    def __init__(
        self,
        capture_bytes: int = 1 << 20,
        dtype: torch.dtype = torch.float32,
        tokens: int = 1024,
        device_ring_bytes: int = 1 << 20,
        width: int = WIDTH,
    ) -> None:
        self.width = width
        self.runtime = some_runtime(self.kind, POINTS, width, dtype, tokens=tokens, device_ring_bytes=device_ring_bytes)
        self.attached = self.ask(Attach(capture_bytes))
        assert isinstance(self.attached, Attached)
        self.reader = open_reader(self.attached, "shared", self.no_wire)

    @staticmethod
    async def no_wire(_ranges: object) -> bytes:
        raise AssertionError

    def ask(self, question: Any, released: tuple[Owner, ...] = ()) -> Any:
        return decode_answer(self.runtime.answer(encode(Call(released, question))))

    def plan(
        self,
        key: str,
        points: Sequence[int] = (0, 1, 2),
        ranges: Sequence[Range] = (Range(0, None),),
        limit: int = 100,
        reduce: Reduction | None = None,
        *,
        accumulates: bool = False,
        prompt: int = 10,
    ) -> None:
        capture = CapturePlan(tuple(points), tuple(ranges), reduce, RAW, accumulates=accumulates)
        plan = Plan(key, prompt, limit, capture=capture)
        self.runtime.register(key, plan.encode(), 0)

    def step(
        self, *parts: tuple[str, int, int], padding: int = 0, skip_point: int | None = None, scale: float = 1.0
    ) -> None:
        """Run one pass over (request, first position, tokens) parts; rows are multiplied by `scale`."""
        names = [name for name, _, _ in parts]
        positions = np.concatenate([np.arange(start, start + count) for _, start, count in parts])
        owner = np.concatenate([np.full(count, float(name[1:])) for name, _, count in parts])
        starts, counts = [start for _, start, _ in parts], [count for _, _, count in parts]
        self.runtime.begin_step(batch(self.kind, names, starts, counts, positions + 7, positions))
        base = torch.from_numpy(owner * 1000 + positions)
        for point in range(POINTS):
            if point == skip_point:
                continue
            rows = torch.zeros(len(base) + padding, self.width, dtype=dtype_of(self.runtime.taps.schemas[0]))
            rows[: len(base)] = (base[:, None] / 2 * scale).to(rows.dtype)
            residual = (rows + (point / 10 if point else 0) * (rows != 0)).to(rows.dtype)
            device = device_of(self.kind)
            tap(self.runtime, rows.to(device), residual.to(device), point)
        self.runtime.end_step()

    async def rows(self, key: str, total: int, first: int = 0) -> tuple[CapturedRows, torch.Tensor]:
        answer = self.ask(Collect((Wanted(Owner(key, 0), total, first),)))
        assert isinstance(answer, Collected)
        (captured_rows,) = answer.shares
        assert isinstance(captured_rows, CapturedRows)
        schemas = self.runtime.taps.layouts.schemas(captured_rows.points)
        rows = assemble(captured_rows, schemas, await self.reader.read(captured_rows.lines))
        return captured_rows, torch.stack([one for one in rows if isinstance(one, torch.Tensor)])


def expected(request: int, positions: Iterable[int], point: int) -> torch.Tensor:
    base = torch.tensor([request * 1000.0 + p for p in positions])
    return (base + (point / 10 if point else 0))[:, None].expand(-1, WIDTH)
