"""Published SAEs of other programs: each laid out from what is known of its files, against NumPy; and damaged ones."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from steercap import SAE, Point
from steercap.errors import InvalidFile

WIDTH, FEATURES, K = 12, 1024, 6
ROWS = np.random.default_rng(5).standard_normal((30, WIDTH)) * 2
RESID = Point(3, "resid_post")


def numbers(seed: int = 0) -> dict[str, Any]:
    """W_enc [d_in, d_sae], W_dec [d_sae, d_out], and one number for each feature under every other name."""
    drawn = np.random.default_rng(seed)
    found = {
        "W_enc": drawn.standard_normal((WIDTH, FEATURES)) / 3,
        "W_dec": drawn.standard_normal((FEATURES, WIDTH)) / 30,
        "b_dec": drawn.standard_normal(WIDTH),
        "W_skip": drawn.standard_normal((WIDTH, WIDTH)) / 3,  # [d_in, d_out]
        "threshold": np.abs(drawn.standard_normal(FEATURES)) / 2,
    } | {name: drawn.standard_normal(FEATURES) / 3 for name in ("b_enc", "b_mag", "b_gate", "r_mag")}
    return {name: one.astype(np.float32) for name, one in found.items()}


class Case:
    """A format: how to write one, and what its features and its reconstruction are.

    `pre` is what an architecture chooses by, `kind` how; `scale` is what rows are multiplied by.
    """

    def __init__(
        self,
        write: Callable[[Path], str],
        kind: str = "relu",
        *,
        point: tuple[Point, Point] = (RESID, RESID),
        shifted: bool = False,
        scale: float = 1.0,
        threshold: Any = None,
        skip: bool = False,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.write, self.kind, self.point, self.shifted, self.scale = write, kind, point, shifted, scale
        self.threshold, self.skip, self.options = threshold, skip, options or {}

    def forward(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Activations and reconstructions in float64."""
        of = {name: one.astype(np.float64) for name, one in numbers().items()}
        inputs = rows * self.scale - (of["b_dec"] if self.shifted else 0)
        products = inputs @ of["W_enc"]
        pre = products + of["b_enc"]
        found = np.maximum(pre, 0)
        if self.kind == "jumprelu":
            found = np.where(pre > (of["threshold"] if self.threshold is None else self.threshold), found, 0)
        elif self.kind == "topk":
            found = np.where(pre >= np.sort(pre, axis=1)[:, -K, None], found, 0)
        elif self.kind == "gated":
            opened = products + of["b_gate"] > 0
            found = np.where(opened, np.maximum(products * np.exp(of["r_mag"]) + of["b_mag"], 0), 0)
        back = (found @ of["W_dec"] + of["b_dec"]) / self.scale
        return found, back + (rows @ of["W_skip"] if self.skip else 0)


def tensors(**names: str) -> dict[str, torch.Tensor]:
    """Tensors by the names of a file; a `.T` behind ours for those that lie the other way."""
    of = numbers()
    found = {}
    for name, own in names.items():
        one = of[own.removesuffix(".T")]
        found[name.replace("__", ".")] = torch.from_numpy(one.T if own.endswith(".T") else one).contiguous()
    return found


LINEAR = {"encoder__weight": "W_enc.T", "encoder__bias": "b_enc", "decoder__weight": "W_dec.T"}
PLAIN = {name: name for name in ("W_enc", "W_dec", "b_enc", "b_dec")}
LOWER = {name.lower(): name for name in PLAIN} | {"threshold": "threshold"}


def saved(folder: Path, file: str, found: dict[str, Any], config: tuple[str, Any] | None = None) -> None:
    """Write tensors to a file, and a configuration beside it."""
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npz":
        np.savez(path, **{name: one.numpy() for name, one in found.items()})
    elif path.suffix == ".safetensors":
        save_file(found, path)
    else:
        torch.save(found, path)
    if config:
        (folder / config[0]).write_text(json.dumps(config[1]))


