"""Wrongly typed values at every parameter: each is taken as its documentation says, or is an error that says what to do."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from workers import known_schemas

from steercap import (
    Ablate,
    Add,
    AddIf,
    CaptureHandle,
    CaptureSpec,
    Generation,
    Replace,
    SAEFeature,
    SetProjection,
    SteeringSpec,
    SteerModel,
)
from steercap.architectures.sites import SITES, placed
from steercap.captures.lifecycle import Lifecycle
from steercap.captures.rows import Captures, Found
from steercap.captures.stacking import flat
from steercap.config import Settings
from steercap.core.chat import MessageSpan
from steercap.core.prompts import as_list, ids_of_prompt, ids_of_text, prompts_or_conversations
from steercap.core.receipt import Receipt
from steercap.core.spec import Point, check_armed, existing
from steercap.errors import (
    InvalidPrompt,
    InvalidRequest,
    InvalidSelection,
    InvalidSetting,
    InvalidSpec,
    InvalidVector,
    LayerOutOfRange,
    PointNotArmed,
    SteercapError,
    UnknownName,
)
from steercap.kernels.codecs import ENCODINGS, codec_of
from steercap.lab.directions.contrast import Contrast, directions_of
from steercap.lab.measures.score import Score
from steercap.lab.measures.scores import make_scorer
from steercap.lab.measures.scores.judge import Judge
from steercap.lab.measures.scores.keywords import Keywords
from steercap.lab.measures.texts import Repetition
from steercap.lab.mechanism.views import TokenHeatmap
from steercap.lab.personas import PersonaSettings
from steercap.lab.studies.running import measures_of
from steercap.lab.studies.sweeps import Sweep
from steercap.steering import DirectionSet, LayerVectors
from steercap.steering.edits.add import LowRank
from steercap.steering.edits.replace import Cap
from steercap.steering.lowering import compile_projection, lower, scopes_of

WIDTH, LAYERS, PROMPT, LIMIT = 4, 3, 5, 9
ARMED = {Point(layer, "resid_post"): layer for layer in range(LAYERS)}
SCHEMAS = known_schemas(ARMED, WIDTH, LAYERS)
V = torch.tensor([1.0, -2.0, 3.0, 0.5])


class Value(NamedTuple):
    """A value, made anew each time, and the kinds of parameters that it is right for."""

    make: Callable[[], Any]
    good: str


def endless() -> list[Any]:
    holds: list[Any] = []
    holds.append(holds)
    return holds


VALUES = [
    Value(lambda value=value: value, good)
    for value, good in (
        # plain
        (True, "flag"),
        (False, "flag"),
        (None, "none"),
        (0, "number whole0 layer layers tokens position"),
        (1, "number whole whole0 layer layers tokens position seconds"),
        (-1, "number layer layers tokens position"),
        (99, "number whole whole0 seconds"),
        (10**30, "number seconds"),
        (10**400, "seconds"),
        (1.0, "number seconds"),
        (0.25, "number seconds"),
        (1e39, "seconds"),
        (float("nan"), ""),
        (float("inf"), "seconds"),
        (1j, ""),
        ("no", "text"),
        ("1", "text"),
        ("all", "layers tokens text sites"),
        ("generated", "tokens text"),
        ("resid_post", "text site"),
        ("raw", "text codec"),
        ("mean", "text reduce"),
        ("wait", "text"),
        ("\ud800", "text"),
        ("", "text"),
        (b"ab", ""),
        (bytearray(b"ab"), ""),
        (object(), ""),
        (int, ""),
        (len, ""),
        ({}, ""),
        ({0: 1}, ""),
        (set(), ""),
        ({True, False}, ""),
        ([], ""),
        ((), ""),
        ([None], ""),
        ([[]], ""),
        (["raw"], ""),
        ([1.0, 2.0, 3.0, 4.0], "vector"),
        ([1, 2, 3, 4], "vector tokens"),
        ([0.5, True, 1.0, 2.0], ""),
        ([1.0, None, 2.0, 3.0], ""),
        ([1.0, 2.0], ""),
        ([1.0, 2.0, 3.0, float("nan")], ""),
        ([1.0, 2.0, 3.0, 1e39], ""),
        ([[1.0, 2.0], [3.0]], ""),
        ([0, 1], "layers tokens"),
        ([0, True], ""),
        ([0, 0.5], ""),
        ([True, False, True], "layers"),
        ([False, False, False], ""),
        ([True, False, False, False, False], "tokens position"),
        ((True, False, False, False, False, False, False, False, True), "tokens"),
        (slice(0, 2), "layers tokens"),
        (slice(0, 10**30), "layers tokens"),
        (slice(np.int64(1), None), "layers tokens"),
        (slice(-(10**30), None), "layers tokens"),
        (slice(True, None), ""),
        (slice(0.5, None), ""),
        (slice("a", None), ""),
        (slice(0, 4, 0), ""),
        (range(2), "layers tokens"),
        (range(0), ""),
        (range(10**30), ""),
        # NumPy
        (np.True_, "flag"),
        (np.int64(1), "number whole whole0 layer layers tokens position seconds"),
        (np.float32(0.5), "number seconds"),
        (np.array(1), "number whole whole0 layer layers tokens position seconds"),
        (np.array([0, 1]), "layers tokens"),
        (np.array([True, False, True]), "layers"),
        (np.array([True, False, False, False, False]), "tokens position"),
        (np.array([[True, False, False, False, False]]), "tokens position"),
        (np.array([[True, False, True], [True, False, True]]), ""),
        (np.array(["a"]), ""),
        (np.array([1.0, None], dtype=object), ""),
        (np.array([1.5, 2.5, 3.5, 4.5])[::-1], "vector"),
        (np.array([1.5, 2.5, 3.5, 4.5], dtype=">f8"), "vector"),
        (np.array([1j, 0, 0, 0]), ""),
        (np.ma.array([1.0, 2.0, 3.0, 4.0], mask=[0, 0, 1, 0]), ""),
        (np.array(["2020-01-01"], dtype="datetime64[ns]"), ""),
        # torch
        (torch.tensor(True), "flag"),
        (torch.tensor(1), "number whole whole0 layer layers tokens position seconds"),
        (torch.tensor(0.5), "number seconds"),
        (torch.tensor(0.5, requires_grad=True), "number seconds"),
        (torch.tensor(1j), ""),
        (torch.tensor([0, 1]), "layers tokens"),
        (torch.tensor([1.0]), "number seconds"),
        (torch.tensor([True, False, True]), "layers"),
        (torch.tensor([True, False, False, False, False]), "tokens position"),
        (torch.tensor([True, False]), ""),
        (torch.tensor([[0], [1]]), "layers tokens"),
        (torch.arange(1.0, 5.0), "vector"),
        (torch.arange(1.0, 5.0, requires_grad=True), "vector"),
        (torch.arange(1.0, 5.0).double(), "vector"),
        (torch.arange(1.0, 5.0).bfloat16(), "vector"),
        (torch.arange(1.0, 5.0).to(torch.float8_e4m3fn), "vector"),
        (torch.arange(1.0, 9.0)[::2], "vector"),
        (torch.arange(1.0, 5.0).to_sparse(), "vector"),
        (torch.arange(1, 5), "vector tokens"),
        (torch.arange(1.0, 6.0), ""),
        (torch.arange(1.0, 5.0)[None], "rows"),
        (torch.arange(1.0, 5.0).to(torch.complex64), ""),
        (torch.tensor([True, True, False, True]), ""),
        (torch.full((4,), float("inf")), ""),
        (torch.ones(4, device="meta"), ""),
        (torch.ones((), device="meta"), ""),
        (torch.empty(0), ""),
        (torch.ones(2, 2, 2), ""),
    )
] + [
    Value(endless, ""),
    Value(lambda: (part for part in ["x"]), ""),
    Value(lambda: (part for part in [0, 1]), "layers tokens"),
]


class Site(NamedTuple):
    """A parameter: how it is given, what kind it is, and what is then done with what was made."""

    name: str
    kind: str
    use: Callable[[Any], Any]
    optional: bool = False


def steer(edit: Any) -> None:
    ready = lower(SteeringSpec([edit]), armed=ARMED, schemas=SCHEMAS, num_layers=LAYERS, edits_per_point=64)
    scopes_of(ready, PROMPT, LIMIT)
    _ = repr(edit), hash(edit)


def capture(**arguments: Any) -> None:
    spec = CaptureSpec(**arguments)
    _ = hash(spec), repr(spec), codec_of(spec.codec_or("raw"), spec.codec_k, spec.codec_seed)
    check_armed(spec.points(LAYERS), ARMED, SITES)
    spec.selection.ranges(PROMPT, LIMIT)
    if spec.project is not None:
        compile_projection(spec, ARMED, SCHEMAS, num_layers=LAYERS)


EDITS: list[tuple[type, dict[str, Any], dict[str, str]]] = [
    (Add, {"vector": V}, {"vector": "vector", "scale": "number", "relative": "flag"}),
    (Ablate, {"vector": V}, {"vector": "vector", "keep": "number"}),
    (Cap, {"vector": V, "low": -1e38}, {"vector": "vector", "high": "number?"}),
    (SetProjection, {"vector": V, "value": 1}, {"vector": "vector", "value": "number"}),
    (
        AddIf,
        {"vector": V, "probe": V},
        dict.fromkeys(("threshold", "scale", "bias"), "number")
        | {"vector": "vector", "probe": "vector", "relative": "flag"},
    ),
    (
        SAEFeature,
        {"encoder": V, "decoder": V, "value": 1},
        {"encoder": "vector", "decoder": "vector", "decoder_bias": "vector?", "value": "number", "bias": "number"},
    ),
    (LowRank, {"read": V[None], "write": V[None]}, {"read": "rows", "write": "rows", "scale": "number"}),
    (Replace, {"rows": V, "positions": 0}, {"rows": "vector rows", "positions": "position"}),
]


def sites() -> Iterator[Site]:
    for kind, base, parameters in EDITS:
        scope = {} if kind is Replace else {"tokens": "tokens"}
        for name, what in (parameters | {"layer": "layer", "layers": "layers", "site": "site"} | scope).items():
            rest = {"layer": 1} if name not in {"layer", "layers"} else {}
            yield Site(
                f"{kind.__name__}.{name}",
                what.removesuffix("?"),
                lambda value, kind=kind, base=base, name=name, rest=rest: steer(kind(**{**base, **rest, name: value})),
                what.endswith("?"),
            )
    for name, what in {
        "layers": "layers",
        "sites": "site",
        "tokens": "tokens",
        "reduce": "reduce?",
        "codec": "codec?",
        "codec_k": "?",
        "codec_seed": "?",
        "sae_k": "?",
        "before_edits": "flag",
        "project": "?",
    }.items():
        yield Site(
            f"CaptureSpec.{name}",
            what.removesuffix("?"),
            lambda value, name=name: capture(**{name: value}),
            what.endswith("?"),
        )
    yield Site("SteeringSpec.preserve_norm", "flag", lambda value: SteeringSpec([Add(V, layer=1)], value))
    yield Site("SteeringSpec.edits", "", SteeringSpec)
    for name, what in {
        "sites": "site sites",
        "layers": "layers",
        "capture_bytes": "whole",
        "spill_bytes": "whole",
        "steering_slots": "whole",
        "vector_bytes": "whole",
        "edits_per_point": "whole",
        "reduce_bytes": "whole0",
        "device_ring_bytes": "whole?",
        "overflow_timeout": "seconds",
        "transport": "",
    }.items():
        yield Site(
            f"Settings.{name}",
            what.removesuffix("?"),
            lambda value, name=name: Settings(**{name: value}).armed(LAYERS),
            what.endswith("?"),
        )
    yield Site("LayerVectors.vectors", "vector", lambda value: LayerVectors({1: value}).width == WIDTH or refuse())
    for label in ("name", "model"):
        yield Site(
            f"LayerVectors.{label}",
            "text codec site reduce",
            lambda value, label=label: LayerVectors({1: V}, **{label: value}),
        )
    yield Site("LayerVectors * ", "number", lambda value: LayerVectors({1: V}) * value)


def refuse() -> None:
    raise InvalidVector("of another width")


SITES_OF_USE = list(sites())


@pytest.mark.parametrize("site", SITES_OF_USE, ids=lambda site: site.name)
def test_every_value_is_taken_as_documented_or_refused(site) -> None:
    """Right ones are accepted, in the types of any library; all others are errors of steercap's with some words."""
    kinds = set(site.kind.split()) | ({"none"} if site.optional else set())
    for value in VALUES:
        made, right = value.make(), bool(kinds & set(value.good.split()))
        try:
            site.use(made)
        except SteercapError as error:
            assert not right, f"{site.name}={made!r} is right, and was refused: {error}"
            assert 10 < len(str(error)) < 1000, error
        else:
            assert right, f"{site.name}={made!r} was accepted"


