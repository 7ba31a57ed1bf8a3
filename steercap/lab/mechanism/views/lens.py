"""Logit lens: next-token predictions from the rows of each layer."""

from __future__ import annotations

import html
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from steercap.captures import lifecycle
from steercap.captures.lens import BEHIND
from steercap.core.extras import extra
from steercap.core.prompts import FONT, drawn, lines_of, shortened, texts_of
from steercap.core.spec import Point
from steercap.core.values import count_of
from steercap.errors import InvalidRequest
from steercap.files.base import save_figure
from steercap.files.fingerprint import names_of, warn_of_other_model
from steercap.lab.mechanism.views.heatmap import ABOVE, CENTRE, colour, ink
from steercap.lab.mechanism.weights import read_tokenizer
from steercap.lab.mechanism.weights.unembedding import Unembedding

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from steercap.core.protocols import CheckpointedModel, FetchedRows

    Source: TypeAlias = CheckpointedModel | str | os.PathLike[str]

#: Sites whose rows are the residual stream, the input of the final norm and the unembedding.
SITES: Final = ("resid_pre", "resid_post")
#: Maximum letters shown of a token, columns in a line of a picture, and width and height of a cell in inches.
LETTERS: Final = 10
COLUMNS: Final = 16
CELL: Final = (0.78, 0.23)


