"""Operations that a sweep can scale; steering specs scaled to a dose, moved to other tokens, or with random vectors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from steercap.core.registry import Registry
from steercap.core.tokens import TokenSelection
from steercap.errors import InvalidSpec
from steercap.lab.directions.contrast import derived_seed
from steercap.steering.edits import Edit
from steercap.steering.edits.add import Add, LowRank
from steercap.steering.edits.replace import Ablate, Cap, SetProjection
from steercap.steering.spec import LogitBias, SteeringSpec


@dataclass(frozen=True)
class Operation:
    """Operation of a sweep, such as addition, and the meaning of its scale.

    If the scale is a projection, the vector's length does not matter, so that random vectors of the same norm are
    random directions: the change of a row depends on the row.

    Args:
        edit: function that returns an edit for a vector, [hidden] in the units of the residual stream, and a scale.
            Keyword arguments are the edit's `layer`, `site`, `tokens` and, if `relative` is True, `relative`.
        axis: axis label of the scale.
        neutral: scale at which the edit changes nothing; None if there is none.
        relative: True if the scale can be a fraction of the row's norm.
        signed: True if minus the scale has the opposite effect, so that there is a negated control. A negated
            projection is another target, not the opposite effect.
    """

    edit: Callable[..., Edit]
    axis: str
    neutral: float | None
    relative: bool = False
    signed: bool = True


OPERATIONS: Final[Registry[Operation]] = Registry(
    "operation",
    {
        # The share removed is 1 - keep: 1 removes the projection, 0 nothing, and -1 doubles it.
        "ablate": Operation(
            lambda vector, scale, **scope: Ablate(vector, keep=1 - scale, **scope),
            "share of the projection taken out",
            neutral=0.0,
        ),
        "add": Operation(Add, "times the vector", neutral=0.0, relative=True),
        "cap": Operation(
            lambda vector, scale, **scope: Cap(vector, high=scale, **scope),
            "greatest projection",
            neutral=None,
            signed=False,
        ),
        "set_projection": Operation(SetProjection, "projection", neutral=None, signed=False),
    },
)


def dosed(spec: SteeringSpec, dose: float) -> SteeringSpec:
    """Return the edits with their scales multiplied by a dose; for dose 1, any spec is returned unchanged.

    Raises:
        InvalidSpec: an edit has no scale, such as a Cap, and the dose is not 1.
    """
    if dose == 1:
        return spec

    def scaled(edit: Any) -> Any:
        if not _has_scale(edit):
            raise InvalidSpec(f"{edit!r} has no scale, and so no dose but 1; give doses=[1]")
        return dataclasses.replace(edit, scale=edit.scale * dose)

    return _map_edits(spec, scaled)


def has_doses(spec: SteeringSpec) -> bool:
    """Return True if every edit has a scale."""
    return all(_has_scale(edit) for edit in spec.flat())


def _has_scale(edit: Any) -> bool:
    """Return True if an edit has a scale that multiplies its whole change."""
    return "scale" in {field.name for field in dataclasses.fields(edit)}


def check_unbiased(spec: SteeringSpec) -> None:
    """Check that a spec has no `LogitBias`: vLLM computes the logits of a text that is read apart, unbiased.

    Raises:
        InvalidSpec: it has one.
    """
    for edit in spec.flat():
        if isinstance(edit, LogitBias):
            raise InvalidSpec(f"{edit!r} does not bias the logits of a text that is read; evaluate it with tasks=[]")


def over_read(spec: SteeringSpec, prompt_len: int, total: int) -> SteeringSpec:
    """Return the edits for reading a text, at the tokens at which they apply if the model generates it.

    Args:
        spec: edits of a generation.
        prompt_len: number of tokens of the prompt.
        total: number of tokens of prompt and text.

    Raises:
        InvalidSelection, EmptySelection: the edits select tokens that such a text does not have.
        InvalidSpec: an edit is a Replace, whose rows belong to fixed positions, or a LogitBias, see `check_unbiased`.
    """
    check_unbiased(spec)

    def at_ranges(edit: Any) -> Any:
        if edit.replaced:
            raise InvalidSpec(f"{edit!r} puts rows at positions of one prompt; it cannot be compared on many prompts")
        ranges = edit.selection.ranges(prompt_len, total)
        return dataclasses.replace(edit, tokens=TokenSelection(tuple((r.start, r.stop, r.step) for r in ranges)))

    return _map_edits(spec, at_ranges)


def random_spec(spec: SteeringSpec, name: str, index: int, seed: int) -> SteeringSpec:
    """Return the edits with their vectors replaced by random ones of the same norms.

    A vector becomes one uniform on the sphere of its length. `read` and `write` of a LowRank are rotated together,
    which preserves their singular values and all scalar products of their rows.

    Args:
        spec: edits to match.
        name: name of the method, which seeds the draw together with `index` and `seed`.
        index: index of the random control, from 0.
        seed: seed of the draw.

    Raises:
        InvalidSpec: an edit is not an Add or LowRank, so that its size depends on the rows.
    """
    place = -1

    def drawn(edit: Any) -> Any:
        nonlocal place
        place += 1
        turn = torch.Generator().manual_seed(derived_seed(f"{seed}/{name}/{index}/{place}"))
        if isinstance(edit, LowRank):
            assert isinstance(edit.read, torch.Tensor)
            assert isinstance(edit.write, torch.Tensor)
            read, write = _rotated(edit.read, edit.write, turn)
            return dataclasses.replace(edit, read=read, write=write)
        if not isinstance(edit, Add):
            raise InvalidSpec(f"{edit!r} has no random control of its size; only Add and LowRank have")
        assert isinstance(edit.vector, torch.Tensor)
        noise = torch.randn(edit.vector.shape, generator=turn).double()
        return dataclasses.replace(edit, vector=noise * (edit.vector.double().norm() / noise.norm()))

    return _map_edits(spec, drawn)


def _rotated(read: torch.Tensor, write: torch.Tensor, turn: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both matrices, [rank, hidden], rotated by one random isometry of the span of their rows: float64."""
    rows = torch.cat([read, write]).double()
    basis = torch.linalg.qr(rows.T).Q  # [width, rows at most]
    other = torch.linalg.qr(torch.randn(basis.shape, generator=turn).double()).Q
    carried = rows @ basis @ other.T
    return carried[: len(read)], carried[len(read) :]


def _map_edits(spec: SteeringSpec, change: Callable[[Any], Any]) -> SteeringSpec:
    """Return the spec with `change` applied to every edit in order, those of nested specs included."""
    changed = [_map_edits(edit, change) if isinstance(edit, SteeringSpec) else change(edit) for edit in spec.edits]
    return SteeringSpec(changed, preserve_norm=spec.preserve_norm)
