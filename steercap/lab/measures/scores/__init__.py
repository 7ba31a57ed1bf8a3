"""Traits of answers, and their scorers: base class and registry. To add a scorer, add a file with a `MEMBER`."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple

import msgspec

from steercap.core.registry import Registry
from steercap.core.values import choices, shown
from steercap.errors import InvalidFile, InvalidSetting
from steercap.files.base import require_file
from steercap.files.tables import read_yaml

#: Placeholders that a trait's rubric must contain.
PLACES: Final = ("{question}", "{answer}")


class Examples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sentences that show a trait and sentences that do not, written by people, to fit a classifier.

    Args:
        positive, negative: equally many of each; those of one index share a subject, so that only the trait differs.
    """

    positive: tuple[str, ...]
    negative: tuple[str, ...]

    def __repr__(self) -> str:
        """Return all sentences under a fixed class name, since names of folders of scores are derived from it."""
        return f"Examples(positive={self.positive!r}, negative={self.negative!r})"


class Trait(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trait of answers, such as kindness: prompts that elicit it, and examples, keywords and a rubric to score it.

    Args:
        name: one word of letters, digits, _ and -.
        description: one sentence.
        positive, negative: system prompts that ask for the trait and for its opposite; one at least; those of one index
            form a pair.
        questions: everyday questions whose answers may show the trait or not.
        examples: sentences for the scorer "minilm"; four pairs at least.
        keywords: words and phrases that show the trait, for the scorer "keywords".
        rubric: prompt to the judging model, for the scorer "judge", with placeholders {question} and {answer}.

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
        InvalidFile: the file is missing or not YAML, or a field is missing, unknown, there twice or not valid.
    """
    found = read_yaml(Path(path))
    if found is None:
        require_file(Path(path))  # says that it is empty
    try:
        return msgspec.convert(found, Trait)
    except msgspec.ValidationError as error:
        raise InvalidFile(f"{path} holds no trait: {error}") from error


@functools.cache
def shipped_traits() -> Mapping[str, Trait]:
    """Return the traits shipped with steercap, by name."""
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


def straightened(text: str) -> str:
    """Return a text with straight apostrophes, and single spaces for all white space, to search it for phrases."""
    return " ".join(text.replace("’", "'").split())


class Scored(NamedTuple):
    """Answer to score, with its question.

    Args:
        question: text of the question; "" for none.
        answer: text of the answer.
    """

    question: str
    answer: str


class Scorer(ABC):
    """Scorer of answers by a trait: abstract base class; subclasses are frozen dataclasses of their settings."""

    #: Names of settings that change no score, such as how often an endpoint is tried.
    effort: ClassVar[frozenset[str]] = frozenset()

    @property
    def key(self) -> str:
        """Text that contains everything a score depends on; its `repr`, where that has nothing else."""
        return repr(self)

    @abstractmethod
    async def score(self, trait: Trait, exchanges: Sequence[Scored]) -> list[float | None]:
        """Score how strongly each answer shows the trait.

        Args:
            trait: the trait.
            exchanges: answers to score, in any number.

        Returns:
            One number each, in order, 0 (not at all) to 100 (wholly); None if it has no score, such as an empty answer.
        """


__all__ = ["SCORERS", "Scored", "Scorer", "make_scorer"]

#: Registry of scorer classes, subclasses of `Scorer`, by name, such as "judge".
SCORERS: Registry[type[Scorer]] = Registry("scorer", sys.modules[__name__], type)


def make_scorer(name: str, arguments: Mapping[str, Any] | None = None) -> Scorer:
    """Return a scorer, constructed from its name and arguments.

    Args:
        name: name in `SCORERS`.
        arguments: arguments of the scorer's class; None for the defaults.

    Raises:
        UnknownName: no scorer has this name.
        InvalidSetting: an argument is unknown, missing, or not valid.
    """
    if not isinstance(arguments, (Mapping, type(None))):
        raise InvalidSetting(f"the arguments of scorer {name!r} are {shown(arguments)}; give a dict")
    kind, given = SCORERS[name], dict(arguments or {})
    wanted = inspect.signature(kind).parameters
    if unknown := [key for key in given if key not in wanted]:
        raise InvalidSetting(
            f"scorer {name!r} has no argument {', '.join(map(str, unknown))}; {choices(unknown[0], wanted)}"
        )
    if missing := [key for key, one in wanted.items() if one.default is one.empty and key not in given]:
        example = ", ".join(f"{key}=..." for key in missing)
        raise InvalidSetting(
            f"scorer {name!r} needs {' and '.join(missing)}; give them as its arguments (scorer_args, --scorer-arg), "
            f"or make the scorer: {kind.__name__}({example})"
        )
    return kind(**given)
