"""A request as the engine's input thread will read it, read here first.

vLLM 0.32 checks ranges in the client, and types only where the engine decodes the request's frame: a wrong one ends the
thread that reads all requests, and the engine seems to live. So vLLM's own preparation, encoder and typed decoder run
here before. What it relies on: `AsyncLLM.get_supported_tasks`, `InputProcessor.process_inputs`, `EngineCoreRequest`,
`MsgpackEncoder` and `MsgpackDecoder`. It can go when vLLM refuses such requests in the client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from steercap.adapters.complaints import named
from steercap.core.values import index_of, shown
from steercap.errors import InvalidPrompt, InvalidRequest

_PROMPT_KEYS: Final = ("prompt", "prompt_token_ids", "cache_salt")
#: Of vLLM's other kinds of prompt, which it refuses itself, with its reason.
_FOREIGN: Final = ("prompt_embeds", "multi_modal_data")


class Wire:
    """What the input thread of an engine would make of requests.

    Args:
        llm: the engine.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreRequest)

    async def check(self, payload: Any, params: SamplingParams, options: Mapping[str, Any]) -> None:
        """See that vLLM takes a request, and that the engine can read it.

        Args:
            payload: the rendered prompt.
            params: its sampling parameters.
            options: further arguments of `AsyncLLM.generate`.

        Raises:
            InvalidRequest: they cannot be sent; the message names the argument.
        """
        tasks = await self._llm.get_supported_tasks()
        try:
            request = self._llm.input_processor.process_inputs("steercap", payload, params, tasks, **options)
        except Exception as error:  # of any kind: vLLM compares and indexes before it looks at types
            raise InvalidRequest(f"vLLM refuses this request: {str(error) or type(error).__name__}") from error
        try:
            self._decoder.decode(self._encoder.encode(request))
        except Exception as error:  # whatever it is, it would have ended the input thread
            given = msgspec.structs.asdict(request) | msgspec.structs.asdict(params)
            complaint = named(str(error), given, EngineCoreRequest.__struct_fields__)
            raise InvalidRequest(f"this request cannot be sent to the engine: {complaint}") from error


def prompt_dict(prompt: Mapping[Any, Any]) -> dict[str, Any]:
    """A prompt dict as vLLM takes it, its token ids plain ints of its own.

    Raises:
        InvalidPrompt: a key that vLLM would ignore, or values of other types.
    """
    if unknown := [key for key in prompt if key not in _PROMPT_KEYS and key not in _FOREIGN]:
        raise InvalidPrompt(
            f"the prompt dict has {', '.join(map(repr, unknown))}, which would be ignored; "
            f"it may have {', '.join(map(repr, _PROMPT_KEYS))}"
        )
    found = dict(prompt)
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
    return [_token_id(one, place) for place, one in enumerate(ids)]


def _token_id(one: Any, place: int) -> int:
    index = index_of(one)
    if index is None:
        raise InvalidPrompt(f"prompt_token_ids[{place}] is {shown(one)}; give whole numbers")
    return index
