"""Adapter of vLLM's Model Runner V1, from which the CPU runner derives.

It relies on this, besides the names in `releases`: `_preprocess` is called for real batches only, after
`_prepare_inputs` has laid the batch out in `input_batch`, `positions` and `input_ids`. It can go when vLLM offers a
hook with the batch's layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import ExecuteModelState, GPUModelRunner

from steercap.adapters import RUNTIME_ATTRIBUTE, logprobs
from steercap.adapters.hooks import attach, looked_through, require_requests, step_of, wrap
from steercap.adapters.releases import require
from steercap.worker.runtime import Runtime
from steercap.worker.step import BatchRows


def hook() -> None:
    """Hook the runner classes of this process; a second call finds them hooked."""
    require("Model Runner V1", GPUModelRunner)
    require("Model Runner V1 on CPU", CPUModelRunner)
    require("ExecuteModelState", ExecuteModelState)
    require_requests()
    logprobs.hook()
    for owner in (GPUModelRunner, CPUModelRunner):
        wrap(owner, "load_model", _load_model)
    wrap(GPUModelRunner, "_preprocess", _preprocess)
    wrap(GPUModelRunner, "execute_model", _execute_model)
    wrap(GPUModelRunner, "sample_tokens", _sample_tokens)


def _load_model(original: Callable[[], Any], runner: Any, *_args: Any, **_options: Any) -> Any:
    with looked_through(runner):
        loaded = original()
    require("Model Runner V1 with its model", runner)
    attach(runner)
    _give_stage_its_buffers(runner, runner.get_model())
    return loaded


def _give_stage_its_buffers(runner: Any, model: Any) -> None:
    """Allocate the input buffers of a later pipeline stage, which an eager CPU engine, without warm-up, does not do."""
    if runner.device.type == "cpu" and not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _preprocess(original: Callable[[], Any], runner: Any, scheduler_output: Any, *_args: Any, **_options: Any) -> Any:
    prepared = original()
    runtime: Runtime = getattr(runner, RUNTIME_ATTRIBUTE)
    batch = runner.input_batch
    requests = batch.num_reqs
    names = batch.req_ids[:requests]
    runtime.begin_step(
        BatchRows(
            request_ids=names,
            starts=batch.num_computed_tokens_cpu[:requests].astype(np.int64),
            counts=np.array([scheduler_output.num_scheduled_tokens[name] for name in names], dtype=np.int64),
            token_ids=runner.input_ids.gpu,
            positions=runner.positions,
        )
    )
    return prepared


def _execute_model(original: Callable[[], Any], runner: Any, scheduler_output: Any, *_args: Any, **_opts: Any) -> Any:
    with step_of(runner, scheduler_output):
        return original()


def _sample_tokens(original: Callable[[], Any], runner: Any, *_args: Any, **_options: Any) -> Any:
    """Add biases to the logits of `execute_model`, before tokens are sampled from them.

    Relies on one row of logits for each request, of its last token in the pass; or, with drafts, on one for each of its
    last `num_draft_tokens` + 1 tokens.
    """
    runtime: Runtime = getattr(runner, RUNTIME_ATTRIBUTE)
    state = runner.execute_model_state
    if runtime.biasing and state is not None and state.logits is not None:
        batch, drafts = runner.input_batch, state.spec_decode_metadata
        if drafts is None:
            counts = np.ones(batch.num_reqs, dtype=np.int64)
            indices = runner.query_start_loc.gpu[1 : batch.num_reqs + 1] - 1
        else:
            counts = np.array(drafts.num_draft_tokens, dtype=np.int64) + 1
            indices = drafts.logits_indices
        with runtime.turn:
            logits = runtime.biasing.put(state.logits, batch.req_ids[: batch.num_reqs], counts, indices)
        runner.execute_model_state = state._replace(logits=logits)
    return original()
