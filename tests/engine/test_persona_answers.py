"""Answers that exist, read by real models: transformers and NumPy find the same, and a kill changes no byte."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from answers_run import PERSONAS, scores_of, write_data
from conftest import opened
from preloaded import killed
from roles_run import checkpoint
from support.rows import TINY_ENGINE
from transformers import AutoModelForCausalLM, AutoTokenizer

from steercap import SteerModel
from steercap.lab.demo import smollm2
from steercap.lab.personas import read_answers, read_answers_by_dtype

SCRIPT = Path(__file__).parents[1] / "answers_run.py"


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="module")
async def model(path) -> AsyncIterator[SteerModel]:
    async with opened(path, **TINY_ENGINE) as found:
        yield found


def given(folder: Path) -> tuple[Path, Path, Path]:
    return folder / "responses", folder / "extract_scores", folder / "out"


def means_of(path: str | Path, talks: list[list[dict[str, str]]]) -> list[np.ndarray]:
    """Mean over each answer's tokens of the output of each layer, [layers, hidden], by transformers' hooks."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(path),
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
    )
    outputs: dict[int, torch.Tensor] = {}

    def keep(index: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            outputs[index] = (output[0] if isinstance(output, tuple) else output).reshape(-1, model.config.hidden_size)

        return hook

    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(keep(index))
    found = []
    for talk in talks:
        before = tokenizer.apply_chat_template(talk[:-1], tokenize=False, add_generation_prompt=True)
        first = tokenizer.encode(before, add_special_tokens=False)
        ids = first + tokenizer.encode(talk[-1]["content"], add_special_tokens=False)
        with torch.inference_mode():
            model(torch.tensor([ids]))
        found.append(np.stack([outputs[index][len(first) :].double().mean(0).numpy() for index in range(len(outputs))]))
    return found


def apart(ours: torch.Tensor, theirs: np.ndarray) -> float:
    """Greatest error of any layer, over the norm of its row."""
    assert tuple(ours.shape) == theirs.shape
    return float((np.linalg.norm(ours.double().numpy() - theirs, axis=1) / np.linalg.norm(theirs, axis=1)).max())


def assert_means(path: str | Path, folder: Path, talks: dict[str, dict[str, Any]]) -> None:
    """Each answer's mean and each level are what transformers and NumPy find."""
    default = []
    for name, mine in talks.items():
        wanted = dict(zip(mine, means_of(path, list(mine.values())), strict=True))
        found = torch.load(folder / "response_activations" / f"{name}.pt", weights_only=True)
        assert list(found) == list(mine)
        assert max(apart(found[key], mean) for key, mean in wanted.items()) < 1e-4
        levels = torch.load(folder / "vectors" / f"{name}.pt", weights_only=True)
        if name == "default":
            default = list(wanted.values())
            continue
        scores = scores_of(name, list(mine))
        kept = {f"pos_{score}": [key for key in mine if scores[key] == score] for score in range(4)}
        kept["pos_all"] = [key for key in mine if scores[key] != "REFUSAL"]
        assert set(levels) == {level for level, keys in kept.items() if len(keys) >= 2}
        assert all(
            apart(rows, np.mean([wanted[key] for key in kept[level]], axis=0)) < 1e-4 for level, rows in levels.items()
        )
    activations = torch.load(folder / "default_vectors.pt", weights_only=True)["activations"]
    assert apart(activations["default_1"], np.mean(default, axis=0)) < 1e-4


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


async def test_means_are_those_of_transformers(model, path, tmp_path) -> None:
    """A tiny model, requests of all personas at once."""
    talks = write_data(tmp_path)
    await read_answers(model, *given(tmp_path), kind="role", minimum=2)
    assert_means(path, tmp_path / "out", talks)


async def test_means_of_smollm2_are_those_of_transformers(smol, tmp_path) -> None:
    """Its template closes a turn with tokens of its own, which belong to no answer."""
    talks = write_data(tmp_path)
    await read_answers(smol, *given(tmp_path), kind="role", minimum=2)
    assert_means(smollm2(), tmp_path / "out", talks)


async def test_each_dtype_has_its_folder_and_one_that_does_not_fit_is_refused(path, tmp_path) -> None:
    """Real engines one after another; float16 is asked for with caches larger than any memory. 16 bits keep two digits."""
    write_data(tmp_path)

    def opening(dtype: str) -> SteerModel:
        space = {"kv_cache_memory_bytes": 1 << 50} if dtype == "float16" else {}
        return SteerModel(str(path), **{**TINY_ENGINE, "dtype": dtype, **space})

    found, refused = await read_answers_by_dtype(opening, *given(tmp_path), kind="role", minimum=2)
    assert list(found) == ["float32", "bfloat16"]
    assert "needs 112590" in refused["float16"]
    files = {dtype: tmp_path / "out" / f"vectors_vllm_{dtype}" for dtype in found}
    for name in PERSONAS:
        full, half = (torch.load(files[dtype] / f"{name}.pt", weights_only=True) for dtype in files)
        assert list(full) == list(half)
        assert all(0 < apart(half[level], full[level].double().numpy()) < 0.05 for level in full)


async def test_a_killed_reading_goes_on_to_the_same_bytes(model, path, tmp_path) -> None:
    """Killed by SIGKILL in the middle of a persona; what was read before is not read again."""
    for place in ("whole", "killed"):
        write_data(tmp_path / place)
    await read_answers(model, *given(tmp_path / "whole"), kind="role", minimum=2, concurrency=1)
    killed(SCRIPT, path, tmp_path / "killed", 33)
    assert [file.stem for file in (tmp_path / "killed/out/vectors").iterdir()] == ["default"]
    assert len(list((tmp_path / "killed/out/parts").iterdir())) == 1
    reached: list[int] = []
    await read_answers(
        model,
        *given(tmp_path / "killed"),
        kind="role",
        minimum=2,
        concurrency=1,
        progress=lambda at: reached.append(at.done),
    )
    assert (reached[0], reached[1], reached[-1]) == (20, 33, 60)
    assert digests(tmp_path / "killed/out") == digests(tmp_path / "whole/out")
