"""Compiled steering of one prompt, and the plan of a request once every configuration has its slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from steercap.core.plan import Plan
from steercap.core.program import SteeringPlan, identity
from steercap.core.tokens import Range
from steercap.steering.lowering import Lowered


@dataclass(frozen=True)
class CompiledSteering:
    """Compiled steering of one prompt.

    Args:
        lowered: the edits.
        scopes: positions of each token selection.
        replaced: positions of each replacement.
        biased: positions of each token selection of biases.
        held: key of the request, if its edits wait for a monitor to fire; else "".
    """

    lowered: Lowered
    scopes: tuple[tuple[Range, ...], ...]
    replaced: tuple[tuple[int, ...], ...]
    biased: tuple[tuple[Range, ...], ...] = ()
    held: str = ""

    def placed(self, slots: Mapping[bytes, int], epoch: int) -> SteeringPlan:
        """Return the steering plan that is sent to the workers.

        Args:
            slots: the slot of each configuration, by its digest.
            epoch: see `identity`.
        """
        digest = self.lowered.digest
        name = identity(self.lowered.edits_digest or digest, self.scopes, self.replaced, epoch, self.held)
        return SteeringPlan(slots[digest], digest, name, self.scopes, self.replaced, self.biased, bool(self.held))


class Planned(NamedTuple):
    """Complete instructions for the workers.

    Args:
        plan: the plan, with slots assigned; None if nothing is kept or changed.
        salt: salt of the prefix cache, for keys and values that depend on more than the tokens; else "".
    """

    plan: Plan | None
    salt: str
