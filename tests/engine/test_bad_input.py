"""Bad input is a clear error before the engine is troubled, and the engine goes on."""

from __future__ import annotations

import pytest
from conftest import opened
from support.agreement import bad_requests_fail_alone, fails
from support.bad import BAD_REQUESTS, PROMPT, SIX
from support.rows import GREEDY, TINY_ENGINE, random_prompt
from vllm import SamplingParams

from steercap import CaptureSpec, SteerModel, errors
from steercap.core.framing import HEADER
from steercap.core.plan import EXTRA_ARGS_KEY
from steercap.testing import tiny_checkpoint


@pytest.mark.parametrize("bad", BAD_REQUESTS, ids=lambda bad: bad.says)
async def test_a_bad_request_says_what_is_wrong(tiny, bad) -> None:
    """The value, the range and the remedy; nothing of it reaches the workers, and nothing of others of its call stays."""
    before = await tiny.stats()
    await fails(tiny, bad)
    after = await tiny.stats()
    assert (after.handles_held, after.capture_bytes_claimed) == (0, 0)
    assert after.steps == before.steps or bad.arguments["prompts"] == [PROMPT, []], "it was sent"


async def test_bad_requests_do_not_disturb_those_that_run(tiny, tiny_reference) -> None:
    """While others run, each bad request fails by itself."""
    _, bad = await bad_requests_fail_alone(tiny, tiny_reference)
    assert bad >= len(BAD_REQUESTS)


async def test_generated_alone_of_one_token_selects_nothing(tiny) -> None:
    """The last sampled token is never an input: asking for it alone is an error that says so."""
    with pytest.raises(errors.EmptySelection, match="the last sampled token is never an input"):
        await tiny.generate(PROMPT, {"max_tokens": 1, **GREEDY}, capture=CaptureSpec(tokens="generated"))


async def test_an_unarmed_point_says_how_to_arm_it(smol) -> None:
    """A site without taps is refused with the setting that arms it."""
    with pytest.raises(errors.PointNotArmed, match=r"SteerModel\(\.\.\., sites=\[\.\.\., 'attn_out'\]"):
        await smol.generate("Hello", SIX, capture=CaptureSpec(layers=3, sites="attn_out"))


async def test_the_engine_outlives_a_request_that_vllm_refuses(tiny) -> None:
    """One bad prompt in a list fails the call before any of it runs; the same list without it runs."""
    with pytest.raises(errors.InvalidPrompt):
        await tiny.generate([PROMPT, random_prompt(300, 2)], SIX, capture_layers="all")
    texts, handles = await tiny.generate([PROMPT], SIX, capture_layers="all")
    await handles[0].fetch()
    assert len(texts) == 1


async def test_the_engine_outlives_what_is_no_plan(tiny) -> None:
    """What somebody puts under steercap's key by vLLM's own calls is left alone, and the worker goes on."""
    for number, plan in enumerate(("text", 7, b"", b"junk", [1, 2], HEADER + b"\xdd\xff\xff\xff\xff")):
        params = SamplingParams(max_tokens=2, temperature=0, extra_args={EXTRA_ARGS_KEY: plan})
        async for output in tiny.engine.generate({"prompt_token_ids": PROMPT}, params, f"no-plan-{number}"):
            last = output
        assert len(last.outputs[0].token_ids) == 2
    _, handle = await tiny.generate(PROMPT, SIX, capture_layers="all")
    await handle.fetch()


async def test_a_full_queue_is_no_fault_of_the_request(tiny, monkeypatch) -> None:
    """What vLLM does not admit leaves steercap as its own error, holds nothing, and runs once there is room."""
    with monkeypatch.context() as changed:
        changed.setattr(tiny.engine.vllm_config.scheduler_config, "max_num_queued_reqs", 0)
        with pytest.raises(errors.EngineFailure, match=r"did not run request .*: The engine is currently busy"):
            await tiny.generate(PROMPT, SIX, capture_layers="all")
    stats = await tiny.stats()
    assert (stats.handles_held, stats.capture_bytes_claimed) == (0, 0)
    _, handle = await tiny.generate(PROMPT, SIX, capture_layers="all")
    await handle.fetch()
    assert handle.receipt.rows == len(PROMPT) + SIX["max_tokens"] - 1


