"""The checks of `verify_gpu.py`, each a function that fills in its figures and raises when one is not as it must be."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from support import agreement, stress
from support.agreement import EVERYTHING, captured, same_tokens_elsewhere, sites_of, worst_of
from support.attention import attention_agrees
from support.bad import BAD_REQUESTS
from support.biases import biases_agree
from support.codecs import codecs_agree
from support.experts import experts_agree
from support.lora import adapters_agree
from support.overflow import overflowing_edits
from support.pooling import embeddings_agree
from support.quantised import KINDS, quantised_reference, unfit
from support.rows import (
    ALL_SITES,
    GREEDY,
    counter,
    flattened,
    hold,
    inputs_of,
    parity,
    random_prompt,
    settled,
    within,
    worst,
)
from support.sketching import sketches_agree
from support.specs import OPERATIONS, spec

from steercap import CaptureHandle, CaptureSpec, SteerModel
from steercap.adapters.gpus import gather_processes
from steercap.architectures.families import FAMILIES
from steercap.testing import Parity, Reference, compare_rows, tiny_checkpoint
from steercap.testing.architectures import FAMILY_CONFIGS
from steercap.testing.reference import PERFECT
from verification import mechanistic
from verification.engines import NORMS, QUANTISED, ROUTED, SPLIT, EngineChoice, Engines, Machine, surroundings

Show = dict[str, Any]
#: bfloat16, a layer given the captured row before it, and graphs on against off: the least row cosine.
BF16_COSINE = 0.999
#: Of each of vLLM's routers for CUDA one that it has for some of them: the greatest scores, biased scores by groups of
#: experts, and functions of the models, one of them in Triton. DeepSeek's latent attention wants kernels of its own.
ROUTERS = ("qwen3_moe", "mixtral", "glm4_moe", "gpt_oss", "llama4_text", "gemma4_moe")
#: Batches of 3, 4, 13 and 1: CUDA graphs exist for 1, 2, 4, 8, 16, ..., so two of these are padded when they decode.
BATCHES = ((9, 30, 77), (1, 7, 40, 133), tuple(range(3, 68, 5)), (100,))


@dataclass(frozen=True)
class Run:
    """What every check is given.

    Args:
        machine: where it runs.
        engines: the engines.
        families: families to check for parity.
        requests: how many the memory check makes.
    """

    machine: Machine
    engines: Engines
    families: tuple[str, ...]
    requests: int


@dataclass(frozen=True)
class Check:
    """A check by its name.

    Args:
        run: the function.
        engines: names of the engines it shares with others.
        alone: whether nothing may run beside it.
        unfit: why it cannot run on a machine, or "".
    """

    run: Callable[[Run, Show], Awaitable[None]]
    engines: Callable[[Run], Sequence[str]]
    alone: bool = False
    unfit: Callable[[Machine], str] = lambda _machine: ""


def figures(same: Parity) -> str:
    """A worst row in a few characters."""
    return f"1-cos {1 - same.cosine:.1e} error {same.error:.1e}"


async def each(names: Iterable[str], one: Callable[[str], Awaitable[None]]) -> None:
    """Run all, then raise what went wrong with any of them."""
    names = list(names)
    ended = await asyncio.gather(*(one(name) for name in names), return_exceptions=True)
    failed = {name: end for name, end in zip(names, ended, strict=True) if isinstance(end, BaseException)}
    for error in failed.values():  # the first, with its traceback
        raise AssertionError("; ".join(f"{name}: {end!r}" for name, end in failed.items())) from error


def happened(facts: dict[str, int], **least: int) -> None:
    """Assert that what the check is about came to pass at all."""
    short = {name: count for name, count in facts.items() if count < least.get(name.replace(" ", "_"), 0)}
    assert not short, f"too few to prove anything: {short}, wanted {least}"


# Rows and edits against transformers


async def check_parity(run: Run, show: Show) -> None:
    """float32, all sites, all layers, several batches: every row, and every weight of attention, against transformers on
    the same tokens.
    """
    if run.machine.cuda:
        show["float32 matmul precision"] = os.environ.get("VLLM_FLOAT32_MATMUL_PRECISION", "highest")
        show["triton dot"] = os.environ.get("TRITON_F32_DEFAULT", "tf32")

    async def one(family: str) -> None:
        model, reference = await run.engines.get(family), run.engines.reference(tiny_checkpoint(family))
        if run.machine.cuda:
            defaults(model)
        found = []
        for number, lengths in enumerate(BATCHES if run.machine.cuda else BATCHES[1:3]):
            handles = await captured(model, lengths, seed=100 * number)
            found.append(await asyncio.to_thread(rows_of, handles, reference))
        show[family] = worse_parts(worst(found))
        within(worst(found))
        if FAMILIES[family].attention:
            show[f"{family} attention"] = f"{await attention_agrees(model, reference):.1e}"

    await each(run.families, one)


def defaults(model: SteerModel) -> None:
    """Assert that vLLM's defaults for CUDA are on, as far as its configuration says."""
    config = model.engine.vllm_config
    cache, scheduler = config.cache_config, config.scheduler_config
    found = {
        "mode": config.compilation_config.mode.name,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "async scheduling": bool(scheduler.async_scheduling),
        "runner V2": bool(config.use_v2_model_runner),
        "prefix caching": bool(cache.enable_prefix_caching),
        "chunks": bool(scheduler.enable_chunked_prefill),
    }
    wanted = dict.fromkeys(found, True) | {"mode": "VLLM_COMPILE", "graphs": "FULL_AND_PIECEWISE"}
    assert found == wanted, f"these are not vLLM's defaults for CUDA: {found}"


