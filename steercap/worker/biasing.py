"""Logit biases: they are added to the logits of the selected positions, and the positions are verified.

The host knows which row of a pass's logits belongs to which position of which request. The device reports the position
that the model read for each of these rows. A position counts as biased once the two agree.

Shape legend: logits = rows of logits of a pass; biased = the rows that get a bias.
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
from steercap.worker.steering import SteeredSample
from steercap.worker.step import BatchRows

#: Addends of at least this many entries are broadcast over their rows; smaller ones are repeated for each row.
_LARGE: Final = 4096


class Addend(NamedTuple):
    """Sum of the logit biases that apply to a row of logits.

    Args:
        ids: token ids, int64 [entries], on the device.
        values: bias of each id, float32 [entries], on the device.
        entries: number of entries.
    """

    ids: torch.Tensor
    values: torch.Tensor
    entries: int


#: Pending additions to logits: row indices and token ids, int64, and values, float32, which broadcast.
Writes: TypeAlias = "list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]"


class Biased(NamedTuple):
    """Row of logits that gets a bias.

    Args:
        steered: the steering state of the row's request.
        row: index of the row among the logits of the pass.
        position: position of the input token that produced the row.
        mask: bit mask of the bias scopes (sets of positions) that include the position.
    """

    steered: SteeredSample
    row: int
    position: int
    mask: int


@dataclass(frozen=True)
class _Pending:
    """Biases that were added, but whose positions are not verified yet.

    Args:
        chosen: the biased rows.
        seen: positions that the model read, on the host once `ready`, int64 [biased].
        ready: CUDA event of their copy to the host; None on CPU.
    """

    chosen: Sequence[Biased]
    seen: torch.Tensor
    ready: Any

    def overlaps(self, wanted: Sequence[Wanted]) -> bool:
        """Return whether any of the rows lies within a wanted sequence, at a position below its number of inputs."""
        totals = {item.owner: item.total for item in wanted}
        return any(one.position < totals.get(one.steered.owner, 0) for one in self.chosen)


class Biasing:
    """Addition and verification of the logit biases on one rank."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._requests: dict[str, SteeredSample] = {}
        self._batch: BatchRows | None = None
        self._pending: deque[_Pending] = deque()
        #: Key, slots, writes and row indices of the last pass, reused while the key is the same. Keeping the slots
        #: alive keeps their `id()`, part of the key, unique.
        self._last: tuple[object, object, Writes, torch.Tensor] | None = None

    def __bool__(self) -> bool:
        """Return whether any running request has a bias."""
        return bool(self._requests)

    def enter(self, request_id: str, steered: SteeredSample) -> None:
        """Start tracking a request, by the runner's id, that has a logit bias."""
        self._requests[request_id] = steered

    def leave(self, request_ids: Iterable[str]) -> None:
        """Stop tracking requests, by the runner's ids, that have ended; unknown ids are ignored."""
        if self._requests:
            for request_id in request_ids:
                self._requests.pop(request_id, None)

    def begin(self, batch: BatchRows) -> None:
        """Begin a pass, whose logits come later; fail the requests of the pass before it if they lack their biases."""
        if not self._requests and self._batch is None and not self._pending:
            return
        if (last := self._batch) is not None:
            self._fail(last, "tokens were sampled from logits without their biases")
        self._batch = batch if self._requests else None
        self._complete(lambda pending: pending.ready is None or pending.ready.query())

    def refuse(self, reason: str) -> None:
        """Fail the requests with biases in the current pass, because its logits cannot be biased; `reason` says why."""
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
        """Add the biases of the pass that was begun last to its logits; return them, in float32 if any was added.

        Args:
            logits: logits of the pass; changed in place if they are float32.
            request_ids: requests of the pass, in the order of their rows.
            counts: rows of logits of each request, those of its last tokens: int64 [requests].
            indices: index of each row's token in the pass, on the device.
        """
        batch, self._batch = self._batch, None
        if batch is None:
            return logits
        if list(request_ids) != list(batch.request_ids) or int(counts.sum()) != len(logits):
            self._fail(batch, "the rows of its logits do not match the pass that was prepared")
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
        """Wait until the biases within the wanted sequences are verified, but not for passes that come after."""
        last = next((pending for pending in reversed(self._pending) if pending.overlaps(wanted)), None)
        if last is not None:
            while self._pending and self._verify(self._pending.popleft()) is not last:
                pass

    def _choose(self, batch: BatchRows, counts: Ints, vocabulary: int) -> list[Biased]:
        """Return the rows of logits that get a bias; fail requests whose biases name ids outside the vocabulary."""
        found, row = [], 0
        stops = (batch.starts + batch.counts).tolist()
        for name, stop, count in zip(batch.request_ids, stops, counts.tolist(), strict=True):
            steered = self._requests.get(name)
            if steered is not None and steered.highest >= vocabulary:
                steered.fail(f"token {steered.highest} of a bias is outside the {vocabulary} tokens of the logits")
            elif steered is not None:
                for along in range(count):
                    position = stop - count + along
                    if mask := steered.bias_mask(position):
                        found.append(Biased(steered, row + along, position, mask))
            row += count
        return found

    def _writes(self, chosen: Sequence[Biased]) -> tuple[Writes, torch.Tensor]:
        """Return the additions to make, and the indices of all biased rows, int64 on the device."""
        key = [(biased.row, biased.mask, id(biased.steered.slot)) for biased in chosen]
        if self._last is None or self._last[0] != key:
            slots = tuple(biased.steered.slot for biased in chosen)
            self._last = key, slots, self._new_writes(chosen), self._moved(np.array([biased.row for biased in chosen]))
        return self._last[2:]

    def _new_writes(self, chosen: Sequence[Biased]) -> Writes:
        groups: dict[tuple[int, int], tuple[Addend, list[int]]] = {}
        for biased in chosen:
            key = id(biased.steered.slot), biased.mask
            if key not in groups:
                groups[key] = self._addend(biased), []
            groups[key][1].append(biased.row)
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

    def _addend(self, biased: Biased) -> Addend:
        """Return the sum of the biases of a row; cached in the slot that holds the biases."""
        slot = biased.steered.slot
        assert slot is not None, "a request whose slot holds something else was never entered"
        if (addend := slot.addends.get(biased.mask)) is None:
            ids, values = combined(slot.configuration.biases, biased.mask)
            addend = slot.addends[biased.mask] = Addend(self._moved(ids), self._moved(values), len(ids))
        return cast("Addend", addend)

    def _moved(self, array: np.ndarray) -> torch.Tensor:
        """Copy an array to the device without waiting for it."""
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
            self._verify(self._pending.popleft())

    def _verify(self, pending: _Pending) -> _Pending:
        """Wait for the positions of biased logits, fail requests whose positions are not those planned, count biases.

        Returns `pending`.
        """
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
