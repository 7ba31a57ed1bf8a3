"""What a model is known by: other weights are another model, copies are the same."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from steercap.errors import RunDiffers
from steercap.files.fingerprint import (
    ENDS,
    WEIGHTS,
    identity_of,
    names_of,
    tokenizer_digest,
    warn_of_other_model,
    weights_digest,
)
from steercap.files.folder import differences
from steercap.files.tensors import tensors_digest
from steercap.lab.demo import smollm2
from steercap.lab.personas import PersonaSettings
from steercap.lab.personas.folder import open_folder
from steercap.lab.studies.evaluation import Evaluation, Method
from steercap.lab.studies.evaluation.store import Folder as EvaluationFolder
from steercap.lab.studies.sweeps import Sweep
from steercap.lab.studies.sweeps.running import open_folder as open_sweep
from steercap.lab.training.training import identity_of as identity_of_trained
from steercap.steering import LayerVectors


def checkpoint(folder: Path, seed: int) -> Path:
    """A folder as training leaves it; its weights are longer than what is read of them."""
    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    save_file({"w": torch.randn(4 * ENDS)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"hidden_size": 4}')
    return folder


def test_weights_are_known_by_what_they_are(tmp_path) -> None:
    """Copies with other times are the same; other weights, sizes, names or configurations are not."""
    first = checkpoint(tmp_path / "a" / "final", 0)
    copy = Path(shutil.copytree(first, tmp_path / "copy"))
    os.utime(copy / "model.safetensors", (1, 1))
    assert weights_digest(copy) == weights_digest(first)
    assert weights_digest(checkpoint(tmp_path / "b" / "final", 1)) != weights_digest(first)
    changes = {
        "head": lambda data: data[:100] + b"?" + data[101:],
        "tail": lambda data: data[:-100] + b"?" + data[-99:],
        "size": lambda data: data[: 2 * ENDS] + data[2 * ENDS + 1 :],
    }
    for name, change in changes.items():
        other = Path(shutil.copytree(first, tmp_path / name)) / "model.safetensors"
        other.write_bytes(change(other.read_bytes()))
        assert weights_digest(other.parent) != weights_digest(first), name
    (copy / "model.safetensors").rename(copy / "other.safetensors")
    assert weights_digest(copy) != weights_digest(first)
    for name in ("config.json", "generation_config.json"):
        other = Path(shutil.copytree(first, tmp_path / name))
        (other / name).write_text(json.dumps({"eos_token_id": 5}))
        assert weights_digest(other) != weights_digest(first)


def concatenated(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a file of a format whose header is not read."""
    torch.cat([*tensors.values()]).numpy().tofile(path)


@pytest.mark.parametrize(("written", "name"), [(save_file, "model.safetensors"), (concatenated, "model.gguf")])
def test_weights_that_differ_in_the_middle_are_others(tmp_path, written, name) -> None:
    """Any tensor that was scaled is seen, wherever in the file it lies; copies are the same, whenever they were made."""
    tensors = {f"layers.{at}": torch.randn(ENDS, generator=torch.Generator().manual_seed(at)) for at in range(5)}
    first = tmp_path / "first"
    first.mkdir()
    written(tensors, first / name)
    copy = Path(shutil.copytree(first, tmp_path / "copy"))
    os.utime(copy / name, (1, 1))
    assert tensors_digest(copy, WEIGHTS) == tensors_digest(first, WEIGHTS) == tensors_digest(first / name, WEIGHTS)
    found = {tensors_digest(first, WEIGHTS)}
    for changed in tensors:
        written({key: -3 * value if key == changed else value for key, value in tensors.items()}, copy / name)
        if changed == "layers.2":
            assert weights_digest(copy) == weights_digest(first), "the ends of the file alone say nothing of it"
        found.add(tensors_digest(copy, WEIGHTS))
    assert len(found) == 1 + len(tensors)
    (copy / name).write_bytes((8).to_bytes(8, "little") + b"nothing!")
    assert tensors_digest(copy, WEIGHTS) not in found


@pytest.fixture(scope="module")
def config():
    """vLLM's configuration of a model, as an engine has it."""
    from vllm.config import ModelConfig

    return ModelConfig(model=str(smollm2()), dtype="float32", max_model_len=64)


