"""What is done as it was asked, and is hardly meant: special tokens twice, more tokens than there is room for, vectors
of another model. Each is warned of, once a call, and an argument says that it is meant.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import listening, opened
from support.rows import TINY_ENGINE, settled
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from steercap import Add, CaptureSpec, Monitor, SteeringSpec, SteerModel
from steercap.adapters import server
from steercap.cli.prompts import PromptOptions, run_each
from steercap.client import RemoteModel
from steercap.core.prompts import repeating, warn_of_doubled
from steercap.core.spec import Point
from steercap.lab.directions import Exchange, calibrate, extract, mean_rows
from steercap.server.server import ServerSettings, application
from steercap.steering.directions import DirectionSet
from steercap.steering.layers import LayerVectors
from steercap.testing import tiny_checkpoint

BOS = 256
GREEDY: dict[str, Any] = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}
CHAT = "{{ bos_token }}{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
TWICE = r"prompt '<bos>\[.*the text has a special token.*add_special_tokens=False"
WIDTH = 128


@pytest.fixture(scope="module")
async def beginning(tmp_path_factory) -> AsyncIterator[SteerModel]:
    """A model whose tokenizer puts <bos> before every text, and whose chat template writes it too, as Gemma's do."""
    path = tmp_path_factory.mktemp("warned") / "beginning"
    shutil.copytree(tiny_checkpoint("llama"), path)
    made = AutoTokenizer.from_pretrained(path)
    made.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    made.chat_template = CHAT
    made.save_pretrained(path)
    async with opened(path, **TINY_ENGINE) as model:
        yield model


@pytest.fixture(scope="module")
async def remote(beginning: SteerModel) -> AsyncIterator[RemoteModel]:
    app = await application(beginning, server.read_flags(beginning.serving.model, []), ServerSettings())
    async with listening(app) as url, SteerModel.connect(url) as model:
        yield model


@contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def rendered(model: SteerModel, *said: str) -> list[str]:
    """Chats as `apply_chat_template(tokenize=False)` gives them."""
    return [model.tokenizer.apply_chat_template([{"role": "user", "content": one}], tokenize=False) for one in said]


@pytest.mark.parametrize("side", ["beginning", "remote"])
async def test_a_rendered_chat_has_its_special_tokens_once_or_says_so(
    side, beginning: SteerModel, remote: RemoteModel
) -> None:
    """Token ids are those of transformers' tokenizer, called either way; every call says that they double, and how many."""
    model: Any = remote if side == "remote" else beginning
    texts = rendered(beginning, "one", "two")
    once, twice = [
        [beginning.tokenizer(text, add_special_tokens=special)["input_ids"] for text in texts]
        for special in (False, True)
    ]
    assert [ids[:2].count(BOS) for ids in (*once, *twice)] == [1, 1, 2, 2]

    async def read(**asked: Any) -> list[list[int]]:
        _, handles = await model.generate(texts, GREEDY, capture_layers=[1], **asked)
        return [list(handle.prompt_token_ids) for handle in handles]

    with pytest.warns(UserWarning, match=TWICE) as said:
        assert await read() == twice
    assert len(said) == 1
    assert "and 1 more" in str(said[0].message)
    with silent():
        assert await read(add_special_tokens=True) == twice
        assert await read(add_special_tokens=False) == once
        assert list((await model.read(texts[0], add_special_tokens=False)).prompt_token_ids) == once[0]
        chunks = [one async for one in model.stream(texts[0], GREEDY, capture_layers=[1], add_special_tokens=False)]
        assert sum(len(one.positions) for one in chunks if one.positions is not None) == len(once[0]) + 2
        await model.generate(["plain text", "more"], GREEDY)
        await model.generate([{"prompt_token_ids": ids} for ids in twice], GREEDY)
        chat = [{"role": "user", "content": "one"}]
        assert list((await model.chat(chat, GREEDY, capture_layers=[1]))[1].prompt_token_ids) == once[0]
        _, handle = await model.chat(chat, GREEDY, capture_layers=[1], add_special_tokens=True)
        assert list(handle.prompt_token_ids) == twice[0]
        (raw,) = await model.run(texts[:1], GREEDY, add_special_tokens=False)
        assert side == "remote" or raw.output.prompt == texts[0]
        assert [one.start for one in handle.messages][:1] == [3]
    with pytest.warns(UserWarning, match=TWICE):
        await model.read(texts[0])
    with pytest.warns(UserWarning, match=TWICE):
        assert [one async for one in model.stream(texts[0], GREEDY)]


