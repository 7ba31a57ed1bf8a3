"""msgspec's complaints about what a user gave, in the user's own names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from steercap.core.values import shown

#: What msgspec says of a wrong value, then its path.
_COMPLAINT: Final = re.compile(r"(?P<says>.*?) - at (?P<key>`key` in )?`\$(?P<path>.*)`", re.DOTALL)


def named(complaint: str, given: Mapping[str, Any], places: tuple[str, ...] = ()) -> str:
    """A complaint with the name and the value that it is about.

    Args:
        complaint: msgspec's; any other is given back as it is.
        given: what the path starts in, by name.
        places: names of what the path counts, where it starts with a number.
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
