"""How the elements of rows lie and spread, by point, so that a codec can give each of them a step of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float

from steercap.concurrency.bounded import each_of
from steercap.core.prompts import special_asked
from steercap.core.protocols import SketchingModel
from steercap.core.spec import Layers, Point
from steercap.core.tokens import Tokens, TokenSelection
from steercap.core.values import index_of, shown
from steercap.edits.inputs import float32_copy
from steercap.errors import InvalidRequest, InvalidSpec, InvalidVector
from steercap.files import native
from steercap.files.native import Kind
from steercap.runs.fingerprint import model_name
from steercap.vectors.extraction import BUT_THE_FIRST, CALL_TEXTS, CALLS, Text, check_texts, digest_of, ids_of, sha_of
from steercap.vectors.layers import FrozenMapping

#: Elements that hardly move count as if they moved by this share of what the typical one does: a row in which such an
#: element moves after all would otherwise lose all others.
LEAST: Final = 0.01


@dataclass(frozen=True, eq=False)
class Calibration:
    """What elements are about, and how far they usually are from it; made by `SteerModel.calibrate`.

    Args:
        means: of each element, by point: float32 [width], of heads one after another.
        spreads: their standard deviations, by the same points: float32 [width].
        model: whose rows they were.
        revision: of the model.
        dtype: that the model computed in.
        tokens: which tokens' rows, as `TokenSelection` writes it.
        prompts: SHA-256 of all token ids read.
        texts: how many were read.
        rows: how many rows of each point they had.

    Raises:
        InvalidSpec: no point, something that is none, or other points in `means` than in `spreads`.
        InvalidVector: vectors that are not finite in float32, of different widths, or a negative spread.
    """

    means: Mapping[Point, Float[torch.Tensor, " width"]]
    spreads: Mapping[Point, Float[torch.Tensor, " width"]]
    model: str = ""
    revision: str = ""
    dtype: str = ""
    tokens: str = ""
    prompts: str = ""
    texts: int = 0
    rows: int = 0

    def __post_init__(self) -> None:
        found = {}
        for name in ("means", "spreads"):
            given = getattr(self, name)
            if not isinstance(given, Mapping) or not given:
                raise InvalidSpec(f"Calibration: {name}={shown(given)}; give a vector for each point, one at least")
            found[name] = {
                _point(point): float32_copy(vector, f"Calibration: {name} at {shown(point)}", "width")
                for point, vector in given.items()
            }
        if found["means"].keys() != found["spreads"].keys():
            raise InvalidSpec("Calibration: means and spreads are of different points")
        for point, mean in found["means"].items():
            spread = found["spreads"][point]
            if mean.shape != spread.shape or bool((spread < 0).any()):
                raise InvalidVector(f"Calibration: the spreads at {point} must be {len(mean)} numbers, none negative")
        for name, vectors in found.items():
            object.__setattr__(self, name, FrozenMapping(vectors))

    @property
    def points(self) -> tuple[Point, ...]:
        """The points that it knows."""
        return tuple(self.means)

    def reach(self, point: Point) -> Float[torch.Tensor, " width"]:
        """What rows less their means are divided by: the spreads, those of elements that hardly move raised to a
        hundredth of the typical one; 1 where nothing moves. float32 [width], none denormal.
        """
        spread = self.spreads[point]
        moving = spread[spread > 0]
        if not len(moving):
            return torch.ones_like(spread)
        # A hundredth of a tiny spread can be 0 in float32, and no row could be divided by it.
        return spread.clamp(min=max(LEAST * float(moving.median()), torch.finfo(torch.float32).tiny))

    def save(self, path: str | Path) -> Path:
        """Write all of it to one safetensors file; see `steercap.files.native`.

        Raises:
            InvalidFile: the name ends in something other than .safetensors.
        """
        return native.save(self, path, _kind(), model=self.model)

    @staticmethod
    def load(path: str | Path) -> Calibration:
        """Read what `save` wrote.

        Raises:
            InvalidFile: the file is truncated, changed, of another kind, or of a newer version.
        """
        return native.load(path, _kind(), Calibration)

    def __repr__(self) -> str:
        about = f"{self.rows} rows of {self.texts} texts, model={self.model!r}"
        return f"Calibration({', '.join(map(str, self.points))}, {about})"


async def calibrate(
    model: SketchingModel,
    texts: Sequence[Text],
    *,
    layers: Layers = "all",
    sites: str | Sequence[str] = ("resid_post",),
    tokens: Tokens | TokenSelection = BUT_THE_FIRST,
    add_special_tokens: bool | None = None,
    progress: Callable[[int], None] | None = None,
) -> Calibration:
    """Have the model read texts, and find out how the elements of its rows lie and spread; no row leaves the workers.

    The texts are read unsteered, whatever `model.steered` says around the call. Inside `model.sketch` they join that
    sketch too, as all calls do.

    Args:
        model: an open model.
        texts: str, token ids, or `Exchange(prompt, response)`, which is read as a whole: some dozens that are like what
            is to be captured.
        layers, sites: where.
        tokens: which tokens' rows. By default all but the first, whose row in most models is an attention sink.
        add_special_tokens: as for `SteerModel.generate`; False for rendered chats, which have theirs.
        progress: called with the number of texts read so far.

    Raises:
        InvalidSpec: no texts.
        InvalidRequest: they have fewer than two rows.
        CaptureNotFinite: a row holds NaN or infinity.
        The errors of `SteerModel.sketch` and `SteerModel.read`.
    """
    check_texts(texts)
    if not texts:
        raise InvalidSpec("no texts to read; give at least one")
    asked = ids_of(model.tokenizer, texts, special_asked(add_special_tokens))
    finished = 0

    async def read(part: Sequence[list[int]]) -> None:
        nonlocal finished
        await model.read([{"prompt_token_ids": ids} for ids in part], capture=None, steering=None)
        finished += len(part)
        if progress is not None:
            progress(finished)

    async with model.sketch("variances", layers=layers, sites=sites, tokens=tokens) as running:
        await each_of([asked[first : first + CALL_TEXTS] for first in range(0, len(asked), CALL_TEXTS)], read, CALLS)
        if running.rows < 2:
            raise InvalidRequest(f"these texts have {running.rows} rows at the tokens {tokens}; give two at least")
        found = await running.fetch()
    return Calibration(
        {point: found.mean(*point).float() for point in found.points},
        {point: found.variance(*point).sqrt().float() for point in found.points},
        model=model_name(model.model),
        revision=model.origin["revision"],
        dtype=found.dtype,
        tokens=str(found.tokens),
        prompts=digest_of([sha_of(ids) for ids in asked]),
        texts=len(texts),
        rows=found.rows,
    )


def _point(point: Any) -> Point:
    """A point as a user wrote it.

    Raises:
        InvalidSpec: it is not a layer and a site.
    """
    layer, site = point if isinstance(point, tuple) and len(point) == 2 else (None, None)
    index = index_of(layer)
    if index is None or index < 0 or not isinstance(site, str):
        raise InvalidSpec(f"Calibration: {shown(point)} is no point; give Point(layer, site), layers from 0")
    return Point(index, site)


def _kind() -> Kind:
    return Kind("calibration", {"Calibration": Calibration})