@pytest.mark.parametrize("side", ["beginning", "remote"])
async def test_vectors_of_rendered_chats_are_those_of_their_tokens(
    side, beginning: SteerModel, remote: RemoteModel
) -> None:
    """With `add_special_tokens=False` the rows are those of the chat; left out, those of another text, and a warning."""
    model: Any = remote if side == "remote" else beginning
    texts = rendered(beginning, "one", "two", "three", "four")
    ids = [beginning.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    known = await mean_rows(model, ids)
    with silent():
        found = await mean_rows(model, texts, add_special_tokens=False)
    torch.testing.assert_close(found.values, known.values)
    assert found.prompts == known.prompts
    with pytest.warns(UserWarning, match=TWICE) as said:
        other = await mean_rows(model, texts)
    assert len(said) == 1
    assert "and 3 more" in str(said[0].message)
    assert not torch.allclose(other.values, known.values, rtol=1e-2)
    with pytest.warns(UserWarning, match=TWICE):
        await extract(model, texts[:2], texts[2:], name="it", held_out=0.0)
    with silent():
        await extract(model, texts[:2], texts[2:], name="it", held_out=0.0, add_special_tokens=False)
    with pytest.warns(UserWarning, match=TWICE):
        await mean_rows(model, [Exchange(texts[0], "yes")])


def test_tokens_around_a_text_are_known_however_many_they_are() -> None:
    """GLM puts two before a text, BERT one on either side, T5 one behind; what only looks like them is let be."""

    def warned(ids: list[int], around: list[int]) -> bool:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            warn_of_doubled(repeating([("text", ids)]), around)
        return bool(said)

    assert warned([0, 1, 0, 1, 7, 8], [0, 1])
    assert warned([101, 101, 7, 8, 102], [101, 102])
    assert warned([101, 7, 8, 102, 102], [101, 102])
    assert warned([7, 8, 1, 1], [1])
    assert warned([2, 2], [2])
    for ids, around in (
        ([0, 1, 7, 0, 1], [0, 1]),
        ([7, 7, 8], [2]),
        ([7, 8, 7, 8], [2, 3]),
        ([2, 7, 7], [2]),
        ([2], [2]),
    ):
        assert not warned(ids, around)
    assert not warned([2, 2, 7], [])


async def test_calibration_reads_texts_as_they_stand(beginning: SteerModel) -> None:
    texts = rendered(beginning, "one", "two", "three")
    with pytest.warns(UserWarning, match=TWICE):
        twice = await calibrate(beginning, texts, layers=[1], tokens="all")
    with silent():
        once = await calibrate(beginning, texts, layers=[1], tokens="all", add_special_tokens=False)
    assert twice.rows == once.rows + 3


async def test_the_command_reads_texts_as_it_is_told(beginning: SteerModel) -> None:
    """`--no-special-tokens` reads them as they stand; left out, one warning for all that double a token."""
    texts = rendered(beginning, "one", "two")

    async def read(special: bool | None) -> list[int]:
        found: dict[int, int] = {}
        asked = PromptOptions(prompts=texts, special_tokens=special).read()

        def take(number: int, _raw: Any, handle: Any) -> None:
            found[number] = list(handle.prompt_token_ids).count(BOS)

        await run_each(beginning, asked, GREEDY, take, capture=CaptureSpec(layers=[1]))
        return [found[number] for number in range(len(texts))]

    with silent():
        assert (await read(special=False), await read(special=True)) == ([1, 1], [2, 2])
    with pytest.warns(UserWarning, match=TWICE) as said:
        assert await read(special=None) == [2, 2]
    assert len(said) == 1
    for special, count in ((None, 1), (False, 1), (True, 2)):
        (chat,) = PromptOptions(prompts=["one"], chat=True, special_tokens=special).read()
        found: list[int] = []
        take = partial(lambda kept, _number, _raw, handle: kept.append(list(handle.prompt_token_ids).count(BOS)), found)
        await run_each(beginning, [chat], GREEDY, take, capture=CaptureSpec(layers=[1]))
        assert found == [count]


@pytest.mark.parametrize("side", ["tiny", "far"])
async def test_more_tokens_than_there_is_room_for(side, tiny: SteerModel) -> None:
    """Generation ends where the context is full, as ever, and the call says so; None asks for as many as there are."""
    context = tiny.engine.model_config.max_model_len
    prompt = {"prompt_token_ids": [7] * (context - 9)}
    if side == "far":
        app = await application(tiny, server.read_flags(tiny.serving.model, []), ServerSettings())
        async with listening(app) as url, SteerModel.connect(url) as model:
            await ask_too_much(model, prompt, context)
    else:
        await ask_too_much(tiny, prompt, context)


async def ask_too_much(model: Any, prompt: Any, context: int) -> None:
    asked = {**GREEDY, "max_tokens": 5000}
    with pytest.warns(UserWarning, match=rf"max_tokens=5000 is more than the context of {context:,} tokens holds"):
        (raw,) = await model.run([prompt], asked)
    with silent():
        (free,) = await model.run([prompt], {**asked, "max_tokens": None})
        (fits,) = await model.run([prompt], {**asked, "max_tokens": 9})
    lengths = [
        len(one.output.choices[0].token_ids if hasattr(one.output, "choices") else one.output.outputs[0].token_ids)
        for one in (raw, free, fits)
    ]
    assert lengths == [9, 9, 9]


def of(model: str, seed: int = 1) -> LayerVectors:
    return LayerVectors({1: torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))}, name="it", model=model)


