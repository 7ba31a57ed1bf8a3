"""Has torch's queries say, in every process that starts with this folder on its path, that there is no AVX-512 or AMX.

vLLM chooses its library of kernels by them. It relies on all of them asking `torch.cpu.get_capabilities`, which is
replaced once torch is imported.
"""

import sys
from importlib.machinery import PathFinder
from types import MappingProxyType


class Finder:
    """Finds `torch.cpu` where it is, with a loader that replaces what it says of this processor."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """The spec of `torch.cpu`; None for any other module."""
        spec = PathFinder.find_spec(name, path, target) if name == "torch.cpu" else None
        if spec is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                run(module)
                found = module.get_capabilities

                def get_capabilities():
                    beyond = ("avx512", "amx", "avx10")
                    return MappingProxyType({what: has for what, has in found().items() if not what.startswith(beyond)})

                module.get_capabilities = get_capabilities

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder)
