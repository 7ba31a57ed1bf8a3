"""Repair of vLLM's detokenizer, whose generated text can begin with the prompt's text.

tokenizers' `DecodeStream` holds text back while it ends within a character. vLLM starts it with the prompt; if the
prompt itself ends within a character (token ids cut there, or invalid bytes), or with U+FFFD, the whole prompt comes
out as if it had been generated, and stop strings match in it. It relies on `FastIncrementalDetokenizer` and its
`tokenizer`, `stream` and `skip_special_tokens`. It can go when such a prompt stays out of vLLM's texts. `text_of`
relies on `IncrementalDetokenizer`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final

import tokenizers
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, IncrementalDetokenizer

from steercap.adapters.releases import require

_MENDED: Final = "__steercap_mended__"
#: Character that a decoder writes for invalid bytes.
_UNKNOWN: Final = "\N{REPLACEMENT CHARACTER}"
#: Number of tokens checked at a prompt's end: a character has at most four bytes, and a token at least one.
_WINDOW: Final = 8


def patch() -> None:
    """Repair vLLM's detokenizer in this process; a second call does nothing."""
    original = FastIncrementalDetokenizer.__init__
    if hasattr(original, _MENDED):
        return
    require("FastIncrementalDetokenizer", FastIncrementalDetokenizer)
    require("IncrementalDetokenizer", IncrementalDetokenizer)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        request = kwargs["request"] if "request" in kwargs else args[1]
        prompt = request.prompt_token_ids or []
        start = _readable(self, prompt)
        if start < len(prompt):
            self.stream = tokenizers.decoders.DecodeStream(
                ids=prompt[:start], skip_special_tokens=self.skip_special_tokens
            )

    setattr(init, _MENDED, True)
    FastIncrementalDetokenizer.__init__ = init


def text_of(tokenizer: Any, params: SamplingParams, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Return vLLM's text for generated token ids, ignoring stop strings; "" if `params.detokenize` is False."""
    if not params.detokenize or not tokens:
        return ""
    plain = copy.copy(params)
    plain.stop = []
    request: Any = SimpleNamespace(request_id="", sampling_params=plain, prompt_token_ids=[*prompt], prompt_embeds=None)
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    detokenizer.update([*tokens], False)
    text: str = detokenizer.get_next_output_text(finished=True, delta=False)
    return text


def _readable(detokenizer: Any, prompt: Sequence[int]) -> int:
    """Return the number of prompt tokens up to the last whole character; 0 if the last `_WINDOW` tokens end none."""
    for end in range(len(prompt), max(len(prompt) - _WINDOW, 0), -1):
        window = prompt[max(end - _WINDOW, 0) : end]
        text = detokenizer.tokenizer.decode(window, skip_special_tokens=detokenizer.skip_special_tokens)
        if not text.endswith(_UNKNOWN):
            return end
    return 0
