"""Weights read of a checkpoint do what transformers' own modules do, in every layout."""

from __future__ import annotations

import pytest
import torch

from steercap.core.spec import Point
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

    def __init__(self, path) -> None:
        reference = Reference(path)
        self.inputs, self.outputs = {}, {}
        layer = reference.layers[LAYER]
        for name, module in layer.named_modules():
            module.register_forward_hook(self._keep(name), with_kwargs=True)
        self.family = reference.family
        between = ("resid_mid",) if self.family.resid_mid else ()
        points = [Point(LAYER, site) for site in ("resid_pre", "resid_post", "attn_out", "mlp_out", *between)]
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
