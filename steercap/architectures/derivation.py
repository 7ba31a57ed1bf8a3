"""Derivation of the sites of layers of no known family, from their modules' inputs and outputs in traced passes.

Names of modules play no part. In each pass a layer gets another random residual stream, of large or small rows, and
attention returns random rows; a module is a site if the equations that define the site hold in all passes:

- `resid_mid` is an input equal to `resid_pre` plus one output, `attn_out`, whose module calls attention; `mlp_out` is
  the output that `resid_post` adds to it. Where blocks run in parallel, `resid_post` is `resid_pre` plus both outputs;
- a block's output, or the input of a norm behind it, is that of its last projection, which reads `z` (attention's
  output) or `neurons`; a block's input is the stream, or the output of the stream's norm, and all that the block reads.

Bit-identical outputs count as one. A site for which several different outputs fit, or none, is refused with the errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, sqrt
from typing import Any, Final

import torch

from steercap.architectures.families.derived import FIELDS, NEEDS, Rows, Traced, TracedCall

#: Allowed error of a sum in units of the dtype's eps, and the smallest relative term that is told from rounding.
_SUM: Final = 4.0
_SEEN: Final = 16.0
#: Allowed deviation of a factor from 1: standard deviations of its rounding error, plus a constant.
_FACTOR: Final = 8.0
_EXACT: Final = 1e-6


@dataclass(frozen=True)
class Fit:
    """Least-squares fit of a stream plus modules' outputs, each times a factor, to a total.

    Args:
        factors: factor of each output; () if the outputs are linearly dependent.
        error: maximum error of a row, divided by the allowed rounding error; inf if an output is lost in rounding.
        factor_error: maximum distance of a factor from 1, divided by the allowed rounding error.
    """

    factors: tuple[float, ...]
    error: float
    factor_error: float


def fitted(total: Rows, base: Rows, added: Sequence[Rows]) -> Fit:
    """Fit factors so that `base` plus factors times `added` equals `total`, with rows scaled by their largest term."""
    eps = torch.finfo(total[0].dtype).eps
    joined = [torch.cat([part.double() for part in rows]) for rows in (total, base, *added)]
    sizes = torch.stack([part.norm(dim=1) for part in joined]).amax(0).clamp(min=1e-30)
    whole, before, *terms = (part / sizes[:, None] for part in joined)
    columns = torch.stack([term.flatten() for term in terms], dim=1)
    gram = columns.T @ columns
    if not bool(gram.isfinite().all()) or float(torch.linalg.matrix_rank(gram)) < len(terms):
        return Fit((), inf, inf)
    factors = torch.linalg.solve(gram, columns.T @ (whole - before).flatten())
    rest = (whole - before).flatten() - columns @ factors
    error = float(rest.view_as(whole).norm(dim=1).max()) / (_SUM * eps)
    seen = min(float((factor * term).norm(dim=1).max()) for factor, term in zip(factors, terms, strict=True))
    spread = eps * sqrt(len(whole) / whole.numel())
    allowed = [_FACTOR * spread / float(term.norm()) + _EXACT for term in terms]
    factor_error = max(abs(float(factor) - 1) / most for factor, most in zip(factors, allowed, strict=True))
    return Fit(tuple(map(float, factors)), error if seen >= _SEEN * eps else inf, factor_error)


def same(first: Rows, second: Rows) -> bool:
    """Check if two modules' rows are bit-identical in every pass; False for ()."""
    return bool(first) and len(first) == len(second) and all(map(torch.equal, first, second))


def close(first: Rows, second: Rows) -> bool:
    """Check if two modules' rows are equal up to rounding in every pass; False for () or differing shapes."""
    if not first or not second or first[0].shape != second[0].shape:
        return False
    allowed = _SUM * torch.finfo(first[0].dtype).eps
    pairs = [(left.double(), right.double()) for left, right in zip(first, second, strict=True)]
    return all(bool(((a - b).norm(dim=1) <= allowed * a.norm(dim=1)).all()) for a, b in pairs)


