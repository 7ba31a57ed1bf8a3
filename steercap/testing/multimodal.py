"""Tiny random models that look at pictures, written by transformers, and what transformers computes of the same ones.

Their processors work without torchvision.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from steercap.core.extras import extra
from steercap.families import FAMILIES
from steercap.families.base import TINY
from steercap.testing.cache import cached
from steercap.testing.tiny import INIT_STD, SEED, SPECIAL, tokenizer, write_model

#: What stands in a prompt for a picture, and its token; two more tokens follow it in every tokenizer here.
PLACEHOLDER: Final = "<image>"
IMAGE: Final = 259
#: Pixels of a side of what the vision towers see, and of a patch of it.
SIDE, PATCH = 56, 14
_VISION: Final = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
}


@dataclass(frozen=True)
class Wrapper:
    """A model that holds a language model, and what makes pictures its tokens.

    Args:
        config: keyword arguments of transformers' `AutoConfig.for_model`.
        tokens: special tokens, by transformers' names; that of `IMAGE` first.
        processor: makes transformers' processor, of a tokenizer.
    """

    config: Mapping[str, Any]
    tokens: Mapping[str, str]
    processor: Callable[[Any], Any]


def _gemma3(text: Any) -> Any:
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    return Gemma3Processor(Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE}), text, image_seq_length=4)


def _llava(text: Any) -> Any:
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    pictures = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    return LlavaProcessor(
        pictures,
        text,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=PLACEHOLDER,
    )


def _idefics3(text: Any) -> Any:
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    pictures = Idefics3ImageProcessorPil(size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE})
    return Idefics3Processor(pictures, text, image_seq_len=4)


def _granite4(text: Any) -> Any:
    from transformers import Granite4VisionProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    pictures = LlavaNextImageProcessorPil(
        size={"shortest_edge": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        image_grid_pinpoints=[[SIDE, 2 * SIDE], [2 * SIDE, SIDE]],
    )
    return Granite4VisionProcessor(
        pictures, text, patch_size=PATCH, vision_feature_select_strategy="full", downsample_rate="1/2"
    )


_ONE_TOKEN: Final = {"image_token": PLACEHOLDER, "boi_token": "<boi>", "eoi_token": "<eoi>"}
#: By name. What their language models are is in their text_config.
WRAPPERS: Final[Mapping[str, Wrapper]] = {
    "gemma3": Wrapper(
        {
            "model_type": "gemma3",
            "text_config": {**FAMILIES["gemma3"].tiny, **SPECIAL},
            "vision_config": {**_VISION, "vision_use_head": False},
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
            "boi_token_index": IMAGE + 1,
            "eoi_token_index": IMAGE + 2,
            "tie_word_embeddings": True,
        },
        _ONE_TOKEN,
        _gemma3,
    ),
    "llava": Wrapper(
        {
            "model_type": "llava",
            "text_config": {"model_type": "llama", **TINY, **SPECIAL},
            "vision_config": {"model_type": "clip_vision_model", **_VISION},
            "image_token_index": IMAGE,
            "image_seq_length": 16,
        },
        _ONE_TOKEN,
        _llava,
    ),
    "idefics3": Wrapper(
        {
            "model_type": "idefics3",
            "text_config": {"model_type": "llama", **TINY, **SPECIAL},
            "vision_config": _VISION,
            "image_token_id": IMAGE,
            "pad_token_id": SPECIAL["pad_token_id"],
            "scale_factor": 2,
        },
        {
            "image_token": PLACEHOLDER,
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
        _idefics3,
    ),
    "granite4_vision": Wrapper(
        {
            "model_type": "granite4_vision",
            "text_config": {
                "model_type": "granite4_vision_text",
                **TINY,
                **SPECIAL,
                "residual_multiplier": 0.5,
                "embedding_multiplier": 2.0,
                "logits_scaling": 2.0,
                "attention_multiplier": 0.2,
            },
            "vision_config": {"model_type": "siglip_vision_model", **_VISION},
            "image_token_index": IMAGE,
            "image_grid_pinpoints": [[SIDE, 2 * SIDE], [2 * SIDE, SIDE]],
            "image_seq_length": 4,
            "vision_feature_select_strategy": "full",
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[-1, 0], [-2, 2]],
            "use_spatial_sampling": False,
        },
        _ONE_TOKEN,
        _granite4,
    ),
}


def wrapper_checkpoint(name: str) -> Path:
    """A random float32 checkpoint of a model that looks at pictures: a language model of 4 layers × 128 within.

    Args:
        name: which of `WRAPPERS`.
    """
    wrapper = WRAPPERS[name]
    known = json.dumps([wrapper.config, wrapper.tokens, INIT_STD, SEED], sort_keys=True)
    return cached(f"seeing-{name}-{hashlib.sha256(known.encode()).hexdigest()[:8]}", partial(_write, wrapper))


def _write(wrapper: Wrapper, folder: Path) -> None:
    with extra("cuda", "cpu"):
        from transformers import AutoConfig, AutoModelForImageTextToText

    write_model(AutoModelForImageTextToText, AutoConfig.for_model(**wrapper.config), folder)
    wrapper.processor(tokenizer(**wrapper.tokens)).save_pretrained(folder)
