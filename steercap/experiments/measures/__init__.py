"""MEASURED BY: one file a measure of answers. To add one, add a file whose `MEMBER` is its class."""

import sys
from collections.abc import Iterable

from steercap.core.registry import Registry
from steercap.errors import InvalidSpec
from steercap.experiments.measures.base import Measure

#: Every measure by the name of its file; members are subclasses of `Measure`.
MEASURES: Registry[type] = Registry("measure", sys.modules[__name__], type)


def measures_of(given: Iterable[str | Measure]) -> tuple[Measure, ...]:
    """Measures by name, or made with arguments of their own.

    Raises:
        UnknownName: a name that no measure has.
        InvalidSpec: something that is no measure, one that needs arguments, two under one label, or a label that is a
            column of every sweep's table, such as "text".
    """
    from steercap.experiments.store import Record  # which imports `base` of this package

    columns = Record.__struct_fields__
    found: dict[str, Measure] = {}
    for one in given:
        try:
            measure = MEASURES[one]() if isinstance(one, str) else one
        except TypeError as error:
            raise InvalidSpec(f"measure {one!r} needs arguments: {error}; make it yourself") from error
        if not isinstance(measure, Measure):
            raise InvalidSpec(f"{one!r} is no measure; give a name of {list(MEASURES)}, or a Measure")
        if measure.label in columns:
            raise InvalidSpec(
                f"{measure!r} would be column {measure.label!r} of the table, which says something else; "
                f"name it otherwise than {', '.join(columns)}"
            )
        if measure.label in found:
            raise InvalidSpec(f"{measure!r} and {found[measure.label]!r} have one label; leave one out")
        found[measure.label] = measure
    return tuple(found.values())
