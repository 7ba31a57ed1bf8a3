"""Pairs of prompts, and the runner of a patching experiment in one engine: one prompt in each run, many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar, get_args

import torch
from jaxtyping import Float

from steercap.concurrency.loops import each_of
from steercap.core.protocols import Progress, ProgressCallback
from steercap.core.spec import CaptureSpec, Point
from steercap.core.values import count_of, index_of, shown
from steercap.errors import InvalidPrompt, InvalidSetting, InvalidSpec
from steercap.lab.directions.extraction import Text, ids_of
from steercap.lab.mechanism.patching.metrics import Metric, MetricRequest
from steercap.lab.mechanism.patching.points import PatchedPlace, elements_of
from steercap.steering.edits.replace import Replace
from steercap.steering.spec import SteeringSpec

if TYPE_CHECKING:
    from steercap.model import SteerModel

#: Direction of patching: "denoise" puts clean rows into the corrupted run, "noise" corrupted rows into the clean.
Direction: TypeAlias = Literal["denoise", "noise"]
#: Alignment of prompts of different lengths: "end" aligns the last tokens.
Align: TypeAlias = Literal["end"]

#: Sites whose rows depend on their positions, as they include rotary embedding.
ROTATED: Final = frozenset({"q", "k"})


@dataclass(frozen=True)
class Pair:
    """Prompt that is patched, and prompt that rows are taken from.

    Args:
        number: index of the pair.
        base: token ids of the prompt that is patched.
        source: token ids of the prompt that rows are taken from.
        tokens: text of each token of `base`.
    """

    number: int
    base: tuple[int, ...]
    source: tuple[int, ...]
    tokens: tuple[str, ...]

    @property
    def shift(self) -> int:
        """Offset from a position of `base` to its counterpart in `source`."""
        return len(self.source) - len(self.base)


async def pairs_of(model: SteerModel, clean: Any, corrupted: Any, *, direction: Any, align: Any) -> list[Pair]:
    """Tokenize clean and corrupted prompts, one each or lists of equal length, and pair them.

    Raises:
        InvalidSpec: an unknown direction or alignment, or lists of different lengths.
        InvalidPrompt: prompts of a pair have different lengths, and `align` is None.
    """
    if direction not in get_args(Direction) or not isinstance(direction, str):
        raise InvalidSpec(f"direction={shown(direction)}; give 'denoise', clean rows into corrupted runs, or 'noise'")
    if align is not None and align not in get_args(Align):
        raise InvalidSpec(f"align={shown(align)}; give None for prompts of equal length, or 'end'")
    cleans, corrupteds = texts_of(clean, "clean"), texts_of(corrupted, "corrupted")
    if len(cleans) != len(corrupteds):
        raise InvalidSpec(f"{len(cleans)} clean prompts and {len(corrupteds)} corrupted ones; give as many of each")
    found, tokenizer = [], model.tokenizer
    ids = [tuple(one) for one in await ids_of(model, [*cleans, *corrupteds])]
    for number, (one, other) in enumerate(zip(ids[: len(cleans)], ids[len(cleans) :], strict=True)):
        if len(one) != len(other) and align is None:
            raise InvalidPrompt(
                f"pair {number}: the clean prompt has {len(one)} tokens and the corrupted one {len(other)}: "
                f"{decoded(tokenizer, one)} and {decoded(tokenizer, other)}; make them alike, or give align='end' to "
                "lay their ends beside each other"
            )
        base, source = (other, one) if direction == "denoise" else (one, other)
        found.append(Pair(number, base, source, decoded(tokenizer, base)))
    return found


def texts_of(given: Any, what: str) -> list[Text]:
    """Return one text or several as a list; `what` names the argument in the error.

    Raises:
        InvalidSpec: there is none, or `given` is not text.
    """
    if isinstance(given, (str, tuple)) or (isinstance(given, Sequence) and given and index_of(given[0]) is not None):
        return [given]
    if isinstance(given, bytes) or not isinstance(given, Sequence) or not given:
        raise InvalidSpec(f"{what}={shown(given)}; give a str, token ids, an Exchange, or a list of these")
    return list(given)


def decoded(tokenizer: Any, ids: Sequence[int]) -> tuple[str, ...]:
    """Return the text of each token by itself."""
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    return tuple(str(decode([token])) for token in ids)


Item = TypeVar("Item")
Result = TypeVar("Result")
#: Rows of a run by point, float [positions, width] in the order of the positions.
RowsAt = Mapping[Point, Float[torch.Tensor, "positions width"]]

#: Default concurrent runs: a batch with vLLM's defaults and a queue for the next; each occupies a steering slot.
CONCURRENCY: Final = 256
#: Pairs that are processed concurrently, with their rows in memory.
PAIRS: Final = 4


@dataclass(frozen=True)
class PatchSource:
    """Captured rows of a run, to be patched into another run.

    Args:
        rows: rows by point, [positions, width], the dimensions of a row flattened.
        positions: positions of the rows, ascending.
    """

    rows: RowsAt
    positions: tuple[int, ...]

    def at(self, point: Point, positions: Iterable[int]) -> Float[torch.Tensor, "positions width"]:
        """Return the rows of a point at some captured positions, in their order."""
        index = {position: row for row, position in enumerate(self.positions)}
        return self.rows[point][[index[position] for position in positions]]


class Runs:
    """Runner of an experiment on pairs of prompts: it runs prompts, with and without edits, and computes their metric.

    Patched runs of all pairs share one limit of concurrent runs.

    Args:
        model: an open model.
        metric: metric of a run.
        pairs: number of pairs.
        concurrency: maximum concurrent patched runs; at most as many as the model has steering slots.
        progress: as for `patch`; the stage is "runs", of the `total` that the caller sets.

    Raises:
        InvalidSpec: `metric` is not a Metric, or does not fit the pairs.
        InvalidSetting: `concurrency` is not above 0.
    """

    def __init__(
        self,
        model: SteerModel,
        metric: Metric,
        pairs: int,
        concurrency: int = CONCURRENCY,
        progress: ProgressCallback | None = None,
    ) -> None:
        if not isinstance(metric, Metric):
            raise InvalidSpec(f"metric={shown(metric)}; give a Metric, such as LogitDifference((' Mary', ' John'))")
        limit = count_of(concurrency, "concurrency", wrong=InvalidSetting)
        self.model = model
        self.total = 0
        self._asked: list[MetricRequest] = metric.asked(model.tokenizer, pairs)
        self._limit = min(limit, model.settings.steering_slots)
        self._gate = asyncio.Semaphore(self._limit)
        self._progress = progress
        self._done = 0

    async def each_pair(self, pairs: Sequence[Item], work: Callable[[Item], Awaitable[Result]]) -> list[Result]:
        """Await `work` on each pair, few at once, since the rows of each are in memory; return results in order."""
        return await each_of(pairs, work, PAIRS)

    async def each_change(self, items: Iterable[Item], work: Callable[[Item], Awaitable[Result]]) -> list[Result]:
        """Await `work`, a patched run, on each item, within the limit over all pairs; return results in order."""

        async def one(item: Item) -> Result:
            async with self._gate:
                found = await work(item)
            self._done += 1
            if self._progress is not None:
                self._progress(Progress("runs", self._done, self.total))
            return found

        return await each_of(items, one, self._limit)

    async def value(self, pair: int, ids: Sequence[int], change: SteeringSpec | None = None) -> float:
        """Run a prompt, token ids of pair `pair`, with the edits of `change`, None for none; return its metric."""
        asked = self._asked[pair]
        prompt = {"prompt_token_ids": list(ids)}
        return asked.read((await self.model.run(prompt, asked.sampling_params, steering=change)).output)

    async def read(
        self, pair: int, ids: Sequence[int], spec: CaptureSpec, change: SteeringSpec | None = None
    ) -> tuple[float, PatchSource]:
        """Run a prompt as `value` does; return its metric and captured rows. `spec` is raw, without `reduce`."""
        asked = self._asked[pair]
        prompt = {"prompt_token_ids": list(ids)}
        found = await self.model.run(prompt, asked.sampling_params, capture=spec, steering=change)
        async with found.handle as handle:
            rows = {point: rows.flatten(1) for point, rows in handle.captures.items()}
            return asked.read(found.output), PatchSource(rows, tuple(handle.positions.tolist()))


def replaced(
    model: SteerModel, cell: PatchedPlace, rows: Float[torch.Tensor, "positions width"], heads: Sequence[int] = ()
) -> Replace:
    """Return the edit that replaces the rows at a cell.

    Args:
        model: model of the points.
        cell: place of the rows.
        rows: replacement for each position of the cell, the dimensions of a row flattened.
        heads: heads to replace, in place of the cell's head; empty for that one.
    """
    schema = model.points[cell.point]
    elements: Any = elements_of(cell.head, schema)
    if heads:
        width = schema.width // schema.shape[0]
        elements = [head * width + element for head in sorted(heads) for element in range(width)]
    layer, site = cell.point
    return Replace(rows, list(cell.positions), elements=elements, layer=layer, site=site)
