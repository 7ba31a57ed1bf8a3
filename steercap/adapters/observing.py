"""Row shapes of modules' inputs and outputs, observed in one forward pass before taps are installed.

The pass has a few tokens and, as in vLLM's own profiling, no attention metadata; it is not compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from vllm import forward_context
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from steercap.adapters.releases import require
from steercap.architectures.decoder import Decoder
from steercap.architectures.sites import SITES, ModuleSite
from steercap.architectures.sites.base import RowShape, read_by
from steercap.core.spec import Point
from steercap.errors import UnsupportedModel

#: Number of tokens of the pass; no dimension of a model has this size, so it identifies the token axis.
TOKENS: Final = 7
_End: TypeAlias = "tuple[nn.Module, str]"


class Observations:
    """Callable that returns the row shape of an armed module's input or output.

    The constructor runs one forward pass of the runner's loaded model, which observes the modules of `armed` points.

    Raises:
        UnsupportedModel: a point's path leads to no module, or into a list of layers other than the decoder's.
    """

    def __init__(self, runner: Any, decoder: Decoder, armed: Iterable[Point]) -> None:
        self._ranks = get_tp_group().world_size
        self._seen: dict[_End, list[Any]] = {end: [] for end in ends_of(decoder, armed)}  # of each call
        if self._seen:
            self._run(runner, decoder)

    def __call__(self, module: nn.Module, end: str) -> RowShape:
        """Return the shape of one token's row of a module's `end`, "input" or "output".

        Raises:
            UnsupportedModel: the pass did not call the module exactly once with one floating-point row per token.
        """
        tensors = self._seen[module, end]
        verb = "reads" if end == "input" else "gives"
        if not tensors:
            raise UnsupportedModel(
                "no forward pass calls the module; a site must be a module that is called with all tokens"
            )
        if len(tensors) > 1:
            raise UnsupportedModel(f"a forward pass calls the module {len(tensors)} times; a site must be called once")
        tensor = tensors[0]
        if not (isinstance(tensor, torch.Tensor) and tensor.is_floating_point()):
            raise UnsupportedModel(f"it {verb} {type(tensor).__name__}, where a floating-point tensor must come first")
        whole = tuple(tensor.shape)
        shape = whole[2:] if whole[:2] == (1, TOKENS) else whole[1:] if whole[:1] == (TOKENS,) else ()
        if not shape:
            raise UnsupportedModel(
                f"it {verb} a tensor of shape {list(whole)} for {TOKENS} tokens, not one row per token"
            )
        shards = self._shards(module, end, tensor)
        return RowShape((shape[0] * shards, *shape[1:]), shards, str(tensor.dtype).removeprefix("torch."))

    def _shards(self, module: nn.Module, end: str, tensor: torch.Tensor) -> int:
        """Return the number of tensor-parallel ranks over which rows are split; 1 if all ranks have equal rows."""
        if self._ranks == 1:
            return 1
        parts = get_tp_group().all_gather(tensor.reshape(1, -1).contiguous(), dim=0)
        if bool((parts == parts[:1]).all()) and bool(parts.any()):  # zeros on all of them prove nothing
            return 1
        linear: Any = getattr(module, "base_layer", module)
        whole, part = (getattr(linear, name, None) for name in (f"{end}_size", f"{end}_size_per_partition"))
        fused = end == "output" and len(getattr(linear, "output_partition_sizes", [0])) > 1
        if whole is None or part is None or whole != part * self._ranks or fused:
            raise UnsupportedModel(
                f"the {self._ranks} ranks hold different rows there, and their {type(linear).__name__} does not say "
                "how to join them into whole rows"
            )
        return int(self._ranks)

    def _run(self, runner: Any, decoder: Decoder) -> None:
        """Run the pass, recording the modules' inputs and outputs."""
        generator = torch.Generator().manual_seed(get_tp_group().rank_in_group)
        with ExitStack() as hooks:
            for module in decoder.model.modules():
                if attends(module):
                    hooks.callback(module.register_forward_hook(partial(_drawn, generator)).remove)
            for (module, end), seen in self._seen.items():
                hooks.callback(_watch(module, end, seen).remove)
            run_pass(runner, decoder.model)


def attends(module: Any) -> bool:
    """Check if a module is an attention layer of vLLM."""
    return all(hasattr(module, name) for name in ("impl", "kv_cache_dtype"))


def run_pass(runner: Any, model: Any) -> None:
    """Run a forward pass of `TOKENS` tokens as vLLM's profiling does: uncompiled, without attention metadata."""
    require("forward_context", forward_context)
    config = runner.vllm_config
    ids = torch.ones(TOKENS, dtype=torch.int32, device=runner.device)
    positions = torch.arange(TOKENS, device=runner.device)
    if config.model_config.uses_mrope:
        positions = positions.expand(3, -1).contiguous()
    first = get_pp_group().is_first_rank
    carried = None if first else model.make_empty_intermediate_tensors(TOKENS, runner.dtype, runner.device)
    with (
        torch.inference_mode(),
        forward_context.set_forward_context(None, config, num_tokens=TOKENS, skip_compiled=True),
    ):
        model(input_ids=ids if first else None, positions=positions, intermediate_tensors=carried)


def ends_of(decoder: Decoder, armed: Iterable[Point]) -> list[_End]:
    """Return the armed modules in the layers of this pipeline stage, each with "input" or "output".

    Raises:
        UnsupportedModel: a point's path leads to no module, or belongs to a list of layers other than the decoder's.
    """
    found = []
    for point in armed:
        site = SITES[point.site]
        if not isinstance(site, ModuleSite) or point.layer not in decoder.layers:
            continue
        if site.layers and site.layers != decoder.path:
            raise UnsupportedModel(f"{point} is not in this model, whose layers are {decoder.path}")
        found.append((_module_at(point, decoder.holder(point), site.path), site.end))
    return found


def _module_at(point: Point, within: nn.Module, path: str) -> nn.Module:
    """Return the submodule of `within` at `path`, for a point.

    Raises:
        UnsupportedModel: there is no such submodule; the message names the first missing part and its siblings.
    """
    module = within
    for name in path.split("."):
        children = dict(module.named_children())
        if name not in children:
            known = f"which holds {', '.join(children)}" if children else "which holds none"
            raise UnsupportedModel(f"{point} is not in this model: no {name!r} in a {type(module).__name__}, {known}")
        module = children[name]
    return module


def _drawn(generator: torch.Generator, _module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
    """Replace attention's output, uninitialised without metadata, by normal random numbers, different on each rank."""
    return torch.randn(output.shape, generator=generator).to(output)


def _copy(tensor: Any) -> Any:
    return tensor.clone() if isinstance(tensor, torch.Tensor) else tensor


def _watch(module: nn.Module, end: str, tensors: list[Any]) -> Any:
    if end == "output":

        def gave(_module: nn.Module, _args: Any, output: Any) -> None:
            tensors.append(_copy(output[0] if isinstance(output, tuple) and output else output))

        return module.register_forward_hook(gave)

    at, name = read_by(module)

    def read(_module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tensors.append(_copy(args[at] if at < len(args) else kwargs.get(name)))

    return module.register_forward_pre_hook(read, with_kwargs=True)
