"""SAEs: what their files say, what they make of rows, and how workers of either kind hold and use them."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import time
import zipfile
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from cli_calls import call
from handles import a_handle
from keepers import PLAN, POINT, TOKENS, Keeper
from safetensors.numpy import save_file
from support.sae_features import check_features
from workers import KINDS, batch, device_of, kept_of, some_runtime, tap

from steercap import SAE, CaptureHandle, CaptureSpec, Point
from steercap.captures.checks import Expected
from steercap.captures.lifecycle import Source
from steercap.captures.rows import Captures, Found
from steercap.core.messages import (
    Attach,
    Call,
    CloseSAE,
    Collect,
    GetStats,
    OpenSAE,
    Owner,
    SAEOpened,
    Wanted,
    decode_answer,
    decode_call,
    encode,
)
from steercap.core.plan import CapturePlan, Plan
from steercap.core.schema import Coding, PointSchema
from steercap.core.tokens import Range
from steercap.engine.sae_readers import Readers, compile_readers
from steercap.engine.saes import Dictionaries
from steercap.engine.workers import Workers
from steercap.errors import InvalidEdit, InvalidFile, InvalidRequest, InvalidSpec, InvalidVector, PointSplit
from steercap.kernels.codecs.coded import CodedRows
from steercap.kernels.codecs.topk import HEAD
from steercap.lab.mechanism.views import logit_attribution
from steercap.lab.mechanism.weights.unembedding import Unembedding
from steercap.saes import formats
from steercap.saes.encoder import Encoder, Features, image_bytes
from steercap.saes.layouts import FoundSAE
from steercap.saes.tensors import Tensors
from steercap.testing import tiny_checkpoint
from steercap.testing.saes import OWN, RandomSAE
from steercap.worker.memory import HEADER_BYTES, SharedSegment

WIDTH = 48
ROWS = torch.randn(90, WIDTH, generator=torch.Generator().manual_seed(1)) * 3 + 0.5


def some(architecture: str = "standard", d_sae: int = 400, **said) -> RandomSAE:
    return RandomSAE(architecture, WIDTH, d_sae, k=12, configuration=tuple(said.items()))


# What files say


@pytest.mark.parametrize("normalisation", ["none", "layer_norm", "constant_norm_rescale"])
@pytest.mark.parametrize("architecture", list(OWN))
def test_features_are_those_of_the_forward_in_numpy(architecture, normalisation, tmp_path) -> None:
    """Every architecture under every normalisation: dense, and the most active ones."""
    if "transcoder" in architecture and normalisation != "none":
        with pytest.raises(InvalidFile, match="does not do here"):
            SAE.load(some(architecture, normalize_activations=normalisation).write(tmp_path))
        return
    own = some(architecture, normalize_activations=normalisation)
    sae = SAE.load(own.write(tmp_path))
    known, slack = own.encode(ROWS), own.slack(ROWS)
    found = sae.encode(ROWS).numpy()
    assert ((np.abs(found - known) <= slack) | ((found == 0) != (known == 0))).all()
    assert ((found > 0) != (known > 0)).mean() < 1e-3
    assert 3 < (known > 0).sum(axis=1).mean() < 300
    check_features(sae.strongest(ROWS, 400), known, slack)
    check_features(sae.strongest(ROWS, 5), known, slack)


@pytest.mark.parametrize("architecture", list(OWN))
def test_what_sae_lens_makes_of_its_own_files(architecture, tmp_path, record_property) -> None:
    """Where SAELens is installed: its own encode and forward, of files that it writes itself."""
    sae_lens = pytest.importorskip("sae_lens", reason="SAELens is not among what is installed")
    theirs = sae_lens.SAE.load_from_disk(some(architecture).write(tmp_path / "ours"))
    theirs.save_model(tmp_path / "theirs")
    sae = SAE.load(tmp_path / "theirs")
    with torch.no_grad():
        known, whole = theirs.encode(ROWS), theirs(ROWS)
    found = sae.encode(ROWS)
    record_property("greatest", float((found - known).abs().max()))
    torch.testing.assert_close(found, known, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(sae.decode(found, ROWS), whole, rtol=1e-5, atol=1e-4)


def test_norms_of_the_decoder_are_multiplied_in(tmp_path) -> None:
    """Of a topk SAE that chooses by them: the same features, with activations and decoder rows of another scale."""
    own = some("topk", rescale_acts_by_decoder_norm=True)
    sae, tensors = SAE.load(own.write(tmp_path)), own.tensors
    norms = np.linalg.norm(tensors["W_dec"], axis=1)
    products = ((ROWS.numpy() - tensors["b_dec"]) @ tensors["W_enc"] + tensors["b_enc"]) * norms
    least = np.sort(products, axis=1)[:, -12, None]
    known = np.where(products >= least, np.maximum(products, 0), 0)
    np.testing.assert_allclose(sae.encode(ROWS).numpy(), known, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(sae.decoder.norm(dim=1).numpy(), 1, rtol=1e-5)
    back = known / norms @ tensors["W_dec"] + tensors["b_dec"]
    np.testing.assert_allclose(sae.decode(sae.encode(ROWS)).numpy(), back, rtol=1e-3, atol=1e-3)


def test_norms_of_the_decoder_open_no_other_gates(tmp_path) -> None:
    """Of a gated SAE: the same features and reconstructions as without, activations multiplied by the norms."""
    plain = SAE.load(some("gated").write(tmp_path / "plain"))
    sae = SAE.load(some("gated", rescale_acts_by_decoder_norm=True).write(tmp_path / "scaled"))
    found, known = sae.encode(ROWS), plain.encode(ROWS)
    assert 0 < (known > 0).float().mean() < 1
    torch.testing.assert_close(found, known * plain.decoder.norm(dim=1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sae.decode(found), plain.decode(known), rtol=1e-4, atol=1e-4)


def test_older_configurations_say_the_same(tmp_path) -> None:
    """Flat, with other names, without what was not written then."""
    own = some("topk")
    folder = own.write(tmp_path)
    old = {"d_in": WIDTH, "d_sae": 400, "hook_point": "blocks.1.hook_resid_post", "activation_fn_str": "topk"}
    old |= {"activation_fn_kwargs": {"k": 12}, "normalize_activations": False, "hook_point_head_index": None}
    new = SAE.load(folder)
    (folder / "cfg.json").write_text(json.dumps(old))
    sae = SAE.load(folder)
    assert (sae.architecture, sae.encoder.k, sae.input) == ("topk", 12, Point(1, "resid_post"))
    assert torch.equal(sae.encode(ROWS), new.encode(ROWS))


def test_a_factor_that_a_file_asks_for_must_be_given(tmp_path) -> None:
    """`expected_average_only_in` is one factor for all rows, and files need not hold it."""
    folder = some(normalize_activations="expected_average_only_in").write(tmp_path)
    with pytest.raises(InvalidFile, match="give activation_scale="):
        SAE.load(folder)
    scaled, plain = SAE.load(folder, activation_scale=0.25), SAE.load(some().write(tmp_path / "plain"))
    torch.testing.assert_close(scaled.encode(ROWS), plain.encode(ROWS * 0.25), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        scaled.decode(scaled.encode(ROWS)) * 0.25, plain.decode(plain.encode(ROWS * 0.25)), rtol=1e-4, atol=1e-4
    )
    with pytest.raises(InvalidFile, match="takes none"):
        SAE.load(tmp_path / "plain", activation_scale=0.25)


def test_rows_of_models_that_were_centred_are_centred(tmp_path) -> None:
    """TransformerLens takes the mean off what layer norms read; vLLM's rows have it."""
    kwargs = {
        "metadata": {
            "hook_name": "blocks.1.hook_resid_pre",
            "model_from_pretrained_kwargs": {"center_writing_weights": True},
        }
    }
    folder = some(**kwargs).write(tmp_path)
    centred, plain = SAE.load(folder), SAE.load(folder, centred=False)
    assert torch.equal(centred.encode(ROWS), plain.encode(ROWS - ROWS.mean(dim=1, keepdim=True)))
    assert not torch.equal(centred.encode(ROWS), plain.encode(ROWS))
    # The reconstruction is of the rows as they are: what was taken off is added again.
    means = ROWS.mean(dim=1, keepdim=True)
    torch.testing.assert_close(
        centred.decode(centred.encode(ROWS), ROWS), plain.decode(plain.encode(ROWS - means)) + means
    )
    with pytest.raises(InvalidSpec, match="give rows="):
        centred.decode(centred.encode(ROWS))


