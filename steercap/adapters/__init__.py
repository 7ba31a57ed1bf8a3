"""The only code that imports vllm: its engine in the module `engine`, each of its model runners in a module of its own.

An adapter of a model runner (V1, V2) hooks the runner's class at three moments: the model is loaded, a batch's rows are
laid out, the forward pass has ended. It passes on plain data alone (`worker.step.BatchRows`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from steercap.adapters import releases
from steercap.errors import UnsupportedRunner

if TYPE_CHECKING:
    # vLLM's types, for annotations in other folders: never imported at run time.
    from vllm.outputs import PoolingRequestOutput as PoolingRequestOutput
    from vllm.outputs import RequestOutput as RequestOutput
    from vllm.pooling_params import PoolingParams as PoolingParams
    from vllm.sampling_params import SamplingParams as SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM as AsyncLLM

    from steercap.worker.runtime import Runtime

#: Name of the attribute that holds a hooked model runner's `Runtime`.
RUNTIME_ATTRIBUTE = "steercap_runtime"
#: Modules that hook a runner, repair vLLM's loading of weights or its runner on CPU, or stand in for torchvision.
_HOOKING: Final = ("torchvision", "runner_v1", "runner_v2", "hooks", "cpu")
#: Reason why hooking failed, by module of `_HOOKING`; an engine that uses another runner can still start.
_UNHOOKED: Final[dict[str, str]] = {}


def hook_runners() -> None:
    """Hook vLLM's model runner classes in this process and keep failures for `runtime_of`; safe to call again."""
    for name in _HOOKING:
        try:
            with releases.importing():
                import_module(f"{__name__}.{name}").hook()
        except UnsupportedRunner as error:
            _UNHOOKED[name] = str(error)


def load_adapter(worker: Any, name: str, number: int, path: str) -> list[str]:
    """Load a LoRA adapter in a vLLM worker; arguments and returned strings as of `lora.load_adapter`."""
    from steercap.adapters import lora

    return lora.load_adapter(worker, name, number, path)


def runtime_of(runner: Any) -> Runtime:
    """Return the steercap runtime of a vLLM model runner whose model has been loaded with taps.

    Raises:
        UnsupportedRunner: no adapter has hooked the runner's class, or a repair of vLLM's CPU code failed.
    """
    runtime: Runtime | None = getattr(runner, RUNTIME_ATTRIBUTE, None)
    if runtime is None:
        kind = f"{type(runner).__module__}.{type(runner).__qualname__}"
        reasons = list(_UNHOOKED.values()) or ["known: Model Runner V1 and V2, on CUDA and CPU"]
        raise UnsupportedRunner("; ".join([f"no adapter for the model runner {kind}", *reasons]))
    if "cpu" in _UNHOOKED and runner.device.type == "cpu":
        raise UnsupportedRunner(_UNHOOKED["cpu"])
    return runtime
