"""Requests and outcomes of a run over roles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from steercap.errors import InvalidSetting
from steercap.lab.personas.records import RoleRequest, RoleResponse, seed_of
from steercap.lab.personas.roles.role import ASSISTANT
from steercap.lab.personas.roles.settings import RoleSettings


class RoleOutcome(msgspec.Struct, frozen=True):
    """Outcome of a role, in numbers.

    Args:
        responses: number of answers.
        kept: number of answers used.
        unscored: number of answers that the scorer could not score.
        mean_score: mean over the answers with a score, 0 to 100; None if there is none, as without a scorer.
        left_out: reason why it has no vector, "" if it has one.
    """

    responses: int
    kept: int
    unscored: int
    mean_score: float | None
    left_out: str = ""


def requests_of(settings: RoleSettings, name: str) -> Iterator[RoleRequest]:
    """Yield every request of a role, or of the assistant, in the order of its table."""
    prompts = settings.roles.prompts_of(name)[: settings.n_prompts]
    for prompt, words in enumerate(prompts):
        for question, text in enumerate(settings.roles.questions[: settings.n_questions]):
            for sample in range(settings.n_samples):
                key = f"{name}/{prompt}/{question}/{sample}"
                yield RoleRequest(key, name, prompt, question, sample, seed_of(settings.seed, key), words, text)


def share_of(settings: RoleSettings, shard: tuple[int, int]) -> tuple[str, ...]:
    """Return the roles of one of several processes, the assistant counted among them.

    Args:
        settings: settings of the run.
        shard: (index of the share, number of shares), from 0. Together the shares hold each role once.

    Raises:
        InvalidSetting: there is no such share.
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
    """Return the outcome of a role.

    Args:
        responses: all answers of the role.
        scores: their scores, in the same order; None if nothing was scored.
        kept: number of answers used.
        left_out: reason why it has no vector, or "".
    """
    known = [score for score in scores or () if score is not None]
    mean = math.fsum(known) / len(known) if known else None
    unscored = len(responses) - len(known) if scores is not None else 0
    return RoleOutcome(len(responses), kept, unscored, mean, left_out)
