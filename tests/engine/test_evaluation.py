"""Evaluation on SmolLM2-135M, float32: fixed texts under steering, conversations, going on after a stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.rows import GREEDY
from support.specs import vector

from steercap import Add, LowRank, Progress, SteeringSpec
from steercap.errors import InvalidFile, PointNotArmed
from steercap.lab.directions import Exchange, extract
from steercap.lab.studies.evaluation import Choices, Evaluation, Method, Passages, evaluate, read_results, shuffled
from steercap.lab.studies.evaluation.tasks import PromptAndText, logprobs_of, tokenized
from steercap.lab.studies.rollouts import RolloutSet, rollout_methods, run_rollouts
from steercap.steering import LayerVectors
from steercap.testing import Reference

LAYER = 12
TASKS = [Passages(first=2), Choices(first=2)]


class Stopped(Exception):
    """What stops an evaluation half-way."""


def some_vectors(*layers: int, width: int = 576) -> LayerVectors:
    """Vectors of noise, long enough to change texts."""
    return LayerVectors({layer: 40 * vector(width, seed=layer) for layer in layers})


def logprobs(reference: Reference, parts: PromptAndText) -> np.ndarray:
    """Those of the text's tokens, by transformers: float64 [tokens]."""
    ids = torch.tensor([parts.ids])
    with torch.inference_mode():
        logits = reference.model(ids, use_cache=False).logits[0].double()
    first = len(parts.ids) - len(parts.text)
    return logits[first - 1 : -1].log_softmax(-1).gather(1, ids[0, first:, None])[:, 0].numpy()


async def test_log_probabilities_of_texts_are_those_of_transformers(smol, smol_reference) -> None:
    """Of every text of both tasks, within 1e-3 nats a token: float32 on both sides. And so is what the task makes of them."""
    for task in TASKS:
        for place, item in enumerate(task.items):
            parts = tokenized(smol.tokenizer, [{"role": "user", "content": item.prompt}], item)
            assert [smol.tokenizer.decode(one.lead + one.text) for one in parts] == [
                item.lead + text for text in item.texts
            ]
            found = await logprobs_of(smol, parts, None)
            expected = [logprobs(smol_reference, one) for one in parts]
            for ours, theirs in zip(found, expected, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-3)
            assert task.value(place, found) == pytest.approx(task.value(place, expected), rel=1e-2)


STEERED = {
    "generated": SteeringSpec([Add(3 * vector(576, seed=1), layer=LAYER, tokens="generated")]),
    "all": SteeringSpec([Add(3 * vector(576, seed=1), layer=LAYER, tokens="all")]),
    "union": SteeringSpec([Add(2 * vector(576, seed=1), layers=[8, LAYER], tokens=["last_prompt", "generated"])]),
    "low rank": SteeringSpec(
        [
            LowRank(
                torch.stack([vector(576, seed=2), vector(576, seed=3)]) / 50,
                torch.stack([vector(576, seed=4), vector(576, seed=5)]),
                bias=torch.tensor([2.0, 2.0]),
                layer=LAYER,
                tokens="generated",
            )
        ],
        preserve_norm=True,
    ),
}


@pytest.mark.parametrize("name", list(STEERED))
async def test_a_text_that_is_read_has_the_log_probabilities_with_which_it_was_written(name, smol) -> None:
    """The edits of a generation, put on its own text when that is read: the same, token by token, within 1e-3 nats, and
    not those of the model without steering.
    """
    spec, prompt = STEERED[name], smol.tokenizer.encode("The weather in the north is")
    raw = await smol.run({"prompt_token_ids": prompt}, {"max_tokens": 16, "logprobs": 0, **GREEDY}, steering=spec)
    (sample,) = raw.output.outputs
    ids = list(sample.token_ids)
    written = [entry[token].logprob for entry, token in zip(sample.logprobs, ids, strict=True)]
    parts = [PromptAndText(prompt, [], ids), PromptAndText(prompt, ids[:5], ids[5:])]
    whole, rest = await logprobs_of(smol, parts, spec)
    np.testing.assert_allclose(whole, written, atol=1e-3)
    np.testing.assert_allclose(rest, written[5:], atol=1e-3)
    (clean,) = await logprobs_of(smol, parts[:1], None)
    assert np.abs(clean - whole).max() > 0.1


