"""Rendering of prompts for vLLM: a text, token ids, or one of vLLM's prompt dicts, with media.

It relies on `parse_model_prompt`, `AsyncLLM.renderer`, its `default_cmpl_tok_params` and `AsyncLLM.model_config`; and
on this: prompts rendered without the renderer's cache of media (`skip_mm_cache`) can be sent in any order, or not at
all.

Media spans come from vLLM's placeholders. It relies on this: a rendered prompt of type "multimodal" has
`mm_placeholders`, a list of `PlaceholderRange` by kind of media, and likewise `mm_hashes`. A range's `is_embed`,
if there is one, marks the tokens whose embedding is replaced; vLLM's scheduler and its runners use the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.v1.engine.async_llm import AsyncLLM

from steercap.core.chat import MediaSpan
from steercap.core.prompts import ids_of_prompt, no_room, no_token, require_salt, tokens_of
from steercap.core.values import Mask, choices, shown
from steercap.errors import InvalidPrompt

_PROMPT_KEYS: Final = ("prompt", "prompt_token_ids", "cache_salt", "multi_modal_data")
#: Keys of vLLM's prompt dicts that are refused here, with the reason.
_REFUSED: Final = {
    "mm_processor_kwargs": "vLLM ignores names that its processor does not know; give it to SteerModel for all prompts",
    "multi_modal_uuids": (
        "vLLM takes images with the same name for the same image; leave it out, and vLLM compares their content"
    ),
}
#: Keys of vLLM's prompt dicts that are passed on, since vLLM refuses them with its own error.
_FOREIGN: Final = ("prompt_embeds",)


@dataclass(frozen=True)
class Rendered:
    """A tokenised prompt, ready to be sent to the engine.

    Args:
        payload: vLLM's engine input.
        token_ids: the prompt's token ids, including placeholder tokens of media.
        media: spans of its images, sounds and videos.
    """

    payload: Any
    token_ids: tuple[int, ...]
    media: tuple[MediaSpan, ...] = ()


async def render(llm: AsyncLLM, prompt: Any, unserved: Sequence[str] = ()) -> Rendered:
    """Tokenise one prompt: a str, token ids, or one of vLLM's prompt dicts; a `Rendered` is returned unchanged.

    Args:
        llm: the engine.
        prompt: the prompt.
        unserved: kinds of media that need torchvision, which is absent.

    Raises:
        InvalidPrompt: the prompt is empty, malformed, too long for the context, of embeddings, or has unserved media.
    """
    if isinstance(prompt, Rendered):
        return prompt
    if isinstance(prompt, Mapping):
        prompt = prompt_dict(prompt)
        if refused := [kind for kind in unserved if kind in (prompt.get("multi_modal_data") or {})]:
            raise InvalidPrompt(
                f"the prompt dict has multi_modal_data of kind {refused[0]!r}, which this model prepares with "
                "torchvision, and that is not installed here; give text alone"
            )
    try:
        parsed = parse_model_prompt(llm.model_config, prompt)
        # A cached picture is sent without its pixels; the engine has them only if all earlier requests were sent.
        if "prompt_token_ids" in parsed and not llm.model_config.is_multimodal_model:  # nothing takes long
            (payload,) = llm.renderer.render_cmpl([parsed], skip_mm_cache=True)
        else:
            (payload,) = await llm.renderer.render_cmpl_async([parsed], skip_mm_cache=True)
    except Exception as error:  # of any kind: vLLM and tokenizers compare and index before they look at types
        raise InvalidPrompt(f"{shown(prompt)} cannot be a prompt: {error}") from error
    if payload["type"] == "embeds":
        raise InvalidPrompt("a prompt of embeddings has no token ids to label rows with; pass text or token ids")
    ids, longest = tuple(payload["prompt_token_ids"]), llm.model_config.max_model_len
    if not ids:
        raise no_token(prompt)
    if len(ids) >= longest and llm.model_config.runner_type != "pooling":
        raise no_room(prompt, len(ids), longest)
    return Rendered(payload, ids, media_of(payload))


def text_ids(llm: AsyncLLM, text: str, special: bool | None) -> list[int]:
    """Tokenise a text as vLLM does before it runs it: in lower case, where the model reads nothing else.

    Args:
        llm: the engine.
        text: the text.
        special: True to add the tokenizer's special tokens; None for vLLM's default, which is False for some models
            that also read pictures, such as Gemma 4 with a chat template.

    Raises:
        InvalidPrompt: the text contains half of a surrogate pair.
    """
    how = llm.renderer.default_cmpl_tok_params
    special = how.add_special_tokens if special is None else special
    return tokens_of(llm.renderer.get_tokenizer(), text.lower() if how.do_lower_case else text, special=special)


def prompt_dict(prompt: Mapping[Any, Any]) -> dict[str, Any]:
    """Check the keys and values of a prompt dict, and return a copy with token ids as a list of plain ints.

    Raises:
        InvalidPrompt: a key is unknown or refused, or a value has the wrong type.
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
    require_salt(found.get("cache_salt"))
    if found.get("prompt_token_ids") is not None:
        found["prompt_token_ids"] = ids_of_prompt(found["prompt_token_ids"])
    return found


def rendered(payload: Any) -> Rendered:
    """Wrap a prompt that vLLM's server has tokenised, with its token ids and media spans.

    Args:
        payload: vLLM's engine input.

    Raises:
        InvalidPrompt: it is a prompt of embeddings, or has no token ids, so that its rows cannot be labelled.
    """
    if not isinstance(payload, Mapping) or payload.get("type") == "embeds" or not payload.get("prompt_token_ids"):
        raise InvalidPrompt(
            "rows of this prompt cannot be labelled: it has no token ids, or embeddings in place of some of them"
        )
    return Rendered(payload, tuple(payload["prompt_token_ids"]), media_of(payload))


def media_of(payload: Mapping[str, Any]) -> tuple[MediaSpan, ...]:
    """Return the media spans of a rendered prompt, by position ascending.

    Args:
        payload: vLLM's engine input.
    """
    if payload["type"] != "multimodal":
        return ()
    found = [
        MediaSpan(kind, index, one.offset + start, one.offset + stop, digest)
        for kind, ranges in payload["mm_placeholders"].items()
        for index, (one, digest) in enumerate(zip(ranges, payload["mm_hashes"][kind], strict=True))
        for start, stop in _runs(one)
    ]
    return tuple(sorted(found, key=lambda span: span.start))


def _runs(placeholder: Any) -> Iterator[tuple[int, int]]:
    """Return the runs [start, stop) of tokens that media embeddings replace, relative to the placeholder's offset."""
    return (
        iter([(0, placeholder.length)])
        if placeholder.is_embed is None
        else Mask(bytes(placeholder.is_embed.tolist())).runs
    )
