"""What rows say next, by the model's own end, against transformers and vLLM's log probabilities."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.rows import GREEDY, inputs_of, random_prompt

from steercap import Add, CaptureHandle, CaptureSpec, Point, errors
from steercap.captures import TunedLens
from steercap.captures.lens import point_of

ASKED = {"max_tokens": 5, "logprobs": 8, "prompt_logprobs": 3, **GREEDY}
BOTH = CaptureSpec(sites=["resid_pre", "resid_post"])


def logits_of(reference, rows: torch.Tensor) -> torch.Tensor:
    """transformers' own final norm and unembedding."""
    with torch.inference_mode():
        found: torch.Tensor = reference.model.lm_head(reference.model.model.norm(rows))
    return found


async def test_the_last_row_says_what_vllm_says(tiny) -> None:
    """Of generated tokens and of those of the prompt."""
    output = await tiny.run(random_prompt(30, 1), ASKED, capture=BOTH)
    async with output.handle as handle:
        found = await handle.lens(tokens=["last_prompt", "generated"], top=8)
        assert found.positions.tolist() == [29, 30, 31, 32, 33]
        for row, said in enumerate(output.output.outputs[0].logprobs):
            ours = dict(zip(found.token_ids[row].tolist(), found.log_probs[row].tolist(), strict=True))
            assert ours.keys() == said.keys()
            assert max(abs(ours[token] - said[token].logprob) for token in said) < 1e-4
        for position, said in enumerate(output.output.prompt_logprobs[1:]):
            one = await handle.lens(tokens=[position], ids=list(said), top=0)
            known = torch.tensor([entry.logprob for entry in said.values()])
            assert (one.chosen[0] - known).abs().max() < 1e-4


@pytest.mark.parametrize("before", [False, True])
async def test_without_a_layer_it_is_what_vllm_says_or_refused(tiny, before) -> None:
    """Rows from before their edits are not what the model predicted from."""
    vector = 3 * torch.randn(tiny.hidden_size, generator=torch.Generator().manual_seed(2))
    capture, steering = CaptureSpec(layers=3, before_edits=before), Add(vector, layer=3)
    output = await tiny.run(random_prompt(9, 6), ASKED, steering=steering, capture=capture)
    async with output.handle as handle:
        if before:
            with pytest.raises(errors.InvalidRequest, match=r"resid_post\[3\] are from before their edits"):
                await handle.lens()
            assert len(await handle.lens(3)) == len(handle.positions)
            return
        found = await handle.lens(tokens=["last_prompt"], top=8)
        said = output.output.outputs[0].logprobs[0]
        ours = dict(zip(found.token_ids[0].tolist(), found.log_probs[0].tolist(), strict=True))
        assert max(abs(ours[token] - said[token].logprob) for token in said) < 1e-4


async def test_any_row_says_what_transformers_makes_of_it(tiny, tiny_reference) -> None:
    _, handle = await tiny.generate(random_prompt(70, 2), ASKED, capture=BOTH)
    async with handle:
        states = tiny_reference.rows(inputs_of(handle), handle.points)
        for layer, site in ((0, "resid_pre"), (1, "resid_post"), (3, None)):
            found = await handle.lens(layer, site=site, full=True, top=4, ids=[5, 7])
            known = logits_of(tiny_reference, states[layer, site or "resid_post"])
            assert found.logits.shape == known.shape
            assert (found.logits - known).abs().max() < 1e-4
            likely = known.log_softmax(-1)
            assert (found.log_probs - likely.gather(1, found.token_ids)).abs().max() < 1e-4
            assert (found.log_probs - likely.topk(4).values).abs().max() < 1e-4
            assert (found.chosen - likely[:, [5, 7]]).abs().max() < 1e-4
        loose = await tiny.unembed(handle.captures[3, "resid_post"], full=True)
        assert torch.equal(loose.logits, (await handle.lens(full=True)).logits)


async def test_a_tuned_lens_comes_before_the_norm(tiny, tiny_reference) -> None:
    width = tiny.hidden_size
    drawn = torch.Generator().manual_seed(1)
    weights = {
        layer: (torch.randn(width, width, generator=drawn) / 20, torch.randn(width, generator=drawn))
        for layer in range(4)
    }
    tuned = TunedLens(weights, model="someone/tiny-llama", width=width)
    _, handle = await tiny.generate(random_prompt(9, 3), ASKED, capture=BOTH)
    async with handle:
        rows = tiny_reference.rows(inputs_of(handle), handle.points)[1, "resid_post"]
        with pytest.warns(UserWarning, match="translator= says that it was made for model 'someone/tiny-llama'"):
            await handle.lens(1, translator=tuned)
        here = replace(tuned, model=f"someone/{Path(handle.model).name}")
        found = await handle.lens(1, translator=here, full=True)
        weight, bias = weights[2]
        assert (found.logits - logits_of(tiny_reference, rows + rows @ weight.T + bias)).abs().max() < 1e-4


