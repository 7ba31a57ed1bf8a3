"""What a run writes down: what is asked, what was answered, how it scored, what was kept."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import msgspec

from steercap.lab.personas.settings import PersonaSettings

#: Which kind of system prompt an answer was given under.
Sign: TypeAlias = Literal["positive", "negative"]
SIGNS: Final[tuple[Sign, Sign]] = ("positive", "negative")


class Request(msgspec.Struct, frozen=True):
    """One request.

    Args:
        id: "trait/sign/prompt/question/sample", unique in a run.
        trait: its name.
        sign: kind of the system prompt.
        prompt: place of the system prompt among its kind.
        question: place of the question.
        sample: which of several answers.
        seed: of sampling, from the run's seed and the id.
        system_prompt, question_text: in words.
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
        """The id of the same request under the opposite system prompt."""
        other = "negative" if self.sign == "positive" else "positive"
        return f"{self.trait}/{other}/{self.prompt}/{self.question}/{self.sample}"


class Response(Request, frozen=True):
    """A request and its answer.

    Args:
        answer: the text.
        token_ids: what was generated, special tokens at the end left out.
        finish: why it ended: "stop" or "length".
    """

    answer: str
    token_ids: tuple[int, ...]
    finish: str


class Score(msgspec.Struct, frozen=True):
    """How strongly an answer shows its trait: 0 to 100, None where nothing could be said."""

    id: str
    score: float | None

    @property
    def trait(self) -> str:
        """The name of the trait."""
        return self.id.partition("/")[0]


class Kept(msgspec.Struct, frozen=True):
    """An answer that is used."""

    id: str
    trait: str
    sign: Sign
    question: int
    score: float


@dataclass(frozen=True)
class Records:
    """What a run has written down; responses and scores are in one order.

    Args:
        responses, scores: of all requests.
        kept: of those that are used.
    """

    responses: Sequence[Response]
    scores: Sequence[Score]
    kept: Sequence[Kept]

    def of(self, trait: str, sign: Sign) -> list[tuple[Response, float | None]]:
        """The answers of a trait under one kind of prompt, with their scores."""
        return [
            (response, score.score)
            for response, score in zip(self.responses, self.scores, strict=True)
            if (response.trait, response.sign) == (trait, sign)
        ]

    def kept_of(self, trait: str, sign: Sign) -> list[Kept]:
        """The kept answers of a trait under one kind of prompt."""
        return [one for one in self.kept if (one.trait, one.sign) == (trait, sign)]


def all_requests(settings: PersonaSettings) -> Iterator[Request]:
    """Every request of a run, in the order of its tables."""
    for trait in settings.resolved():
        questions = trait.questions[: settings.n_questions]
        for sign in SIGNS:
            for prompt, words in enumerate(getattr(trait, sign)[: settings.n_prompts]):
                for question, text in enumerate(questions):
                    for sample in range(settings.n_samples):
                        name = f"{trait.name}/{sign}/{prompt}/{question}/{sample}"
                        seed = seed_of(settings.seed, name)
                        yield Request(name, trait.name, sign, prompt, question, sample, seed, words, text)


def seed_of(seed: int, name: str) -> int:
    """31 bits that depend on the run's seed and the request alone, not on what ran before it."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:4]) >> 1
