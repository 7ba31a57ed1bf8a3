"""DeepSeek-V4's streams on a CUDA machine: rows against the published equations, one stream steered, CUDA graphs on.

    python scripts/verify_streams.py [--checkpoint FOLDER] [--tensor-parallel 1]

Without a folder a random checkpoint of 3 layers is written, as wide as the real model, so that vLLM's kernels for NVIDIA
take it; its weights are bfloat16. With one, such as DeepSeek-V4-Flash, what the equations need is read from it.
Prints the worst row of each site; an AssertionError says which is further off than rounding explains.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import beside_tests  # noqa: F401 -- support is there
import torch
import typer
from support.rows import random_prompt
from support.streams import ARMED, Equations, agrees, streams_checkpoint

from steercap import Add, CaptureSpec, SteeringSpec, SteerModel
from steercap.captures.handle import CaptureHandle
from steercap.core.spec import Point

#: Sizes that NVIDIA's kernels take: those of the real model, with fewer and smaller experts.
WIDE = {
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "n_routed_experts": 64,
    "moe_intermediate_size": 256,
}
PROMPT, GREEDY = 140, {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


async def captured(model: SteerModel, steering: SteeringSpec | None = None) -> CaptureHandle:
    """All rows of one request."""
    spec = CaptureSpec(layers="all", sites=ARMED)
    _, handle = await model.generate(random_prompt(PROMPT, 1), GREEDY, capture=spec, steering=steering)
    assert isinstance(handle, CaptureHandle)
    return await handle.fetch()


async def verify(folder: Path, **engine: Any) -> None:
    """Open the model with vLLM's defaults, compiled and with CUDA graphs where vLLM has them, and compare."""
    equations = Equations(folder)
    async with SteerModel(str(folder), sites=ARMED, max_model_len=512, **engine) as model:
        config = model.engine.vllm_config
        print("CUDA graphs:", config.compilation_config.cudagraph_mode, "eager:", config.model_config.enforce_eager)
        print("code:", model.serving.opened().loaded.code)
        assert not config.model_config.enforce_eager
        clean = await captured(model)
        print("rows:", agrees(clean, equations))
        for site in ("mhc_streams_pre_attn", "mhc_streams_pre_mlp", "mhc_streams_final"):
            point = Point(clean.num_layers - 1 if site == "mhc_streams_final" else 1, site)
            rows = clean.captures[point][:PROMPT]
            vector = torch.randn(rows.shape[2], generator=torch.Generator().manual_seed(1)) * 3 * rows.float().std()
            steered = await captured(model, SteeringSpec([Add(vector, layer=point.layer, site=site, part=2)]))
            after = steered.captures[point][:PROMPT]
            assert torch.equal(after[:, [0, 1, 3]], rows[:, [0, 1, 3]]), site
            assert torch.equal(after[:, 2], (rows[:, 2].float() + vector).bfloat16()), site
            added = torch.zeros(rows.shape[1:])
            added[2] = vector
            print(f"stream 2 steered at {point}:", agrees(steered, equations, {point: added}))


def main(
    checkpoint: Annotated[Path | None, typer.Option(help="a folder with DeepSeek-V4 in it")] = None,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs")] = 1,
) -> None:
    """Verify the streams of one model."""
    folder = checkpoint or streams_checkpoint(**WIDE)
    named = {} if checkpoint else {"tokenizer_mode": "hf"}
    asyncio.run(verify(folder, tensor_parallel_size=tensor_parallel, **named))


if __name__ == "__main__":
    typer.run(main)
