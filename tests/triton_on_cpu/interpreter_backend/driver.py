"""A driver that is there and drives nothing."""

from __future__ import annotations

from typing import Any, NoReturn

from triton.backends.driver import DriverBase

from interpreter_backend.once import patch_once


class InterpreterDriver(DriverBase):
    """What Triton would launch compiled kernels with."""

    @classmethod
    def is_active(cls) -> bool:
        """vLLM counts it, when it imports Triton; Triton, which is asked for no kernel, never does."""
        patch_once()
        return True

    def map_python_to_cpp_type(self, ty: str) -> NoReturn:
        raise NotImplementedError(ty)

    def get_current_target(self) -> NoReturn:
        raise NotImplementedError("kernels are interpreted: set TRITON_INTERPRET=1")

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> NoReturn:
        raise NotImplementedError("an interpreted kernel is not to be measured")
