"""Spec whose vectors are parameters, lowered by the edits' own code, so that training computes what the taps compute.

An edit's own `lower` is run on a copy of the edit with parameters as its vectors, and torch differentiates the result.
No operation is implemented twice; an operation added to `steercap.steering.edits` can be trained at once.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from steercap.architectures.sites import SITES
from steercap.core.hints import dataclass
from steercap.core.spec import Layers, name_of_site, parse_layers, resolve_layers
from steercap.core.tokens import Tokens, TokenSelection
from steercap.core.values import shown
from steercap.errors import InvalidSetting, InvalidSpec
from steercap.steering.edits import Edit, RankOne
from steercap.steering.edits.add import Add, LowRank
from steercap.steering.edits.replace import Replace
from steercap.steering.spec import SteeringSpec

#: Names of vectors that only decide whether a row is edited; trained only if named.
GATES: Final = frozenset({"probe"})
#: Names of fields of an edit that say where it applies, not what it computes.
_SCOPE: Final = frozenset(field.name for field in dataclasses.fields(Edit))


class TrainableSpec(nn.Module):
    """Module with the edits of a spec, whose chosen vectors and numbers are parameters.

    Args:
        spec: initial spec.
        fields: names of the fields to train, of the edits that have them: "vector", "read", "probe", "scale", ...; None
            for all vectors but those of gates, which are trained only if named.
        dtype: dtype of the parameters.

    Raises:
        InvalidSpec: an edit is a bias of logits or a replacement, which are not trained.
        InvalidSetting: a field is in no edit, or is neither a vector nor a number.
    """

    def __init__(
        self, spec: SteeringSpec, fields: Sequence[str] | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self._start = spec
        self.edits: tuple[Edit, ...] = tuple(_trainable(edit) for edit in spec.flat())
        self.keepers = tuple(keeper for _, keeper in spec.segments())
        self.values = nn.ParameterDict()
        for number, edit in enumerate(self.edits):
            for name, value in _fields(edit, fields).items():
                self.values[f"{number}/{name}"] = nn.Parameter(torch.as_tensor(value, dtype=dtype))
        if fields is not None and (unknown := set(fields) - {key.split("/")[1] for key in self.values}):
            raise InvalidSetting(
                f"fields={shown(sorted(unknown))}: no edit has such a vector or number; {self.edits[0].name} has "
                f"{', '.join(_fields(self.edits[0], _names(self.edits[0])))}"
            )

    def lowered(self) -> tuple[tuple[RankOne, ...], ...]:
        """Return the rank-one edits of each edit, in order of the edits, differentiable in the parameters."""
        return tuple(_shadow(edit, self._tensors_of(number)).lower() for number, edit in enumerate(self.edits))

    def spec(self, values: Mapping[str, torch.Tensor] | None = None) -> SteeringSpec:
        """Return a spec for inference with the current parameters, or with `values` by name as in `state_dict`.

        Gates are hard, and numbers plain floats.

        Raises:
            InvalidVector: a vector is not finite, or is zero and needs a direction.
        """
        found = (
            dict(self.values.items()) if values is None else {k.removeprefix("values."): v for k, v in values.items()}
        )
        by_edit: dict[int, dict[str, Any]] = {number: {} for number in range(len(self.edits))}
        for key, value in found.items():
            number, name = key.split("/")
            by_edit[int(number)][name] = value.detach() if value.dim() else float(value)
        return _rebuilt(self._start, iter(range(len(self.edits))), by_edit)

    def norm(self) -> float:
        """Return the Euclidean norm of all trained parameters."""
        return float(torch.cat([value.detach().double().flatten() for value in self.values.values()]).norm())

    def _tensors_of(self, number: int) -> dict[str, torch.Tensor]:
        return {key.split("/")[1]: value for key, value in self.values.items() if key.startswith(f"{number}/")}


def _trainable(edit: Any) -> Edit:
    if not isinstance(edit, Edit) or isinstance(edit, Replace):
        raise InvalidSpec(f"{edit}: steercap.lab.training trains edits that add to rows; leave it out")
    if edit.part is not None and any(one.response.relative for one in edit.lower()):
        raise InvalidSpec(f"{edit}: part= leaves other parts alone, and relative= is of whole rows; leave one out")
    return edit


def _names(edit: Edit) -> list[str]:
    return [field.name for field in dataclasses.fields(edit) if field.name not in _SCOPE]


def _fields(edit: Edit, names: Sequence[str] | None) -> dict[str, Any]:
    """Return the fields of an edit to train, by name: all vectors but gates, or the vectors and numbers in `names`."""
    found = {name: getattr(edit, name) for name in _names(edit)}
    if names is None:
        return {name: value for name, value in found.items() if torch.is_tensor(value) and name not in GATES}
    return {name: value for name, value in found.items() if name in names and _is_real(value)}


def _is_real(value: Any) -> bool:
    return torch.is_tensor(value) or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _shadow(edit: Edit, values: Mapping[str, torch.Tensor]) -> Edit:
    """Return a copy of an edit with `values` in place of its fields, which are neither checked nor copied."""
    shadow: Edit = object.__new__(type(edit))
    vars(shadow).update(vars(edit) | dict(values))
    return shadow


def _rebuilt(spec: SteeringSpec, numbers: Iterator[int], values: Mapping[int, Mapping[str, Any]]) -> SteeringSpec:
    """Return a copy of a spec, nested specs included, with new fields by edit; `numbers` yields the edits' indices."""
    edits: list[Any] = []
    for edit in spec.edits:
        if isinstance(edit, SteeringSpec):
            edits.append(_rebuilt(edit, numbers, values))
        elif isinstance(edit, Edit):
            edits.append(dataclasses.replace(edit, **values[next(numbers)]))
    return SteeringSpec(edits, spec.preserve_norm)


