"""Initial edits of training when no vector is given: of a model's width, at the named layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from steercap.core.spec import Layers, parse_layers, resolve_layers
from steercap.core.tokens import Tokens, TokenSelection
from steercap.steering.edits.add import Add
from steercap.steering.edits.base import Edit
from steercap.steering.edits.low_rank import LowRank
from steercap.steering.spec import SteeringSpec


@dataclass(frozen=True, kw_only=True)
class Start(ABC):
    """Initial edits for some layers, made for a model.

    Args:
        layers: layers, each with an edit of its own.
        site: site of the edits, with rows as wide as the stream.
        tokens: tokens to edit, as for every edit.
    """

    layers: Layers
    site: str = "resid_post"
    tokens: Tokens | TokenSelection = "all"

    def spec(self, width: int, num_layers: int, generator: torch.Generator) -> SteeringSpec:
        """Return the edits.

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
        """Return the edit of one layer."""


@dataclass(frozen=True, kw_only=True)
class TrainableAdd(Start):
    """Initial `Add` with a vector for each layer.

    Args:
        norm: initial norm of the vector, with a random direction; 0 begins at zero, as BiPO does.
        relative: argument as for `Add`; needs a norm.
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

    It begins as no change: random orthonormal directions to write, and zeros to read, so that all of the gradient of
    the first step is in `read` and `bias`.

    Args:
        rank: number of directions k.
        layers, site, tokens: see `Start`.
    """

    rank: int = 4

    def _edit(self, layer: int, width: int, generator: torch.Generator) -> Edit:
        write = torch.linalg.qr(torch.randn(width, self.rank, generator=generator)).Q.T
        read = torch.zeros(self.rank, width)
        return LowRank(read, write, layer=layer, site=self.site, tokens=self.tokens)
