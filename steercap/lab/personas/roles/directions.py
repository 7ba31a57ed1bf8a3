"""Contrast and principal component: the two candidate directions of an assistant axis at one layer.

Shape legend: roles = without the assistant; hidden = elements of a row. All arithmetic is in float64.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float

from steercap.core.values import shown
from steercap.errors import InvalidSpec

#: Method of finding an axis.
How = Literal["contrast", "pca"]
HOWS: Final[tuple[How, ...]] = get_args(How)


class Directions(NamedTuple):
    """Directions of an axis at one layer.

    Args:
        contrast: unit vector from the mean of the roles to the assistant, [hidden].
        pca: first principal component of the roles, centred on their mean, of length 1, on whose positive side the
            assistant lies, [hidden].
        explained: share of the roles' variance explained by each component, greatest first, [roles - 1].
        offset: assistant's vector minus the mean of the roles, [hidden].
        standing: score of the assistant on the component, in the roles' standard deviations from their mean; 0 or more.
            If it is small, the sign of the component is arbitrary.
    """

    contrast: Float[torch.Tensor, " hidden"]
    pca: Float[torch.Tensor, " hidden"]
    explained: Float[torch.Tensor, " components"]
    offset: Float[torch.Tensor, " hidden"]
    standing: float

    def of(self, how: How) -> Float[torch.Tensor, " hidden"]:
        """Return the unit vector of one method."""
        return self.contrast if how == "contrast" else self.pca


class Axes(NamedTuple):
    """Directions of several sets of roles at once, with fields as in `Directions`.

    Args:
        contrast, pca: unit vectors, [..., hidden].
        offset: assistant's vector minus the mean of the roles, [..., hidden].
        sizes: sums of squares along each component, greatest first, [..., roles].
    """

    contrast: Float[torch.Tensor, "*sets hidden"]
    pca: Float[torch.Tensor, "*sets hidden"]
    offset: Float[torch.Tensor, "*sets hidden"]
    sizes: Float[torch.Tensor, "*sets roles"]


def directions(roles: Float[torch.Tensor, "roles hidden"], assistant: Float[torch.Tensor, " hidden"]) -> Directions:
    """Compute both directions at one layer.

    Args:
        roles: vectors of roles, two at least.
        assistant: vector of the assistant.

    Raises:
        InvalidSpec: all roles are equal, or the assistant is their mean: there is no direction.
    """
    roles, assistant = roles.double(), assistant.double()
    found = axes(roles, assistant, torch.ones(len(roles), dtype=torch.bool))
    if bool(found.contrast.isnan().any()) or bool(found.pca.isnan().any()):
        raise InvalidSpec("all roles have one vector, or the assistant has the mean of theirs: there is no axis")
    sizes = found.sizes[: len(roles) - 1]
    spread = float(((roles - roles.mean(0)) @ found.pca).std())
    standing = float(found.pca @ found.offset) / spread
    return Directions(found.contrast, found.pca, sizes / sizes.sum(), found.offset, standing)


def axes(
    roles: Float[torch.Tensor, "*sets roles hidden"],
    assistant: Float[torch.Tensor, "*sets hidden"],
    used: Bool[torch.Tensor, "*sets roles"],
) -> Axes:
    """Compute both directions of several sets of roles, each of some of the roles; NaN for a set without a direction.

    Args:
        roles: float64 vectors.
        assistant: float64 vectors.
        used: roles of each set, two at least.
    """
    weights = used.to(roles.dtype)[..., None]
    mean = (roles * weights).sum(-2, keepdim=True) / weights.sum(-2, keepdim=True)
    centred, offset = (roles - mean) * weights, assistant - mean.squeeze(-2)
    # By the products of roles with each other: there are fewer of them than elements of a row.
    sizes, vectors = torch.linalg.eigh(centred @ centred.mT)
    component = (vectors[..., None, :, -1] @ centred).squeeze(-2)
    component = component / component.norm(dim=-1, keepdim=True)  # 0 / 0 where all roles are one
    side = (component * offset).sum(-1, keepdim=True)
    return Axes(
        offset / offset.norm(dim=-1, keepdim=True),
        torch.where(side < 0, -component, component),
        offset,
        sizes.flip(-1).clamp(min=0),
    )


def how_of(how: Any) -> How:
    """Check the name of a method of finding an axis, and return it.

    Raises:
        InvalidSpec: the name is unknown.
    """
    if how not in HOWS:
        raise InvalidSpec(f"how={shown(how)}; give {' or '.join(map(repr, HOWS))}")
    found: How = how
    return found
