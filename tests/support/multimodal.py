"""Tiny random models that look at pictures, written by transformers, and what transformers computes of the same ones.

Processors of pictures are transformers' with PIL, so that torchvision is needed only where a processor of videos asks
for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import load_file, save_file

from steercap.captures.handle import CaptureHandle
from steercap.core.extras import extra
from steercap.core.spec import CaptureSpec
from steercap.lab.demo import cached
from steercap.steering.spec import SteeringSpec
from steercap.testing import INIT_STD, SEED, SPECIAL, tokenizer, write_model
from steercap.testing.architectures import ARCHITECTURES, ENGINES, FAMILY_CONFIGS, TINY
from steercap.testing.reference import Parity, Reference
from support.images import picture
from support.rows import GREEDY, flattened, inputs_of, parity, within, worst

if TYPE_CHECKING:
    from steercap.model import SteerModel

#: The image token, and its id.
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


@dataclass(frozen=True, kw_only=True)
class Wrapper:
    """A model that holds a language model, and what makes pictures its tokens.

    Args:
        config: keyword arguments of transformers' `AutoConfig.for_model`.
        tokens: special tokens, by transformers' names; that of `IMAGE` first.
        processor: makes transformers' processor, of a tokenizer; None where the model reads text alone.
        stands: what stands in a prompt for a picture.
        engine: engine arguments that it needs.
        torchvision: name of its processor where that has one of videos, which needs torchvision; without it the model
            reads text alone.
        tall: width and height, in pixels, of the tallest picture that it is shown.
        left_out: what transformers' processor gives and its model must not get to compute what vLLM does on CPU.
        names: pairs of a pattern in transformers' names of weights and what takes its place on the hub.
    """

    config: Mapping[str, Any]
    tokens: Mapping[str, str]
    processor: Callable[[Any], Any] | None
    stands: str = PLACEHOLDER
    engine: Mapping[str, Any] = field(default_factory=dict)
    torchvision: str = ""
    tall: tuple[int, int] = (56, 90)
    left_out: tuple[str, ...] = ()
    names: tuple[tuple[str, str], ...] = ((r"^vision_tower\.(?!vision_model\.)", "vision_tower.vision_model."),)


def _gemma3(text: Any) -> Any:
    with extra("cuda", "cpu"):
        from transformers import Gemma3Processor
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    return Gemma3Processor(Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE}), text, image_seq_length=4)


def _llava(text: Any) -> Any:
    with extra("cuda", "cpu"):
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
    with extra("cuda", "cpu"):
        from transformers import Idefics3Processor
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    pictures = Idefics3ImageProcessorPil(size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE})
    return Idefics3Processor(pictures, text, image_seq_len=4)


def _paddleocr(text: Any) -> Any:
    with extra("cuda", "cpu"):
        from transformers import PaddleOCRVLProcessor
        from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil

    return PaddleOCRVLProcessor(PaddleOCRVLImageProcessorPil(size=_PIXELS, patch_size=PATCH), text)


def _qwen2_5(text: Any) -> Any:
    with extra("cuda", "cpu"):
        from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    pictures = Qwen2VLImageProcessor(size=_PIXELS, patch_size=PATCH)
    return Qwen2_5_VLProcessor(pictures, text, Qwen2VLVideoProcessor(size=_PIXELS, patch_size=PATCH))


def _qwen3(text: Any) -> Any:
    with extra("cuda", "cpu"):
        from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    pictures = Qwen2VLImageProcessor(size=_PIXELS, patch_size=PATCH)
    return Qwen3VLProcessor(pictures, text, Qwen3VLVideoProcessor(size=_PIXELS, patch_size=PATCH))


#: Fewest and most pixels of a picture, for processors that keep its shape.
_PIXELS: Final = {"shortest_edge": SIDE * SIDE, "longest_edge": 4 * SIDE * SIDE}
#: vLLM joins the lines round Gemma 3's pictures, for which there must be tokens.
_GEMMA: Final = {
    "image_token": PLACEHOLDER,
    "boi_token": "<boi>",
    "eoi_token": "<eoi>",
    **{f"lines_{count}_token": "\n" * count for count in (1, 2, 3, 4)},
}
_QWEN: Final = {
    "image_token": PLACEHOLDER,
    "video_token": "<video>",
    "vision_start_token": "<begin>",
    "vision_end_token": "<end>",
}
_QWEN_IDS: Final = {
    "image_token_id": IMAGE,
    "video_token_id": IMAGE + 1,
    "vision_start_token_id": IMAGE + 2,
    "vision_end_token_id": IMAGE + 3,
}
#: Positions of three axes, as many of the 16 pairs of an element each.
_AXES: Final = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
_QWEN_VISION: Final = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "patch_size": PATCH,
    "out_hidden_size": TINY["hidden_size"],
}
_GEMMA3: Final = Wrapper(
    config={
        "model_type": "gemma3",
        "text_config": {**FAMILY_CONFIGS["gemma3"], **SPECIAL},
        "vision_config": {**_VISION, "vision_use_head": False},
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
        "boi_token_index": IMAGE + 1,
        "eoi_token_index": IMAGE + 2,
        "tie_word_embeddings": True,
    },
    tokens=_GEMMA,
    processor=_gemma3,
    stands="<boi>",
    left_out=("token_type_ids",),
)
#: What Qwen 3.5 adds to its text: axes of positions, for the quarter of each head that turns.
_TEXT: Final = {
    **SPECIAL,
    "rope_parameters": {
        **_AXES,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_QWEN3_5: Final = Wrapper(
    config={
        "model_type": "qwen3_5",
        "text_config": {**ARCHITECTURES["qwen3_5"], **_TEXT},
        "vision_config": {**_QWEN_VISION, "num_position_embeddings": 64},
        **_QWEN_IDS,
    },
    tokens=_QWEN,
    processor=_qwen3,
    stands=f"<begin>{PLACEHOLDER}<end>",
    engine=ENGINES["qwen3_5"],
    torchvision="Qwen3VLProcessor",
)
#: No pictures, so that vLLM makes no processor of them.
_TEXT_ALONE: Final = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
#: By name.
WRAPPERS: Final[Mapping[str, Wrapper]] = {
    "gemma3_mm": _GEMMA3,
    "gemma3_mm_tf": replace(_GEMMA3, engine={"model_impl": "transformers"}),
    "llava": Wrapper(
        config={
            "model_type": "llava",
            "text_config": {"model_type": "llama", **TINY, **SPECIAL},
            "vision_config": {"model_type": "clip_vision_model", **_VISION},
            "image_token_index": IMAGE,
            "image_seq_length": 16,
        },
        tokens={"image_token": PLACEHOLDER},
        processor=_llava,
    ),
    "idefics3": Wrapper(
        config={
            "model_type": "idefics3",
            "text_config": {"model_type": "llama", **TINY, **SPECIAL},
            "vision_config": _VISION,
            "image_token_id": IMAGE,
            "pad_token_id": SPECIAL["pad_token_id"],
            "scale_factor": 2,
        },
        tokens={
            "image_token": PLACEHOLDER,
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
        processor=_idefics3,
    ),
    "paddleocr_vl": Wrapper(
        config={
            "model_type": "paddleocr_vl",
            "text_config": {**TINY, **SPECIAL, "rope_parameters": _AXES, "head_dim": 32},
            "vision_config": _VISION,
            **_QWEN_IDS,
            "tie_word_embeddings": False,
        },
        tokens=_QWEN,
        processor=_paddleocr,
        tall=(56, 56),  # between patches that were learned, vLLM interpolates to other corners than transformers
        stands=f"<begin>{PLACEHOLDER}<end>",
    ),
    "qwen2_5_vl": Wrapper(
        config={
            "model_type": "qwen2_5_vl",
            "text_config": {**TINY, **SPECIAL, "rope_parameters": _AXES},
            "vision_config": {**_QWEN_VISION, "window_size": SIDE, "fullatt_block_indexes": [1]},
            **_QWEN_IDS,
        },
        tokens=_QWEN,
        processor=_qwen2_5,
        stands=f"<begin>{PLACEHOLDER}<end>",
        torchvision="Qwen2_5_VLProcessor",
    ),
    "qwen3_vl": Wrapper(
        config={
            "model_type": "qwen3_vl",
            "text_config": {
                **TINY,
                **SPECIAL,
                "rope_parameters": {**_AXES, "mrope_section": [6, 5, 5], "mrope_interleaved": True},
                "head_dim": 32,
            },
            "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
            **_QWEN_IDS,
        },
        tokens=_QWEN,
        processor=_qwen3,
        stands=f"<begin>{PLACEHOLDER}<end>",
        torchvision="Qwen3VLProcessor",
    ),
    "qwen3_5_vl": _QWEN3_5,
    "qwen3_5_moe_vl": replace(
        _QWEN3_5,
        config={
            **_QWEN3_5.config,
            "model_type": "qwen3_5_moe",
            "text_config": {**ARCHITECTURES["qwen3_5_moe"], **_TEXT},
        },
    ),
    "muse_glimmer": Wrapper(
        config={
            "model_type": "muse_glimmer",
            "text_config": {**TINY, **SPECIAL, "head_dim": 32, "sliding_window": 24},
            "vision_config": {
                **_VISION,
                "pos_emb_height": 4,
                "pos_emb_width": 4,
                "max_position_embeddings": 16,
                "output_dim": 256,
                "adapter_dim": 128,
            },
            "out_hidden_size": 256,
            "projector_hidden_size": 128,
            "image_token_id": 512,  # is not generated: transformers takes the embedding of id 0 for it
            "video_token_id": 513,
        },
        tokens={},
        processor=None,
        engine={**_TEXT_ALONE, "hf_overrides": {"architectures": ["MuseGlimmerForCausalLM"]}},
    ),
    "hyperclovax_vision_v2": Wrapper(
        config={
            "model_type": "hyperclovax_vision_v2",
            "text_config": {**ARCHITECTURES["hyperclovax"], **SPECIAL},
            "vision_config": {
                **_QWEN_VISION,
                "model_type": "qwen2_5_vl_vision",
                "window_size": SIDE,
                "fullatt_block_indexes": [1],
            },
            "image_token_id": IMAGE,
            "video_token_id": IMAGE + 1,
            "tie_word_embeddings": False,
        },
        tokens={},
        processor=None,
        engine={**_TEXT_ALONE, "hf_overrides": {"architectures": ["HCXVisionV2ForCausalLM"]}},
        names=(
            (r"^model\.language_model\.(?!lm_head)", "model.language_model.model."),
            (r"^model\.vision_projector", "model.mm_projector"),
        ),
    ),
}


#: Those that read text alone.
BLIND: Final = tuple(name for name, one in WRAPPERS.items() if one.processor is None)


def runnable() -> list[str]:
    """The wrappers whose processors can be made here."""
    seeing = {name: one for name, one in WRAPPERS.items() if name not in BLIND}
    return [name for name, one in seeing.items() if not one.torchvision or find_spec("torchvision")]


def wrapper_checkpoint(name: str) -> Path:
    """A random float32 checkpoint of a model that looks at pictures: a language model of 4 layers × 128 within.

    Args:
        name: which of `WRAPPERS`.
    """
    wrapper = WRAPPERS[name]
    blind = [] if name in runnable() else ["text alone"]
    known = json.dumps([wrapper.config, wrapper.tokens, wrapper.names, INIT_STD, SEED, *blind], sort_keys=True)
    kind = wrapper.config["model_type"]
    return cached(f"seeing-{kind}-{hashlib.sha256(known.encode()).hexdigest()[:8]}", partial(_write, wrapper))


def _write(wrapper: Wrapper, folder: Path) -> None:
    with extra("cuda", "cpu"):
        from transformers import AutoConfig, AutoModelForImageTextToText

    write_model(AutoModelForImageTextToText, AutoConfig.for_model(**wrapper.config), folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for pattern, instead in wrapper.names:
        tensors = {re.sub(pattern, instead, name): tensor for name, tensor in tensors.items()}
    save_file(tensors, path, {"format": "pt"})
    text = tokenizer(**wrapper.tokens)
    if wrapper.processor is None:
        text.save_pretrained(folder)
    elif wrapper.torchvision and not find_spec("torchvision"):
        text.save_pretrained(folder)
        published = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": wrapper.torchvision}
        (folder / "preprocessor_config.json").write_text(json.dumps(published))
    else:
        wrapper.processor(text).save_pretrained(folder)


def prompt_of(name: str, text: str, *pictures: Any) -> dict[str, Any]:
    """vLLM's prompt dict of a text with pictures.

    Args:
        name: which of `WRAPPERS`.
        text: with a `{}` where each picture stands.
        pictures: PIL's.
    """
    prompt = text.format(*[WRAPPERS[name].stands] * len(pictures))
    return {"prompt": prompt, "multi_modal_data": {"image": list(pictures)}} if pictures else {"prompt": prompt}


#: The longest prompt of `prompts_of` has two pictures of five tiles.
LONGEST: Final = 384
#: Longer than a block of the cache, and no multiple of it.
LONG: Final = "The quick brown fox jumps over the lazy dog, and then it sleeps. "


def prompts_of(name: str) -> list[dict[str, Any]]:
    """Short and long, of no picture, one and two, of several shapes; two differ in their pictures alone."""
    return [
        prompt_of(name, "no picture at all"),
        prompt_of(name, "a {} b", picture(1)),
        prompt_of(name, "a {} b", picture(2)),
        prompt_of(name, LONG + "{} and {}, " + LONG, picture(3, 70, 56), picture(4, *WRAPPERS[name].tall)),
    ]


class Looking:
    """What transformers computes of prompts with pictures.

    Args:
        name: which of `WRAPPERS`.
    """

    def __init__(self, name: str) -> None:
        with extra("cuda", "cpu"):
            from transformers import AutoProcessor

        self.name = name
        self._wrapper, path = WRAPPERS[name], wrapper_checkpoint(name)
        self._processor: Any = AutoProcessor.from_pretrained(path)
        self.reference = Reference(path)

    def hold(
        self,
        handles: Sequence[CaptureHandle],
        prompts: Sequence[Mapping[str, Any]],
        specs: Sequence[SteeringSpec | None] | None = None,
    ) -> dict[str, Parity]:
        """Assert of each handle that its prompt's tokens are those of transformers' processor, those of them that are
        the image token are labelled as a picture's, and its rows are transformers' to within the float32 bounds.

        Args:
            handles: all rows, fetched.
            prompts: see `prompt_of`.
            specs: what each was steered by.
        """
        known = [None] * len(handles) if specs is None else specs
        return within(worst(map(self.parity, handles, prompts, known)))

    def parity(
        self, handle: CaptureHandle, prompt: Mapping[str, Any], steering: SteeringSpec | None = None
    ) -> dict[str, Parity]:
        """The worst row of each site: of the prompt's text, of pictures, and generated; see `hold`."""
        pictures = prompt.get("multi_modal_data", {}).get("image")
        seen = dict(self._processor(text=[prompt["prompt"]], images=pictures, return_tensors="pt"))
        ids, total = seen.pop("input_ids")[0].tolist(), len(inputs_of(handle))
        assert list(handle.prompt_token_ids) == ids
        tokens = [ids[at] if at < len(ids) else None for at in handle.positions.tolist()]
        assert handle.token_types.tolist() == ["image" if token == IMAGE else "text" for token in tokens]
        given = {
            name: torch.nn.functional.pad(value, (0, total - len(ids))) if name in _PER_TOKEN else value
            for name, value in seen.items()
            if name not in {"attention_mask", *self._wrapper.left_out}
        }
        return parity(handle, self.reference, steering, media=given)


async def pictures_agree(model: SteerModel, looking: Looking) -> dict[str, Parity]:
    """Requests with pictures, with others, with two and with none share a batch, and long prompts are read in chunks
    that end within a picture: every row at every site is transformers', and those of pictures are labelled as such.
    """
    prompts = prompts_of(looking.name)
    sites = tuple(dict.fromkeys(point.site for point in model.points))
    _, found = await model.generate(prompts, {"max_tokens": 8, **GREEDY}, capture=CaptureSpec(sites=sites))
    handles = flattened(found)
    await model.fetch_captures_batch(handles)
    assert handles[1].prompt_token_ids == handles[2].prompt_token_ids
    assert handles[1].media[0].digest != handles[2].media[0].digest
    assert {span.index for span in handles[3].media} == {0, 1}
    rows = await asyncio.to_thread(looking.hold, handles, prompts)
    assert set(rows) == {f"{site} {part}" for site in sites for part in ("prompt", "image", "generated")}
    return rows


#: What processors give for each token of a prompt, and is 0 for text.
_PER_TOKEN: Final = frozenset({"token_type_ids", "mm_token_type_ids"})
