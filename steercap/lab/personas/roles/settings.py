"""Settings of a run over roles; the requests, outcomes, and shares of several processes, that follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from steercap.core.values import shown
from steercap.errors import InvalidSetting
from steercap.lab.measures.scores import make_scorer
from steercap.lab.measures.statistics import clusters_of
from steercap.lab.personas.records import RoleRequest, RoleResponse, seed_of
from steercap.lab.personas.roles.role import ASSISTANT, RoleSet, drift_prompts, trait_of
from steercap.lab.personas.settings import STORED, check_fields, digest_of

#: Names of the settings that each stage of a role depends on, besides those of the stages before it.
_DEPENDS: Final[Mapping[str, tuple[str, ...]]] = {
    "generate": ("seed", "n_samples", "max_tokens", "temperature", "top_p"),
    "score": ("scorer", "scorer_args"),
    "read": ("threshold", "min_kept", "layers", "site", "read_system", "read_together"),
}
_SIZES: Final = ("samples", "n_questions", "n_prompts", "max_tokens", "concurrency", "min_kept", "read_together")
_LEAST: Final = {**dict.fromkeys(_SIZES, 1), "n_questions": 2}


class RoleSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename=STORED):
    """Settings of a run over roles, see `run_roles`. The default sizes are those of Lu et al., The Assistant Axis.

    Args:
        roles: roles, their questions and the assistant's prompts.
        seed: seed of all draws.
        samples: number of answers to each question under each system prompt; 1 at temperature 0.
        n_questions, n_prompts: number of questions and of each role's system prompts to use, from the first; None takes
            all.
        max_tokens: maximum tokens of an answer.
        temperature, top_p: sampling parameters.
        concurrency: maximum concurrent requests.
        scorer: name in `steercap.lab.measures.scores.SCORERS` of the scorer of role play; None uses all answers.
        scorer_args: arguments of the scorer; no API keys, since they are written to the run folder.
        threshold: minimum score, 0 to 100, of an answer that is used. The assistant's answers are not scored.
        min_kept: minimum number of used answers; a role with fewer is left out.
        layers, site: layers and site of the captured rows; layers are "all", an index or several.
        read_system: True to put the system prompt before an answer when it is read to capture rows.
        read_together: number of answers read in one batch. With 1, on a CPU, a row is the same to the last bit whatever
            the other answers; in a batch it depends on them by rounding.

    Raises:
        InvalidSetting, UnknownName: a value is not valid.
    """

    roles: RoleSet
    seed: int = 0
    samples: int = 1
    n_questions: int | None = None
    n_prompts: int | None = None
    max_tokens: int = 512
    temperature: float = 0.7
    top_p: float = 0.9
    concurrency: int = 256
    scorer: str | None = None
    scorer_args: dict[str, Any] = {}
    threshold: float = 50.0
    min_kept: int = 10
    layers: int | tuple[int, ...] | Literal["all"] = "all"
    site: str = "resid_post"
    read_system: bool = True
    read_together: int = 64

    def __post_init__(self) -> None:
        if not isinstance(self.roles, RoleSet):
            raise InvalidSetting(f"roles={shown(self.roles)}; give a RoleSet, such as of load_roles(path)")
        names = ("site",) if self.scorer is None else ("scorer", "site")
        check_fields(self, _LEAST, ("temperature", "top_p", "threshold"), ("read_system",), names)
        if self.scorer is not None:
            make_scorer(self.scorer, self.scorer_args)
            for role in self.roles.roles:
                trait_of(role, self.roles, self.scorer)
        self._check_sizes()

    def _check_sizes(self) -> None:
        """Check that at least `min_kept` answers of every role, and the assistant, are requested."""
        for name in (ASSISTANT, *self.roles.names):
            if (asked := self.answers_of(name)) < self.min_kept:
                raise InvalidSetting(
                    f"min_kept={self.min_kept}, but {name} is asked for {asked} answers; ask more or lower min_kept"
                )

    def answers_of(self, name: str) -> int:
        """Return the number of answers requested of the role of this name, or of the "assistant"."""
        prompts = len(self.roles.prompts_of(name)[: self.n_prompts])
        return len(self.roles.questions[: self.n_questions]) * prompts * self.samples

    @classmethod
    def small(cls, roles: RoleSet, **changes: Any) -> RoleSettings:
        """Return settings for a small model on a CPU: a run of minutes, resumed bit-identically if interrupted.

        They are one answer to each of eight questions under each of two prompts, 32 tokens long, read one by one.

        Args:
            roles: the roles.
            changes: settings by name, in place of these or the defaults.
        """
        sizes = {"n_questions": 8, "n_prompts": 2, "max_tokens": 32, "concurrency": 64, "read_together": 1}
        return cls(roles=roles, **{**sizes, **changes})


def described(settings: RoleSettings) -> dict[str, Any]:
    """Return the settings as JSON-compatible values, with roles as a mapping by name."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(settings))
    roles = {role["name"]: role for role in plain["roles"]["roles"]}
    return {**plain, "roles": {**plain["roles"], "roles": roles}}


