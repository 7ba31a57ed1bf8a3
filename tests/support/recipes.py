"""Oracle of docs/recipes.md: its numbers in transformers and NumPy, from the data that the page makes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from steercap.lab.demo import smollm2
from steercap.lab.mechanism.analysis.given import random_pairs
from support.checkpoints import Checkpoint, cosine

LAYER, WIDTH, NULLS = 18, 576, 50
OUT, SWEEP = Path("out"), "smollm2__trait__"


class Plain:
    """The model in transformers, with a vector that a hook adds from a token on."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(smollm2())
        self.vector, self.start = torch.zeros(WIDTH), 0
        self.model.model.layers[LAYER].register_forward_hook(self._add)

    def _add(self, _module: Any, _inputs: Any, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows[:, : self.start], rows[:, self.start :] + self.vector], 1)

    def chat(self, turns: list[dict[str, str]]) -> list[int]:
        ids: list[int] = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        return ids

    @torch.inference_mode()
    def logits(self, ids: list[int], vector: torch.Tensor | None = None, start: int = 0) -> torch.Tensor:
        self.vector, self.start = torch.zeros(WIDTH) if vector is None else vector, start
        logits: torch.Tensor = self.model(torch.tensor([ids])).logits[0]
        return logits

    @torch.inference_mode()
    def mean(self, turns: list[dict[str, str]]) -> np.ndarray:
        """Mean over the last turn's tokens of the output of each layer, [layers, hidden]."""
        self.vector, outputs = torch.zeros(WIDTH), []
        keep = [
            layer.register_forward_hook(lambda _module, _inputs, rows: outputs.append(rows[0]))
            for layer in self.model.model.layers
        ]
        before, after = self.chat(turns[:-1]), self.tokenizer.encode(turns[-1]["content"], add_special_tokens=False)
        self.model(torch.tensor([before + after]))
        for hook in keep:
            hook.remove()
        return torch.stack(outputs)[:, len(before) :].double().mean(1).numpy()

    def perplexity(
        self, lines: list[dict[str, str]], vector: torch.Tensor | None = None, prompted: bool = False
    ) -> float:
        losses = []
        for line in lines:
            system = [{"role": "system", "content": line["system"]}] if prompted else []
            before = self.chat([*system, {"role": "user", "content": line["prompt"]}])
            after = self.tokenizer.encode(line["response"], add_special_tokens=False)
            logits = self.logits(before + after, vector)[len(before) - 1 : -1]
            losses.append(cross_entropy(logits, torch.tensor(after), reduction="none"))
        return math.exp(torch.cat(losses).mean())


def check_recipes(folder: Path) -> None:
    """Compare what the page wrote into a folder with what transformers and NumPy find."""
    plain = Plain()
    levels = check_answers(plain, folder)
    check_sweep(plain, folder, levels)
    check_rollouts(plain, folder)
    check_comparison(folder, levels)


