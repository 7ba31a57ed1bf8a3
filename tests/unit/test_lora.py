"""LoRA adapters over pipeline stages: each holds some of the layers, and together they must hold all of an adapter's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.lora import write_adapter
from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

from steercap.adapters.lora import Adapters, _refusal, load_adapter
from steercap.errors import InvalidRequest
from steercap.testing import tiny_checkpoint

NAMES = ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "vision.layers.7.mlp.down_proj")


def a_stage(*held: str, weights: tuple[str, ...] = NAMES, error: str = "") -> SimpleNamespace:
    """A worker that holds these modules, and loads an adapter for others."""

    def add_lora(_request: object) -> None:
        if error:
            raise ValueError(error)

    loras = dict.fromkeys(weights, SimpleNamespace(lora_a=torch.zeros(2, 4), lora_b=torch.zeros(4, 2)))
    manager = SimpleNamespace(
        modules=dict.fromkeys(held, object()), get_adapter=lambda _number: SimpleNamespace(loras=loras)
    )
    runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
    removed: list[int] = []
    return SimpleNamespace(remove_lora=removed.append, removed=removed, add_lora=add_lora, model_runner=runner)


def refusal(*stages: SimpleNamespace) -> str:
    for stage in stages:
        stage.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=len(stages)))
    return _refusal([load_adapter(stage, "mine", 1, "/mine") for stage in stages])


def test_an_adapter_for_layers_of_all_stages_is_taken() -> None:
    """Each stage lacks those of the other, and a picture encoder may have more layers than the language model."""
    assert refusal(a_stage(*NAMES)) == ""
    assert refusal(a_stage(NAMES[0], NAMES[2]), a_stage(NAMES[1])) == ""


def test_a_layer_on_no_stage_is_named() -> None:
    """It would do nothing, whether one worker holds the model or two."""
    assert refusal(a_stage(*NAMES[:2])) == f"the model has no {NAMES[2]}"
    assert refusal(a_stage(NAMES[0]), a_stage(NAMES[2])) == f"the model has no {NAMES[1]}"


def test_an_adapter_that_one_stage_refuses_is_not_kept() -> None:
    """It is removed once before it is loaded, and again after."""
    whole, part = a_stage(*NAMES), a_stage(*NAMES[:2])
    assert (refusal(whole), refusal(part)) == ("", f"the model has no {NAMES[2]}")
    assert (whole.removed, part.removed) == ([1], [1, 1])


def test_a_stage_that_fails_says_why() -> None:
    """Its own reason comes first, whatever the others lack."""
    assert refusal(a_stage(NAMES[0]), a_stage(error="rank is 64")) == "rank is 64"


async def test_an_adapter_that_has_changed_is_refused_by_later_engines_too(tmp_path) -> None:
    """Requests that are repeated after a restart, and rows that are computed again, would be of other weights."""
    checkpoint = Path(tiny_checkpoint("qwen3"))
    ours, other = (LoRARequest(name, number, str(tmp_path / name)) for number, name in enumerate(("ours", "other"), 1))
    for seed, adapter in enumerate((ours, other)):
        write_adapter(Path(adapter.lora_path), checkpoint, seed=seed)
    loaded: list[str] = []
    first, second, third = (engine_of(loaded) for _ in range(3))
    for adapter in (ours, other):
        await first.ready(adapter, SamplingParams())
    second.follow(first)
    await second.ready(ours, SamplingParams())
    third.follow(second)
    write_adapter(Path(other.lora_path), checkpoint, seed=2, rank=8)
    assert (await third.ready(ours, SamplingParams())).lora_name == "ours"
    with pytest.raises(InvalidRequest, match=r"'other'.* have changed since it was loaded"):
        await third.ready(other, SamplingParams())
    assert (await third.ready(LoRARequest("new", 3, other.lora_path), SamplingParams())).lora_name == "new"
    assert loaded == ["ours", "other", "ours", "ours", "new"]


def engine_of(loaded: list[str]) -> Adapters:
    """The adapters of one engine, whose workers take any."""

    async def load(name: str, *_: Any) -> list[list[str]]:
        loaded.append(name)
        return [[""]]

    text = SimpleNamespace(max_position_embeddings=64)
    model = SimpleNamespace(hf_config=SimpleNamespace(get_text_config=lambda: text))
    return Adapters(SimpleNamespace(lora_config=LoRAConfig(max_lora_rank=16), model_config=model), load)
