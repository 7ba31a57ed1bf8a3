"""msgspec's validation errors rewritten with the user's own names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from steercap.core.values import shown

#: msgspec's message about a wrong value, with the path of the value.
_COMPLAINT: Final = re.compile(r"(?P<says>.*?) - at (?P<key>`key` in )?`\$(?P<path>.*)`", re.DOTALL)


def named(complaint: str, given: Mapping[str, Any], places: tuple[str, ...] = ()) -> str:
    """Return a validation error with the name and the value that it is about.

    Args:
        complaint: message of msgspec; any other is returned as it is.
        given: values by the names in which the path starts.
        places: names for the indices in which the path starts, where it starts with a number.
    """
    found = _COMPLAINT.fullmatch(complaint)
    if found is None:
        return complaint
    path = found["path"]
    if places and (numbered := re.match(r"\[(\d+)\]", path)):
        path = places[int(numbered[1])] + path[numbered.end() :]
    path = path.removeprefix("sampling_params").lstrip(".")
    name = re.split(r"[.\[]", path)[0]
    where = f"a key of {path}" if found["key"] else path
    says = f"{where}: {found['says'][:1].lower()}{found['says'][1:]}"
    return f"{says} ({name}={shown(given[name])})" if name in given else says
