"""DeepSeek-V4 without a hub: a tiny random checkpoint, and the published equations of its streams in float64.

They are those of arXiv:2512.24880, with DeepSeek-V4's gates. For each block, of the streams X [streams, hidden],

    x = X / rms(X), all of it as one row;  pre, post, res = split(fn x) · scale + base
    pre = sigmoid(pre) + eps,  post = 2 sigmoid(post),  res = sinkhorn(softmax(res) + eps)
    the block reads norm(Σ_i pre_i X_i);  behind it X'_j = Σ_i res_ij X_i + post_j block

and the final norm reads Σ_i (sigmoid(scale · fn x + base) + eps)_i X_i. Nothing of vLLM, or of a module, is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from steercap.core.extras import extra
from steercap.core.spec import Point
from steercap.lab.demo import cached
from steercap.testing import INIT_STD, SEED, SPECIAL, tokenizer

if TYPE_CHECKING:
    from steercap.captures.handle import CaptureHandle

#: By a layer's blocks, the sites before it, of what it is mixed by, reads and adds.
BLOCKS: Final = {
    "attn": ("mhc_streams_pre_attn", "mhc_attn_post_mix", "mhc_attn_res_mix", "attn_in", "attn_out"),
    "ffn": ("mhc_streams_pre_mlp", "mhc_ffn_post_mix", "mhc_ffn_res_mix", "mlp_in", "mlp_out"),
}
#: All of them, and the last streams.
ARMED: Final = (*BLOCKS["attn"], *BLOCKS["ffn"], "mhc_streams_final")
#: The error of an element, over the norm of its row or its stream: of float32 that kernels sum in other orders over
#: 1,024 products (found: 3e-7), and of a row of bfloat16 rounded up to three times, by half of 2^-8 each (found:
#: 2e-3).
COEFFICIENTS: Final = 1e-5
ROWS: Final = 3 * 2**-9
#: By how much the engine's choice may miss the greatest logit, in standard deviations, which bfloat16 rounds.
LOGITS: Final = 0.02
#: Of config.json. Kernels fix head_dim, index_head_dim and, on CPU, 256 experts; each kind of attention is there once.
TINY_V4: Final[Mapping[str, Any]] = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 256,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 512,
    "compress_ratios": [0, 4, 128],
    "sliding_window": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "expert_dtype": "bf16",
}
#: Of transformers' names in the original's, those that its own writing leaves as they are; and what is kept in float32.
_RENAMED: Final = (("model.", ""), ("hc_head.hc_", "hc_head_"), (".attn.norm.", ".attn.kv_norm."))
_NAMES: Final = {"embed_tokens.weight": "embed.weight", "lm_head.weight": "head.weight"}
_WIDE: Final = (".hc_", "hc_head", "attn_sink", "gate.bias", ".ape")


def streams_checkpoint(**changes: Any) -> Path:
    """A random checkpoint of DeepSeek-V4 in bfloat16, 3 layers × 256, with a byte-level tokenizer.

    Args:
        **changes: of its configuration.
    """
    settings = {**TINY_V4, **changes, **SPECIAL}
    digest = hashlib.sha256(json.dumps([settings, INIT_STD, SEED], sort_keys=True).encode()).hexdigest()[:8]
    return cached(f"tiny-deepseek_v4-{digest}", partial(_write, settings))


def _write(settings: Mapping[str, Any], folder: Path) -> None:
    with extra("cuda", "cpu"):
        from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(SEED)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**settings)).to(torch.bfloat16)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            noise = torch.randn_like(weights) * INIT_STD
            if (
                "_hc." in name or "hc_head" in name
            ):  # coefficients that differ from token to token, and stream to stream
                weights.copy_(noise / 3 if weights.dim() == 2 else 1 + noise if "scale" in name else 4 * noise)
            else:
                weights.copy_(weights + noise if weights.dim() == 1 and "norm" in name else noise)
    model.save_pretrained(folder)
    found = load_file(folder / "model.safetensors")
    save_file(dict(_original(name, weights) for name, weights in found.items()), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings))
    tokenizer().save_pretrained(folder)


def _original(name: str, weights: torch.Tensor) -> tuple[str, torch.Tensor]:
    """A tensor as DeepSeek's own checkpoints name and keep it."""
    for ours, theirs in _RENAMED:
        name = name.replace(ours, theirs)
    name = _NAMES.get(name, name)
    return name, weights.float() if any(part in name for part in _WIDE) else weights


