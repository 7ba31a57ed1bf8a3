"""Roles as rows: one for each role, question and layer, of which everything here is computed.

Shape legend: roles = without the assistant; questions = of the run; hidden = elements of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from jaxtyping import Float

from steercap.core.values import choices
from steercap.errors import InvalidSpec, LayerOutOfRange, UnknownName
from steercap.lab.personas.roles.role import ASSISTANT
from steercap.steering.directions import DirectionSet, Provenance
from steercap.steering.layers import LayerVectors

#: Fewest roles that an axis can be of.
LEAST: Final = 2


@dataclass(frozen=True, eq=False)
class RoleRows:
    """Rows by role, question and layer; read when they are asked for, a layer at a time.

    Args:
        counts: how many answers are behind the row of each question, by role, the assistant among them: as many numbers
            for each, 0 where a question has none.
        layers: where rows were read, ascending.
        read: of a role's name and a layer: float32 [questions, hidden], in the units of the stream; rows of questions
            without answers are not looked at.
        model: whose they are, "" if unknown.
        site: place in the layer.
        provenance: where they come from.

    Raises:
        InvalidSpec: no assistant, fewer than two roles, other numbers of questions for some, or one without answers.
    """

    counts: Mapping[str, tuple[int, ...]]
    layers: tuple[int, ...]
    read: Callable[[str, int], torch.Tensor]
    model: str = ""
    site: str = "resid_post"
    provenance: Provenance = field(default_factory=Provenance)

    def __post_init__(self) -> None:
        if ASSISTANT not in self.counts or len(self.counts) < LEAST + 1:
            raise InvalidSpec(f"rows of {list(self.counts)}; give those of {ASSISTANT!r} and of two roles at least")
        sizes = {name: len(counts) for name, counts in self.counts.items()}
        if len(set(sizes.values())) > 1:
            raise InvalidSpec(f"the numbers of questions are {sizes}; all roles are asked the same questions")
        if silent := [name for name, counts in self.counts.items() if not any(counts)]:
            raise InvalidSpec(f"{silent} have no answers; leave them out")

    @staticmethod
    def of(
        means: Mapping[str, Float[torch.Tensor, "layers questions hidden"]],
        *,
        model: str = "",
        site: str = "resid_post",
    ) -> RoleRows:
        """Rows that are in memory, an answer to each question, the layers counted from 0.

        Args:
            means: by role, the assistant among them.
            model, site: whose they are, and where.
        """
        shape = next(iter(means.values())).shape
        counts = {name: (1,) * rows.shape[1] for name, rows in means.items()}
        return RoleRows(counts, tuple(range(shape[0])), lambda name, layer: means[name][layer], model, site)

    @property
    def names(self) -> tuple[str, ...]:
        """The roles, without the assistant."""
        return tuple(name for name in self.counts if name != ASSISTANT)

    @property
    def questions(self) -> int:
        """How many questions there are."""
        return len(self.counts[ASSISTANT])

    def at(self, name: str, layer: int) -> Float[torch.Tensor, "questions hidden"]:
        """The rows of one role at one layer: float64, 0 for questions without answers.

        Raises:
            UnknownName: no such role.
            LayerOutOfRange: a layer that was not read.
        """
        if name not in self.counts:
            raise UnknownName(f"no rows of {name!r}; {choices(name, self.counts)}")
        if layer not in self.layers:
            raise LayerOutOfRange(f"layer {layer} was not read; {list(self.layers)} were")
        there = torch.tensor(self.counts[name]) > 0
        return torch.where(there[:, None], self.read(name, layer).double(), 0.0)

    def mean(self, name: str, layer: int) -> Float[torch.Tensor, " hidden"]:
        """A role's vector at one layer: the mean over its answers, float64.

        Raises:
            UnknownName, LayerOutOfRange: as for `at`.
        """
        weights = torch.tensor(self.counts[name], dtype=torch.float64)
        found: torch.Tensor = weights @ self.at(name, layer) / weights.sum()
        return found

    def means(self, layer: int) -> tuple[Float[torch.Tensor, "roles hidden"], Float[torch.Tensor, " hidden"]]:
        """The vectors of all roles in the order of `names`, and the assistant's: float64."""
        return torch.stack([self.mean(name, layer) for name in self.names]), self.mean(ASSISTANT, layer)

    def vectors(self) -> DirectionSet:
        """A role's vector at every layer, and the assistant's, by name: mean rows, not differences of them."""
        return DirectionSet(
            {
                name: LayerVectors(
                    {layer: self.mean(name, layer) for layer in self.layers}, model=self.model, site=self.site
                )
                for name in self.counts
            },
            self.provenance,
        )
