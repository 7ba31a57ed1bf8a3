"""Comparison of vectors: two folders of them; trained ones with averaged ones and with system prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import msgspec

from steercap.core.values import choices, shown
from steercap.errors import InvalidFile, InvalidSpec, RunDiffers, TrainingDiverged, UnknownName
from steercap.files.base import blame, require_file, write_whole
from steercap.files.folder import differences
from steercap.files.tables import write_table
from steercap.lab.training.datasets import HELD_OUT, RESULT, TextLoss, example_of, read_result
from steercap.lab.training.hooked import HookedModel
from steercap.lab.training.rates import RATES_FOLDER
from steercap.lab.training.settings import TrainingSettings
from steercap.lab.training.training import hooked_of, identity_of, perplexity_of
from steercap.steering.directions import DirectionSet
from steercap.steering.edits.add import Add
from steercap.steering.formats import load_personas, load_steering_vector
from steercap.steering.layers import LayerVectors
from steercap.steering.spec import SteeringSpec

#: Vectors by name: a mapping; a `DirectionSet` in a file; a folder of NAME.pt, or of NAME/steering_vector.pt.
Vectors: TypeAlias = "Mapping[str, LayerVectors] | str | Path"
#: File of the losses of averaged vectors, in the folder of a data set; file of the table.
AVERAGED, TABLE = "averaged.json", "steering_vector_comparison.parquet"


class VectorPair(msgspec.Struct, frozen=True):
    """Two vectors of one name and layer.

    Args:
        name, layer: name and layer of both.
        cosine: cosine; None if one is zero.
        norm, other_norm: Euclidean norms of the first and the second, in the units of the stream.
        norm_ratio: norm of the second divided by that of the first; None if that is 0.
    """

    name: str
    layer: int
    cosine: float | None
    norm: float
    other_norm: float
    norm_ratio: float | None


class TrainedComparison(msgspec.Struct, frozen=True):
    """Trained and averaged vector of a data set, and its system prompt.

    Args:
        dataset: name of the data set.
        averaged: name of the averaged vector.
        layer: layer of the trained vector, to which both are added.
        cosine: cosine of both; None if one is zero.
        norm_trained, norm_averaged: Euclidean norms, in the units of the stream.
        lr: learning rate of the trained vector.
        tokens: number of held-out tokens of responses.
        loss_trained, loss_averaged, loss_prompted, loss_unsteered: mean loss of the held-out examples, in nats per
            token; None without system prompts.
        perplexity_trained, perplexity_averaged, perplexity_prompted, perplexity_unsteered: perplexity of the held-out
            responses, over all tokens.
    """

    dataset: str
    averaged: str
    layer: int
    cosine: float | None
    norm_trained: float
    norm_averaged: float
    lr: float
    tokens: int
    loss_trained: float
    perplexity_trained: float
    loss_averaged: float
    perplexity_averaged: float
    loss_prompted: float | None
    perplexity_prompted: float | None
    loss_unsteered: float
    perplexity_unsteered: float


@dataclass(frozen=True)
class ComparedVectors:
    """Results of a comparison.

    Args:
        rows: a row for each name and layer, or for each data set.
        left_out: reasons of the names that were not compared; under "layers of NAME and 2 more", layers of one side.
    """

    rows: Sequence[VectorPair] | Sequence[TrainedComparison]
    left_out: Mapping[str, str]

    def save(self, path: str | Path) -> Path:
        """Write the rows to a Parquet file, whose name ends in .parquet."""
        return write_table(path, list(self.rows))

    def __str__(self) -> str:
        cosines = [row.cosine for row in self.rows if row.cosine is not None]
        about = f"; cosine {min(cosines):.4f} at least, {median(cosines):.4f} in the middle" if cosines else ""
        zero = len(self.rows) - len(cosines)
        return f"{len(self.rows)} pairs{about}; {zero} with a vector of zeros; {len(self.left_out)} left out"


def read_vectors(vectors: Vectors, **reading: Any) -> tuple[Mapping[str, LayerVectors], dict[str, str]]:
    """Read vectors by name.

    Args:
        vectors: a mapping; a `DirectionSet` in a file; or a folder, of persona files `NAME.pt` or of trained vectors
            `NAME/steering_vector.pt`.
        **reading: for persona files, arguments of `load_personas`, such as `level` and `layers`.

    Returns:
        The vectors, and the reasons of the files of a folder that have none.

    Raises:
        InvalidSpec: a mapping holds something else; or `reading` for what is no folder of persona files.
        InvalidFile: the file or folder holds no vectors, or is damaged.
        UnknownName: no file has the level.
    """
    if isinstance(vectors, Mapping):
        if not vectors or not all(isinstance(one, LayerVectors) for one in vectors.values()):
            raise InvalidSpec(f"vectors={shown(vectors)}; give LayerVectors by name, one at least")
        return vectors, {}
    path = Path(vectors)
    if path.is_dir() and any(path.glob("*.pt")):
        personas = load_personas(path, **reading)
        return personas.directions, {f"{path}/{file}": reason for file, reason in personas.left_out.items()}
    if any(value is not None for value in reading.values()):
        raise InvalidSpec(f"{path} is no folder of persona files NAME.pt, of which {', '.join(reading)} could be read")
    if not path.is_dir():
        return DirectionSet.load(path), {}
    folders = sorted(file.parent for file in path.glob("*/steering_vector.pt"))
    found = {folder.name: load_steering_vector(folder)[0] for folder in folders}
    if not found:
        raise InvalidFile(f"{path} holds no vectors; give a folder of NAME.pt or of NAME/steering_vector.pt")
    return found, {}


def compare_vectors(first: Vectors, second: Vectors, **reading: Any) -> ComparedVectors:
    """Compare vectors of equal names, layer by layer, whatever models, engines or dtypes they are of.

    Args:
        first, second: vectors by name; see `read_vectors`.
        **reading: arguments of `load_personas`, for folders of persona files.

    Returns:
        A row for each name and layer of both. Names and layers that only one has are left out, and said.

    Raises:
        UnknownName: they have no name in common.
        InvalidSpec: two of one name are of different sites or widths, or have no layer in common.
        The errors of `read_vectors`.
    """
    (ours, lacking), (theirs, also) = (read_vectors(one, **reading) for one in (first, second))
    common = [name for name in ours if name in theirs]
    if not common:
        raise UnknownName(f"no name in common: first has {choices('', ours)}; second {choices('', theirs)}")
    left_out = lacking | also | {name: "only in the first" for name in ours if name not in theirs}
    left_out |= {name: "only in the second" for name in theirs if name not in ours}
    rows = [row for name in common for row in _pairs(name, ours[name], theirs[name])]
    alone: dict[str, list[str]] = {}
    for name in common:
        alone.setdefault(_unmatched(ours[name], theirs[name]), []).append(name)
    for said, (name, *more) in alone.items():
        if said:
            left_out[f"layers of {name}" + (f" and {len(more)} more" if more else "")] = said
    return ComparedVectors(rows, left_out)


def _unmatched(first: LayerVectors, second: LayerVectors) -> str:
    """Return the layers that only one of two vectors has, in words; "" if both have the same."""
    sides = {"first": first.keys() - second.keys(), "second": second.keys() - first.keys()}
    return "; ".join(
        f"{len(layers)} only in the {side}, from {min(layers)} to {max(layers)}"
        for side, layers in sides.items()
        if layers
    )


def _pairs(name: str, first: LayerVectors, second: LayerVectors) -> list[VectorPair]:
    """Compare two vectors at their common layers."""
    layers = [layer for layer in first if layer in second]
    if (first.site, first.width) != (second.site, second.width) or not layers:
        raise InvalidSpec(f"{name}: {first!r} and {second!r} differ in site, width, or have no layer in common")
    found = []
    for layer in layers:
        one, other = first[layer].double(), second[layer].double()
        norm, other_norm = float(one.norm()), float(other.norm())
        cosine = float(one @ other / norm / other_norm) if norm and other_norm else None
        ratio = other_norm / norm if norm else None
        bounded = None if cosine is None else min(max(cosine, -1.0), 1.0)
        found.append(VectorPair(name, layer, bounded, norm, other_norm, ratio))
    return found


class _AveragedLoss(msgspec.Struct, frozen=True):
    """Likelihood of held-out responses with an averaged vector, of this SHA-256, added at a layer."""

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
    progress: Callable[[int, int], None] | None = None,
    **reading: Any,
) -> ComparedVectors:
    """Compare the vectors that `train_datasets` trained with averaged ones, and with system prompts.

    The averaged vectors are added as they are to the layer and tokens of the trained one, on what was held out. The
    table is written to `steering_vector_comparison.parquet` in the folder; after an interruption, the call resumes.

    Args:
        model: model that the vectors were trained on.
        out: folder of `train_datasets`.
        averaged: averaged vectors by name; see `read_vectors`.
        name_of: function that returns the name of a data set's averaged vector; by default what follows the last "__"
            ("qwen-3-32b__trait__kind": "kind"). One of the data set's own name comes first.
        batch_size: number of examples in a pass.
        progress: function called with the number of data sets done, and of all.
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
    for done, folder in enumerate(folders, 1):
        name = folder.name if folder.name in known else name_of(folder.name)
        if name in known:
            found = _compared(hooked, folder, name, known[name], batch_size)
        else:
            found = f"no averaged vector {name!r}"
        if isinstance(found, str):
            left_out[folder.name] = found
        else:
            rows.append(found)
        if progress is not None:
            progress(done, len(folders))
    if not rows:
        raise UnknownName(f"nothing to compare: {shown(left_out)}; {choices(name, known)}")
    result = ComparedVectors(rows, left_out)
    result.save(Path(out) / TABLE)
    return result