def asks_of(vectors: LayerVectors) -> dict[str, dict[str, Any]]:
    """Each way in which a call takes vectors."""
    return {
        "steering": {"steering": Add(vectors, 0.5, layer=1)},
        "spec": {"steering": SteeringSpec([replace(Add(vectors, layer=1), scale=0.5)])},
        "project": {"capture": CaptureSpec(project=vectors)},
        "directions": {"capture": CaptureSpec(project=DirectionSet({"it": vectors}))},
        "monitors": {"monitors": [Monitor(vectors, threshold=1e9, layer=1)]},
    }


@pytest.mark.parametrize("how", list(asks_of(of("x"))))
async def test_vectors_of_another_model_are_named(how, tiny: SteerModel) -> None:
    """Said once for each spec; silent of the model's own names, of vectors that name none, and where it is meant."""
    own = Path(tiny.model).name
    asked = asks_of(of("openai/gpt2"))[how]
    with pytest.warns(UserWarning, match=rf"made for model 'openai/gpt2', and this one is '{own}'"):
        await tiny.run([5, 6, 7], GREEDY, **asked)
    with silent():
        if how != "monitors":  # which are read anew for each request
            await tiny.run([5, 6, 7], GREEDY, **asked)
        for name in (own, own.upper(), f"somebody/{own}", "qwen3", ""):
            await tiny.run([5, 6, 7], GREEDY, **asks_of(of(name))[how])


async def test_a_file_of_another_model_is_named(tiny: SteerModel, tmp_path: Path) -> None:
    """Of vectors as of steering, which keeps the model of its vectors; the header of a file may say another."""
    vectors = LayerVectors.load(of("gpt2").save(tmp_path / "it.safetensors"))
    edit = Add(vectors, 0.5, layer=1)
    specs = [SteeringSpec.load(SteeringSpec([edit]).save(tmp_path / "one.safetensors"))]
    specs += [
        SteeringSpec.load(SteeringSpec([replace(edit, model="")]).save(tmp_path / "two.safetensors", model="gpt2"))
    ]
    for spec in specs:
        assert [one.model for one in spec.of_rows()] == ["gpt2"]
        with pytest.warns(UserWarning, match="a vector of steering= says that it was made for model 'gpt2'"):
            await tiny.generate([5, 6, 7], GREEDY, steering=spec)
    with silent():
        await tiny.generate([5, 6, 7], GREEDY, steering=replace(edit, model=tiny.model))


async def test_a_server_names_vectors_of_another_model(tiny: SteerModel, tmp_path: Path) -> None:
    """At its start those of the operator; a client those that it asks with."""
    file = of("gpt2").save(tmp_path / "it.safetensors")
    flags = server.read_flags(tiny.serving.model, ["--served-model-name", "tiny"])
    with pytest.warns(UserWarning, match="--vectors it says that it was made for model 'gpt2'"):
        await application(tiny, flags, ServerSettings(vectors={"it": file}))
    app = await application(tiny, flags, ServerSettings())
    async with listening(app) as url, SteerModel.connect(url) as remote:
        for asked in asks_of(of("gpt2")).values():
            with pytest.warns(UserWarning, match="made for model 'gpt2', and this one is") as said:
                await remote.run([[5, 6, 7], [8, 9], [3, 4]], GREEDY, **asked)
            assert len([one for one in said if one.filename == __file__]) == 1, "once a call, and of its line"
        with silent():
            for name in ("tiny", Path(tiny.model).name, ""):
                await remote.generate([5, 6, 7], GREEDY, steering=Add(of(name), layer=1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="max_tokens=5000"):
                await remote.generate([7] * 250, {**GREEDY, "max_tokens": 5000}, capture_layers=[1])
    assert await settled(tiny) == (0, 0, 0)


async def test_the_calibration_and_the_sae_of_another_model_are_named(tiny: SteerModel) -> None:
    made = await calibrate(tiny, ["some text", "and more of it"], layers=[1])
    assert made.model == Path(tiny.model).name
    spec = CaptureSpec(layers=[1], codec="full8", calibration=replace(made, model="gpt2"))
    with pytest.warns(UserWarning, match="calibration= says that it was made for model 'gpt2'"):
        await tiny.generate([5, 6, 7], GREEDY, capture=spec)
    assert Point(1, "resid_post") in made.points