def rows_of(handles: Sequence[CaptureHandle], reference: Reference) -> dict[str, Parity]:
    """The worst rows, whatever they are."""
    return worst(parity(handle, reference) for handle in handles)


def worse_parts(found: dict[str, Parity]) -> dict[str, str]:
    """The worst row of all sites: of prompts, and of what was generated."""
    return {
        part: figures(worst_of({name: same for name, same in found.items() if name.endswith(part)}))
        for part in ("prompt", "generated")
        if any(name.endswith(part) for name in found)
    }


async def check_steering(run: Run, show: Show) -> None:
    """float32, every operation at every site in one batch, against transformers with the same edit."""

    async def one(family: str) -> None:
        model, reference = await run.engines.get(family), run.engines.reference(tiny_checkpoint(family))
        found = await agreement.edits_agree(model, reference)
        name = min(found, key=lambda name: found[name].cosine)
        show[family] = f"{len(found)} operations, worst {name} {figures(worst_of(found))}"

    await each(run.families, one)


async def check_norms(run: Run, show: Show) -> None:
    """float32, no layer's input tapped, so that the taps behind layers are in the norms: rows and edits as above."""

    async def one(name: str) -> None:
        model = await run.engines.get(name)
        reference = run.engines.reference(tiny_checkpoint(name.removesuffix(NORMS)))
        handles = [handle for lengths in BATCHES[:3] for handle in await captured(model, lengths)]
        rows = await asyncio.to_thread(rows_of, handles, reference)
        edits = await agreement.edits_agree(model, reference)
        show[name] = {**worse_parts(rows), f"{len(edits)} operations": figures(worst_of(edits))}
        within(rows)

    await each(_norms_engines(run), one)


def _norms_engines(run: Run) -> list[str]:
    return [family + NORMS for family in run.families if FAMILIES[family].loops]


async def check_bf16(run: Run, show: Show) -> None:
    """bfloat16, block by block: the least row cosine with transformers in float32 on the rows captured before it.

    With transformers in bfloat16 it is shown too, and not judged: two roundings are in it, ours and theirs.
    """

    async def one(name: str) -> None:
        model = await run.engines.get(name)
        path = Path(model.model)
        handles: Any
        if name == "smollm2":
            prompts = ["The capital of France is", "Once upon a time there was", "def fibonacci(n):", "1"]
            _, handles = await model.generate(prompts, {"max_tokens": 24, **GREEDY}, capture=EVERYTHING)
            await model.fetch_captures_batch(handles)
        else:
            handles = [
                handle for number in (0, 1) for handle in await captured(model, BATCHES[1 + number], seed=number)
            ]
        half, full = run.engines.reference(path, "bfloat16"), run.engines.reference(path)
        exact, same, whole, theirs = await asyncio.to_thread(layer_by_layer, handles, half, full)
        show[name] = {
            "layer by layer, least cosine with float32": f"{worst_of(exact).cosine:.6f}",
            "with bfloat16": f"{worst_of(same).cosine:.6f}",
            "from end to end with float32": f"{whole.cosine:.4f}",
            "transformers in bfloat16 from end to end with float32": f"{theirs.cosine:.4f}",
        }
        beyond = {part: row for part, row in exact.items() if row.cosine <= BF16_COSINE}
        assert not beyond, f"below {BF16_COSINE}: {beyond}"

    await each(_bf16_engines(run), one)