class Templated:
    """A tokenizer, of which the template alone is asked."""

    def __init__(self, template: str | None) -> None:
        self.chat_template = template


def test_a_tokenizer_is_known_by_what_it_makes_of_a_text() -> None:
    """Other numbers for the same words are another tokenizer; a call that cut texts off does not make it one."""

    def made(*words: str) -> PreTrainedTokenizerFast:
        backend = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
        return PreTrainedTokenizerFast(tokenizer_object=backend)

    one, other = made("?", "a", "b"), made("?", "b", "a")
    assert one("a")["input_ids"] != other("a")["input_ids"]
    assert tokenizer_digest(one) == tokenizer_digest(one) == tokenizer_digest(made("?", "a", "b"))
    assert tokenizer_digest(one) != tokenizer_digest(other)
    cut = made("?", "a", "b")
    cut("a", truncation=True, max_length=1)
    assert cut.backend_tokenizer.truncation
    assert tokenizer_digest(cut) == tokenizer_digest(one)
    begins = made("?", "a", "b")
    begins.bos_token = "a"
    assert begins.bos_token_id == 1
    assert tokenizer_digest(begins) != tokenizer_digest(one), "windows and templates begin with it"
    slow = [
        SimpleNamespace(get_vocab=partial(dict, words))
        for words in ([(b"a", 1), (b"\xff", 2)], [(b"a", 2), (b"\xff", 1)])
    ]
    assert tokenizer_digest(slow[0]) != tokenizer_digest(slow[1]), "one that is not of the library `tokenizers`"
    assert tokenizer_digest(None) == ""