def read_pt(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def check_answers(plain: Plain, folder: Path) -> dict[tuple[str, str], np.ndarray]:
    """Mean of a file's first answer, and of each level; return the vector of each persona, [layers, hidden]."""
    means: dict[tuple[str, str, str], list[np.ndarray]] = {}
    for path in sorted(folder.glob("data/*/responses/*.jsonl")):
        kind = path.parts[-3]
        answers = read_pt(folder / OUT / kind / "response_activations" / f"{path.stem}.pt")
        lines = [*map(json.loads, path.read_text().splitlines())]
        for line in lines:
            own = answers.pop(f"{line['label']}_p{line['prompt_index']}_q{line['question_index']}").double().numpy()
            assert line is not lines[0] or near(own, plain.mean(line["conversation"]))
            means.setdefault((kind, path.stem, line["label"]), []).append(own)
        assert not answers
    found = {key: np.mean(rows, axis=0) for key, rows in means.items()}
    vectors = {}
    for (kind, name, label), mean in found.items():
        other = found["roles", "default", "default"] if kind == "roles" else found[kind, name, "neg"]
        if label == "pos":
            vectors[kind, name] = mean - other
    assert len(vectors) == 4
    for (kind, name), vector in vectors.items():
        level = read_pt(folder / OUT / kind / "vectors" / f"{name}.pt")["pos_3" if kind == "roles" else "pos_neg_50"]
        if kind == "roles":
            level = level - read_pt(folder / OUT / kind / "default_vectors.pt")["activations"]["default_1"]
        assert near(level.double().numpy(), vector)
    return vectors


def near(ours: np.ndarray, known: np.ndarray, tolerance: float = 1e-4) -> bool:
    """Whether every row is within a share of its length."""
    apart = np.linalg.norm(ours - known, axis=-1) / np.linalg.norm(known, axis=-1)
    return ours.shape == known.shape and bool((apart < tolerance).all())


def check_sweep(plain: Plain, folder: Path, levels: dict[tuple[str, str], np.ndarray]) -> None:
    """Perplexities of what was held out, and the table of trained and averaged vectors."""
    rows = parquet.read_table(folder / OUT / "sweep" / "steering_vector_comparison.parquet").to_pylist()
    assert [row["dataset"] for row in rows] == [f"{SWEEP}anxious", f"{SWEEP}impolite"]
    for row in rows:
        held_out = [
            *map(json.loads, (folder / OUT / "sweep" / row["dataset"] / "held_out.jsonl").read_text().splitlines())
        ]
        trained = read_pt(folder / OUT / "sweep" / row["dataset"] / "steering_vector.pt")["steering_vector"]
        averaged = levels["traits", row["averaged"]][LAYER]
        known = {
            "unsteered": plain.perplexity(held_out),
            "trained": plain.perplexity(held_out, trained),
            "averaged": plain.perplexity(held_out, torch.tensor(averaged).float()),
            "prompted": plain.perplexity(held_out, prompted=True),
        }
        assert {name: row[f"perplexity_{name}"] for name in known} == pytest.approx(known, rel=1e-3)
        assert known["trained"] < known["unsteered"]
        norms = np.linalg.norm(trained), np.linalg.norm(averaged), cosine(trained.double().numpy(), averaged)
        assert (row["norm_trained"], row["norm_averaged"], row["cosine"]) == pytest.approx(norms, rel=1e-3, abs=1e-4)


def check_rollouts(plain: Plain, folder: Path) -> None:
    """Every token of every answer is the likeliest under its dose; means are of the scores."""
    for name in ("anxious", "impolite"):
        where, doses = folder / OUT / "rollouts" / name, {"none": torch.zeros(WIDTH)}
        trained = read_pt(folder / OUT / "sweep" / f"{SWEEP}{name}" / "steering_vector.pt")["steering_vector"]
        averaged = read_pt(folder / OUT / "traits" / "vectors" / f"{name}.pt")["pos_neg_50"][LAYER]
        for method, vector in (("trained", trained), ("activation", averaged)):
            unit = vector / vector.norm()
            doses |= {f"{method}_scale_50": 50 * unit, f"{method}_scale_learned": trained.norm() * unit}
        rows = parquet.read_table(where / "results.parquet").to_pylist()
        summary = json.loads((where / "minilm_summary.json").read_text())["variant_summary"]
        assert {row["method"] for row in rows[::2] if row["question"] == 0} == set(doses) == set(summary)
        for row in rows[::2]:  # the first question
            before, after = row["prompt_token_ids"], row["output_token_ids"]
            logits = plain.logits(before + after, doses[row["method"]], len(before))[len(before) - 1 : -1]
            behind = logits.max(1).values - logits[range(len(after)), after]
            assert float(behind.max()) < 1e-2, row["method"]
        for method, scores in summary.items():
            own = [row["minilm"] / 100 for row in rows if row["method"] == method]
            assert (scores["count"], scores["mean"]) == (len(own), pytest.approx(np.mean(own)))
        assert len({row["text"] for row in rows if row["question"] == 0}) > 1, "steering changed nothing"


def check_comparison(folder: Path, levels: dict[tuple[str, str], np.ndarray]) -> None:
    """Matrices, feed-forward blocks and attention of both checkpoints on the vectors and their components."""
    pair = Checkpoint("llama", Path(smollm2())), Checkpoint("llama", folder / "instruct")
    tables = {
        path.stem: parquet.read_table(path).to_pylist() for path in (folder / OUT / "comparison").glob("*.parquet")
    }
    assert all(tables[name] for name in ("matrices", "susceptibility", "feed_forward", "attention"))
    rows, length = scaled({key: one[LAYER] for key, one in levels.items()})
    for row in tables["matrices"]:
        one, other = (own[matrix_of(row)] for own in pair)
        known = np.linalg.norm(other - one), cosine(one.ravel(), other.ravel())
        assert (row["frobenius"], row["cosine"]) == pytest.approx(known, rel=1e-5)
    for row in tables["susceptibility"]:
        if row["group"] != "random":
            vector, block = rows[row["group"], row["name"]], "attention" if row["matrix"] in "qkv" else "mlp"
            outputs = [own[matrix_of(row)] @ own.before(vector, row["layer"], block) for own in pair]
            assert row["distance"] == pytest.approx(1 - cosine(*outputs), abs=2e-6, rel=1e-2)
    for row in tables["feed_forward"]:
        one, other = (own.feed_forward(rows[row["group"], row["name"]], row["layer"]) for own in pair)
        known = np.linalg.norm(other - one), 1 - cosine(one, other)
        assert (row["absolute"], row["angular"]) == pytest.approx(known, abs=2e-6, rel=1e-2)
    drawn = random_pairs(NULLS, WIDTH, 0)[0].double().numpy() * length
    for row in tables["attention"]:
        source, target = rows[row["source_group"], row["source"]], rows[row["target_group"], row["target"]]
        for model, own in zip(("base", "instruct"), pair, strict=True):
            numbers = score if row["circuit"] == "qk" else written
            value = numbers(own, source[None], target[None], row["layer"])[0]
            assert row[model] == pytest.approx(value, abs=1e-4 * (1 + abs(value)))
            if row["relation"] == "same" and row["source"] == "PC1":
                random = numbers(own, drawn, drawn, row["layer"])
                assert row[f"{model}_z"] == pytest.approx((value - random.mean()) / random.std(ddof=1), abs=5e-3)


def score(own: Checkpoint, sources: np.ndarray, targets: np.ndarray, layer: int) -> Any:
    return own.scores(sources, targets, layer)


def written(own: Checkpoint, sources: np.ndarray, targets: np.ndarray, layer: int) -> Any:
    return cosine(own.writes(sources, layer), targets)


def matrix_of(row: dict[str, Any]) -> str:
    block = "self_attn" if row["matrix"] in "qkv" else "mlp"
    return f"model.layers.{row['layer']}.{block}.{row['matrix']}_proj.weight"


def scaled(vectors: dict[tuple[str, str], np.ndarray]) -> tuple[dict[tuple[str, str], np.ndarray], float]:
    """Every vector and the components of all, at the mean length; and that length."""
    given = np.array(list(vectors.values()))
    length = float(np.linalg.norm(given, axis=1).mean())
    middle = given - given.mean(0)
    rows = dict(vectors)
    for at, axis in enumerate(np.linalg.svd(middle, full_matrices=False)[2][: len(given) - 1], 1):
        outermost = middle @ axis
        rows["components", f"PC{at}"] = axis * np.sign(outermost[np.abs(outermost).argmax()])
    return {key: row / np.linalg.norm(row) * length for key, row in rows.items()}, length
