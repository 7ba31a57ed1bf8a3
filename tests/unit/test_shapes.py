"""Shapes that signatures state are enforced under test: see `shapes.py`."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch
from jaxtyping import TypeCheckError
from shapes import CHECKED

import steercap
from steercap.kernels import reference
from steercap.kernels.bits import stray_rows

ROOT = Path(steercap.__file__).parent
#: Where shapes are stated and not checked: on CUDA alone, within Triton, in what vLLM compiles, and in tests of tests.
UNCHECKED = {
    "kernels/tap.py",
    "testing/edits.py",
    "testing/reference.py",
    # They read what users pass, tensors of any kind among it, and refuse it in words of their own.
    "captures/fork_files.py",
    "captures/published.py",
    "lab/directions/contrast.py",
    "lab/personas/levels.py",
    "steering/directions.py",
    # Blocking twins of functions that are checked.
    "sync/functions.py",
}


@pytest.mark.parametrize(
    "call",
    [
        lambda: stray_rows(torch.zeros(3)),
        lambda: stray_rows(torch.zeros(3, 4, dtype=torch.int64)),
        lambda: reference.TokenEntries(1, *[torch.zeros(2)] * 5),
        lambda: reference.rows_at(torch.zeros(3), None, torch.zeros(1, dtype=torch.int64)),
    ],
    ids=["a row for rows", "whole numbers for rows", "floats for places", "a vector for several"],
)
def test_another_shape_or_dtype_is_refused(call) -> None:
    """What contradicts its signature is an error that names the argument, before anything is computed."""
    with pytest.raises(TypeCheckError, match="parameter"):
        call()


def test_axes_of_one_name_are_as_long_as_each_other() -> None:
    """Rows and vectors of different widths are refused, although each alone is right."""
    rows, bank = torch.zeros(3, 8), torch.zeros(2, 7)
    masks, replacements = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 1, dtype=torch.int64)
    with pytest.raises(TypeCheckError, match="parameter 'bank'"):
        reference.edit_rows(rows, [], masks, replacements, bank)
    reference.edit_rows(rows, [], masks, replacements, torch.zeros(2, 8))


def test_every_module_that_states_shapes_is_checked() -> None:
    """A module that imports jaxtyping is checked, or named above with the reason."""
    stating = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if "from jaxtyping" in path.read_text()}
    places = [name.removeprefix("steercap.").replace(".", "/") for name in CHECKED]
    checked = {name for name in stating for place in places if name == f"{place}.py" or name.startswith(f"{place}/")}
    triton = {name for name in stating if re.match(r"kernels/triton_\w+\.py", name)}
    assert stating - checked - triton == UNCHECKED
    assert all(importlib.import_module(name).__name__ == name for name in CHECKED)
