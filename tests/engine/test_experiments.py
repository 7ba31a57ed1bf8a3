"""Sweeps on SmolLM2-135M, float32: controls, perplexity against transformers, what a dose does, going on after a stop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.rows import GREEDY
from support.specs import vector

from steercap import CaptureSpec, Progress
from steercap.errors import InvalidPrompt, InvalidRequest, InvalidVector, PointNotArmed
from steercap.lab.directions import Exchange, extract
from steercap.lab.measures.score import Score
from steercap.lab.measures.texts import Perplexity
from steercap.lab.mechanism.views import heatmap_of
from steercap.lab.personas import shipped_traits
from steercap.lab.studies.sweeps import Answered, Sweep, run_sweep
from steercap.steering import DirectionSet, LayerVectors
from steercap.testing import Reference

LAYER = 12
#: Not the trait's own: neither the direction, nor the layer, nor the doses were chosen with them (scripts/study_dose.py).
QUESTIONS = (
    "My company is merging with another one. What will change?",
    "I am going to learn Spanish this year. Any thoughts?",
    "My son wants to become a musician. What should I think of that?",
    "I planted an apple tree yesterday. What comes next?",
    "Our football team has a new coach. How will the season go?",
    "I am seventy and want to travel alone. What do you say?",
)


class Stopped(Exception):
    """What stops a sweep half-way."""


def asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def some_vectors(*layers: int, width: int = 576) -> LayerVectors:
    """Vectors of noise, long enough to change texts."""
    return LayerVectors({layer: 3 * vector(width, seed=layer) for layer in layers})


def perplexity(reference: Reference, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """That of an answer after a prompt, from transformers' logits."""
    ids = torch.tensor([[*prompt, *answer]])
    with torch.inference_mode():
        logits = reference.model(ids, use_cache=False).logits[0].double()
    chances = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, ids[0, len(prompt) :, None])
    return math.exp(-chances.mean())


def small(**changed: Any) -> Sweep:
    given = {
        "vectors": {"noise": some_vectors(8, LAYER)},
        "layers": [(LAYER,), (8, LAYER)],
        "scales": (1.0,),
        "random": 2,
        "tokens": "all",
        "prompts": ["The capital of France is", asked("Name a colour.")],
        "sampling_params": {"max_tokens": 12, **GREEDY},
    }
    return Sweep(**{**given, **changed})


async def test_a_sweep_has_an_answer_for_every_condition(smol, tmp_path) -> None:
    """Each prompt under each condition, in the order of the sweep; without steering it is what plain generation says."""
    sweep = small()
    results = await run_sweep(smol, sweep, out=tmp_path, measures=["length", "repetition"])
    assert [record.condition for record in results.records] == [one.condition for one in sweep.requests()]
    assert len(results.records) == 2 * (1 + 2 * (1 + 1 + 2))
    clean = [record.text for record in results.records if record.control == "none"]
    plain = await smol.generate(sweep.prompts[0], sweep.sampling_params, steering=None)
    replied = await smol.chat(sweep.prompts[1], sweep.sampling_params, steering=None)
    assert clean == [plain, replied]
    steered = [record.text for record in results.records if record.control == ""]
    assert all(text not in clean for text in steered)
    assert [one.answers for one in results.summary()] == [2] * len(sweep.conditions())
    files = {"sweep.json", "answers", "values", "results.parquet", ".lock"}
    assert {path.name for path in tmp_path.iterdir()} == files


async def test_two_calls_do_not_write_to_one_folder(smol, tmp_path) -> None:
    """They would replace each other's answers; once one has ended, another may."""
    first, second = await asyncio.gather(
        run_sweep(smol, small(), out=tmp_path), run_sweep(smol, small(), out=tmp_path), return_exceptions=True
    )
    assert isinstance(second, InvalidRequest), second
    assert not isinstance(first, BaseException), first
    again = await run_sweep(smol, small(), out=tmp_path)
    assert [record.text for record in again.records] == [record.text for record in first.records]


async def test_a_sweep_that_was_stopped_goes_on(smol, tmp_path) -> None:
    """What was answered is not asked again, and all is as if it had never stopped, sampling included; a further measure
    asks for no answer.
    """
    sweep = small(samples=2, sampling_params={"max_tokens": 12, "temperature": 0.8})
    calls: list[Progress] = []

    def stop(at: Progress) -> None:
        calls.append(at)
        if at.done == 7:
            raise Stopped

    with pytest.raises(Stopped):
        await run_sweep(smol, sweep, out=tmp_path / "stopped", concurrency=3, progress=stop)
    done, total = calls[-1].done, calls[-1].total
    assert 7 <= done <= 9  # others that were under way may have come to their end
    again: list[Progress] = []
    later = await run_sweep(smol, sweep, out=tmp_path / "stopped", progress=again.append)
    assert again == [Progress("answers", at, total) for at in range(done, total + 1)]
    whole = await run_sweep(smol, sweep, out=tmp_path / "whole")
    assert later.records == whole.records
    texts = {(record.prompt_index, record.sample): record.text for record in whole.records if record.control == "none"}
    assert len(set(texts.values())) == len(texts) == 4
    again.clear()
    more = await run_sweep(smol, sweep, out=tmp_path / "stopped", measures=["length"], progress=again.append)
    assert again == [Progress("answers", total, total), *(Progress("length", at, total) for at in (0, total))]
    assert more.values["length"] == [len(record.output_token_ids) for record in more.records]


