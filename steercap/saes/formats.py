"""Settings of SAEs and transcoders in the formats of SAELens, in each generation, and of Gemma Scope 1 and 2.

Gemma Scope's SAEs are jumprelu, without a shift of rows. Gemma Scope 1 names the point in the path alone:
`gemma-scope-2b-pt-res/layer_20/width_16k/average_l0_71`.

Before version 6 SAELens's configuration was flat, and some fields had other names or were left out; since then the
fields about the language model are in `metadata`. A file from which steercap would have to guess is refused.
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
from steercap.saes.layouts import FoundSAE
from steercap.saes.reading import ARCHITECTURES, SAESettings, point_of

#: Input and output hook of Gemma Scope 2, by the part's name in paths; "" if the output is the input.
SECOND: Final = {
    "resid_post": ("output", ""),
    "attn_out": ("self_attn.o_proj.input", ""),
    "mlp_out": ("post_feedforward_layernorm.output", ""),
    "transcoder": ("pre_feedforward_layernorm.output", "post_feedforward_layernorm.output"),
}
#: Site by kind of Gemma Scope 1 repository; for transcoders that of the output. Their input, the row behind the norm
#: and before its gain, is at no site.
SITES: Final = {"res": "resid_post", "mlp": "mlp_out", "att": "z", "transcoders": "mlp_out"}
_REPOSITORY: Final = re.compile(r"gemma-scope-([0-9a-z]+-(?:pt|it))-(res|mlp|att|transcoders)(?![0-9a-z])")
_SECOND: Final = re.compile(rf"(?:^|/)({'|'.join(SECOND)})(?:_all)?/layer_(\d{{1,4}})(_[^/]*)/")
_EMBEDDING: Final = re.compile(r"(?:^|/)embedding/")
_LAYER: Final = re.compile(r"(?<![0-9a-z])layer_(\d{1,4})(?!\d)")


def gemma_scope(sae: FoundSAE) -> SAESettings:
    """Return the settings of a Gemma Scope 1 SAE, `params.npz`, from its path and the shapes of its arrays.

    SAEs of embeddings were trained on unscaled embeddings; Gemma multiplies these by √d_in before its first layer.
    """
    path, shapes = sae.weights, sae.tensors.shapes
    where = f"{sae.source}/{path}"
    repositories, layers = set(_REPOSITORY.findall(where)), set(_LAYER.findall(where))
    encoder, decoder = shapes.get("W_enc", ()), shapes.get("W_dec", ())
    width = encoder[0] if encoder else 0
    model, part = repositories.pop() if len(repositories) == 1 else ("", "")
    below = where[max((found.end() for found in _REPOSITORY.finditer(where)), default=0) :]
    embeds = part == "res" and width > 0 and bool(_EMBEDDING.search(below)) and not _LAYER.search(below)
    layer = int(layers.pop()) if len(layers) == 1 else None
    point = Point(layer, SITES[part]) if part and layer is not None else None
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


def gemma_scope_2(sae: FoundSAE) -> SAESettings:
    """Return the settings of a Gemma Scope 2 SAE from its `config.json`, or from the path if there is none.

    Raises:
        InvalidFile: the configuration cannot be read, or has another architecture.
    """
    path = sae.weights
    config = sae.read_config() if sae.configuration else _inferred(f"{sae.source}/{path}")
    if config.get("architecture") != "jump_relu":
        raise InvalidFile(f"{path}: architecture={shown(config.get('architecture'))}; Gemma Scope's are jump_relu")
    hook, target = config.get("hf_hook_point_in"), config.get("hf_hook_point_out")
    transcodes = target is not None and target != hook
    skips = config.get("affine_connection") is True
    architecture = "jumprelu" if not transcodes else "jumprelu_skip_transcoder" if skips else "jumprelu_transcoder"
    return SAESettings(
        architecture,
        point_of(hook),
        point_of(target if transcodes else hook),
        name="/".join(path.parent.parts[-2:]),
        model=str(config.get("model_name") or ""),
        hooks=(hook, target if transcodes else hook),
    )


def _inferred(where: str) -> dict[str, object]:
    """Infer the fields of a `config.json` from a path such as `transcoder_all/layer_3_width_16k_l0_big_affine/`.

    Raises:
        InvalidFile: the path has no layer or no part.
    """
    found = _SECOND.search(where)
    if found is None:
        raise InvalidFile(
            f"{where} has no config.json beside it, and its path is not like Gemma Scope 2's, "
            f"<{'|'.join(SECOND)}>/layer_<N>_..., which would say what it is"
        )
    reads, writes = SECOND[found[1]]
    model = re.search(r"gemma-scope-2-(\w+-(?:pt|it))", where)
    config: dict[str, object] = {"architecture": "jump_relu", "hf_hook_point_in": f"model.layers.{found[2]}.{reads}"}
    config |= {"model_name": f"google/gemma-3-{model[1]}"} if model else {}
    config |= {"hf_hook_point_out": f"model.layers.{found[2]}.{writes}"} if writes else {}
    return config | {"affine_connection": "_affine" in found[3]}


#: SAELens architectures that exist only in training.
TRAINED: Final = frozenset({"batchtopk", "matryoshka_batchtopk"})
#: Present names of SAELens's configuration fields, by older name.
RENAMED: Final = {
    "hook_point": "hook_name",
    "hook_point_head_index": "hook_head_index",
    "activation_fn_str": "activation_fn",
}
#: SAELens's name of the normalisation by one factor for all rows.
AVERAGE: Final = "expected_average_only_in"
#: Fields that published SAEs lack, by repository: `config_overrides` of SAELens's `pretrained_saes.yaml` (6.54) that
#: change the computation.
_CENTRED: Final = {"model_from_pretrained_kwargs": {"center_writing_weights": True}}
PUBLISHED: Final[Mapping[str, Mapping[str, object]]] = {
    "jbloom/gpt2-small-saes-reformatted": _CENTRED,
    "jbloom/gpt2-small-feature-splitting-experiment-layer-8": _CENTRED,
    "tommmcgrath/gpt2-small-mlp-out-saes": _CENTRED,
    "joshengels/mistral-7b-residual-stream-saes": {"normalize_activations": "constant_norm_rescale"},
}
#: Sites whose rows have mean zero if TransformerLens centres the weights that write to the stream.
CENTRED_SITES: Final = frozenset({"resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"})
#: Pattern of names of models with layer norms, whose weights TransformerLens centres by default.
LAYER_NORMED: Final = re.compile(
    r"(.*/)?((distil)?gpt-?2|gpt-?(neo|j)|stanford-gpt|pythia|opt-\d|bloom|stablelm|santacoder|phi-[12]|"
    r"(gelu|solu|attn-only|tiny-stories)-)",
    re.IGNORECASE,
)
#: Pattern of names of models with RMS norms, whose weights TransformerLens never centres.
RMS_NORMED: Final = re.compile(
    r"(.*/)?(meta-|code-?|tiny-?)?(llama|gemma|mi[sx]tral|qwen|yi-|phi-[34]|olmo-?2|gpt-oss|apertus|deepseek|smollm|baichuan)",
    re.IGNORECASE,
)


def sae_lens(sae: FoundSAE) -> SAESettings:
    """Return the settings of an SAE in SAELens's format, from its `cfg.json`.

    Raises:
        InvalidFile: the configuration cannot be read, or has an unsupported option.
    """
    found, path, centred = sae.read_config(), sae.configuration or sae.weights, sae.centred
    config: dict[str, object] = {RENAMED.get(name, name): value for name, value in found.items()}
    metadata = config.get("metadata")
    if isinstance(metadata, Mapping):
        config = {**config, **metadata}
    config |= PUBLISHED.get(sae.source.lower(), {})
    architecture, k = _architecture(path, config)
    if config.get("hook_head_index") is not None:
        raise InvalidFile(f"{path}: it reads head {config['hook_head_index']} alone; steercap reads whole points")
    transcodes = "transcoder" in architecture
    shifted = config.get("apply_b_dec_to_input", not transcodes)
    if not isinstance(shifted, bool) or (shifted and transcodes):
        raise InvalidFile(
            f"{path}: apply_b_dec_to_input={shown(shifted)} of a {architecture}; it must be true or false, and false "
            "for a transcoder"
        )
    rescaled = config.get("rescale_acts_by_decoder_norm", False)
    if not isinstance(rescaled, bool):
        raise InvalidFile(f"{path}: rescale_acts_by_decoder_norm={shown(rescaled)}; it is true or false")
    normalisation, factor = _normalisation(path, config, sae.scale, transcodes=transcodes)
    hook = _hook(config.get("hf_hook_name"), config.get("hook_name"))
    target = _hook(config.get("hf_hook_name_out"), config.get("hook_name_out")) if transcodes else hook
    reads = point_of(hook)
    if centred is None:
        centred = _centred(path, config, reads, normalisation)
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
        name=str(config.get("neuronpedia_id") or ""),
        model=str(config.get("model_name") or ""),
        size=(index_of(config.get("d_in")), index_of(config.get("d_sae"))),
        hooks=(hook, target),
    )


def _hook(module: object, hook: object) -> object:
    """Return transformers' module name of a point, or the TransformerLens name if only that one names a known site."""
    return hook if module is None or (point_of(module) is None and point_of(hook) is not None) else module


