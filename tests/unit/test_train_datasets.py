"""Training as people train: epochs, budgets of tokens, learning rates, schedules; beside plain loops of PyTorch."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from random import Random

import pytest
import torch
from cli_calls import call
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from steercap import Add, Progress, SteeringSpec
from steercap.errors import (
    InvalidFile,
    InvalidPrompt,
    InvalidRequest,
    InvalidSetting,
    RunDiffers,
    TrainingDiverged,
    UnknownName,
)
from steercap.files.folder import locked
from steercap.lab.training import (
    Example,
    ExampleFolder,
    HookedModel,
    Preference,
    Prompted,
    TokenBudget,
    TrainableAdd,
    perplexity_of,
    train,
    train_datasets,
    train_many,
)
from steercap.lab.training.batches import Steps
from steercap.lab.training.objectives import Likelihood
from steercap.steering.formats import load_steering_vector
from steercap.testing import tiny_checkpoint

LAYER = 1


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with a chat template."""
    folder = tmp_path_factory.mktemp("chatty")
    shutil.copytree(tiny_checkpoint("qwen3"), folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(
        "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{% endfor %}<answer>"
    )
    return folder


@pytest.fixture(scope="module")
def model(path) -> HookedModel:
    """A tiny model, in float32."""
    return HookedModel(path)


def examples(count: int = 12, seed: int = 0) -> list[Example]:
    words = ["wind", "moon", "sea", "light", "stone", "bird"]
    return [
        Example(f"Say {place}. ", " ".join(words[(place + at + seed) % 6] for at in range(2 + place % 3)))
        for place in range(count)
    ]


class Plain:
    """A loop in PyTorch and transformers alone: one example in a pass, a hook that adds the vector."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.vector = torch.zeros(self.model.config.hidden_size, requires_grad=True)
        self.model.model.layers[LAYER].register_forward_hook(lambda _module, _args, rows: rows + self.vector)

    def loss(self, prompt: str | list[int], response: str) -> tuple[torch.Tensor, int]:
        """Mean loss of the response's tokens, and their number."""
        before = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        after = self.tokenizer.encode(response, add_special_tokens=False)
        logits = self.model(input_ids=torch.tensor([before + after])).logits[0]
        start = max(len(before), 1)
        targets = torch.tensor(before + after)[start:]
        return functional.cross_entropy(logits[start - 1 : -1], targets), len(targets)

    def chat(self, prompt: str, system: str | None) -> list[int]:
        turns = [] if system is None else [{"role": "system", "content": system}]
        turns.append({"role": "user", "content": prompt})
        return self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)

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
        held_out=held,
        epochs=2.5,
        batch_size=size,
        accumulation=accumulation,
        scheduler=schedule,
        optimizer="adam",
        lr=0.3,
    )
    plain, steps, epoch = (
        Plain(Path(model.path)),
        math.ceil(2.5 * 14 / (size * accumulation)),
        math.ceil(14 / (size * accumulation)),
    )
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
    how = {"edit": TrainableAdd(layers=[LAYER]), "epochs": 1, "batch_size": 4, "held_out": 0.34}
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


def prompted(count: int, seed: int = 0) -> list[Prompted]:
    return [Prompted("Be a bird.", one.prompt, one.response) for one in examples(count, seed)]


SMALL = {"edit": TrainableAdd(layers=[LAYER]), "budget": TokenBudget(300, 120), "batch_size": 4}


def test_a_data_set_of_one_source_is_skipped_for_that_reason(model, tmp_path) -> None:
    """It has tokens enough, but its examples are in one part alone."""
    data = {"one": prompted(60), "alone": [replace(example, source="s") for example in prompted(60)]}
    found = train_datasets(model, data, out=tmp_path, rates=[0.1], **SMALL)
    assert found.skipped["alone"].endswith("; all have one source, which cannot be in both parts")


