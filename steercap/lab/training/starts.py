"""Where training begins when no vector is given: edits of a model's width at the layers that are named."""

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
    """An edit for each of some layers, made for a model.

    Args:
        layers: each has an edit of its own.
        site: place in the layer; its rows are as wide as the stream.
        tokens: which tokens are edited, as for every edit.
    """

    layers: Layers
    site: str = "resid_post"
    tokens: Tokens | TokenSelection = "all"

    def spec(self, width: int, num_layers: int, generator: torch.Generator) -> SteeringSpec:
        """The edits.

        Args:
            width: elements of a row.
            num_layers: layers of the model.
            generator: draws what is random.

        Raises:
            LayerOutOfRange: a layer that the model lacks.
        """
        layers = resolve_layers(parse_layers(self.layers), num_layers)
        return SteeringSpec([self._edit(layer, width, generator) for layer in layers])

    @abstractmethod
    def _edit(self, layer: int, width: int, generator: torch.Generator) -> Edit:
        """The edit of one layer."""


@dataclass(frozen=True, kw_only=True)
class TrainableAdd(Start):
    """`Add` with a vector for each layer.

    Args:
        norm: length of the vector to begin with, its direction drawn; 0 begins at zero, as BiPO does.
        relative: as for `Add`; needs a norm.
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
    """`LowRank` for each layer: k directions that are read, k that are written, and a bias.

    It begins as no change: orthonormal directions to write, drawn, and zeros to read, so that all of the gradient of
    the first step is in `read` and `bias`.

    Args:
        rank: k.
        layers, site, tokens: see `Start`.
    """

    rank: int = 4

    def _edit(self, layer: int, width: int, generator: torch.Generator) -> Edit:
        write = torch.linalg.qr(torch.randn(width, self.rank, generator=generator)).Q.T
        read = torch.zeros(self.rank, width)
        return LowRank(read, write, layer=layer, site=self.site, tokens=self.tokens)
