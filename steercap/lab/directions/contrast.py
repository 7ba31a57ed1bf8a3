"""Two kinds of rows, and the direction between them: computed from some groups of texts, tested on the others."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Final

import torch
from jaxtyping import Float

from steercap.core.display import brief
from steercap.core.extras import require
from steercap.core.hints import dataclass
from steercap.core.spec import Layers
from steercap.core.values import number_of, parts_of, shown, warn
from steercap.errors import InvalidSpec, InvalidVector
from steercap.lab.directions.methods import METHODS, runs_of
from steercap.steering.directions import DirectionSet, Provenance
from steercap.steering.edits.inputs import layers_among
from steercap.steering.layers import LayerVectors

#: Multiple of the median norm from which a text's row dominates a direction. Of 100 texts that SmolLM2 read,
#: mean rows stay within 3.1 times the median, but for two with an attention sink inside: up to 27 times.
OUTLYING: Final = 4.0
#: Fraction of the texts above which long rows are not reported as outliers.
_FEW: Final = 0.25


@dataclass(frozen=True, eq=False)
class Contrast:
    """Rows of texts that show a property (positive) and of texts that do not (negative).

    Args:
        positive, negative: rows of each kind, float32 [texts, layers, hidden].
        positive_groups, negative_groups: group of each text, such as its question: texts of one group are held out
            together, and are paired, in their order, for methods that compare pairs.
    """

    positive: Float[torch.Tensor, "p layers hidden"]
    negative: Float[torch.Tensor, "n layers hidden"]
    positive_groups: Sequence[Hashable]
    negative_groups: Sequence[Hashable]

    __repr__ = brief

    def __post_init__(self) -> None:
        for kind in ("positive", "negative"):
            rows, groups = getattr(self, kind), _groups(getattr(self, f"{kind}_groups"), kind)
            object.__setattr__(self, f"{kind}_groups", groups)
            if not isinstance(rows, torch.Tensor) or not rows.is_floating_point():
                raise InvalidSpec(
                    f"Contrast: {kind}={shown(rows)}; give a floating-point tensor [texts, layers, hidden]"
                )
            if rows.dim() != 3 or len(rows) != len(groups) or not len(rows):
                raise InvalidSpec(
                    f"Contrast: {kind} rows {tuple(rows.shape)} in {len(groups)} groups; expected "
                    "[texts, layers, hidden], one text at least, and a group for each"
                )

        if self.positive.shape[1:] != self.negative.shape[1:]:
            raise InvalidSpec(
                f"Contrast: positive rows are {tuple(self.positive.shape)}, negative ones "
                f"{tuple(self.negative.shape)}; both must be of the same layers and width"
            )

    def split(self, held_out: float, seed: int) -> tuple[Contrast, Contrast | None]:
        """Split by whole groups into texts to compute a direction from and texts to test it on, None for held_out=0.

        Args:
            held_out: fraction of the groups with texts of both kinds to hold out, in [0, 1); one at least unless 0.
            seed: seed of the draw.

        Raises:
            InvalidSpec: too few groups for both parts.
        """
        share = number_of(held_out)
        if share is None or not 0 <= share < 1:
            raise InvalidSpec(f"held_out={shown(held_out)}; give a share of the groups, from 0 to less than 1")
        if not share:
            return self, None
        theirs = set(self.negative_groups)
        common = [group for group in dict.fromkeys(self.positive_groups) if group in theirs]
        count = max(1, round(share * len(common)))
        if len(common) < 2:
            raise InvalidSpec(f"{len(common)} groups have texts of both kinds; to hold some out, at least 2 are needed")
        out = set(random.Random(seed).sample(common, min(count, len(common) - 1)))  # noqa: S311 -- a split, no secret
        return self._where(lambda group: group not in out), self._where(lambda group: group in out)

    def pairs(self) -> Contrast:
        """Return the texts that can be paired in their groups, row i of both kinds being a pair; drop the others."""
        places: list[tuple[int, int]] = []
        waiting: dict[Hashable, list[int]] = {}
        for place, group in enumerate(self.negative_groups):
            waiting.setdefault(group, []).append(place)
        for place, group in enumerate(self.positive_groups):
            if waiting.get(group):
                places.append((place, waiting[group].pop(0)))
        if not places:
            raise InvalidSpec("no group has texts of both kinds, so there are no pairs to compare")
        ours, theirs = zip(*places, strict=True)
        return self._at(ours, theirs)

    def _where(self, wanted: Any) -> Contrast:
        return self._at(
            [place for place, group in enumerate(self.positive_groups) if wanted(group)],
            [place for place, group in enumerate(self.negative_groups) if wanted(group)],
        )

    def _at(self, ours: Sequence[int], theirs: Sequence[int]) -> Contrast:
        return Contrast(
            self.positive[list(ours)],
            self.negative[list(theirs)],
            [self.positive_groups[place] for place in ours],
            [self.negative_groups[place] for place in theirs],
        )


def check_groups(
    positive: Sequence[Hashable], negative: Sequence[Hashable], *, method: str, held_out: float, seed: int = 0
) -> None:
    """Check, before texts are read, that a direction can be computed from texts of these groups; see `extract`.

    Raises:
        UnknownName: the method does not exist.
        MissingExtra: the method's libraries are not installed.
        InvalidSpec: there are no texts, too few groups to hold any out, or no pairs for a method that needs them.
    """
    how = METHODS[method]
    require(*how.extras)
    ours, theirs = (torch.zeros(len(groups), 1, 1) for groups in (positive, negative))
    seen, _ = Contrast(ours, theirs, positive, negative).split(held_out, seed)
    if how.paired:
        seen.pairs()


def _groups(given: Any, kind: str) -> list[Hashable]:
    found = parts_of(given, f"Contrast: {kind}_groups")
    if found is None or not all(isinstance(group, Hashable) for group in found):
        raise InvalidSpec(f"Contrast: {kind}_groups={shown(given)}; give a list of text or numbers, one for each text")
    return found


def directions_of(
    name: str,
    contrast: Contrast,
    layers: Layers,
    *,
    method: str = "difference",
    site: str = "resid_post",
    held_out: float = 0.25,
    seed: int = 0,
) -> DirectionSet:
    """Return a set of one direction computed from rows, with its AUC on held-out rows in the provenance.

    Args:
        name: name of the direction.
        contrast: positive and negative rows.
        layers: layer indices along the rows' second axis: an index, a range, several, or "all" for 0 and up.
        method, site, held_out, seed: arguments as for `extract`.

    Raises:
        UnknownName: the method does not exist.
        InvalidSpec: there are too few groups to hold any out, or no pairs for a method that needs them.
        InvalidVector: a row holds NaN or inf.
    """
    how, layers = METHODS[method], _layers_of(contrast, layers, range(contrast.positive.shape[1]))
    for rows in (contrast.positive, contrast.negative):
        if not rows.isfinite().all():
            raise InvalidVector("Contrast: some rows hold NaN or infinity; check how they were captured")
    seen, unseen = contrast.split(held_out, seed)
    used = seen.pairs() if how.paired else seen
    if left := len(seen.positive) + len(seen.negative) - len(used.positive) - len(used.negative):
        warn(
            f"{name}: method={method!r} compares pairs, and leaves out {left} of {len(seen.positive)} positive and "
            f"{len(seen.negative)} negative texts, which have no partner of the other kind in their group; give as "
            "many of each, groups= and negative_groups=, or method='difference'"
        )
    vectors = {
        layer: how.direction(used.positive[:, at].double(), used.negative[:, at].double(), seed)
        for at, layer in enumerate(layers)
    }
    found = LayerVectors(vectors, name=name, site=site)
    norms = torch.cat([contrast.positive, contrast.negative]).double().norm(dim=-1)
    _warn_of_long(name, norms, len(contrast.positive), layers)
    provenance = Provenance(
        method=method,
        seed=seed,
        rows={name: (len(used.positive), len(used.negative))},
        held_out={name: (len(unseen.positive), len(unseen.negative)) if unseen else (0, 0)},
        auc={name: separability(found, unseen, layers)} if unseen else {},
        row_norms={name: dict(zip(layers, norms.mean(0).tolist(), strict=True))},
    )
    return DirectionSet({name: found}, provenance)


def _layers_of(contrast: Contrast, layers: Layers, known: Iterable[int]) -> list[int]:
    """Return layers along the rows' second axis, `known` for "all"; raise InvalidSpec if they do not fit."""
    found = layers_among(layers, known)
    if len(found) != contrast.positive.shape[1] or len(set(found)) < len(found):
        number = contrast.positive.shape[1]
        raise InvalidSpec(f"layers={shown(layers)} for rows of {number} layers; give one each, all different")
    return found