def gemma(upper: bool, part: str = "res", within: str = "layer_3/width_16k/average_l0_7") -> Callable[[Path], str]:
    """Gemma Scope's `params.npz`."""

    def write(root: Path) -> str:
        folder = f"gemma-scope-2b-pt-{part}/{within}"
        saved(root / folder, "params.npz", tensors(**(PLAIN | {"threshold": "threshold"} if upper else LOWER)))
        return folder

    return write


def second(folder: str, said: dict[str, Any] | None, *, skip: bool = False) -> Callable[[Path], str]:
    """Gemma Scope 2's `params.safetensors`, with its configuration or without."""

    def write(root: Path) -> str:
        found = tensors(**LOWER, **({"affine_skip_connection": "W_skip"} if skip else {}))
        saved(root / folder, "params.safetensors", found, ("config.json", said) if said else None)
        return folder

    return write


def dictionary(kind: str, names: dict[str, str], **extra: Any) -> Callable[[Path], str]:
    """dictionary_learning's `ae.pt`."""

    def write(root: Path) -> str:
        trainer = {"dict_class": kind, "layer": 3, "activation_dim": WIDTH, "dict_size": FEATURES, "k": K}
        trainer |= {"lm_name": "openai/gpt-oss-20b", "submodule_name": "resid_post_layer_3"}
        said = {"trainer": trainer, "buffer": {"ctx_len": 2048}}
        saved(root / "trainer_0", "ae.pt", tensors(**names) | extra, ("config.json", said))
        return "trainer_0"

    return write


def one_file(
    folder: str, name: str, names: dict[str, str], config: tuple[str, Any] | None = None
) -> Callable[..., str]:
    """A file that is named."""

    def write(root: Path) -> str:
        saved(root / folder, name, tensors(**names), config)
        return f"{folder}/{name}"

    return write


def scoped(said: dict[str, Any], names: dict[str, str], file: str, config: str, **extra: Any) -> Callable[..., str]:
    """Llama Scope's."""

    def write(root: Path) -> str:
        common = {"d_model": WIDTH, "hook_point_in": "blocks.3.hook_resid_post"}
        common |= {"hook_point_out": common["hook_point_in"], "norm_activation": "dataset-wise", "act_fn": "jumprelu"}
        saved(root / "L3R", file, tensors(**names) | extra, (config, common | said))
        return "L3R"

    return write


def of_sae_lens(root: Path) -> str:
    """Qwen Scope as SAELens saves it again, with a factor of ones."""
    said = {"architecture": "topk", "k": K, "d_in": WIDTH, "d_sae": FEATURES, "apply_b_dec_to_input": False}
    said |= {"metadata": {"hook_name": "blocks.3.hook_resid_post", "hf_hook_name": "model.layers.3"}}
    found = tensors(**PLAIN) | {"scaling_factor": torch.ones(FEATURES)}
    saved(root / "q", "sae_weights.safetensors", found, ("cfg.json", said))
    return "q"


def logs(root: Path) -> str:
    """Llama Scope R1's, whose thresholds are logarithms, and whose norms are tensors."""
    norms = {f"dataset_average_activation_norm.{side}": torch.tensor(2.0) for side in ("in", "out")}
    found = {"log_jumprelu_threshold": torch.from_numpy(np.log(numbers()["threshold"]))}
    write = scoped({}, LINEAR | {"decoder__bias": "b_dec"}, "sae_weights.safetensors", "config.json", **norms, **found)
    return write(root)


NORM = {"dataset_average_activation_norm": {"in": 2.0, "out": 2.0}, "d_sae": FEATURES, "jump_relu_threshold": 0.4}
FACTOR = WIDTH**0.5 / 2
MODULES = {
    "architecture": "jump_relu",
    "hf_hook_point_in": "model.layers.3.pre_feedforward_layernorm.output",
    "hf_hook_point_out": "model.layers.3.post_feedforward_layernorm.output",
    "affine_connection": True,
}
MLP = (Point(3, "mlp_in"), Point(3, "mlp_out"))
HOOK_Z = {"act_name": "blocks.3.attn.hook_z", "act_size": WIDTH, "dict_size": FEATURES}
GOODFIRE = {"encoder_linear__weight": "W_enc.T", "encoder_linear__bias": "b_enc"}
GOODFIRE |= {"decoder_linear__weight": "W_dec.T", "decoder_linear__bias": "b_dec"}
QWEN = "SAE-Res-Qwen3-1.7B-Base-W1K-L0_6"
TOP = LINEAR | {"b_dec": "b_dec"}

