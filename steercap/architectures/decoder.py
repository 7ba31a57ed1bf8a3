"""Search for the decoder layers of a loaded model, its final norm and unembedding, and the logits of rows by them.

A model that reads images or sound holds a language model; the language model holds its layers in one list. On a
pipeline stage that list has a placeholder for each layer of the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from steercap.architectures.families.base import Family
from steercap.architectures.families.proved import fingerprint_of, name_of, same_code
from steercap.architectures.sites import SITES
from steercap.architectures.sites.streams import collapsed
from steercap.core.messages import Choose, NotCapturing, Project, Unembed, Unembedded
from steercap.core.spec import Point
from steercap.errors import UnsupportedModel

_LOG: Final = logging.getLogger(__name__)
#: Maximum number of rows that are unembedded at a time.
ROWS: Final = 64


@dataclass(frozen=True)
class Unembedding:
    """Functions from rows of the last layer, [n, hidden], to logits, [n, vocabulary], or a part of these.

    All ranks of a tensor-parallel group must call it together; the logits may be None on others than the first.

    Args:
        norm: the final norm.
        head: function from normed rows to logits.
    """

    norm: Callable[[torch.Tensor], torch.Tensor]
    head: Callable[[torch.Tensor], torch.Tensor | None]

    def logits(self, rows: torch.Tensor, *, normed: bool) -> Iterator[torch.Tensor]:
        """Yield logits, float32 [n, vocabulary], of at most `ROWS` rows at a time.

        Args:
            rows: rows [n, hidden].
            normed: True if the final norm has been applied to them.
        """
        for some in rows.split(ROWS):
            found = self.head(some if normed else self.norm(some))
            if found is not None:
                yield found.float().view(len(some), -1)


def unembedded(model: Unembedding | None, request: Unembed, device: torch.device) -> Unembedded | NotCapturing:
    """Answer an Unembed question on one rank.

    Args:
        model: the model's unembedding; None where the model's end is on another pipeline stage.
        request: the question.
        device: device where the model computes.
    """
    if model is None:
        return NotCapturing()
    tokens = slice(None) if request.tokens is None else list(request.tokens)
    found: list[tuple[torch.Tensor, ...]] = []
    for logits in model.logits(rows_of(request, device), normed=request.normed):
        best = logits.topk(min(request.top, logits.shape[1]))
        edges = (*logits.aminmax(dim=1), logits.std(dim=1), logits.logsumexp(dim=1))
        found.append((logits[:, tokens], best.indices, best.values, *edges))
    if not found:
        return NotCapturing()
    chosen, top, values, *of_all = (torch.cat(parts).cpu() for parts in zip(*found, strict=True))
    least, most, spread, total = (tuple(one.tolist()) for one in of_all)
    return Unembedded(_bytes(chosen), least, most, spread, total, _bytes(top), _bytes(values))


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def rows_of(request: Unembed | Project | Choose, device: torch.device) -> torch.Tensor:
    """Return the rows of a question as a tensor [count, width] on the device."""
    found = torch.frombuffer(bytearray(request.rows), dtype=getattr(torch, request.dtype))
    return found.view(request.count, -1).to(device)


@dataclass(frozen=True)
class Decoder:
    """Decoder layers of a loaded model.

    Args:
        model: the model that vLLM runs.
        path: dotted path of the list of layers in the model.
        parent: module that holds the list of layers; if it holds nothing else, the module above it.
        layers: layers of this pipeline stage, by their indices in the whole model.
    """

    model: Any
    path: str
    parent: nn.Module
    layers: Mapping[int, nn.Module]

    def holder(self, point: Point) -> nn.Module:
        """Return the module that a point's site is in: a layer, the module that holds the layers, or the model."""
        match SITES[point.site].within:
            case "model":
                model: nn.Module = self.model
                return model
            case "decoder":
                return self.parent
            case _:
                return self.layers[point.layer]

    @property
    def code(self) -> dict[str, str]:
        """Fingerprint of `forward` of each class of its layers, by the name that families use; see `same_code`."""
        return same_code({name_of(type(layer)): fingerprint_of(layer)} for layer in self.layers.values())

    def unembedding(self, family: Family, made: Callable[[torch.Tensor], Any], *, bare: bool = False) -> Unembedding:
        """Return the final norm and the head that makes logits, or, in a pooling model, its output for each token.

        Args:
            family: family of its layers.
            made: function from rows after the norm (and the modules and divisor after it) to logits; None on some
                ranks.
            bare: True if a norm may be missing after layers that no family knows, as in encoders.

        Raises:
            UnsupportedModel: no norm is found after the layers, where the family names none.
        """
        norm = [module for name in family.norm.split("|") if (module := self._module(name))][:1]
        after = [module for name in family.after_norm if (module := self._module(name))]
        if not norm and family.derived and not bare:
            children = ", ".join(name for name, _ in self.parent.named_children())
            raise UnsupportedModel(
                f"steercap finds no norm after the layers of {type(self.parent).__name__}, which holds {children}"
            )
        model: Any = self.model
        # A model within another, such as MiniCPM-V's, has the attribute, and the outer one does not divide by it.
        divisor = float(getattr(model, family.divisor, 1.0)) if family.divisor else 1.0

        def head(rows: torch.Tensor) -> torch.Tensor | None:
            hidden = _through(after, rows)
            logits: torch.Tensor | None = made(hidden if divisor == 1 else hidden / divisor)
            return logits

        def normed(rows: torch.Tensor) -> torch.Tensor:
            return _through([] if family.norms_late else norm, collapsed(self.parent, rows) if family.mhc else rows)

        return Unembedding(normed, head)

    def norms_late(self, family: Family, unembedding: Unembedding, rows: torch.Tensor) -> bool:
        """Check if making logits applies the final norm; all ranks of a tensor-parallel group must call it together.

        A head that fails on rows of zeros counts as one that does not: the proof at start computes with it too.
        """
        called: list[nn.Module] = []
        with torch.inference_mode(), ExitStack() as hooks:
            for module in filter(None, map(self._module, family.norm.split("|"))):
                hooks.callback(module.register_forward_pre_hook(lambda norm, _args: called.append(norm)).remove)
            try:
                unembedding.head(rows)
            except Exception as error:  # noqa: BLE001 -- of whatever model; a start needs no logits unless it proves them
                _LOG.warning("steercap cannot tell if making logits applies the final norm: %r", error)
        return bool(called)

    def _module(self, name: str) -> nn.Module | None:
        """Return a module beside the layers; None if there is none of that name."""
        found = getattr(self.parent, name, None)
        return found if isinstance(found, nn.Module) else None


