"""Sweeps of a vector in an open model: the effect of adding it, by layer, and by layer and token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from steercap.core.protocols import ProgressCallback
from steercap.core.spec import Layers
from steercap.core.tokens import Tokens, TokenSelection
from steercap.core.values import index_of, number_of, shown
from steercap.errors import InvalidSpec
from steercap.lab.directions.contrast import random_like
from steercap.lab.directions.extraction import Text, ids_of
from steercap.lab.mechanism.analysis.given import Vectors, chosen_layers, named, origin
from steercap.lab.mechanism.analysis.tables import table_of
from steercap.lab.mechanism.patching.metrics import Metric
from steercap.lab.mechanism.patching.points import positions_of
from steercap.lab.mechanism.patching.running import CONCURRENCY, Pair, Runs, decoded, texts_of
from steercap.steering.edits.add import Add
from steercap.steering.layers import LayerVectors
from steercap.steering.spec import SteeringSpec

if TYPE_CHECKING:
    import pyarrow as pa

    from steercap.model import SteerModel

COLUMNS = ("name", "control", "layer", "prompt", "position", "token", "value", "base", "difference")


class _SweepRun(NamedTuple):
    """Run of one prompt in which a vector, or a random control of it, is added at one layer to some positions."""

    name: str
    control: str
    vectors: LayerVectors
    layer: int
    positions: tuple[int, ...]


async def layer_sweep(
    model: SteerModel,
    vectors: Vectors,
    prompts: Text | Sequence[Text],
    *,
    metric: Metric,
    scale: float = 1.0,
    relative: bool = False,
    layers: Layers | None = None,
    tokens: Tokens | TokenSelection = "prompt",
    random: int = 8,
    seed: int = 0,
    concurrency: int = CONCURRENCY,
    progress: ProgressCallback | None = None,
) -> pa.Table:
    """Measure the effect on a metric of adding each layer's vector at that layer, and of random vectors of equal norm.

    Each layer has its own run; all share the engine's batches, and a run in which the vector was not added raises. To
    measure whole answers, sweep layers with `steercap.lab.studies.sweeps.run_sweep`.

    Args:
        model: an open model, with taps at the vectors' points.
        vectors: a DirectionSet, or LayerVectors of one model, site and width.
        prompts: one prompt or several: str, token ids, or `Exchange`.
        metric: metric of the token after the prompt, as for `steercap.lab.mechanism.patching.patch`.
        scale, relative: arguments as in `steercap.Add`.
        layers: layers of the vectors; all by default.
        tokens: tokens of the prompt to add the vector to, all in one run.
        random: number of random vectors for each vector and layer, 0 for none.
        seed: seed of the random vectors.
        concurrency: maximum concurrent runs.
        progress: function called with a `Progress` whenever the work advances.

    Returns:
        Columns `name`, `control` ("" for the vector, "random-03" for the fourth random one), `layer`, `prompt`,
        `position` and `token` (null and ""), `value` and `base` (metric with and without the vector), `difference`
        (`value - base`): a row for each run.

    Raises:
        InvalidSpec: the vectors, scale, prompts or metric are not valid.
        PointNotArmed: the engine has no tap at a point.
        The errors of `SteerModel.generate`, SteeringNotApplied among them.
    """
    sweep = _Sweep(vectors, scale, layers, tokens, random, relative=relative, seed=seed, together=True)
    return await sweep.run(model, prompts, metric, concurrency, progress)


async def position_sweep(
    model: SteerModel,
    vectors: Vectors,
    prompts: Text | Sequence[Text],
    *,
    metric: Metric,
    scale: float = 1.0,
    relative: bool = False,
    layers: Layers | None = None,
    tokens: Tokens | TokenSelection = "prompt",
    random: int = 0,
    seed: int = 0,
    concurrency: int = CONCURRENCY,
    progress: ProgressCallback | None = None,
) -> pa.Table:
    """Measure the effect of adding each layer's vector at that layer to a single token, each token in its own run.

    Args:
        model, vectors, prompts, metric, scale, relative, layers, tokens, random, seed, concurrency, progress: as for
            `layer_sweep`.

    Returns:
        Columns as for `layer_sweep`, with `position` and `token` filled in.

    Raises:
        The errors of `layer_sweep`.
    """
    sweep = _Sweep(vectors, scale, layers, tokens, random, relative=relative, seed=seed, together=False)
    return await sweep.run(model, prompts, metric, concurrency, progress)


class _Sweep:
    """Settings of a sweep, as for `layer_sweep`; `together` is True to steer all tokens in one run.

    Raises:
        InvalidSpec: the scale or the number of random vectors is not valid.
        The errors of `named` and `chosen_layers`.
    """

    def __init__(
        self,
        vectors: Vectors,
        scale: object,
        layers: Layers | None,
        tokens: Tokens | TokenSelection,
        random: object,
        *,
        relative: bool,
        seed: int,
        together: bool,
    ) -> None:
        number, count = number_of(scale), index_of(random)
        if number is None or not math.isfinite(number) or not number:
            raise InvalidSpec(f"scale={shown(scale)}; give a finite number that is not 0")
        if count is None or count < 0:
            raise InvalidSpec(f"random={shown(random)}; give a number of random vectors, 0 for none")
        self._directions, self._selection = named(vectors), TokenSelection.parse(tokens)
        self._layers = chosen_layers(self._directions, layers)
        self._scale, self._random, self._seed = number, count, seed
        self._relative, self._together = relative, together

    async def run(
        self,
        model: SteerModel,
        prompts: Text | Sequence[Text],
        metric: Metric,
        concurrency: int,
        progress: ProgressCallback | None,
    ) -> pa.Table:
        """Measure each prompt without steering, and with each vector or random control at each layer (and position).

        Args:
            model, prompts, metric, progress: as for `layer_sweep`.
            concurrency: maximum concurrent runs.

        Returns:
            Columns `COLUMNS`: a row for each run with a vector.
        """
        ids = [tuple(one) for one in await ids_of(model, texts_of(prompts, "prompts"))]
        pairs = [Pair(number, one, one, decoded(model.tokenizer, one)) for number, one in enumerate(ids)]
        asked = [list(self._asked(pair)) for pair in pairs]
        runs = Runs(model, metric, len(pairs), concurrency, progress)
        runs.total = sum(map(len, asked))

        async def one_prompt(pair: Pair) -> list[dict[str, Any]]:
            base = await runs.value(pair.number, pair.base)

            async def one(run: _SweepRun) -> dict[str, Any]:
                value = await runs.value(pair.number, pair.base, self._edit(run))
                return self._row(run, pair, value, base)

            return await runs.each_change(asked[pair.number], one)

        rows = [row for found in await runs.each_pair(pairs, one_prompt) for row in found]
        made = {"scale": self._scale, "relative": self._relative, "random": self._random, "seed": self._seed}
        about = origin(self._directions, **made, tokens=str(self._selection))
        return table_of({name: [row[name] for row in rows] for name in COLUMNS}, **about)

    def _asked(self, pair: Pair) -> Iterator[_SweepRun]:
        """Yield the steered runs of one prompt: by vector, control, layer, and position unless `together`."""
        positions = positions_of(self._selection, len(pair.base))
        groups = [tuple(positions)] if self._together else [(position,) for position in positions]
        for name, vectors in self._directions.items():
            random = [random_like(vectors, draw, self._seed, self._layers) for draw in range(self._random)]
            for draw, one in enumerate([vectors, *random]):
                control = f"random-{draw - 1:02}" if draw else ""
                for layer, group in product(self._layers, groups):
                    yield _SweepRun(name, control, one, layer, group)

    def _edit(self, run: _SweepRun) -> SteeringSpec:
        scope: dict[str, Any] = {
            "layer": run.layer,
            "site": self._directions.site,
            "tokens": list(run.positions),
            "relative": self._relative,
        }
        return SteeringSpec([Add(run.vectors[run.layer], self._scale, **scope)])

    def _row(self, run: _SweepRun, pair: Pair, value: float, base: float) -> dict[str, Any]:
        position = None if self._together else run.positions[0]
        return {
            "name": run.name,
            "control": run.control,
            "layer": run.layer,
            "prompt": pair.number,
            "position": position,
            "token": "" if position is None else pair.tokens[position],
            "value": value,
            "base": base,
            "difference": value - base,
        }
