"""Derivation of the sites of layers that no family knows, from what their modules read and return in traced passes.

Nothing is taken from a module's name. In each pass a layer gets another random stream, large and small, and attention
returns random rows; a site is found where the equations of its definition close in all of them:

- `resid_mid` is read where a module takes `resid_pre` and one module's output; that output, which attention reaches, is
  `attn_out`. `mlp_out` is the one that `resid_post` adds to it; side by side, the pair that `resid_post` adds;
- a block's last projection gives its output, or what a norm behind the block reads; `z` is what attention returned;
- a block's input is read by all of the block behind the norm of the stream, or the stream itself.

Outputs that are equal bit for bit are one; where two others close, or none does, the site is refused with the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, sqrt
from typing import Any, Final

import torch

from steercap.architectures.families.derived import FIELDS, NEEDS, Rows, Traced, TracedCall

#: Roundings to the rows' dtype in a sum, and least part of a term in it that can be told from them.
_SUM: Final = 4.0
_SEEN: Final = 16.0
#: Standard deviations of rounding in a factor, and its least error.
_FACTOR: Final = 8.0
_EXACT: Final = 1e-6


@dataclass(frozen=True)
class Fit:
    """Closest sum of a stream and modules' outputs, each times a factor.

    Args:
        factors: factors of the outputs.
        error: greatest error of a row, over what rounding allows; inf where an output is too small to be seen.
        apart: greatest distance of a factor from 1, over what rounding allows.
    """

    factors: tuple[float, ...]
    error: float
    apart: float


def fitted(total: Rows, base: Rows, added: Sequence[Rows]) -> Fit:
    """Find the factors with which `added` best make up `total` less `base`, each row relative to its largest term."""
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
    apart = max(abs(float(factor) - 1) / most for factor, most in zip(factors, allowed, strict=True))
    return Fit(tuple(map(float, factors)), error if seen >= _SEEN * eps else inf, apart)


def same(first: Rows, second: Rows) -> bool:
    """Check if two tensors are equal bit for bit in every pass."""
    return bool(first) and len(first) == len(second) and all(map(torch.equal, first, second))


def close(first: Rows, second: Rows) -> bool:
    """Check if two tensors are equal but for rounding in every pass."""
    if not first or not second or first[0].shape != second[0].shape:
        return False
    allowed = _SUM * torch.finfo(first[0].dtype).eps
    pairs = [(left.double(), right.double()) for left, right in zip(first, second, strict=True)]
    return all(bool(((a - b).norm(dim=1) <= allowed * a.norm(dim=1)).all()) for a, b in pairs)


@dataclass
class Layer:
    """Derivation of the sites of one layer.

    Args:
        traced: the layer in the passes.
        head_dim: elements of an attention head's output, where its attention module is not in the layer.

    Attributes:
        found: paths of modules, by field of `Family`.
        refused: reasons, by site.
    """

    traced: Traced
    head_dim: int
    found: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @cached_property
    def groups(self) -> list[list[TracedCall]]:
        """Calls whose outputs are rows of the stream's width, those with equal outputs together, in order."""
        groups: list[list[TracedCall]] = []
        for call in sorted(self.traced.calls, key=lambda call: call.end):
            if not call.given or call.given[0].shape != self.traced.before[0].shape:
                continue
            group = next((group for group in groups if same(call.given, group[0].given)), None)
            if group is None:
                groups.append([call])
            else:
                group.append(call)
        return groups

    def solve(self) -> None:
        """Derive all sites; see `found` and `refused`."""
        if not self.traced.before or not self.traced.after:
            self._refuse(tuple(FIELDS), "its stream was not finite, or not a row for each token, in a traced pass")
            return
        blocks = self._in_turn() or self._side_by_side()
        if blocks is None:
            self._refuse(("attn_out", "mlp_out", "resid_mid", "attn_in"), self._nearest())
        else:
            for site, (group, apart, factor, read) in blocks.items():
                self._block(
                    site, group, read, "" if apart <= 1 else f"it adds {factor:.6g} times the output of its module"
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
        tried = [(fitted(after, before, [group[0].given]).error, group[-1].path) for group in self.groups]
        tried += [
            (fitted(after, before, [one[0].given, other[0].given]).error, f"{one[-1].path} + {other[-1].path}")
            for number, one in enumerate(self.groups)
            for other in self.groups[number + 1 :]
        ]
        error, path = min(tried, default=(inf, "nothing"))
        return (
            f"no outputs of its modules add up to its residual stream; the nearest is {path}, off by {error:.3g} times "
            "the error that rounding allows"
        )

    def _in_turn(self) -> dict[str, Any] | None:
        """Return the groups of both blocks of a layer whose second block reads what the first has added to."""
        before, after = self.traced.before, self.traced.after
        readers: list[tuple[TracedCall, int, Fit]] = []
        for call in sorted(self.traced.calls, key=lambda call: call.begin):
            if not call.stream or call.stream[0].shape != before[0].shape or close(call.stream, before):
                continue
            for number, group in enumerate(self.groups):
                if group[0].end < call.begin:
                    fit = fitted(call.stream, before, [group[0].given])
                    readers += [(call, number, fit)] if fit.error <= 1 else []
        firsts = {number for _, number, _ in readers}
        if len(firsts) != 1:
            return None
        reader, number, fit = readers[0]
        later = [(group, fitted(after, reader.stream, [group[0].given])) for group in self.groups]
        seconds = [(group, more) for group, more in later if group[0].begin >= reader.begin and more.error <= 1]
        if len(seconds) != 1 or not self._attends(self.groups[number]) or self._attends(seconds[0][0]):
            return None
        self.found["resid_mid"] = reader.path
        (second, more), first = seconds[0], self.groups[number]
        return {
            "attn_out": (first, fit.apart, fit.factors[0], before),
            "mlp_out": (second, more.apart, more.factors[0], reader.stream),
        }

    def _side_by_side(self) -> dict[str, Any] | None:
        """Return the groups of two blocks that both read the layer's stream."""
        before, after, groups = self.traced.before, self.traced.after, self.groups
        pairs = [
            (one, other, fit)
            for number, one in enumerate(groups)
            for other in groups[number + 1 :]
            if (fit := fitted(after, before, [one[0].given, other[0].given])).error <= 1
        ]
        if len(pairs) != 1:
            return None
        (*both, fit), apart = pairs[0], pairs[0][2].apart
        attending = [self._attends(group) for group in both]
        if sum(attending) != 1:
            return None
        first = attending.index(True)
        self._refuse(("resid_mid",), "no module reads the stream after attention was added and before the rest is")
        return {
            "attn_out": (both[first], apart, fit.factors[first], before),
            "mlp_out": (both[1 - first], apart, fit.factors[1 - first], before),
        }

    def _sources(self, group: Sequence[TracedCall]) -> Iterator[TracedCall]:
        """Yield the calls of a group, and those whose output a norm of the group reads."""
        yield from group
        for norm in group:
            if not norm.linear and not any(norm.module.children()):
                yield from (call for call in self.traced.calls if call not in group and same(call.given, norm.taken))

    def _attends(self, group: Sequence[TracedCall]) -> bool:
        return any(call.holds(one) for call in self._sources(group) for one in self.traced.attended)

    def _stateful(self, group: Sequence[TracedCall]) -> str:
        """Return the class of a module in a block that keeps a state besides attention's, "" if there is none."""
        attended = {id(one.module) for one in self.traced.attended}
        held = (c.module for call in self._sources(group) for c in self.traced.calls if c is call or call.holds(c))
        stateful = (module for module in held if hasattr(module, "get_kv_cache_spec") and id(module) not in attended)
        return next((type(module).__name__ for module in stateful), "")

    def _block(self, site: str, group: Sequence[TracedCall], stream: Rows, wrong: str) -> None:
        """Derive one block's sites, given the calls of its output and the stream that it reads."""
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
        """Return the call of a block that reads the block's input; None if that cannot be told."""
        outside = [call for call in self.traced.calls if not outer.holds(call)]
        norms = [c for c in outside if not c.linear and close(c.stream, stream) and c is not outer]
        norms = [c for c in norms if c.given and c.given[0].shape == stream[0].shape and c.end < outer.begin]
        for norm in norms:
            readers = [c for c in outside if same(c.taken, norm.given) and norm.end < c.begin <= outer.begin]
            outermost = [c for c in readers if not any(other.holds(c) for other in readers)]
            if outer in outermost:
                return outer
            if outer.linear and len(outermost) == 1:
                return outermost[0]
        within = [outer, *(call for call in self.traced.calls if outer.holds(call))]
        normed = any(not c.linear and same(c.taken, outer.taken) and not any(c.module.children()) for c in within)
        projected = any(c.linear and same(c.taken, outer.taken) for c in within)  # or a norm in code comes between
        return outer if close(outer.taken, stream) and projected and not normed and not norms else None

    def _projection(
        self, group: Sequence[TracedCall], outer: TracedCall | None, entry: TracedCall | None, *, attends: bool
    ) -> None:
        """Derive what the block's last projection reads."""
        site = "z" if attends else "neurons"
        linear = [call for call in self._sources(group) if call.linear and call.taken]
        last = [call for call in linear if not any(other.holds(call) for other in linear)]
        if len(last) != 1:
            return self._refuse((site,), f"{len(last)} linear modules have the output that the block adds")
        read = last[0].taken
        if attends:
            attended = [one.given for one in self.traced.attended if outer and outer.holds(one)]
            if len(attended) != 1 or not same(attended[0], read):
                return self._refuse((site,), "its last projection does not read the output of attention")
            module: Any = next(one.module for one in self.traced.attended if outer and outer.holds(one))
            named = any(call.module is module for call in self.traced.calls)
            if not named and getattr(module, "head_size_v", self.head_dim) != self.head_dim:
                return self._refuse((site,), f"its heads are not of {self.head_dim} elements")
        elif any(call.linear and same(call.given, read) for call in self.traced.calls):
            return self._refuse(
                (site,), "its last projection reads the output of another projection, with no activation between"
            )
        elif last[0] is entry or any(_has_experts(call) for call in self.traced.calls if outer and outer.holds(call)):
            return self._refuse((site,), "before its last projection come experts, or no module")
        self.found[FIELDS[site]] = last[0].path
        return None

    def _attention(self) -> None:
        """Derive the module that takes queries, keys and values."""
        calls = {id(call.module): call for call in self.traced.calls}
        inside = [calls[id(one.module)] for one in self.traced.attended if id(one.module) in calls]
        if len(self.traced.attended) != 1 or len(inside) != 1 or not hasattr(inside[0].module, "head_size_v"):
            self._refuse(
                ("q", "k", "v"), "its layer does not call exactly one attention module of vLLM that hooks can follow"
            )
        else:
            self.found["attention"] = inside[0].path


def _has_experts(call: TracedCall) -> bool:
    """Check if a module is, or holds, vLLM's experts, which may be called past hooks."""
    kinds = (type(module).__name__ for module in call.module.modules())
    return hasattr(call.module, "w13_weight") or any("FusedMoE" in kind or "MoERunner" in kind for kind in kinds)
