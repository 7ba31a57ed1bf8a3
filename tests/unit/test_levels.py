"""Levels of personas: which answers make a level, against a plain reading of the published rules."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch

from steercap.errors import InvalidSpec, UnknownName
from steercap.lab.personas.levels import LEVELS, LevelMeans, plan_levels

#: Answers of a drawn persona: prompts by questions.
PROMPTS, QUESTIONS = 4, 30


def drawn(kind: str, seed: int) -> tuple[list[str], dict[str, Any], dict[str, np.ndarray]]:
    """Draw keys, some without a partner; scores, some refusals or missing; and a row [2 layers, 3] for each answer."""
    rng = random.Random(seed)
    labels = ("pos", "default") if kind == "role" else ("pos", "neg", "default")
    keys = [f"{label}_p{p}_q{q}" for label in labels for p in range(PROMPTS) for q in range(QUESTIONS)]
    keys = [key for key in keys if rng.random() < 0.9]
    rng.shuffle(keys)
    scores: dict[str, Any] = {}
    for key in keys:
        draw = rng.random()
        if draw < 0.1:
            scores[key] = "REFUSAL"
        elif draw < 0.2:
            scores[key] = None
        elif draw < 0.9:
            scores[key] = rng.randrange(4) if kind == "role" else rng.choice([0, 20, 39, 40, 69.5, 70, 71, 90, 100])
    values = np.random.default_rng(seed).normal(size=(len(keys), 2, 3)) * 10
    return keys, scores, dict(zip(keys, values, strict=True))


def role_levels(keys: list[str], scores: dict[str, Any], rows: dict[str, np.ndarray], minimum: int) -> dict[str, Any]:
    """Return a role's levels by the rules, written plainly."""
    positive = [key for key in keys if key.startswith("pos") and isinstance(scores.get(key), int)]
    groups = {f"pos_{level}": [key for key in positive if scores[key] == level] for level in range(4)}
    groups["pos_all"] = positive
    found = {name: np.mean([rows[key] for key in group], 0) for name, group in groups.items() if len(group) >= minimum}
    default = [rows[key] for key in keys if key.startswith("default") and scores.get(key) != "REFUSAL"]
    return {**found, **({"default_1": np.mean(default, 0)} if default else {})}


def trait_levels(keys: list[str], scores: dict[str, Any], rows: dict[str, np.ndarray], minimum: int) -> dict[str, Any]:
    """Return a trait's levels by the rules, in the manner of the published script: one loop over prompts, questions."""
    groups: dict[str, list[np.ndarray]] = {name: [] for name in LEVELS["trait"]}
    numbers = {key: scores[key] for key in keys if isinstance(scores.get(key), (int, float))}
    for place in [f"p{p}_q{q}" for p in range(PROMPTS) for q in range(QUESTIONS)]:
        first = f"pos_{place}"
        if first not in numbers:
            continue
        if numbers[first] >= 70:
            groups["pos_70"].append(rows[first])
        elif numbers[first] >= 40:
            groups["pos_40_70"].append(rows[first])
        for label in ("neg", "default"):
            if (second := f"{label}_{place}") in numbers:
                groups[f"pos_{label}"].append(rows[first] - rows[second])
                if numbers[first] - numbers[second] > 50:
                    groups[f"pos_{label}_50"].append(rows[first] - rows[second])
    return {name: np.mean(group, 0) for name, group in groups.items() if len(group) >= minimum}


