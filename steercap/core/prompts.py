"""Checks and normalisation of prompts, conversations and their arguments; token ids; tokens as visible text."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar, cast

from steercap.core.chat import (
    UNSPELT,
    MessageSpan,
    Region,
    as_given,
    content_form,
    message_spans,
    place,
    token_span,
)
from steercap.core.extras import extra
from steercap.core.names import require_contents, require_variables, template_sources, variables_of
from steercap.core.spec import CaptureSpec, Layers
from steercap.core.values import index_of, shown, truth_of, warn
from steercap.errors import InvalidPrompt, InvalidRequest, InvalidSpec


def tokens_of(tokenizer: Any, text: Any, *, special: bool) -> list[int]:
    """Tokenise a str, or a conversation by the chat template; token ids are returned as plain ints.

    Args:
        tokenizer: the model's tokenizer.
        text: str, token ids, or {"role", "content"} dicts.
        special: True to add the special tokens that the tokenizer puts around a str.

    Raises:
        InvalidSpec: `text` is none of these.
        InvalidPrompt: a str contains half of a surrogate pair.
        InvalidRequest: the tokenizer has no chat template, or the template refuses the conversation.
    """
    if isinstance(text, str):
        return list(tokenizer.encode(require_text(text), add_special_tokens=special))
    if is_chat(text):
        return templated(tokenizer, text, {}, spans=False)[0]
    return ids_of_text(text)


def is_chat(text: Any) -> bool:
    """Check if a value is a conversation: a non-empty sequence of dicts."""
    return isinstance(text, Sequence) and bool(text) and all(isinstance(part, Mapping) for part in text)


Item = TypeVar("Item")

#: Font of tokens in plots; it is installed with matplotlib.
FONT: Final = "DejaVu Sans Mono"
#: Visible sign by white space character; any other white space is shown as SPACE.
VISIBLE: Final = {" ": "·", "\t": "⇥", "\r": "␍", "\n": "↵", "\u00a0": "⍽"}
SPACE: Final = "␣"
#: Sign of an empty text, such as that of a token that `decode` leaves out.
NOTHING: Final = "∅"
UNKNOWN: Final = "�"


def visible(text: str) -> str:
    """Return a token's text with visible white space: `·` for a space, `⇥` for a tab, `↵` for a line end."""
    return "".join(VISIBLE.get(letter) or _printed(letter) for letter in text) or NOTHING


def _printed(letter: str) -> str:
    return letter if letter.isprintable() else SPACE if letter.isspace() else UNKNOWN


def drawn(text: str) -> str:
    """Return visible text for matplotlib, with a sign for characters that the plots' font lacks, and $ escaped."""
    font = _font()
    shown = (letter if font.get_char_index(ord(letter)) else UNKNOWN for letter in visible(text))
    return "".join(shown).replace("$", r"\$")


def shortened(text: str, width: int) -> str:
    """Return visible text of at most `width` characters, with an ellipsis if it is cut."""
    shown = visible(text)
    return shown if len(shown) <= width else f"{shown[: width - 1]}…"


def texts_of(tokenizer: Any, token_ids: Iterable[int]) -> list[str]:
    """Decode each token by itself; a token that is part of a character becomes U+FFFD."""
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    return [str(decode([token])) for token in token_ids]


def lines_of(items: Sequence[Item], count: int) -> Iterator[tuple[int, Sequence[Item]]]:
    """Split items into lines of at most `count`; yield (index of the first item, items) of each line."""
    for first in range(0, len(items), count):
        yield first, items[first : first + count]


@functools.cache
def _font() -> Any:
    """Return matplotlib's font object of `FONT`, which knows the characters it has."""
    with extra("plots"):
        from matplotlib.font_manager import findfont, get_font

    return get_font(findfont(FONT))


#: Numbers of special tokens that tokenizers add before or after a text; GLM's adds two.
_AROUND: Final = (1, 2)
#: Types of bytes, whose items are integers but no token ids.
_BYTES: Final = (bytes, bytearray, memoryview)
#: Arguments of `apply_chat_template` that are no variables of a template.
_NO_VARIABLES: Final = (
    "add_special_tokens",
    "max_length",
    "padding",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
)
#: Tokenizers of Mistral's own formats, of vLLM and of transformers: they never read a control token such as [INST] from
#: text, so that conversations are not rendered to text first.
_UNSPELT: Final = frozenset({"MistralTokenizer", "MistralCommonBackend"})
#: Words in the type of a message part that is no text, such as "image_url" or "input_audio".
MEDIA: Final = ("image", "audio", "video", "file")


