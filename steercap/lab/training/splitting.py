"""Split of examples into training and held-out ones: whole sources, drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence

from steercap.core.values import number_of, shown
from steercap.errors import InvalidSetting


def split(sources: Sequence[Hashable | None], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the indices of training examples, and of held-out ones.

    Examples of one source are on one side, all of them. Which sources are held out depends on their names and on the
    seed, not on the order of the examples.

    Args:
        sources: source of each example; None for one of its own.
        share: share of the sources to hold out, in (0, 1); one at least, and not all.
        seed: seed of the draw.

    Raises:
        InvalidSetting: the share is out of range, or there are fewer than two sources.
    """
    given = number_of(share)
    if given is None or not 0 < given < 1:
        raise InvalidSetting(f"validation={shown(share)}; give a share of the sources, between 0 and 1")
    named = [(str(place), "") if source is None else ("", str(source)) for place, source in enumerate(sources)]
    distinct = sorted(set(named))
    if len(distinct) < 2:
        raise InvalidSetting(f"{len(distinct)} source; to hold some out, at least 2 are needed")
    count = min(max(1, round(given * len(distinct))), len(distinct) - 1)
    out = set(random.Random(seed).sample(distinct, count))  # noqa: S311 -- a split, no secret
    seen = [place for place, source in enumerate(named) if source not in out]
    return seen, [place for place, source in enumerate(named) if source in out]