@pytest.mark.parametrize("kwargs", [{}, {"model_from_pretrained_kwargs": {}}, {"model_from_pretrained_kwargs": None}])
@pytest.mark.parametrize("flat", [True, False])
def test_whether_rows_were_centred_is_not_guessed(flat, kwargs, tmp_path) -> None:
    """TransformerLens centres GPT-2's by default, and the first files do not say what was done."""
    said = {"hook_name": "blocks.1.hook_resid_pre", "model_name": "gpt2-small", **kwargs}
    folder = some(**({"metadata": {}, **said} if flat else {"metadata": said})).write(tmp_path)
    with pytest.raises(InvalidFile, match=r"rows of gpt2-small by default.*give centred=True or centred=False"):
        SAE.load(folder)
    centred, plain = SAE.load(folder, centred=True), SAE.load(folder, centred=False)
    assert torch.equal(centred.encode(ROWS), plain.encode(ROWS - ROWS.mean(dim=1, keepdim=True)))


@pytest.mark.parametrize(
    "said",
    [
        {"metadata": {"hook_name": "blocks.1.attn.hook_z", "model_name": "gpt2-small"}},
        {"metadata": {"hook_name": "blocks.1.hook_resid_pre", "model_name": "gemma-2b"}},
        {
            "metadata": {
                "hook_name": "blocks.1.hook_resid_pre",
                "model_name": "gpt2-small",
                "model_from_pretrained_kwargs": {"center_writing_weights": False},
            }
        },
        *(
            {
                "metadata": {
                    "hook_name": f"blocks.1.{hook}",
                    "model_name": model,
                    "model_from_pretrained_kwargs": {"center_writing_weights": True},
                }
            }
            for hook, model in (("mlp.hook_post", "gpt2-small"), ("hook_resid_pre", "google/gemma-2-2b"))
        ),
    ],
    ids=["not of the stream", "without layer norm", "said", "centred elsewhere", "RMS norms are not centred"],
)
def test_rows_that_nobody_centred_are_read_as_they_are(said, tmp_path) -> None:
    assert not SAE.load(some(**said).write(tmp_path)).encoder.centred


