"""Calls of an open model (generate, chat, run, read, encode, stream) and the types of their results."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, Unpack, overload

from steercap.captures.pooled import Encoded
from steercap.core.prompts import CallArguments, as_list, checked_special, conversations_in, prompts_or_conversations
from steercap.core.spec import CaptureSpec, Layers
from steercap.requests.call_types import (
    READ,
    CallSteering,
    ChatOptions,
    Conversation,
    CoroutineOf,
    Generation,
    Handle,
    Options,
    Params,
    Pooling,
    Prompt,
    PromptSteering,
    RunOptions,
    Several,
    Text,
    copied,
    copied_params,
)
from steercap.requests.context import FROM_CONTEXT, SketchBackend, Sketched, in_context, sketches_in_force
from steercap.requests.stream import Chunk

if TYPE_CHECKING:
    from steercap.adapters import SamplingParams
    from steercap.steering.monitor import Monitor

#: Calls whose results already contain the handles, or are handles.
_ALONE: Final = frozenset({"run", "read"})


class Backend(SketchBackend, Protocol):
    """Interface of what runs the calls: a local engine or a server."""

    def run(self, prompts: Sequence[Any], call: CallArguments) -> Coroutine[Any, Any, Sequence[Generation[Any]]]:
        """Run prompts and conversations (`core.prompts.is_conversation`); return their results in order."""

    def streamed(self, prompt: Any, call: CallArguments) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of `Calls.stream`."""


