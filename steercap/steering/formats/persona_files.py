"""Files of other programs' persona vectors: means of roles and traits by level, and their principal components.

    vectors/NAME.pt              level -> [layers, hidden]
    default_vectors.pt           beside the folder; "activations": level -> [layers, hidden]
    vectors_vllm_DTYPE/NAME.pt   "activations" and "contrast": [layers, hidden]; "metadata"
    layer22_pos23.pt             principal components at one layer, pickled objects of scikit-learn

Row i is the output of decoder layer i counted from 0, our `resid_post`: there is no row for the embeddings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float

from steercap.core.display import brief
from steercap.core.values import choices, index_of, shown
from steercap.errors import InvalidFile, InvalidSpec, UnknownName
from steercap.files.base import blame, check_extension, read_pt, require_file, write_whole
from steercap.files.pickled import PickledArray, StandIn, read_pickled
from steercap.steering.directions import DirectionSet
from steercap.steering.edits.inputs import several
from steercap.steering.layers import LayerVectors

#: Levels that are read by default: of roles, of traits, of captures.
DEFAULTS: Final = ("pos_3", "pos_neg_50", "contrast")
_DIFFERENCES: Final = ("pos_neg", "pos_default", "contrast")  # how levels begin that are differences already


@dataclass(frozen=True, eq=False)
class PersonaFolder:
    """Vectors read from a folder of personas by `load_personas`.

    Args:
        directions: vectors by persona's name.
        level: level of the vectors, such as "pos_3 - default_1".
        found: number of files that have each level.
        left_out: reason why a file gave no vector, by file name.
    """

    directions: DirectionSet
    level: str
    found: Mapping[str, int]
    left_out: Mapping[str, str]

    def __str__(self) -> str:
        reasons = "".join(f"; {count} left out: {reason}" for reason, count in Counter(self.left_out.values()).items())
        return f"{self.level} of {len(self.directions)} of {len(self.directions) + len(self.left_out)} files{reasons}"


def load_levels(path: str | Path, *, model: str = "", layers: Iterable[int] | None = None) -> dict[str, LayerVectors]:
    """Read all levels (means of some answers) of one file: of a persona, of defaults, or a capture.

    Args:
        path: the file.
        model: model of the vectors, which the file does not name.
        layers: layers to keep; None for all.

    Returns:
        Vectors at `resid_post` by level, without levels of zeros, which some scripts write if there are no answers.

    Raises:
        InvalidFile: damaged, of another format, or with NaN or inf.
        LayerOutOfRange, InvalidSpec: a layer that the file does not have; `layers` that is not a list.
    """
    path, kept = Path(path), None if layers is None else several(layers, "layers")
    rows = {level: tensor for level, tensor in _tensors(path).items() if bool(tensor.any())}
    with blame(path):
        whole = {level: LayerVectors(dict(enumerate(own)), name=level, model=model) for level, own in rows.items()}
    return whole if kept is None else {level: vectors.at_layers(kept) for level, vectors in whole.items()}


def load_personas(
    folder: str | Path,
    *,
    level: str | None = None,
    raw: bool = False,
    default: str | Path | None = None,
    minus: str = "default_1",
    model: str = "",
    layers: Iterable[int] | None = None,
) -> PersonaFolder:
    """Read a vector by layer of each persona in a folder: `pos_3 - default_1` of roles, `pos_neg_50` of traits.

    Args:
        folder: folder of `NAME.pt`, such as `vectors` or `vectors_vllm_bfloat16`; or one such file.
        level: level to read; None for the one of "pos_3", "pos_neg_50" and "contrast" that the files have.
        raw: True to return means as they are, without subtracting the default.
        default: file of defaults; None for `default_vectors.pt` beside the folder. Read only to subtract.
        minus: level of the file of defaults to subtract.
        model: model of the vectors, which the files do not name.
        layers: layers to keep, to save memory; None for all.

    Raises:
        InvalidFile: no folder, no persona in it, no file of defaults, or a file is damaged or of another shape.
        UnknownName: no file has the level, or the defaults lack `minus`; the message lists the levels.
        LayerOutOfRange, InvalidSpec: a layer that the files do not have; `layers` that is not a list.
    """
    folder, kept = Path(folder), None if layers is None else several(layers, "layers")
    wanted = DEFAULTS if level is None else (level,)
    found, vectors, lacking = Counter[str](), dict[str, dict[str, LayerVectors]](), dict[str, str]()
    paths, left_out = _listing(folder)
    for path in paths:
        levels = load_levels(path, model=model, layers=kept)
        found.update(list(levels))
        for one in levels.keys() & set(wanted):
            alike = vectors.setdefault(one, {})
            with blame(path):
                levels[one].require_alike(next(iter(alike.values()), levels[one]))
            alike[path.stem] = levels[one]
        if not levels.keys() & set(wanted):
            lacking[path.name] = f"no {' or '.join(wanted)}, or only zeros"
    if len(vectors) != 1:
        there = ", ".join(f"{name} ({count} files)" for name, count in sorted(found.items())) or "no level at all"
        near = f"; {choices(level, found)}" if level is not None else "; give level="
        raise UnknownName(f"{folder} has {there}: {'more than one' if vectors else 'no'} {' or '.join(wanted)}{near}")
    ((name, chosen),) = vectors.items()
    if not raw and not name.startswith(_DIFFERENCES):
        above = folder.absolute().parents[folder.is_file()]
        beside = above / "default_vectors.pt" if default is None else Path(default)
        if not beside.exists():
            raise InvalidFile(f"there is no {beside}; give default=, the file of default levels, or raw=True")
        levels = load_levels(beside, model=model, layers=kept)
        if minus not in levels:
            raise UnknownName(f"{beside} has no level {minus!r}; {choices(minus, levels)}")
        with blame(beside):
            chosen = {persona: mean - levels[minus] for persona, mean in chosen.items()}
        name = f"{name} - {minus}"
    return PersonaFolder(DirectionSet(chosen), name, dict(found), {**left_out, **lacking})


def save_levels(levels: Mapping[str, LayerVectors], path: str | Path) -> Path:
    """Write a persona's vectors by level to a `.pt`: a dict of float32 [layers, hidden]; return its path.

    Raises:
        InvalidSpec: no levels, another site, or layers that are not all from 0 on.
        InvalidFile: the name does not end in .pt.
    """
    return _save({level: _rows(vectors) for level, vectors in levels.items()}, path)


def save_default_levels(
    levels: Mapping[str, LayerVectors], path: str | Path, *, metadata: Mapping[str, Any] | None = None
) -> Path:
    """Write vectors of defaults by level, such as "default_1", to a `default_vectors.pt`; return its path.

    Args:
        levels: vectors by level.
        path: the file.
        metadata: plain values to write too, such as counts.

    Raises:
        InvalidSpec, InvalidFile: as for `save_levels`.
    """
    rows = {level: _rows(vectors) for level, vectors in levels.items()}
    return _save({"activations": rows, "metadata": dict(metadata or {})} if rows else {}, path)


def save_persona_capture(
    persona: LayerVectors, control: LayerVectors, path: str | Path, *, metadata: Mapping[str, Any] | None = None
) -> Path:
    """Write a persona's means, and their difference from a control's, to a `vectors_vllm_DTYPE/NAME.pt`.

    Args:
        persona: mean rows of the persona, by layer.
        control: mean rows of the control, whose name is written as `control` in the metadata.
        path: the file.
        metadata: further plain values to write.

    Raises:
        InvalidSpec: the control has no name, differs in model, site, width or layers; or as for `save_levels`.
        InvalidFile: the name has another extension.
    """
    if not control.name:
        raise InvalidSpec(f"{control!r} is the control and has no name; give it one with named")
    rows = {"activations": _rows(persona), "contrast": _rows(persona - control)}
    return _save({**rows, "metadata": {**(metadata or {}), "control": control.name}}, path)


@dataclass(frozen=True, eq=False)
class PersonaComponents:
    """Principal components of personas at one layer; read by `load_components`.

    Args:
        kind: "role" or "trait".
        layer: layer of all vectors, from 0.
        components: principal components, unit vectors: float64 [components, hidden].
        mean: mean of the personas' vectors, float64 [hidden].
        variance_explained: fraction of the variance along each component, float64 [components].
        vectors: personas' vectors, float32 [personas, hidden], by level.
        names: personas' names in the order of `vectors`, by level.
        further: keys of the file's other entries, which are not read.
    """

    kind: str
    layer: int
    components: Float[torch.Tensor, "components hidden"]
    mean: Float[torch.Tensor, " hidden"]
    variance_explained: Float[torch.Tensor, " components"]
    vectors: Mapping[str, Float[torch.Tensor, "personas hidden"]]
    names: Mapping[str, tuple[str, ...]]
    further: tuple[str, ...]
    __repr__ = brief


def load_components(path: str | Path) -> PersonaComponents:
    """Read a file of principal components, such as `layer22_pos23.pt`; no code in it is run.

    Raises:
        InvalidFile: damaged, incomplete, or with shapes that do not fit one another or numbers that are not finite.
    """
    found = read_pickled(Path(path))
    with blame(Path(path)):
        known = ("pca", "variance_explained", "layer", "vectors", "roles" if "roles" in found else "traits")
        if missing := [name for name in known if name not in found]:
            raise ValueError(f"no {', '.join(missing)}; it has {', '.join(map(str, found))}")
        pca, explained, layer, vectors, names = (found[name] for name in known)
        state = pca.state if isinstance(pca, StandIn) and isinstance(pca.state, dict) else {}
        components, mean = _numbers(state.get("components_"), 2), _numbers(state.get("mean_"), 1)
        explained, place = _numbers(explained, 1), index_of(layer)
        if place is None or place < 0 or components.shape != (len(explained), len(mean)):
            raise ValueError(f"components {list(components.shape)}, mean {list(mean.shape)}, layer {shown(layer)}")
        if not isinstance(vectors, dict) or not isinstance(names, dict) or not names.keys() >= vectors.keys():
            raise ValueError(f"vectors {shown(vectors)} and {known[-1]} {shown(names)}; expected both by level")
        rows = {level: _at_layer(vectors[level], names[level], place, len(mean)) for level in vectors}
        people = {level: tuple(names[level]) for level in vectors}
        further = tuple(str(one) for one in found if one not in known)
    return PersonaComponents(known[-1].removesuffix("s"), place, components, mean, explained, rows, people, further)


def _at_layer(vectors: Any, names: Any, layer: int, width: int) -> Float[torch.Tensor, "personas hidden"]:
    """Return vectors, each [hidden] or [layers, hidden], at one layer: float32 [personas, hidden]."""
    read = (_numbers(one, 1, 2) for one in vectors)
    rows = [(one[layer] if one.dim() == 2 and layer < len(one) else one).float() for one in read]
    told = all(isinstance(name, str) for name in names)
    if len(rows) != len(names) or any(row.shape != (width,) for row in rows) or not told:
        raise ValueError(f"{len(rows)} vectors of names {shown(names)}, or of another width than {width}")
    return torch.stack(rows) if rows else torch.empty(0, width)


def _numbers(value: Any, *axes: int) -> torch.Tensor:
    """Return a tensor or pickled array of finite floats as float64, if its number of axes is one of `axes`."""
    found = torch.from_numpy(value.numpy()) if isinstance(value, PickledArray) else value
    fits = isinstance(found, torch.Tensor) and found.dim() in axes and found.is_floating_point()
    if not fits or not bool(found.isfinite().all()):
        raise ValueError(f"expected finite floats with {axes[0]} axes, got {_held(found)}")
    return found.double()


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors [layers, hidden] of a file by level, in any of the formats of this module."""
    found = read_pt(path)
    if isinstance(found, dict) and isinstance(found.get("activations"), dict):
        found = found["activations"]
    rows = {key: one for key, one in found.items() if key != "metadata"} if isinstance(found, dict) else {}
    if not rows:
        raise InvalidFile(f"{path} holds {_held(found)}; expected a dict of levels [layers, hidden]")
    shape = next(iter(rows.values())).shape if isinstance(next(iter(rows.values())), torch.Tensor) else ()
    for key, one in rows.items():
        fits = isinstance(one, torch.Tensor) and one.is_floating_point() and one.dim() == 2 and one.numel()
        if not fits or one.shape != shape or not isinstance(key, str):
            raise InvalidFile(f"{path}: level {shown(key)} is {_held(one)}; expected floats [layers, hidden], alike")
    return rows


