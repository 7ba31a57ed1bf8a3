"""Activation-capping experiments in a `.pt`: chatspace's, and those of the assistant axis (Lu et al. 2026).

Both hold `{"vectors": {name: {"vector": [hidden], "layer": int}}, "experiments": [{"id": str, "interventions":
[{"vector": name, "cap": float}]}]}`; other keys are left alone. A layer is the output of a decoder layer counted
from 0, our `resid_post`; a cap is a projection on the unit vector, in the units of the stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch

from steercap.core.values import choices
from steercap.errors import InvalidFile, InvalidSpec, UnknownName
from steercap.files.base import blame, read_pt
from steercap.steering.edits.projecting import Cap
from steercap.steering.spec import SteeringSpec


def load_capping(
    path: str | Path, *, bound: Literal["high", "low"] = "high", experiments: Iterable[str] | None = None
) -> dict[str, SteeringSpec]:
    """Read experiments by id, each as `Cap` edits in the order of its interventions.

    Args:
        path: the file, such as `capping_config.pt` of the assistant axis.
        bound: meaning of a cap: "high" for the greatest projection, as published; "low" for the least, in files of
            floors.
        experiments: ids to read; None for all.

    Raises:
        InvalidSpec: another bound.
        UnknownName: an experiment that the file does not have.
        InvalidFile: damaged, of another shape, or an experiment or vector that lacks something or holds NaN or inf.
    """
    if bound not in {"high", "low"}:
        raise InvalidSpec(f"bound={bound!r}; give 'high' for a greatest projection or 'low' for a least one")
    path = Path(path)
    found = read_pt(path)
    vectors = _item(path, "the file", found, "vectors", (dict,))
    by_id = _by_id(path, _item(path, "the file", found, "experiments", (list, tuple)))
    wanted = list(by_id) if experiments is None else list(experiments)
    for name in wanted:
        if name not in by_id:
            raise UnknownName(f"unknown experiment {name!r} of {path}; {choices(name, by_id)}")
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
    """Return `holder[key]`, checked to be of one of some types."""
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
