"""Check of codecs on given texts: the cheapest codec of each site whose decoded rows pass measures against raw rows."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from steercap.captures.site_codecs import SiteCodecs
from steercap.core.display import brief
from steercap.core.protocols import Count, ProgressCallback, ReadingModel
from steercap.core.schema import Coding
from steercap.core.spec import CaptureSpec, Layers, Point, resolve_layers
from steercap.core.tokens import BUT_THE_FIRST, TokenSelection
from steercap.core.values import number_of, shown
from steercap.errors import InvalidRequest, InvalidSpec
from steercap.files.fingerprint import model_name, names_of, warn_of_other_model
from steercap.lab.directions.extraction import Text, check_texts, prompts_and_rows
from steercap.lab.mechanism.codec_judge import (
    FEW_ROWS,
    LEAST_ROWS,
    MOST_ROWS,
    NEURONS,
    CheckAsked,
    CodecJudge,
    CodecMeasure,
)
from steercap.lab.mechanism.codec_measures import FOLDS, Floats
from steercap.saes.sae import SAE
from steercap.steering.directions import DirectionSet

#: Codecs that are judged by default; raw rows are judged in any case, so that one passes.
CANDIDATES: Final = (
    "full8",
    "fp8",
    "int4",
    *(f"rp8,k={k}" for k in (256, 512, 1024)),
    *(f"topk8,k={k}" for k in (32, 64, 128, 256)),
)
#: Maximum texts of one call of the engine: their rows are raw, and rows of neurons are wide.
CALL_TEXTS: Final = 8


@dataclass(frozen=True)
class CodecCheck:
    """Result of judging codecs on given texts; made by `check_codecs`.

    Args:
        measures: all measures, in the order of sites, layers and bytes.
        model: name of the model whose rows were judged.
        rows, texts: number of rows of each point, and of the texts with these rows.
        notes: reasons why codecs or texts were left out, and warnings, by their subject, such as "rows".
    """

    measures: tuple[CodecMeasure, ...]
    model: str
    rows: int
    texts: int
    notes: Mapping[str, str] = field(default_factory=dict)

    __repr__ = brief

    def table(self) -> list[dict[str, Any]]:
        """Return a record for each site and codec, cheapest first: `site`, `codec`, `bytes`, the worst value of each
        measure, `failed`, the names of measures that missed their bars, and `chosen`.
        """
        groups: dict[tuple[str, str], list[CodecMeasure]] = {}
        for measure in self.measures:
            groups.setdefault((measure.site, measure.codec), []).append(measure)
        sites = list(dict.fromkeys(site for site, _ in groups))
        found: list[dict[str, Any]] = []
        for (site, codec), own in sorted(groups.items(), key=lambda item: (sites.index(item[0][0]), item[1][0].bytes)):
            failed = sorted({measure.measure for measure in own if not measure.passes})
            found.append({"site": site, "codec": codec, "bytes": own[0].bytes, **_worst(own), "failed": failed})
        taken: set[str] = set()
        for record in found:
            record["chosen"] = not record["failed"] and record["site"] not in taken
            taken |= {record["site"]} if record["chosen"] else set()
        return found

    @property
    def codecs(self) -> SiteCodecs:
        """The cheapest codec of each site that passes all measures."""
        return SiteCodecs.parse([f"{row['site']}={row['codec']}" for row in self.table() if row["chosen"]])

    def save(self, path: str | Path) -> Path:
        """Write the chosen codecs, with all measures, to a JSON file that `SiteCodecs.load` and the commands read.

        Raises:
            OSError: the file cannot be written.
        """
        about = {"model": self.model, "rows": self.rows, "texts": self.texts, "notes": dict(self.notes)}
        return self.codecs.save(path, **about, measures=[msgspec.to_builtins(measure) for measure in self.measures])


def _worst(measures: Sequence[CodecMeasure]) -> dict[str, float | None]:
    """Return each measure's worst value: the greatest if it has an upper limit, else the least; None if one is None."""
    found: dict[str, float | None] = {}
    for name in dict.fromkeys(measure.measure for measure in measures):
        own = [measure for measure in measures if measure.measure == name]
        values = [measure.value for measure in own if measure.value is not None]
        found[name] = None if len(values) < len(own) else max(values) if own[0].at_most else min(values)
    return found


