"""What a user passes to `generate` and `chat`, brought into one shape.

Number 1 in the life of a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from steercap.core.chat import MessageSpan, message_spans
from steercap.core.spec import CaptureSpec, Layers
from steercap.errors import InvalidPrompt, InvalidRequest, InvalidSpec


def listed(prompts: Any) -> tuple[bool, list[Any]]:
    """Whether several prompts were given, and the list of them."""
    if isinstance(prompts, (str, Mapping)):
        return False, [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidPrompt(f"prompts={prompts!r}; give a str, token ids, a prompt dict, or a list of these")
    if not prompts:
        raise InvalidPrompt("prompts=[] holds no prompt; give at least one")
    if all(isinstance(token, int) and not isinstance(token, bool) for token in prompts):
        return False, [{"prompt_token_ids": list(prompts)}]
    return True, [
        prompt if isinstance(prompt, (str, Mapping)) else {"prompt_token_ids": list(prompt)} for prompt in prompts
    ]


def capture_asked(layers: Layers | None, capture: Any) -> Any:
    """What is to be kept: `capture=`, or its shorthand `capture_layers=`.

    Raises:
        InvalidSpec: both were given.
    """
    if layers is not None and capture is not None:
        raise InvalidSpec("give capture_layers= or capture=, not both")
    return CaptureSpec(layers=layers) if layers is not None else capture


def each(value: Any, count: int, name: str) -> list[Any]:
    """One value for each prompt."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{name} has {len(value)} entries for {count} prompts; give one for all, or one each")
    return list(value)


def templated(
    tokenizer: Any, conversation: Sequence[Mapping[str, Any]], kwargs: dict[str, Any]
) -> tuple[list[int], list[MessageSpan]]:
    """Token ids of a conversation that invites a reply, and where its messages lie."""

    def ids(messages: Sequence[Mapping[str, Any]], *, invite: bool) -> list[int]:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, **{"add_generation_prompt": invite, **kwargs}
        )
        return list(tokenizer.encode(text, add_special_tokens=False))

    try:
        full = ids(conversation, invite=True)
        prefixes = [ids(conversation[: end + 1], invite=False) for end in range(len(conversation))]
    except Exception as error:
        raise InvalidRequest(f"the chat template refuses {conversation!r}: {error}") from error
    return full, message_spans([str(message.get("role")) for message in conversation], prefixes, full)
