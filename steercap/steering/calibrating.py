"""Compilation of a calibration for one engine, checked against the model before anything runs.

A calibration is sent like steering vectors: held in a slot, identified by its SHA-256, sent once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from steercap.core.plan import InSlot
from steercap.core.program import NONE
from steercap.core.schema import PointSchema
from steercap.core.spec import CaptureSpec, Point
from steercap.core.values import shown
from steercap.errors import InvalidSpec, InvalidVector
from steercap.steering.calibration import Calibration
from steercap.steering.layers import FrozenMapping
from steercap.steering.lowering import Lowered
from steercap.steering.projection import read_by


@dataclass(frozen=True, eq=False)
class Calibrated:
    """Calibration compiled for some points of one engine.

    Args:
        lowered: content of its slot: centre and reach of each point.
        plan: its part of a request's plan; the slot is not known yet.
        constants: centre and reach by point and name, float32 [width] each.
    """

    lowered: Lowered
    plan: InSlot
    constants: Mapping[Point, Mapping[str, torch.Tensor]]

    @property
    def digest(self) -> str:
        """SHA-256 of the points and constants that rows are coded by, in hexadecimal.

        It is the same on engines that arm other points, or these in another order. The digest of the slot's content is
        not: that content numbers the armed points and depends on their order.
        """
        found = hashlib.sha256()
        for point in sorted(self.constants):
            found.update(str(point).encode())
            for name, vector in sorted(self.constants[point].items()):
                found.update(name.encode())
                found.update(vector.contiguous().numpy().data)
        return found.hexdigest()


def calibration_of(spec: CaptureSpec) -> Calibration | None:
    """Return the user's calibration, or None if there is none.

    Raises:
        InvalidSpec: it is no `Calibration`.
    """
    if spec.calibration is None or isinstance(spec.calibration, Calibration):
        return spec.calibration
    raise InvalidSpec(f"calibration={shown(spec.calibration)}; give a Calibration, as `calibrate` makes it")


def compile_calibration(
    calibration: Calibration, points: Sequence[Point], armed: Mapping[Point, int], schemas: Mapping[Point, PointSchema]
) -> Calibrated:
    """Check a calibration, and compile its part for some points.

    Args:
        calibration: the user's calibration.
        points: the points of a spec, armed.
        armed: index of every armed point.
        schemas: shape and dtype of the rows at each armed point.

    Raises:
        InvalidSpec: it does not know a point.
        InvalidVector: the rows at a point have another width than it was made of.
    """
    if missing := [point for point in points if point not in calibration.points]:
        raise InvalidSpec(
            f"calibration= knows nothing of {', '.join(map(str, missing))}; it was made at "
            f"{', '.join(map(str, calibration.points))}"
        )
    for point in points:
        width = len(calibration.means[point])
        if width != schemas[point].width:
            raise InvalidVector(
                f"calibration= has {width} elements at {point}, and its rows are {schemas[point]}; it was made for "
                "another model"
            )
    ordered = sorted(points, key=lambda point: armed[point])
    constants = {  # frozen: all handles hold these, and decode by what the slot holds
        point: FrozenMapping({"centre": calibration.means[point], "reach": calibration.reach(point)})
        for point in ordered
    }
    widest = max(schemas[point].width for point in ordered)
    vectors = torch.ones(2 * len(ordered), widest, dtype=torch.float32)  # rows of one blob are as wide as the widest
    for number, named in enumerate(constants.values()):
        for part, vector in enumerate(named.values()):
            vectors[2 * number + part, : len(vector)] = vector
    lowered = read_by(vectors, [armed[point] for point in ordered])
    return Calibrated(lowered, InSlot(NONE, lowered.digest), constants)