def vectors() -> LayerVectors:
    return LayerVectors({0: V, 2: -V}, name="v")


def directions() -> DirectionSet:
    return DirectionSet({"v": vectors()})


def captures() -> Captures:
    return Captures({Point(layer, "resid_post"): torch.ones(2, WIDTH) for layer in (0, 2)}, LAYERS)


def sweep(**arguments: Any) -> Any:
    made = Sweep(**{"vectors": directions(), "layers": [0], "scales": [1.0], "prompts": ["x"], **arguments})
    return made.definition({}) and None


CONTRAST = {
    "positive": torch.randn(4, 1, 3),
    "negative": torch.randn(4, 1, 3),
    "positive_groups": range(4),
    "negative_groups": range(4),
}


def handle() -> CaptureHandle:
    """A fetched handle of a chat of two messages and a reply."""
    points = (Point(0, "resid_post"), Point(2, "resid_post"))
    captures = Captures({point: torch.ones(5, WIDTH) for point in points}, LAYERS)
    receipt = Receipt(points, np.arange(5), np.array([0, 1, 2, 3, 7]), 5, None)
    return CaptureHandle(
        request_id="r",
        model="m",
        text="",
        prompt_token_ids=range(4),
        output_token_ids=[7, 8],
        points=points,
        num_layers=LAYERS,
        lifecycle=Lifecycle("r", found=Found(captures, receipt)),
        messages=[
            MessageSpan("user", 0, 0, 1),
            MessageSpan("assistant", 1, 1, 3),
            MessageSpan("assistant", None, 4, 5),
        ],
    )


