"""The types of what a call is asked, which decide the type of what it gives."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, Required, TypeAlias, TypedDict, TypeVar

from steercap.core.spec import CaptureSpec, Layers
from steercap.requests.context import FromContext
from steercap.steering.spec import SteeringSpec

if TYPE_CHECKING:
    from steercap.adapters.types import PoolingParams, SamplingParams
    from steercap.steering.edits.base import Edit
    from steercap.steering.logit_bias import LogitBias
    from steercap.steering.monitor import Monitor


Value = TypeVar("Value")
One_co = TypeVar("One_co", covariant=True)
#: What is awaited.
Coming: TypeAlias = Coroutine[Any, Any, Value]
#: A text, token ids, or one of vLLM's prompt dicts.
Prompt: TypeAlias = str | Mapping[str, Any] | Sequence[int]
#: Messages, {"role", "content"}.
Conversation: TypeAlias = Sequence[Mapping[str, Any]]
#: What a prompt gives: its text, or with `n > 1`, which no type checker sees, those of its samples.
Text: TypeAlias = str | list[str]
#: What one prompt's `steering=` may be.
Steering: TypeAlias = "SteeringSpec | Edit | LogitBias | None"
#: vLLM's SamplingParams or their fields, for all prompts or one each.
Params: TypeAlias = "SamplingParams | Mapping[str, Any] | Sequence[Any] | None"
#: vLLM's PoolingParams or their fields, for all prompts or one each.
Pooling: TypeAlias = "PoolingParams | Mapping[str, Any] | Sequence[Any] | None"
On: TypeAlias = Literal[True]
Off: TypeAlias = Literal[False]


class Several(Protocol[One_co]):
    """A sequence that is not a str: its `in` takes anything, which that of a str does not."""

    def __contains__(self, item: object, /) -> bool: ...
    def __iter__(self) -> Iterator[One_co]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> One_co: ...


class Options(TypedDict, total=False):
    """Arguments of `Calls.generate` that do not change the type of what it gives."""

    steering: Steering | Sequence[Steering] | FromContext
    add_special_tokens: bool | None
    lora_request: Any
    priority: int


class Plain(Options, total=False):
    """Nothing is kept."""

    capture_layers: None
    capture: None


class ByLayers(Options, total=False):
    """Layers are kept."""

    capture_layers: Required[Layers]
    capture: None


class BySpec(Options, total=False):
    """What a spec says is kept."""

    capture_layers: None
    capture: Required[CaptureSpec]


class BySpecs(Options, total=False):
    """The same, with a spec for each prompt; None keeps nothing of it."""

    capture_layers: None
    capture: Required[Sequence[CaptureSpec | None]]


class Reading(Options, total=False):
    """What a spec or the layers say is kept; all layers if neither is given."""

    capture_layers: Layers | None
    capture: CaptureSpec | None


class Template(TypedDict, total=False):
    """What `chat` takes besides."""

    chat_template_kwargs: Mapping[str, Any] | None


class ChatPlain(Plain, Template):
    """`Plain`, of `chat`."""


class ChatByLayers(ByLayers, Template):
    """`ByLayers`, of `chat`."""


class ChatBySpec(BySpec, Template):
    """`BySpec`, of `chat`."""


class ChatBySpecs(BySpecs, Template):
    """`BySpecs`, of `chat`."""


class Watched(TypedDict, total=False):
    """What `generate` and `chat` take besides, with `raw_output=True`."""

    monitors: Sequence[Monitor] | None


class RawPlain(Plain, Watched):
    """`Plain`, with monitors."""


class RawByLayers(ByLayers, Watched):
    """`ByLayers`, with monitors."""


class RawBySpec(BySpec, Watched):
    """`BySpec`, with monitors."""


class RawBySpecs(BySpecs, Watched):
    """`BySpecs`, with monitors."""


class RawChatPlain(ChatPlain, Watched):
    """`ChatPlain`, with monitors."""


class RawChatByLayers(ChatByLayers, Watched):
    """`ChatByLayers`, with monitors."""


class RawChatBySpec(ChatBySpec, Watched):
    """`ChatBySpec`, with monitors."""


class RawChatBySpecs(ChatBySpecs, Watched):
    """`ChatBySpecs`, with monitors."""
