"""Results of a patching experiment: a record for each patched or ablated run, means over pairs, and heat maps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from steercap.core.display import brief, html_table
from steercap.core.extras import extra
from steercap.core.values import choices, shown
from steercap.errors import InvalidSpec
from steercap.files.tables import export_table
from steercap.lab.mechanism.patching.plots import plot_effects
from steercap.lab.mechanism.patching.points import PatchedPlace
from steercap.lab.mechanism.patching.running import Pair

if TYPE_CHECKING:
    import pyarrow as pa

#: Quantity drawn in a heat map.
Quantity: TypeAlias = Literal["effect", "difference", "value"]
#: Number of runs in a notebook's table; names of the fields that identify a run.
STRONGEST: Final = 20
KEYS: Final = ("pair", "layer", "site", "head", "position", "receiver")


class PatchEffect(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one run in which rows were patched or ablated.

    Args:
        pair: index of the pair of prompts, or of the prompt.
        layer, site: point whose rows were replaced.
        head: index of the head whose part of the rows was replaced, None for whole rows.
        position: position of the token, None if several were patched at once.
        token: text of the token, "" if there were several.
        receiver: for path patching, the name of the receiver; "" otherwise.
        value: metric of the patched run.
        base: metric of the same prompt without a patch.
        source: metric of the run that rows were taken from; None for ablation.
    """

    pair: int
    layer: int
    site: str
    head: int | None
    position: int | None
    token: str
    receiver: str = ""
    value: float
    base: float
    source: float | None

    @property
    def difference(self) -> float:
        """`value - base`, in the metric's unit."""
        return self.value - self.base

    @property
    def effect(self) -> float:
        """Normalised effect, `(value - base) / (source - base)`: 0 for no change, 1 for the metric of the other run.

        NaN for ablation, and if both runs have the same value.
        """
        whole = math.nan if self.source is None else self.source - self.base
        return self.difference / whole if whole else math.nan