def _labels_of(labels: Mapping[str, Sequence[float]] | None, texts: int) -> dict[str, Floats]:
    """Return labels as float64 [texts], by concept; `texts` is the number of texts.

    Raises:
        InvalidSpec: `labels` is not a mapping from names to a finite number for each text.
    """
    if not isinstance(labels or {}, Mapping):
        raise InvalidSpec(f"labels={shown(labels)}; give numbers by the name of a concept, {{'praise': [1, 0, ...]}}")
    found = {}
    for name, numbers in (labels or {}).items():
        known = [number_of(one) for one in numbers] if isinstance(numbers, Iterable) else []
        if len(known) != texts or not all(one is not None and math.isfinite(one) for one in known):
            raise InvalidSpec(f"labels[{name!r}]={shown(numbers)}; give a finite number for each of the {texts} texts")
        found[name] = np.array(known, dtype=np.float64)
    return found


def _layers_of(
    model: ReadingModel, layers: Layers | None, directions: DirectionSet | None, sae: SAE | None
) -> tuple[int, ...]:
    """Return the layers to judge: by default three, at quarters of the model's or directions' layers, and the SAE's.

    Raises:
        InvalidSpec: `directions` or `sae` is of another type.
        LayerOutOfRange: the model does not have a layer.
    """
    for name, given, kind in (("directions", directions, DirectionSet), ("sae", sae, SAE)):
        if given is not None and not isinstance(given, kind):
            raise InvalidSpec(f"{name}={shown(given)}; give a {kind.__name__}, or None")
        warn_of_other_model(f"{name}=", getattr(given, "model", ""), names_of(model.model), tuned=kind is SAE)
    if layers is not None:
        return resolve_layers(layers, model.num_layers)
    known = tuple(range(model.num_layers)) if directions is None else directions.layers
    quarters = {known[len(known) * quarter // 4] for quarter in (1, 2, 3)}
    return tuple(sorted(quarters | (set() if sae is None else {sae.input.layer})))


def codings_of(candidates: Sequence[str]) -> dict[str, Coding]:
    """Parse codecs from texts such as "topk8,k=64"; return them by text, raw rows first.

    Raises:
        InvalidSpec, UnknownName: an entry is not a codec.
    """
    if isinstance(candidates, str) or not isinstance(candidates, Sequence):
        raise InvalidSpec(f"candidates={shown(candidates)}; give codecs in a list, such as ['topk8,k=64']")
    parsed = [SiteCodecs.parse([f"resid_post={text}"]) for text in ("raw", *candidates)]
    return {one.texts[0].partition("=")[2]: one.codings["resid_post"] for one in parsed}


async def check_codecs(
    model: ReadingModel,
    texts: Sequence[Text],
    *,
    layers: Layers | None = None,
    sites: str | Sequence[str] = ("resid_post", NEURONS),
    candidates: Sequence[str] = CANDIDATES,
    labels: Mapping[str, Sequence[float]] | None = None,
    directions: DirectionSet | None = None,
    sae: SAE | None = None,
    train_sae: bool = False,
    most_rows: int = MOST_ROWS,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> CodecCheck:
    """Judge codecs by the rows of given texts, captured raw, a layer at a time, and encoded here as one rank does.

    A codec passes at a site if at all layers `neuron_ranks`, Spearman's correlation of the mean absolute elements of
    `neurons`, `concept`, Pearson's correlation of cross-validated scores of rows by probes of the labels, and
    `direction`, that of the rows' cosines with each direction, are at least `BAR`; and, for codecs that project rows,
    `cosine_error`, the root mean square error of rows' cosines, is at most 1 / sqrt(k), and `rounding`, the least
    cosine with the projection before rounding, at least `ROUNDING_BAR`. Other measures are only reported.

    Args:
        model: an open model with taps at these sites.
        texts: str, token ids, or `Exchange(prompt, response)`. Rows are those of the response of an Exchange, and of
            all tokens but the first of other texts.
        layers: layers to judge; by default three, at the quarters of the model or of the directions, and the SAE's.
        sites: sites to judge.
        candidates: codecs, such as "topk8,k=64"; raw rows are always judged.
        labels: by name of a concept, a number for each text.
        directions: named directions at one of the sites. A site without these, labels or ranks of neurons is judged by
            the first `PRINCIPAL` principal directions of its rows.
        sae: SAE of one of the points, which is applied to decoded rows: `sae_explained` is the share of raw rows'
            variance, `sae_probe_delta` the change in the correlation of labels with a probe of its features.
        train_sae: also train a small SAE on raw rows and one on the rows of each topk8 codec: `trained_sae_explained`
            is the share of the variance of raw rows not trained on; and `trained_sae_probe_delta`.
        most_rows: maximum rows of each point to judge by; later texts are left out.
        seed: seed of the sample of rows, and of training.
        progress: function called with a `Progress` whenever the work advances.

    Raises:
        InvalidSpec, UnknownName: an argument is not valid.
        InvalidRequest: there are too few rows or labelled texts.
        The errors of `SteerModel.read`.
    """
    check_texts(texts)
    asked = CheckAsked(
        layers=_layers_of(model, layers, directions, sae),
        sites=tuple(CaptureSpec(sites=sites).sites),
        codings=codings_of(candidates),
        labels=_labels_of(labels, len(texts)),
        directions=directions,
        sae=sae,
        train_sae=bool(train_sae),
        most_rows=most_rows,
        seed=seed,
    )
    prompts = await prompts_and_rows(model, texts, TokenSelection.parse(BUT_THE_FIRST))
    count = Count("points", len(asked.layers) * len(asked.sites), 0, progress)
    found: list[CodecMeasure] = []
    notes: dict[str, str] = {}
    taken: list[int] = []
    for layer in asked.layers:
        rows = await _read(model, prompts, taken, layer, asked)
        groups = _groups(rows, len(texts), asked, notes)
        taken = list(rows)
        labelled = {name: numbers[taken] for name, numbers in asked.labels.items()}
        check_labels(labelled)
        for site in asked.sites:
            whole = torch.cat([item[site] for item in rows.values()])[: asked.most_rows]
            judge = CodecJudge(Point(layer, site), whole, groups, labelled, asked)
            found += await asyncio.to_thread(judge.measures, notes)
            count.add()
    measures = sorted(found, key=lambda item: (asked.sites.index(item.site), item.layer, item.bytes))
    return CodecCheck(tuple(measures), model_name(model.model), len(groups), len(taken), notes)


async def _read(
    model: ReadingModel, prompts: Sequence[Any], taken: Sequence[int], layer: int, check: CheckAsked
) -> dict[int, dict[str, torch.Tensor]]:
    """Capture texts until there are enough rows; return rows by index of the text, then site, for texts that have rows.

    Args:
        model: model that reads.
        prompts: token ids and token selection of each text.
        taken: indices of the texts to read; all if empty.
        layer: layer of the rows.
        check: arguments of the check.
    """
    numbers, found, count = list(taken or range(len(prompts))), dict[int, dict[str, torch.Tensor]](), 0
    while numbers and count < check.most_rows:
        part, numbers = numbers[:CALL_TEXTS], numbers[CALL_TEXTS:]
        specs = [CaptureSpec(layers=[layer], sites=check.sites, tokens=prompts[one][1], codec="raw") for one in part]
        asking = [{"prompt_token_ids": prompts[one][0]} for one in part]
        handles = await model.read(asking, capture=specs, steering=None)
        await model.fetch_captures_batch(handles)
        for number, handle in zip(part, handles, strict=True):
            rows = {site: handle.captures[layer, site].clone() for site in check.sites}
            if len(rows[check.sites[0]]) and count < check.most_rows:
                found[number] = rows
                count += len(rows[check.sites[0]])
    return found


def _groups(
    rows: Mapping[int, Mapping[str, torch.Tensor]], texts: int, check: CheckAsked, notes: dict[str, str]
) -> npt.NDArray[np.int64]:
    """Return the number of each row's text, from 0: int64 [rows]; tell `notes` of few rows, and of texts without rows.

    Raises:
        InvalidRequest: there are fewer than `LEAST_ROWS` rows.
    """
    counts = [len(one[check.sites[0]]) for one in rows.values()]
    found = np.repeat(np.arange(len(counts)), counts)[: check.most_rows]
    if len(found) < LEAST_ROWS:
        raise InvalidRequest(f"the texts have {len(found)} rows; give texts of {FEW_ROWS:,} to {MOST_ROWS:,} tokens")
    if len(found) < FEW_ROWS:
        notes["rows"] = f"{len(found)}; with fewer than {FEW_ROWS:,} the correlations say little"
    if texts > len(rows):
        lost, after = texts - len(rows), texts - 1 - max(rows)
        notes["texts"] = f"{lost} left out: {after} after the last row, {lost - after} without rows"
    return found


def check_labels(labels: Mapping[str, Sequence[float] | Floats]) -> None:
    """Check that probes can be fitted to labels, a number for each text by concept.

    Raises:
        InvalidRequest: a concept has too few texts, or labels that are all equal.
    """
    for name, numbers in labels.items():
        if len(numbers) < 2 * FOLDS or np.ptp(numbers) == 0:
            raise InvalidRequest(
                f"labels[{name!r}]: {len(numbers)} texts, with labels {sorted(set(map(float, numbers)))[:4]}; "
                f"a probe needs {2 * FOLDS} texts and different labels: give shorter texts, mixed, or more rows"
            )
