"""Capture specs as users write them, parsed and checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, cast

from steercap.core.display import brief
from steercap.core.hints import dataclass
from steercap.core.names import EVERY, Name, is_module, read_name
from steercap.core.tokens import Tokens, TokenSelection
from steercap.core.values import Mask, choices, index_of, mask_of, parts_of, plain, shown, truth_of
from steercap.errors import InvalidSpec, LayerOutOfRange, PointNotArmed, UnknownName

#: Layers as a user writes them; negative indices count from the last layer, and a mask has a bool for each layer.
Layers: TypeAlias = "int | slice | range | Sequence[int] | Sequence[bool] | Mask | Literal['all']"
#: Point as a user writes it: a name with a layer, such as "z[5]", or a (layer, site) pair.
At: TypeAlias = "str | tuple[int, str]"
Reduction: TypeAlias = Literal["mean", "sum", "max", "last"]

#: Maximum values of `CaptureSpec(codec_k=)` and `CaptureSpec(codec_seed=)`.
MOST_NUMBERS: Final = 1 << 16
MOST_SEED: Final = (1 << 64) - 1

#: Sites from which attention weights are computed, and the maximum of `CaptureSpec(attention=)`.
QUERIES_AND_KEYS: Final = ("q", "k")
MOST_TARGETS: Final = 128

REDUCTIONS: Final[tuple[Reduction, ...]] = ("mean", "sum", "max", "last")


class Point(NamedTuple):
    """A place in the model where rows can be read and edited: a site at a layer index."""

    layer: int
    site: str

    def __str__(self) -> str:
        if is_module(self.site):
            return self.site.replace(EVERY, str(self.layer))
        return f"{self.site}[{self.layer}]"


class Projectable(Protocol):
    """Directions on which rows can be projected: a `DirectionSet`, or `LayerVectors` for one direction."""

    @property
    def site(self) -> str:
        """Name of the site of the rows."""

    @property
    def width(self) -> int:
        """Number of elements of a direction."""


class Calibrating(Protocol):
    """Argument of `CaptureSpec(calibration=)`: scales for the codec "full8" by point, such as a `Calibration`."""

    @property
    def points(self) -> tuple[Point, ...]:
        """Points with scales."""


class Reader(Protocol):
    """Encoder that reads rows of one point: an `SAE`."""

    @property
    def input(self) -> Point:
        """Point whose rows the encoder reads."""


@dataclass(frozen=True, kw_only=True)
class CaptureSpec:
    """Specification of the activations to capture from a request: points, tokens and storage.

    Args:
        layers: an index, a slice, a range, a sequence of indices, a mask with a truth value for each layer of the
            model, or "all"; negative counts from the last layer. Layer `i` of `resid_post` is transformers'
            `hidden_states[i + 1]`, before the final norm for the last layer.
        sites: names of sites within a layer, one or several; TransformerLens's names ("hook_resid_post", "attn.hook_z")
            and the paths of modules that the engine was opened with ("model.layers.*.mlp.input") are names too.
        at: points, instead of layers and sites: a name with its layer ("resid_post[5]", "blocks.5.attn.hook_z",
            "model.layers.5.mlp.input"), a pair of layer and site, or several of these in a list. A name without a layer
            stands for all layers.
        tokens: "all", "prompt", "generated", "last_prompt", a slice, positions (negative counts from the end of the
            prompt), a mask of bools for the prompt tokens or for all prompt + `max_tokens` - 1 positions,
            or a list of these. Prompt + generated - 1 tokens exist: the last sampled one is never an input.
        reduce: None for one row per token, or "mean", "sum", "max", "last" over the tokens selected, computed in
            the worker in float32: one row per point.
        codec: encoding of stored rows. "raw" keeps them bit for bit. The others are
            lossy, and decoded to float32: "full8" keeps 8 bits an element, "fp8" as floating point, "int4" 4 bits,
            "topk8" the `codec_k` elements of greatest magnitude, "rp8" and "rp16" `codec_k` random projections. The
            maximum error of an element follows from scales that are stored with the rows; see `CaptureHandle.coded`.
            None for that of `SteerModel(codec=)` or `STEERCAP_CODEC`, else "raw". Reductions and projections have no
            codec.
        codec_k: number of values stored for a row with "topk8" (64 by default), "rp8" and "rp16" (512).
        codec_seed: seed of the matrix of "rp8" and "rp16", 0 by default. Rows can be compared only if their seeds are
            equal.
        calibration: scales for "full8", made by `steercap.lab.directions.calibrate`: each element then has a
            quantisation step of its own, and the error is several times less for the same bytes.
        before_edits: True to capture rows before the edits at their own point; by default edits are included. Edits at
            earlier points have had their effect in either case.
        project: a DirectionSet, or LayerVectors for one direction: instead of each row, its scalar products with
            the unit vectors of its layer, float32 [rows, directions], computed in the worker. `layers="all"` then means
            all layers of the directions, and the site is that of the directions.
        sae: an SAE, or several of different points: instead of each row, its `sae_k` most active features, computed in
            the worker; see `CaptureHandle.features`. The points are those of the SAEs.
        sae_k: number of features of a row, with `sae`; 32 by default.
        attention: instead of queries and keys, this many positions, 1 to 128, to which each head attends most from each
            token, computed in the worker; see `CaptureHandle.attention`. They take 3 bytes each, plus 4 for each head
            and token. The sites are "q" and "k", and `tokens` must begin at the first token.
        allow_nonfinite: True to return rows with NaN or infinity, which a model that overflows has; by default fetching
            them raises CaptureNotFinite.
        gather: True to concatenate the parts of rows that are split over tensor-parallel ranks; False to return the
            parts, see `Captures.shards`.

    Raises:
        InvalidSpec: there is no site, a reduction is unknown, a value has the wrong type, two of `project`, `reduce`,
            `sae` and `attention` are given, or `layers`, `sites` or `at` beside another argument that determines the
            points.
        UnknownName: a TransformerLens name has no site of equal rows.
        InvalidSelection: `tokens` is malformed.
    """

    layers: Layers = "all"
    sites: str | Sequence[str] = ("resid_post",)
    at: At | Sequence[At] | None = None
    tokens: Tokens | TokenSelection = "all"
    reduce: Reduction | None = None
    codec: str | None = None
    codec_k: int | None = None
    codec_seed: int | None = None
    calibration: Calibrating | None = None
    before_edits: bool = False
    project: Projectable | None = None
    sae: Reader | Sequence[Reader] | None = None
    sae_k: int | None = None
    attention: int | None = None
    allow_nonfinite: bool = False
    gather: bool = True

    __repr__ = brief

    def __post_init__(self) -> None:
        if self.reduce is not None and not (isinstance(self.reduce, str) and self.reduce in REDUCTIONS):
            raise InvalidSpec(f"unknown reduce={shown(self.reduce)}; {choices(self.reduce, REDUCTIONS)}, or None")
        if not (self.codec is None or isinstance(self.codec, str)):
            raise InvalidSpec(f"codec={shown(self.codec)}; give the name of one codec, such as 'raw'")
        numbers = (("codec_k", 1, MOST_NUMBERS), ("codec_seed", 0, MOST_SEED), ("sae_k", 1, MOST_NUMBERS))
        for name, least, most in (*numbers, ("attention", 1, MOST_TARGETS)):
            given = getattr(self, name)
            number = None if given is None else index_of(given)
            if given is not None and (number is None or not least <= number <= most):
                raise InvalidSpec(f"{name}={shown(given)}; give an integer from {least} to {most}")
            object.__setattr__(self, name, number)
        for name in ("before_edits", "allow_nonfinite", "gather"):
            object.__setattr__(self, name, truth_of(getattr(self, name), name))
        object.__setattr__(self, "sites", parse_sites(self.sites))
        object.__setattr__(self, "tokens", TokenSelection.parse(self.tokens))
        object.__setattr__(self, "layers", parse_layers(self.layers))
        if self.at is not None:
            if self.layers != "all" or self.sites != ("resid_post",) or self.project is not None:
                raise InvalidSpec("at= already names the points; leave layers=, sites= and project= out")
            object.__setattr__(self, "at", parse_points(self.at))
        if self.project is not None and self.reduce is not None:
            raise InvalidSpec(
                f"project= gives a few numbers per token, reduce={self.reduce!r} one row per request; give only one"
            )
        self._check_reading()
        self._check_attention()
        self._check_storing()

    def _check_reading(self) -> None:
        """Check that no argument given beside `sae` also determines the points or replaces the rows."""
        if isinstance(self.sae, (list, tuple)):
            object.__setattr__(self, "sae", tuple(self.sae))
            if not self.sae:
                raise InvalidSpec("sae=[] reads nothing; give an SAE, or leave it out")
        if self.sae is None:
            if self.sae_k is not None:
                raise InvalidSpec(f"sae_k={self.sae_k} is for sae=, which is not given; codec_k= is that of a codec")
            return
        if self.project is not None or self.reduce is not None:
            raise InvalidSpec("sae=, project= and reduce= each replace rows by something else; give only one of them")
        if self.layers != "all" or self.sites != ("resid_post",) or self.at is not None:
            raise InvalidSpec(
                "sae= already names the points, those that its SAEs read; leave layers=, sites= and at= out"
            )

    def _check_attention(self) -> None:
        """Check that no argument given beside `attention` also determines the sites or changes the rows."""
        if self.attention is None:
            return
        others = ("at", "reduce", "codec", "codec_k", "codec_seed", "calibration", "project", "sae", "before_edits")
        values = {name: getattr(self, name) for name in (*others, "allow_nonfinite")}
        given = [name for name, value in values.items() if value is not None and value is not False]
        if self.sites not in {("resid_post",), QUERIES_AND_KEYS}:
            given.append("sites")
        if given:
            raise InvalidSpec(f"attention= summarises the queries and keys that the model read; leave {given[0]}= out")
        require_start(self.selection)
        object.__setattr__(self, "sites", QUERIES_AND_KEYS)

    def _check_storing(self) -> None:
        """Check that no codec is given for results computed from rows, which are stored as float32."""
        if self.calibration is not None and self.codec not in {None, "full8"}:
            raise InvalidSpec(f"calibration= is for codec='full8', not for codec={self.codec!r}")
        if self.keeps_rows:
            return
        if self.calibration is not None:
            raise InvalidSpec("calibration= is for rows, and reduce=, project= or sae= keeps none; leave it out")
        asked = "sae=" if self.sae is not None else "project=" if self.reduce is None else f"reduce={self.reduce!r}"
        for name in ("codec", "codec_k", "codec_seed"):
            given = getattr(self, name)
            if given not in {None, "raw"}:
                hint = "give sae_k=" if self.sae is not None and name == "codec_k" else "leave it out"
                raise InvalidSpec(f"{asked} gives float32 numbers, which {name}={given!r} cannot hold; {hint}")

    def __hash__(self) -> int:
        parts = repr(self.layers), self.sites, self.at, self.tokens, self.reduce, self.codec, self.codec_k
        return hash((*parts, self.codec_seed, self.sae_k, self.before_edits, self.attention))

    @property
    def keeps_rows(self) -> bool:
        """True if rows themselves are stored, rather than results computed from them."""
        return self.project is None and self.reduce is None and self.sae is None and self.attention is None

    @property
    def saes(self) -> tuple[Any, ...]:
        """SAEs that read the rows; () if there are none."""
        if self.sae is None:
            return ()
        return self.sae if isinstance(self.sae, tuple) else (self.sae,)

    def codec_or(self, default: str) -> str:
        """Return the name of the codec of the rows, or `default` if the spec has none."""
        if self.calibration is not None:
            return "full8"
        if self.codec is not None:
            return self.codec
        return default if self.keeps_rows else "raw"

    @property
    def selection(self) -> TokenSelection:
        """Parsed token selection."""
        return cast("TokenSelection", self.tokens)

    def points(self, num_layers: int) -> tuple[Point, ...]:
        """Return the points to capture in a model of `num_layers` layers, by layer, or in the order of `at`.

        Raises:
            LayerOutOfRange: a layer index is outside the model.
            InvalidSpec: no layer is selected, or a mask has another length than the model has layers.
        """
        if self.at is not None:
            names = cast("tuple[Name, ...]", self.at)
            return tuple(dict.fromkeys(point for name in names for point in points_of(name, "all", num_layers)))
        layers = resolve_layers(self.layers, num_layers)
        return tuple(Point(layer, site) for layer in layers for site in self.sites)

    def is_open(self, point: Point, num_layers: int) -> bool:
        """Check if a point may be absent without an error: its layer is from "all", or from a name without a layer."""
        if self.at is None:
            return isinstance(self.layers, str)
        names = cast("tuple[Name, ...]", self.at)
        own = {point.layer, point.layer - num_layers}
        return not any(name.site == point.site and name.layer in own for name in names)


def points_of(name: Name, layers: Layers, num_layers: int) -> tuple[Point, ...]:
    """Return the points of a parsed name, at the name's own layer, or else at `layers`.

    Raises:
        LayerOutOfRange, InvalidSpec: see `resolve_layers`.
    """
    found = resolve_layers(layers if name.layer is None else name.layer, num_layers)
    return tuple(Point(layer, name.site) for layer in found)


def parse_points(at: Any) -> tuple[Name, ...]:
    """Parse the points of `CaptureSpec(at=)`: distinct, in the order given; they need not exist.

    Raises:
        InvalidSpec: there is no point, or an item is no point.
        UnknownName: see `read_name`.
    """
    alone = isinstance(at, str) or (isinstance(at, tuple) and len(at) == 2 and index_of(at[0]) is not None)
    found = [at] if alone else parts_of(at, "at")
    if not found:
        raise InvalidSpec(f"at={shown(at)}; give a point, such as 'resid_post[5]' or (5, 'z'), or several in a list")
    return tuple(dict.fromkeys(map(_named_point, found)))


def _named_point(given: Any) -> Name:
    if isinstance(given, str):
        return read_name(given)
    pair = parts_of(given, "at")
    if pair is None or len(pair) != 2 or index_of(pair[0]) is None or not isinstance(pair[1], str):
        raise InvalidSpec(f"at={shown(given)} is not a point; give 'resid_post[5]', or a layer and a site, (5, 'z')")
    return Name(name_of_site(pair[1]), index_of(pair[0]))


def name_of_site(site: str) -> str:
    """Return steercap's name of a site, given any name of the site.

    Raises:
        InvalidSpec: the name has a layer index.
        UnknownName: see `read_name`.
    """
    found = read_name(site)
    if found.layer is not None:
        raise InvalidSpec(f"{shown(site)} names a layer, but sites= takes names of sites; give at={site!r} instead")
    return found.site


def parse_sites(sites: Any) -> tuple[str, ...]:
    """Parse names of sites to steercap's: distinct, in the order given; they need not exist.

    Raises:
        InvalidSpec: there is no name, an item is no str, or a name has a layer index.
        UnknownName: see `read_name`.
    """
    return tuple(dict.fromkeys(map(name_of_site, _texts(sites))))


def parse_names(sites: Any) -> tuple[Name, ...]:
    """Parse names of sites, with or without a layer index: distinct, in the order given.

    Raises:
        InvalidSpec: there is no name, or an item is no str.
        UnknownName: see `read_name`.
    """
    return tuple(dict.fromkeys(map(read_name, _texts(sites))))


def _texts(sites: Any) -> tuple[str, ...]:
    found = [sites] if isinstance(sites, str) else parts_of(sites, "sites")
    if found is None or not all(isinstance(site, str) for site in found):
        raise InvalidSpec(f"sites={shown(sites)}; give the name of a site, or several in a list")
    if not found:
        raise InvalidSpec("sites=() captures nothing; name at least one site")
    return tuple(found)


def parse_layers(layers: Any) -> Layers:
    """Convert layers to immutable plain values; the model need not have them.

    Returns:
        "all", an index, a slice or a range of plain integers, a tuple of indices, or a mask.

    Raises:
        InvalidSpec: a value has another type, such as a single bool.
    """
    found = plain(layers)
    if isinstance(found, (Mask, range)) or (isinstance(found, str) and found == "all"):
        return found  # type: ignore[return-value]  # mypy keeps str
    if isinstance(found, slice):
        return _plain_slice(found)
    if (index := index_of(found)) is not None:
        return index
    parts = None if isinstance(found, str) else parts_of(found, "layers")
    if parts is None:
        raise InvalidSpec(
            f"layers={shown(layers)} is not a layer; use 'all', an index, a slice, a sequence of indices or a mask"
        )
    if (mask := mask_of(parts)) is not None:
        return mask
    return tuple(_integer(part) for part in parts)


def resolve_layers(layers: Layers, num_layers: int) -> tuple[int, ...]:
    """Return the selected layer indices of a model of `num_layers` layers, ascending, distinct and non-negative.

    Raises:
        LayerOutOfRange: a layer index is outside the model.
        InvalidSpec: a value has another type, a mask has another length, or no layer is selected.
    """
    found = sorted({_index(layer, num_layers) for layer in _listed(parse_layers(layers), num_layers)})
    if not found:
        raise InvalidSpec(f"layers={shown(layers)} selects none of the {num_layers} layers")
    return tuple(found)


def existing(
    points: tuple[Point, ...], is_open: Callable[[Point], bool], exists: Callable[[Point], bool]
) -> tuple[Point, ...]:
    """Drop points that the model lacks if they are wanted only where it has them, as at layers "all".

    If nothing is left, return all points, so that `check_armed` refuses one by its name.

    Args:
        points: points requested.
        is_open: predicate that says if a point is wanted only where the model has it.
        exists: predicate that says if the model has a point; raises `UnknownName` for a site that does not exist.
    """
    return tuple(point for point in points if not is_open(point) or exists(point)) or points


def check_armed(
    points: Iterable[Point],
    armed: Iterable[Point],
    known_sites: Collection[str],
    exists: Callable[[Point], bool] = lambda _: True,
    refused: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Check that every requested point has a tap in this engine.

    Args:
        points: points requested.
        armed: points that have a tap.
        known_sites: names of all sites.
        exists: predicate that says if the model has a point.
        refused: reason why the model lacks a site, by site.

    Raises:
        UnknownName: a site does not exist.
        PointNotArmed: a point has no tap.
    """
    taps = set(armed)
    for point in points:
        if point.site not in known_sites:
            raise UnknownName(f"unknown site {point.site!r}; {choices(point.site, known_sites)}")
        if point not in taps:
            layers = sorted({tap.layer for tap in taps if tap.site == point.site})
            sites = ", ".join(sorted({repr(tap.site) for tap in taps}))
            where = f"{point.site!r} has taps at layers {layers}" if layers else f"taps are at sites {sites or 'none'}"
            where += ", those of steercap's own checks included"
            if not exists(point):
                why = f" ({refused[point.site]})" if point.site in refused else ""
                raise PointNotArmed(
                    f"this model has no {point.site!r} at layer {point.layer}{why}; in this engine {where}"
                )
            raise PointNotArmed(
                f"{point} has no tap in this engine, where {where}; arm it at the start: "
                f"SteerModel(..., sites=[..., {point.site!r}], layers=[..., {point.layer}]), or --sites of "
                "`steercap up` and `serve`"
            )


