"""Captured rows by point, as handles and chunks of a stream have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch

from steercap.architectures.sites import SITES
from steercap.core.display import layers_by_site
from steercap.core.names import read_name
from steercap.core.receipt import Receipt
from steercap.core.spec import Point, name_of_site
from steercap.core.values import index_of, shown
from steercap.errors import InvalidSpec, LayerOutOfRange, SteercapError
from steercap.kernels.codecs.coded import CodedRows, Whole, decoded
from steercap.saes.encoder import Features

#: Rows of one point: whole, or a tuple of the shards of the tensor-parallel ranks; as tensors, or in a codec.
Rows: TypeAlias = "Whole | tuple[Whole, ...]"
#: Key of a row lookup: a layer, a (layer, site), or a point's name.
Key: TypeAlias = "int | tuple[int, str] | str"


class Captures(Mapping[Point, torch.Tensor]):
    """Mapping of points to captured rows.

    Look rows up as `captures[layer]` if one site was captured, as `captures[layer, site]` always, or by a point's name:
    `captures["blocks.5.attn.hook_z"]`, `captures["final_norm"]`.

    Values are tensors [rows, *shape of the point] in the point's dtype, see `model.points`: [rows, hidden] for the
    residual stream, [rows, heads, head_dim] for `z`. Rows in a lossy codec are decoded at every access, to float32 of
    that shape, with "rp8" and "rp16" to their [rows, k] projections; `coded` has the codes. After a reduction rows are
    [1, *shape] in float32 ([0, *shape] if no token was there to reduce), and with `project=` [rows, directions] in
    float32. With `sae=` they are the activations of all features, float32 [rows, features], with 0 for those that were
    not kept; `features` has the kept ones alone. Negative layers count from the model's last.

    Args:
        rows: rows by point: tensors or codes, or tuples of shards if they are split over ranks and were not gathered.
        num_layers: decoder layers of the model.
    """

    def __init__(self, rows: Mapping[Point, Rows], num_layers: int) -> None:
        self._rows = dict(rows)
        self._num_layers = num_layers
        self._sites = tuple(dict.fromkeys(point.site for point in self._rows))

    def __getitem__(self, key: Key) -> torch.Tensor:
        """Return the rows of one point, decoded.

        Raises:
            LayerOutOfRange: the point was not captured; also a KeyError.
            InvalidSpec: several sites were captured and none is named, the key is no layer or (layer, site), the rows
                are shards that were not gathered, or they are a summary of attention.
        """
        return decoded(self.whole(key))

    def whole(self, key: Key) -> Whole:
        """Return the rows of one point undecoded: a tensor, or `CodedRows`.

        Raises:
            LayerOutOfRange, InvalidSpec: as for `captures[layer, site]`.
        """
        point = self.as_point(key)
        rows = self._rows[point]
        if isinstance(rows, tuple):
            raise InvalidSpec(
                f"the rows of {point} were not gathered, and are in {len(rows)} shards; use captures.shards(layer, "
                "site), or capture with gather=True"
            )
        return rows

    def elements(self, key: Key) -> torch.Tensor:
        """Return the rows of one point with all their elements, decoded, for a lens or products with vectors.

        Raises:
            InvalidSpec: features or random projections were kept instead; or as for `captures[layer, site]`.
            LayerOutOfRange: as for `captures[layer, site]`.
        """
        rows = self.whole(key)
        if isinstance(rows, CodedRows) and rows.stores_features:
            raise InvalidSpec(f"{rows} are features of an SAE, not rows of the model; capture without sae=")
        if isinstance(rows, CodedRows) and rows.is_projected:
            raise InvalidSpec(
                f"{rows} do not keep the elements of rows; capture with another codec, or take "
                "coded[...].inner(vectors)"
            )
        return decoded(rows)

    @property
    def coded(self) -> Coded:
        """Rows in a lossy codec, undecoded, by point."""
        return Coded(self)

    @property
    def features(self) -> Featured:
        """SAE features of the rows, by point, of a capture with `sae=`."""
        return Featured(self)

    def shards(self, layer: int, site: str | None = None) -> tuple[torch.Tensor, ...]:
        """Return the shards of one point's rows, decoded, in the order of the tensor-parallel ranks.

        One tensor is returned if each rank had whole rows or they were gathered: see `CaptureSpec(gather=False)`.

        Raises:
            LayerOutOfRange, InvalidSpec: as for `captures[layer, site]`.
        """
        rows = self._rows[self.as_point(layer if site is None else (layer, site))]
        return tuple(map(decoded, rows if isinstance(rows, tuple) else (rows,)))

    def as_kept(self, key: Key) -> Rows:
        """Return the rows of one point undecoded: a tensor, `CodedRows`, or a tuple of shards of either.

        Raises:
            LayerOutOfRange, InvalidSpec: as for `captures[layer, site]`.
        """
        return self._rows[self.as_point(key)]

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Captures:
        """Return captures with `change` applied to each tensor in a fixed order: rows, or the parts of a codec."""
        return Captures({point: mapped(rows, change) for point, rows in self._rows.items()}, self._num_layers)

    def all_kept(self) -> dict[Point, Rows]:
        """Return each point's rows undecoded: a tensor, `CodedRows`, or a tuple of shards of either."""
        return dict(self._rows)

    def as_point(self, key: Key) -> Point:
        """Return the captured point of a key.

        Raises:
            LayerOutOfRange, InvalidSpec: as for `captures[layer, site]`.
        """
        given, site = self._named(key) if isinstance(key, str) else (key, None)
        if isinstance(key, tuple) and len(key) == 2:
            given, site = key
        layer = index_of(given)
        if isinstance(given, str) and index_of(site) is not None:
            raise InvalidSpec(f"captures[{shown(given)}, {site}]: the layer comes first: captures[{site}, {given!r}]")
        if layer is None or not (site is None or isinstance(site, str)):
            raise InvalidSpec(
                f"captures[{shown(key)}]: give a layer, or a layer and a site: captures[layer], "
                f"captures[layer, 'resid_post']; captured: {self._points()}"
            )
        index = layer + self._num_layers if layer < 0 else layer
        named = self._only_site() if site is None else name_of_site(site)
        point = Point(SITES[named].placed(index, self._num_layers) if named in SITES else index, named)
        if point not in self._rows:
            raise LayerOutOfRange(f"{point} was not captured; captured: {self._points()}")
        return point

    @staticmethod
    def _named(key: str) -> tuple[int | str, str]:
        """Return layer and site of a point's name; layer 0 for a site that the model has only once."""
        site, layer = read_name(key)
        if layer is None and site in SITES and SITES[site].of_model is not None:
            return 0, site
        return key if layer is None else layer, site

    def __contains__(self, key: object) -> bool:
        try:
            self.as_point(key)  # type: ignore[arg-type]
        except SteercapError:
            return False
        return True

    def __iter__(self) -> Iterator[Point]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        forms: dict[str, list[Point]] = {}
        for point, rows in self._rows.items():
            forms.setdefault(_described(rows), []).append(point)
        size = sum(one.nbytes for rows in self._rows.values() for one in (rows if isinstance(rows, tuple) else (rows,)))
        return f"Captures({'; '.join(f'{layers_by_site(at)}: {form}' for form, at in forms.items())}; {size:,} bytes)"

    @property
    def layers(self) -> tuple[int, ...]:
        """Captured layers, ascending."""
        return tuple(sorted({point.layer for point in self._rows}))

    @property
    def sites(self) -> tuple[str, ...]:
        """Captured sites, in the order of the points."""
        return self._sites

    def _points(self) -> str:
        return ", ".join(map(str, self._rows))

    def _only_site(self) -> str:
        if len(self._sites) != 1:
            raise InvalidSpec(f"sites {', '.join(self._sites)} were captured; say which: captures[layer, site]")
        return self._sites[0]


