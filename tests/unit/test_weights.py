"""Weights read of a checkpoint do what transformers' own modules do, in every layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from steercap.core.spec import Point
from steercap.errors import InvalidSpec
from steercap.kernels.codecs.random_projection import signs
from steercap.lab.mechanism.weights.layouts import LAYOUTS
from steercap.lab.mechanism.weights.model import ModelWeights
from steercap.testing import Reference, tiny_checkpoint

#: By architecture, tiny checkpoints that have it.
TINY = {
    "LlamaForCausalLM": "llama",
    "GemmaForCausalLM": "gemma",
    "GraniteForCausalLM": "granite",
    "HeliumForCausalLM": "helium",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "StableLmForCausalLM": "stablelm",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "GPT2LMHeadModel": "gpt2",
    "Phi3ForCausalLM": "phi3",
    "PhiForCausalLM": "phi",
    "CohereForCausalLM": "cohere",
    "GPTNeoXForCausalLM": "gpt_neox",
    "Starcoder2ForCausalLM": "starcoder2",
    "MixtralForCausalLM": "mixtral",
}
#: How far float32 sums in another order may be apart, of the longest row.
NEAR = 5e-7
LAYER = 1


def test_every_layout_is_checked() -> None:
    """An architecture without a checkpoint here would be claimed and not shown; none is claimed twice."""
    claimed = [name for layout in LAYOUTS.values() for name in layout.architectures]
    assert sorted(claimed) == sorted(TINY)


def near(found, known) -> None:
    assert found.shape == known.shape
    assert (found - known).abs().max() < NEAR * known.norm(dim=-1).max()


def scaled(norm, rows):
    """The scale that a norm gives to a row, one where there is none."""
    return torch.ones(len(rows), 1) if norm is None else norm.scales(rows)


class Seen:
    """One token through transformers: rows at points, and what modules of one layer gave."""

    def __init__(self, path, at=LAYER) -> None:
        reference = Reference(path)
        self.inputs, self.outputs = {}, {}
        for name, module in reference.layers[at].named_modules():
            module.register_forward_hook(self._keep(name), with_kwargs=True)
        self.family = reference.family
        between = ("resid_mid",) if self.family.resid_mid else ()
        points = [Point(at, site) for site in ("resid_pre", "resid_post", "attn_out", "mlp_out", *between)]
        rows = {point.site: rows for point, rows in reference.rows([65], points).items()}
        self.read_by_attention, self.read_by_mlp = rows["resid_pre"], rows.get("resid_mid", rows["resid_pre"])
        if between:  # what is added to the stream, any factor in it
            self.attention_adds = rows["resid_mid"] - rows["resid_pre"]
            self.mlp_adds = rows["resid_post"] - rows["resid_mid"]
        else:
            self.attention_adds, self.mlp_adds = rows["attn_out"], rows["mlp_out"]
            near(rows["resid_pre"] + self.attention_adds + self.mlp_adds, rows["resid_post"])

    def _keep(self, name):
        def keep(_module, args, kwargs, output):
            given = args[0] if args else kwargs.get("hidden_states")
            self.inputs[name], self.outputs[name] = given, output[0] if isinstance(output, tuple) else output

        return keep

    def output(self, name):
        return self.outputs[name].flatten(0, 1).flatten(1)

    def input(self, name):
        return self.inputs[name].flatten(0, 1).flatten(1)


@pytest.mark.parametrize("family", TINY.values())
def test_contributions_of_heads_are_projections_of_what_each_writes(family) -> None:
    """Of each head by a product of its own; together, with the bias, the projection of the module's output."""
    path = tiny_checkpoint(family)
    seen, block = Seen(path), ModelWeights.open(path).attention_block(LAYER)
    z = seen.input(seen.family.attn_proj).unflatten(1, (block.heads, -1))
    found = block.contributions(z, k=16, seed=3)
    matrix = signs(16, len(block.output[0]), 3).double() / 4
    for head in range(block.heads):
        own = slice(head * z.shape[2], (head + 1) * z.shape[2])
        near(found[:, head].double(), z[:, head].double() @ block.output[0][:, own].double().T @ matrix.T)
    bias = 0 if block.output[1] is None else block.output[1]
    written = seen.output(seen.family.attn_proj) - bias
    near(found.sum(1), (written.double() @ matrix.T).float())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"z": torch.ones(2, 3, 5)}, r"z=\(2, 3, 5\); give rows at the site z, \[rows, \d+, \d+\] of floats"),
        ({"z": [1.0]}, r"z=\[1.0\]; give rows"),
        ({"k": 0}, "k=0"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_contributions_of_other_rows_are_refused(given, says) -> None:
    block = ModelWeights.open(tiny_checkpoint("llama")).attention_block(LAYER)
    z = torch.ones(2, block.heads, block.output[0].shape[1] // block.heads)
    with pytest.raises(InvalidSpec, match=says):
        block.contributions(**({"z": z} | given))


@pytest.mark.parametrize("family", TINY.values())
def test_attention_is_that_of_the_module(family) -> None:
    """Of a prompt of one token attention has weight one: values, what each head adds, and all of what the block adds are
    transformers' own, to rounding; queries and keys as well, which position 0 leaves unturned.
    """
    path = tiny_checkpoint(family)
    seen, weights = Seen(path), ModelWeights.open(path).attention(LAYER)
    layout = next(one for one in LAYOUTS.values() if ModelWeights.open(path)._architecture in one.architectures)
    row, proj = seen.read_by_attention, seen.family.attn_proj
    scale = scaled(weights.norm, row)

    def read(projection):
        return projection.weight @ row[0] * scale[0] + projection.constant

    z = read(weights.value).repeat_interleave(weights.group, 0)
    near(z.flatten()[None], seen.input(proj))
    behind = torch.einsum("nd,nhd->h", z, weights.output) + weights.output_constant
    post = scaled(weights.post, seen.output(proj))
    near(behind[None] * post, seen.attention_adds)
    constants = torch.einsum("nd,nhd->h", weights.value.constant.repeat_interleave(weights.group, 0), weights.output)
    heads = weights.written(row).sum(0) * scale + constants + weights.output_constant
    near(heads * post, seen.attention_adds)
    if not layout.fused:
        for projection, norm, name, normed in (
            (weights.query, weights.query_norm, layout.query, layout.query_norm),
            (weights.key, weights.key_norm, layout.key, layout.key_norm),
        ):
            found = read(projection).flatten()[None]
            if norm is None:
                near(found, seen.output(name))
            else:
                raw = seen.output(name).unflatten(1, (-1, norm.width))[0]
                near(
                    (found.unflatten(1, (-1, norm.width))[0] * norm.scales(raw)).flatten()[None],
                    seen.output(normed).reshape(1, -1),
                )
    else:
        fused = seen.output(layout.fused)[0]
        if layout.order == "by_head":
            parts = fused.unflatten(0, (weights.heads, 3, -1)).unbind(1)
        else:
            parts = fused.split([read(one).numel() for one in (weights.query, weights.key, weights.value)])
        for projection, known in zip((weights.query, weights.key, weights.value), parts, strict=True):
            near(read(projection).flatten()[None], known.flatten()[None])


@pytest.mark.parametrize("family", [one for one in TINY.values() if one != "mixtral"])
def test_neurons_are_those_of_the_module(family) -> None:
    """Pre-activations of gates and neurons, and what each neuron adds to the stream."""
    path = tiny_checkpoint(family)
    seen, model = Seen(path), ModelWeights.open(path)
    layout, weights = model._layout, model.neurons(LAYER)  # of qwen3_moe, the layer that is dense
    row = seen.read_by_mlp
    scale = scaled(weights.norm, row)
    if layout.gate_up:
        known = dict(zip(("gate", "up"), seen.output(layout.gate_up).chunk(2, 1), strict=True))
    elif layout.gate:
        known = {"gate": seen.output(layout.gate), "up": seen.output(layout.up)}
    else:
        known = {"in": seen.output(layout.up)}
    assert set(known) == set(weights.reading)
    for name, projection in weights.reading.items():
        near((row * scale) @ projection.weight.T + projection.constant, known[name])
    proj = seen.family.mlp_proj
    written = seen.input(proj) @ weights.down + weights.down_constant
    near(written * scaled(weights.post, seen.output(proj)), seen.mlp_adds)


@pytest.mark.parametrize("family", TINY.values())
@pytest.mark.parametrize("layer", [LAYER, 2])
def test_blocks_do_to_rows_what_the_modules_do(family, layer) -> None:
    """Both blocks as functions of rows: what they add to the stream, experts included; of one token, attention has
    weight one. Nothing of a layer is kept in the model afterwards.
    """
    path = tiny_checkpoint(family)
    seen, model = Seen(path, layer), ModelWeights.open(path)
    block = model.feed_forward(layer)
    near(block.forward(seen.read_by_mlp), seen.mlp_adds)
    near(block.forward(seen.read_by_mlp.repeat(3, 1))[2:], seen.mlp_adds)
    attention = model.attention_block(layer)
    near(attention.forward(seen.read_by_attention), seen.attention_adds)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # of float32 whatever the process has set
        near(block.forward(seen.read_by_mlp), seen.mlp_adds)
        near(attention.forward(seen.read_by_attention), seen.attention_adds)
    layout = model._layout
    for read, name, normed in (
        (attention.queries, layout.query, layout.query_norm),
        (attention.keys, layout.key, layout.key_norm),
    ):
        if not layout.fused:
            known = seen.outputs[normed or name].reshape(1, -1, attention.head_dim)
            near(read(seen.read_by_attention), known.repeat_interleave(attention.heads // known.shape[1], 1))
    if layout.fused or not layout.gate:
        return
    for part, name in (("gate", layout.gate), ("up", layout.up)):
        if part in block.matrices:
            normed = seen.inputs[name].flatten(0, -2)
            known = seen.output(name)
            near(normed @ block.matrices[part].T, known)
    assert all(one.is_meta for name, one in model._decoder[layer].named_parameters() if name.startswith("mlp."))


def reference_experts(rows, tensors, prefix, names, chosen, *, normed):
    """Softmax over experts, the `chosen` best of each row, SwiGLU of each, row by row."""
    found = torch.zeros_like(rows)
    for at, row in enumerate(rows):
        shares = (tensors[f"{prefix}.{names[0]}.weight"] @ row).softmax(0)
        best = shares.topk(chosen)
        weights = best.values / best.values.sum() if normed else best.values
        for weight, expert in zip(weights, best.indices.tolist(), strict=True):
            gate, up, down = (tensors[f"{prefix}.{name.format(expert)}.weight"] for name in names[1:])
            found[at] += weight * (down @ (torch.nn.functional.silu(gate @ row) * (up @ row)))
    return found


@pytest.mark.parametrize(("family", "layer", "chosen"), [("mixtral", 1, 2), ("qwen3_moe", 2, None)])
def test_rows_go_through_their_own_experts(family, layer, chosen) -> None:
    """Against the published formula, of rows that are routed apart; experts are read for their own rows alone."""
    path = tiny_checkpoint(family, **({"num_experts_per_tok": chosen} if chosen else {}))
    model = ModelWeights.open(path)
    tensors = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
    config = model._config
    names = {
        "mixtral": ["block_sparse_moe.gate", *(f"block_sparse_moe.experts.{{}}.w{one}" for one in (1, 3, 2))],
        "qwen3_moe": ["mlp.gate", *(f"mlp.experts.{{}}.{one}_proj" for one in ("gate", "up", "down"))],
    }[family]
    prefix = f"model.layers.{layer}"
    rows = torch.randn(40, model.width, generator=torch.Generator().manual_seed(2)) * 3
    gain = tensors[f"{prefix}.post_attention_layernorm.weight"]
    scaled_rows = gain * rows * (rows.square().mean(1, keepdim=True) + config.rms_norm_eps).rsqrt()
    normed = family == "mixtral" or config.norm_topk_prob
    known = reference_experts(scaled_rows, tensors, prefix, names, config.num_experts_per_tok, normed=normed)
    block = model.feed_forward(layer)
    read = []
    inner = replace(block.inner, read=lambda expert: read.append(expert) or block.inner.read(expert))
    near(replace(block, inner=inner).forward(rows), known)
    assert len(read) == len(set(read)) > 1
    assert not block.matrices
    read.clear()
    near(replace(block, inner=inner).forward(rows[:1]), known[:1])
    assert len(read) == config.num_experts_per_tok
