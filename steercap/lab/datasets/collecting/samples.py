"""Which tokens are kept: those of a selection, one in k, those along a direction, those a function chooses.

None looks at what runs beside a window, so the same texts give the same tokens whenever, and wherever, they are read.
But without `concurrency=1` rows may differ in their last bits, and through them which rows `ByProbe` keeps and which
texts `params` generates.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from steercap.core.mixing import mixed, mixed_all
from steercap.core.spec import Point
from steercap.core.tokens import Range, Tokens, TokenSelection, selected
from steercap.core.values import Mask, index_of, number_of, shown
from steercap.errors import EmptySelection, InvalidSelection, InvalidSpec
from steercap.lab.datasets.collecting.windows import Window

if TYPE_CHECKING:
    from steercap.captures.rows import Captures
    from steercap.steering.layers import LayerVectors

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
#: What a predicate is called with, beside the token ids of a window: bool [tokens].
Predicate = Callable[[Window, Ints], Any]


class TokenSample(abc.ABC):
    """Which tokens of each window are kept."""

    @abc.abstractmethod
    def asked(self, window: Window, limit: int) -> TokenSelection | None:
        """The tokens whose rows the model is asked for, None for none.

        Args:
            window: the prompt.
            limit: positions that can have a row, those of generated tokens included.
        """

    def kept(
        self,
        window: Window,  # noqa: ARG002 -- what any of them needs
        limit: int,  # noqa: ARG002
        positions: Ints,  # noqa: ARG002
        token_ids: Ints,  # noqa: ARG002
        captures: Captures,  # noqa: ARG002
    ) -> Bools | None:
        """Which of the rows that came are kept: bool [rows], or None for all of them.

        Args:
            window: the prompt.
            limit: what `asked` was told.
            positions: of the rows, int64 [rows].
            token_ids: of the prompt and of what was generated, as far as they can have rows: int64 [tokens].
            captures: the rows.
        """
        return None

    @property
    def needs(self) -> Point | None:
        """A point whose rows decide, None where none does."""
        return None

    @abc.abstractmethod
    def described(self) -> dict[str, Any]:
        """What it depends on, as JSON can hold it: a run that goes on must find the same."""


@dataclass(frozen=True)
class Selected(TokenSample):
    """The tokens of a selection, as for `CaptureSpec`.

    Args:
        of: the selection.
    """

    of: Tokens | TokenSelection = "all"

    def __post_init__(self) -> None:
        object.__setattr__(self, "of", TokenSelection.parse(self.of))

    @property
    def selection(self) -> TokenSelection:
        """It, parsed."""
        return TokenSelection.parse(self.of)

    def asked(self, window: Window, limit: int) -> TokenSelection | None:
        return self.selection if self._ranges(window, limit) else None

    def described(self) -> dict[str, Any]:
        return {"tokens": str(self.selection)}

    def mask(self, window: Window, limit: int) -> Bools:
        """The tokens selected: bool [limit]."""
        return selected(self._ranges(window, limit), limit)

    def _ranges(self, window: Window, limit: int) -> tuple[Range, ...]:
        """What is selected of a window.

        Raises:
            InvalidSelection: a position or a mask that does not fit it; the message names the window.
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
    """One token in k, at random: by seed, document, window and position, so independent of what else is read.

    Args:
        k: 1 or more; each token is kept with probability 1/k.
        seed: another one gives other tokens.
        of: the tokens to draw from.

    Raises:
        InvalidSpec: k is no such number.
        InvalidSelection: see `CaptureSpec`.
    """

    k: int
    seed: int = 0
    of: Tokens | TokenSelection = "all"

    def __post_init__(self) -> None:
        k, seed = index_of(self.k), index_of(self.seed)
        if k is None or seed is None or k < 1:
            raise InvalidSpec(f"OneIn(k={shown(self.k)}, seed={shown(self.seed)}); give whole numbers, k from 1")
        object.__setattr__(self, "of", TokenSelection.parse(self.of))

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
    """The tokens that a function chooses.

    Args:
        choose: called with a `Window` and all its token ids that can have rows, whatever `of` is (int64 [tokens],
            generated ones included), from any thread; gives truth values, one for each.
        name: what it is known by: a run that goes on must find the same; by default the function's own.
        of: the tokens that are asked for at all.

    Raises:
        InvalidSpec: it cannot be called, or has no name of its own and none is given.
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
        captures: Captures,  # noqa: ARG002
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
    """The tokens whose rows lie far along a direction.

    Rows of all tokens come from the workers, and are projected here.

    Args:
        probe: a direction by layer, at one site; see `LayerVectors`.
        layer: whose row decides; it must be among those collected, and its codec keep elements.
        above: the least projection that is kept: row · direction, the direction as it is.
        below: the greatest that is; one of both, or both.
        of: the tokens that are asked for at all.

    Raises:
        InvalidSpec: no threshold, or a layer without a direction.
    """

    probe: LayerVectors
    layer: int
    above: float | None = None
    below: float | None = None
    of: Tokens | TokenSelection = "all"
    _vector: torch.Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        bounds = [None if bound is None else number_of(bound) for bound in (self.above, self.below)]
        if bounds == [None, None] or any(bound != bound for bound in bounds if bound is not None):  # noqa: PLR0124
            raise InvalidSpec("ByProbe without a threshold; give above=, below=, or both, as numbers")
        if self.layer not in self.probe:
            raise InvalidSpec(f"the probe has no direction for layer {self.layer}; it has {list(self.probe)}")
        object.__setattr__(self, "of", TokenSelection.parse(self.of))
        object.__setattr__(self, "_vector", self.probe[self.layer].float().flatten())

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
        captures: Captures,
    ) -> Bools | None:
        products = captures.elements((self.layer, self.probe.site)).flatten(1).float() @ self._vector
        low = -np.inf if self.above is None else self.above
        high = np.inf if self.below is None else self.below
        found: Bools = ((products >= low) & (products <= high)).numpy()
        return found

    def described(self) -> dict[str, Any]:
        vector = self._vector.numpy().tobytes()
        return {
            "tokens": str(self.of),
            "probe": _sha(vector),
            "layer": self.layer,
            "site": self.probe.site,
            "above": self.above,
            "below": self.below,
        }


def sample_of(tokens: Tokens | TokenSelection | TokenSample) -> TokenSample:
    """A sample, of what a user gave for `tokens`.

    Raises:
        InvalidSelection: see `CaptureSpec`.
    """
    return tokens if isinstance(tokens, TokenSample) else Selected(tokens)


def _selection(mask: Bools) -> TokenSelection | None:
    if not mask.any():
        return None
    return TokenSelection((Mask(mask.view(np.uint8).tobytes()),))


def seed_of(seed: int, document: int) -> int:
    """The seed of a document's sampling, from that of a run: 0 to 2^63 - 1."""
    return mixed(mixed(seed) ^ document) >> 1


def _sha(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


def described(sample: TokenSample) -> Mapping[str, Any]:
    """What a sample depends on, as JSON would give it back."""
    found: Mapping[str, Any] = msgspec.json.decode(msgspec.json.encode(sample.described()))
    return found
