"""Traced forward passes of layers of no known family, from which `architectures.derivation` derives their sites.

The passes run before taps are installed, like that of `observing`. In each, every layer gets a random residual stream,
and attention returns random rows. Two further passes vary the stream and fix the rows at the derived block inputs:
queries, keys, values and `mlp_out` must then be equal in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from typing import Any, Final

import torch
from torch import nn

from steercap.adapters.observing import TOKENS, attends, run_pass
from steercap.architectures.decoder import Decoder
from steercap.architectures.derivation import Layer
from steercap.architectures.families.base import Family, arguments_of, located
from steercap.architectures.families.derived import FIELDS, Traced, TracedCall, joined, reading_more
from steercap.architectures.sites.base import of_input, read_by
from steercap.architectures.sites.residual import stream_and_residual, taken_by

#: Standard deviations of the stream and of attention's rows in each pass. A block's output lost in the rounding of one
#: pass shows in another, as do further terms that are added to the stream.
_SCALES: Final = ((1.0, 1.0), (0.05, 1.0), (0.05, 0.05))


def derived(runner: Any, decoder: Decoder, family: Family, head_dim: int) -> tuple[Family, dict[str, str]]:
    """Derive the sites of a model's layers from traced passes, starting from a family that knows only the stream.

    Args:
        runner: vLLM's model runner, with its model.
        decoder: decoder of the model.
        family: family of the layers with the stream's sites alone, see `families.derived`.
        head_dim: width of one attention head's output, by the configuration.

    Returns:
        The family with the derived sites; and, by site, the reason why it was not derived. If a pass fails, none is.
    """
    try:
        return _derived(runner, decoder, family, head_dim)
    except Exception as error:  # noqa: BLE001 -- such layers still have their stream, which needs no pass
        return family, dict.fromkeys(FIELDS, f"a traced pass failed: {type(error).__name__}: {str(error)[:500]}")


def _derived(runner: Any, decoder: Decoder, family: Family, head_dim: int) -> tuple[Family, dict[str, str]]:
    parallel = runner.vllm_config.parallel_config
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
        reason = "derived on one rank alone: tensor_parallel_size=1, pipeline_parallel_size=1"  # ranks could differ
        return family, dict.fromkeys(FIELDS, reason)
    passes = [_TracedPass(decoder, family, seed, scales) for seed, scales in enumerate(_SCALES)]
    for one in passes:
        one.run(runner)
    solved = {}
    for index in decoder.layers:
        layer = Layer(_traced([one.layers.pop(index) for one in passes]), head_dim)
        layer.solve()
        solved[index] = layer.found, layer.refused
    found, refused = joined(decoder.layers, solved, family)
    seeds = range(len(_SCALES), len(_SCALES) + 2)
    passes = [_TracedPass(decoder, found, seed, _SCALES[0], blocks=True) for seed in seeds]
    for one in passes:
        one.run(runner)
    for index, module in decoder.layers.items():
        wrong = reading_more(_traced([one.layers.pop(index) for one in passes]), module, found)
        refused |= {site: f"at layer {index}: {reason}" for site, reason in wrong.items() if getattr(found, site)}
        gone: dict[str, Any] = dict.fromkeys(wrong, "")
        found = replace(found, **gone)
    return found, refused


class _LayerTrace:
    """One layer's record in one pass: its stream, and calls [path, module, begin, end, input, stream, output]."""

    def __init__(self) -> None:
        self.before: torch.Tensor | None = None
        self.after: torch.Tensor | None = None
        self.calls: list[list[Any]] = []
        self.attended: list[list[Any]] = []


