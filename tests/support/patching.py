"""Patching with hooks on transformers' Llama and Qwen 3, to compare with: it knows nothing of our edits and sites.

Shape legend: copies = runs of one prompt, all in one pass; tokens = of the prompt; width = heads one after another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from steercap.core.extras import extra
from steercap.lab.mechanism.patching import Grid, LogitDifference, patch
from steercap.model import SteerModel
from support.rows import random_prompt

#: A layer and a name: "resid_pre", "resid_post", "attn_out", "mlp_out", "z", "q", "k" or "v".
Place: TypeAlias = tuple[int, str]
#: Sees what stands at a place, [copies, tokens, width], and may change it in place.
Visit: TypeAlias = Callable[[torch.Tensor], None]


class Seen(NamedTuple):
    """One pass.

    Args:
        logits: after the prompt, float32 [copies, vocabulary].
        rows: by place, float32 [copies, tokens, width].
    """

    logits: torch.Tensor
    rows: dict[Place, torch.Tensor]

    def difference(self, right: int, wrong: int) -> list[float]:
        """The logit difference of each copy."""
        found: list[float] = (self.logits[:, right] - self.logits[:, wrong]).tolist()
        return found


class Hooked:
    """A model of transformers whose rows are changed by hooks.

    Args:
        path: checkpoint of a Llama or a Qwen 3, computed in float32.
    """

    def __init__(self, path: str | Path) -> None:
        with extra("cuda", "cpu"):
            from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.head_dim = int(self.model.model.layers[0].self_attn.head_dim)

    def run(
        self,
        ids: Sequence[int],
        changes: Mapping[Place, Visit] | None = None,
        keep: Sequence[Place] = (),
        copies: int = 1,
    ) -> Seen:
        """Read a prompt, several times at once.

        Args:
            ids: the prompt.
            changes: what is done at places.
            keep: places whose rows are kept, as they are once changed.
            copies: how many times.
        """
        rows: dict[Place, torch.Tensor] = {}
        visits = {place: [visit] for place, visit in (changes or {}).items()}
        for place in keep:
            visits.setdefault(place, []).append(partial(_kept, rows, place))
        with torch.inference_mode(), ExitStack() as hooks:
            for (layer, name), each in visits.items():
                if name not in {"q", "k", "v"}:
                    hooks.callback(self._hook(self.model.model.layers[layer], name, each).remove)
            hooks.enter_context(self._attention(visits))
            logits = self.model(torch.tensor([list(ids)] * copies), use_cache=False).logits[:, -1].float()
        return Seen(logits, rows)

    @staticmethod
    def _hook(layer: Any, name: str, visits: Sequence[Visit]) -> Any:
        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            rows = (args[0] if args else kwargs["hidden_states"]).clone()
            for visit in visits:
                visit(rows)
            return ((rows, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": rows})

        def after(_module: nn.Module, _args: Any, output: Any) -> Any:
            rows = (output[0] if isinstance(output, tuple) else output).clone()
            for visit in visits:
                visit(rows)
            return (rows, *output[1:]) if isinstance(output, tuple) else rows

        if name in {"resid_pre", "z"}:
            module = layer if name == "resid_pre" else layer.self_attn.o_proj
            return module.register_forward_pre_hook(before, with_kwargs=True)
        module = {"resid_post": layer, "attn_out": layer.self_attn, "mlp_out": layer.mlp}[name]
        return module.register_forward_hook(after)

    @contextmanager
    def _attention(self, visits: Mapping[Place, Sequence[Visit]]) -> Iterator[None]:
        """Visit what attention of this model reads, once rotated; other models call the same function."""
        module: Any = sys.modules[type(self.model.model.layers[0].self_attn).__module__]
        original, own = module.eager_attention_forward, {layer.self_attn for layer in self.model.model.layers}

        def attend(attention: Any, *given: torch.Tensor, **kwargs: Any) -> Any:
            if attention not in own:  # a thread beside runs another model of this class
                return original(attention, *given, **kwargs)
            read = list(given)
            for number, name in enumerate(("q", "k", "v")):
                rows = read[number].transpose(1, 2).flatten(2).clone()
                for visit in visits.get((attention.layer_idx, name), ()):
                    visit(rows)
                read[number] = rows.unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            return original(attention, *read, **kwargs)

        module.eager_attention_forward = attend
        try:
            yield
        finally:
            module.eager_attention_forward = original

    # What patching is, in terms of hooks

    def patched(
        self, ids: Sequence[int], place: Place, rows: torch.Tensor, each: Sequence[tuple[int | None, Sequence[int]]]
    ) -> Seen:
        """Put rows at a place, in each copy those of one head (or all of it) and of some positions.

        Args:
            ids: the prompt that is changed.
            place: where.
            rows: what is put there, [tokens, width].
            each: of each copy, the head and the positions.
        """

        def put(own: torch.Tensor) -> None:
            for copy, (head, positions) in enumerate(each):
                part = slice(None) if head is None else slice(head * self.head_dim, (head + 1) * self.head_dim)
                for position in positions:
                    own[copy, position, part] = rows[position, part]

        return self.run(ids, {place: put}, copies=len(each))

    def path_patched(
        self,
        base: Sequence[int],
        source: Sequence[int],
        sender: tuple[int, int],
        receivers: tuple[str, Sequence[tuple[int, int]]] | None,
        *,
        through_mlps: bool = True,
    ) -> Seen:
        """Let one head's change through to some heads, or to the logits, at every token.

        Args:
            base: the prompt that is changed.
            source: the prompt that the sender's rows come from.
            sender: layer and head.
            receivers: "q", "k" or "v", and layer and head of each; None for the logits.
            through_mlps: whether feed-forward blocks carry it on.
        """
        layer, head = sender
        depth, part = len(self.model.model.layers), slice(head * self.head_dim, (head + 1) * self.head_dim)
        held = [(later, "z") for later in range(layer + 1, depth)]
        held += [] if through_mlps else [(later, "mlp_out") for later in range(layer, depth)]
        before, other = self.run(base, keep=held).rows, self.run(source, keep=[(layer, "z")]).rows[layer, "z"]

        def send(own: torch.Tensor) -> None:
            own[..., part] = other[..., part]

        frozen: dict[Place, Visit] = {place: partial(_put, before[place]) for place in held}
        name, heads = receivers or ("q", [])
        reached = [(number, name) for number in dict.fromkeys(number for number, _ in heads) if number > layer]
        first = self.run(base, {**frozen, (layer, "z"): send}, keep=reached)
        if receivers is None:
            return first

        def receive(place: Place, own: torch.Tensor) -> None:
            for number, one in heads:
                if number == place[0]:
                    taken = slice(one * self.head_dim, (one + 1) * self.head_dim)
                    own[..., taken] = first.rows[place][..., taken]

        return self.run(base, {place: partial(receive, place) for place in reached})


def _kept(rows: dict[Place, torch.Tensor], place: Place, own: torch.Tensor) -> None:
    rows[place] = own.clone()


def _put(given: torch.Tensor, own: torch.Tensor) -> None:
    own.copy_(given.expand_as(own))


async def patches_agree(model: SteerModel, hooked: Hooked, grids: Sequence[Grid]) -> tuple[float, float]:
    """Patch two pairs at every cell of some grids, and compare with hooks.

    Args:
        model: an open model with the grids' points.
        hooked: the same model.
        grids: of single tokens.

    Returns:
        The worst difference of a value from that of hooks, and the greatest effect.
    """
    right, wrong, tokens = 17, 99, 7
    clean = [random_prompt(tokens, seed) for seed in (1, 2)]
    corrupted = [[*clean[0][:3], 40, *clean[0][4:]], [*clean[1][:2], 41, 42, *clean[1][4:]]]
    effects = await patch(model, clean, corrupted, grids, metric=LogitDifference((right, wrong)))
    worst = 0.0
    for pair, (base, source) in enumerate(zip(corrupted, clean, strict=True)):
        places = sorted({(one.layer, one.site) for one in effects.records})
        seen = hooked.run(source, keep=places)
        for layer, site in places:
            found = effects.where(pair=pair, layer=layer, site=site).records
            each: list[tuple[int | None, Sequence[int]]] = []
            for one in found:
                assert one.position is not None
                each.append((one.head, [one.position]))
            known = hooked.patched(base, (layer, site), seen.rows[layer, site][0], each).difference(right, wrong)
            worst = np.max([worst, *(abs(one.value - value) for one, value in zip(found, known, strict=True))])
    return worst, max(abs(one.difference) for one in effects.records)
