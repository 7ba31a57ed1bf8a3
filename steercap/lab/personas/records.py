"""Records of runs over traits or roles: requests, answers, scores, and kept answers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias, TypeVar

import msgspec

from steercap.lab.personas.settings import PersonaSettings

#: Kind of the system prompt of an answer.
Sign: TypeAlias = Literal["positive", "negative"]
SIGNS: Final[tuple[Sign, Sign]] = ("positive", "negative")


class RunSettings(Protocol):
    """Interface of the settings that `PersonaSettings`, of runs over traits, and `RoleSettings` share."""

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of an answer."""

    @property
    def temperature(self) -> float:
        """Sampling temperature; 0 is greedy."""

    @property
    def top_p(self) -> float:
        """Share of the probability mass to sample from, in (0, 1]."""

    @property
    def concurrency(self) -> int:
        """Maximum concurrent requests."""

    @property
    def layers(self) -> int | tuple[int, ...] | Literal["all"]:
        """Layers whose rows are captured: an index, several, or "all"."""

    @property
    def site(self) -> str:
        """Site whose rows are captured, such as "resid_post"."""

    @property
    def read_system(self) -> bool:
        """True if the system prompt comes before an answer when the answer is read to capture rows."""


class TraitRequest(msgspec.Struct, frozen=True):
    """Request to a model for one answer to a question, under a system prompt for a trait or against it.

    Args:
        id: "trait/sign/prompt/question/sample", unique in a run.
        trait: name of the trait.
        sign: "positive" if the system prompt asks for the trait, "negative" if for its opposite.
        prompt: index of the system prompt among those of this sign.
        question: index of the question.
        sample: index of the answer among several to one prompt and question.
        seed: sampling seed, derived from the run's seed and the id.
        system_prompt, question_text: texts of the prompt and the question.
    """

    id: str
    trait: str
    sign: Sign
    prompt: int
    question: int
    sample: int
    seed: int
    system_prompt: str
    question_text: str

    @property
    def counterpart(self) -> str:
        """Id of the same request under the opposite system prompt."""
        other = "negative" if self.sign == "positive" else "positive"
        return f"{self.trait}/{other}/{self.prompt}/{self.question}/{self.sample}"


class Response(TraitRequest, frozen=True):
    """Request of a run over traits, with the model's answer.

    Args:
        answer: the text.
        token_ids: generated tokens, without special tokens at the end.
        finish: reason for its end: "stop" or "length".
    """

    answer: str
    token_ids: tuple[int, ...]
    finish: str


class RoleRequest(msgspec.Struct, frozen=True):
    """Request to a model for one answer to a question, under the system prompt of a role.

    Args:
        id: "role/prompt/question/sample", unique in a run.
        role: name of the role, or "assistant".
        prompt: index of the system prompt.
        question: index of the question.
        sample: index of the answer among several to one prompt and question.
        seed: sampling seed, derived from the run's seed and the id.
        system_prompt, question_text: texts of the prompt ("" for none) and the question.
    """

    id: str
    role: str
    prompt: int
    question: int
    sample: int
    seed: int
    system_prompt: str
    question_text: str


class RoleResponse(RoleRequest, frozen=True):
    """Request of a run over roles, with the model's answer.

    Args:
        answer: the text.
        token_ids: generated tokens, without special tokens at the end.
        finish: reason for its end: "stop" or "length".
    """

    answer: str
    token_ids: tuple[int, ...]
    finish: str


#: Type of answers: `Response` in runs over traits, `RoleResponse` in runs over roles.
AnyResponse = TypeVar("AnyResponse", Response, RoleResponse)


class Score(msgspec.Struct, frozen=True):
    """Score of the answer to the request `id`, for its trait or role: 0 to 100, None if it could not be scored."""

    id: str
    score: float | None

    @property
    def trait(self) -> str:
        """Name of the trait (or role), the first part of the id."""
        return self.id.partition("/")[0]


class Kept(msgspec.Struct, frozen=True):
    """Answer that passed the filter and is used for its trait's vector; fields as in `Response` and `Score`."""

    id: str
    trait: str
    sign: Sign
    question: int
    score: float


@dataclass(frozen=True)
class Records:
    """Records of a run over traits; responses and scores are in the same order.

    Args:
        responses, scores: answers to all requests, and their scores.
        kept: answers that are used for the vectors.
    """

    responses: Sequence[Response]
    scores: Sequence[Score]
    kept: Sequence[Kept]

    def of(self, trait: str, sign: Sign) -> list[tuple[Response, float | None]]:
        """Return the answers of a trait under prompts of one sign, with their scores, in the order of the run."""
        return [
            (response, score.score)
            for response, score in zip(self.responses, self.scores, strict=True)
            if (response.trait, response.sign) == (trait, sign)
        ]

    def kept_of(self, trait: str, sign: Sign) -> list[Kept]:
        """Return the kept answers of a trait under prompts of one sign."""
        return [one for one in self.kept if (one.trait, one.sign) == (trait, sign)]


def all_requests(settings: PersonaSettings) -> Iterator[TraitRequest]:
    """Yield every request of a run, in the order of its tables."""
    for trait in settings.resolved():
        questions = trait.questions[: settings.n_questions]
        for sign in SIGNS:
            for prompt, words in enumerate(getattr(trait, sign)[: settings.n_prompts]):
                for question, text in enumerate(questions):
                    for sample in range(settings.samples):
                        name = f"{trait.name}/{sign}/{prompt}/{question}/{sample}"
                        seed = seed_of(settings.seed, name)
                        yield TraitRequest(name, trait.name, sign, prompt, question, sample, seed, words, text)


def seed_of(seed: int, name: str) -> int:
    """Return a 31-bit sampling seed that depends only on the run's seed and the request's id, `name`."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:4]) >> 1
