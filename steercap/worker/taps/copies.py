"""Copies of rows between the device and the arena, merged into few: runs, pieces, and grids."""

from __future__ import annotations

import numpy as np

from steercap.core.rows import Ints


def runs(targets: Ints, sources: Ints, records: Ints) -> tuple[Ints, Ints, Ints]:
    """Merge records that are consecutive on both sides into runs.

    Args:
        targets, sources: first target line and first source line of each record.
        records: lines of each record, one at least.

    Returns:
        First target line, first source line and number of lines of each run.
    """
    follows = [lines[1:] == lines[:-1] + records[:-1] for lines in (targets, sources)]
    first = np.flatnonzero(np.concatenate([[True], ~(follows[0] & follows[1])]))
    return targets[first], sources[first], np.add.reduceat(records, first)


def pieces(targets: Ints, sources: Ints, sizes: Ints, most: int) -> tuple[Ints, Ints, Ints]:
    """Split copies into pieces of at most `most` bytes each, in their order."""
    if not len(sizes) or sizes.max() <= most:
        return targets, sources, sizes
    parts = -(-sizes // most)
    number = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
    done = number * most
    left = np.repeat(sizes, parts) - done
    return np.repeat(targets, parts) + done, np.repeat(sources, parts) + done, np.minimum(left, most)


def overlap(targets: Ints, sizes: Ints) -> bool:
    """Return True if some copies have bytes of their targets in common, so that their order matters."""
    order = np.argsort(targets)
    begins = targets[order]
    return bool((begins[1:] < (begins + sizes[order])[:-1]).any())


def grids(targets: Ints, sources: Ints, sizes: Ints, target_steps: Ints, source_steps: Ints) -> Ints:
    """Merge copies at regular distances into grids.

    Args:
        targets, sources, sizes: addresses and bytes of each copy, one at least: int64 [copies].
        target_steps, source_steps: bytes from each copy to the next one of the same grid, if there is one.

    Returns:
        The grids, as for `Transfers.fetch_grids`.
    """
    same = (sizes[1:] == sizes[:-1]) & (targets[1:] - targets[:-1] == target_steps[:-1])
    same &= (sources[1:] - sources[:-1] == source_steps[:-1]) & (target_steps[1:] == target_steps[:-1])
    same &= source_steps[1:] == source_steps[:-1]
    first = np.flatnonzero(np.concatenate([[True], ~same]))
    rows = np.diff(np.append(first, len(sizes)))
    columns = (targets[first], sources[first], sizes[first], rows, target_steps[first], source_steps[first])
    return np.stack(columns, axis=1)
