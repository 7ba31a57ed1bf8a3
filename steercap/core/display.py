"""Short texts and tables by which results show themselves: `repr`, and HTML in a notebook.

Nothing here computes, reads a file or asks a worker, so that any object can be shown at any time.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from steercap.core.extras import extra
from steercap.core.values import shown

#: Number of items that a `repr` lists, and of rows and letters of a cell that a notebook's table has.
FEW: Final = 8
MOST_ROWS: Final = 60
MOST_LETTERS: Final = 200
#: Stands for a field or a default that is not there.
_LACKING: Final = object()
#: Types whose defaults a `repr` leaves out, and mappings without a short `repr` of their own.
_PLAIN: Final = (bool, int, float, str, tuple, type(None))
_MAPPINGS: Final = frozenset({dict, MappingProxyType})

#: Colours of pictures that every kind of eye tells apart, the palette of Okabe and Ito; and the grey of chance.
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY: Final = "#999999"
#: Candidate places of a name: offset in points to the right of its dot and above it, and the anchor of the text.
SIDES: Final = (
    (4, 0, "left", "center"),
    (-4, 0, "right", "center"),
    (0, 4, "center", "bottom"),
    (0, -4, "center", "top"),
    (4, 6, "left", "bottom"),
    (-4, 6, "right", "bottom"),
    (4, -6, "left", "top"),
    (-4, -6, "right", "top"),
)


def brief(owner: Any, *without: str) -> str:
    """Return a short text of a record, to be its `__repr__`: shapes for tensors, counts for many items.

    Private fields and those at a plain default are left out, and those that an unfinished object lacks.

    Args:
        owner: a dataclass, a NamedTuple or a msgspec Struct.
        without: further fields to leave out.
    """
    parts = []
    for name, default in _fields_of(type(owner)).items():
        value = getattr(owner, name, _LACKING)
        usual = type(value) is type(default) and isinstance(value, _PLAIN) and value == default
        if value is not _LACKING and not usual and not name.startswith("_") and name not in without:
            parts.append(f"{name}={described(value)}")
    return f"{type(owner).__name__}({', '.join(parts)})"


def _fields_of(kind: Any) -> dict[str, Any]:
    """Return the default of each field of a kind of record, `_LACKING` or MISSING for those without."""
    if known := getattr(kind, "__dataclass_fields__", None):
        return {name: field.default for name, field in known.items()}
    if (names := getattr(kind, "__struct_fields__", None)) is not None:
        defaults = kind.__struct_defaults__
        return dict.fromkeys(names, _LACKING) | dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    return {name: kind._field_defaults.get(name, _LACKING) for name in kind._fields}


def described(value: Any, depth: int = 2) -> str:
    """Return a short text of a value: dtype and shape of a tensor or an array, the number of many items.

    Args:
        value: any value.
        depth: number of nested lists that are described item by item.
    """
    arrays = type(value).__module__.partition(".")[0] in {"numpy", "torch"}
    if arrays and {"shape", "dtype"} <= set(dir(type(value))) and not isinstance(value, np.generic):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if type(value) in _MAPPINGS:
        keys = ", ".join(map(shown, islice(value, FEW)))
        return f"<{len(value):,} by name: {keys}{', ...' if len(value) > FEW else ''}>" if value else "{}"
    if type(value) not in {list, tuple} or not depth:
        return shown(value)
    if len(value) > FEW:
        kinds = {type(part).__name__ for part in islice(value, FEW)}
        return f"<{len(value):,} × {kinds.pop()}>" if len(kinds) == 1 else f"<{len(value):,} items>"
    inner = ", ".join(described(part, depth - 1) for part in value)
    return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"


def span(layers: Sequence[int]) -> str:
    """Describe layers briefly: "0 to 29" or "8, 16"; of many with gaps the first, the last and the number."""
    if len(layers) > 2 and list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]} to {layers[-1]}"
    if len(layers) > 2 * FEW:
        return f"{len(layers)} from {layers[0]} to {layers[-1]}"
    return ", ".join(map(str, layers))


def layers_by_site(points: Iterable[tuple[int, str]]) -> str:
    """Describe points (layer, site) briefly, in their order: "resid_post: 0 to 29; z: 8, 16"."""
    sites: dict[str, list[int]] = {}
    for layer, site in points:
        sites.setdefault(site, []).append(layer)
    return "; ".join(f"{site}: {span(layers)}" for site, layers in sites.items())


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table for a notebook: every text escaped, at most `MOST_ROWS` rows, and the number of the others.

    Args:
        title: line above it.
        columns: heads of the columns.
        rows: cells of each row; numbers are shown with four digits, None and NaN as an empty cell.
    """
    cells = [list(row) for row in rows]
    more = f"<div>and {len(cells) - MOST_ROWS:,} rows more</div>" if len(cells) > MOST_ROWS else ""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>" for row in cells[:MOST_ROWS])
    top = f"<div style='font-weight:bold'>{html.escape(title)}</div>"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div style='overflow-x:auto;font-size:12px'>{top}{table}{more}</div>"


def _cell(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return html.escape(text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 1]}…")


def duration(seconds: float) -> str:
    """Return a duration in words: "45 s", "12 min", "3 h 20 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def ink() -> str:
    """Return the colour of texts and lines in pictures: that of matplotlib's style, black without one."""
    with extra("plots"):
        from matplotlib import rcParams

    return str(rcParams["text.color"])


def place_names(axes: Any, names: Sequence[str], points: Any, size: float = 6.5, **style: Any) -> None:
    """Draw names beside points, [names, 2], each on the first side where it fits.

    A name fits if it covers no other name and no point, and stays in the axes, whose limits are final; if no side fits,
    the last one is used. `style` goes to matplotlib's `annotate`.
    """
    axes.figure.draw_without_rendering()  # so that places in the axes are known
    taken: list[Any] = []
    dots, frame = axes.transData.transform(points), axes.get_window_extent()
    for name, point in zip(names, points, strict=True):
        for number, (across, up, beside, over) in enumerate(SIDES, 1):
            how = {"ha": beside, "va": over, "fontsize": size, "color": ink(), **style}
            text = axes.annotate(name, point, (across, up), textcoords="offset points", **how)
            box = text.get_window_extent()
            covers = any(map(box.overlaps, taken)) or any(box.contains(*dot) for dot in dots)
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 + 12 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if number == len(SIDES) or (inside and not covers):
                taken.append(box)
                break
            text.remove()
