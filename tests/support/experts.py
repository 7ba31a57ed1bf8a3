"""The experts that a model's routers choose against those that transformers' experts are called with."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from steercap.captures.handle import CaptureHandle
from steercap.captures.stacking import flat
from steercap.core.spec import CaptureSpec, Point
from steercap.lab.demo import cached
from steercap.model import SteerModel
from steercap.steering.spec import SteeringSpec
from steercap.testing import SEED, tiny_checkpoint
from steercap.testing.reference import Reference
from support.rows import GREEDY, inputs_of, random_prompt

#: What the tiny checkpoints of families and of `ARCHITECTURES` have besides, so that routing does all that it can.
ROUTED: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen3_moe": {"norm_topk_prob": False},
    "mixtral": {},
    "qwen2_moe": {"norm_topk_prob": True},
    "olmoe": {},
    "granitemoe": {},
    "granitemoeshared": {},
    "granitemoe_swa": {},
    "granitemoehybrid": {},
    "granitemoehybrid_attn": {},
    "glm4_moe": {"routed_scaling_factor": 1.7},
    "glm4_moe_lite": {"routed_scaling_factor": 1.7},
    "deepseek_v2": {
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
    },
    "deepseek_v3": {"n_group": 4, "topk_group": 2},
    "axk1": {"n_group": 4, "topk_group": 2},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2},
    "exaone_moe": {},
    "llama4_text": {},
    "gpt_oss": {},
    "afmoe": {"route_scale": 1.7},
    "hy_v3": {},
    "cohere2_moe": {},
    "mimo_v2_flash": {},  # whose factor vLLM does not read
    "gemma4_moe": {},
    "qwen3_next": {"num_experts_per_tok": 2},
    # To the sum of weights, by which it would divide them, transformers adds 1e-6.
    "lfm2_moe": {"routed_scaling_factor": 1.7, "norm_topk_prob": False},
    "phimoe": {},
}
#: What checkpoints call a bias that is added to scores for the choice alone.
_BIASES: Final = ("e_score_correction_bias", "expert_bias")
#: Of scores, which are between 0 and 1, so that it decides many choices.
_BIAS_STD: Final = 0.3
#: How far weights of the same logits may be apart, relative to the greatest: roundings to the dtype of the model, in
#: which transformers hands them to the experts, and vLLM computes some on CPU.
ROUNDED: Final = 4.0
#: The same in float32 where each has computed the logits.
COMPUTED: Final = 1e-4


def routed_checkpoint(name: str) -> Path:
    """A random checkpoint whose experts are chosen with all that its routers can do: see `ROUTED`, and a bias of scores
    where there is one, which transformers initialises with 0.

    Args:
        name: a key of `ROUTED`.
    """
    plain, key = tiny_checkpoint(name, **ROUTED[name]), json.dumps([name, dict(ROUTED[name]), _BIAS_STD, SEED])
    return cached(f"routed-{name}-{hashlib.sha256(key.encode()).hexdigest()[:8]}", partial(_biased, plain))


def _biased(plain: Path, folder: Path) -> None:
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    file = folder / "model.safetensors"
    weights, generator = load_file(file), torch.Generator().manual_seed(SEED)
    for name, values in weights.items():
        if name.endswith(_BIASES):
            weights[name] = torch.randn(values.shape, generator=generator).to(values) * _BIAS_STD
    save_file(weights, file, {"format": "pt"})


async def experts_agree(
    model: SteerModel, reference: Reference, steering: SteeringSpec | None = None, lengths: tuple[int, ...] = (1, 40)
) -> float:
    """Whatever the layer and the token, the experts and weights are those that transformers' experts are called with,
    given the rows of `router` that were captured; and where it computes in float32, given its own.

    Args:
        model: with `router` armed.
        reference: transformers on the same checkpoint.
        steering: of all requests.
        lengths: of prompts.

    Returns:
        The greatest error of a weight in the first case, relative to the greatest weight of its row.
    """
    layers = [point.layer for point in model.points if point.site == "router"]
    prompts = [random_prompt(length, seed) for seed, length in enumerate(lengths)]
    spec = CaptureSpec(layers=layers, sites="router")
    _, handles = await model.generate(prompts, {"max_tokens": 12, **GREEDY}, capture=spec, steering=steering)
    await model.fetch_captures_batch(found := flat(handles))
    return max([await _agree(handle, reference, steering, layers) for handle in found])


async def experts_add(model: SteerModel, reference: Reference) -> float:
    """Experts are those that ran, and weights those that they were added with: transformers' experts, called with them,
    add what the model's do. Returns the greatest error of a row of `mlp_out`, relative to it.

    Args:
        model: with `router` and `mlp_out` armed, and Llama's layer.
        reference: transformers on the same checkpoint.
    """
    layers = [point.layer for point in model.points if point.site == "router"]
    spec = CaptureSpec(layers=layers, sites=["router", "mlp_out"])
    _, handles = await model.generate(random_prompt(40, 3), {"max_tokens": 12, **GREEDY}, capture=spec)
    (handle,) = flat(handles)
    await handle.fetch()
    choice = {layer: await handle.experts(layer) for layer in layers}
    chosen = {layer: (one.ids, one.weights) for layer, one in choice.items()}
    points = [Point(layer, "mlp_out") for layer in layers]
    known = await asyncio.to_thread(reference.rows, inputs_of(handle), points, chosen=chosen)
    errors = [((handle.captures[at] - rows).norm(dim=1) / rows.norm(dim=1)).max() for at, rows in known.items()]
    return float(torch.stack(errors).max())


async def _agree(
    handle: CaptureHandle, reference: Reference, steering: SteeringSpec | None, layers: list[int]
) -> float:
    dtype = reference.model.dtype
    given = {Point(layer, "router"): handle.captures[layer, "router"] for layer in layers}
    asked: dict[str, Any] = {"steering": steering, "prompt_len": len(handle.prompt_token_ids)}
    same = await asyncio.to_thread(reference.experts, inputs_of(handle), given=given)
    own = await asyncio.to_thread(reference.experts, inputs_of(handle), **asked)
    assert list(same) == list(own) == layers
    errors = []
    for layer in layers:
        found = await handle.experts(layer)
        assert found.positions.tolist() == handle.positions.tolist()
        logits = handle.captures[layer, "router"]
        errors.append(near := difference((found.ids, found.weights), same[layer], logits))
        allowed = ROUNDED * torch.finfo(dtype).eps
        assert near < allowed, f"layer {layer}: for the same logits, weights are off by {near:.1e}"
        if dtype == torch.float32:
            far = difference((found.ids, found.weights), own[layer], logits)
            assert far < COMPUTED, f"layer {layer}: weights are off by {far:.1e} of those of transformers"
    return max(errors)


def difference(
    found: tuple[torch.Tensor, torch.Tensor], known: tuple[torch.Tensor, torch.Tensor], logits: torch.Tensor
) -> float:
    """The greatest error of a weight relative to the greatest weight of its row, where no two logits are equal.

    Args:
        found, known: ids and weights, [n, k] each.
        logits: by which experts were chosen, [n, experts].
    """
    ordered = logits.sort(dim=1).values
    tied = (ordered[:, 1:] == ordered[:, :-1]).any(dim=1)
    assert tied.float().mean() < 0.5, "too many ties to say anything"
    one, other = (torch.zeros_like(logits).scatter(1, *both)[~tied] for both in (found, known))
    wrong = ((one != 0) != (other != 0)).any(dim=1)
    assert not wrong.any(), f"{int(wrong.sum())} of {len(wrong)} rows went to other experts"
    assert found[0].shape == known[0].shape
    return float(((one - other).abs().amax(1) / other.abs().amax(1)).max())
