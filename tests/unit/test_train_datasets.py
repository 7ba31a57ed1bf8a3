"""Training as people train: epochs, budgets of tokens, learning rates, schedules; beside plain loops of PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from steercap.errors import InvalidSetting
from steercap.lab.training import Example, HookedModel, TrainableAdd, train, train_many
from steercap.lab.training.batches import Steps
from steercap.testing import tiny_checkpoint

LAYER = 1


@pytest.fixture(scope="module")
def model() -> HookedModel:
    """A tiny model, in float32."""
    return HookedModel(tiny_checkpoint("qwen3"))


def examples(count: int = 12, seed: int = 0) -> list[Example]:
    words = ["wind", "moon", "sea", "light", "stone", "bird"]
    return [
        Example(f"Say {place}. ", " ".join(words[(place + at + seed) % 6] for at in range(2 + place % 3)))
        for place in range(count)
    ]


class Plain:
    """A loop in PyTorch and transformers alone: one example in a pass, a hook that adds the vector."""

    def __init__(self) -> None:
        path = tiny_checkpoint("qwen3")
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.vector = torch.zeros(self.model.config.hidden_size, requires_grad=True)
        self.model.model.layers[LAYER].register_forward_hook(lambda _module, _args, rows: rows + self.vector)

    def loss(self, prompt: str, response: str) -> tuple[torch.Tensor, int]:
        """Mean loss of the response's tokens, and their number."""
        before, after = self.tokenizer.encode(prompt), self.tokenizer.encode(response, add_special_tokens=False)
        logits = self.model(input_ids=torch.tensor([before + after])).logits[0]
        start = max(len(before), 1)
        targets = torch.tensor(before + after)[start:]
        return functional.cross_entropy(logits[start - 1 : -1], targets), len(targets)

    def mean(self, texts) -> torch.Tensor:
        return torch.stack([self.loss(one.prompt, one.response)[0] for one in texts]).mean()


#: Each schedule's share of the learning rate at a step, from 0.
FACTORS = {
    "cosine": lambda step, steps: 0.5 * (1 + math.cos(math.pi * step / steps)),
    "linear": lambda step, steps: 1 - step / steps,
    "constant": lambda *_: 1.0,
}


def order_of(name: str, count: int, size: int, steps: int) -> list[list[int]]:
    """The examples of each pass, whose order `test_training.py` tests."""
    found = Steps({name: count}, size, 0, start=0, stop=steps, live=lambda: [0])
    return [[one.place for one in batch] for batch in found]


@pytest.mark.parametrize(("accumulation", "size"), [(1, 4), (3, 2)])
@pytest.mark.parametrize("schedule", FACTORS)
def test_epochs_schedules_and_accumulation_are_those_of_a_plain_loop(
    model, tmp_path, schedule, accumulation, size
) -> None:
    """Losses after each epoch, steps, rates and the best vector; accumulated passes are one large step."""
    texts, held, factor = examples(14), examples(5, seed=2), FACTORS[schedule]
    trained = train(
        model,
        texts,
        edit=TrainableAdd(layers=[LAYER]),
        out=tmp_path / "it",
        validation=held,
        epochs=2.5,
        batch_size=size,
        accumulation=accumulation,
        scheduler=schedule,
        optimizer="adam",
        lr=0.3,
    )
    plain, steps, epoch = Plain(), math.ceil(2.5 * 14 / (size * accumulation)), math.ceil(14 / (size * accumulation))
    optimizer = torch.optim.Adam([plain.vector], lr=0.3)
    order = order_of("it", 14, size, steps * accumulation)
    losses = {0: float(plain.mean(held).detach())}
    vectors = {0: plain.vector.detach().clone()}
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.3 * factor(step, steps)
        optimizer.zero_grad()
        places = [one for batch in order[step * accumulation : (step + 1) * accumulation] for one in batch]
        assert len(places) == size * accumulation
        plain.mean([texts[place] for place in places]).backward()
        optimizer.step()
        if (step + 1) % epoch == 0 or step + 1 == steps:
            losses[step + 1], vectors[step + 1] = float(plain.mean(held).detach()), plain.vector.detach().clone()
    assert [one.step for one in trained.history] == list(losses)
    assert [one.validation_loss for one in trained.history] == pytest.approx(list(losses.values()), rel=1e-4)
    assert trained.history[1].lr == pytest.approx(0.3 * factor(trained.history[1].step, steps), abs=1e-9)
    best = min(losses, key=losses.get)
    assert best == trained.best_step
    assert torch.allclose(trained.spec.of_rows()[0].vector, vectors[best], atol=2e-3)


def test_traits_whose_epochs_end_at_different_steps_are_refused(model, tmp_path) -> None:
    """Steps are common to the traits of a call; equal ones train together."""
    how = {"edit": TrainableAdd(layers=[LAYER]), "epochs": 1, "batch_size": 4, "validation": 0.34}
    with pytest.raises(InvalidSetting, match="end their epochs at different steps"):
        train_many(model, {"a": examples(16), "b": examples(40)}, out=tmp_path / "ab", **how)
    both = train_many(model, {"a": examples(16), "b": examples(16, seed=1)}, out=tmp_path / "ab", **how)
    assert {trait.history[-1].step for trait in both.values()} == {3}


@pytest.mark.parametrize("site", ["resid_post", "mlp_out"])
def test_checkpointing_gives_the_same_vector_with_less_kept(model, tmp_path, site) -> None:
    """Bit for bit, at any site; the layers' own forward is back afterwards, and fewer numbers wait for the backward pass."""
    how = {"edit": TrainableAdd(layers=[0], site=site), "name": "it", "steps": 3, "evaluate_every": 3, "batch_size": 2}
    kept, specs = [], []
    for checkpointing in (False, True):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one, to=sizes: to.append(one.numel()) or one, lambda x: x):
            trained = train(model, examples(), out=tmp_path / f"{checkpointing}", checkpointing=checkpointing, **how)
        kept.append(sum(sizes))
        specs.append(trained.spec.of_rows()[0].vector)
    assert torch.equal(*specs)
    assert specs[0].any()
    assert kept[1] < kept[0]
    assert not any("forward" in vars(layer) for layer in model.layers.values())


def test_a_model_placed_by_accelerate_trains_the_same_vector(model, tmp_path) -> None:
    """Layers that accelerate fetches for their turn: its own forward is kept under checkpointing, too."""
    placed = HookedModel(
        tiny_checkpoint("qwen3"),
        device_map={"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
        | {f"model.layers.{layer}": "disk" if layer == 2 else "cpu" for layer in model.layers},
        offload_folder=str(tmp_path / "offloaded"),
    )
    mine = {layer: vars(one).get("forward") for layer, one in placed.layers.items()}
    assert any(mine.values())
    how = {"edit": TrainableAdd(layers=[LAYER]), "name": "it", "steps": 3, "evaluate_every": 3, "batch_size": 2}
    found = train(placed, examples(), out=tmp_path / "placed", checkpointing=True, **how)
    alone = train(model, examples(), out=tmp_path / "alone", **how)
    assert [one.validation_loss for one in found.history] == pytest.approx(
        [one.validation_loss for one in alone.history], rel=1e-5
    )
    assert {layer: vars(one).get("forward") for layer, one in placed.layers.items()} == mine
