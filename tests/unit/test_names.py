"""Names of points: our own, TransformerLens's, modules' paths; what is not one is said to be none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steercap import Add, CaptureSpec, Point
from steercap.architectures.sites import SITES, placed
from steercap.captures.rows import Captures
from steercap.config import Settings
from steercap.core.names import TRANSFORMER_LENS, Name, is_module, read_name
from steercap.errors import InvalidEdit, InvalidSpec, LayerOutOfRange, SteercapError, UnknownName
from steercap.steering import LayerVectors

LAYERS = 4
V = torch.ones(3)


@pytest.mark.parametrize(
    ("name", "site", "layer"),
    [
        ("resid_post", "resid_post", None),
        ("resid_post[5]", "resid_post", 5),
        ("z[-1]", "z", -1),
        ("hook_resid_mid", "resid_mid", None),
        ("blocks.*.hook_mlp_out", "mlp_out", None),
        ("blocks.17.attn.hook_rot_k", "k", 17),
        ("blocks.0.mlp.hook_post", "neurons", 0),
        ("model.layers.5.mlp.down_proj.input", "model.layers.*.mlp.down_proj.input", 5),
        ("model.layers.*.self_attn.output", "model.layers.*.self_attn.output", None),
        ("transformer.h.3.mlp.experts.2.output", "transformer.h.*.mlp.experts.2.output", 3),
        ("lm_head.output", "lm_head.output", None),
        ("model.layers[0].input_layernorm.output", "model.layers.*.input_layernorm.output", 0),
        ("model.layers[*].mlp.output", "model.layers.*.mlp.output", None),
        ("transformer.h[3].mlp.experts[2].output", "transformer.h.*.mlp.experts.2.output", 3),
    ],
)
def test_a_name_says_its_site_and_maybe_its_layer(name, site, layer) -> None:
    assert read_name(name) == Name(site, layer)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("blocks.3.hook_embed", "leaves out what is added for positions"),
        ("blocks.3.attn.hook_q", r"before rotary embedding.*attn\.hook_rot_q"),
        ("blocks.3.ln1.hook_normalized", "the norm's weights"),
        ("blocks.3.attn.hook_pattern", r"'q' and 'k' .*attention_pattern\(layer\)"),
        ("blocks.3.mlp.hook_pre", r"before the activation function.*mlp\.hook_post"),
        ("model.layers.3.output", r"is a whole layer.* the same rows are 'resid_post\[3\]'"),
        ("model.layers[3].output[0]", r"is a whole layer.* the same rows are 'resid_post\[3\]'"),
        ("transformer.h.*.input", "is a whole layer.* the same rows are 'resid_pre'"),
        ("blocks.3.hook_nothing", r"unknown name .* after 'blocks\.<layer>\.'"),
        ("a.3.b.*.input", "the first number in a path is the layer"),
        ("a.*.b.*.input", "the first number in a path is the layer"),
        ("*.input", "the first number in a path is the layer"),
        ("resid_post[\N{ARABIC-INDIC DIGIT THREE}]", "brackets hold the number of one layer"),
        ("resid_post[5][3]", "gives its layer twice, 5 and 3"),
        ("blocks.5.hook_resid_post[3]", "gives its layer twice, 5 and 3"),
        ("model.layers.5.mlp.input[-1]", "gives its layer twice, 5 and -1"),
        ("model.layers[5].mlp.input[-1]", "gives its layer twice, 5 and -1"),
        ("model.layers[-1].mlp.input", "brackets hold the number of one layer"),
        ("model.layers[0:3].mlp.input", "brackets hold the number of one layer"),
        ("resid_post.5", r"did you mean 'resid_post\[5\]'\?"),
        (f"resid_post[{'9' * 5000}]", "no model has so many layers"),
        (f"blocks.{'9' * 5000}.hook_resid_post", "no model has so many layers"),
        (f"model.layers.{'9' * 5000}.mlp.input", "no model has so many layers"),
    ],
)
def test_a_name_for_other_rows_is_refused(name, says) -> None:
    with pytest.raises(UnknownName, match=says):
        read_name(name)


@given(st.text() | st.from_regex(r"[a-z.*0-9\[\]]{1,30}"))
def test_whatever_is_given_as_a_name_is_read_or_refused(name) -> None:
    """Never evaluated: a name is one, or another error of ours."""
    try:
        found = read_name(name)
    except SteercapError:
        return
    assert isinstance(found, Name)
    assert found.site not in SITES or read_name(str(Point(found.layer or 0, found.site))).site == found.site


def test_points_are_shown_by_names_that_are_read() -> None:
    for point in (Point(2, "resid_post"), Point(3, "model.layers.*.mlp.input"), Point(0, "z")):
        assert Point(*reversed(read_name(str(point)))) == point


def test_a_capture_names_its_points() -> None:
    """In the order given, each once, at the layers that names say."""
    asked = CaptureSpec(at=["blocks.2.attn.hook_z", (1, "resid_post"), "resid_post[1]", "hook_resid_mid", (-1, "q")])
    middles = tuple(Point(layer, "resid_mid") for layer in range(LAYERS))
    assert asked.points(LAYERS) == (Point(2, "z"), Point(1, "resid_post"), *middles, Point(3, "q"))
    opened = [point for point in asked.points(LAYERS) if asked.is_open(point, LAYERS)]
    assert opened == list(middles)  # the others are meant wherever the model has them or not
    assert CaptureSpec(at=(2, "z")).points(LAYERS) == CaptureSpec(at="z[2]").points(LAYERS) == (Point(2, "z"),)
    with pytest.raises(LayerOutOfRange):
        CaptureSpec(at="z[4]").points(LAYERS)


@pytest.mark.parametrize(
    "given",
    [{"at": []}, {"at": 5}, {"at": [5]}, {"at": [("z", 5)]}, {"at": "z[1]", "layers": 1}, {"at": "z[1]", "sites": "q"}],
)
def test_what_is_no_point_is_refused(given) -> None:
    with pytest.raises(InvalidSpec, match="at="):
        CaptureSpec(**given)


def test_a_site_may_have_other_names() -> None:
    assert CaptureSpec(sites=["hook_resid_post", "attn.hook_z"]).sites == ("resid_post", "z")
    assert LayerVectors({1: V}, site="hook_mlp_out").site == "mlp_out"
    with pytest.raises(InvalidSpec, match=r"names a layer.*at='blocks\.1\.hook_mlp_out'"):
        CaptureSpec(sites="blocks.1.hook_mlp_out")


def test_an_edit_may_take_its_layer_from_the_name() -> None:
    edit = Add(V, site="blocks.2.hook_resid_mid")
    assert (edit.layer, edit.site) == (2, "resid_mid")
    assert edit.points(LAYERS) == (Point(2, "resid_mid"),)
    assert Add(V, site="hook_resid_mid", layers=[0, 1]).points(LAYERS) == (Point(0, "resid_mid"), Point(1, "resid_mid"))
    with pytest.raises(InvalidEdit, match="leave layer= out"):
        Add(V, site="resid_mid[2]", layer=1)
    with pytest.raises(InvalidEdit, match="give layer="):
        Add(V, site="hook_resid_mid")


def test_an_engine_arms_what_names_say() -> None:
    settings = Settings(sites=["hook_mlp_out", "blocks.1.attn.hook_z", "model.layers.2.mlp.input"], layers=[0, 3])
    assert settings.sites == ("mlp_out", "z", "model.layers.*.mlp.input")
    armed = settings.armed(LAYERS)
    assert {Point(0, "mlp_out"), Point(3, "mlp_out"), Point(1, "z"), Point(2, "model.layers.*.mlp.input")} <= set(armed)
    assert {point.layer for point in armed if point.site == "z"} == {1}


def test_what_a_model_has_one_of_is_at_one_layer() -> None:
    """Whichever layer is named, of a capture, an edit, an engine and a look-up."""
    assert placed([Point(1, "final_norm"), Point(0, "final_norm"), Point(2, "embed")], LAYERS) == (
        Point(3, "final_norm"),
        Point(0, "embed"),
    )
    assert Add(V, layers="all", site="embed").points(LAYERS) == (Point(0, "embed"),)
    assert set(Settings(sites=["embed", "final_norm"], layers=2).armed(LAYERS)) == {
        Point(0, "embed"),
        Point(3, "final_norm"),
        Point(3, "resid_post"),
    }
    rows = Captures({Point(3, "final_norm"): V[None], Point(1, "z"): V[None]}, LAYERS)
    for key in ("final_norm", (0, "final_norm"), (-1, "final_norm")):
        assert torch.equal(rows[key], V[None])
    assert torch.equal(rows["blocks.1.attn.hook_z"], V[None])
    with pytest.raises(InvalidSpec, match="give a layer"):
        _ = rows["z"]
    with pytest.raises(LayerOutOfRange):
        _ = rows["blocks.2.attn.hook_z"]


def test_every_name_of_transformer_lens_is_of_a_site() -> None:
    assert set(TRANSFORMER_LENS.values()) <= set(SITES)
    assert not any(map(is_module, SITES))
    assert "model.norm.output" in SITES
    with pytest.raises(UnknownName):
        _ = SITES["model.norm"]
