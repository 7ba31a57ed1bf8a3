"""Metrics of patching: one number computed from the engine's output of each run."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from steercap.core.hints import dataclass
from steercap.core.values import index_of, shown
from steercap.errors import EngineFailure, InvalidSpec

#: One token of the vocabulary: its id, or a text that is just this token, such as " Mary".
Token: TypeAlias = str | int


class MetricRequest(NamedTuple):
    """Sampling parameters of one pair's runs, and the function that computes the metric of each.

    Args:
        sampling_params: vLLM sampling parameters.
        read: function that returns the metric of a run from vLLM's RequestOutput.
    """

    sampling_params: Mapping[str, Any]
    read: Callable[[Any], float]


class Metric(ABC):
    """Number computed from a run, by which clean, corrupted and patched runs are compared."""

    @abstractmethod
    def asked(self, tokenizer: Any, pairs: int) -> list[MetricRequest]:
        """Return the sampling parameters, and the function for the metric, of each pair of prompts, in order.

        Args:
            tokenizer: tokenizer of the model.
            pairs: number of pairs.

        Raises:
            InvalidSpec: the metric has answers for another number of pairs, or one is not a single token.
        """


@dataclass(frozen=True)
class LogitDifference(Metric):
    """Logit of the right token minus that of the wrong one, right after the prompt.

    It equals the difference of their log probabilities, in nats.

    Args:
        answers: (right, wrong) for each pair, or one such tuple for all; token ids, or texts of one token, " Mary".
    """

    answers: tuple[Token, Token] | Sequence[tuple[Token, Token]]

    def asked(self, tokenizer: Any, pairs: int) -> list[MetricRequest]:
        found = []
        for answer in _each(
            self.answers, pairs, "LogitDifference: answers", "(right, wrong)", is_valid=_is_tuple_of_tokens
        ):
            if not _is_tuple_of_tokens(answer):
                raise InvalidSpec(f"LogitDifference: answers hold {shown(answer)}; give (right, wrong), a token each")
            right, wrong = (token_id(tokenizer, token) for token in answer)
            if right == wrong:
                raise InvalidSpec(f"LogitDifference: {shown(answer)} are the same token, so they never differ")
            found.append(MetricRequest(_after_prompt(right, wrong), partial(_difference, right, wrong)))
        return found


@dataclass(frozen=True)
class LogProbability(Metric):
    """Log probability of a token right after the prompt, in nats.

    Args:
        answers: token for each pair, or one for all; token ids, or texts of one token.
    """

    answers: Token | Sequence[Token]

    def asked(self, tokenizer: Any, pairs: int) -> list[MetricRequest]:
        ids = [
            token_id(tokenizer, one)
            for one in _each(self.answers, pairs, "LogProbability: answers", "token", is_valid=_is_token)
        ]
        return [MetricRequest(_after_prompt(one), partial(_log_probability, one)) for one in ids]


@dataclass(frozen=True)
class Measured(Metric):
    """Metric computed by a function of vLLM's output.

    Args:
        function: function called with vLLM's RequestOutput and the index of the pair; returns a float.
        sampling_params: sampling parameters of every run: `{"max_tokens": 1, "logprobs": 20, "temperature": 0}`, for
            one sample.
    """

    function: Callable[[Any, int], float]
    sampling_params: Mapping[str, Any]

    def asked(self, tokenizer: Any, pairs: int) -> list[MetricRequest]:  # noqa: ARG002 -- of the contract
        if isinstance(self.sampling_params, Mapping) and self.sampling_params.get("n", 1) != 1:
            raise InvalidSpec(
                f"Measured: sampling_params={shown(self.sampling_params)}; a run has one sample, so leave n= out"
            )
        return [MetricRequest(self.sampling_params, partial(self._read, pair)) for pair in range(pairs)]

    def _read(self, pair: int, output: Any) -> float:
        return float(self.function(output, pair))


def token_id(tokenizer: Any, token: Token) -> int:
    """Return the id of one token.

    Raises:
        InvalidSpec: the text is not exactly one token, or the value is not a token.
    """
    if isinstance(token, str):
        ids = list(tokenizer.encode(token, add_special_tokens=False))
        if len(ids) != 1:
            parts = [tokenizer.decode([part]) for part in ids]
            raise InvalidSpec(
                f"{token!r} is {len(ids)} tokens, {parts}; give a text of one token (mind the space before a word), "
                "or a token id"
            )
        return int(ids[0])
    index = index_of(token)
    if index is None or not 0 <= index < len(tokenizer):
        raise InvalidSpec(f"{shown(token)} is not a token; give a text of one token, or an id below {len(tokenizer)}")
    return index


def _each(given: Any, pairs: int, argument: str, one: str, *, is_valid: Callable[[Any], bool]) -> list[Any]:
    """Return one value, `one` in messages, for each pair: a list, or one value, recognised by `is_valid`, repeated."""
    if is_valid(given):
        return [given] * pairs
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence) or len(given) != pairs:
        raise InvalidSpec(f"{argument}={shown(given)} for {pairs} pairs; give one {one} for all, or a list of {pairs}")
    return list(given)


def _is_token(given: Any) -> bool:
    return isinstance(given, str) or index_of(given) is not None


def _is_tuple_of_tokens(given: Any) -> bool:
    return isinstance(given, (tuple, list)) and len(given) == 2 and all(map(_is_token, given))


def _after_prompt(*tokens: int) -> dict[str, Any]:
    """Return sampling parameters that request the log probabilities of tokens, by id, right after the prompt."""
    return {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "logprob_token_ids": list(tokens)}


def _difference(right: int, wrong: int, output: Any) -> float:
    return _log_probability(right, output) - _log_probability(wrong, output)


def _log_probability(token: int, output: Any) -> float:
    (sample,) = output.outputs
    given = sample.logprobs[0] if sample.logprobs else {}
    found = given[token].logprob if token in given else math.nan
    if not math.isfinite(found):
        raise EngineFailure(
            f"vLLM gave {found} as the log probability of token {token}, which it was asked for by logprob_token_ids; "
            "use Measured(...) with sampling parameters that it answers"
        )
    return found
