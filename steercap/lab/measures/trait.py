"""What a trait is, and the ones that come with steercap."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from steercap.core.extras import extra
from steercap.errors import InvalidFile
from steercap.files.base import require_file

#: What a rubric must hold, in braces.
PLACES: Final = ("{question}", "{answer}")


class Examples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sentences that show a trait and sentences that do not, of no model: what a classifier learns from.

    Args:
        positive, negative: as many of each; those of one place are on one subject, so that only the trait differs.
    """

    positive: tuple[str, ...]
    negative: tuple[str, ...]

    def __repr__(self) -> str:
        """All of it, under one name whatever the class is called: folders of scores are named by it."""
        return f"Examples(positive={self.positive!r}, negative={self.negative!r})"


class Trait(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A way to answer: what brings it out in a model, and what tells that it is there.

    Args:
        name: one word of letters, digits, _ and -.
        description: one sentence.
        positive, negative: system prompts that ask for the trait and for its opposite; one at least, and those of
            one place contrast.
        questions: what is asked; every-day questions whose answers may show the trait or not.
        examples: sentences for the scorer "minilm"; four pairs at least.
        keywords: words and phrases that show the trait, for the scorer "keywords".
        rubric: what the scorer "judge" tells the judging model; {question} and {answer} stand for what is judged.

    Raises:
        ValueError: something is missing or empty, stands there twice, or the rubric lacks a place.
    """

    name: str
    description: str
    positive: tuple[str, ...]
    negative: tuple[str, ...]
    questions: tuple[str, ...]
    examples: Examples
    keywords: tuple[str, ...]
    rubric: str

    def __post_init__(self) -> None:
        lists = {"positive": 1, "negative": 1, "questions": 1, "keywords": 1}
        found = {name: getattr(self, name) for name in lists}
        for kind in ("positive", "negative"):
            lists[f"examples.{kind}"] = 4
            found[f"examples.{kind}"] = getattr(self.examples, kind)
        for name, least in lists.items():
            _check(name, found[name], least)
        if len(self.examples.positive) != len(self.examples.negative):
            raise ValueError(
                f"{len(self.examples.positive)} positive and {len(self.examples.negative)} negative examples; "
                "give as many of each, those of one place on one subject"
            )
        if not re.fullmatch(r"[\w-]+", self.name):  # it names files, and stands before "/" in the ids of requests
            raise ValueError(f"name={self.name!r}; give one word of letters, digits, _ and -")
        if not self.description.strip():
            raise ValueError("description is empty; give one sentence")
        if missing := [place for place in PLACES if place not in self.rubric]:
            raise ValueError(f"the rubric lacks {' and '.join(missing)}")


def load_trait(path: str | Path) -> Trait:
    """Read a trait from a YAML file.

    Args:
        path: the file; the shipped ones, in `steercap/lab/personas/shipped`, show what it holds.

    Raises:
        InvalidFile: no such file, no YAML, or a field that is missing, unknown or does not fit.
    """
    with extra("personas"):
        import yaml
    require_file(Path(path))
    try:
        return msgspec.yaml.decode(Path(path).read_bytes(), type=Trait)
    except (OSError, msgspec.MsgspecError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidFile(f"{path} holds no trait: {error}") from error


@functools.cache
def traits() -> Mapping[str, Trait]:
    """The traits that come with steercap, by name."""
    with resources.as_file(resources.files("steercap.lab.personas") / "shipped") as folder:
        found = [load_trait(path) for path in sorted(folder.glob("*.yaml"))]
    return MappingProxyType({trait.name: trait for trait in found})


def _check(name: str, texts: tuple[str, ...], least: int) -> None:
    if len(texts) < least:
        raise ValueError(f"{name} has {len(texts)} entries; give {least} or more")
    if empty := [place for place, text in enumerate(texts) if not text.strip()]:
        raise ValueError(f"{name} has an empty entry at {empty[0]}")
    if len(set(texts)) < len(texts):
        twice = next(text for text in texts if texts.count(text) > 1)
        raise ValueError(f"{name} has {twice!r} twice")
