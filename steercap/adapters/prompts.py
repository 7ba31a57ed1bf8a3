"""Prompts as vLLM takes them: a text, token ids, or one of its prompt dicts, pictures included.

What it relies on: `parse_model_prompt`, `AsyncLLM.renderer` and `AsyncLLM.model_config`; that a rendered prompt whose
pictures were not taken from the renderer's cache (`skip_mm_cache`) can be sent in any order, or never.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.v1.engine.async_llm import AsyncLLM

from steercap.adapters.media import media_of
from steercap.core.media import MediaSpan
from steercap.core.values import choices, index_of, shown
from steercap.errors import InvalidPrompt

_PROMPT_KEYS: Final = ("prompt", "prompt_token_ids", "cache_salt", "multi_modal_data")
#: What vLLM takes beside pictures, and why it is not taken here.
_REFUSED: Final = {
    "mm_processor_kwargs": "vLLM ignores names that its processor does not know; give it to SteerModel for all prompts",
    "multi_modal_uuids": "vLLM takes pictures of one name for one picture; leave it out, and what they show decides",
}
#: Of vLLM's other kinds of prompt, which it refuses itself, with its reason.
_FOREIGN: Final = ("prompt_embeds",)


@dataclass(frozen=True)
class Rendered:
    """A prompt as the engine takes it.

    Args:
        payload: vLLM's engine input.
        token_ids: the prompt's token ids, with as many tokens for each picture as vLLM makes of it.
        media: where its pictures are.
    """

    payload: Any
    token_ids: tuple[int, ...]
    media: tuple[MediaSpan, ...] = ()


async def render(llm: AsyncLLM, prompt: Any) -> Rendered:
    """Tokenise one prompt: a str, token ids, or one of vLLM's prompt dicts; one that is rendered is as it is.

    Args:
        llm: the engine.
        prompt: the prompt.

    Raises:
        InvalidPrompt: the prompt is empty, malformed, or too long for the context.
    """
    if isinstance(prompt, Rendered):
        return prompt
    if isinstance(prompt, Mapping):
        prompt = prompt_dict(prompt)
    try:
        parsed = parse_model_prompt(llm.model_config, prompt)
        # From its cache, a picture is sent without its pixels: the engine has them if every request before was sent.
        (payload,) = await llm.renderer.render_cmpl_async([parsed], skip_mm_cache=True)
    except Exception as error:  # of any kind: vLLM and tokenizers compare and index before they look at types
        raise InvalidPrompt(f"{shown(prompt)} cannot be a prompt: {error}") from error
    if payload["type"] == "embeds":
        raise InvalidPrompt("a prompt of embeddings has no token ids to label rows with; pass text or token ids")
    ids, longest = tuple(payload["prompt_token_ids"]), llm.model_config.max_model_len
    if not ids:
        raise InvalidPrompt(f"{shown(prompt)} holds no token; a prompt needs at least one")
    if len(ids) >= longest and llm.model_config.runner_type != "pooling":
        raise InvalidPrompt(
            f"{shown(prompt)} has {len(ids)} tokens, but the context holds {longest}, "
            "one generated token at least included; shorten it or start the engine with a larger max_model_len"
        )
    return Rendered(payload, ids, media_of(payload))


def prompt_dict(prompt: Mapping[Any, Any]) -> dict[str, Any]:
    """A prompt dict as vLLM takes it, its token ids plain ints of its own.

    Raises:
        InvalidPrompt: a key that vLLM would ignore or take on trust, or values of other types.
    """
    found = dict(prompt)
    for key, reason in _REFUSED.items():
        if found.get(key) is not None:
            raise InvalidPrompt(f"the prompt dict has {key!r}: {reason}")
    if unknown := [key for key in prompt if key not in _PROMPT_KEYS and key not in _FOREIGN]:
        raise InvalidPrompt(
            f"the prompt dict has {', '.join(map(repr, unknown))}, which would be ignored; "
            f"{choices(unknown[0], _PROMPT_KEYS)}"
        )
    salt = found.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise InvalidPrompt(f"cache_salt={shown(salt)}; give a str")
    if found.get("prompt_token_ids") is not None:
        found["prompt_token_ids"] = token_ids(found["prompt_token_ids"])
    return found


def token_ids(given: Any) -> list[int]:
    """Token ids as plain ints: NumPy's and torch's whole numbers too.

    Raises:
        InvalidPrompt: something else among them, such as a float or a bool.
    """
    array = hasattr(given, "tolist") and getattr(given, "ndim", 0) == 1
    if isinstance(given, (str, bytes)) or not (array or isinstance(given, Sequence)):
        raise InvalidPrompt(f"prompt_token_ids={shown(given)}; give a list of whole numbers")
    ids = [*given]
    if {type(one) for one in ids} <= {int}:
        return ids
    return [_token_id(one, index) for index, one in enumerate(ids)]


def _token_id(one: Any, index: int) -> int:
    found = index_of(one)
    if found is None:
        raise InvalidPrompt(f"prompt_token_ids[{index}] is {shown(one)}; give whole numbers")
    return found


def rendered(payload: Any) -> Rendered:
    """A prompt that vLLM's server has rendered.

    Raises:
        InvalidPrompt: a prompt of embeddings, or none that steercap can label rows of.
    """
    if not isinstance(payload, Mapping) or not payload.get("prompt_token_ids"):
        raise InvalidPrompt("rows of this prompt cannot be labelled: it has no token ids")
    return Rendered(payload, tuple(payload["prompt_token_ids"]), media_of(payload))
