"""Widths of models that people serve now, with few layers and random weights, proved on a GPU against transformers.

    python scripts/prove_shapes.py --json out/shapes.json          all of them, four at a time
    python scripts/prove_shapes.py --only minimax-m2 --small       a trial of one, also on a CPU

Each is the model's text part at its published widths (transformers' configuration classes have them as defaults, but for
those given here), with the layers and experts that `SHAPES` says. Random bfloat16 weights are written by transformers
and opened as a user opens them: vLLM's defaults, every site that the start can prove. Then each layer's rows are compared
with those that transformers' own layer makes, in float32, of the rows that were captured before it; and of a steered
request with the same plus the vector. A router may choose another expert where two are close in 16 bits, so of the
MLP's rows that follow a router the share is shown that agrees.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

for name, value in {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}.items():
    os.environ.setdefault(name, value)

#: Fewer experts; what a token chooses of them is not cut. With them, published fields that transformers' classes lack.
FEW: dict[str, dict[str, Any]] = {
    "deepseek": {"n_routed_experts": 32, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "minimax": {
        "num_local_experts": 32,
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5},
    },
    "qwen": {"num_experts": 32},
}
#: By name: model_type, and what differs from its configuration's defaults.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-9b": {"model_type": "qwen3_5_text", "num_hidden_layers": 4},
    "qwen3.5-35b-a3b": {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 4, **FEW["qwen"]},
    "qwen3-235b-a22b": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "hidden_size": 4096,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151_936,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "num_experts_per_tok": 8,
        **FEW["qwen"],
    },
    "gpt-oss-120b": {"model_type": "gpt_oss", "num_hidden_layers": 4, "num_local_experts": 32},
    "deepseek-v3.2": {
        "model_type": "deepseek_v32",
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        **FEW["deepseek"],
    },
    "kimi-k2": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "vocab_size": 163_840,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_group": 1,
        "topk_group": 1,
        **FEW["deepseek"],
    },
    "glm-5": {"model_type": "glm_moe_dsa", "num_hidden_layers": 3, "first_k_dense_replace": 1, **FEW["deepseek"]},
    "minimax-m2": {
        "model_type": "minimax_m2",
        "num_hidden_layers": 3,
        **FEW["minimax"],
    },
    "gemma-4": {"model_type": "gemma4_text", "num_hidden_layers": 6},
    "llama-3.3-70b": {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
    },
}
#: Sizes of a trial, where a configuration has them.
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "vocab_size": 512,
    "shared_expert_intermediate_size": 128,
    "num_attention_heads": 4,
    "head_dim": 64,
    "vocab_size_per_layer_input": 512,
}
#: Engine arguments by name, where packages of other kernels that come with vLLM are not installed.
ELSE: dict[str, dict[str, Any]] = {
    "qwen3.5-9b": {"gdn_prefill_backend": "triton"},
    "qwen3.5-35b-a3b": {"gdn_prefill_backend": "triton"},
    "gemma-4": {"attention_backend": "TRITON_ATTN"},
}
PATIENCE = 420
MARK = "SHAPE "
#: Least median of the cosines of rows, and the least of any row that no router comes before.
MEDIAN, LEAST = 0.999, 0.98
LENGTHS, GENERATED = (1, 20, 90, 300), 16
#: What adds to the stream in transformers' layers, by site: the norm behind a block, or the block.
BLOCKS = {
    "attn_out": ("post_attention_layernorm", "self_attn", "linear_attn"),
    "mlp_out": ("post_feedforward_layernorm", "mlp", "block_sparse_moe"),
}


def written(name: str, *, small: bool) -> Path:
    """The checkpoint of a shape, made on the first call."""
    from transformers import CONFIG_MAPPING

    from steercap.lab.demo import cached

    settings = dict(SHAPES[name])
    kind = CONFIG_MAPPING[settings.pop("model_type")]
    if small:
        known = kind().to_dict()
        settings |= {size: value for size, value in SMALL.items() if size in known}
        settings |= {"num_key_value_heads": min(2, settings.get("num_key_value_heads", 2))}
    config = kind(**settings, bos_token_id=1, eos_token_id=2, pad_token_id=0, dtype="bfloat16")
    key = hashlib.sha256(config.to_json_string(use_diff=False).encode()).hexdigest()[:8]
    return cached(f"shape-{name}-{key}", partial(write, config))


def write(config: Any, folder: Path) -> None:
    """Write random weights: matrices that keep a row's size, gains and biases that tell one candidate from another."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() == 1:
                weights.add_(torch.randn_like(weights) * (0.1 if "norm" in name else 0.02))
            else:
                weights.copy_(torch.randn_like(weights) / weights.shape[-1] ** 0.5)
    model.save_pretrained(folder)