def test_what_is_neither_true_nor_false_is_refused(tmp_path) -> None:
    """A text is true to Python, whatever it says."""
    with pytest.raises(InvalidSpec, match="centred='no'; give True, False"):
        SAE.load(some().write(tmp_path / "plain"), centred="no")
    with pytest.raises(InvalidFile, match="rescale_acts_by_decoder_norm='true'"):
        SAE.load(some("topk", rescale_acts_by_decoder_norm="true").write(tmp_path / "text"))
    with pytest.raises(InvalidFile, match=r"architecture=\['topk'\]"):
        SAE.load(RandomSAE("topk", WIDTH, 400, configuration=(("architecture", ["topk"]),)).write(tmp_path / "list"))


def test_what_sae_lens_knows_of_a_repository_is_known(tmp_path) -> None:
    """Of published SAEs whose files do not say how rows were processed."""
    said = {"hook_point": "blocks.8.hook_resid_pre", "model_name": "gpt2-small"}
    (tmp_path / "cfg.json").write_text(json.dumps(said))
    empty = Tensors(tmp_path, {}, torch.zeros)
    found = FoundSAE(tmp_path, tmp_path / "cfg.json", "jbloom/GPT2-Small-SAEs-Reformatted", empty)
    assert formats.sae_lens(found).centred
    said = {"hook_name": "blocks.8.hook_resid_pre", "model_name": "mistral-7b", "normalize_activations": "none"}
    (tmp_path / "cfg.json").write_text(json.dumps(said))
    rescaled = formats.sae_lens(found._replace(source="JoshEngels/Mistral-7B-Residual-Stream-SAEs"))
    assert rescaled.normalisation == "constant_norm_rescale"


HOOKS = {
    "blocks.5.hook_resid_post": Point(5, "resid_post"),
    "blocks.0.hook_resid_pre": Point(0, "resid_pre"),
    "blocks.11.attn.hook_z": Point(11, "z"),
    "blocks.3.hook_mlp_out": Point(3, "mlp_out"),
    "blocks.3.mlp.hook_post": Point(3, "neurons"),
    "model.layers.7.output": Point(7, "resid_post"),
}


@pytest.mark.parametrize(("hook", "point"), list(HOOKS.items()))
def test_hooks_are_points(hook, point, tmp_path) -> None:
    """By TransformerLens's names and by transformers' modules."""
    assert SAE.load(some(metadata={"hook_name": hook}).write(tmp_path)).input == point


@pytest.mark.parametrize(
    "hook", ["blocks.5.ln2.hook_normalized", "blocks.5.attn.hook_q", "hook_embed", "blocks.x.hook_z", None, 5]
)
def test_a_hook_that_is_no_point_is_not_guessed(hook, tmp_path) -> None:
    """The error says how to name one."""
    folder = some(metadata={"hook_name": hook}).write(tmp_path)
    with pytest.raises(InvalidFile, match=r"SAE.load\(..., input=\(layer, site\)\)"):
        SAE.load(folder)
    assert SAE.load(folder, input=(4, "resid_post")).output == Point(4, "resid_post")
    for wrong in ((-1, "resid_post"), "resid_post", (1, 2)):
        with pytest.raises(InvalidSpec, match="give a layer from 0 up and a site"):
            SAE.load(folder, input=wrong)
    with pytest.raises(InvalidSpec, match="is not a transcoder: it reads"):
        SAE.load(folder, input=(4, "resid_post"), output=(4, "mlp_out"))


def test_gemma_scope_has_its_point_in_the_path(tmp_path) -> None:
    """`params.npz` in the layout of the first, `config.json` beside `params.safetensors` in that of the second."""
    own = some("jumprelu", apply_b_dec_to_input=False)
    place = tmp_path / "models--google--gemma-scope-2b-pt-res" / "layer_20" / "width_16k" / "average_l0_71"
    first = SAE.load(own.write_npz(place))
    assert (first.input, first.architecture) == (Point(20, "resid_post"), "jumprelu")
    assert first.model == "google/gemma-2-2b"
    known = own.encode(ROWS)
    check_features(first.strongest(ROWS, 100), known, own.slack(ROWS))
    second = tmp_path / "second"
    second.mkdir()
    save_file({name.lower(): tensor for name, tensor in own.tensors.items()}, second / "params.safetensors")
    said = {"architecture": "jump_relu", "hf_hook_point_in": "model.layers.9.output", "model_name": "gemma-3"}
    (second / "config.json").write_text(json.dumps(said))
    assert torch.equal(SAE.load(second).encode(ROWS), first.encode(ROWS))
    assert SAE.load(second).input == Point(9, "resid_post")
    transcoder = tmp_path / "gemma-scope-2b-pt-transcoders" / "layer_3" / "width_16k" / "average_l0_9"
    with pytest.raises(InvalidFile, match="input="):
        SAE.load(own.write_npz(transcoder))
    assert SAE.load(transcoder, input=(3, "mlp_in")).output == Point(3, "mlp_out")
    with pytest.raises(InvalidFile, match="input="):
        SAE.load(own.write_npz(tmp_path / "nowhere"))


