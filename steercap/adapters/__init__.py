"""The only code that imports vllm: the engine's side in `engine`, one module for each model runner.

A runner adapter hooks three moments of its runner's class: the model has been loaded, a real batch has been laid
out, the pass has ended. Everything it passes on is plain data (`worker.step.BatchRows`).
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

#: Attribute of a hooked runner with its runtime.
RUNTIME_ATTRIBUTE = "steercap_runtime"
#: Modules that hook a runner, repair vLLM's loading of weights or its runner on CPU, or stand in for torchvision.
_HOOKING: Final = ("torchvision", "runner_v1", "runner_v2", "hooks", "cpu")
#: Reasons why some of them failed, by module: an engine of the other runner does not need them.
_UNHOOKED: Final[dict[str, str]] = {}


def hook_runners() -> None:
    """Hook the classes of all known model runners in this process; safe to call again."""
    for name in _HOOKING:
        try:
            with releases.importing():
                import_module(f"{__name__}.{name}").hook()
        except UnsupportedRunner as error:
            _UNHOOKED[name] = str(error)


def load_adapter(worker: Any, name: str, number: int, path: str) -> list[str]:
    """Load a LoRA adapter in a worker; see `lora.load_adapter`."""
    from steercap.adapters import lora

    return lora.load_adapter(worker, name, number, path)


def runtime_of(runner: Any) -> Runtime:
    """Return the runtime of a loaded runner.

    Raises:
        UnsupportedRunner: no adapter has hooked this runner's class, or it cannot be repaired on CPU.
    """
    runtime: Runtime | None = getattr(runner, RUNTIME_ATTRIBUTE, None)
    if runtime is None:
        kind = f"{type(runner).__module__}.{type(runner).__qualname__}"
        reasons = list(_UNHOOKED.values()) or ["known: Model Runner V1 and V2, on CUDA and CPU"]
        raise UnsupportedRunner("; ".join([f"no adapter for the model runner {kind}", *reasons]))
    if "cpu" in _UNHOOKED and runner.device.type == "cpu":
        raise UnsupportedRunner(_UNHOOKED["cpu"])
    return runtime
