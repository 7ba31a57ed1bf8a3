"""Tests of several streams on an engine of DeepSeek-V4: `test_streams.py` runs them, once for each forward vLLM has."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
import torch
from conftest import opened
from support.rows import random_prompt
from support.streams import ARMED, Equations, agrees, apart, streams_checkpoint

from steercap import Ablate, Add, CaptureSpec, SteeringSpec, SteerModel
from steercap.architectures.families.proved import fingerprint_of
from steercap.captures.handle import CaptureHandle
from steercap.core.spec import Point
from steercap.errors import InvalidSpec, InvalidVector

LAYERS, PROMPT = 3, 140  # beyond the window, and one chunk of what is compressed to a 128th
GREEDY = {"max_tokens": 6, "temperature": 0.0}


@pytest.fixture(scope="session")
async def v4() -> AsyncIterator[SteerModel]:
    """The tiny DeepSeek-V4, all that it has armed."""
    engine = {"max_model_len": 256, "kv_cache_memory_bytes": 64 << 20, "tokenizer_mode": "hf", "max_num_seqs": 8}
    async with opened(streams_checkpoint(), sites=ARMED, enforce_eager=True, **engine) as model:
        yield model


@pytest.fixture(scope="session")
def equations() -> Equations:
    """The published equations over the checkpoint of `v4`."""
    return Equations(streams_checkpoint())


async def captured(model: SteerModel, steering: SteeringSpec | None = None, **spec: object) -> CaptureHandle:
    """All rows of one request."""
    asked = CaptureSpec(layers="all", sites=ARMED, **spec)  # type: ignore[arg-type]
    _, handle = await model.generate(random_prompt(PROMPT, 1), GREEDY, capture=asked, steering=steering)
    await handle.fetch()
    return handle


@pytest.fixture(scope="session")
async def clean(v4) -> CaptureHandle:
    """All rows of the request without edits, which the interpreter takes seconds for."""
    return await captured(v4)


async def test_the_layers_run_the_forward_that_was_asked_for(v4) -> None:
    """That for NVIDIA is another code than that for CPU, and what runs is named by its fingerprint."""
    from vllm.models.deepseek_v4.cpu.model import DeepseekV4DecoderLayer as OnCPU
    from vllm.models.deepseek_v4.nvidia.model import DeepseekV4DecoderLayer as OnNvidia

    on_nvidia = os.environ.get("DEEPSEEK_V4_FORWARD") == "nvidia"
    (found,) = v4.serving.opened().loaded.code.values()
    assert found == fingerprint_of(OnNvidia if on_nvidia else OnCPU)


async def test_rows_are_those_of_the_published_equations(clean, equations, record_property) -> None:
    """Streams, coefficients and what blocks read: every layer, every token, prefill and decode, and the logits."""
    shapes = {str(point.site): (tuple(rows.shape[1:]), str(rows.dtype)) for point, rows in clean.captures.items()}
    assert shapes["mhc_streams_pre_attn"] == shapes["mhc_streams_final"] == ((4, 256), "torch.bfloat16")
    assert shapes["mhc_ffn_post_mix"] == ((4,), "torch.float32")
    assert shapes["mhc_attn_res_mix"] == ((4, 4), "torch.float32")
    assert len(clean.positions) == PROMPT + 5
    record_property("worst", str(agrees(clean, equations)))
    said = clean.captures[Point(1, "mhc_attn_post_mix")]
    assert said.std(0).min() > 0.02, "coefficients must differ from token to token, or rows of another would pass"


@pytest.mark.parametrize("site", ["mhc_streams_pre_attn", "mhc_streams_pre_mlp", "mhc_streams_final"])
async def test_a_vector_for_one_stream_changes_that_stream_alone(v4, clean, equations, site) -> None:
    """At its point; what comes after is what the equations make of the changed streams."""
    point = Point(2 if site == "mhc_streams_final" else 1, site)
    vector = torch.randn(256, generator=torch.Generator().manual_seed(1)) * clean.captures[point].float().std() * 3
    handle = await captured(v4, SteeringSpec([Add(vector, layer=point.layer, site=site, part=2)]))
    before, after = clean.captures[point][:PROMPT], handle.captures[point][:PROMPT]
    assert torch.equal(after[:, [0, 1, 3]], before[:, [0, 1, 3]])
    assert torch.equal(after[:, 2], (before[:, 2].float() + vector).bfloat16())
    added = torch.zeros(4, 256)
    added[2] = vector
    agrees(handle, equations, {point: added})


async def test_a_vector_for_each_stream_is_one_for_all(v4, equations) -> None:
    """It is what the vector, repeated for each of them, is."""
    vector = torch.randn(256, generator=torch.Generator().manual_seed(2))
    place = {"layer": 1, "site": "mhc_streams_pre_mlp"}
    each = await captured(v4, SteeringSpec([Add(vector, **place, part="each")]))
    flat = await captured(v4, SteeringSpec([Add(vector.repeat(4), **place)]))
    assert torch.equal(each.token_ids, flat.token_ids)
    assert all(torch.equal(each.captures[point], flat.captures[point]) for point in each.points)
    agrees(each, equations, {Point(1, "mhc_streams_pre_mlp"): vector.repeat(4, 1)})


async def test_an_edit_that_reads_a_stream_reads_that_one(v4, clean) -> None:
    """A direction ablated in one stream is still in the others, bit for bit."""
    point = Point(1, "mhc_streams_pre_attn")
    vector = torch.nn.functional.normalize(torch.randn(256, generator=torch.Generator().manual_seed(3)), dim=0)
    before = clean.captures[point][:PROMPT]
    after = (await captured(v4, SteeringSpec([Ablate(vector, layer=1, site=point.site, part=-1)]))).captures[point][
        :PROMPT
    ]
    assert torch.equal(after[:, :3], before[:, :3])
    along = (after[:, 3].double() @ vector.double()).abs()
    assert (along < 2**-7 * before[:, 3].double().norm(dim=1)).all()
    assert (before[:, 3].double() @ vector.double()).abs().max() > 2**-4 * before[:, 3].double().norm(dim=1).mean()


async def test_rows_before_an_edit_are_those_without_it(v4, clean) -> None:
    """`before_edits` of the streams that are edited, and of what reads them what follows from the edit."""
    point, vector = Point(1, "mhc_streams_pre_mlp"), torch.full((256,), 0.5)
    edited = (
        await captured(v4, SteeringSpec([Add(vector, layer=1, site=point.site, part=0)]), before_edits=True)
    ).captures
    assert torch.equal(edited[point][:PROMPT], clean.captures[point][:PROMPT])
    changed = edited[Point(1, "mhc_ffn_post_mix")][:PROMPT] != clean.captures[Point(1, "mhc_ffn_post_mix")][:PROMPT]
    assert changed.any(1).all()


async def test_the_last_streams_are_the_models(v4) -> None:
    """Whatever layers are named, there is one point of them, and one place to steer."""
    asked = CaptureSpec(layers=[0, 1], sites="mhc_streams_final")
    _, handle = await v4.generate(random_prompt(9, 4), GREEDY, capture=asked)
    await handle.fetch()
    assert handle.points == (Point(LAYERS - 1, "mhc_streams_final"),)
    steering = SteeringSpec([Add(torch.ones(256), layer=0, site="mhc_streams_final", part=0)])
    _, steered = await v4.generate(random_prompt(9, 4), GREEDY, capture=asked, steering=steering)
    await steered.fetch()
    same, rows = handle.captures[0, "mhc_streams_final"][:9], steered.captures[0, "mhc_streams_final"][:9]
    assert torch.equal(rows[:, 0], (same[:, 0].float() + 1).bfloat16())


async def test_one_file_holds_rows_of_several_dtypes(clean, tmp_path) -> None:
    """And of several shapes: what is read back is what was captured."""
    clean.save(tmp_path / "rows.safetensors")
    read = CaptureHandle.load(tmp_path / "rows.safetensors")
    assert {rows.dtype for rows in read.captures.values()} == {torch.bfloat16, torch.float32}
    assert all(torch.equal(read.captures[point], rows) for point, rows in clean.captures.items())


async def test_a_mean_of_coefficients_is_that_of_their_rows(v4, clean) -> None:
    """Reductions that run along take rows of any shape and dtype."""
    whole, mean = clean.captures, (await captured(v4, reduce="mean")).captures
    for point in (Point(1, "mhc_ffn_res_mix"), Point(0, "mhc_attn_post_mix"), Point(2, "mhc_streams_final")):
        assert apart(mean[point].view(-1), whole[point].double().mean(0).view(-1)) < 1e-5


@pytest.mark.parametrize(
    ("edit", "error", "says"),
    [
        (Add([1.0] * 4, layer=1, site="mhc_attn_post_mix"), InvalidSpec, "can be read but not changed"),
        (Add([1.0] * 16, layer=1, site="mhc_ffn_res_mix"), InvalidSpec, "can be read but not changed"),
        (Add([1.0] * 256, layer=1, site="mhc_streams_pre_mlp"), InvalidVector, "give part=, one of 4 or 'each'"),
        (Add([1.0] * 256, layer=1, site="mhc_streams_pre_mlp", part=4), InvalidSpec, "have 4 parts, 0 to 3"),
        (Add([1.0] * 64, layer=1, site="mhc_streams_pre_mlp", part=1), InvalidVector, "a part of the rows .* has 256"),
        (Add([1.0] * 256, layer=1, site="mlp_out", part=1), InvalidSpec, "rows with several axes"),
    ],
)
async def test_what_no_stream_can_take_is_refused(v4, edit, error, says) -> None:
    """Before anything runs, and with what to do instead."""
    with pytest.raises(error, match=says):
        await v4.generate(random_prompt(9, 5), GREEDY, steering=edit)
