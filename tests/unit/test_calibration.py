"""What a calibration takes, what rows are divided by, and that nobody changes what a slot holds already."""

from __future__ import annotations

import pytest
import torch
from workers import known_schemas

from steercap import Calibration, Point
from steercap.core.prompts import ids_of_text
from steercap.errors import InvalidSpec, InvalidVector
from steercap.steering.calibration import compile_calibration

POINT, WIDTH = Point(0, "resid_post"), 4
ONES = torch.ones(WIDTH)


@pytest.mark.parametrize(
    ("means", "spreads", "says"),
    [
        (ONES, ONES.double() * 1e300, "spreads at .* holds 4 values of 4 that are NaN or infinity in float32"),
        (-ONES.double() * 1e300, ONES, "means at .* holds 4 values of 4 that are NaN or infinity in float32"),
        (ONES, ONES * float("nan"), "NaN or inf"),
        (ONES, ONES[:3], "must be 4 numbers, none negative"),
        (ONES, -ONES, "must be 4 numbers, none negative"),
        (ONES[None], ONES[None], r"expected \[width\]"),
        (ONES.bool(), ONES, "not made of real numbers"),
    ],
)
def test_vectors_that_float32_cannot_hold_are_refused(means, spreads, says) -> None:
    """An infinite reach would decode every row to NaN, and no scale would show it."""
    with pytest.raises(InvalidVector, match=says):
        Calibration({POINT: means}, {POINT: spreads})


@pytest.mark.parametrize("point", [3, "resid_post", ("resid_post",), (-1, "resid_post"), (True, "z"), (0, 1)], ids=str)
def test_what_is_no_point_is_refused(point) -> None:
    """Layers count from 0 here, as a calibration knows no model."""
    with pytest.raises(InvalidSpec, match="is not a point; give Point"):
        Calibration({point: ONES}, {point: ONES})


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1.0, 1e38])
def test_rows_can_be_divided_by_any_reach(size) -> None:
    """Elements that hardly move get a hundredth of the typical spread, and never a number that float32 loses."""
    reach = Calibration({POINT: ONES}, {POINT: torch.tensor([0.0, size, size, size])}).reach(POINT)
    assert (reach >= torch.finfo(torch.float32).tiny).all()
    assert (reach >= 0.01 * size * (1 - 1e-6)).all()
    if size > 1e-36:
        torch.testing.assert_close(reach / size, torch.tensor([0.01, 1.0, 1.0, 1.0]))


def test_constants_of_a_handle_cannot_change_those_of_others() -> None:
    """All handles of a calibration decode by what was compiled once, and its slot holds: each look gives a copy."""
    armed = {POINT: 0}
    calibration = Calibration({POINT: ONES}, {POINT: 2 * ONES})
    compiled = compile_calibration(calibration, [POINT], armed, known_schemas(armed, WIDTH, 1))
    for name, known in (("centre", ONES), ("reach", 2 * ONES)):
        compiled.constants[POINT][name].mul_(7)
        assert torch.equal(compiled.constants[POINT][name], known)


@pytest.mark.parametrize(
    "text",
    [None, 5, torch.tensor(5), [1, 2.5], [True], torch.ones(2), [[1]], ["a"], {1}, {}, b"ab", iter([1])],
    ids=lambda text: str(text).partition(" at 0x")[0],
)
def test_what_is_no_text_is_refused(text) -> None:
    """Such as each of the ids of one text that were given in place of texts; always by the same error."""
    with pytest.raises(InvalidSpec, match="is not a text; give texts in a list"):
        ids_of_text(text)


@pytest.mark.parametrize("text", [[1, 2], (1, 2), torch.tensor([1, 2]), range(1, 3)], ids=str)
def test_token_ids_of_any_kind_are_a_text(text) -> None:
    """They become whole numbers; no text is empty ids."""
    assert (ids_of_text(text), ids_of_text(text[:0])) == ([1, 2], [])