async def test_perplexity_is_that_of_transformers(smol, smol_reference, tmp_path) -> None:
    """Of clean and of badly steered answers, whatever steering surrounds the call; relative 1e-3: float32 on both sides,
    over some tens of tokens.
    """
    sweep = small(random=0, scales=(3.0,), sampling_params={"max_tokens": 24, **GREEDY})
    results = await run_sweep(smol, sweep, out=tmp_path)
    records = [*results.records, Answered(prompt="", prompt_token_ids=(1, 2), text="", output_token_ids=())]
    async with smol.steered(sweep.spec(sweep.conditions()[1])):
        found = await Perplexity().measure(smol, records)
    for record, value in zip(results.records, found, strict=False):
        expected = perplexity(smol_reference, record.prompt_token_ids, record.output_token_ids)
        assert value == pytest.approx(expected, rel=1e-3)
    assert math.isnan(found[-1])
    assert max(found[:-1]) > 3 * found[0]  # texts of very different perplexity were compared


async def test_an_answer_that_fills_the_context_has_a_perplexity(smol, smol_reference) -> None:
    """vLLM reads no sequence that leaves no room to go on; the last token is left out."""
    ids = tuple(smol.tokenizer.encode("one two three four " * 300))[:1024]
    (value,) = await Perplexity().measure(
        smol, [Answered(prompt="", prompt_token_ids=ids[:1000], text="", output_token_ids=ids[1000:])]
    )
    assert value == pytest.approx(perplexity(smol_reference, ids[:1000], ids[1000:-1]), rel=1e-3)


async def test_a_dose_moves_a_trait_as_no_random_vector_does(smol, tmp_path, record_property) -> None:
    """Down with -2, up with 2, each well outside what random vectors of the same norm do at the same place; and the texts
    stay likely to the model without steering.
    """
    trait, before = shipped_traits()["optimistic"], asked("What do you think?")
    positive, negative = (
        [Exchange(before, text) for text in texts] for texts in (trait.examples.positive, trait.examples.negative)
    )
    directions = await extract(smol, positive, negative, name=trait.name, layers=20, seed=1)
    sweep = Sweep(
        vectors=directions,
        layers=(20,),
        scales=(-2, 2),
        random=5,
        prompts=[asked(question) for question in QUESTIONS],
        sampling_params={"max_tokens": 24, **GREEDY},
    )
    results = await run_sweep(smol, sweep, out=tmp_path, measures=[Score(trait), "perplexity"])
    down, up = results.effects(trait.name)
    record_property("optimistic", f"-2: {down.steered.value:.0f}, 0: {up.plain.value:.0f}, 2: {up.steered.value:.0f}")
    record_property("optimistic, random", f"-2: {sorted(down.random)}, 2: {sorted(up.random)}")
    assert down.steered.value < up.plain.value < up.steered.value
    assert min(down.outside, up.outside) > 0
    assert up.steered.value - down.steered.value > 20
    for one in results.effects("perplexity"):
        assert one.steered.value < 2 * one.plain.value


async def test_what_does_not_fit_the_engine_is_refused_first(smol, tmp_path) -> None:
    """Before any request runs, and before a folder is made."""
    with pytest.raises(InvalidVector, match="width 8"):
        await run_sweep(smol, small(vectors={"noise": some_vectors(8, LAYER, width=8)}), out=tmp_path / "x")
    beyond = small(vectors={"noise": some_vectors(99)}, layers=(99,))
    with pytest.raises(PointNotArmed, match="layer 99"):
        await run_sweep(smol, beyond, out=tmp_path / "x")
    assert not (tmp_path / "x").exists()


async def test_a_request_that_fails_keeps_the_others(smol, tmp_path) -> None:
    """The error is its own, not a group's; what was answered before is there the next time."""
    sweep = small(prompts=["The capital of France is", "word " * 2000], random=0)
    with pytest.raises(InvalidPrompt):
        await run_sweep(smol, sweep, out=tmp_path, concurrency=1)
    assert len(list((tmp_path / "answers").glob("*.parquet"))) == 1


async def test_more_conditions_than_slots_wait_for_each_other(smol, tmp_path) -> None:
    """All are answered, though all requests are under way at once."""
    sweep = small(layers=(LAYER,), prompts=["a b c"], random=300, sampling_params={"max_tokens": 2, **GREEDY})
    assert len(sweep.conditions()) > (await smol.stats()).steering_slots
    results = await run_sweep(smol, sweep, out=tmp_path)
    assert len(results.records) == len(sweep.conditions())
    assert (await smol.stats()).steering_slots_in_use == 0


async def test_a_heat_map_is_the_same_from_rows_and_from_the_workers(smol) -> None:
    """Full rows projected here, and projections that travelled: equal but for float32 sums of 576 products."""
    own = DirectionSet({name: LayerVectors({8: vector(576, seed=at)}) for at, name in enumerate(("one", "two"))})
    params = {"max_tokens": 4, **GREEDY}
    asked_for = [CaptureSpec(layers=8), CaptureSpec(project=own)]
    _, handles = await smol.generate(["Dear Sir,\n"] * 2, params, capture=asked_for, steering=None)
    await smol.fetch_captures_batch(handles)
    rows, projected = (heatmap_of(handle, own, 8, smol.tokenizer) for handle in handles)
    assert rows.tokens[:4] == ("Dear", " Sir", ",", "\n")
    assert rows.names == ("one", "two")
    np.testing.assert_allclose(projected.values, rows.values, rtol=1e-4, atol=1e-3 * np.abs(rows.values).max())
    assert "Dear" in rows._repr_html_()
