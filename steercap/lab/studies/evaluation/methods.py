"""Method of an evaluation, steering at some doses or a system prompt; and controls for methods."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator, Sequence
from random import Random
from typing import Final

from steercap.core.hints import dataclass
from steercap.core.protocols import ReadingModel
from steercap.core.spec import Reduction
from steercap.core.tokens import BUT_THE_FIRST, Tokens, TokenSelection
from steercap.core.values import number_of, parts_of, shown
from steercap.errors import InvalidSpec
from steercap.lab.directions.extraction import Text, extract, groups_of
from steercap.lab.directions.methods import METHODS
from steercap.lab.studies.sweeps.operations import dosed, has_doses, random_spec
from steercap.steering.edits.add import Add
from steercap.steering.layers import LayerVectors
from steercap.steering.spec import Steering, SteeringSpec, spec_of

#: Default name of the method without steering and system prompt.
PLAIN = "none"
#: Default lengths of added vectors, in the units of the residual stream: 100 to 1,000 by hundreds, in both directions.
SCALES: Final = tuple(sign * length for sign in (1, -1) for length in range(100, 1001, 100))


@dataclass(frozen=True, eq=False, kw_only=True)
class Method:
    """Method to compare: steering at doses, a system prompt, both, or nothing.

    Args:
        name: name in tables and pictures.
        steering: a SteeringSpec, an edit or a LogitBias, with its own scope; or LayerVectors, which are added at
            `layers`; None for none. A member of a DirectionSet is LayerVectors; a trained file is read by
            `SteeringSpec.load`.
        doses: factors on the scale of every edit, each tried by itself; not 0, which is no method. An edit without a
            scale, such as a Cap, has dose 1 alone.
        layers: for LayerVectors, the layers to add them at, all at once; by default all that have a vector.
        tokens: for LayerVectors, the tokens to edit; "generated" by default.
        system: system prompt; "" for that of the model's chat template.
        control_of: name of the method that this one is a control of, "" for none. Controls are drawn in grey, and left
            out of `EvaluationResults.compare`.
        pooled: name under which methods are pooled in tables and pictures, such as several random vectors.

    Raises:
        InvalidSpec: an empty name, no dose or one that is 0, not finite, duplicated, or not 1 with nothing to scale;
            layers or tokens without LayerVectors, or a layer without a vector.
    """

    name: str
    steering: Steering | None = None
    doses: Sequence[float] = (1.0,)
    layers: Sequence[int] | None = None
    tokens: Tokens | TokenSelection | None = None
    system: str = ""
    control_of: str = ""
    pooled: str = ""

    def __post_init__(self) -> None:
        for field in ("name", "system", "control_of", "pooled"):
            if not isinstance(getattr(self, field), str) or (field == "name" and not self.name):
                raise InvalidSpec(f"Method: {field}={shown(getattr(self, field))}; give text")
        if isinstance(self.steering, LayerVectors):
            object.__setattr__(self, "steering", self._added(self.steering))
        elif self.layers is not None or self.tokens is not None:
            raise InvalidSpec(
                f"Method {self.name!r}: layers= and tokens= are for LayerVectors; leave them out, since edits have "
                "their own"
            )
        elif self.steering is not None:
            object.__setattr__(self, "steering", spec_of(self.steering, f"Method {self.name!r}: steering"))
        object.__setattr__(self, "doses", self._doses())

    @property
    def line(self) -> str:
        """Name of the method's line in tables and pictures: `pooled`, or else `name`."""
        return self.pooled or self.name

    @property
    def is_plain(self) -> bool:
        """True if the method has neither steering nor a system prompt."""
        return self.steering is None and not self.system

    @property
    def scales(self) -> bool:
        """True if the method's steering has scales, so that it can have several doses."""
        return isinstance(self.steering, SteeringSpec) and has_doses(self.steering)

    def spec(self, dose: float) -> SteeringSpec | None:
        """Return the method's edits with their scales times `dose`; None without steering."""
        assert self.steering is None or isinstance(self.steering, SteeringSpec)
        return None if self.steering is None else dosed(self.steering, dose)

    def random(self, count: int = 5, *, seed: int = 0) -> list[Method]:
        """Return controls: the same edits with random vectors of the same norms, at the same doses.

        Args:
            count: number of controls, which are pooled in tables and pictures.
            seed: seed of the draws.

        Raises:
            InvalidSpec: the method has no steering, or an edit that has no random control of its size.
        """
        if self.steering is None:
            raise InvalidSpec(f"Method {self.name!r} has no steering, and so no random control")
        assert isinstance(self.steering, SteeringSpec)
        pooled = f"random, as {self.name}"
        return [
            dataclasses.replace(
                self,
                name=f"{pooled} {at:02}",
                steering=random_spec(self.steering, self.name, at, seed),
                layers=None,
                tokens=None,
                control_of=self.name,
                pooled=pooled,
            )
            for at in range(count)
        ]

    def _added(self, vectors: LayerVectors) -> SteeringSpec:
        tokens = "generated" if self.tokens is None else self.tokens
        try:
            return SteeringSpec.by_layer(Add, vectors, layers=self.layers, tokens=tokens)
        except InvalidSpec as error:
            raise InvalidSpec(f"Method {self.name!r}: {error}") from error

    def _doses(self) -> tuple[float, ...]:
        given = [number_of(dose) for dose in parts_of(self.doses, "Method: doses") or ()]
        found = tuple(dose for dose in given if dose is not None and math.isfinite(dose) and dose)
        if not found or len(found) < len(given) or len(set(found)) < len(found):
            raise InvalidSpec(
                f"Method {self.name!r}: doses={shown(self.doses)}; give finite numbers other than 0, each once"
            )
        if not self.scales and found != (1.0,):
            raise InvalidSpec(f"Method {self.name!r}: doses={found}, but nothing in it has a scale; leave doses out")
        return found


