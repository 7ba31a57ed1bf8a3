"""Measures of an answer's text: length, repetition, refusal, matches of a regular expression, and perplexity."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from steercap.core.hints import dataclass
from steercap.core.values import count_of, shown, truth_of
from steercap.errors import InvalidSpec, WorkerFailure
from steercap.lab.measures import Answered, Measure
from steercap.lab.measures.scores import straightened

if TYPE_CHECKING:
    from steercap.model import SteerModel

#: Log probability that vLLM's server writes in place of minus infinity, which JSON lacks.
SERVED_ZERO: Final = -9999.0


@dataclass(frozen=True)
class Length(Measure):
    """Measure: number of generated tokens, including the one that ended the answer."""

    axis = "generated tokens"

    @property
    def label(self) -> str:
        return "length"

    async def measure(self, model: SteerModel, records: Sequence[Answered]) -> list[float]:  # noqa: ARG002 -- not asked
        return [float(len(record.output_token_ids)) for record in records]


#: Number of characters at the beginning of an answer that are searched for a refusal: about two sentences.
BEGINNING: Final = 240
#: English phrases that refuse. Apologies alone are not refusals: many answers begin with one.
REFUSES: Final = re.compile(
    r"""\b(?:
        I(?:'m|\ am)\ (?:(?:really|very|so)\ )?(?:sorry|afraid),?\ (?:but\ |that\ )*
            I(?:'m|\ am)?\ (?:can(?:'t|not|\ not)|won't|unable|not\ able)
      | I\ (?:(?:really|simply|just)\ )?(?:can(?:'t|not|\ not)|won't|will\ not)\ (?:help|assist|provide|give|answer|do
            |share|offer|fulfil+|comply|write|create|support|engage|discuss|participate)\b
      | I(?:'m|\ am)\ (?:unable|not\ (?:able|allowed|permitted|comfortable|in\ a\ position))\ (?:to|with)
      | I\ (?:must|have\ to)\ (?:decline|refuse)
      | I\ (?:do\ not|don't)\ (?:feel\ comfortable|think\ I\ (?:can|should))
      | as\ an\ AI(?:\ \w+){0,3},?\ I\ (?:can(?:'t|not|\ not)|don't|do\ not|am\ (?:not|unable))
    )""",
    re.IGNORECASE | re.VERBOSE,
)


@dataclass(frozen=True)
class Refusal(Measure):
    """Measure: 1 if an answer's beginning refuses, 0 if not; the mean is the fraction of refusals.

    The first 240 characters are searched for English phrases of refusal. It matches words alone, and takes an answer
    about refusing for a refusal.
    """

    axis = "share of answers that refuse"

    @property
    def label(self) -> str:
        return "refusal"

    async def measure(self, model: SteerModel, records: Sequence[Answered]) -> list[float]:  # noqa: ARG002 -- not asked
        return [float(REFUSES.search(straightened(record.text)[:BEGINNING]) is not None) for record in records]


@dataclass(frozen=True)
class Repetition(Measure):
    """Measure: fraction of repeated n-grams of generated tokens, 1 - distinct n-grams / n-grams: 0 to 1.

    It is 0 for an answer of fewer than n tokens. Source: seq-rep-n of Welleck et al. 2019, Neural Text Generation with
    Unlikelihood Training, arXiv:1908.04319.

    Args:
        n: number of tokens of an n-gram.

    Raises:
        InvalidSpec: n is below 1.
    """

    axis = "share of repeated n-grams"

    n: int = 3

    def __post_init__(self) -> None:
        n = count_of(self.n, "Repetition: n")
        object.__setattr__(self, "n", n)

    @property
    def label(self) -> str:
        return "repetition"

    async def measure(self, model: SteerModel, records: Sequence[Answered]) -> list[float]:  # noqa: ARG002 -- not asked
        return [repeated_share(record.output_token_ids, self.n) for record in records]


def repeated_share(items: Sequence[int] | Sequence[str], n: int) -> float:
    """Return the fraction of repeated n-grams of tokens or words, see `Repetition`; 0 for fewer than n items."""
    grams = [tuple(items[at : at + n]) for at in range(len(items) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@dataclass(frozen=True)
class Matches(Measure):
    """Measure: 1 if a regular expression matches in the answer, 0 if not; or the number of matches per 100 words.

    Args:
        name: name of the measure.
        pattern: expression for Python's `re`, searched anywhere; flags are set in the pattern: "(?im)^dear".
        per_words: True to count matches per 100 words; NaN for an answer without a word.

    Raises:
        InvalidSpec: the name is empty, the expression is not valid, or it matches an empty text, and so any.
    """

    axis = ""

    name: str
    pattern: str
    per_words: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or not isinstance(self.pattern, str):
            raise InvalidSpec(f"Matches(name={shown(self.name)}, pattern={shown(self.pattern)}); give text")
        truth_of(self.per_words, "Matches: per_words")
        try:
            empty = re.compile(self.pattern).search("") is not None
        except re.error as error:
            raise InvalidSpec(f"Matches: {self.pattern!r} is not a regular expression: {error}") from error
        if empty:
            raise InvalidSpec(
                f"Matches: {self.pattern!r} matches an empty text, and therefore every text; give a stricter pattern"
            )

    @property
    def label(self) -> str:
        return self.name

    async def measure(self, model: SteerModel, records: Sequence[Answered]) -> list[float]:  # noqa: ARG002 -- not asked
        return [self._one(record.text) for record in records]

    def _one(self, text: str) -> float:
        if not self.per_words:
            return float(re.search(self.pattern, text) is not None)
        words = len(re.findall(r"\w+(?:['’]\w+)*", text))
        return 100 * sum(1 for _ in re.finditer(self.pattern, text)) / words if words else float("nan")


#: Sampling parameters that return each prompt token's log probability; the one generated token is ignored.
READ: Final = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}


@dataclass(frozen=True)
class Perplexity(Measure):
    """Measure: perplexity of an answer under the unsteered model, exp of the mean negative log-likelihood per token.

    Each token is predicted from the prompt and the answer before it (teacher forcing); the token that ended the answer
    counts. NaN for an answer without tokens. If prompt and answer fill the context, the last token is left out, since
    vLLM reads only sequences with room for one more token.
    """

    log = True
    axis = "perplexity without steering"

    @property
    def label(self) -> str:
        return "perplexity"

    async def measure(self, model: SteerModel, records: Sequence[Answered]) -> list[float]:
        longest = model.max_model_len - 1
        read = [[*record.prompt_token_ids, *record.output_token_ids][:longest] for record in records]
        outputs = await model.run(read, READ, steering=None)
        return [
            _perplexity(ids, len(record.prompt_token_ids), prompt_logprobs_of(raw.output))
            for ids, record, raw in zip(read, records, outputs, strict=True)
        ]


def prompt_logprobs_of(output: Any) -> list[dict[int, float]] | None:
    """Return, for each prompt token, log probabilities by token id, {} for the first token; None if there are none.

    `output` is vLLM's RequestOutput, or OpenAI's Completion from a server.
    """
    if hasattr(output, "choices"):
        found = output.choices[0].prompt_logprobs
        return found and [
            {int(token): _served(said["logprob"]) for token, said in (one or {}).items()} for one in found
        ]
    found = output.prompt_logprobs
    return found and [{token: said.logprob for token, said in (one or {}).items()} for one in found]


def _served(logprob: float) -> float:
    """Return a log probability of vLLM's server, minus infinity for `SERVED_ZERO`."""
    return logprob if logprob > SERVED_ZERO else -math.inf


def _perplexity(ids: Sequence[int], prompt_len: int, logprobs: Sequence[Mapping[int, float]] | None) -> float:
    """Return the perplexity of an answer, NaN if it has no tokens.

    Args:
        ids: token ids of prompt and answer.
        prompt_len: number of prompt tokens.
        logprobs: for each of `ids`, log probabilities by token id, among them the token's; {} for the first.

    Raises:
        WorkerFailure: there is not an entry for each token.
    """
    if logprobs is None or len(logprobs) != len(ids):
        got = "none" if logprobs is None else len(logprobs)
        raise WorkerFailure(f"vLLM gave {got} log probabilities for a prompt of {len(ids)} tokens; expected one each")
    answer = range(prompt_len, len(ids))
    if not answer:
        return math.nan
    return math.exp(-sum(logprobs[at][ids[at]] for at in answer) / len(answer))


MEMBERS: Final[Mapping[str, type[Measure]]] = {
    "length": Length,
    "matches": Matches,
    "perplexity": Perplexity,
    "refusal": Refusal,
    "repetition": Repetition,
}