def test_a_folder_of_an_sae_is_inspected(tmp_path) -> None:
    """In each layout it is an SAE with its point and sizes, and neither a model nor a folder of unknown files."""
    own = some("jumprelu", apply_b_dec_to_input=False)
    folders = [own.write(tmp_path / "lens"), tmp_path / "second"]
    folders += [own.write_npz(tmp_path / "gemma-scope-2b-pt-res" / "layer_20" / "width_16k" / "average_l0_71")]
    folders[1].mkdir()
    save_file({name.lower(): tensor for name, tensor in own.tensors.items()}, folders[1] / "params.safetensors")
    said = {"architecture": "jump_relu", "hf_hook_point_in": "model.layers.9.output", "model_name": "gemma-3"}
    (folders[1] / "config.json").write_text(json.dumps(said))
    for folder in folders:
        known = SAE.load(folder)
        found = json.loads(call("inspect", folder, "--json").stdout)
        assert (found["kind"], found["architecture"], found["features"]) == ("SAE", "jumprelu", own.d_sae)
        assert (found["reads"], found["width"], found["model"]) == (str(known.input), own.d_in, known.model)
        assert str(known.input) in call("inspect", folder).stdout


def test_the_hub_is_read_out_of_its_cache(tmp_path, monkeypatch) -> None:
    """As huggingface_hub lays it out, offline; what is not there is an error, and nothing is fetched."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository, commit = tmp_path / "models--some--saes", "a" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    some().write(repository / "snapshots" / commit / "layer_1")
    assert SAE.load("some/saes", "layer_1").d_sae == 400
    for source, folder in (("some/saes", "layer_2"), ("other/saes", "layer_1")):
        with pytest.raises(InvalidFile, match="as far as the hub, or its cache here, can be read"):
            SAE.load(source, folder)
    for source in ("./nowhere", "nowhere", str(tmp_path / "nowhere"), "a/b/c"):
        with pytest.raises(InvalidFile, match=r"is not a folder.*; give one, or a name on the hub"):
            SAE.load(source)


# Files that are wrong

REFUSED = {
    "batchtopk": ({"architecture": "batchtopk"}, "save_inference_model"),
    "unknown architecture": ({"architecture": "crosscoder"}, "steercap knows standard, topk"),
    "another response": ({"activation_fn": "tanh-relu"}, "activation_fn='tanh-relu'"),
    "whitened": ({"normalize_activations": "covariance_whitening"}, "does not do here"),
    "a head": ({"metadata": {"hook_name": "blocks.1.attn.hook_z", "hook_head_index": 3}}, "head 3 alone"),
    "width": ({"d_in": 47}, "says d_in=47, and its weights have 48"),
    "features": ({"d_sae": 401}, "says d_sae=401"),
    "topk without k": ({"architecture": "topk", "k": None}, "with k=None"),
    "topk of too many": ({"architecture": "topk", "k": 500}, "k=500 of 400"),
    "lacks a threshold": ({"architecture": "jumprelu"}, "lacks threshold"),
    "shifted": ({"apply_b_dec_to_input": "yes"}, "apply_b_dec_to_input='yes'"),
}


@pytest.mark.parametrize("which", list(REFUSED))
def test_what_a_configuration_asks_for_and_cannot_have(which, tmp_path) -> None:
    """Refused by name, and not guessed at."""
    said, says = REFUSED[which]
    with pytest.raises(InvalidFile, match=says):
        SAE.load(RandomSAE("standard", WIDTH, 400, configuration=tuple(said.items())).write(tmp_path))


def test_tensors_are_checked(tmp_path) -> None:
    """One too many, of another shape, of integers, NaN; a file that is cut off, or missing, or no JSON."""
    own, folder = some(), some().write(tmp_path)
    path = folder / "sae_weights.safetensors"
    whole = path.read_bytes()
    save_file({**own.tensors, "scaling_factor": np.ones(400, np.float32)}, path)  # as older files have it
    check_features(SAE.load(folder).strongest(ROWS, 400), own.encode(ROWS), own.slack(ROWS))
    for change, says in (
        ({"scaling_factor": np.full(400, 2, np.float32)}, "holds a scaling_factor other than 1"),
        ({"b_enc": np.zeros(399, np.float32)}, "b_enc is"),
        ({"W_dec": np.zeros((400, 40), np.float32)}, "only transcoders do"),
        ({"W_enc": np.zeros(48, np.float32)}, "they are matrices"),
        ({"b_dec": np.zeros(48, np.int32)}, "must be floating-point"),
        ({"b_dec": np.full(48, np.nan, np.float32)}, "holds NaN"),
        ({"W_enc": np.full((48, 400), 1e300)}, "beyond float32"),
    ):
        save_file({**own.tensors, **change}, path)
        with pytest.raises(InvalidFile, match=says):
            SAE.load(folder)
    path.write_bytes(whole[:5000])
    with pytest.raises(InvalidFile, match="cannot be read as a safetensors file"):
        SAE.load(folder)
    path.write_bytes(whole)
    unreadable = "cannot be read as a JSON object"
    for text, says in (("[]", unreadable), ("{", unreadable), ("x" * 2_000_000, "too many for a configuration")):
        (folder / "cfg.json").write_text(text)
        with pytest.raises(InvalidFile, match=says):
            SAE.load(folder)
    (folder / "cfg.json").unlink()
    with pytest.raises(InvalidFile, match=r"no cfg.json beside it"):
        SAE.load(folder)


def test_arrays_are_never_unpickled(tmp_path) -> None:
    """Objects in an `.npz`, an array that is shorter than it says, and what is no archive."""
    folder, own = tmp_path / "gemma-scope-2b-pt-res" / "layer_1" / "x", some("jumprelu")
    own.write_npz(folder)
    path = folder / "params.npz"
    arrays = {name.lower(): tensor for name, tensor in own.tensors.items()}
    np.savez(path, **(arrays | {"b_dec": np.array([{"a": 1}], dtype=object)}))
    with pytest.raises(InvalidFile, match="must be floating-point numbers"):
        SAE.load(folder)
    np.savez(path, **arrays)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["b_dec.npy"] = members["b_dec.npy"][:-4]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(InvalidFile, match="declares 192 bytes and has 188"):
        SAE.load(folder)
    path.write_bytes(b"no archive")
    with pytest.raises(InvalidFile, match=r"cannot be read as an \.npz"):
        SAE.load(folder)


# What is asked


def test_a_spec_with_an_sae_asks_for_nothing_else(tmp_path) -> None:
    """Points, reductions, projections, codecs: each contradicts it."""
    sae = SAE.load(some().write(tmp_path))
    for given in (
        {"layers": 1},
        {"sites": "mlp_out"},
        {"reduce": "mean"},
        {"codec": "full8"},
        {"codec_seed": 1},
        {"codec_k": 3},
        {"sae": []},
    ):
        with pytest.raises(InvalidSpec):
            CaptureSpec(**{"sae": sae, **given})
    with pytest.raises(InvalidSpec, match="codec_k=3 cannot hold; give sae_k="):
        CaptureSpec(sae=sae, codec_k=3)
    with pytest.raises(InvalidSpec, match="sae_k=3 is for sae=, which is not given"):
        CaptureSpec(codec="rp8", sae_k=3)
    assert CaptureSpec(sae=[sae], sae_k=3).saes == CaptureSpec(sae=sae).saes


def test_a_point_that_is_split_is_refused(tmp_path) -> None:
    """No rank has a whole row there."""
    sae, point = SAE.load(some().write(tmp_path), input=(0, "z")), Point(0, "z")
    with pytest.raises(PointSplit, match="split over 2 ranks"):
        compile_readers(CaptureSpec(sae=sae), [point], {point: 0}, {point: PointSchema((4, 12), "float32", shards=2)})


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("architecture", list(OWN))
def test_a_row_that_is_not_finite_has_no_features(architecture, value, tmp_path) -> None:
    """An infinite element may make zeros of all activations: none of them is one."""
    sae = SAE.load(some(architecture).write(tmp_path))
    rows = ROWS[:3].clone()
    rows[1] = 0
    rows[1, 5] = value
    dense = sae.encode(rows)
    assert dense[1].isnan().all()
    assert torch.equal(dense[[0, 2]], sae.encode(ROWS[:3])[[0, 2]])
    assert sae.strongest(rows, 5).active.tolist()[1] == -1


def test_features_stay_what_they_are_through_bytes() -> None:
    """Fewer active ones than there is room for, all of them, none, and a row that is not finite."""
    acts = torch.tensor([[0.0, 3, 0, 1], [0, 0, 0, 0], [4, 3, 2, 1], [0, torch.nan, 1, 2]])
    from steercap.kernels.codecs.topk import STRONGEST, strongest

    schema, coding = PointSchema((4,), "float32"), Coding("features", 3)
    found = Features.of(CodedRows(coding, schema, STRONGEST.parts(strongest(acts, 3), schema, coding)))
    assert found.ids.tolist() == [[1, 3, -1], [-1, -1, -1], [0, 1, 2], [-1, -1, -1]]
    assert found.active.tolist() == [2, 0, 4, -1]
    assert found.rest[:3].tolist() == [0, 0, 1]
    assert found.complete.tolist() == [True, True, False, False]
    assert torch.equal(found.dense()[:2], acts[:2])
    assert found.dense()[2].tolist() == [4, 3, 2, 0]
    assert found.dense()[3].isnan().all()
    assert found.of_feature(1)[:3].tolist() == [3, 0, 3]
    assert found.of_feature(np.int64(1))[:3].tolist() == found.of_feature(torch.tensor(1))[:3].tolist() == [3, 0, 3]
    assert found[1:3].ids.shape == (2, 3)
    for one in (2, -2, np.int64(2), torch.tensor(2)):
        assert (found[one].ids.tolist(), len(found[one])) == ([[0, 1, 2]], 1)
        assert "1 rows" in repr(found[one])
    assert len(list(found)) == 4
    assert STRONGEST.row_bytes(schema, coding) == HEAD + 24
    for wrong in (4, -1, True, 1.0):
        with pytest.raises(InvalidSpec, match="features 0 to 3"):
            found.of_feature(wrong)


# What they write


NORMALISED = ("none", "constant_norm_rescale", "layer_norm")


def in_numpy(own: RandomSAE) -> tuple[np.ndarray, np.ndarray]:
    """Encoder and decoder weights in float64."""
    return own.tensors["W_enc"].astype(np.float64), own.tensors["W_dec"].astype(np.float64)


@pytest.mark.parametrize("normalisation", ["none", "constant_norm_rescale"])
def test_a_feature_is_added_as_its_activation_is_decoded(normalisation, tmp_path) -> None:
    """SAELens multiplies the reconstruction by the row's norm over √d_in; the edit is applied by its formula, in NumPy."""
    own = some(normalize_activations=normalisation)
    sae, rows = SAE.load(own.write(tmp_path)), ROWS.double().numpy()
    written = 5.0 * in_numpy(own)[1][7]
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    wanted = written * (norms / np.sqrt(WIDTH) if normalisation != "none" else np.ones_like(norms))
    edit = sae.add_feature(7, np.float32(5.0))
    vector = edit.vector.double().numpy()
    sizes = edit.scale * (norms / np.linalg.norm(vector) if edit.relative else np.ones_like(norms))
    np.testing.assert_allclose(sizes * vector, wanted, rtol=1e-5, atol=1e-6)
    acts = sae.encode(ROWS)
    more = acts.clone()
    more[:, 7] += 5
    np.testing.assert_allclose((sae.decode(more, ROWS) - sae.decode(acts, ROWS)).numpy(), wanted, rtol=1e-3, atol=1e-3)
    assert (sae.add_feature(7, 0.5, relative=True).scale, sae.add_feature(7, 0.5, relative=True).relative) == (
        0.5,
        True,
    )


