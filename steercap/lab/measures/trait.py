"""Trait of a model's answers, and the shipped traits."""

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

#: Placeholders that a rubric must have.
PLACES: Final = ("{question}", "{answer}")


class Examples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sentences that show a trait and sentences that do not, not written by a model, to train a classifier.

    Args:
        positive, negative: equally many of each; those of one index are on one subject, so that only the trait differs.
    """

    positive: tuple[str, ...]
    negative: tuple[str, ...]

    def __repr__(self) -> str:
        """Return all sentences under a fixed class name, since folders of scores are named by it."""
        return f"Examples(positive={self.positive!r}, negative={self.negative!r})"


class Trait(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trait of answers: prompts that bring it out, and examples, keywords and a rubric to recognise it.

    Args:
        name: one word of letters, digits, _ and -.
        description: one sentence.
        positive, negative: system prompts that ask for the trait and for its opposite; one at least, and those of one
            index contrast.
        questions: everyday questions whose answers may show the trait or not.
        examples: sentences for the scorer "minilm"; four pairs at least.
        keywords: words and phrases that show the trait, for the scorer "keywords".
        rubric: prompt of the scorer "judge" to the judging model, with placeholders {question} and {answer}.

    Raises:
        ValueError: a field is missing, empty or has duplicates, or the rubric lacks a placeholder.
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
        path: the file; those in `steercap/lab/personas/shipped` show its format.

    Raises:
        InvalidFile: the file is missing or not YAML, or a field is missing, unknown or not valid.
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
    """Return the shipped traits, by name."""
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
