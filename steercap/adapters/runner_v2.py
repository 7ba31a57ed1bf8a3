"""Adapter of vLLM's Model Runner V2, the default on CUDA, and on CPU where Triton has a backend for it.

It relies on this, besides the names in `releases`: `prepare_inputs` is called for real batches only, with padding
already decided, and returns an `InputBatch` whose `positions` and `input_ids` are views of buffers that the model,
compiled or replayed from a CUDA graph, reads on the current stream. Dummy runs and graph capture never call it, so the
taps are idle there (`hooks.rest`); vLLM's warm-up requests do, without a plan of steercap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from steercap.adapters import RUNTIME_ATTRIBUTE
from steercap.adapters.hooks import attach, finding_modules, misplaced, require_requests, rest, run_step, wrap
from steercap.adapters.releases import require
from steercap.core.rows import Ints
from steercap.worker.runtime import Runtime
from steercap.worker.step import BatchRows


def hook() -> None:
    """Hook the V2 runner class of this process; a second call does nothing."""
    require("Model Runner V2", GPUModelRunner)
    require("InputBatch of Model Runner V2", InputBatch)
    require_requests()
    wrap(GPUModelRunner, "load_model", _load_model)
    wrap(GPUModelRunner, "prepare_inputs", _prepare_inputs)
    wrap(GPUModelRunner, "execute_model", _execute_model)
    wrap(GPUModelRunner, "sample", _sample)


def _load_model(original: Callable[[], Any], runner: Any, *_args: Any, **_options: Any) -> Any:
    with finding_modules(runner):
        loaded = original()
    require("Model Runner V2 with its model", runner)
    attach(runner)
    return loaded


def _prepare_inputs(original: Callable[[], Any], runner: Any, *_args: Any, **_options: Any) -> Any:
    batch = original()
    runtime: Runtime = getattr(runner, RUNTIME_ATTRIBUTE)
    runtime.begin_step(
        BatchRows(
            request_ids=batch.req_ids,
            starts=batch.num_computed_tokens_np,
            counts=batch.num_scheduled_tokens,
            num_tokens=batch.num_tokens,
            token_ids=batch.input_ids,
            positions=batch.positions,
            ahead=_ahead(batch, runtime.ahead) if runtime.ahead else None,
            failure=misplaced(runner.req_states.req_id_to_index, batch.req_ids, batch.idx_mapping_np.tolist()),
        )
    )
    return batch


def _ahead(batch: Any, most: int) -> Ints:
    """Return by how many positions each request may be scheduled ahead of the device: int64 [requests].

    Prompts are where they are scheduled, and so is what follows them, unless their last token is computed with drafts.
    """
    ahead: Ints = np.full(len(batch.req_ids), most, dtype=np.int64)
    drafts = batch.num_draft_tokens_per_req
    return np.where(batch.is_prefilling_np & (drafts is None or drafts == 0), 0, ahead)


def _execute_model(
    original: Callable[[], Any],
    runner: Any,
    scheduler_output: Any,
    _intermediate_tensors: Any = None,
    dummy_run: bool = False,
    *_args: Any,
    **_options: Any,
) -> Any:
    if dummy_run:
        rest(runner)
        return original()
    return run_step(original, runner, scheduler_output)


def _sample(
    original: Callable[[], Any], runner: Any, _hidden_states: Any, input_batch: Any, *_args: Any, **_options: Any
) -> Any:
    """Add steering biases to logits right after the model has computed them, before grammars and samplers use them.

    Relies on `sample` calling the model's `compute_logits` once, for the tokens at `logits_indices`, split by request
    at `cu_num_logits_np`; and on `compute_logits_local`, where ranks sample for each other.
    """
    runtime: Runtime = getattr(runner, RUNTIME_ATTRIBUTE)
    biasing = runtime.biasing
    if not biasing:
        return original()
    if getattr(runner, "batch_sharder", None) is not None:
        biasing.refuse("each tensor-parallel rank samples for only some of the requests, so logits cannot be biased")
        return original()
    model = runner.model
    compute = model.compute_logits

    def compute_biased(*args: Any, **options: Any) -> Any:
        counts, logits = np.diff(input_batch.cu_num_logits_np).astype(np.int64), compute(*args, **options)
        with runtime.turn:
            return biasing.put(logits, input_batch.req_ids, counts, input_batch.logits_indices)

    model.compute_logits = compute_biased
    try:
        return original()
    finally:
        del model.compute_logits
