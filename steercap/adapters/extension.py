"""The worker's end of every call of the client.

vLLM imports this module in each worker process before the model is loaded, and mixes the class into its worker:
importing it is what hooks the model runners, and its methods are the RPCs.
"""

from __future__ import annotations

from typing import Any

from steercap.adapters import death, hook_runners, load_adapter, runtime_of
from steercap.adapters.cluster import find_folder
from steercap.core.messages import Unhooked, encode
from steercap.errors import UnsupportedRunner

find_folder()
hook_runners()


class WorkerExtension:
    """Mixed into vLLM's worker by `worker_extension_cls`; every name is prefixed, since none may clash."""

    model_runner: Any

    def steercap_answer(self, frame: bytes) -> bytes:
        """Answer one frame of the client; never raises."""
        try:
            runtime = runtime_of(self.model_runner)
        except UnsupportedRunner as error:
            return encode(Unhooked(str(error)))
        return runtime.answer(frame)

    def steercap_place(self) -> str:
        """Where this worker is, see `adapters.death`."""
        return death.place()

    def steercap_load_adapter(self, name: str, number: int, path: str) -> str:
        """Load a LoRA adapter; never raises. Says why it cannot be used, or ""."""
        return load_adapter(self, name, number, path)
