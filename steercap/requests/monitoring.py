"""Monitors of one running request: they score its rows as they are computed, and may end or steer its text."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from steercap.captures.fetching import Arrived
from steercap.core.rows import Ints
from steercap.core.tokens import selected
from steercap.errors import CaptureNotFinite
from steercap.requests.monitor_readers import MonitorReader

if TYPE_CHECKING:
    from steercap.adapters import RequestOutput

#: Finish reason of a text that a monitor has ended, beside vLLM's own reasons.
STOPPED: Final = "steercap_probe"


@dataclass(frozen=True)
class Crossing:
    """Token at which a monitor fired.

    Args:
        monitor: the monitor's name.
        position: position of the token in the sequence.
        index: index among the generated tokens, from 0; None for a token of the prompt.
        score: score of the row at this position.
    """

    monitor: str
    position: int
    index: int | None
    score: float


@dataclass(frozen=True)
class MonitorReport:
    """Result of one monitor for one sample.

    Args:
        monitor: name of the monitor.
        scored: number of rows that the monitor scored; the last token of a text has no row.
        crossings: tokens at which the monitor fired, in order of position.
        stopped: True if the monitor ended the text.
        steered_from: first position whose row the monitor's steering edited; None if it edited none.
        late: True if the monitor fired to steer, but the text ended before a row could be edited.
    """

    monitor: str
    scored: int
    crossings: tuple[Crossing, ...]
    stopped: bool = False
    steered_from: int | None = None
    late: bool = False


@dataclass
class _Sample:
    """State of one sample while it runs.

    Args:
        scored: number of rows scored, by monitor.
        tokens: token ids generated so far.
        text: text generated so far.
        before: number of tokens and of characters before the newest output.
        rows: number of rows fetched so far.
        crossings: tokens at which monitors fired.
        stop: crossing at which the text ends.
        ended: True once vLLM or a monitor has ended the sample.
        steered: position at which held-back steering began; None before that.
    """

    scored: list[int]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    before: tuple[int, int] = (0, 0)
    rows: int = 0
    crossings: list[Crossing] = field(default_factory=list)
    stop: Crossing | None = None
    ended: bool = False
    steered: int | None = None


#: Coroutine function that fetches new rows by sample index, given each sample's token ids and the number of rows
#: fetched before.
Rows = Callable[[Mapping[int, tuple[Sequence[int], int]]], Awaitable[Mapping[int, Arrived]]]


class Watch:
    """Monitors of one request, with the state of its samples.

    Args:
        name: name of the request, for messages.
        monitor_readers: monitors, bound to the captured data of the request.
        prompt_len: number of prompt tokens.
        limit: number of positions that can have rows.
        samples: number of samples.
    """

    def __init__(
        self, name: str, monitor_readers: Sequence[MonitorReader], *, prompt_len: int, limit: int, samples: int
    ) -> None:
        self._name, self._monitor_readers = name, tuple(monitor_readers)
        self._prompt_len, self._limit = prompt_len, limit
        self._selected = [selected(monitor_reader.ranges, limit) for monitor_reader in monitor_readers]
        self._samples = [_Sample([0] * len(monitor_readers)) for _ in range(samples)]

    def reports(self, index: int = 0) -> tuple[MonitorReport, ...]:
        """Return the current report of each monitor for a sample."""
        sample = self._samples[index]
        stopped = None if sample.stop is None else sample.stop.monitor
        reports = []
        for number, monitor_reader in enumerate(self._monitor_readers):
            fired = tuple(crossing for crossing in sample.crossings if crossing.monitor == monitor_reader.label)
            steers = monitor_reader.monitor.do == "steer"
            begun = steers and sample.steered is not None and sample.steered < self._prompt_len + len(sample.tokens) - 1
            reports.append(
                MonitorReport(
                    monitor_reader.label,
                    sample.scored[number],
                    fired,
                    stopped == monitor_reader.label,
                    sample.steered if begun else None,
                    late=steers and sample.ended and bool(fired) and not begun,
                )
            )
        return tuple(reports)

    def crossings(self, index: int = 0) -> tuple[Crossing, ...]:
        """Return the tokens of a sample at which monitors fired so far, in order of position."""
        return tuple(self._samples[index].crossings)

    def steered(self, index: int) -> int | None:
        """Return the first position of a sample at which held-back steering applies; None while it is held back."""
        return self._samples[index].steered

    async def outputs(
        self,
        outputs: AsyncGenerator[RequestOutput, None],
        rows: Rows,
        text: Callable[[Sequence[int]], str],
        engage: Callable[[Sequence[int]], Awaitable[Sequence[int]]],
        *,
        new: bool,
        final: bool,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request, truncated after a token at which a monitor stopped it.

        Once all samples have ended, the engine's request is closed before the last output is yielded.

        Args:
            outputs: outputs of the engine.
            rows: coroutine function that returns new rows of samples.
            text: function that returns the text of generated token ids.
            engage: coroutine function that starts the steering of samples, by index; it returns the first positions.
            new: True if an output holds only the new tokens of each sample; False if it holds all of them.
            final: True if only the last output is wanted, with all samples.

        Raises:
            CaptureIncomplete, CaptureNotFinite: a row to score is missing, or its score is not finite.
        """
        latest: dict[int, Any] = {}
        last: RequestOutput | None = None
        async with aclosing(outputs):
            async for output in outputs:
                parts = [part for part in output.outputs if not self._samples[part.index].ended]
                for part in parts:
                    self._grow(part, new=new)
                await self._score(rows, {part.index for part in parts})
                last = copy.copy(output)
                last.outputs = [self._cut(part, text, new=new) for part in parts]
                latest |= {part.index: part for part in last.outputs}
                await self._engage(engage, {part.index for part in parts})
                if all(sample.ended for sample in self._samples):
                    break
                if last.outputs and not (final or output.finished):
                    yield last
        assert last is not None, "the engine ended a request without an output"
        last.finished = True
        if final:
            last.outputs = [part for _, part in sorted(latest.items())]
        yield last

    def _grow(self, output: Any, *, new: bool) -> None:
        """Add the tokens and text of an output to the state of its sample; `new` as for `outputs`."""
        sample = self._samples[output.index]
        if not new:
            sample.tokens, sample.text = [], ""
        sample.before = len(sample.tokens), len(sample.text)
        sample.tokens.extend(output.token_ids)
        sample.text += output.text

    async def _score(self, rows: Rows, grown: Collection[int]) -> None:
        """Fetch and score the new rows of the samples in `grown`."""
        samples = {index: self._samples[index] for index in grown if self._samples[index].tokens}
        found = await rows({index: (sample.tokens, sample.rows) for index, sample in samples.items()})
        for index, came in found.items():
            self._enter(samples[index], came)

    async def _engage(
        self, engage: Callable[[Sequence[int]], Awaitable[Sequence[int]]], grown: Collection[int]
    ) -> None:
        """Start the steering of samples in `grown` in which a steering monitor has fired for the first time."""
        steering = {
            monitor_reader.label for monitor_reader in self._monitor_readers if monitor_reader.monitor.do == "steer"
        }
        due = [
            index
            for index in sorted(grown)
            if (sample := self._samples[index]).steered is None
            and not sample.ended
            and any(crossing.monitor in steering for crossing in sample.crossings)
        ]
        # One call for all samples: with a call each, the engine would run on, and the last texts might end before it.
        for index, start in zip(due, await engage(due) if due else (), strict=True):
            self._samples[index].steered = start

    def _enter(self, sample: _Sample, came: Arrived) -> None:
        """Record the scores of one sample's new rows, up to the first token at which a monitor stops the text."""
        sample.rows += len(came.positions)
        crossings: list[Crossing] = []
        scored = []
        for monitor_reader, chosen in zip(self._monitor_readers, self._selected, strict=True):
            own = chosen[came.positions]
            scored.append(came.positions[own])
            crossings += self._crossings(
                monitor_reader, came.positions[own], monitor_reader.scores(came.captures)[torch.from_numpy(own)]
            )
        crossings.sort(key=lambda crossing: crossing.position)
        stopping = {
            monitor_reader.label for monitor_reader in self._monitor_readers if monitor_reader.monitor.do == "stop"
        }
        sample.stop = next((crossing for crossing in crossings if crossing.monitor in stopping), None)
        end = self._limit if sample.stop is None else sample.stop.position
        sample.crossings += [crossing for crossing in crossings if crossing.position <= end]
        for number, positions in enumerate(scored):
            sample.scored[number] += int((positions <= end).sum())

    def _crossings(self, monitor_reader: MonitorReader, positions: Ints, scores: torch.Tensor) -> list[Crossing]:
        """Return the crossings of one monitor, given positions and scores: float64 [rows].

        Raises CaptureNotFinite for a score that is NaN or infinite.
        """
        found = []
        for position, score in zip(positions.tolist(), scores.tolist(), strict=True):
            if not abs(score) < float("inf"):
                raise CaptureNotFinite(
                    f"{self._name}: monitor {monitor_reader.label!r} has no score at position {position}: its row at "
                    f"{monitor_reader.point} gives {score}"
                )
            if monitor_reader.monitor.fires(score):
                token = position - self._prompt_len
                found.append(Crossing(monitor_reader.label, position, token if token >= 0 else None, score))
        return found

    def _cut(self, output: Any, text: Callable[[Sequence[int]], str], *, new: bool) -> Any:
        """Return an output truncated after the token at which its sample was stopped.

        A cumulative output (not `new`) shares vLLM's own lists, which may have grown since, so it is copied.
        """
        sample = self._samples[output.index]
        if sample.stop is None:
            sample.ended = output.finish_reason is not None
            return output if new else _shortened(output, len(sample.tokens))
        assert sample.stop.index is not None, "prompts are not stopped at"
        sample.ended = True
        sample.tokens = sample.tokens[: sample.stop.index + 1]
        sample.text = text(sample.tokens)
        tokens, characters = sample.before
        return replace(
            _shortened(output, len(sample.tokens) - tokens),
            text=sample.text[characters:],
            cumulative_logprob=_total(output, len(sample.tokens) - tokens, new=new),
            finish_reason=STOPPED,
            stop_reason=sample.stop.monitor,
        )


def _shortened(output: Any, tokens: int) -> Any:
    """Return a copy of an output with only its first `tokens` tokens."""
    logprobs = None if output.logprobs is None else output.logprobs[:tokens]
    return replace(output, token_ids=list(output.token_ids[:tokens]), logprobs=logprobs)


def _total(output: Any, tokens: int, *, new: bool) -> float | None:
    """Return the cumulative log probability of an output after its first `tokens` tokens; None without logprobs."""
    if output.logprobs is None:
        return None
    counted = range(tokens, len(output.token_ids)) if new else range(tokens)
    part = sum(output.logprobs[number][output.token_ids[number]].logprob for number in counted)
    return float(output.cumulative_logprob - part if new else part)
