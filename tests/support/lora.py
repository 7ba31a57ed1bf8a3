"""Tiny random LoRA adapters in PEFT's format, a checkpoint with one merged in, and several in one batch."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from steercap.captures.handle import CaptureHandle
from steercap.core.spec import CaptureSpec
from steercap.steering.spec import SteeringSpec
from steercap.testing.reference import Parity, Reference
from support.agreement import worst_of
from support.rows import ALL_SITES, GREEDY, flattened, parity, random_prompt, steps, within, within_16, worst
from support.specs import spec

if TYPE_CHECKING:
    from steercap.model import SteerModel

#: Arguments of an engine for them.
LORA_ENGINE: Final = {"enable_lora": True, "max_lora_rank": 16, "max_loras": 2}
#: What an adapter changes: every linear module of a decoder layer of the Llama kind.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path, checkpoint: Path, *, seed: int, rank: int = 4, scale: float = 0.1, **config: Any
) -> Path:
    """A random adapter for a checkpoint, in PEFT's format.

    Args:
        folder: where to write it.
        checkpoint: the model's folder.
        seed: of its weights.
        rank: its rank.
        scale: standard deviation of its weights.
        **config: entries of adapter_config.json to set otherwise.

    Returns:
        The folder.
    """
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if name.split(".")[-2] in TARGETS:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=draw) * scale
            tensors[f"{module}.lora_B.weight"] = torch.randn(weight.shape[0], rank, generator=draw) * scale
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(TARGETS), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge(folder: Path, checkpoint: Path, adapter: Path) -> Path:
    """The checkpoint with an adapter added to its weights: what a request with the adapter must compute."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, folder)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    weights, change = load_file(checkpoint / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in sorted({name.rsplit(".", 2)[0] for name in change}):
        product = change[f"{name}.lora_B.weight"].double() @ change[f"{name}.lora_A.weight"].double()
        target = f"{name.removeprefix('base_model.model.')}.weight"
        merged = weights[target].double() + product * (settings["lora_alpha"] / settings["r"])
        weights[target] = merged.to(weights[target].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


async def adapters_agree(
    model: SteerModel, checkpoint: Path, folder: Path, request: Callable[[str, int, str], Any]
) -> dict[str, Parity]:
    """Requests with three adapters and with none, steered and not, of the same prompts: every row is that of its own
    adapter's weights merged into the model, so neither a batch nor the prefix cache mixes them.

    In 16 bits rows are compared step by step. Those of requests that read the prefix cache lack rows to begin with,
    and are judged by which of the four models they are nearest to.

    Args:
        model: an engine with `LORA_ENGINE` and `ALL_SITES`.
        checkpoint: its checkpoint.
        folder: where adapters are written, and checkpoints with them.
        request: vLLM's `LoRARequest`.

    Returns:
        The worst rows, those of requests without an adapter apart.
    """
    folders = [write_adapter(folder / str(number), checkpoint, seed=number, rank=4 * number) for number in (1, 2, 3)]
    asked = [None, *(request(f"adapter {place}", 1 + place, str(path)) for place, path in enumerate(folders))]
    edits = [
        spec("relative", model.hidden_size, seed=place, layers="all") if place % 5 == 3 else None for place in range(40)
    ]
    late = CaptureSpec(sites=ALL_SITES, tokens=["last_prompt", "generated"])  # reads the prefix cache
    jobs = [
        model.generate(
            random_prompt((10, 100)[place % 2], place // 8),
            {"max_tokens": 10, **GREEDY},
            capture=CaptureSpec(sites=ALL_SITES) if place % 3 else late,
            steering=edits[place],
            lora_request=asked[place % 4],
        )
        for place in range(40)
    ]
    handles = [handle for _, handle in await asyncio.gather(*jobs)]
    await model.fetch_captures_batch(handles)
    merged = [checkpoint, *(merge(path / "merged", checkpoint, path) for path in folders)]
    return await asyncio.to_thread(_own, flattened(handles), edits, [Reference(path) for path in merged])


def _own(
    handles: Sequence[CaptureHandle], edits: Sequence[SteeringSpec | None], references: Sequence[Reference]
) -> dict[str, Parity]:
    """The worst rows of each, against the reference that is its own."""
    exact = handles[0].captures[handles[0].points[0]].dtype == torch.float32
    found = []
    for place, (handle, steering) in enumerate(zip(handles, edits, strict=True)):
        own = place % len(references)
        if exact or place % 3:
            same = (parity if exact else steps)(handle, references[own], steering)
            found.append({f"{'adapter' if own else 'none'} {name}": row for name, row in same.items()})
        else:
            near = [worst_of(parity(handle, reference, steering)).cosine for reference in references]
            assert near.index(max(near)) == own, f"rows of adapter {own} are nearest to another's: {near}"
    return (within if exact else within_16)(worst(found))
