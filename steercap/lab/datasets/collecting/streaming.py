"""Stream of shuffled rows from an engine into a training loop, without a disk.

A task takes blocks from the engine while the training computes; its queue and the buffer are bounded, so a slow
training slows the engine down. Rows come in the order of the corpus and are shuffled by numbers that follow from the
seed, so the same corpus gives the same batches at any speed.
"""

from __future__ import annotations

import asyncio
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, get_args

import torch

from steercap.core.display import layers_by_site
from steercap.core.spec import Point
from steercap.core.values import count_of, shown
from steercap.errors import InvalidRequest, InvalidSetting
from steercap.kernels.codecs.coded import decoded
from steercap.lab.datasets.collecting.feeding import feed
from steercap.lab.datasets.collecting.pipeline import blocks
from steercap.lab.datasets.collecting.reading import Block, Reading
from steercap.lab.datasets.collecting.sources import DocumentSource
from steercap.lab.datasets.definition import PointFormat
from steercap.lab.datasets.reading import Join, check_alike
from steercap.lab.datasets.rows import (
    NORMALISE,
    Labelled,
    Normalisation,
    Normalise,
    Rows,
    ShuffleBuffer,
    join_points,
    normalise_rows,
)
from steercap.lab.datasets.statistics import PointStatistics, statistics_of
from steercap.lab.datasets.tables import COLUMNS

if TYPE_CHECKING:
    from steercap.client import RemoteModel
    from steercap.model import SteerModel

#: Maximum rows queued ahead of the shuffle buffer, as a fraction of the buffer's size.
AHEAD: Final = 0.25


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """Settings of a stream of shuffled batches of rows: arguments of `steercap.lab.datasets.collecting.activations`.

    Raises:
        InvalidSetting: `batch_size` is below 1, `buffer` below `batch_size`, or `seed` below 0; or `join` or
            `normalise` is unknown.
    """

    batch_size: int
    buffer: int
    seed: int
    join: Join
    normalise: Normalise
    statistics: Mapping[str, PointStatistics] | None
    dtype: torch.dtype | None
    labels: bool
    drop_last: bool

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("buffer", self.batch_size), ("seed", 0)):
            count_of(getattr(self, name), name, least, wrong=InvalidSetting)
        for name, known in (("join", get_args(Join)), ("normalise", NORMALISE)):
            if getattr(self, name) not in known:
                raise InvalidSetting(f"{name}={shown(getattr(self, name))}; use one of {', '.join(map(repr, known))}")