#: What else takes a value from a user: no other error than steercap's comes out, whatever is done with what was made.
FURTHER: dict[str, Callable[[Any], Any]] = {
    "LayerVectors": LayerVectors,
    "LayerVectors.site": lambda value: LayerVectors({1: V}, site=value),
    "LayerVectors +": lambda value: vectors() + value,
    "LayerVectors /": lambda value: vectors() / value,
    "LayerVectors.dot": lambda value: vectors().dot(value),
    "LayerVectors.cosine": lambda value: vectors().cosine(value),
    "LayerVectors.without": lambda value: vectors().without(value),
    "LayerVectors.named": lambda value: vectors().named(value),
    "LayerVectors[]": lambda value: vectors()[value],
    "in LayerVectors": lambda value: value in vectors(),
    "DirectionSet": DirectionSet,
    "DirectionSet.provenance": lambda value: DirectionSet({"v": vectors()}, value),
    "DirectionSet[]": lambda value: directions()[value],
    "DirectionSet.at": lambda value: directions().at(value),
    "DirectionSet.select": lambda value: directions().select(value),
    "DirectionSet.at_layers": lambda value: directions().at_layers(value),
    "LayerVectors.at_layers": lambda value: next(iter(directions().values())).at_layers(value),
    "DirectionSet.project": lambda value: directions().project(value, 0),
    "DirectionSet.project layer": lambda value: directions().project(torch.ones(2, WIDTH), value),
    "DirectionSet.cosines": lambda value: directions().cosines(value),
    "DirectionSet.marks": lambda value: directions().marks(value),
    "Captures[]": lambda value: captures()[value],
    "Captures[,]": lambda value: captures()[value, "resid_post"],
    "Captures[, site]": lambda value: captures()[0, value],
    "in Captures": lambda value: value in captures(),
    "CaptureHandle.rows_of": lambda value: handle().rows_of(value),
    "ENCODINGS[]": lambda value: ENCODINGS[value],
    "fetch_captures_batch": flat,
    "make_scorer": make_scorer,
    "make_scorer arguments": lambda value: make_scorer("keywords", value),
    "Judge.base_url": lambda value: Judge(value, "m"),
    "Judge.retries": lambda value: Judge("u", "m", retries=value),
    "Judge.timeout": lambda value: Judge("u", "m", timeout=value),
    "Judge.logprobs": lambda value: Judge("u", "m", logprobs=value),
    "Keywords": Keywords,
    "Repetition": Repetition,
    "Score.trait": lambda value: Score(value, "keywords"),
    "Score.scorer": lambda value: Score("optimistic", value),
    "measures_of": lambda value: measures_of([value], ()),
    "TokenHeatmap.values": lambda value: TokenHeatmap(["a"] * WIDTH, value).legend,
    "TokenHeatmap.centre": lambda value: TokenHeatmap(["a"], [1.0], centre=value).legend,
    "TokenHeatmap.limit": lambda value: TokenHeatmap(["a"], [1.0], limit=value).legend,
    **{f"Contrast.{name}": lambda value, name=name: Contrast(**{**CONTRAST, name: value}) for name in CONTRAST},
    "directions_of.held_out": lambda value: directions_of("x", Contrast(**CONTRAST), [0], held_out=value),
    "directions_of.method": lambda value: directions_of("x", Contrast(**CONTRAST), [0], method=value),
    **{
        f"PersonaSettings.{name}": lambda value, name=name: PersonaSettings(**{"traits": ("optimistic",), name: value})
        for name in PersonaSettings.__struct_fields__
    },
    **{
        f"Sweep.{name}": lambda value, name=name: sweep(**{name: value})
        for name in (
            "vectors",
            "layers",
            "scales",
            "prompts",
            "operations",
            "tokens",
            "relative",
            "negated",
            "samples",
            "sampling_params",
        )
    },
}


