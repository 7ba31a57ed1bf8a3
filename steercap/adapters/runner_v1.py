"""Adapter of vLLM's Model Runner V1, from which the CPU runner derives, and a repair of its `logprob_token_ids`.

It relies on this, besides the names in `releases`: `_preprocess` is called for real batches only, after
`_prepare_inputs` has laid the batch out in `input_batch`, `positions` and `input_ids`. It can go when vLLM offers a
hook with the batch's layout.

If one request of a batch sets `logprob_token_ids`, vLLM treats all requests of the batch so: another's `logprobs=5`
returns its sampled token, and token 0 at -inf. With drafts it ignores `logprob_token_ids`, or crashes. The repair gives
each row the log probabilities that its request asked for. Model Runner V2 does so itself.

The repair relies on this: both samplers get all log probabilities that they return from `Sampler.gather_logprobs`, with
equally many rows for each request, in the order of the batch; and `SamplingMetadata` has the requests' options as
`logprob_token_ids` and `max_num_logprobs`. vLLM's output processor reads the sampled token, in the first column, and
after it as many columns as the request asked for, so the padding of a row is never seen. It can go when vLLM mixes
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import ExecuteModelState, GPUModelRunner

from steercap.adapters import RUNTIME_ATTRIBUTE
from steercap.adapters.hooks import attach, finding_modules, misplaced, require_requests, rest, run_step, wrap
from steercap.adapters.releases import require
from steercap.worker.runtime import Runtime
from steercap.worker.step import BatchRows


def repair_logprobs() -> None:
    """Repair the log probabilities of this process's sampler classes; a second call does nothing."""
    require("Sampler", Sampler)
    require("RejectionSampler", RejectionSampler)
    require("SamplingMetadata", SamplingMetadata)
    wrap(Sampler, "forward", _sample)
    wrap(RejectionSampler, "forward", _verify)


def _sample(
    original: Callable[[], Any],
    sampler: Any,
    logits: torch.Tensor,
    sampling_metadata: Any,
    *_args: Any,
    **_options: Any,
) -> Any:
    with _mixed(sampler, sampling_metadata, len(logits)):
        return original()


def _verify(
    original: Callable[[], Any],
    rejection_sampler: Any,
    metadata: Any,
    _draft_probs: Any,
    _logits: Any,
    sampling_metadata: Any,
    *_args: Any,
    **_options: Any,
) -> Any:
    with _mixed(rejection_sampler.sampler, sampling_metadata, len(metadata.num_draft_tokens)):
        return original()