def _bf16_engines(run: Run) -> list[str]:
    return ["bf16", "smollm2"] if run.machine.smollm2 else ["bf16"]


def layer_by_layer(
    handles: Sequence[CaptureHandle], half: Reference, full: Reference
) -> tuple[dict[str, Parity], dict[str, Parity], Parity, Parity]:
    """The worst rows layer by layer, against transformers in float32 and in bfloat16; from end to end, the worst row of
    the capture and of transformers in bfloat16 against float32.
    """
    exact, same = (worst(parity(handle, one, by_layer=True) for handle in handles) for one in (full, half))
    return exact, same, worst_of(rows_of(handles, full)), rounding(handles, half, full)


def rounding(handles: Sequence[CaptureHandle], half: Reference, full: Reference) -> Parity:
    """The worst row of transformers in bfloat16 against transformers in float32, on the tokens of `handles`."""
    found = PERFECT
    for handle in handles:
        known, own = (one.rows(inputs_of(handle), handle.points) for one in (full, half))
        for point in handle.points:
            found = found.worse(compare_rows(own[point], known[point]))
    return found


async def check_graphs(run: Run, show: Show) -> None:
    """Compiled with CUDA graphs against eager, on the same tokens: decoded and prefilled rows."""

    async def one(pair: str) -> None:
        fast, eager = await asyncio.gather(*(run.engines.get(name) for name in pair.split(" | ")))
        found: dict[str, Parity] = {}
        handles: list[CaptureHandle] = []
        for number, lengths in enumerate(BATCHES[:3]):
            decoded = await captured(fast, lengths, seed=30 * number)
            for name, rows in (("decoded", decoded), ("prefilled", await _prefilled(fast, decoded))):
                same = worst_of(await same_tokens_elsewhere(rows, eager))
                found[name] = found.get(name, PERFECT).worse(same)
            handles += decoded
        show[pair] = {name: figures(same) for name, same in found.items()}
        if fast.engine.model_config.dtype == torch.float32:
            within(found)
            return
        half, full = (run.engines.reference(Path(fast.model), dtype) for dtype in ("bfloat16", "float32"))
        noise = await asyncio.to_thread(rounding, handles, half, full)
        show[pair] |= {"bfloat16 itself, transformers with transformers in float32": figures(noise)}
        assert worst_of(found).cosine > min(BF16_COSINE, noise.cosine), "further apart than bfloat16 is from float32"

    await each([" | ".join(pair) for pair in _pairs(run.machine)], one)


def _pairs(machine: Machine) -> list[tuple[str, str]]:
    of_cuda = [("qwen3", "qwen3 eager"), ("bf16", "bf16 eager"), ("bf16" + NORMS, "bf16 eager" + NORMS)]
    return of_cuda if machine.cuda else [("bf16 compiled", "bf16")]


async def _prefilled(model: SteerModel, handles: Sequence[CaptureHandle]) -> list[CaptureHandle]:
    """The same tokens again, all of them prompts."""
    prompts = [{"prompt_token_ids": inputs_of(handle)} for handle in handles]
    again: Any
    _, again = await model.generate(prompts, {"max_tokens": 1}, capture=CaptureSpec(sites=sites_of(model)))
    await model.fetch_captures_batch(again)
    found: list[CaptureHandle] = again
    return found


# Quantised and adapted


