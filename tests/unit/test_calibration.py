"""That nobody changes what a slot of a calibration holds already."""

from __future__ import annotations

import torch
from workers import known_schemas

from steercap import Calibration, Point
from steercap.steering.calibration import compile_calibration

POINT, WIDTH = Point(0, "resid_post"), 4
ONES = torch.ones(WIDTH)


def test_constants_of_a_handle_cannot_change_those_of_others() -> None:
    """All handles of a calibration decode by what was compiled once, and its slot holds: each look gives a copy."""
    armed = {POINT: 0}
    calibration = Calibration({POINT: ONES}, {POINT: 2 * ONES})
    compiled = compile_calibration(calibration, [POINT], armed, known_schemas(armed, WIDTH, 1))
    for name, known in (("centre", ONES), ("reach", 2 * ONES)):
        compiled.constants[POINT][name].mul_(7)
        assert torch.equal(compiled.constants[POINT][name], known)
