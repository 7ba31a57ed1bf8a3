"""Stacking of the rows of many handles into one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from steercap.captures.handle import CaptureHandle
from steercap.captures.rows import Captures
from steercap.core.display import span
from steercap.core.spec import Layers, Point, resolve_layers
from steercap.core.tokens import Tokens, TokenSelection, selected
from steercap.core.values import choices, shown
from steercap.errors import InvalidRequest, InvalidSelection, LayerOutOfRange
from steercap.kernels.codecs.coded import CodedRows

#: Maximum depth of nested lists of handles.
DEEPEST: Final = 8


def stack(
    handles: Sequence[CaptureHandle],
    tokens: Tokens | TokenSelection | None = None,
    *,
    layers: Layers | None = None,
    site: str | None = None,
) -> torch.Tensor:
    """Stack one row of each handle at each layer into a tensor.

    Args:
        handles: fetched handles of one model, one per prompt.
        tokens: a selection of exactly one token of every handle, such as "last_prompt", 0, or -2 for the second-to-last
            prompt token. None for the last prompt token, and for handles of a reduction, which have one row.
        layers: the layers, ascending in the tensor; None for all captured ones, which all handles must share.
        site: the site; None if only one was captured.

    Returns:
        [prompts, layers, hidden] in the dtype of the rows; with `project=`, [prompts, layers, directions].

    Raises:
        InvalidRequest: there are no handles, lists are nested, layers have different widths, or handles differ in
            model, layers, site, width, dtype, reduction or directions.
        InvalidSelection: `tokens` selects no token of a handle, several, or one that was not captured.
        LayerOutOfRange: a layer was not captured.
        CaptureNotFetched, CaptureReleased: a handle is not fetched, or was released.
    """
    given = _checked(handles)
    site, wanted = _place(given[0], layers, site)
    _check_alike(given, site, every=layers is None)
    rows = []
    for number, handle in enumerate(given):
        at = _row(number, handle, tokens)
        by_layer = {layer: _point_rows(handle.captures, Point(layer, site), at) for layer in wanted}
        _check_widths(by_layer, site)
        rows.append(torch.stack([*by_layer.values()]))
    return torch.stack(rows)


def _checked(handles: Any) -> list[CaptureHandle]:
    if not isinstance(handles, Sequence) or not handles:
        raise InvalidRequest(f"stack: handles={handles!r}; give a list of at least one fetched handle")
    for number, handle in enumerate(handles):
        if handle is None or isinstance(handle, Sequence):
            raise InvalidRequest(
                f"stack: entry {number} is {type(handle).__name__}, not a handle; with n > 1 flatten the lists, "
                "and leave out prompts for which nothing was kept"
            )
    return list(handles)


def _place(first: CaptureHandle, layers: Layers | None, site: str | None) -> tuple[str, list[int]]:
    """Return the site and the layers to stack, checked against the first handle."""
    captures = first.captures
    if site is None and len(captures.sites) > 1:
        raise InvalidRequest(f"stack: the handles hold sites {', '.join(captures.sites)}; give site=")
    site = captures.sites[0] if site is None else site
    known = _layers_at(first, site)
    if not known:
        raise InvalidRequest(f"stack: site={site!r} was not captured; {choices(site, captures.sites)}")
    wanted = known if layers is None else list(resolve_layers(layers, first.num_layers))
    if missing := [layer for layer in wanted if layer not in known]:
        raise LayerOutOfRange(f"stack: layers {missing} were not captured at {site!r}; captured: {known}")
    return site, wanted


def _layers_at(handle: CaptureHandle, site: str) -> list[int]:
    return sorted(point.layer for point in handle.captures if point.site == site)


def _check_alike(handles: Sequence[CaptureHandle], site: str, *, every: bool) -> None:
    """Check that all handles have the same kind of rows; raise InvalidRequest if not.

    Args:
        handles: the handles.
        site: the site to stack.
        every: True if all captured layers are stacked, so that they must be the same.
    """
    kinds: dict[str, list[Any]] = {
        "model": [handle.model for handle in handles],
        "reduction": [handle.receipt.reduce for handle in handles],
        "directions": [handle.directions for handle in handles],
        "marks of the directions": [handle.marks for handle in handles],
        "width and dtype": [_form(handle, site) for handle in handles],
    }
    if every:
        kinds[f"layers at {site!r}"] = [_layers_at(handle, site) for handle in handles]
    for name, found in kinds.items():
        for number, value in enumerate(found):
            if value != found[0]:
                raise InvalidRequest(
                    f"stack: handles differ in their {name}: {found[0]!r} of handle 0, {value!r} of handle {number}; "
                    "stack those that are alike" + (", or give layers=" if name.startswith("layers") else "")
                )


def _check_widths(rows: Mapping[int, torch.Tensor], site: str) -> None:
    """Check that the rows of all layers have one shape; `k` of some models, such as Gemma 4, has several."""
    layers: dict[tuple[int, ...], list[int]] = {}
    for layer, row in rows.items():
        layers.setdefault(tuple(row.shape), []).append(layer)
    if len(layers) > 1:
        held = ", ".join(f"{list(shape)} at layers {span(at)}" for shape, at in layers.items())
        raise InvalidRequest(f"stack: rows of {site!r} are {held}; give layers= of one width")


def _form(handle: CaptureHandle, site: str) -> tuple[int | str | tuple[int, ...], torch.dtype] | None:
    point = next((point for point in handle.captures if point.site == site), None)
    if point is None:
        return None
    rows = handle.captures.whole(point)
    if isinstance(rows, CodedRows):  # decoded to numbers of one width they may be projections of several matrices
        return rows.terms, torch.float32
    return rows.shape[-1] if rows.ndim == 2 else tuple(rows.shape[1:]), rows.dtype


def _point_rows(captures: Captures, point: Point, at: int) -> torch.Tensor:
    """Return one row of a point, by its index; of rows in a codec, only this row is decoded."""
    rows = captures.whole(point)
    return rows[at : at + 1].decoded()[0] if isinstance(rows, CodedRows) else rows[at]


def _row(number: int, handle: CaptureHandle, tokens: Tokens | TokenSelection | None) -> int:
    """Return the index of the selected row of a handle; `number` is the handle's index, for messages."""
    if reduce := handle.receipt.reduce:
        if tokens is not None:
            raise InvalidSelection(
                f"stack: handle {number} holds one row, the {reduce} of its tokens; leave tokens= out"
            )
        if not handle.receipt.rows:
            raise InvalidSelection(f"stack: handle {number} holds no row: it had no token to reduce")
        return 0
    selection = TokenSelection.parse("last_prompt" if tokens is None else tokens)
    prompt_len = len(handle.prompt_token_ids)
    total = prompt_len + max(len(handle.output_token_ids) - 1, 0)  # the last sampled token has no row
    positions = selected(selection.ranges(prompt_len, total), total).nonzero()[0].tolist()
    if len(positions) != 1:
        raise InvalidSelection(
            f"stack: tokens={selection} selects {len(positions)} tokens of handle {number}; "
            "choose one, such as 'last_prompt' or -1, or capture with reduce="
        )
    held: list[int] = handle.positions.tolist()
    if positions[0] not in held:
        raise InvalidSelection(
            f"stack: handle {number} has no row of position {positions[0]} (tokens={selection}); "
            f"captured: {len(held)} of {total} positions"
        )
    return held.index(positions[0])


def flat(handles: Any, depth: int = 0) -> list[CaptureHandle]:
    """Return the handles of nested lists in order, leaving out None.

    Raises:
        InvalidRequest: a list holds something else, or is nested more than `DEEPEST` deep.
    """
    if handles is None:
        return []
    if isinstance(handles, CaptureHandle):
        return [handles]
    if not isinstance(handles, (list, tuple)) or depth > DEEPEST:
        raise InvalidRequest(f"handles={shown(handles)}; give handles of generate or chat, in lists as they came")
    return [handle for group in handles for handle in flat(group, depth + 1)]
