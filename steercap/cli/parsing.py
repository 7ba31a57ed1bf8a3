"""Parsers of options' texts: layers, sites, tokens, numbers, and the steering of `--steer` and its further options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, cast

import msgspec
import typer

from steercap.cli.contents import chosen, directions_in, load, only
from steercap.core.display import span
from steercap.errors import InvalidSpec

if TYPE_CHECKING:
    from steercap.cli.contents import Content
    from steercap.core.spec import Layers
    from steercap.steering.layers import LayerVectors
    from steercap.steering.spec import SteeringSpec

_steering = partial(typer.Option, rich_help_panel="Steering")
#: Options `--first-row` and `--level` of several commands that read files of vectors.
FirstRow: TypeAlias = Annotated[
    int | None, typer.Option(min=0, max=1, help="Index of layer 0 in a .pt tensor: 0 or 1.")
]
Level: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Level of persona files (default: the one of pos_3, pos_neg_50 and contrast that the files have)."
    ),
]

#: Option `--concurrency` of `sweep` and `evaluate`.
Concurrency: TypeAlias = Annotated[int | None, typer.Option(min=1, help="Maximum concurrent requests (default 512).")]


def layers_of(text: str, option: str | None = "--layers") -> Layers:
    """Parse layers: "all" to itself, "8" or "8,16,-1" to a list, "4:20:2" to a slice.

    Raises:
        typer.BadParameter: the text is not of this form.
    """
    if text.strip() == "all":
        return "all"
    if ":" in text:
        return _slice(text, option)
    return [_integer(part, text, option) for part in text.split(",")]


def tokens_of(text: str, option: str | None = "--tokens") -> Any:
    """Parse a token selection: a name such as "prompt", a position "3", a slice "-5:", or several with commas.

    Raises:
        typer.BadParameter: the text is not of this form.
    """
    found = [_tokens(part.strip(), text, option) for part in text.split(",")]
    return found[0] if len(found) == 1 else found


def names_of(text: str) -> tuple[str, ...]:
    """Parse names separated by commas, without spaces around them.

    Raises:
        typer.BadParameter: there are none.
    """
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise typer.BadParameter(f"{text!r} holds no name; give names separated by commas")
    return names


def numbers_of(text: str, option: str) -> tuple[float, ...]:
    """Parse numbers separated by commas, such as "0.5,1,2".

    Raises:
        typer.BadParameter: an entry is not a number.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}: give numbers with commas between, such as 0.5,1,2", param_hint=option
        ) from None


def dtype_of(text: str) -> Any:
    """Return the floating-point `torch.dtype` of a name, such as "bfloat16".

    Raises:
        typer.BadParameter: there is no floating-point dtype of this name.
    """
    import torch

    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise typer.BadParameter(f"{text!r}; give float32, bfloat16 or float16", param_hint="--dtype")
    return found


def _tokens(part: str, text: str, option: str | None) -> Any:
    from steercap.core.tokens import NAMES

    if part in NAMES:
        return part
    if ":" in part:
        return _slice(part, option)
    if re.fullmatch(r"-?\d+", part):
        return int(part)
    known = ", ".join(NAMES)
    raise typer.BadParameter(
        f"{text!r}: give {known}, a position such as -1, a slice such as 2:10, or several: prompt,-1",
        param_hint=option,
    )


def _slice(text: str, option: str | None) -> slice:
    parts = text.split(":")
    if len(parts) > 3:
        raise typer.BadParameter(f"{text!r}: a slice is start:stop or start:stop:step", param_hint=option)
    return slice(*(_integer(part, text, option) if part.strip() else None for part in parts))


def _integer(part: str, text: str, option: str | None) -> int:
    """Parse `part` of the option's text `text`; raise BadParameter if it is not a whole number."""
    try:
        return int(part)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}: give all, an index, several such as 8,16,-1, or a slice such as 4:20:2", param_hint=option
        ) from None


