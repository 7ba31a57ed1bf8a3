"""Engine arguments that steercap needs or refuses, before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from steercap.adapters.arguments import ahead, check_supported, overshoot, read_arguments, remade
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
def test_vllm_takes_arguments_with_drafts_twice(reading, given) -> None:
    """However they were asked for."""
    args = reading(**given)
    config = remade(args, args.create_engine_config(), {"max_num_seqs": 7})
    assert config.speculative_config.num_speculative_tokens == 2
    assert config.scheduler_config.max_num_seqs == 7
    check_supported(config)


@pytest.mark.parametrize(
    ("drafts", "asynchronous", "ahead_by", "past_end"), [(2, True, 2, 5), (2, False, 0, 2), (0, True, 0, 1)]
)
def test_passes_are_scheduled_ahead_of_drafts(reading, drafts, asynchronous, ahead_by, past_end) -> None:
    """With asynchronous scheduling alone, by the drafts of the pass before."""
    given = {"speculative_config": {"method": "ngram", "num_speculative_tokens": drafts}} if drafts else {}
    config = reading(**given).create_engine_config()
    config.scheduler_config.async_scheduling = asynchronous
    assert (ahead(config), overshoot(config)) == (ahead_by, past_end)
    check_supported(config)


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