async def check_quantised(run: Run, show: Show) -> None:
    """Each kind of quantised model, bfloat16, step by step from site to site: rows and edits are transformers' on what its
    codes stand for.
    """
    show |= {kind: f"SKIP: {reason}" for kind in KINDS if (reason := unfit(kind, run.machine.device))}

    async def one(kind: str) -> None:
        model = await run.engines.get(QUANTISED + kind)
        found = await agreement.steps_agree(model, quantised_reference(kind, run.machine.device), KINDS[kind].least)
        steered = {name: same for name, same in found.items() if name.startswith("steered")}
        show[kind] = {**worse_parts(found), "steered": figures(worst_of(steered))}

    await each(_fit_kinds(run.machine), one)


def _fit_kinds(machine: Machine) -> list[str]:
    return [kind for kind in KINDS if not unfit(kind, machine.device)]


async def check_lora(run: Run, show: Show) -> None:
    """Requests with three adapters and with none in one batch, clean and steered: each as its own merged checkpoint."""
    from vllm.lora.request import LoRARequest

    model = await run.engines.get("lora")
    with tempfile.TemporaryDirectory(prefix="steercap-verify-") as folder:
        found = await adapters_agree(model, Path(model.model), Path(folder), LoRARequest)
    for who in ("adapter", "none"):
        rows = {name: same for name, same in found.items() if name.startswith(who)}
        show[who] = worse_parts(rows)


# What moves requests about


async def check_stress(run: Run, show: Show) -> None:
    """Chunks, cache hits, preemption, one-token prompts, cancellation, samples, 64 staggered requests, 40 specs."""
    model, reference = await run.engines.get("cramped alone"), run.engines.reference(tiny_checkpoint("qwen3"))
    seconds = 0.2 if run.machine.cuda else 1.0
    staggered = {"preemptions": 1, "cached_tokens": 1, "captures": 40, "cancelled": 1}
    scenarios: list[tuple[stress.Scenario, dict[str, int]]] = [
        (stress.a_prompt_longer_than_a_step, {"steps": 4 + 9}),
        (stress.prefix_cache_hits, {"cached_tokens": 1}),
        (stress.preemption, {"preemptions": 1, "rows_written_again": 1}),
        (stress.steered_preemption, {"preemptions": 1, "rows_written_again": 1}),
        (stress.reductions_along, {"preemptions": 1}),
        (stress.one_token_prompts, {}),
        (stress.passes_of_no_request, {"passes": 10}),
        (stress.cancelled_neighbours, {"cancelled": 6}),
        (lambda model, reference: stress.everything_at_once(model, reference, seconds), staggered),
        (
            lambda model, reference: stress.steered_requests_at_once(model, reference, seconds),
            staggered | {"captures": 60, "steered_from_the_cache": 1},
        ),
    ]
    names = [scenario.__name__ for scenario, _ in scenarios[:-2]] + ["everything_at_once", "steered_requests_at_once"]
    total, failed = PERFECT, []
    for name, (scenario, least) in zip(names, scenarios, strict=True):
        try:
            shown = await scenario(model, reference)
            total = total.worse(worst_of(shown.worst))
            show[name] = {"worst row": figures(worst_of(shown.worst)), **shown.facts}
            happened(shown.facts, **least)
        except AssertionError as error:
            failed.append(f"{name}: {error}")
    show["worst row of all"] = figures(total)
    assert not failed, "; ".join(failed)


async def check_bias(run: Run, show: Show) -> None:
    """Biases of logits of every scope, beside edits, in one batch: tokens and log probabilities of transformers, each
    with a processor of its own; and with drafts, as far as the tokens go.
    """
    reference = run.engines.reference(tiny_checkpoint("qwen3"))

    async def one(name: str) -> None:
        model = await run.engines.get(name)
        before = _drafts(model) if name in _methods(run.machine) else None
        show[name] = f"{await biases_agree(model, reference):.1e} nats"
        if before is not None:
            drafts = {kind: count - before[kind] for kind, count in _drafts(model).items()}
            show[name] += f", drafts {drafts}"
            happened(drafts, accepted=5, rejected=5)

    await each(_bias_engines(run), one)


def _bias_engines(run: Run) -> list[str]:
    layouts = ["tensor_parallel_size", "pipeline_parallel_size"] if not _two_workers(run.machine) else []
    return ["qwen3", *_methods(run.machine), *layouts]


