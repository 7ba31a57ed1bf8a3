"""For the reference: "The errors of X." under `Raises:` names no exception, and would be left out of the page."""

import re
from typing import Any

import griffe


class Raises(griffe.Extension):
    """Gives such lines a name that the docstring parser reads."""

    def on_object(self, *, obj: griffe.Object, **_kwargs: Any) -> None:
        """Called for every object that was read."""
        if obj.docstring is not None:
            found = re.sub(r"(?m)^(\s+)The errors of ", r"\1Others: those of ", obj.docstring.value)
            obj.docstring.value = found
