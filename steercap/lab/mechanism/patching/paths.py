"""Path patching of heads: what one does to others directly, all heads between held as they were (arXiv:2211.00593).

For each sender, two runs. In the first the sender's `z` comes from the other run and every later head gives what it
gave without, so that only the paths through the residual stream and the feed-forward blocks carry the change; what
reaches the receivers is kept. In the second only the receivers get that, and everything after them is computed. Where
the logits receive, the first run is all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from steercap.core.spec import CaptureSpec, Point
from steercap.core.tokens import Tokens, TokenSelection
from steercap.lab.directions.extraction import Text
from steercap.lab.mechanism.patching.metrics import Metric
from steercap.lab.mechanism.patching.pairs import Direction, Pair, pairs_of
from steercap.lab.mechanism.patching.points import Cell
from steercap.lab.mechanism.patching.results import Effects, PatchEffect, effect_of
from steercap.lab.mechanism.patching.routes import LOGITS, Frozen, Head, Receiver, Routes
from steercap.lab.mechanism.patching.running import CONCURRENT, Runs, Source

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
    """Measure what each head does to others, or to the logits, on direct paths: no head between carries it on.

    The `z` of one sender comes from the other run; all heads in later layers give what they gave without; what then
    reaches the receivers' queries, keys or values is put there in a run of its own, in which all else is computed.

    Args:
        model: an open model with `z` armed at all layers, and the sites that receive.
        clean, corrupted: a prompt each, or a list of as many of each, those of a pair of equally many tokens.
        metric: the number that runs are compared by, as for `patch`.
        senders: (layer, head) of each, or "all".
        receivers: a `Receiver`, "logits", or several of them, each by itself.
        tokens: at which tokens of the prompt the senders' rows come from the other run.
        direction: "noise": the clean run is changed, and senders come from the corrupted run. "denoise": the reverse.
        through_mlps: whether feed-forward blocks carry the change on. If not, they are held too (`mlp_out` armed).
        concurrent: senders under way at once.
        progress: called with the number of senders that are done, and of all.

    Returns:
        The effect of every sender on every receiver; of a receiver that has no head after the sender, none.

    Raises:
        InvalidPrompt: the prompts of a pair have different lengths.
        InvalidSpec: heads that do not exist, a metric that does not fit, or no sender before a receiver.
        PointNotArmed: the engine has no tap where one is needed.
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
    """What one sender does to each receiver in one pair."""
    pair, (base, _), (source, _) = frozen
    reached, first = list(routes.reached(sender)), routes.first_run(frozen, sender)
    points = {point for one in reached if isinstance(one, Receiver) for point in one.points if point.layer > sender[0]}
    if points:
        layers, sites = {point.layer for point in points}, {point.site for point in points}
        spec = CaptureSpec(layers=sorted(layers), sites=sorted(sites), tokens="prompt", codec="raw")
        value, seen = await runs.read(pair.number, pair.base, spec, first)
    else:
        value, seen = await runs.value(pair.number, pair.base, first), Source({}, ())
    cell, found = Cell(Point(sender[0], "z"), sender[1], ()), []
    for one in reached:
        if isinstance(one, Receiver):
            second = routes.second_run(frozen, one, sender[0], seen)
            value = await runs.value(pair.number, pair.base, second)
        name = one.name if isinstance(one, Receiver) else LOGITS
        found.append(effect_of(pair, cell, value=value, base=base, source=source, receiver=name))
    return found
