"""Types of the calls' arguments and results; the type of an argument determines that of the result."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeAlias, TypedDict, TypeVar

import msgspec

from steercap.core.display import brief
from steercap.core.receipt import SteeringReceipt
from steercap.errors import InvalidRequest
from steercap.requests.context import FromContext
from steercap.requests.monitoring import MonitorReport
from steercap.steering.spec import Steering

if TYPE_CHECKING:
    from typing_extensions import TypeVar as DefaultingTypeVar

    from steercap.adapters import PoolingParams, SamplingParams
    from steercap.captures.handle import CaptureHandle
    from steercap.steering.monitor import Monitor

    #: Type of the handles of captured rows: awaited ones, or those of `steercap.sync`.
    Handle = DefaultingTypeVar("Handle", default=CaptureHandle)
else:
    Handle = TypeVar("Handle")

Value = TypeVar("Value")
One_co = TypeVar("One_co", covariant=True)
#: Coroutine that returns a value.
CoroutineOf: TypeAlias = Coroutine[Any, Any, Value]
#: Argument types that the caller may change later, so that they are copied; and those that nobody can change.
_CHANGING: Final = frozenset({list, dict, set, tuple})
_ATOMS: Final = frozenset({str, int, float, bool, bytes, type(None)})
#: Nested levels that are copied: enough for the arguments of a tool call in a list of conversations.
_LEVELS: Final = 12
#: Sampling parameters of a prompt that is only read: vLLM samples one token at least, which has no row.
READ: Final[Mapping[str, Any]] = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
#: A text, token ids, or one of vLLM's prompt dicts.
Prompt: TypeAlias = str | Mapping[str, Any] | Sequence[int]
#: Messages, each a dict with "role" and "content".
Conversation: TypeAlias = Sequence[Mapping[str, Any]]
#: Text of a prompt, or with `n > 1`, which no type checker sees, the list of its samples' texts.
Text: TypeAlias = str | list[str]
#: Values of `steering=` for one prompt: with a server also the name of vectors or steering that it has.
PromptSteering: TypeAlias = "Steering | str | FromContext | None"
#: The same for a call: for all prompts, or one each.
CallSteering: TypeAlias = "PromptSteering | Sequence[Steering | str | None]"
#: vLLM's SamplingParams or a dict of their fields, for all prompts or one each.
Params: TypeAlias = "SamplingParams | Mapping[str, Any] | Sequence[Any] | None"
#: vLLM's PoolingParams or a dict of their fields, for all prompts or one each.
Pooling: TypeAlias = "PoolingParams | Mapping[str, Any] | Sequence[Any] | None"


class Several(Protocol[One_co]):
    """Typing protocol for lists and tuples but not `str`, whose `__contains__` accepts only a str."""

    def __contains__(self, item: object, /) -> bool: ...
    def __iter__(self) -> Iterator[One_co]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> One_co: ...


class Options(TypedDict, total=False):
    """Arguments of every call that do not change the type of its result."""

    steering: CallSteering
    add_special_tokens: bool | None
    lora_request: Any
    priority: int


class ChatOptions(Options, total=False):
    """Arguments of `chat` that do not change the type of its result."""

    chat_template_kwargs: Mapping[str, Any] | None


class RunOptions(ChatOptions, total=False):
    """Arguments of `run` that do not change the type of its result."""

    monitors: Sequence[Monitor] | None


@dataclass(frozen=True)
class Generation(Generic[Handle]):
    """Result of one prompt: its texts, captures and reports, an entry for each sample.

    Args:
        output: vLLM's RequestOutput, unchanged, such as `output.outputs[0].logprobs`; a server's is OpenAI's
            `Completion`.
        texts: generated texts, one for each sample.
        handles: handle of each sample's captured rows; None if nothing is captured.
        steering: receipt of each sample's edits; None if the request was not steered.
        monitors: for each sample, the report of each monitor; None without monitors.
    """

    output: Any
    texts: tuple[str, ...]
    handles: tuple[Handle, ...] | None = None
    steering: tuple[SteeringReceipt, ...] | None = None
    monitors: tuple[tuple[MonitorReport, ...], ...] | None = None

    def __repr__(self) -> str:
        """Return texts and reports, without vLLM's output."""
        return brief(self, "output")

    @property
    def samples(self) -> Sequence[Any]:
        """Samples of `output` with their `text`, `token_ids` and `finish_reason`, from vLLM or from a server."""
        found: Sequence[Any] = self.output.choices if hasattr(self.output, "choices") else self.output.outputs
        return found

    @property
    def text(self) -> str:
        """Text of the only sample.

        Raises:
            InvalidRequest: there are several samples.
        """
        return _only(self.texts, "text", "texts")

    @property
    def handle(self) -> Handle:
        """Handle of the only sample.

        Raises:
            InvalidRequest: nothing was captured, or there are several samples.
        """
        if self.handles is None:
            raise InvalidRequest("nothing of this prompt was captured; give run capture= or capture_layers=")
        return _only(self.handles, "handle", "handles")


def _only(values: Sequence[Value], name: str, several: str) -> Value:
    if len(values) != 1:
        raise InvalidRequest(f"this generation has {len(values)} samples, each with a {name} of its own; use {several}")
    return values[0]


def copied(value: Any, levels: int = _LEVELS) -> Any:
    """Return a copy of a value: of its lists, tuples, dicts and sets, nested ones too, and of vectors of any library.

    Everything else is shared, such as specs, which do not change, and pictures.

    Args:
        value: an argument of a call.
        levels: number of nested levels to copy.
    """
    kind = type(value)
    if kind in _ATOMS or not levels:
        return value
    if kind not in _CHANGING:
        return _copied_vector(value)
    if kind is dict:
        return {name: copied(one, levels - 1) for name, one in value.items()}
    if kind is list and value and type(value[0]) is int:  # token ids, thousands of them
        return value.copy()
    return kind(value) if _ATOMS.issuperset(map(type, value)) else kind(copied(one, levels - 1) for one in value)


def _copied_vector(value: Any) -> Any:
    if getattr(value, "ndim", 0) != 1:
        return value
    copying = getattr(value, "clone", None) or getattr(value, "copy", None)  # of torch, of NumPy
    return value if copying is None else copying()


def copied_params(params: Any) -> Any:
    """Return a copy of parameters that are a mapping or vLLM's, or of each in a list or tuple; others unchanged."""
    if type(params) in {list, tuple}:
        return [*map(copied_params, params)]
    if isinstance(params, msgspec.Struct):
        found = copy(params)
        for name in found.__struct_fields__:
            if type(value := getattr(found, name)) in _CHANGING:
                setattr(found, name, copied(value))
        return found
    return copied(dict(params)) if isinstance(params, Mapping) else params
