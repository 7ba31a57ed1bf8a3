"""Runners that studies share: missing answers and values are computed, and stored as they come."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar

from steercap.concurrency.loops import each_of
from steercap.core.protocols import Count, ProgressCallback
from steercap.core.values import parts_of, shown
from steercap.errors import InvalidSpec
from steercap.lab.measures import MEASURES, Answered, Measure
from steercap.lab.studies import NUMBER, Row, Table, Value
from steercap.steering.spec import SteeringSpec

if TYPE_CHECKING:
    from steercap.model import SteerModel

AnyAnswer = TypeVar("AnyAnswer", bound=Answered)
Item = TypeVar("Item")
Condition = TypeVar("Condition")

#: Default concurrent requests: more than a batch with vLLM's defaults, few enough to be in memory.
CONCURRENCY: Final = 512
#: Number of answers that are measured, and whose values are then stored, at a time.
MEASURED: Final = 256
#: Address in the repr of an object without one of its own: another object has it later.
ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+>", re.IGNORECASE)


def steered(
    items: Iterable[Item], spec: Callable[[Any], SteeringSpec | None]
) -> Iterator[tuple[Item, SteeringSpec | None]]:
    """Yield each item with the edits of its condition, which are made once, when the condition's first item is due.

    Args:
        items: items with an attribute `condition`, grouped by condition.
        spec: function that returns the edits of a condition; None without steering.
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
    concurrency: int,
    count: Count,
) -> None:
    """Compute the missing rows of a table; after an error, rows computed before are stored.

    Args:
        kept: table to fill; its parts are joined in one file when all rows are there.
        missing: items to work on.
        work: coroutine function of an item, and of a function that adds a row to the table, called for each row.
        concurrency: maximum number of items in progress.
        count: counter of the wanted rows in the table.

    Raises:
        The errors of `work`.
    """

    def keep(row: Row) -> None:
        kept.add([row])
        count.add()

    try:
        await each_of(missing, lambda item: work(item, keep), concurrency)
    finally:
        kept.flush()
    kept.join()


async def ask(model: SteerModel, prompt: Any, sampling: Mapping[str, Any], spec: SteeringSpec | None) -> dict[str, Any]:
    """Generate one answer to a prompt, with the edits of `spec`, None for none.

    Returns:
        Values of the fields of `Answered` except `prompt`, and "finish_reason", vLLM's: "stop" or "length".
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
    model: SteerModel,
    measure: Measure,
    records: Sequence[AnyAnswer],
    kept: Table[Value],
    progress: ProgressCallback | None,
) -> list[float]:
    """Return the value of each record in order; missing values are measured and stored.

    Args:
        model: model that generated the answers.
        measure: measure to apply.
        records: answers, with a field `number`.
        kept: table of stored values.
        progress: as for `run_sweep`; the stage is the measure's label.

    Raises:
        The errors of the measure; values measured until then are stored.
    """
    missing = [record for record in records if NUMBER(record) not in kept.rows]
    count = Count(measure.label, len(records), len(records) - len(missing), progress)
    try:
        for first in range(0, len(missing), MEASURED):
            part = missing[first : first + MEASURED]
            values = await measure.measure(model, part)
            kept.add(Value(number=NUMBER(one), value=value) for one, value in zip(part, values, strict=True))
            count.add(len(part))
    finally:
        kept.flush()
    kept.join()
    return [kept.rows[NUMBER(record)].value for record in records]


def measures_of(given: Iterable[str | Measure], columns: Sequence[str]) -> tuple[Measure, ...]:
    """Return the measures that are given by name or as objects, in order.

    Args:
        given: names in `MEASURES`, or measures.
        columns: column names of the table of answers, none of which may be a label.

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
    """Return the measures or tasks that are given by name or as objects, in order, with different labels.

    Args:
        given: names in `known`, or objects.
        known: classes by name.
        kind: base class of these classes.

    Raises:
        UnknownName: no class has a given name.
        InvalidSpec: they are not several; an entry is neither, or the name of a class that needs arguments; or two have
            one label, or the text by which one's stored values are recognised holds an address.
    """
    noun, found = kind.__name__.lower(), dict[str, Any]()
    several = parts_of(given, f"{noun}s")
    if several is None:
        raise InvalidSpec(f"{noun}s={shown(given)}; give a list of names from {list(known)}, or of {kind.__name__}s")
    for one in several:
        made = _make_member(one, known[one], noun) if isinstance(one, str) else one
        if not isinstance(made, kind):
            raise InvalidSpec(f"{shown(one)} is not a {noun}; give a name from {list(known)}, or a {kind.__name__}")
        if ADDRESS.search(made.key if isinstance(made, Measure) else repr(made)):
            raise InvalidSpec(
                f"{noun} {made.label!r}: {shown(made)} is told apart by an address of this process, so that values of "
                f"one with other arguments would be taken for its own; make {type(made).__name__} a frozen dataclass "
                f"of plain values, or give it a __repr__ with all that its values depend on"
            )
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
