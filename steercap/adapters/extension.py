"""Worker side of the client's calls.

vLLM imports this module in each worker process before the model is loaded, and mixes the class into its worker:
the import hooks the model runners, and the class's methods are the RPCs.
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
    """Mixin of vLLM's worker (`worker_extension_cls`); its names have a prefix so that none clashes."""

    model_runner: Any

    def steercap_answer(self, frame: bytes) -> bytes:
        """Answer one encoded message of the client with another, `core.messages`; an error is an answer too."""
        try:
            runtime = runtime_of(self.model_runner)
        except UnsupportedRunner as error:
            return encode(Unhooked(str(error)))
        return runtime.answer(frame)

    def steercap_place(self) -> str:
        """Return the place of this worker's process, see `adapters.process_exit`."""
        return death.place()

    def steercap_load_adapter(self, name: str, number: int, path: str) -> list[str]:
        """Load a LoRA adapter; return what `load_adapter` does. Never raises."""
        return load_adapter(self, name, number, path)
