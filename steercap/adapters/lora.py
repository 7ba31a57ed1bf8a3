"""LoRA adapters of requests: each is loaded in all workers and checked before a request that uses it is sent.

vLLM loads an adapter in the first step that needs it. An adapter that is missing or does not fit ends the engine;
weights narrower than the model's are copied into a corner of vLLM's tables; weights for layers that the model lacks are
ignored; and two adapters of one name or number share vLLM's caches. It relies on `LoRARequest`,
`get_adapter_absolute_path`, `PEFTHelper`; in the worker on `add_lora`, `remove_lora` and the manager behind
`model_runner.lora_manager`; and on `punica_wrapper` of `LogitsProcessorWithLoRA`. It can go when vLLM refuses such
adapters itself.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

from steercap.adapters.parameters import wants_prompt_logprobs
from steercap.adapters.wire import named
from steercap.core.values import shown
from steercap.errors import InvalidRequest

_SETTINGS: Final = "adapter_config.json"
_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


class LoadedAdapter(NamedTuple):
    """LoRA adapter that the workers have loaded.

    Args:
        request: vLLM's LoRARequest, with an absolute path.
        files: size in bytes and modification time in ns of each of its files when it was loaded.
    """

    request: LoRARequest
    files: tuple[tuple[int, int], ...]


class Adapters:
    """LoRA adapters that an engine's workers have loaded.

    Args:
        config: the `VllmConfig`.
        load: coroutine function of an adapter's name, number and path; loads it in every worker and returns each
            worker's answer, as of `load_adapter`.
    """

    def __init__(self, config: Any, load: Callable[[str, int, str], Awaitable[list[Sequence[str]]]]) -> None:
        self._config = config
        self._load = load
        self._known: dict[int, LoadedAdapter] = {}
        #: Files of adapters that engines before this one had loaded.
        self._before: dict[tuple[str, int, str], tuple[tuple[int, int], ...]] = {}
        self._loading = asyncio.Lock()

    def follow(self, dead: Adapters) -> None:
        """Refuse adapters whose files have changed since a dead engine, or one before it, has loaded them."""
        self._before = dead._before | {_names(known): files for known, files in dead._known.values()}

    async def ready(self, given: Any, params: SamplingParams | PoolingParams) -> LoRARequest | None:
        """Load a request's adapter in every worker unless it is loaded; return it with checked fields, None for None.

        Raises:
            InvalidRequest: `given` is not vLLM's LoRARequest, the engine was started without `enable_lora`, its files
                are missing or do not fit the model, or its name or number is another adapter's; or LoRA is enabled and
                the request wants prompt logprobs, which vLLM cannot compute with adapters.
        """
        if (
            self._config.lora_config is not None
            and isinstance(params, SamplingParams)
            and wants_prompt_logprobs(params)
        ):
            raise InvalidRequest(
                "prompt_logprobs on an engine with enable_lora=True: vLLM cannot tell to which request its rows "
                "belong; use an engine without LoRA"
            )
        if given is None:
            return None
        request = self._read(given)
        request.lora_path = await asyncio.to_thread(_adapter_folder, request)
        async with self._loading:
            files = _files(request)
            if not self._is_known(request, files):
                await asyncio.to_thread(self._check, request)
                if reason := _refusal(await self._load(*_names(request))):
                    raise InvalidRequest(f"{_described(request)} cannot be loaded: {reason}")
                self._known[request.lora_int_id] = LoadedAdapter(request, files)
        return request

    def _read(self, given: Any) -> LoRARequest:
        """Check the user's LoRARequest and convert its fields to the types that the engine expects."""
        if not isinstance(given, LoRARequest):
            raise InvalidRequest(f"lora_request={shown(given)}; give vLLM's LoRARequest")
        if self._config.lora_config is None:
            raise InvalidRequest("this engine was started without LoRA; use SteerModel(..., enable_lora=True)")
        fields = msgspec.structs.asdict(given)
        try:
            request = msgspec.convert(tuple(fields.values()), LoRARequest)
        except Exception as error:  # of any kind: its own checks compare before they look at types
            complaint = named(str(error), fields, given.__struct_fields__)
            raise InvalidRequest(f"lora_request: {complaint or type(error).__name__}") from error
        if request.load_inplace:
            raise InvalidRequest(
                "lora_request: load_inplace=True would leave keys and values of the old weights in the prefix cache; "
                "give the new weights another name and number"
            )
        return request

    def _is_known(self, request: LoRARequest, files: tuple[tuple[int, int], ...]) -> bool:
        """Check if the workers have loaded this adapter with these file sizes and times.

        Raises:
            InvalidRequest: another loaded adapter has its name or number, or its files have changed since.
        """
        then = {**self._before, **{_names(known): loaded for known, loaded in self._known.values()}}
        if files != then.get(_names(request), files):
            raise InvalidRequest(
                f"the files of {_described(request)} have changed since it was loaded; give it another name and number"
            )
        for known, _ in self._known.values():
            if _names(known) == _names(request):
                return True
            if request.lora_int_id == known.lora_int_id or request.lora_name == known.lora_name:
                raise InvalidRequest(
                    f"{_described(request)} has the name or number of {_described(known)}, and vLLM would take one for "
                    "the other; give each adapter a name and number of its own"
                )
        return False

    def _check(self, request: LoRARequest) -> None:
        """Check an adapter's `adapter_config.json` against the engine's LoRA settings, without the model's weights."""
        text = self._config.model_config.hf_config.get_text_config()
        try:
            helper = PEFTHelper.from_local_dir(request.lora_path, getattr(text, "max_position_embeddings", None))
            helper.validate_legal(self._config.lora_config)
        except Exception as error:  # of any kind: it depends on what the file holds
            raise InvalidRequest(f"{_described(request)} is not one that this engine can use: {error}") from error


