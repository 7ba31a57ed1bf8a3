"""Methods that the client calls in vLLM's workers by RPC.

vLLM imports this module in each worker process before the model is loaded, and mixes the class into its worker:
importing it hooks the model runners, and the methods of `WorkerExtension` are the RPCs.
"""

from __future__ import annotations

from typing import Any

from steercap.adapters import hook_runners, load_adapter, runtime_of
from steercap.adapters import process_exit as death
from steercap.adapters.entry import find_folder
from steercap.core.messages import Unhooked, encode
from steercap.errors import UnsupportedRunner

find_folder()
hook_runners()


class WorkerExtension:
    """Mixin of vLLM's worker class (`worker_extension_cls`) with steercap's RPCs, all named `steercap_...`."""

    model_runner: Any

    def steercap_answer(self, frame: bytes) -> bytes:
        """Answer an encoded message of `core.messages` with an encoded message, which may be an error."""
        try:
            runtime = runtime_of(self.model_runner)
        except UnsupportedRunner as error:
            return encode(Unhooked(str(error)))
        return runtime.answer(frame)

    def steercap_place(self) -> str:
        """Return where this worker's process runs, as of `process_exit.place`."""
        return death.place()

    def steercap_load_adapter(self, name: str, number: int, path: str) -> list[str]:
        """Load a LoRA adapter; return the reason of a failure or "", then names of absent modules. Never raises."""
        return load_adapter(self, name, number, path)
