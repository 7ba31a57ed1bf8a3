"""Modules by their paths, and points by TransformerLens's names, on a real engine against transformers."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest
import torch
from support.rows import CRAMPED, GREEDY, TINY_ENGINE, by_part, inputs_of, random_prompt, within

from steercap import Add, CaptureSpec, Point, SteeringSpec, SteerModel, errors
from steercap.testing import tiny_checkpoint
from steercap.testing.reference import Reference

pytestmark = pytest.mark.slow

PATHS = (
    "model.layers.*.mlp.down_proj.input",
    "model.layers.*.self_attn.q_norm.output",
    "model.layers.*.input_layernorm.output",
    "model.layers.*.self_attn.input",
    "model.embed_tokens.output",
    "model.norm.output",
    "model.layers.*.mlp.output",  # behind "mlp_out", so that no sum holds of what is edited here
)


async def test_modules_are_read_and_written_by_their_paths() -> None:
    """Rows and edits of chunked prompts, beside each other, are transformers'; our own sites agree bit for bit."""
    reference = await asyncio.to_thread(Reference, tiny_checkpoint("qwen3"))
    sites = ["neurons", "final_norm", "attn_in", "mlp_out", *PATHS]
    async with SteerModel(str(tiny_checkpoint("qwen3")), sites=sites, **CRAMPED) as model:
        assert model.points[1, "model.layers.*.self_attn.q_norm.output"].shape == (4, 32)
        prompts = [random_prompt(length, length) for length in (3, 40, 150)]
        edits = [None] + [
            SteeringSpec([Add(torch.randn(model.points[point].width), 3.0, layer=point.layer, site=point.site)])
            for point in (Point(1, PATHS[1]), Point(2, PATHS[2]))
        ]
        params = {"max_tokens": 9, **GREEDY}
        capture = CaptureSpec(at=[*sites, "blocks.3.hook_resid_post"])
        _, handles = await model.generate(prompts, params, capture=capture, steering=edits)
        await model.fetch_captures_batch(handles)
        for handle, edit in zip(handles, edits, strict=True):
            length = len(handle.prompt_token_ids)
            known = reference.rows(inputs_of(handle), handle.points, steering=edit, prompt_len=length)
            within(by_part(handle, known))
            if edit is not None:
                clean = reference.rows(inputs_of(handle), handle.points)
                assert min(same.cosine for same in by_part(handle, clean).values()) < 0.999
            rows = handle.captures
            assert torch.equal(rows["model.norm.output"], rows["final_norm"])
            for layer in range(4):
                assert torch.equal(rows[layer, PATHS[6]], rows[layer, "mlp_out"])
                assert torch.equal(rows[layer, PATHS[0]], rows[f"blocks.{layer}.mlp.hook_post"])
                assert torch.equal(rows[f"model.layers.{layer}.self_attn.input"], rows[layer, "attn_in"])


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("lm_head.output", "lm_head.output cannot be a site: no forward pass calls the module"),
        pytest.param(
            "model.layers.1.self_attn.q_proj.output",
            r"no 'q_proj' in a Qwen3Attention, which holds qkv_proj",
            marks=pytest.mark.extended,
        ),
    ],
)
async def test_a_path_that_leads_to_no_rows_is_refused_at_the_start(path, says) -> None:
    with pytest.raises(errors.UnsupportedModel, match=says):
        await SteerModel(str(tiny_checkpoint("qwen3")), sites=[path], **TINY_ENGINE).start()


@pytest.fixture
def unreadable(tmp_path) -> Path:
    """A checkpoint whose weights end too early."""
    folder = Path(shutil.copytree(tiny_checkpoint("qwen3"), tmp_path / "unreadable"))
    for file in folder.glob("*.safetensors"):
        os.truncate(file, file.stat().st_size - 1000)
    return folder


async def test_a_misspelt_path_is_refused_before_weights_are_read(unreadable) -> None:
    says = r"model\.layer\.0\.mlp\.output is not in this model, whose layers are model\.layers"
    with pytest.raises(errors.UnsupportedModel, match=says):
        await SteerModel(str(unreadable), sites=["model.layer.*.mlp.output"], **TINY_ENGINE).start()
