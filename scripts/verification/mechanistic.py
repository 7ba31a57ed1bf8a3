"""Checks of `verify_gpu.py` of what is made of rows: the lens, modules by their paths, SAEs, patching."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from support.patching import Hooked, patches_agree
from support.rows import GREEDY, by_part, inputs_of, random_prompt, within, worst
from support.sae_features import features_agree

from steercap import SAE, Add, CaptureSpec, SteeringSpec
from steercap.core.spec import Point
from steercap.lab.mechanism.patching import Grid
from steercap.testing import tiny_checkpoint
from steercap.testing.saes import OWN, RandomSAE
from verification.engines import PATHS

if TYPE_CHECKING:
    from verification.checks import Run

#: Of logits of the size of 1, in float32.
TOLERANCE = 1e-4
#: Two runs of one prompt, in batches of other shapes, on CUDA.
APART = 8.0


async def check_lens(run: Run, show: dict[str, Any]) -> None:
    """What rows say next: of the last, vLLM's log probabilities; of all, transformers' norm and unembedding of them."""
    model, reference = await run.engines.get("qwen3"), run.engines.reference(tiny_checkpoint("qwen3"))
    asked = {"max_tokens": 5, "logprobs": 8, **GREEDY}
    prompts = [random_prompt(length, length) for length in (3, 30, 90)]
    answers = await model.run(prompts, asked, capture=CaptureSpec())
    handles = [answer.handle for answer in answers]
    await model.fetch_captures_batch(handles)
    said_off = rows_off = 0.0
    for answer, handle in zip(answers, handles, strict=True):
        last = await handle.lens(tokens=["last_prompt", "generated"], top=8)
        for row, said in enumerate(answer.output.outputs[0].logprobs):
            ours = dict(zip(last.token_ids[row].tolist(), last.log_probs[row].tolist(), strict=True))
            both = ours.keys() & said.keys()
            assert len(both) >= 7, "other tokens than vLLM's"
            said_off = np.max([said_off, *(abs(ours[token] - said[token].logprob) for token in both)])
        for layer in range(handle.num_layers):
            rows = handle.captures[layer]
            with torch.inference_mode():
                known = reference.model.lm_head(reference.model.model.norm(rows))
            found = await handle.lens(layer, site="resid_post", full=True)
            assert found.logits is not None
            rows_off = np.maximum(rows_off, float((found.logits - known).abs().max()))
    show["vLLM's log probabilities"], show["transformers' logits"] = f"{said_off:.1e}", f"{rows_off:.1e}"
    assert said_off < TOLERANCE
    assert rows_off < TOLERANCE


async def check_modules(run: Run, show: dict[str, Any]) -> None:
    """Modules by their paths, read and written, against transformers."""
    model, reference = await run.engines.get("modules"), run.engines.reference(tiny_checkpoint("qwen3"))
    prompts = [random_prompt(length, length) for length in (3, 40, 150)]
    edits: list[SteeringSpec | None] = [None]
    for layer, site in ((1, PATHS[1]), (2, PATHS[2])):
        width = model.points[Point(layer, site)].width
        edits.append(SteeringSpec([Add(torch.randn(width), 3.0, layer=layer, site=site)]))
    params = {"max_tokens": 9, **GREEDY}
    handles: Any
    _, handles = await model.generate(prompts, params, capture=CaptureSpec(at=PATHS), steering=edits)
    await model.fetch_captures_batch(handles)
    found = []
    for handle, edit in zip(handles, edits, strict=True):
        length = len(handle.prompt_token_ids)
        known = reference.rows(inputs_of(handle), handle.points, steering=edit, prompt_len=length)
        found.append(by_part(handle, known))
    show["points"], show["worst"] = len(handles[0].points), f"{max(one.error for one in worst(found).values()):.1e}"
    within(worst(found))


async def check_saes(run: Run, show: dict[str, Any]) -> None:
    """Features of rows on the worker, of every architecture, against NumPy."""
    model = await run.engines.get("qwen3")
    with tempfile.TemporaryDirectory() as folder:
        for architecture in OWN:
            own = RandomSAE(architecture, model.hidden_size, 1500, k=20)
            sae = SAE.load(own.write(Path(folder, architecture)))
            apart = APART if run.machine.cuda else 1.0
            show[architecture] = f"{await features_agree(model, own, sae, apart=apart):.1e}"


async def check_patching(run: Run, show: dict[str, Any]) -> None:
    """Rows, and rows of heads, of one run in another: what becomes of the logits, against hooks."""
    hooked = await asyncio.to_thread(Hooked, tiny_checkpoint("qwen3"))
    grids = [Grid(sites=("resid_pre", "attn_out", "mlp_out")), Grid(sites=("z", "q", "v"), heads="all", tokens=[2, -1])]
    off, greatest = await patches_agree(await run.engines.get("modules"), hooked, grids)
    show["worst"], show["greatest effect"] = f"{off:.1e}", f"{greatest:.2f}"
    assert off < TOLERANCE < greatest / 100