@pytest.mark.parametrize("name", FURTHER)
def test_no_value_brings_out_another_error(name) -> None:
    """Whatever is given where vectors, rows, layers, names and numbers are looked up or made."""
    for value in VALUES:
        try:
            FURTHER[name](value.make())
        except SteercapError as error:
            assert 10 < len(str(error)) < 1000, error


ANY = st.sampled_from(VALUES)


@given(st.sampled_from(EDITS), st.dictionaries(st.integers(0, 9), ANY, min_size=1, max_size=4), st.booleans())
@settings(max_examples=1500, deadline=None)
@pytest.mark.slow
def test_several_wrong_values_at_once_are_refused_too(edit, junk, captured) -> None:
    """Of edits and captures alike: accepted or an error of steercap's, and nothing else."""
    kind, base, parameters = edit
    names = (
        ["layers", "sites", "tokens", "reduce", "codec", "codec_k", "codec_seed", "before_edits"]
        if captured
        else [*parameters, "layers", "site", "tokens"]
    )
    given_junk = {names[at % len(names)]: value.make() for at, value in junk.items()}
    try:
        if captured:
            capture(**given_junk)
        else:
            steer(kind(**{**base, "layers": 1, **given_junk}))
    except SteercapError as error:
        assert 10 < len(str(error)) < 2000


