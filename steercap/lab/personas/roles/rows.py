"""Mean rows of roles, one for each role, question and layer, from which vectors and axes are computed; their files.

A file has the rows of one role; one layer can be read without the others.

Shape legend: roles = the assistant not counted; questions = of the run; hidden = elements of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Float

from steercap.core.display import brief
from steercap.core.values import choices
from steercap.errors import InvalidFile, InvalidSpec, LayerOutOfRange, UnknownName
from steercap.files.base import read_tensors_at
from steercap.lab.personas.capture import RowsHeader, read_rows
from steercap.lab.personas.roles.folder import RoleFolder
from steercap.lab.personas.roles.role import ASSISTANT
from steercap.steering.directions import DirectionSet, Provenance
from steercap.steering.layers import LayerVectors

#: Minimum number of roles of an axis.
LEAST: Final = 2


@dataclass(frozen=True, eq=False)
class RoleRows:
    """Mean rows by role, question and layer, read on demand, a layer at a time.

    Args:
        counts: number of answers averaged in the row of each question, 0 for a question without answers, by role, the
            "assistant" included; all roles have the same questions.
        layers: indices of the layers, ascending.
        read: function from a role's name and a layer to float32 [questions, hidden], in the units of the residual
            stream; rows of questions without answers are ignored.
        model: name of the model, "" if unknown.
        site: site of the rows.
        provenance: model, texts and selection that the rows come from.

    Raises:
        InvalidSpec: no assistant, fewer than two roles, roles with different numbers of questions, or one without
            answers.
    """

    counts: Mapping[str, tuple[int, ...]]
    layers: tuple[int, ...]
    read: Callable[[str, int], torch.Tensor]
    model: str = ""
    site: str = "resid_post"
    provenance: Provenance = field(default_factory=Provenance)

    __repr__ = brief

    def __post_init__(self) -> None:
        if ASSISTANT not in self.counts or len(self.counts) < LEAST + 1:
            raise InvalidSpec(f"rows of {list(self.counts)}; give those of {ASSISTANT!r} and of at least two roles")
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
        """Return rows that are in memory, with one answer to each question, and layers counted from 0.

        Args:
            means: rows by role, the "assistant" included.
            model, site: name of the model, and site of the rows.
        """
        shape = next(iter(means.values())).shape
        counts = {name: (1,) * rows.shape[1] for name, rows in means.items()}
        return RoleRows(counts, tuple(range(shape[0])), lambda name, layer: means[name][layer], model, site)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the roles, without the assistant."""
        return tuple(name for name in self.counts if name != ASSISTANT)

    @property
    def questions(self) -> int:
        """Number of questions."""
        return len(self.counts[ASSISTANT])

    def at(self, name: str, layer: int) -> Float[torch.Tensor, "questions hidden"]:
        """Return the rows of one role at one layer: float64 [questions, hidden], 0 for questions without answers.

        Raises:
            UnknownName: there is no such role.
            LayerOutOfRange: there are no rows of the layer.
        """
        if name not in self.counts:
            raise UnknownName(f"no rows of {name!r}; {choices(name, self.counts)}")
        if layer not in self.layers:
            raise LayerOutOfRange(f"layer {layer} was not read; {list(self.layers)} were")
        there = torch.tensor(self.counts[name]) > 0
        return torch.where(there[:, None], self.read(name, layer).double(), 0.0)

    def mean(self, name: str, layer: int) -> Float[torch.Tensor, " hidden"]:
        """Return a role's vector at one layer: the mean over its answers, float64 [hidden].

        Raises:
            UnknownName, LayerOutOfRange: as for `at`.
        """
        weights = torch.tensor(self.counts[name], dtype=torch.float64)
        found: torch.Tensor = weights @ self.at(name, layer) / weights.sum()
        return found

    def means(self, layer: int) -> tuple[Float[torch.Tensor, "roles hidden"], Float[torch.Tensor, " hidden"]]:
        """Return the vectors of all roles in the order of `names`, [roles, hidden], and the assistant's: float64."""
        return torch.stack([self.mean(name, layer) for name in self.names]), self.mean(ASSISTANT, layer)

    def vectors(self) -> DirectionSet:
        """Return the vectors of roles and assistant at every layer, by name: mean rows, not differences of means."""
        return DirectionSet(
            {
                name: LayerVectors(
                    {layer: self.mean(name, layer) for layer in self.layers}, model=self.model, site=self.site
                )
                for name in self.counts
            },
            self.provenance,
        )


class RoleRowsHeader(RowsHeader, frozen=True):
    """Header of a file of a role's rows.

    Args:
        role: name of the role.
        layers: layer indices along the first axis of both tensors: `means`, float32 [layers, questions, hidden], and
            `norms`, the mean norm of the answers' rows, float32 [layers, questions].
        questions: indices of questions along the second axis, ascending.
        counts: number of answers averaged for each question.
        prompts: SHA-256 of the tokens read for each question, in hexadecimal.
    """

    role: str
    layers: tuple[int, ...]
    questions: tuple[int, ...]
    counts: tuple[int, ...]
    prompts: tuple[str, ...]


def rows_path(role: RoleFolder) -> Path:
    """Return the path of the file of a role's rows."""
    return role.path / "rows.safetensors"


def read_rows_header(path: Path) -> RoleRowsHeader:
    """Read the header of a file of a role's rows.

    Raises:
        InvalidFile: the file is missing, is not such a file, or is of another version.
    """
    return read_rows(path, RoleRowsHeader, tensors=False)[0]


def load_part(path: Path) -> tuple[RoleRowsHeader, torch.Tensor, torch.Tensor]:
    """Read a file of a role's rows; return the header, and the tensors `means` and `norms`, see `RoleRowsHeader`.

    Raises:
        InvalidFile: as for `read_rows_header`.
    """
    header, tensors = read_rows(path, RoleRowsHeader)
    _check(path, header, tuple(tensors["means"].shape[:2]) if {"means", "norms"} <= tensors.keys() else ())
    return header, tensors["means"], tensors["norms"]


def load_layer(path: Path, header: RoleRowsHeader, layer: int) -> torch.Tensor:
    """Read one layer of a file of a role's rows: float32 [questions, hidden], questions as in the header.

    Raises:
        InvalidFile: the rows cannot be read.
    """
    found = read_tensors_at(path, "means", header.layers.index(layer))
    _check(path, header, (len(header.layers), len(found)))
    return found


def _check(path: Path, header: RoleRowsHeader, shape: tuple[int, ...]) -> None:
    if shape != (len(header.layers), len(header.questions)):
        raise InvalidFile(f"{path} does not hold the rows that its header names; remove the role's folder")
