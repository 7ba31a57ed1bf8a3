"""The experts that routers choose, against those that transformers' experts are called with."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch
from conftest import opened
from support.experts import ROUTED, experts_add, experts_agree, routed_checkpoint
from support.rows import GREEDY, MAX_ERROR, TINY_ENGINE, inputs_of, random_prompt

from steercap import Add, CaptureHandle, CaptureSpec, SteeringSpec, SteerModel, errors
from steercap import sync as blocking
from steercap.testing import Reference
from steercap.testing.architectures import ENGINES

SIX = {"max_tokens": 6, **GREEDY}
ROUTER = CaptureSpec(layers=[1, 2], sites="router")
#: Groups of experts, biased scores, weights renormalised, a factor behind the router, and a dense layer: the most.
MOST = "deepseek_v3"


@pytest.fixture(scope="module")
async def routed() -> AsyncIterator[SteerModel]:
    """Tiny DeepSeek V3, its routers and what its blocks add armed."""
    async with opened(routed_checkpoint(MOST), sites=["router", "mlp_out"], **TINY_ENGINE, **ENGINES[MOST]) as model:
        yield model


@pytest.fixture(scope="module")
def known() -> Reference:
    """transformers on its checkpoint."""
    return Reference(routed_checkpoint(MOST))


async def some(model: SteerModel, **asked) -> CaptureHandle:
    """A request whose routers are captured, and its rows are here."""
    _, handle = await model.generate(random_prompt(40, 1), SIX, **{"capture": ROUTER, **asked})
    return await handle.fetch()


async def test_experts_are_those_of_transformers(routed, known, record_property) -> None:
    record_property(MOST, f"{await experts_agree(routed, known):.1e}")


async def test_weights_are_those_that_outputs_are_added_with(routed, known, record_property) -> None:
    """The factor behind the router included."""
    record_property(MOST, f"{(error := await experts_add(routed, known)):.1e}")
    assert error < MAX_ERROR


@pytest.mark.extended
@pytest.mark.parametrize("name", sorted({*ROUTED} - {MOST}))
async def test_experts_of_every_family_are_those_of_transformers(name, record_property) -> None:
    """Whatever the family does between logits and weights."""
    engine = {**TINY_ENGINE, **ENGINES.get(name, {})}
    path = routed_checkpoint(name)
    # What the probe at the start adds to PhiMoE's routers changes no choice, and no weight, if they alone are armed.
    sites = ["router", "mlp_out"] if name == "phimoe" else ["router"]
    async with opened(path, sites=sites, **engine) as model:
        reference = Reference(path, getattr(torch, engine["dtype"]))
        record_property(name, f"{await experts_agree(model, reference):.1e}")


async def test_an_edited_router_chooses_by_the_edited_logits(routed, known) -> None:
    """Experts in other groups than most are chosen, by every edited token and by no other; as transformers chooses,
    whose own logits are edited.
    """
    push = torch.full((8,), -20.0)
    push[[3, 6]] = 20.0
    edit = SteeringSpec([Add(push, layer=2, site="router", tokens=[slice(0, 30)])])
    before, after = await some(routed), await some(routed, steering=edit)
    clean, found = await before.experts(2), await after.experts(2)
    assert found.ids[:30].sort(dim=1).values.tolist() == [[3, 6]] * 30
    assert (clean.ids[:30].sort(dim=1).values != torch.tensor([3, 6])).any(dim=1).sum() > 20
    _, weights = known.experts(inputs_of(after), steering=edit, prompt_len=40)[2]
    assert (found.weights - weights).abs().max() < 1e-4
    await experts_agree(routed, known, edit, lengths=(40,))
    with pytest.raises(errors.InvalidRequest, match="before its edits"):
        await (
            await some(routed, steering=edit, capture=CaptureSpec(layers=2, sites="router", before_edits=True))
        ).experts(2)
    unedited = await some(routed, capture=CaptureSpec(layers=2, sites="router", before_edits=True))
    assert torch.equal((await unedited.experts(2)).ids, clean.ids)


async def test_tokens_and_layers_are_chosen_as_elsewhere(routed) -> None:
    """Negative layers count from the last, `tokens=` takes what `CaptureSpec` does, and positions say which rows."""
    handle = await some(routed)
    every = await handle.experts(2)
    few = await handle.experts(-2, tokens=["last_prompt", "generated"])
    assert few.positions.tolist() == list(range(39, 45))
    assert torch.equal(few.ids, every.ids[39:])
    assert few.weights.allclose(every.weights[39:], atol=1e-6)  # sums of other shapes round otherwise
    assert (every.ids.dtype, every.weights.dtype, every.ids.shape) == (torch.int64, torch.float32, (45, 2))
    assert (every.weights[:, 0] >= every.weights[:, 1]).all()
    assert every.weights.sum(dim=1).allclose(torch.tensor(2.5))  # its routed_scaling_factor
    assert repr(every) == "Experts(45 rows, 2 each)"


@pytest.mark.parametrize(
    ("asked", "layer", "error", "says"),
    [
        ({}, 7, errors.InvalidRequest, "layer=7; the model has layers 0 to 3"),
        ({}, "one", errors.InvalidRequest, "the model has layers 0 to 3"),
        ({}, 3, errors.InvalidRequest, r"router\[3\] was not captured; captured: router"),
        ({}, 0, errors.InvalidRequest, r"router\[0\] is not in this model, whose layer has no experts"),
        ({"reduce": "mean"}, 1, errors.InvalidRequest, "the handle holds the mean"),
        ({"codec": "full8"}, 1, errors.InvalidRequest, "capture without a codec"),
    ],
)
async def test_what_no_router_chose_by_is_refused(routed, asked, layer, error, says) -> None:
    handle = await some(routed, capture=CaptureSpec(layers=[1, 2], sites="router", **asked))
    with pytest.raises(error, match=says):
        await handle.experts(layer)


async def test_rows_that_are_gone_or_elsewhere_are_refused(routed, tmp_path) -> None:
    handle = await some(routed, capture=CaptureSpec(layers=1, sites="router", tokens="prompt"))
    with pytest.raises(errors.InvalidSelection, match="no row of position 41"):
        await handle.experts(1, tokens=[41])
    loaded = CaptureHandle.load(handle.save(tmp_path / "handle.safetensors"))
    with pytest.raises(errors.InvalidRequest, match="from a file"):
        await loaded.experts(1)
    with pytest.raises(errors.InvalidRequest, match="from a file"):
        blocking.CaptureHandle.load(tmp_path / "handle.safetensors").experts(1)
    handle.release()
    with pytest.raises(errors.CaptureReleased):
        await handle.experts(1)
    _, unfetched = await routed.generate(random_prompt(4, 2), SIX, capture=ROUTER)
    with pytest.raises(errors.CaptureNotFetched):
        await unfetched.experts(1)


async def test_rows_are_asked_for_in_parts(routed, monkeypatch) -> None:
    """A question to the workers has so many bytes at most; what they say is joined in order."""
    handle = await some(routed)
    whole = await handle.experts(1)
    monkeypatch.setattr("steercap.captures.experts._FRAME_BYTES", 7 * 8 * 4)
    parts = await handle.experts(1)
    assert torch.equal(parts.ids, whole.ids)
    assert parts.weights.allclose(whole.weights, atol=1e-6)


@pytest.mark.usefixtures("two_workers")
@pytest.mark.parametrize(
    "layout",
    ["tensor_parallel_size", *(pytest.param(one, marks=pytest.mark.extended) for one in ("pipeline_parallel_size",))],
)
async def test_two_workers_choose_as_one(layout, record_property) -> None:
    """Tensor parallel, each rank has the whole router; pipeline parallel, the stage of the layer answers."""
    path = routed_checkpoint("qwen3_moe")
    async with opened(path, sites=["router"], **TINY_ENGINE, **{layout: 2}) as model:
        assert [point.layer for point in model.points if point.site == "router"] == [0, 2, 3]
        record_property(layout, f"{await experts_agree(model, Reference(path)):.1e}")