async def check_overflow(run: Run, show: Show) -> None:
    """Edits that overflow fail alone, in every dtype, eager and with graphs; rows of clean requests stay what they were."""

    async def one(name: str) -> None:
        model = await run.engines.get(name)
        found = await overflowing_edits(
            model, random.Random(5), rounds=6, capture=EVERYTHING, layers=4, sites=ALL_SITES
        )
        show[name] = found
        assert min(found.values()) >= 8, f"too few to prove anything: {found}"

    await each(_overflow_engines(run), one)


def _overflow_engines(run: Run) -> list[str]:
    names = ["cramped", "cramped float16", "cramped bfloat16"]
    return [*names, *(f"{name} eager" for name in names)] if run.machine.cuda else names


async def check_bad(run: Run, show: Show) -> None:
    """Bad requests raise their own errors while others run; the others' rows are right."""
    model, reference = await run.engines.get("qwen3"), run.engines.reference(tiny_checkpoint("qwen3"))
    found, refused = await agreement.bad_requests_fail_alone(model, reference)
    show |= {"refused": refused, "kinds": len(BAD_REQUESTS), "neighbours": figures(worst_of(found))}


async def check_projections(run: Run, show: Show) -> None:
    """What rows are along directions, computed beside the model, is what whole rows give here."""
    model = await run.engines.get("qwen3")
    # Two runs of the same prompts: with TF32 attention they differ by more than roundings of float32.
    bound = 1e-3 if run.machine.cuda else 1e-4
    for site in ("resid_post", "mlp_out"):
        show[site] = f"{await agreement.projections_agree(model, site, bound):.1e} row norms"


# Engines of several shapes


async def check_cache(run: Run, show: Show) -> None:
    """One fresh VLLM_CACHE_ROOT: sites A, B, A, plain vLLM, A. Each start passes its probe, and its rows are right."""
    await run.engines.up()  # the variable below is for our own starts
    reference, path = run.engines.reference(tiny_checkpoint("qwen3")), tiny_checkpoint("qwen3")
    first, second = ("resid_post",), ("attn_out", "mlp_out")
    tokens: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory(prefix="steercap-verify-") as root:
        wanted = replace(run.machine.engine("qwen3"), environment={"VLLM_CACHE_ROOT": root})
        artifacts = 0
        for name, sites in (("A", first), ("B", second), ("A again", first), ("plain", None), ("A last", first)):
            before = time.perf_counter()
            if sites is None:
                seconds, tokens[name] = await plain_tokens(wanted)
                shown: Show = {"start s": seconds}
            else:
                model = await run.engines.start(wanted, sites=sites)
                try:
                    shown = {"start s": round(time.perf_counter() - before, 1)}
                    idle = await model.run(_cache_prompts(), {"max_tokens": 12, **GREEDY})
                    tokens[name] = [list(raw.output.outputs[0].token_ids) for raw in idle]
                    handles = await captured(model, (20, 50), 12, capture=CaptureSpec(sites=sites))
                    shown["worst row"] = figures(worst_of(await asyncio.to_thread(hold, handles, reference)))
                finally:
                    await model.aclose()
            files = sum(found.is_file() for found in Path(root).rglob("*"))
            show[name] = {**shown, "new files": files - artifacts}
            artifacts = files
    different = [name for name, found in tokens.items() if found != tokens["plain"]]
    assert not different, f"idle tokens differ from plain vLLM's with {different}: {path}"


def _cache_prompts() -> list[list[int]]:
    return [random_prompt(20 + seed, 900 + seed) for seed in range(4)]


