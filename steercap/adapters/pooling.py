"""Pooling parameters of users, and the head of a pooling model that takes the place of logits.

It relies on `PoolingParams`, `POOLING_TASKS`, `ModelConfig.get_pooling_task`; and on this: a model's `pooler` keeps one
for each task in `poolers_by_task`, and those of single tokens have a `head` with `forward_chunk`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import numpy as np
import torch
from vllm.pooling_params import PoolingParams

from steercap.adapters.wire import named
from steercap.core.values import choices, shown
from steercap.errors import InvalidRequest, UnsupportedModel

#: Supported tasks: other tasks of vLLM's have plug-ins of their own that read the request.
TASKS: Final = ("embed", "classify", "token_embed", "token_classify")
#: Tasks with an output for each token.
OF_TOKENS: Final = ("token_embed", "token_classify")


class _Given(msgspec.Struct, forbid_unknown_fields=True):
    """Fields of `PoolingParams` that a user may set; the rest is between vLLM's server and its workers."""

    task: str | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    skip_reading_prefix_cache: bool | None = None


def read_pooling(given: Any, supported: tuple[str, ...], default: str) -> PoolingParams:
    """Convert a user's pooling parameters to vLLM's, sharing nothing with the given object.

    Args:
        given: PoolingParams, a dict of their fields, or None.
        supported: tasks of the model.
        default: task used where none is named.

    Raises:
        InvalidRequest: an unknown name, a value of another type, a task that the model has not, or a field that the
            user may not set.
    """
    fields = _fields(given)
    try:
        found = msgspec.convert(fields, _Given)
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


def _fields(given: Any) -> dict[str, Any]:
    """Return the fields of a user's pooling parameters, by name, with NumPy's numbers as Python's; {} for None.

    Of a PoolingParams these are all fields that a user may set, defaults included; of a dict, those in it.

    Raises:
        InvalidRequest: something else, an unknown name, or a PoolingParams in which a field of vLLM's own is set.
    """
    if given is None:
        return {}
    if isinstance(given, PoolingParams):
        found = {name: getattr(given, name) for name in _Given.__struct_fields__}
        plain = PoolingParams(**found)
        if set_too := [
            name for name in PoolingParams.__struct_fields__ if getattr(plain, name) != getattr(given, name)
        ]:
            raise InvalidRequest(f"pooling parameters: {', '.join(set_too)} is vLLM's own; leave it out")
    elif isinstance(given, Mapping):
        found = dict(given)
    else:
        raise InvalidRequest(f"pooling={shown(given)}; give vLLM's PoolingParams, or a dict of its fields")
    for name, value in found.items():
        if name not in _Given.__struct_fields__:
            raise InvalidRequest(f"there is no pooling parameter {name!r}; {choices(name, _Given.__struct_fields__)}")
        if isinstance(value, np.generic):
            found[name] = value.item()
    return found


def tasks_of(supported: tuple[str, ...], model_config: Any) -> tuple[tuple[str, ...], str]:
    """Return the tasks of a pooling model, and the one that vLLM takes where none is named.

    Args:
        supported: tasks that the engine supports.
        model_config: vLLM's ModelConfig.

    Raises:
        UnsupportedModel: it has none that requests can name.
    """
    tasks = tuple(task for task in TASKS if task in supported)
    if not tasks:
        raise UnsupportedModel(f"this model pools for {', '.join(supported) or 'no task'}; known: {', '.join(TASKS)}")
    try:
        return tasks, str(model_config.get_pooling_task(tasks))
    except RuntimeError as error:  # its configuration names a task of a plug-in
        raise UnsupportedModel(f"the task in pooler_config cannot be asked for: {error}") from error


def token_head(model: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return a function from normed rows to a pooling model's raw output by token, or None if it has none.

    Args:
        model: model that vLLM has loaded.
    """
    poolers = getattr(model.pooler, "poolers_by_task", {})
    for task in OF_TOKENS:
        chunk = getattr(getattr(poolers.get(task), "head", None), "forward_chunk", None)
        if chunk is not None:
            params = PoolingParams(task=task, use_activation=False)
            return lambda rows: chunk(rows, params)
    return None