class Calls(Sketched, Generic[Handle]):
    """Calls of an open model: generate, chat, run, read, encode and stream.

    One prompt gives one result, and a list of prompts a list. With captures, generate, chat and encode return a pair.
    Where `n` decides whether there is one text or a list of them, the declared type is the union of both.
    """

    _backend: Backend

    def _named_coroutine(
        self,
        call: CallArguments,
        prompts: Any,
        listing: Callable[[Any], tuple[bool, list[Any]]],
        value: Callable[[Generation[Any]], Any],
    ) -> Coroutine[Any, Any, Any]:
        """Return the coroutine of a call, named after it for Python's warning about a forgotten `await`.

        Args:
            call: arguments of the call.
            prompts: prompts as the user gave them.
            listing: function that returns True if several prompts were given, and the list of prompts.
            value: function from one `Generation` to what the call returns for it.
        """
        coming: Coroutine[Any, Any, Any] = self._values(call, copied(prompts), listing, value)
        coming.__qualname__ = f"{type(self).__name__}.{call.name}"  # type: ignore[attr-defined]  # of coroutine objects
        return coming

    async def _values(
        self,
        call: CallArguments,
        prompts: Any,
        listing: Callable[[Any], tuple[bool, list[Any]]],
        value: Callable[[Generation[Any]], Any],
    ) -> Any:
        many, given = listing(prompts)
        found = await self._backend.run(given, call)
        values: Any = [value(one) for one in found]
        if call.name in _ALONE or call.spec is None:
            return values if many else values[0]
        handles = [None if one.handles is None else _unnested(one.handles) for one in found]
        return (values, handles) if many else (values[0], handles[0])

    @overload
    def generate(
        self,
        prompts: Prompt,
        sampling_params: Params = None,
        *,
        capture_layers: None = None,
        capture: None = None,
        **asked: Unpack[Options],
    ) -> CoroutineOf[Text]: ...
    @overload
    def generate(
        self,
        prompts: Prompt,
        sampling_params: Params = None,
        *,
        capture_layers: Layers = ...,
        capture: CaptureSpec = ...,
        **asked: Unpack[Options],
    ) -> CoroutineOf[tuple[Text, Handle | list[Handle]]]: ...
    @overload
    def generate(
        self,
        prompts: Several[Prompt],
        sampling_params: Params = None,
        *,
        capture_layers: None = None,
        capture: None = None,
        **asked: Unpack[Options],
    ) -> CoroutineOf[list[Text]]: ...
    @overload
    def generate(
        self,
        prompts: Several[Prompt],
        sampling_params: Params = None,
        *,
        capture_layers: Layers = ...,
        capture: CaptureSpec = ...,
        **asked: Unpack[Options],
    ) -> CoroutineOf[tuple[list[Text], list[Handle | list[Handle]]]]: ...
    @overload
    def generate(
        self,
        prompts: Several[Prompt],
        sampling_params: Params = None,
        *,
        capture_layers: None = None,
        capture: Sequence[CaptureSpec | None],
        **asked: Unpack[Options],
    ) -> CoroutineOf[tuple[list[Text], list[Handle | list[Handle] | None]]]: ...
    def generate(
        self,
        prompts: Any,
        sampling_params: Params = None,
        *,
        capture_layers: Layers | None = None,
        capture: CaptureSpec | Sequence[CaptureSpec | None] | None = None,
        steering: CallSteering = FROM_CONTEXT,
        add_special_tokens: bool | None = None,
        lora_request: Any = None,
        priority: int = 0,
    ) -> Coroutine[Any, Any, Any]:
        """Generate text and capture activations on request.

        Args:
            prompts: a str, token ids, one of vLLM's prompt dicts, or a list of these. A dict may hold pictures:
                `{"prompt": "What is <image>?", "multi_modal_data": {"image": picture}}`.
            sampling_params: vLLM's SamplingParams or a dict of its fields, for all prompts or one each.
            capture_layers: shorthand for `capture=CaptureSpec(layers=capture_layers)`.
            capture: the rows to capture, one spec for all prompts, or one each (None captures nothing).
            steering: a SteeringSpec, an edit, a LogitBias, LayerVectors (each added at its layer) or a server's name;
                for all prompts or one each. None edits nothing; by default that of the enclosing `model.steered` holds.
            add_special_tokens: True adds the tokenizer's special tokens, such as <bos>, to each text, and False none.
                None does as vLLM (none for some that see, as Gemma 4), with a warning if the text has them already.
            lora_request: vLLM's LoRARequest, for an engine started with `enable_lora=True`.
            priority: vLLM's request priority, for an engine started with `scheduling_policy="priority"`.

        Returns:
            The text, or a list of texts for a list of prompts; with `n > 1`, a list of n texts for each prompt. If
            anything is captured, the pair (texts, handles), where handles is nested like texts and has a
            `CaptureHandle` for each text, None where nothing is captured. `run` returns vLLM's output and receipts too.

        There are prompt + generated - 1 rows: the last sampled token is never an input to the model. Layer `i` of
        "resid_post" is transformers' `hidden_states[i + 1]`, before the final norm for the last layer.

        Raises:
            InvalidPrompt, InvalidSpec, InvalidSelection, PointNotArmed: raised before that prompt runs. Earlier prompts
                of the list may have begun; they are cancelled, as after any other error.
            CaptureMemoryFull, SteeringSlotsFull: there is not enough memory, or no slot.
            SteeringNotApplied: a worker did not make every edit; the text is withheld.
            ModelClosed: the model is not open.
        """
        asked = _SharedArguments(capture_layers, capture, steering, add_special_tokens, lora_request, priority)
        return self._named_coroutine(
            asked.call(self, "generate", sampling_params), prompts, as_list, lambda one: _unnested(one.texts)
        )

    @overload
    def chat(
        self,
        messages: Conversation,
        sampling_params: Params = None,
        *,
        capture_layers: None = None,
        capture: None = None,
        **asked: Unpack[ChatOptions],
    ) -> CoroutineOf[Text]: ...
    @overload
    def chat(
        self,
        messages: Conversation,
        sampling_params: Params = None,
        *,
        capture_layers: Layers = ...,
        capture: CaptureSpec = ...,
        **asked: Unpack[ChatOptions],
    ) -> CoroutineOf[tuple[Text, Handle | list[Handle]]]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling_params: Params = None,
        *,
        capture_layers: None = None,
        capture: None = None,
        **asked: Unpack[ChatOptions],
    ) -> CoroutineOf[list[Text]]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling_params: Params = None,
        *,
        capture_layers: Layers = ...,
        capture: CaptureSpec = ...,
        **asked: Unpack[ChatOptions],
    ) -> CoroutineOf[tuple[list[Text], list[Handle | list[Handle]]]]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling_params: Params = None,
        *,
        capture_layers: None = None,
        capture: Sequence[CaptureSpec | None],
        **asked: Unpack[ChatOptions],
    ) -> CoroutineOf[tuple[list[Text], list[Handle | list[Handle] | None]]]: ...
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params = None,
        *,
        capture_layers: Layers | None = None,
        capture: CaptureSpec | Sequence[CaptureSpec | None] | None = None,
        steering: CallSteering = FROM_CONTEXT,
        add_special_tokens: bool | None = None,
        lora_request: Any = None,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Generate the next message of a conversation, or of each of several.

        Args:
            messages: one conversation, a list of {"role", "content"} dicts, or a list of conversations. Text only; for
                pictures use `generate`.
            sampling_params, capture_layers, capture, steering, lora_request, priority: as for `generate`.
            add_special_tokens: True adds the tokenizer's special tokens to the chat template's; None and False do not.
            chat_template_kwargs: further arguments of the tokenizer's chat template.

        Returns:
            As for `generate`. Handles know the rows of each message (the template's own tokens belong to none):
            `handle.messages`, `handle.rows_of(0)`, `handle.rows_of("assistant")`.

        Raises:
            InvalidRequest: the tokenizer has no chat template, or the template refuses the messages.
            The errors of `generate`.
        """
        asked = _SharedArguments(capture_layers, capture, steering, add_special_tokens, lora_request, priority)
        return self._named_coroutine(
            asked.call(self, "chat", sampling_params, template_kwargs=chat_template_kwargs),
            messages,
            conversations_in,
            lambda one: _unnested(one.texts),
        )

    @overload
    def run(
        self,
        prompts: Prompt,
        sampling_params: Params = None,
        *,
        capture_layers: Layers | None = None,
        capture: CaptureSpec | None = None,
        **asked: Unpack[RunOptions],
    ) -> CoroutineOf[Generation[Handle]]: ...
    @overload
    def run(
        self,
        prompts: Conversation,
        sampling_params: Params = None,
        *,
        capture_layers: Layers | None = None,
        capture: CaptureSpec | Sequence[CaptureSpec | None] | None = None,
        **asked: Unpack[RunOptions],
    ) -> CoroutineOf[Any]: ...  # one conversation, or several prompt dicts: no type tells
    @overload
    def run(
        self,
        prompts: Several[Prompt | Conversation],
        sampling_params: Params = None,
        *,
        capture_layers: Layers | None = None,
        capture: CaptureSpec | Sequence[CaptureSpec | None] | None = None,
        **asked: Unpack[RunOptions],
    ) -> CoroutineOf[list[Generation[Handle]]]: ...
    def run(
        self,
        prompts: Any,
        sampling_params: Params = None,
        *,
        capture_layers: Layers | None = None,
        capture: CaptureSpec | Sequence[CaptureSpec | None] | None = None,
        steering: CallSteering = FROM_CONTEXT,
        monitors: Sequence[Monitor] | None = None,
        add_special_tokens: bool | None = None,
        lora_request: Any = None,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Generate as `generate` and `chat` do, and return a `Generation` for each prompt.

        Args:
            prompts: a str, token ids, one of vLLM's prompt dicts, a conversation (a list of {"role", "content"} dicts),
                or a list of these.
            sampling_params, capture_layers, capture, steering, lora_request, priority: as for `generate`.
            monitors: probes with thresholds that watch each request while it runs, and may end it: `Monitor`.
            add_special_tokens: for prompts as for `generate`, for conversations as for `chat`.
            chat_template_kwargs: further arguments of the tokenizer's chat template, for conversations alone.

        Returns:
            A `Generation` for one prompt, or a list of them for several: vLLM's output, texts, handles, receipts of
            edits and reports of monitors.

        Raises:
            InvalidRequest: `chat_template_kwargs` is given with a prompt that is no conversation.
            The errors of `generate` and `chat`.
        """
        asked = _SharedArguments(capture_layers, capture, steering, add_special_tokens, lora_request, priority)
        return self._named_coroutine(
            asked.call(self, "run", sampling_params, monitors=monitors, template_kwargs=chat_template_kwargs),
            prompts,
            partial(prompts_or_conversations, template_kwargs=chat_template_kwargs),
            lambda one: one,
        )

    @overload
    def read(
        self,
        prompts: Prompt,
        *,
        capture_layers: Layers | None = None,
        capture: CaptureSpec | None = None,
        **asked: Unpack[Options],
    ) -> CoroutineOf[Handle]: ...
    @overload
    def read(
        self,
        prompts: Several[Prompt],
        *,
        capture_layers: Layers | None = None,
        capture: CaptureSpec | None = None,
        **asked: Unpack[Options],
    ) -> CoroutineOf[list[Handle]]: ...
    @overload
    def read(
        self,
        prompts: Several[Prompt],
        *,
        capture_layers: None = None,
        capture: Sequence[CaptureSpec | None],
        **asked: Unpack[Options],
    ) -> CoroutineOf[list[Handle | None]]: ...
    def read(
        self,
        prompts: Any,
        *,
        capture_layers: Layers | None = None,
        capture: CaptureSpec | Sequence[CaptureSpec | None] | None = None,
        steering: CallSteering = FROM_CONTEXT,
        add_special_tokens: bool | None = None,
        lora_request: Any = None,
        priority: int = 0,
    ) -> Coroutine[Any, Any, Any]:
        """Run prompts through the model without generating, and capture their activations; for pooling models too.

        Args:
            prompts: a str, token ids, one of vLLM's prompt dicts, or a list of these; each at least one token shorter
                than `max_model_len`, or for a pooling model at most as long.
            capture_layers, capture: as for `generate`; without both, all layers at "resid_post".
            steering, add_special_tokens, lora_request, priority: as for `generate`.

        Returns:
            A `CaptureHandle`, or a list of them for a list of prompts (None where nothing is captured), with a row for
            every selected token, the last one included. `handle.text` and `handle.output_token_ids` are empty. Inside
            `model.sketch`, without a capture of its own, the call adds rows to the sketch and returns None.

        Raises:
            EmptySelection: `tokens="generated"` is given, and nothing is generated.
            The errors of `generate`.
        """
        if capture_layers is None and capture is None and not sketches_in_force(self):
            capture = CaptureSpec()
        asked = _SharedArguments(capture_layers, capture, steering, add_special_tokens, lora_request, priority)
        return self._named_coroutine(
            asked.call(self, "read", READ, reading=True),
            prompts,
            as_list,
            lambda one: one.handles[0] if one.handles else None,
        )

    @overload
    def encode(
        self,
        prompts: Prompt,
        pooling_params: Pooling = None,
        *,
        capture_layers: None = None,
        capture: None = None,
        **asked: Unpack[Options],
    ) -> CoroutineOf[Encoded]: ...
    @overload
    def encode(
        self,
        prompts: Prompt,
        pooling_params: Pooling = None,
        *,
        capture_layers: Layers = ...,
        capture: CaptureSpec = ...,
        **asked: Unpack[Options],
    ) -> CoroutineOf[tuple[Encoded, Handle]]: ...
    @overload
    def encode(
        self,
        prompts: Several[Prompt],
        pooling_params: Pooling = None,
        *,
        capture_layers: None = None,
        capture: None = None,
        **asked: Unpack[Options],
    ) -> CoroutineOf[list[Encoded]]: ...
    @overload
    def encode(
        self,
        prompts: Several[Prompt],
        pooling_params: Pooling = None,
        *,
        capture_layers: Layers = ...,
        capture: CaptureSpec = ...,
        **asked: Unpack[Options],
    ) -> CoroutineOf[tuple[list[Encoded], list[Handle]]]: ...
    @overload
    def encode(
        self,
        prompts: Several[Prompt],
        pooling_params: Pooling = None,
        *,
        capture_layers: None = None,
        capture: Sequence[CaptureSpec | None],
        **asked: Unpack[Options],
    ) -> CoroutineOf[tuple[list[Encoded], list[Handle | None]]]: ...
    def encode(
        self,
        prompts: Any,
        pooling_params: Pooling = None,
        *,
        capture_layers: Layers | None = None,
        capture: CaptureSpec | Sequence[CaptureSpec | None] | None = None,
        steering: CallSteering = FROM_CONTEXT,
        add_special_tokens: bool | None = None,
        lora_request: Any = None,
        priority: int = 0,
    ) -> Coroutine[Any, Any, Any]:
        """Embed or classify prompts with a pooling model and capture activations on request.

        Args:
            prompts: a str, token ids, one of vLLM's prompt dicts, or a list of these; each at most `max_model_len`
                tokens long.
            pooling_params: vLLM's PoolingParams or a dict of its fields, for all prompts or one each: `task` ("embed",
                "classify", "token_embed", "token_classify"; vLLM's default for the model if left out),
                `use_activation`, `dimensions`.
            capture_layers, capture, steering, add_special_tokens, lora_request, priority: as for `generate`.

        Returns:
            An `Encoded`, with vLLM's pooled output as `embedding` or `data`, or a list of them for a list of prompts.
            If anything is captured, the pair (encoded, handles), with a `CaptureHandle` for each, None where nothing is
            captured. There is a row for every selected token, the last one included.

        Raises:
            InvalidRequest: the model was opened to generate, or the pooling parameters are invalid.
            EmptySelection: `tokens="generated"` is given, and nothing is generated.
            The errors of `generate`.
        """
        asked = _SharedArguments(capture_layers, capture, steering, add_special_tokens, lora_request, priority)
        call = asked.call(self, "encode", pooling_params, reading=True, encoding=True)
        return self._named_coroutine(call, prompts, as_list, lambda one: one.output)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        capture_layers: Layers | None = None,
        capture: CaptureSpec | None = None,
        steering: PromptSteering = FROM_CONTEXT,
        monitors: Sequence[Monitor] | None = None,
        add_special_tokens: bool | None = None,
        lora_request: Any = None,
        priority: int = 0,
    ) -> AsyncGenerator[Chunk, None]:
        """Generate text for one prompt, yielding text and captured rows while they are computed.

        Args:
            prompt: one prompt, as for `generate`.
            sampling_params, capture_layers, capture, steering, add_special_tokens, lora_request, priority: as for
                `generate`, for one sample.
            monitors: as for `run`; chunks contain the crossings.

        Yields:
            Chunks, whose texts, token ids and rows concatenate to those of the whole request; the first chunk has the
            rows of the prompt, or the first chunks, where they are larger than memory. Closing the generator
            (`contextlib.aclosing`, or dropping it after leaving the loop) cancels the request.

        Raises:
            InvalidRequest: there are several prompts, `n > 1`, or the capture is a reduction or a summary.
            The errors of `generate`, and CaptureIncomplete. SteeringNotApplied comes in place of the last chunk.
        """
        asked = _SharedArguments(capture_layers, capture, steering, add_special_tokens, lora_request, priority)
        return self._backend.streamed(copied(prompt), asked.call(self, "stream", sampling_params, monitors=monitors))


class _SharedArguments(NamedTuple):
    """Arguments that every call takes, as the user gave them."""

    capture_layers: Layers | None
    capture: Any
    steering: CallSteering
    add_special_tokens: bool | None
    lora_request: Any
    priority: int

    def call(self, model: object, name: str, params: Any, **more: Any) -> CallArguments:
        """Return all arguments of a call, with the steering and sketches in force where it is made.

        They are copies: changes that the caller makes later do not affect the call. `more` are further fields.
        """
        options = {"lora_request": self.lora_request, "priority": self.priority}
        more = {name: copied(value) for name, value in more.items()}
        special = checked_special(self.add_special_tokens)
        given = copied_params(params), copied(self.capture), copied(self.steering), options
        return in_context(model, CallArguments(name, *given, add_special_tokens=special, **more), self.capture_layers)


def _unnested(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else [*values]