class _TracedPass:
    """Forward pass with a random stream and random attention rows, which records the tensors of each layer.

    Args:
        decoder: decoder of the model.
        family: family of the layers, with at least the stream's sites.
        seed: seed of the random rows.
        scales: standard deviations of the stream and of attention's rows.
        blocks: True to overwrite `attn_in` and `mlp_in` with rows that are equal in all such passes.

    Attributes:
        layers: record of each layer, by layer index.
    """

    def __init__(
        self, decoder: Decoder, family: Family, seed: int, scales: tuple[float, float], *, blocks: bool = False
    ) -> None:
        self._blocks = blocks
        self._decoder, self._family = decoder, family
        self._scale, self._attended_scale = scales
        self._stream = torch.Generator().manual_seed(seed)
        self._heads = torch.Generator().manual_seed(1 + seed)
        self._clock = count()
        self._now: _LayerTrace | None = None
        self.layers = {index: _LayerTrace() for index in decoder.layers}

    def run(self, runner: Any) -> None:
        """Run the pass on a model runner's model, and fill `layers`."""
        with ExitStack() as hooks:
            for module in runner.vllm_config.compilation_config.static_forward_context.values():
                if attends(module):
                    hooks.callback(self._replace(module))
            for index, layer in self._decoder.layers.items():
                self._watch(layer, self.layers[index], hooks)
            run_pass(runner, self._decoder.model)

    def _replace(self, module: Any) -> Callable[[], None]:
        """Make an attention module return random rows; return a function that undoes it."""
        plain, own = module.forward, vars(module).get("forward")

        def forward(*args: Any, **kwargs: Any) -> Any:
            begin = next(self._clock)
            made = plain(*args, **kwargs)
            drawn = (torch.randn(made.shape, generator=self._heads) * self._attended_scale).to(made)
            if self._now is not None:
                read = [rows for one in (*args, *kwargs.values()) if (rows := _rows(one)) is not None]
                taken = torch.cat(read, dim=1) if read else None
                self._now.attended.append(["", module, begin, next(self._clock), taken, None, _rows(drawn)])
            return drawn

        module.forward = forward
        return lambda: delattr(module, "forward") if own is None else setattr(module, "forward", own)

    def _watch(self, layer: nn.Module, layer_trace: _LayerTrace, hooks: ExitStack) -> None:
        """Hook a layer and all modules in it, so that the pass fills `layer_trace`."""
        terms, names = taken_by(layer, self._family), arguments_of(layer)
        replaced = [self._family.hidden_input, self._family.residual_input]

        def begin(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            for name in replaced:
                if isinstance(given.get(name), torch.Tensor):
                    drawn = torch.randn(given[name].shape, generator=self._stream) * self._scale
                    given[name] = drawn.to(given[name])
            args = tuple(given[name] for name in names[: len(args)])
            kwargs = {name: given[name] for name in kwargs}
            self._now, layer_trace.before = layer_trace, _sum(*terms(args, kwargs))
            return args, kwargs

        def end(_module: nn.Module, _args: Any, output: Any) -> None:
            at = self._family.residual_output
            many = isinstance(output, tuple)
            residual = output[at] if many and at is not None else None
            self._now, layer_trace.after = None, _sum(output[0] if many else output, residual)

        inputs = (self._family.attn_in, self._family.mlp_in) if self._blocks else ()
        for path in filter(None, inputs):
            try:
                module = layer.get_submodule(located(layer, path))
            except AttributeError:
                continue
            hook = of_input(module, _same)
            hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for path, module in layer.named_modules():
            if path:
                self._watch_module(path, module, layer_trace, hooks)
        hooks.callback(layer.register_forward_pre_hook(begin, with_kwargs=True).remove)
        hooks.callback(layer.register_forward_hook(end).remove)

    def _watch_module(self, path: str, module: nn.Module, layer_trace: _LayerTrace, hooks: ExitStack) -> None:
        at, name = read_by(module)
        terms = stream_and_residual(module)
        open_calls: list[list[Any]] = []

        def begin(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            taken = args[at] if at < len(args) else kwargs.get(name)
            stream = _sum(*terms(args, kwargs)) if taken is not None else None
            call = [path, module, next(self._clock), -1, _rows(taken), stream, None]
            layer_trace.calls.append(call)
            open_calls.append(call)

        def end(_module: nn.Module, _args: Any, output: Any) -> None:
            if open_calls:
                call = open_calls.pop()
                call[3], call[6] = next(self._clock), _rows(output[0] if isinstance(output, tuple) else output)

        hooks.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
        hooks.callback(module.register_forward_hook(end).remove)


def _same(_module: nn.Module, rows: torch.Tensor) -> None:
    """Overwrite a block's input in place by random rows that are equal in each pass."""
    rows.copy_(torch.randn(rows.shape, generator=torch.Generator().manual_seed(0)))


def _rows(tensor: Any) -> torch.Tensor | None:
    """Copy a tensor to the host as rows [TOKENS, width]; None if it has not one row per token, or is not finite."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.dim() < 2:
        return None
    tensor = tensor[0] if tensor.shape[:2] == (1, TOKENS) else tensor
    if tensor.shape[0] != TOKENS or tensor.dim() < 2:
        return None
    rows = tensor.detach().flatten(1).cpu().clone()
    return rows if bool(rows.isfinite().all()) else None


def _sum(hidden: Any, residual: Any) -> torch.Tensor | None:
    """Return the sum of a stream's rows and of the residual's beside it; None if either is not rows."""
    first, second = _rows(hidden), _rows(residual)
    if first is None or second is None or first.shape != second.shape:
        return first if residual is None or not isinstance(residual, torch.Tensor) else None
    return first + second


def _traced(records: list[_LayerTrace]) -> Traced:
    """Combine one layer's records of all passes; modules that were not called exactly once in each are left out."""
    once = [Counter(call[0] for call in record.calls) for record in records]
    by_path: list[Mapping[str, list[Any]]] = [{call[0]: call for call in record.calls} for record in records]
    paths = [path for path in by_path[0] if all(counts[path] == 1 for counts in once)]
    calls = [_call([calls[path] for calls in by_path]) for path in paths]
    even = all(len(record.attended) == len(records[0].attended) for record in records)
    attended = (
        [_call(list(pair)) for pair in zip(*(record.attended for record in records), strict=True)] if even else []
    )
    return Traced(
        _every([record.before for record in records]),
        _every([record.after for record in records]),
        tuple(calls),
        tuple(attended),
    )


def _call(calls: list[list[Any]]) -> TracedCall:
    path, module, begin, end = calls[0][:4]
    return TracedCall(path, module, begin, end, *(_every([call[place] for call in calls]) for place in (4, 5, 6)))


def _every(tensors: list[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    """Return the tensors of all passes; () if a pass has none."""
    found = tuple(tensor for tensor in tensors if tensor is not None)
    return found if len(found) == len(tensors) else ()