def settings_from(plain: Mapping[str, Any], names: tuple[str, ...]) -> RoleSettings:
    """Return settings from `plain`, a return value of `described`, with only the roles of these names, in their order.

    Raises:
        msgspec.ValidationError, LookupError: a value is missing or not valid.
    """
    roles = {**plain["roles"], "roles": [plain["roles"]["roles"][name] for name in names]}
    return msgspec.convert({**plain, "roles": roles}, RoleSettings)


def generation_of(plain: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the settings, from those of `described`, that the answers of the role or the assistant depend on."""
    roles = plain["roles"]
    prompts = roles["assistant"] if name == ASSISTANT else roles["roles"][name]["prompts"]
    common = {field: plain[field] for field in _DEPENDS["generate"]}
    asked = roles["questions"][: plain["n_questions"]]
    return {**common, "questions": asked, "prompts": prompts[: plain["n_prompts"]]}


def digests_of(plain: Mapping[str, Any], model: Mapping[str, str], name: str) -> dict[str, str]:
    """Return the SHA-256 of the inputs of each stage of a role, by stage, in order; other roles do not matter.

    `plain` is the settings as `described` returns them, `model` the identity of the model, `name` that of the role.
    """
    generate = digest_of([dict(model), generation_of(plain, name)])
    role = plain["roles"]["roles"].get(name)
    said = None if role is None or plain["scorer"] is None else [role, plain["roles"]["plain"]]
    score = digest_of([generate, said, [plain[field] for field in _DEPENDS["score"]]])
    read = digest_of([score, [plain[field] for field in _DEPENDS["read"]]])
    return {"generate": generate, "score": score, "read": read}


class RoleOutcome(msgspec.Struct, frozen=True):
    """Outcome of a role: counts of its answers, and their mean score.

    Args:
        responses: number of answers.
        kept: number of answers used.
        unscored: number of answers that the scorer could not score.
        mean_score: mean over the answers with a score, 0 to 100; None if there is none, as without a scorer.
        left_out: reason why the role has no vector, "" if it has one.
        tokens: number of tokens of the used answers for which the model's context has room; None if the folder was
            written by an older version.
    """

    responses: int
    kept: int
    unscored: int
    mean_score: float | None
    left_out: str = ""
    tokens: int | None = None


def requests_of(settings: RoleSettings, name: str) -> Iterator[RoleRequest]:
    """Yield every request of the role of this name, or of the "assistant", in the order of its table of answers."""
    prompts = settings.roles.prompts_of(name)[: settings.n_prompts]
    for prompt, words in enumerate(prompts):
        for question, text in enumerate(settings.roles.questions[: settings.n_questions]):
            for sample in range(settings.samples):
                key = f"{name}/{prompt}/{question}/{sample}"
                yield RoleRequest(key, name, prompt, question, sample, seed_of(settings.seed, key), words, text)


def share_of(settings: RoleSettings, shard: tuple[int, int]) -> tuple[str, ...]:
    """Return the names of the roles, or the assistant, that one of several processes is to run.

    `shard` is (index of the share, from 0, number of shares). Each role is in exactly one share.

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
    responses: Sequence[RoleResponse], scores: Sequence[float | None] | None, kept: int, left_out: str, tokens: int
) -> RoleOutcome:
    """Return the outcome of a role.

    Args:
        responses: all answers of the role.
        scores: their scores, in the same order; None if nothing was scored.
        kept: number of answers used.
        left_out: reason why the role has no vector, or "".
        tokens: number of their tokens with room.
    """
    known = [score for score in scores or () if score is not None]
    mean = math.fsum(known) / len(known) if known else None
    unscored = len(responses) - len(known) if scores is not None else 0
    return RoleOutcome(len(responses), kept, unscored, mean, left_out, tokens)


class Case(msgspec.Struct, frozen=True):
    """Request whose answers are compared across steering conditions.

    Args:
        kind: "role", or "drift" for a request without a role.
        role: name of the role, "" for none.
        question: index of the question; answers to one question are resampled together for intervals.
        seed: sampling seed, the same under every condition.
        system_prompt: system prompt, "" for none.
        text: text of the question.
    """

    kind: str
    role: str
    question: int
    seed: int
    system_prompt: str
    text: str


def cases_of(settings: RoleSettings) -> list[Case]:
    """Return a case for each request of each role of a run, without the assistant.

    Args:
        settings: settings of the run, or others with different questions and prompts.
    """
    return [
        Case("role", one.role, one.question, one.seed, one.system_prompt, one.question_text)
        for name in settings.roles.names
        for one in requests_of(settings, name)
    ]


def drift_cases(prompts: Sequence[str] | None = None, *, samples: int = 1, seed: int = 0) -> list[Case]:
    """Return cases without a role, with prompts that may make an assistant leave its default character.

    Args:
        prompts: texts of the user; those that come with steercap by default.
        samples: number of cases for each prompt, with different seeds.
        seed: seed from which sampling seeds are derived.
    """
    texts = drift_prompts() if prompts is None else prompts
    return [
        Case("drift", "", cluster, seed_of(seed, f"drift/{place}/{sample}"), "", text)
        for place, (cluster, text) in enumerate(zip(clusters_of(texts), texts, strict=True))
        for sample in range(samples)
    ]
