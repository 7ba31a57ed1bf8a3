"""Monitors: probes with thresholds that score rows while a request runs, and their compilation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, Final, Literal, cast, get_args

import torch

from steercap.architectures.sites import SITES, placed
from steercap.core.hints import dataclass
from steercap.core.plan import InSlot
from steercap.core.program import NONE
from steercap.core.schema import PointSchema
from steercap.core.spec import Point, name_of_site, resolve_layers
from steercap.core.tokens import Tokens, TokenSelection
from steercap.core.values import index_of, number_of, shown, truth_of
from steercap.errors import InvalidSpec, InvalidVector
from steercap.steering.edits.inputs import Vector, at_layer, float32_copy, model_of
from steercap.steering.lowering import CompiledProjection, read_by
from steercap.steering.spec import Steering, SteeringSpec, spec_of

#: Action of a monitor when it fires.
Do = Literal["annotate", "stop", "steer"]
#: Maximum number of monitors of one request.
MOST: Final = 64


@dataclass(frozen=True, eq=False)
class Monitor:
    """Probe with a threshold that watches a request: it fires at each row h with h·probe + bias beyond the threshold.

    A row is scored when the model has read its token, which is when the next token has been sampled. The last token of
    a text is never read, and has no score.

    A score is computed from float32 products on the worker, or in float64 if the request captures the rows too; so
    rounding decides for a score that equals the threshold.

    Args:
        probe: [hidden], used without normalisation, such as the weights of a linear probe.
        threshold: value that the score must exceed (`above`) or be less than.
        layer: decoder layer whose rows are scored, from 0; negative from the end.
        site: place in the layer, a name in `steercap.architectures.sites`. Rows are scored after the edits at their
            point.
        above: True to fire above the threshold; False to fire below it.
        bias: bias of the probe, added to the score.
        tokens: tokens whose rows are scored, as for `CaptureSpec`.
        do: "annotate" reports where it fires; "stop" ends the text with the token at which it first fires, for
            generated tokens only; "steer" starts `steering`, which then stays on.
        steering: steering that starts where it first fires, with the next token that the model has not begun to read;
            the report says which. From there on it edits the tokens that its edits select.
        name: name in reports; "" for its number among the monitors of its request.
        model: model that the probe was made for, as for edits.

    Raises:
        InvalidSpec: a number, name, flag or `do` of a wrong type or value.
        InvalidVector: a probe that is zero, not finite, or not [hidden].
        InvalidSelection: a malformed `tokens`.
        UnknownName: a site that does not exist.
    """

    probe: Vector
    _: KW_ONLY
    threshold: float
    layer: int
    site: str = "resid_post"
    above: bool = True
    bias: float = 0.0
    tokens: Tokens | TokenSelection = "generated"
    do: Do = "annotate"
    name: str = ""
    steering: Steering | None = None
    model: str = ""

    def __post_init__(self) -> None:
        self._check_do()
        for field in ("threshold", "bias"):
            number = number_of(getattr(self, field))
            if number is None or not math.isfinite(number):
                raise InvalidSpec(f"Monitor: {field}={shown(getattr(self, field))}; give a finite number")
            object.__setattr__(self, field, number)
        layer, above = index_of(self.layer), truth_of(self.above, "Monitor: above")
        if layer is None:
            raise InvalidSpec(f"Monitor: layer={shown(self.layer)}; give the index of one layer")
        if not all(isinstance(text, str) for text in (self.site, self.name, self.model)):
            raise InvalidSpec(
                f"Monitor: site={shown(self.site)}, name={shown(self.name)}, model={shown(self.model)}; give text"
            )
        object.__setattr__(self, "model", model_of({"probe": self.probe}, "Monitor") or self.model)
        object.__setattr__(self, "layer", layer)
        object.__setattr__(self, "above", above)
        object.__setattr__(self, "site", name_of_site(self.site))
        object.__setattr__(self, "tokens", TokenSelection.parse(self.tokens))
        _ = SITES[self.site]
        self._keep_probe(layer)

    def _keep_probe(self, layer: int) -> None:
        what = "Monitor: probe"
        probe = float32_copy(at_layer(self.probe, what, layer, self.site), what, "width")
        if not probe.any():
            raise InvalidVector("Monitor: probe is zero, so every row would have the same score")
        object.__setattr__(self, "probe", probe)

    def _check_do(self) -> None:
        asked: object = self.do
        if not isinstance(asked, str) or asked not in get_args(Do):
            raise InvalidSpec(f"Monitor: do={shown(asked)}; give {', '.join(map(repr, get_args(Do)))}")
        if (asked == "steer") != (self.steering is not None):
            raise InvalidSpec(
                f"Monitor: do={shown(asked)} with steering={shown(self.steering)}; steering= and do='steer' go together"
            )
        if self.steering is not None:
            object.__setattr__(self, "steering", spec_of(self.steering, "Monitor: steering"))

    @property
    def weights(self) -> torch.Tensor:
        """Copy of the probe: float32 [hidden]."""
        return cast("torch.Tensor", self.probe)

    @property
    def unit(self) -> torch.Tensor:
        """Probe scaled to norm 1: float32 [hidden]."""
        return (self.weights.double() / float(self.weights.double().norm())).float()

    @property
    def length(self) -> float:
        """Euclidean norm of the probe."""
        return float(self.weights.double().norm())

    @property
    def power(self) -> float:
        """Least power of two above the norm; rows are projected on the probe divided by it, which is exact."""
        return math.ldexp(1.0, math.frexp(self.length)[1])

    @property
    def selection(self) -> TokenSelection:
        """Selection of the tokens to score, parsed from `tokens`."""
        return cast("TokenSelection", self.tokens)

    def fires(self, score: float) -> bool:
        """Return True if a score is above the threshold, or with above=False below it."""
        return score > self.threshold if self.above else score < self.threshold

    def point(self, num_layers: int) -> Point:
        """Return the point whose rows the monitor scores, in a model of `num_layers` layers.

        Raises:
            LayerOutOfRange: the model does not have the monitor's layer.
        """
        (layer,) = resolve_layers(self.layer, num_layers)
        (point,) = placed((Point(layer, self.site),), num_layers)
        return point

    def __repr__(self) -> str:
        """Return a short text: name, threshold, place and action."""
        beyond = ">" if self.above else "<"
        return f"Monitor({self.name or 'probe'} {beyond} {self.threshold} at {self.layer}, {self.site}: {self.do})"


def monitors_of(given: Any) -> tuple[Monitor, ...]:
    """Return the argument `monitors=` of a request as a tuple, after checking it; () for None.

    Raises:
        InvalidSpec: items of another type, more than `MOST`, or two of the same name.
    """
    if given is None:
        return ()
    found = (given,) if isinstance(given, Monitor) else tuple(given) if isinstance(given, (list, tuple)) else None
    if found is None or not all(isinstance(one, Monitor) for one in found):
        raise InvalidSpec(f"monitors={shown(given)}; give a list of Monitor")
    if len(found) > MOST:
        raise InvalidSpec(f"{len(found)} monitors; a request may have {MOST}")
    labels = labels_of(found)
    if len(set(labels)) < len(labels):
        raise InvalidSpec(f"monitors are called {', '.join(map(repr, labels))}; give each a name= of its own")
    return found


def held_back(monitors: Sequence[Monitor]) -> SteeringSpec | None:
    """Return the steering that one of the monitors starts when it fires; None if no monitor steers.

    Raises:
        InvalidSpec: several monitors steer.
    """
    found = [cast("SteeringSpec", one.steering) for one in monitors if one.steering is not None]
    if len(found) > 1:
        raise InvalidSpec(f"{len(found)} monitors with do='steer'; a request may have one")
    return found[0] if found else None


def labels_of(monitors: Sequence[Monitor]) -> tuple[str, ...]:
    """Return the monitors' names in reports: `name`, or the index in the request."""
    return tuple(one.name or str(number) for number, one in enumerate(monitors))