def _architecture(path: Path, config: Mapping[str, object]) -> tuple[str, int]:
    """Return an SAELens configuration's architecture, and `k` for "topk", else 0.

    Raises:
        InvalidFile: steercap does not know the architecture, or `k` is missing; the message names `path`, its file.
    """
    architecture, response = config.get("architecture", "standard"), config.get("activation_fn", "relu")
    kwargs = config.get("activation_fn_kwargs")
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
    number = index_of(k if k is not None else config.get("k"))
    if number is None or number < 1:
        raise InvalidFile(f"{path}: a topk SAE with k={shown(config.get('k', k))}")
    return "topk", number


def _centred(path: Path, config: Mapping[str, object], reads: Point | None, normalisation: Normalisation) -> bool:
    """Check if the SAE was trained on centred rows.

    With `center_writing_weights`, TransformerLens centres what is written to the stream of a model with layer norms.
    """
    kwargs = config.get("model_from_pretrained_kwargs")
    told = kwargs.get("center_writing_weights") if isinstance(kwargs, Mapping) else None
    model = str(config.get("model_name") or "")
    written = (
        reads is not None and reads.site in CENTRED_SITES and normalisation != "layer_norm"
    )  # which centres rows itself
    if isinstance(told, bool):
        return told and (written or reads is None) and not RMS_NORMED.match(model)
    if written and LAYER_NORMED.match(model):
        raise InvalidFile(
            f"{path}: TransformerLens centres rows of {model} by default, and the file does not say whether it was "
            "made of such rows (center_writing_weights); give centred=True or centred=False"
        )
    return False


def _normalisation(
    path: Path, config: Mapping[str, object], scale: float | None, *, transcodes: bool
) -> tuple[Normalisation, float]:
    """Return the normalisation of rows, and a factor by which rows are multiplied, 1 for none."""
    asked = config.get("normalize_activations")
    if asked is None or isinstance(asked, bool):  # as the first files have it
        asked = AVERAGE if asked else "none"
    if asked != AVERAGE:
        if scale is not None:
            raise InvalidFile(f"{path}: activation_scale={scale}, and normalize_activations={asked!r} takes none")
        known = next((one for one in NORMALISATIONS if one == asked), None)
        if known is None or (transcodes and known != "none"):
            raise InvalidFile(f"{path}: normalize_activations={shown(asked)}, which steercap does not do here")
        return known, 1.0
    factor = number_of(config.get("norm_scaling_factor") if scale is None else scale)
    if transcodes or factor is None or not 0 < factor < float("inf"):
        raise InvalidFile(
            f"{path}: normalize_activations={AVERAGE!r} multiplies rows by a factor that the file does not hold; give "
            "activation_scale= (SAELens calls it norm_scaling_factor), or save the SAE with the factor folded in"
        )
    return "none", factor
