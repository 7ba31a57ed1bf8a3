"""Evaluation of methods on the same questions, and its definition: everything that the answers depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import partial
from itertools import product
from typing import Any, Final, NamedTuple

import msgspec

from steercap.core.display import brief
from steercap.core.hints import dataclass
from steercap.core.values import choices, parts_of, shown
from steercap.errors import InvalidSpec
from steercap.files.folder import FolderKind, differences
from steercap.lab.directions.contrast import derived_seed
from steercap.lab.studies import SAMPLING, as_stored, settle
from steercap.lab.studies.evaluation.methods import Method, listed
from steercap.steering.spec import SteeringSpec


class EvaluationCondition(msgspec.Struct, frozen=True):
    """Method at a dose.

    Args:
        method: name of the method.
        dose: factor on the scale of the method's edits; 1 for a method without steering.
    """

    method: str
    dose: float


class Conversation(NamedTuple):
    """Conversation `sample` about a question, by index, to run; `number` is that of its first answer in the folder."""

    number: int
    condition: EvaluationCondition
    question: int
    sample: int


class KnownCondition(msgspec.Struct, frozen=True):
    """Condition of answers that a folder has or will have.

    Args:
        digest: SHA-256 of the condition's edits and system prompt, in hexadecimal.
        method: name of the method when it was added; for readers.
        dose: dose of the method.
    """

    digest: str
    method: str
    dose: float


class EvaluationDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the answers of an evaluation depend on, regardless of the methods compared.

    Args:
        model: identity of the model; see `steercap.files.fingerprint`.
        questions: texts of each question's turns.
        sampling: vLLM sampling parameters.
        samples: number of conversations about each question.
        chat: True if questions go through the chat template.
        seed: seed of the sampling.
        conditions: conditions in the order of their answers; more may be added.
    """

    model: dict[str, str]
    questions: list[list[str]]
    sampling: dict[str, Any]
    samples: int
    chat: bool
    seed: int
    conditions: list[KnownCondition] = []