async def test_a_tuned_lens_is_of_a_model_with_as_many_layers(tiny) -> None:
    """Its last translator is followed by rows as they are, which no row within another model is."""
    width = tiny.hidden_size
    short = TunedLens(
        {layer: (torch.zeros(width, width), torch.zeros(width)) for layer in range(2)}, model="", width=width
    )
    _, handle = await tiny.generate(random_prompt(9, 3), ASKED, capture=BOTH)
    async with handle:
        with pytest.raises(errors.InvalidRequest, match="of a model of 2 layers, and this model has 4"):
            await handle.lens(1, translator=short)


def test_what_the_model_has_one_of_is_found_without_its_layer() -> None:
    """As captures find it, whichever layer is named."""
    captured = [Point(0, "embed"), Point(3, "final_norm"), Point(2, "resid_post")]
    for layer in (None, 0, 2, -1):
        assert point_of(captured, 4, layer, "embed") == Point(0, "embed")
        assert point_of(captured, 4, layer, "final_norm") == Point(3, "final_norm")


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"layer": 99}, errors.InvalidRequest, "layer=99; the model has layers 0 to 3"),
        ({"layer": 1, "site": "resid_mid"}, errors.InvalidRequest, r"resid_mid\[1\] was not captured"),
        ({"site": "z"}, errors.InvalidRequest, "rows of the stream are at embed"),
        ({"site": "final_norm"}, errors.InvalidRequest, r"final_norm\[3\] was not captured"),
        ({"top": -1}, errors.InvalidRequest, "top=-1"),
        ({"ids": [10**9]}, errors.InvalidRequest, "ids=.*; give a list of token ids"),
        ({"full": True, "max_bytes": 100}, errors.InvalidRequest, "more than max_bytes=100"),
        ({"full": True, "max_bytes": "much"}, errors.InvalidRequest, "max_bytes='much'"),
        ({"full": "yes"}, errors.InvalidRequest, "full='yes'; give True or False"),
        ({"site": "embed"}, errors.InvalidRequest, r"embed\[0\] was not captured"),
        ({"tokens": [400]}, errors.SteercapError, "400|no row"),
    ],
)
async def test_what_no_lens_can_show_is_refused(tiny, asked, error, says) -> None:
    _, handle = await tiny.generate(random_prompt(4, 4), ASKED, capture=BOTH)
    async with handle:
        with pytest.raises(error, match=says):
            await handle.lens(**asked)


async def test_rows_that_are_gone_or_from_a_file_have_no_lens(tiny, tmp_path) -> None:
    _, handle = await tiny.generate(random_prompt(4, 5), ASKED, capture=BOTH)
    with pytest.raises(errors.CaptureNotFetched):
        await handle.lens()
    async with handle:
        saved = handle.save(tmp_path / "handle.safetensors")
        _, mean = await tiny.generate(random_prompt(4, 5), ASKED, capture=CaptureSpec(reduce="mean"))
        async with mean:
            with pytest.raises(errors.InvalidRequest, match="the handle holds the mean"):
                await mean.lens()
    with pytest.raises(errors.CaptureReleased):
        await handle.lens()
    loaded = CaptureHandle.load(saved)
    with pytest.raises(errors.InvalidRequest, match="from a file"):
        await loaded.lens()
    with pytest.raises(errors.InvalidRequest, match=r"rows=\(3, 5\) of torch.float32; give a floating-point tensor"):
        await tiny.unembed(torch.ones(3, 5))
    assert len(await tiny.unembed(torch.ones(0, tiny.hidden_size))) == 0


async def test_normed_rows_are_refused_where_the_head_norms_them_again(tiny, monkeypatch) -> None:
    """Of MiMo's rows behind the norm, its head would make logits of rows normed twice."""
    rows = torch.ones(2, tiny.hidden_size)
    assert len(await tiny.unembed(rows, normed=True)) == 2
    monkeypatch.setitem(tiny.serving.opened().refused, "final_norm", "the model norms rows as it makes logits of them")
    with pytest.raises(errors.InvalidRequest, match="which this model has none of: the model norms rows"):
        await tiny.unembed(rows, normed=True)
    assert len(await tiny.unembed(rows)) == 2


@pytest.mark.parametrize("rows", [float("nan"), float("inf"), 1e300])
async def test_rows_that_are_no_numbers_say_nothing(tiny, rows) -> None:
    """Some token would be the likeliest of them."""
    given = torch.zeros(3, tiny.hidden_size, dtype=torch.float64)
    given[1, 7] = rows
    with pytest.raises(errors.InvalidRequest, match="row 1 holds NaN or infinity"):
        await tiny.unembed(given)


async def test_what_is_no_tensor_of_rows_is_refused_before_the_workers_see_it(tiny) -> None:
    rows = torch.zeros(2, tiny.hidden_size)
    for given in (rows.to_sparse(), rows.to("meta"), rows.int(), rows[0], rows[:, 1:], rows.tolist()):
        with pytest.raises(errors.InvalidRequest, match="give a floating-point tensor"):
            await tiny.unembed(given)
    with pytest.raises(errors.InvalidRequest, match="normed='no'; give True or False"):
        await tiny.unembed(rows, normed="no")
