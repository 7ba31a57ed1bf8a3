"""The equations of the proof at start, on rows that are made up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steercap import Add, Point
from steercap.architectures.families.base import Family
from steercap.core.attention import AttentionRule
from steercap.core.messages import Loaded
from steercap.errors import UnsupportedModel
from steercap.requests import probe
from steercap.requests.equations import (
    EQUATION_SITES,
    PROJECTED,
    Claim,
    attends,
    edited,
    equations,
    lens_claim,
    of_projections,
    projected,
    worst,
)
from steercap.requests.probe import _overflowed, _Probed

ROWS, WIDTH, LAYERS = 4, 16, 3


def pass_of(seed: int, factor: float = 1.0, dtype: torch.dtype = torch.float32) -> dict[Point, torch.Tensor]:
    """Rows of a stream that grows as it should."""
    generator = torch.Generator().manual_seed(seed)

    def drawn() -> torch.Tensor:
        return torch.randn(ROWS, WIDTH, generator=generator)

    stream, rows = drawn(), {}
    for layer in range(LAYERS):
        attention, feed_forward = drawn(), drawn()
        middle = stream + factor * attention
        after = middle + factor * feed_forward
        kept = (stream, attention, middle, feed_forward, after)
        rows |= {Point(layer, site): one for site, one in zip(EQUATION_SITES, kept, strict=True)}
        stream = after
    return {point: one.to(dtype) for point, one in rows.items()}


@given(st.integers(0, 1000), st.sampled_from([1.0, 0.22]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_stream_that_grows_by_what_blocks_add_is_proved(seed, factor, dtype) -> None:
    claims = list(equations(pass_of(seed, factor, dtype), factor))
    assert len(claims) == 4 * LAYERS - 1
    assert worst(claims) is None


def test_the_stream_begins_with_what_is_embedded() -> None:
    rows = pass_of(6)
    rows[Point(0, "embed")] = rows[Point(0, "resid_pre")].clone()
    assert worst(equations(rows, 1.0)) is None
    added = torch.randn(ROWS, WIDTH)
    rows[Point(0, "embed")] += added
    assert worst(equations(rows, 1.0)).name == "resid_pre[0] is embed[0]"
    assert worst(equations(rows, 1.0, (Point(0, "embed"), added))) is not None  # what is embedded is the edited row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("site", EQUATION_SITES)
def test_a_row_that_is_something_else_is_seen(site, dtype) -> None:
    """A scale, a row of another token, a partial sum: each breaks an equation."""
    for change in (lambda row: 1.2 * row, lambda row: row.roll(1, 0), lambda row: row - row.mean()):
        rows = pass_of(3, 1.0, dtype)
        rows[Point(1, site)] = change(rows[Point(1, site)].float()).to(dtype)
        wrong = worst(equations(rows, 1.0))
        assert wrong is not None
        assert "1" in wrong.name


def test_a_forgotten_factor_is_seen() -> None:
    rows = pass_of(5, 0.22)
    assert worst(equations(rows, 0.22)) is None
    assert "attn_out + mlp_out" in worst(equations(rows, 1.0)).name


def test_a_layer_of_one_block_grows_by_that_block() -> None:
    """Of Mamba, and of hybrids whose layers are one block each: what the layer has not adds nothing."""
    rows = {point: one for point, one in pass_of(2).items() if point.site != "resid_mid"}
    absent = {Point(layer, "mlp_out") for layer in range(LAYERS)}
    for layer in range(LAYERS):
        lacking = rows.pop(Point(layer, "mlp_out"))
        later = [
            point
            for point in rows
            if (point.layer, EQUATION_SITES.index(point.site)) > (layer, EQUATION_SITES.index("mlp_out"))
        ]
        for point in later:
            rows[point] = rows[point] - lacking if point.site.startswith("resid") else rows[point]
    assert len(list(equations(rows, 1.0))) == LAYERS - 1  # of a layer that may have another block, nothing is known
    claims = list(equations(rows, 1.0, absent=absent))
    assert len(claims) == 2 * LAYERS - 1
    assert worst(claims) is None
    rows[Point(1, "attn_out")] = 1.2 * rows[Point(1, "attn_out")]
    assert worst(equations(rows, 1.0, absent=absent)).name == "resid_post[1] is resid_pre + attn_out"
    nothing = {Point(layer, site) for layer in range(LAYERS) for site in ("attn_out", "mlp_out")}
    assert len(list(equations(rows, 1.0, absent=nothing))) == LAYERS - 1


@pytest.mark.parametrize("middle", [False, True])
def test_where_layers_do_more_than_add_the_sum_between_the_blocks_alone_is_claimed(middle) -> None:
    """A norm behind the sum, which leaves no row between the blocks, or a constant that the stream is multiplied by."""
    rows = {point: one for point, one in pass_of(4).items() if middle or point.site != "resid_mid"}
    for layer in range(LAYERS - 1):
        before, added, between = (Point(layer + 1, site) for site in ("resid_pre", "attn_out", "resid_mid"))
        rows[before] = rows[Point(layer, "resid_post")] = 3 * rows[before]
        if middle:
            rows[between] = rows[before] + rows[added]
    claims = list(equations(rows, None))
    assert {claim.name for claim in claims} == {
        *(f"resid_pre[{layer + 1}] is resid_post[{layer}]" for layer in range(LAYERS - 1)),
        *(f"resid_mid[{layer}] is resid_pre + attn_out" for layer in range(LAYERS) if middle),
    }
    assert worst(claims) is None
    rows[Point(1, "attn_out")] = 1.01 * rows[Point(1, "attn_out")]
    assert (worst(equations(rows, None)) is not None) == middle


def test_an_edit_moves_both_equations_by_what_it_added() -> None:
    """The row of a point is the edited one: what comes after it follows, what comes before does not."""
    vector = torch.randn(ROWS, WIDTH)
    rows = pass_of(7)
    after = Point(1, "resid_post")
    rows[after] = rows[after] + vector
    assert worst(equations(rows, 1.0, (after, vector))) is not None  # the next layer did not begin with it
    for site in EQUATION_SITES:
        following = Point(2, site)
        if site.startswith("resid"):
            rows[following] = rows[following] + vector
    assert worst(equations(rows, 1.0, (after, vector))) is None
    assert worst(equations(rows, 1.0)) is not None


def test_an_edit_between_the_blocks_is_part_of_the_sum() -> None:
    vector = torch.randn(ROWS, WIDTH)
    rows, edit = pass_of(8), (Point(1, "resid_mid"), vector)
    for point in rows:
        if point.site.startswith("resid") and (point.layer, EQUATION_SITES.index(point.site)) >= (
            1,
            EQUATION_SITES.index("resid_mid"),
        ):
            rows[point] = rows[point] + vector
    assert worst(equations(rows, 1.0, edit)) is None
    assert len(list(equations(rows, 1.0, edit))) == 4 * LAYERS - 1
    assert "resid_mid[1]" in worst(equations(pass_of(8), 1.0, edit)).name


def test_what_is_not_armed_is_not_claimed() -> None:
    rows = {point: one for point, one in pass_of(1).items() if point.site == "resid_post"}
    assert list(equations(rows, 1.0)) == []


HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def attention_of(seed: int, rule: AttentionRule, dtype: torch.dtype = torch.float32) -> dict[Point, torch.Tensor]:
    """What a layer reads, and gives by PyTorch's own attention, or one head and token after the other."""
    generator = torch.Generator().manual_seed(seed)
    heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    rows = {site: torch.randn(ROWS, count, HEAD_DIM, generator=generator).to(dtype) for site, count in heads.items()}
    q, k, v = (rows[site].double() for site in "qkv")
    z = torch.zeros(ROWS, HEADS, HEAD_DIM, dtype=torch.float64)
    for head in range(HEADS):
        for query in range(ROWS):
            seen = range(max(0, query + 1 - (rule.window or ROWS)), query + 1)
            logits = torch.stack([rule.scale * q[query, head] @ k[key, head // 2] for key in seen])
            if rule.soft_cap:
                logits = rule.soft_cap * (logits / rule.soft_cap).tanh()
            sinks = torch.tensor([rule.sinks[head]] if rule.sinks else [], dtype=torch.float64)
            weights = torch.cat([logits, sinks]).softmax(0)
            z[query, head] = sum(weight * v[key, head // 2] for weight, key in zip(weights, seen, strict=False))
    return {Point(1, site): one for site, one in {**rows, "z": z.to(dtype)}.items()}


RULES = {
    "plain": AttentionRule(0.35),
    "window": AttentionRule(0.35, window=2),
    "soft cap": AttentionRule(2.0, soft_cap=1.5),
    "sinks": AttentionRule(0.35, sinks=(0.5, -1.0, 2.0, 0.0)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", RULES)
def test_what_heads_give_is_proved_of_what_they_read(kind, dtype) -> None:
    """Whatever the rule of attention is."""
    rows = attention_of(11, RULES[kind], dtype)
    (claim,) = attends(1, rows, RULES[kind])
    assert claim.holds
    added = torch.randn(ROWS, HEADS * HEAD_DIM)
    edit = (Point(1, "z"), added)
    assert not worst(attends(1, rows, RULES[kind], edit)).holds
    rows[Point(1, "z")] = (rows[Point(1, "z")].float() + added.view(ROWS, HEADS, HEAD_DIM)).to(dtype)
    (claim,) = attends(1, rows, RULES[kind], edit)
    assert claim.holds
    assert claim.name == "z[1] is the values, weighed by attention, with an edit at z[1]"
    assert worst(attends(1, attention_of(11, RULES[kind], dtype), RULES[kind], (Point(1, "q"), added))) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("site", ["q", "k", "v", "z"])
def test_heads_that_are_something_else_are_seen(site, dtype) -> None:
    """Rows of other tokens, heads in another order, elements in another order, a scale; another view of the same numbers."""
    rule, point = RULES["plain"], Point(1, site)
    changes = {
        "tokens": lambda row: row.roll(1, 0),
        "heads": lambda row: row.flip(1),
        "elements": lambda row: row.flip(2),
        "scale": lambda row: 1.5 * row,
        "view": lambda row: row.transpose(1, 2).reshape(row.shape),
    }
    for name, change in changes.items():
        rows = attention_of(12, rule, dtype)
        rows[point] = change(rows[point].float()).to(dtype)
        (claim,) = attends(1, rows, rule)
        assert not claim.holds, name


def test_heads_of_other_shapes_are_seen_and_what_is_not_understood_is_not_claimed() -> None:
    """Values that are padded are no heads' values; a rule that is not understood proves nothing, nor does a part of it."""
    rule, rows = RULES["plain"], attention_of(13, RULES["plain"])
    wide = rows | {Point(1, "v"): torch.nn.functional.pad(rows[1, "v"], (0, HEAD_DIM))}
    assert not worst(attends(1, wide, rule)).holds
    fewer = rows | {Point(1, "z"): rows[1, "z"].reshape(ROWS, 2, -1)}
    assert not worst(attends(1, fewer, rule)).holds
    assert list(attends(1, rows, AttentionRule(0.0, unknown="it is strange"))) == []
    assert list(attends(2, rows, rule)) == []
    assert list(attends(1, {point: one for point, one in rows.items() if point.site != "v"}, rule)) == []


def test_what_is_projected_of_something_else_is_seen() -> None:
    found = torch.randn(ROWS, WIDTH)
    at, block = Point(2, "z"), Point(2, "attn_out")
    assert projected(at, block, found, found * (1 + 1e-5)).holds
    assert str(projected(at, block, found, found.roll(1, 0))).startswith(
        "attn_out[2] is what is projected of z[2]: off"
    )
    assert not projected(at, block, found, found / 2).holds
    assert not projected(at, block, found, float("nan") * found).holds


@pytest.mark.parametrize("site", PROJECTED)
async def test_what_is_projected_of_an_edited_row_holds_the_edit(site) -> None:
    """A tap whose edit reaches the captured row and half of it the projection; other points' rows are not projected."""
    weight, clean, vector = torch.randn(WIDTH, WIDTH), torch.randn(ROWS, WIDTH), torch.randn(WIDTH)
    asked = []

    async def project(layer, name, rows, number):
        asked.append((layer, name, number))
        return rows @ weight

    engine = SimpleNamespace(
        family=Family(), workers=SimpleNamespace(project=project), vllm=SimpleNamespace(config=None), exists=lambda _: 0
    )
    at, block = Point(2, site), Point(2, PROJECTED[site])
    others = {Point(2, name): torch.randn(ROWS, WIDTH) for name in {*PROJECTED, *PROJECTED.values()} - {site}}
    for share in (1.0, 0.5):
        rows = {**others, at: clean + vector, block: (clean + share * vector) @ weight}
        (claim,) = [one async for one in of_projections(engine, 3, rows, at)]
        assert claim.name == f"{block} is what is projected of {at}, with an edit there"
        assert claim.holds == (share == 1)
    assert asked == 2 * [(2, site, 3)]
    assert [one async for one in of_projections(engine, 3, rows, block)] == []


def test_an_edit_that_is_not_exact_is_seen() -> None:
    clean, vector = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    point = Point(0, "z")
    for alone in (False, True):
        assert edited(point, clean, clean + vector, vector, torch.float32, alone=alone).holds
        assert not edited(point, clean, clean + 1.01 * vector, vector, torch.float32, alone=alone).holds
        for dtype in (torch.float32, torch.bfloat16):
            assert not edited(point, clean, clean, vector, dtype, alone=alone).holds
            assert not edited(point, clean, clean + vector.roll(1, 0), vector, dtype, alone=alone).holds
            assert not edited(point, clean, clean * float("nan"), vector, dtype, alone=alone).holds


def test_a_row_of_another_batch_in_sixteen_bits_is_no_wrong_edit() -> None:
    """A router that chooses between close experts moves a row by a part, and the edit is there all the same."""
    clean, vector, moved = (torch.randn(ROWS, WIDTH) for _ in range(3))
    found = clean + vector
    found[1] += 0.3 * moved[1] / moved[1].norm() * clean[1].norm()
    point = Point(2, "mlp_in")
    assert edited(point, clean, found, vector, torch.bfloat16, alone=False).holds
    assert not edited(point, clean, found, vector, torch.bfloat16, alone=True).holds
    assert not edited(point, clean, found, vector, torch.float32, alone=False).holds


def test_a_weaker_edit_in_sixteen_bits_is_seen() -> None:
    """Also where it is within what rows of other batches may differ by."""
    clean, vector = torch.randn(3, 256), torch.randn(256).expand(3, 256)
    massive = clean * torch.tensor([[5.0], [1.0], [1.0]])  # a first token, whose row is missed
    missed = vector * torch.tensor([[0.0], [1.0], [1.0]])
    for before, added in [(clean, vector / 2), (clean, vector * 2), (massive, missed)]:
        for alone in (False, True):
            assert not edited(Point(2, "mlp_in"), before, before + added, vector, torch.bfloat16, alone=alone).holds


def lens(reported: list[float], logits: torch.Tensor, tokens: list[int], dtype: torch.dtype = torch.float32):
    edges = logits.aminmax()
    return lens_claim(
        "here",
        reported,
        logits[tokens].tolist(),
        most=float(edges.max),
        spread=float(logits.std()),
        total=float(logits.logsumexp(0)),
        size=float(logits.abs().max()),
        dtype=dtype,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lens_closes_of_logits_and_of_their_logarithms_of_probabilities(dtype) -> None:
    """Another order, or a token that should have been reported, is seen; and of one token, the most probable, how
    probable it is.
    """
    logits = 3 * torch.randn(500)
    tokens = logits.topk(20).indices.tolist()
    said = logits.log_softmax(0)[tokens].tolist()
    assert lens(said, logits, tokens, dtype).holds
    assert lens(logits[tokens].tolist(), logits, tokens, dtype).holds
    assert lens(said[:1], logits, tokens[:1], dtype).holds
    assert not lens([said[0] + 2.0], logits, tokens[:1], dtype).holds
    nothing = torch.zeros(500)  # of weights that are all zero, nothing can be said
    assert lens(nothing.log_softmax(0)[tokens].tolist(), nothing, tokens, dtype).holds
    other = 0.8 * logits + 0.6 * 3 * torch.randn(500)
    assert not lens(said, other, tokens, dtype).holds
    hidden = logits.clone()
    hidden[int(logits.argmin())] = logits.max() + 3.0
    assert not lens(said, hidden, tokens, dtype).holds
    assert not lens([float("nan")] * 20, logits, tokens, dtype).holds


@pytest.mark.parametrize("derived", [True, False])
def test_a_derived_family_is_not_served_if_its_rows_overflow(derived) -> None:
    """Nothing tells its candidates apart then; a known family is served with a warning."""
    end = Point(1, "resid_post")
    engine = SimpleNamespace(
        family=Family(derived=derived),
        end=end,
        vllm=SimpleNamespace(points=[end]),
        loaded=Loaded("x", {"odd.Layer": ""}),
    )
    probed = _Probed({end: torch.full((4, 8), float("inf"))}, None)
    told = (
        pytest.raises(UnsupportedModel, match=r"position 2 .* resid_post\[1\] holds .* derived of layers of odd\.Layer")
        if derived
        else pytest.warns(UserWarning, match="neither rows nor edits could be tested")
    )
    with told:
        _overflowed(engine, probed, 2, 0)


def reporting(moved: float) -> SimpleNamespace:
    """An output whose next token's log probabilities are moved."""
    logprobs = {token: SimpleNamespace(logprob=moved - token) for token in range(1, 4)}
    return SimpleNamespace(outputs=[SimpleNamespace(logprobs=[logprobs])])


@pytest.mark.parametrize(("lost", "shown"), [(True, False), (False, False), (False, True)])
async def test_a_lost_edit_is_seen_through_the_noise_of_a_batch(lost, shown, monkeypatch) -> None:
    """Outputs of requests side by side differ by rounding, so that an edit whose output is about the unedited one's is
    made alone, if no equation has the edited row on its other side: it is lost if nothing differs there, and not if only
    little does.
    """
    point, other = Point(0, "attn_in"), Point(1, "attn_in")
    edits = {at: Add(torch.ones(WIDTH), layer=at.layer, site=at.site) for at in (point, other)}
    clean = torch.zeros(ROWS, WIDTH)
    ran = []

    async def run(_engine, _number, wanted):
        ran.append([at for at, _ in wanted])
        noise = [1e-5 * number for number in range(len(wanted))]
        strength = {None: 0.0, point: 0.0 if lost else 1e-6, other: 0.5}
        rows = dict.fromkeys(edits, clean[:3] + 1)
        return [
            (at, _Probed(rows, reporting(strength[at] + near))) for (at, _), near in zip(wanted, noise, strict=True)
        ]

    monkeypatch.setattr(probe, "_run", run)
    monkeypatch.setattr(probe, "of_rows", lambda *asked: [Claim("", 1.0, 0.0)] if shown and len(asked) == 2 else [])
    engine = SimpleNamespace(end=point, family=Family())
    silent, claims = await probe._try(engine, 0, edits, _Probed(dict.fromkeys(edits, clean), None))
    assert silent == ([point] if lost else [])
    assert ran == [[None, point, other]] + ([] if shown else [[None], [point]])
    assert worst(claims) is None
