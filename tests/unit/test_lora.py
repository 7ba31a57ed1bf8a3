"""LoRA adapters over pipeline stages: each holds some of the layers, and together they must hold all of an adapter's."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from steercap.adapters.lora import _refusal, load_adapter

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
