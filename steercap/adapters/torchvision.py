"""Placeholders for torchvision where it is not installed, such as in the CPU setup, where its wheels break torch.

Many of vLLM's model files, and transformers' processors of images and videos, import it at the top and use it for media
alone. Their imports get placeholders, which raise an error when called, so text can be served without it. All other
code finds torchvision absent as before: `find_spec`, `sys.modules`, other packages' imports.

It relies on this: an import statement calls the `__import__` of its module's `__builtins__`; `_run_in_subprocess` of
vLLM's registry pickles a function by cloudpickle and calls it in a fresh process, to inspect a model's class; a
processor of `MULTIMODAL_REGISTRY` makes inputs of each kind that `info.allowed_mm_limits` lists. It can go when vLLM
and transformers import torchvision where they use it.
"""

from __future__ import annotations

import builtins
import functools
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final, NoReturn

from steercap.adapters.releases import require

NAME: Final = "torchvision"
#: Packages whose imports get placeholders.
_IMPORTERS: Final = ("vllm", "transformers")
#: Name of the function of vLLM's registry that calls another function in a fresh process.
_INSPECTION: Final = "_run_in_subprocess"
_HOOKED: Final = "__steercap_torchvision__"


def is_absent() -> bool:
    """Check that torchvision is not installed."""
    return find_spec(NAME) is None


class _Placeholder(type):
    """Metaclass of placeholder classes, which can be annotated with and subclassed, but raise when called."""

    def __getattr__(cls, name: str) -> _Placeholder:
        if name.startswith("__"):
            raise AttributeError(name)
        return _PLACEHOLDERS[f"{cls.__qualname__}.{name}"]

    def __call__(cls, *_args: object, **_options: object) -> NoReturn:
        used = next(base.__qualname__ for base in cls.__mro__ if base.__module__ == __name__)
        raise ModuleNotFoundError(
            f"torchvision is not installed, and {used} is needed for pictures or videos; text alone is served",
            name=NAME,
        )


class _Placeholders(dict[str, _Placeholder]):
    """Placeholders by dotted name, made on first use; pickled empty."""

    def __missing__(self, name: str) -> _Placeholder:
        made = _Placeholder(name.rpartition(".")[2], (), {"__qualname__": name, "__module__": __name__})
        return self.setdefault(name, made)

    def __reduce__(self) -> tuple[type[_Placeholders], tuple[()]]:
        return type(self), ()


_PLACEHOLDERS: Final = _Placeholders()


def _import(name: str, *args: Any, **options: Any) -> Any:
    if name.partition(".")[0] == NAME and is_absent():
        names = args[2] if len(args) > 2 else options.get("fromlist")
        return _PLACEHOLDERS[name if names else NAME]
    return builtins.__import__(name, *args, **options)


class _Loader(SourceFileLoader):
    """Loader of source files in whose modules imports of torchvision return placeholders."""

    def exec_module(self, module: ModuleType) -> None:
        code = self.get_code(module.__name__)
        if code is not None and any(name.partition(".")[0] == NAME for name in code.co_names):
            module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
        super().exec_module(module)


class _Finder:
    """Finder that loads the modules of `_IMPORTERS` with `_Loader`."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in _IMPORTERS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def hook_imports() -> None:
    """Make imports of torchvision by vLLM and transformers return placeholders if it is absent; safe to call again."""
    if _Finder not in sys.meta_path and is_absent():
        sys.meta_path.insert(0, _Finder)


def hook() -> None:
    """Install the placeholders here and in the processes where vLLM inspects model classes; safe to call again."""
    hook_imports()
    if not is_absent():
        return
    import cloudpickle
    from vllm.model_executor.models import registry

    require("registry", registry)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a fresh process may not find it
    original = getattr(registry, _INSPECTION)
    if hasattr(original, _HOOKED):
        return

    @functools.wraps(original)
    def inspecting(function: Callable[[], Any]) -> Any:
        return original(functools.partial(_inspect, function))

    setattr(inspecting, _HOOKED, True)
    setattr(registry, _INSPECTION, inspecting)


def _inspect(function: Callable[[], Any]) -> Any:
    hook_imports()
    return function()


def unserved_media(config: Any) -> tuple[str, ...]:
    """Return the kinds of media, such as "image", that this model's processor cannot prepare without torchvision.

    Each kind within the engine's limits is tried on dummy data. Failures of other causes are left to vLLM.
    """
    model = config.model_config
    if not is_absent() or not model.supports_multimodal_inputs:
        return ()
    from vllm.multimodal import MULTIMODAL_REGISTRY

    limits = MULTIMODAL_REGISTRY.get_processing_info(model).allowed_mm_limits
    unserved = []
    for kind in (kind for kind, limit in limits.items() if limit):
        try:
            MULTIMODAL_REGISTRY.create_processor(model).get_dummy_mm_inputs({kind: 1})
        except Exception as error:  # noqa: BLE001 -- processors raise anything; vLLM meets the same error again
            if any(isinstance(cause, ImportError) and NAME in str(cause).lower() for cause in _causes(error)):
                unserved.append(kind)
    return tuple(unserved)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
