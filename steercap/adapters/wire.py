"""Trial decoding of a request in the client, as the engine's input thread will do it, and msgspec's errors.

vLLM checks ranges in the client, and types only where the engine decodes the request's frame: a wrong one ends the
thread that reads all requests, and the engine seems to live. So vLLM's own preparation, encoder and typed decoder run
here first; for requests of token ids and plain numbers its preparation is enough. It relies on
`AsyncLLM.get_supported_tasks`, `InputProcessor.process_inputs`, `EngineCoreRequest`, `MsgpackEncoder` and
`MsgpackDecoder`. It can go when vLLM refuses such requests in the client.
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
#: Every other field, those of later releases too.
_OTHERS: Final = tuple(name for name in SamplingParams.__struct_fields__ if name not in _NUMBERS and name[0] != "_")
_ALL_NUMBERS: Final = attrgetter(*(name for name in SamplingParams.__struct_fields__ if name in _NUMBERS))
_ALL_OTHERS: Final = attrgetter(*_OTHERS)
#: Options that `AsyncLLM.add_request` sets on the request that `process_inputs` has made, which takes neither.
_SET_ON_REQUEST: Final = ("reasoning_ended", "reasoning_parser_kwargs")
#: Integers that every decoder and every tensor of a runner holds.
_INT32: Final = range(2**31)


class Wire:
    """Trial encoder and decoder of an engine's requests."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        #: Numbers of the parameters and options of the last plain request that passed, and the greatest length and
        #: token id of those that passed with them.
        self._passed: tuple[Any, ...] | None = None
        self._length = self._greatest = 0

    async def check(self, payload: Any, params: SamplingParams | PoolingParams, options: Mapping[str, Any]) -> None:
        """Check that vLLM accepts a request, and that the engine can decode it.

        A plain request that differs from one that passed only in its token ids, none of them greater and not more of
        them, passes without a trial.

        Args:
            payload: the rendered prompt.
            params: its sampling or pooling parameters.
            options: further arguments of `AsyncLLM.generate` or `encode`.

        Raises:
            InvalidRequest: they cannot be sent; the message names the argument.
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
    """Return the token ids of a prompt that holds nothing else, all in bounds; None for another prompt.

    Decoding them would find nothing: none of its values can be of a type that the engine does not expect.
    """
    if type(payload) is not dict or payload["type"] != "token":
        return None
    ids, salt = payload["prompt_token_ids"], payload.get("cache_salt")
    fit = set(map(type, ids)) == {int} and min(ids) in _INT32 and max(ids) in _INT32
    return ids if fit and (salt is None or (type(salt) is str and salt.isascii())) else None


def is_plain_options(options: Mapping[str, Any]) -> bool:
    """Return True if a request has no option but a priority in bounds."""
    priority = options.get("priority", 0)
    return (
        type(priority) is int
        and priority in _INT32
        and all(value is None for name, value in options.items() if name != "priority")
    )


def is_plain_params(params: SamplingParams | PoolingParams) -> bool:
    """Return True for sampling parameters, as `read_params` returns them, that are numbers in bounds alone."""
    return (
        type(params) is SamplingParams
        and all(value in _INT32 for value in (params.max_tokens, params.min_tokens, params.n) if value is not None)
        and params.top_k <= _INT32[-1]
        and not any(map(_is_set, _ALL_OTHERS(params)))
    )


def _is_set(value: Any) -> bool:
    """Return True for a value other than None, False, 0 and an empty list."""
    return value is not None and (type(value) not in {bool, int, list} or bool(value))


#: msgspec's message about a wrong value, with the path of the value.
_COMPLAINT: Final = re.compile(r"(?P<says>.*?) - at (?P<key>`key` in )?`\$(?P<path>.*)`", re.DOTALL)


def named(complaint: str, values: Mapping[str, Any], places: tuple[str, ...] = ()) -> str:
    """Return a validation error with the name and the value that it is about.

    Args:
        complaint: message of msgspec; any other is returned as it is.
        values: values by the names in which the path starts.
        places: names for the indices in which the path starts, where it starts with a number.
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