def test_what_has_no_end_is_refused() -> None:
    """An iterator that never stops does not hang."""
    for make in (lambda value: CaptureSpec(tokens=value), lambda value: CaptureSpec(layers=value)):
        with pytest.raises(SteercapError, match="more than"):
            make(itertools.count())


BITS = st.lists(st.booleans(), min_size=1, max_size=40)
FORMS = st.sampled_from([list, tuple, np.array, torch.tensor, lambda bits: [np.bool_(bit) for bit in bits]])


@given(BITS, FORMS, st.integers(1, 40), st.integers(0, 20))
def test_a_mask_is_read_as_a_mask_or_refused(bits, form, prompt_len, generated) -> None:
    """It selects where it is true, of prompt or of all inputs; of any other length it is refused, with the right ones."""
    limit = prompt_len + generated
    true = [place for place, bit in enumerate(bits) if bit]
    if not true:
        with pytest.raises(InvalidSelection, match="selects no token"):
            CaptureSpec(tokens=form(bits))
        return
    rows = torch.randn(len(true), WIDTH)
    specs = (CaptureSpec(tokens=form(bits)), Add(V, layer=1, tokens=form(bits)), Replace(rows, form(bits), layer=1))
    for spec in specs:
        assert spec.selection == specs[0].selection
        assert spec.selection != CaptureSpec(tokens=[0, 1]).selection
        if len(bits) not in {prompt_len, limit}:
            with pytest.raises(
                InvalidSelection, match=f"{len(bits)} truth values; here it can have {prompt_len}, .* {limit},"
            ):
                spec.selection.ranges(prompt_len, limit)
            continue
        found = {place for part in spec.selection.ranges(prompt_len, limit) for place in range(part.start, part.stop)}
        assert found == set(true)
    assert specs[2].replaced == tuple(true)