CASES = {
    "gemma scope": Case(gemma(upper=True), "jumprelu"),
    "gemma scope, lower case": Case(gemma(upper=False), "jumprelu"),
    "gemma scope, attention": Case(gemma(upper=True, part="att"), "jumprelu", point=(Point(3, "z"),) * 2),
    "gemma scope, embeddings": Case(
        gemma(upper=True, within="embedding/width_4k/average_l0_6"),
        "jumprelu",
        point=(Point(0, "resid_pre"),) * 2,
        scale=WIDTH**-0.5,
    ),
    "gemma scope, transcoder": Case(
        gemma(upper=True, part="transcoders"), "jumprelu", point=MLP, options={"input": (3, "mlp_in")}
    ),
    "gemma scope 2": Case(
        second("s", {"architecture": "jump_relu", "hf_hook_point_in": "model.layers.3.output"}), "jumprelu"
    ),
    "gemma scope 2, path alone": Case(
        second("gemma-scope-2-1b-pt/resid_post_all/layer_3_width_16k_l0_big", None), "jumprelu"
    ),
    "gemma scope 2, skip": Case(second("t", MODULES, skip=True), "jumprelu", point=MLP, skip=True),
    "gemma scope 2, skip, path alone": Case(
        second("transcoder_all/layer_3_width_16k_l0_big_affine", None, skip=True), "jumprelu", point=MLP, skip=True
    ),
    "qwen scope, by SAELens": Case(of_sae_lens, "topk"),
    "qwen scope": Case(one_file(QWEN, "layer3.sae.pt", PLAIN | {"W_enc": "W_enc.T", "W_dec": "W_dec.T"}), "topk"),
    "dictionary_learning, standard": Case(dictionary("AutoEncoder", LINEAR | {"bias": "b_dec"}), shifted=True),
    "dictionary_learning, new": Case(dictionary("AutoEncoderNew", LINEAR | {"decoder__bias": "b_dec"})),
    "dictionary_learning, topk": Case(
        dictionary("AutoEncoderTopK", TOP, k=torch.tensor(K), threshold=torch.tensor(0.9)), "topk", shifted=True
    ),
    "dictionary_learning, batch topk": Case(
        dictionary("BatchTopKSAE", TOP, k=torch.tensor(K), threshold=torch.tensor(0.3)),
        "jumprelu",
        shifted=True,
        threshold=np.float32(0.3),
    ),
    "dictionary_learning, matryoshka": Case(
        dictionary(
            "MatryoshkaBatchTopKSAE", PLAIN, k=torch.tensor(K), threshold=torch.tensor(0.3), group_sizes=torch.ones(2)
        ),
        "jumprelu",
        shifted=True,
        threshold=np.float32(0.3),
    ),
    "dictionary_learning, jumprelu": Case(
        dictionary("JumpReluAutoEncoder", PLAIN | {"threshold": "threshold"}), "jumprelu"
    ),
    "dictionary_learning, gated": Case(
        dictionary(
            "GatedAutoEncoder",
            {"encoder__weight": "W_enc.T", "decoder__weight": "W_dec.T", "decoder_bias": "b_dec"}
            | {"r_mag": "r_mag", "gate_bias": "b_gate", "mag_bias": "b_mag"},
        ),
        "gated",
        shifted=True,
    ),
    "llama scope": Case(
        scoped(NORM, LINEAR | {"decoder__bias": "b_dec"}, "checkpoints/final.safetensors", "hyperparams.json"),
        "jumprelu",
        scale=FACTOR,
        threshold=0.4 * FACTOR,
    ),
    "llama scope, by norms": Case(
        scoped(
            NORM | {"sparsity_include_decoder_norm": True},
            LINEAR | {"decoder__bias": "b_dec"},
            "checkpoints/final.safetensors",
            "hyperparams.json",
        ),
        "jumprelu",
        scale=FACTOR,
        threshold=0.4 * FACTOR / np.linalg.norm(numbers()["W_dec"], axis=1),
    ),
    "llama scope r1": Case(logs, "jumprelu", scale=FACTOR),
    "goodfire": Case(one_file("g", "Llama-3.1-8B-Instruct-SAE-l3.pth", GOODFIRE)),
    "qresearch": Case(one_file("r", "DeepSeek-R1-Distill-Llama-8B-SAE-l3.pt", LINEAR | {"decoder__bias": "b_dec"})),
    "kissane": Case(
        one_file(
            "k", "gpt2-small_L3_Hcat_z_lr1.20e-03_v9.pt", PLAIN, ("gpt2-small_L3_Hcat_z_lr1.20e-03_v9_cfg.json", HOOK_Z)
        ),
        point=(Point(3, "z"),) * 2,
        shifted=True,
    ),
    "mwhanna": Case(one_file("qwen3-4b-transcoders", "layer_3.safetensors", PLAIN | {"W_enc": "W_enc.T"}), point=MLP),
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_published_layout_is_read(name, tmp_path) -> None:
    """Features and reconstructions are NumPy's, at the points that the format names."""
    case = CASES[name]
    sae = SAE.load(tmp_path, case.write(tmp_path), **case.options)
    assert (sae.input, sae.output) == case.point
    known, back = case.forward(ROWS)
    rows = torch.from_numpy(ROWS)
    found = sae.encode(rows)
    assert 2 < (known > 0).sum(axis=1).mean() < FEATURES
    np.testing.assert_allclose(found.numpy(), known, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sae.decode(found, rows).numpy(), back, rtol=1e-5, atol=1e-5)


def test_a_weights_file_in_a_folder_of_its_format_can_be_named(tmp_path, monkeypatch) -> None:
    """The file that `SAE.load` finds of itself."""
    case = CASES["llama scope"]
    folder = case.write(tmp_path)
    named = f"{folder}/checkpoints/final.safetensors".lstrip("/")
    rows = torch.from_numpy(ROWS)
    whole = SAE.load(tmp_path, folder).encode(rows)
    assert torch.equal(SAE.load(tmp_path, named).encode(rows), whole)
    assert torch.equal(SAE.load(tmp_path / named).encode(rows), whole)
    monkeypatch.chdir(tmp_path / folder)
    assert torch.equal(SAE.load("checkpoints/final.safetensors").encode(rows), whole)


def test_a_folder_named_embedding_says_nothing_of_a_layer(tmp_path) -> None:
    """A user's own, above the repository's."""
    case = CASES["gemma scope"]
    sae = SAE.load(tmp_path / "embedding", case.write(tmp_path / "embedding"))
    assert (sae.input, sae.output) == case.point


def test_a_folder_named_like_a_layer_says_nothing_of_embeddings(tmp_path) -> None:
    """Nor a user's folder of another layer above them."""
    case = CASES["gemma scope, embeddings"]
    sae = SAE.load(tmp_path / "layer_12_study", case.write(tmp_path / "layer_12_study"))
    assert (sae.input, sae.output) == case.point


# Files that are wrong


def damage(root: Path, random: np.random.Generator) -> str:
    """Change something of the files below a folder; returns what, for messages."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    path = files[random.integers(len(files))]
    if path.suffix == ".json":
        said = json.loads(path.read_text())
        inside = said["trainer"] if "trainer" in said and random.random() < 0.8 else said
        key = sorted(inside)[random.integers(len(inside))]
        value = [None, "x", -1, 1e400, [], {}, True, "blocks.99999.hook_x"][random.integers(8)]
        if random.random() < 0.4:
            del inside[key]
        else:
            inside[key] = value
        path.write_text(json.dumps(said))
        return f"{path.name}: {key} {value!r}"
    whole = path.read_bytes()
    how = ["cut", "flip", "drop", "shape", "integers", "scalar", "nan", "more", "kind"][random.integers(9)]
    if how == "cut":
        path.write_bytes(whole[: random.integers(len(whole))])
    elif how == "flip":
        at = random.integers(min(len(whole), 2000))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
    else:
        found = read_back(path)
        name = sorted(found)[random.integers(len(found))]
        changed = {
            "shape": torch.zeros(int(random.integers(5)), 3),
            "integers": torch.zeros_like(found[name], dtype=torch.int32),
            "scalar": torch.tensor(1.0),
            "nan": torch.full_like(found[name].float(), torch.nan),
            "kind": torch.zeros_like(found[name], dtype=torch.complex64),
        }
        if how == "drop":
            del found[name]
        else:
            found["other" if how == "more" else name] = changed.get(how, found[name].clone())
        saved(path.parent, path.name, found)
    return f"{path.name}: {how}"


def read_back(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file that `saved` wrote."""
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays}
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