def _mixing(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint, of one file or several, that the equations need, float64."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 -- it is no dict
                if "hc_" in name or name.endswith("norm.weight") or name in {"embed.weight", "head.weight"}:
                    yield name, tensors.get_tensor(name).double()


@dataclass(frozen=True)
class Mix:
    """What a block's operator makes of streams.

    Args:
        read: what the block reads, normed.
        post: by what the block is added to each stream.
        res: how the streams are mixed, from the first axis to the second.
    """

    read: Float[torch.Tensor, "n hidden"]
    post: Float[torch.Tensor, "n streams"]
    res: Float[torch.Tensor, "n streams streams"]


class Equations:
    """The published equations, over the weights of a checkpoint.

    Args:
        folder: of `streams_checkpoint`.
    """

    def __init__(self, folder: Path) -> None:
        self.config: Any = json.loads((folder / "config.json").read_text())
        self.weights = dict(_mixing(folder))

    def embedded(self, token_ids: torch.Tensor) -> Float[torch.Tensor, "n streams hidden"]:
        """What the streams begin with."""
        return self.weights["embed.weight"][token_ids][:, None].repeat(1, self.config["hc_mult"], 1)

    def mix(self, layer: int, block: str, streams: Float[torch.Tensor, "n streams hidden"]) -> Mix:
        """What a layer's operator before a block, "attn" or "ffn", makes of streams."""
        count, eps = self.config["hc_mult"], self.config["hc_eps"]
        named = f"layers.{layer}.hc_{block}"
        pre, post, res = self._projected(named, streams).split([count, count, count * count], dim=1)
        scales, (pre_base, post_base, res_base) = (
            self.weights[f"{named}_scale"],
            self.weights[f"{named}_base"].split([count, count, count * count]),
        )
        weights = torch.sigmoid(pre * scales[0] + pre_base) + eps
        read = self._norm((weights[:, :, None] * streams.double()).sum(1), f"layers.{layer}.{block}_norm.weight")
        squares = (res * scales[2] + res_base).view(-1, count, count)
        return Mix(read, 2 * torch.sigmoid(post * scales[1] + post_base), self._sinkhorn(squares))

    def behind(
        self, streams: Float[torch.Tensor, "n streams hidden"], block: Float[torch.Tensor, "n hidden"], mix: Mix
    ) -> Float[torch.Tensor, "n streams hidden"]:
        """The streams behind a block, by what it adds."""
        return mix.res.double().mT @ streams.double() + mix.post.double()[:, :, None] * block.double()[:, None]

    def logits(self, streams: Float[torch.Tensor, "n streams hidden"]) -> Float[torch.Tensor, "n vocabulary"]:
        """What the model makes of its last streams."""
        scale, base = self.weights["hc_head_scale"], self.weights["hc_head_base"]
        gates = torch.sigmoid(self._projected("hc_head", streams) * scale + base) + self.config["hc_eps"]
        last = self._norm((gates[:, :, None] * streams.double()).sum(1), "norm.weight")
        return last @ self.weights["head.weight"].T

    def _projected(self, named: str, streams: torch.Tensor) -> torch.Tensor:
        """The streams of a token as one row, over its root mean square, and projected."""
        flat = streams.double().flatten(1)
        return (flat / self._rms(flat)) @ self.weights[f"{named}_fn"].T

    def _norm(self, rows: torch.Tensor, weights: str) -> torch.Tensor:
        return rows / self._rms(rows) * self.weights[weights]

    def _rms(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (rows.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return found

    def _sinkhorn(self, squares: torch.Tensor) -> torch.Tensor:
        eps = float(self.config["hc_eps"])
        found = torch.softmax(squares, dim=-1) + eps
        found = found / (found.sum(-2, keepdim=True) + eps)
        for _ in range(self.config["hc_sinkhorn_iters"] - 1):
            found = found / (found.sum(-1, keepdim=True) + eps)
            found = found / (found.sum(-2, keepdim=True) + eps)
        return found


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The greatest error of an element over the norm of its row, which is the last axis."""
    unit = expected.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    return float(((found.double() - expected) / unit).abs().max())


def agrees(
    handle: CaptureHandle, equations: Equations, added: Mapping[Point, torch.Tensor] = MappingProxyType({})
) -> dict[str, float]:
    """How far rows are from the published equations, by site, each given the captured rows before it.

    Args:
        handle: rows of all tokens of a request, at all layers and at all of `ARMED`.
        equations: of its model.
        added: what an edit adds to the streams of points, [streams, hidden].

    Raises:
        AssertionError: further than rounding explains.
    """
    rows, last, worst = handle.captures, handle.num_layers - 1, dict[str, float]()

    def hold(site: str, found: torch.Tensor, expected: torch.Tensor, most: float) -> None:
        worst[site] = np.maximum(worst.get(site, 0.0), apart(found, expected))
        assert worst[site] < most, (site, worst[site])

    def behind(point: Point, expected: torch.Tensor) -> None:
        hold(point.site, rows[point], expected + added.get(point, torch.zeros(1)).double(), ROWS)

    behind(Point(0, "mhc_streams_pre_attn"), equations.embedded(handle.token_ids))
    for layer in range(last + 1):
        end = Point(layer, "mhc_streams_final") if layer == last else Point(layer + 1, "mhc_streams_pre_attn")
        for block, following in (("attn", Point(layer, "mhc_streams_pre_mlp")), ("ffn", end)):
            streams, post, res, read, adds = (rows[Point(layer, site)] for site in BLOCKS[block])
            said = equations.mix(layer, block, streams)
            expected = ((post, said.post, COEFFICIENTS), (res, said.res, COEFFICIENTS), (read, said.read, ROWS))
            for site, (found, wanted, most) in zip(BLOCKS[block][1:4], expected, strict=True):
                hold(site, found, wanted, most)
            behind(following, equations.behind(streams, adds, Mix(said.read, post.double(), res.double())))
    logits = equations.logits(rows[Point(last, "mhc_streams_final")][len(handle.prompt_token_ids) - 1 :])
    chosen = logits.gather(1, torch.tensor(handle.output_token_ids)[:, None])[:, 0]
    worst["logits"] = float(((logits.amax(1) - chosen) / logits.std(1)).max())
    assert worst["logits"] < LOGITS, worst
    return worst
