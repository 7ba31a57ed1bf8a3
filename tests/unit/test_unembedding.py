"""The unembedding of a checkpoint gives transformers' own logits."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from steercap import errors
from steercap.core.spec import Point
from steercap.lab.demo import smollm2
from steercap.lab.mechanism.weights.unembedding import Unembedding
from steercap.testing import Reference, tiny_checkpoint
from steercap.testing.architectures import FAMILY_CONFIGS

IDS = [3, 41, 5, 99, 200, 7]


def agrees(path, *, scale: float = 1.0) -> None:
    """The logits of the last layer's rows are the model's own; those of the rows before it are not."""
    reference = Reference(path)
    last = reference.model.config.num_hidden_layers - 1
    rows = reference.rows(IDS, [Point(last, "resid_post"), Point(last, "resid_pre")])
    with torch.inference_mode():
        known = reference.model(torch.tensor([IDS]), use_cache=False).logits[0]
    found = Unembedding.load(path)
    assert (found.vocabulary, found.width) == (known.shape[-1], rows[Point(last, "resid_post")].shape[-1])
    error = (found.logits(rows[Point(last, "resid_post")]) - known).abs().max()
    assert error < 1e-4 * scale * known.abs().max()  # float32 sums in another order
    assert (found.logits(rows[Point(last, "resid_pre")]) - known).abs().max() > 100 * error
    ids, chances = found.best(rows[Point(last, "resid_post")], 3)
    expected = known.softmax(-1).topk(3, -1)
    assert torch.equal(ids, expected.indices)
    assert torch.allclose(chances, expected.values, atol=1e-4)


@pytest.mark.parametrize(
    "family",
    [
        *FAMILY_CONFIGS,
        "phi",
        "gptj",
        "gpt_neox",
        "nemotron_h",
        "cohere",
        "granite",
        "minicpm3",
        "falcon_h1",
        "gemma4_text",
    ],
)
def test_logits_of_the_last_layer_are_the_models(family) -> None:
    """Norms with and without bias and offset, tied and untied unembeddings, with a bias or under another name in the
    files, factors, soft-capping: every family.
    """
    agrees(tiny_checkpoint(family))


def test_logits_are_of_float32_whatever_the_process_has_set() -> None:
    """Under autocast too, against transformers without it; they are tensors that can be changed."""
    path = tiny_checkpoint("qwen3")
    reference, found = Reference(path), Unembedding.load(path)
    point = Point(reference.model.config.num_hidden_layers - 1, "resid_post")
    rows, tokens = reference.rows(IDS, [point])[point], torch.tensor(IDS)
    with torch.no_grad():
        known = reference.model(torch.tensor([IDS]), use_cache=False).logits[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, (directions, constants), read = found.logits(rows), found.directions(rows, tokens), found.read(rows)
    assert (logits - known).abs().max() < 1e-4 * known.abs().max()
    own = (directions * rows).sum(dim=1) + constants
    assert (own - known[torch.arange(len(IDS)), tokens]).abs().max() < 1e-4 * known.abs().max()
    assert torch.equal(read, found.read(rows))
    for one in (logits, directions, read, rows):
        one.add_(1)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2", "cohere", "granite", "minicpm3", "stablelm", "phi"])
def test_a_frozen_norm_is_the_derivative_less_that_of_its_scale(family) -> None:
    """Against autograd, which lets the scale move: d logit / d row = direction - row (direction · row) / ‖row‖²."""
    found = Unembedding.load(tiny_checkpoint(family))
    rows = torch.randn(5, found.width, generator=torch.Generator().manual_seed(0)) * 4 + 1
    tokens = torch.tensor([3, 41, 5, 99, 200])
    directions, constants = found.directions(rows, tokens)
    leaves = rows.clone().requires_grad_()
    logits = (found._head(found._norm(leaves)) * found._factor)[torch.arange(5), tokens]
    logits.sum().backward()
    error = ((directions * rows).sum(dim=1) + constants - logits.detach()).abs()
    assert error.max() < 1e-4 * logits.abs().max()
    centred = family in {"gpt2", "cohere", "stablelm", "phi"}
    length = rows - rows.mean(dim=1, keepdim=True) * centred
    moved = length * ((directions * rows).sum(dim=1) / length.square().sum(dim=1))[:, None]
    torch.testing.assert_close(directions - moved, leaves.grad, rtol=1e-3, atol=1e-5 * float(directions.abs().max()))
    for wrong in (torch.full((5,), found.vocabulary), torch.full((5,), -1)):
        with pytest.raises(errors.InvalidRequest, match="tokens below"):
            found.directions(rows, wrong)


def test_a_norm_that_cannot_be_frozen_is_refused() -> None:
    """What is no scale and gain, such as tanh, has no linear form, and none is made up."""
    found = Unembedding.load(tiny_checkpoint("qwen3"))
    odd = Unembedding(torch.nn.Tanh(), found._head, None)
    with pytest.raises(errors.UnsupportedModel, match="Tanh is not a norm that can be frozen"):
        odd.directions(torch.randn(2, found.width), torch.tensor([1, 2]))


def test_logits_of_smollm2() -> None:
    """A real model, its unembedding tied."""
    agrees(smollm2())


def test_soft_capping_is_seen() -> None:
    """The tiny Gemma 2 has logits that its cap bends, so that leaving it out would show."""
    found = Unembedding.load(tiny_checkpoint("gemma2"))
    rows = torch.randn(4, found.width)
    bare = Unembedding(found._norm, found._head, None).logits(rows)
    assert (found.logits(rows) - bare).abs().max() > 0.01
    assert found.logits(rows * 100).abs().max() <= 30


def test_few_logits_at_once_are_the_same(monkeypatch) -> None:
    """Blocks of rows change nothing."""
    found = Unembedding.load(tiny_checkpoint("qwen3"))
    rows = torch.randn(7, found.width)
    whole = found.best(rows, 2)
    monkeypatch.setattr("steercap.lab.mechanism.weights.unembedding.BLOCK_BYTES", 2 * 4 * found.vocabulary)
    parts = found.best(rows, 2)
    assert torch.equal(whole[0], parts[0])
    assert torch.allclose(whole[1], parts[1])


def copied(family, folder, change):
    """A checkpoint with its tensors changed."""
    path = folder / "changed"
    shutil.copytree(tiny_checkpoint(family), path)
    tensors = change(load_file(path / "model.safetensors"))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def test_names_without_the_prefix_are_known(tmp_path) -> None:
    """As gpt2 on the hub has them."""
    path = copied("gpt2", tmp_path, lambda tensors: {k.removeprefix("transformer."): v for k, v in tensors.items()})
    rows = torch.randn(2, 128)
    assert torch.equal(Unembedding.load(path).logits(rows), Unembedding.load(tiny_checkpoint("gpt2")).logits(rows))


def test_shards_are_found_by_the_index(tmp_path) -> None:
    """Only those that are needed are opened."""
    path = copied("llama", tmp_path, lambda tensors: tensors)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    held = {name: f"{number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(held.values()):
        save_file({name: tensors[name] for name in held if held[name] == file}, path / file, {"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": held}))
    rows = torch.randn(2, 128)
    assert torch.equal(Unembedding.load(path).logits(rows), Unembedding.load(tiny_checkpoint("llama")).logits(rows))
    (path / held["lm_head.weight"]).unlink()
    with pytest.raises(errors.ModelNotLoaded, match="the index names"):
        Unembedding.load(path)


def test_what_cannot_be_read_is_an_error(tmp_path) -> None:
    """A missing tensor, quantised weights, no weights, no checkpoint, an unknown architecture, OPT's projection."""
    lacking = copied(
        "llama", tmp_path / "a", lambda tensors: {k: v for k, v in tensors.items() if k != "lm_head.weight"}
    )
    with pytest.raises(errors.InvalidFile, match=r"no tensor 'lm_head\.weight'"):
        Unembedding.load(lacking)
    packed = {"lm_head.weight": torch.zeros(512, 16, dtype=torch.int32)}
    with pytest.raises(errors.UnsupportedModel, match="not quantised"):
        Unembedding.load(copied("llama", tmp_path / "b", lambda tensors: tensors | packed))
    (lacking / "model.safetensors").unlink()
    with pytest.raises(errors.ModelNotLoaded, match="safetensors"):
        Unembedding.load(lacking)
    with pytest.raises(errors.ModelNotLoaded, match="no configuration"):
        Unembedding.load(tmp_path / "nothing")
    for family, change, says in (
        ("llama", {"architectures": ["Other"]}, "Other"),
        ("opt", {"word_embed_proj_dim": 64}, "norm and an unembedding alone"),
    ):
        path = copied(family, tmp_path / family, lambda tensors: tensors)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(errors.UnsupportedModel, match=says):
            Unembedding.load(path)
    with pytest.raises(errors.InvalidRequest, match="width 5"):
        Unembedding.load(tiny_checkpoint("llama")).logits(torch.zeros(2, 5))


def test_a_cap_that_the_model_does_not_have_is_left_out() -> None:
    """A configuration keeps any key of its file; transformers' Llama, and vLLM's, reads none of this name."""
    agrees(tiny_checkpoint("llama", final_logit_softcapping=5.0))
