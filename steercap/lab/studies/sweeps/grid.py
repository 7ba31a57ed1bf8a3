"""Sweep over vectors, layers, operations and scales on the same prompts, with controls."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from itertools import product
from typing import Any, Final, NamedTuple

import msgspec

from steercap.core.display import brief
from steercap.core.hints import dataclass
from steercap.core.spec import Layers
from steercap.core.tokens import Tokens, TokenSelection
from steercap.core.values import index_of, number_of, parts_of, plain, shown
from steercap.errors import InvalidSpec
from steercap.files.folder import FolderKind, differences
from steercap.lab.directions.contrast import derived_seed, random_like
from steercap.lab.studies import SAMPLING, as_stored, settle
from steercap.lab.studies.sweeps.operations import OPERATIONS
from steercap.steering.edits.inputs import layers_among, several
from steercap.steering.layers import LayerVectors
from steercap.steering.spec import SteeringSpec


class SweepCondition(msgspec.Struct, frozen=True, kw_only=True):
    """One way of steering in a sweep.

    Args:
        vector: name of the vector; for a control, the vector it is compared with; "" without steering.
        operation: name of the operation, "" without steering.
        layers: layers steered together.
        scale: scale of the operation, 0 without steering; a negated control has minus the scale.
        control: "" for the vector itself, "none" for no steering, "random-03" for the fourth random vector, "negated"
            for the vector at minus the scale.
    """

    vector: str = ""
    operation: str = ""
    layers: tuple[int, ...] = ()
    scale: float = 0.0
    control: str = ""


class SweepRequest(NamedTuple):
    """Request for one answer.

    Args:
        number: number of the request in the sweep, from 0.
        condition: condition under which to generate the answer.
        prompt: index of the prompt.
        sample: index of the answer among those to this prompt.
    """

    number: int
    condition: SweepCondition
    prompt: int
    sample: int


class SweepDefinition(msgspec.Struct, frozen=True, kw_only=True, rename={"negated": "reversed"}):  # its name in files
    """Everything that the answers of a sweep depend on: two sweeps of one definition are the same sweep.

    Args:
        model: identity of the model; see `steercap.files.fingerprint`.
        vectors: SHA-256 of the vectors at the layers swept, by name.
        layers: groups of layers steered together.
        scales, operations, tokens, relative, random, negated, seed, prompts: as for `Sweep`; tokens as text.
        sampling: sampling parameters of an answer.
        samples: number of answers to each prompt under each condition.
    """

    model: dict[str, str]
    vectors: dict[str, str]
    layers: list[list[int]]
    scales: list[float]
    operations: list[str]
    tokens: str
    relative: bool
    random: int
    negated: bool
    seed: int
    prompts: list[Any]
    sampling: dict[str, Any]
    samples: int


def _differing(stored: SweepDefinition, expected: SweepDefinition) -> list[str]:
    """Return all differences; also of the order of vectors, by which answers, and so their values, are numbered."""
    was, now = ({"order of vectors": list(one.vectors)} for one in (stored, expected))
    return differences(stored, expected) or differences(was, now)


#: Kind of folder of a sweep; it is resumed only by a sweep whose definition is equal, vectors in the same order.
SWEEP: Final = FolderKind("sweep.json", SweepDefinition, "sweep", _differing)


@dataclass(frozen=True, eq=False, kw_only=True)
class Sweep:
    """All combinations of vectors, layers, operations and scales, on the same prompts, with their controls.

    A scale is a multiple of the vector: at scale 1, directions from `steercap.lab.directions.extract` move the mean
    of the negative texts to that of the positive ones. With `relative=True` it is the length of the added vector as a
    fraction of the row's norm. `OPERATIONS` documents its meaning for other operations.

    Every sweep includes the prompts without steering, once: control "none", which also stands for every scale that
    changes nothing, such as 0 for "add".

    Args:
        vectors: LayerVectors by name; a DirectionSet is such a mapping.
        layers: layers to steer: `(10, 14)`, a range, a slice or "all" is each layer by itself, `[(10,), (10, 12, 14)]`
            one by itself, and three at once, each with its own vector.
        scales: numbers, NumPy's included; a negated one is another condition.
        operations: names in `OPERATIONS`.
        tokens: tokens to steer, as in every edit.
        relative: True if scales are fractions of the row's norm; for "add" only.
        random: number of random vectors for each vector, of its norm at each layer, tried with all operations, layers
            and scales. The norm matters only to "add"; for the other operations they are random directions.
        negated: try each scale negated too, for operations where that has the opposite effect (`Operation.signed`): not
            for "cap" and "set_projection".
        seed: seed of the random vectors and of the sampling.
        prompts: str, or conversations of {"role", "content"} dicts; answers to equal ones are those to one prompt.
        sampling_params: vLLM sampling parameters except `n` and `seed`, which the sweep sets; by default 64
            tokens, greedy. Those left out of a mapping are vLLM's defaults: 16 tokens, temperature 1.
        samples: number of answers to each prompt; the same prompt and sample have the same seed under every condition.

    Raises:
        InvalidSpec: an empty axis, a duplicated name or number, a layer without a vector, or a number out of range.
        UnknownName: an operation does not exist.
    """

    vectors: Mapping[str, LayerVectors]
    layers: Layers | Sequence[int | Sequence[int]]
    scales: Sequence[float]
    prompts: Sequence[Any]
    operations: Sequence[str] = ("add",)
    tokens: Tokens | TokenSelection = "generated"
    relative: bool = False
    random: int = 20
    negated: bool = True
    seed: int = 0
    sampling_params: Mapping[str, Any] = field(default_factory=lambda: dict(SAMPLING))
    samples: int = 1

    __repr__ = brief

    def __post_init__(self) -> None:
        self._check_kinds()
        keep = object.__setattr__
        keep(self, "vectors", {name: _named(name, vectors) for name, vectors in self.vectors.items()})
        shared = sorted(set[int].intersection(*map(set, self.vectors.values())))
        keep(self, "layers", tuple(map(_together, layers_among(plain(self.layers), shared, "Sweep: layers"))))
        keep(self, "scales", tuple(_scale(scale) for scale in self.scales))
        keep(self, "operations", tuple(self.operations))
        keep(self, "prompts", tuple(_prompt(prompt) for prompt in self.prompts))
        keep(self, "tokens", TokenSelection.parse(self.tokens))
        settle(self, whole=("random", "samples", "seed"), flags=("relative", "negated"))
        self._check_axes()
        self._check_numbers()

    def _check_kinds(self) -> None:
        """Check that every axis has an entry, and convert it to a plain list or mapping."""
        for axis in ("vectors", "scales", "operations", "prompts"):
            given = plain(getattr(self, axis))
            if axis != "vectors":
                given = several(given, f"Sweep: {axis}")
            elif not isinstance(given, Mapping) or isinstance(given, LayerVectors):
                raise InvalidSpec(f"Sweep: vectors={shown(given)}; give LayerVectors by name, as a DirectionSet does")
            if not given:
                raise InvalidSpec(f"Sweep: {axis}={shown(given)}; give at least one")
            object.__setattr__(self, axis, given)
        for name in self.operations:
            _ = OPERATIONS[name]

    def _check_axes(self) -> None:
        for axis in ("layers", "scales", "operations"):
            given = getattr(self, axis)
            if len(set(given)) < max(len(given), 1):
                raise InvalidSpec(f"Sweep: {axis}={given} is empty, or holds something twice")
        for name, vectors in self.vectors.items():
            if missing := sorted({layer for layers in self.groups for layer in layers} - set(vectors)):
                raise InvalidSpec(f"Sweep: {name!r} has no vectors for layers {missing}; it has {list(vectors)}")

    def _check_numbers(self) -> None:
        for name in self.operations:
            if self.relative and not OPERATIONS[name].relative:
                raise InvalidSpec(f"Sweep: relative=True, but {name!r} has no scale relative to a row; use 'add'")
        if self.random < 0:
            raise InvalidSpec(f"Sweep: random={self.random}; give 0 or more")

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of layers steered together."""
        return self.layers  # type: ignore[return-value]  # normalised above

    def conditions(self) -> tuple[SweepCondition, ...]:
        """Return all conditions: no steering first, then by vector, operation and layers, each with its controls."""
        found: dict[SweepCondition, None] = {SweepCondition(control="none"): None}
        for name, operation, layers in product(self.vectors, self.operations, self.groups):
            neutral = OPERATIONS[operation].neutral
            scales = [scale for scale in self.scales if scale != neutral]
            both = self.negated and OPERATIONS[operation].signed
            negated = [-scale for scale in scales if -scale not in self.scales] if both else []
            controls = {"": scales, "negated": negated} | {f"random-{at:02}": scales for at in range(self.random)}
            for control, own in controls.items():
                one = SweepCondition(vector=name, operation=operation, layers=layers, control=control)
                found |= {msgspec.structs.replace(one, scale=scale): None for scale in own}
        return tuple(found)

    def spec(self, condition: SweepCondition) -> SteeringSpec | None:
        """Return the edits of a condition, None for no steering; made on each call, to keep no random vectors."""
        if condition.control == "none":
            return None
        vectors = self.vectors[condition.vector]
        if condition.control.startswith("random-"):
            vectors = random_like(vectors, int(condition.control[len("random-") :]), self.seed, condition.layers)
        operation = OPERATIONS[condition.operation]
        scope: dict[str, Any] = {"site": vectors.site, "tokens": self.tokens}
        if operation.relative:
            scope["relative"] = self.relative
        return SteeringSpec(
            [operation.edit(vectors[layer], condition.scale, layer=layer, **scope) for layer in condition.layers]
        )

    def requests(self) -> Iterator[SweepRequest]:
        """Yield all requests in order of number, grouped by condition so that few steering slots are in use at once."""
        each = product(self.conditions(), range(len(self.prompts)), range(self.samples))
        for number, (condition, prompt, sample) in enumerate(each):
            yield SweepRequest(number, condition, prompt, sample)

    def sampling_of(self, request: SweepRequest) -> dict[str, Any]:
        """Return vLLM sampling parameters of one answer; its seed depends on prompt and sample, not the condition."""
        return {**self.sampling_params, "seed": derived_seed(f"{self.seed}/{request.prompt}/{request.sample}")}

    def definition(self, model: Mapping[str, str]) -> SweepDefinition:
        """Return the definition, everything that the answers depend on.

        Args:
            model: identity of the model; see `steercap.files.fingerprint`.

        Raises:
            InvalidSpec: the sampling parameters or prompts are not JSON-compatible.
        """
        swept = sorted({layer for layers in self.groups for layer in layers})
        names = {*SweepDefinition.__struct_fields__} - {"model", "sampling"}
        known: dict[str, Any] = {name: getattr(self, name) for name in names} | {
            "model": dict(model),
            "sampling": self.sampling_params,
            "vectors": {name: _digest(vectors, swept) for name, vectors in self.vectors.items()},
            "tokens": str(self.tokens),
        }
        return as_stored(self, SweepDefinition(**known))


