"""What is wrong with a family."""

from dataclasses import replace

from steercap.architectures.families import FAMILIES
from steercap.architectures.families.base import one

VALUES = {"None": None, "one": one, "1": 1}


def spoil(said: str) -> None:
    """Change the fields of a family, or take it away."""
    name, *changes = said.split()
    FAMILIES[name]  # they are found by now
    members = FAMILIES._members
    assert members is not None
    wrong = dict(change.split("=") for change in changes)
    if not wrong:
        del members[name]
    else:
        fields = {field: VALUES.get(value, value) for field, value in wrong.items()}
        members[name] = replace(members[name], **fields)
