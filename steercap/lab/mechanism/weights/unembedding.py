"""Final norm and unembedding of a model, read from its checkpoint: rows of the residual stream to logits.

The modules are transformers' own, built without weights; only the tensors they need are read.
"""

from __future__ import annotations

import os
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
from jaxtyping import Float, Int
from torch import nn

from steercap.architectures.families import family_of
from steercap.errors import InvalidRequest, UnsupportedModel
from steercap.kernels.bits import exact_products
from steercap.lab.mechanism.weights import TensorFiles, configuration, option, skeleton
from steercap.lab.mechanism.weights.blocks import FrozenNorm

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Maximum bytes of float32 logits, or unembedding rows, in memory at once.
BLOCK_BYTES: Final = 64 << 20


class Unembedding:
    """Map from rows of the last layer of the residual stream to logits.

    It has the final norm, the unembedding (tied to the embedding or not, with or without a bias), and the factor and
    soft-capping of logits if the model has them, in float32.

    Attributes:
        vocabulary: number of tokens with a logit.
        width: number of elements of a row.
        blocks: factor of block outputs before they are added to the stream; None if a layer does more than add them.
    """

    def __init__(
        self,
        norm: nn.Module,
        head: nn.Module,
        softcap: float | None,
        factor: float = 1.0,
        blocks: float | None = 1.0,
    ) -> None:
        self.blocks = blocks
        self._norm = norm
        self._head = head
        self._softcap = softcap
        self._factor = factor
        self.vocabulary, self.width = (int(size) for size in head.get_parameter("weight").shape)

    def __repr__(self) -> str:
        return f"Unembedding({self.width} → {self.vocabulary:,} tokens)"

    @classmethod
    def load(cls, checkpoint: str | os.PathLike[str], *, revision: str | None = None) -> Unembedding:
        """Read the final norm and unembedding from a checkpoint.

        Args:
            checkpoint: folder, or name on the hub, with safetensors files.
            revision: revision of a name on the hub.

        Raises:
            ModelNotLoaded: there is no such checkpoint, or it has no safetensors files.
            UnsupportedModel: the architecture is not known, its last layer is not followed by a norm and an unembedding
                alone (OPT-350m), or these have quantised weights.
            InvalidFile: the files lack a tensor that the configuration promises.
        """
        path = os.fspath(checkpoint)
        config = configuration(path, revision)
        family_of(config.architectures or ())  # before its modules are built
        return cls.of(config, skeleton(config), TensorFiles.find(path, revision))

    @classmethod
    def of(cls, config: PretrainedConfig, model: Any, files: TensorFiles) -> Unembedding:
        """Read the final norm and unembedding from a checkpoint that is open.

        Args:
            config: transformers' configuration.
            model: modules of the model, without weights.
            files: tensor files of the checkpoint.

        Raises:
            UnsupportedModel, InvalidFile: as for `load`.
        """
        family = family_of(config.architectures or ())
        norm, head, names = _modules(files.path, config, model)
        files = files.of(model)
        for name, (module, parameter) in names.items():
            tensor = files.read(name, module.get_parameter(parameter).shape)
            setattr(module, parameter, nn.Parameter(tensor, requires_grad=False))
        softcap = option(config, "final_logit_softcapping", None)
        return cls(norm, head, softcap, family.logits(config), family.factor(config))

    @cached_property
    def norm(self) -> FrozenNorm:
        """Final norm as a linear map, with the scale that depends on the row treated as a constant.

        Raises:
            UnsupportedModel: the norm is not a scale and a gain, with or without a mean subtracted first.
        """
        return FrozenNorm(self._norm, self.width)

    def read(self, directions: Float[torch.Tensor, "n hidden"]) -> Float[torch.Tensor, "n vocabulary"]:
        """Return the contribution of directions to each token's logit, up to the positive scale of the final norm.

        The gain of the final norm, its centring and the factor of logits are in it; the norm's constant, the
        unembedding's bias, and soft-capping, which keeps the order of tokens, are not. The result is float32.

        Args:
            directions: directions in the residual stream, any floating dtype.
        """
        with torch.no_grad(), exact_products():
            return self.norm.linear(directions) @ self.weight.T * self._factor

    @cached_property
    def reading_lengths(self) -> Float[torch.Tensor, " vocabulary"]:
        """L2 norm of each token's logit direction in the residual stream: float32 [vocabulary].

        `read` of a direction is this norm, times the direction's length, times the cosine of the two.
        """
        size = max(1, BLOCK_BYTES // (4 * self.width))
        blocks = [self.norm.through(block).norm(dim=1) for block in self.weight.split(size)]
        return torch.cat(blocks) * abs(self._factor)

    @property
    def weight(self) -> Float[torch.Tensor, "vocabulary hidden"]:
        """Rows of the unembedding, float32 [vocabulary, hidden]."""
        return self._head.get_parameter("weight")

    def logits(self, rows: Float[torch.Tensor, "*any hidden"]) -> Float[torch.Tensor, "*any vocabulary"]:
        """Compute logits of the next token: float32 [..., vocabulary]. For the last layer's rows, they are the model's.

        Args:
            rows: rows of "resid_post" or "resid_pre", any dtype, [..., hidden].

        Raises:
            InvalidRequest: the rows have another width.
        """
        if rows.shape[-1] != self.width:
            raise InvalidRequest(
                f"rows have width {rows.shape[-1]}, and this unembedding takes {self.width}; give rows of its model"
            )
        with torch.no_grad(), exact_products():
            found: torch.Tensor = self._head(self._norm(rows.float())) * self._factor
            return found if self._softcap is None else torch.tanh(found / self._softcap) * self._softcap

    def directions(
        self, rows: Float[torch.Tensor, "rows hidden"], token_ids: Int[torch.Tensor, " rows"]
    ) -> tuple[Float[torch.Tensor, "rows hidden"], Float[torch.Tensor, " rows"]]:
        """Return the direction that a token's logit reads from each row, with the norm's scale fixed at the row's.

        `directions · row + constant` is the logit before any soft-capping. For a part of the row, such as a feature's
        output, `directions · part` is its direct effect on the logit.

        Args:
            rows: rows of the last layer's "resid_post", any dtype.
            token_ids: token id for each row.

        Returns:
            The directions, float32 [rows, hidden], and the constants from the biases of norm and unembedding, float32
            [rows].

        Raises:
            InvalidRequest: the rows have another width, or a token has no logit.
            UnsupportedModel: the norm is not a scale and a gain, with or without a mean subtracted first.
        """
        if rows.shape[-1] != self.width or bool(((token_ids < 0) | (token_ids >= self.vocabulary)).any()):
            raise InvalidRequest(
                f"rows {tuple(rows.shape)} and tokens up to {int(token_ids.max())}; this unembedding takes rows of "
                f"{self.width} and tokens below {self.vocabulary}"
            )
        with torch.no_grad(), exact_products():
            weights = self.weight[token_ids] * self._factor
            constants, bias = weights @ self.norm.constant, dict(self._head.named_parameters()).get("bias")
            if bias is not None:
                constants += bias[token_ids] * self._factor
            return self.norm.through(weights) * self.norm.scales(rows), constants

    def best(self, rows: Float[torch.Tensor, "rows hidden"], count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the most probable next tokens, most probable first, computed in blocks of rows to save memory.

        Args:
            rows: rows as for `logits`.
            count: number of tokens per row.

        Returns:
            Token ids, int64 [rows, count], and their probabilities, float32 [rows, count].
        """
        size = max(1, BLOCK_BYTES // (4 * self.vocabulary))
        found = [self.logits(block).softmax(-1).topk(count, -1) for block in rows.split(size)]
        return torch.cat([one.indices for one in found]), torch.cat([one.values for one in found])


def _modules(
    path: str, config: PretrainedConfig, model: Any
) -> tuple[nn.Module, nn.Module, dict[str, tuple[nn.Module, str]]]:
    """Return the final norm and the unembedding, without weights, and their (module, parameter) by tensor name.

    Raises:
        UnsupportedModel: the last layer is not followed by these two alone.
    """
    family = family_of(config.architectures or ())
    owner, _, name = family.final_norm.rpartition(".")
    norm, head = getattr(model.get_submodule(owner), name), model.get_output_embeddings()
    if norm is None or getattr(model.get_submodule(owner), "project_out", None) is not None:
        raise UnsupportedModel(
            f"{path}: in this model the layers are not followed by a norm and an unembedding alone; "
            "there is no logit lens for it"
        )
    tied = bool(config.tie_word_embeddings)
    weight = model.get_input_embeddings().weight if tied else head.weight
    known = {id(parameter): name for name, parameter in reversed(list(model.named_parameters(remove_duplicate=False)))}
    names = {known[id(weight)]: (head, "weight")}
    if head.bias is not None:
        names[known[id(head.bias)]] = (head, "bias")
    names |= {f"{family.final_norm}.{part}": (norm, part) for part, _ in norm.named_parameters()}
    return norm, head, names
