"""Tasks of fixed texts that the model reads under a method: base class, members, registry; their log probabilities.

To add one, add a class and an entry of `TASKS`.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from steercap.core.extras import extra
from steercap.core.hints import dataclass
from steercap.core.prompts import templated
from steercap.core.registry import Registry
from steercap.core.values import count_of, parts_of, shown
from steercap.errors import InvalidSpec, WorkerFailure
from steercap.lab.measures.texts import READ, prompt_logprobs_of
from steercap.lab.studies.sweeps.operations import over_read
from steercap.steering.spec import SteeringSpec

if TYPE_CHECKING:
    from steercap.model import SteerModel

Kind = TypeVar("Kind")
#: Minimum tokens before a scored text: vLLM gives no log probability for the first token of a prompt.
FIRST_SCORED: Final = 1


class Item(NamedTuple):
    """Prompt and texts of a task to read.

    Args:
        prompt: text of the user.
        lead: beginning of the answer: read as if the model had written it, and not scored.
        texts: continuations, each read by itself after the lead, and scored.
    """

    prompt: str
    lead: str
    texts: tuple[str, ...]


def first_of(items: Sequence[Item], first: int | None, what: str) -> Sequence[Item]:
    """Return the first `first` items of a task, all of them for None; `what` is the task's name, for the error.

    Raises:
        InvalidSpec: `first` is not an integer from 1 to the number of items.
    """
    return items if first is None else items[: count_of(first, f"{what}: first", 1, len(items))]


@functools.cache
def read_shipped(name: str, kind: type[Kind]) -> Kind:
    """Return `evaluation/shipped/<name>.yaml`, texts written for steercap, decoded as the type `kind`; cached."""
    with extra("experiments"):
        import yaml

    text = (resources.files("steercap.lab.studies.evaluation") / "shipped" / f"{name}.yaml").read_text(encoding="utf-8")
    return msgspec.convert(yaml.safe_load(text), kind)


class Task(ABC):
    """Task of fixed texts, with a value for each item from log probabilities of tokens.

    The `repr` contains everything that the value depends on: stored values are recognised by it. The texts are read as
    answers after the prompt of a method, its system prompt included, with `chat=False` on a new line, and its edits are
    placed as if the model had generated them: those of tokens="generated" begin after the prompt.
    """

    #: True if the value is a factor, such as perplexity, with a geometric mean and a logarithmic axis.
    log: ClassVar[bool] = False
    #: Axis label, with its unit.
    axis: ClassVar[str] = ""
    #: Direction of improvement: "more", "less", or "" for neither.
    better: ClassVar[str] = ""

    @property
    @abstractmethod
    def label(self) -> str:
        """Column name in tables."""

    @property
    @abstractmethod
    def items(self) -> Sequence[Item]:
        """Items to read, always in the same order."""

    @abstractmethod
    def value(self, item: int, logprobs: Sequence[npt.NDArray[np.float64]]) -> float:
        """Return the value of one item.

        Args:
            item: index of the item.
            logprobs: natural log probabilities of the tokens of each text of the item, in order: float64 [tokens] each.
        """


@dataclass(frozen=True)
class Passages(Task):
    """Perplexity of a passage given a question that it answers: exp of the mean negative log-likelihood, 1 or more.

    The passages are the same for every method, so this measures a method's effect on the model's language, apart from
    the subject. A method that asks for another style makes plain prose less likely by design; that is part of its cost.

    Args:
        texts: passages by the question that each answers; by default twelve that come with steercap, written for it,
            of some 40 words each, about common knowledge.

        first: number of passages to use, from the first; all by default.

    Raises:
        InvalidSpec: there is no passage, one is empty, or there are fewer than `first`.
    """

    log = True
    axis = "perplexity of neutral prose"
    better = "less"

    texts: Mapping[str, str] | None = None
    first: int | None = None

    def __post_init__(self) -> None:
        if self.texts is not None:
            given = dict(self.texts) if isinstance(self.texts, Mapping) else {}
            if not given or not all(isinstance(part, str) and part.strip() for one in given.items() for part in one):
                raise InvalidSpec(f"Passages: texts={shown(self.texts)}; give passages by the questions they answer")
            object.__setattr__(self, "texts", given)
        _ = self.items

    @property
    def label(self) -> str:
        return "neutral"

    @property
    def items(self) -> Sequence[Item]:
        known = self.texts or read_shipped("passages", dict[str, str])
        return first_of([Item(question, "", (text,)) for question, text in known.items()], self.first, "Passages")

    def value(self, item: int, logprobs: Sequence[npt.NDArray[np.float64]]) -> float:  # noqa: ARG002 -- all alike
        (tokens,) = logprobs
        return math.exp(-float(tokens.mean()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({[tuple(item) for item in self.items]})"


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Question with its answers.

    Args:
        question: text of the question.
        lead: beginning of every answer. It has a few words, so that edits of generated tokens affect the scored tokens:
            the first word of an answer is still predicted by the last token of the prompt.
        right: right continuation.
        wrong: wrong continuations, one at least.
    """

    question: str
    lead: str
    right: str
    wrong: tuple[str, ...]

    def __post_init__(self) -> None:
        texts = [self.right, *self.wrong]
        if not self.wrong or not all(part.strip() for part in (self.question, self.lead, *texts)):
            raise ValueError(
                "question, lead, right and each entry of wrong must be text, and wrong must have at least one entry"
            )
        if len(set(texts)) < len(texts):
            raise ValueError(f"{self.question!r} has an answer twice")


