"""Definition of a model family: inputs and outputs of its decoder layers, and the paths of their modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import nn


#: Names of the norm between the last layer and the unembedding.
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
    """View a layer's tensor as rows [n, width] that share its memory; transformers' modules carry [1, n, width]."""
    return tensor.view(-1, tensor.shape[-1]) if tensor.dim() == 3 and tensor.shape[0] == 1 else tensor


def one(_config: Any) -> float:
    """Return 1, the factor of most families."""
    return 1.0


def unknown(_config: Any) -> None:
    """Return None: no factor is known, since these layers do not merely add their blocks' outputs to the stream."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Description of decoder layers of one kind, in vLLM and in transformers alike.

    Modules of a layer are dotted paths; "a|b" is the first of them that a layer has, since names differ between the two
    libraries, and between the layers of a hybrid; "a?b" is b in layers that have a too. "" stands for a module that
    does not exist.

    Args:
        architectures: names in `config.json` of models with such layers; used before a model is loaded.
        classes: the layers' classes, each with the module that holds it: "llama.LlamaDecoderLayer". They decide.
        layers: dotted path from transformers' model to its list of decoder layers.
        attn_out: module whose output the attention block adds to the stream.
        mlp_out: module whose output the feed-forward block adds to the stream.
        attn_in: module that reads the input of the attention block, normed where norms come first; None for that of
            `attn_out`.
        mlp_in: module that reads the input of the feed-forward block; None for that of `mlp_out`.
        resid_mid: module that reads the stream first once the attention block has added to it; "" where both blocks
            read the stream as the layer takes it, or a layer is one block.
        final_norm: path of the norm between the last layer and the unembedding in transformers.
        norms_embeddings: True if embeddings go through that norm too, so that it runs twice a pass and its output is
            no site.
        norms_late: True if that norm runs as logits are made, on sampled rows alone, so that its output is no site.
        after_norm: names, beside the norm, of modules that follow it in vLLM.
        divisor: name of an attribute of vLLM's model by which, if the model has it, final rows are divided before
            logits are made of them; "" for none.
        residual_output: index of the residual in the tuple a vLLM layer returns, when the stream is
            hidden + residual; None when the first item is the stream.
        loops: classes of the module that holds the layers in vLLM, as in `classes`, which pass on what a layer returns
            untouched: to the `input_layernorm` of the next, and after the last to the norm.
        hidden_input: name of the argument that carries the stream (or its undeferred part) into a vLLM layer.
        residual_input: name of the argument that carries the deferred residual, "" if there is none.
        attn_proj: module that projects the output of the heads to the stream.
        attention: module that vLLM calls with queries, keys and values; its parent makes them, in transformers too.
            "" where they are passed on without a call.
        gated: True if the output of the heads is multiplied by a gate before it is projected.
        mlp_proj: module that projects the neurons to the stream.
        scaled: function of transformers' configuration that returns the feed-forward block's factor of projected
            neurons.
        router: module that returns the logits of the experts.
        router_rounded: True if these logits are rounded to the model's dtype before experts are chosen by them.
        sparse: function of transformers' configuration and a layer's index that says if the layer has experts; None if
            no layer has.
        factor: function of transformers' configuration that returns the factor of both blocks' outputs before they are
            added; None where a layer does more than add them to its input, so that the proof at start checks no sum.
        norms: for layers that norm the sum of the stream and a block's output, the norm after each: "resid_mid" for the
            attention block, "mlp_out" for the feed-forward block. There `resid_mid` is the sum before its norm, and
            `resid_post` the output of the second; empty for others.
        single: True if a layer is one block, so that it has `attn_out` or `mlp_out`, and adds nothing else.
        logits: function of transformers' configuration that returns the factor of the logits, before any soft-capping.
        mhc: True if layers carry several streams and mix them as DeepSeek-V4 does, see `sites.streams`; there is no one
            residual stream then.
        varied: True if layers differ, so that some lack a module that others have.
        derived: True if the family was derived from the layers: a guess at their inputs and outputs, to be proved.
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
        """Path, within a layer, of the module that the attention block's input goes to, after a norm before the block.

        It is `attn_in`, or `attn_out` if that is None; "" if layers have no such module.
        """
        return self.attn_out if self.attn_in is None else self.attn_in

    @property
    def mlp_input(self) -> str:
        """Path of the module that reads the input of the feed-forward block."""
        return self.mlp_out if self.mlp_in is None else self.mlp_in

    @property
    def norm(self) -> str:
        """Name of the norm after the layers, in the module that holds these."""
        return "|".join(NORMS) if self.derived else self.final_norm.rpartition(".")[2]

    @property
    def end(self) -> str:
        """Site of the last layer from which the model makes its logits."""
        return "mhc_streams_final" if self.mhc else "resid_post"

    @property
    def projections(self) -> dict[str, tuple[str, str]]:
        """Paths of each block's output projection and of the module whose output is added to the stream.

        They are keyed by the site that the projection reads: "z" for attention, "neurons" for feed-forward.
        """
        return {"z": (self.attn_proj, self.attn_out), "neurons": (self.mlp_proj, self.mlp_out)}

    def is_sparse(self, config: Any, layer: int) -> bool:
        """Check if a layer has experts."""
        return self.sparse is not None and self.sparse(config, layer)


#: Family whose layers take and return the whole stream: no residual is deferred.
whole = partial(Family, residual_output=None, residual_input="")
#: Family with a norm after each block, whose output is what the block adds.
normed = partial(
    Family,
    attn_out="post_attention_layernorm",
    mlp_out="post_feedforward_layernorm",
    attn_in="self_attn",
    mlp_in="mlp",
)


def arguments_of(module: nn.Module) -> list[str]:
    """Return the names of the arguments of a module's `forward`.

    A replacement that takes any, such as that of layers whose weights vLLM offloads, passes them on to the class's.
    """
    bare = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    own = [one.name for one in inspect.signature(module.forward).parameters.values() if one.kind not in bare]
    whole = inspect.signature(type(module).forward).parameters.values()
    return own or [one.name for one in whole if one.kind not in bare][1:]


def located(layer: nn.Module, path: str) -> str:
    """Return the dotted path of a module of a layer: the first of "a|b" that it has, or of "a?b", b if it has both.

    Raises:
        AttributeError: it has none of them.
    """
    for candidate in path.split("|"):
        names = candidate.split("?")
        try:
            list(map(layer.get_submodule, names))
        except AttributeError:
            continue
        return names[-1]
    raise AttributeError(f"it has no module {path.replace('|', ' or ')}")