def test_each_data_set_keeps_the_vector_of_its_best_rate_alone(model, tmp_path) -> None:
    """The rate, losses and perplexities are those of plain loops; small data sets are skipped by name; nothing else lies there."""
    data = {"a__trait__one": prompted(60), "a__trait__small": prompted(3), "a__trait__two": prompted(70, seed=3)}
    calls: list[Progress] = []
    found = train_datasets(model, data, out=tmp_path, rates=[1.0, 0.1, 0.001], progress=calls.append, **SMALL)
    assert list(found.results) == ["a__trait__one", "a__trait__two"]
    assert calls[-1] == Progress("trainings", 9, 9)
    assert calls == sorted(calls, key=attrgetter("done"))
    assert re.fullmatch(r"\d+ tokens in 3 examples, of 420", found.skipped["a__trait__small"])
    assert "2 data sets trained; skipped: a__trait__small" in str(found)
    for name, result in found.results.items():
        assert sorted(path.name for path in (tmp_path / name).iterdir() if path.name != ".lock") == [
            f"{name}.directions.safetensors",
            f"{name}.history.json",
            f"{name}.safetensors",
            "held_out.jsonl",
            "rates.json",
            "result.json",
            "steering_config.json",
            "steering_vector.pt",
        ]
        losses = {one.lr: one.validation_loss for one in result.rates}
        assert list(losses) == [1.0, 0.1, 0.001]
        assert result.lr == min(losses, key=losses.get)
        vectors, config = load_steering_vector(tmp_path / name)
        assert config.target_layer == LAYER
        assert vectors[LAYER].norm() == pytest.approx(result.norm, rel=1e-5)
        held = [
            Example(one["prompt"], one["response"])
            for one in map(json.loads, (tmp_path / name / "held_out.jsonl").read_text().splitlines())
        ]
        assert (result.examples + result.held_out + result.left_out, len(held)) == (len(data[name]), result.held_out)
        plain = Plain(Path(model.path))
        for label, vector, system in (
            ("unsteered", torch.zeros_like(vectors[LAYER]), None),
            ("trained", vectors[LAYER], None),
            ("prompted", torch.zeros_like(vectors[LAYER]), "Be a bird."),
        ):
            plain.vector.data.copy_(vector)
            with torch.no_grad():
                texts = [plain.loss(plain.chat(one.prompt, system), one.response) for one in held]
            total, tokens = sum(float(loss) * count for loss, count in texts), sum(count for _, count in texts)
            said = result.validation[label]
            assert said.tokens == tokens
            assert said.perplexity == pytest.approx(math.exp(total / tokens), rel=1e-4)
            assert said.loss == pytest.approx(float(torch.stack([loss for loss, _ in texts]).mean()), rel=1e-4)
        assert result.validation["trained"].loss == pytest.approx(losses[result.lr], rel=1e-4)
        assert torch.equal(found.spec(name).of_rows()[0].vector, vectors[LAYER])


def test_a_rate_is_trained_as_train_would(model, tmp_path) -> None:
    """The journal's settings by default: five epochs, a cosine, patience of two; the vector is that of the same call of `train`."""
    data, budget = prompted(60), SMALL["budget"]
    found = train_datasets(model, {"it": data}, out=tmp_path / "sweep", rates=[0.05], **SMALL).results["it"]
    tokenizer = AutoTokenizer.from_pretrained(model.path)
    sizes = [len(Likelihood().tokens(tokenizer, one)[0].ids) for one in data]
    seen, held = budget.draw(sizes, [None] * len(data), 0)
    assert (found.tokens, found.held_out_tokens) == tuple(sum(sizes[at] for at in places) for places in (seen, held))
    assert 300 <= found.tokens < 300 + max(sizes)
    assert not set(seen) & set(held)
    steps = math.ceil(5 * len(seen) / 4)
    alone = train(
        model,
        [data[at] for at in seen],
        held_out=[data[at] for at in held],
        edit=SMALL["edit"],
        out=tmp_path / "it",
        steps=steps,
        evaluate_every=math.ceil(len(seen) / 4),
        patience=2,
        batch_size=4,
        optimizer=partial(torch.optim.AdamW, lr=0.05, weight_decay=0.0),
        scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=steps),
    )
    kept = SteeringSpec.load(tmp_path / "sweep" / "it" / "it.safetensors")
    assert torch.equal(kept.of_rows()[0].vector, alone.spec.of_rows()[0].vector)
    assert json.loads((tmp_path / "sweep/it/it.history.json").read_text()) == json.loads(
        (tmp_path / "it/it.history.json").read_text()
    )


