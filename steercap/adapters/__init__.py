"""The only code that imports vllm: the engine's side in `engine`, one module for each model runner.

A runner adapter hooks three moments of its runner's class: the model has been loaded, a real batch has been laid
out, the pass has ended. Everything it passes on is plain (`worker.batch.BatchRows`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steercap.errors import UnsupportedRunner

if TYPE_CHECKING:
    from steercap.worker.runtime import Runtime

#: Where a hooked runner keeps its runtime.
RUNTIME_ATTRIBUTE = "steercap_runtime"


def hook_runners() -> None:
    """Hook the classes of every model runner this steercap knows, in this process; safe to call again."""
    from steercap.adapters import cpu, runner_v1, runner_v2

    runner_v1.hook()
    runner_v2.hook()
    cpu.hook()


def load_adapter(worker: Any, name: str, number: int, path: str) -> str:
    """Have a worker load a LoRA adapter; see `lora.load_adapter`."""
    from steercap.adapters import lora

    return lora.load_adapter(worker, name, number, path)


def runtime_of(runner: Any) -> Runtime:
    """The runtime of a loaded runner.

    Raises:
        UnsupportedRunner: no adapter has hooked this runner's class.
    """
    runtime: Runtime | None = getattr(runner, RUNTIME_ATTRIBUTE, None)
    if runtime is None:
        kind = f"{type(runner).__module__}.{type(runner).__qualname__}"
        raise UnsupportedRunner(
            f"no adapter for the model runner {kind}; known: Model Runner V1 (CUDA and CPU) and V2 (CUDA)"
        )
    return runtime
