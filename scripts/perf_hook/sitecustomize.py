"""Times each pass inside vLLM's workers, and replays CUDA graphs without idle taps: for any script, which it does not change.

    export PYTHONPATH=scripts/perf_hook:.
    PERF_TIMES=out/times python scripts/bench_gpu.py --workloads 64x128+200 --modes control,idle,capture-all,steer-1
    python scripts/step_report.py out/times

Python imports this file by its name in every process that has the folder on its path. In the environment:

PERF_TIMES=FOLDER   one JSON line for each pass into FOLDER/PID.jsonl, written while the engine stands still
PERF_STRIP=idle     passes of which nothing is tracked replay graphs from which the tap kernels were taken out
PERF_STRIP=need     the same, and other passes replay graphs with the taps of the points that they need alone

Plain vLLM in the same run is timed too, and never stripped. How much of what all sites cost idle are kernels, and how
much are fusions that taps broke? Run this twice, the second time with PERF_STRIP=idle:

    export STEERCAP_DEVICE_RING_BYTES=4000000000     # or the rows of all sites leave no room for two engines on 80 GB
    PERF_TIMES=out/armed python scripts/bench_gpu.py --random-weights --workloads 64x128+200,1x32+200 --modes control,idle \
        --arm attn_in,attn_out,k,mlp_in,mlp_out,neurons,q,resid_mid,resid_pre,v,z
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

MODES = ("", "idle", "need")
TIMES, STRIP = os.environ.get("PERF_TIMES", ""), os.environ.get("PERF_STRIP", "")
_TIMED, _STRIPPED = ([name] if wanted else [] for name, wanted in (("times", TIMES), ("strip", STRIP)))
#: Which modules of this folder patch a module once it has been imported: each has a function for it, by its last name.
PATCHES: Mapping[str, Sequence[str]] = {
    "vllm.v1.worker.gpu_worker": _TIMED,
    "vllm.v1.worker.gpu.cudagraph_utils": [*_TIMED, *_STRIPPED],
    "steercap.worker.runtime": _TIMED,
    "steercap.worker.taps.cuda": _TIMED,
}


class PatchingLoader(importlib.abc.Loader):
    """Loads a module as `loader` does, then patches it."""

    def __init__(self, loader: Any, name: str) -> None:
        self._loader, self._name = loader, name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for name in PATCHES[self._name]:
            patches = importlib.import_module(f"perf_hook.{name}")
            getattr(patches, f"patch_{self._name.rpartition('.')[2]}")(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that are patched, with the finders behind it."""

    _busy = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        del path, target
        if not PATCHES.get(fullname) or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            spec.loader = PatchingLoader(spec.loader, fullname)
        return spec


if STRIP not in MODES:
    sys.exit(f"PERF_STRIP={STRIP!r}; write {' or '.join(filter(None, MODES))}")
if TIMES or STRIP:
    sys.path.append(
        str(Path(__file__).parent.parent)
    )  # for perf_hook; behind all else, since scripts have common names
    sys.meta_path.insert(0, Finder())
