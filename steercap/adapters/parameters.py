"""Conversion of users' sampling and pooling parameters to vLLM's, with each value checked for its type.

vLLM accepts sampling parameters of any type and fails where they are used, in the engine. `msgspec` knows the types of
`SamplingParams`. It can go when vLLM checks types.

Pooling relies on `PoolingParams`, `POOLING_TASKS`, `ModelConfig.get_pooling_task`; and on this: a model's `pooler`
has a pooler for each task in `poolers_by_task`, and the token-wise poolers have a `head` with `forward_chunk`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, Final

import msgspec
import numpy as np
import torch
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams

from steercap.adapters.wire import named
from steercap.core.plan import EXTRA_ARGS_KEY
from steercap.core.values import check_seed, choices, shown
from steercap.errors import InvalidRequest, UnsupportedModel

#: Fields of `SamplingParams` that vLLM sets itself.
_INTERNAL: Final = {"output_text_buffer_length", "skip_clone"}
_PUBLIC: Final = tuple(
    name for name in SamplingParams.__struct_fields__ if not name.startswith("_") and name not in _INTERNAL
)
#: Maximum nesting of `extra_args`, far below Python's recursion limit for copying and pickling.
_DEPTH: Final = 50
_FLOAT32: Final = torch.finfo(torch.float32)
#: Types of immutable values, which need no copy.
_ATOMS: Final = frozenset({type(None), bool, int, float, str, RequestOutputKind})
_ALL_VALUES: Final = attrgetter(*_PUBLIC)


def read_params(given: Any) -> SamplingParams:
    """Convert a user's sampling parameters to a new SamplingParams without shared objects; vLLM's defaults for None.

    Args:
        given: SamplingParams, a dict of their fields, or None.

    Raises:
        InvalidRequest: a name is unknown, a value has the wrong type, is refused by vLLM or does not fit its tensors,
            or `extra_args` has steercap's own key.
    """
    fields = _fields(given)
    _check_plain(fields.get("extra_args"), "extra_args")  # before it is copied, which has its own bounds
    try:
        if isinstance(rows := fields.get("prompt_logprob_token_ids"), list):
            fields["prompt_logprob_token_ids"] = np.asarray(rows)
        copied = {name: one if type(one) in _ATOMS else copy.deepcopy(one) for name, one in fields.items()}
        params = msgspec.convert(copied, SamplingParams)
    except Exception as error:  # of any kind: vLLM computes with the values, and copies run the user's own code
        raise InvalidRequest(f"sampling parameters: {named(str(error), fields)}") from error
    _check_numbers(params)
    if params.ignore_eos and params.structured_outputs is not None:
        raise InvalidRequest(
            "ignore_eos=True with structured_outputs: past the end of the structure nothing constrains the text; "
            "leave ignore_eos out"
        )
    if EXTRA_ARGS_KEY in (params.extra_args or {}):
        raise InvalidRequest(f"extra_args[{EXTRA_ARGS_KEY!r}] belongs to steercap; use capture= and steering=")
    params.skip_clone = True  # nobody else has them, and vLLM's deep copy would take longer than all the rest
    return params


class ParamsReader:
    """Converter of users' sampling parameters that reuses the last result for equal input."""

    def __init__(self) -> None:
        self._copied: Any = self  # nothing yet
        self._types: tuple[Any, ...] = ()
        self._params = SamplingParams()

    def read(self, given: Any) -> SamplingParams:
        """Convert a user's sampling parameters to SamplingParams that the caller owns; errors as of `read_params`."""
        types = (*(given if type(given) is dict else ()), *map(type, _values(given)))
        if types != self._types or given != self._copied:
            self._params, self._copied = read_params(given), self
            if all(type(one) in _ATOMS or (type(one) is list and not one) for one in _values(given)):
                self._copied, self._types = copy.deepcopy(given), types
        return copy.copy(self._params)


def _values(given: Any) -> Iterable[Any]:
    """Return the values in SamplingParams or a dict of them; for another type, a tuple of the object itself."""
    if type(given) is SamplingParams:
        return _ALL_VALUES(given)
    return given.values() if type(given) is dict else (given,)


def wants_prompt_logprobs(params: SamplingParams) -> bool:
    """Check if log probabilities of prompt tokens are requested."""
    return params.prompt_logprobs is not None or getattr(params, "prompt_logprob_token_ids", None) is not None


def _fields(given: Any) -> dict[str, Any]:
    """Return the user's sampling parameters by field name, with NumPy numbers converted to Python's; {} for None."""
    if given is None:
        return {}
    if isinstance(given, SamplingParams):
        found = {name: getattr(given, name) for name in _PUBLIC}
    elif isinstance(given, Mapping):
        found = dict(given)
    else:
        raise InvalidRequest(f"sampling_params={shown(given)}; give vLLM's SamplingParams, or a dict of its fields")
    found = _plain_numbers(found, "sampling", _PUBLIC)
    if isinstance(found.get("output_kind"), RequestOutputKind):
        found["output_kind"] = found["output_kind"].value
    return found


def _plain_numbers(fields: Mapping[str, Any], kind: str, known: tuple[str, ...]) -> dict[str, Any]:
    """Return fields with NumPy numbers converted to Python's; InvalidRequest for a name that is not in `known`."""
    for name in fields:
        if name not in known:
            raise InvalidRequest(f"there is no {kind} parameter {name!r}; {choices(name, known)}")
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in fields.items()}