async def plain_tokens(wanted: EngineChoice) -> tuple[float, list[list[int]]]:
    """Seconds that vLLM without steercap takes to start, and what it answers."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = {name: value for name, value in wanted.arguments.items() if name != "capture_bytes"}
    args, before = AsyncEngineArgs(model=str(wanted.path), **arguments), time.perf_counter()
    with surroundings(wanted.environment):
        plain = await asyncio.to_thread(AsyncLLM.from_engine_args, args)
    seconds = round(time.perf_counter() - before, 1)

    async def one(index: int, prompt: list[int]) -> list[int]:
        params = SamplingParams(max_tokens=12, **GREEDY, output_kind=RequestOutputKind.FINAL_ONLY)
        (rendered,) = await plain.renderer.render_cmpl_async([{"prompt_token_ids": prompt}])
        outputs = [output async for output in plain.generate(rendered, params, f"plain-{index}")]
        return list(outputs[-1].outputs[0].token_ids)

    try:
        return seconds, await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(_cache_prompts())))
    finally:
        plain.output_handler.cancel()
        await asyncio.wait([plain.output_handler])
        await asyncio.to_thread(plain.shutdown)


def _layouts(machine: Machine) -> list[str]:
    """How workers share the work of one model: the engines of `check_parallel`."""
    return ["tp 4", "tp 2 pp 2", "dp 4"] if machine.gpus >= 4 else ["tp 2", "pp 2", "dp 2"]


async def check_parallel(run: Run, show: Show) -> None:
    """Several workers, tensor, pipeline and data parallel: rows and edits as transformers', rows as one worker's."""
    reference = run.engines.reference(tiny_checkpoint("qwen3"))
    layouts = _layouts(run.machine)
    if not run.machine.cuda:  # the workers of one engine take all cores
        for layout in layouts:
            await each([layout], lambda name: _parallel(run, show, name, reference))
        return
    await each(layouts, lambda name: _parallel(run, show, name, reference))


async def _parallel(run: Run, show: Show, layout: str, reference: Reference) -> None:
    model, single = await run.engines.get(layout), await run.engines.get("qwen3")
    found, handles = await agreement.workers_agree(model, reference)
    one = await same_tokens_elsewhere(handles, single)
    steered = worst_of({name: same for name, same in found.items() if name.startswith("steered")})
    clean = worst_of({name: same for name, same in found.items() if not name.startswith("steered")})
    show[layout] = {"rows": figures(clean), "steered": figures(steered), "with one worker": figures(worst_of(one))}
    within(one)
    if layout.startswith("dp"):
        prompts = [random_prompt(length, length) for length in range(1, 65)]
        vector = spec("add", 128, seed=7, layers="all")
        _, given = await model.generate(prompts, agreement.SEVEN, capture=CaptureSpec(sites=ALL_SITES), steering=vector)
        held = [workers[0].requests for workers in await model.serving.opened().workers.get_stats()]
        await model.fetch_captures_batch(every := flattened(given))
        many = await asyncio.to_thread(hold, every, reference, [vector] * len(every))
        show[layout] |= {"requests of each engine": held, "64 steered": figures(worst_of(many))}
        assert len(held) == int(layout.split()[1])
        assert min(held) >= 1, f"an engine had none of 64 requests: {held}"


def _split(machine: Machine) -> str:
    return f"{SPLIT}{4 if machine.gpus >= 4 else 2}"


async def check_split(run: Run, show: Show) -> None:
    """Tensor parallel: points that are split are joined, added to and refused as they must be."""
    found = await agreement.shards_agree(
        await run.engines.get(_split(run.machine)), run.engines.reference(tiny_checkpoint("qwen3"))
    )
    show |= {name: figures(same) for name, same in found.items()}


async def check_encodings(run: Run, show: Show) -> None:
    """Every codec: each element within its bound of what the raw row holds; a router, neurons and heads among the points."""

    async def one(name: str) -> None:
        show[name] = await codecs_agree(await run.engines.get(name))

    await each(["qwen3", "qwen3_moe"], one)


async def check_experts(run: Run, show: Show) -> None:
    """The experts that routers choose, and their weights, are what transformers' experts are called with."""

    async def one(name: str) -> None:
        wanted = run.machine.engine(name)
        reference = run.engines.reference(wanted.path, wanted.arguments["dtype"])
        show[name] = f"{await experts_agree(await run.engines.get(name), reference):.1e}"

    await each(_routed(run), one)


def _routed(run: Run) -> list[str]:
    """On CPU, one of vLLM's routers does what others do on CUDA."""
    return [ROUTED + kind for kind in (ROUTERS if run.machine.cuda else ["deepseek_v3"])]


async def check_sketches(run: Run, show: Show) -> None:
    """Means, covariances and frequent directions that the workers keep are those of the rows."""
    show["covariance"] = f"{await sketches_agree(await run.engines.get('qwen3')):.1e}"


async def check_pooling(run: Run, show: Show) -> None:
    """An embedding model: rows, edits and embeddings of prompts of all lengths at once are transformers'."""
    reference = run.engines.reference(run.machine.engine("pooling").path)
    show |= {
        name: figures(same)
        for name, same in (await embeddings_agree(await run.engines.get("pooling"), reference)).items()
    }


