"""Construction of an SAE from a file's tensors: each architecture is converted to one encoder and one decoder.

Points are derived from TransformerLens's hook names and transformers' module names. A name whose rows differ from those
of every point has no point.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch

from steercap.architectures.sites import SITES
from steercap.core.names import TRANSFORMER_LENS
from steercap.core.spec import Point
from steercap.errors import InvalidFile
from steercap.saes.encoder import Encoder, Normalisation
from steercap.saes.tensors import Tensors

#: Site of a module's input or output, by transformers' name behind `model.layers.<layer>.`.
MODULES: Final = {
    "output": "resid_post",
    "self_attn.o_proj.input": "z",
    "mlp.down_proj.input": "neurons",
    "pre_feedforward_layernorm.output": "mlp_in",
    "post_feedforward_layernorm.output": "mlp_out",
}
_BLOCK: Final = re.compile(r"blocks\.(\d{1,4})\.(.+)")
_LAYER: Final = re.compile(r"model\.(?:language_model\.)?layers\.(\d{1,4})\.(.+)")
_POINT: Final = re.compile(r"([a-z_]+)\[(\d{1,4})\]")
#: Names of the tensors of an SAE, by architecture: weights, biases, and others with one number per feature.
STANDARD: Final = ("W_enc", "b_enc", "W_dec", "b_dec")
ARCHITECTURES: Final[Mapping[str, tuple[str, ...]]] = {
    "standard": STANDARD,
    "topk": STANDARD,
    "jumprelu": (*STANDARD, "threshold"),
    "gated": ("W_enc", "W_dec", "b_dec", "r_mag", "b_mag", "b_gate"),
    "transcoder": STANDARD,
    "skip_transcoder": (*STANDARD, "W_skip"),
    "jumprelu_transcoder": (*STANDARD, "threshold"),
    "jumprelu_skip_transcoder": (*STANDARD, "threshold", "W_skip"),
}
#: Maximum number of features, and of elements of a row: beyond any published SAE.
MOST_FEATURES: Final = 1 << 26
MOST_WIDTH: Final = 1 << 20


def point_of(name: object) -> Point | None:
    """Return the point of a TransformerLens hook, module name or point's name; None if no point has these rows."""
    if not isinstance(name, str):
        return None
    for pattern, sites in ((_BLOCK, TRANSFORMER_LENS), (_LAYER, MODULES)):
        if (found := pattern.fullmatch(name)) and found[2] in sites:
            return Point(int(found[1]), sites[found[2]])
    own = _POINT.fullmatch(name)
    return Point(int(own[2]), own[1]) if own and own[1] in SITES else None


@dataclass(frozen=True)
class SAESettings:
    """Settings of an SAE, read from its configuration, path and file.

    Args:
        architecture: a name in `ARCHITECTURES`.
        input, output: points whose rows the SAE reads and reconstructs; None if the file names no known point.
        k: number of active features of a "topk" SAE.
        rescaled: True if activations are multiplied by the norms of the decoder's rows.
        shifted: True if the decoder's bias is subtracted from input rows.
        normalisation: normalisation of rows before encoding.
        scale: factor by which rows are multiplied first; it is folded into the weights.
        threshold: one threshold for all features, or None if the file has one per feature or the architecture none.
        by_norm: True if the threshold applies to a feature's pre-activation times the norm of its decoder row.
        unused: names of tensors in the file that are ignored.
        centred: True if the model's rows were centred on their mean.
        name, model: labels of the SAE and its model, "" if unknown.
        size: (d_in, d_sae) of the configuration, None where it does not give them.
        hooks: the file's names of the input and output point, for error messages.
    """

    architecture: str
    input: Point | None
    output: Point | None
    k: int = 0
    rescaled: bool = False
    shifted: bool = False
    normalisation: Normalisation = "none"
    scale: float = 1.0
    threshold: float | None = None
    by_norm: bool = False
    unused: frozenset[str] = frozenset()
    centred: bool = False
    name: str = ""
    model: str = ""
    size: tuple[int | None, int | None] = (None, None)
    hooks: tuple[object, object] = (None, None)

    @property
    def transcodes(self) -> bool:
        """True if the SAE is a transcoder, which reconstructs other rows than it reads."""
        return "transcoder" in self.architecture


class SAEParts(NamedTuple):
    """Tensors of an SAE, in the form in which they are used.

    Args:
        encoder: the encoder half.
        decoder: decoder weights, float32 [d_sae, d_out].
        decoder_bias: decoder bias, float32 [d_out].
        skip: matrix of a skip transcoder, float32 [d_out, d_in], else None.
    """

    encoder: Encoder
    decoder: torch.Tensor
    decoder_bias: torch.Tensor
    skip: torch.Tensor | None