class ActivationStream:
    """Async iterator of shuffled batches of a model's rows, made by `activations`; read once.

    Use it as a context manager, or close it with `aclose`: that ends its requests and frees their rows.

    Attributes:
        rows: number of rows returned so far.
        tokens: number of tokens that the model has read, for these rows and later ones.
    """

    def __init__(
        self, model: SteerModel | RemoteModel, reading: Reading, source: DocumentSource, how: Streaming
    ) -> None:
        self._task: asyncio.Task[None] | None = None  # first: `__del__` looks at it
        self._model, self._reading, self._source, self._how = model, reading, source, how
        schemas = reading.engine.schemas
        self._formats = {p: PointFormat(*p, schemas[p], reading.coding) for p in reading.points}
        self._check_join()
        self._buffer = ShuffleBuffer(how.buffer, how.seed)
        self._waiting: deque[dict[str, torch.Tensor]] = deque()
        self._ahead = 0
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._error: BaseException | None = None
        self._ended = self._closed = False
        self._normalisations: dict[str, Normalisation] | None = None
        self.rows: int = 0
        self.tokens: int = 0

    def __repr__(self) -> str:
        state = "closed" if self._closed else "ended" if self._ended else "open"
        return f"ActivationStream({layers_by_site(self._reading.points)}; {state}, {self.rows:,} rows returned)"

    @property
    def points(self) -> tuple[str, ...]:
        """Names of the points whose rows are read, in order, such as "resid_post[5]"."""
        return tuple(map(str, self._reading.points))

    @property
    def normalisations(self) -> dict[str, Normalisation]:
        """Normalisation of each point by its name; {} if rows are not normalised.

        Raises:
            InvalidRequest: no batch was taken yet; normalisations are computed from the first rows.
        """
        if self._how.normalise == "none":
            return {}
        if self._normalisations is None:
            raise InvalidRequest("normalisations come from the first rows; take a batch before you ask for it")
        return self._normalisations

    def __aiter__(self) -> ActivationStream:
        """Return the stream itself; InvalidRequest once it has ended or was closed."""
        if self._closed:
            raise InvalidRequest("a stream is read once, and this one has ended or was closed; make another to read on")
        return self

    async def __anext__(self) -> Rows | Labelled:
        """Return the next batch of shuffled rows, waiting until the buffer is full or the corpus has ended.

        Raises:
            StopAsyncIteration: the corpus has ended, or the stream was closed.
            The errors of `SteerModel.read` and of the corpus.
        """
        if self._closed:
            raise StopAsyncIteration
        if self._task is None:
            self._task = asyncio.ensure_future(self._produce())
        await self._fill()
        short = len(self._buffer) < self._how.batch_size
        if not len(self._buffer) or (short and self._how.drop_last):
            await self.aclose()
            raise StopAsyncIteration
        if self._normalisations is None and self._how.normalise != "none":
            self._normalisations = self._estimated()
        return self._batch(self._buffer.draw(self._how.batch_size))

    async def aclose(self) -> None:
        """Cancel the requests and free all queued rows; may be called again."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._waiting.clear()
        self._buffer = ShuffleBuffer(0, 0)

    async def __aenter__(self) -> ActivationStream:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._task is not None and not self._task.done():
            warnings.warn(
                "a stream of activations was left open: use `async with activations(...)`, or await its aclose()",
                ResourceWarning,
                stacklevel=2,
            )

    # From the engine

    async def _produce(self) -> None:
        try:
            async with aclosing(blocks(self._model, self._reading, feed(self._source, self._reading))) as found:
                async for block in found:
                    self.tokens += sum(one.read for one in block.ended)
                    for columns in self._columns(block):
                        self._waiting.append(columns)
                        self._ahead += len(columns["document"])
                    self._news.set()
                    await self._wait_for_room()
        except asyncio.CancelledError as error:
            if not self._closed:  # or the stream would seem to be at its end
                self._error = RuntimeError("the task that reads ahead for this stream was cancelled by somebody else")
                self._error.__cause__ = error
            raise
        except Exception as error:  # noqa: BLE001 -- it is theirs who wait for batches
            self._error = error
        finally:
            self._ended = True
            self._news.set()

    async def _wait_for_room(self) -> None:
        while self._ahead > AHEAD * self._how.buffer:
            self._room.clear()
            await self._room.wait()

    async def _fill(self) -> None:
        """Move rows into the shuffle buffer until it is full, or the corpus has ended."""
        while not self._buffer.full:
            if self._error is not None:
                error = self._error
                await self.aclose()
                raise error
            if self._waiting:
                self._take()
            elif self._ended:
                return
            else:
                self._news.clear()
                await self._news.wait()

    def _take(self) -> None:
        columns = self._waiting[0]
        taken = self._buffer.add(columns)
        if taken == len(columns["document"]):
            self._waiting.popleft()
        else:
            self._waiting[0] = {name: column[taken:] for name, column in columns.items()}
        self._ahead -= taken
        self._room.set()

    # Columns of the buffer: labels by their names, rows by those of points, or as MIXED

    def _columns(self, block: Block) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the labels and decoded rows of a block as columns of the shuffle buffer."""
        if not len(block.index):
            return
        labels = {name: torch.from_numpy(getattr(block.index, name)).long() for name in COLUMNS}
        rows = {point: self._decoded(point, block) for point in self._reading.points}
        if self._how.join != "mix":
            yield {**labels, "point": torch.zeros_like(labels["token"]), **{str(p): r for p, r in rows.items()}}
            return
        # Row by row, so that the order does not depend on where a block ends.
        count = len(rows)
        yield {
            **{name: column.repeat_interleave(count) for name, column in labels.items()},
            "point": torch.arange(count).repeat(len(labels["token"])),
            MIXED: torch.stack(list(rows.values()), 1).flatten(0, 1),
        }

    def _decoded(self, point: Point, block: Block) -> torch.Tensor:
        pieces = [decoded(piece) for piece in block.rows[point]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _estimated(self) -> dict[str, Normalisation]:
        """Return normalisations by name of the point, from given statistics or from the rows in the buffer."""
        given = self._how.statistics or {}
        found = {}
        for number, (point, known) in enumerate(self._formats.items()):
            statistics = given.get(str(point)) or statistics_of([self._held(number, point)], known.decoded_width)
            found[str(point)] = Normalisation.of(self._how.normalise, statistics)
        return found

    def _held(self, number: int, point: Point) -> torch.Tensor:
        columns = self._buffer.columns
        if self._how.join != "mix":
            return columns[str(point)]
        return columns[MIXED][columns["point"] == number]

    def _batch(self, drawn: dict[str, torch.Tensor]) -> Rows | Labelled:
        labels = {name: drawn.pop(name) for name in (*COLUMNS, "point")}
        self.rows += len(labels["token"])
        rows = self._normalised(drawn, labels["point"])
        return Labelled(rows, **labels) if self._how.labels else rows

    def _normalised(self, drawn: Mapping[str, torch.Tensor], points: torch.Tensor) -> Rows:
        if MIXED in drawn:
            whole = drawn[MIXED].to(self._dtype(drawn[MIXED]))
            for number, name in enumerate(self.points):
                chosen = points == number
                whole[chosen] = self._normalised_rows(name, drawn[MIXED][chosen])
            return whole
        return join_points({name: self._normalised_rows(name, drawn[name]) for name in self.points}, self._how.join)

    def _normalised_rows(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of one point, normalised, in the stream's dtype."""
        return normalise_rows(rows, self.normalisations.get(name), self._dtype(rows))

    def _dtype(self, rows: torch.Tensor) -> torch.dtype:
        return self._how.dtype or rows.dtype

    def _check_join(self) -> None:
        if self._how.join == "mix":
            check_alike(list(self._formats.values()), "join='mix'")
        unknown = sorted(set(self._how.statistics or {}) - set(self.points))
        if unknown:
            raise InvalidRequest(f"statistics= names {unknown[0]!r}, which is not read; read: {', '.join(self.points)}")


#: Name of the buffer's column with the rows of all points, for join="mix".
MIXED: Final = "rows"
