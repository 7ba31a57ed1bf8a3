"""CaptureHandle: what the user holds of one request's rows.

Number 8 in the life of a request.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from steercap.core.chat import MessageSpan
from steercap.core.idiom import AWAITED
from steercap.core.messages import Owner, Wanted
from steercap.core.ownership import Unshared
from steercap.core.plan import Plan
from steercap.core.receipt import Receipt, SteeringReceipt, check_labels, check_points
from steercap.core.rows import rows_selected
from steercap.core.spec import Point
from steercap.core.values import index_of, shown
from steercap.errors import (
    CaptureIncomplete,
    CaptureNotFetched,
    CaptureNotFinite,
    CaptureReleased,
    InvalidRequest,
    InvalidSpec,
)
from steercap.requests import files
from steercap.requests.captures import Captures

if TYPE_CHECKING:
    from steercap.core.budget import Ticket
    from steercap.engine.engine import Engine
    from steercap.engine.fetching import Delivery
    from steercap.vectors.directions import Mark


class CaptureHandle(Unshared):
    """One finished request's activations, fetched when you ask for them.

    The rows stay in the worker until `fetch()`, `release()`, the end of `async with handle:` or garbage collection
    frees them. Made by `SteerModel.generate`, `chat` and `read`, or read from a file by `load`. It cannot be copied or
    pickled: its rows have one owner; `save` and `load` take it to another process.

    Attributes:
        request_id: steercap's name of the request.
        text: generated text; empty after `read`, which generates none.
        prompt_token_ids: token ids of the prompt.
        output_token_ids: generated token ids; the last one has no row, since it was never an input.
        points: what was captured, layer by layer.
        messages: for `chat`, the span of positions of each message.
        directions: with `project=`, the names of what rows were projected on.
        marks: fingerprints of these directions, by layer; empty in files of older versions.
    """

    _instead = "its rows have one owner; use handle.save(path), and CaptureHandle.load(path) where it is wanted"

    def __init__(
        self,
        *,
        request_id: str,
        model: str,
        text: str,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        points: Sequence[Point],
        num_layers: int,
        messages: Sequence[MessageSpan] = (),
        directions: Sequence[str] = (),
        marks: Mapping[int, Sequence[Mark]] = MappingProxyType({}),
    ) -> None:
        self.request_id = request_id
        self.model = model
        self.text = text
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.output_token_ids = tuple(output_token_ids)
        self.points = tuple(points)
        self.messages = tuple(messages)
        self.num_layers = num_layers
        self.directions = tuple(directions)
        self.marks = {layer: tuple(known) for layer, known in marks.items()}
        self._captures: Captures | None = None
        self._receipt: Receipt | None = None
        self._source: _Source | None = None
        self._finalizer: weakref.finalize[..., CaptureHandle] | None = None
        self._released = False
        self._lock = asyncio.Lock()
        self._idiom = AWAITED

    def _attach(
        self,
        engine: Engine,
        owner: Owner,
        plan: Plan,
        ticket: Ticket,
        *,
        steering: SteeringReceipt | None,
        tokens: Sequence[int],
    ) -> CaptureHandle:
        self._source = _Source(engine, owner, plan, ticket, steering, tuple(tokens))
        self._finalizer = weakref.finalize(self, engine.give_back_from_any_thread, owner, ticket)
        self._finalizer.atexit = False
        return self

    async def fetch(self) -> CaptureHandle:
        """Bring the rows here, and free them in the worker. A second call does nothing.

        Returns:
            This handle, its `captures`, `positions`, `token_ids` and `receipt` readable.

        Raises:
            CaptureIncomplete: rows are missing or belong to another token.
            CaptureNotFinite: rows hold NaN or infinity, and `allow_nonfinite` was not asked for.
            CaptureReleased: the handle was released before.
            EngineFailure: the engine has died or was closed.
            WrongEventLoop: the model was started in another event loop.
        """
        await fetch_all([self])
        return self

    @property
    def fetched(self) -> bool:
        """Whether the rows are here."""
        return self._captures is not None

    @property
    def captures(self) -> Captures:
        """The rows, by layer or by (layer, site).

        Raises:
            CaptureNotFetched: before `fetch()`.
            CaptureReleased: after `release()`.
        """
        self._require_fetched()
        assert self._captures is not None
        return self._captures

    @property
    def receipt(self) -> Receipt:
        """What the workers recorded of this capture."""
        self._require_fetched()
        assert self._receipt is not None
        return self._receipt

    @property
    def positions(self) -> torch.Tensor:
        """Position of each row in its sequence, or of each row that was reduced: int64 [rows], a copy."""
        return torch.from_numpy(self.receipt.positions.copy())

    @property
    def token_ids(self) -> torch.Tensor:
        """Token the model read at each position: int64 [rows], a copy."""
        return torch.from_numpy(self.receipt.token_ids.copy())

    def rows_of(self, message: int | str) -> torch.Tensor:
        """Rows that belong to a message of a `chat`: bool [rows].

        A mask over the rows of this handle: `handle.captures[4][mask]`, and `tokens=handle.positions[mask]` for the
        same tokens in another request.

        Args:
            message: index of the message (negative from the end), or a role, "generation_prompt" and the reply's
                "assistant" included; a role covers all its messages.

        Raises:
            InvalidSpec: no such message, or the handle is not from `chat`.
        """
        given = [span for span in self.messages if span.index is not None]
        index = None if isinstance(message, str) else index_of(message)
        if isinstance(message, str):
            spans = [span for span in self.messages if span.role == message]
        elif index is not None and -len(given) <= index < 0:
            spans = [given[index]]
        else:
            spans = [span for span in given if span.index == index]
        if not spans:
            known = (
                ", ".join(f"{span.index}: {span.role}" for span in self.messages)
                or "none, for this handle is not from chat"
            )
            raise InvalidSpec(f"no message {shown(message)}; messages: {known}")
        positions = self.positions
        mask = torch.zeros_like(positions, dtype=torch.bool)
        for span in spans:
            mask |= (positions >= span.start) & (positions < span.stop)
        return mask

    def to_numpy(self) -> dict[Point, np.ndarray[Any, Any]]:
        """The rows as NumPy arrays; bfloat16, which NumPy lacks, becomes float32."""
        return {
            point: (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()
            for point, rows in self.captures.items()
        }

    def save(self, path: str | Path) -> Path:
        """Write rows, labels and texts to one safetensors file; see `steercap.requests.files`.

        Raises:
            CaptureNotFetched: before `fetch()`.
        """
        receipt = self.receipt
        header = files.Header(
            version=files.VERSION,
            model=self.model,
            request_id=self.request_id,
            text=self.text,
            num_layers=self.num_layers,
            points=self.points,
            messages=self.messages,
            reduce=receipt.reduce,
            writes=receipt.writes,
            steering=receipt.steering,
            directions=self.directions,
            marks=self.marks,
        )
        labels = self.positions, self.token_ids, self.prompt_token_ids, self.output_token_ids
        return files.write(files.Saved(header, self.captures, *labels), Path(path))

    @staticmethod
    def load(path: str | Path) -> CaptureHandle:
        """Read a handle that `save` wrote; it is fetched already.

        Raises:
            InvalidFile: the file is truncated, of another kind, or of a newer version.
        """
        header, rows, positions, token_ids, prompt_token_ids, output_token_ids = files.read(Path(path))
        handle = CaptureHandle(
            request_id=header.request_id,
            model=header.model,
            text=header.text,
            prompt_token_ids=prompt_token_ids,
            output_token_ids=output_token_ids,
            points=header.points,
            num_layers=header.num_layers,
            messages=header.messages,
            directions=header.directions,
            marks=header.marks,
        )
        labels = positions.numpy(), token_ids.numpy()
        handle._receipt = Receipt(header.points, *labels, header.writes, header.reduce, header.steering)
        handle._captures = Captures(rows, header.num_layers)
        return handle

    def release(self) -> None:
        """Drop the rows, here and in the worker. Idempotent; nothing can be read afterwards."""
        self._released = True
        self._captures = self._receipt = None
        if not self._lock.locked():  # or a fetch still reads the rows; it frees them when it is done
            self._free()

    async def __aenter__(self) -> CaptureHandle:
        return await self.fetch()

    async def __aexit__(self, *_exc: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self._released else "fetched" if self.fetched else "not fetched"
        return f"CaptureHandle({self.request_id}, {len(self.points)} points, {state}, text={self.text[:40]!r})"

    def _require_fetched(self) -> None:
        if self._released:
            raise CaptureReleased(f"{self.request_id} was released; its rows are gone. Fetch and read before releasing")
        if self._captures is None:
            raise CaptureNotFetched(
                f"{self.request_id} is not fetched; `{self._idiom.call}handle.fetch()`, or "
                f"`{self._idiom.call}model.fetch_captures_batch(handles)` for many at once"
            )

    def _free(self) -> None:
        if self._finalizer is not None and self._source is not None:
            self._finalizer.detach()
            source, here = self._source, self._source.engine.home.is_here
            give_back = source.engine.give_back if here else source.engine.give_back_from_any_thread
            give_back(source.owner, source.ticket)
            self._finalizer = None

    def _receive(self, delivery: Delivery) -> None:
        """Check what came against what must be, and take it."""
        assert self._source is not None
        expected = Expected(
            self.request_id, self._source.plan, self.points, self._source.tokens, steering=self._source.steering
        )
        rows, self._receipt = received(expected, delivery, self._source.engine.vllm.points)
        self._captures = Captures(rows, self.num_layers)
        self._free()

    def _wanted(self) -> Wanted:
        assert self._source is not None
        return Wanted(self._source.owner, len(self._source.tokens) - 1)


@dataclass(frozen=True)
class Expected:
    """What must come.

    Args:
        name: name of the request, for messages.
        plan: what was asked.
        points: the points of the plan.
        tokens: prompt and generated token ids, the last sampled one included.
        first: rows that have come before.
        steering: what is known to have been edited.
    """

    name: str
    plan: Plan
    points: tuple[Point, ...]
    tokens: tuple[int, ...]
    first: int = 0
    steering: SteeringReceipt | None = None


def received(
    expected: Expected, delivery: Delivery, armed: Sequence[Point]
) -> tuple[dict[Point, torch.Tensor], Receipt]:
    """Check a delivery against what must be.

    Returns:
        Rows by point, layer by layer, and the receipt.

    Raises:
        CaptureIncomplete: a worker failed, a row or a point is missing, or a label differs.
        CaptureNotFinite: a row holds NaN or infinity, and that was not asked for.
    """
    if delivery.failure:
        raise CaptureIncomplete(f"{expected.name}: {delivery.failure}")
    capture = expected.plan.capture
    assert capture is not None
    known = rows_selected(capture.ranges, expected.plan.limit, len(expected.tokens) - 1)[expected.first :]
    rows: dict[Point, torch.Tensor] = {}
    writes = 0
    for parcel, values in zip(delivery.parcels, delivery.rows, strict=True):
        positions = np.frombuffer(parcel.positions, dtype=np.int64)
        token_ids = np.frombuffer(parcel.token_ids, dtype=np.int64)
        check_labels(expected.name, known, expected.tokens, positions, token_ids)
        rows |= zip((armed[point] for point in parcel.points), values, strict=True)
        writes += parcel.writes
    check_points(expected.name, expected.points, list(rows))
    if not capture.allow_nonfinite:
        check_finite(expected, delivery, rows, armed)
    token_ids = np.asarray(expected.tokens, dtype=np.int64)[known]
    receipt = Receipt(expected.points, known, token_ids, writes, capture.reduce, expected.steering)
    return {point: rows[point] for point in expected.points}, receipt


def check_finite(
    expected: Expected, delivery: Delivery, rows: Mapping[Point, torch.Tensor], armed: Sequence[Point]
) -> None:
    """See that every row is finite.

    Raises:
        CaptureNotFinite: one of the rows kept, or what was computed from them.
    """
    capture = expected.plan.capture
    assert capture is not None
    remedy = "CaptureSpec(..., allow_nonfinite=True) hands such rows over"
    found = [parcel.nonfinite for parcel in delivery.parcels if parcel.nonfinite]
    if found:
        position, point = min(found)
        raise CaptureNotFinite(
            f"{expected.name}: the row of position {position} at {armed[point]} holds NaN or infinity; {remedy}"
        )
    if capture.reduce or capture.projection:  # rows that are finite may have sums that are not
        for at, values in rows.items():
            if not values.isfinite().all():
                raise CaptureNotFinite(f"{expected.name}: what was computed of rows at {at} overflows; {remedy}")


@dataclass(frozen=True)
class _Source:
    """Where a handle's rows are, and the tokens they must be of: the last sampled one, which has no row, included."""

    engine: Engine
    owner: Owner
    plan: Plan
    ticket: Ticket
    steering: SteeringReceipt | None
    tokens: tuple[int, ...]


