"""From rows of the residual stream to logits: a model's final norm and unembedding, read from its checkpoint.

The modules are transformers' own, built without weights; only the tensors they need are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
from jaxtyping import Float, Int
from torch import nn

from steercap.core.extras import extra
from steercap.errors import InvalidFile, InvalidRequest, ModelNotLoaded, UnsupportedModel
from steercap.families import family_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WHOLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
#: How far a row behind the norm may be from what its linear form makes of it, of the row's length.
LINEAR: Final = 1e-4
#: Logits held at once, in bytes of float32.
BLOCK_BYTES: Final = 64 << 20


class Unembedding:
    """What a model does to the rows of its last layer to get logits.

    Its final norm, its unembedding (tied to the embedding or not), and the factor and soft-capping of logits where the
    model has them, in float32.

    Attributes:
        vocabulary: tokens that have a logit.
        width: elements of a row.
        blocks: what the outputs of blocks are multiplied by before they are added to the stream; None where a layer
            does more than add them.
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

    @classmethod
    def load(cls, checkpoint: str | os.PathLike[str], *, revision: str | None = None) -> Unembedding:
        """Read it from a checkpoint.

        Args:
            checkpoint: folder, or name on the hub, of safetensors files.
            revision: of a name on the hub.

        Raises:
            ModelNotLoaded: no such checkpoint, or one without safetensors files.
            UnsupportedModel: an architecture that steercap does not know, one whose last layer is not followed by a
                norm and an unembedding alone (OPT-350m), or quantised weights of these.
            InvalidFile: the files lack a tensor that the configuration promises.
        """
        with extra("cuda", "cpu"):
            from transformers import AutoConfig

        path = os.fspath(checkpoint)
        try:
            config = AutoConfig.from_pretrained(path, revision=revision)
        except (OSError, ValueError) as error:
            raise ModelNotLoaded(f"no configuration of a model at {path!r}: {error}") from error
        norm, head, names = _modules(path, config)
        tensors = dict(_tensors(path, revision, set(names)))
        for name, (module, parameter) in names.items():
            tensor = tensors[name]
            if tensor.shape != module.get_parameter(parameter).shape or not tensor.is_floating_point():
                raise UnsupportedModel(
                    f"{path}: {name} is {list(tensor.shape)} {tensor.dtype}, which is not the plain weight that the "
                    "configuration describes; the logit lens reads weights that are not quantised"
                )
            setattr(module, parameter, nn.Parameter(tensor.float(), requires_grad=False))
        return cls(
            norm,
            head,
            getattr(config, "final_logit_softcapping", None),
            family_of(config.architectures or ()).logits(config),
            family_of(config.architectures or ()).factor(config),
        )

    def logits(self, rows: Float[torch.Tensor, "*any hidden"]) -> Float[torch.Tensor, "*any vocabulary"]:
        """Logits of the next token: float32 [..., vocabulary]. Of the last layer's rows, they are the model's own.

        Args:
            rows: of "resid_post" or "resid_pre", any dtype, [..., hidden].

        Raises:
            InvalidRequest: rows of another width.
        """
        if rows.shape[-1] != self.width:
            raise InvalidRequest(
                f"rows have width {rows.shape[-1]}, and this unembedding takes {self.width}: of another model?"
            )
        with torch.inference_mode():
            found: torch.Tensor = self._head(self._norm(rows.float())) * self._factor
            return found if self._softcap is None else torch.tanh(found / self._softcap) * self._softcap

    def directions(
        self, rows: Float[torch.Tensor, "rows hidden"], token_ids: Int[torch.Tensor, " rows"]
    ) -> tuple[Float[torch.Tensor, "rows hidden"], Float[torch.Tensor, " rows"]]:
        """What a token's logit reads in each row, with the norm frozen: its scale is taken as that of the row.

        `directions · row + constant` is the logit before any soft-capping, and of a part of the row, such as what a
        feature wrote, `directions · part` is its direct effect on it.

        Args:
            rows: of the last layer's "resid_post", any dtype.
            token_ids: one for each row.

        Returns:
            The directions, float32 [rows, hidden], and the constants, float32 [rows]: of a norm with a bias.

        Raises:
            InvalidRequest: rows of another width, or a token that has no logit.
            UnsupportedModel: a norm that is not a scale and a gain, with or without a mean subtracted first.
        """
        if rows.shape[-1] != self.width or bool(((token_ids < 0) | (token_ids >= self.vocabulary)).any()):
            raise InvalidRequest(
                f"rows {tuple(rows.shape)} and tokens up to {int(token_ids.max())}; this unembedding takes rows of "
                f"{self.width} and tokens below {self.vocabulary}"
            )
        with torch.inference_mode():
            constant, gain = self._gain()
            behind = self._norm(rows.float()) - constant
            weights = self._head.get_parameter("weight")[token_ids] * self._factor
            for centre in (False, True):
                scaled = gain * (rows.float() - rows.float().mean(dim=1, keepdim=True) * centre)
                scales = (behind * scaled).sum(dim=1, keepdim=True) / scaled.square().sum(dim=1, keepdim=True)
                if bool(((behind - scales * scaled).norm(dim=1) <= LINEAR * behind.norm(dim=1)).all()):
                    read = weights * gain * scales
                    return read - read.mean(dim=1, keepdim=True) * centre, weights @ constant
        raise UnsupportedModel(f"{type(self._norm).__name__} is no norm that can be frozen: a scale times a gain")

    def _gain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the norm adds, and what it multiplies elements by, as it says itself: float32 [hidden] each."""
        signs = torch.ones(self.width)
        signs[1::2] = -1  # of mean 0 and length √hidden, where hidden is even
        constant = self._norm(torch.zeros(1, self.width))[0]
        return constant, (self._norm(signs[None])[0] - constant) * signs

    def best(self, rows: Float[torch.Tensor, "rows hidden"], count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The most probable next tokens, most probable first, never holding the logits of all rows at once.

        Args:
            rows: as for `logits`.
            count: tokens per row.

        Returns:
            Token ids, int64 [rows, count], and their probabilities, float32 [rows, count].
        """
        size = max(1, BLOCK_BYTES // (4 * self.vocabulary))
        found = [self.logits(block).softmax(-1).topk(count, -1) for block in rows.split(size)]
        return torch.cat([one.indices for one in found]), torch.cat([one.values for one in found])


def _modules(path: str, config: PretrainedConfig) -> tuple[nn.Module, nn.Module, dict[str, tuple[nn.Module, str]]]:
    """The final norm and the unembedding, without weights, and which tensor each of their parameters is.

    Raises:
        UnsupportedModel: not a model whose last layer is followed by these alone.
    """
    with extra("cuda", "cpu"):
        from transformers import AutoModelForCausalLM

    family = family_of(config.architectures or ())
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    owner, _, name = family.final_norm.rpartition(".")
    norm, head = getattr(model.get_submodule(owner), name), model.get_output_embeddings()
    if norm is None or getattr(model.get_submodule(owner), "project_out", None) is not None:
        raise UnsupportedModel(
            f"{path}: in this model the layers are not followed by a norm and an unembedding alone; "
            "there is no logit lens for it"
        )
    tied = bool(config.tie_word_embeddings)
    weight = model.get_input_embeddings().weight if tied else head.weight
    head_name = next(
        known for known, parameter in model.named_parameters(remove_duplicate=False) if parameter is weight
    )
    names = {head_name: (head, "weight")}
    names |= {f"{family.final_norm}.{part}": (norm, part) for part, _ in norm.named_parameters()}
    if head.bias is not None:
        raise UnsupportedModel(f"{path}: its unembedding has a bias, which no known family has")
    return norm, head, names


def _tensors(path: str, revision: str | None, wanted: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a checkpoint by name.

    Checkpoints that were written without the head have names without the prefix of the body: "ln_f.weight" for
    "transformer.ln_f.weight".

    Raises:
        ModelNotLoaded: no safetensors files.
        InvalidFile: a tensor is missing.
    """
    from safetensors import safe_open

    files = _files(path, revision)
    for name in sorted(wanted):
        spelled = next((known for known in (name, name.partition(".")[2]) if known in files), None)
        if spelled is None:
            raise InvalidFile(f"{path} holds no tensor {name!r}, which its configuration asks for")
        with safe_open(files[spelled], framework="pt") as tensors:
            yield name, tensors.get_tensor(spelled)


def _files(path: str, revision: str | None) -> dict[str, Path]:
    """The file that holds each tensor."""
    from safetensors import safe_open

    if index := _file(path, INDEX, revision):
        held: dict[str, str] = msgspec.json.decode(index.read_bytes())["weight_map"]
        files = {name: _file(path, name, revision) for name in sorted(set(held.values()))}
        if missing := [name for name, file in files.items() if file is None]:
            raise ModelNotLoaded(f"{path}: the index names {', '.join(missing)}, which cannot be found")
        return {name: file for name, part in held.items() if (file := files[part]) is not None}
    if whole := _file(path, WHOLE, revision):
        with safe_open(whole, framework="pt") as tensors:
            return dict.fromkeys(tensors.keys(), whole)
    raise ModelNotLoaded(f"{path!r} has neither {WHOLE} nor {INDEX}; the logit lens reads safetensors files")


def _file(path: str, name: str, revision: str | None) -> Path | None:
    with extra("cuda", "cpu"):
        from transformers.utils import cached_file

    found = cached_file(
        path,
        name,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)