@given(st.lists(st.booleans(), min_size=1, max_size=8), FORMS, st.integers(1, 8))
def test_a_mask_of_layers_has_one_truth_value_a_layer(bits, form, num_layers) -> None:
    """In captures, edits and settings alike; truth values are never layers 0 and 1."""
    true = tuple(layer for layer, bit in enumerate(bits) if bit)
    made = CaptureSpec(layers=form(bits)), Add(V, layers=form(bits)), Settings(layers=form(bits))
    assert hash(made[0]) == hash(CaptureSpec(layers=form(bits)))
    assert made[0] == CaptureSpec(layers=list(bits))
    assert made[0] != CaptureSpec(layers=[int(bit) for bit in bits])
    points = made[0].points, made[1].points, made[2].armed
    armed = tuple(sorted({*true, num_layers - 1}))  # the last layer always is
    for of, layers in zip(points, (true, true, armed), strict=True):
        if len(bits) == num_layers and true:
            assert tuple(point.layer for point in of(num_layers)) == layers
        else:
            with pytest.raises(InvalidSpec, match=r"mask of|selects none"):
                of(num_layers)


def test_masks_come_back_from_files(tmp_path) -> None:
    """Of tokens, layers and positions, beside other selections, with their lengths."""
    mask = [True, False, True]
    spec = SteeringSpec(
        [
            Add(V, layers=torch.tensor(mask), tokens=np.array(mask)),
            Add(V, layer=1, tokens=[mask, "generated"]),
            Replace(V.expand(2, WIDTH), mask, layer=0),
        ]
    )
    again = SteeringSpec.load(spec.save(tmp_path / "x.safetensors"))
    for mine, theirs in zip(spec.flat(), again.flat(), strict=True):
        assert (mine.selection, mine.layers, mine.replaced) == (theirs.selection, theirs.layers, theirs.replaced)
        with pytest.raises(InvalidSelection, match="mask of 3"):
            theirs.selection.ranges(5, 9)


def test_all_layers_are_those_that_have_the_site() -> None:
    """Layers that are named are meant, whether they have the site or not; of "all", those that have it, if any has."""
    points = tuple(Point(layer, "router") for layer in range(LAYERS))

    def odd(point: Point) -> bool:
        return point.layer % 2 == 1

    def opened(layers: Any) -> Callable[[Point], bool]:
        return partial(CaptureSpec(layers=layers, sites="router").is_open, num_layers=LAYERS)

    assert existing(points, opened("all"), odd) == points[1::2]
    assert existing(points, opened("all"), lambda _: False) == points
    for named in (slice(None), range(LAYERS), (0, 1)):
        assert existing(points, opened(named), odd) == points


def test_a_point_that_the_model_lacks_is_said_to_be_lacking() -> None:
    """To arm it is no advice, for a capture and for an edit alike."""
    points = {Point(layer, "router"): layer for layer in (0, 2, 3)}

    def exists(point: Point) -> bool:
        return point in points

    with pytest.raises(PointNotArmed, match=r"no 'router' at layer 1; .* at layers \[0, 2, 3\]"):
        check_armed([Point(1, "router")], points, SITES, exists)
    spec = SteeringSpec([Add(V, layer=1, site="router")])
    with pytest.raises(PointNotArmed, match="no 'router' at layer 1"):
        lower(spec, armed=points, schemas={}, num_layers=4, edits_per_point=1, exists=exists)
    with pytest.raises(PointNotArmed, match="arm it at the start"):
        check_armed([Point(0, "neurons")], points, SITES, lambda _: True)


@given(
    sites=st.lists(st.sampled_from(sorted(SITES)), min_size=1, max_size=3, unique=True),
    layers=st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True),
    asked=st.tuples(st.integers(0, 5), st.sampled_from(sorted(SITES))),
)
def test_a_point_without_a_tap_is_armed_as_its_error_says(sites, layers, asked) -> None:
    """It names the point and where taps are, of which some are nobody's wish; what it says to arm gives one."""
    point = placed([Point(*asked)], 6)[0]
    armed = Settings(sites=sites, layers=layers).armed(6)
    if point in armed:
        return
    with pytest.raises(PointNotArmed) as raised:
        check_armed([point], armed, SITES)
    text = str(raised.value)
    assert text.startswith(f"{point} has no tap in this engine, where ")
    assert "those of steercap's own checks included" in text
    assert f"sites=[..., {point.site!r}], layers=[..., {point.layer}])" in text
    assert point in Settings(sites=[*sites, point.site], layers=[*layers, point.layer]).armed(6)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("resid_post[4:8]", "layers="),
        ("resid_post[4, 8]", "layers="),
        ("resid_post[*]", "layers="),
        ("resid_post[]", "layers="),
        ("resid_post[5", "layers="),
        ("layers[5].resid_post", "layers="),
    ],
)
def test_brackets_hold_the_number_of_one_layer(name, hint) -> None:
    """In any place where a point or a site is named, and not as a list of every site there is."""
    for ask in (
        lambda: CaptureSpec(at=name),
        lambda: CaptureSpec(sites=name),
        lambda: Settings(sites=[name]),
        lambda: Add(V, layer=1, site=name),
    ):
        with pytest.raises(UnknownName, match=re.escape(f"{name!r}: brackets hold the number of one layer")) as raised:
            ask()
        assert hint in str(raised.value)