class Layers:
    """transformers' layers by themselves, each given the rows captured before it.

    Args:
        path: the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        self.model = loaded.to(self.device).eval()
        self.layers = list(self.model.model.layers)

    def routed(self, index: int) -> bool:
        """Whether a router chooses experts in a layer."""
        return any(name.endswith("experts") for name, _ in self.layers[index].named_modules())

    def rows(self, ids: list[int], inputs: dict[int, Any]) -> dict[tuple[int, str], Any]:
        """Rows [tokens, hidden] of attention, MLP and the whole layer, by layer and site."""
        import torch

        found: dict[tuple[int, str], Any] = {}
        hooks = []

        def keep(key: tuple[int, str], _module: Any, _args: Any, output: Any) -> None:
            found[key] = (output[0] if isinstance(output, tuple) else output).reshape(len(ids), -1)

        def give(index: int, _module: Any, args: Any, kwargs: Any) -> Any:
            rows = inputs[index].to(self.device, torch.float32)[None]
            return ((rows, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": rows})

        for index, layer in enumerate(self.layers):
            hooks.append(layer.register_forward_pre_hook(partial(give, index), with_kwargs=True))
            hooks.append(layer.register_forward_hook(partial(keep, (index, "resid_post"))))
            behind = hasattr(layer, "post_feedforward_layernorm")  # else a norm of this name is the next block's
            for site, (norm, *names) in BLOCKS.items():
                block = next(getattr(layer, name) for name in ([norm] if behind else names) if hasattr(layer, name))
                hooks.append(block.register_forward_hook(partial(keep, (index, site))))
        try:
            with torch.inference_mode():
                self.model(torch.tensor([ids], device=self.device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return found


def compared(handle: Any, oracle: Layers, added: dict[int, Any]) -> dict[str, list[Any]]:
    """Cosines of a request's rows with the oracle's, by site; those after a router apart."""
    import torch

    ids = handle.token_ids.tolist()
    captures = handle.captures
    known = oracle.rows(ids, {layer: captures[layer, "resid_pre"] for layer in captures.layers})
    found: dict[str, list[Any]] = {}
    for (layer, site), rows in known.items():
        if (layer, site) not in captures:
            continue
        expected = rows.cpu() + (added[layer] if site == "resid_post" and layer in added else 0)
        cosines = torch.cosine_similarity(captures[layer, site].float(), expected, dim=-1)
        name = f"{site} after a router" if site != "attn_out" and oracle.routed(layer) else site
        found.setdefault(name, []).append(cosines)
    return found


async def prove(name: str, *, small: bool) -> dict[str, Any]:
    """One shape: its sites, how its rows agree, and what was refused."""
    import torch

    from steercap import Add, CaptureSpec, SteeringSpec, SteerModel
    from steercap.errors import ModelNotLoaded, TapsNotInstalled, UnsupportedModel

    begun, path = time.monotonic(), written(name, small=small)
    cuda = torch.cuda.is_available()
    own: dict[str, Any] = {"gpu_memory_utilization": 0.1} if cuda else {"enforce_eager": True}
    if cuda and importlib.util.find_spec("flashinfer") is None:
        own |= ELSE.get(name, {})
    memory: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 30, "capture_bytes": 1 << 30}
    sizes: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 256}
    record: dict[str, Any] = {"name": name, "shape": SHAPES[name], "written_s": time.monotonic() - begun}
    begun = time.monotonic()
    model = SteerModel(str(path), sites="all", dtype="bfloat16", skip_tokenizer_init=True, **memory, **sizes, **own)
    try:
        await model.start()
    except (UnsupportedModel, ModelNotLoaded, TapsNotInstalled) as error:
        shutil.rmtree(path)
        return {**record, "refused": str(error)}
    async with model:
        record["start_s"] = time.monotonic() - begun
        sites = tuple(dict.fromkeys(point.site for point in model.points))
        record |= {"family": model.serving.opened().loaded.family or "derived", "sites": sites}
        record |= {"left out": {str(site): str(reason) for site, reason in model.refused.items()}}
        record["claims"] = len(model.serving.proof)
        generator = torch.Generator().manual_seed(0)
        draw = partial(torch.randint, 3, 500, generator=generator)
        prompts = [{"prompt_token_ids": draw((length,)).tolist()} for length in LENGTHS]
        vector = torch.randn(model.hidden_size, generator=generator)
        sampling = {"max_tokens": GENERATED, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        steering = [None, None, SteeringSpec([Add(vector, layer=1)]), None]
        raws = await model.run(prompts, sampling, capture=CaptureSpec(sites=sites), steering=steering)
        handles = [raw.handle for raw in raws]
        await model.fetch_captures_batch(handles)
    oracle = Layers(path)
    shutil.rmtree(path)  # all of them together take some 60 GB
    rows: dict[str, list[Any]] = {}
    for handle, spec in zip(handles, steering, strict=True):
        for site, cosines in compared(handle, oracle, {1: vector} if spec else {}).items():
            rows.setdefault(site, []).extend(cosines)
    every = {site: torch.cat(cosines) for site, cosines in rows.items()}
    record["rows"] = {
        site: {"median": float(one.median()), "least": float(one.min()), "share": float((one >= MEDIAN).float().mean())}
        for site, one in every.items()
    }
    return record


def right(record: dict[str, Any]) -> bool:
    """Whether all rows that were compared are transformers'."""
    rows = record.get("rows", {})
    return bool(rows) and all(
        one["median"] >= MEDIAN and ("router" in site or one["least"] >= LEAST) for site, one in rows.items()
    )


