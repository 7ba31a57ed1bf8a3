"""Steering in other programs' `.pt` files: vectors [layers, hidden], a trained vector [hidden], or experiments of caps.

The first is the format of persona vectors (Chen et al. 2025, arXiv:2507.21509). Such a file does not say which layer
row 0 is, so the caller must: `first_row` is the row of layer 0.

    first_row=0    row i is layer i
    first_row=1    row i is layer i - 1; row 0, the embeddings, is not a layer and is left out

persona_vectors stacks transformers' `hidden_states`, whose entry 0 is the embeddings: first_row=1.

The second is a folder: `steering_vector.pt` holds "steering_vector", `steering_config.json` names the model and the
layer, from 0, to whose output the vector is added.

The third is chatspace's and the assistant axis's (Lu et al. 2026): `{"vectors": {name: {"vector": [hidden], "layer":
int}}, "experiments": [{"id": str, "interventions": [{"vector": name, "cap": float}]}]}`; other keys are ignored. A
layer is the output of a decoder layer counted from 0, `resid_post` here; a cap is a projection on the unit vector, in
the units of the stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import torch

from steercap.core.values import choices, index_of, shown
from steercap.errors import InvalidFile, InvalidSpec, UnknownName
from steercap.files.base import blame, check_extension, read_pt, require_file, write_whole
from steercap.steering.edits.inputs import several
from steercap.steering.edits.replace import Cap
from steercap.steering.layers import LayerVectors
from steercap.steering.spec import SteeringSpec

#: Names of the two files of a trained vector.
VECTOR: Final = "steering_vector.pt"
CONFIG: Final = "steering_config.json"


def load_layers_pt(
    path: str | Path, *, first_row: Literal[0, 1], name: str = "", model: str = "", site: str = "resid_post"
) -> LayerVectors:
    """Read vectors by layer from a `.pt` that contains a tensor [layers, hidden] of any floating dtype.

    Args:
        path: the file.
        first_row: the row of layer 0: 1 for persona vectors, whose row 0 is the embeddings.
        name, model, site: attributes of the result, which the file does not have.

    Raises:
        InvalidSpec: `first_row` is neither 0 nor 1.
        InvalidFile: damaged, not such a tensor, or with NaN or inf.
    """
    first, path = _checked_first_row(first_row), Path(path)
    rows = read_pt(path)
    if not isinstance(rows, torch.Tensor) or rows.dim() != 2 or not rows.is_floating_point():
        raise InvalidFile(f"{path} holds {_shown(rows)}; expected one floating-point tensor [layers, hidden]")
    if len(rows) <= first:
        raise InvalidFile(
            f"{path} has {len(rows)} rows, which with first_row={first} leaves no layer; check first_row="
        )
    with blame(path):
        return LayerVectors(dict(enumerate(rows[first:])), name=name, model=model, site=site)


def save_layers_pt(vectors: LayerVectors, path: str | Path, *, first_row: Literal[0, 1]) -> Path:
    """Write vectors to a `.pt` as a float32 tensor [layers, hidden]; with first_row=1 row 0, the embeddings', is zero.

    Raises:
        InvalidSpec: another `first_row`, or no vector for a layer below the last; a row of zeros there would be wrong.
        InvalidFile: the name does not end in .pt.
    """
    first = _checked_first_row(first_row)
    missing = sorted(set(range(max(vectors))) - set(vectors))
    if missing:
        raise InvalidSpec(
            f"{vectors!r} has no vector for layers {missing}, and a tensor has a row for each from 0; "
            "save it with LayerVectors.save, which keeps any layers"
        )
    rows = torch.stack([torch.zeros(vectors.width)] * first + list(vectors.values()))
    path = Path(path)
    check_extension(path, ".pt")
    with write_whole(path) as scratch:
        torch.save(rows, scratch)
    return path


class SteeringConfig(msgspec.Struct, frozen=True):
    """Content of `steering_config.json`, which describes a trained vector.

    Args:
        model_name: name of the model.
        target_layer: layer from 0 whose output the vector is added to.
        init_scale: scale of the random vector that training started from; 0 for none.
    """

    model_name: str
    target_layer: int
    init_scale: float = 0.0


def load_steering_vector(folder: str | Path) -> tuple[LayerVectors, SteeringConfig]:
    """Read a trained vector from a folder with `steering_vector.pt` and `steering_config.json`.

    Returns:
        The vector at `resid_post` of its layer, named like the folder; and the configuration.

    Raises:
        InvalidFile: a file is missing, damaged or incomplete.
    """
    folder = Path(folder)
    require_file(folder / CONFIG)
    with blame(folder / CONFIG):
        config = msgspec.json.decode((folder / CONFIG).read_bytes(), type=SteeringConfig)
    found = read_pt(folder / VECTOR)
    vector = found.get("steering_vector") if isinstance(found, dict) else None
    if not isinstance(vector, torch.Tensor) or not vector.is_floating_point():
        raise InvalidFile(f"{folder / VECTOR} holds {_shown(found)}; expected a 'steering_vector' [hidden]")
    with blame(folder / VECTOR):
        vectors = LayerVectors(
            {config.target_layer: vector.detach()}, name=folder.absolute().name, model=config.model_name
        )
    return vectors, config


def save_steering_vector(vectors: LayerVectors, folder: str | Path, *, init_scale: float = 0.0) -> Path:
    """Write a vector of one layer to a folder in the form that `load_steering_vector` reads; return the folder.

    Raises:
        InvalidSpec: several layers, another site, or no model.
    """
    if len(vectors) != 1 or vectors.site != "resid_post" or not vectors.model:
        raise InvalidSpec(f"{vectors!r}; give the vector of one layer at resid_post, with its model's name")
    ((layer, vector),) = vectors.items()
    path = Path(folder) / CONFIG
    with write_whole(path.with_name(VECTOR)) as scratch:
        torch.save({"steering_vector": vector}, scratch)
    with write_whole(path) as scratch:
        config = SteeringConfig(vectors.model, layer, init_scale)
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(config)) + b"\n")
    return path.parent


def _checked_first_row(first_row: object) -> int:
    found = index_of(first_row)
    if found not in {0, 1}:
        raise InvalidSpec(f"first_row={shown(first_row)}; give 0 if row 0 is layer 0, or 1 if row 0 is the embeddings")
    assert found is not None
    return found


def _shown(content: object) -> str:
    if isinstance(content, torch.Tensor):
        return f"a tensor {tuple(content.shape)} of {content.dtype}"
    return f"{type(content).__name__}, not a tensor"


def load_capping(
    path: str | Path, *, bound: Literal["high", "low"] = "high", experiments: Iterable[str] | None = None
) -> dict[str, SteeringSpec]:
    """Read experiments of capping: a spec of `Cap` edits for each, by id, in the order of its interventions.

    Args:
        path: the file, such as `capping_config.pt` of the assistant axis.
        bound: meaning of a cap: "high" for the maximum projection, as published; "low" for the minimum, in files of
            floors.
        experiments: ids to read; None for all.

    Raises:
        InvalidSpec: another `bound`, or `experiments` that is not a list of ids.
        UnknownName: an experiment that the file does not have.
        InvalidFile: damaged, of another format, or with an experiment or vector that is incomplete or not finite.
    """
    if not isinstance(bound, str) or bound not in {"high", "low"}:
        raise InvalidSpec(f"bound={shown(bound)}; give 'high' for a greatest projection or 'low' for a least one")
    path, ids = Path(path), None if experiments is None else several(experiments, "experiments")
    found = read_pt(path)
    vectors = _item(path, "the file", found, "vectors", (dict,))
    by_id = _by_id(path, _item(path, "the file", found, "experiments", (list, tuple)))
    wanted = list(by_id) if ids is None else ids
    for name in wanted:
        if not isinstance(name, str) or name not in by_id:
            raise UnknownName(f"unknown experiment {shown(name)} of {path}; {choices(name, by_id)}")
    return {name: _experiment(path, name, by_id[name], vectors, bound) for name in wanted}


def _by_id(path: Path, experiments: Iterable[Any]) -> dict[str, Any]:
    by_id: dict[str, Any] = {}
    for number, experiment in enumerate(experiments):
        name = _item(path, f"experiment {number}", experiment, "id", (str,))
        if name in by_id:
            raise InvalidFile(f"{path}: experiment {name!r} is there twice; give each an id of its own")
        by_id[name] = experiment
    return by_id


def _experiment(path: Path, name: str, experiment: Any, vectors: Any, bound: str) -> SteeringSpec:
    where = f"experiment {name!r}"
    interventions = _item(path, where, experiment, "interventions", (list, tuple))
    if not interventions:
        raise InvalidFile(f"{path}: {where} has no interventions; leave it out with experiments=[...]")
    return SteeringSpec([_cap(path, where, intervention, vectors, bound) for intervention in interventions])


def _cap(path: Path, where: str, intervention: Any, vectors: Any, bound: str) -> Cap:
    name = _item(path, where, intervention, "vector", (str,))
    cap = _item(path, f"{where}, vector {name!r}", intervention, "cap", (int, float, torch.Tensor))
    if name not in vectors:
        raise InvalidFile(
            f"{path}: {where} uses vector {name!r}, which the file does not have (it has {len(vectors)}); "
            "add it, or leave the experiment out with experiments=[...]"
        )
    where = f"vector {name!r}"
    vector = _item(path, where, vectors[name], "vector", (torch.Tensor,))
    layer = _item(path, where, vectors[name], "layer", (int,))
    if layer < 0:
        raise InvalidFile(f"{path}: {where} has layer {layer}; layers count from 0")
    low, high = (None, cap) if bound == "high" else (cap, None)
    with blame(path):
        return Cap(vector, low=low, high=high, layer=layer)


def _item(path: Path, where: str, holder: Any, key: str, kinds: tuple[type, ...]) -> Any:
    """Return `holder[key]` after checking that it is of one of the types `kinds`; `where` names the holder in errors.

    Raises:
        InvalidFile: it is missing, or of another type.
    """
    if not isinstance(holder, dict):
        raise InvalidFile(f"{path}: {where} is {_kind(holder)}, not dict; is this a capping configuration?")
    if key not in holder:
        raise InvalidFile(f"{path}: {where} has no {key!r}, only {sorted(map(str, holder))}; add it to the file")
    value = holder[key]
    if not isinstance(value, kinds) or isinstance(value, bool):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise InvalidFile(f"{path}: {where} has a {key!r} that is {_kind(value)}, not {expected}; correct the file")
    return value


def _kind(value: object) -> str:
    return type(value).__name__
