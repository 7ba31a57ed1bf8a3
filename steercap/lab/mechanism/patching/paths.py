"""Path patching of heads: direct effects of one head on others, with all heads between frozen (arXiv:2211.00593).

For each sender, there are two runs. In the first, the sender's `z` comes from the other prompt and every later head is
frozen at its unpatched output, so that only the residual stream and the feed-forward blocks carry the change; the
receivers' queries, keys or values are captured. In the second, only these are patched, and everything after them is
computed. If the receiver is the logits, the first run suffices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from steercap.core.hints import dataclass
from steercap.core.protocols import ProgressCallback
from steercap.core.spec import CaptureSpec, Point
from steercap.core.tokens import Tokens, TokenSelection
from steercap.core.values import index_of, parts_of, shown, truth_of
from steercap.errors import InvalidSpec, PointNotArmed
from steercap.lab.directions.extraction import Text
from steercap.lab.mechanism.patching.metrics import Metric
from steercap.lab.mechanism.patching.points import PatchedPlace, head_count, positions_of
from steercap.lab.mechanism.patching.results import Effects, PatchEffect, effect_of
from steercap.lab.mechanism.patching.running import CONCURRENCY, Direction, Pair, PatchSource, Runs, pairs_of, replaced
from steercap.steering.spec import SteeringSpec

if TYPE_CHECKING:
    from steercap.model import SteerModel
    from steercap.steering.edits import Edit

#: Head: indices of its layer and of the head in that layer, from 0.
Head: TypeAlias = tuple[int, int]
#: Receiver that stands for the model's output.
LOGITS: Final = "logits"
#: Sites at which the heads of a `Receiver` can be patched.
RECEIVED: Final = ("q", "k", "v")


@dataclass(frozen=True)
class Receiver:
    """Group of heads whose queries, keys or values are patched together, to measure the effect of a sender on them.

    Args:
        site: site of the heads, "q", "k" or "v". Heads of `k` and `v` are key heads, of which there may be fewer.
        heads: (layer, head) of each head.
        tokens: tokens of the prompt at which the heads are patched.
        name: name in the column `receiver` of the table; "" for one built from site and heads.

    Raises:
        InvalidSpec, InvalidSelection: an argument is of the wrong type.
    """

    site: Literal["q", "k", "v"]
    heads: Sequence[Head]
    tokens: Tokens | TokenSelection = "prompt"
    name: str = ""

    def __post_init__(self) -> None:
        if self.site not in RECEIVED:
            raise InvalidSpec(f"Receiver: site={shown(self.site)}; give one of {', '.join(map(repr, RECEIVED))}")
        heads = heads_in(self.heads, "Receiver: heads")
        object.__setattr__(self, "heads", heads)
        object.__setattr__(self, "tokens", TokenSelection.parse(self.tokens))
        if not self.name:
            object.__setattr__(self, "name", f"{self.site} of {', '.join(f'{layer}.{head}' for layer, head in heads)}")

    @property
    def points(self) -> list[Point]:
        """Points of the heads, one for each of their layers, in order of first mention."""
        return [Point(layer, self.site) for layer in dict.fromkeys(layer for layer, _ in self.heads)]


class Frozen(NamedTuple):
    """Results of the unpatched runs on a pair of prompts.

    Args:
        pair: the prompts.
        base: metric, and rows to freeze, of the run on the prompt that is patched.
        source: metric, and the senders' `z` rows, of the run on the other prompt.
    """

    pair: Pair
    base: tuple[float, PatchSource]
    source: tuple[float, PatchSource]


class Routes:
    """Senders and receivers of a path patching, checked against a model; arguments and errors as for `path_patch`."""

    def __init__(self, model: SteerModel, senders: Any, receivers: Any, tokens: Any, through_mlps: Any) -> None:
        through = truth_of(through_mlps, "through_mlps")
        self._model = model
        self.receivers = _receivers(receivers)
        self.tokens = TokenSelection.parse(tokens)
        last = max(self._last(end) if isinstance(end, Receiver) else model.num_layers for end in self.receivers)
        self.senders = self._heads(senders, last)
        for site, heads in (("z", self.senders), *((end.site, end.heads) for end in self._heads_that_receive())):
            self._check_heads(site, heads)
        if late := [head for head in self.senders if head[0] >= last]:
            raise InvalidSpec(f"senders hold {late[0]}, but no receiver is in a later layer, so it cannot affect any")
        first = min(layer for layer, _ in self.senders)
        self._frozen = [Point(layer, "z") for layer in range(first, model.num_layers)]
        if not through:
            self._frozen += [Point(layer, "mlp_out") for layer in range(first, model.num_layers)]
        self._check_armed(self._frozen)

    @property
    def held(self) -> CaptureSpec:
        """Capture spec of the rows at which the first run is frozen at the values of the unpatched run."""
        sites = dict.fromkeys(point.site for point in self._frozen)
        return CaptureSpec(
            layers=[*dict.fromkeys(point.layer for point in self._frozen)], sites=[*sites], tokens="prompt", codec="raw"
        )

    @property
    def sent(self) -> CaptureSpec:
        """Capture spec of the senders' `z` rows in the run on the source prompt."""
        layers = sorted({layer for layer, _ in self.senders})
        return CaptureSpec(layers=layers, sites="z", tokens=self.tokens, codec="raw")

    def check(self, pair: Pair) -> None:
        """Check that all token selections fit a pair's prompts; errors as for `positions_of`."""
        for selection in (self.tokens, *(receiver.tokens for receiver in self._heads_that_receive())):
            assert isinstance(selection, TokenSelection)
            positions_of(selection, len(pair.base))

    def first_run(self, frozen: Frozen, sender: Head) -> SteeringSpec:
        """Return the edits of the first run: the sender's rows from the other prompt, everything after it frozen."""
        layer, head = sender
        positions = positions_of(self.tokens, len(frozen.pair.base))
        sending = PatchedPlace(Point(layer, "z"), head, tuple(positions))
        edits: list[Edit] = [replaced(self._model, sending, frozen.source[1].at(sending.point, positions))]
        everywhere = tuple(range(len(frozen.pair.base)))
        for point in self._frozen:
            if point.layer > layer or (point.layer == layer and point.site == "mlp_out"):
                cell = PatchedPlace(point, None, everywhere)
                edits.append(replaced(self._model, cell, frozen.base[1].at(point, everywhere)))
        return SteeringSpec(edits)

    def second_run(self, frozen: Frozen, receiver: Receiver, after: int, seen: PatchSource) -> SteeringSpec:
        """Return the edits of the second run: a receiver's heads after layer `after` get their rows of the first."""
        assert isinstance(receiver.tokens, TokenSelection)
        positions = tuple(positions_of(receiver.tokens, len(frozen.pair.base)))
        edits = []
        for layer, heads in groupby(sorted(receiver.heads), key=lambda head: head[0]):
            point = Point(layer, receiver.site)
            if layer > after:
                cell = PatchedPlace(point, None, positions)
                edits.append(replaced(self._model, cell, seen.at(point, positions), [head for _, head in heads]))
        return SteeringSpec(edits)

    def reached(self, sender: Head) -> Iterator[Receiver | Literal["logits"]]:
        """Yield the receivers with a head in a later layer than the sender, in order; "logits" is always one."""
        for receiver in self.receivers:
            if not isinstance(receiver, Receiver) or self._last(receiver) > sender[0]:
                yield receiver

    @staticmethod
    def _last(receiver: Receiver) -> int:
        """Return the last layer in which a receiver has a head."""
        return max(layer for layer, _ in receiver.heads)

    def _heads(self, senders: Any, last: int) -> list[Head]:
        if isinstance(senders, str) and senders == "all":
            points = [Point(layer, "z") for layer in range(last)]
            if not points:
                raise InvalidSpec("no layer is before that of the receivers, so no sender can affect them")
            self._check_armed(points)
            return [
                (point.layer, head) for point in points for head in range(head_count(point, self._model.points[point]))
            ]
        return list(heads_in(senders, "senders"))

    def _heads_that_receive(self) -> list[Receiver]:
        return [receiver for receiver in self.receivers if isinstance(receiver, Receiver)]

    def _check_heads(self, site: str, heads: Sequence[Head]) -> None:
        for layer, head in heads:
            if not 0 <= layer < self._model.num_layers:
                raise InvalidSpec(f"head {layer}.{head}: this model has layers 0 to {self._model.num_layers - 1}")
            point = Point(layer, site)
            self._check_armed([point])
            if not 0 <= head < (count := head_count(point, self._model.points[point])):
                raise InvalidSpec(f"head {layer}.{head}: rows at {point} have {count} heads, 0 to {count - 1}")

    def _check_armed(self, points: Sequence[Point]) -> None:
        if missing := [point for point in points if point not in self._model.points]:
            sites = sorted({point.site for point in missing})
            raise PointNotArmed(
                f"path patching needs taps at {', '.join(map(str, missing[:3]))}{' ...' if missing[3:] else ''}, which "
                f"this engine does not have; start it with SteerModel(..., sites=[..., {', '.join(map(repr, sites))}])"
            )


