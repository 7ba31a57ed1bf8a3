"""Definition of a layer family: inputs and outputs of decoder layers, and the paths of their modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import nn


#: Attribute names under which models have the norm between the last layer and the unembedding.
NORMS: Final = (
    "norm",
    "final_layernorm",
    "final_layer_norm",
    "ln_f",
    "norm_f",
    "final_norm",
    "embedding_norm",
    "ln_out",
    "output_norm",
)


def rows_of(tensor: Any) -> Any:
    """View a layer's tensor, [n, width] or transformers' [1, n, width], as rows [n, width] that share its memory."""
    return tensor.view(-1, tensor.shape[-1]) if tensor.dim() == 3 and tensor.shape[0] == 1 else tensor


def one(_config: Any) -> float:
    """Return 1: the factor of families that do not scale."""
    return 1.0


def unknown(_config: Any) -> None:
    """Return None: the factor of families whose layers do more than add their blocks' outputs to the stream."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Decoder layers of one kind: architecture names, classes, module paths and factors, in vLLM and transformers.

    Modules are given as dotted paths within a layer. "a|b" means the first that the layer has, since names differ
    between the two libraries and between layers of a hybrid; "a?b" means b in layers that have a too; "" means that
    there is no such module.

    Args:
        architectures: names in `config.json` of models with such layers; decisive before a model is loaded.
        classes: classes of the layers with their modules, such as "llama.LlamaDecoderLayer"; decisive once it is
            loaded.
        layers: dotted path from transformers' model to its list of decoder layers.
        attn_out: module whose output the attention block adds to the stream.
        mlp_out: module whose output the feed-forward block adds to the stream.
        attn_in: module whose input is the attention block's input, after a norm before the block; None for the module
            `attn_out`.
        mlp_in: module whose input is the feed-forward block's input, likewise; None for the module `mlp_out`.
        resid_mid: first module that reads the stream after the attention block has added to it; "" where both blocks
            read the layer's input, or a layer is one block.
        final_norm: path, from transformers' model, of the norm between the last layer and the unembedding.
        norms_embeddings: True if embeddings go through the final norm too, so that it runs twice a pass and its output
            is no site.
        norms_late: True if the final norm runs in computing logits, on sampled rows alone, so that its output is no
            site.
        after_norm: names, beside the final norm, of modules that follow it in vLLM.
        divisor: name of an attribute of vLLM's model by which normed rows are divided before the unembedding, if the
            model has it; "" for none.
        residual_output: index of the residual in the tuple that a vLLM layer returns, where the stream is item 0 plus
            the residual; None where item 0 is the stream.
        loops: classes, written as in `classes`, of vLLM modules that contain the layers and pass a layer's output
            unchanged to the next layer's `input_layernorm`, and the last layer's to the final norm.
        hidden_input: name of a vLLM layer's argument with the stream, or the part of it that is not in the residual.
        residual_input: name of the argument of a vLLM layer with the residual, "" if there is none.
        attn_proj: module that projects the output of the heads to the stream.
        attention: module that vLLM calls with queries, keys and values, which its parent module computes in both
            libraries; "" where none is called with them, or they cannot be compared with transformers'.
        gated: True if the output of the heads is multiplied by a gate before it is projected.
        mlp_proj: module that projects the neurons to the stream (down projection).
        scaled: function of transformers' configuration; returns the factor of the down projection's output.
        router: module that returns the router logits.
        router_rounded: True if router logits are rounded to the model's dtype before experts are chosen.
        sparse: predicate on transformers' configuration and a layer index: True if the layer has experts; None if no
            layer has.
        factor: function of transformers' configuration; returns the factor by which both blocks' outputs are multiplied
            before they are added to the stream, or None where a layer does more than that, so that the proof at start
            checks no sum but `resid_mid`, to which the attention block's output is then added as it is.
        norms: for layers that norm the sum of the stream and a block's output, the norm after each: "resid_mid" for the
            attention block, "mlp_out" for the feed-forward block. There `resid_mid` is the sum before its norm, and
            `resid_post` the output of the second norm; {} for all others.
        single: True if each layer is one block, so that it has either `attn_out` or `mlp_out`.
        logits: function of transformers' configuration; returns the factor of the logits, before any soft-capping.
        mhc: True if layers have several residual streams and mix them as DeepSeek-V4 does, see `sites.streams`.
        varied: True if some layers lack modules that others have.
        derived: True if the family was derived from loaded layers, and the proof at start must confirm it.
    """

    architectures: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    layers: str = "model.layers"
    attn_out: str = "self_attn"
    mlp_out: str = "mlp"
    attn_in: str | None = None
    mlp_in: str | None = None
    resid_mid: str = "post_attention_layernorm"
    final_norm: str = "model.norm"
    norms_embeddings: bool = False
    norms_late: bool = False
    after_norm: tuple[str, ...] = ()
    divisor: str = ""
    residual_output: int | None = 1
    loops: tuple[str, ...] = ()
    hidden_input: str = "hidden_states"
    residual_input: str = "residual"
    attn_proj: str = "self_attn.o_proj"
    attention: str = "self_attn.attn"
    gated: bool = False
    mlp_proj: str = "mlp.down_proj"
    scaled: Callable[[Any], float] = one
    router: str = ""
    router_rounded: bool = False
    sparse: Callable[[Any, int], bool] | None = None
    factor: Callable[[Any], float | None] = one
    norms: Mapping[str, str] = field(default_factory=dict)
    single: bool = False
    logits: Callable[[Any], float] = one
    mhc: bool = False
    varied: bool = False
    derived: bool = False

    @property
    def attention_input(self) -> str:
        """Path, within a layer, of the module whose input is the attention block's input, after any norm before it.

        `attn_in`, or `attn_out` if that is None.
        """
        return self.attn_out if self.attn_in is None else self.attn_in

    @property
    def mlp_input(self) -> str:
        """Path, within a layer, of the module whose input is the feed-forward block's input: `mlp_in` or `mlp_out`."""
        return self.mlp_out if self.mlp_in is None else self.mlp_in

    @property
    def norm(self) -> str:
        """Name of the final norm in the module that contains the layers; "a|b" for several to try."""
        return "|".join(NORMS) if self.derived else self.final_norm.rpartition(".")[2]

    @property
    def end(self) -> str:
        """Name of the last layer's site from which the model computes its logits."""
        return "mhc_streams_final" if self.mhc else "resid_post"

    @property
    def projections(self) -> dict[str, tuple[str, str]]:
        """Paths (output projection, module whose output is added to the stream) of each block.

        The keys are the sites that the projections read: "z" for attention, "neurons" for feed-forward.
        """
        return {"z": (self.attn_proj, self.attn_out), "neurons": (self.mlp_proj, self.mlp_out)}

    def is_sparse(self, config: Any, layer: int) -> bool:
        """Check if the layer with this index has experts, by transformers' configuration of the model."""
        return self.sparse is not None and self.sparse(config, layer)


