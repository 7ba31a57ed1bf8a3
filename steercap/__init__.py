"""steercap: read and steer what a language model computes while vLLM serves it.

Importing it loads neither vLLM nor torch; the public names load what they need when first used.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # The packages of _PACKAGES, for type checkers.
    from steercap import analysis as analysis
    from steercap import client as client
    from steercap import collecting as collecting
    from steercap import datasets as datasets
    from steercap import edits as edits
    from steercap import encodings as encodings
    from steercap import errors as errors
    from steercap import evaluation as evaluation
    from steercap import experiments as experiments
    from steercap import formats as formats
    from steercap import patching as patching
    from steercap import persona as persona
    from steercap import quantisation as quantisation
    from steercap import roles as roles
    from steercap import saes as saes
    from steercap import sites as sites
    from steercap import sketches as sketches
    from steercap import sync as sync
    from steercap import testing as testing
    from steercap import training as training
    from steercap import vectors as vectors
    from steercap import views as views
    from steercap.config import Settings
    from steercap.core.receipt import Receipt, SteeringReceipt
    from steercap.core.rows import latest_per_position
    from steercap.core.spec import CaptureSpec, Point
    from steercap.datasets.dataset import ActivationDataset
    from steercap.edits.ablate import Ablate
    from steercap.edits.add import Add
    from steercap.edits.add_if import AddIf
    from steercap.edits.cap import Cap
    from steercap.edits.low_rank import LowRank
    from steercap.edits.replace import Replace
    from steercap.edits.sae_feature import SAEFeature
    from steercap.edits.set_projection import SetProjection
    from steercap.model import SteerModel
    from steercap.requests.answers import RawOutput
    from steercap.requests.attention import AttentionSummary
    from steercap.requests.handle import CaptureHandle
    from steercap.requests.manifest import Manifest
    from steercap.requests.monitoring import Crossing, MonitorReport
    from steercap.requests.pooled import Encoded
    from steercap.requests.saving import CaptureRun, save_run
    from steercap.requests.sketching import RunningSketch
    from steercap.requests.stacking import stack
    from steercap.requests.stream import Chunk
    from steercap.saes.features import Features
    from steercap.saes.sae import SAE
    from steercap.sketches.sketch import Sketch
    from steercap.steering.logit_bias import LogitBias
    from steercap.steering.monitor import Monitor
    from steercap.steering.spec import SteeringSpec
    from steercap.vectors.calibration import Calibration

__version__ = "0.1.0"

_HOMES = {
    "Ablate": "steercap.edits.ablate",
    "ActivationDataset": "steercap.datasets.dataset",
    "Add": "steercap.edits.add",
    "AddIf": "steercap.edits.add_if",
    "Cap": "steercap.edits.cap",
    "AttentionSummary": "steercap.requests.attention",
    "Calibration": "steercap.vectors.calibration",
    "CaptureHandle": "steercap.requests.handle",
    "CaptureRun": "steercap.requests.saving",
    "CaptureSpec": "steercap.core.spec",
    "Chunk": "steercap.requests.stream",
    "Crossing": "steercap.requests.monitoring",
    "Encoded": "steercap.requests.pooled",
    "Features": "steercap.saes.features",
    "LogitBias": "steercap.steering.logit_bias",
    "LowRank": "steercap.edits.low_rank",
    "Manifest": "steercap.requests.manifest",
    "Monitor": "steercap.steering.monitor",
    "MonitorReport": "steercap.requests.monitoring",
    "Point": "steercap.core.spec",
    "RawOutput": "steercap.requests.answers",
    "Receipt": "steercap.core.receipt",
    "Replace": "steercap.edits.replace",
    "RunningSketch": "steercap.requests.sketching",
    "SAE": "steercap.saes.sae",
    "SAEFeature": "steercap.edits.sae_feature",
    "SetProjection": "steercap.edits.set_projection",
    "Settings": "steercap.config",
    "Sketch": "steercap.sketches.sketch",
    "SteerModel": "steercap.model",
    "SteeringReceipt": "steercap.core.receipt",
    "SteeringSpec": "steercap.steering.spec",
    "latest_per_position": "steercap.core.rows",
    "save_run": "steercap.requests.saving",
    "stack": "steercap.requests.stacking",
}
#: Packages that `import steercap` makes reachable, each loaded when it is first named.
_PACKAGES = frozenset(
    {
        "analysis",
        "client",
        "collecting",
        "datasets",
        "edits",
        "encodings",
        "errors",
        "evaluation",
        "experiments",
        "formats",
        "patching",
        "persona",
        "quantisation",
        "roles",
        "saes",
        "sites",
        "sketches",
        "sync",
        "testing",
        "training",
        "vectors",
        "views",
    }
)

__all__ = [
    "SAE",
    "Ablate",
    "ActivationDataset",
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
    """What completion offers: names that are not loaded yet included."""
    return sorted({*__all__, *_PACKAGES, "__version__", "__doc__", "__file__", "__name__", "__path__"})