@dataclass(frozen=True)
class CallArguments:
    """Arguments of one call of a model, such as `SteerModel.generate`, besides its prompts.

    Args:
        name: name of the method.
        sampling_params: sampling parameters, or pooling parameters if the prompts are encoded.
        spec: capture spec for all prompts, or a list with one for each; None for no capture.
        steering: steering as given to the call, or the surrounding default of `model.steered`.
        options: the call's `lora_request` and `priority`.
        reading: True to run the prompts alone, and drop the token that vLLM must sample.
        sketches: open sketches (`model.sketch`) to which the call's rows are added.
        encoding: True for a call of a pooling model.
        monitors: monitors that watch each request.
        add_special_tokens: True, False or None, see `checked_special`.
        template_kwargs: further arguments of the chat template, for conversations.
    """

    name: str
    sampling_params: Any
    spec: Any
    steering: Any
    options: dict[str, Any]
    reading: bool = False
    sketches: Sequence[Any] = ()
    encoding: bool = False
    monitors: Any = None
    add_special_tokens: bool | None = None
    template_kwargs: Any = None


def as_list(prompts: Any) -> tuple[bool, list[Any]]:
    """Return (True if several prompts were given, list of the prompts), with token ids as prompt dicts.

    Raises:
        InvalidPrompt: there is no prompt, or an item cannot be a prompt.
    """
    if isinstance(prompts, (str, Mapping)):
        return False, [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, _BYTES):
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
    """Convert token ids of any library to plain ints; None if an item is no integer, and for bytes."""
    if isinstance(given, _BYTES):
        return None
    if {type(one) for one in given} <= {int}:
        return [*given]
    ids = [index_of(one) for one in given]
    return None if None in ids else cast("list[int]", ids)


def ids_of_text(text: Any) -> list[int]:
    """Return token ids that were given in place of a text as plain ints; [] for an empty sequence.

    Raises:
        InvalidSpec: `text` is no ordered collection, or an item is no integer.
    """
    ids = None
    if isinstance(text, Sized) and not isinstance(text, (Mapping, *_BYTES, AbstractSet)):
        with contextlib.suppress(TypeError):  # a tensor of one number
            ids = _token_ids([*cast("Iterable[Any]", text)])
    if ids is None:
        raise InvalidSpec(f"{shown(text)} is not a text; give texts in a list: str, token ids, or Exchange")
    return ids


def ids_of_prompt(given: Any) -> list[int]:
    """Convert token ids, from a list or a NumPy or torch vector, to plain ints.

    Raises:
        InvalidPrompt: an item is no integer, such as a float or a bool.
    """
    array = hasattr(given, "tolist") and getattr(given, "ndim", 0) == 1
    if isinstance(given, (str, *_BYTES)) or not (array or isinstance(given, Sequence)):
        raise InvalidPrompt(f"prompt_token_ids={shown(given)}; give a list of whole numbers")
    ids = [*given]
    if {type(one) for one in ids} <= {int}:
        return ids
    return [_token_id(one, index) for index, one in enumerate(ids)]


def _token_id(value: Any, index: int) -> int:
    found = index_of(value)
    if found is None:
        raise InvalidPrompt(f"prompt_token_ids[{index}] is {shown(value)}; give whole numbers")
    return found


def require_salt(salt: Any) -> None:
    """Check that a prompt's `cache_salt` is a str or None.

    Raises:
        InvalidPrompt: it is something else.
    """
    if salt is not None and not isinstance(salt, str):
        raise InvalidPrompt(f"cache_salt={shown(salt)}; give a str")


