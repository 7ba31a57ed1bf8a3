"""Reference for captures: the rows that transformers computes for the same tokens, and comparison by the worst row.

The finished sequence goes through the model in one forward pass (teacher forcing), and hooks store the rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import nn
from torch.utils.hooks import RemovableHandle

from steercap.core.extras import extra
from steercap.core.spec import Point
from steercap.core.tokens import selected
from steercap.lab.training.hooked import HookedModel, Visited, firsts
from steercap.steering.spec import LogitBias, Steering, spec_of
from steercap.testing.edits import edited


class Parity(NamedTuple):
    """Agreement of rows with their reference, by the worst row.

    Args:
        cosine: least cosine of a row with its reference row.
        error: greatest absolute error of an element, over the norm of its reference row.
    """

    cosine: float
    error: float

    def worse(self, other: Parity) -> Parity:
        """Return the lower cosine and the greater error of both; NaN where either is, which min and max may drop."""
        return Parity(float(np.minimum(self.cosine, other.cosine)), float(np.maximum(self.error, other.error)))


#: Parity of equal rows, from which `worse` accumulates.
PERFECT = Parity(1.0, 0.0)


def compare_rows(rows: Float[torch.Tensor, "rows hidden"], reference: Float[torch.Tensor, "rows hidden"]) -> Parity:
    """Compare rows with reference rows in float64, by the worst row, since a mean would hide a single wrong one.

    Raises:
        ValueError: the shapes differ, or there is no row.
    """
    if rows.shape != reference.shape or not len(rows):
        raise ValueError(f"cannot compare rows {tuple(rows.shape)} with a reference of {tuple(reference.shape)}")
    left, right = rows.double(), reference.double()
    cosine = torch.cosine_similarity(left, right, dim=-1).min()
    error = ((left - right).abs().amax(-1) / right.norm(dim=-1)).max()
    return Parity(float(cosine), float(error))


#: Ids of experts, int64 [tokens, k], and their weights, float32 [tokens, k].
Chosen: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


class Reference:
    """Transformers model whose rows can be read and edited at steercap's points.

    Args:
        path: path of the checkpoint.
        dtype: dtype to compute in.
        **loading: further arguments of transformers' `from_pretrained`.
    """

    def __init__(self, path: str | Path, dtype: torch.dtype = torch.float32, **loading: Any) -> None:
        self.hooked = HookedModel(path, dtype, **{"attn_implementation": "eager", **loading})
        self.model: Any = self.hooked.model
        self.layers: Mapping[int, nn.Module] = self.hooked.layers
        self.family = self.hooked.family
        self._hooked = threading.Lock()  # hooks of one thread would see the rows of another

    def rows(
        self,
        token_ids: Sequence[int],
        points: Iterable[Point],
        inputs: Mapping[int, torch.Tensor] | None = None,
        *,
        given: Mapping[Point, torch.Tensor] | None = None,
        chosen: Mapping[int, Chosen] = MappingProxyType({}),
        steering: Steering | None = None,
        prompt_len: int = 0,
        media: Mapping[str, Any] = MappingProxyType({}),
    ) -> dict[Point, torch.Tensor]:
        """Return the rows of all tokens at each point: [tokens, width], in the model's dtype.

        Args:
            token_ids: the sequence, without its last sampled token.
            points: points to read.
            inputs: rows [tokens, hidden] that replace the inputs of these layers. A 16-bit model drifts from layer to
                layer; given the rows captured before it, each layer is compared by itself.
            given: rows [tokens, width] that replace those of these points, after the points' own rows have been read.
            chosen: experts and weights that replace the router's choice, by layer.
            steering: edits to make at their points, in float64, before the rows are read.
            prompt_len: number of prompt tokens, which the edits' token selections refer to.
            media: further inputs of the model, such as a picture.

        Concurrent calls from several threads run one after the other.
        """
        found: dict[Point, torch.Tensor] = {}
        edits = self._edits(steering, prompt_len)
        keeps: list[Visited] = [(point, partial(_keep, point, found)) for point in points]
        instead = [(point, partial(_change, partial(_instead, rows))) for point, rows in (given or {}).items()]
        with self._hooked, ExitStack() as hooks, torch.no_grad():
            # Hooks of a module run in the order in which they are put in.
            self.hooked.visit(hooks, firsts([*edits, *keeps], first=True))
            self.hooked.visit(hooks, firsts(edits, first=False))
            for layer, rows in (inputs or {}).items():
                hooks.callback(self.layers[layer].register_forward_pre_hook(_replace(rows), with_kwargs=True).remove)
            self.hooked.visit(hooks, firsts(keeps, first=False))
            self.hooked.visit(hooks, instead)
            for layer, choice in chosen.items():
                hooks.callback(_choose(_experts(self.layers[layer])[1], choice).remove)
            self.model(torch.tensor([list(token_ids)]), use_cache=False, **media)
        return found

    def attention(
        self, token_ids: Sequence[int], *, steering: Steering | None = None, prompt_len: int = 0
    ) -> list[torch.Tensor]:
        """Return the attention weights of each layer: float32 [heads, tokens, tokens].

        Args:
            token_ids, steering, prompt_len: as for `rows`.
        """
        with self._hooked, ExitStack() as hooks, torch.no_grad():
            edits = self._edits(steering, prompt_len)
            self.hooked.visit(hooks, [*firsts(edits, first=True), *firsts(edits, first=False)])
            found = self.model(torch.tensor([list(token_ids)]), use_cache=False, output_attentions=True).attentions
        return [weights[0].float() for weights in found]

    def experts(
        self,
        token_ids: Sequence[int],
        *,
        given: Mapping[Point, torch.Tensor] | None = None,
        steering: Steering | None = None,
        prompt_len: int = 0,
    ) -> dict[int, Chosen]:
        """Return the experts of each layer that has any: ids, int64 [tokens, k], and weights, float32 [tokens, k].

        They are the inputs of transformers' experts module, sorted by weight, greatest first.

        Args:
            token_ids, given, steering, prompt_len: as for `rows`.
        """
        found: dict[int, Chosen] = {}
        instead = [(point, partial(_change, partial(_instead, rows))) for point, rows in (given or {}).items()]
        with self._hooked, ExitStack() as hooks, torch.no_grad():
            self.hooked.visit(hooks, self._edits(steering, prompt_len))
            self.hooked.visit(hooks, instead)
            for index, layer in self.layers.items():
                if any(name.endswith(".experts") or name == "experts" for name, _ in layer.named_modules()):
                    hooks.callback(_watch_experts(*_experts(layer), partial(found.__setitem__, index)).remove)
            self.model(torch.tensor([list(token_ids)]), use_cache=False)
        return found

    def greedy(
        self, token_ids: Sequence[int], tokens: int, steering: Steering | None = None
    ) -> tuple[list[int], torch.Tensor]:
        """Decode a prompt greedily with transformers, edits made by hooks and logit biases by a LogitsProcessor.

        Args:
            token_ids: token ids of the prompt.
            tokens: number of tokens to generate; an end-of-sequence token does not stop it.
            steering: edits and logit biases.

        Returns:
            The generated token ids, and log probabilities at each: float32 [tokens, vocabulary].
        """
        with extra("cuda", "cpu"):
            from transformers import GenerationConfig, LogitsProcessorList

        prompt_len, none = len(token_ids), self.model.config.get_text_config().vocab_size  # a token that never comes
        config = GenerationConfig(
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=none,
            pad_token_id=0,
            use_cache=False,  # so that hooks see all positions, from the first
            return_dict_in_generate=True,
            output_scores=True,
        )
        processors = LogitsProcessorList([biasing(steering, prompt_len, tokens)])
        with self._hooked, ExitStack() as hooks, torch.no_grad():
            self.hooked.visit(hooks, self._edits(steering, prompt_len))
            found = self.model.generate(
                torch.tensor([list(token_ids)], device=self.model.device),
                generation_config=config,
                logits_processor=processors,
            )
        scores = torch.cat(found.scores).float()
        return found.sequences[0, prompt_len:].tolist(), scores.log_softmax(-1).cpu()

    def _edits(self, steering: Steering | None, prompt_len: int) -> list[Visited]:
        """Return each point that is edited, with a function that edits the hidden states there in place."""
        if steering is None:
            return []
        spec = spec_of(steering)
        count = len(self.layers)
        points = dict.fromkeys(point for edit in spec.of_rows() for point in edit.points(count))
        return [
            (point, partial(_change, partial(edited, spec, point, prompt_len=prompt_len, num_layers=count)))
            for point in points
        ]


def biasing(steering: Steering | None, prompt_len: int, tokens: int) -> Any:
    """Return a transformers LogitsProcessor that adds logit biases at the positions that they select."""
    with extra("cuda", "cpu"):
        from transformers import LogitsProcessor

    limit = prompt_len + tokens - 1
    biases = [edit for edit in (spec_of(steering).flat() if steering else ()) if isinstance(edit, LogitBias)]
    chosen = [selected(bias.selection.ranges(prompt_len, limit), limit) for bias in biases]

    class BiasProcessor(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores = scores.clone()
            for bias, held in zip(biases, chosen, strict=True):
                if held[input_ids.shape[1] - 1]:
                    given = bias.bias
                    pairs = given.items() if isinstance(given, Mapping) else enumerate(torch.as_tensor(given).tolist())
                    for token, value in pairs:
                        scores[:, token] += value
            return scores

    return BiasProcessor()


def _experts(layer: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return the parent module of a layer's module "experts", and this module."""
    path = next(name for name, _ in layer.named_modules() if name.rpartition(".")[2] == "experts")
    return layer.get_submodule(path.rpartition(".")[0]), layer.get_submodule(path)


