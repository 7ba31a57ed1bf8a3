"""MEASURED BY: one file a measure of answers. To add one, add a file whose `MEMBER` is its class."""

import inspect
import sys
from collections.abc import Iterable

from steercap.core.registry import Registry
from steercap.core.values import shown
from steercap.errors import InvalidSpec
from steercap.experiments.measures.base import Measure

#: Every measure by the name of its file; members are subclasses of `Measure`.
MEASURES: Registry[type] = Registry("measure", sys.modules[__name__], type)


def measures_of(given: Iterable[str | Measure]) -> tuple[Measure, ...]:
    """Measures by name, or made with arguments of their own.

    Raises:
        UnknownName: a name that no measure has.
        InvalidSpec: something that is not a measure, one that needs arguments, two of one label, or a label that is a
            column of every sweep's table, such as "text".
    """
    from steercap.experiments.store import Record  # which imports `base` of this package

    columns = Record.__struct_fields__
    found: dict[str, Measure] = {}
    for one in given:
        measure = _named(one) if isinstance(one, str) else one
        if not isinstance(measure, Measure):
            raise InvalidSpec(f"{shown(one)} is not a measure; give a name from {list(MEASURES)}, or a Measure")
        if measure.label in columns:
            raise InvalidSpec(
                f"{measure!r} would be column {measure.label!r} of the table, which says something else; "
                f"name it otherwise than {', '.join(columns)}"
            )
        if measure.label in found:
            raise InvalidSpec(f"{measure!r} and {found[measure.label]!r} have the same label; leave one out")
        found[measure.label] = measure
    return tuple(found.values())


def _named(name: str) -> Measure:
    kind = MEASURES[name]
    missing = [key for key, one in inspect.signature(kind).parameters.items() if one.default is one.empty]
    if missing:
        example = ", ".join(f"{key}=..." for key in missing)
        raise InvalidSpec(f"measure {name!r} must be told its {' and '.join(missing)}; give {kind.__name__}({example})")
    measure: Measure = kind()
    return measure