def test_an_amount_that_no_edit_can_follow_is_refused(tmp_path) -> None:
    """Where the scale of what a feature writes is not the norm of the row; a fraction of that norm always works."""
    spread = SAE.load(some(normalize_activations="layer_norm").write(tmp_path / "ln"))
    centred = SAE.load(some(normalize_activations="constant_norm_rescale").write(tmp_path / "c"), centred=True)
    for sae in (spread, centred):
        with pytest.raises(InvalidSpec, match=r"scales what a feature writes by a spread of each row.*relative=True"):
            sae.add_feature(7, 5.0)
        assert sae.add_feature(7, 0.5, relative=True).relative
    plain = SAE.load(some(normalize_activations="constant_norm_rescale").write(tmp_path / "p"))
    for wrong in ("5", True, float("nan")):
        with pytest.raises(InvalidEdit, match="Add: scale="):
            plain.add_feature(7, wrong)
    plain.decoder[9] = 0
    with pytest.raises(InvalidVector, match="zero"):
        plain.add_feature(9, 5.0)


@pytest.mark.parametrize("site", ["resid_pre", "resid_mid", "resid_post"])
def test_no_feature_is_attributed_where_later_layers_scale_the_stream(site, tmp_path) -> None:
    """Gemma 4's do: a feature counts as it was written at the last layer alone, by the final norm's frozen scale."""
    checkpoint = tiny_checkpoint("gemma4_text")
    assert Unembedding.load(checkpoint).blocks is None
    norm, head = torch.nn.RMSNorm(2, eps=1e-6), torch.nn.Linear(2, 260, bias=False)
    how = {"token": 65, "top": 5, "unembedding": Unembedding(norm, head, None, blocks=None)}
    path, handle = RandomSAE("standard", 2, 5).write(tmp_path), a_handle((0, 3), model=str(checkpoint))
    with pytest.raises(InvalidRequest, match=r"layers of this model do more .* give an SAE of"):
        logit_attribution(handle, checkpoint, SAE.load(path, input=(0, site)), **how)
    if site == "resid_post":
        last = SAE.load(path, input=(3, site))
        rows = handle.captures[3, site]
        wrote = last.encode(rows)[:, :, None] * last.decoder
        scales = rows.square().mean(1).add(1e-6).rsqrt()
        known = (wrote @ head.weight[65].detach()) * scales[:, None]
        table = logit_attribution(handle, checkpoint, last, **how)
        known = known.gather(1, table.ids.clamp(min=0).long()).where(table.ids >= 0, 0)
        torch.testing.assert_close(table.contributions, known)
        with pytest.warns(UserWarning, match="sae= says that it was made for model 'mistralai/Mistral-7B'"):
            logit_attribution(handle, checkpoint, dataclasses.replace(last, model="mistralai/Mistral-7B"), **how)


