"""Conversion of vectors to other formats; content that a format cannot hold is an error."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from steercap.cli.contents import Content, chosen, directions_in, only
from steercap.cli.tables import span
from steercap.errors import InvalidSpec

if TYPE_CHECKING:
    from steercap.core.spec import Layers
    from steercap.steering.directions import DirectionSet
    from steercap.steering.spec import SteeringSpec


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
    base: Literal[0, 1] | None,
    model_hint: str,
) -> dict[str, Any]:
    """Write the content of `source` as `target`.

    Args:
        content: content of the source file.
        source: path of the source file.
        target: path of the file to write.
        name: one of several directions or experiments, or a new name for a single one.
        layers: layers to keep.
        base: row of layer 0 in a `.pt` file.
        model_hint: model hint of a GGUF file.

    Returns:
        Facts about the written file, by name.

    Raises:
        InvalidSpec: an unknown extension, or a format that cannot hold the content.
    """
    form = _by_extension(target)
    if isinstance(content, dict):
        return _write_steering(chosen(content, source, name), target, form)
    from steercap.steering.spec import SteeringSpec

    if isinstance(content, SteeringSpec):
        return _write_steering(content, target, form)
    directions = _kept(_named(directions_in(content, source), name), layers)
    if form is Target.SAFETENSORS:
        directions.save(target)
    else:
        _write_one(directions, target, form, base, model_hint)
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
        raise InvalidSpec(f"{target}: {target.suffix or 'no extension'!r} says no format; use {known}") from None


def _write_one(directions: DirectionSet, target: Path, form: Target, base: Literal[0, 1] | None, hint: str) -> None:
    from steercap.steering.formats import save_control_vector, save_layers_pt

    vectors = only(directions, None)
    if form is Target.GGUF:
        save_control_vector(vectors, target, model_hint=hint)
        return
    if base is None:
        raise InvalidSpec(f"{target}: say with --base which row is layer 0: 1 if row 0 is the embeddings, or 0")
    save_layers_pt(vectors, target, base=base)


def _write_steering(spec: SteeringSpec, target: Path, form: Target) -> dict[str, Any]:
    if form is not Target.SAFETENSORS:
        raise InvalidSpec(f"{target}: edits are more than vectors, and .{form} cannot hold them; use .safetensors")
    spec.save(target)
    return {"format": form.value, "edits": "; ".join(map(repr, spec.flat()))}


def _named(directions: DirectionSet, name: str | None) -> DirectionSet:
    """Select one of several directions, or rename the only one."""
    if name is None or name in directions or len(directions) > 1:
        return directions if name is None else directions.select(name)
    from dataclasses import replace

    from steercap.steering.directions import DirectionSet

    (old,) = directions
    renamed: dict[str, Any] = {
        field: {name: known[old]} if old in (known := getattr(directions.provenance, field)) else {}
        for field in ("prompts", "rows", "held_out", "auc")
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