def _warn_of_long(name: str, norms: Float[torch.Tensor, "texts layers"], positive: int, layers: Sequence[int]) -> None:
    """Warn of a few texts whose rows have far greater norms than others'; the first `positive` texts are positive."""
    median = norms.median(dim=0).values
    long = (norms > OUTLYING * median) & (median > 0)
    long &= long.double().mean(dim=0) <= _FEW
    if not long.any():
        return
    places = long.any(dim=1).nonzero()[:, 0].tolist()
    texts = [f"positive[{at}]" if at < positive else f"negative[{at - positive}]" for at in places]
    at = [layer for layer, found in zip(layers, long.any(dim=0).tolist(), strict=True) if found]
    warn(
        f"{name}: at layers {runs_of(at)} the rows of {', '.join(texts[:3])}{', ...' if len(texts) > 3 else ''} (texts "
        f"count from 0) are over {OUTLYING:g} times as long as most, so they alone decide the direction there. One of "
        "their tokens is likely an attention sink: leave these texts out, reword them, or start tokens= behind it"
    )


def separability(vectors: LayerVectors, contrast: Contrast, layers: Layers) -> dict[int, float]:
    """Return by layer the AUC of the rows' projections on the layer's vector: 1 separates all, 0.5 is chance.

    Args:
        vectors: vectors for each of `layers` at least.
        contrast: rows that the vectors were not computed from.
        layers: layer indices along the rows' second axis: an index, a range, several, or "all" of the vectors'.

    Raises:
        InvalidSpec: the rows have another number of layers.
    """
    found = {}
    for at, layer in enumerate(_layers_of(contrast, layers, vectors)):
        along = vectors[layer].double()
        found[layer] = area(contrast.positive[:, at].double() @ along, contrast.negative[:, at].double() @ along)
    return found


