"""The two directions that an assistant axis can be, from vectors of roles at one layer.

Shape legend: roles = without the assistant; hidden = elements of a row. All arithmetic is in float64.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float

from steercap.core.values import shown
from steercap.errors import InvalidSpec

#: How an axis is found.
How = Literal["contrast", "pca"]
HOWS: Final[tuple[How, ...]] = get_args(How)


class Directions(NamedTuple):
    """What is found at one layer.

    Args:
        contrast: unit vector from the mean of the roles to the assistant, [hidden].
        pca: first principal component of the roles, centred on their mean, of length 1, on whose positive side the
            assistant lies, [hidden].
        explained: share of the roles' variance of each component, greatest first, [roles - 1].
        offset: of the assistant from the mean of the roles, [hidden].
        standing: where the assistant lies on the component, in the roles' standard deviations from their mean; 0 or
            more. Where it is small, the side that the assistant is on is an accident.
    """

    contrast: Float[torch.Tensor, " hidden"]
    pca: Float[torch.Tensor, " hidden"]
    explained: Float[torch.Tensor, " components"]
    offset: Float[torch.Tensor, " hidden"]
    standing: float

    def of(self, how: How) -> Float[torch.Tensor, " hidden"]:
        """The unit vector found in one way."""
        return self.contrast if how == "contrast" else self.pca


def directions(roles: Float[torch.Tensor, "roles hidden"], assistant: Float[torch.Tensor, " hidden"]) -> Directions:
    """Both directions at one layer.

    Args:
        roles: vectors of roles, two at least.
        assistant: the assistant's.

    Raises:
        InvalidSpec: all roles are the same, or the assistant is their mean: there is no direction.
    """
    roles, assistant = roles.double(), assistant.double()
    mean = roles.mean(0)
    centred, offset = roles - mean, assistant - mean
    # By the products of roles with each other: there are fewer of them than elements of a row.
    sizes, weights = torch.linalg.eigh(centred @ centred.T)
    sizes = sizes.flip(0).clamp(min=0)[: len(roles) - 1]
    component = weights[:, -1] @ centred
    if not float(component.norm()) or not float(offset.norm()):
        raise InvalidSpec("all roles have one vector, or the assistant has the mean of theirs: there is no axis")
    component, contrast = component / component.norm(), offset / offset.norm()
    place = float(component @ offset)
    component = component if place >= 0 else -component
    spread = float((centred @ component).std())
    return Directions(contrast, component, sizes / sizes.sum(), offset, abs(place) / spread)


def how_of(how: Any) -> How:
    """A way to find an axis, as a user writes it.

    Raises:
        InvalidSpec: another.
    """
    if how not in HOWS:
        raise InvalidSpec(f"how={shown(how)}; give {' or '.join(map(repr, HOWS))}")
    found: How = how
    return found
