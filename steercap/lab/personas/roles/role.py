"""Role, set of roles with shared questions and prompts, and prompts without a role that come with steercap."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from importlib import resources
from typing import Final

import msgspec

from steercap.core.values import choices
from steercap.errors import InvalidSetting, UnknownName
from steercap.lab.measures.scores import PLACES, Examples, Trait

#: Name of the default assistant, where it is listed among roles.
ASSISTANT: Final = "assistant"
#: Minimum number of a role's example sentences, and of plain ones, for the scorer "minilm".
LEAST_EXAMPLES: Final = 4
#: Rubric of the scorer "judge" for a role without a `rubric`.
RUBRIC: Final = """\
A model was asked to play a role. The role: {role}

Question: {{question}}
Answer: {{answer}}

How much does the answer play this role, from 0 (a plain assistant answers, or refuses to play) to 100 (it speaks wholly
as the role would)? Answer with a number alone.
"""


class Role(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Character that a model is asked to play.

    Args:
        name: one word of letters, digits, _ and -, other than "assistant".
        prompts: system prompts that ask the model to play the role, one at least.
        description: description in one sentence, for the scorer "judge".
        keywords: words and phrases that show the role, for the scorer "keywords".
        examples: sentences as the role would say them, four at least, for the scorer "minilm".
        rubric: prompt of the scorer "judge" to the judging model, with {question} and {answer}; "" for a default with
            the description.

    Raises:
        ValueError: the name is not valid, a prompt is missing, empty or duplicated, or the rubric lacks a placeholder.
    """

    name: str
    prompts: tuple[str, ...]
    description: str = ""
    keywords: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    rubric: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w-]+", self.name) or self.name == ASSISTANT:  # it names a folder
            raise ValueError(
                f"name={self.name!r}; give one word of letters, digits, _ and -, other than {ASSISTANT!r}, which is "
                "the name of the default assistant"
            )
        check_texts(f"the prompts of {self.name}", self.prompts)
        check_texts(f"the keywords of {self.name}", self.keywords, least=0)
        check_texts(f"the examples of {self.name}", self.examples, least=0)
        if self.rubric and (missing := [place for place in PLACES if place not in self.rubric]):
            raise ValueError(f"the rubric of {self.name} lacks {' and '.join(missing)}")


class RoleSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Set of roles with shared questions and prompts.

    Args:
        roles: two roles at least, with different names.
        questions: questions for every role and the assistant, two at least.
        assistant: system prompts of the default assistant; "" is no system prompt.
        plain: sentences of an assistant that plays no role, as negative examples for the scorer "minilm".

    Raises:
        ValueError: there are too few roles, questions or prompts, or a text is empty or duplicated.
    """

    roles: tuple[Role, ...]
    questions: tuple[str, ...]
    assistant: tuple[str, ...] = ("",)
    plain: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [role.name for role in self.roles]
        if len(names) < 2:
            raise ValueError(f"{len(names)} roles; give two or more: the axis is computed from how roles differ")
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ValueError(f"the role {twice[0]!r} is there twice; give each a name of its own")
        check_texts("questions", self.questions, least=2)
        check_texts("the assistant's prompts", self.assistant, empty=True)
        check_texts("plain", self.plain, least=0)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the roles, without the assistant's."""
        return tuple(role.name for role in self.roles)

    def prompts_of(self, name: str) -> tuple[str, ...]:
        """Return the system prompts of a role, or of the assistant.

        Raises:
            UnknownName: there is no role of this name.
        """
        return self.assistant if name == ASSISTANT else self.role(name).prompts

    def role(self, name: str) -> Role:
        """Return the role of a name.

        Raises:
            UnknownName: there is no role of this name.
        """
        for role in self.roles:
            if role.name == name:
                return role
        raise UnknownName(f"no role {name!r}; {choices(name, self.names)}")

    def select(self, names: Collection[str]) -> RoleSet:
        """Return a set with the roles of these names, in the order given, and the same questions and prompts.

        Raises:
            UnknownName: there is no role of a given name.
            InvalidSetting: fewer than two names, or one given twice.
        """
        try:
            return msgspec.structs.replace(self, roles=tuple(self.role(name) for name in names))
        except ValueError as error:
            if isinstance(error, UnknownName):
                raise
            raise InvalidSetting(str(error)) from error


def trait_of(role: Role, roles: RoleSet, scorer: str) -> Trait:
    """Return a role as a trait, which a scorer can score.

    The role's system prompts are positive, "You are a helpful assistant." is negative; its sentences and the set's
    plain ones are the examples, in pairs. Fields that the role lacks and this scorer does not use are filled in:
    placeholders for examples, the role's name for keywords, a default rubric.

    Raises:
        InvalidSetting: the scorer is "minilm" and there are too few pairs of sentences, or it is "keywords" and the
            role has no keywords.
    """
    pairs = min(len(role.examples), len(roles.plain))
    if scorer == "minilm" and pairs < LEAST_EXAMPLES:
        raise InvalidSetting(
            f"scorer 'minilm' tells a role's example sentences from plain ones: {role.name} has {len(role.examples)}, "
            f"and there are {len(roles.plain)} plain ones; give {LEAST_EXAMPLES} of each, or another scorer"
        )
    if scorer == "keywords" and not role.keywords:
        raise InvalidSetting(f"scorer 'keywords' counts a role's keywords, and {role.name} has none; give some")
    filler = tuple(f"{role.name} {number}" for number in range(LEAST_EXAMPLES))  # of scorers that look at none
    used = Examples(role.examples[:pairs], roles.plain[:pairs]) if pairs >= LEAST_EXAMPLES else Examples(filler, filler)
    told = role.description or role.prompts[0]
    return Trait(
        name=role.name,
        description=told,
        positive=role.prompts,
        negative=("You are a helpful assistant.",),
        questions=roles.questions,
        examples=used,
        keywords=role.keywords or (role.name,),
        rubric=role.rubric or RUBRIC.format(role=told.replace("{", "(").replace("}", ")")),
    )


def check_texts(what: str, texts: tuple[str, ...], *, least: int = 1, empty: bool = False) -> None:
    """Check that `texts` has at least `least` elements, no duplicate, and, unless `empty`, no blank element.

    Raises:
        ValueError: a condition is not met; the message begins with `what`.
    """
    if len(texts) < least:
        raise ValueError(f"{what}: {len(texts)} given; give {least} or more")
    blank = [place for place, text in enumerate(texts) if not text.strip()]
    if blank and not empty:
        raise ValueError(f"{what}: number {blank[0]}, counted from 0, is empty")
    if len(set(texts)) < len(texts):
        raise ValueError(f"{what}: {next(text for text in texts if texts.count(text) > 1)!r} is there twice")


@functools.cache
def drift_prompts() -> tuple[str, ...]:
    """Return the shipped prompts without a role that may make an assistant leave its default character; cached."""
    with resources.as_file(resources.files("steercap.lab.personas.roles") / "shipped" / "_drift.txt") as path:
        return tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
