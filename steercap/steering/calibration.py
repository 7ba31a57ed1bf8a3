"""Means and standard deviations of rows' elements, by point, by which a codec quantises each element.

A calibration is compiled for an engine and checked against the model before a request runs. It is sent like steering
vectors: once, into a slot of the workers, identified by its SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float

from steercap.core.plan import InSlot
from steercap.core.program import NONE
from steercap.core.schema import PointSchema
from steercap.core.spec import CaptureSpec, Point
from steercap.core.values import index_of, shown
from steercap.errors import InvalidSpec, InvalidVector
from steercap.files import native
from steercap.files.native import FileKind
from steercap.steering.edits.inputs import FrozenMapping, float32_copy
from steercap.steering.lowering import Lowered, read_by

#: Least reach of an element, as a fraction of the median spread. Otherwise a row in which an element varies that hardly
#: varied in calibration would lose the precision of all others.
LEAST: Final = 0.01


@dataclass(frozen=True, eq=False)
class Calibration:
    """Mean and standard deviation of each element of rows, by point; made by `steercap.lab.directions.calibrate`.

    Args:
        means: mean of each element, by point: float32 [width], heads one after another.
        spreads: standard deviation of each element, by the same points: float32 [width].
        model: model of the rows.
        revision: revision of the model.
        dtype: dtype that the model computed in.
        tokens: selection of the tokens, as `TokenSelection` writes it.
        prompts: SHA-256 of all token ids read.
        texts: number of texts read.
        rows: number of rows of each point.

    Raises:
        InvalidSpec: no point, a key that is not a point, or other points in `means` than in `spreads`.
        InvalidVector: vectors that are not finite in float32, of different widths, or a negative spread.
    """

    means: Mapping[Point, Float[torch.Tensor, " width"]]
    spreads: Mapping[Point, Float[torch.Tensor, " width"]]
    _: KW_ONLY
    model: str = ""
    revision: str = ""
    dtype: str = ""
    tokens: str = ""
    prompts: str = ""
    texts: int = 0
    rows: int = 0

    def __post_init__(self) -> None:
        found = {}
        for name in ("means", "spreads"):
            given = getattr(self, name)
            if not isinstance(given, Mapping) or not given:
                raise InvalidSpec(f"Calibration: {name}={shown(given)}; give a vector for each point, one at least")
            found[name] = {
                _point(point): float32_copy(vector, f"Calibration: {name} at {shown(point)}", "width")
                for point, vector in given.items()
            }
        if found["means"].keys() != found["spreads"].keys():
            raise InvalidSpec("Calibration: means and spreads are of different points")
        for point, mean in found["means"].items():
            spread = found["spreads"][point]
            if mean.shape != spread.shape or bool((spread < 0).any()):
                raise InvalidVector(f"Calibration: the spreads at {point} must be {len(mean)} numbers, none negative")
        for name, vectors in found.items():
            object.__setattr__(self, name, FrozenMapping(vectors))

    @property
    def points(self) -> tuple[Point, ...]:
        """Points with means and spreads."""
        return tuple(self.means)

    def reach(self, point: Point) -> Float[torch.Tensor, " width"]:
        """Return what a point's centred rows are divided by before quantisation: float32 [width], none denormal.

        It is the spread of each element, but at least `LEAST` times the median spread above 0; 1 if no element varies.
        """
        spread = self.spreads[point]
        moving = spread[spread > 0]
        if not len(moving):
            return torch.ones_like(spread)
        # A hundredth of a tiny spread can be 0 in float32, and no row could be divided by it.
        return spread.clamp(min=max(LEAST * float(moving.median()), torch.finfo(torch.float32).tiny))

    def save(self, path: str | Path) -> Path:
        """Write the calibration to one safetensors file, and return its path; see `steercap.files.native`.

        Raises:
            InvalidFile: the name ends in something other than .safetensors.
        """
        return native.save(self, path, _kind(), model=self.model)

    @staticmethod
    def load(path: str | Path) -> Calibration:
        """Return the calibration in a file that `save` wrote.

        Raises:
            InvalidFile: the file is truncated, changed, of another kind, or of a newer version.
        """
        return native.load(path, _kind(), Calibration)

    def __repr__(self) -> str:
        about = f"{self.rows} rows of {self.texts} texts, model={self.model!r}"
        return f"Calibration({', '.join(map(str, self.points))}, {about})"


def _point(point: Any) -> Point:
    """Return a (layer, site) tuple as `Point`.

    Raises:
        InvalidSpec: it is not such a tuple.
    """
    layer, site = point if isinstance(point, tuple) and len(point) == 2 else (None, None)
    index = index_of(layer)
    if index is None or index < 0 or not isinstance(site, str):
        raise InvalidSpec(f"Calibration: {shown(point)} is not a point; give Point(layer, site), layers from 0")
    return Point(index, site)


def _kind() -> FileKind:
    return FileKind("calibration", {"Calibration": Calibration})


@dataclass(frozen=True, eq=False)
class Calibrated:
    """Calibration compiled for some points of one engine.

    Args:
        lowered: content of its slot: centre (mean) and reach of each point.
        plan: its part of a request's plan, without the slot, which is granted later.
        constants: by point, "centre" and "reach": float32 [width] each.
    """

    lowered: Lowered
    plan: InSlot
    constants: Mapping[Point, Mapping[str, torch.Tensor]]

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of the points and constants that rows are quantised by.

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
    """Return the calibration of a capture spec, or None.

    Raises:
        InvalidSpec: the field is not a `Calibration`.
    """
    if spec.calibration is None or isinstance(spec.calibration, Calibration):
        return spec.calibration
    raise InvalidSpec(f"calibration={shown(spec.calibration)}; give a Calibration, as `calibrate` makes it")


def compile_calibration(
    calibration: Calibration, points: Sequence[Point], armed: Mapping[Point, int], schemas: Mapping[Point, PointSchema]
) -> Calibrated:
    """Check a calibration against the model, and compile it for some points.

    Args:
        calibration: the calibration.
        points: points of a capture spec, all armed.
        armed: index of every armed point.
        schemas: shape and dtype of the rows at each armed point.

    Raises:
        InvalidSpec: the calibration lacks a point.
        InvalidVector: the rows at a point have another width than the calibration.
    """
    if missing := [point for point in points if point not in calibration.points]:
        raise InvalidSpec(
            f"calibration= has no means and spreads at {', '.join(map(str, missing))}; it was made at "
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
