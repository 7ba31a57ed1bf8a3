"""Every family × every site against transformers, float32, teacher-forced, by the worst row."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import product

import pytest
import torch
from conftest import opened
from safetensors.torch import load_file
from support.agreement import adds_up, edits_agree, places_of, rows_agree, sites_of
from support.attention import attention_agrees
from support.deriving import built, derivations, named, paths_of
from support.rows import GREEDY, MAX_ERROR, TINY_ENGINE, hold, random_prompt
from support.specs import OPERATIONS, VARIANTS, spec
from transformers import AutoConfig

from steercap import CaptureSpec, Point, SteerModel
from steercap.adapters import hooks
from steercap.architectures.families import FAMILIES
from steercap.architectures.sites import SITES
from steercap.errors import UnsupportedModel
from steercap.testing import Reference, tiny_checkpoint
from steercap.testing.architectures import FAMILY_CONFIGS

#: Norms of queries and keys; experts; one tensor of queries, keys and values; soft caps, windows and norms behind the
#: blocks; transformers' modules. The others differ from one of them by less.
KINDS = ("qwen3", "qwen3_moe", "gpt2", "gemma2", "olmo2")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in KINDS else pytest.mark.extended) for name in FAMILY_CONFIGS],
)
async def served(request) -> AsyncIterator[tuple[str, SteerModel, Reference]]:
    """One family: its name, its engine with all sites armed, and transformers on the same checkpoint."""
    path = tiny_checkpoint(request.param)
    async with opened(path, sites="all", **TINY_ENGINE) as model:
        yield request.param, model, Reference(path)


async def test_rows_are_those_of_transformers(served, record_property) -> None:
    """Whatever the family and the site, each row is the one transformers computes, prompt and generated."""
    family, model, reference = served
    for name, same in (await rows_agree(model, reference)).items():
        record_property(f"{family} {name}", f"1-cos {1 - same.cosine:.1e}, error {same.error:.1e}")


async def test_edits_are_those_of_transformers(served, record_property) -> None:
    """Whatever the family, the operation and the site, every row at every point is that of transformers with the edit
    made by a hook, in float64; all of them share one batch.
    """
    family, model, reference = served
    for name, same in (await edits_agree(model, reference)).items():
        record_property(f"{family} steered by {name}", f"1-cos {1 - same.cosine:.1e}, error {same.error:.1e}")


async def test_the_stream_is_the_sum_of_what_the_blocks_add(served, record_property) -> None:
    """resid_post = resid_pre + attn_out + mlp_out, in every family: the sites mean what their names say."""
    family, model, _ = served
    difference = await adds_up(model)
    record_property(f"{family} sum", f"{difference:.1e}")
    assert difference < MAX_ERROR


#: head_dim^-0.5, and Gemma's query_pre_attn_scalar^-0.5.
SCALES = {"gemma2": 256**-0.5, "gemma3": 256**-0.5}
#: Which layers of a tiny model see 24 tokens alone.
WINDOWS = {"mistral": (24,) * 4, "gemma2": (24, None) * 2, "gemma3": (24, None) * 2}


async def test_attention_is_that_of_transformers(served, record_property) -> None:
    """Weights computed of captured queries and keys are those of `output_attentions`, clean and steered, beyond every
    window; and keys and values of the last layer are cached with their edits, its queries are not.
    """
    family, model, reference = served
    if family == "olmo2":  # transformers' modules, past whose hooks attention is called
        assert not {"q", "k", "v"} & {point.site for point in model.points}
        return
    rules = model.serving.opened().attention
    assert [rules[layer].window for layer in range(4)] == list(WINDOWS.get(family, (None,) * 4))
    assert all(rule.scale == pytest.approx(SCALES.get(family, 32**-0.5)) for rule in rules.values())
    assert {rule.soft_cap for rule in rules.values()} == {50.0 if family == "gemma2" else None}
    record_property(f"{family} attention", f"{await attention_agrees(model, reference):.1e}")
    last = {site: model.points[Point(3, site)].changes_kv for site in ("q", "k", "v", "z")}
    assert last == {"q": False, "k": True, "v": True, "z": False}


async def test_norms_behind_blocks_are_no_part_of_what_blocks_add(record_property) -> None:
    """OPT 350M: a layer gives the norm of what it takes and what a block adds, twice, and its embeddings are narrower
    than its stream. Rows and edits are those of transformers at every site, and no sum is claimed.
    """
    path = tiny_checkpoint("opt", do_layer_norm_before=False, word_embed_proj_dim=64)
    async with opened(path, sites="all", **TINY_ENGINE) as model:
        reference = Reference(path)
        for name, same in (await rows_agree(model, reference)).items():
            record_property(f"opt 350m {name}", f"1-cos {1 - same.cosine:.1e}, error {same.error:.1e}")
        specs = [
            spec("add", places_of(model, site)[1], seed=seed, layers=[0, 2], site=site)
            for seed, site in enumerate(sites_of(model))
        ]
        prompts = [random_prompt(12, seed) for seed in range(len(specs))]
        everything = CaptureSpec(sites=sites_of(model))
        _, steered = await model.generate(prompts, {"max_tokens": 8, **GREEDY}, capture=everything, steering=specs)
        await model.fetch_captures_batch(steered)
        hold(steered, reference, specs)
        assert not any("resid_pre +" in claim.name for claim in model.proof)
        assert {"z[3]", "neurons[3]"} <= {claim.name.rpartition(" ")[2] for claim in model.proof}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in KINDS else pytest.mark.extended) for name in FAMILY_CONFIGS]
)
def test_derived_sites_are_those_of_the_family(name) -> None:
    """With the family hidden, traced passes find the same modules, or none: of routers, and of what is summed of experts."""
    with built(tiny_checkpoint(name)) as (runner, decoder):
        _, family = named(decoder)
        (found, refused), *_ = [
            one for one in derivations(runner, decoder) if one[0].residual_output == family.residual_output
        ]
        for layer in decoder.layers.values():
            ours, theirs = paths_of(layer, found), paths_of(layer, family)
            assert {site for site, path in theirs.items() if path != ours[site]} <= {"router"}, refused


def test_the_bias_of_a_router_among_the_experts_is_loaded() -> None:
    """vLLM 0.32 drops Laguna's, and its routers then choose other experts."""
    hooks.hook()
    path = tiny_checkpoint("laguna")
    tensors = load_file(path / "model.safetensors")
    with built(path) as (_, decoder):
        for index in (1, 2, 3):
            loaded = decoder.layers[index].mlp.experts.router.e_score_correction_bias
            assert torch.equal(loaded, tensors[f"model.layers.{index}.mlp.experts.e_score_correction_bias"])
            assert bool(loaded.any())