def test_a_model_is_known_by_weights_arguments_and_template(config, monkeypatch) -> None:
    """Each of these changes answers, and what is known of the model; on the hub the commit stands for the weights."""
    found = identity_of(str(smollm2()), config, Templated("a"))
    assert found["weights"] == weights_digest(smollm2())
    assert (found["dtype"], found["quantization"]) == ("float32", "")
    assert identity_of(str(smollm2()), config, Templated("a")) == found
    assert identity_of(str(smollm2()), config, Templated("b"))["chat_template"] != found["chat_template"]
    assert identity_of(str(smollm2()), config, Templated(None))["chat_template"] == ""
    assert found["tensors"] == tensors_digest(smollm2(), WEIGHTS)
    words = SimpleNamespace(get_vocab=lambda: {"ab": 3}), SimpleNamespace(get_vocab=lambda: {"a": 1, "b": 2})
    assert len({identity_of(str(smollm2()), config, one)["tokenizer"] for one in words}) == 2
    for name, value, shown in (
        ("quantization", "fp8", "quantization"),
        ("override_generation_config", {"top_k": 1}, "generation"),
        ("hf_overrides", {"rope_theta": 1}, "generation"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(config, name, value)
            assert identity_of(str(smollm2()), config, Templated("a"))[shown] != found[shown]
    monkeypatch.setattr(config.hf_config, "_commit_hash", "c0ffee", raising=False)
    hub = identity_of("Some/Model", config, Templated("a"))
    assert (hub["weights"], hub["tensors"]) == ("c0ffee", "")
    monkeypatch.setattr(config.hf_config, "_commit_hash", None)
    monkeypatch.setattr(config, "model", "/hub/models--Some--Model/snapshots/abc123")
    assert identity_of("Some/Model", config, Templated("a"))["weights"] == "abc123"


@pytest.mark.parametrize(("path", "commit"), [(str(smollm2()), None), ("Some/Model", "c0ffee"), ("Some/Model", None)])
def test_a_training_knows_the_weights_as_an_engine_does(config, monkeypatch, path, commit) -> None:
    """By their files, or by the commit, of which transformers says none if it does not know it."""
    monkeypatch.setattr(config.hf_config, "_commit_hash", commit, raising=False)
    monkeypatch.setattr(config, "model", path)
    known = identity_of(path, config, None)
    found = identity_of_trained(SimpleNamespace(path=path, config=config.hf_config, dtype=torch.float32))  # type: ignore[arg-type]
    assert found == {name: known[name] for name in ("name", "weights", "tensors", "dtype")}


def test_two_final_folders_of_other_weights_are_two_models(config, tmp_path) -> None:
    """A run of personas, and a sweep, begun with one is refused with the other, and the message says why."""
    one, other = (
        identity_of(str(checkpoint(tmp_path / name / "final", at)), config, Templated("a"))
        for at, name in enumerate("ab")
    )
    assert one["name"] == other["name"] == "final"
    settings = PersonaSettings.small("formal")
    open_folder(tmp_path / "run", one, settings)
    open_folder(tmp_path / "run", one, settings)
    with pytest.raises(RunDiffers, match=r"model\.weights was '\w+', is '\w+'; model\.tensors was"):
        open_folder(tmp_path / "run", other, settings)
    sweep = Sweep(vectors={"warm": LayerVectors({1: torch.ones(4)})}, layers=(1,), scales=(1,), prompts=["a"])
    open_sweep(tmp_path / "sweep", sweep.definition(one))
    with pytest.raises(RunDiffers, match=r"sweep: model\.weights was '\w+', is '\w+'; model\.tensors was"):
        open_sweep(tmp_path / "sweep", sweep.definition(other))


def test_what_a_stored_identity_lacks_is_not_compared(tmp_path) -> None:
    """Folders of before resume under the fields that they were begun with, marks of finished work included; a field
    that is stored must be the same.
    """
    known = {"name": "final", "weights": "1"}
    now = known | {"tensors": "2", "tokenizer": "3"}
    settings = PersonaSettings.small("formal")
    begun = open_folder(tmp_path / "run", known, settings)
    begun.finish("generate")
    resumed = open_folder(tmp_path / "run", now, settings)
    assert resumed.is_done("generate")
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["model"] == known
    sweep = Sweep(vectors={"warm": LayerVectors({1: torch.ones(4)})}, layers=(1,), scales=(1,), prompts=["a"])
    open_sweep(tmp_path / "sweep", sweep.definition(known))
    open_sweep(tmp_path / "sweep", sweep.definition(now))
    evaluation = Evaluation(methods=[Method(name="none")], questions=["a"])
    more = dataclasses.replace(evaluation, methods=[Method(name="kind", system="Be kind.")])
    EvaluationFolder(tmp_path / "evaluation", evaluation, known)
    EvaluationFolder(tmp_path / "evaluation", more, now)
    assert json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())["model"] == known
    assert differences({"training": {"model": known}}, {"training": {"model": now}}) == []
    assert differences({"model": now}, {"model": now | {"tokenizer": "4"}}) == ["model.tokenizer was '3', is '4'"]
    assert differences({"model": now}, {"model": known}) == [
        "model.tensors was '2', is not set",
        "model.tokenizer was '3', is not set",
    ]


@pytest.mark.parametrize(
    ("label", "model", "same"),
    [
        ("HuggingFaceTB/SmolLM2-135M", "/root/.cache/hub/models--HuggingFaceTB--SmolLM2-135M/snapshots/12fd25f7", True),
        ("gpt2-small", "openai-community/gpt2", True),
        ("google/gemma_2_2b", "/models/gemma-2-2b/", True),
        ("google/gemma-2-2b", "google/gemma-2-2b-it", False),
        ("gpt2", "HuggingFaceTB/SmolLM2-135M", False),
        ("", "anything", True),
    ],
)
def test_a_model_is_known_under_each_of_its_names(label, model, same) -> None:
    """By its name whoever has it, in its folder, and offline, where vLLM has a snapshot of huggingface_hub's."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_of_other_model("it", label, (*names_of(model), ""))
    assert not said if same else f"made for model {label!r}" in str(said[0].message)


def test_a_snapshot_is_known_by_the_name_of_its_repository(tmp_path) -> None:
    """And by its own, which files of before may have."""
    path = tmp_path / "models--HuggingFaceTB--SmolLM2-135M" / "snapshots" / "12fd25f7"
    path.mkdir(parents=True)
    assert names_of(str(path)) == ("HuggingFaceTB/SmolLM2-135M", "12fd25f7")


def test_what_is_made_for_a_base_model_may_be_meant_for_its_instruct_model() -> None:
    """SAEs often are; vectors are told apart."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_other_model("it", "gemma-2-2b", names_of("google/gemma-2-2b-it"), tuned=True)
    with pytest.warns(UserWarning, match="gemma-2-9b"):
        warn_of_other_model("it", "gemma-2-9b", names_of("google/gemma-2-2b-it"), tuned=True)
