"""Path patching of heads: direct effects of one head on others, with all heads between held (arXiv:2211.00593).

For each sender, there are two runs. In the first, the sender's `z` comes from the other run and every later head is
held at its unchanged output, so that only paths through the residual stream and the feed-forward blocks carry the
change; the receivers' inputs are captured. In the second, only the receivers get these, and everything after them is
computed. If the receiver is the logits, the first run suffices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from steercap.core.spec import CaptureSpec, Point
from steercap.core.tokens import Tokens, TokenSelection
from steercap.lab.directions.extraction import Text
from steercap.lab.mechanism.patching.metrics import Metric
from steercap.lab.mechanism.patching.pairs import Direction, Pair, pairs_of
from steercap.lab.mechanism.patching.points import PatchedPlace
from steercap.lab.mechanism.patching.results import Effects, PatchEffect, effect_of
from steercap.lab.mechanism.patching.routes import LOGITS, Frozen, Head, Receiver, Routes
from steercap.lab.mechanism.patching.running import CONCURRENT, PatchSource, Runs

if TYPE_CHECKING:
    from steercap.model import SteerModel


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
    concurrent: int = CONCURRENT,
    progress: Callable[[int, int], None] | None = None,
) -> Effects:
    """Measure the direct effect of each head on other heads, or on the logits, with all heads between held.

    The `z` of one sender comes from the other run, and all heads in later layers are held at their unchanged outputs.
    The resulting queries, keys or values of the receivers are patched in a second run, in which all else is computed.

    Args:
        model: an open model with `z` armed at all layers, and the receivers' sites.
        clean, corrupted: a prompt each, or lists of equal length; the prompts of a pair must have equally many tokens.
        metric: metric of a run, as for `patch`.
        senders: (layer, head) of each sender, or "all".
        receivers: a `Receiver`, "logits", or several of them, each measured by itself.
        tokens: tokens of the prompt at which the senders' rows come from the other run.
        direction: "noise": the clean run is changed, and senders come from the corrupted run. "denoise": the reverse.
        through_mlps: let feed-forward blocks carry the change. If False, they are held too, which needs `mlp_out`
            armed.
        concurrent: maximum concurrent senders.
        progress: function called with the number of finished senders, and of all.

    Returns:
        The effect of every sender on every receiver that has a head after it.

    Raises:
        InvalidPrompt: the prompts of a pair have different lengths.
        InvalidSpec: a head does not exist, the metric is not valid, or no sender comes before a receiver.
        PointNotArmed: the engine has no tap at a needed point.
        The errors of `SteerModel.generate`, SteeringNotApplied among them.
    """
    routes = Routes(model, senders, receivers, tokens, through_mlps)
    pairs = pairs_of(model.tokenizer, clean, corrupted, direction=direction, align=None)
    runs = Runs(model, metric, len(pairs), concurrent, progress)
    runs.total = len(routes.senders) * len(pairs)
    for pair in pairs:
        routes.check(pair)

    async def one_pair(pair: Pair) -> list[PatchEffect]:
        base = await runs.read(pair.number, pair.base, routes.held)
        source = await runs.read(pair.number, pair.source, routes.sent)
        frozen = Frozen(pair, base, source)

        async def one_sender(sender: Head) -> list[PatchEffect]:
            return await _sent(runs, routes, frozen, sender)

        each = await runs.each_change(routes.senders, one_sender)
        return [effect for effects in each for effect in effects]

    found = await runs.each_pair(pairs, one_pair)
    return Effects([effect for effects in found for effect in effects], [pair.tokens for pair in pairs])


async def _sent(runs: Runs, routes: Routes, frozen: Frozen, sender: Head) -> list[PatchEffect]:
    """Measure the effects of one sender on each receiver in one pair."""
    pair, (base, _), (source, _) = frozen
    reached, first = list(routes.reached(sender)), routes.first_run(frozen, sender)
    points = {point for one in reached if isinstance(one, Receiver) for point in one.points if point.layer > sender[0]}
    if points:
        layers, sites = {point.layer for point in points}, {point.site for point in points}
        spec = CaptureSpec(layers=sorted(layers), sites=sorted(sites), tokens="prompt", codec="raw")
        value, seen = await runs.read(pair.number, pair.base, spec, first)
    else:
        value, seen = await runs.value(pair.number, pair.base, first), PatchSource({}, ())
    cell, found = PatchedPlace(Point(sender[0], "z"), sender[1], ()), []
    for one in reached:
        if isinstance(one, Receiver):
            second = routes.second_run(frozen, one, sender[0], seen)
            value = await runs.value(pair.number, pair.base, second)
        name = one.name if isinstance(one, Receiver) else LOGITS
        found.append(effect_of(pair, cell, value=value, base=base, source=source, receiver=name))
    return found
