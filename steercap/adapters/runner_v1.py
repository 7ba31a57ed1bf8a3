"""vLLM's Model Runner V1, which the CPU runner derives from.

Number 4 and 5 in the life of a request. What it relies on, all of vLLM 0.32: `load_model` ends with `self.model`
set; `_preprocess` is called for real batches only, after `_prepare_inputs` has laid the batch out in
`input_batch`, `positions` and `input_ids`; `execute_model` is entered once a step. It can go when vLLM offers
a hook with the batch's layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from steercap.adapters import RUNTIME_ATTRIBUTE
from steercap.adapters.settings import armed_points
from steercap.core.plan import EXTRA_ARGS_KEY
from steercap.core.rows import BatchRows
from steercap.families import family_of
from steercap.kernels.tap import bind
from steercap.worker.install import install_taps
from steercap.worker.runtime import Runtime

_HOOKED: Final = "__steercap_hook__"


def hook() -> None:
    """Hook the runner classes of this process; a second call finds them hooked."""
    for owner in (GPUModelRunner, CPUModelRunner):
        _wrap(owner, "load_model", _load_model)
    _wrap(GPUModelRunner, "_preprocess", _preprocess)
    _wrap(GPUModelRunner, "execute_model", _execute_model)


def _wrap(owner: type, name: str, hook: Callable[..., Any]) -> None:
    original = vars(owner)[name]
    if getattr(original, _HOOKED, False):
        return

    @functools.wraps(original)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(functools.partial(original, self, *args, **kwargs), self, *args)

    setattr(hooked, _HOOKED, True)
    setattr(owner, name, hooked)


def _load_model(original: Callable[[], Any], runner: Any, *_args: Any) -> Any:
    loaded = original()
    if getattr(runner, RUNTIME_ATTRIBUTE, None) is not None:  # a subclass called its parent's load_model
        return loaded
    config = runner.vllm_config
    hf_config = config.model_config
    armed = armed_points(config.additional_config)
    model = runner.get_model()
    family = family_of(hf_config.architectures)
    start, stop = hf_config.get_layers_start_end_indices(config.parallel_config)
    local = install_taps(model, family, armed, range(start, stop), runner.device)
    runtime = Runtime(
        local,
        len(armed),
        hf_config.get_hidden_size(),
        runner.dtype,
        captures=get_tensor_model_parallel_rank() == 0,
    )
    setattr(runner, RUNTIME_ATTRIBUTE, runtime)
    bind(runtime.tables)
    _give_stage_its_buffers(runner, model)
    return loaded


def _give_stage_its_buffers(runner: Any, model: Any) -> None:
    """Make the buffers a later pipeline stage receives into: an eager CPU engine, which never warms up, forgets to."""
    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _preprocess(original: Callable[[], Any], runner: Any, scheduler_output: Any, *_args: Any) -> Any:
    prepared = original()
    runtime: Runtime = getattr(runner, RUNTIME_ATTRIBUTE)
    batch = runner.input_batch
    requests = batch.num_reqs
    tokens = scheduler_output.total_num_scheduled_tokens
    names = batch.req_ids[:requests]
    runtime.begin_step(
        BatchRows(
            request_ids=names,
            starts=batch.num_computed_tokens_cpu[:requests].astype(np.int64),
            counts=np.array([scheduler_output.num_scheduled_tokens[name] for name in names], dtype=np.int64),
            token_ids=_host(runner.input_ids.gpu, tokens),
            positions=_host(runner.positions, tokens),
        )
    )
    return prepared


def _execute_model(original: Callable[[], Any], runner: Any, scheduler_output: Any, *_args: Any) -> Any:
    runtime: Runtime = getattr(runner, RUNTIME_ATTRIBUTE)
    runtime.forget(scheduler_output.finished_req_ids)
    for request in scheduler_output.scheduled_new_reqs:
        extra = getattr(request.sampling_params, "extra_args", None) or {}
        if EXTRA_ARGS_KEY in extra:
            plan = extra[EXTRA_ARGS_KEY]
            runtime.register(request.req_id, plan, sample_of(request.req_id))
    try:
        result = original()
    except BaseException as error:
        runtime.end_step(error)
        raise
    runtime.end_step()
    return result


def sample_of(request_id: str) -> int:
    """Which sample of `n > 1` a request of the worker is: vLLM names them `<index>_<id>-<suffix>`.

    steercap's own ids hold no underscore, so one can only be vLLM's.
    """
    index, separator, _ = request_id.partition("_")
    return int(index) if separator else 0


def _host(values: torch.Tensor, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return values[:count].to(device="cpu", dtype=torch.int64, copy=True).numpy()