def small(*further: Method) -> Evaluation:
    steer = Method(name="noise", steering=some_vectors(LAYER), doses=[0.5, 1])
    return Evaluation(
        methods=[steer, Method(name="prompt", system="You are a pirate who hates the sea."), *further],
        questions=["Name a colour.", ["What is a river?", "And a lake?"]],
        sampling_params={"max_tokens": 8, "temperature": 0.8},
    )


def texts(results) -> dict[tuple[str, float, int, int], str]:
    return {(one.method, one.dose, one.question, one.turn): one.text for one in results.answers}


def nearly(one: Any, other: Any) -> bool:
    """Whether readings are the same but for last bits, which depend on what ran beside them."""
    return one.keys() == other.keys() and all(
        one[task].keys() == other[task].keys()
        and all(found == pytest.approx(other[task][condition], rel=1e-4) for condition, found in one[task].items())
        for task in one
    )


async def test_an_evaluation_that_was_stopped_goes_on_and_takes_further_methods(smol, tmp_path) -> None:
    """What was done is done no more, in the middle of a conversation too, and all is as if it had never stopped; a method
    that comes later is asked alone.
    """

    def stop(at: Progress) -> None:
        if (at.stage, at.done) == ("answers", 5):
            raise Stopped

    with pytest.raises(Stopped):
        await evaluate(smol, small(), out=tmp_path / "stopped", tasks=TASKS, concurrency=2, progress=stop)
    again: list[Progress] = []
    measures = ["length", "repetition"]
    later = await evaluate(
        smol,
        small(),
        out=tmp_path / "stopped",
        tasks=TASKS,
        measures=measures,
        progress=again.append,
    )
    assert {at.stage for at in again if at.done < at.total} == {"answers", *measures}
    assert next(at.done for at in again if at.stage == "answers") >= 5
    whole = await evaluate(smol, small(), out=tmp_path / "whole", tasks=TASKS, measures=measures)
    assert (texts(later), later.values) == (texts(whole), whole.values)
    assert nearly(later.readings, whole.readings)
    again.clear()
    more = await evaluate(
        smol,
        small(*small().method("noise").random(1)),
        out=tmp_path / "stopped",
        tasks=TASKS,
        progress=again.append,
    )
    assert [at.stage for at in again].count("answers") == 1 + 2 * 3
    assert texts(later).items() <= texts(more).items()
    assert (tmp_path / "stopped" / "results.parquet").exists()
    read = read_results(small(), out=tmp_path / "stopped", tasks=TASKS, measures=measures)
    assert (texts(read), read.values, read.readings) == (texts(later), later.values, later.readings)
    assert read.markdown() == later.markdown()
    with pytest.raises(InvalidFile, match="call `evaluate` again to compute it"):
        read_results(small(), out=tmp_path / "stopped", tasks=TASKS, measures=["refusal"])


async def test_a_conversation_goes_on_from_the_models_own_answers(smol, tmp_path) -> None:
    """The second turn is what plain chat says after the first answer, steered by the method, with its system prompt."""
    results = await evaluate(smol, small(), out=tmp_path, tasks=[])
    said, one = texts(results), small()
    for condition in one.conditions():
        at = (condition.method, condition.dose, 1)
        talk = ["What is a river?", said[*at, 0], "And a lake?"]
        params = one.sampling_of(1, 0, 1)
        expected = await smol.chat(one.prompt(condition, talk), params, steering=one.spec(condition))
        assert said[*at, 1] == expected
    plain = [said["none", 1.0, question, 0] for question in (0, 1)]
    for method in ("noise", "prompt"):
        assert [said[method, 1.0, question, 0] for question in (0, 1)] != plain


async def test_an_edit_that_does_not_fit_is_refused_before_anything_is_answered(smol, tmp_path) -> None:
    """A site that is not armed."""
    edit = Add(vector(576, seed=0), layer=3, site="mlp_out")
    one = Evaluation(methods=[Method(name="mlp", steering=edit)], questions=["Name a colour."])
    with pytest.raises(PointNotArmed):
        await evaluate(smol, one, out=tmp_path, tasks=[Passages(first=1)])
    assert not list((tmp_path / "answers").glob("*.parquet"))


def exchanges(texts: Sequence[str]) -> list[Exchange]:
    return [Exchange([{"role": "user", "content": "How was it?"}], text) for text in texts]