async def shuffled(
    model: ReadingModel,
    positive: Sequence[Text],
    negative: Sequence[Text],
    *,
    like: LayerVectors,
    method: str = "difference",
    tokens: Tokens | TokenSelection = BUT_THE_FIRST,
    reduce: Reduction | None = "mean",
    groups: Sequence[Hashable] | None = None,
    negative_groups: Sequence[Hashable] | None = None,
    seed: int = 0,
    add_special_tokens: bool | None = None,
) -> LayerVectors:
    """Extract a control direction from the same texts with half of the labels exchanged at random.

    It shares the properties of any direction between such texts, but each side has as many texts of the trait as the
    other, in each group to within one; of an odd number of texts one is left out. If all groups have one text of each
    label, the two stay on different sides. The control is scaled to the norms of `like`; at its own it would have less
    effect merely by being shorter.

    Args:
        model: an open model.
        positive, negative: the texts that the vector was extracted from.
        like: the vector; the control has the same layers, site and norms.
        method, tokens, reduce, groups, negative_groups, add_special_tokens: arguments of the vector's extraction by
            `steercap.lab.directions.extract`.
        seed: seed of the random exchange.

    Returns:
        Vectors at the layers of `like`.

    Raises:
        InvalidSpec: fewer than two texts of a label, so that none can be exchanged; or a method that compares pairs,
            where an exchange within a pair changes nothing.
        The errors of `steercap.lab.directions.extract`.
    """
    if min(len(positive), len(negative)) < 2:
        raise InvalidSpec(f"shuffled: {len(positive)} and {len(negative)} texts; give two of each label at least")
    if METHODS[method].paired:
        raise InvalidSpec(f"shuffled: method={method!r} compares pairs; give one that does not, such as 'difference'")
    ours, theirs = groups_of(positive, negative, groups, negative_groups)
    group_order = list(dict.fromkeys([*ours, *theirs]))
    draw = Random(seed)  # noqa: S311 -- a control, no secret
    draw.shuffle(group_order)
    with_trait = _dealt(positive, ours, group_order, draw)
    without_trait = _dealt(negative, theirs, group_order, draw)
    one, other = [*with_trait[0], *without_trait[1]], [*with_trait[1], *without_trait[0]]
    found = await extract(
        model,
        [text for text, _ in one],
        [text for text, _ in other],
        name="shuffled",
        layers=list(like),
        site=like.site,
        groups=[group for _, group in one],
        negative_groups=[group for _, group in other],
        method=method,
        tokens=tokens,
        reduce=reduce,
        held_out=0,
        seed=seed,
        add_special_tokens=add_special_tokens,
    )
    norms = like.norms()
    drawn = found["shuffled"].unit()
    return LayerVectors(
        {layer: drawn[layer] * norms[layer] for layer in drawn}, name="shuffled", model=like.model, site=like.site
    )


