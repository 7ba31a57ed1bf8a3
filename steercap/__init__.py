"""steercap: read and steer the activations of a language model while vLLM serves it.

Importing it loads neither vLLM nor torch; the public names load what they need when first used.
"""

from typing import TYPE_CHECKING

from steercap.core.extras import lazy_names

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
    from steercap.captures.handle import CaptureHandle
    from steercap.captures.manifest import Manifest
    from steercap.captures.pooled import Encoded
    from steercap.captures.saving import CaptureRun, save_run
    from steercap.captures.sketch import Sketch
    from steercap.captures.stacking import stack
    from steercap.config import Settings
    from steercap.core.protocols import Progress
    from steercap.core.receipt import Receipt, SteeringReceipt
    from steercap.core.rows import latest_per_position
    from steercap.core.spec import CaptureSpec, Point
    from steercap.kernels.attention import AttentionSummary
    from steercap.model import SteerModel
    from steercap.requests.call_types import Generation
    from steercap.requests.monitoring import Crossing, MonitorReport
    from steercap.requests.sketching import RunningSketch
    from steercap.requests.stream import Chunk
    from steercap.saes.encoder import Features
    from steercap.saes.sae import SAE
    from steercap.steering.calibration import Calibration
    from steercap.steering.directions import DirectionSet
    from steercap.steering.edits.add import Add, AddIf, LowRank, SAEFeature
    from steercap.steering.edits.replace import Ablate, Cap, Replace, SetProjection
    from steercap.steering.layers import LayerVectors
    from steercap.steering.monitor import Monitor
    from steercap.steering.spec import LogitBias, SteeringSpec

__version__ = "0.1.0"

_HOMES = {
    "Ablate": "steering.edits.replace",
    "Add": "steering.edits.add",
    "AddIf": "steering.edits.add",
    "Cap": "steering.edits.replace",
    "AttentionSummary": "kernels.attention",
    "Calibration": "steering.calibration",
    "CaptureHandle": "captures.handle",
    "CaptureRun": "captures.saving",
    "CaptureSpec": "core.spec",
    "Chunk": "requests.stream",
    "Crossing": "requests.monitoring",
    "DirectionSet": "steering.directions",
    "Encoded": "captures.pooled",
    "Features": "saes.encoder",
    "LayerVectors": "steering.layers",
    "LogitBias": "steering.spec",
    "LowRank": "steering.edits.add",
    "Manifest": "captures.manifest",
    "Monitor": "steering.monitor",
    "MonitorReport": "requests.monitoring",
    "Point": "core.spec",
    "Progress": "core.protocols",
    "Generation": "requests.call_types",
    "Receipt": "core.receipt",
    "Replace": "steering.edits.replace",
    "RunningSketch": "requests.sketching",
    "SAE": "saes.sae",
    "SAEFeature": "steering.edits.add",
    "SetProjection": "steering.edits.replace",
    "Settings": "config",
    "Sketch": "captures.sketch",
    "SteerModel": "model",
    "SteeringReceipt": "core.receipt",
    "SteeringSpec": "steering.spec",
    "latest_per_position": "core.rows",
    "save_run": "captures.saving",
    "stack": "captures.stacking",
}
#: Subpackages that are attributes of `steercap`, each imported when it is first accessed.
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
    "DirectionSet",
    "Encoded",
    "Features",
    "Generation",
    "LayerVectors",
    "LogitBias",
    "LowRank",
    "Manifest",
    "Monitor",
    "MonitorReport",
    "Point",
    "Progress",
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

__getattr__, __dir__ = lazy_names(__name__, _HOMES, _PACKAGES)
