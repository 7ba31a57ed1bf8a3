"""Trial of a direction at a few layers: replies steered both ways in one batch, with their effect and perplexity.

To measure every layer alike, the unsteered model reads each reply. Its effect is the distance of its mean row from that
of the unsteered reply along the direction, as a multiple of the direction's length. At 1, a difference of means has
moved the reply as far as the positive texts are from the negative ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from steercap.concurrency.loops import each_of
from steercap.core.display import html_table, span
from steercap.core.values import choices, index_of, number_of, parts_of, shown
from steercap.errors import InvalidSpec, LayerOutOfRange, UnknownName
from steercap.lab.directions import Exchange, mean_rows, suggested_layer
from steercap.lab.measures import Answered
from steercap.lab.measures.texts import Perplexity, repeated_share
from steercap.lab.studies.running import CONCURRENCY, ask
from steercap.steering.directions import DirectionSet
from steercap.steering.edits.add import Add
from steercap.steering.layers import LayerVectors
from steercap.steering.spec import SteeringSpec

if TYPE_CHECKING:
    from steercap.model import SteerModel

#: Default candidates, as shares of the way from the first layer to the last; the outer fifths seldom steer well.
SHARES: Final = (0.2, 0.35, 0.5, 0.6, 0.7, 0.8)
#: Fields of an answer, without its finish reason.
_ANSWERED: Final = frozenset(Answered.__struct_fields__)
#: Multiple of the unsteered replies' perplexity above which a layer's replies count as broken text.
BROKEN: Final = 3.0
#: Share of repeated runs of three words from which a reply counts as broken text: the perplexity of a loop is low.
REPEATS: Final = 0.5
#: Number of replies to a prompt at a layer: with the vector added, and subtracted.
WAYS: Final = 2


class Tried(NamedTuple):
    """Reply to one prompt, steered at one layer or not at all.

    Args:
        prompt: index of the prompt.
        layer: layer steered, None without steering.
        scale: multiple of the vector that was added, negative for the opposite direction; 0 without steering.
        text: the reply.
        effect: distance of its mean row from the unsteered reply's along the direction, in lengths of the direction;
            NaN for a reply without tokens.
        perplexity: the unsteered model's perplexity of the reply; NaN for a reply without tokens.
    """

    prompt: int
    layer: int | None
    scale: float
    text: str
    effect: float
    perplexity: float


class LayerEffect(NamedTuple):
    """Effects at one layer, means over the prompts whose replies both ways could be measured.

    Args:
        layer: the layer.
        up, down: mean effect of adding and of subtracting the vector; NaN if no prompt could be measured.
        apart: `up - down`.
        perplexity: geometric mean over the replies both ways; infinite if that of any reply at the layer is.
        repeated: greatest share of repeated runs of three words in a reply at the layer.
        broken: True if the perplexity is infinite, NaN, or over `BROKEN` times that of the unsteered replies to these
            prompts, or if `repeated` is `REPEATS` or more.
        prompts: number of prompts whose replies both ways could be measured: all but those with an empty reply.
    """

    layer: int
    up: float
    down: float
    apart: float
    perplexity: float
    repeated: float
    broken: bool
    prompts: int


@dataclass(frozen=True, eq=False)
class TriedLayers:
    """Result of `try_layers`: replies steered at a few layers.

    Args:
        name: name of the direction.
        prompts: the prompts.
        scale: multiple of the vector that was added, and subtracted.
        read_at: layer whose rows and vector measure the effects.
        replies: replies prompt by prompt, the unsteered one first, then both ways at each layer.
    """

    name: str
    prompts: tuple[Any, ...]
    scale: float
    read_at: int
    replies: tuple[Tried, ...]

    def __repr__(self) -> str:
        tried = f"±{self.scale:g} at layers {span([effect.layer for effect in self.effects()])}"
        return f"TriedLayers({self.name!r}, {tried}, {len(self.prompts)} prompts, best: {self.best})"

    def effects(self) -> list[LayerEffect]:
        """Return the mean effects at each layer that was tried, layers ascending."""
        plain = {reply.prompt: reply.perplexity for reply in self.replies if reply.layer is None}
        found = []
        for layer in sorted({reply.layer for reply in self.replies if reply.layer is not None}):
            own = [reply for reply in self.replies if reply.layer == layer]
            ways = Counter(reply.prompt for reply in own if math.isfinite(reply.effect))
            both = {prompt for prompt, number in ways.items() if number == WAYS}
            effects = [(reply.scale > 0, reply.effect) for reply in own if reply.prompt in both]
            up, down = (_mean(effect for way, effect in effects if way == wanted) for wanted in (True, False))
            perplexity = _factor(
                reply.perplexity for reply in own if reply.prompt in both or reply.perplexity == math.inf
            )
            sound = perplexity <= BROKEN * _factor(plain[prompt] for prompt in both) < math.inf
            repeated = max(repeated_share(reply.text.split(), 3) for reply in own)
            broken = not sound or repeated >= REPEATS
            found.append(LayerEffect(layer, up, down, up - down, perplexity, repeated, broken, len(both)))
        return found

    @property
    def best(self) -> int | None:
        """Layer with the greatest positive `apart` among layers without broken text; None if there is none."""
        fit = [effect for effect in self.effects() if not effect.broken and effect.apart > 0]
        return max(fit, key=lambda effect: effect.apart).layer if fit else None

    def _repr_html_(self) -> str:
        """Return an HTML table of the replies for a notebook."""
        title = f"{self.name}: ±{self.scale:g} times the vector; best layer: {self.best}"
        return html_table(title, Tried._fields, self.replies)


def _mean(values: Iterable[float]) -> float:
    """Return the arithmetic mean of numbers; NaN if there are none, or one is NaN."""
    known = list(values)
    return float(np.mean(known)) if known else math.nan


def _factor(values: Iterable[float]) -> float:
    """Return the geometric mean of perplexities; infinite if one is, NaN if there are none."""
    known = list(values)
    return math.inf if math.inf in known else math.exp(_mean(map(math.log, known)))


def candidates(layers: Sequence[int], suggested: int | None = None) -> list[int]:
    """Return a few of a direction's layers to try, ascending: those at `SHARES`, and the suggested one if given."""
    places = {round(share * (len(layers) - 1)) for share in SHARES}
    return sorted({layers[place] for place in places} | ({suggested} if suggested is not None else set()))


