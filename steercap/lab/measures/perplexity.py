"""Perplexity of answers under the model without steering."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from steercap.errors import WorkerFailure
from steercap.lab.measures import Answered, Measure

if TYPE_CHECKING:
    from steercap.model import SteerModel

#: Log probability of each prompt token alone; one token must be generated, and is ignored.
READ: Final = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}


@dataclass(frozen=True)
class Perplexity(Measure):
    """Perplexity of an answer under the model without steering: exp of the mean negative log-likelihood, 1 or more.

    Each token is predicted from the prompt and the answer before it (teacher forcing); the token that ended the answer
    counts. NaN of an answer without tokens. Where prompt and answer fill the context, the last token is left
    out: vLLM reads no sequence that leaves no room to go on.
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
    """Return the log probabilities of a prompt's tokens, each by token id, {} for the first.

    `output` is vLLM's RequestOutput, or OpenAI's Completion from a server.
    """
    if hasattr(output, "choices"):
        found = output.choices[0].prompt_logprobs
        return found and [{int(token): said["logprob"] for token, said in (one or {}).items()} for one in found]
    found = output.prompt_logprobs
    return found and [{token: said.logprob for token, said in (one or {}).items()} for one in found]


def _perplexity(ids: Sequence[int], prompt_len: int, logprobs: Sequence[Mapping[int, float]] | None) -> float:
    """Compute it from the prompt's log probabilities: an entry for each token, empty for the first.

    An entry maps token ids to log probabilities; it holds the token itself, and may hold likelier ones.
    """
    if logprobs is None or len(logprobs) != len(ids):
        got = "none" if logprobs is None else len(logprobs)
        raise WorkerFailure(f"vLLM gave {got} log probabilities for a prompt of {len(ids)} tokens; expected one each")
    answer = range(prompt_len, len(ids))
    if not answer:
        return math.nan
    return math.exp(-sum(logprobs[at][ids[at]] for at in answer) / len(answer))


MEMBER = Perplexity