def _dealt(
    texts: Sequence[Text], groups: Sequence[Hashable], order: Sequence[Hashable], draw: Random
) -> tuple[list[tuple[Text, Hashable]], list[tuple[Text, Hashable]]]:
    """Deal texts with their groups to two sides in turn, in random order within each group; an odd last is left out."""
    rank = {group: place for place, group in enumerate(order)}
    dealt = sorted(zip(texts, groups, strict=True), key=lambda one: (rank[one[1]], draw.random()))
    even = len(dealt) // 2 * 2
    return dealt[0:even:2], dealt[1:even:2]


def rollout_methods(
    trained: LayerVectors,
    averaged: LayerVectors | None = None,
    *,
    scales: Sequence[float] = SCALES,
    layers: Sequence[int] | None = None,
    tokens: Tokens | TokenSelection = "generated",
) -> list[Method]:
    """Return methods that add vectors scaled to each length, and to the length that was learned.

    The methods are named `trained_scale_100`, `trained_scale_-100`, ..., and `trained_scale_learned` for the trained
    vector as it is; `activation_scale_100`, ..., and `activation_scale_learned` for the averaged one, at the length of
    the trained one, layer by layer.

    Args:
        trained: trained vector of each layer; all layers are steered together.
        averaged: difference of means, at the same site and layers; None for none.
        scales: lengths of the added vector, in the units of the residual stream; negative for the opposite direction.
            May be empty.
        layers: layers to use; by default those of the trained vector.
        tokens: tokens to steer.

    Raises:
        InvalidSpec: a scale is 0, not finite, or given twice; or the vectors differ in site, layers or width.
        LayerOutOfRange: a layer has no vector.
        InvalidVector: a vector is zero.
    """
    lengths = _lengths(scales)
    vectors = {"trained": trained} | ({} if averaged is None else {"activation": averaged})
    if not all(isinstance(own, LayerVectors) for own in vectors.values()):
        raise InvalidSpec(f"rollout_methods: trained={shown(trained)}, averaged={shown(averaged)}; give LayerVectors")
    chosen = {name: own.at_layers(list(trained) if layers is None else layers) for name, own in vectors.items()}
    shapes = {name: (own.site, list(own), own.width) for name, own in chosen.items()}
    if shapes.get("activation", shapes["trained"]) != shapes["trained"]:
        raise InvalidSpec(f"rollout_methods: site, layers and width are {shapes}; give vectors of the same")
    learned, found = chosen["trained"].norms(), list[Method]()
    for name, own in chosen.items():
        unit = own.unit()
        found += [_method(scaled_name(name, length), unit, dict.fromkeys(unit, length), tokens) for length in lengths]
        found.append(_method(f"{name}_scale_learned", unit, learned, tokens))
    return found


def scaled_name(name: str, scale: float) -> str:
    """Return `<name>_scale_<scale>`, with enough digits that different scales give different names."""
    short = f"{scale:g}"
    return f"{name}_scale_{short if float(short) == scale else repr(scale)}"


def listed(methods: Sequence[Method]) -> Iterator[Method]:
    """Yield the methods, preceded by one without steering and system prompt if none is."""
    if not any(method.is_plain for method in methods):
        yield Method(name=PLAIN)
    yield from methods


def _lengths(scales: Sequence[float]) -> list[float]:
    given = parts_of(scales, "rollout_methods: scales")
    found = [scale for scale in map(number_of, given or ()) if scale is not None and math.isfinite(scale) and scale]
    if given is None or len(set(found)) < len(given):
        raise InvalidSpec(f"rollout_methods: scales={shown(scales)}; give finite numbers other than 0, each once")
    return found


def _method(name: str, unit: LayerVectors, lengths: dict[int, float], tokens: Tokens | TokenSelection) -> Method:
    edits = [
        Add(unit[layer], scale=length, layer=layer, site=unit.site, tokens=tokens, model=unit.model)
        for layer, length in lengths.items()
    ]
    return Method(name=name, steering=SteeringSpec(edits))
