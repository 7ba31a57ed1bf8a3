"""Decoder layers of a loaded model, its final norm and unembedding, and logits computed from captured rows.

A multimodal model contains a language model, which has its layers in one list. On a pipeline stage that list has
placeholders for the layers of other stages.
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
#: Maximum number of rows unembedded in one call, which bounds the memory of logits.
ROWS: Final = 64


@dataclass(frozen=True)
class Unembedding:
    """Final norm and head of a model: functions from last-layer rows, [n, hidden], to logits, [n, vocabulary].

    All ranks of a tensor-parallel group must call both together; the logits may be None on ranks but the first.

    Args:
        norm: function from rows to rows after the final norm.
        head: function from normed rows to logits, or None on some ranks.
    """

    norm: Callable[[torch.Tensor], torch.Tensor]
    head: Callable[[torch.Tensor], torch.Tensor | None]

    def logits(self, rows: torch.Tensor, *, normed: bool) -> Iterator[torch.Tensor]:
        """Yield logits, float32 [m, vocabulary], for consecutive blocks of m <= `ROWS` rows; nothing on ranks without.

        Args:
            rows: rows [n, hidden].
            normed: True if the final norm has been applied to them.
        """
        for some in rows.split(ROWS):
            found = self.head(some if normed else self.norm(some))
            if found is not None:
                yield found.float().view(len(some), -1)


def unembedded(model: Unembedding | None, request: Unembed, device: torch.device) -> Unembedded | NotCapturing:
    """Compute the answer to an `Unembed` message on one rank: logits of chosen tokens, top tokens and statistics.

    Args:
        model: the model's unembedding; None if it is on another pipeline stage, which gives NotCapturing.
        request: the message, with rows and the tokens wanted.
        device: the model's device.
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
    """Return the rows of a message as a tensor [count, width] of the message's dtype, on the device."""
    found = torch.frombuffer(bytearray(request.rows), dtype=getattr(torch, request.dtype))
    return found.view(request.count, -1).to(device)


@dataclass(frozen=True)
class Decoder:
    """Decoder layers of a loaded model, and the modules around them.

    Args:
        model: vLLM's model.
        path: dotted path of the list of layers in the model.
        parent: module that holds the list of layers; if it holds nothing else, the module above it.
        layers: layers of this pipeline stage, by their indices in the whole model.
    """

    model: Any
    path: str
    parent: nn.Module
    layers: Mapping[int, nn.Module]

    def holder(self, point: Point) -> nn.Module:
        """Return the module in which a point's site is: its layer, the module around the layers, or the model."""
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
        """Fingerprint of `forward` by class of the layers, such as "llama.LlamaDecoderLayer"; see `same_code`."""
        return same_code({name_of(type(layer)): fingerprint_of(layer)} for layer in self.layers.values())

    def unembedding(self, family: Family, made: Callable[[torch.Tensor], Any], *, bare: bool = False) -> Unembedding:
        """Return the model's final norm and head; a pooling model's head makes token outputs in place of logits.

        Args:
            family: family of the layers.
            made: function from rows after the norm, and after `family.after_norm` and `divisor`, to logits; None on
                some ranks.
            bare: True if the model may have no final norm, as encoders of unknown layers do.

        Raises:
            UnsupportedModel: the layers are of no known family, and no final norm is found.
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
        """Check if the head itself applies the final norm; all ranks of a tensor-parallel group must call it together.

        It runs the head on `rows`, [n, hidden]. A failure is logged and counts as False: the proof at start shows it.
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
        """Return a child module of `parent` by name; None if there is none."""
        found = getattr(self.parent, name, None)
        return found if isinstance(found, nn.Module) else None


def _through(modules: Sequence[Any], rows: torch.Tensor) -> torch.Tensor:
    """Apply modules in turn to rows [n, hidden] by `forward`, which bypasses their taps."""
    hidden: Any = rows
    for module in modules:
        found = module.forward(hidden)
        hidden = found[0] if isinstance(found, tuple) else found
    return hidden  # type: ignore[no-any-return]


def decoder_of(model: nn.Module, num_layers: int, present: range) -> Decoder:
    """Find the decoder layers of a loaded model.

    Args:
        model: the model that vLLM has loaded.
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
    """Return all modules of a language model by path, and the paths of its outermost lists of `num_layers` modules."""
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
