"""Engine arguments that steercap needs or refuses, before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from steercap.adapters.arguments import check_supported, drafting, read_arguments
from steercap.errors import UnsupportedRunner


@pytest.fixture
def reading(tmp_path: Path) -> Callable[..., Any]:
    """Read arguments for a tiny model, of which there is the configuration alone."""
    tiny = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}
    LlamaConfig(**tiny, **heads, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    return lambda **given: read_arguments(str(tmp_path), {"skip_tokenizer_init": True, "dtype": "float32", **given})


@pytest.mark.parametrize(
    "given",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"spec_method": "ngram", "spec_tokens": 2},
    ],
)
def test_drafts_are_scheduled_when_positions_are_known(reading, given) -> None:
    """However they were asked for; and vLLM takes the arguments a second time."""
    args = reading(**given)
    needed = drafting(args, args.create_engine_config())
    assert needed["async_scheduling"] is False
    config = replace(args, **needed).create_engine_config()
    assert config.speculative_config.num_speculative_tokens == 2
    assert not config.scheduler_config.async_scheduling
    check_supported(config)


def test_what_a_user_asked_for_is_refused_not_changed(reading) -> None:
    """Asynchronous scheduling, of an engine that drafts; one that drafts nothing needs nothing."""
    args = reading(speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    config = args.create_engine_config()
    assert "async_scheduling" not in drafting(replace(args, async_scheduling=True), config)
    config.scheduler_config.async_scheduling = True
    with pytest.raises(UnsupportedRunner, match="async_scheduling=True schedules positions"):
        check_supported(config)
    assert drafting(args, reading().create_engine_config()) == {}


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_logits_in_place_of_logprobs_are_refused(reading, mode) -> None:
    """Measures would take them for log-probabilities."""
    with pytest.raises(UnsupportedRunner, match=f"logprobs_mode='{mode}' returns logits"):
        check_supported(reading(logprobs_mode=mode).create_engine_config())
    check_supported(reading(logprobs_mode="processed_logprobs").create_engine_config())


def test_models_that_draw_tokens_over_and_over_are_refused(reading) -> None:
    """As DiffusionGemma, which vLLM knows by the length of its canvas."""
    config = reading().create_engine_config()
    check_supported(config)
    config.model_config.hf_config.canvas_length = 32
    vars(config.model_config).pop("is_diffusion", None)
    with pytest.raises(UnsupportedRunner, match="a diffusion model"):
        check_supported(config)