@pytest.mark.parametrize("seed", range(30))
def test_a_draw_keeps_sources_together_and_budgets(seed) -> None:
    """Random sizes and sources: both sides reach their budgets by less than one example, or all sources are used."""
    draw = Random(seed)
    sizes = [draw.randint(1, 40) for _ in range(draw.randint(1, 60))]
    sources = [draw.choice([None, "a", "b", "c", "d"]) for _ in sizes]
    budget = TokenBudget(draw.randint(1, 300), draw.randint(1, 100))
    seen, held = budget.draw(sizes, sources, seed)
    assert not set(seen) & set(held)
    assert not {sources[at] for at in seen} & {sources[at] for at in held} - {None}
    for places, bound in ((held, budget.validation), (seen, budget.training)):
        count = sum(sizes[at] for at in places)
        assert count < bound + max(sizes)
        if count < bound:
            used = {*seen, *held} | {at for at, one in enumerate(sources) if one is not None}
            assert used == set(range(len(sizes))) or not places


def test_a_result_of_other_system_prompts_is_refused(model, tmp_path) -> None:
    """Its tokens are the same, and its perplexity with the prompts is not."""
    how = {**SMALL, "rates": [0.3], "epochs": 1}
    data = prompted(60)
    found = train_datasets(model, {"one": data}, out=tmp_path, **how).results["one"]
    others = [Prompted("Be a stone, and say so.", one.prompt, one.response) for one in data]
    with pytest.raises(RunDiffers, match="one holds a training on other system prompts"):
        train_datasets(model, {"one": others}, out=tmp_path, **how)
    assert train_datasets(model, {"one": data}, out=tmp_path, **how).results["one"] == found


def test_an_interrupted_call_resumes_to_the_same_files(model, tmp_path) -> None:
    """Cut at any training, after the result and between; what differs is named; a second writer is refused."""
    data = {"one": prompted(60), "two": prompted(50, seed=1)}
    how = {**SMALL, "rates": [0.3, 0.01], "epochs": 1}
    train_datasets(model, data, out=tmp_path / "whole", **how)
    for cut in range(1, 5):

        def stop(at: Progress, cut: int = cut) -> None:
            if at.done == cut:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train_datasets(model, data, out=tmp_path / f"{cut}", progress=stop, **how)
        train_datasets(model, data, out=tmp_path / f"{cut}", **how)
        for name in data:
            mine, theirs = (
                {path.name: path.read_bytes() for path in (tmp_path / folder / name).iterdir()}
                for folder in (f"{cut}", "whole")
            )
            assert mine.keys() == theirs.keys()
            assert all(mine[file] == theirs[file] for file in mine if file != "steering_vector.pt")
    with pytest.raises(RunDiffers, match=r"rates was \[0\.3, 0\.01\], is \[0\.3\]"):
        train_datasets(model, data, out=tmp_path / "whole", **{**how, "rates": [0.3]})
    with pytest.raises(RunDiffers, match=r"training\.settings.steps was"):
        train_datasets(model, data, out=tmp_path / "whole", **{**how, "epochs": 2})
    (tmp_path / "whole" / "one" / "result.json").write_text("{")
    with pytest.raises(InvalidFile, match=r"result.json cannot be read as the result of a data set"):
        train_datasets(model, data, out=tmp_path / "whole", **how)
    with locked(tmp_path / "other" / "one"), pytest.raises(InvalidRequest, match="another call writes"):
        train_datasets(model, data, out=tmp_path / "other", **how)


def away(values, lr: float) -> torch.optim.Optimizer:
    """Raise the loss; at a rate of above 1 no number is left."""
    return torch.optim.SGD(values, lr=math.inf if lr > 1 else lr, maximize=True)