@dataclass(frozen=True, eq=False)
class Effects:
    """Results of every patched or ablated run of an experiment.

    Args:
        records: results of the runs, pair by pair, in the order of the grid.
        tokens: texts of the tokens of the patched prompt, for each pair.
    """

    records: Sequence[PatchEffect]
    tokens: Sequence[Sequence[str]]

    __repr__ = brief

    def __len__(self) -> int:
        return len(self.records)

    def _repr_html_(self) -> str:
        """Return an HTML table for a notebook: the 20 runs with the greatest differences, the strongest on top."""
        strongest = sorted(self.records, key=lambda record: -abs(np.nan_to_num(record.difference)))[:STRONGEST]
        columns = [*KEYS, "token", "base", "value", "difference", "effect"]
        rows = [[getattr(record, name) for name in columns] for record in strongest]
        return html_table(f"The strongest {len(rows)} of {len(self):,} runs", columns, rows)

    def where(self, **columns: Any) -> Effects:
        """Return the runs whose fields have the given values, in order: `effects.where(site="z", head=3)`.

        Args:
            **columns: values of any of `pair`, `layer`, `site`, `head`, `position` and `receiver`.

        Raises:
            InvalidSpec: an unknown column, or no such run.
        """
        if unknown := sorted(set(columns) - set(KEYS)):
            raise InvalidSpec(f"{unknown} is not a column to choose by; {choices(unknown[0], KEYS)}")
        found = [
            record for record in self.records if all(getattr(record, name) == value for name, value in columns.items())
        ]
        if not found:
            asked = ", ".join(f"{name}={shown(value)}" for name, value in columns.items())
            here = "; ".join(
                f"{name} is one of {_few({getattr(one, name) for one in self.records})}" for name in columns
            )
            raise InvalidSpec(f"no run has {asked}; {here}")
        return Effects(found, self.tokens)

    @property
    def table(self) -> pa.Table:
        """Runs as a pyarrow Table, one row each, with columns `difference` and `effect`."""
        with extra("experiments"):
            import pyarrow as pa

        kinds = {"site": pa.string(), "token": pa.string(), "receiver": pa.string()}
        kinds |= dict.fromkeys(("value", "base", "source", "difference", "effect"), pa.float64())
        names = (*PatchEffect.__struct_fields__, "difference", "effect")
        return pa.table(
            {
                name: pa.array([getattr(record, name) for record in self.records], kinds.get(name, pa.int64()))
                for name in names
            }
        )

    def save(self, path: str | Path) -> Path:
        """Write the table to one file, `.parquet` or `.csv`, atomically; return its path.

        Raises:
            InvalidFile: the file has another suffix.
        """
        return export_table(path, self.table)

    def array(self, of: Quantity | None = None) -> npt.NDArray[np.float64]:
        """Return means over pairs, by layer and position or head: float64 [layers, columns]; NaN without a run.

        The axes are the properties `layers` and `columns`. An "effect" is the mean difference over the mean of
        `source - base`, so that a pair whose runs have nearly equal values does not dominate.

        Args:
            of: quantity: "effect", "difference" (in the metric's unit) or "value"; by default "effect" if rows came
                from another run, else "difference".

        Raises:
            InvalidSpec: several sites or receivers, both heads and positions, or prompts of different lengths: choose
                with `where`. Also several groups of tokens, each changed together, at one place.
        """
        quantity = self.quantity(of)
        axis, layers, columns = self.axis, self.layers, self.columns
        groups = Counter((one.pair, one.layer, one.head) for one in self.records if one.position is None)
        if any(count > 1 for count in groups.values()):
            raise InvalidSpec(
                "there are several runs of one place, of different groups of tokens that were changed together, which "
                "no column tells apart; give each Grid(together=True) a call of its own"
            )
        sums = np.zeros((3, len(layers), len(columns)))
        for record in self.records:
            column = columns.index(getattr(record, axis))
            span = math.nan if record.source is None else record.source - record.base
            at = (slice(None), layers.index(record.layer), column)
            sums[at] += (1, record.value if quantity == "value" else record.difference, span)
        with np.errstate(divide="ignore", invalid="ignore"):
            found: npt.NDArray[np.float64] = sums[1] / (sums[2] if quantity == "effect" else sums[0])
        return np.where(np.isfinite(found), found, np.nan)

    @property
    def layers(self) -> list[int]:
        """Indices of the layers that were patched, ascending."""
        return sorted({record.layer for record in self.records})

    @property
    def columns(self) -> list[int | None]:
        """Positions or heads that were patched, ascending; [None] for whole rows of several tokens at once."""
        return sorted({getattr(record, self.axis) for record in self.records}, key=lambda at: -1 if at is None else at)

    @property
    def axis(self) -> Literal["position", "head"]:
        """Meaning of the columns: "position" or "head".

        Raises:
            InvalidSpec: as for `array`.
        """
        for name in ("site", "receiver"):
            if len(found := {getattr(record, name) for record in self.records}) > 1:
                raise InvalidSpec(f"there are several of {name}, {_few(found)}; choose one: effects.where({name}=...)")
        heads, positions = ({getattr(record, name) for record in self.records} for name in ("head", "position"))
        if len(heads) > 1 and len(positions) > 1:
            raise InvalidSpec(
                f"there are heads, {_few(heads)}, and positions, {_few(positions)}; choose one head or one position: "
                "effects.where(head=...)"
            )
        lengths = {len(self.tokens[record.pair]) for record in self.records}
        if len(positions) > 1 and len(lengths) > 1:
            raise InvalidSpec(
                f"the prompts have {_few(lengths)} tokens, so that their positions are not the same; choose one: "
                "effects.where(pair=...)"
            )
        return "head" if heads != {None} and len(positions) == 1 else "position"

    def quantity(self, of: Quantity | None) -> Quantity:
        """Return the quantity to draw, `of`, or for None the default: "effect", or "difference" for ablation.

        Raises:
            InvalidSpec: an unknown quantity, or the effect of an ablation.
        """
        comes_from_a_run = all(record.source is not None for record in self.records)
        if of is None:
            return "effect" if comes_from_a_run else "difference"
        if of not in get_args(Quantity) or (of == "effect" and not comes_from_a_run):
            raise InvalidSpec(
                f"of={shown(of)}; give one of {', '.join(get_args(Quantity))}; an ablation has no 'effect'"
            )
        return of

    def labels(self) -> list[str]:
        """Return labels of `columns`: head indices, or positions, with the token's text if it is one in all pairs."""
        if self.axis == "head":
            return [str(head) for head in self.columns]
        pairs = {record.pair for record in self.records}
        found = []
        for position in self.columns:
            texts = set() if position is None else {self.tokens[pair][position] for pair in pairs}
            number = "several" if position is None else str(position)
            found.append(f"{texts.pop()} {number}" if len(texts) == 1 else number)
        return found

    def plot(self, path: str | Path, *, of: Quantity | None = None) -> Path:
        """Draw heat maps, layers × positions or heads, and return `path`; see `patching.plots.plot_effects`."""
        return plot_effects(self, path, of=of)


def effect_of(
    pair: Pair,
    cell: PatchedPlace,
    *,
    value: float,
    base: float,
    source: float | None,
    receiver: str = "",
    together: bool = False,
) -> PatchEffect:
    """Return the result of a run of `pair` that was patched at `cell`; the other arguments are as in `PatchEffect`.

    Where all tokens of a grid are changed `together`, the effect is at no one position, even if there is one token.
    """
    position = cell.positions[0] if len(cell.positions) == 1 and not together else None
    return PatchEffect(
        pair=pair.number,
        layer=cell.point.layer,
        site=cell.point.site,
        head=cell.head,
        position=position,
        token="" if position is None else pair.tokens[position],
        receiver=receiver,
        value=value,
        base=base,
        source=source,
    )


def _few(values: set[Any]) -> str:
    """Format values for an error, sorted, None last, and shortened if there are many."""
    return shown(sorted(values, key=lambda value: (value is None, 0 if value is None else value)))
