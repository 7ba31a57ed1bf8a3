"""steercap: read and steer what a language model computes while vLLM serves it.

Importing it loads neither vLLM nor torch; the public names load what they need when first used.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # The packages of _PACKAGES, for type checkers.
    from steercap import architectures as architectures
    from steercap import captures as captures
    from steercap import client as client
    from steercap import errors as errors
    from steercap import lab as lab
    from steercap import saes as saes
    from steercap import steering as steering
    from steercap import sync as sync
    from steercap import testing as testing
    from steercap.captures.attention import AttentionSummary
    from steercap.captures.handle import CaptureHandle
    from steercap.captures.manifest import Manifest
    from steercap.captures.pooled import Encoded
    from steercap.captures.saving import CaptureRun, save_run
    from steercap.captures.sketch import Sketch
    from steercap.captures.stacking import stack
    from steercap.config import Settings
    from steercap.core.receipt import Receipt, SteeringReceipt
    from steercap.core.rows import latest_per_position
    from steercap.core.spec import CaptureSpec, Point
    from steercap.model import SteerModel
    from steercap.requests.answers import RawOutput
    from steercap.requests.monitoring import Crossing, MonitorReport
    from steercap.requests.sketching import RunningSketch
    from steercap.requests.stream import Chunk
    from steercap.saes.features import Features
    from steercap.saes.sae import SAE
    from steercap.steering.calibration import Calibration
    from steercap.steering.edits.ablate import Ablate
    from steercap.steering.edits.add import Add
    from steercap.steering.edits.add_if import AddIf
    from steercap.steering.edits.cap import Cap
    from steercap.steering.edits.low_rank import LowRank
    from steercap.steering.edits.replace import Replace
    from steercap.steering.edits.sae_feature import SAEFeature
    from steercap.steering.edits.set_projection import SetProjection
    from steercap.steering.logit_bias import LogitBias
    from steercap.steering.monitor import Monitor
    from steercap.steering.spec import SteeringSpec

__version__ = "0.1.0"

_HOMES = {
    "Ablate": "steercap.steering.edits.ablate",
    "Add": "steercap.steering.edits.add",
    "AddIf": "steercap.steering.edits.add_if",
    "Cap": "steercap.steering.edits.cap",
    "AttentionSummary": "steercap.captures.attention",
    "Calibration": "steercap.steering.calibration",
    "CaptureHandle": "steercap.captures.handle",
    "CaptureRun": "steercap.captures.saving",
    "CaptureSpec": "steercap.core.spec",
    "Chunk": "steercap.requests.stream",
    "Crossing": "steercap.requests.monitoring",
    "Encoded": "steercap.captures.pooled",
    "Features": "steercap.saes.features",
    "LogitBias": "steercap.steering.logit_bias",
    "LowRank": "steercap.steering.edits.low_rank",
    "Manifest": "steercap.captures.manifest",
    "Monitor": "steercap.steering.monitor",
    "MonitorReport": "steercap.requests.monitoring",
    "Point": "steercap.core.spec",
    "RawOutput": "steercap.requests.answers",
    "Receipt": "steercap.core.receipt",
    "Replace": "steercap.steering.edits.replace",
    "RunningSketch": "steercap.requests.sketching",
    "SAE": "steercap.saes.sae",
    "SAEFeature": "steercap.steering.edits.sae_feature",
    "SetProjection": "steercap.steering.edits.set_projection",
    "Settings": "steercap.config",
    "Sketch": "steercap.captures.sketch",
    "SteerModel": "steercap.model",
    "SteeringReceipt": "steercap.core.receipt",
    "SteeringSpec": "steercap.steering.spec",
    "latest_per_position": "steercap.core.rows",
    "save_run": "steercap.captures.saving",
    "stack": "steercap.captures.stacking",
}
#: Packages that `import steercap` makes reachable, each loaded when it is first named.
_PACKAGES = frozenset({"architectures", "captures", "client", "errors", "lab", "saes", "steering", "sync", "testing"})

__all__ = [
    "SAE",
    "Ablate",
    "Add",
    "AddIf",
    "AttentionSummary",
    "Calibration",
    "Cap",
    "CaptureHandle",
    "CaptureRun",
    "CaptureSpec",
    "Chunk",
    "Crossing",
    "Encoded",
    "Features",
    "LogitBias",
    "LowRank",
    "Manifest",
    "Monitor",
    "MonitorReport",
    "Point",
    "RawOutput",
    "Receipt",
    "Replace",
    "RunningSketch",
    "SAEFeature",
    "SetProjection",
    "Settings",
    "Sketch",
    "SteerModel",
    "SteeringReceipt",
    "SteeringSpec",
    "latest_per_position",
    "save_run",
    "stack",
]


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return import_module(f"steercap.{name}")
    if name not in _HOMES:
        inner = not name.startswith("_") and find_spec(f"steercap.{name}") is not None
        hint = f" before it is imported; write import steercap.{name}" if inner else ""
        raise AttributeError(f"module 'steercap' has no attribute {name!r}{hint}", name=name, obj=sys.modules[__name__])
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the names for completion, including those that are not loaded yet."""
    return sorted({*__all__, *_PACKAGES, "__version__", "__doc__", "__file__", "__name__", "__path__"})
