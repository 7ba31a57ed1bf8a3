"""Support for tests: tiny random checkpoints of all families, and transformers as the reference for rows and edits."""

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

#: Standard deviation of random weights, by which rows differ between tokens and layers, and attention is not uniform.
INIT_STD: Final = 0.15
SEED: Final = 20260
#: Ids of the special tokens of tokenizers made here.
SPECIAL: Final = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
_CONFIGS: Final[Registry[Mapping[str, Any]]] = Registry("tiny model", {**FAMILY_CONFIGS, **ARCHITECTURES})


def tiny_checkpoint(family: str, **changes: Any) -> Path:
    """Return the folder of a random float32 checkpoint, 4 layers × 128, with a byte-level tokenizer; made once.

    Args:
        family: a key of `FAMILY_CONFIGS` or `ARCHITECTURES`.
        **changes: arguments of its configuration to override.

    Raises:
        UnknownName: there is no such family.
    """
    settings = {**tiny_config(family), **changes}
    tiny = json.dumps([settings, INIT_STD, SEED], sort_keys=True)
    return cached(f"tiny-{family}-{hashlib.sha256(tiny.encode()).hexdigest()[:8]}", partial(_write, settings))


def tiny_config(name: str) -> Mapping[str, Any]:
    """Return the arguments of `AutoConfig.for_model` for a tiny model, by key of `FAMILY_CONFIGS` or `ARCHITECTURES`.

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
    """Write a transformers model of class `kind` with random weights to a folder."""
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
    """Return a byte-level transformers tokenizer: a token per byte, then the special ones, those of `SPECIAL` first.

    Args:
        **special: further special tokens by transformers' attribute, such as `image_token`.
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