def require_text(text: str) -> str:
    """Return a text unchanged, after checking that it can be tokenised.

    Raises:
        InvalidPrompt: it contains half of a surrogate pair, which is no character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidPrompt(
            f"{shown(text)}: character {error.start} is half of a surrogate pair, which is not text; decode the text "
            "with errors='replace'"
        ) from error
    return text


def no_token(prompt: Any) -> InvalidPrompt:
    """Return the error for a prompt without tokens."""
    return InvalidPrompt(f"{shown(prompt)} holds no token; a prompt needs at least one")


def no_room(prompt: Any, tokens: int, context: int) -> InvalidPrompt:
    """Return the error for a prompt of `tokens` tokens, which leave no room in a context of `context` tokens."""
    return InvalidPrompt(
        f"{shown(prompt)} has {tokens} tokens, but the context holds {context}, one generated token at least included; "
        "shorten it or start the engine with a larger max_model_len"
    )


def text_of(prompt: Any) -> str | None:
    """Return the text of a prompt that is to be tokenised; None for token ids, and for a conversation."""
    if isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is None:
        prompt = prompt.get("prompt")
    return prompt if isinstance(prompt, str) else None


def checked_special(given: Any) -> bool | None:
    """Return a call's `add_special_tokens`, checked; None stands for True with a warning about doubled tokens.

    Raises:
        InvalidRequest: it is any other value.
    """
    return None if given is None else truth_of(given, "add_special_tokens", wrong=InvalidRequest)


def repeating(given: Iterable[tuple[Any, Sequence[int]]]) -> list[tuple[str, Sequence[int]]]:
    """Return the texts and token ids of prompts whose first or last tokens occur twice in a row.

    Args:
        given: prompts with their token ids; prompts that are no text are skipped.
    """
    return [
        (text, ids)
        for prompt, ids in given
        if any(ids[:many] == ids[many : 2 * many] or ids[-many:] == ids[-2 * many : -many] for many in _AROUND)
        and (text := text_of(prompt)) is not None
    ]


def warn_of_doubled(given: Iterable[tuple[Any, Sequence[int]]], special: Sequence[int]) -> None:
    """Issue one warning for texts that begin or end with a special token that the tokenizer adds as well.

    Args:
        given: texts with their token ids.
        special: token ids of an empty text, that is, the special tokens that the tokenizer adds.
    """

    def doubled(ids: Sequence[int]) -> bool:
        own, added = [*ids], [*special]
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


def warn_of_room(requests: Iterable[tuple[Any, int | None, int]], context: int | None) -> None:
    """Issue a warning if a request's `max_tokens` exceeds the room that its prompt leaves in the context.

    Args:
        requests: for each request, the user's sampling parameters, the parsed `max_tokens`, and the number of prompt
            tokens; requests for which the user set no `max_tokens` are skipped.
        context: maximum number of tokens of a prompt and its reply; None if unknown, for no warning.
    """
    if context is None:
        return
    for params, max_tokens, prompt_len in requests:
        named = params is not None and (not isinstance(params, Mapping) or "max_tokens" in params)
        if named and max_tokens is not None and prompt_len + max_tokens > context:
            warn(
                f"max_tokens={max_tokens} is more than the context of {context:,} tokens holds after the prompt, and "
                "generation ends where it is full; give fewer, None for as many as there is room for, or start the "
                "engine with a larger max_model_len"
            )
            return


def conversations_in(messages: Any) -> tuple[bool, list[Any]]:
    """Return (True if several conversations were given, list of the conversations).

    Raises:
        InvalidPrompt: there is no conversation, or an item cannot be one.
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
    """Return (True if several prompts were given, list of prompts and conversations) for the arguments of `run`.

    A list of dicts that each have a "role" is a conversation, and stays a list; a prompt is a str or a dict.

    Raises:
        InvalidPrompt: there is no prompt, or an item cannot be one.
        InvalidRequest: `template_kwargs` is given, but a prompt is no conversation.
    """
    if _has_roles(prompts):
        many, found = False, [prompts]
    elif isinstance(prompts, (list, tuple)) and any(map(_has_roles, prompts)):
        many, found = True, [one if _has_roles(one) else _one_prompt(one) for one in prompts]
    else:
        many, found = as_list(prompts)
    others = [one for one in found if not is_conversation(one)]
    if lonely := [one for one in others if isinstance(one, Mapping) and "role" in one]:
        raise InvalidPrompt(f"{shown(lonely[0])} is a single message; give a list of {{'role', 'content'}} dicts")
    if template_kwargs is not None and others:
        raise InvalidRequest(
            f"chat_template_kwargs= with the prompt {shown(others[0])}, which is not a conversation; leave it out, or "
            f"give a list of {{'role', 'content'}} dicts"
        )
    return many, found