async def check_spec(run: Run, show: Show) -> None:
    """Speculative decoding: rows, clean and steered, are transformers' and those of an engine without it."""
    single, reference = await run.engines.get("qwen3"), run.engines.reference(tiny_checkpoint("qwen3"))

    async def one(method: str) -> None:
        model = await run.engines.get(method)
        before = _drafts(model)
        # Patterns that repeat propose drafts; what the model makes of them, and its own loops, has some accepted.
        prompts = [(random_prompt(5 + seed % 4, 500 + seed) * 12)[: 24 + seed] for seed in range(24)]
        params = {"max_tokens": 80, **GREEDY}
        specs = [
            spec(OPERATIONS[place % len(OPERATIONS)], 128, seed=place, layers="all") for place in range(len(prompts))
        ]
        handles: Any
        _, handles = await model.generate(prompts, params, capture=EVERYTHING)
        await model.fetch_captures_batch(handles)
        drafts = {name: count - before[name] for name, count in _drafts(model).items()}
        plain = await single.run(prompts, params)
        texts = zip(plain, handles, strict=True)
        equal = sum(tuple(raw.output.outputs[0].token_ids) == handle.output_token_ids for raw, handle in texts)
        shown: Show = {"drafts": drafts, "rows written again": sum(h.receipt.writes - h.receipt.rows for h in handles)}
        show[method] = shown | {"texts as without": f"{equal} of {len(handles)}"}
        shown = show[method]
        elsewhere = await same_tokens_elsewhere(handles, single)
        shown["against no speculation"] = figures(worst_of(elsewhere))
        clean = await asyncio.to_thread(rows_of, handles, reference)
        shown["against transformers"] = figures(worst_of(clean))
        _, steered = await model.generate(prompts, params, capture=EVERYTHING, steering=specs)
        await model.fetch_captures_batch(steered)
        shown["steered"] = figures(worst_of(await stress.held(steered, reference, specs)))
        within(clean)
        within(elsewhere)
        happened(drafts, accepted=20, rejected=20)

    await each(_methods(run.machine), one)


def _methods(machine: Machine) -> list[str]:
    """`ngram_gpu` is the one that async scheduling is left on with."""
    return ["ngram", "ngram_gpu"] if machine.cuda else ["ngram"]


def _drafts(model: SteerModel) -> dict[str, int]:
    proposed, accepted = (
        int(counter(model, f"counter_spec_decode_num_{kind}_tokens")) for kind in ("draft", "accepted")
    )
    return {"accepted": accepted, "rejected": proposed - accepted}


# What stays behind


async def check_memory(run: Run, show: Show) -> None:
    """Thousands of small requests, a quarter each plain, captured, steered, both: as quick at the end as at the start,
    and nothing is held, on the GPU or by the workers.
    """
    model = await run.engines.get("qwen3")
    specs = [spec(OPERATIONS[place % len(OPERATIONS)], 128, seed=place, layers="all") for place in range(40)]
    captures = [None, EVERYTHING, None, CaptureSpec(reduce="mean")]

    async def batch(first: int, count: int) -> None:
        numbers = range(first, first + count)
        _, handles = await model.generate(
            [random_prompt(8 + number % 9, number) for number in numbers],
            {"max_tokens": 4, **GREEDY},
            capture=[captures[number % 4] for number in numbers],
            steering=[specs[number % 40] if number % 4 > 1 else None for number in numbers],
        )
        await model.fetch_captures_batch(handles)

    block = run.requests // 10
    size = min(256, block)

    async def requests(first: int) -> float:
        before = time.perf_counter()
        for start in range(first, first + block, size):
            await batch(start, min(size, first + block - start))
        return time.perf_counter() - before

    idle = await _held(run.machine, model)
    await requests(-block)  # what is allocated once for good
    warm = await _held(run.machine, model)
    seconds = [await requests(number * block) for number in range(10)]
    after = await _held(run.machine, model)
    show |= {"requests": 10 * block, "seconds of each tenth": [round(one, 2) for one in seconds]}
    show |= {"idle": idle, "after warm-up": warm, "at the end": after}
    ratio = min(seconds[-3:]) / min(seconds[:3])
    show["last against first"] = round(ratio, 3)
    assert ratio < (1.15 if run.machine.cuda else 1.5), "requests have become slower"
    for name in ("handles", "claimed", "in use", "slots", "vectors", "waiting", "steered"):
        assert after[name] == 0, f"{name} still held: {after}"
    memory = "GPU MiB" if run.machine.cuda else "RSS MiB"
    assert after[memory] <= warm[memory] + (64 if run.machine.cuda else 128), (
        f"{memory} grew from {warm[memory]} to {after[memory]}"
    )