def attributed() -> tuple[CaptureHandle, dict[str, Any]]:
    """A handle with rows whose mean is not 0 at layers 0 and 3, and arguments of `logit_attribution` for an RMS norm."""
    handle = a_handle((0, 3), prompt=tuple(range(20)), output=(), model=str(tiny_checkpoint("qwen3")))
    rows = {point: ROWS[20 * place :][:20] for place, point in enumerate(handle.points)}
    handle.lifecycle.found = Found(Captures(rows, 4), handle.receipt)
    unembedding = Unembedding(torch.nn.RMSNorm(WIDTH), torch.nn.Linear(WIDTH, 260, bias=False), None)
    return handle, {"model": handle.model, "token": 65, "top": 5, "unembedding": unembedding}


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("normalisation", NORMALISED)
def test_features_and_bias_are_the_reconstruction(normalisation, centred, skip, tmp_path) -> None:
    """All of it: some SAEs add the row's mean, some transcoders a linear map of the row."""
    path = some(normalize_activations=normalisation).write(tmp_path)
    sae, (handle, how) = SAE.load(path, input=(0, "resid_post"), centred=centred), attributed()
    if skip and normalisation == "none":
        sae = dataclasses.replace(sae, architecture="skip_transcoder", skip=torch.randn(WIDTH, WIDTH))
    table, rows = logit_attribution(handle, sae=sae, **how), handle.captures[0]
    read, _ = how["unembedding"].directions(handle.captures[3], table.token_ids)
    known = (read * sae.decode(sae.encode(rows), rows)).sum(1)
    found = table.contributions.sum(1) + table.others + table.bias
    torch.testing.assert_close(found, known, rtol=1e-4, atol=1e-4)  # sums of 400 products in another order
    torch.testing.assert_close(found + table.rest + table.constants, table.logits, rtol=1e-4, atol=1e-4)