#: `Family` with other defaults, for layers that take and return the whole stream, without a separate residual.
whole = partial(Family, residual_output=None, residual_input="")
#: `Family` with other defaults, for layers with a norm after each block, whose output is added to the stream.
normed = partial(
    Family,
    attn_out="post_attention_layernorm",
    mlp_out="post_feedforward_layernorm",
    attn_in="self_attn",
    mlp_in="mlp",
)


def arguments_of(module: nn.Module) -> list[str]:
    """Return the names of the parameters of a module's `forward`, in order, without *args and **kwargs.

    If the module's own `forward` has only those, as where vLLM offloads weights, they are read from the class.
    """
    bare = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    own = [one.name for one in inspect.signature(module.forward).parameters.values() if one.kind not in bare]
    whole = inspect.signature(type(module).forward).parameters.values()
    return own or [one.name for one in whole if one.kind not in bare][1:]


def located(layer: nn.Module, path: str) -> str:
    """Return the path of a module in a layer: the first of "a|b" that the layer has; of "a?b", b if it has both.

    Raises:
        AttributeError: the layer has a module at none of them.
    """
    for candidate in path.split("|"):
        names = candidate.split("?")
        try:
            list(map(layer.get_submodule, names))
        except AttributeError:
            continue
        return names[-1]
    raise AttributeError(f"it has no module {path.replace('|', ' or ')}")
