"""Derivation of sites in a model of vLLM's that this process builds, without an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

from steercap.adapters import torchvision
from steercap.adapters.tracing import derived
from steercap.architectures.decoder import Decoder, decoder_of
from steercap.architectures.families import FAMILIES, families_of
from steercap.architectures.families.base import Family, located
from steercap.architectures.families.derived import FIELDS, candidates
from steercap.architectures.families.proved import is_transformers


@contextmanager
def _alone() -> Iterator[None]:
    """Make this process a group of one; the groups depend on the model."""
    init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
    initialize_model_parallel(1, 1)
    try:
        yield
    finally:
        cleanup_dist_env_and_memory()


@contextmanager
def built(path: Path, **arguments: Any) -> Iterator[tuple[Any, Decoder]]:
    """A model with its weights: a runner as far as a pass needs it, and the decoder."""
    torchvision.hook()
    args = EngineArgs(str(path), **{"dtype": "float32", "enforce_eager": True, "max_model_len": 256, **arguments})
    vllm_config = args.create_engine_config()
    with set_current_vllm_config(vllm_config), patch.object(torch.accelerator, "empty_cache"), _alone():
        model = get_model(vllm_config=vllm_config)
        num_layers = vllm_config.model_config.get_total_num_hidden_layers()
        runner = SimpleNamespace(vllm_config=vllm_config, device=torch.device("cpu"), dtype=torch.float32)
        yield runner, decoder_of(model, num_layers, range(num_layers))


def derivations(runner: Any, decoder: Decoder) -> list[tuple[Family, dict[str, str]]]:
    """All candidates of a model with their sites, as if no family knew its layers."""
    each = list({type(layer): layer for layer in decoder.layers.values()}.values())
    found = candidates(each, transformers=all(is_transformers(type(layer)) for layer in each))
    config = runner.vllm_config.model_config
    head_dim = getattr(config.hf_text_config, "v_head_dim", None) or config.get_head_size()
    return [derived(runner, decoder, family, head_dim) for family in found]


def named(decoder: Decoder) -> tuple[str, Family]:
    """The family that knows the layers, and its name; "" where none does."""
    (family, *_) = families_of(list(decoder.layers.values()))
    name = next((name for name, one in FAMILIES.items() if one.classes == family.classes), "")
    return name, family


def paths_of(layer: torch.nn.Module, family: Family) -> Mapping[str, str]:
    """The path of each site's module in a layer, by site."""
    own = {site: getattr(family, field) for site, field in FIELDS.items()}
    own |= {"attn_in": family.attention_input, "mlp_in": family.mlp_input}
    found = {}
    for site, path in own.items():
        try:
            found[site] = located(layer, path) if path else ""
        except AttributeError:
            found[site] = ""
    return found
