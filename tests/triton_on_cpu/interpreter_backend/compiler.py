"""A compiler that supports no target."""

from __future__ import annotations

from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend


class InterpreterBackend(BaseBackend):
    """What Triton would compile kernels with."""

    @staticmethod
    def supports_target(target: Any) -> bool:  # noqa: ARG004 -- named by Triton
        return False

    def hash(self) -> NoReturn:
        raise NotImplementedError

    def parse_options(self, options: dict[str, Any]) -> NoReturn:
        raise NotImplementedError

    def add_stages(self, stages: dict[str, Any], options: object, language: Any) -> NoReturn:
        raise NotImplementedError

    def load_dialects(self, context: Any) -> NoReturn:
        raise NotImplementedError

    def get_module_map(self) -> NoReturn:
        raise NotImplementedError