def parts_of(tensors: Tensors, settings: SAESettings) -> SAEParts:
    """Read and check the tensors of an SAE, by the names in `ARCHITECTURES`, and convert them by its settings.

    Raises:
        InvalidFile: a tensor is missing or unknown, has another shape, or is not finite.
    """
    read = {name: tensors.read(name) for name in _check_shapes(tensors, settings)}
    weight, decoder, decoder_bias = read["W_enc"], read["W_dec"], read["b_dec"]
    if settings.threshold is not None:
        read["threshold"] = torch.full((len(decoder),), settings.threshold)
    if settings.by_norm and "threshold" in read:
        read["threshold"] = (read["threshold"] / decoder.norm(dim=1)).nan_to_num(nan=0.0)
    if settings.scale != 1.0:
        weight, decoder, decoder_bias = weight * settings.scale, decoder / settings.scale, decoder_bias / settings.scale
    threshold = read["threshold"].clamp_(min=0) if "threshold" in read else None
    if settings.architecture == "gated":
        # Open where x·W > -b_gate, as much as e^r x·W + b_mag, if that is above 0: one response with a threshold.
        factor = read["r_mag"].exp()
        weight, bias = weight * factor, read["b_mag"]
        threshold = (bias - factor * read["b_gate"]).clamp_(min=0)
    else:
        bias = read["b_enc"]
    if settings.rescaled:
        norms = decoder.norm(dim=1)
        weight, bias = weight * norms, bias * norms
        if settings.architecture == "gated" and threshold is not None:  # that of the response without norms
            threshold = threshold * norms
        decoder = decoder / norms.where(norms > 0, 1.0)[:, None]  # a feature that writes nothing is never active
    shift = decoder_bias if settings.shifted else None
    encoder = Encoder(weight, bias, threshold, shift, settings.k, settings.normalisation, settings.centred)
    for name, tensor in zip(("encoder", "bias", "threshold"), encoder.tensors, strict=False):
        if not tensor.isfinite().all():
            raise InvalidFile(f"{tensors.path}: the {name} overflows float32 once its factors are multiplied in")
    return SAEParts(encoder, decoder, decoder_bias, read.get("W_skip"))


def _check_shapes(tensors: Tensors, settings: SAESettings) -> tuple[str, ...]:
    """Check names and shapes of the tensors against the settings, and return the names to read.

    Raises:
        InvalidFile: a tensor is missing or unknown, or a shape is wrong.
    """
    path, known = tensors.path, settings.threshold is not None
    wanted = tuple(name for name in ARCHITECTURES[settings.architecture] if name != "threshold" or not known)
    if missing := [name for name in wanted if name not in tensors.shapes]:
        raise InvalidFile(f"{path} lacks {', '.join(missing)}, which a {settings.architecture} SAE has")
    if others := sorted(set(tensors.shapes) - set(wanted) - settings.unused):
        raise InvalidFile(
            f"{path} holds {', '.join(others)}, which steercap does not know in a {settings.architecture} SAE; leaving "
            "them out would give wrong features"
        )
    shapes = {name: tensors.shapes[name] for name in wanted}
    d_in, d_sae, d_out = _sizes(path, shapes["W_enc"], shapes["W_dec"], transcodes=settings.transcodes)
    exact = {"W_enc": (d_in, d_sae), "W_dec": (d_sae, d_out), "b_dec": (d_out,), "W_skip": (d_out, d_in)}
    for name, shape in shapes.items():
        if shape != exact.get(name, (d_sae,)):
            raise InvalidFile(f"{path}: {name} is {shape}, and must be {exact.get(name, (d_sae,))}")
    for said, found, name in zip(settings.size, (d_in, d_sae), ("d_in", "d_sae"), strict=True):
        if said is not None and said != found:
            raise InvalidFile(f"{path}: its configuration says {name}={said}, and its weights have {found}")
    if not 0 <= settings.k <= d_sae or (settings.architecture == "topk" and not settings.k):
        raise InvalidFile(f"{path}: k={settings.k} of {d_sae} features")
    return wanted


def _sizes(path: Path, encoder: tuple[int, ...], decoder: tuple[int, ...], *, transcodes: bool) -> tuple[int, int, int]:
    """Return d_in, d_sae and d_out from the shapes of the weights, checked.

    Raises:
        InvalidFile: the shapes of the weights are not those of an SAE.
    """
    if len(encoder) != 2 or len(decoder) != 2:
        raise InvalidFile(f"{path}: weights of shapes {encoder} and {decoder}; they are matrices")
    (d_in, d_sae), d_out = encoder, decoder[1]
    if not (0 < d_sae <= MOST_FEATURES and min(d_in, d_out) > 0 and max(d_in, d_out) <= MOST_WIDTH):
        raise InvalidFile(f"{path}: {d_in} × {d_sae} and {d_sae} × {d_out} numbers are no SAE")
    if d_out != d_in and not transcodes:
        raise InvalidFile(f"{path} reads {d_in} elements and writes {d_out}; only transcoders do")
    return d_in, d_sae, d_out
