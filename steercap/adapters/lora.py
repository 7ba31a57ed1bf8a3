"""LoRA adapters of requests, loaded and checked before a request that uses them is sent.

vLLM loads an adapter within the first step that needs it: one that is missing, or does not fit, ends the engine;
one whose weights are narrower than the model's is copied into a corner of its tables; one for layers that the model
lacks does nothing; and two under one name or number are the same to its caches. It relies on `LoRARequest`,
`get_adapter_absolute_path`, `PEFTHelper`; in the worker on `add_lora`, `remove_lora` and the manager behind
`model_runner.lora_manager`; and on `punica_wrapper` of the wrapper of a model's logits processor. It can go when vLLM
refuses such adapters itself.
"""

from __future__ import annotations

import asyncio
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
    """An adapter that the workers have loaded.

    Args:
        request: the LoRARequest, as it is passed to vLLM.
        files: size and modification time of each of its files when it was loaded.
    """

    request: LoRARequest
    files: tuple[tuple[int, int], ...]


class Adapters:
    """Adapters that an engine has loaded.

    Args:
        config: vLLM's configuration.
        load: coroutine function that loads an adapter in every worker, given its name, number and path, and returns
            the answer of each, see `load_adapter`.
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
        """Return a request's adapter, after every worker has loaded it once.

        Raises:
            InvalidRequest: it is not vLLM's LoRARequest, the engine was started without `enable_lora`, its files are
                missing or do not fit the model, or its name or number is another adapter's; or the request wants
                logprobs of its prompt, for which vLLM has no adapter by row (on CPU it crashes on them).
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
        """Check if the workers have loaded this adapter.

        Raises:
            InvalidRequest: they have another under its name or number, or its files have changed.
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
        """Check an adapter's settings against the engine's, without the model."""
        text = self._config.model_config.hf_config.get_text_config()
        try:
            helper = PEFTHelper.from_local_dir(request.lora_path, getattr(text, "max_position_embeddings", None))
            helper.validate_legal(self._config.lora_config)
        except Exception as error:  # of any kind: it depends on what the file holds
            raise InvalidRequest(f"{_described(request)} is not one that this engine can use: {error}") from error


def _adapter_folder(request: LoRARequest) -> str:
    """Return the absolute path of an adapter's folder, which stays valid after a change of directory.

    Raises:
        InvalidRequest: there is none.
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


def _names(request: LoRARequest) -> tuple[str, int, str]:
    return request.lora_name, request.lora_int_id, request.lora_path


def _described(request: LoRARequest) -> str:
    return f"the LoRA adapter {request.lora_name!r} ({request.lora_int_id}, {request.lora_path})"


def _refusal(answers: Sequence[Sequence[str]]) -> str:
    """Return the reason of the workers' answers why an adapter cannot be used; "" if it can."""
    reasons = [reason for reason, *_ in answers if reason]
    # A pipeline stage lacks the modules of the other stages.
    nowhere = set[str].intersection(*(set(missing) for _, *missing in answers))
    return next(iter([*reasons, *(f"the model has no {name}" for name in sorted(nowhere))]), "")


def load_adapter(worker: Any, name: str, number: int, path: str) -> list[str]:
    """Load an adapter in a worker, and check that the modules that this worker has fit.

    Returns:
        The reason why it cannot be used, and then it is not kept, or ""; then the names of the adapter's modules that
        the worker lacks.
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
    """Return the first mismatch between an adapter's weights and the model, or "".

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
    """Replacement of LoRA's kernels, whose row counts and adapters by row are those of the last pass."""

    @staticmethod
    def add_lora_logits(logits: Any, *_: Any) -> Any:
        """Return the logits unchanged."""
        return logits


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Make a model compute logits of arbitrary rows in the block, as for a request with no adapter."""
    wrappers = [module for module in model.modules() if isinstance(module, LogitsProcessorWithLoRA)]
    kernels = [wrapper.punica_wrapper for wrapper in wrappers]
    try:
        for wrapper in wrappers:
            wrapper.punica_wrapper = _NoAdapter()
        yield
    finally:
        for wrapper, kernel in zip(wrappers, kernels, strict=True):
            wrapper.punica_wrapper = kernel