def _adapter_folder(request: LoRARequest) -> str:
    """Return the absolute path of an adapter's folder, downloaded if necessary.

    Raises:
        InvalidRequest: the folder, its configuration or its weights are missing.
    """
    try:
        folder = Path(get_adapter_absolute_path(request.lora_path)).absolute()
    except Exception as error:  # of any kind: it may ask a hub
        raise InvalidRequest(f"{_described(request)} cannot be found: {error}") from error
    if not (folder / _SETTINGS).is_file() or not any((folder / name).is_file() for name in _WEIGHTS):
        raise InvalidRequest(f"{_described(request)} is not there: its folder must hold {_SETTINGS} and {_WEIGHTS[0]}")
    return str(folder)


def _files(request: LoRARequest) -> tuple[tuple[int, int], ...]:
    found = []
    for name in (_SETTINGS, *_WEIGHTS):
        with suppress(FileNotFoundError):
            stat = (Path(request.lora_path) / name).stat()
            found.append((stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def digest_of(path: str) -> str:
    """Return the SHA-256, in hexadecimal, of an adapter's settings and weights, by which copies are equal.

    Args:
        path: folder of the adapter, or its name on the hub, from where it is downloaded if necessary.
    """
    found, folder = hashlib.sha256(), Path(get_adapter_absolute_path(path))
    for name in (_SETTINGS, *_WEIGHTS):
        with suppress(FileNotFoundError), (folder / name).open("rb") as content:
            found.update(name.encode() + hashlib.file_digest(content, "sha256").digest())
    return found.hexdigest()


def _names(request: LoRARequest) -> tuple[str, int, str]:
    return request.lora_name, request.lora_int_id, request.lora_path


def _described(request: LoRARequest) -> str:
    return f"the LoRA adapter {request.lora_name!r} ({request.lora_int_id}, {request.lora_path})"


def _refusal(answers: Sequence[Sequence[str]]) -> str:
    """Return the first reason in the workers' answers why an adapter cannot be used; "" if it can."""
    reasons = [reason for reason, *_ in answers if reason]
    # A pipeline stage lacks the modules of the other stages.
    nowhere = set[str].intersection(*(set(missing) for _, *missing in answers))
    return next(iter([*reasons, *(f"the model has no {name}" for name in sorted(nowhere))]), "")


def load_adapter(worker: Any, name: str, number: int, path: str) -> list[str]:
    """Load a LoRA adapter, with these fields of a LoRARequest, in a worker, and check that it fits the model's modules.

    Returns:
        First the reason why the adapter cannot be used and was unloaded, or ""; then the names of the adapter's modules
        that this worker's part of the model lacks.
    """
    missing: list[str] = []
    try:
        worker.remove_lora(number)  # an earlier one that only this rank has kept
        worker.add_lora(LoRARequest(name, number, path))
        manager = worker.model_runner.lora_manager._adapter_manager  # noqa: SLF001 -- vLLM shows it in no other way
        missing = [name for name in manager.get_adapter(number).loras if manager.modules.get(name) is None]
        reason = _misfit(manager, number)
        if missing and worker.vllm_config.parallel_config.pipeline_parallel_size == 1:
            reason = reason or f"the model has no {missing[0]}"
    except Exception as error:  # noqa: BLE001 -- at the RPC boundary: other ranks' answers would stay unread
        reason = str(error) or type(error).__name__
    if reason:
        with suppress(Exception):  # it may have been refused before it was kept
            worker.remove_lora(number)
    return [reason, *missing]


def _misfit(manager: Any, number: int) -> str:
    """Return a description of the first mismatch of shapes between an adapter's weights and the model, or "".

    Args:
        manager: the worker's LoRA manager, which has loaded the adapter.
        number: number of the adapter.
    """
    for name, weights in manager.get_adapter(number).loras.items():
        module = manager.modules.get(name)
        if not hasattr(module, "lora_a_stacked") or not hasattr(module, "slice_lora_a"):
            continue
        matrices_of = [weights.lora_a, weights.lora_b]
        if getattr(module, "tp_size", 1) > 1:
            matrices_of = [module.slice_lora_a(matrices_of[0]), module.slice_lora_b(matrices_of[1])]
        a, b = ([matrices] if not isinstance(matrices, (list, tuple)) else matrices for matrices in matrices_of)
        for index, (down, up) in enumerate(zip(a, b, strict=True)):
            if down is None or up is None:
                continue
            has = (down.shape[-1], up.shape[0])
            wants = (module.lora_a_stacked[index].shape[-1], module.lora_b_stacked[index].shape[-2])
            if has != wants:
                return (
                    f"{name} of the adapter is {has[0]} to {has[1]} wide, and that of the model {wants[0]} to "
                    f"{wants[1]}"
                )
    return ""


class _NoAdapter:
    """Replacement of vLLM's LoRA kernels, which know only the last pass's rows, that adds no adapter."""

    @staticmethod
    def add_lora_logits(logits: Any, *_: Any) -> Any:
        """Return the logits unchanged."""
        return logits


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Make a model's `compute_logits` accept arbitrary rows in the block, without LoRA adapters."""
    wrappers = [module for module in model.modules() if isinstance(module, LogitsProcessorWithLoRA)]
    kernels = [wrapper.punica_wrapper for wrapper in wrappers]
    try:
        for wrapper in wrappers:
            wrapper.punica_wrapper = _NoAdapter()
        yield
    finally:
        for wrapper, kernel in zip(wrappers, kernels, strict=True):
            wrapper.punica_wrapper = kernel