def heads_in(given: Any, what: str) -> tuple[Head, ...]:
    """Parse a list of (layer, head) pairs; `what` names the argument in errors.

    Raises:
        InvalidSpec: `given` is not such a list, is empty, or has a head twice.
    """
    found = []
    for item in parts_of(given, what) or [None]:
        parts = [index_of(part) for part in item] if isinstance(item, (tuple, list)) else []
        if len(parts) != 2 or None in parts:
            raise InvalidSpec(f"{what}={shown(given)}; give (layer, head) of each, in a list")
        found.append((parts[0], parts[1]))
    if len(set(found)) < len(found):
        raise InvalidSpec(f"{what}={shown(given)} holds a head twice")
    return tuple(found)  # type: ignore[arg-type]  # none is None


def _receivers(given: Any) -> list[Any]:
    several = [given] if isinstance(given, (Receiver, str)) else parts_of(given, "receivers")
    if not several or not all(isinstance(receiver, Receiver) or receiver == LOGITS for receiver in several):
        raise InvalidSpec(f"receivers={shown(given)}; give 'logits', a Receiver, or a list of them")
    names = [receiver.name if isinstance(receiver, Receiver) else receiver for receiver in several]
    if len(set(names)) < len(names):
        raise InvalidSpec(f"receivers are called {names}; give each a name= of its own")
    return several