@pytest.mark.parametrize("name", list(CASES))
def test_a_damaged_file_is_an_error_of_ours(name, tmp_path) -> None:
    """Whatever is changed: it loads, or says that the file is wrong; nothing else escapes."""
    case, random, refused = CASES[name], np.random.default_rng(len(name)), 0
    for number in range(8):
        folder = case.write(tmp_path / str(number))
        what = damage(tmp_path / str(number), random)
        try:
            sae = SAE.load(tmp_path / str(number), folder, **case.options)
            assert sae.encode(torch.from_numpy(ROWS)).isfinite().all(), what
        except InvalidFile as error:
            assert str(error).startswith(str(tmp_path)), what
            refused += 1
        except Exception as error:
            raise AssertionError(f"{name}, {number}, {what}: {type(error).__name__}: {error}") from error
        shutil.rmtree(tmp_path / str(number))
    assert refused > 1


@pytest.mark.parametrize(
    ("source", "file", "says"),
    [
        ("layer_12/temporal", "latest_ckpt.safetensors", "temporal SAE"),
        ("layers.3", "sae.safetensors", "sparsify"),
        ("clt-gemma-2-2b-2.5M", "W_enc_0.safetensors", "cross-layer transcoder"),
        ("crosscoders", "other.safetensors", "none of sae_weights.safetensors"),
        ("qwen", "layer3.sae.pt", "its format tells model, layer and k only in"),
    ],
)
def test_what_is_out_of_scope_says_why(source, file, says, tmp_path) -> None:
    """By its folder, or by the file."""
    saved(tmp_path / source, file, tensors(**PLAIN))
    named = f"{source}/{file}" if re.search(r"W_enc|layer3", file) else source
    with pytest.raises(InvalidFile, match=says):
        SAE.load(tmp_path, named)


def test_a_file_that_runs_code_is_refused(tmp_path) -> None:
    """A pickle of anything but tensors, in each format that has one; and no dictionary, and several of one name."""
    for name in ("ae.pt", "Llama-3.1-8B-Instruct-SAE-l3.pth"):
        for content, says in (
            (Case, "runs no code"),
            ([1], "expected a dictionary"),
            ({1: torch.ones(1)}, "dictionary"),
        ):
            saved(tmp_path, name, content, ("config.json", {"trainer": {}}))
            with pytest.raises(InvalidFile, match=says):
                SAE.load(tmp_path / name)
    saved(tmp_path, "ae.pt", tensors(**PLAIN, encoder__weight="W_enc.T"))
    with pytest.raises(InvalidFile, match="has W_enc twice"):
        SAE.load(tmp_path)
    with pytest.raises(InvalidFile, match="leave activation_scale="):
        SAE.load(tmp_path, CASES["goodfire"].write(tmp_path), activation_scale=2.0)