async def test_captures_are_read_after_fetch_and_before_release(tiny) -> None:
    """Before: CaptureNotFetched. After: CaptureReleased, for fetching too. Both say what to do."""
    _, handle = await tiny.generate(PROMPT, SIX, capture=CaptureSpec(layers=[0, 1]))
    with pytest.raises(errors.CaptureNotFetched, match=r"await handle\.fetch\(\)"):
        _ = handle.captures
    await handle.fetch()
    with pytest.raises(errors.LayerOutOfRange, match=r"captured: resid_post\[0\], resid_post\[1\]"):
        _ = handle.captures[2]
    assert 2 not in handle.captures
    handle.release()
    handle.release()
    with pytest.raises(errors.CaptureReleased, match="its rows are gone"):
        _ = handle.captures
    with pytest.raises(errors.CaptureReleased):
        await handle.fetch()


async def test_two_sites_need_a_site_to_be_named(tiny) -> None:
    """`captures[layer]` is for one site; with two, the error says how to choose."""
    _, handle = await tiny.generate(PROMPT, SIX, capture=CaptureSpec(layers=1, sites=["resid_pre", "mlp_out"]))
    async with handle:
        with pytest.raises(errors.InvalidSpec, match=r"captures\[layer, site\]"):
            _ = handle.captures[1]
        assert handle.captures[-3, "mlp_out"] is handle.captures[1, "mlp_out"]


@pytest.mark.parametrize(
    ("model", "arguments", "error", "says"),
    [
        ("/nowhere/at/all", {}, errors.ModelNotLoaded, "/nowhere/at/all"),
        ("qwen3", {"no_such_argument": 1}, errors.InvalidSetting, "no_such_argument"),
        ("qwen3", {"worker_extension_cls": "a.B"}, errors.InvalidSetting, "worker_extension_cls"),
        ("qwen3", {"layers": [9]}, errors.LayerOutOfRange, "layer 9 is outside this model of 4 layers"),
        (
            "qwen3",
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}, "async_scheduling": True},
            errors.SteercapError,
            "async",
        ),
        # Of a worker process, which vLLM only says has failed.
        (
            "qwen3",
            {"hf_overrides": {"intermediate_size": 300}},
            errors.ModelNotLoaded,
            r"did not start: RuntimeError: start",
        ),
        (
            "gemma3",
            {"sites": "router", "hf_overrides": {"architectures": ["Rnj1ForCausalLM"]}},
            errors.UnsupportedModel,
            "knows no router in layers of rnj1",
        ),
    ],
)
async def test_an_engine_that_cannot_start_says_why(model, arguments, error, says) -> None:
    """An error names the cause, and nothing is left running."""
    path = model if model.startswith("/") else tiny_checkpoint(model)
    with pytest.raises(error, match=says):
        async with opened(path, **{**TINY_ENGINE, **arguments}):
            pytest.fail("it started")


async def test_another_implementation_of_a_known_architecture_is_served_without_what_it_lacks() -> None:
    """transformers' own modules carry the whole stream, and call attention past hooks."""
    async with opened(tiny_checkpoint("llama"), model_impl="transformers", sites="all", **TINY_ENGINE) as model:
        sites = {point.site for point in model.points}
    blocks = {"attn_in", "attn_out", "mlp_in", "mlp_out", "z", "neurons"}
    assert sites == {"embed", "resid_pre", "resid_mid", "resid_post", "final_norm", *blocks}


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"sites": ["resid_post", "resid_late"]}, errors.UnknownName, "unknown site 'resid_late'"),
        ({"overflow": "drop"}, errors.InvalidSetting, "overflow='drop'; known: 'wait', 'error'"),
        ({"transport": "pigeon"}, errors.InvalidSetting, "transport='pigeon'"),
        ({"capture_bytes": 1e9}, errors.InvalidSetting, "whole number"),
        ({"capture_bytes": 0}, errors.InvalidSetting, "capture_bytes=0"),
    ],
)
def test_a_bad_setting_is_refused_before_anything_starts(settings, error, says) -> None:
    """Settings are checked when the model is described, not when it starts."""
    with pytest.raises(error, match=says):
        SteerModel("anything", **settings)


async def test_a_model_that_is_not_open_says_so() -> None:
    """Before start and after close, every call is ModelClosed."""
    model = SteerModel("anything")
    with pytest.raises(errors.ModelClosed, match="never started"):
        await model.generate("x")
    await model.aclose()
    await model.aclose()
    for call in (model.generate("x"), model.start(), model.stats()):
        with pytest.raises(errors.ModelClosed, match="closed"):
            await call
