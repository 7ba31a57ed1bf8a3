"""Runners that studies share: missing answers, readings and values are made, and kept as they come."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar

from steercap.concurrency.loops import each_of
from steercap.core.values import shown
from steercap.errors import InvalidSpec
from steercap.lab.measures import MEASURES, Answered, Measure
from steercap.lab.studies import NUMBER, Row, Table, Value
from steercap.steering.spec import SteeringSpec

if TYPE_CHECKING:
    from steercap.model import SteerModel

AnyAnswer = TypeVar("AnyAnswer", bound=Answered)
Item = TypeVar("Item")
Condition = TypeVar("Condition")

#: Concurrent requests: more than any batch of vLLM's defaults, few enough to hold in memory.
CONCURRENT: Final = 512
#: Answers measured at once, and then kept.
MEASURED: Final = 256


def steered(
    items: Iterable[Item], spec: Callable[[Any], SteeringSpec | None]
) -> Iterator[tuple[Item, SteeringSpec | None]]:
    """Yield items with their steering, made once for each condition, when its first item is taken.

    Args:
        items: items with an attribute `condition`, grouped by it.
        spec: function that makes the edits of a condition; None for none.
    """
    for condition, alike in groupby(items, attrgetter("condition")):
        edits = spec(condition)
        for item in alike:
            yield item, edits


async def fill(
    kept: Table[Row],
    missing: Iterable[Item],
    work: Callable[[Item, Callable[[Row], None]], Awaitable[None]],
    *,
    concurrent: int,
    done: int,
    wanted: int,
    progress: Callable[[int, int], None],
) -> None:
    """Make the missing rows of a table; rows made before an error are kept.

    Args:
        kept: table to fill; its parts become one when all rows are there.
        missing: items to work on.
        work: coroutine function of an item and of a function that keeps one row; it may keep several.
        concurrent: maximum number of items in progress.
        done, wanted: number of wanted rows that are there, and in all.
        progress: function called with both numbers after each row.

    Raises:
        The errors of `work`.
    """

    def keep(row: Row) -> None:
        nonlocal done
        kept.add([row])
        done += 1
        progress(done, wanted)

    try:
        await each_of(missing, lambda item: work(item, keep), concurrent)
    finally:
        kept.flush()
    kept.join()


async def ask(model: SteerModel, prompt: Any, sampling: Mapping[str, Any], spec: SteeringSpec | None) -> dict[str, Any]:
    """Generate one answer.

    Returns:
        The fields of `Answered` except `prompt`, and "finish_reason", vLLM's: "stop" or "length".
    """
    found = await model.run(prompt, sampling, steering=spec)
    (sample,), output = found.samples, found.output  # a server's choices hold the prompt's token ids
    return {
        "prompt_token_ids": tuple((sample if hasattr(output, "choices") else output).prompt_token_ids),
        "text": sample.text,
        "output_token_ids": tuple(sample.token_ids),
        "finish_reason": sample.finish_reason or "",
    }


async def measured(
    model: SteerModel, measure: Measure, records: Sequence[AnyAnswer], kept: Table[Value]
) -> list[float]:
    """Return the value of each record, measuring and storing those that are missing.

    Args:
        model: model that gave the answers.
        measure: measure to apply.
        records: answers, with a field `number`.
        kept: table of stored values.

    Raises:
        The errors of the measure; what was measured until then is kept.
    """
    missing = [record for record in records if NUMBER(record) not in kept.rows]
    try:
        for first in range(0, len(missing), MEASURED):
            part = missing[first : first + MEASURED]
            values = await measure.measure(model, part)
            kept.add(Value(number=NUMBER(one), value=value) for one, value in zip(part, values, strict=True))
    finally:
        kept.flush()
    kept.join()
    return [kept.rows[NUMBER(record)].value for record in records]


def measures_of(given: Iterable[str | Measure], columns: Sequence[str]) -> tuple[Measure, ...]:
    """Resolve measures given by name or as objects.

    Args:
        given: names in `MEASURES`, or measures.
        columns: column names of the table of answers, which labels must not repeat.

    Raises:
        UnknownName: a name is not in `MEASURES`.
        InvalidSpec: an entry is neither a name nor a measure, or a named measure needs arguments; two measures have
            the same label; or a label is in `columns`.
    """
    measures = chosen(given, MEASURES, Measure)
    for measure in measures:
        if measure.label in columns:
            raise InvalidSpec(
                f"{measure!r} would be column {measure.label!r}, which the table uses for something else; give it a "
                f"name other than {', '.join(columns)}"
            )
    return measures


def chosen(given: Iterable[Any], known: Mapping[str, type[Any]], kind: type[Any]) -> tuple[Any, ...]:
    """Resolve measures or tasks given by name or as objects, each with a label of its own.

    Args:
        given: names of known classes, or objects.
        known: classes by name.
        kind: their base class.

    Raises:
        UnknownName: no class has a name.
        InvalidSpec: an entry is something else, or the name of a class that needs arguments; or two have one label.
    """
    noun, found = kind.__name__.lower(), dict[str, Any]()
    for one in given:
        made = _make_member(one, known[one], noun) if isinstance(one, str) else one
        if not isinstance(made, kind):
            raise InvalidSpec(f"{shown(one)} is not a {noun}; give a name from {list(known)}, or a {kind.__name__}")
        if made.label in found:
            raise InvalidSpec(f"two {noun}s have the label {made.label!r}; leave one out")
        found[made.label] = made
    return tuple(found.values())


def _make_member(name: str, kind: type[Any], noun: str) -> Any:
    missing = [key for key, one in inspect.signature(kind).parameters.items() if one.default is one.empty]
    if missing:
        example = ", ".join(f"{key}=..." for key in missing)
        raise InvalidSpec(f"{noun} {name!r} needs its {' and '.join(missing)}; give {kind.__name__}({example})")
    return kind()
