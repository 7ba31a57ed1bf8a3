"""Reader of steering files, whose format is detected from their contents, and their conversion to other formats.

Our own files are safetensors with a header; GGUF files hold a control vector; `.pt` files a tensor of layers, for which
the user must say which row is layer 0, or experiments of activation capping.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import typer

from steercap.core.display import span
from steercap.core.values import choices
from steercap.errors import InvalidFile, InvalidSpec

if TYPE_CHECKING:
    from steercap.core.spec import Layers
    from steercap.steering.directions import DirectionSet
    from steercap.steering.layers import LayerVectors
    from steercap.steering.spec import SteeringSpec

#: Content of a steering file; a dict has the specs of activation-capping experiments, by their ids.
Content: TypeAlias = "SteeringSpec | LayerVectors | DirectionSet | dict[str, SteeringSpec]"
#: Extensions of files of vectors in a folder.
FILES: Final = (".gguf", ".pt", ".safetensors")


def load(path: Path, *, first_row: Literal[0, 1] | None = None, bound: Literal["high", "low"] | None = None) -> Content:
    """Read a file of steering, vectors or directions, of steercap or another tool.

    `first_row` is the row of layer 0 in a `.pt` tensor of layers; for `bound` see `load_capping`.

    Raises:
        InvalidFile: the file does not exist, is damaged, or is of another kind.
        InvalidSpec: a `.pt` tensor of layers without `first_row`.
        typer.BadParameter: `first_row` or `bound`, and a file to which it means nothing.
    """
    kind = kind_of(path)
    if kind != "pt":
        _refuse_reading(path, first_row=first_row, bound=bound)
    match kind:
        case "gguf":
            from steercap.steering.formats import load_control_vector

            return load_control_vector(path)
        case "pt":
            return _load_pt(path, first_row, bound)
        case "safetensors":
            return _load_native(path)
        case _:
            raise InvalidFile(f"{path} is a file of {kind}; vectors are in .safetensors of steercap, .gguf or .pt")


def kind_of(path: Path) -> str:
    """Return the kind of a file by its first bytes: "gguf", "pt", "parquet" or "safetensors".

    Raises:
        InvalidFile: it cannot be read, or is of another kind.
    """
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise InvalidFile(f"{path} cannot be read: {error.strerror}") from error
    # torch.save writes a zip archive, until 2020 a bare pickle; safetensors begin with the size of their JSON.
    magics = {b"GGUF": "gguf", b"PAR1": "parquet", b"PK\x03\x04": "pt", b"\x80\x02": "pt"}
    kinds = [kind for magic, kind in magics.items() if head.startswith(magic)]
    if kinds or head[8:9] == b"{":
        return kinds[0] if kinds else "safetensors"
    raise InvalidFile(f"{path} is not a file that steercap knows; it reads .safetensors, .gguf, .pt and .parquet")


def _refuse_reading(path: Path, *, first_row: int | None = None, bound: str | None = None) -> None:
    if first_row is not None:
        raise typer.BadParameter(f"{path} says itself which layers it has; leave it out", param_hint="--first-row")
    if bound is not None:
        raise typer.BadParameter(f"{path} holds no capping experiments; leave it out", param_hint="--bound")


def _load_pt(path: Path, first_row: Literal[0, 1] | None, bound: Literal["high", "low"] | None) -> Content:
    import torch

    from steercap.files.base import read_pt
    from steercap.steering.formats import load_capping, load_layers_pt

    if not isinstance(read_pt(path), torch.Tensor):
        _refuse_reading(path, first_row=first_row)
        return load_capping(path, bound=bound or "high")
    _refuse_reading(path, bound=bound)
    if first_row is None:
        raise InvalidSpec(
            f"{path} does not say which layer its row 0 is; give --first-row 1 (first_row: 1 in YAML) if it is "
            "the embeddings, as in persona vectors, or 0 if it is layer 0"
        )
    return load_layers_pt(path, first_row=first_row, name=path.stem)


def _load_native(path: Path) -> Content:
    from steercap.files.native import READERS, read_header
    from steercap.lab.personas.roles.axis import AssistantAxis
    from steercap.steering.directions import DirectionSet
    from steercap.steering.layers import LayerVectors
    from steercap.steering.spec import SteeringSpec

    readers: dict[str, Callable[[Path], Content]] = {
        "steering": SteeringSpec.load,
        "vectors": LayerVectors.load,
        "directions": DirectionSet.load,
        "axis": lambda file: AssistantAxis.load(file).vectors,
    }
    kind = read_header(path).kind
    if kind not in readers:
        raise InvalidFile(f"{path} holds {kind}, not steering, vectors or directions; read it with {READERS[kind]}")
    return readers[kind](path)


def directions_in(content: Content, path: Path) -> DirectionSet:
    """Return the directions of a file; LayerVectors become one direction, named by themselves or else by the file.

    Raises:
        InvalidFile: the content is edits, not vectors.
    """
    from steercap.steering.directions import DirectionSet
    from steercap.steering.layers import LayerVectors

    if isinstance(content, DirectionSet):
        return content
    if isinstance(content, LayerVectors):
        return DirectionSet({content.name or path.stem: content})
    raise InvalidFile(f"{path} holds edits that are ready to use, not vectors; give it to --steer")


def group_in(
    path: Path, *, layer: int, first_row: Literal[0, 1] | None, say: Callable[[str], object], **reading: Any
) -> DirectionSet:
    """Return the vectors of one layer in a file or in all files of a folder; persona files are read by `load_personas`.

    `first_row` is for `.pt` tensors among them. `say` is called with a summary of persona files; `reading` are `level`
    and `raw` of `load_personas`.

    Raises:
        InvalidFile: a folder without vectors, two vectors of one name, or a file without vectors.
    """
    from steercap.files.base import read_pt
    from steercap.steering.directions import DirectionSet
    from steercap.steering.formats import load_personas

    files = sorted(one for one in path.iterdir() if one.suffix in FILES) if path.is_dir() else [path]
    if {one.suffix for one in files} == {".pt"} and isinstance(read_pt(files[0]), dict):
        personas = load_personas(path, layers=[layer], **reading)
        say(f"{path}: {personas}")
        return personas.directions
    found: dict[str, LayerVectors] = {}
    for file in files:
        content = load(file, first_row=first_row if kind_of(file) == "pt" else None)
        directions = directions_in(content, file).at_layers([layer])
        if twice := found.keys() & directions.keys():
            raise InvalidFile(f"{file} holds {min(twice)!r}, and so does another file of {path}; rename one")
        found |= directions
    if not found:
        raise InvalidFile(f"{path} has no file of vectors, {', '.join(FILES)}")
    return DirectionSet(found)


def only(directions: DirectionSet, name: str | None) -> LayerVectors:
    """Return the direction called `name`; if `name` is None, the only direction.

    Raises:
        InvalidSpec: there is no such name, or there are several and no name is given.
    """
    if name is not None:
        directions = directions.select(name)
    if len(directions) > 1:
        raise InvalidSpec(f"there are {len(directions)} directions; give --name, one of {', '.join(directions)}")
    return next(iter(directions.values()))


def chosen(experiments: dict[str, SteeringSpec], path: Path, name: str | None) -> SteeringSpec:
    """Return the experiment called `name`, from the file `path`; if `name` is None, the only experiment.

    Raises:
        InvalidSpec: there is no such name, or there are several and no name is given.
    """
    if name is None and len(experiments) == 1:
        return next(iter(experiments.values()))
    if name is None:
        raise InvalidSpec(f"{path} has {len(experiments)} experiments; give --name, one of {', '.join(experiments)}")
    if name in experiments:
        return experiments[name]
    advice = choices(name, experiments) if any(experiments) else "leave --name out"
    raise InvalidSpec(f"{path} has no experiment {name!r}; {advice}")


class Target(enum.StrEnum):
    """File formats that can be written."""

    SAFETENSORS = "safetensors"
    GGUF = "gguf"
    PT = "pt"


def write(
    content: Content,
    source: Path,
    target: Path,
    *,
    name: str | None,
    layers: Layers,
    first_row: Literal[0, 1] | None,
    model_hint: str,
) -> dict[str, Any]:
    """Write some layers of the content of `source`, a file, to `target`; return facts about it to show, by name.

    `name` is one of several directions or experiments, or a new name for a single one; `first_row` is layer 0's in a
    `.pt` file, `model_hint` the model hint in a GGUF file.

    Raises:
        InvalidSpec: an unknown extension, a format that cannot hold the content, or layers or a name of edits.
    """
    form = _by_extension(target)
    from steercap.steering.spec import SteeringSpec

    if isinstance(content, dict | SteeringSpec):
        if layers != "all":
            raise InvalidSpec(f"{source} holds edits, which have layers of their own; leave --layers out")
        return _write_steering(
            chosen(content if isinstance(content, dict) else {"": content}, source, name), target, form
        )
    directions = _kept(_named(directions_in(content, source), name), layers)
    if form is Target.SAFETENSORS:
        directions.save(target)
    else:
        _write_one(directions, target, form, first_row, model_hint)
    return {
        "format": form.value,
        "names": ", ".join(directions),
        "layers": span(directions.layers),
        "site": directions.site,
    }


def _by_extension(target: Path) -> Target:
    try:
        return Target(target.suffix.lower().removeprefix("."))
    except ValueError:
        known = ", ".join(f".{one}" for one in Target)
        raise InvalidSpec(f"{target}: {target.suffix or 'no extension'!r} is not a known format; use {known}") from None


def _write_one(directions: DirectionSet, target: Path, form: Target, row: Literal[0, 1] | None, hint: str) -> None:
    from steercap.steering.formats import save_control_vector, save_layers_pt

    vectors = only(directions, None)
    if form is Target.GGUF:
        save_control_vector(vectors, target, model_hint=hint)
        return
    if row is None:
        raise InvalidSpec(f"{target}: give --first-row, the row of layer 0: 1 if row 0 is the embeddings, otherwise 0")
    save_layers_pt(vectors, target, first_row=row)


def _write_steering(spec: SteeringSpec, target: Path, form: Target) -> dict[str, Any]:
    if form is not Target.SAFETENSORS:
        raise InvalidSpec(f"{target}: .{form} holds vectors only, and these are edits; use .safetensors")
    spec.save(target)
    return {"format": form.value, "edits": "; ".join(map(repr, spec.flat()))}


def _named(directions: DirectionSet, name: str | None) -> DirectionSet:
    """Return the direction `name` of several, or a single one renamed; all directions if `name` is None."""
    if name is None or name in directions or len(directions) > 1:
        return directions if name is None else directions.select(name)
    from dataclasses import replace

    from steercap.steering.directions import DirectionSet

    (old,) = directions
    renamed: dict[str, Any] = {
        field: {name: known[old]} if old in (known := getattr(directions.provenance, field)) else {}
        for field in ("prompts", "rows", "held_out", "auc", "row_norms")
    }
    return DirectionSet({name: directions[old]}, replace(directions.provenance, **renamed))


def _kept(directions: DirectionSet, layers: Layers) -> DirectionSet:
    if layers == "all":
        return directions
    from steercap.core.spec import resolve_layers

    asked = resolve_layers(layers, directions.layers[-1] + 1)
    # A slice is limited to the layers that exist; layers given by number must exist.
    return directions.at_layers(
        [layer for layer in asked if layer in directions.layers] if isinstance(layers, slice) else asked
    )
