"""Code shared by the adapters of model runners: hooks on methods of vLLM's classes, installation of taps in a model.

It relies on the names in `releases`, and in both runners on this: after `load_model`, `get_model()` returns the model;
`execute_model` is called once per step, with the scheduler's output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from itertools import chain
from types import ModuleType
from typing import Any, Final

import torch
from vllm import envs
from vllm.config import CompilationMode
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.model_loader import base_loader
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from steercap.adapters import RUNTIME_ATTRIBUTE
from steercap.adapters.arguments import ahead, armed_points, candidate_of, tap_sizes
from steercap.adapters.lora import without_adapters
from steercap.adapters.modules import attention_rules, choosing
from steercap.adapters.observing import Observations, ends_of
from steercap.adapters.parameters import token_head
from steercap.adapters.process_exit import READ, READING, mark
from steercap.adapters.releases import require
from steercap.adapters.tracing import derived
from steercap.architectures.decoder import Decoder, decoder_of
from steercap.architectures.families import FAMILIES, families_of
from steercap.architectures.families.derived import FIELDS
from steercap.architectures.sites.base import Sizes
from steercap.core.messages import Loaded
from steercap.core.names import is_module
from steercap.core.plan import EXTRA_ARGS_KEY
from steercap.errors import UnsupportedRunner
from steercap.kernels.tap import bind
from steercap.worker.install import install_taps, projecting
from steercap.worker.runtime import Runtime
from steercap.worker.taps import Taps

_HOOKED: Final = "__steercap_hook__"
#: Attributes of runners V2 and V1 that hold the CUDA stream on which sampled tokens are copied to the host.
_OUTPUT_STREAMS: Final = ("output_copy_stream", "async_output_copy_stream")
#: Tokens by which a pass, padded to the largest CUDA graph, may exceed the scheduler's maximum.
_PADDING: Final = 1024
#: Name of a router's bias in checkpoints that store it among the experts' weights, as Laguna's do.
_BIAS: Final = "e_score_correction_bias"
#: Module of the `forward` that vLLM gives to layers whose offloaded weights are copied to the device in each call.
_COPYING: Final = "vllm.model_executor.offloader.uva"
#: Attribute of a layer: factor by which vLLM multiplies the experts' output.
_SCALE: Final = "routed_scaling_factor"
#: Module and name of the vLLM class with the layers of DBRX.
_DBRX: Final = "vllm.model_executor.models.dbrx", "DbrxModel"
#: Module and name of the vLLM function that makes the loader of OLMo Hybrid's convolutions; absent in earlier releases.
_CONVOLUTIONS: Final = "vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn", "_make_fused_conv1d_weight_loader"
#: Module and name of the vLLM class that runs a layer's experts; absent in earlier releases.
_RUNNER: Final = "vllm.model_executor.layers.fused_moe.runner.moe_runner", "MoERunner"


def wrap(owner: type | ModuleType, name: str, hook: Callable[..., Any]) -> None:
    """Replace a method, or a module's function, so that a call runs `hook(original, *args, **kwargs)`.

    `original` takes no arguments and makes the intercepted call; the hook's result is the call's. A method that is
    hooked already is left alone.
    """
    original = getattr(owner, name)
    if getattr(original, _HOOKED, False):
        return

    @functools.wraps(original)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(functools.partial(original, self, *args, **kwargs), self, *args, **kwargs)

    setattr(hooked, _HOOKED, True)
    setattr(owner, name, hooked)


def class_of(module: str, name: str) -> type | None:
    """Return the class `name` of vLLM's module `module`; None if the installed release lacks either."""
    try:
        found: type | None = getattr(import_module(module), name, None)
    except ModuleNotFoundError as error:
        if not module.startswith(error.name or " "):
            raise
        return None
    return found


def hook() -> None:
    """Have vLLM load weights that it drops or refuses; a second call does nothing."""
    runner = class_of(*_RUNNER)
    if runner is not None and hasattr(runner, "load_weights"):
        wrap(runner, "load_weights", _with_bias)
    if (dbrx := class_of(*_DBRX)) is not None:
        wrap(dbrx, "load_weights", _of_routed_experts)
    module, name = _CONVOLUTIONS
    if class_of(module, name) is not None:
        wrap(import_module(module), name, _by_part)


