"""Sketches on this rank: statistics of the captured rows of finished requests, updated on the model's device.

A request is added in two steps, since it must be added on every rank or on none. First it is prepared: its rows are
checked, and room for the sum of their squares is reserved. Then it is committed, which cannot fail for any value of
the rows. A prepared request is remembered until it is released, so that it is committed only once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from steercap.core.messages import (
    Answer,
    CloseSketch,
    CommitSketch,
    Joining,
    OpenSketch,
    Owner,
    ReadSketch,
    SketchCommitted,
    SketchOpened,
    SketchPart,
)
from steercap.errors import WorkerFailure
from steercap.kernels.sketches import SKETCHES, Kind, SketchState, squares_of
from steercap.worker.arena import Layouts
from steercap.worker.capture_buffer import ArenaBuffer


@dataclass(frozen=True)
class PreparedRows:
    """Rows of a request that were checked for a sketch and are not added yet.

    Args:
        capture_buffer: buffer that holds the rows.
        rows: number of rows.
        squares: sum of the squares of all elements of the rows, by the index of the point.
    """

    capture_buffer: ArenaBuffer
    rows: int
    squares: Mapping[int, float]


@dataclass
class RankSketch:
    """One sketch on this rank, with the requests that were prepared for it or added to it.

    Args:
        kind: kind of the sketch.
        states: state of each point, by its index among the engine's armed points.
        prepared: requests that were prepared and not committed yet.
        committed: number of rows of each request that was committed, until it is released.
    """

    kind: Kind
    states: dict[int, SketchState]
    prepared: dict[Owner, PreparedRows] = field(default_factory=dict)
    committed: dict[Owner, int] = field(default_factory=dict)

    def knows(self, owner: Owner) -> bool:
        """Return whether a request was prepared and not released since."""
        return owner in self.prepared or owner in self.committed

    def refusal(self, squares: Mapping[int, float]) -> str | None:
        """Return the reason why rows cannot be added on top of all prepared rows; None if they can.

        Args:
            squares: sum of the squares of the rows' elements, by the index of their point.
        """
        for point, state in self.states.items():
            promised = sum(other.squares[point] for other in self.prepared.values())
            if reason := self.kind.refusal(state.squares + promised + squares[point]):
                return reason
        return None

    def add_rows(self, block: Mapping[int, torch.Tensor]) -> None:
        """Add a block of rows to the state of each point: float32 [rows, width] by the index of the point."""
        for point, state in self.states.items():
            self.kind.add_rows(state, block[point])

    def mark_committed(self, owner: Owner) -> None:
        """Record that all rows of a prepared request were added, and count the squares of its rows."""
        prepared = self.prepared.pop(owner)
        self.committed[owner] = prepared.rows
        for point, state in self.states.items():
            state.squares += prepared.squares[point]


class Sketches:
    """Summaries of many requests' rows, such as covariances, that this rank keeps for the client by name.

    Args:
        layouts: record layouts of this rank, which know the points that it keeps.
        device: device of the model and of the sketches.
    """

    def __init__(self, layouts: Layouts, device: torch.device) -> None:
        self._layouts = layouts
        self._device = device
        self._sketches: dict[str, RankSketch] = {}

    def __len__(self) -> int:
        return len(self._sketches)

    @property
    def nbytes(self) -> int:
        """Bytes of all sketches."""
        return sum(state.nbytes for sketch in self._sketches.values() for state in sketch.states.values())

    def answer(self, question: OpenSketch | CommitSketch | ReadSketch | CloseSketch) -> Answer:
        """Answer a call of the client: create, commit to, read or close a sketch.

        Raises:
            WorkerFailure, UnknownName: there is no such sketch, or no such kind.
        """
        match question:
            case OpenSketch():
                return SketchOpened(self.open(question))
            case CommitSketch(joining):
                return SketchCommitted(tuple(map(self.commit, joining)))
            case ReadSketch():
                return self.read(question)
            case CloseSketch(name):
                self._sketches.pop(name, None)
                return SketchOpened("")

    def open(self, message: OpenSketch) -> str:
        """Create a sketch unless one of this name exists; return the reason why it cannot be created, or ""."""
        if message.name in self._sketches:
            return ""
        kind, points = SKETCHES[message.kind], self._layouts.points(message.points)
        widths = [schema.shard_width for schema in self._layouts.schemas(points)]
        wanted = sum(kind.nbytes(width, message.size) for width in widths)
        if self.nbytes + wanted > message.most_bytes:
            used = f"{self.nbytes:,} of them in use"
            return f"it needs {wanted:,} bytes, and sketches may use {message.most_bytes:,}, {used}"
        try:
            states = [kind.empty(width, message.size, self._device) for width in widths]
        except torch.OutOfMemoryError:
            return f"it needs {wanted:,} bytes, more than the device has left"
        self._sketches[message.name] = RankSketch(kind, dict(zip(points, states, strict=True)))
        return ""

    def prepare(self, joining: Joining, capture_buffer: ArenaBuffer) -> str | None:
        """Check a request's rows for sketches and reserve room; return a reason to refuse them, or None. Idempotent."""
        owner = joining.wanted.owner
        if missing := [name for name in joining.sketches if name not in self._sketches]:
            return f"there is no sketch {missing[0]} here"
        sketches = [sketch for name in joining.sketches if not (sketch := self._sketches[name]).knows(owner)]
        points = sorted({point for sketch in sketches for point in sketch.states})
        rows = capture_buffer.selected(joining.wanted.total)
        squares = torch.zeros(len(points), dtype=torch.float64, device=self._device)
        for block in capture_buffer.blocks(rows):
            squares += torch.stack([squares_of(block[point]) for point in points]) if points else 0
        prepared = dict(zip(points, squares.tolist(), strict=True))
        for sketch in sketches:
            if reason := sketch.refusal(prepared):
                return f"its rows cannot be taken into a sketch: {reason}"
        for sketch in sketches:
            sketch.prepared[owner] = PreparedRows(capture_buffer, rows, prepared)
        return None

    def commit(self, joining: Joining) -> int:
        """Add the rows of a prepared request to its sketches, once; return their number, or -1 if not prepared."""
        owner = joining.wanted.owner
        sketches = [sketch for name in joining.sketches if (sketch := self._sketches.get(name)) and sketch.knows(owner)]
        if not sketches or len(sketches) != len(joining.sketches):
            return -1
        waiting = [sketch for sketch in sketches if owner in sketch.prepared]
        if waiting:
            one = waiting[0].prepared[owner]
            for block in one.capture_buffer.blocks(one.rows):
                for sketch in waiting:
                    sketch.add_rows(block)
        for sketch in waiting:
            sketch.mark_committed(owner)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # after the answer, the rows' memory may be reused
        return sketches[0].committed[owner]

    def forget(self, owners: Sequence[Owner]) -> None:
        """Forget prepared and committed requests, whose rows were released."""
        for sketch in self._sketches.values():
            for owner in owners:
                sketch.prepared.pop(owner, None)
                sketch.committed.pop(owner, None)

    def read(self, message: ReadSketch) -> SketchPart:
        """Return bytes [start, stop) of a sketch's tensors at a point, joined one after the other.

        Raises:
            WorkerFailure: there is no such sketch.
        """
        sketch = self._sketches.get(message.name)
        if sketch is None:
            raise WorkerFailure(f"there is no sketch {message.name} here")
        state = sketch.states.get(message.point)
        if state is None:
            return SketchPart(kept=False, rows=0, squares=0.0, filled=0, data=b"")
        parts, before = [], 0
        for tensor in state.tensors.values():
            stored = tensor.view(-1).view(torch.uint8)
            part = stored[max(message.start - before, 0) : max(message.stop - before, 0)]
            parts.append(part.cpu().numpy().tobytes())
            before += len(stored)
        return SketchPart(kept=True, rows=state.rows, squares=state.squares, filled=state.filled, data=b"".join(parts))