def test_the_experts_of_dbrx_are_loaded() -> None:
    """vLLM 0.32 looks for them in a module that does not hold them; kernels on CPU have an order of their own."""
    hooks.hook()
    path = tiny_checkpoint("dbrx")
    tensors = load_file(path / "model.safetensors")
    with built(path) as (_, decoder):
        for index, layer in decoder.layers.items():
            prefix = f"transformer.blocks.{index}.ffn.experts.mlp."
            each = [tensors[prefix + name].view(8, -1) for name in ("w1", "v1")]
            loaded = layer.ffn.experts.routed_experts.w13_weight.flatten(1)
            assert torch.equal(loaded.sort().values, torch.cat(each, dim=1).sort().values)


def test_a_router_and_neurons_are_where_the_model_has_them() -> None:
    """A layer with experts has a router and no neurons of its own, a dense one the reverse."""
    config = AutoConfig.from_pretrained(tiny_checkpoint("qwen3_moe"))
    there = {site: [SITES[site].exists(FAMILIES["qwen3_moe"], config, layer) for layer in range(4)] for site in SITES}
    assert there["router"] == [True, False, True, True]
    assert there["neurons"] == [False, True, False, False]


async def test_rows_that_drown_in_the_stream_are_probed_too() -> None:
    """Neurons of vLLM's dummy weights are some 1e-11: an edit of their size changes nothing, and the tap is right."""
    async with opened(tiny_checkpoint("qwen3"), sites="neurons", load_format="dummy", **TINY_ENGINE) as model:
        _, handle = await model.generate("small", {"max_tokens": 2, **GREEDY}, capture=CaptureSpec(sites="neurons"))
        await handle.fetch()
        with pytest.raises(UnsupportedModel, match="weights that no checkpoint holds"):
            _ = model.checkpoint
    assert all(0 < rows.abs().max() < 1e-6 for rows in handle.captures.values())


@pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(name, marks=pytest.mark.extended) for name in ("gpt2", "olmo2"))]
)
async def test_compiled_rows_are_those_of_transformers(family, record_property) -> None:
    """Through torch.compile's graph (inductor), taps at all sites fire, read and write the same rows as in eager mode;
    also where vLLM runs transformers' modules, whose rows come as [1, tokens, width], and where queries, keys and values
    are views of one tensor.
    """
    path, reference = tiny_checkpoint(family), Reference(tiny_checkpoint(family))
    prompts = [random_prompt(length, seed) for seed, length in enumerate((1, 40, 133))]
    arguments = {**TINY_ENGINE, "enforce_eager": False}
    async with opened(path, sites="all", **arguments) as model:
        sites = sites_of(model)
        names = list(product((*OPERATIONS, *VARIANTS), sites))
        everything = CaptureSpec(sites=sites)
        _, handles = await model.generate(prompts, {"max_tokens": 20, **GREEDY}, capture=everything)
        specs = [
            spec(name, places_of(model, site)[1], seed=seed, layers=[0, 2], site=site)
            for seed, (name, site) in enumerate(names)
        ]
        _, steered = await model.generate(
            [random_prompt(12, seed) for seed in range(len(specs))],
            {"max_tokens": 8, **GREEDY},
            capture=everything,
            steering=specs,
        )
        await model.fetch_captures_batch([handles, steered])
    for kind, found in (("", hold(handles, reference)), ("steered ", hold(steered, reference, specs))):
        for name, same in found.items():
            record_property(f"compiled {kind}{name}", f"1-cos {1 - same.cosine:.1e}, error {same.error:.1e}")
