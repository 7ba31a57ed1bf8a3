"""One architecture proved: a tiny model of it, opened as a user opens it, against transformers."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Final

import torch

from steercap.adapters.releases import installed
from steercap.cli.models import NOT_REFUSED
from steercap.errors import ModelNotLoaded, TapsNotInstalled, UnsupportedModel
from steercap.model import SteerModel
from steercap.testing.architectures import ON_CUDA
from steercap.testing.reference import Reference
from support.agreement import edits_agree, layers_agree, rows_agree
from support.multimodal import LONGEST, WRAPPERS, Looking, pictures_agree, runnable, wrapper_checkpoint
from support.published import engine_of, published_checkpoint, reference_of
from support.rows import TINY_ENGINE

CUDA: Final = torch.cuda.is_available()
#: Long prompts are read in chunks of so many tokens.
CHUNK: Final = 64


async def prove(name: str) -> dict[str, Any]:
    """What becomes of one architecture: its sites, their worst rows and edits, or why it is refused.

    In 16 bits rows are compared block by block, and edits are not: they cannot be told from what rounding adds up to.
    """
    path = wrapper_checkpoint(name) if name in WRAPPERS else published_checkpoint(name)
    arguments = _arguments(name)
    looking = await asyncio.to_thread(Looking, name) if name in runnable() else None  # or a wrapper reads text alone
    made = partial(Reference, path) if name in WRAPPERS else partial(reference_of, name)
    reference = looking.reference if looking else await asyncio.to_thread(made)
    config = reference.model.config
    record = {
        "name": name,
        "device": "cuda" if CUDA else "cpu",
        "vllm": installed(),
        "model_type": config.model_type,
        "architecture": arguments.get("hf_overrides", {}).get("architectures", config.architectures)[0],
    }
    try:
        model = await SteerModel(str(path), sites="all", **arguments).start()
    except ModelNotLoaded as error:  # vLLM itself cannot run it here; steercap may serve it elsewhere
        return {**record, "refused": f"{NOT_REFUSED}: {str(error).replace(str(path), path.name)}"}
    except (UnsupportedModel, TapsNotInstalled) as error:
        return {**record, "refused": str(error)}
    async with model:
        loaded = model.serving.opened().loaded
        lens = max(claim.error for claim in model.serving.proof if "lens" in claim.name)
        exact = arguments["dtype"] == "float32"
        try:
            rows = await (rows_agree if exact else layers_agree)(model, reference)
            edits = await edits_agree(model, reference, every=False) if exact else {}
            rows |= await pictures_agree(model, looking) if looking else {}
        except AssertionError as error:
            return {**record, "refused": f"{NOT_REFUSED}: rows differ from transformers': {error}"}
        return {
            **record,
            "family": loaded.family,
            "code": loaded.code,
            "dtype": arguments["dtype"],
            "sites": list(dict.fromkeys(point.site for point in model.points)),
            "lens": lens,
            "rows": {key: {"cosine": same.cosine, "error": same.error} for key, same in rows.items()},
            "edits": {key: same.error for key, same in edits.items()},
        }


def _arguments(name: str) -> dict[str, Any]:
    """The engine's: eager on CPU; on CUDA with vLLM's defaults, and room for others beside it."""
    found = {**TINY_ENGINE, "max_num_batched_tokens": CHUNK, **engine_of(name)}
    if name in WRAPPERS:
        found |= {"max_model_len": LONGEST, **WRAPPERS[name].engine}
    if CUDA:
        del found["enforce_eager"]
        found |= {"gpu_memory_utilization": 0.06, "capture_bytes": 512 << 20, **ON_CUDA.get(name, {})}
    return found
