"""A trained edit in transformers, and the same file in an engine."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from conftest import opened
from support.rows import ALL_SITES, GREEDY, TINY_ENGINE, random_prompt

from steercap import AddIf, CaptureSpec, SteeringSpec
from steercap.core.spec import Point
from steercap.lab.training import (
    OBJECTIVES,
    Example,
    HookedModel,
    Preference,
    Prompted,
    TrainableAdd,
    TrainableLowRank,
    train,
)
from steercap.lab.training.batches import padded
from steercap.lab.training.examples import ExampleTokens
from steercap.lab.training.settings import Penalties
from steercap.lab.training.steered import SteeredTraits
from steercap.lab.training.trainable import TrainableSpec
from steercap.testing import tiny_checkpoint
from steercap.testing.reference import compare_rows

WIDTH = 128
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
TEXTS = [("Say wind. ", "wind moon sea"), ("Say moon. ", "moon sea light"), ("Say sea. ", "sea light stone")]
PAIRS = [Preference(prompt, response, "no no", prompt) for prompt, response in TEXTS]
PROBE = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))
GATED = AddIf(torch.zeros(WIDTH), PROBE, threshold=0.1, layer=1, tokens=["last_prompt", "generated"])
#: Of each objective a kind of edit, and what else there is to train.
RUNS = {
    "likelihood": (TrainableAdd(layers=[1, 2]), [Example(*text, source=text[0]) for text in TEXTS], {}),
    "bipo": (
        TrainableAdd(layers=[1], norm=1.0, relative=True, tokens="generated"),
        PAIRS,
        {"fields": ["vector", "scale"]},
    ),
    "reps": (TrainableLowRank(layers=[0, 2], rank=3, site="mlp_out"), PAIRS, {}),
    "distillation": (
        GATED,
        [Prompted("Rhyme.", *text, source=text[0]) for text in TEXTS],
        {"fields": ["vector", "probe"]},
    ),
}


@pytest.fixture(scope="module")
def trained_in(tmp_path_factory) -> HookedModel:
    """The model of the engine, with a chat template."""
    from transformers import AutoTokenizer

    known = tiny_checkpoint("qwen3")
    folder = tmp_path_factory.mktemp("model") / known.name
    shutil.copytree(known, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return HookedModel(folder)


@pytest.mark.slow
@pytest.mark.parametrize("objective", RUNS)
async def test_a_trained_edit_does_in_an_engine_what_it_did_in_training(tiny, trained_in, objective, tmp_path) -> None:
    """Every row at every site, of prompt and answer, under the file that training wrote: cosine > 0.99999, error < 1e-4."""
    edit, examples, more = RUNS[objective]
    optimizer = partial(torch.optim.Adam, lr=0.05)
    how = {"steps": 4, "evaluate_every": 2, "batch_size": 2, "held_out": 0.34, "optimizer": optimizer, **more}
    trained = train(trained_in, examples, edit=edit, objective=objective, out=tmp_path / "run", **how)
    assert trained.best_step > 0, trained.history
    steering = SteeringSpec.load(trained.file)
    params = {"max_tokens": 10, **GREEDY}
    capture = CaptureSpec(sites=ALL_SITES)
    for prompt in (random_prompt(24, 1), random_prompt(3, 2)):
        _, handle = await tiny.generate(prompt, params, capture=capture, steering=steering)
        _, plain = await tiny.generate(prompt, params, capture=capture)
        await tiny.fetch_captures_batch([handle, plain])
        ids = [*handle.prompt_token_ids, *handle.output_token_ids]
        wanted = rows_in_training(
            trained_in, trained.spec, ExampleTokens(tuple(ids), len(handle.prompt_token_ids)), handle.points
        )
        for point in handle.points:
            found = compare_rows(handle.captures[point], wanted[point][handle.positions])
            assert found.cosine > 0.99999, point
            assert found.error < 1e-4, point
        last = Point(3, "resid_post")
        assert not torch.equal(handle.captures[last][-1], plain.captures[last][-1])


def rows_in_training(
    model: HookedModel, spec: SteeringSpec, tokens: ExampleTokens, points: list[Point]
) -> dict[Point, torch.Tensor]:
    """Rows of every point, [tokens, width], in a pass as objectives make it, another and longer text beside it."""
    module = SteeredTraits(model, [TrainableSpec(spec)], OBJECTIVES["likelihood"], Penalties(), 1.0)
    beside = ExampleTokens(tuple(range(60)), 20)
    batch = padded([tokens, beside], module.selections, torch.zeros(2, dtype=torch.int64), torch.device("cpu"))
    found: dict[Point, torch.Tensor] = {}

    def keep(point: Point, hidden: torch.Tensor) -> None:
        found[point] = hidden.reshape(2, batch.ids.shape[1], -1)[0, : tokens.inputs].clone()

    with ExitStack() as hooks, torch.no_grad():
        hooks.enter_context(module.hooked())
        model.visit(hooks, [(point, partial(keep, point)) for point in points])
        module.logits(batch)
    return found


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}),
        ("gemma2", {}),
        ("gemma3", {}),
        ("vaultgemma", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}),
    ],
)
async def test_losses_are_those_of_the_engine(family, changes) -> None:
    """What is trained on is what vLLM runs: each token's loss is its log probability there, whatever caps attention."""
    path, ids = tiny_checkpoint(family, **changes), random_prompt(150, 3)
    async with opened(path, **TINY_ENGINE) as model:
        raw = await model.run(ids, {"max_tokens": 1, "prompt_logprobs": 0})
    known = [-step[token].logprob for token, step in zip(ids[1:], raw.output.prompt_logprobs[1:], strict=True)]
    with torch.no_grad():
        scores = HookedModel(path).model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    losses = torch.nn.functional.cross_entropy(scores, torch.tensor(ids[1:]), reduction="none")
    torch.testing.assert_close(losses, torch.tensor(known), rtol=0, atol=1e-4)
