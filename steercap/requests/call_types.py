"""Types of the calls' arguments, which determine the type of each call's result."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, Required, TypeAlias, TypedDict, TypeVar

from steercap.core.spec import CaptureSpec, Layers
from steercap.requests.context import FromContext
from steercap.steering.spec import SteeringSpec

if TYPE_CHECKING:
    from steercap.adapters.types import PoolingParams, SamplingParams
    from steercap.steering.edits import Edit
    from steercap.steering.logit_bias import LogitBias
    from steercap.steering.monitor import Monitor


Value = TypeVar("Value")
One_co = TypeVar("One_co", covariant=True)
#: Coroutine that returns a value.
Coming: TypeAlias = Coroutine[Any, Any, Value]
#: A text, token ids, or one of vLLM's prompt dicts.
Prompt: TypeAlias = str | Mapping[str, Any] | Sequence[int]
#: Messages, {"role", "content"}.
Conversation: TypeAlias = Sequence[Mapping[str, Any]]
#: Text of a prompt, or with `n > 1`, which no type checker sees, the list of texts of its samples.
Text: TypeAlias = str | list[str]
#: Values of `steering=` for one prompt.
Steering: TypeAlias = "SteeringSpec | Edit | LogitBias | None"
#: vLLM's SamplingParams or their fields, for all prompts or one each.
Params: TypeAlias = "SamplingParams | Mapping[str, Any] | Sequence[Any] | None"
#: vLLM's PoolingParams or their fields, for all prompts or one each.
Pooling: TypeAlias = "PoolingParams | Mapping[str, Any] | Sequence[Any] | None"
On: TypeAlias = Literal[True]
Off: TypeAlias = Literal[False]


class Several(Protocol[One_co]):
    """Sequence that is not a str: its `in` takes any object, which that of a str does not."""

    def __contains__(self, item: object, /) -> bool: ...
    def __iter__(self) -> Iterator[One_co]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> One_co: ...


class Options(TypedDict, total=False):
    """Arguments of `Calls.generate` that do not change the type of its result."""

    steering: Steering | Sequence[Steering] | FromContext
    add_special_tokens: bool | None
    lora_request: Any
    priority: int


class Plain(Options, total=False):
    """Arguments of a call that captures nothing."""

    capture_layers: None
    capture: None


class ByLayers(Options, total=False):
    """Arguments of a call that captures layers."""

    capture_layers: Required[Layers]
    capture: None


class BySpec(Options, total=False):
    """Arguments of a call that captures by one spec."""

    capture_layers: None
    capture: Required[CaptureSpec]


class BySpecs(Options, total=False):
    """Arguments of a call with a capture spec for each prompt; None captures nothing of that prompt."""

    capture_layers: None
    capture: Required[Sequence[CaptureSpec | None]]


class Reading(Options, total=False):
    """Arguments of `read`, which captures by a spec or layers; all layers if neither is given."""

    capture_layers: Layers | None
    capture: CaptureSpec | None


class Template(TypedDict, total=False):
    """Further arguments of `chat`."""

    chat_template_kwargs: Mapping[str, Any] | None


class ChatPlain(Plain, Template):
    """Arguments of `chat` that captures nothing."""


class ChatByLayers(ByLayers, Template):
    """Arguments of `chat` that captures layers."""


class ChatBySpec(BySpec, Template):
    """Arguments of `chat` that captures by one spec."""


class ChatBySpecs(BySpecs, Template):
    """Arguments of `chat` that captures by a spec for each prompt."""


class Watched(TypedDict, total=False):
    """Further arguments of `generate` and `chat` with `raw_output=True`."""

    monitors: Sequence[Monitor] | None


class RawPlain(Plain, Watched):
    """Arguments of `generate` with `raw_output=True` that captures nothing: monitors, too."""


class RawByLayers(ByLayers, Watched):
    """Arguments of `generate` with `raw_output=True` that captures layers: monitors, too."""


class RawBySpec(BySpec, Watched):
    """Arguments of `generate` with `raw_output=True` that captures by one spec: monitors, too."""


class RawBySpecs(BySpecs, Watched):
    """Arguments of `generate` with `raw_output=True` that captures by a spec for each prompt: monitors, too."""


class RawChatPlain(ChatPlain, Watched):
    """Arguments of `chat` with `raw_output=True` that captures nothing: monitors, too."""


class RawChatByLayers(ChatByLayers, Watched):
    """Arguments of `chat` with `raw_output=True` that captures layers: monitors, too."""


class RawChatBySpec(ChatBySpec, Watched):
    """Arguments of `chat` with `raw_output=True` that captures by one spec: monitors, too."""


class RawChatBySpecs(ChatBySpecs, Watched):
    """Arguments of `chat` with `raw_output=True` that captures by a spec for each prompt: monitors, too."""
