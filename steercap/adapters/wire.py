"""Trial decoding of requests in the client, as the engine's input thread will decode them, and msgspec's errors.

vLLM checks ranges in the client, but types only where the engine decodes the request: a wrong type ends the thread that
reads all requests, while the engine seems alive. So vLLM's own preparation, encoder and typed decoder run here first;
for requests of token ids and plain numbers its preparation is enough. It relies on `AsyncLLM.get_supported_tasks`,
`InputProcessor.process_inputs`, `EngineCoreRequest`, `MsgpackEncoder` and `MsgpackDecoder`. It can go when vLLM refuses
such requests in the client.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Final

import msgspec
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from steercap.core.values import shown
from steercap.errors import InvalidRequest

#: Fields of sampling parameters that hold a number or a flag, whose types and bounds are checked where they are read.
_NUMBERS: Final = frozenset(
    {
        "n",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "ignore_eos",
        "max_tokens",
        "min_tokens",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "output_kind",
        "skip_clone",
        "output_text_buffer_length",
    }
)
#: Names of all other fields, including those of later releases.
_OTHERS: Final = tuple(name for name in SamplingParams.__struct_fields__ if name not in _NUMBERS and name[0] != "_")
_ALL_NUMBERS: Final = attrgetter(*(name for name in SamplingParams.__struct_fields__ if name in _NUMBERS))
_ALL_OTHERS: Final = attrgetter(*_OTHERS)
#: Options that `AsyncLLM.add_request` sets on the request that `process_inputs` has made, which takes neither.
_SET_ON_REQUEST: Final = ("reasoning_ended", "reasoning_parser_kwargs")
#: Non-negative integers that fit a runner's int32 tensors.
_INT32: Final = range(2**31)


class Wire:
    """Trial encoder and decoder of an engine's requests."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        #: Numeric parameters and options of the last plain request that passed, and the maximum length and
        #: token id of those that passed with them.
        self._passed: tuple[Any, ...] | None = None
        self._length = self._greatest = 0

    async def check(self, payload: Any, params: SamplingParams | PoolingParams, options: Mapping[str, Any]) -> None:
        """Check that vLLM accepts a request, and that the engine can decode it; nothing is sent.

        A plain request that differs from the last one that passed only in fewer or smaller token ids is not tried
        again.

        Args:
            payload: the rendered prompt.
            params: the request's sampling or pooling parameters.
            options: further arguments of `AsyncLLM.generate` or `encode`.

        Raises:
            InvalidRequest: vLLM refuses the request or could not decode it; the message names the argument.
        """
        ids = plain_ids(payload) if is_plain_options(options) and is_plain_params(params) else None
        asked = None if ids is None else (_ALL_NUMBERS(params), dict(options))
        if ids is not None and asked == self._passed and len(ids) <= self._length and max(ids) <= self._greatest:
            return
        tasks = await self._llm.get_supported_tasks()
        prepared = {name: value for name, value in options.items() if name not in _SET_ON_REQUEST}
        try:
            request = self._llm.input_processor.process_inputs("steercap", payload, params, tasks, **prepared)
        except Exception as error:  # of any kind: vLLM compares and indexes before it looks at types
            raise InvalidRequest(f"vLLM refuses this request: {str(error) or type(error).__name__}") from error
        if ids is not None:
            if asked != self._passed:
                self._passed, self._length, self._greatest = asked, 0, 0
            self._length, self._greatest = max(self._length, len(ids)), max(self._greatest, *ids)
            return
        for name in _SET_ON_REQUEST:
            if options.get(name) is not None:
                setattr(request, name, options[name])
        try:
            frames = self._encoder.encode(request)  # several where there are pictures: torch reads what it can write to
            self._decoder.decode([bytearray(frame) for frame in frames])
        except Exception as error:  # of any kind: it would have ended the input thread
            given = msgspec.structs.asdict(request) | msgspec.structs.asdict(params)
            complaint = named(str(error), given, EngineCoreRequest.__struct_fields__)
            raise InvalidRequest(f"this request cannot be sent to the engine: {complaint}") from error


def plain_ids(payload: Any) -> list[int] | None:
    """Return the token ids of a rendered prompt of int32 token ids alone; None for any other prompt.

    Such a prompt needs no trial decoding. An ASCII cache salt is allowed.
    """
    if type(payload) is not dict or payload["type"] != "token":
        return None
    ids, salt = payload["prompt_token_ids"], payload.get("cache_salt")
    fit = set(map(type, ids)) == {int} and min(ids) in _INT32 and max(ids) in _INT32
    return ids if fit and (salt is None or (type(salt) is str and salt.isascii())) else None


def is_plain_options(options: Mapping[str, Any]) -> bool:
    """Check if a request has no option except a priority that fits int32."""
    priority = options.get("priority", 0)
    return (
        type(priority) is int
        and priority in _INT32
        and all(value is None for name, value in options.items() if name != "priority")
    )


def is_plain_params(params: SamplingParams | PoolingParams) -> bool:
    """Check if sampling parameters, as returned by `read_params`, set nothing but numbers that fit int32."""
    return (
        type(params) is SamplingParams
        and all(value in _INT32 for value in (params.max_tokens, params.min_tokens, params.n) if value is not None)
        and params.top_k <= _INT32[-1]
        and not any(map(_is_set, _ALL_OTHERS(params)))
    )


def _is_set(value: Any) -> bool:
    """Check if a value is neither None, False, 0 nor an empty list."""
    return value is not None and (type(value) not in {bool, int, list} or bool(value))


#: Pattern of msgspec's message about a wrong value, with the value's path.
_COMPLAINT: Final = re.compile(r"(?P<says>.*?) - at (?P<key>`key` in )?`\$(?P<path>.*)`", re.DOTALL)


def named(complaint: str, values: Mapping[str, Any], places: tuple[str, ...] = ()) -> str:
    """Rewrite a validation message of msgspec to name the field and show its value.

    Args:
        complaint: msgspec's message; any other text is returned unchanged.
        values: the validated values, by the field name with which the path starts.
        places: field names by index, for a path that starts with an index.
    """
    found = _COMPLAINT.fullmatch(complaint)
    if found is None:
        return complaint
    path = found["path"]
    if places and (numbered := re.match(r"\[(\d+)\]", path)):
        path = places[int(numbered[1])] + path[numbered.end() :]
    path = path.removeprefix("sampling_params").lstrip(".")
    name = re.split(r"[.\[]", path)[0]
    where = f"a key of {path}" if found["key"] else path
    says = f"{where}: {found['says'][:1].lower()}{found['says'][1:]}"
    return f"{says} ({name}={shown(values[name])})" if name in values else says