@dataclass
class Layer:
    """Derivation of the sites of one layer.

    Args:
        traced: the layer's rows and calls in all passes.
        head_dim: width of an attention head's output, for a layer that does not contain its attention module.

    Attributes:
        found: paths of modules within the layer, by field of `Family`; filled by `solve`.
        refused: reason why a site was not derived, by site; filled by `solve`.
    """

    traced: Traced
    head_dim: int
    found: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @cached_property
    def groups(self) -> list[list[TracedCall]]:
        """Calls whose outputs have the stream's shape, ordered by end; calls with identical outputs form one group."""
        groups: list[list[TracedCall]] = []
        for call in sorted(self.traced.calls, key=lambda call: call.end):
            if not call.outputs or call.outputs[0].shape != self.traced.before[0].shape:
                continue
            group = next((group for group in groups if same(call.outputs, group[0].outputs)), None)
            if group is None:
                groups.append([call])
            else:
                group.append(call)
        return groups

    def solve(self) -> None:
        """Derive all sites of the layer, and fill `found` and `refused`."""
        if not self.traced.before or not self.traced.after:
            self._refuse(tuple(FIELDS), "its stream was not finite, or not a row for each token, in a traced pass")
            return
        blocks = self._in_turn() or self._side_by_side()
        if blocks is None:
            self._refuse(("attn_out", "mlp_out", "resid_mid", "attn_in"), self._nearest())
        else:
            for site, (group, error, factor, read) in blocks.items():
                self._block(
                    site, group, read, "" if error <= 1 else f"it adds {factor:.6g} times the output of its module"
                )
        if any(map(_has_experts, self.traced.calls)):
            self._refuse(("router",), "no equation of the checks contains the logits of experts")
        for site, others in NEEDS.items():
            if site in self.refused:
                self._refuse(others, f"{site}, which would prove it, is refused")

    def _refuse(self, sites: Sequence[str], reason: str) -> None:
        for site in sites:
            self.refused.setdefault(site, reason)
            self.found.pop(FIELDS[site], None)

    def _nearest(self) -> str:
        before, after = self.traced.before, self.traced.after
        tried = [(fitted(after, before, [group[0].outputs]).error, group[-1].path) for group in self.groups]
        tried += [
            (fitted(after, before, [one[0].outputs, other[0].outputs]).error, f"{one[-1].path} + {other[-1].path}")
            for number, one in enumerate(self.groups)
            for other in self.groups[number + 1 :]
        ]
        error, path = min(tried, default=(inf, "nothing"))
        return (
            f"no outputs of its modules add up to its residual stream; the nearest is {path}, off by {error:.3g} times "
            "the error that rounding allows"
        )

    def _in_turn(self) -> dict[str, Any] | None:
        """Return (group, factor error, factor, stream read) by site if block two reads block one's sum, or None."""
        before, after = self.traced.before, self.traced.after
        readers: list[tuple[TracedCall, int, Fit]] = []
        for call in sorted(self.traced.calls, key=lambda call: call.begin):
            if not call.stream or call.stream[0].shape != before[0].shape or close(call.stream, before):
                continue
            for number, group in enumerate(self.groups):
                if group[0].end < call.begin:
                    fit = fitted(call.stream, before, [group[0].outputs])
                    readers += [(call, number, fit)] if fit.error <= 1 else []
        firsts = {number for _, number, _ in readers}
        if len(firsts) != 1:
            return None
        reader, number, fit = readers[0]
        later = [(group, fitted(after, reader.stream, [group[0].outputs])) for group in self.groups]
        seconds = [(group, more) for group, more in later if group[0].begin >= reader.begin and more.error <= 1]
        if len(seconds) != 1 or not self._attends(self.groups[number]) or self._attends(seconds[0][0]):
            return None
        self.found["resid_mid"] = reader.path
        (second, more), first = seconds[0], self.groups[number]
        return {
            "attn_out": (first, fit.factor_error, fit.factors[0], before),
            "mlp_out": (second, more.factor_error, more.factors[0], reader.stream),
        }

    def _side_by_side(self) -> dict[str, Any] | None:
        """Return the same as `_in_turn` for two parallel blocks, which both read the layer's input; None if none."""
        before, after, groups = self.traced.before, self.traced.after, self.groups
        pairs = [
            (one, other, fit)
            for number, one in enumerate(groups)
            for other in groups[number + 1 :]
            if (fit := fitted(after, before, [one[0].outputs, other[0].outputs])).error <= 1
        ]
        if len(pairs) != 1:
            return None
        (*both, fit), factor_error = pairs[0], pairs[0][2].factor_error
        attending = [self._attends(group) for group in both]
        if sum(attending) != 1:
            return None
        first = attending.index(True)
        self._refuse(("resid_mid",), "no module reads the stream after attention was added and before the rest is")
        return {
            "attn_out": (both[first], factor_error, fit.factors[first], before),
            "mlp_out": (both[1 - first], factor_error, fit.factors[1 - first], before),
        }

    def _sources(self, group: Sequence[TracedCall]) -> Iterator[TracedCall]:
        """Yield the calls of a group, and calls whose output is the input of a norm in the group."""
        yield from group
        for norm in group:
            if not norm.linear and not any(norm.module.children()):
                yield from (call for call in self.traced.calls if call not in group and same(call.outputs, norm.inputs))

    def _attends(self, group: Sequence[TracedCall]) -> bool:
        return any(call.covers(one) for call in self._sources(group) for one in self.traced.attended)

    def _stateful(self, group: Sequence[TracedCall]) -> str:
        """Return the class name of a block's module with a state other than attention's, as Mamba has; "" if none."""
        attended = {id(one.module) for one in self.traced.attended}
        held = (c.module for call in self._sources(group) for c in self.traced.calls if c is call or call.covers(c))
        stateful = (module for module in held if hasattr(module, "get_kv_cache_spec") and id(module) not in attended)
        return next((type(module).__name__ for module in stateful), "")

    def _block(self, site: str, group: Sequence[TracedCall], stream: Rows, wrong: str) -> None:
        """Derive a block's sites from the calls of its output; `wrong` is a reason to refuse that output, or ""."""
        attends = site == "attn_out"
        if kind := self._stateful(group):
            others = ("attn_in", "z", "q", "k", "v") if attends else ("mlp_in", "neurons")
            return self._refuse((site, *others), f"its block holds a {kind}, which mixes tokens beside attention")
        if wrong:
            self._refuse((site,), wrong)
        else:
            self.found[site] = max(group, key=lambda call: call.end).path
        sources = [call for call in self._sources(group) if self._attends([call]) == attends]
        outer = min(sources, key=lambda call: call.begin, default=None)
        inside = "attn_in" if attends else "mlp_in"
        entry = None if outer is None else self._entry(outer, stream)
        if entry is None:
            self._refuse((inside,), "no single module of the block reads the output of the stream's norm")
        else:
            self.found[inside] = entry.path
        self._projection(group, outer, entry, attends=attends)
        if attends and not wrong:
            self._attention()
        return None

    def _entry(self, outer: TracedCall, stream: Rows) -> TracedCall | None:
        """Return the call that reads the input of the block with outermost call `outer`; None if that is ambiguous."""
        outside = [call for call in self.traced.calls if not outer.covers(call)]
        norms = [c for c in outside if not c.linear and close(c.stream, stream) and c is not outer]
        norms = [c for c in norms if c.outputs and c.outputs[0].shape == stream[0].shape and c.end < outer.begin]
        for norm in norms:
            readers = [c for c in outside if same(c.inputs, norm.outputs) and norm.end < c.begin <= outer.begin]
            outermost = [c for c in readers if not any(other.covers(c) for other in readers)]
            if outer in outermost:
                return outer
            if outer.linear and len(outermost) == 1:
                return outermost[0]
        within = [outer, *(call for call in self.traced.calls if outer.covers(call))]
        normed = any(not c.linear and same(c.inputs, outer.inputs) and not any(c.module.children()) for c in within)
        projected = any(c.linear and same(c.inputs, outer.inputs) for c in within)  # or a norm in code comes between
        return outer if close(outer.inputs, stream) and projected and not normed and not norms else None

    def _projection(
        self, group: Sequence[TracedCall], outer: TracedCall | None, entry: TracedCall | None, *, attends: bool
    ) -> None:
        """Derive the input of the block's last projection: `z` or `neurons`."""
        site = "z" if attends else "neurons"
        linear = [call for call in self._sources(group) if call.linear and call.inputs]
        last = [call for call in linear if not any(other.covers(call) for other in linear)]
        if len(last) != 1:
            return self._refuse((site,), f"{len(last)} linear modules have the output that the block adds")
        read = last[0].inputs
        if attends:
            attended = [one.outputs for one in self.traced.attended if outer and outer.covers(one)]
            if len(attended) != 1 or not same(attended[0], read):
                return self._refuse((site,), "its last projection does not read the output of attention")
            module: Any = next(one.module for one in self.traced.attended if outer and outer.covers(one))
            named = any(call.module is module for call in self.traced.calls)
            if not named and getattr(module, "head_size_v", self.head_dim) != self.head_dim:
                return self._refuse((site,), f"its heads are not of {self.head_dim} elements")
        elif any(call.linear and same(call.outputs, read) for call in self.traced.calls):
            return self._refuse(
                (site,), "its last projection reads the output of another projection, with no activation between"
            )
        elif last[0] is entry or any(_has_experts(call) for call in self.traced.calls if outer and outer.covers(call)):
            return self._refuse((site,), "before its last projection come experts, or no module")
        self.found[FIELDS[site]] = last[0].path
        return None

    def _attention(self) -> None:
        """Derive the attention module that is called with queries, keys and values."""
        calls = {id(call.module): call for call in self.traced.calls}
        inside = [calls[id(one.module)] for one in self.traced.attended if id(one.module) in calls]
        if len(self.traced.attended) != 1 or len(inside) != 1 or not hasattr(inside[0].module, "head_size_v"):
            self._refuse(
                ("q", "k", "v"), "its layer does not call exactly one attention module of vLLM that hooks can follow"
            )
        else:
            self.found["attention"] = inside[0].path


def _has_experts(call: TracedCall) -> bool:
    """Check if a called module is, or contains, vLLM's experts, whose modules may be called without hooks."""
    kinds = (type(module).__name__ for module in call.module.modules())
    return hasattr(call.module, "w13_weight") or any("FusedMoE" in kind or "MoERunner" in kind for kind in kinds)