def test_two_masks_never_read_alike() -> None:
    """A sweep is known again by the words of its tokens, so these say all of a mask."""
    seen = {
        str(CaptureSpec(tokens=list(bits)).selection)
        for n in (1, 4)
        for bits in itertools.product([True, False], repeat=n)
        if any(bits)
    }
    assert len(seen) == 1 + 15


def test_no_vector_changes_after_it_was_given_or_read() -> None:
    """Neither the user's tensor nor what an edit, LayerVectors or a DirectionSet hand out reaches what they hold."""
    mine = V.clone()
    edit, found = Add(mine, layer=1), DirectionSet({"v": LayerVectors({1: mine})})
    spec = CaptureSpec(project=found)
    before = [lower(SteeringSpec([edit]), armed=ARMED, schemas=SCHEMAS, num_layers=LAYERS, edits_per_point=4).digest]
    before += [compile_projection(spec, ARMED, SCHEMAS, num_layers=LAYERS).lowered.digest]
    for reached in (
        mine,
        edit.vector,
        found["v"][1],
        found["v"].vectors[1],
        found.directions["v"][1],
        found.at(1),
        *found["v"].values(),
    ):
        reached.mul_(-7)
        reached.numpy()[...] = 3
    after = [lower(SteeringSpec([edit]), armed=ARMED, schemas=SCHEMAS, num_layers=LAYERS, edits_per_point=4).digest]
    after += [compile_projection(spec, ARMED, SCHEMAS, num_layers=LAYERS).lowered.digest]
    assert before == after
    for mapping, key in ((found["v"].vectors, 1), (found.directions, "v")):
        with pytest.raises(TypeError, match="item assignment"):
            mapping[key] = None


def test_what_is_looked_up_in_vain_is_a_key_error_too() -> None:
    """So `get` and `in` do what they do of any mapping, and the message says what there is."""
    for mapping, key in (
        (vectors(), 7),
        (directions(), "w"),
        (captures(), 1),
        (ENCODINGS, "zip"),
        (captures(), "resid_post"),
    ):
        assert mapping.get(key, "nothing") == "nothing" if key != "resid_post" else True
        assert key not in mapping
        with pytest.raises(
            SteercapError,
            match=r"(layers \[0, 2\]|known: 'v'|captured: resid_post\[0\], |known: 'attention', 'calibrated8', 'features', )",
        ):
            mapping[key]
    with pytest.raises(LayerOutOfRange, match=r"^7 is not a layer"):
        vectors()[7]
    with pytest.raises(InvalidSpec, match=r"captures\[layer, 'resid_post'\]"):
        captures()["resid_post"]


def test_a_scorer_says_what_it_must_be_told() -> None:
    """The names of what is missing, and how to give it."""
    for make in (lambda: make_scorer("judge"), lambda: Score("optimistic", "judge")):
        with pytest.raises(InvalidSetting, match=r"needs base_url and model; .* Judge\(base_url=\.\.\., model="):
            make()
    with pytest.raises(InvalidSetting, match="no argument colour; known: 'density"):
        make_scorer("keywords", {"colour": 1})
    with pytest.raises(InvalidSpec, match=r"needs its trait; give Score\(trait=\.\.\.\)"):
        measures_of(["score"], ())


def test_rows_of_a_message_are_asked_for_by_index_or_role() -> None:
    """Integers of any library, negative ones from the end; a truth value or None is not a message."""
    made = handle()
    for index in (1, -1, np.int64(1), np.int64(-1), torch.tensor(1)):
        assert made.rows_of(index).tolist() == [False, True, True, False, False]
    assert made.rows_of("assistant").tolist() == [False, True, True, False, True]
    for nonsense in (True, None, 2, -3, 1.0, "system", torch.tensor(True)):
        with pytest.raises(InvalidSpec, match="0: user, 1: assistant, assistant"):
            made.rows_of(nonsense)