async def path_patch(
    model: SteerModel,
    clean: Text | Sequence[Text],
    corrupted: Text | Sequence[Text],
    *,
    metric: Metric,
    senders: Sequence[Head] | Literal["all"] = "all",
    receivers: Receiver | Literal["logits"] | Sequence[Receiver | Literal["logits"]] = LOGITS,
    tokens: Tokens | TokenSelection = "prompt",
    direction: Direction = "noise",
    through_mlps: bool = True,
    concurrency: int = CONCURRENCY,
    progress: ProgressCallback | None = None,
) -> Effects:
    """Measure the direct effect of each head on other heads, or on the logits, with all heads between frozen.

    One sender's `z` comes from the other prompt, and all heads in later layers are frozen at their unpatched outputs.
    The resulting queries, keys or values of the receivers are patched in a second run, in which all else is computed.

    Args:
        model: an open model with `z` armed at all layers, and the receivers' sites.
        clean, corrupted: a prompt each, or lists of equal length; the prompts of a pair must have equally many tokens.
        metric: metric of a run, as for `patch`.
        senders: (layer, head) of each sender, or "all".
        receivers: a `Receiver`, "logits", or several of them, each measured by itself.
        tokens: tokens of the prompt at which the senders' rows come from the other run.
        direction: "noise": the clean run is changed, and senders come from the corrupted run. "denoise": the reverse.
        through_mlps: True if feed-forward blocks carry the change; False freezes them too, and needs `mlp_out` armed.
        concurrency: maximum concurrent senders.
        progress: function called with a `Progress` whenever the work advances.

    Returns:
        The effect of every sender on every receiver that has a head after it.

    Raises:
        InvalidPrompt: the prompts of a pair have different lengths.
        InvalidSpec: a head does not exist, the metric is not valid, or no sender comes before a receiver.
        PointNotArmed: the engine has no tap at a needed point.
        The errors of `SteerModel.generate`, SteeringNotApplied among them.
    """
    routes = Routes(model, senders, receivers, tokens, through_mlps)
    pairs = await pairs_of(model, clean, corrupted, direction=direction, align=None)
    runs = Runs(model, metric, len(pairs), concurrency, progress)
    runs.total = len(routes.senders) * len(pairs)
    for pair in pairs:
        routes.check(pair)

    async def one_pair(pair: Pair) -> list[PatchEffect]:
        base = await runs.read(pair.number, pair.base, routes.held)
        source = await runs.read(pair.number, pair.source, routes.sent)
        each = await runs.each_change(routes.senders, partial(_sent, runs, routes, Frozen(pair, base, source)))
        return [effect for effects in each for effect in effects]

    found = await runs.each_pair(pairs, one_pair)
    return Effects([effect for effects in found for effect in effects], [pair.tokens for pair in pairs])


async def _sent(runs: Runs, routes: Routes, frozen: Frozen, sender: Head) -> list[PatchEffect]:
    """Measure the effects of one sender on each receiver after it, in one pair of prompts."""
    pair, (base, _), (source, _) = frozen
    reached, first = list(routes.reached(sender)), routes.first_run(frozen, sender)
    points = {point for one in reached if isinstance(one, Receiver) for point in one.points if point.layer > sender[0]}
    if points:
        layers, sites = {point.layer for point in points}, {point.site for point in points}
        spec = CaptureSpec(layers=sorted(layers), sites=sorted(sites), tokens="prompt", codec="raw")
        direct, seen = await runs.read(pair.number, pair.base, spec, first)
    else:
        direct, seen = await runs.value(pair.number, pair.base, first), PatchSource({}, ())
    cell, found = PatchedPlace(Point(sender[0], "z"), sender[1], ()), []
    for one in reached:
        if isinstance(one, Receiver):
            second = routes.second_run(frozen, one, sender[0], seen)
            value, name = await runs.value(pair.number, pair.base, second), one.name
        else:
            value, name = direct, LOGITS
        found.append(effect_of(pair, cell, value=value, base=base, source=source, receiver=name))
    return found