@dataclass(frozen=True)
class Choices(Task):
    """Accuracy of multiple choice: 1 if the right answer has the greatest log probability, summed over tokens, else 0.

    The choice is by probability of the texts, not by letters, which small models do not understand. Equal log
    probabilities count as wrong.

    Args:
        questions: questions with answers; by default forty of everyday knowledge that come with steercap, written for
            it, each with three wrong answers of about the same length, so that chance is 0.25.

        first: number of questions to use, from the first; all by default.

    Raises:
        InvalidSpec: there is no question, an entry is not a Choice, or there are fewer than `first`.
    """

    axis = "accuracy, multiple choice"
    better = "more"

    questions: Sequence[Choice] | None = None
    first: int | None = None

    def __post_init__(self) -> None:
        if self.questions is not None:
            given: list[Any] | None = parts_of(self.questions, "Choices: questions")
            if not given or not all(isinstance(one, Choice) for one in given):
                raise InvalidSpec(f"Choices: questions={shown(self.questions)}; give a list of Choice")
            object.__setattr__(self, "questions", tuple(given))
        _ = self.items

    @property
    def label(self) -> str:
        return "choices"

    @property
    def items(self) -> Sequence[Item]:
        known = self.questions or read_shipped("choices", tuple[Choice, ...])
        items = [
            Item(one.question, one.lead, tuple(f" {text.strip()}" for text in (one.right, *one.wrong))) for one in known
        ]
        return first_of(items, self.first, "Choices")

    def value(self, item: int, logprobs: Sequence[npt.NDArray[np.float64]]) -> float:  # noqa: ARG002 -- all alike
        right, *wrong = (float(tokens.sum()) for tokens in logprobs)
        return float(right > max(wrong))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({[tuple(item) for item in self.items]})"


#: Every task by its name; members are subclasses of `Task`.
TASKS: Final[Registry[type[Task]]] = Registry("task", {"choices": Choices, "passages": Passages})


class PromptAndText(NamedTuple):
    """Token ids of a prompt, of the beginning of an answer, and of its continuation, which alone is scored."""

    prompt: list[int]
    lead: list[int]
    text: list[int]

    @property
    def ids(self) -> list[int]:
        """All token ids in order."""
        return [*self.prompt, *self.lead, *self.text]


def tokenized(tokenizer: Any, prompt: Any, item: Item) -> list[PromptAndText]:
    """Return token ids of the prompt, the item's lead and one of its texts, for each of its texts in order.

    The prompt is text, which a new line follows, or a conversation for the tokenizer's chat template.

    Raises:
        InvalidSpec: a text has no token, or no token comes before it.
    """
    plain = isinstance(prompt, str)
    read = tokenizer.encode(f"{prompt}\n") if plain else templated(tokenizer, prompt, {}, spans=False)[0]
    lead = tokenizer.encode(item.lead, add_special_tokens=False) if item.lead else []
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in item.texts]
    if not all(texts) or len(read) + len(lead) < FIRST_SCORED:
        raise InvalidSpec(f"{item!r} has a text without tokens, or no token before its texts")
    return [PromptAndText(list(read), list(lead), list(text)) for text in texts]


async def logprobs_of(
    model: SteerModel, parts: Sequence[PromptAndText], spec: SteeringSpec | None
) -> list[npt.NDArray[np.float64]]:
    """Return the natural log probability of each token of each text, given all tokens before it: float64 [tokens] each.

    Edits of `spec` (None for no steering) apply where they would if the model had generated the text after the prompt.

    Raises:
        InvalidSpec: an edit or a LogitBias cannot apply to a text that is read, see `over_read`.
        WorkerFailure: vLLM gives no log probabilities.
        The errors of `SteerModel.generate`.
    """
    prompts = [{"prompt_token_ids": one.ids} for one in parts]
    steering = [None if spec is None else over_read(spec, len(one.prompt), len(one.ids)) for one in parts]
    found = await model.run(prompts, READ, steering=steering)
    return [_scored(one, prompt_logprobs_of(each.output)) for one, each in zip(parts, found, strict=True)]


def _scored(parts: PromptAndText, logprobs: Sequence[Mapping[int, float]] | None) -> npt.NDArray[np.float64]:
    """Return the log probabilities of the text's tokens; `logprobs` maps token ids to them, one mapping per token."""
    ids = parts.ids
    if logprobs is None or len(logprobs) != len(ids):
        got = "none" if logprobs is None else len(logprobs)
        raise WorkerFailure(f"vLLM gave {got} log probabilities for a text of {len(ids)} tokens; expected one each")
    first = len(ids) - len(parts.text)
    return np.array([logprobs[at][ids[at]] for at in range(first, len(ids))], dtype=np.float64)
