"""Log probabilities of fixed texts under a method, with its edits placed as in generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from steercap.core.prompts import templated
from steercap.errors import InvalidSpec, WorkerFailure
from steercap.lab.measures.perplexity import READ
from steercap.lab.studies.evaluation.dosing import over_read
from steercap.lab.studies.evaluation.tasks import Item
from steercap.steering.spec import SteeringSpec

if TYPE_CHECKING:
    from steercap.model import SteerModel

#: The first log probability that vLLM gives is that of the second token.
FIRST_SCORED: Final = 1


class PromptAndText(NamedTuple):
    """Token ids of a prompt and a text to read.

    Args:
        prompt: tokens of the prompt.
        lead: tokens of the beginning of the answer.
        text: tokens of its continuation; scored.
    """

    prompt: list[int]
    lead: list[int]
    text: list[int]

    @property
    def ids(self) -> list[int]:
        """All token ids in order."""
        return [*self.prompt, *self.lead, *self.text]


def parts_of(tokenizer: Any, prompt: Any, item: Item) -> list[PromptAndText]:
    """Tokenize an item: one result for each of its texts, after the prompt, a text or a conversation for the chat
    template.

    Raises:
        InvalidSpec: a text has no token.
    """
    read = tokenizer.encode(prompt) if isinstance(prompt, str) else templated(tokenizer, prompt, {}, spans=False)[0]
    lead = tokenizer.encode(item.lead, add_special_tokens=False) if item.lead else []
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in item.texts]
    if not all(texts) or len(read) + len(lead) < FIRST_SCORED:
        raise InvalidSpec(f"{item!r} has a text without a token, or nothing before it")
    return [PromptAndText(list(read), list(lead), list(text)) for text in texts]


async def logprobs_of(
    model: SteerModel, parts: Sequence[PromptAndText], spec: SteeringSpec | None
) -> list[npt.NDArray[np.float64]]:
    """Return the natural log probability of each token of each text, given all before it: float64 [tokens] each.

    The edits are those of a generation, moved to the corresponding tokens.

    Raises:
        InvalidSpec: an edit cannot apply to a text that is read, see `over_read`; or a LogitBias reaches into it.
        WorkerFailure: vLLM gives no log probabilities.
        The errors of `SteerModel.generate`.
    """
    prompts = [{"prompt_token_ids": one.ids} for one in parts]
    steering = [None if spec is None else over_read(spec, len(one.prompt), len(one.ids)) for one in parts]
    found = await model.run(prompts, READ, steering=steering)
    return [_scored(one, each.output.prompt_logprobs) for one, each in zip(parts, found, strict=True)]


def _scored(parts: PromptAndText, logprobs: Sequence[Any] | None) -> npt.NDArray[np.float64]:
    """Return the log probabilities of the text from vLLM's entry for each token, a mapping that holds the token."""
    ids = parts.ids
    if logprobs is None or len(logprobs) != len(ids):
        got = "none" if logprobs is None else len(logprobs)
        raise WorkerFailure(f"vLLM gave {got} log probabilities for a text of {len(ids)} tokens; expected one each")
    first = len(ids) - len(parts.text)
    return np.array([logprobs[at][ids[at]].logprob for at in range(first, len(ids))], dtype=np.float64)