#: Kind of folder of an evaluation; it may be resumed with other conditions, which are added.
FOLDER: Final = FolderKind(
    "evaluation.json", EvaluationDefinition, "evaluation", partial(differences, but=("conditions",))
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Evaluation:
    """Set of methods to compare on the same questions.

    A method without steering and system prompt is always included, named "none" unless you name it yourself.

    Args:
        methods: methods to compare.
        questions: questions, each a text, or several texts of the user's turns, each after the model's own answer to
            the one before; answers to equal ones are those to one question. Use questions from which no vector was
            made and by which no dose was chosen.
        sampling_params: vLLM sampling parameters except `n` and `seed`, which the evaluation sets; by default 64
            tokens, greedy. Those left out of a mapping are vLLM's defaults: 16 tokens, temperature 1.
        samples: number of conversations about each question; the same question, sample and turn have the same seed
            under every method.
        chat: put questions through the chat template; if False, each is a text that the model continues, after the
            system prompt and an empty line if a method has one.
        seed: seed of the sampling.

    Raises:
        InvalidSpec: no method or no question, two methods of one name, a control of a missing method, several turns
            without a chat, or a number out of range.
    """

    methods: Sequence[Method]
    questions: Sequence[str | Sequence[str]]
    sampling_params: Mapping[str, Any] = field(default_factory=lambda: dict(SAMPLING))
    samples: int = 1
    chat: bool = True
    seed: int = 0

    __repr__ = brief

    def __post_init__(self) -> None:
        keep = object.__setattr__
        keep(self, "methods", self._methods())
        asked = parts_of(self.questions, "Evaluation: questions")
        if not asked:
            raise InvalidSpec(f"Evaluation: questions={shown(self.questions)}; give a list with at least one")
        keep(self, "questions", tuple(_turns(question) for question in asked))
        settle(self, whole=("samples", "seed"), flags=("chat",))
        if not self.chat and self.turns > 1:
            raise InvalidSpec("Evaluation: several turns are a conversation; give chat=True, or one text a question")

    def _methods(self) -> tuple[Method, ...]:
        given = parts_of(self.methods, "Evaluation: methods")
        if not given or not all(isinstance(method, Method) for method in given):
            raise InvalidSpec(f"Evaluation: methods={shown(self.methods)}; give a list of Method, with at least one")
        found = tuple(listed(given))
        names = [method.name for method in found]
        if twice := [name for name in names if names.count(name) > 1]:
            raise InvalidSpec(f"Evaluation: two methods are called {twice[0]!r}; name them apart")
        lines = {method.line for method in found}
        for method in found:
            if method.control_of and method.control_of not in lines:
                raise InvalidSpec(
                    f"Method {method.name!r} is a control of {method.control_of!r}, which is not evaluated; "
                    f"{choices(method.control_of, sorted(lines))}"
                )
        return found

    @property
    def turns(self) -> int:
        """Maximum number of turns of a question."""
        return max(map(len, self.questions))

    @property
    def plain(self) -> str:
        """Name of the method that changes nothing."""
        return next(method.name for method in self.methods if method.is_plain)

    def method(self, name: str) -> Method:
        """Return a method by its name.

        Raises:
            InvalidSpec: there is no such method.
        """
        for method in self.methods:
            if method.name == name:
                return method
        raise InvalidSpec(f"{name!r} is not evaluated; {choices(name, [one.name for one in self.methods])}")

    def conditions(self) -> tuple[EvaluationCondition, ...]:
        """Return every method at each of its doses, in order."""
        return tuple(EvaluationCondition(method.name, dose) for method in self.methods for dose in method.doses)

    def spec(self, condition: EvaluationCondition) -> SteeringSpec | None:
        """Return the edits of a condition; None without steering."""
        return self.method(condition.method).spec(condition.dose)

    def digest(self, condition: EvaluationCondition) -> str:
        """Return the SHA-256 of a condition's edits and system prompt, in hexadecimal."""
        spec = self.spec(condition)
        said = ["" if spec is None else spec.sha256, self.method(condition.method).system]
        return hashlib.sha256(msgspec.json.encode(said)).hexdigest()

    def conversations(self, places: Mapping[EvaluationCondition, int]) -> Iterator[Conversation]:
        """Yield all conversations, grouped by condition; `places` are the conditions' indices in the folder."""
        per = len(self.questions) * self.samples * self.turns
        for condition in self.conditions():
            for at, (question, sample) in enumerate(product(range(len(self.questions)), range(self.samples))):
                yield Conversation(places[condition] * per + at * self.turns, condition, question, sample)

    def prompt(self, condition: EvaluationCondition, said: Sequence[str]) -> Any:
        """Return the prompt of the next answer: chat messages, or text if `chat` is False.

        Args:
            condition: condition with the system prompt.
            said: texts of user and model so far, in turns; the user begins and ends.
        """
        system = self.method(condition.method).system
        if not self.chat:
            return f"{system}\n\n{said[-1]}" if system else said[-1]
        spoken = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
        return [*([{"role": "system", "content": system}] if system else []), *spoken]

    def sampling_of(self, question: int, sample: int, turn: int) -> dict[str, Any]:
        """Return vLLM sampling parameters of the answer of these indices; the seed does not depend on the condition."""
        return {**self.sampling_params, "seed": derived_seed(f"{self.seed}/{question}/{sample}/{turn}")}

    def definition(self, model: Mapping[str, str]) -> EvaluationDefinition:
        """Return the definition, everything that the answers depend on.

        Args:
            model: identity of the model; see `steercap.files.fingerprint`.

        Raises:
            InvalidSpec: the sampling parameters are not JSON-compatible.
        """
        found = EvaluationDefinition(
            model=dict(model),
            questions=[list(question) for question in self.questions],
            sampling=dict(self.sampling_params),
            samples=self.samples,
            chat=self.chat,
            seed=self.seed,
            conditions=[KnownCondition(self.digest(one), one.method, one.dose) for one in self.conditions()],
        )
        return as_stored(self, found)


def _turns(question: Any) -> tuple[str, ...]:
    turns = [question] if isinstance(question, str) else parts_of(question, "Evaluation: questions") or []
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise InvalidSpec(
            f"Evaluation: questions hold {shown(question)}; give a text, or a list of what the user says turn by turn"
        )
    return tuple(turns)