def _of_routed_experts(original: Any, model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
    """Load the weights of DBRX's experts into the module that holds them.

    vLLM looks for them in the module above (0.32): no checkpoint of DBRX loads. Relies on `original.func`, the method,
    and on the names of both modules. Can go when vLLM looks in the right one.
    """
    moved = any("experts.routed_experts." in name for name, _ in model.named_parameters())
    names = ("experts.mlp.", "experts.routed_experts.mlp.") if moved else ("", "")
    return original.func(model, ((name.replace(*names), tensor) for name, tensor in weights))


def _by_part(original: Callable[[], Any], *_args: Any, **_options: Any) -> Callable[..., Any]:
    """Return the loader of a joint convolution that takes the number of a part from its weights.

    vLLM's takes it as an argument, which its caller does not pass (0.32): no checkpoint of OLMo Hybrid loads. Relies on
    the attribute `shard_id`, which the caller sets on the weights. Can go when vLLM's loader reads it.
    """
    load = original()

    def loaded(param: torch.Tensor, weights: torch.Tensor, part: int | None = None) -> None:
        load(param, weights, getattr(weights, "shard_id", None) if part is None else part)

    return loaded


def _with_bias(original: Any, runner: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str]:
    """Load the experts' weights, and the router's bias if it is among them; return the names of the loaded parameters.

    vLLM hands all weights of a checkpoint's `experts` to `routed_experts.load_weights`, which drops weights that belong
    to no expert: Laguna's routers then choose without their bias. Relies on `original.func`, the method, and on the
    parameter `e_score_correction_bias` of `routed_experts`. Can go when vLLM loads it.
    """
    found, bias = list[str](), getattr(runner.routed_experts, _BIAS, None)

    def others() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if name == _BIAS and bias is not None:
                bias.data.copy_(tensor)
                found.append(f"routed_experts.{name}")
            else:
                yield name, tensor

    return chain(original.func(runner, others()) or (), found)  # which fills while the others are read, now or later


def require_requests() -> None:
    """Check that the installed vLLM describes new and finished requests as `run_step` reads them.

    Raises:
        UnsupportedRunner: vLLM's classes lack a name.
    """
    require("SchedulerOutput", SchedulerOutput)
    require("NewRequestData", NewRequestData)


def require_whole_batches(layers: Iterable[Any]) -> None:
    """Check that every tensor-parallel rank computes all tokens of a batch in these decoder layers.

    Raises:
        UnsupportedRunner: layers shard tokens over the ranks, as DeepSeek-V4's do for some experts.
    """
    if any(getattr(layer, "use_sequence_parallel", False) for layer in layers):
        raise UnsupportedRunner(
            "these layers are sequence-parallel: between blocks a rank does not have the tokens of the batch; switch "
            "enable_expert_parallel off, or choose a moe_backend that is not a mega kernel, with one engine "
            "(data_parallel_size=1)"
        )


def require_one_call(layers: Iterable[Any]) -> None:
    """Check that a forward pass calls each of these decoder layers once.

    Raises:
        UnsupportedRunner: vLLM's weight offloading calls some layer a second time within its own call.
    """
    if any(getattr(layer.forward, "__module__", "") == _COPYING for layer in layers):
        raise UnsupportedRunner(
            "cpu_offload_gb without unified addressing (VLLM_WEIGHT_OFFLOADING_DISABLE_UVA=1, or no pinned memory) "
            "calls a layer within its own call, so that its taps run twice; unset the variable, or use "
            "offload_group_size"
        )


def require_true_scale(layers: Iterable[Any], dtype: torch.dtype) -> None:
    """Check that these decoder layers add their blocks' outputs to the residual stream unscaled.

    Raises:
        UnsupportedRunner: in float16 vLLM's layers of DeepSeek, A.X K1 and openPangu divide the stream by a factor
            of their configuration, which the next norm hides: rows would be too small, and edits too strong.
    """
    if dtype != torch.float16:
        return
    for layer in layers:
        factor = getattr(layer, _SCALE, None)
        if factor not in {None, 1.0} and _SCALE in type(layer).forward.__code__.co_names:
            raise UnsupportedRunner(
                f"in float16 vLLM divides the residual stream of these layers by their {_SCALE}, {factor:g}, so that "
                "rows and edits would have another scale than the model's; use dtype='bfloat16'"
            )


@contextmanager
def finding_modules(runner: Any) -> Iterator[None]:
    """Find the modules of armed points in the first model that is built in the block, before its weights are loaded.

    An absent module fails the start early; where vLLM's loader builds models otherwise, `attach` fails after loading.
    """
    mark(READING)
    config, built = runner.vllm_config, getattr(base_loader, "initialize_model", None)
    armed = [point for point in armed_points(config.additional_config) if is_module(point.site)]
    if built is None or not armed:
        yield
        return

    def looked(*args: Any, **options: Any) -> Any:
        base_loader.initialize_model = built  # a drafting model is built after it
        model = built(*args, **options)
        ends_of(_decoder(model, config), armed)
        return model

    base_loader.initialize_model = looked
    try:
        yield
    finally:
        base_loader.initialize_model = built


def _decoder(model: Any, config: Any) -> Decoder:
    """Return the decoder of a loaded model with the layers of this pipeline stage; errors as of `decoder_of`."""
    start, stop = config.model_config.get_layers_start_end_indices(config.parallel_config)
    return decoder_of(model, config.model_config.get_total_num_hidden_layers(), range(start, stop))


def attach(runner: Any) -> None:
    """Install taps in the model that a runner has loaded, and store their `Runtime` on the runner; once per runner."""
    if getattr(runner, RUNTIME_ATTRIBUTE, None) is not None:  # a subclass called its parent's load_model
        return
    mark(READ)
    config = runner.vllm_config
    model_config = config.model_config
    armed = armed_points(config.additional_config)
    num_layers = model_config.get_total_num_hidden_layers()
    decoder = _decoder(runner.get_model(), config)
    require_whole_batches(decoder.layers.values())
    require_one_call(decoder.layers.values())
    require_true_scale(decoder.layers.values(), runner.dtype)
    families = families_of(list(decoder.layers.values()))
    # The layers of another pipeline stage may have more candidates.
    family = families[min(candidate_of(config.additional_config), len(families) - 1)]
    # Of values where keys are of another size, or, with latent attention, are never made.
    head_dim = getattr(model_config.hf_text_config, "v_head_dim", None) or model_config.get_head_size()
    refused: dict[str, str] = {}
    if family.derived and any(point.site in FIELDS for point in armed):  # the stream alone needs no pass
        family, refused = derived(runner, decoder, family, head_dim)
    pools = model_config.runner_type == "pooling"
    made = token_head(decoder.model) if pools else _logits_of(decoder.model, lora=config.lora_config is not None)
    last = get_pp_group().is_last_rank
    unembed = decoder.unembedding(family, made, bare=pools) if made and last else None
    if made and unembed and not pools and decoder.norms_late(family, unembed, _row(runner)):
        family = replace(family, norms_late=True)
        unembed = decoder.unembedding(family, made)
        refused["final_norm"] = "the model norms rows as it makes logits of them, those of sampled tokens alone"
    installed = install_taps(
        decoder,
        family,
        armed,
        Sizes(
            model_config.get_hidden_size(),
            head_dim,
            model_config.get_total_num_kv_heads(),
            config.parallel_config.tensor_parallel_size,
            Observations(runner, decoder, armed),
        ),
        runner.dtype,
        shard=get_tensor_model_parallel_rank(),
        num_layers=num_layers,
        device=runner.device,
        norms=_norms_of(config),
    )
    sizes = tap_sizes(config, installed, runner.max_num_tokens + _PADDING)
    with torch.inference_mode(mode=False):  # otherwise the tables could be written only in inference mode
        taps: Taps
        if runner.device.type == "cuda":
            from steercap.worker.taps.cuda import CudaTaps
            from steercap.worker.taps.transfers import CudaTransfers

            streams = (getattr(runner, name, None) for name in _OUTPUT_STREAMS)
            transfers = CudaTransfers(runner.device, next((stream for stream in streams if stream), None))
            taps = CudaTaps(installed, sizes, transfers)
        else:
            from steercap.worker.taps.host import HostTaps

            taps = HostTaps(installed, sizes)
    names = [str(point) for point in armed]
    rules = attention_rules(decoder.layers, family, [armed[point] for point in installed.points], model_config)
    known = "" if family.derived else next(name for name, one in FAMILIES.items() if one.classes == family.classes)
    loaded = Loaded(known, decoder.code, len(families), refused)
    project = projecting(decoder.layers, family, installed.shard)
    choose = choosing(decoder.layers, family, runner.dtype)
    runtime = Runtime(
        taps,
        names,
        runner.device,
        loaded=loaded,
        unembed=unembed,
        project=project,
        choose=choose,
        attention=rules,
        samples=last,
        longest=model_config.max_model_len,
        ahead=ahead(config),
    )
    setattr(runner, RUNTIME_ATTRIBUTE, runtime)
    bind(taps)


def misplaced(rows: Mapping[str, int], names: Sequence[str], computed: Sequence[int]) -> str | None:
    """Return an error message if the requests of a batch are computed from each other's states; None if not.

    Positions and token ids do not tell requests with one prompt apart.

    Args:
        rows: row of each request in the runner's table of states, by its id.
        names: ids of the batch's requests.
        computed: rows that the batch's tokens are computed from.
    """
    known = list(map(rows.get, names))
    if known == list(computed):
        return None
    return f"the runner computes requests from rows {list(computed)} of its table, and they are in rows {known}"


def _row(runner: Any) -> torch.Tensor:
    """Return one residual stream row of zeros, [1, hidden], in the model's dtype and on its device."""
    hidden = runner.vllm_config.model_config.get_hidden_size()
    return torch.zeros((1, hidden), dtype=runner.dtype, device=runner.device)


def _norms_of(config: Any) -> type[torch.nn.Module] | None:
    """Return vLLM's RMSNorm if inductor compiles it to the arithmetic of `kernels.reference.add_norm`; else None."""
    compilation = config.compilation_config
    compiled = compilation.mode != CompilationMode.NONE and compilation.backend == "inductor"
    kernels = getattr(config, "kernel_config", None)  # older releases name no kernels of a norm
    priority = getattr(getattr(kernels, "ir_op_priority", None), "fused_add_rms_norm", ())
    native = compiled and list(priority[:1]) == ["native"]
    return RMSNorm if native and config.device_config.device_type == "cuda" and not envs.VLLM_BATCH_INVARIANT else None


def _logits_of(model: Any, *, lora: bool) -> Callable[[torch.Tensor], torch.Tensor | None]:
    """Return a function from normed rows [rows, hidden] to logits [rows, vocabulary] without LoRA adapters."""
    plain: Callable[[torch.Tensor], torch.Tensor | None] = model.compute_logits
    if not lora:
        return plain

    def made(rows: torch.Tensor) -> torch.Tensor | None:
        with without_adapters(model):
            return plain(rows)

    return made


def run_step(original: Callable[[], Any], runner: Any, scheduler_output: Any) -> Any:
    """Run the runner's step and return its result; end finished requests and register new ones before it."""
    runtime: Runtime = getattr(runner, RUNTIME_ATTRIBUTE)
    with runtime.turn:
        if scheduler_output.finished_req_ids:
            runtime.end_requests(scheduler_output.finished_req_ids)
        for request in scheduler_output.scheduled_new_reqs:
            extra = carried(request)
            if EXTRA_ARGS_KEY in extra:
                runtime.register(request.req_id, extra[EXTRA_ARGS_KEY], sample_of(request.req_id))
        try:
            ran = original()
        except BaseException as error:
            runtime.end_step(error)
            raise
        runtime.end_step()
        return ran


def rest(runner: Any) -> None:
    """Make a runner's taps neither capture nor edit in the next pass, such as a dummy pass without requests."""
    runtime: Runtime | None = getattr(runner, RUNTIME_ATTRIBUTE, None)
    if runtime is not None:
        runtime.taps.rest()


def carried(request: Any) -> Mapping[str, Any]:
    """Return the user's extra arguments in a new request's sampling or pooling parameters; {} if there are none."""
    if request.pooling_params is not None:
        return request.pooling_params.extra_kwargs or {}
    return getattr(request.sampling_params, "extra_args", None) or {}


def sample_of(request_id: str) -> int:
    """Return a request's sample index in a worker, where vLLM names samples of `n > 1` `<index>_<id>-<suffix>`.

    steercap's request ids contain no underscore; those of others may, and have no index before it.
    """
    index, separator, _ = request_id.partition("_")
    return int(index) if separator and index.isdecimal() else 0