@dataclass(frozen=True)
class SteerOptions:
    """Options for steering: a file, and where and how strongly its vectors are added."""

    steer: Annotated[
        Path | None,
        _steering(
            exists=True,
            dir_okay=False,
            help="File of steering or vectors: steercap .safetensors, GGUF control vector, .pt.",
        ),
    ] = None
    steer_layers: Annotated[str | None, _steering(help="Layers to add vectors at, counted from 0: 14, or 12,14.")] = (
        None
    )
    scale: Annotated[float | None, _steering(help="Vector multiplier (default 1).")] = None
    name: Annotated[
        str | None, _steering(help="Name of the direction or capping experiment, if the file has several.")
    ] = None
    steer_tokens: Annotated[
        str | None,
        _steering(help="Tokens to add vectors at: all (default), prompt, generated, last_prompt, or positions."),
    ] = None
    first_row: Annotated[int | None, _steering(min=0, max=1, help="Index of layer 0 in a .pt tensor: 0 or 1.")] = None

    def spec(self) -> SteeringSpec | None:
        """Return the steering spec that the options describe; None without --steer.

        Raises:
            typer.BadParameter: an option lacks the vectors that it needs, or vectors of several layers lack a choice.
            InvalidFile, InvalidSpec: the file holds other content, or lacks the name or layer.
        """
        said = [
            f"--{name.replace('_', '-')}"
            for name in ("steer_layers", "scale", "name", "steer_tokens", "first_row")
            if getattr(self, name) is not None
        ]
        if self.steer is None:
            if said:
                raise typer.BadParameter(f"{said[0]} needs vectors or steering; give --steer FILE", param_hint=said[0])
            return None
        content = load(self.steer, first_row=first_row_of(self.first_row))
        if isinstance(content, dict):
            return _experiment(content, self.steer, self.name, said)
        from steercap.steering.spec import SteeringSpec

        if isinstance(content, SteeringSpec):
            _refuse(said, f"{self.steer} holds edits, which have their own")
            return content
        return self._added(only(directions_in(content, self.steer), self.name))

    def _added(self, vectors: LayerVectors) -> SteeringSpec:
        from steercap.steering.edits.add import Add
        from steercap.steering.spec import SteeringSpec

        if self.steer_layers is None and len(vectors) > 1:
            raise typer.BadParameter(
                f"{self.steer} has vectors for layers {span(list(vectors))}; say which to add with --steer-layers",
                param_hint="--steer-layers",
            )
        asked = list(vectors) if self.steer_layers is None else self._asked(self.steer_layers, list(vectors))
        if missing := [layer for layer in asked if layer not in vectors]:
            raise InvalidSpec(
                f"{self.steer} has no vector for layer {missing[0]}; it has them for {span(list(vectors))}"
            )
        tokens = tokens_of("all" if self.steer_tokens is None else self.steer_tokens, "--steer-tokens")
        scale = 1.0 if self.scale is None else self.scale
        return SteeringSpec.by_layer(Add, vectors, scale, layers=asked, tokens=tokens)

    def _asked(self, text: str, known: list[int]) -> list[int]:
        """Parse --steer-layers; `known` are the file's layers, which may end before the model's: no negative ones."""
        from steercap.core.spec import resolve_layers

        layers = layers_of(text, "--steer-layers")
        if isinstance(layers, list) and min(layers) >= 0:
            return sorted(set(layers))
        ends = layers if isinstance(layers, list) else [layers.start, layers.stop] if isinstance(layers, slice) else []
        if any(end is not None and end < 0 for end in ends):
            raise typer.BadParameter(
                f"{text!r}: negative layers cannot be used with {self.steer}, which has vectors for layers "
                f"{span(known)}; name those",
                param_hint="--steer-layers",
            )
        return list(resolve_layers(layers, max(known) + 1))


def sites_of(spec: SteeringSpec | None) -> tuple[str, ...]:
    """Return the sites that a spec edits, each once, to arm in the engine; () for None."""
    return tuple(dict.fromkeys(edit.site for edit in spec.of_rows())) if spec is not None else ()


def loaded(path: Path, first_row: Literal[0, 1] | None, option: str) -> Content:
    """Return the content of a file, as `load` does; `option` is the option or YAML key of `first_row`, for errors."""
    try:
        return load(path, first_row=first_row)
    except typer.BadParameter as error:
        raise typer.BadParameter(error.message, param_hint=option) from error


def first_row_of(first_row: int | None) -> Literal[0, 1] | None:
    """Return `first_row`, which the option has checked to be 0, 1 or None, with a narrower type."""
    assert first_row in {0, 1, None}
    return cast("Literal[0, 1] | None", first_row)


def _experiment(experiments: dict[str, SteeringSpec], path: Path, name: str | None, texts: list[str]) -> SteeringSpec:
    _refuse([option for option in texts if option != "--name"], f"{path} holds experiments, which have their own")
    return chosen(experiments, path, name)


def _refuse(texts: list[str], why: str) -> None:
    if texts:
        raise typer.BadParameter(f"{why}; leave {texts[0]} out", param_hint=texts[0])


def named(texts: Sequence[str], option: str) -> list[tuple[str, str]]:
    """Parse texts of the form NAME=VALUE to pairs, for the option `option`.

    Raises:
        typer.BadParameter: a text is not of this form, or a name is given twice.
    """
    found: list[tuple[str, str]] = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise typer.BadParameter(f"{text!r}: give NAME=..., such as calm=calm.safetensors", param_hint=option)
        if name in dict(found):
            raise typer.BadParameter(f"the name {name!r} is given twice; rename one", param_hint=option)
        found.append((name, value))
    return found


def steering_in(text: str) -> Any:
    """Decode the steering of --preset: JSON, or the name of a file of --vectors, which is returned as it is.

    Raises:
        typer.BadParameter: the text begins as JSON and is none.
    """
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        if text.lstrip().startswith(("{", "[")):
            raise typer.BadParameter(f"{text!r} is not JSON: {error}", param_hint="--preset") from None
        return text


def refuse(why: str, given: Mapping[str, object]) -> None:
    """Refuse options, given as values by flag, None for one that was left out; `why` is the reason.

    Raises:
        typer.BadParameter: an option was given; the error names the first.
    """
    for flag, value in given.items():
        if value is not None:
            raise typer.BadParameter(f"{why}; leave it out", param_hint=flag)
