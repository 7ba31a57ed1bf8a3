"""YAML file of a sweep, which flags override, and its conversion to `Sweep` and measures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
import typer

from steercap.cli.contents import directions_in
from steercap.cli.parsing import loaded, names_of, tokens_of
from steercap.cli.persona import is_file, trait_of
from steercap.cli.preflight import check_sampling
from steercap.cli.prompts import Prompt, PromptOptions
from steercap.core.values import nearest
from steercap.errors import InvalidFile, UnknownName

if TYPE_CHECKING:
    from steercap.lab.studies.sweeps import Measure, Sweep

Settings = TypeVar("Settings", bound=msgspec.Struct)


class SweepFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sweep in a YAML file; see `steercap.lab.studies.sweeps.Sweep`. Flags have the same names and override it.

    Args:
        vectors: path of vectors or directions, relative to the folder of the YAML file.
        names: names of the directions to use; all if left out.
        first_row: row of layer 0 in a `.pt` file.
        layers: layers, each alone, or several at once: `[10, [10, 12, 14]]`.
        scales: factors by which vectors are multiplied.
        prompts: path of a file of prompts, or texts.
        chat: True to apply the chat template to prompts.
        operations, relative, random, negated, seed, samples: as for `Sweep`, with its defaults.
        tokens: steered tokens, in the form of the option `--tokens`.
        max_tokens, temperature: sampling parameters.
        concurrency: maximum concurrent requests.
        measures: names in `MEASURES`; "score:evil" is the score of a trait, "score:evil:keywords" by another scorer;
            "score:mine.yaml" is that of a trait in a file, relative to the folder of the YAML file.
    """

    vectors: str
    layers: tuple[int | tuple[int, ...], ...]
    scales: tuple[float, ...]
    prompts: str | tuple[str, ...]
    names: tuple[str, ...] | None = None
    first_row: Literal[0, 1] | None = None
    chat: bool = False
    operations: tuple[str, ...] | None = None
    tokens: str | None = None
    relative: bool | None = None
    random: int | None = None
    negated: bool | None = None
    seed: int | None = None
    samples: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    concurrency: Annotated[int, msgspec.Meta(ge=1)] | None = None
    measures: tuple[str, ...] = ("repetition",)


def read_settings(path: Path | None, flags: Mapping[str, Any]) -> SweepFile:
    """Read the settings from a YAML file, unless `path` is None, and from flags (option to value), which override them.

    Raises:
        InvalidFile: no valid YAML, or a key that is unknown or of the wrong type.
        typer.BadParameter: a setting that is in neither.
    """
    needed = "such as vectors: file"
    found = {} if path is None else yaml_keys(path, needed, paths=("vectors", "prompts"))
    for name in ("vectors", "layers", "scales", "prompts"):
        if name not in found and flags.get(name) is None:
            raise typer.BadParameter(f"give --{name}, or a YAML file with {name}:", param_hint=f"--{name}")
    return settings_of(SweepFile, found, flags, path)


def yaml_keys(path: Path, needed: str, *, paths: Iterable[str]) -> dict[str, Any]:
    """Read the keys and values of a YAML file; {} if it has none.

    Args:
        path: path of the file.
        needed: description of the keys, for the error.
        paths: keys whose texts are paths, joined to the file's folder; so are files of traits in `measures`.

    Raises:
        InvalidFile: the file is not YAML, has a key twice, or is not a mapping.
    """
    from steercap.files.tables import read_yaml

    found = read_yaml(path)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise InvalidFile(f"{path} holds {type(found).__name__}; give keys and values, {needed}")
    for name in paths:
        if isinstance(found.get(name), str) and found[name]:
            found[name] = str(path.parent / found[name])
    if isinstance(found.get("measures"), list):
        found["measures"] = [_measure_from(path.parent, measure) for measure in found["measures"]]
    return found


