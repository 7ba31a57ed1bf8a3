"""Normalisation and checks of the arguments of `generate`, `chat` and `run`: prompts, conversations and flags."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from steercap.core.chat import MessageSpan, Region, message_spans, place, token_span
from steercap.core.spec import CaptureSpec, Layers
from steercap.core.values import flag_of, index_of, shown, warn
from steercap.errors import InvalidPrompt, InvalidRequest, InvalidSpec

#: Numbers of tokens that tokenizers put before or after a text; GLM's puts two.
_AROUND: Final = (1, 2)
#: Words in the type of a message part that is not text: "image_url", "input_audio".
MEDIA: Final = ("image", "audio", "video", "file")


@dataclass(frozen=True)
class CallArguments:
    """Arguments of one call of a model, such as `SteerModel.generate`, besides its prompts.

    Args:
        name: name of the method.
        sampling_params: sampling parameters, or pooling parameters if the prompts are encoded.
        capture_layers, capture: as given to the call, see `SteerModel.generate`.
        steering: as given to the call, or the spec in force where it is made.
        options: the call's `lora_request` and `priority`.
        reading: True if the prompts alone are wanted, and the token that vLLM must sample is kept from the caller.
        sketches: running sketches (`model.sketch`) in force where the call is made; its rows are added to them.
        encoding: True if the prompts are encoded by a pooling model.
        monitors: monitors that watch each request.
        add_special_tokens: see `special_asked`.
        template_kwargs: further arguments of the chat template, for conversations.
    """

    name: str
    sampling_params: Any
    capture_layers: Layers | None
    capture: Any
    steering: Any
    options: dict[str, Any]
    reading: bool = False
    sketches: Sequence[Any] = ()
    encoding: bool = False
    monitors: Any = None
    add_special_tokens: bool | None = None
    template_kwargs: Any = None

    @property
    def spec(self) -> Any:
        """Capture spec, for all prompts or one each; None for no capture."""
        return capture_asked(self.capture_layers, self.capture)


def listed(prompts: Any) -> tuple[bool, list[Any]]:
    """Return the prompts as a list, and True before it if several were given; token ids become prompt dicts.

    Raises:
        InvalidPrompt: no prompt, or something that cannot be one.
    """
    if isinstance(prompts, (str, Mapping)):
        return False, [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidPrompt(f"prompts={shown(prompts)}; give a str, token ids, a prompt dict, or a list of these")
    if not prompts:
        raise InvalidPrompt("prompts=[] is empty; give at least one prompt")
    if (ids := _token_ids(prompts)) is not None:
        return False, [{"prompt_token_ids": ids}]
    return True, [_one_prompt(prompt) for prompt in prompts]


def _one_prompt(prompt: Any) -> Any:
    if isinstance(prompt, (str, Mapping)):
        return prompt
    if isinstance(prompt, Sequence) and (ids := _token_ids(prompt)) is not None:
        return {"prompt_token_ids": ids}
    raise InvalidPrompt(f"{shown(prompt)} cannot be a prompt; give a str, token ids or a prompt dict")


def _token_ids(given: Sequence[Any]) -> list[int] | None:
    """Convert token ids of any library to plain integers; None if something else is among them."""
    if {type(one) for one in given} <= {int}:
        return [*given]
    ids = [index_of(one) for one in given]
    return None if None in ids else cast("list[int]", ids)


def text_of(prompt: Any) -> str | None:
    """Return the text of a prompt that is to be tokenised; None if it is no text."""
    if isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is None:
        prompt = prompt.get("prompt")
    return prompt if isinstance(prompt, str) else None


def special_asked(given: Any) -> bool | None:
    """Check `add_special_tokens`: True or False, or None for True with a warning (`warn_of_doubled`).

    Raises:
        InvalidRequest: any other value.
    """
    return None if given is None else flag_asked("add_special_tokens", given)


def repeating(given: Iterable[tuple[Any, Sequence[int]]]) -> list[tuple[str, Sequence[int]]]:
    """Find texts whose first or last tokens come twice, as when text and tokenizer both add a special token.

    Args:
        given: prompts with their token ids; prompts that are not text are skipped.
    """
    return [
        (text, ids)
        for prompt, ids in given
        if any(ids[:many] == ids[many : 2 * many] or ids[-many:] == ids[-2 * many : -many] for many in _AROUND)
        and (text := text_of(prompt)) is not None
    ]


def warn_of_doubled(given: Iterable[tuple[Any, Sequence[int]]], around: Sequence[int]) -> None:
    """Warn of texts that begin or end with a special token that the tokenizer has added once more.

    Args:
        given: texts, and their token ids.
        around: token ids of an empty text: the special tokens alone.
    """

    def doubled(ids: Sequence[int]) -> bool:
        own, added = [*ids], [*around]
        return any(
            own[:many] == own[many : 2 * many] == added[:many] or own[-many:] == own[-2 * many : -many] == added[-many:]
            for many in _AROUND
            if many <= len(added)
        )

    found = [text for text, ids in given if doubled(ids)]
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        warn(
            f"prompt {shown(found[0])}{more}: the text has a special token, such as <bos>, that the tokenizer adds to "
            "it once more, and the model reads both; give add_special_tokens=False to read the text as it stands, True "
            "to keep both; or, to calls that have no such argument, its token ids"
        )


def warn_of_room(asked: Iterable[tuple[Any, int | None, int]], context: int | None) -> None:
    """Warn if `max_tokens` is more than the context has room for after a prompt: generation ends where it is full.

    Args:
        asked: for each request, the sampling parameters as the user gave them, their parsed `max_tokens`, and the
            number
            of prompt tokens. Where the user did not set `max_tokens` (None, or a dict without it) nothing is warned of.
        context: maximum number of tokens of a prompt and its reply; None if unknown.
    """
    if context is None:
        return
    for params, max_tokens, prompt_len in asked:
        named = params is not None and (not isinstance(params, Mapping) or "max_tokens" in params)
        if named and max_tokens is not None and prompt_len + max_tokens > context:
            warn(
                f"max_tokens={max_tokens} is more than the context of {context:,} tokens holds after the prompt, and "
                "generation ends where it is full; give fewer, None for as many as there is room for, or start the "
                "engine with a larger max_model_len"
            )
            return


def conversations_in(messages: Any) -> tuple[bool, list[Any]]:
    """Return the conversations as a list, and True before it if several were given.

    Raises:
        InvalidPrompt: no conversation, or something that cannot be one.
    """
    if _is_messages(messages):
        return False, [messages]
    if isinstance(messages, (list, tuple)) and messages and all(map(_is_messages, messages)):
        return True, [*messages]
    raise InvalidPrompt(
        f"messages={shown(messages)}; give a list of {{'role', 'content'}} dicts, or a list of such lists"
    )


def _is_messages(messages: Any) -> bool:
    if not isinstance(messages, (list, tuple)) or not messages:
        return False
    return all(isinstance(message, Mapping) and message for message in messages)


def prompts_or_conversations(prompts: Any, template_kwargs: Any) -> tuple[bool, list[Any]]:
    """Return the arguments of `run` as a list, and True before it if several were given.

    A list of dicts that each have a "role" is a conversation, and stays a list; a prompt is a str or a dict.

    Raises:
        InvalidPrompt: no prompt, or something that cannot be one.
        InvalidRequest: there are arguments of the chat template, but a prompt is no conversation.
    """
    if _has_roles(prompts):
        many, found = False, [prompts]
    elif isinstance(prompts, (list, tuple)) and any(map(_has_roles, prompts)):
        many, found = True, [one if _has_roles(one) else _one_prompt(one) for one in prompts]
    else:
        many, found = listed(prompts)
    others = [one for one in found if not is_conversation(one)]
    if lonely := [one for one in others if isinstance(one, Mapping) and "role" in one]:
        raise InvalidPrompt(f"{shown(lonely[0])} is a message alone; give a list of {{'role', 'content'}} dicts")
    if template_kwargs is not None and others:
        raise InvalidRequest(
            f"chat_template_kwargs= with the prompt {shown(others[0])}, which is no conversation; leave it out, or "
            "give a list of {'role', 'content'} dicts"
        )
    return many, found


def is_conversation(prompt: Any) -> bool:
    """Return True if an entry of `prompts_or_conversations` or `conversations_in` is a conversation."""
    return isinstance(prompt, (list, tuple))


def _has_roles(messages: Any) -> bool:
    return _is_messages(messages) and all("role" in message for message in messages)


def without_media(conversation: Sequence[Mapping[str, Any]]) -> None:
    """Check that all messages hold text alone; a template writes only a placeholder for media.

    Raises:
        InvalidPrompt: one does.
    """
    for index, message in enumerate(conversation):
        content = message.get("content")
        for part in content if isinstance(content, (list, tuple)) else ():
            named = [str(part.get("type")), *part] if isinstance(part, Mapping) else []
            if found := next((name for name in named for kind in MEDIA if kind in str(name)), None):
                raise InvalidPrompt(
                    f"message {index} holds {found!r}, and chat takes text alone. Render the conversation with "
                    "model.tokenizer.apply_chat_template(..., tokenize=True), and give model.generate the prompt dict "
                    "{'prompt_token_ids': ..., 'multi_modal_data': {'image': [...]}}"
                )


def template_arguments(given: Any) -> dict[str, Any]:
    """Check further arguments of a chat template; None gives {}.

    Raises:
        InvalidRequest: they are not a mapping from names.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidRequest(f"chat_template_kwargs={shown(given)}; give a dict from names to values")
    return dict(given)