def _choose(experts: nn.Module, chosen: Chosen) -> RemovableHandle:
    """Make a layer's experts module use `chosen` in place of its router's choice, until the handle is removed."""

    def called(_module: nn.Module, args: tuple[Any, ...]) -> Any:
        return (args[0], chosen[0].to(args[1]), chosen[1].to(args[2]))

    return experts.register_forward_pre_hook(called)


def _watch_experts(block: nn.Module, experts: nn.Module, keep: Callable[[Chosen], None]) -> RemovableHandle:
    """Call `keep` with the expert ids and weights of each call of `experts`, until the handle is removed."""

    def kept(ids: torch.Tensor, weights: torch.Tensor) -> None:
        order = weights.float().sort(dim=1, descending=True, stable=True).indices
        keep((ids.long().gather(1, order), weights.float().gather(1, order)))

    def called(_module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        _hidden, ids, weights = (*args, *kwargs.values())
        kept(ids, weights)

    def scored(router: nn.Module, _args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Keep Llama 4's choice from its router: its experts read rows times the scores of all experts, mostly 0."""
        best = output[0].topk(router.top_k, dim=1)  # type: ignore[arg-type]
        kept(best.indices, best.values)

    if type(block).__name__.startswith("Llama4"):
        return block.get_submodule("router").register_forward_hook(scored)
    return experts.register_forward_pre_hook(called, with_kwargs=True)


def _keep(point: Point, found: dict[Point, torch.Tensor], hidden: torch.Tensor) -> None:
    found[point] = _rows(hidden).clone()


def _rows(hidden: torch.Tensor) -> torch.Tensor:
    """Return the hidden states of one sequence, with or without a batch axis, as [tokens, width]."""
    return (hidden[0] if hidden.dim() > 2 and hidden.shape[0] == 1 else hidden).flatten(1)


def _change(change: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> None:
    hidden.copy_(change(_rows(hidden)).to(hidden.dtype).reshape(hidden.shape))


def _instead(rows: torch.Tensor, _own: torch.Tensor) -> torch.Tensor:
    return rows


def _replace(rows: torch.Tensor) -> Callable[..., Any]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (rows[None], *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": rows[None]}

    return hook