@contextmanager
def _mixed(sampler: Any, metadata: Any, requests: int) -> Iterator[None]:
    """Make the sampler ignore `logprob_token_ids` in the block, and add each request's chosen tokens afterwards.

    Args:
        sampler: vLLM's `Sampler`.
        metadata: `SamplingMetadata` of this pass.
        requests: number of requests in the pass.
    """
    asked, most = metadata.logprob_token_ids, metadata.max_num_logprobs
    if not asked:
        yield
        return
    gather = sampler.gather_logprobs

    def gathered(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
        return with_tokens(gather(logprobs, num_logprobs, token_ids), logprobs, asked, len(logprobs) // requests)

    metadata.logprob_token_ids, metadata.max_num_logprobs = None, most or 0
    sampler.gather_logprobs = gathered
    try:
        yield
    finally:
        del sampler.gather_logprobs
        metadata.logprob_token_ids, metadata.max_num_logprobs = asked, most


def with_tokens(
    sampled: LogprobsTensors, logprobs: torch.Tensor, requested: Mapping[int, Sequence[int]], rows_each: int
) -> LogprobsTensors:
    """Return log probabilities of each row's most likely tokens or, for requests in `requested`, of chosen tokens.

    Args:
        sampled: ids and log probabilities of the sampled token and the most likely ones, [rows, 1 + k].
        logprobs: log probabilities of every token, [rows, vocabulary].
        requested: chosen token ids by the request's index in the batch.
        rows_each: number of consecutive rows of each request.
    """
    most = max(map(len, requested.values()))
    rows = [request * rows_each + row for request in requested for row in range(rows_each)]
    tokens = torch.zeros(len(rows), most, dtype=torch.int64)
    missing = torch.ones(len(rows), most, dtype=torch.bool)
    for request_index, chosen in enumerate(requested.values()):
        tokens[request_index * rows_each : (request_index + 1) * rows_each, : len(chosen)] = torch.tensor(chosen)
        missing[request_index * rows_each : (request_index + 1) * rows_each, : len(chosen)] = False
    index, tokens, missing = (_moved(tensor, logprobs.device) for tensor in (torch.tensor(rows), tokens, missing))
    values = logprobs[index].gather(1, tokens).masked_fill(missing, -inf)
    width = max(sampled.logprobs.shape[1], 1 + most)
    ids = pad(sampled.logprob_token_ids, (0, width - sampled.logprobs.shape[1]))
    numbers = pad(sampled.logprobs, (0, width - sampled.logprobs.shape[1]), value=-inf)
    ids[index, 1:] = pad(tokens, (0, width - 1 - most)).to(ids.dtype)
    numbers[index, 1:] = pad(values, (0, width - 1 - most), value=-inf)
    return sampled._replace(logprob_token_ids=ids, logprobs=numbers)


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to the device without waiting for it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def hook() -> None:
    """Hook the V1 runner classes of this process, on GPU and CPU; a second call does nothing."""
    require("Model Runner V1", GPUModelRunner)
    require("Model Runner V1 on CPU", CPUModelRunner)
    require("ExecuteModelState", ExecuteModelState)
    require_requests()
    repair_logprobs()
    for owner in (GPUModelRunner, CPUModelRunner):
        wrap(owner, "load_model", _load_model)
    wrap(GPUModelRunner, "_preprocess", _preprocess)
    wrap(GPUModelRunner, "execute_model", _execute_model)
    wrap(GPUModelRunner, "_dummy_run", _dummy_run)
    wrap(GPUModelRunner, "sample_tokens", _sample_tokens)


def _load_model(original: Callable[[], Any], runner: Any, *_args: Any, **_options: Any) -> Any:
    with finding_modules(runner):
        loaded = original()
    require("Model Runner V1 with its model", runner)
    attach(runner)
    _give_stage_its_buffers(runner, runner.get_model())
    return loaded


def _give_stage_its_buffers(runner: Any, model: Any) -> None:
    """Allocate input buffers of a later pipeline stage, which vLLM's eager CPU engine, without warm-up, leaves out."""
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
    counts = np.array([scheduler_output.num_scheduled_tokens[name] for name in names])
    runtime.begin_step(
        BatchRows(
            request_ids=names,
            starts=batch.num_computed_tokens_cpu[:requests].copy(),
            counts=counts,
            num_tokens=int(counts.sum()),
            token_ids=runner.input_ids.gpu,
            positions=runner.positions,
            ahead=np.full(requests, runtime.ahead) if runtime.ahead else None,
            failure=misplaced(batch.req_id_to_index, names, range(requests)),
        )
    )
    return prepared


def _execute_model(original: Callable[[], Any], runner: Any, scheduler_output: Any, *_args: Any, **_opts: Any) -> Any:
    return run_step(original, runner, scheduler_output)


def _dummy_run(original: Callable[[], Any], runner: Any, *_args: Any, **_options: Any) -> Any:
    rest(runner)
    return original()


def _sample_tokens(original: Callable[[], Any], runner: Any, *_args: Any, **_options: Any) -> Any:
    """Add steering biases to the logits that `execute_model` left, before tokens are sampled from them.

    Relies on one row of logits for each request's last token in the pass; with drafts, for each of the request's last
    `num_draft_tokens` + 1 tokens.
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
