"""SAEs and transcoders of Gemma Scope: `params.npz` of the first, `config.json` and `params.safetensors` of the second.

All of them are jumprelu, and subtract nothing from what they read. The first names its point in the path alone:
`gemma-scope-2b-pt-res/layer_20/width_16k/average_l0_71`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from steercap.core.spec import Point
from steercap.core.values import shown
from steercap.errors import InvalidFile
from steercap.saes.hooks import point_of
from steercap.saes.reading import Recipe
from steercap.saes.tensors import Tensors, read_configuration

ARRAYS: Final = "params.npz"
CONFIGURATION: Final = "config.json"
WEIGHTS: Final = "params.safetensors"
#: Names in files of both.
NAMES: Final = {"W_enc": "w_enc", "W_dec": "w_dec", "b_enc": "b_enc", "b_dec": "b_dec", "threshold": "threshold"}
#: The point that each repository of the first is of, and what a transcoder reconstructs. What transcoders read is the
#: row behind the norm and before its gain, which is at no point.
SITES: Final = {"res": "resid_post", "mlp": "mlp_out", "att": "z", "transcoders": "mlp_out"}
_REPOSITORY: Final = re.compile(r"gemma-scope-([0-9a-z]+-(?:pt|it))-(res|mlp|att|transcoders)(?![0-9a-z])")
_LAYER: Final = re.compile(r"(?<![0-9a-z])layer_(\d{1,4})(?!\d)")


def recipe_of_arrays(path: Path, tensors: Tensors, source: str) -> Recipe:
    """What is known of a `params.npz`, of its path and its arrays.

    Args:
        path: of the file.
        tensors: its arrays.
        source: what the user named, a repository perhaps.
    """
    where = f"{source}/{path}"
    repositories, layers = set(_REPOSITORY.findall(where)), set(_LAYER.findall(where))
    width = tensors.shapes.get("w_enc", (0, 0))[0], tensors.shapes.get("w_dec", (0, 0))[-1]
    model, part = repositories.pop() if len(repositories) == 1 else ("", "")
    layer = int(layers.pop()) if len(layers) == 1 else None
    point = Point(layer, SITES[part]) if part and layer is not None else None
    transcodes = part == "transcoders" or width[0] != width[1]
    return Recipe(
        "jumprelu_transcoder" if transcodes else "jumprelu",
        None if transcodes else point,
        point,
        name="/".join(path.parent.parts[-3:]),
        model=model and f"google/gemma-2-{model.removesuffix('-pt')}",
        hooks=("the path", "the path"),
    )


def read_recipe(path: Path) -> Recipe:
    """What the `config.json` of Gemma Scope 2 says.

    Raises:
        InvalidFile: it cannot be read, or is of another architecture.
    """
    said = read_configuration(path)
    if said.get("architecture") != "jump_relu":
        raise InvalidFile(f"{path}: architecture={shown(said.get('architecture'))}; Gemma Scope's are jump_relu")
    hook, target = said.get("hf_hook_point_in"), said.get("hf_hook_point_out")
    transcodes = target is not None and target != hook
    skips = said.get("affine_connection") is True
    architecture = "jumprelu" if not transcodes else "jumprelu_skip_transcoder" if skips else "jumprelu_transcoder"
    return Recipe(
        architecture,
        point_of(hook),
        point_of(target if transcodes else hook),
        name="/".join(path.parent.parts[-2:]),
        model=str(said.get("model_name") or ""),
        hooks=(hook, target if transcodes else hook),
    )
