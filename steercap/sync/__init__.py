"""The API of steercap without `await`: `steercap.sync` has the same names as `steercap`.

    from steercap.sync import SteerModel
    from steercap.sync.directions import extract

    with SteerModel("Qwen/Qwen3-0.6B") as model:
        text, handle = model.generate("Hello", capture_layers=[4])
        rows = handle.fetch().captures[4]
        found = extract(model, ["It was lovely"], ["It was awful"], name="joy", held_out=0)

`steercap.sync.directions`, `steercap.sync.collecting`, `steercap.sync.sweeps`, `steercap.sync.evaluation`,
`steercap.sync.patching`, `steercap.sync.analysis`, `steercap.sync.personas` and `steercap.sync.roles` hold the
functions that take an open model; all but both `run`s are names of `steercap.sync` too. Names that need no `await`,
such as edits and specs, are in `steercap` only.
In a notebook `await` works at the top level, and `steercap.SteerModel` is the better choice.
"""

from typing import TYPE_CHECKING

from steercap.core.extras import lazy_names

if TYPE_CHECKING:
    from steercap.sync import analysis, collecting, directions, evaluation, patching, personas, roles, sweeps
    from steercap.sync.analysis import layer_sweep, position_sweep
    from steercap.sync.collecting import ActivationStream, activations, collect
    from steercap.sync.directions import calibrate, extract, mean_rows
    from steercap.sync.evaluation import evaluate, shuffled
    from steercap.sync.handle import CaptureHandle
    from steercap.sync.model import SteerModel
    from steercap.sync.patching import ablate, patch, path_patch
    from steercap.sync.remote import RemoteModel
    from steercap.sync.roles import (
        calibrated_capping,
        compare_steering,
        projections_by_text,
        run_share,
        token_projections,
    )
    from steercap.sync.saving import save_run
    from steercap.sync.sketch import RunningSketch
    from steercap.sync.sweeps import run_sweep

__all__ = [
    "ActivationStream",
    "CaptureHandle",
    "RemoteModel",
    "RunningSketch",
    "SteerModel",
    "ablate",
    "activations",
    "analysis",
    "calibrate",
    "calibrated_capping",
    "collect",
    "collecting",
    "compare_steering",
    "directions",
    "evaluate",
    "evaluation",
    "extract",
    "layer_sweep",
    "mean_rows",
    "patch",
    "patching",
    "path_patch",
    "personas",
    "position_sweep",
    "projections_by_text",
    "roles",
    "run_share",
    "run_sweep",
    "save_run",
    "shuffled",
    "sweeps",
    "token_projections",
]

_HOMES = {
    "ActivationStream": "collecting",
    "CaptureHandle": "handle",
    "RemoteModel": "remote",
    "RunningSketch": "sketch",
    "SteerModel": "model",
    "ablate": "patching",
    "activations": "collecting",
    "calibrate": "directions",
    "calibrated_capping": "roles",
    "collect": "collecting",
    "compare_steering": "roles",
    "evaluate": "evaluation",
    "extract": "directions",
    "layer_sweep": "analysis",
    "mean_rows": "directions",
    "patch": "patching",
    "path_patch": "patching",
    "position_sweep": "analysis",
    "projections_by_text": "roles",
    "run_share": "roles",
    "run_sweep": "sweeps",
    "save_run": "saving",
    "shuffled": "evaluation",
    "token_projections": "roles",
}
_PACKAGES = frozenset({"analysis", "collecting", "evaluation", "sweeps", "patching", "personas", "roles", "directions"})

__getattr__, __dir__ = lazy_names(__name__, _HOMES, _PACKAGES)