def settings_of(
    kind: type[Settings], keys: Mapping[str, Any], flags: Mapping[str, Any], path: Path | None, hint: str = ""
) -> Settings:
    """Return settings of the type `kind` from the keys of a YAML file and from flags, which override them unless None.

    Raises:
        InvalidFile: a key that is unknown, missing or of the wrong type; `hint` follows the known ones.
    """
    try:
        return msgspec.convert({**keys, **{name: value for name, value in flags.items() if value is not None}}, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise InvalidFile(f"{path or 'the flags'}: {error}; known: {known}{hint}") from error


def sweep_of(settings: SweepFile, flags: Mapping[str, Any] | None = None) -> Sweep:
    """Create the sweep that settings describe; reads its files of vectors and prompts.

    Errors name the flag of a setting that `flags` gives, and the YAML file's key of another.

    Raises:
        InvalidFile: vectors or prompts cannot be read.
        InvalidSpec: `Sweep` refuses its arguments.
    """
    from steercap.lab.studies.sweeps import Sweep

    first_row, tokens = (
        f"--{one.replace('_', '-')}" if (flags or {}).get(one) is not None else one for one in ("first_row", "tokens")
    )
    path = Path(settings.vectors)
    directions = directions_in(loaded(path, settings.first_row, first_row), path)
    if isinstance(settings.prompts, str):
        prompts = PromptOptions(file=settings.prompts, chat=settings.chat).read()
    else:
        prompts = PromptOptions(chat=settings.chat).templated([Prompt(text) for text in settings.prompts])
    further = not_none(settings, "operations", "relative", "random", "negated", "seed", "samples")
    if settings.tokens is not None:
        further["tokens"] = tokens_of(settings.tokens, tokens)
    return Sweep(
        vectors=directions if settings.names is None else directions.select(settings.names),
        layers=settings.layers,
        scales=settings.scales,
        prompts=[prompt.content for prompt in prompts],
        sampling_params=sampling_of(settings),
        **further,
    )


def not_none(settings: msgspec.Struct, *names: str) -> dict[str, Any]:
    """Return the settings of these names that are not None, by name; the others have the defaults of the library."""
    return {name: value for name in names if (value := getattr(settings, name)) is not None}


def sampling_of(settings: msgspec.Struct) -> dict[str, Any]:
    """Return the sampling parameters of a study from its settings.

    Raises:
        typer.BadParameter: one is out of range.
    """
    from steercap.lab.studies import SAMPLING

    found = {**SAMPLING, **not_none(settings, "max_tokens", "temperature")}
    check_sampling(**found)
    return found


def measures_in(text: str) -> tuple[str, ...]:
    """Parse `--measures`, names separated by commas; the path of a trait's file may contain commas.

    Raises:
        typer.BadParameter: there are none.
    """
    from steercap.lab.studies.sweeps import MEASURES

    parts = re.split(rf",(?=\s*score:|\s*(?:{'|'.join(MEASURES)})\s*(?:,|$))", text)
    return tuple(
        one for part in parts for one in ([part.strip()] if is_file(_scored(part.strip())[0]) else names_of(part))
    )


def measure_of(text: str) -> str | Measure:
    """Return a measure's name, checked, or a trait's score: "score:evil", "score:evil:keywords", "score:mine.yaml".

    Raises:
        UnknownName: there is no such measure, trait or scorer.
        InvalidFile: the YAML file holds no trait.
    """
    from steercap.lab.measures.score import Score
    from steercap.lab.measures.scores import SCORERS, shipped_traits
    from steercap.lab.studies.sweeps import MEASURES

    name, _, rest = text.partition(":")
    trait, scorer = _scored(rest)
    if name == "score" and trait:
        return Score(trait_of(trait), *scorer)
    if text in MEASURES and text != "score":
        return text
    known = {one: one for one in MEASURES if one != "score"} | {one: f"score:{one}" for one in shipped_traits()}
    known |= {one: f"score:TRAIT:{one}" for one in SCORERS}
    near = nearest(name, known)
    hint = f"did you mean {known[near]!r}? " if near else ""
    names = ", ".join(map(repr, known.values()))
    raise UnknownName(f"unknown measure {text!r}; {hint}known: {names}; TRAIT is a name or a YAML file")


def _scored(text: str) -> tuple[str, list[str]]:
    """Split "TRAIT" or "TRAIT:SCORER" into the trait and [] or [scorer]; a path of a trait may contain colons."""
    trait, colon, scorer = text.rpartition(":")
    return (trait, [scorer]) if colon and not is_file(text) else (text, [])


def _measure_from(folder: Path, measure: Any) -> Any:
    """Return a measure of a YAML file in `folder`; a path of a trait's file is joined to that folder."""
    if not isinstance(measure, str) or not measure.startswith("score:"):
        return measure
    trait, scorer = _scored(measure.removeprefix("score:"))
    return ":".join(["score", str(folder / trait), *scorer]) if is_file(trait) else measure