def is_conversation(prompt: Any) -> bool:
    """Check if an item returned by `prompts_or_conversations` or `conversations_in` is a conversation."""
    return isinstance(prompt, (list, tuple))


def _has_roles(messages: Any) -> bool:
    return _is_messages(messages) and all("role" in message for message in messages)


def without_media(conversation: Sequence[Mapping[str, Any]]) -> None:
    """Check that all messages of a conversation contain text alone.

    Raises:
        InvalidPrompt: a message contains an image, sound, video or file.
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
    """Check further arguments of a chat template and return a copy; {} for None.

    Raises:
        InvalidRequest: they are no mapping from names, or one is no variable of a template.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidRequest(f"chat_template_kwargs={shown(given)}; give a dict from names to values")
    if wrong := next((name for name in _NO_VARIABLES if name in given), None):
        instead = "give it to the call itself" if wrong == "add_special_tokens" else "leave it out"
        raise InvalidRequest(f"chat_template_kwargs has {wrong!r}, which is no variable of a template; {instead}")
    return dict(given)


def capture_of_call(layers: Layers | None, capture: Any) -> Any:
    """Return a call's capture spec: `capture`, or a spec made from the layers of the shorthand `capture_layers`.

    Raises:
        InvalidSpec: both are given.
    """
    if layers is not None and capture is not None:
        raise InvalidSpec("give capture_layers= or capture=, not both")
    return CaptureSpec(layers=layers) if layers is not None else capture


def per_prompt(value: Any, count: int, name: str) -> list[Any]:
    """Return a list of one value per prompt: the list given, or a single value repeated `count` times.

    Raises:
        InvalidRequest: a list has another length; the message calls it `name`.
    """
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        several = "; several edits of one prompt are a SteeringSpec([...])" if name == "steering" else ""
        raise InvalidRequest(
            f"{name} has {len(value)} entries for {count} prompts; give one for all, or one each{several}"
        )
    return list(value)


def templated(
    tokenizer: Any,
    conversation: Sequence[Mapping[str, Any]],
    kwargs: dict[str, Any],
    *,
    spans: bool,
    special: bool | None = None,
) -> tuple[list[int], list[MessageSpan]]:
    """Return the token ids of a conversation with the generation prompt, and the spans of its messages' contents.

    Args:
        tokenizer: the model's tokenizer.
        conversation: {"role", "content"} dicts.
        kwargs: further arguments of the chat template.
        spans: True to find the spans, which takes at least one rendering for each message; False to return [].
        special: True to let the tokenizer add its special tokens to those of the template; Mistral's adds none.

    Raises:
        InvalidRequest: there is no template, it refuses the conversation, or it does not read one of `kwargs`.
        InvalidPrompt: the template reads only text, and a part of a message is none; or a content is neither text nor
            parts, or is missing.
    """
    require_contents(conversation, template_sources(tokenizer, kwargs))
    require_variables(kwargs, lambda: variables_of(tokenizer, kwargs))

    def applied(messages: Sequence[Mapping[str, Any]], *, invite: bool = True, **how: Any) -> Any:
        arguments = {"add_generation_prompt": invite, **kwargs, **how}
        return tokenizer.apply_chat_template([dict(message) for message in messages], **arguments)

    if not _UNSPELT.isdisjoint(kind.__name__ for kind in type(tokenizer).__mro__):
        try:
            ids = applied([*map(as_given, conversation)], tokenize=True, return_dict=False)
        except Exception as error:
            raise InvalidRequest(f"the tokenizer refuses {shown(conversation)}: {error}") from error
        return [*ids], message_spans(conversation, [UNSPELT] * len(conversation), []) if spans else []

    form = content_form(conversation, lambda messages: str(applied(messages, tokenize=False)))

    def render(messages: Sequence[Mapping[str, Any]], *, invite: bool = True) -> str:
        return str(applied([form(message) for message in messages], invite=invite, tokenize=False))

    try:
        text = render(conversation)
        if not spans:
            return list(tokenizer.encode(text, add_special_tokens=bool(special))), []
        encoded = tokenizer(text, add_special_tokens=bool(special), return_offsets_mapping=True)
    except InvalidPrompt:
        raise
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
    """Return the regions of a message's content in `text`, or the reason why there are none, by rendering variants."""
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