def _through(modules: Sequence[Any], rows: torch.Tensor) -> torch.Tensor:
    """Apply modules to rows one after the other, bypassing their taps, which expect tokens of a request."""
    hidden: Any = rows
    for module in modules:
        found = module.forward(hidden)
        hidden = found[0] if isinstance(found, tuple) else found
    return hidden  # type: ignore[no-any-return]


def decoder_of(model: nn.Module, num_layers: int, present: range) -> Decoder:
    """Find the decoder layers of a loaded model.

    Args:
        model: model that vLLM has loaded.
        num_layers: number of layers of the whole model.
        present: indices of the layers that this pipeline stage holds.

    Raises:
        UnsupportedModel: there is no list of `num_layers` layers, or more than one.
    """
    inner: Any = getattr(model, "get_language_model", None)
    text: nn.Module = model if inner is None else inner()
    modules, outer = _lists(text, num_layers)
    within = getattr(text, "model", None)
    if len(outer) > 1 and isinstance(within, nn.Module):
        # With transformers' modules, vLLM's language model still lists the towers beside its `model`.
        inside = _lists(within, num_layers)
        modules, outer = inside if len(inside[1]) == 1 else (modules, outer)
    if len(outer) != 1:
        found = f"has {', '.join(outer)}" if outer else "has none"
        raise UnsupportedModel(
            f"steercap looks for one list of {num_layers} decoder layers, and {type(text).__name__} {found}"
        )
    (path,) = outer
    layers: Sequence[nn.Module] = modules[path]  # type: ignore[assignment]  # mypy knows no ModuleList as a sequence
    named = next((name for name, module in model.named_modules() if module is modules[path]), path)
    holder = path.rpartition(".")[0]
    if len(dict(modules[holder].named_children())) == 1:
        holder = holder.rpartition(".")[0]
    parent = modules[holder]
    return Decoder(model, named, parent, {index: layers[index] for index in present})


def _lists(text: nn.Module, num_layers: int) -> tuple[dict[str, nn.Module], list[str]]:
    """Return all modules of a language model, and the names of its outermost lists of `num_layers` modules."""
    modules = dict(text.named_modules())
    lists = {
        name: module
        for name, module in modules.items()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    }
    # Gemma 4 has a second list of the same layers, in an inner module.
    same: dict[tuple[int, ...], str] = {}
    for name in sorted(lists, key=lambda path: path.count(".")):
        same.setdefault(tuple(map(id, lists[name])), name)
    return modules, [name for name in same.values() if not any(name.startswith(f"{other}.") for other in lists)]
