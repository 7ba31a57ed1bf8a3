"""SAEs in SAELens's format: `cfg.json` beside `sae_weights.safetensors`, in each generation of the former.

Before version 6 the configuration was flat, and some fields had other names or were left out; since then the fields
about the language model are in `metadata`. A file from which steercap would have to guess is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from steercap.core.spec import Point
from steercap.core.values import index_of, number_of, shown
from steercap.errors import InvalidFile
from steercap.saes.encoder import NORMALISATIONS, Normalisation
from steercap.saes.layouts import SAEPlace
from steercap.saes.reading import ARCHITECTURES, SAESettings, point_of

#: Architectures that exist only in training.
TRAINED: Final = frozenset({"batchtopk", "matryoshka_batchtopk"})
#: Older names of fields.
RENAMED: Final = {
    "hook_point": "hook_name",
    "hook_point_head_index": "hook_head_index",
    "activation_fn_str": "activation_fn",
}
#: Normalisation by one factor for all rows, which must be known.
AVERAGE: Final = "expected_average_only_in"
#: Settings of published SAEs that their files lack: `config_overrides` of SAELens's `pretrained_saes.yaml` (6.54) that
#: change the computation.
_CENTRED: Final = {"model_from_pretrained_kwargs": {"center_writing_weights": True}}
PUBLISHED: Final[Mapping[str, Mapping[str, object]]] = {
    "jbloom/gpt2-small-saes-reformatted": _CENTRED,
    "jbloom/gpt2-small-feature-splitting-experiment-layer-8": _CENTRED,
    "tommmcgrath/gpt2-small-mlp-out-saes": _CENTRED,
    "joshengels/mistral-7b-residual-stream-saes": {"normalize_activations": "constant_norm_rescale"},
}
#: Sites whose rows TransformerLens centres where it centres the weights that write to the stream.
WRITTEN: Final = frozenset({"resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"})
#: Names of models with layer norms: TransformerLens centres their weights unless it is told not to.
LAYER_NORMED: Final = re.compile(
    r"(.*/)?((distil)?gpt-?2|gpt-?(neo|j)|stanford-gpt|pythia|opt-\d|bloom|stablelm|santacoder|phi-[12]|"
    r"(gelu|solu|attn-only|tiny-stories)-)",
    re.IGNORECASE,
)


def read_recipe(place: SAEPlace) -> SAESettings:
    """Return the recipe of an SAELens configuration.

    Raises:
        InvalidFile: it cannot be read, or asks for what steercap does not do.
    """
    found, path, centred = place.said(), place.configuration or place.weights, place.centred
    said: dict[str, object] = {RENAMED.get(name, name): value for name, value in found.items()}
    metadata = said.get("metadata")
    if isinstance(metadata, Mapping):
        said = {**said, **metadata}
    said |= PUBLISHED.get(place.source.lower(), {})
    architecture, k = _architecture(path, said)
    if said.get("hook_head_index") is not None:
        raise InvalidFile(f"{path}: it reads head {said['hook_head_index']} alone; steercap reads whole points")
    transcodes = "transcoder" in architecture
    shifted = said.get("apply_b_dec_to_input", not transcodes)
    if not isinstance(shifted, bool) or (shifted and transcodes):
        raise InvalidFile(
            f"{path}: apply_b_dec_to_input={shown(shifted)} of a {architecture}; it must be true or false, and false "
            "for a transcoder"
        )
    rescaled = said.get("rescale_acts_by_decoder_norm", False)
    if not isinstance(rescaled, bool):
        raise InvalidFile(f"{path}: rescale_acts_by_decoder_norm={shown(rescaled)}; it is true or false")
    normalisation, factor = _normalisation(path, said, place.scale, transcodes=transcodes)
    hook = _hook(said.get("hf_hook_name"), said.get("hook_name"))
    target = _hook(said.get("hf_hook_name_out"), said.get("hook_name_out")) if transcodes else hook
    reads = point_of(hook)
    if centred is None:
        centred = _centred(path, said, reads, normalisation)
    return SAESettings(
        architecture,
        reads,
        point_of(target),
        k,
        rescaled=rescaled,
        shifted=shifted,
        normalisation=normalisation,
        scale=factor,
        centred=centred,
        name=str(said.get("neuronpedia_id") or ""),
        model=str(said.get("model_name") or ""),
        size=(index_of(said.get("d_in")), index_of(said.get("d_sae"))),
        hooks=(hook, target),
    )


def _hook(module: object, hook: object) -> object:
    """Return the name of a point: that of transformers' module, or else TransformerLens's."""
    return hook if module is None or (point_of(module) is None and point_of(hook) is not None) else module


def _architecture(path: Path, said: Mapping[str, object]) -> tuple[str, int]:
    """Return the architecture and its `k`, 0 for architectures without one."""
    architecture, response = said.get("architecture", "standard"), said.get("activation_fn", "relu")
    kwargs = said.get("activation_fn_kwargs")
    k = kwargs.get("k") if isinstance(kwargs, Mapping) else None
    if response == "topk" and architecture in ("standard", "topk"):
        architecture, response = "topk", "relu"
    if isinstance(architecture, str) and architecture in TRAINED:
        raise InvalidFile(
            f"{path}: {architecture} is an architecture of training; save the SAE for inference, with SAELens' "
            "save_inference_model"
        )
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES or response != "relu":
        raise InvalidFile(
            f"{path}: architecture={shown(architecture)} with activation_fn={shown(response)}; steercap knows "
            f"{', '.join(ARCHITECTURES)}, with relu"
        )
    if architecture != "topk":
        return architecture, 0
    number = index_of(k if k is not None else said.get("k"))
    if number is None or number < 1:
        raise InvalidFile(f"{path}: a topk SAE with k={shown(said.get('k', k))}")
    return "topk", number


def _centred(path: Path, said: Mapping[str, object], reads: Point | None, normalisation: Normalisation) -> bool:
    """Return True if the SAE was trained on centred rows."""
    kwargs = said.get("model_from_pretrained_kwargs")
    told = kwargs.get("center_writing_weights") if isinstance(kwargs, Mapping) else None
    if isinstance(told, bool):
        return told
    model = str(said.get("model_name") or "")
    written = reads is not None and reads.site in WRITTEN and normalisation != "layer_norm"  # which centres rows itself
    if written and LAYER_NORMED.match(model):
        raise InvalidFile(
            f"{path}: TransformerLens centres rows of {model} by default, and the file does not say whether it was "
            "made of such rows (center_writing_weights); give centred=True or centred=False"
        )
    return False


def _normalisation(
    path: Path, said: Mapping[str, object], scale: float | None, *, transcodes: bool
) -> tuple[Normalisation, float]:
    """Return the normalisation of rows, and the factor that is multiplied into the weights."""
    asked = said.get("normalize_activations")
    if asked is None or isinstance(asked, bool):  # as the first files have it
        asked = AVERAGE if asked else "none"
    if asked != AVERAGE:
        if scale is not None:
            raise InvalidFile(f"{path}: activation_scale={scale}, and normalize_activations={asked!r} takes none")
        known = next((one for one in NORMALISATIONS if one == asked), None)
        if known is None or (transcodes and known != "none"):
            raise InvalidFile(f"{path}: normalize_activations={shown(asked)}, which steercap does not do here")
        return known, 1.0
    factor = number_of(said.get("norm_scaling_factor") if scale is None else scale)
    if transcodes or factor is None or not 0 < factor < float("inf"):
        raise InvalidFile(
            f"{path}: normalize_activations={AVERAGE!r} multiplies rows by a factor that the file does not hold; give "
            "activation_scale= (SAELens calls it norm_scaling_factor), or save the SAE with the factor folded in"
        )
    return "none", factor