def in_process(name: str, small: bool) -> dict[str, Any]:
    """The same in a process of its own, which can die or hang by itself."""
    command = [sys.executable, __file__, "--only", name, "--machine", *(["--small"] if small else [])]
    with tempfile.TemporaryFile("w+") as said:
        try:
            plain = {**os.environ, "TYPER_STANDARD_TRACEBACK": "1"}
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=said, text=True, timeout=PATIENCE, check=False, env=plain
            )
        except subprocess.TimeoutExpired:
            return {"name": name, "failed": f"not done after {PATIENCE} s"}
        lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
        said.seek(0)
        found: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK)) if lines else {"failed": said.read()[-2000:]}
        return {"name": name, **found}


def main(
    only: Annotated[list[str] | None, typer.Option(help="Names; all by default.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write results here, after every shape.")] = None,
    together: Annotated[int, typer.Option(help="Engines at once.")] = 4,
    *,
    small: Annotated[bool, typer.Option("--small", help="Narrow layers, for a trial.")] = False,
    machine: Annotated[bool, typer.Option(help="Print a record for the process that asked.", hidden=True)] = False,
) -> None:
    """Prove them; exit code 1 if rows of any differ."""
    names = only or list(SHAPES)
    if machine:
        print(MARK + json.dumps(asyncio.run(prove(names[0], small=small))), flush=True)
        return
    records = []
    with ThreadPoolExecutor(together) as pool:
        for done in as_completed([pool.submit(in_process, name, small) for name in names]):
            records.append(record := done.result())
            shown = {key: value for key, value in record.items() if key not in {"name", "shape"}}
            print("RIGHT" if right(record) else "NOT", record["name"], json.dumps(shown), flush=True)
            if out:
                out.write_text(json.dumps(records, indent=1))
    sys.exit(not all(map(right, records)))


if __name__ == "__main__":
    typer.run(main)
