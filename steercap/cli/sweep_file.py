"""What a sweep is told, by flags or a YAML file, and the sweep and measures that this means."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from steercap.cli.contents import directions_in, load
from steercap.cli.persona import is_file, trait_of
from steercap.cli.prompts import PromptOptions
from steercap.cli.selections import names_of, tokens_of
from steercap.cli.steering import base_of
from steercap.core.extras import extra
from steercap.errors import InvalidFile

if TYPE_CHECKING:
    from steercap.lab.studies.sweeps import Measure, Sweep


class SweepFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a YAML file of a sweep holds; see `steercap.lab.studies.sweeps.Sweep`. Flags say the same, and come first.

    Args:
        vectors: file of vectors or directions; a path from the folder of the YAML file.
        names: which of its directions; all if left out.
        base: of a `.pt`, the row of layer 0.
        layers: each alone, or several at once: `[10, [10, 12, 14]]`.
        scales: factors.
        prompts: a file of prompts, or texts.
        chat: whether prompts go through the chat template.
        operations, relative, random, reversed, seed, samples: as for `Sweep`.
        tokens: which are steered, as in the shell.
        max_tokens, temperature: of the sampling.
        measures: names in `MEASURES`; "score:evil" is the score of a trait, "score:evil:keywords" by another scorer; a
            trait of one's own is a file, "score:mine.yaml", its path from the folder of the YAML file.
    """

    vectors: str
    layers: tuple[int | tuple[int, ...], ...]
    scales: tuple[float, ...]
    prompts: str | tuple[str, ...]
    names: tuple[str, ...] | None = None
    base: int | None = None
    chat: bool = False
    operations: tuple[str, ...] = ("add",)
    tokens: str = "generated"
    relative: bool = False
    random: int = 20
    reversed: bool = True
    seed: int = 0
    samples: int = 1
    max_tokens: int = 64
    temperature: float = 0.0
    measures: tuple[str, ...] = ("repetition",)


def read_settings(path: Path | None, flags: Mapping[str, Any]) -> SweepFile:
    """The settings of a YAML file, if there is one, with what flags say in their place.

    Raises:
        InvalidFile: no YAML, or a key that is unknown or does not fit.
        typer.BadParameter: something that neither says.
    """
    with extra("experiments"):
        import yaml

    found: Any = {}
    if path is not None:
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise InvalidFile(f"{path} cannot be read as YAML: {error}") from error
        if not isinstance(found, dict):
            raise InvalidFile(f"{path} holds {type(found).__name__}; give keys and values, such as vectors: file")
        for name in ("vectors", "prompts"):
            if isinstance(found.get(name), str):
                found[name] = str(path.parent / found[name])
        if isinstance(found.get("measures"), list):
            found["measures"] = [measure_from(path.parent, measure) for measure in found["measures"]]
    found |= {name: value for name, value in flags.items() if value is not None}
    if missing := [name for name in ("vectors", "layers", "scales", "prompts") if name not in found]:
        raise typer.BadParameter(
            f"give --{missing[0]}, or a YAML file with {missing[0]}:", param_hint=f"--{missing[0]}"
        )
    try:
        return msgspec.convert(found, SweepFile)
    except msgspec.ValidationError as error:
        raise InvalidFile(f"{path or 'the flags'}: {error}; known: {', '.join(SweepFile.__struct_fields__)}") from error


def sweep_of(settings: SweepFile) -> Sweep:
    """The sweep that settings describe.

    Raises:
        InvalidFile: vectors or prompts that cannot be read.
        InvalidSpec: what `Sweep` refuses.
    """
    from steercap.lab.studies.sweeps import Sweep

    path = Path(settings.vectors)
    directions = directions_in(load(path, base=base_of(settings.base)), path)
    if isinstance(settings.prompts, str):
        prompts = PromptOptions(file=settings.prompts, chat=settings.chat).read()
    else:
        prompts = PromptOptions(prompts=list(settings.prompts), chat=settings.chat).read()
    return Sweep(
        vectors=directions if settings.names is None else directions.select(settings.names),
        layers=settings.layers,
        scales=settings.scales,
        prompts=[prompt.content for prompt in prompts],
        operations=settings.operations,
        tokens=tokens_of(settings.tokens),
        relative=settings.relative,
        random=settings.random,
        reversed=settings.reversed,
        seed=settings.seed,
        sampling={"max_tokens": settings.max_tokens, "temperature": settings.temperature},
        samples=settings.samples,
    )


def measures_in(text: str) -> tuple[str, ...]:
    """Measures with commas between; the path of a trait's file may hold commas too.

    Raises:
        typer.BadParameter: none.
    """
    from steercap.lab.studies.sweeps import MEASURES

    parts = re.split(rf",(?=\s*score:|\s*(?:{'|'.join(MEASURES)})\s*(?:,|$))", text)
    return tuple(
        one for part in parts for one in ([part.strip()] if is_file(_scored(part.strip())[0]) else names_of(part))
    )


def measure_of(text: str) -> str | Measure:
    """A measure by name, or the score of a trait: "score:evil", "score:evil:keywords", "score:mine.yaml".

    Raises:
        UnknownName: no such measure, trait or scorer.
        InvalidFile: a YAML file that holds no trait.
        typer.BadParameter: a score without a trait.
    """
    from steercap.lab.measures.score import Score
    from steercap.lab.studies.sweeps import MEASURES

    name, colon, rest = text.partition(":")
    trait, scorer = _scored(rest)
    if name == "score" and trait:
        return Score(trait_of(trait), *scorer)
    if name == "score" or colon:
        raise typer.BadParameter(
            f"{text!r}: give a measure, or score:TRAIT, or score:TRAIT:SCORER, where TRAIT is a name or a YAML file",
            param_hint="--measures",
        )
    _ = MEASURES[name]
    return name


def _scored(text: str) -> tuple[str, list[str]]:
    """The trait of a score, and its scorer if one is named; a path may hold colons."""
    trait, colon, scorer = text.rpartition(":")
    return (trait, [scorer]) if colon and not is_file(text) else (text, [])


def measure_from(folder: Path, measure: Any) -> Any:
    """A measure of a YAML file; where its trait is a file, with its path from a folder."""
    if not isinstance(measure, str) or not measure.startswith("score:"):
        return measure
    trait, scorer = _scored(measure.removeprefix("score:"))
    return ":".join(["score", str(folder / trait), *scorer]) if is_file(trait) else measure