def test_features_of_another_sae_are_not_attributed(tmp_path) -> None:
    """SAEs of one release are equally wide at all layers: point and encoder tell them apart, where they are known."""
    path, (handle, how) = some().write(tmp_path / "a"), attributed()
    sae, later = (SAE.load(path, input=(layer, "resid_post")) for layer in (0, 1))
    features = sae.strongest(handle.captures[0], 400)
    table = logit_attribution(handle, sae=sae, features=features, **how)
    torch.testing.assert_close(table.contributions, logit_attribution(handle, sae=sae, **how).contributions)
    with pytest.raises(InvalidRequest, match=r"of resid_post\[0\] are not of SAE.* read at resid_post\[1\]"):
        logit_attribution(handle, sae=later, features=features, **how)
    other = SAE.load(dataclasses.replace(some(), seed=1).write(tmp_path / "b"), input=(0, "resid_post"))
    known = dataclasses.replace(features, digest=sae.encoder.digest())[:]
    logit_attribution(handle, sae=sae, features=known, **how)
    with pytest.raises(InvalidRequest, match="are not of SAE"):
        logit_attribution(handle, sae=other, features=known, **how)


def test_a_handle_knows_the_sae_of_its_features(tmp_path) -> None:
    """By point, and by the digest of the encoder in the request's plan; a handle without an engine by point alone."""
    sae = SAE.load(some().write(tmp_path), input=POINT)
    parts = sae.strongest(ROWS[:2], 5)
    schema, coding = PointSchema((400,), "float32"), Coding("features", 5)
    stored = {"indices": parts.ids, "q": parts.values, "active": parts.active, "rest": parts.rest}
    handle = a_handle((0,), prompt=(5, 6), output=())
    handle.lifecycle.found = Found(Captures({POINT: CodedRows(coding, schema, stored)}, 4), handle.receipt)
    assert (handle.features[0].point, handle.features[0].digest) == (POINT, b"")
    capture = msgspec.structs.replace(PLAN.capture, saes=(sae.encoder.digest(),))
    keeper: Any = Keeper()
    expected = Expected("r", msgspec.structs.replace(PLAN, capture=capture), (POINT,), TOKENS)
    handle.lifecycle.source = Source(keeper, Owner("r", 0), SimpleNamespace(), expected)
    assert (handle.features[0].point, handle.features[0].digest) == (POINT, sae.encoder.digest())


@pytest.mark.parametrize("normalisation", NORMALISED)
def test_what_is_decoded_is_checked(normalisation, tmp_path) -> None:
    """A scale is never that of another token: as many rows as activations, each of all features."""
    sae = SAE.load(some(normalize_activations=normalisation).write(tmp_path))
    acts, features = sae.encode(ROWS), sae.strongest(ROWS, 400)
    torch.testing.assert_close(sae.decode(features.dense(), ROWS), sae.decode(acts, ROWS))
    for wrong in (acts[0], acts[:, :3], acts[None], acts.long(), features, acts.numpy()):
        with pytest.raises(InvalidSpec, match=r"activations=.*give floats \[rows, 400\]"):
            sae.decode(wrong, ROWS)
    for few in (ROWS[:1], ROWS[:5]):
        if normalisation != "none":
            with pytest.raises(InvalidSpec, match=f"90 activations and {len(few)} rows"):
                sae.decode(acts, few)
    for wrong in (ROWS[0], ROWS[:, :3], ROWS.long(), ROWS.view(2, 45, WIDTH), [1.0]):
        with pytest.raises(
            InvalidSpec, match=r"give floats \[rows, 48\] as a tensor of torch; one row as row\[None\], batches"
        ):
            sae.encode(wrong)