def means_of(plan: Any, rows: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return the plan's levels from rows added in the order of `rows`."""
    means = LevelMeans(plan)
    for key, row in rows.items():
        means.add(key, torch.from_numpy(row))
    return means.means()


class TestLevels:
    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("minimum", [1, 12, 1000])
    @pytest.mark.parametrize("kind", ["role", "trait"])
    def test_levels_are_those_of_the_rules(self, kind: Any, minimum: int, seed: int) -> None:
        """Every level has the value that a plain loop gives; those below the minimum are absent, not zeros."""
        keys, scores, rows = drawn(kind, seed)
        plan = plan_levels(kind, keys, scores, minimum=minimum)
        wanted = (role_levels if kind == "role" else trait_levels)(keys, scores, rows, minimum)
        found = means_of(plan, rows)
        assert set(found) == set(wanted)
        assert list(found) == [name for name in LEVELS[kind] if name in wanted]
        for name, level in found.items():
            assert level.dtype == torch.float32
            np.testing.assert_allclose(level.numpy(), wanted[name], rtol=1e-5, atol=1e-5)  # float32's rounding

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("kind", ["role", "trait"])
    def test_every_answer_is_used_or_counted(self, kind: Any, seed: int) -> None:
        """What a level uses and what it leaves out are together all that it could have used."""
        keys, scores, _ = drawn(kind, seed)
        plan = plan_levels(kind, keys, scores, minimum=9)
        places = {
            label: {key[len(label) :] for key in keys if key.startswith(label)} for label in ("pos", "neg", "default")
        }
        for level in LEVELS[kind]:
            second = level.split("_")[1]
            if kind == "trait" and second in {"neg", "default"}:
                candidates = len(places["pos"] | places[second])
            else:
                candidates = len(places["default" if level == "default_1" else "pos"])
            used = sum(weight > 0 for weight in plan.weights.get(level, {}).values())
            assert used + sum(plan.left_out[level].values()) == candidates
            assert 0 not in plan.left_out[level].values()

    def test_defaults_are_fifty_answers_for_roles_and_any_pair_for_traits(self) -> None:
        """49 answers make no level of a role, 50 do; default answers need no number; one pair makes a trait's level."""
        keys = [f"pos_p0_q{q}" for q in range(99)] + ["default_p0_q0"]
        plan = plan_levels("role", keys, {key: 3 if place < 50 else 2 for place, key in enumerate(keys[:-1])})
        assert list(plan.weights) == ["pos_3", "pos_all", "default_1"]
        assert plan.left_out["pos_2"] == {"another score": 50, "fewer than 50": 49}
        pair = plan_levels("trait", ["pos_p0_q0", "neg_p0_q0"], {"pos_p0_q0": 80, "neg_p0_q0": 30})
        assert list(pair.weights) == ["pos_neg", "pos_70"]
        assert pair.left_out["pos_neg_50"] == {"scores not more than 50 apart": 1}

    def test_reversed_pairs_do_not_count_as_apart(self) -> None:
        """A pair whose negative answer scores higher is no pair of `pos_neg_50`."""
        plan = plan_levels("trait", ["pos_p0_q0", "neg_p0_q0"], {"pos_p0_q0": 10, "neg_p0_q0": 90})
        assert set(plan.weights) == {"pos_neg"}

    def test_answers_of_several_files(self) -> None:
        """Answers of one prompt and question in two files are two answers, and pairs do not cross files."""
        keys = ["0_default/default_p0_q0", "1_default/default_p0_q0"]
        assert plan_levels("role", keys, {}).weights == {"default_1": dict.fromkeys(keys, 0.5)}
        apart = plan_levels("trait", ["a/pos_p0_q0", "b/neg_p0_q0"], {"a/pos_p0_q0": 9, "b/neg_p0_q0": 1})
        assert "pos_neg" not in apart.weights
        assert apart.left_out["pos_neg"] == {"no partner": 2}

    def test_unused_answers_and_scores_are_counted(self) -> None:
        """Negative answers of a role and scores of no answer are said."""
        plan = plan_levels("role", ["neg_p0_q0", "pos_p0_q0"], {"pos_p0_q1": 3, "pos_p0_q0": 3}, minimum=1)
        assert plan.unused == {"a role has no level of 'neg' answers": 1, "scores without an answer": 1}
        assert plan.needed == {"pos_p0_q0"}

    @pytest.mark.parametrize(
        ("kind", "keys", "scores", "told"),
        [
            ("rol", [], {}, "did you mean 'role'"),
            ("role", ["positive_p0_q0"], {}, "'positive_p0_q0'; a key is pos"),
            ("role", ["pos_p0_q00"], {}, "a key is"),
            ("role", ["pos_q0_p0"], {}, "a key is"),
            ("role", [3], {}, "a key is"),
            ("role", ["pos_p0_q0"] * 2, {}, "there twice"),
            ("role", ["pos_p0_q0"], {"pos_p0_q0": 2.5}, "score 2.5; a role has 0, 1, 2 or 3"),
            ("role", ["pos_p0_q0"], {"pos_p0_q0": 70}, "score 70"),
            ("role", ["pos_p0_q0"], {"pos_p0_q0": True}, "score True"),
            ("trait", ["pos_p0_q0"], {"pos_p0_q0": -1}, "0 to 100"),
            ("trait", ["pos_p0_q0"], {"pos_p0_q0": float("nan")}, "score nan"),
            ("trait", ["pos_p0_q0"], {"pos_p0_q0": "refusal"}, "'refusal'; a trait has 0 to 100, or 'REFUSAL'"),
            ("trait", ["pos_p0_q0"], {"pos_p0_q0": "80"}, "score '80'"),
        ],
    )
    def test_errors(self, kind: Any, keys: list[Any], scores: dict[str, Any], told: str) -> None:
        """Other keys and scores are refused, and the message says which."""
        with pytest.raises(InvalidSpec, match=re.escape(told)):
            plan_levels(kind, keys, scores)

    @pytest.mark.parametrize("minimum", [0, -1, 1.5, True])
    def test_minimum_is_checked(self, minimum: Any) -> None:
        """A minimum is a whole number from 1."""
        with pytest.raises(InvalidSpec, match="minimum="):
            plan_levels("role", [], {}, minimum=minimum)


class TestMeans:
    def test_order_and_dtype_do_not_matter(self) -> None:
        """Half-precision rows are added in float64: a small answer beside large ones is not lost."""
        keys = [f"default_p0_q{q}" for q in range(3000)]
        plan = plan_levels("role", keys, {})
        rows = {
            key: torch.full((1, 1), 1.0 if place else 60000.0, dtype=torch.float16) for place, key in enumerate(keys)
        }
        forward, backward = LevelMeans(plan), LevelMeans(plan)
        for key in keys:
            forward.add(key, rows[key])
        for key in reversed(keys):
            backward.add(key, rows[key])
        wanted = np.float32((np.float64(np.float16(60000)) + 2999) / 3000)
        assert (
            forward.means()["default_1"].item() == backward.means()["default_1"].item() == pytest.approx(wanted, 1e-7)
        )

    def test_wrong_rows_are_refused(self) -> None:
        """A doubled, unknown or missing answer, another shape or dtype, and NaN are errors."""
        plan = plan_levels("role", ["default_p0_q0", "default_p0_q1", "pos_p0_q0"], {})
        means = LevelMeans(plan)
        means.add("default_p0_q0", torch.ones(2, 3))
        for key, rows, told in [
            ("default_p0_q0", torch.ones(2, 3), "added twice"),
            ("default_p0_q1", torch.ones(2, 4), "those before it have"),
            ("default_p0_q1", torch.ones(3), r"\[3\]; expected floats"),
            ("default_p0_q1", torch.ones(2, 3, dtype=torch.int32), "int32"),
            ("default_p0_q1", torch.tensor([[1.0, 2, 3], [4, float("nan"), 6]]), "NaN"),
            ("pos_p0_q0", torch.full((2, 3), float("inf")), "NaN or infinity"),
        ]:
            with pytest.raises(InvalidSpec, match=told):
                means.add(key, rows)
        with pytest.raises(UnknownName, match="did you mean 'default_p0_q1'"):
            means.add("default_p0_q11", torch.ones(2, 3))
        with pytest.raises(InvalidSpec, match=r"1 needed answers were not added: default_p0_q1$"):
            means.means()
        means.add("default_p0_q1", torch.full((2, 3), 3.0))
        assert torch.equal(means.means()["default_1"], torch.full((2, 3), 2.0))

    def test_a_level_beyond_float32_is_an_error(self) -> None:
        """A mean that float32 cannot hold is not returned as infinity."""
        means = LevelMeans(plan_levels("role", ["default_p0_q0"], {}))
        means.add("default_p0_q0", torch.full((1, 1), 1e300, dtype=torch.float64))
        with pytest.raises(InvalidSpec, match="beyond the range of float32"):
            means.means()

    def test_no_levels_are_no_rows(self) -> None:
        """A persona without used answers has no levels."""
        assert LevelMeans(plan_levels("trait", [], {})).means() == {}