def _compared(
    model: HookedModel, folder: Path, name: str, averaged: LayerVectors, batch_size: int
) -> TrainedComparison | str:
    """Compare the vectors of a data set, or return the reason why they cannot be."""
    result = read_result(folder)
    if apart := differences(RATES_FOLDER.read(folder).training.model, identity_of(model)):
        raise RunDiffers(f"{folder} was trained on another model: {'; '.join(apart)}; give the same")
    if not {"trained", "unsteered"} <= result.validation.keys():
        return "trained on preferences, which have no perplexity"
    if not (folder / "steering_vector.pt").exists():
        return "what was trained is not one vector of the stream"
    trained, config = load_steering_vector(folder)
    if config.target_layer not in averaged:
        return f"the averaged vector has no layer {config.target_layer}"
    pair = _pairs(folder.name, trained, averaged.at_layers([config.target_layer]))[0]
    try:
        loss = _averaged_loss(model, folder, averaged, pair.layer, batch_size)
    except TrainingDiverged as error:
        return f"the averaged vector: {error}"
    losses = {**result.validation, "averaged": loss}
    said: dict[str, Any] = {"loss_prompted": None, "perplexity_prompted": None}
    for label, loss in losses.items():
        said |= {f"loss_{label}": loss.loss, f"perplexity_{label}": loss.perplexity}
    numbers = (pair.layer, pair.cosine, pair.norm, pair.other_norm, result.lr, losses["trained"].tokens)
    return TrainedComparison(folder.name, name, *numbers, **said)


def _averaged_loss(model: HookedModel, folder: Path, averaged: LayerVectors, layer: int, batch_size: int) -> TextLoss:
    """Return the likelihood of what was held out with an averaged vector, computed once."""
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
        held_out = [example_of(msgspec.json.decode(line, type=dict[str, Any])) for line in lines]
        if len(lines) != (wanted := read_result(folder).held_out):
            raise ValueError(f"{len(lines)} examples are there, of {wanted}; it was changed")
    (trained,) = SteeringSpec.load(folder / f"{folder.name}.safetensors").of_rows()
    edit = Add(averaged[layer], layer=layer, tokens=trained.selection)
    loss = perplexity_of(model, held_out, edit, batch_size=batch_size)  # type: ignore[arg-type]
    with write_whole(file) as scratch:
        scratch.write_bytes(msgspec.json.encode(_AveragedLoss(digest, layer, loss)))
    return loss