@pytest.mark.parametrize("normalisation", NORMALISED)
def test_sums_are_of_float32_whatever_the_process_has_set(normalisation, tmp_path) -> None:
    """Autocast to bfloat16 would be off by hundredths, and give another dtype."""
    own = some(normalize_activations=normalisation)
    sae = SAE.load(own.write(tmp_path))
    acts, back = sae.encode(ROWS), sae.decode(sae.encode(ROWS), ROWS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, again, few = sae.encode(ROWS), sae.decode(acts, ROWS), sae.strongest(ROWS, 400)
    assert (found.dtype, again.dtype) == (torch.float32, torch.float32)
    assert (np.abs(found.numpy() - own.encode(ROWS)) <= own.slack(ROWS)).mean() > 0.999
    assert torch.equal(found, acts)
    assert torch.equal(again, back)
    assert torch.equal(few.dense(), sae.strongest(ROWS, 400).dense())


def test_what_an_sae_returns_can_be_changed_and_trained_on(tmp_path) -> None:
    """Activations and reconstructions are tensors like any other."""
    sae = SAE.load(some().write(tmp_path))
    acts, back = sae.encode(ROWS), sae.decode(sae.encode(ROWS))
    acts[:, 2] = 0
    back += 1
    sae.strongest(ROWS, 5).values[0] = 0
    probe = torch.zeros(400, requires_grad=True)
    (acts @ probe).sum().backward()
    torch.testing.assert_close(probe.grad, acts.sum(0))


# In a worker


class Worker:
    """A runtime of two points that is asked as a client asks."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32) -> None:
        self.kind, self.dtype = kind, dtype
        self.runtime = some_runtime(kind, 2, WIDTH, dtype, tokens=64, device_ring_bytes=1 << 20)
        self.ask(Attach(1 << 20))

    def ask(self, question, released=()):
        return decode_answer(self.runtime.answer(encode(Call(released, question))))

    def open(self, encoder: Encoder, point: int = 1, *, most: int = 1 << 30, digest: bytes = b"") -> SAEOpened:
        segment = SharedSegment.create(wanted := image_bytes(encoder.shape))
        encoder.write(torch.frombuffer(segment.memory, dtype=torch.uint8, count=wanted, offset=HEADER_BYTES))
        asked = OpenSAE(digest or encoder.digest(), point, encoder.shape, segment.path, segment.nonce, most)
        try:
            for _ in range(6000):
                answer = self.ask(asked)
                if not answer.coming:
                    return answer
                time.sleep(0.01)
        finally:
            segment.close()
        raise AssertionError("it never came")

    def read(self, key: str, encoder: Encoder, rows: torch.Tensor, k: int):
        """A request of these rows at point 1, in two chunks; what comes of it."""
        capture = CapturePlan((1,), (Range(0, None),), None, Coding("features", k), saes=(encoder.digest(),))
        self.runtime.register(key, Plan(key, len(rows), len(rows), capture=capture).encode(), 0)
        for start, stop in ((0, 13), (13, len(rows))):
            positions = np.arange(start, stop)
            self.runtime.begin_step(batch(self.kind, [key], [start], [stop - start], positions + 7, positions))
            for _point in range(2):
                tap(self.runtime, rows[start:stop].clone().to(device_of(self.kind)), None, _point)
            self.runtime.end_step()
        (captured_rows,) = self.ask(Collect((Wanted(Owner(key, 0), len(rows)),))).shares
        return captured_rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["standard", "topk", "jumprelu"])
def test_a_worker_reads_rows_with_what_it_was_given(kind, architecture, tmp_path) -> None:
    """Rows of two chunks, on either kind of taps; what is read after the SAE was closed is an error."""
    own = some(architecture)
    encoder, worker, rows = SAE.load(own.write(tmp_path)).encoder, Worker(kind), ROWS[:40]
    assert worker.open(encoder) == SAEOpened()
    counted = worker.ask(GetStats())
    assert (counted.saes, counted.sae_bytes) == (1, encoder.nbytes)
    captured_rows = worker.read("a", encoder, rows, 20)
    (stored,) = kept_of(worker.runtime, captured_rows)
    found = Features.of(CodedRows(stored.coding, PointSchema((400,), "float32"), stored.parts))
    check_features(found, own.encode(rows), own.slack(rows))
    assert worker.ask(CloseSAE(encoder.digest(), 1)) == SAEOpened()
    worker.runtime.end_requests(["a"])
    assert worker.ask(GetStats(), released=(Owner("a", 0),)).sae_bytes == 0
    assert "is not loaded in this worker" in worker.read("b", encoder, rows, 20).failure


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_refuses_what_it_cannot_vouch_for(kind, tmp_path) -> None:
    """Too large, other numbers than announced, memory that is not there; ranks without the point have nothing to do."""
    encoder, worker = SAE.load(some().write(tmp_path)).encoder, Worker(kind)
    assert "are in use" in worker.open(encoder, most=1000).full
    assert "does not hold the SAE" in worker.open(encoder, digest=b"x" * 32).refused
    asked = OpenSAE(encoder.digest(), 1, encoder.shape, "/proc/self/fd/9999", b"n" * 16, 1 << 30)
    assert "cannot open" in worker.ask(asked).unreachable
    assert worker.open(encoder, point=7) == SAEOpened()
    counted = worker.ask(GetStats())
    assert (counted.saes, counted.sae_bytes) == (0, 0)


async def test_an_sae_that_is_loaded_again_while_its_equal_is_freed(tmp_path) -> None:
    """The workers hold it, and the client knows that they do."""
    worker, closing, close = Worker("host"), asyncio.Event(), asyncio.Event()

    async def rpc(frame: bytes) -> list[list[bytes]]:
        if isinstance(decode_call(frame).question, CloseSAE):
            closing.set()
            await close.wait()
        return [[worker.runtime.answer(frame)]]

    held = Dictionaries(Workers(SimpleNamespace(rpc=rpc, aborted=0)), 1 << 30)
    path = some().write(tmp_path)

    def readers() -> Readers:
        return Readers({Point(1, "resid_post"): 1}, (SAE.load(path).encoder,), Coding("features", 20))

    async def use(own: Readers) -> None:
        async with held.holding(own):
            assert worker.ask(GetStats()).saes == 1

    async with asyncio.timeout(60):
        await use(readers())
        gc.collect()
        await closing.wait()
        using = asyncio.create_task(use(again := readers()))
        while not any(entry.users for entry in held._entries.values()):
            await asyncio.sleep(0.01)
        close.set()
        await using
        assert held._held == worker.ask(GetStats()).sae_bytes > 0
        del again
        gc.collect()
        while held._entries:
            await asyncio.sleep(0.01)
    assert worker.ask(GetStats()).saes == 0
    await held.aclose()