async def try_layers(
    model: SteerModel,
    directions: DirectionSet | LayerVectors,
    prompts: Sequence[Any],
    *,
    name: str | None = None,
    layers: Sequence[int] | None = None,
    scale: float = 2.0,
    max_tokens: int = 24,
) -> TriedLayers:
    """Steer replies to prompts at a few layers, by a vector and its negative, all in one batch, and measure them.

    Replies are greedy, and steered at generated tokens. A few prompts show which layers are worth a sweep; they prove
    nothing, as there is no control with random vectors: see `steercap.lab.studies.sweeps`.

    Args:
        model: an open model.
        directions: a direction, or a set of them, made by `extract` or read from a file.
        prompts: str, or conversations of {"role", "content"} dicts.
        name: name of the direction in the set; None if there is only one.
        layers: layers to try; by default some from the middle, and the one that `suggested_layer` returns.
        scale: multiple of the vector to add, and to subtract.
        max_tokens: maximum tokens of a reply.

    Raises:
        InvalidSpec: there is no prompt, one is empty, the scale is not a number above 0, or the direction is zero.
        UnknownName: no such direction, or several and no name.
        LayerOutOfRange: the direction has no vector at a layer.
        The errors of `SteerModel.generate`.
    """
    vectors, suggested = _direction(directions, name)
    asked, dose = _checked_arguments(prompts, scale)
    tried = _layers(vectors, layers, suggested)
    read_at = tried[len(tried) // 2] if suggested is None else suggested
    if not vectors.norms()[read_at] > 0:
        raise InvalidSpec(
            f"try_layers: {vectors.name!r} is zero at layer {read_at}, so it has no direction to project on"
        )
    ways = [(None, 0.0), *((layer, sign * dose) for layer in tried for sign in (1, -1))]
    cases = [_Case(number, layer, by) for number in range(len(asked)) for layer, by in ways]

    async def answer(case: _Case) -> Answered:
        got = await ask(model, asked[case.prompt], {"max_tokens": max_tokens, "temperature": 0.0}, case.spec(vectors))
        return Answered(prompt=shown(asked[case.prompt]), **{field: got[field] for field in got if field in _ANSWERED})

    answers = await each_of(cases, answer, CONCURRENCY)
    along = await _along(model, answers, vectors, read_at)
    perplexities = await Perplexity().measure(model, answers)
    plain = {case.prompt: at for case, at in zip(cases, along, strict=True) if case.layer is None}
    replies = (
        Tried(*case, one.text, at - plain[case.prompt], perplexity)
        for case, one, at, perplexity in zip(cases, answers, along, perplexities, strict=True)
    )
    return TriedLayers(vectors.name or (name or ""), asked, dose, read_at, tuple(replies))


class _Case(NamedTuple):
    """Reply to be generated; fields as in `Tried`."""

    prompt: int
    layer: int | None
    scale: float

    def spec(self, vectors: LayerVectors) -> SteeringSpec | None:
        """Return the edits for the reply, None without steering."""
        if self.layer is None:
            return None
        vector = vectors[self.layer]
        return SteeringSpec([Add(vector, self.scale, layer=self.layer, site=vectors.site, tokens="generated")])


def _checked_arguments(prompts: Any, scale: Any) -> tuple[tuple[Any, ...], float]:
    """Return the prompts and the scale, checked; raise InvalidSpec if they are not valid."""
    dose = number_of(scale)
    if dose is None or not 0 < dose < math.inf:
        raise InvalidSpec(
            f"try_layers: scale={shown(scale)}; give a number above 0: the vector is added and subtracted"
        )
    asked = () if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence) else tuple(prompts)
    if not asked or any(not one or isinstance(one, Mapping) for one in asked):
        raise InvalidSpec(f"try_layers: prompts={shown(prompts)}; give a list of texts or conversations, none empty")
    return asked, dose


