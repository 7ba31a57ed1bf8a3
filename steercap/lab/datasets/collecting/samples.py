"""Token samples of a collection: the tokens of a selection, one in k, by projection on a direction, or by a function.

No sample depends on other windows, so the same texts give the same tokens whenever and wherever they are read. But
without `concurrency=1` rows may differ in their last bits, and through them which rows `ByProbe` keeps and which texts
`sampling_params` generates.
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Callable
from dataclasses import KW_ONLY, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from steercap.core.hints import dataclass
from steercap.core.spec import Point
from steercap.core.tokens import Range, Tokens, TokenSelection, selected
from steercap.core.values import Mask, index_of, mixed, mixed_all, number_of, shown
from steercap.errors import EmptySelection, InvalidSelection, InvalidSpec
from steercap.kernels.bits import exact_products
from steercap.lab.datasets.collecting.documents import Window

if TYPE_CHECKING:
    from steercap.steering.layers import LayerVectors

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
#: Function from a window and its token ids to truth values: bool [tokens].
Predicate = Callable[[Window, Ints], Any]


class TokenSample(abc.ABC):
    """Rule that selects, in each window, the tokens whose rows are kept."""

    @abc.abstractmethod
    def asked(self, window: Window, limit: int) -> TokenSelection | None:
        """Return the selection of tokens whose rows are requested of the model, or None for no tokens.

        Args:
            window: the prompt.
            limit: number of positions that can have a row, generated tokens included.
        """

    def kept(
        self,
        window: Window,  # noqa: ARG002 -- what any of them needs
        limit: int,  # noqa: ARG002
        positions: Ints,  # noqa: ARG002
        token_ids: Ints,  # noqa: ARG002
        captures: Any,  # noqa: ARG002
    ) -> Bools | None:
        """Select the rows to keep of those that were captured: bool [rows], or None for all.

        Args:
            window: the prompt.
            limit: number of positions that can have a row, as for `asked`.
            positions: positions of the rows, int64 [rows].
            token_ids: ids of all prompt and generated tokens that can have rows: int64 [tokens].
            captures: the rows, as `CaptureHandle.captures`.
        """
        return None

    @property
    def needs(self) -> Point | None:
        """Point whose rows `kept` reads, which must be captured; None if it reads none."""
        return None

    @abc.abstractmethod
    def described(self) -> dict[str, Any]:
        """Return the settings that determine the sample, JSON-compatible; a resumed run must have the same."""


@dataclass(frozen=True)
class Selected(TokenSample):
    """Token sample of all tokens in a selection, as for `CaptureSpec`."""

    of: Tokens | TokenSelection = "all"

    def __post_init__(self) -> None:
        object.__setattr__(self, "of", TokenSelection.parse(self.of))

    @property
    def selection(self) -> TokenSelection:
        """Token selection, parsed from `of`."""
        return TokenSelection.parse(self.of)

    def asked(self, window: Window, limit: int) -> TokenSelection | None:
        return self.selection if self._ranges(window, limit) else None

    def described(self) -> dict[str, Any]:
        return {"tokens": str(self.selection)}

    def mask(self, window: Window, limit: int) -> Bools:
        """Return the selected tokens as a mask: bool [limit]."""
        return selected(self._ranges(window, limit), limit)

    def _ranges(self, window: Window, limit: int) -> tuple[Range, ...]:
        """Return the ranges of positions selected in a window, () for none.

        Raises:
            InvalidSelection: a position or a mask does not fit the window, which the message names.
        """
        length = len(window.token_ids)
        try:
            return self.selection.ranges(length, limit)
        except EmptySelection:
            return ()
        except InvalidSelection as error:
            outside = [at for at in self.selection.terms if isinstance(at, int) and not -length <= at < limit]
            instead = "".join(f"; slice({at}, {at + 1}) keeps nothing of shorter windows" for at in outside[:1])
            raise InvalidSelection(f"{window.where}, window {window.number}: {error}{instead}") from error


@dataclass(frozen=True)
class OneIn(TokenSample):
    """Token sample that keeps one token in k at random, by seed, document, window and position alone.

    Args:
        k: inverse sampling rate, 1 or more; each token is kept with probability 1/k.
        seed: seed of the draw.
        of: selection of tokens to draw from.

    Raises:
        InvalidSpec: k or seed is not a whole number, or k is below 1.
        InvalidSelection: see `CaptureSpec`.
    """

    k: int
    seed: int = 0
    of: Tokens | TokenSelection = "all"

    def __post_init__(self) -> None:
        k, seed = index_of(self.k), index_of(self.seed)
        if k is None or seed is None or k < 1:
            raise InvalidSpec(f"OneIn(k={shown(self.k)}, seed={shown(self.seed)}); give whole numbers, k from 1")
        vars(self).update(k=k, seed=seed, of=TokenSelection.parse(self.of))  # NumPy's numbers are no JSON

    def asked(self, window: Window, limit: int) -> TokenSelection | None:
        mask = Selected(self.of).mask(window, limit) & self._drawn(window, limit)
        return _selection(mask)

    def _drawn(self, window: Window, limit: int) -> Bools:
        start = mixed(mixed(mixed(self.seed) ^ window.document) ^ window.number)
        numbers = mixed_all(np.uint64(start) ^ np.arange(limit, dtype=np.uint64))
        drawn: Bools = numbers % np.uint64(self.k) == 0
        return drawn

    def described(self) -> dict[str, Any]:
        return {"tokens": str(self.of), "one_in": self.k, "seed": self.seed}


@dataclass(frozen=True)
class ByPredicate(TokenSample):
    """Token sample chosen by a function.

    Args:
        choose: function called with a `Window` and all its token ids that can have rows, whatever `of` is (int64
            [tokens], generated ones included), from any thread; returns a truth value for each.
        name: identity of the function, which must be the same in a resumed run; by default the function's own name.
        of: selection of tokens to choose from.

    Raises:
        InvalidSpec: the function cannot be called, or has no name of its own and none is given.
    """

    choose: Predicate
    name: str = ""
    of: Tokens | TokenSelection = "all"

    def __post_init__(self) -> None:
        name = self.name or f"{getattr(self.choose, '__module__', '')}.{getattr(self.choose, '__qualname__', '')}"
        if not callable(self.choose) or name.endswith((".", "<lambda>")):
            raise InvalidSpec(f"ByPredicate({shown(self.choose)}); give a function, and name= where it has no name")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "of", TokenSelection.parse(self.of))

    def asked(self, window: Window, limit: int) -> TokenSelection | None:
        base = Selected(self.of)
        if limit > len(window.token_ids):  # what is generated is known when it is
            return base.asked(window, limit)
        return _selection(base.mask(window, limit) & self._chosen(window, window.token_ids))

    def kept(
        self,
        window: Window,
        limit: int,
        positions: Ints,
        token_ids: Ints,
        captures: Any,  # noqa: ARG002
    ) -> Bools | None:
        if limit <= len(window.token_ids):
            return None  # chosen before
        chosen: Bools = self._chosen(window, token_ids)[positions]
        return chosen

    def _chosen(self, window: Window, token_ids: Ints) -> Bools:
        found = np.asarray(self.choose(window, token_ids))
        if found.shape != token_ids.shape or found.dtype != np.bool_:
            raise InvalidSpec(
                f"{self.name} gave {shown(found)} for {window.where}; give {len(token_ids)} truth values, one a token"
            )
        return found

    def described(self) -> dict[str, Any]:
        return {"tokens": str(self.of), "predicate": self.name}


@dataclass(frozen=True)
class ByProbe(TokenSample):
    """Token sample of the tokens whose rows project far enough along a direction.

    Rows of all selected tokens are fetched from the workers and projected in the client.

    Args:
        probe: a direction by layer, at one site; see `LayerVectors`.
        layer: layer whose row is projected; it must be collected, in a codec that keeps elements.
        above: minimum projection to keep, row · direction; unlike `CaptureSpec(project=)`, the direction is not
            normalised. A row at the minimum is kept; `Monitor` and `AddIf` need a score above their threshold.
        below: maximum projection to keep, itself included; give `above`, `below` or both.
        of: selection of tokens to choose from.

    Raises:
        InvalidSpec: no threshold is given, or the layer has no direction.
    """

    probe: LayerVectors
    _: KW_ONLY
    layer: int
    above: float | None = None
    below: float | None = None
    of: Tokens | TokenSelection = "all"
    _vector: torch.Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        bounds = {name: number_of(vars(self)[name]) for name in ("above", "below") if vars(self)[name] is not None}
        if not bounds or any(bound is None or bound != bound for bound in bounds.values()):  # noqa: PLR0124
            raise InvalidSpec(f"above={shown(self.above)}, below={shown(self.below)}; give thresholds as numbers")
        if self.layer not in self.probe:
            raise InvalidSpec(f"the probe has no direction for layer {self.layer}; it has {list(self.probe)}")
        vector = self.probe[self.layer].float().flatten()
        vars(self).update(bounds, of=TokenSelection.parse(self.of), _vector=vector)

    @property
    def needs(self) -> Point | None:
        return Point(self.layer, self.probe.site)

    def asked(self, window: Window, limit: int) -> TokenSelection | None:
        return Selected(self.of).asked(window, limit)

    def kept(
        self,
        window: Window,  # noqa: ARG002
        limit: int,  # noqa: ARG002
        positions: Ints,  # noqa: ARG002
        token_ids: Ints,  # noqa: ARG002
        captures: Any,
    ) -> Bools | None:
        rows = captures.elements((self.layer, self.probe.site)).flatten(1).float()
        with exact_products():
            products = rows @ self._vector
        low = -np.inf if self.above is None else self.above
        high = np.inf if self.below is None else self.below
        found: Bools = ((products >= low) & (products <= high)).numpy()
        return found

    def described(self) -> dict[str, Any]:
        vector = self._vector.numpy().tobytes()
        return {
            "tokens": str(self.of),
            "probe": hashlib.sha256(vector).hexdigest(),
            "layer": self.layer,
            "site": self.probe.site,
            "above": self.above,
            "below": self.below,
        }


def sample_of(tokens: Tokens | TokenSelection | TokenSample) -> TokenSample:
    """Return the sample for a user's `tokens` argument: a `TokenSample` itself, `Selected` for anything else.

    Raises:
        InvalidSelection: see `CaptureSpec`.
    """
    return tokens if isinstance(tokens, TokenSample) else Selected(tokens)


def _selection(mask: Bools) -> TokenSelection | None:
    if not mask.any():
        return None
    return TokenSelection((Mask(mask.view(np.uint8).tobytes()),))


def seed_of(seed: int, document: int) -> int:
    """Return the sampling seed of a document, derived from the run's seed: 0 to 2^63 - 1."""
    return mixed(mixed(seed) ^ document) >> 1
