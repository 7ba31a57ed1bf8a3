"""Settings of published SAEs of other programs: one function per file format.

Tensors are renamed to SAELens's names when they are read. Weights of linear layers (`*.weight`), [d_sae, d_in] and
[d_out, d_sae], are transposed; `SAEFormat.transposed` lists other transposed ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import torch

from steercap.core.spec import Point
from steercap.core.values import index_of, number_of, shown
from steercap.errors import InvalidFile
from steercap.saes.reading import SAESettings, point_of
from steercap.saes.tensors import Tensors, read_configuration

#: SAELens's name of a tensor, by a different name in files.
NAMES: Final[Mapping[str, str]] = {
    "w_enc": "W_enc",
    "w_dec": "W_dec",
    "affine_skip_connection": "W_skip",
    "encoder.weight": "W_enc",
    "encoder.bias": "b_enc",
    "decoder.weight": "W_dec",
    "decoder.bias": "b_dec",
    "encoder_linear.weight": "W_enc",
    "encoder_linear.bias": "b_enc",
    "decoder_linear.weight": "W_dec",
    "decoder_linear.bias": "b_dec",
    "bias": "b_dec",
    "decoder_bias": "b_dec",
    "mag_bias": "b_mag",
    "gate_bias": "b_gate",
    "log_jumprelu_threshold": "threshold",
}
#: Prefix of Llama Scope's tensors with the average norm of a point's rows.
NORMS: Final = "dataset_average_activation_norm."
#: Architecture by class of dictionary_learning, and True if the decoder's bias is subtracted from the input.
CLASSES: Final[Mapping[str, tuple[str, bool]]] = {
    "AutoEncoder": ("standard", True),
    "AutoEncoderNew": ("standard", False),
    "AutoEncoderTopK": ("topk", True),
    "BatchTopKSAE": ("jumprelu", True),
    "MatryoshkaBatchTopKSAE": ("jumprelu", True),
    "GatedAutoEncoder": ("gated", True),
    "JumpReluAutoEncoder": ("jumprelu", False),
}
_QWEN: Final = re.compile(r"SAE-Res-(Qwen[\w.-]+?)-W(\d{1,5})K-L0_(\d{1,5})(?!\d)")
_OF_MODEL: Final = re.compile(r"([\w.-]+)-SAE-l(\d{1,4})\.pth?")


class FoundSAE(NamedTuple):
    """Files of an SAE that were found, and the user's options for reading them.

    Args:
        weights: path of the weights file.
        configuration: path of the configuration file, or None.
        source: folder or repository that the user gave.
        tensors: tensors of the weights file, by SAELens's names.
        scale: factor by which rows are multiplied first, or None if the user gave none.
        centred: True to centre rows first, None if the user gave nothing.
    """

    weights: Path
    configuration: Path | None
    source: str
    tensors: Tensors
    scale: float | None = None
    centred: bool | None = None

    def read_config(self) -> dict[str, object]:
        """Return the fields of the configuration file.

        Raises:
            InvalidFile: the file cannot be read, or is missing.
        """
        if self.configuration is None:
            raise InvalidFile(f"{self.weights} has no configuration beside it")
        return read_configuration(self.configuration)


def named(tensors: Tensors, transposed: frozenset[str]) -> Tensors:
    """Return tensors by SAELens's names and in its orientation, without a `scaling_factor` of 1.

    `transposed` are SAELens's names of tensors that are stored transposed, besides the weights of linear layers.

    Raises:
        InvalidFile: two tensors get the same name, or `scaling_factor` is not 1.
    """
    found: dict[str, str] = {}
    for name in tensors.shapes:
        if (known := NAMES.get(name, name)) in found:
            raise InvalidFile(f"{tensors.path} has {known} twice, as {found[known]} and as {name}")
        found[known] = name
    if (factor := found.pop("scaling_factor", None)) and not bool((tensors.read(factor) - 1).abs().le(1e-5).all()):
        raise InvalidFile(
            f"{tensors.path} holds a scaling_factor other than 1, by which activations would be multiplied, which "
            "steercap does not support; fold it into W_dec and save the SAE again"
        )
    flipped = {
        known
        for known, name in found.items()
        if known in transposed or name == "affine_skip_connection" or name.endswith(".weight")
    }

    def read(known: str) -> torch.Tensor:
        tensor = tensors.read(found[known])
        if found[known] == "log_jumprelu_threshold":
            tensor = tensor.exp()
        return tensor.T.contiguous() if known in flipped else tensor

    shapes = {known: tensors.shapes[name] for known, name in found.items()}
    shapes = {known: shape[::-1] if known in flipped else shape for known, shape in shapes.items()}
    return Tensors(tensors.path, shapes, read)


# Formats of one program each


def llama_scope(sae: FoundSAE) -> SAESettings:
    """Return the settings of a Llama Scope SAE.

    A `hyperparams.json` has one threshold for all features, in units of unscaled rows; with a `config.json`, the
    weights file has one per feature. Rows are scaled to an average norm of √d_in. InvalidFile if unsupported.
    """
    config, path = sae.read_config(), sae.configuration
    hook, target, width = config.get("hook_point_in"), config.get("hook_point_out"), index_of(config.get("d_model"))
    if target not in (None, hook):
        raise InvalidFile(f"{path}: a Llama Scope transcoder, with norms of its own on both sides, which is not read")
    if (
        config.get("act_fn", "jumprelu") != "jumprelu"
        or config.get("norm_activation", "dataset-wise") != "dataset-wise"
    ):
        raise InvalidFile(
            f"{path}: Llama Scope with act_fn={shown(config.get('act_fn'))} and norm_activation="
            f"{shown(config.get('norm_activation'))}; jumprelu and dataset-wise are read"
        )
    norms = config.get("dataset_average_activation_norm")
    stored = {name for name in sae.tensors.shapes if name.startswith(NORMS)}
    values = [norms.get("in")] if isinstance(norms, Mapping) else [scalar(sae.tensors, name) for name in stored]
    norm = number_of(values[0]) if values and len(set(map(str, values))) == 1 else None
    scale = sae.scale if norm is None or norm <= 0 or width is None else width**0.5 / norm
    if scale is None or width is None or not 0 < scale < float("inf"):
        raise InvalidFile(
            f"{path}: Llama Scope with d_model={shown(config.get('d_model'))} and average norms "
            f"{shown(values)}; rows are scaled by them: give activation_scale= (√d_model / norm)"
        )
    threshold = None
    if "threshold" not in sae.tensors.shapes:
        one = number_of(config.get("jump_relu_threshold"))
        if one is None or not 0 <= one < float("inf"):
            raise InvalidFile(
                f"{path}: Llama Scope with jump_relu_threshold={shown(config.get('jump_relu_threshold'))}"
            )
        threshold = one * scale
    size = index_of(config.get("d_sae"))
    factor = index_of(config.get("expansion_factor"))
    return SAESettings(
        "jumprelu",
        point_of(hook),
        point_of(hook),
        shifted=config.get("apply_decoder_bias_to_pre_encoder") is True,
        scale=scale,
        threshold=threshold,
        by_norm=config.get("sparsity_include_decoder_norm") is True,
        unused=frozenset(stored),
        name=sae.weights.parent.name,
        size=(width, size if size is not None or factor is None else width * factor),
        hooks=(hook, hook),
    )


def scalar(tensors: Tensors, name: str) -> float:
    """Return the single number of a tensor in a file.

    Raises:
        InvalidFile: the tensor has several numbers.
    """
    if tensors.shapes[name] not in ((), (1,)):
        raise InvalidFile(f"{tensors.path}: {name} is {tensors.shapes[name]}, and must be one number")
    return tensors.read(name).item()


def dictionary_learning(sae: FoundSAE) -> SAESettings:
    """Return the settings of a dictionary_learning SAE: `ae.pt` with a `config.json`; InvalidFile if unsupported."""
    config, path = sae.read_config(), sae.configuration
    trainer = config.get("trainer")
    if not isinstance(trainer, Mapping):
        raise InvalidFile(f"{path}: dictionary_learning's trainer={shown(trainer)}; it is an object")
    kind, layer = trainer.get("dict_class"), index_of(trainer.get("layer"))
    if not isinstance(kind, str) or kind not in CLASSES:
        raise InvalidFile(
            f"{path}: dictionary_learning's dict_class={shown(kind)}; steercap knows {', '.join(CLASSES)}"
        )
    architecture, shifted = CLASSES[kind]
    k = index_of(trainer.get("k")) if architecture == "topk" else 0
    if k is None or (architecture == "topk" and k < 1):
        raise InvalidFile(f"{path}: {kind} of dictionary_learning with k={shown(trainer.get('k'))}")
    module = trainer.get("submodule_name", f"resid_post_layer_{layer}")
    known = layer is not None and 0 <= layer < 10_000 and module == f"resid_post_layer_{layer}"
    point = Point(layer, "resid_post") if known and layer is not None else None
    threshold, unused = None, frozenset[str]()
    if architecture == "topk":
        unused = frozenset({"threshold"})  # it saves one, and chooses by k
    elif kind.endswith("TopKSAE") and "threshold" in sae.tensors.shapes:
        threshold, unused = max(scalar(sae.tensors, "threshold"), 0.0), frozenset({"threshold"})
    return SAESettings(
        architecture,
        point,
        point,
        k,
        shifted=shifted,
        threshold=threshold,
        unused=unused,
        name="/".join(sae.weights.parent.parts[-2:]),
        model=str(trainer.get("lm_name") or ""),
        size=(index_of(trainer.get("activation_dim")), index_of(trainer.get("dict_size"))),
        hooks=(module, module),
    )


def kissane(sae: FoundSAE) -> SAESettings:
    """Return the settings of a GPT-2 attention SAE by Kissane and others: a `.pt` with a `_cfg.json`."""
    config = sae.read_config()
    hook, size = config.get("act_name"), (index_of(config.get("act_size")), index_of(config.get("dict_size")))
    point = point_of(hook)
    return SAESettings("standard", point, point, shifted=True, model="gpt2-small", size=size, hooks=(hook, hook))


# Formats without a configuration, described by their file names


def of_model(sae: FoundSAE) -> SAESettings:
    """Return the settings of an SAE of Goodfire or qresearch: one file, whose name has model and layer."""
    model, layer = _fields(sae, _OF_MODEL, sae.weights.name)
    point = Point(int(layer), "resid_post")
    return SAESettings("standard", point, point, name=sae.weights.stem, model=model)


def qwen_scope(sae: FoundSAE) -> SAESettings:
    """Return the settings of a Qwen Scope SAE: `layer<N>.sae.pt`, in a repository whose name has model, width and k."""
    (layer,) = _fields(sae, re.compile(r"layer(\d{1,4})\.sae\.pt"), sae.weights.name)
    model, width, k = _fields(sae, _QWEN, f"{sae.source}/{sae.weights}")
    point = Point(int(layer), "resid_post")
    size = (None, int(width) << 10)
    return SAESettings("topk", point, point, int(k), name=f"layer{layer}", model=f"Qwen/{model}", size=size)


def mwhanna(sae: FoundSAE) -> SAESettings:
    """Return the settings of mwhanna's Qwen 3 transcoder: `layer_<N>.safetensors`, from `mlp_in` to `mlp_out`."""
    (layer,) = _fields(sae, re.compile(r"layer_(\d{1,4})\.safetensors"), sae.weights.name)
    sizes = re.findall(r"qwen3-([\d.]+b)", f"{sae.source}/{sae.weights}".lower())
    model = f"Qwen/Qwen3-{sizes[-1].upper()}" if sizes else ""
    reads, writes = Point(int(layer), "mlp_in"), Point(int(layer), "mlp_out")
    return SAESettings("transcoder", reads, writes, name=sae.weights.stem, model=model)


def _fields(sae: FoundSAE, pattern: re.Pattern[str], text: str) -> tuple[str, ...]:
    """Return the groups of a pattern that must match a file name or path exactly once.

    Raises:
        InvalidFile: it matches not at all, or several times differently.
    """
    found = set(pattern.findall(text))
    if len(found) != 1:
        raise InvalidFile(
            f"{sae.weights}: its format tells model, layer and k only in names, and {text!r} must have exactly one "
            f"part like {pattern.pattern}; keep the names of the repository and the file"
        )
    one = found.pop()
    return (one,) if isinstance(one, str) else tuple(one)
