"""Weights of a checkpoint, layer by layer, read on request; no engine is needed."""

from __future__ import annotations

import copy
import hashlib
import os
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
from jaxtyping import Float
from torch import nn

from steercap.architectures.families import family_of
from steercap.core.values import index_of, shown
from steercap.errors import LayerOutOfRange, UnsupportedModel
from steercap.files.fingerprint import weights_digest
from steercap.lab.mechanism.weights import TensorFiles, configuration, option, read_tokenizer, skeleton
from steercap.lab.mechanism.weights.applied import AttentionBlock, FeedForward, RoutedExperts
from steercap.lab.mechanism.weights.blocks import (
    AttentionWeights,
    FrozenNorm,
    Linear,
    NeuronWeights,
    reading,
    taken_apart,
    writing,
)
from steercap.lab.mechanism.weights.layouts import layout_of
from steercap.lab.mechanism.weights.unembedding import Unembedding

if TYPE_CHECKING:
    from transformers import PretrainedConfig


#: Fields of a configuration that determine the shapes of a layer's matrices.
_SHAPING: Final = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "num_experts",
    "num_local_experts",
)


class ModelWeights:
    """Weights of a model, from the safetensors files of its checkpoint, float32.

    Made by `open`. A layer's weights are read on each call, so that at most one layer is in memory.

    Attributes:
        name: name of the checkpoint.
        layers: number of decoder layers.
        width: hidden size, the number of elements of a row of the residual stream.
    """

    def __init__(self, config: PretrainedConfig, files: TensorFiles, revision: str | None = None) -> None:
        self.name, self._revision = files.path, revision
        self._config: Any = config
        self._architecture = ", ".join(config.architectures or ())
        self._layout = layout_of(config.architectures or ())
        self._family = family_of(config.architectures or ())
        self._model = skeleton(config)
        self._files = files.of(self._model)
        self._decoder = self._model.get_submodule(self._family.layers)
        self.layers = len(self._decoder)
        self.width = int(config.hidden_size)

    @classmethod
    def open(cls, checkpoint: str | os.PathLike[str], *, revision: str | None = None) -> ModelWeights:
        """Open a checkpoint; no weights are read yet.

        Args:
            checkpoint: folder, or name on the hub, with safetensors files; for an open model, `model.model`.
            revision: revision of a name on the hub.

        Raises:
            ModelNotLoaded: there is no such checkpoint, or it has no safetensors files.
            UnsupportedModel: the architecture's weight names are not known.
        """
        path = os.fspath(checkpoint)
        config = configuration(path, revision)
        layout_of(config.architectures or ())
        return cls(config, TensorFiles.find(path, revision), revision)

    def __repr__(self) -> str:
        return f"ModelWeights({self.name!r}, {self.layers} layers × {self.width})"

    @property
    def is_parallel(self) -> bool:
        """True if both the attention and the feed-forward block of a layer read the layer's input."""
        return bool(option(self._config, "use_parallel_residual", not self._family.resid_mid))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 that identifies the checkpoint: of `weights_digest` and the modification times of weight files."""
        paths = sorted(set(self._files.held.values()))
        written = [weights_digest(paths[0].parent), *(str(path.stat().st_mtime_ns) for path in paths)]
        return hashlib.sha256(" ".join(written).encode()).hexdigest()

    @property
    def structure(self) -> dict[str, Any]:
        """Architectures, and fields of the configuration that shape a layer's matrices, by name; None if absent."""
        return {"architectures": self._config.architectures} | {
            name: getattr(self._config, name, None) for name in _SHAPING
        }

    @cached_property
    def unembedding(self) -> Unembedding:
        """Final norm and unembedding matrix, read once.

        Raises:
            UnsupportedModel, InvalidFile: as for `Unembedding.load`.
        """
        return Unembedding.of(self._config, self._model, self._files)

    @cached_property
    def embedding(self) -> Float[torch.Tensor, "vocabulary hidden"]:
        """Embedding as in the checkpoint, without factors that the model applies: float32 [vocabulary, hidden].

        Raises:
            InvalidFile: the files lack the embedding.
        """
        if self._config.tie_word_embeddings:
            return self.unembedding.weight
        module = self._model.get_input_embeddings()
        name = next(name for name, one in self._model.named_modules() if one is module)
        return self._files.read(f"{name}.weight", module.weight.shape)

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer of the checkpoint, from transformers.

        Raises:
            ModelNotLoaded: the checkpoint has no tokenizer.
        """
        return read_tokenizer(self.name, self._revision)

    def attention(self, layer: int) -> AttentionWeights:
        """Read the weights of one attention block as linear maps of the residual stream, with norms folded in.

        Args:
            layer: index of the layer; negative counts from the last.

        Raises:
            LayerOutOfRange: no such layer.
            UnsupportedModel: the layer has unknown or quantised weights.
        """
        return self.attention_block(layer).folded()

    def attention_block(self, layer: int) -> AttentionBlock:
        """Read one attention block as a function of rows of the stream; arguments and errors as for `attention`."""
        index, layout = self._index(layer), self._layout
        self._check_parameters(index)
        norm, post = (self._norm(index, name, self.width) for name in (layout.attn_norm, layout.attn_post))
        query, key, value = self._projections(index)
        head_dim, output = query[0].shape[0] // self._heads, self._linear(index, self._family.attn_proj)
        of_queries, of_keys = (
            self._norm_of_heads(index, name, head_dim, len(one[0]))
            for name, one in ((layout.query_norm, query), (layout.key_norm, key))
        )
        block = (query, key, value, output, self._heads, norm, post, of_queries, of_keys)
        return AttentionBlock(index, *block, self._factor)

    def feed_forward(self, layer: int) -> FeedForward:
        """Read one feed-forward block as a function of rows: transformers' own module between the norms, in float32.

        The weights of an expert are not read here but on each call in which a row is routed to it, and not kept.

        Args:
            layer: index of the layer; negative counts from the last.

        Raises:
            LayerOutOfRange: no such layer.
            UnsupportedModel: the layer has unknown or quantised weights.
        """
        index, layout = self._index(layer), self._layout
        self._check_parameters(index)
        norm, post = (self._norm(index, name, self.width) for name in (layout.mlp_norm, layout.mlp_post))
        if self._has_experts(index):
            module, prefix = self._decoder[index].get_submodule("mlp"), f"{self._family.layers}.{index}"
            experts = RoutedExperts.of(module, self._files, prefix, layout.experts)
            return FeedForward(index, experts, norm, post, self._factor, {})
        path = self._family.mlp_proj.rpartition(".")[0]
        empty = self._decoder[index].get_submodule(path)  # stays empty, so that no layer is kept
        inner = self._files.fill(f"{self._family.layers}.{index}.{path}", copy.deepcopy(empty).eval())
        return FeedForward(index, inner, norm, post, self._factor, layout.read_by(inner, path))

    def neurons(self, layer: int) -> NeuronWeights:
        """Read the weights of one feed-forward block as linear maps of the residual stream, with norms folded in.

        Args:
            layer: index of the layer; negative counts from the last.

        Raises:
            LayerOutOfRange: no such layer.
            UnsupportedModel: the layer has experts, or unknown or quantised weights.
        """
        index, layout = self._index(layer), self._layout
        if self._has_experts(index):
            raise UnsupportedModel(
                f"{self.name}: layer {index} of {self._architecture} has experts, of which a router chooses for each "
                "token; their neurons are not read"
            )
        self._check_parameters(index)
        norm, post = (self._norm(index, name, self.width) for name in (layout.mlp_norm, layout.mlp_post))
        if layout.gate_up:
            weight, bias = self._linear(index, layout.gate_up)
            (gate, up), biases = weight.chunk(2), (None, None) if bias is None else bias.chunk(2)
            read: list[Linear | None] = [(gate, biases[0]), (up, biases[1])]
        else:
            read = [self._linear(index, name) if name else None for name in (layout.gate, layout.up)]
        gates, ups = (None if one is None else reading(one, norm) for one in read)
        assert ups is not None
        weight, bias = self._linear(index, self._family.mlp_proj)
        down, constant = writing((weight.T, bias), post, self._factor)
        return NeuronWeights(index, gates, ups, down, constant, norm, post)

    @property
    def _heads(self) -> int:
        return int(self._config.num_attention_heads)

    @property
    def _kv_heads(self) -> int:
        return int(getattr(self._config, "num_key_value_heads", None) or self._heads)

    @property
    def _factor(self) -> float:
        """Factor of a block's output; UnsupportedModel if layers do more with it than add it to the stream."""
        factor = self._family.factor(self._config)
        if factor is None:
            raise UnsupportedModel(
                f"{self.name}: layers of {self._architecture} do more to the residual stream than add to it"
            )
        return factor

    def _index(self, layer: int) -> int:
        index = index_of(layer)
        if index is None or not -self.layers <= index < self.layers:
            raise LayerOutOfRange(f"layer {shown(layer)}; {self.name} has layers 0 to {self.layers - 1}")
        return index % self.layers

    def _has_experts(self, layer: int) -> bool:
        return not (self._layout.up or self._layout.gate_up) or self._family.is_sparse(self._config, layer)

    def _check_parameters(self, layer: int) -> None:
        """Raise UnsupportedModel if a layer has a parameter of unknown effect, or weights are quantised."""
        if quantised := getattr(self._config, "quantization_config", None):
            raise UnsupportedModel(f"{self.name}: its weights are quantised ({quantised}); only plain ones can be read")
        known = {*self._layout.attention, self._family.attn_proj}
        experts = self._has_experts(layer)
        if not experts:
            known |= {*self._layout.neurons, self._family.mlp_proj}
        elif self._layout.mlp_norm:
            known.add(self._layout.mlp_norm)
        names = [name for name, _ in self._decoder[layer].named_parameters()]
        others = [name for name in names if name.rpartition(".")[0] not in known]
        if others := [name for name in others if not (experts and name.startswith("mlp."))]:
            what = f"{', '.join(others)}, whose effect steercap does not know"
            raise UnsupportedModel(f"{self.name}: layer {layer} of {self._architecture} has {what}")

    def _module(self, layer: int, name: str) -> Any:
        module = self._decoder[layer].get_submodule(name)
        return self._files.fill(f"{self._family.layers}.{layer}.{name}", module)

    def _norm(self, layer: int, name: str, width: int) -> FrozenNorm | None:
        if name and name not in dict(self._decoder[layer].named_modules()):
            raise UnsupportedModel(f"{self.name}: {self._architecture} has no {name} in layer {layer}")
        return FrozenNorm(self._module(layer, name), width) if name else None

    def _norm_of_heads(self, layer: int, name: str, head_dim: int, outputs: int) -> FrozenNorm | None:
        """Read a norm of queries or keys, over each head or over all `outputs` elements; None for an empty name."""
        if not name:
            return None
        module = self._module(layer, name)
        (gain,) = module.parameters()
        return FrozenNorm(module, head_dim if len(gain) == head_dim else outputs)

    def _projections(self, layer: int) -> tuple[Linear, Linear, Linear]:
        """Read the weights, [out, in], and biases of queries, keys and values; split a fused projection."""
        layout = self._layout
        if layout.fused:
            return taken_apart(self._linear(layer, layout.fused), layout.order, self._heads, self._kv_heads)
        query, key, value = (self._linear(layer, name) for name in (layout.query, layout.key, layout.value))
        return query, key, value

    def _linear(self, layer: int, name: str) -> Linear:
        """Read the weight, [out, in], and the bias of the projection `name` of a layer: float32; None for no bias."""
        module = self._decoder[layer].get_submodule(name)
        prefix = f"{self._family.layers}.{layer}.{name}"
        weight = self._files.read(f"{prefix}.weight", module.weight.shape)
        bias = None if module.bias is None else self._files.read(f"{prefix}.bias", module.bias.shape)
        if isinstance(module, nn.Linear):
            return weight, bias
        if type(module).__name__ == "Conv1D":  # transformers' own, which keeps its weight as [in, out]
            return weight.T, bias
        raise UnsupportedModel(f"{self.name}: {prefix} is a {type(module).__name__}, not a plain projection")
