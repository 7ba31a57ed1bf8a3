"""Short texts and tables that display results: `repr`, HTML in a notebook, and labels in plots.

Nothing here computes results, reads files or calls a worker, so any object can be displayed at any time.
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

#: Maximum number of items of a list in a `repr` and of their characters, of rows in a table, of characters in a cell.
FEW: Final = 8
MOST_INNER: Final = 400
MOST_ROWS: Final = 60
MOST_LETTERS: Final = 200
#: Sentinel for an absent field or default.
_LACKING: Final = object()
#: Types whose default values a `repr` leaves out, and types of mappings that are abbreviated.
_PLAIN: Final = (bool, int, float, str, tuple, type(None))
_MAPPINGS: Final = frozenset({dict, MappingProxyType})

#: Colour-blind safe colours of plots, the palette of Okabe and Ito; and the grey of chance levels.
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY: Final = "#999999"
#: Candidate places of a label: offset (x, y) in points from its dot, and the text's (ha, va).
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
    """Return a one-line `repr` of a record, with dtype and shape for tensors and counts for long lists.

    Private fields, fields at their default and fields not yet set are left out.

    Args:
        owner: a dataclass, a NamedTuple or a msgspec Struct.
        without: names of further fields to leave out.
    """
    parts = []
    for name, default in _fields_of(type(owner)).items():
        value = getattr(owner, name, _LACKING)
        usual = type(value) is type(default) and isinstance(value, _PLAIN) and value == default
        if value is not _LACKING and not usual and not name.startswith("_") and name not in without:
            parts.append(f"{name}={described(value)}")
    return f"{type(owner).__name__}({', '.join(parts)})"


def _fields_of(kind: Any) -> dict[str, Any]:
    """Return the default of each field of a dataclass, Struct or NamedTuple type; `_LACKING` or MISSING for none."""
    if known := getattr(kind, "__dataclass_fields__", None):
        return {name: field.default for name, field in known.items()}
    if (names := getattr(kind, "__struct_fields__", None)) is not None:
        defaults = kind.__struct_defaults__
        return dict.fromkeys(names, _LACKING) | dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    return {name: kind._field_defaults.get(name, _LACKING) for name in kind._fields}


def described(value: Any, depth: int = 2) -> str:
    """Return a short text of a value: dtype and shape of a tensor or array, the length of a long list.

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
    inner = ", ".join(described(part, depth - 1) for part in value[: FEW + 1])
    if len(value) > FEW or (len(value) > 1 and len(inner) > MOST_INNER):
        kinds = {type(part).__name__ for part in islice(value, FEW)}
        return f"<{len(value):,} × {kinds.pop()}>" if len(kinds) == 1 else f"<{len(value):,} items>"
    return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"


def span(layers: Sequence[int]) -> str:
    """Describe layer indices briefly: "0 to 29", "8, 16", or "40 from 0 to 90" for many with gaps."""
    if len(layers) > 2 and list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]} to {layers[-1]}"
    if len(layers) > 2 * FEW:
        return f"{len(layers)} from {layers[0]} to {layers[-1]}"
    return ", ".join(map(str, layers))


def layers_by_site(points: Iterable[tuple[int, str]]) -> str:
    """Describe points (layer, site) briefly, sites in order of appearance: "resid_post: 0 to 29; z: 8, 16"."""
    return "; ".join(f"{site}: {span(layers)}" for site, layers in _by_site(points).items())


def sites_by_layers(points: Iterable[tuple[int, str]]) -> str:
    """Describe points (layer, site), sites of equal layers together: "layers 0 to 9 of q, k; layer 0 of embed"."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for site, layers in _by_site(points).items():
        groups.setdefault(tuple(layers), []).append(site)
    return "; ".join(
        f"{'layers' if len(layers) > 1 else 'layer'} {span(layers)} of {', '.join(sites)}"
        for layers, sites in groups.items()
    )


def _by_site(points: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    sites: dict[str, list[int]] = {}
    for layer, site in points:
        sites.setdefault(site, []).append(layer)
    return sites


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table for a notebook, with escaped text and at most `MOST_ROWS` rows and a count of the rest.

    Args:
        title: title above the table.
        columns: column headings.
        rows: cells of each row; floats are shown with four significant digits, None and NaN as an empty cell.
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
    """Format a duration given in seconds: "45 s", "12 min", "3 h 20 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def ink() -> str:
    """Return the colour of texts and lines in plots: the text colour of matplotlib's current style."""
    with extra("plots"):
        from matplotlib import rcParams

    return str(rcParams["text.color"])


def place_names(axes: Any, names: Sequence[str], points: Any, size: float = 6.5, **style: Any) -> None:
    """Draw labels beside points, [names, 2] in data coordinates, each at the first place of `SIDES` where it fits.

    A label fits if it covers no other label and no point, and stays in the axes, whose limits must be final; if none
    fits, the last place is used. `size` is the font size in points; `style` is passed to matplotlib's `annotate`.
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