def test_labels_that_are_handed_out_are_copies() -> None:
    """What a user does to positions and ids does not reach the receipt, by which messages are found."""
    made = handle()
    made.positions.add_(3)
    made.token_ids.zero_()
    assert made.positions.tolist() == list(range(5))
    assert made.token_ids.tolist() == [0, 1, 2, 3, 7]
    assert CaptureSpec(tokens=made.positions[made.rows_of("assistant")]).selection.terms == (1, 2, 4)


@pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda how: how.__name__)
def test_what_has_one_owner_is_not_copied(copying) -> None:
    """A second handle would free the same rows again, a second model stop the same engine; each says what to do."""
    from steercap import sync

    with pytest.raises(InvalidRequest, match=r"handle\.save\(path\)"):
        copying(handle())
    with pytest.raises(InvalidRequest, match=r"handle\.save\(path\)"):
        copying(
            {"mine": [sync.CaptureHandle(handle(), None)]}
            if copying is not copy.copy
            else sync.CaptureHandle(handle(), None)
        )
    for model in (SteerModel("x"), sync.SteerModel("x")):
        with pytest.raises(InvalidRequest, match="make another SteerModel"):
            copying(model)


def test_what_is_a_value_is_copied() -> None:
    """Specs, edits, vectors and rows that are here come back from pickle and deepcopy as they were."""
    spec = SteeringSpec([Add(V, layer=1, tokens=[True, False])])
    for again in (copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert torch.equal(again.edits[0].vector, V)
        assert again.edits[0].selection == spec.edits[0].selection
    for value in (vectors(), directions(), CaptureSpec(layers=[True, False, True], tokens=-1)):
        assert copy.deepcopy(value) == value == pickle.loads(pickle.dumps(value))
    assert torch.equal(pickle.loads(pickle.dumps(captures()))[0], captures()[0])


def test_run_tells_a_conversation_from_prompts_by_its_keys() -> None:
    """Dicts with a role are messages of one conversation; those of vLLM are prompts, and both may stand in one list."""
    talk = [{"role": "user", "content": "hi"}]
    told = partial(prompts_or_conversations, template_kwargs=None)
    assert told("hi") == (False, ["hi"])
    assert told([1, 2]) == (False, [{"prompt_token_ids": [1, 2]}])
    assert told(talk) == (False, [talk])
    assert told([talk, talk]) == (True, [talk, talk])
    assert told([{"prompt": "hi"}]) == (True, [{"prompt": "hi"}])
    assert told(["hi", talk, [1]]) == (True, ["hi", talk, {"prompt_token_ids": [1]}])
    for wrong in (talk[0], [*talk, {"prompt": "hi"}], [*talk, {"content": "hi"}], [[*talk, {}]], [talk, 3], []):
        with pytest.raises(InvalidPrompt):
            told(wrong)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_are_no_token_ids(kind) -> None:
    """Although their items are integers: the model would read five tokens that nobody meant."""
    text = kind(b"Hello")
    for prompts in (text, [text], ["x", text], (text,)):
        with pytest.raises(InvalidPrompt, match=r"cannot be a prompt|give a str"):
            as_list(prompts)
        with pytest.raises(InvalidPrompt, match=r"cannot be a prompt|give a str"):
            prompts_or_conversations(prompts, template_kwargs=None)
    for wrong in (text, [text]):
        with pytest.raises(InvalidSpec, match="is not a text"):
            ids_of_text(wrong)
    with pytest.raises(InvalidPrompt, match="whole numbers"):
        ids_of_prompt(text)


def test_run_takes_arguments_of_the_template_for_conversations_alone() -> None:
    talk = [{"role": "user", "content": "hi"}]
    assert prompts_or_conversations([talk], template_kwargs={"x": 1}) == (True, [talk])
    for prompts in ("hi", [talk, "hi"], [1, 2]):
        with pytest.raises(InvalidRequest, match=r"chat_template_kwargs= with the prompt .*not a conversation"):
            prompts_or_conversations(prompts, template_kwargs={})


def test_a_generation_of_one_sample_has_a_text_and_a_handle() -> None:
    one = Generation(None, ("a",), ("rows",))
    assert (one.text, one.handle) == ("a", "rows")
    several = Generation(None, ("a", "b"), ("rows", "others"))
    for name in ("text", "handle"):
        with pytest.raises(InvalidRequest, match=f"2 samples, each with a {name} of its own; use {name}s"):
            getattr(several, name)
    with pytest.raises(InvalidRequest, match="nothing of this prompt was captured"):
        _ = Generation(None, ("a",)).handle
