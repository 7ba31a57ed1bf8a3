"""What a run over roles writes down: what is asked, and what was answered."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from steercap.errors import InvalidSetting
from steercap.lab.personas.records import seed_of
from steercap.lab.personas.roles.role import ASSISTANT
from steercap.lab.personas.roles.settings import RoleSettings


class RoleRequest(msgspec.Struct, frozen=True):
    """One request.

    Args:
        id: "role/prompt/question/sample", unique in a run.
        role: its name, or "assistant".
        prompt: place of the system prompt.
        question: place of the question.
        sample: which of several answers.
        seed: of sampling, from the run's seed and the id.
        system_prompt, question_text: in words; no system prompt is "".
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
    """A request and its answer.

    Args:
        answer: the text.
        token_ids: what was generated, special tokens at the end left out.
        finish: why it ended: "stop" or "length".
    """

    answer: str
    token_ids: tuple[int, ...]
    finish: str


class RoleOutcome(msgspec.Struct, frozen=True):
    """What became of a role.

    Args:
        responses: how many answers there are.
        kept: how many are used.
        unscored: how many the scorer could say nothing of.
        mean_score: of those that have a score, 0 to 100; None where none has, as without a scorer.
        left_out: why it has no vector, "" where it has one.
    """

    responses: int
    kept: int
    unscored: int
    mean_score: float | None
    left_out: str = ""


def requests_of(settings: RoleSettings, name: str) -> Iterator[RoleRequest]:
    """Every request of a role, or of the assistant, in the order of its table."""
    prompts = settings.roles.prompts_of(name)[: settings.n_prompts]
    for prompt, words in enumerate(prompts):
        for question, text in enumerate(settings.roles.questions[: settings.n_questions]):
            for sample in range(settings.n_samples):
                key = f"{name}/{prompt}/{question}/{sample}"
                yield RoleRequest(key, name, prompt, question, sample, seed_of(settings.seed, key), words, text)


def share_of(settings: RoleSettings, shard: tuple[int, int]) -> tuple[str, ...]:
    """The roles that one of several processes takes, the assistant counted among them.

    Args:
        settings: of the run.
        shard: (which, of how many), from 0. The shares of all hold each role once.

    Raises:
        InvalidSetting: no such share.
    """
    which, count = shard
    names = (ASSISTANT, *settings.roles.names)
    if count < 1 or not 0 <= which < count:
        raise InvalidSetting(f"shard={which}/{count}; give 0/n to n-1/n")
    if count > len(names):
        raise InvalidSetting(f"shard={which}/{count}, but there are {len(names)} roles, the assistant included")
    return names[which::count]


def outcome_of(
    responses: Sequence[RoleResponse], scores: Sequence[float | None] | None, kept: int, left_out: str
) -> RoleOutcome:
    """A role in numbers.

    Args:
        responses: all of its answers.
        scores: of them, in their order; None where nothing was scored.
        kept: how many are used.
        left_out: why it has no vector.
    """
    known = [score for score in scores or () if score is not None]
    mean = math.fsum(known) / len(known) if known else None
    unscored = len(responses) - len(known) if scores is not None else 0
    return RoleOutcome(len(responses), kept, unscored, mean, left_out)
