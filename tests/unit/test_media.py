"""Which tokens stand for pictures: vLLM's own ranges as spans, spans as types, and what a prompt dict may hold."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from handles import a_handle
from vllm.inputs.engine import embeds_input, tokens_input
from vllm.multimodal.inputs import PlaceholderRange

from steercap import CaptureHandle
from steercap.adapters.prompts import media_of, prompt_dict, rendered
from steercap.architectures.families import architectures_within, family_of
from steercap.core.chat import MediaSpan, types_at
from steercap.core.prompts import without_media
from steercap.errors import InvalidFile, InvalidPrompt


def test_ranges_of_vllm_become_spans() -> None:
    """Where `is_embed` leaves tokens out, a picture has several spans, and what is between them is text."""
    tiles = PlaceholderRange(4, 6, torch.tensor([False, True, True, False, True, False]))
    payload = {
        "type": "multimodal",
        "mm_placeholders": {"image": [PlaceholderRange(12, 2), tiles], "audio": [PlaceholderRange(0, 1)]},
        "mm_hashes": {"image": ["a", "b"], "audio": ["c"]},
    }
    spans = media_of(payload)
    assert spans == (
        MediaSpan("audio", 0, 0, 1, "c"),
        MediaSpan("image", 1, 5, 7, "b"),
        MediaSpan("image", 1, 8, 9, "b"),
        MediaSpan("image", 0, 12, 14, "a"),
    )
    found = types_at(spans, np.arange(15))
    assert "".join(kind[0] for kind in found.tolist()) == "attttiititttiit"
    assert types_at(spans, np.array([8, 0])).tolist() == ["image", "audio"]
    assert media_of({"type": "token", "prompt_token_ids": [1]}) == ()


def test_a_prompt_without_pictures_is_text() -> None:
    """Generated tokens too; the types of no rows are an array of no str."""
    assert types_at((), np.arange(3)).tolist() == ["text"] * 3
    assert types_at((), np.arange(0)).dtype.kind == "U"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "a", "multi_modal_data": {"image": 1}, "mm_processor_kwargs": {}}, "give it to SteerModel"),
        (
            {"prompt": "a", "multi_modal_data": {"image": 1}, "multi_modal_uuids": {"image": ["x"]}},
            "compares their content",
        ),
        ({"prompt": "a", "multi_modal_date": {"image": 1}}, "would be ignored"),
    ],
)
def test_what_would_be_dropped_is_refused(prompt, message) -> None:
    """Options that may come to nothing, names in place of pictures, and keys that are misspelt."""
    with pytest.raises(InvalidPrompt, match=message):
        prompt_dict(prompt)


def test_embeddings_among_tokens_are_refused() -> None:
    """vLLM's server puts a placeholder's id in their place: rows would bear it as if it had been read."""
    assert rendered(tokens_input([5, 6])).token_ids == (5, 6)
    mixed = embeds_input(torch.zeros(2, 4), prompt_token_ids=[5, 0], is_token_ids=torch.tensor([True, False]))
    for payload in (mixed, embeds_input(torch.zeros(2, 4))):
        with pytest.raises(InvalidPrompt, match="rows of this prompt cannot be labelled"):
            rendered(payload)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "input_audio", "input_audio": {}},
        {"video": "x"},
    ],
)
def test_chat_refuses_what_its_template_would_only_name(part) -> None:
    """A picture in a message would leave its placeholder and no picture; text in parts is text."""
    text = {"type": "text", "text": "What is in this image?"}
    without_media([{"role": "user", "content": [text, text]}, {"role": "assistant", "content": None}])
    with pytest.raises(InvalidPrompt, match="message 1 holds"):
        without_media([{"role": "system", "content": "image"}, {"role": "user", "content": [text, part]}])


def test_the_language_model_within_a_wrapper_has_its_family() -> None:
    """By its own architecture, by transformers' name for its type, or, where it is in no other model, by ours."""

    def within(kind: str, *own: str) -> tuple[str, ...]:
        text = SimpleNamespace(model_type=kind, architectures=own or None)
        return family_of(architectures_within(text, {"llama": "LlamaForCausalLM"})).architectures

    assert "LlamaForCausalLM" in within("llama")
    assert "Qwen2ForCausalLM" in within("qwen2_5_vl_text")
    assert "Gemma3ForCausalLM" in within("llama", "Gemma3ForCausalLM")


def test_a_file_keeps_where_pictures_were(tmp_path) -> None:
    """They are read as they were written, and refused beyond the prompt."""
    handle = a_handle()
    assert set(handle.token_types) == {"text"}
    handle.media = (MediaSpan("image", 0, 0, 2, "a"),)
    types = handle.token_types.tolist()
    path = handle.save(tmp_path / "rows.safetensors")
    assert CaptureHandle.load(path).media == handle.media
    assert CaptureHandle.load(path).token_types.tolist() == types
    with np.load(handle.save_npz(tmp_path / "rows.npz"), allow_pickle=False) as arrays:
        assert arrays["token_types"].tolist() == types
    beyond = len(handle.prompt_token_ids) + 1
    handle.media = (MediaSpan("image", 0, 0, beyond, "a"),)
    with pytest.raises(InvalidFile, match="an image at positions outside its prompt"):
        CaptureHandle.load(handle.save(tmp_path / "beyond.safetensors"))
