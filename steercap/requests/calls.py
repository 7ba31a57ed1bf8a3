"""Calls of an open model (generate, chat, read, encode, stream) and the types of their results."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar, Unpack, overload

from steercap.captures.pooled import Encoded
from steercap.core.prompts import CallArguments, special_asked
from steercap.core.spec import CaptureSpec, Layers
from steercap.requests.answers import RawOutput
from steercap.requests.call_types import (
    ByLayers,
    BySpec,
    BySpecs,
    ChatByLayers,
    ChatBySpec,
    ChatBySpecs,
    ChatPlain,
    Coming,
    Conversation,
    Off,
    On,
    Params,
    Plain,
    Pooling,
    Prompt,
    RawByLayers,
    RawBySpec,
    RawBySpecs,
    RawChatByLayers,
    RawChatBySpec,
    RawChatBySpecs,
    RawChatPlain,
    RawPlain,
    Reading,
    Several,
    Steering,
    Text,
)
from steercap.requests.context import FROM_CONTEXT, FromContext, in_context, sketches_in_force
from steercap.requests.stream import Chunk

if TYPE_CHECKING:
    from steercap.adapters.types import SamplingParams
    from steercap.steering.monitor import Monitor

#: Sampling parameters of `read`: vLLM runs no prompt without sampling one token, which has no row.
READ: Final = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
#: Type of the handles that the calls return.
Handle = TypeVar("Handle")


class Backend(Protocol):
    """Backend that answers the calls: a local engine or a server."""

    def generated(self, prompts: Any, call: CallArguments) -> Coroutine[Any, Any, Any]:
        """Return the result of `Calls.generate`."""

    def encoded(self, prompts: Any, call: CallArguments) -> Coroutine[Any, Any, Any]:
        """Return the result of `Calls.encode`."""

    def read(self, prompts: Any, call: CallArguments) -> Coroutine[Any, Any, Any]:
        """Return the result of `Calls.read`."""

    def replied(self, messages: Any, call: CallArguments, template_kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Return the result of `Calls.chat`."""

    def streamed(self, prompt: Any, call: CallArguments) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of `Calls.stream`."""


class Calls(Generic[Handle]):
    """Calls of an open model.

    One prompt gives one result and several give a list. Captures come beside the texts, as a pair. Where `n` decides
    whether there is one text or a list of them, the declared type is the union of both.
    """

    _answers: Backend

    def _called(self, name: str, coming: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
        """Name a coroutine after the call that made it, for Python's warning about a forgotten `await`."""
        coming.__qualname__ = f"{type(self).__name__}.{name}"  # type: ignore[attr-defined]  # of coroutine objects
        return coming

    @overload
    def generate(
        self, prompts: Prompt, sampling_params: Params = None, *, raw_output: Off = False, **asked: Unpack[Plain]
    ) -> Coming[Text]: ...
    @overload
    def generate(
        self, prompts: Prompt, sampling_params: Params = None, *, raw_output: On, **asked: Unpack[RawPlain]
    ) -> Coming[RawOutput]: ...
    @overload
    def generate(
        self, prompts: Prompt, sampling_params: Params = None, *, raw_output: Off = False, **asked: Unpack[ByLayers]
    ) -> Coming[tuple[Text, Handle | list[Handle]]]: ...
    @overload
    def generate(
        self, prompts: Prompt, sampling_params: Params = None, *, raw_output: On, **asked: Unpack[RawByLayers]
    ) -> Coming[tuple[RawOutput, Handle | list[Handle]]]: ...
    @overload
    def generate(
        self, prompts: Prompt, sampling_params: Params = None, *, raw_output: Off = False, **asked: Unpack[BySpec]
    ) -> Coming[tuple[Text, Handle | list[Handle]]]: ...
    @overload
    def generate(
        self, prompts: Prompt, sampling_params: Params = None, *, raw_output: On, **asked: Unpack[RawBySpec]
    ) -> Coming[tuple[RawOutput, Handle | list[Handle]]]: ...
    @overload
    def generate(
        self,
        prompts: Several[Prompt],
        sampling_params: Params = None,
        *,
        raw_output: Off = False,
        **asked: Unpack[Plain],
    ) -> Coming[list[Text]]: ...
    @overload
    def generate(
        self, prompts: Several[Prompt], sampling_params: Params = None, *, raw_output: On, **asked: Unpack[RawPlain]
    ) -> Coming[list[RawOutput]]: ...
    @overload
    def generate(
        self,
        prompts: Several[Prompt],
        sampling_params: Params = None,
        *,
        raw_output: Off = False,
        **asked: Unpack[ByLayers],
    ) -> Coming[tuple[list[Text], list[Handle | list[Handle]]]]: ...
    @overload
    def generate(
        self, prompts: Several[Prompt], sampling_params: Params = None, *, raw_output: On, **asked: Unpack[RawByLayers]
    ) -> Coming[tuple[list[RawOutput], list[Handle | list[Handle]]]]: ...
    @overload
    def generate(
        self,
        prompts: Several[Prompt],
        sampling_params: Params = None,
        *,
        raw_output: Off = False,
        **asked: Unpack[BySpec],
    ) -> Coming[tuple[list[Text], list[Handle | list[Handle]]]]: ...
    @overload
    def generate(
        self, prompts: Several[Prompt], sampling_params: Params = None, *, raw_output: On, **asked: Unpack[RawBySpec]
    ) -> Coming[tuple[list[RawOutput], list[Handle | list[Handle]]]]: ...
    @overload
    def generate(
        self,
        prompts: Several[Prompt],
        sampling_params: Params = None,
        *,
        raw_output: Off = False,
        **asked: Unpack[BySpecs],
    ) -> Coming[tuple[list[Text], list[Handle | list[Handle] | None]]]: ...
    @overload
    def generate(
        self, prompts: Several[Prompt], sampling_params: Params = None, *, raw_output: On, **asked: Unpack[RawBySpecs]
    ) -> Coming[tuple[list[RawOutput], list[Handle | list[Handle] | None]]]: ...
    def generate(
        self,
        prompts: Any,
        sampling_params: Params = None,
        *,
        capture_layers: Layers | None = None,
        capture: CaptureSpec | Sequence[CaptureSpec | None] | None = None,
        steering: Steering | Sequence[Steering] | FromContext = FROM_CONTEXT,
        monitors: Sequence[Monitor] | None = None,
        raw_output: bool = False,
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
            capture: the rows to keep, for all prompts, or one spec each (None keeps nothing).
            steering: the edits to apply: a SteeringSpec (or one edit) for all prompts, or one each; None changes
                nothing. Left out, the steering of the enclosing `model.steered` applies.
            monitors: probes with thresholds that watch each request while it runs, and may end it: `Monitor`. Their
                reports are in the `RawOutput`, so they need `raw_output=True`.
            raw_output: return a `RawOutput` in place of each text: vLLM's RequestOutput as `output`, as `steering`
                a `SteeringReceipt` for each sample (None without steering), and as `monitors` the report of each
                monitor for each sample.
            add_special_tokens: True adds the tokenizer's special tokens, such as <bos>, to each text. Left out, they
                are added too, as in vLLM, with a warning if the text has them already, as a rendered chat has; False
                takes the text as it stands, True keeps both without a warning.
            lora_request: vLLM's LoRARequest, for an engine started with `enable_lora=True`.
            priority: vLLM's request priority, for an engine started with `scheduling_policy="priority"`.

        Returns:
            The text, or a list of texts for a list of prompts; with `n > 1`, a list of n texts for each prompt. If
            anything is captured, the pair (texts, handles), where handles is nested like texts and holds a
            `CaptureHandle` for each text, None where nothing is kept.

        There are prompt + generated - 1 rows: the last sampled token is never an input to the model. Layer `i` of
        "resid_post" is transformers' `hidden_states[i + 1]`, before the final norm for the last layer.

        Raises:
            InvalidPrompt, InvalidSpec, InvalidSelection, PointNotArmed: raised before that prompt runs. Earlier prompts
                of the list may have begun; they are cancelled, as after any other error.
            CaptureMemoryFull, SteeringSlotsFull: there is no room.
            SteeringNotApplied: a worker did not make every edit; the text is withheld.
            ModelClosed: the model is not open.
        """
        options = {"lora_request": lora_request, "priority": priority}
        call = CallArguments(
            sampling_params,
            capture_layers,
            capture,
            steering,
            options,
            raw_output=raw_output,
            monitors=monitors,
            add_special_tokens=special_asked(add_special_tokens),
        )
        return self._called("generate", self._answers.generated(prompts, in_context(self, call)))

    @overload
    def chat(
        self,
        messages: Conversation,
        sampling_params: Params = None,
        *,
        raw_output: Off = False,
        **asked: Unpack[ChatPlain],
    ) -> Coming[Text]: ...
    @overload
    def chat(
        self, messages: Conversation, sampling_params: Params = None, *, raw_output: On, **asked: Unpack[RawChatPlain]
    ) -> Coming[RawOutput]: ...
    @overload
    def chat(
        self,
        messages: Conversation,
        sampling_params: Params = None,
        *,
        raw_output: Off = False,
        **asked: Unpack[ChatByLayers],
    ) -> Coming[tuple[Text, Handle | list[Handle]]]: ...
    @overload
    def chat(
        self,
        messages: Conversation,
        sampling_params: Params = None,
        *,
        raw_output: On,
        **asked: Unpack[RawChatByLayers],
    ) -> Coming[tuple[RawOutput, Handle | list[Handle]]]: ...
    @overload
    def chat(
        self,
        messages: Conversation,
        sampling_params: Params = None,
        *,
        raw_output: Off = False,
        **asked: Unpack[ChatBySpec],
    ) -> Coming[tuple[Text, Handle | list[Handle]]]: ...
    @overload
    def chat(
        self, messages: Conversation, sampling_params: Params = None, *, raw_output: On, **asked: Unpack[RawChatBySpec]
    ) -> Coming[tuple[RawOutput, Handle | list[Handle]]]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling_params: Params = None,
        *,
        raw_output: Off = False,
        **asked: Unpack[ChatPlain],
    ) -> Coming[list[Text]]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling_params: Params = None,
        *,
        raw_output: On,
        **asked: Unpack[RawChatPlain],
    ) -> Coming[list[RawOutput]]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling_params: Params = None,
        *,
        raw_output: Off = False,
        **asked: Unpack[ChatByLayers],
    ) -> Coming[tuple[list[Text], list[Handle | list[Handle]]]]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling_params: Params = None,
        *,
        raw_output: On,
        **asked: Unpack[RawChatByLayers],
    ) -> Coming[tuple[list[RawOutput], list[Handle | list[Handle]]]]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling_params: Params = None,
        *,
        raw_output: Off = False,
        **asked: Unpack[ChatBySpec],
    ) -> Coming[tuple[list[Text], list[Handle | list[Handle]]]]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling_params: Params = None,
        *,
        raw_output: On,
        **asked: Unpack[RawChatBySpec],
    ) -> Coming[tuple[list[RawOutput], list[Handle | list[Handle]]]]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling_params: Params = None,
        *,
        raw_output: Off = False,
        **asked: Unpack[ChatBySpecs],
    ) -> Coming[tuple[list[Text], list[Handle | list[Handle] | None]]]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling_params: Params = None,
        *,
        raw_output: On,
        **asked: Unpack[RawChatBySpecs],
    ) -> Coming[tuple[list[RawOutput], list[Handle | list[Handle] | None]]]: ...
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params = None,
        *,
        capture_layers: Layers | None = None,
        capture: CaptureSpec | Sequence[CaptureSpec | None] | None = None,
        steering: Steering | Sequence[Steering] | FromContext = FROM_CONTEXT,
        monitors: Sequence[Monitor] | None = None,
        raw_output: bool = False,
        add_special_tokens: bool | None = None,
        lora_request: Any = None,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Generate the next message of a conversation, or of each of several.

        Args:
            messages: one conversation, a list of {"role", "content"} dicts, or a list of conversations. Text only; for
                pictures use `generate`.
            sampling_params, capture_layers, capture, steering, monitors, raw_output, lora_request, priority: as for
                `generate`.
            add_special_tokens: True adds the tokenizer's special tokens to those of the chat template; left out, they
                are not added.
            chat_template_kwargs: further arguments of the tokenizer's chat template.

        Returns:
            As for `generate`. Handles know the rows of each message (the template's own tokens belong to none):
            `handle.messages`, `handle.rows_of(0)`, `handle.rows_of("assistant")`.

        Raises:
            InvalidRequest: the tokenizer has no chat template, or it refuses the messages.
            The errors of `generate`.
        """
        options = {"lora_request": lora_request, "priority": priority}
        call = CallArguments(
            sampling_params,
            capture_layers,
            capture,
            steering,
            options,
            raw_output=raw_output,
            monitors=monitors,
            add_special_tokens=special_asked(add_special_tokens),
        )
        return self._called("chat", self._answers.replied(messages, in_context(self, call), chat_template_kwargs))

    @overload
    def read(self, prompts: Prompt, **asked: Unpack[Reading]) -> Coming[Handle]: ...
    @overload
    def read(self, prompts: Several[Prompt], **asked: Unpack[Reading]) -> Coming[list[Handle]]: ...
    @overload
    def read(self, prompts: Several[Prompt], **asked: Unpack[BySpecs]) -> Coming[list[Handle | None]]: ...
    def read(
        self,
        prompts: Any,
        *,
        capture_layers: Layers | None = None,
        capture: CaptureSpec | Sequence[CaptureSpec | None] | None = None,
        steering: Steering | Sequence[Steering] | FromContext = FROM_CONTEXT,
        add_special_tokens: bool | None = None,
        lora_request: Any = None,
        priority: int = 0,
    ) -> Coroutine[Any, Any, Any]:
        """Run prompts through the model without generating, and capture their activations; for pooling models too.

        Args:
            prompts: a str, token ids, one of vLLM's prompt dicts, or a list of these; each at least one token shorter
                than `max_model_len`, or for a pooling model at most as long.
            capture_layers, capture: as for `generate`; left out, all layers at "resid_post".
            steering, add_special_tokens, lora_request, priority: as for `generate`.

        Returns:
            A `CaptureHandle`, or a list of them for a list of prompts (None where nothing is kept), with a row for
            every token selected, the last one included. `handle.text` and `handle.output_token_ids` are empty.
            Inside `model.sketch`, without a capture of its own, the call adds rows to the sketch and returns None.

        Raises:
            EmptySelection: `tokens="generated"`: nothing is generated.
            The errors of `generate`.
        """
        options = {"lora_request": lora_request, "priority": priority}
        left_out = capture_layers is None and capture is None and not sketches_in_force(self)
        spec = CaptureSpec() if left_out else capture
        special = special_asked(add_special_tokens)
        call = CallArguments(READ, capture_layers, spec, steering, options, reading=True, add_special_tokens=special)
        return self._called("read", self._answers.read(prompts, in_context(self, call)))

    @overload
    def encode(self, prompts: Prompt, pooling: Pooling = None, **asked: Unpack[Plain]) -> Coming[Encoded]: ...
    @overload
    def encode(
        self, prompts: Prompt, pooling: Pooling = None, **asked: Unpack[ByLayers]
    ) -> Coming[tuple[Encoded, Handle]]: ...
    @overload
    def encode(
        self, prompts: Prompt, pooling: Pooling = None, **asked: Unpack[BySpec]
    ) -> Coming[tuple[Encoded, Handle]]: ...
    @overload
    def encode(
        self, prompts: Several[Prompt], pooling: Pooling = None, **asked: Unpack[Plain]
    ) -> Coming[list[Encoded]]: ...
    @overload
    def encode(
        self, prompts: Several[Prompt], pooling: Pooling = None, **asked: Unpack[ByLayers]
    ) -> Coming[tuple[list[Encoded], list[Handle]]]: ...
    @overload
    def encode(
        self, prompts: Several[Prompt], pooling: Pooling = None, **asked: Unpack[BySpec]
    ) -> Coming[tuple[list[Encoded], list[Handle]]]: ...
    @overload
    def encode(
        self, prompts: Several[Prompt], pooling: Pooling = None, **asked: Unpack[BySpecs]
    ) -> Coming[tuple[list[Encoded], list[Handle | None]]]: ...
    def encode(
        self,
        prompts: Any,
        pooling: Pooling = None,
        *,
        capture_layers: Layers | None = None,
        capture: CaptureSpec | Sequence[CaptureSpec | None] | None = None,
        steering: Steering | Sequence[Steering] | FromContext = FROM_CONTEXT,
        add_special_tokens: bool | None = None,
        lora_request: Any = None,
        priority: int = 0,
    ) -> Coroutine[Any, Any, Any]:
        """Embed or classify prompts with a pooling model and capture activations on request.

        Args:
            prompts: a str, token ids, one of vLLM's prompt dicts, or a list of these; each of at most `max_model_len`
                tokens.
            pooling: vLLM's PoolingParams or a dict of its fields, for all prompts or one each: `task` ("embed",
                "classify", "token_embed", "token_classify"; left out, vLLM's default for the model), `use_activation`,
                `dimensions`.
            capture_layers, capture, steering, add_special_tokens, lora_request, priority: as for `generate`.

        Returns:
            An `Encoded`, with vLLM's pooled output as `embedding` or `data`, or a list of them for a list of prompts.
            If anything is captured, the pair (encoded, handles), with a `CaptureHandle` for each, None where nothing is
            kept. There is a row for every token selected, the last one included.

        Raises:
            InvalidRequest: the model generates; or something is wrong with the pooling parameters.
            EmptySelection: `tokens="generated"`: nothing is generated.
            The errors of `generate`.
        """
        options = {"lora_request": lora_request, "priority": priority}
        call = CallArguments(
            pooling,
            capture_layers,
            capture,
            steering,
            options,
            reading=True,
            encoding=True,
            add_special_tokens=special_asked(add_special_tokens),
        )
        return self._called("encode", self._answers.encoded(prompts, in_context(self, call)))

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        capture_layers: Layers | None = None,
        capture: CaptureSpec | None = None,
        steering: Steering | FromContext = FROM_CONTEXT,
        monitors: Sequence[Monitor] | None = None,
        add_special_tokens: bool | None = None,
        lora_request: Any = None,
        priority: int = 0,
    ) -> AsyncGenerator[Chunk, None]:
        """Generate text for one prompt, yielding text and rows as they come.

        Args:
            prompt: one prompt, as for `generate`.
            sampling_params, capture_layers, capture, steering, add_special_tokens, lora_request, priority: as for
                `generate`, for one sample.
            monitors: as for `generate`; the chunks hold their crossings.

        Yields:
            Chunks, whose texts, token ids and rows concatenate to those of the whole request; the first chunk has the
            rows of the prompt. Closing the generator (`contextlib.aclosing`, or dropping it after leaving the loop)
            cancels the request.

        Raises:
            InvalidRequest: several prompts, `n > 1`, or a reduction, which needs the whole sequence.
            The errors of `generate`, and CaptureIncomplete. SteeringNotApplied comes in place of the last chunk.
        """
        options = {"lora_request": lora_request, "priority": priority}
        special = special_asked(add_special_tokens)
        call = CallArguments(
            sampling_params, capture_layers, capture, steering, options, monitors=monitors, add_special_tokens=special
        )
        return self._answers.streamed(prompt, in_context(self, call))
