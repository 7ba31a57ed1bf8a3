"""Biases of logits: added to the rows of the right positions, pass by pass, and proof of the positions they have.

The host knows which row of a pass's logits belongs to which position of which request. The device is asked for the
same: where the row was taken from, and the position that the model read there. A position counts as biased once the two
agree.

Shape legend: logits = rows of logits of a pass; biased = those among them that are changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from jaxtyping import Float, Int

from steercap.core.biases import combined
from steercap.core.messages import Wanted
from steercap.core.rows import Ints
from steercap.worker.batch import BatchRows
from steercap.worker.steering import Steered

#: From so many entries on, what is added to several rows alike is not written out for each of them.
_LARGE: Final = 4096


class Addend(NamedTuple):
    """What is added to a row.

    Args:
        ids: int64 [entries], on the device.
        values: float32 [entries], on the device.
        entries: how many.
    """

    ids: torch.Tensor
    values: torch.Tensor
    entries: int


#: What is added to which rows of the logits: rows and ids, int64, and values, float32, which broadcast.
Writes: TypeAlias = "list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]"


class Biased(NamedTuple):
    """A row of logits that is biased.

    Args:
        steered: its request.
        row: its index among the rows of the pass.
        position: of the token that it was made at.
        mask: the scopes of biases that hold it.
    """

    steered: Steered
    row: int
    position: int
    mask: int


@dataclass(frozen=True)
class _Pending:
    """Biases that were put, whose rows' positions are on their way from the device.

    Args:
        chosen: row by row.
        seen: the positions that the model read, on the host once `ready`, int64 [biased].
        ready: waits for them; None if they are there.
    """

    chosen: Sequence[Biased]
    seen: torch.Tensor
    ready: Any

    def of(self, wanted: Sequence[Wanted]) -> bool:
        """Whether it holds positions that are wanted."""
        totals = {item.owner: item.total for item in wanted}
        return any(one.position < totals.get(one.steered.owner, 0) for one in self.chosen)


class Biasing:
    """All logits that are biased on one rank.

    Args:
        device: where logits are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._requests: dict[str, Steered] = {}
        self._batch: BatchRows | None = None
        self._pending: deque[_Pending] = deque()
        #: What the last pass added where, which the next one mostly does again; and slots, which are known by their id.
        self._last: tuple[object, object, Writes, torch.Tensor] | None = None

    def __bool__(self) -> bool:
        """Whether any request that runs has a bias."""
        return bool(self._requests)

    def enter(self, request_id: str, steered: Steered) -> None:
        """A request that has a bias is scheduled for the first time."""
        self._requests[request_id] = steered

    def leave(self, request_ids: Iterable[str]) -> None:
        """These requests will not run again."""
        if self._requests:
            for request_id in request_ids:
                self._requests.pop(request_id, None)

    def begin(self, batch: BatchRows) -> None:
        """A pass is laid out; its logits come later."""
        if (last := self._batch) is not None:
            self._fail(last, "tokens were sampled from logits that had not got their biases")
        self._batch = batch if self._requests else None
        self._complete(lambda pending: pending.ready is None or pending.ready.query())

    def refuse(self, reason: str) -> None:
        """The logits of this pass cannot be biased."""
        batch, self._batch = self._batch, None
        if batch is not None:
            self._fail(batch, reason)

    def put(
        self,
        logits: Float[torch.Tensor, "logits vocabulary"],
        request_ids: Sequence[str],
        counts: Ints,
        indices: Int[torch.Tensor, " logits"],
    ) -> Float[torch.Tensor, "logits vocabulary"]:
        """The logits of a pass with their biases, in float32 if there are any.

        Args:
            logits: of the pass that was begun last; they are changed if they are float32.
            request_ids: requests of the pass, in the order of its rows.
            counts: how many rows of logits each has, those of its last tokens: int64 [requests].
            indices: which token of the pass each row is of, on the device.
        """
        batch, self._batch = self._batch, None
        if batch is None:
            return logits
        if list(request_ids) != list(batch.request_ids) or int(counts.sum()) != len(logits):
            self._fail(batch, "the rows of its logits are not those of the pass that was laid out")
            return logits
        chosen = self._choose(batch, counts, logits.shape[1])
        if not chosen:
            return logits
        logits = logits.to(torch.float32)  # in 16 bits a small bias would be lost; samplers compute so anyway
        writes, rows = self._writes(chosen)
        for at, ids, values in writes:
            logits[at, ids] += values
        seen = batch.positions[indices[rows]].to("cpu", non_blocking=True)
        self._pending.append(_Pending(chosen, seen, self._event()))
        return logits

    def confirm(self, wanted: Sequence[Wanted]) -> None:
        """Wait until it is known what became of these positions, and of no others."""
        last = next((pending for pending in reversed(self._pending) if pending.of(wanted)), None)
        if last is not None:
            while self._pending and self._take_in(self._pending.popleft()) is not last:
                pass

    def _choose(self, batch: BatchRows, counts: Ints, vocabulary: int) -> list[Biased]:
        """The rows that are biased. Most requests have one row in a pass, so that numbers are faster than arrays."""
        found, row = [], 0
        stops = (batch.starts + batch.counts).tolist()
        for name, stop, count in zip(batch.request_ids, stops, counts.tolist(), strict=True):
            steered = self._requests.get(name)
            if steered is not None and steered.highest >= vocabulary:
                steered.fail(f"token {steered.highest} of a bias is not among the {vocabulary} that logits are of")
            elif steered is not None:
                for along in range(count):
                    position = stop - count + along
                    if mask := steered.bias_mask(position):
                        found.append(Biased(steered, row + along, position, mask))
            row += count
        return found

    def _writes(self, chosen: Sequence[Biased]) -> tuple[Writes, torch.Tensor]:
        """What is added where, and all rows that are biased, int64 on the device."""
        key = [(one.row, one.mask, id(one.steered.slot)) for one in chosen]
        if self._last is None or self._last[0] != key:
            slots = tuple(one.steered.slot for one in chosen)
            self._last = key, slots, self._new_writes(chosen), self._moved(np.array([one.row for one in chosen]))
        return self._last[2:]

    def _new_writes(self, chosen: Sequence[Biased]) -> Writes:
        groups: dict[tuple[int, int], tuple[Addend, list[int]]] = {}
        for one in chosen:
            key = id(one.steered.slot), one.mask
            if key not in groups:
                groups[key] = self._addend(one), []
            groups[key][1].append(one.row)
        writes: Writes = []
        small = [group for group in groups.values() if group[0].entries < _LARGE]
        for addend, rows in groups.values():
            if addend.entries >= _LARGE:
                writes.append((self._moved(np.array(rows))[:, None], addend.ids[None], addend.values))
        if small:
            rows_of_all = np.concatenate([np.repeat(rows, addend.entries) for addend, rows in small])
            ids = torch.cat([addend.ids for addend, rows in small for _ in rows])
            values = torch.cat([addend.values for addend, rows in small for _ in rows])
            writes.append((self._moved(rows_of_all), ids, values))
        return writes

    def _addend(self, one: Biased) -> Addend:
        """What the biases of a row add up to; kept with the slot that holds them."""
        slot = one.steered.slot
        assert slot is not None, "a request whose slot holds something else was never entered"
        if (addend := slot.addends.get(one.mask)) is None:
            ids, values = combined(slot.configuration.biases, one.mask)
            addend = slot.addends[one.mask] = Addend(self._moved(ids), self._moved(values), len(ids))
        return cast("Addend", addend)

    def _moved(self, array: np.ndarray) -> torch.Tensor:
        """An array on the device, without waiting for it."""
        tensor = torch.tensor(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def _event(self) -> Any:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _complete(self, ready: Callable[[_Pending], bool]) -> None:
        while self._pending and ready(self._pending[0]):
            self._take_in(self._pending.popleft())

    def _take_in(self, pending: _Pending) -> _Pending:
        """Write down which positions were biased."""
        if pending.ready is not None:
            pending.ready.synchronize()
        for one, seen in zip(pending.chosen, pending.seen.tolist(), strict=True):
            if seen != one.position:
                one.steered.fail(f"the logits of position {seen} were biased as those of {one.position}")
            one.steered.put(one.position, self._addend(one).entries)
        return pending

    def _fail(self, batch: BatchRows, reason: str) -> None:
        """Fail the requests of a pass whose last row should have been biased."""
        last = (batch.starts + batch.counts - 1).tolist()
        for name, position in zip(batch.request_ids, last, strict=True):
            steered = self._requests.get(name)
            if steered is not None and steered.bias_mask(position):
                steered.fail(reason)