async def _held(machine: Machine, model: SteerModel) -> dict[str, int]:
    """What the engine holds, and how much memory is used: on the GPU, and by this process and its children."""
    gc.collect()
    handles, claimed, in_use = await settled(model)
    stats, engines = await model.stats(), await model.serving.opened().workers.get_stats()
    held = {"handles": handles, "claimed": claimed, "in use": in_use, "slots": stats.steering_slots_in_use}
    held |= {"vectors": stats.vector_bytes_in_use, "waiting": stats.requests_waiting}
    held["steered"] = sum(count.steered for workers in engines for count in workers)
    ours = [psutil.Process(), *psutil.Process().children(recursive=True)]
    held["RSS MiB"] = sum(process.memory_info().rss for process in ours) >> 20
    if machine.cuda:
        held["GPU MiB"] = gpu_mib({process.pid for process in ours})
    return held


def gpu_mib(ours: Collection[int]) -> int:
    """GPU memory of some processes; where nvidia-smi lists none of them, as in a container, all that the GPU has in use."""
    own = [one.bytes for one in gather_processes() if one.pid in ours and one.bytes is not None]
    if own:
        return sum(own) >> 20
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={first}"]
    return int(subprocess.run(query, check=True, capture_output=True, text=True).stdout)


def _two_workers(machine: Machine) -> str:
    if machine.cuda:
        return "" if machine.gpus >= 2 else "needs --gpus 2"
    return "" if (os.cpu_count() or 1) >= 2 else "needs two cores"


CHECKS: dict[str, Check] = {
    "parity": Check(check_parity, lambda run: run.families),
    "steering": Check(check_steering, lambda run: run.families),
    "norms": Check(check_norms, _norms_engines),
    "bf16": Check(check_bf16, _bf16_engines),
    "quantised": Check(check_quantised, lambda run: [QUANTISED + kind for kind in _fit_kinds(run.machine)]),
    "lora": Check(check_lora, lambda _run: ["lora"]),
    "graphs": Check(check_graphs, lambda run: [name for pair in _pairs(run.machine) for name in pair]),
    "stress": Check(check_stress, lambda _run: ["cramped alone"]),
    "bias": Check(check_bias, _bias_engines),
    "overflow": Check(check_overflow, _overflow_engines),
    "bad": Check(check_bad, lambda _run: ["qwen3"]),
    "projections": Check(check_projections, lambda _run: ["qwen3"]),
    "spec": Check(check_spec, lambda run: [*_methods(run.machine), "qwen3"]),
    "parallel": Check(check_parallel, lambda run: [*_layouts(run.machine), "qwen3"], unfit=_two_workers),
    "split": Check(check_split, lambda run: [_split(run.machine)], unfit=_two_workers),
    "encodings": Check(check_encodings, lambda _run: ["qwen3", "qwen3_moe"]),
    "experts": Check(check_experts, _routed),
    "sketches": Check(check_sketches, lambda _run: ["qwen3"]),
    "lens": Check(mechanistic.check_lens, lambda _run: ["qwen3"]),
    "modules": Check(mechanistic.check_modules, lambda _run: ["modules"]),
    "saes": Check(mechanistic.check_saes, lambda _run: ["qwen3"]),
    "patching": Check(mechanistic.check_patching, lambda _run: ["modules"]),
    "pooling": Check(check_pooling, lambda _run: ["pooling"]),
    "cache": Check(check_cache, lambda _run: []),
    "memory": Check(check_memory, lambda _run: ["qwen3"], alone=True),
}
FAMILY_NAMES = tuple(FAMILY_CONFIGS)
