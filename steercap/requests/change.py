"""One prompt's steering, and the plan of a request with all that it names in its slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from steercap.core.plan import Plan
from steercap.core.program import SteeringPlan, identity
from steercap.core.tokens import Range
from steercap.steering.lowering import Lowered


@dataclass(frozen=True)
class Change:
    """One prompt's steering.

    Args:
        lowered: the edits.
        scopes: positions of each token selection.
        replaced: positions of each replacement.
        biased: positions of each token selection of biases.
        held: key of the request, if nothing is edited until a monitor says so; else "".
    """

    lowered: Lowered
    scopes: tuple[tuple[Range, ...], ...]
    replaced: tuple[tuple[int, ...], ...]
    biased: tuple[tuple[Range, ...], ...] = ()
    held: str = ""

    def placed(self, slots: Mapping[bytes, int], epoch: int) -> SteeringPlan:
        """What the workers are told of it.

        Args:
            slots: where each configuration is, by its digest.
            epoch: see `identity`.
        """
        digest = self.lowered.digest
        name = identity(self.lowered.edits_digest or digest, self.scopes, self.replaced, epoch, self.held)
        return SteeringPlan(slots[digest], digest, name, self.scopes, self.replaced, self.biased, bool(self.held))


class Planned(NamedTuple):
    """What the workers shall do, complete.

    Args:
        plan: the plan, all that it names in its slot; None if nothing is kept or changed.
        salt: what keys and values depend on besides the tokens, "" for nothing.
    """

    plan: Plan | None
    salt: str