def _named(name: object, vectors: object) -> LayerVectors:
    if not isinstance(name, str) or not name or not isinstance(vectors, LayerVectors):
        raise InvalidSpec(f"Sweep: vectors hold {shown(name)}: {shown(vectors)}; give LayerVectors by their name")
    return vectors.named(name)


def _together(layers: object) -> tuple[int, ...]:
    """Return the layers that are steered together, ascending, from one index or several; else raise InvalidSpec."""
    several = [layers] if index_of(layers) is not None else parts_of(layers, "Sweep: layers")
    indices = [index_of(layer) for layer in several or [None]]
    if None in indices:
        raise InvalidSpec(f"Sweep: layers hold {shown(layers)}; give an index, or several that are steered at once")
    found = tuple(layer for layer in indices if layer is not None)
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise InvalidSpec(f"Sweep: layers hold {shown(layers)}; indices count from 0, and each is steered once")
    return tuple(sorted(found))


def _scale(scale: object) -> float:
    number = number_of(scale)
    if number is None or not math.isfinite(number):
        raise InvalidSpec(f"Sweep: scales hold {shown(scale)}; give finite numbers")
    return number + 0.0  # -0 is 0


def _prompt(prompt: Any) -> Any:
    if isinstance(prompt, str) and prompt:
        return prompt
    turns = isinstance(prompt, Sequence) and all(isinstance(one, Mapping) and "role" in one for one in prompt)
    if turns and prompt:
        return [dict(message) for message in prompt]
    raise InvalidSpec(f"Sweep: prompts hold {shown(prompt)}; give text, or a list of {{'role', 'content'}} dicts")


def _digest(vectors: LayerVectors, layers: Sequence[int]) -> str:
    found = hashlib.sha256(vectors.site.encode())
    for layer in layers:
        found.update(layer.to_bytes(4) + vectors[layer].numpy().tobytes())
    return found.hexdigest()