def test_a_rate_that_diverges_is_recorded_and_others_go_on(model, tmp_path) -> None:
    """Only if no rate gives finite losses is it an error."""
    how = {**SMALL, "epochs": 1, "optimizer": away}
    with pytest.warns(UserWarning, match="it: no rate lowered the validation loss"):
        found = train_datasets(model, {"it": prompted(60)}, out=tmp_path / "it", rates=[2.0, 0.5], **how).results["it"]
    assert [one.validation_loss is None for one in found.rates] == [True, False]
    assert found.lr == 0.5
    with pytest.raises(TrainingDiverged, match=r"it: losses are not finite at any of the rates \[2\.0\]"):
        train_datasets(model, {"it": prompted(60)}, out=tmp_path / "none", rates=[2.0], **how)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"lr": 0.1}, InvalidSetting, "give rates="),
        ({"rates": []}, InvalidSetting, "one at least"),
        ({"rates": [0.1, 0.1]}, InvalidSetting, "give each once"),
        ({"rates": [0.1, math.nan]}, InvalidSetting, "above 0"),
        ({"rates": "0.1"}, InvalidSetting, "above 0"),
        ({"datasets": {}}, InvalidSetting, "by the name of the data set"),
        ({"datasets": {"a/b": prompted(4)}}, InvalidFile, "'a/b'"),
        ({"datasets": {"x": prompted(4), "y": []}}, InvalidSetting, "0 tokens in 0 examples, of 420"),
        ({"datasets": {"x": [Preference("a", "b", "c")] * 9}}, InvalidSetting, "data set x: Likelihood learns from"),
        ({"epoch": 3}, InvalidSetting, "did you mean 'epochs'"),
        ({"budget": (1, 2)}, InvalidSetting, "budget=(1, 2); give TokenBudget(training=..., validation=...)"),
        ({"objective": 3}, InvalidSetting, "objective=3; give an objective, or a name: bipo, distillation, likelihood"),
        ({"objective": "likelyhood"}, UnknownName, "did you mean 'likelihood'"),
        ({"datasets": {"x": [Example([1], [99999])] * 60}}, InvalidPrompt, "data set x: token id 99999"),
    ],
)
def test_wrong_calls_are_refused(model, tmp_path, changes, error, says) -> None:
    """Before any step, by the name of the argument or data set."""
    given = {"datasets": {"x": prompted(60)}, **SMALL, **changes}
    with pytest.raises(error, match=re.escape(says)):
        train_datasets(model, given.pop("datasets"), out=tmp_path / "x", **given)
    with pytest.raises(InvalidSetting, match="training=0; give a whole number"):
        TokenBudget(0)


def test_perplexity_needs_system_prompts_where_it_is_asked_for(model) -> None:
    """Of mixed examples, one without a system prompt is named."""
    with pytest.raises(InvalidSetting, match="has no system prompt; give Prompted"):
        perplexity_of(model, [*prompted(2), *examples(1)], prompted=True)


def test_what_has_no_loss_is_told(model) -> None:
    """A target that PyTorch would leave out, -100, counts as a token otherwise; ids that no embedding has; no batches."""
    with pytest.raises(InvalidPrompt, match=f"token id {model.vocabulary} in .*; the model's ids are 0 to"):
        perplexity_of(model, [Example([model.vocabulary], [3])])
    for wrong in (0, -1, 1.5, None):
        with pytest.raises(InvalidSetting, match=re.escape(f"batch_size={wrong}; give a whole number, 1 or more")):
            perplexity_of(model, [Example([1, 2], [3])], batch_size=wrong)
    with pytest.raises(InvalidPrompt, match="token id -100 in"):
        perplexity_of(model, [Example([1, 2], [3, -100])])
    with pytest.raises(TrainingDiverged, match=r"losses are not finite under Add\(.*use a smaller vector"):
        perplexity_of(model, [Example([1, 2], [3, 4])], Add(torch.full((model.width,), 3e38), 10.0, layer=0))