async def test_a_direction_of_shuffled_labels_has_little_of_the_real_one(smol) -> None:
    """At its length, and of the same texts: |cosine| below half, where the direction of one half of them with the other's is
    above it.
    """
    things = ["film", "food", "song", "town", "day", "room", "idea", "trip", "book", "game", "walk", "coat"]
    positive = exchanges([f"The {thing} was wonderful and lovely." for thing in things])
    negative = exchanges([f"The {thing} was terrible and ugly." for thing in things])
    options = {"layers": [LAYER], "held_out": 0, "name": "praise"}
    real = (await extract(smol, positive, negative, **options))["praise"]
    half = (await extract(smol, positive[:6], negative[:6], **options))["praise"]
    other = (await extract(smol, positive[6:], negative[6:], **options))["praise"]
    drawn = await shuffled(smol, positive, negative, like=real)
    assert drawn.norms()[LAYER] == pytest.approx(real.norms()[LAYER], rel=1e-5)
    assert abs(drawn.cosine(real)[LAYER]) < 0.5 < half.cosine(other)[LAYER]
    for groups in (["one"] * 12, ["a"] * 5 + ["b"] * 3 + ["c"] * 4):
        drawn = await shuffled(smol, positive, negative, like=real, groups=groups)
        assert abs(drawn.cosine(real)[LAYER]) < 0.5, groups


def written(reference: Reference, ids: Sequence[int], added: np.ndarray | None, tokens: Sequence[int]) -> list[float]:
    """By how much a greedy choice of transformers beats each token, 0 where it is that token, in logits.

    What is added is added to the output of the layer at generated tokens, by a hook written here.
    """

    def steer(_module: Any, _given: Any, output: Any) -> Any:
        rows = output[0] if isinstance(output, tuple) else output
        rows[:, len(ids) :] += torch.from_numpy(added)
        return output

    hook = None if added is None else reference.model.model.layers[LAYER].register_forward_hook(steer)
    try:
        with torch.inference_mode():
            logits = reference.model(torch.tensor([[*ids, *tokens]]), use_cache=False).logits[0, len(ids) - 1 : -1]
    finally:
        if hook is not None:
            hook.remove()
    return (logits.max(-1).values - logits[range(len(tokens)), list(tokens)]).tolist()


async def test_rollouts_write_what_transformers_writes_with_these_vectors(smol, smol_reference, tmp_path) -> None:
    """Two data sets under way at once: every answer is the greedy one under a unit vector times its scale, in NumPy."""
    sets, rows = [], {}
    for at, name in enumerate(("one", "two")):
        trained, averaged = (LayerVectors({LAYER: 47.4758 * vector(576, seed=at + more)}) for more in (10, 20))
        rows[name] = {"trained": trained[LAYER].numpy(), "activation": averaged[LAYER].numpy() / 3}
        methods = rollout_methods(trained, LayerVectors({LAYER: averaged[LAYER] / 3}), scales=[100, -100])
        sampling = {"max_tokens": 8, **GREEDY}
        evaluation = Evaluation(
            methods=methods, questions=["Name a colour.", f"What is {name}?"], sampling_params=sampling
        )
        sets.append(RolloutSet(name=name, evaluation=evaluation, positive=["A b.", "C d."], negative=["E f.", "G h."]))
    found = await run_rollouts(smol, sets, out=tmp_path)
    assert list(found[0].minilm) == ["none", *(method.name for method in sets[0].evaluation.methods[1:])]
    for one in sets:
        learned = np.linalg.norm(rows[one.name]["trained"])
        answers = read_results(one.evaluation, out=tmp_path / one.name, tasks=[]).answers
        texts = {method: [answer.text for answer in answers if answer.method == method] for method in found[0].minilm}
        assert len(set(map(tuple, texts.values()))) > 3  # steering shows
        assert len(answers) == 7 * 2
        for answer in answers:
            name, _, scale = answer.method.partition("_scale_")
            row, added = rows[one.name].get(name), None
            if row is not None:
                added = (learned if scale == "learned" else float(scale)) * row / np.linalg.norm(row)
            behind = written(smol_reference, answer.prompt_token_ids, added, answer.output_token_ids)
            assert max(behind) < 1e-2, (one.name, answer.method)
