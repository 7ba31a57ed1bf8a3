"""Support for tests: tiny random checkpoints of every family, and transformers as the reference of rows and edits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from steercap.core.extras import extra
from steercap.core.registry import Registry
from steercap.lab.demo import cached
from steercap.testing.architectures import ARCHITECTURES, FAMILY_CONFIGS
from steercap.testing.reference import Parity, Reference, compare_rows

#: Standard deviation of weights: rows differ between tokens, positions and layers, and attention is not uniform.
INIT_STD: Final = 0.15
SEED: Final = 20260
#: Ids of the special tokens of every tokenizer here.
SPECIAL: Final = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
_CONFIGS: Final[Registry[Mapping[str, Any]]] = Registry("tiny model", {**FAMILY_CONFIGS, **ARCHITECTURES})


def tiny_checkpoint(family: str, **changes: Any) -> Path:
    """Create a random float32 checkpoint of one family, 4 layers × 128, with a byte-level tokenizer.

    Args:
        family: name of a family, or one of `ARCHITECTURES`.
        **changes: changes to its configuration.

    Raises:
        UnknownName: there is no such family.
    """
    settings = {**tiny_config(family), **changes}
    tiny = json.dumps([settings, INIT_STD, SEED], sort_keys=True)
    return cached(f"tiny-{family}-{hashlib.sha256(tiny.encode()).hexdigest()[:8]}", partial(_write, settings))


def tiny_config(name: str) -> Mapping[str, Any]:
    """Return the keyword arguments of `AutoConfig.for_model` for a tiny model of a family, or one of `ARCHITECTURES`.

    Raises:
        UnknownName: the name is neither.
    """
    return _CONFIGS[name]


def _write(settings: dict[str, Any], folder: Path) -> None:
    with extra("cuda", "cpu"):
        from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**settings, **SPECIAL)
    write_model(AutoModelForCausalLM, config, folder)
    tokenizer().save_pretrained(folder)


def write_model(kind: Any, config: Any, folder: Path) -> None:
    """Write a model of random weights, of a class and a configuration of transformers."""
    import torch

    torch.manual_seed(SEED)
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            norm = weights.dim() == 1 and ("norm" in name or "ln_" in name)
            noise = torch.randn_like(weights) * INIT_STD
            weights.copy_(weights + noise if norm else noise)
        for name, weights in model.named_buffers():
            if name.endswith("layer_scalar"):  # of Gemma 4, which would be 1
                weights.copy_(weights + torch.randn_like(weights) * INIT_STD)
    model.save_pretrained(folder)


def tokenizer(**special: str) -> Any:
    """Create a byte-level tokenizer: a token for each byte, then the special ones, those of `SPECIAL` first.

    Args:
        **special: further tokens by transformers' names for them, such as `image_token`.
    """
    with extra("cuda", "cpu"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    roles = {f"{role}_token": f"<{role}>" for role in ("bos", "eos", "pad")}
    vocabulary = {token: index for index, token in enumerate([*alphabet, *roles.values()])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    further = {"extra_special_tokens": special} if special else {}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=512, **roles, **further)


__all__ = ["Parity", "Reference", "compare_rows", "tiny_checkpoint"]
