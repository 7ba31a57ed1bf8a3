"""`steercap models MODEL`: what a model would be served with, told from its config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_calls import call
from transformers import AutoConfig

from steercap.adapters.releases import registered
from steercap.cli.models import ModelFacts, facts_of, standing_of
from steercap.errors import ModelNotLoaded
from steercap.testing import tiny_config


def folder_of(path: Path, name: str, **changes: Any) -> str:
    """A folder with a configuration, and no weights."""
    config = AutoConfig.for_model(**tiny_config(name), architectures=[changes.pop("architecture")], **changes)
    config.save_pretrained(path)
    return str(path)


def test_a_folder_without_weights_is_described(tmp_path) -> None:
    """Sites by layer, and weights by the parameters that the configuration makes."""
    found = facts_of(folder_of(tmp_path, "qwen3_moe", architecture="Qwen3MoeForCausalLM"))
    assert isinstance(found, ModelFacts)
    assert (found.standing.state, found.standing.family) == ("proved", "qwen3_moe")
    assert (found.layers, found.width) == (4, 128)
    assert (found.sites["neurons"], found.sites["router"], found.sites["embed"]) == ("1", "0, 2-3", "0")
    assert found.sites["attn_out"] == "0-3"
    # Each of three sparse layers has 8 experts of 3 × 64 × 128, and there are two embeddings of 512 × 128.
    assert found.weights > 2 * (3 * 8 * 3 * 64 * 128 + 2 * 512 * 128)
    assert found.command == f"steercap serve {tmp_path} --sites all"


def test_layers_that_no_family_knows_are_derived(tmp_path) -> None:
    found = facts_of(folder_of(tmp_path, "qwen3", architecture="Step1ForCausalLM"))
    assert found.standing.state == "derived"
    assert found.sites == {"resid_pre": "0-3", "resid_post": "0-3"}


@pytest.mark.parametrize(
    ("architecture", "state", "reason"),
    [
        ("LlamaForCausalLM", "proved", "compared with transformers"),
        ("Step1ForCausalLM", "derived", "no family knows it"),
        ("MPTForCausalLM", "refused", "no longer has it"),
        ("PersimmonForCausalLM", "unknown", "only with transformers' modules"),  # vLLM had it, and transformers has
        ("IQuestLoopCoderForCausalLM", "refused", "run several times in a pass"),
        ("HrmTextForCausalLM", "refused", "run several times in a pass"),
        ("Gemma3nForConditionalGeneration", "derived", "refuses the model"),
        ("Rnj1ForCausalLM", "proved", "a start derives its sites"),
        ("Eagle3LlamaForCausalLM", "refused", "a draft model"),
        ("MBartForConditionalGeneration", "unknown", "plug-in"),
        ("TransformersForCausalLM", "unknown", "give the model's own"),
        ("Qwen2VLForConditionalGeneration", "derived", "no family knows it: the start derives"),  # in two tables
        ("BertModel", "known", "it is a pooling model, served only by `encode`"),
        ("CLIPModel", "derived", "it is a pooling model, served only by `encode`"),
        (
            "Qwen3ForSequenceClassification",
            "known",
            "it is a pooling model, served only by `encode`",
        ),  # vLLM converts it
        ("NoSuchForCausalLM", "unknown", "does not register it"),
    ],
)
def test_each_standing_has_its_reason(architecture, state, reason) -> None:
    found = standing_of(architecture)
    assert (found.state, reason in found.reason) == (state, True), found


def test_only_what_generates_or_pools_is_served() -> None:
    """By vLLM's own tables: of every architecture that it registers."""
    for architecture, tables in registered().items():
        found = standing_of(architecture)
        if {"text_generation", "multimodal", "transformers_supported"} & {*tables}:
            assert not found.pools, found
        elif {"speculative_decoding", "oot_supported", "transformers_backend"} & {*tables}:
            assert found.state in {"refused", "unknown"}, found
        elif "previously_supported" not in tables:
            assert (found.pools, "`encode`" in found.reason, found.state in {"known", "derived"}) == (True, True, True)


@pytest.mark.parametrize(
    ("architecture", "state"),
    [
        ("NoSuchForConditionalGeneration", "unknown"),  # neither vLLM nor transformers has it
        ("LlavaForConditionalGeneration", "proved"),  # vLLM's own
        ("AyaVisionForConditionalGeneration", "proved"),  # by transformers' modules
    ],
)
def test_a_wrapper_is_proved_by_its_language_model_only_if_it_runs(architecture, state) -> None:
    assert standing_of(architecture, ("LlamaForCausalLM",)).state == state


def test_a_pooling_model_has_a_command_that_pools(tmp_path) -> None:
    """And one that is not known has neither sites nor a proof."""
    pooling, other = tmp_path / "pooling", tmp_path / "other"
    found = facts_of(folder_of(pooling, "qwen3", architecture="Qwen3ForSequenceClassification"))
    assert found.command == f"steercap capture TEXT --model {pooling} --engine-arg runner=pooling --out FOLDER"
    assert found.sites["resid_post"] == "0-3"
    assert facts_of(folder_of(other, "qwen3", architecture="NoSuchForCausalLM")).sites == {}


@pytest.mark.parametrize("content", ["[]", "{", json.dumps({"model_type": "llama"})])
def test_a_folder_whose_configuration_names_nothing_is_an_error(content, tmp_path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelNotLoaded, match="names no architectures"):
        facts_of(str(tmp_path))


def test_architectures_are_listed_in_the_folder_of_a_model_too(tmp_path, monkeypatch) -> None:
    """That folder is described only by its path, and its path is no part of the name of one that is refused."""
    folder_of(tmp_path, "qwen3", architecture="Qwen3ForCausalLM")
    monkeypatch.chdir(tmp_path)
    listed = json.loads(call("models", "--json").stdout)
    assert len(listed) > 9
    assert json.loads(call("models", ".", "--json").stdout)["model"] == "."
    done = call("models", "--refused", ".")
    assert (done.exit_code, "--refused" in done.stderr) == (2, True), done.output
    assert json.loads(call("models", "--refused", "--json").stdout)


def test_what_is_not_here_is_an_error_that_says_how_to_fetch_it(tmp_path) -> None:
    with pytest.raises(ModelNotLoaded, match=r"'nobody/nothing' is not on this machine.*hf download nobody/nothing"):
        facts_of("nobody/nothing")
    with pytest.raises(ModelNotLoaded, match="there is no model at"):
        facts_of(str(tmp_path / "none"))