@dataclass(frozen=True, eq=False, repr=False)
class LogitLens:
    """Most probable next tokens by layer and position, most probable first.

    It is displayed as an HTML table in a notebook and as a coloured one by rich; `plot` writes a picture.

    Args:
        layers: layer indices, ascending.
        read: text of the token read at each position.
        positions: positions of these tokens in the sequence.
        token_ids: ids of the predicted tokens, int64 [layers, positions, top].
        probabilities: probabilities of these tokens, float32 [layers, positions, top].
        words: texts of the predicted tokens, indexed by layer, position and rank.
        title: title of the view.
    """

    layers: tuple[int, ...]
    read: tuple[str, ...]
    positions: tuple[int, ...]
    token_ids: torch.Tensor
    probabilities: torch.Tensor
    words: tuple[tuple[tuple[str, ...], ...], ...]
    title: str = "logit lens: the next token at each layer"

    def __repr__(self) -> str:
        """Return a short text, since a notebook stores it together with the HTML."""
        return f"LogitLens({len(self.layers)} layers × {len(self.read)} tokens, top {self.token_ids.shape[-1]})"

    def _repr_html_(self) -> str:
        """Return an HTML table for a notebook; a cell's most probable tokens show on hover."""
        head = "".join(f"<th style='text-align:center'>{html.escape(shortened(t, LETTERS))}</th>" for t in self.read)
        lines = "".join(
            f"<tr><th>{layer}</th>{''.join(self._cell(row, column) for column in range(len(self.read)))}</tr>"
            for row, layer in reversed(list(enumerate(self.layers)))
        )
        style = "font-family:monospace;font-size:11px;border-collapse:collapse;white-space:nowrap"
        return (
            f"<div style='overflow-x:auto'><div style='font-weight:bold'>{html.escape(self.title)}</div>"
            f"<table style='{style}'>{lines}<tr><th></th>{head}</tr></table></div>"
        )

    def _cell(self, row: int, column: int) -> str:
        said = ", ".join(
            f"{word!r} {float(chance):.3f}"
            for word, chance in zip(self.words[row][column], self.probabilities[row, column], strict=True)
        )
        background = self._colour(row, column)
        style = f"background:{background};color:{ink(background)};text-align:center;padding:1px 4px"
        shown = html.escape(shortened(self.words[row][column][0], LETTERS))
        return f'<td title="{html.escape(said, quote=True)}" style="{style}">{shown}</td>'

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield coloured tables for a terminal, each with as many columns as fit; the last layer is on top."""
        with extra("cli"):
            from rich.table import Table
            from rich.text import Text

        yield Text(self.title, style="bold")
        for first, line in lines_of(self.read, max(1, (options.max_width - 6) // (LETTERS + 1))):
            table = Table(box=None, padding=(0, 1, 0, 0), show_header=False, show_footer=True)
            table.add_column(footer="", style="dim", justify="right")
            for token in line:
                table.add_column(footer=Text(shortened(token, LETTERS), style="bold"), min_width=LETTERS, no_wrap=True)
            for row, layer in reversed(list(enumerate(self.layers))):
                cells = []
                for column in range(first, first + len(line)):
                    background = self._colour(row, column)
                    shown = shortened(self.words[row][column][0], LETTERS)
                    cells.append(Text(shown.ljust(LETTERS), style=f"{ink(background)} on {background}"))
                table.add_row(str(layer), *cells)
            yield table

    def plot(self, path: str | Path) -> Path:
        """Draw the best token by position, in lines of 16, and layer, from bottom to top; return the file's path.

        Args:
            path: file to write; its suffix sets the format.
        """
        with extra("plots"):
            from matplotlib.figure import Figure

        lines = list(lines_of(self.read, COLUMNS))
        size = (
            1.6 + CELL[0] * min(len(self.read), COLUMNS),
            0.7 + (1.0 + CELL[1] * len(self.layers)) * len(lines),
        )
        figure = Figure(figsize=size, layout="constrained")
        for axes, (first, line) in zip(figure.subplots(len(lines), squeeze=False)[:, 0], lines, strict=True):
            self.draw(axes, first, first + len(line))
            axes.set_xlim(-0.5, min(len(self.read), COLUMNS) - 0.5)
            axes.set_title("")
        figure.suptitle(self.title.replace("$", r"\$"), fontsize=10)
        return save_figure(figure, path, 110)

    def draw(self, axes: Any, start: int = 0, stop: int | None = None) -> Any:
        """Draw some positions into matplotlib axes.

        Args:
            axes: axes to draw in.
            start, stop: slice of positions; all by default.

        Returns:
            matplotlib's image, for a colour bar.
        """
        with extra("plots"):
            from matplotlib.colors import LinearSegmentedColormap

        ends = [tuple(part / 255 for part in end) for end in (CENTRE, ABOVE)]
        colours = LinearSegmentedColormap.from_list("steercap lens", ends, N=255)
        columns = range(len(self.read))[start:stop]
        best = self.probabilities[:, start:stop, 0].numpy()
        image = axes.imshow(best, aspect="auto", origin="lower", cmap=colours, vmin=0, vmax=1)
        for row, place in ((row, place) for row in range(len(self.layers)) for place in range(len(columns))):
            shown = drawn(shortened(self.words[row][columns[place]][0], LETTERS))
            style = {"ha": "center", "va": "center", "fontsize": 7, "family": FONT}
            axes.text(place, row, shown, color=ink(self._colour(row, columns[place])), **style)
        labels = [drawn(shortened(self.read[column], LETTERS)) for column in columns]
        axes.set_xticks(range(len(columns)), labels, fontsize=8, family=FONT)
        axes.set_yticks(range(len(self.layers)), map(str, self.layers), fontsize=7)
        axes.set(title=self.title.replace("$", r"\$"), xlabel="token read", ylabel="layer")
        return image

    def _colour(self, row: int, column: int) -> str:
        return colour(float(self.probabilities[row, column, 0]), 0.0, 1.0)


def logit_lens(
    handle: FetchedRows,
    model: Source,
    *,
    site: str = "resid_post",
    top: int = 5,
    unembedding: Unembedding | None = None,
) -> LogitLens:
    """Predict next tokens from rows of each captured layer, by the model's final norm and unembedding.

    At the last layer of "resid_post" these are the model's own next tokens and probabilities, unless the rows are from
    before their edits or the request edits "final_norm", which handles of an open model refuse and others cannot know.
    They are computed on the client, in float32, from the weights of the checkpoint: changes in the engine alone, such
    as a LoRA adapter of the unembedding, are not included.

    Args:
        handle: fetched handle with rows of the residual stream.
        model: the open model of the handle, or the folder or name of its checkpoint.
        site: site of the rows, "resid_post" or "resid_pre".
        top: number of most probable tokens kept for each row.
        unembedding: unembedding of the model, if it was read before by `Unembedding.load(checkpoint)`; saves reading it
            for each handle.

    Raises:
        InvalidRequest: the handle has projections or a reduction instead of rows, the site is not the residual stream
            or was not captured, rows have another width, or `top` is below 1; or, if the handle is of an open model,
            rows of "resid_post" of the last layer are not those that it predicted from, as for `handle.lens()`.
        UnsupportedModel: the engine has dummy weights, or as for `Unembedding.load`.
        ModelNotLoaded, InvalidFile: as for `Unembedding.load`.
        CaptureNotFetched: the handle was not fetched.
    """
    layers, captures = _layers(handle, site), handle.captures
    if site == "resid_post" and layers[-1] == handle.num_layers - 1:
        require_own(handle, Point(layers[-1], site), "logit_lens")
    checkpoint, revision = checkpoint_of(model)
    unembedding = unembedding or Unembedding.load(checkpoint, revision=revision)
    tokenizer = tokenizer_of(model)
    warn_of_other_checkpoint(handle, checkpoint)
    count = count_of(top, "logit_lens: top", 1, unembedding.vocabulary, wrong=InvalidRequest)
    found = [unembedding.best(captures.elements((layer, site)), count) for layer in layers]
    token_ids = torch.stack([ids for ids, _ in found])
    distinct = token_ids.unique().tolist()
    known = dict(zip(distinct, texts_of(tokenizer, distinct), strict=True))
    words = tuple(tuple(tuple(known[token] for token in row) for row in layer) for layer in token_ids.tolist())
    read = tuple(texts_of(tokenizer, handle.token_ids.tolist()))
    positions = tuple(handle.positions.tolist())
    return LogitLens(layers, read, positions, token_ids, torch.stack([chances for _, chances in found]), words)


def _layers(handle: FetchedRows, site: str) -> tuple[int, ...]:
    """Return the captured layers with full rows at a site of the residual stream, ascending; else InvalidRequest."""
    captures = handle.captures
    if handle.directions or handle.receipt.reduce:
        held = "projections" if handle.directions else f"the {handle.receipt.reduce} of its tokens"
        raise InvalidRequest(f"logit_lens: the handle holds {held}; capture full rows, without project= or reduce=")
    if site not in SITES:
        raise InvalidRequest(f"logit_lens: site={site!r}; the residual stream is at {' and '.join(map(repr, SITES))}")
    layers = tuple(sorted(point.layer for point in captures if point.site == site))
    if not layers or not len(handle.positions):
        raise InvalidRequest(f"logit_lens: no row of {site!r} in {captures!r}; capture it, or give site=")
    return layers


def require_own(handle: FetchedRows, point: Point, purpose: str) -> None:
    """Check that rows of a point are those that the model predicted from, where the handle is of an open model.

    Args:
        handle: the handle.
        point: "resid_post" of the last layer, or an earlier point, whose rows must be from after their edits.
        purpose: name of the call, for the error.

    Raises:
        InvalidRequest: they are not; see `captures.lifecycle.Source.require_own`.
    """
    source, last = handle.lifecycle.source, handle.num_layers - 1
    if isinstance(source, lifecycle.Source):
        source.require_own(point, Point(last, BEHIND) if point == Point(last, "resid_post") else None, purpose)


def warn_of_other_checkpoint(handle: FetchedRows, checkpoint: str) -> None:
    """Warn if a handle's rows are of another model than the checkpoint, by their names."""
    names = (checkpoint, *names_of(checkpoint), *names_of(os.path.realpath(checkpoint)))
    if not re.fullmatch("[0-9a-f]{40}", handle.model):  # the commit of a snapshot that was opened by its path
        warn_of_other_model("the handle", handle.model, names, fix="ignore this")


def checkpoint_of(model: Source) -> tuple[str, str | None]:
    """Return the name or path of a model's checkpoint, and its revision, or None if none was requested.

    Raises:
        UnsupportedModel: the model has no checkpoint, such as one with dummy weights.
    """
    if isinstance(model, (str, os.PathLike)):
        return os.fspath(model), None
    return model.checkpoint


def tokenizer_of(model: Source) -> Any:
    """Return the tokenizer of a model.

    Raises:
        ModelNotLoaded: the checkpoint has no tokenizer.
    """
    if not isinstance(model, (str, os.PathLike)):
        return model.tokenizer
    return read_tokenizer(os.fspath(model))
