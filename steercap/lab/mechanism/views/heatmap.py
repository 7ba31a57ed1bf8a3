"""Heat maps of tokens: in a notebook, in a terminal, and as a picture of tokens by names or layers.

Colours diverge around a centre; text on them is black or white, whichever contrasts more.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from steercap.core.extras import extra
from steercap.core.prompts import FONT, drawn, lines_of, texts_of, visible
from steercap.core.values import index_of, number_of, shown
from steercap.errors import InvalidRequest
from steercap.files.base import save_figure
from steercap.files.fingerprint import names_of, warn_of_other_model

if TYPE_CHECKING:
    import torch
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

    from steercap.core.protocols import FetchedRows
    from steercap.steering.directions import DirectionSet
    from steercap.steering.layers import LayerVectors

#: RGB colours below, at and above the centre: blue, white and orange, which the colour-blind can tell apart.
BELOW, CENTRE, ABOVE = (33, 102, 172), (247, 247, 247), (230, 97, 1)
#: Colour of NaN and inf.
UNKNOWN: Final = (200, 200, 200)
#: Multiple of the median distance from the centre beyond which a value is ignored for the default limit: the first
#: token of most models is a hundred times as far off as others, which would all be white.
FAR: Final = 10.0
SPAN_STYLE: Final = "padding:1px 0;border-radius:2px;white-space:pre-wrap"
BLOCK_STYLE: Final = "font-family:monospace;font-size:13px;line-height:1.7;margin:4px 0 10px;overflow-wrap:anywhere"
#: Tokens in a line of a picture; sizes in inches: of a cell, of a letter of a label, of the margins and of the scale.
LINE: Final = 48
CELL: Final = 0.24
LETTER: Final = 0.07
LEFT, TOP, GAP, SCALE, TITLE_LETTER = 0.3, 0.5, 0.25, 0.9, 0.085
#: Maximum lines of tokens in one picture: matplotlib draws at most 65,535 pixels in a direction.
LINES: Final = 200


@dataclass(frozen=True, eq=False, repr=False)
class TokenHeatmap:
    """Heat map with a number for each token, or for each token and name: blue below the centre, orange above.

    It is displayed as HTML in a notebook and as coloured text by rich; `plot` writes a picture.

    Args:
        tokens: text of each token.
        values: [tokens], or [tokens, names]; numbers, an array, or a tensor of any dtype and device.
        names: names of the columns, such as directions or layers; may be left out for a single one.
        title: title of the heat map.
        centre: value that is white; the scale is symmetric around it.
        limit: distance from the centre at and beyond which colours are full. By default the greatest distance of a
            value, those beyond ten times the median distance ignored.
        unit: unit of the values, for the legend.
        positions: position of each token, shown with it; by default they are counted from 0.

    Raises:
        InvalidRequest: there are no tokens, values are not real numbers of this shape, or centre or limit is not valid.
    """

    tokens: Sequence[str]
    values: Any
    names: Sequence[str] = ()
    title: str = ""
    centre: float = 0.0
    limit: float | None = None
    unit: str = ""
    positions: Sequence[int] = ()

    def __post_init__(self) -> None:
        values = _numbers(self.values)
        values = values[:, None] if values.ndim == 1 else values
        names = tuple(map(str, self.names)) or ("",)
        if not len(self.tokens) or values.shape != (len(self.tokens), len(names)):
            raise InvalidRequest(
                f"TokenHeatmap: values {list(values.shape)} for {len(self.tokens)} tokens and names {list(names)}; "
                "give [tokens] or [tokens, names], with at least one token"
            )
        positions = tuple(self.positions) or tuple(range(len(self.tokens)))
        if len(positions) != len(self.tokens):
            raise InvalidRequest(
                f"TokenHeatmap: {len(positions)} positions for {len(self.tokens)} tokens; give one each"
            )
        values.flags.writeable = False
        object.__setattr__(self, "positions", positions)
        object.__setattr__(self, "tokens", tuple(self.tokens))
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "names", names)
        centre = number_of(self.centre)
        if centre is None or not math.isfinite(centre):
            raise InvalidRequest(f"TokenHeatmap: centre={shown(self.centre)}; give the value that is white")
        object.__setattr__(self, "centre", centre)
        limit = _usual(values, centre) if self.limit is None else number_of(self.limit)
        if limit is None or not 0 <= limit < float("inf"):
            raise InvalidRequest(f"TokenHeatmap: limit={shown(self.limit)}; give a distance from the centre")
        object.__setattr__(self, "limit", limit)

    @property
    def legend(self) -> str:
        """Legend of the colours and the range of the values, as text."""
        assert self.limit is not None
        known = self.values[np.isfinite(self.values)]
        seen = f"values {_shown(known.min())} to {_shown(known.max())}" if len(known) else "no finite values"
        unit = f" {self.unit}" if self.unit else ""
        low, high = _shown(self.centre - self.limit), _shown(self.centre + self.limit)
        return f"≤ {low} blue · {_shown(self.centre)} white · ≥ {high} orange{unit}; {seen}"

    def __repr__(self) -> str:
        """Return a short text, since a notebook keeps it next to the HTML."""
        names = f", names={list(self.names)}" if any(self.names) else ""
        return f"TokenHeatmap({self.title!r}, {len(self.tokens)} tokens{names}; {self.legend})"

    # Notebook

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: a block of text for each name; a token's value shows on hover."""
        title = f"<div style='font-weight:bold;margin-bottom:4px'>{html.escape(self.title)}</div>" if self.title else ""
        blocks = "".join(self._block(place, name) for place, name in enumerate(self.names))
        return f"<div>{title}{blocks}{self._scale()}</div>"

    def _block(self, place: int, name: str) -> str:
        head = f"<div style='opacity:.7'>{html.escape(name)}</div>" if name else ""
        cells = zip(self.tokens, self.values[:, place], self.positions, strict=True)
        spans = "".join(self._span(token, value, position) for token, value, position in cells)
        return f"<div style='{BLOCK_STYLE}'>{head}{spans}</div>"

    def _span(self, token: str, value: float, position: int) -> str:
        background = self._colour(value)
        said = html.escape(f"{position}: {token!r} {_shown(value)}", quote=True)
        style = f"background:{background};color:{ink(background)};{SPAN_STYLE}"
        shown = html.escape(visible(token)).replace("↵", "↵<br>")
        return f'<wbr><span title="{said}" style="{style}">{shown}</span>'

    def _scale(self) -> str:
        stops = ",".join(f"rgb{end}" for end in (BELOW, CENTRE, ABOVE))
        style = f"display:inline-block;width:120px;height:10px;background:linear-gradient(to right,{stops})"
        bar = f"<span style='{style}'></span>"
        return f"<div style='font-size:11px;opacity:.7'>{bar} {html.escape(self.legend)}</div>"

    # Terminal

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield coloured text for a terminal, in lines that end between tokens."""
        with extra("cli"):
            from rich.text import Text

        if self.title:
            yield Text(self.title, style="bold")
        for place, name in enumerate(self.names):
            if name:
                yield Text(name, style="dim")
            yield from self._lines(place, options.max_width)
        yield Text(self.legend, style="dim")

    def _lines(self, place: int, width: int) -> Iterator[Text]:
        """Yield the tokens under one name, in lines of at most `width` cells; rich folds a longer token."""
        with extra("cli"):
            from rich.cells import cell_len
            from rich.text import Text

        line = Text(overflow="fold")
        for at, token in enumerate(self.tokens):
            background, shown = self._colour(self.values[at, place]), visible(token)
            if line and line.cell_len + cell_len(shown) > width:
                yield line
                line = Text(overflow="fold")
            for number, part in enumerate(shown.split("↵")):
                if number:
                    line.append("↵", style=f"{ink(background)} on {background}")
                    yield line
                    line = Text(overflow="fold")
                line.append(part, style=f"{ink(background)} on {background}")
        if line:
            yield line

    # Picture

    def plot(self, path: str | Path) -> Path:
        """Draw a grid, tokens from left to right in lines of 48 with a row for each name, and return the file's path.

        Args:
            path: file to write; its suffix sets the format.

        Raises:
            InvalidRequest: there are more than 9,600 tokens, too many for one picture.
        """
        with extra("plots"):
            from matplotlib.figure import Figure

        lines = list(lines_of(self.tokens, LINE))
        if len(lines) > LINES:
            raise InvalidRequest(
                f"TokenHeatmap: {len(self.tokens)} tokens do not fit one picture, which holds {LINES * LINE}; "
                "plot it in parts"
            )
        grid = len(self.names) * CELL
        below = [LETTER * max(len(drawn(token)) for token in line) + GAP for _, line in lines]
        left = LEFT + LETTER * max(map(len, self.names))
        span = max(min(len(self.tokens), LINE) * CELL, TITLE_LETTER * len(self.title) - left)
        width, height = left + span + SCALE, TOP + sum(below) + grid * len(lines)
        figure = Figure(figsize=(width, height))
        top = height - TOP
        for (first, line), under in zip(lines, below, strict=True):
            box = (left / width, (top - grid) / height, len(line) * CELL / width, grid / height)
            axes = figure.add_axes(box)
            image = self._draw(axes, first, line)
            top -= grid + under
        box = ((left + span + 0.1) / width, (height - TOP - grid) / height, 0.12 / width, grid / height)
        bar = figure.add_axes(box)
        figure.colorbar(image, cax=bar, label=self.unit, extend="both")
        figure.text(left / width, 1 - TOP / 2 / height, self.title.replace("$", r"\$"), fontsize=10, va="center")
        return save_figure(figure, path, 110, bbox_inches="tight", pad_inches=0.1)

    def _draw(self, axes: Any, first: int, line: Sequence[str]) -> Any:
        """Draw one line of tokens, and return the image, for its colour bar."""
        with extra("plots"):
            from matplotlib.colors import LinearSegmentedColormap

        assert self.limit is not None
        ends = [tuple(part / 255 for part in end) for end in (BELOW, CENTRE, ABOVE)]
        colours = LinearSegmentedColormap.from_list("steercap", ends, N=255)
        colours.set_bad(tuple(part / 255 for part in UNKNOWN))
        half = self.limit or 1.0
        values = self.values[first : first + len(line)].T
        image = axes.imshow(
            values,
            aspect="auto",
            cmap=colours,
            vmin=self.centre - half,
            vmax=self.centre + half,
            interpolation="nearest",
        )
        axes.set_xticks(range(len(line)), [drawn(token) for token in line], rotation=90, fontsize=8, family=FONT)
        axes.set_yticks(range(len(self.names)), self.names, fontsize=8)
        return image

    def _colour(self, value: float) -> str:
        assert self.limit is not None
        return colour(value, self.centre, self.limit)


def heatmap_of(
    handle: FetchedRows,
    directions: DirectionSet,
    layer: int,
    tokenizer: Any,
    *,
    title: str = "",
    centre: float = 0.0,
    limit: float | None = None,
) -> TokenHeatmap:
    """Return a heat map of the projections of one layer's captured rows on unit directions, by token and direction.

    Args:
        handle: fetched handle with full rows, or with projections of `CaptureSpec(project=directions)`.
        directions: directions to project on.
        layer: layer index; negative counts from the last.
        tokenizer: tokenizer of the model, `model.tokenizer`.
        title, centre, limit: arguments of the heat map; maps of one centre and limit can be compared by colour.

    Raises:
        InvalidRequest: the handle has projections on directions of other names or values, or rows of another width.
        InvalidSpec: the directions have no vectors for this layer.
        LayerOutOfRange: the layer was not captured.
        CaptureNotFetched: the handle was not fetched.
    """
    index = index_of(layer)
    if index is None:
        raise InvalidRequest(f"heatmap_of: layer={shown(layer)}; give one layer, as an integer")
    place = index + handle.num_layers if index < 0 else index
    values = _projected(handle, directions.at_layers([place]), place)
    tokens = texts_of(tokenizer, handle.token_ids.tolist())
    said = title or f"projection on unit directions, layer {place}"
    return TokenHeatmap(tokens, values.numpy(), tuple(directions), said, centre, limit, "", handle.positions.tolist())


def heatmap_of_layers(
    handle: FetchedRows,
    vectors: LayerVectors,
    tokenizer: Any,
    *,
    title: str = "",
    centre: float = 0.0,
    limit: float | None = None,
) -> TokenHeatmap:
    """Return a heat map of projections on one unit direction per layer, by token and layer; the last layer on top.

    Args:
        handle: fetched handle with rows or projections at some of the layers of the vectors.
        vectors: vector of each layer to project on, scaled to length 1.
        tokenizer, title, centre, limit: arguments as for `heatmap_of`.

    Raises:
        InvalidRequest: no layer has both rows and a vector; or as for `heatmap_of`.
        CaptureNotFetched: the handle was not fetched.
    """
    import torch

    from steercap.steering.directions import DirectionSet

    captures = handle.captures
    layers = [layer for layer in captures.layers if layer in vectors and (layer, vectors.site) in captures]
    if not layers:
        raise InvalidRequest(f"heatmap_of_layers: {captures!r} and {vectors!r} have no layer in common")
    # A direction without a name is called so where rows are projected in the workers, too.
    own = DirectionSet({vectors.name or "projection": vectors}).at_layers(layers)
    layers.reverse()
    values = torch.cat([_projected(handle, own, layer) for layer in layers], dim=1)
    tokens = texts_of(tokenizer, handle.token_ids.tolist())
    said = title or f"projection on {vectors.name or 'the unit direction'}, by layer"
    return TokenHeatmap(
        tokens, values.numpy(), tuple(map(str, layers)), said, centre, limit, "", handle.positions.tolist()
    )


def colour(value: float, centre: float, limit: float) -> str:
    """Return the background of a value as #rrggbb; values beyond the limit are clamped, NaN and inf are grey.

    Args:
        value: value to colour.
        centre: value that is white.
        limit: distance from the centre at which colours are full; 0 makes all of them white.
    """
    if not math.isfinite(value):
        return _hex(UNKNOWN)
    share = min(abs(value - centre) / limit, 1.0) if limit else 0.0
    end = ABOVE if value > centre else BELOW
    mixed = [round(middle + share * (full - middle)) for middle, full in zip(CENTRE, end, strict=True)]
    return _hex((mixed[0], mixed[1], mixed[2]))


def ink(background: str) -> str:
    """Return black or white, whichever contrasts more with a background of #rrggbb."""
    return "#000000" if contrast("#000000", background) >= contrast("#ffffff", background) else "#ffffff"


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two colours of #rrggbb, from 1 to 21. Source: WCAG 2.2."""
    darker, lighter = sorted((_luminance(first), _luminance(second)))
    return (lighter + 0.05) / (darker + 0.05)