async def _along(model: SteerModel, answers: Sequence[Answered], vectors: LayerVectors, layer: int) -> list[float]:
    """Return each answer's mean row projected on a layer's vector, in lengths of the vector; NaN without tokens."""
    room = model.max_model_len - 1
    texts = {
        number: Exchange(list(one.prompt_token_ids), list(one.output_token_ids[: room - len(one.prompt_token_ids)]))
        for number, one in enumerate(answers)
        if one.output_token_ids and len(one.prompt_token_ids) < room
    }
    found = [math.nan] * len(answers)
    if texts:
        rows = await mean_rows(model, list(texts.values()), layers=[layer], site=vectors.site)
        vector = vectors[layer].double().flatten()
        for number, value in zip(texts, rows.values[:, 0].double() @ vector / vector.square().sum(), strict=True):
            found[number] = float(value)
    return found


def _direction(directions: DirectionSet | LayerVectors, name: str | None) -> tuple[LayerVectors, int | None]:
    """Return the direction of a name, and the layer that `suggested_layer` returns for it, None if it has none."""
    if isinstance(directions, LayerVectors):
        return directions, None
    if not isinstance(directions, DirectionSet):
        raise InvalidSpec(f"try_layers: directions={shown(directions)}; give a DirectionSet or LayerVectors")
    named = next(iter(directions)) if name is None and len(directions) == 1 else name
    if named not in directions:
        raise UnknownName(f"try_layers: name={shown(name)}; {choices(name, directions)}")
    suggestion = suggested_layer(directions, str(named))
    return directions[str(named)], None if suggestion is None else suggestion.layer


def _layers(vectors: LayerVectors, given: Sequence[int] | None, suggested: int | None) -> list[int]:
    """Return the layers to try, ascending: those given, checked to have a vector, or `candidates` for None."""
    if given is None:
        return candidates(list(vectors), suggested)
    found = [index_of(layer) for layer in parts_of(given, "try_layers: layers") or [None]]
    known = [layer for layer in found if layer is not None]
    if len(known) < len(found):
        raise InvalidSpec(f"try_layers: layers={shown(given)}; give a list of layers, such as [12, 18]")
    if missing := [layer for layer in known if layer not in vectors]:
        raise LayerOutOfRange(f"try_layers: layer {missing[0]}; {vectors.name!r} has layers {span(list(vectors))}")
    return sorted(set(known))