def flag_asked(name: str, given: Any) -> bool:
    """Parse an argument that is True or False.

    Raises:
        InvalidRequest: it is something else.
    """
    flag = flag_of(given)
    if flag is None:
        raise InvalidRequest(f"{name}={shown(given)}; give True or False")
    return flag


def capture_asked(layers: Layers | None, capture: Any) -> Any:
    """Return the capture spec: `capture=`, or one made of its shorthand `capture_layers=`.

    Raises:
        InvalidSpec: both were given.
    """
    if layers is not None and capture is not None:
        raise InvalidSpec("give capture_layers= or capture=, not both")
    return CaptureSpec(layers=layers) if layers is not None else capture


def each(value: Any, count: int, name: str) -> list[Any]:
    """Return one value for each of `count` prompts: the list given, or a single value repeated.

    Raises:
        InvalidRequest: a list of another length.
    """
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{name} has {len(value)} entries for {count} prompts; give one for all, or one each")
    return list(value)


def templated(
    tokenizer: Any,
    conversation: Sequence[Mapping[str, Any]],
    kwargs: dict[str, Any],
    *,
    spans: bool,
    special: bool | None = None,
) -> tuple[list[int], list[MessageSpan]]:
    """Return the token ids of a conversation that invites a reply, and the spans of its messages' contents.

    Args:
        tokenizer: the model's tokenizer.
        conversation: {"role", "content"} dicts.
        kwargs: further arguments of the chat template.
        spans: True to find the spans, which takes one rendering for each message, and more where the template
            branches on a message's text.
        special: True if the tokenizer adds its own special tokens to those of the template.

    Raises:
        InvalidRequest: there is no template, or it refuses the conversation.
    """

    def render(messages: Sequence[Mapping[str, Any]], *, invite: bool = True) -> str:
        arguments = {"add_generation_prompt": invite, **kwargs, "tokenize": False}
        return str(tokenizer.apply_chat_template([dict(message) for message in messages], **arguments))

    try:
        text = render(conversation)
        if not spans:
            return list(tokenizer.encode(text, add_special_tokens=bool(special))), []
        encoded = tokenizer(text, add_special_tokens=bool(special), return_offsets_mapping=True)
    except Exception as error:
        raise InvalidRequest(f"the chat template or the tokenizer refuses {shown(conversation)}: {error}") from error
    placed = [_placed(text, conversation, index, render) for index in range(len(conversation))]
    found = message_spans(conversation, placed, encoded["offset_mapping"])
    with contextlib.suppress(Exception):
        closed = render(conversation, invite=False)
        if text.startswith(closed) and len(closed) < len(text):
            region = (len(closed), len(text))
            found.append(MessageSpan("generation_prompt", None, *token_span(encoded["offset_mapping"], region)))
    return list(encoded["input_ids"]), found


def _placed(
    text: str, conversation: Sequence[Mapping[str, Any]], index: int, render: Callable[..., str]
) -> list[Region] | str:
    """Return the regions of a message's content, or the reason why there are none."""
    steps = place(text, conversation, index)
    try:
        changed = next(steps)
        while True:
            rendered = None
            with contextlib.suppress(Exception):  # a template may refuse what the content is changed to
                rendered = render(changed)
            changed = steps.send(rendered)
    except StopIteration as end:
        return cast("list[Region] | str", end.value)
