"""Judgement of codecs at one point: measures of each codec, and the bars, thresholds that some must reach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from steercap.core.schema import RAW, Coding
from steercap.core.spec import Point
from steercap.core.values import choices, index_of, shown
from steercap.errors import InvalidRequest, InvalidSpec
from steercap.lab.mechanism import codec_measures as measured
from steercap.saes.sae import SAE
from steercap.steering.directions import DirectionSet

#: Minimum correlation with raw rows; minimum cosine of projections with their values before rounding.
BAR: Final = 0.95
ROUNDING_BAR: Final = 0.99
#: Names of the measures that have a bar, some only for codecs that project rows; others are only reported.
BARRED: Final = ("neuron_ranks", "concept", "direction", "cosine_error", "rounding")
#: Site whose elements are ranked.
NEURONS: Final = "neurons"
#: Default maximum of rows to judge by; number below which a judgement is weak; minimum, below which there is none.
MOST_ROWS: Final = 2000
FEW_ROWS: Final = 1000
LEAST_ROWS: Final = 64
#: Number of principal directions that are measured at a site without labels, directions or neurons.
PRINCIPAL: Final = 8


class CodecMeasure(msgspec.Struct, frozen=True, kw_only=True):
    """Value of one measure of one codec at one point.

    Args:
        site, layer: site and layer of the point.
        codec: the codec as text, in the form that `SiteCodecs.parse` accepts.
        bytes: bytes of an encoded row.
        measure: name of the measure.
        name: name of the concept or direction that was measured, "" for none.
        value: the measured number; None if the measure is not possible for the codec's rows.
        bar: threshold for the value; None for a measure that is only reported.
        at_most: True if the bar is a maximum, False if it is a minimum.
    """

    site: str
    layer: int
    codec: str
    bytes: int
    measure: str
    name: str = ""
    value: float | None
    bar: float | None = None
    at_most: bool = False

    @property
    def passes(self) -> bool:
        """True if the value meets the bar, or there is no bar."""
        if self.bar is None:
            return True
        return self.value is not None and (self.value <= self.bar if self.at_most else self.value >= self.bar)


@dataclass(frozen=True, eq=False)
class CheckAsked:
    """Validated arguments of `check_codecs`.

    Args:
        layers, sites: layers and sites of the points to judge.
        codings: candidate codecs by their texts, raw rows first.
        labels: labels by concept, a number for each text, float64 [texts].
        directions, sae, train_sae, most_rows, seed: arguments of `check_codecs`.
    """

    layers: tuple[int, ...]
    sites: tuple[str, ...]
    codings: Mapping[str, Coding]
    labels: Mapping[str, measured.Floats]
    directions: DirectionSet | None
    sae: SAE | None
    train_sae: bool
    most_rows: int
    seed: int

    def __post_init__(self) -> None:
        points = {(layer, site) for layer in self.layers for site in self.sites}
        if self.directions is not None:
            self.directions.at_layers(self.layers)  # says which layers there are
            if self.directions.site not in self.sites:
                raise InvalidSpec(
                    f"directions at {self.directions.site!r}; {choices(self.directions.site, self.sites)}"
                )
        if self.sae is not None and (self.sae.transcodes or self.sae.input not in points):
            raise InvalidSpec(
                f"sae={self.sae!r}; give an SAE, not a transcoder, of a point that is judged, one of {sorted(points)}"
            )
        most, seed = index_of(self.most_rows), index_of(self.seed)
        if most is None or most < LEAST_ROWS:
            raise InvalidSpec(
                f"most_rows={shown(self.most_rows)}; give a whole number from {LEAST_ROWS}, such as {MOST_ROWS}"
            )
        if seed is None or seed < 0:
            raise InvalidSpec(f"seed={shown(self.seed)}; give a whole number from 0")


@dataclass(frozen=True, eq=False)
class CodecJudge:
    """Comparison of codecs on the rows of one point.

    Args:
        point: the point.
        rows: raw rows, [rows, *shape of the point], in the model's dtype.
        texts: index of each row's text, ascending from 0.
        labels: labels by concept, a number for each of these texts.
        asked: arguments of `check_codecs`.
    """

    point: Point
    rows: torch.Tensor
    texts: npt.NDArray[np.int64]
    labels: Mapping[str, measured.Floats]
    asked: CheckAsked

    def measures(self, notes: dict[str, str]) -> list[CodecMeasure]:
        """Measure every codec at the point; for one left out, add the reason to `notes` by codec and site.

        Raises:
            InvalidRequest: all rows are equal, so that any codec would pass.
            InvalidSpec: the directions have another width than the rows.
        """
        raw = measured.CheckedRows.of(self.rows, RAW)
        if not np.ptp(raw.rows, axis=0).any():
            raise InvalidRequest(f"all {len(raw.rows):,} rows at {self.point} are equal; give texts that differ")
        directions = self._directions(raw.rows)
        first: dict[tuple[str, str], float | None] = {}
        found: list[CodecMeasure] = []
        for codec, coding in self.asked.codings.items():
            kept = raw if coding == RAW else self._kept(coding, raw)
            if isinstance(kept, str):
                notes[f"{codec} at {self.point.site}"] = f"left out: {kept}"
                continue
            own: dict[str, Any] = {
                "site": self.point.site,
                "layer": self.point.layer,
                "codec": codec,
                "bytes": kept.bytes,
            }
            for measure, name, value, bar in (
                *self._judged(raw, kept, directions, coding),
                *self._reported(raw, kept, coding),
            ):
                known = first.setdefault((measure, name), value)
                shown_value = _less(value, known) if measure.endswith("_delta") else value
                found.append(
                    CodecMeasure(
                        **own, measure=measure, name=name, value=shown_value, bar=bar, at_most=measure == "cosine_error"
                    )
                )
        return found

    def _kept(self, coding: Coding, raw: measured.CheckedRows) -> measured.CheckedRows | str:
        """Return the rows, encoded and decoded, or, as text, the reason why captures refuse the codec at the point."""
        if coding.k > raw.rows.shape[1]:
            return f"k is above the {raw.rows.shape[1]:,} elements of a row"
        kept = measured.CheckedRows.of(self.rows, coding)
        return f"{kept.bytes:,} bytes a row; raw rows have {raw.bytes:,}" if kept.bytes >= raw.bytes else kept

    def _directions(self, rows: measured.Floats) -> Mapping[str, measured.Floats]:
        given = self.asked.directions
        if given is not None and given.site == self.point.site:
            if given.width != rows.shape[1]:
                raise InvalidSpec(
                    f"directions of width {given.width}; rows at {self.point} have {rows.shape[1]} elements"
                )
            return dict(zip(given, given.units(self.point.layer).double().numpy(), strict=True))
        asked = bool(self.labels) or self.point.site == NEURONS
        return {} if asked else measured.principal(rows, PRINCIPAL)

    def _judged(
        self,
        raw: measured.CheckedRows,
        kept: measured.CheckedRows,
        directions: Mapping[str, measured.Floats],
        coding: Coding,
    ) -> Iterator[tuple[str, str, float | None, float | None]]:
        """Yield (measure, concept or direction, value, bar) of measures that may have a bar, None for none."""
        if self.point.site == NEURONS:
            yield "neuron_ranks", "", measured.neuron_ranks(raw, kept), BAR
        for name, labels in self.labels.items():
            ours, theirs = (measured.concept_scores(one.rows, self.texts, labels)[0] for one in (raw, kept))
            yield "concept", name, measured.correlation(ours, theirs), BAR
        if directions:
            ours, theirs = (measured.cosines_with(one, np.stack(list(directions.values()))) for one in (raw, kept))
            for name, mine, other in zip(directions, ours.T, theirs.T, strict=True):
                yield "direction", name, measured.correlation(mine, other), BAR
        error = measured.cosine_error(raw, kept, self.asked.seed)
        yield "cosine_error", "", error, None if kept.matrix is None else coding.k**-0.5
        if kept.matrix is not None:
            group, number = measured.rounding(raw, kept)
            yield "rounding", "", group, ROUNDING_BAR
            yield "rounding_by_number", "", number, None

    def _reported(
        self, raw: measured.CheckedRows, kept: measured.CheckedRows, coding: Coding
    ) -> Iterator[tuple[str, str, float | None, float | None]]:
        """Yield measures without a bar as `_judged` does; the caller makes deltas, by subtracting raw rows' values."""
        for name, labels in self.labels.items():
            yield "concept_fit", name, _fit(kept.rows, self.texts, labels), None
        sae = self.asked.sae
        if sae is not None and sae.input == self.point:
            yield (
                "sae_explained",
                "",
                None if kept.matrix is not None else measured.explained(sae, raw.rows, kept.rows),
                None,
            )
            yield from self._probed("sae_probe_delta", sae, None if kept.matrix is not None else kept.rows)
        if self.asked.train_sae and coding.encoding in {"raw", "topk8"}:
            known = len(raw.rows) * 3 // 4
            trained = measured.trained_sae(kept.rows[:known], self.point, self.asked.seed)
            yield "trained_sae_explained", "", measured.explained(trained, raw.rows[known:], raw.rows[known:]), None
            yield from self._probed("trained_sae_probe_delta", trained, raw.rows)

    def _probed(
        self, measure: str, sae: SAE, rows: measured.Floats | None
    ) -> Iterator[tuple[str, str, float | None, float | None]]:
        """Yield (measure, concept, correlation of a concept probe on SAE features, None) for each concept."""
        features = None if rows is None else measured.features_of(sae, rows, self.texts)
        of_each = np.arange(len(np.unique(self.texts)))
        for name, labels in self.labels.items():
            yield measure, name, None if features is None else _fit(features, of_each, labels), None


def _fit(rows: measured.Floats, texts: npt.NDArray[np.int64], labels: measured.Floats) -> float:
    return measured.correlation(measured.concept_scores(rows, texts, labels)[1], labels)


def _less(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value - base