def compile_probes(
    monitors: Sequence[Monitor],
    points: Sequence[Point],
    armed: Mapping[Point, int],
) -> tuple[CompiledProjection, tuple[int, ...]]:
    """Compile the capture for a request that keeps nothing but its monitors' scores: projections of rows on the probes.

    Args:
        monitors: the monitors.
        points: point of each monitor.
        armed: index of every armed point.

    Returns:
        The projection on probes divided by `power`, equally many at each point; and each monitor's column at its point.

    Raises:
        InvalidSpec: probes of different widths.
    """
    if len({len(one.weights) for one in monitors}) > 1:
        raise InvalidSpec("all monitors of a request must read rows of one width; use another request for the others")
    at: dict[Point, list[torch.Tensor]] = {}
    columns = []
    for monitor, point in zip(monitors, points, strict=True):
        found = at.setdefault(point, [])
        columns.append(len(found))
        found.append((monitor.weights.double() / monitor.power).float())
    ordered = sorted(at, key=armed.__getitem__)
    count = max(map(len, at.values()))
    vectors = [vector for point in ordered for vector in (at[point] * count)[:count]]  # as many numbers of each
    lowered = read_by(torch.stack(vectors), [armed[point] for point in ordered])
    names = tuple(map(str, range(count)))
    return CompiledProjection(lowered, InSlot(NONE, lowered.digest), tuple(ordered), names, {}), tuple(columns)


def check_widths(monitors: Sequence[Monitor], points: Sequence[Point], schemas: Mapping[Point, PointSchema]) -> None:
    """Check that each monitor's probe is as wide as the rows at its point.

    Raises:
        InvalidVector: a probe is not.
    """
    for monitor, point in zip(monitors, points, strict=True):
        if len(monitor.weights) != schemas[point].width:
            raise InvalidVector(
                f"{monitor}: the probe has width {len(monitor.weights)}, the rows at {point} are {schemas[point]}; it "
                "was made for another model, or another site"
            )
