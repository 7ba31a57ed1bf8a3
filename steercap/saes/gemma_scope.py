"""SAEs and transcoders of Gemma Scope 1 (`params.npz`) and 2 (`config.json` and `params.safetensors`).

All of them are jumprelu, and subtract nothing from the rows that they read. The first names its point in the path
alone: `gemma-scope-2b-pt-res/layer_20/width_16k/average_l0_71`.
"""

from __future__ import annotations

import re
from typing import Final

from steercap.core.spec import Point
from steercap.core.values import shown
from steercap.errors import InvalidFile
from steercap.saes.layouts import SAEPlace
from steercap.saes.reading import SAESettings, point_of

#: Input and output hook of each part of Gemma Scope 2, by the part's name in paths.
SECOND: Final = {
    "resid_post": ("output", ""),
    "attn_out": ("self_attn.o_proj.input", ""),
    "mlp_out": ("post_feedforward_layernorm.output", ""),
    "transcoder": ("pre_feedforward_layernorm.output", "post_feedforward_layernorm.output"),
}
#: Site of each repository of Gemma Scope 1, for transcoders that of the output. Their input, the row behind the norm
#: and before its gain, is at no point.
SITES: Final = {"res": "resid_post", "mlp": "mlp_out", "att": "z", "transcoders": "mlp_out"}
_REPOSITORY: Final = re.compile(r"gemma-scope-([0-9a-z]+-(?:pt|it))-(res|mlp|att|transcoders)(?![0-9a-z])")
_SECOND: Final = re.compile(rf"(?:^|/)({'|'.join(SECOND)})(?:_all)?/layer_(\d{{1,4}})(_[^/]*)/")
_EMBEDDING: Final = re.compile(r"(?:^|/)embedding/")
_LAYER: Final = re.compile(r"(?<![0-9a-z])layer_(\d{1,4})(?!\d)")


def recipe_of_arrays(place: SAEPlace) -> SAESettings:
    """Return the recipe of a `params.npz`, from its path and its arrays.

    SAEs of the embeddings were trained before these are multiplied by √d_in, as Gemma does before its first layer.
    """
    path, shapes = place.weights, place.tensors.shapes
    where = f"{place.source}/{path}"
    repositories, layers = set(_REPOSITORY.findall(where)), set(_LAYER.findall(where))
    encoder, decoder = shapes.get("W_enc", ()), shapes.get("W_dec", ())
    width = encoder[0] if encoder else 0
    model, part = repositories.pop() if len(repositories) == 1 else ("", "")
    layer = int(layers.pop()) if len(layers) == 1 else None
    point = Point(layer, SITES[part]) if part and layer is not None else None
    embeds = part == "res" and _EMBEDDING.search(where) is not None and width > 0
    transcodes = part == "transcoders" or (bool(decoder) and decoder[-1] != width)
    return SAESettings(
        "jumprelu_transcoder" if transcodes else "jumprelu",
        None if transcodes else Point(0, "resid_pre") if embeds else point,
        Point(0, "resid_pre") if embeds else point,
        scale=width**-0.5 if embeds else 1.0,
        name="/".join(path.parent.parts[-3:]),
        model=model and f"google/gemma-2-{model.removesuffix('-pt')}",
        hooks=("the path", "the path"),
    )


def read_recipe(place: SAEPlace) -> SAESettings:
    """Return the recipe of a Gemma Scope 2 SAE, from its `config.json`, or from the path if there is none.

    Raises:
        InvalidFile: it cannot be read, or is of another architecture.
    """
    path = place.weights
    said = place.said() if place.configuration else _inferred(f"{place.source}/{path}")
    if said.get("architecture") != "jump_relu":
        raise InvalidFile(f"{path}: architecture={shown(said.get('architecture'))}; Gemma Scope's are jump_relu")
    hook, target = said.get("hf_hook_point_in"), said.get("hf_hook_point_out")
    transcodes = target is not None and target != hook
    skips = said.get("affine_connection") is True
    architecture = "jumprelu" if not transcodes else "jumprelu_skip_transcoder" if skips else "jumprelu_transcoder"
    return SAESettings(
        architecture,
        point_of(hook),
        point_of(target if transcodes else hook),
        name="/".join(path.parent.parts[-2:]),
        model=str(said.get("model_name") or ""),
        hooks=(hook, target if transcodes else hook),
    )


def _inferred(where: str) -> dict[str, object]:
    """Infer the fields of a `config.json` from the path: `transcoder_all/layer_3_width_16k_l0_big_affine/`.

    Raises:
        InvalidFile: it names no layer, or no part.
    """
    found = _SECOND.search(where)
    if found is None:
        raise InvalidFile(
            f"{where} has no config.json beside it, and its path is not like Gemma Scope 2's, "
            f"<{'|'.join(SECOND)}>/layer_<N>_..., which would say what it is"
        )
    reads, writes = SECOND[found[1]]
    model = re.search(r"gemma-scope-2-(\w+-(?:pt|it))", where)
    said: dict[str, object] = {"architecture": "jump_relu", "hf_hook_point_in": f"model.layers.{found[2]}.{reads}"}
    said |= {"model_name": f"google/gemma-3-{model[1]}"} if model else {}
    said |= {"hf_hook_point_out": f"model.layers.{found[2]}.{writes}"} if writes else {}
    return said | {"affine_connection": "_affine" in found[3]}