def area(positive: Float[torch.Tensor, " p"], negative: Float[torch.Tensor, " n"]) -> float:
    """Return the area under the ROC curve: the fraction of pairs with the positive value above, ties counted half.

    Source: Hanley and McNeil (1982), The meaning and use of the area under a receiver operating characteristic curve.

    Raises:
        InvalidVector: a value is NaN or infinite.
    """
    if not (positive.isfinite().all() and negative.isfinite().all()):
        raise InvalidVector("the rows to separate hold NaN or infinity; leave out the text that overflows")
    ordered = negative.sort().values
    below, up_to = (torch.searchsorted(ordered, positive.contiguous(), right=right).sum() for right in (False, True))
    return float(below + up_to) / (2 * len(positive) * len(negative))


def random_like(vectors: LayerVectors, index: int, seed: int, layers: Layers = "all") -> LayerVectors:
    """Return a random vector for each layer, with the norm of the given one, as a control.

    Directions are uniform on the sphere. Each depends on seed, name of the vectors, index and layer alone, and not on
    the other layers or controls that are drawn.

    Args:
        vectors: vectors to match.
        index: index of the random control, from 0.
        seed: seed of the draw.
        layers: layers to draw for: an index, a range, several, or "all" of `vectors`.
    """
    sized = dict[int, torch.Tensor]()
    for layer in layers_among(layers, vectors):
        generator = torch.Generator().manual_seed(derived_seed(f"{seed}/{vectors.name}/{index}/{layer}"))
        drawn = torch.randn(vectors.width, generator=generator).double()
        sized[layer] = drawn * (vectors[layer].double().norm() / drawn.norm())
    return LayerVectors(sized, name=f"{vectors.name}-random-{index:02}", model=vectors.model, site=vectors.site)


def derived_seed(text: str) -> int:
    """Return a 63-bit seed that depends on `text` alone, by SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1
