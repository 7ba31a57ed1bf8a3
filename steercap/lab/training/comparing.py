"""Comparison of trained vectors with vectors that are means of activations, and with system prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from steercap.core.protocols import Count, ProgressCallback
from steercap.core.values import choices, shown
from steercap.errors import InvalidFile, RunDiffers, TrainingDiverged, UnknownName
from steercap.files.base import blame, require_file, write_whole
from steercap.files.folder import differences
from steercap.lab.training.datasets import HELD_OUT, RESULT, TextLoss, example_of, read_result
from steercap.lab.training.hooked import HookedModel
from steercap.lab.training.rates import RATES_FOLDER
from steercap.lab.training.settings import TrainingSettings
from steercap.lab.training.training import hooked_of, identity_of, perplexity_of
from steercap.lab.training.vector_pairs import ComparedVectors, TrainedComparison, Vectors, pairs_of, read_vectors
from steercap.steering.edits.add import Add
from steercap.steering.formats import load_steering_vector
from steercap.steering.layers import LayerVectors
from steercap.steering.spec import SteeringSpec

#: File of the loss with an averaged vector, in the folder of a data set; file of the table of all.
AVERAGED, TABLE = "averaged.json", "steering_vector_comparison.parquet"


class _AveragedLoss(msgspec.Struct, frozen=True):
    """Loss of held-out responses while an averaged vector, identified by its SHA-256, is added at a layer."""

    sha256: str
    layer: int
    loss: TextLoss


def compare_trained(
    model: str | Path | HookedModel,
    out: str | Path,
    averaged: Vectors,
    *,
    name_of: Callable[[str], str] = lambda dataset: dataset.rpartition("__")[2],
    batch_size: int = 8,
    progress: ProgressCallback | None = None,
    **reading: Any,
) -> ComparedVectors:
    """Compare the vectors that `train_datasets` trained with averaged ones, and with system prompts.

    Each averaged vector is added, not scaled, at the layer and tokens of the trained one, on held-out examples. The
    table is written to `steering_vector_comparison.parquet` in the folder; after an interruption, the call resumes.

    Args:
        model: model that the vectors were trained on.
        out: folder of `train_datasets`.
        averaged: averaged vectors by name; see `read_vectors`.
        name_of: function that returns the name of a data set's averaged vector; by default what follows the last "__"
            ("qwen-3-32b__trait__kind": "kind"). One of the data set's own name comes first.
        batch_size: number of examples in a pass.
        progress: function called with a `Progress` whenever the work advances.
        **reading: arguments of `load_personas`, for a folder of persona files.

    Raises:
        InvalidFile: the folder holds no data set that was trained, or a file is damaged.
        RunDiffers: a vector was trained on another model.
        UnknownName: no data set has an averaged vector.
        InvalidSpec: vectors of one data set differ in width.
    """
    known, left_out = read_vectors(averaged, **reading)
    hooked = hooked_of(model, TrainingSettings())
    folders = sorted(file.parent for file in Path(out).glob(f"*/{RESULT}"))
    if not folders:
        raise InvalidFile(f"{out} holds no data set that was trained; give the folder of train_datasets")
    begun = {file.parent for file in Path(out).glob(f"*/{RATES_FOLDER.file}")}
    left_out |= {one.name: "not finished; call train_datasets again" for one in sorted(begun.difference(folders))}
    rows: list[TrainedComparison] = []
    count = Count("data sets", len(folders), 0, progress)
    for folder in folders:
        name = folder.name if folder.name in known else name_of(folder.name)
        if name in known:
            found = _compared(hooked, folder, name, known[name], batch_size)
        else:
            found = f"no averaged vector {name!r}"
        if isinstance(found, str):
            left_out[folder.name] = found
        else:
            rows.append(found)
        count.add()
    if not rows:
        raise UnknownName(f"nothing to compare: {shown(left_out)}; {choices(name, known)}")
    result = ComparedVectors(rows, left_out)
    result.save(Path(out) / TABLE)
    return result


def _compared(
    model: HookedModel, folder: Path, name: str, averaged: LayerVectors, batch_size: int
) -> TrainedComparison | str:
    """Compare a data set's trained vector with the averaged one, or return the reason why it cannot be compared."""
    result = read_result(folder)
    known = RATES_FOLDER.read(folder).training.model
    if apart := differences({"model": known}, {"model": identity_of(model)}):
        raise RunDiffers(f"{folder} was trained on another model: {'; '.join(apart)}; give the same")
    if not {"trained", "unsteered"} <= result.validation.keys():
        return "trained on preferences, which have no perplexity"
    if not (folder / "steering_vector.pt").exists():
        return "the trained edit is not one vector of the residual stream"
    trained, config = load_steering_vector(folder)
    if config.target_layer not in averaged:
        return f"the averaged vector has no layer {config.target_layer}"
    pair = pairs_of(folder.name, trained, averaged.at_layers([config.target_layer]))[0]
    try:
        loss = _averaged_loss(model, folder, averaged, pair.layer, batch_size, result.held_out)
    except TrainingDiverged as error:
        return f"the averaged vector: {error}"
    losses = {**result.validation, "averaged": loss}
    said: dict[str, Any] = {"loss_prompted": None, "perplexity_prompted": None}
    for label, loss in losses.items():
        said |= {f"loss_{label}": loss.loss, f"perplexity_{label}": loss.perplexity}
    numbers = (pair.layer, pair.cosine, pair.norm, pair.other_norm, result.lr, losses["trained"].tokens)
    return TrainedComparison(folder.name, name, *numbers, **said)


def _averaged_loss(  # noqa: PLR0917 -- a model and a vector, and where the examples are
    model: HookedModel, folder: Path, averaged: LayerVectors, layer: int, batch_size: int, held_out: int
) -> TextLoss:
    """Return the loss of the `held_out` held-out examples with an averaged vector; stored in a file, and reused."""
    digest = hashlib.sha256(averaged[layer].numpy().tobytes()).hexdigest()
    file = folder / AVERAGED
    if file.exists():
        with blame(file):
            known = msgspec.json.decode(file.read_bytes(), type=_AveragedLoss)
        if (known.sha256, known.layer) == (digest, layer):
            return known.loss
    require_file(folder / HELD_OUT)
    with blame(folder / HELD_OUT):
        lines = (folder / HELD_OUT).read_bytes().splitlines()
        examples = [example_of(msgspec.json.decode(line, type=dict[str, Any])) for line in lines]
        if len(lines) != held_out:
            raise ValueError(f"{len(lines)} examples are there, of {held_out}; it was changed")
    (trained,) = SteeringSpec.load(folder / f"{folder.name}.safetensors").of_rows()
    edit = Add(averaged[layer], layer=layer, tokens=trained.selection)
    loss = perplexity_of(model, examples, edit, batch_size=batch_size)  # type: ignore[arg-type]
    with write_whole(file) as scratch:
        scratch.write_bytes(msgspec.json.encode(_AveragedLoss(digest, layer, loss)))
    return loss