@dataclass(frozen=True, kw_only=True)
class Start(ABC):
    """Recipe for initial edits, one for each of some layers, drawn for a model's width.

    Args:
        layers: layers, as in `CaptureSpec`, each with its own edit.
        site: site of the edits, with rows as wide as the residual stream.
        tokens: tokens to edit, as for any edit.

    Raises:
        UnknownName: a site that does not exist.
    """

    layers: Layers
    site: str = "resid_post"
    tokens: Tokens | TokenSelection = "all"

    def __post_init__(self) -> None:
        _ = SITES[name_of_site(self.site)]

    def spec(self, width: int, num_layers: int, generator: torch.Generator) -> SteeringSpec:
        """Return a spec of the initial edits, one for each layer, ready to train.

        Args:
            width: number of elements of a row.
            num_layers: number of layers of the model.
            generator: random generator.

        Raises:
            LayerOutOfRange: the model lacks a layer.
        """
        layers = resolve_layers(parse_layers(self.layers), num_layers)
        return SteeringSpec([self._edit(layer, width, generator) for layer in layers])

    @abstractmethod
    def _edit(self, layer: int, width: int, generator: torch.Generator) -> Edit:
        """Return the initial edit of one layer, for rows of `width` elements."""


@dataclass(frozen=True, kw_only=True)
class TrainableAdd(Start):
    """Initial `Add` for each layer, with a vector to train.

    Args:
        norm: initial norm of the vector, whose direction is random; 0 for a vector of zeros, as in BiPO.
        relative: as for `Add`; needs a `norm` above 0.
        layers, site, tokens: see `Start`.
    """

    norm: float = 0.0
    relative: bool = False

    def _edit(self, layer: int, width: int, generator: torch.Generator) -> Edit:
        drawn = torch.randn(width, generator=generator)
        vector = self.norm * drawn / drawn.norm()
        return Add(vector, layer=layer, site=self.site, tokens=self.tokens, relative=self.relative)


@dataclass(frozen=True, kw_only=True)
class TrainableLowRank(Start):
    """Initial `LowRank` for each layer: k directions that are read, k that are written, and a bias.

    Initially it changes nothing: directions to write are random and orthonormal, and those to read are zero, so the
    first step's gradient is in `read` and `bias` alone.

    Args:
        rank: number of directions k.
        layers, site, tokens: see `Start`.
    """

    rank: int = 4

    def _edit(self, layer: int, width: int, generator: torch.Generator) -> Edit:
        write = torch.linalg.qr(torch.randn(width, self.rank, generator=generator)).Q.T
        read = torch.zeros(self.rank, width)
        return LowRank(read, write, layer=layer, site=self.site, tokens=self.tokens)