def _listing(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Return a folder's `.pt` files, or the one file given, and the reasons why other entries are left out, by name."""
    if not folder.is_dir():
        require_file(folder)
    held = folder.iterdir() if folder.is_dir() else [folder]
    entries = sorted(one for one in held if not one.name.startswith("."))
    paths = [one for one in entries if one.suffix == ".pt" and one.is_file()]
    if not paths:
        raise InvalidFile(f"{folder} is no folder of NAME.pt, nor such a file; it holds {shown([*map(str, entries)])}")
    return paths, {one.name: "no .pt file" for one in entries if one not in paths}


def _rows(vectors: LayerVectors) -> Float[torch.Tensor, "layers hidden"]:
    if vectors.site != "resid_post" or list(vectors) != list(range(len(vectors))):
        raise InvalidSpec(f"{vectors!r}; a file of personas has a row for the output of every layer from 0 on")
    return torch.stack(list(vectors.values()))


def _save(content: dict[str, Any], path: str | Path) -> Path:
    if not content:
        raise InvalidSpec("no levels to write; an empty level is absent, and a file has one at least")
    check_extension(Path(path), ".pt")
    with write_whole(Path(path)) as scratch:
        torch.save(content, scratch)
    return Path(path)


def _held(content: object) -> str:
    return f"{content.dtype} {list(content.shape)}" if isinstance(content, torch.Tensor) else shown(content)