def _check_numbers(params: SamplingParams) -> None:
    """Check that numbers fit the types of the runners' tensors, which vLLM does not check; else InvalidRequest."""
    check_seed(params.seed, params.n)
    biases = params.logit_bias or {}
    if params.allowed_token_ids and all(biases.get(token) == -math.inf for token in params.allowed_token_ids):
        raise InvalidRequest("logit_bias is -inf for each of allowed_token_ids, so no token could be generated")
    for token, bias in biases.items():
        if math.isnan(bias) or bias > _FLOAT32.max:
            raise InvalidRequest(
                f"logit_bias[{token}]={bias}; give a number that float32 holds, or -inf to forbid the token"
            )
    if not _FLOAT32.tiny <= params.repetition_penalty <= _FLOAT32.max:
        raise InvalidRequest(f"repetition_penalty={params.repetition_penalty}; give a number that float32 holds")


def _check_plain(value: Any, where: str, depth: int = 0) -> None:
    """Check that a value of `extra_args` can be sent to the workers; vLLM sends arrays as references to local memory.

    Raises:
        InvalidRequest: a value is not None, a bool, number, text, bytes, list or dict; or nesting exceeds `_DEPTH`.
    """
    if depth > _DEPTH:
        raise InvalidRequest(f"extra_args is nested deeper than {_DEPTH} levels, or holds itself; make it flatter")
    if isinstance(value, dict):
        for key, one in value.items():
            _check_plain(key, f"a key of {where}", depth + 1)
            _check_plain(one, f"{where}[{key!r}]", depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            _check_plain(one, f"{where}[{index}]", depth + 1)
    elif value is not None and type(value) not in {bool, int, float, str, bytes}:
        raise InvalidRequest(f"{where} is {shown(value)}; give plain numbers, text, bytes, lists or dicts")


#: Supported pooling tasks; vLLM's others are served by plug-ins that read the request themselves.
TASKS: Final = ("embed", "classify", "token_embed", "token_classify")
#: Pooling tasks that return one output per token.
OF_TOKENS: Final = ("token_embed", "token_classify")


class _GivenPooling(msgspec.Struct, forbid_unknown_fields=True):
    """Fields of `PoolingParams` that a user may set; None for vLLM's default."""

    task: str | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    skip_reading_prefix_cache: bool | None = None


def read_pooling(given: Any, supported: tuple[str, ...], default: str) -> PoolingParams:
    """Convert a user's pooling parameters to a new PoolingParams without shared objects.

    Args:
        given: PoolingParams, a dict of their fields, or None.
        supported: names of the model's tasks.
        default: task used where none is named.

    Raises:
        InvalidRequest: a name is unknown, a value has the wrong type, the model lacks the task, or a field is not the
            user's to set.
    """
    fields = _pooling_fields(given)
    try:
        found = msgspec.convert(fields, _GivenPooling)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"pooling parameters: {named(str(error), fields)}") from error
    task = default if found.task is None else found.task
    if task not in supported:
        raise InvalidRequest(f"pooling task {task!r}: this model does {', '.join(map(repr, supported))}")
    if task in OF_TOKENS and found.skip_reading_prefix_cache is False:
        raise InvalidRequest(
            f"skip_reading_prefix_cache=False with task {task!r}: vLLM returns nothing for tokens that it takes from "
            "the prefix cache; leave it out"
        )
    return PoolingParams(**{**msgspec.structs.asdict(found), "task": task})


def _pooling_fields(given: Any) -> dict[str, Any]:
    """Return a user's pooling parameters by field name, with NumPy numbers converted to Python's; {} for None.

    For a PoolingParams these are all fields that a user may set, defaults included; for a dict, its items.

    Raises:
        InvalidRequest: `given` has another type, a name is unknown, or an internal field of vLLM is set.
    """
    if given is None:
        return {}
    if isinstance(given, PoolingParams):
        found = {name: getattr(given, name) for name in _GivenPooling.__struct_fields__}
        plain = PoolingParams(**found)
        if set_too := [
            name for name in PoolingParams.__struct_fields__ if getattr(plain, name) != getattr(given, name)
        ]:
            raise InvalidRequest(f"pooling parameters: {', '.join(set_too)} is vLLM's own; leave it out")
    elif isinstance(given, Mapping):
        found = dict(given)
    else:
        raise InvalidRequest(f"pooling_params={shown(given)}; give vLLM's PoolingParams, or a dict of its fields")
    return _plain_numbers(found, "pooling", _GivenPooling.__struct_fields__)


def tasks_of(supported: tuple[str, ...], model_config: Any) -> tuple[tuple[str, ...], str]:
    """Return the names of a pooling model's supported tasks, and that of vLLM's default task for it.

    Raises:
        UnsupportedModel: the model has no task that requests can name.
    """
    tasks = tuple(task for task in TASKS if task in supported)
    if not tasks:
        raise UnsupportedModel(f"this model pools for {', '.join(supported) or 'no task'}; known: {', '.join(TASKS)}")
    try:
        return tasks, str(model_config.get_pooling_task(tasks))
    except RuntimeError as error:  # its configuration names a task of a plug-in
        raise UnsupportedModel(f"the task in pooler_config cannot be asked for: {error}") from error


def token_head(model: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return a function from normed rows [n, hidden] to a pooling model's raw token outputs; None if it has none."""
    poolers = getattr(model.pooler, "poolers_by_task", {})
    for task in OF_TOKENS:
        chunk = getattr(getattr(poolers.get(task), "head", None), "forward_chunk", None)
        if chunk is not None:
            params = PoolingParams(task=task, use_activation=False)
            return lambda rows: chunk(rows, params)
    return None