async def fetch_all(handles: Sequence[CaptureHandle]) -> None:
    """Fetch handles of one model with one RPC; those already fetched are left alone.

    Raises:
        CaptureIncomplete: some rows are missing or wrong; the other handles are fetched all the same.
        CaptureNotFinite: some rows hold NaN or infinity; likewise.
        CaptureReleased: one of the handles was released.
        InvalidRequest: handles of several models.
        ModelClosed, WrongEventLoop: the model is not open, or was started in another event loop.
    """
    for handle in handles:
        if not handle.fetched and not handle._released and handle._source is not None:
            handle._source.engine.require_open()  # before a lock that belongs to its event loop
    async with AsyncExitStack() as locked:
        pending: list[CaptureHandle] = []
        for handle in sorted(dict.fromkeys(handles), key=id):
            await locked.enter_async_context(handle._lock)
            if handle._released:
                handle._require_fetched()
            if not handle.fetched:
                pending.append(handle)
        if not pending:
            return
        await _fetch_pending(pending)


async def _fetch_pending(pending: Sequence[CaptureHandle]) -> None:
    """Fetch handles whose locks are held."""
    engines = {handle._source.engine for handle in pending if handle._source is not None}
    if len(engines) != 1:
        raise InvalidRequest(f"these handles belong to {len(engines)} models; fetch the handles of one model at a time")
    errors: list[CaptureIncomplete | CaptureNotFinite] = []
    try:
        deliveries = await engines.pop().collect([handle._wanted() for handle in pending])
        for handle, delivery in zip(pending, deliveries, strict=True):
            try:
                if not handle._released:
                    handle._receive(delivery)
            except (CaptureIncomplete, CaptureNotFinite) as error:
                errors.append(error)
            await asyncio.sleep(0)  # a batch of thousands must not stop the loop
    finally:
        for handle in pending:
            if handle._released:  # meanwhile, and left to us
                handle._free()
    for handle in pending:
        if handle._released:
            handle._require_fetched()
    if errors:
        rest = f" (and {len(errors) - 1} other handles of this batch)" if len(errors) > 1 else ""
        raise type(errors[0])(f"{errors[0]}{rest}") from errors[0]