def _plain_slice(layers: slice) -> slice:
    given = (layers.start, layers.stop, layers.step)
    parts = [None if part is None else _integer(part) for part in given]
    if parts[2] == 0:
        raise InvalidSpec(f"layers={shown(layers)} has step 0; give another step, such as 1")
    return slice(*parts)


def _integer(layer: object) -> int:
    index = index_of(layer)
    if index is None:
        raise InvalidSpec(f"layer {shown(layer)} is not an integer; layers count from 0, or from -1 backwards")
    return index


def _listed(layers: Any, num_layers: int) -> Iterable[int]:
    """Return the layer indices, possibly negative, that parsed layers select."""
    if layers == "all":
        return range(num_layers)
    if isinstance(layers, Mask):
        if len(layers) != num_layers:
            raise InvalidSpec(
                f"layers= is a mask of {len(layers)} truth values, and this model has {num_layers} layers; "
                "give one each"
            )
        return layers.places
    if isinstance(layers, slice):
        return range(num_layers)[layers]
    return (layers,) if isinstance(layers, int) else layers


def _index(index: int, num_layers: int) -> int:
    if not -num_layers <= index < num_layers:
        raise LayerOutOfRange(
            f"layer {index} is outside this model of {num_layers} layers; use 0 to {num_layers - 1}, "
            f"or -{num_layers} to -1 from the end"
        )
    return index % num_layers


def require_start(selection: TokenSelection) -> None:
    """Check that a token selection begins at the first token and has no gap, as attention summaries need.

    Raises:
        InvalidSpec: it does not, or may not for some prompt.
    """
    if not selection.from_start:
        raise InvalidSpec("attention reads the keys of all tokens before; give 'all' as tokens, or a slice from 0")