def _projected(handle: FetchedRows, directions: DirectionSet, layer: int) -> torch.Tensor:
    """Return scalar products of the rows of one layer with unit directions: float32 [rows, names]."""
    rows: torch.Tensor = handle.captures.elements((layer, directions.site))
    if handle.directions:
        if missing := [name for name in directions if name not in handle.directions]:
            raise InvalidRequest(f"the handle holds projections on {list(handle.directions)}, and none on {missing}")
        places = [handle.directions.index(name) for name in directions]
        _check_same(handle, directions, layer, places)
        return rows[:, places].float()
    if rows.shape[-1] != directions.width:
        raise InvalidRequest(f"rows of layer {layer} are {list(rows.shape)}; directions have width {directions.width}")
    warn_of_other_model("directions=", directions.model, names_of(handle.model))
    return directions.project(rows, layer)


def _check_same(handle: FetchedRows, directions: DirectionSet, layer: int, places: list[int]) -> None:
    """Check that the handle was projected on these directions, by fingerprints of the vectors, if it has any."""
    from steercap.steering.edits.inputs import alike

    known = handle.marks.get(layer)
    if known is None:
        return
    marks = zip(directions, directions.marks(layer), places, strict=True)
    if others := [name for name, mark, place in marks if not alike(mark, known[place])]:
        raise InvalidRequest(
            f"at layer {layer} the handle holds projections on other directions of the names {others}; "
            "give those that were passed as project="
        )


def _numbers(values: Any) -> npt.NDArray[np.float64]:
    """Return a float64 copy of numbers, an array or a tensor, also of bfloat16 or on a device; else InvalidRequest."""
    import torch

    try:
        given = values.detach().cpu().to_dense() if isinstance(values, torch.Tensor) else values
        wide = isinstance(given, torch.Tensor) and not given.is_complex()
        found = np.asarray(given.double() if wide else given)
        kind = found.dtype.kind
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequest(f"TokenHeatmap: values={shown(values)} are not real numbers: {error}") from error
    if kind not in "biuf":
        raise InvalidRequest(f"TokenHeatmap: values={shown(values)} are {found.dtype.name}; give real numbers")
    return np.array(found, dtype=np.float64)


def _usual(values: npt.NDArray[np.float64], centre: float) -> float:
    """Return the default limit: the greatest distance from the centre, without outliers among those above 0."""
    far = np.abs(values[np.isfinite(values)] - centre)
    far = far[far > 0]
    return float(far[far <= FAR * np.median(far)].max()) if len(far) else 0.0


def _shown(value: float) -> str:
    return f"{value:.4g}"


def _luminance(background: str) -> float:
    parts = [int(background[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _hex(rgb: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*rgb)