class Found(NamedTuple):
    """Fetched rows, and the workers' receipt for them."""

    captures: Captures
    receipt: Receipt


def mapped(rows: Rows, change: Callable[[torch.Tensor], torch.Tensor]) -> Rows:
    """Return rows of a point with `change` applied to each of their tensors, rows or codes, in a fixed order."""
    if isinstance(rows, tuple):
        return tuple(_mapped(shard, change) for shard in rows)
    return _mapped(rows, change)


def _mapped(rows: Whole, change: Callable[[torch.Tensor], torch.Tensor]) -> Whole:
    if isinstance(rows, CodedRows):
        return replace(rows, parts={name: change(part) for name, part in rows.parts.items()})
    return change(rows)


class Coded(Mapping[Point, CodedRows]):
    """Mapping of points to rows in a lossy codec, undecoded.

    Look rows up as `coded[layer]` if one site was captured, and as `coded[layer, site]` always.
    """

    def __init__(self, captures: Captures) -> None:
        self._captures = captures

    def __getitem__(self, key: Key) -> CodedRows:
        """Return the undecoded rows of one point.

        Raises:
            LayerOutOfRange: the point was not captured; also a KeyError.
            InvalidSpec: the rows are not in a lossy codec, or as for `captures[layer, site]`.
        """
        rows = self._captures.whole(key)
        if not isinstance(rows, CodedRows):
            raise InvalidSpec(f"the rows of {key} are not in a lossy codec; captures[...] has them as they are kept")
        return rows

    def __iter__(self) -> Iterator[Point]:
        return (point for point in self._captures if isinstance(self._captures.as_kept(point), CodedRows))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Featured(Mapping[Point, Features]):
    """Mapping of points to the SAE features of their rows.

    Look features up as `features[layer]` if one site was captured, and as `features[layer, site]` always.

    Args:
        captures: the captured rows.
        digests: digest of the SAE's encoder by point, if known.
    """

    def __init__(self, captures: Captures, digests: Mapping[Point, bytes] = MappingProxyType({})) -> None:
        self._captures, self._digests = captures, digests

    def __getitem__(self, key: int | tuple[int, str]) -> Features:
        """Return the features of the rows of one point.

        Raises:
            LayerOutOfRange: the point was not captured; also a KeyError.
            InvalidSpec: no SAE read the rows of the point, or as for `captures[layer, site]`.
        """
        rows = self._captures.whole(key)
        if not isinstance(rows, CodedRows) or not rows.stores_features:
            raise InvalidSpec(f"no SAE read the rows of {key}; capture with CaptureSpec(sae=)")
        point = self._captures.as_point(key)
        return Features.of(rows, point, self._digests.get(point, b""))

    def __iter__(self) -> Iterator[Point]:
        return (point for point in self._captures.coded if self._captures.coded[point].stores_features)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _described(rows: Rows) -> str:
    if isinstance(rows, tuple):
        return " + ".join(map(_described, rows))
    return repr(rows) if isinstance(rows, CodedRows) else f"{tuple(rows.shape)} {rows.dtype}"
