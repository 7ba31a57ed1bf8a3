"""Capping along the assistant axis: projections of rows are raised to a floor typical of the default assistant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from jaxtyping import Float

from steercap.concurrency.loops import each_of
from steercap.core.display import brief
from steercap.core.protocols import ReadingModel
from steercap.core.spec import CaptureSpec
from steercap.core.tokens import BUT_THE_FIRST, Tokens, TokenSelection
from steercap.core.values import number_of, parts_of, shown
from steercap.errors import InvalidSpec, LayerOutOfRange, RunDiffers
from steercap.files.folder import differences
from steercap.lab.directions import Exchange
from steercap.lab.directions.extraction import CALL_TEXTS, CALLS, check_texts, prompts_and_rows
from steercap.lab.personas.capture import prompt_of
from steercap.lab.personas.roles.axis import AssistantAxis
from steercap.lab.personas.roles.folder import read_folder
from steercap.lab.personas.roles.role import ASSISTANT
from steercap.lab.personas.roles.settings import Case
from steercap.lab.personas.roles.stages import answers_of
from steercap.steering.edits.inputs import FrozenMapping
from steercap.steering.edits.replace import Cap
from steercap.steering.layers import LayerVectors
from steercap.steering.spec import SteeringSpec

if TYPE_CHECKING:
    from steercap.lab.personas.roles.pipeline import RoleRun
    from steercap.model import SteerModel


@dataclass(frozen=True, eq=False)
class Capping:
    """Steering that raises projections on the axis to floors at some layers; made by `capping`.

    Args:
        spec: a `Cap` with `low=` at each layer.
        floors: minimum projection by layer, in the units of the residual stream.
        provenance: origin of the floors, as texts by name; `save` writes it with the spec.
        model: name of the model.
    """

    spec: SteeringSpec
    floors: Mapping[int, float]
    provenance: Mapping[str, str]
    model: str = ""

    __repr__ = brief

    def save(self, path: str | Path) -> Path:
        """Write the spec with its provenance to a safetensors file that `SteeringSpec.load` reads; return its path.

        Raises:
            InvalidFile: the suffix is not .safetensors.
        """
        return self.spec.save(path, model=self.model, provenance=self.provenance)


def calibration_texts(run: RoleRun) -> list[Exchange]:
    """Return the default assistant's answers in a run, on which typical projections are measured.

    Args:
        run: run, as returned by `load_roles_run`.

    Raises:
        InvalidFile: the folder's answers cannot be read.
    """
    responses = answers_of(read_folder(run.folder).roles[ASSISTANT])
    return [Exchange(prompt_of(run.settings, one), one.token_ids) for one in responses if one.token_ids]


async def token_projections(
    model: ReadingModel,
    vectors: AssistantAxis | LayerVectors,
    texts: Sequence[Exchange],
    *,
    layers: Sequence[int] | None = None,
) -> dict[int, Float[torch.Tensor, " tokens"]]:
    """Return projections on the axis of every token of some answers, by layer, computed in the workers.

    Args:
        model: an open model.
        vectors: the axis, or other vectors, such as random ones.
        texts: prompts with their answers; the answers' tokens are projected.
        layers: layers of the axis; None for all.

    Returns:
        By layer, float32 [tokens of all answers, in order], in the units of the residual stream.

    Raises:
        InvalidSpec: there are no texts.
        LayerOutOfRange: the axis has no vector at a layer.
        The errors of `SteerModel.read`.
    """
    found = await projections_by_text(model, vectors, texts, layers=layers)
    return {layer: torch.cat([one[layer] for one in found]) for layer in found[0]}


async def projections_by_text(
    model: ReadingModel,
    vectors: AssistantAxis | LayerVectors,
    texts: Sequence[Exchange],
    *,
    layers: Sequence[int] | None = None,
) -> list[dict[int, Float[torch.Tensor, " tokens"]]]:
    """Return projections on the axis of every token of each text's answer, float32 [tokens] by layer, text by text.

    Where prompt and answer fill the context, the answer's last token is left out: it had no row, and vLLM reads no
    sequence that leaves no room to go on.

    Args:
        model, vectors, texts, layers: arguments as for `token_projections`.

    Raises:
        InvalidSpec, LayerOutOfRange: as for `token_projections`.
        The errors of `SteerModel.read`.
    """
    vectors = vectors.vectors if isinstance(vectors, AssistantAxis) else vectors
    wanted = layers_in(vectors, layers)
    check_texts(texts)
    if not texts:
        raise InvalidSpec("no texts to read; give at least one")

    async def read(part: Sequence[Exchange]) -> list[dict[int, torch.Tensor]]:
        asked = await prompts_and_rows(model, part, TokenSelection.parse("all"))
        specs = [CaptureSpec(project=vectors, layers=list(wanted), tokens=tokens) for _, tokens in asked]
        full = model.max_model_len
        prompts = [{"prompt_token_ids": ids[:-1] if len(ids) == full else ids} for ids, _ in asked]
        handles = await model.read(prompts, capture=specs, steering=None)
        await model.fetch_captures_batch(handles)
        return [{layer: handle.captures[layer][:, 0].clone() for layer in wanted} for handle in handles]

    parts = [texts[first : first + CALL_TEXTS] for first in range(0, len(texts), CALL_TEXTS)]
    return [one for part in await each_of(parts, read, CALLS) for one in part]


async def calibrated_capping(
    model: SteerModel,
    run: RoleRun,
    vectors: AssistantAxis | LayerVectors,
    *,
    layers: Sequence[int] | None = None,
    percentile: float = 25.0,
    tokens: Tokens | TokenSelection = BUT_THE_FIRST,
) -> Capping:
    """Build a capping with floors measured on the default assistant's answers in a run.

    Args:
        model: an open model, the same as the run's.
        run: run, as returned by `load_roles_run`.
        vectors: the axis, or other vectors, such as random ones to compare with.
        layers: layers to cap; None for all.
        percentile, tokens: arguments as for `capping`.

    Raises:
        RunDiffers: the run is of another model.
        InvalidSpec, LayerOutOfRange: as for `capping`.
        The errors of `SteerModel.read`.
    """
    known, here = read_folder(run.folder).definition.model, model.identity()
    if what := differences({"model": known}, {"model": here}):
        raise RunDiffers(f"{run.folder} is of another model: {'; '.join(what)}; open the model that it is of")
    projections = await token_projections(model, vectors, calibration_texts(run), layers=layers)
    return capping(vectors, projections, percentile=percentile, tokens=tokens)


def capping(
    vectors: AssistantAxis | LayerVectors,
    projections: Mapping[int, Float[torch.Tensor, " tokens"]],
    *,
    percentile: float = 25.0,
    tokens: Tokens | TokenSelection = BUT_THE_FIRST,
) -> Capping:
    """Build a capping that raises rows' projections to a percentile of measured ones: a `Cap(low=)` at each layer.

    Source: activation capping, Lu et al. 2026 (arXiv:2601.10387). A floor on the axis is a ceiling, `Cap(high=)`, on
    the vector that points away from the assistant, as `formats.load_capping` reads it.

    Args:
        vectors: the axis, or other vectors.
        projections: projections on these vectors, by layer, as returned by `token_projections` for the default
            assistant's answers.
        percentile: percentile from 0 to 100, interpolated linearly between values as NumPy does.
        tokens: tokens whose rows are capped. By default all but the first, whose row in most models is an attention
            sink: a hundred times as long as the others, and not among the measured rows.

    Raises:
        InvalidSpec: the percentile is out of range, or projections are missing or not finite.
        LayerOutOfRange: the axis has no vector at a layer.
    """
    given = number_of(percentile)
    if given is None or not 0 <= given <= 100:
        raise InvalidSpec(f"percentile={shown(percentile)}; give a number from 0 to 100")
    how = vectors.how if isinstance(vectors, AssistantAxis) else vectors.name
    vectors = vectors.vectors if isinstance(vectors, AssistantAxis) else vectors
    layers = layers_in(vectors, list(projections))
    floors = {layer: _percentile(layer, projections[layer], given) for layer in layers}
    edits = [
        Cap(vectors[layer], low=floor, layer=layer, site=vectors.site, tokens=tokens) for layer, floor in floors.items()
    ]
    measured = ", ".join(f"{layer}: {len(projections[layer])}" for layer in layers)
    provenance = {
        "made by": "steercap.lab.personas.roles.capping",
        "vectors": f"{vectors.name} ({how})" if how not in vectors.name else vectors.name,
        "percentile": f"{given:g}",
        "projections by layer": measured,
        "tokens": str(TokenSelection.parse(tokens)),
    }
    return Capping(SteeringSpec(edits), FrozenMapping(floors), FrozenMapping(provenance), vectors.model)


def layers_in(vectors: LayerVectors, layers: Any) -> tuple[int, ...]:
    """Return the selected layers of vectors, ascending; `layers=None` takes all.

    Raises:
        InvalidSpec: `layers` is empty, or is not a sequence of indices.
        LayerOutOfRange: a layer has no vector.
    """
    if layers is None:
        return tuple(vectors)
    found = parts_of(layers, "layers")
    if not found:
        raise InvalidSpec(f"layers={shown(layers)}; give one or more of {list(vectors)}")
    if missing := [layer for layer in found if layer not in vectors]:
        raise LayerOutOfRange(f"layers {missing} have no vector; {list(vectors)} have one")
    return tuple(sorted(set(found)))


def _percentile(layer: int, values: torch.Tensor, percentile: float) -> float:
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1 or not found.size or not np.isfinite(found).all():
        raise InvalidSpec(f"the projections of layer {layer} are {list(found.shape)}; give finite numbers in a row")
    return float(np.percentile(found, percentile))


class CapRecord(msgspec.Struct, frozen=True):
    """Answer to a case under one condition, with its measures.

    Args:
        case: case of the answer.
        condition: name of the steering condition, "plain" without steering.
        answer: text of the answer.
        tokens: number of the answer's tokens.
        projection: projection of the answer's rows on the axis after the edits, mean over tokens, by layer.
        read: the same when the unsteered model reads the answer, which shows the text's effect without the edits.
        score: score of its role play, 0 to 100; None without a role, or if it could not be scored.
        perplexity: the unsteered model's perplexity of the answer.
    """

    case: Case
    condition: str
    answer: str
    tokens: int
    projection: dict[int, float]
    read: dict[int, float]
    score: float | None
    perplexity: float