def test_folders_hold_data_sets_in_every_form(model, tmp_path) -> None:
    """By prefix; texts, conversations, persona answers of one label; anything else is named with file and line."""

    def write(name: str, *lines: object) -> None:
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")

    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    write(
        "a__trait__x",
        {"text": "It rains."},
        {"conversation": turns},
        {"prompt": [1, 2], "response": "b", "source": "s", "system": None},
    )
    write("a__trait__y", {"messages": [{"role": "system", "content": "Be kind."}, *turns]})
    keys = {"prompt_index": 0, "question_index": 7}
    write("b", *({"conversation": turns, "label": label, **keys} for label in ("pos", "neg", "default")))
    found = ExampleFolder(tmp_path, "a__trait__*")
    assert list(found) == ["a__trait__x", "a__trait__y"]
    assert found["a__trait__x"] == [Example("", "It rains."), Example(turns[:1], "So."), Example([1, 2], "b", "s")]
    assert found["a__trait__y"] == [Prompted("Be kind.", turns[:1], "So.")]
    assert ExampleFolder(tmp_path, "b", "pos")["b"] == [Example(turns[:1], "So.", "7")]
    write("d", *({"text": "a", "question_index": 7, "source": source} for source in (None, "s")))
    assert [one.source for one in ExampleFolder(tmp_path)["d"]] == ["7", "s"]
    with pytest.raises(InvalidFile, match=r"b.jsonl, line 1 has the label 'pos', and label=None; give label="):
        ExampleFolder(tmp_path)["b"]
    with pytest.raises(InvalidSetting, match=re.escape("""{'b': "no line has label='poz'"}""")):
        train_datasets(model, ExampleFolder(tmp_path, "b", "poz"), out=tmp_path / "out", edit=TrainableAdd(layers=[1]))
    with pytest.raises(InvalidFile, match=r"line 1 has the label None, and label='pos'; leave label= out"):
        ExampleFolder(tmp_path, label="pos")["a__trait__x"]
    with pytest.raises(InvalidFile, match=r"no data set 'c\*'.jsonl; .*'a__trait__x'"):
        ExampleFolder(tmp_path, "c*")
    with pytest.raises(UnknownName, match="did you mean 'a__trait__x'"):
        found["a_trait_x"]
    for number, (line, says) in enumerate(
        [
            ({"text": "a", "more": 1}, "fields ['more', 'text']: text already is the whole example; give text"),
            ({"text": "a", "prompt": "kept?", "source": "s"}, "text already is the whole example"),
            ({"conversation": turns, "system": "Be kind."}, "conversation already is the whole example"),
            ({"conversation": turns, "messages": turns}, "conversation already is the whole example"),
            ({"conversation": turns[:1]}, "turns of role and content"),
            ({"conversation": [*turns, *turns[:1]]}, "of 'assistant' as its last turn"),
            ({"messages": [{"role": "system", "content": "a"}, turns[1]]}, "give a turn of 'user'"),
            ([1], "Expected `object`"),
        ]
    ):
        write(f"wrong{number}", {"text": "a"}, line)
        with pytest.raises(InvalidFile, match=f"line 2: .*{re.escape(says)}"):
            ExampleFolder(tmp_path)[f"wrong{number}"]


def words(done) -> str:
    """What a command said to stderr, without its frames and lines."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", done.stderr).split())


def test_the_command_trains_a_folder(path, tmp_path, monkeypatch) -> None:
    """Data sets by prefix; the vectors are those of the call; what fits a file alone, or a folder alone, is refused."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for name, count in (("a__one", 60), ("a__small", 2), ("b", 60)):
        lines = [{"system": one.system, "prompt": one.prompt, "response": one.response} for one in prompted(count)]
        (Path("data") / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    asked = ["train", "data", "--datasets", "a__*", "--layers", str(LAYER), "--out", "out", "--model", str(path)]
    asked += ["--training-tokens", "300", "--validation-tokens", "120", "--rates", "0.1,0.001", "--batch-size", "4"]
    asked += ["--optimizer", "adam", "--scheduler", "linear", "--epochs", "1", "--patience", "1", "--checkpointing"]
    done = call(*asked, "--device-map", "cpu", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert list(found["trained"]) == ["a__one"]
    assert list(found["skipped"]) == ["a__small"]
    alone = train_datasets(
        path,
        {"a__one": prompted(60)},
        out="alone",
        rates=[0.1, 0.001],
        optimizer="adam",
        scheduler="linear",
        epochs=1,
        patience=1,
        **SMALL,
    )
    assert found["trained"]["a__one"]["lr"] == alone.results["a__one"].lr
    vectors = [
        SteeringSpec.load(f"{folder}/a__one/a__one.safetensors").of_rows()[0].vector for folder in ("out", "alone")
    ]
    assert torch.equal(*vectors)
    shown = call(*asked)
    assert "perplexity" in shown.stdout
    assert "a__small" in shown.stdout
    for more, says in (
        (["--lr", "0.1"], "this option is for a file of examples, not a folder; give --rates"),
        (["--validation", "0.1"], "--validation"),
        (["--rates", "fast"], "fast"),
        (["--datasets", "c*"], "no data set 'c*'"),
        (["--scheduler", "cosin"], "did you mean 'cosine'"),
        (["--epochs", "1", "--steps", "3"], "give one of them"),
    ):
        wrong = call("train", "data", "--layers", "1", "--out", "wrong", "--model", str(path), *more)
        assert wrong.exit_code in {1, 2}
        assert says in words(wrong)
    wrong = call("train", "data/b.jsonl", "--layers", "1", "--out", "wrong", "--training-tokens", "9")
    assert "--training-tokens: this option is for a folder of data sets, not a file" in words(wrong)
