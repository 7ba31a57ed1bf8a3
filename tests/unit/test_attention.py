"""Attention weights by the formula, written out number by number, and what is read off vLLM's modules."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from handles import a_handle
from hypothesis import given
from hypothesis import strategies as st
from support.rows import random_prompt
from support.specs import spec
from workers import KINDS, batch, device_of, kept_of, some_runtime, tap

from steercap import AttentionSummary, CaptureHandle, CaptureSpec, Point, SteeringSpec, stack
from steercap.captures import npz
from steercap.captures.lifecycle import Lifecycle
from steercap.captures.manifest import layout_of
from steercap.captures.rows import Captures, Found
from steercap.core.attention import AttentionRule, joined
from steercap.core.messages import (
    Attach,
    Attached,
    Call,
    CapturedRows,
    Collect,
    Collected,
    Counted,
    GetStats,
    Owner,
    Wanted,
    decode_answer,
    encode,
)
from steercap.core.plan import AttentionPlan, CapturePlan, Plan
from steercap.core.receipt import Receipt
from steercap.core.schema import RAW, Coding, PointSchema
from steercap.core.tokens import Range
from steercap.errors import InvalidFile, InvalidRequest, InvalidSelection, InvalidSpec, LayerOutOfRange
from steercap.kernels.attention import Attending, numbers_of, pattern, summarised, summary_of, weights_of
from steercap.kernels.codecs import ENCODINGS, Codec
from steercap.kernels.codecs.coded import CodedRows
from steercap.testing import Reference, tiny_checkpoint
from steercap.worker import buffers
from steercap.worker.runtime import Runtime

RULES = st.builds(
    AttentionRule,
    scale=st.floats(0.05, 2.0),
    window=st.none() | st.integers(1, 12),
    soft_cap=st.none() | st.floats(0.5, 30.0),
    sinks=st.just(()) | st.tuples(*[st.floats(-3.0, 3.0)] * 4),
)


def attending(rule: AttentionRule, tokens: int, kv_heads: int, seed: int, wanted: list[int] | None = None) -> Attending:
    """Random queries of 4 heads, of all tokens or those wanted, and the keys of all."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys = (torch.randn(tokens, heads, 8, generator=generator) for heads in (4, kv_heads))
    positions = torch.arange(tokens)
    at = positions if wanted is None else torch.tensor(wanted)
    return Attending(rule, queries[at], keys, at, positions)


def by_hand(asked: Attending, head: int, query: int) -> tuple[dict[int, float], float]:
    """The weight of each position that a query sees, and of the sink, in Python's own numbers."""
    rule, at = asked.rule, int(asked.query_positions[query])
    group = asked.queries.shape[1] // asked.keys.shape[1]
    logits = {}
    for key in range(at + 1):
        if rule.window is None or at - key < rule.window:
            pairs = zip(asked.queries[query, head].tolist(), asked.keys[key, head // group].tolist(), strict=True)
            logit = rule.scale * math.fsum(a * b for a, b in pairs)
            logits[key] = logit if rule.soft_cap is None else rule.soft_cap * math.tanh(logit / rule.soft_cap)
    sink = math.exp(rule.sinks[head]) if rule.sinks else 0.0
    total = math.fsum(map(math.exp, logits.values())) + sink
    return {key: math.exp(logit) / total for key, logit in logits.items()}, sink / total


@given(RULES, st.integers(1, 20), st.sampled_from([1, 2, 4]), st.integers(0, 99), st.integers(1, 6))
def test_a_summary_is_what_the_formula_gives(rule, tokens, kv_heads, seed, top) -> None:
    """Each head and token: targets, weights, entropy, first token and sink, by loops over single numbers."""
    asked = attending(rule, tokens, kv_heads, seed)
    found, whole = summarised(asked, top), pattern(asked, 1 << 20)
    for head in range(4):
        for query in range(tokens):
            weights, sink = by_hand(asked, head, query)
            strongest = sorted(weights.values(), reverse=True)[:top]
            row = found.weights[head, query].tolist()
            targets = found.targets[head, query].tolist()
            assert row == pytest.approx([*strongest, *[0.0] * (top - len(strongest))], abs=1e-5)
            assert targets[len(strongest) :] == [-1] * (top - len(strongest))
            assert len(set(targets[: len(strongest)])) == len(strongest)
            assert [weights[target] for target in targets if target >= 0] == pytest.approx(strongest, abs=1e-5)
            entropy = -math.fsum(w * math.log(w) for w in (*weights.values(), sink) if w)
            assert float(found.entropy[head, query]) == pytest.approx(entropy, abs=1e-4)
            assert float(found.first[head, query]) == pytest.approx(weights.get(0, 0.0), abs=1e-5)
            assert float(found.sink[head, query]) == pytest.approx(sink, abs=1e-5)
            dense = [weights.get(key, 0.0) for key in range(tokens)]
            assert whole[head, query].tolist() == pytest.approx(dense, abs=1e-5)


@given(RULES, st.integers(1, 40), st.integers(1, 500), st.data())
def test_chunks_change_nothing_and_are_as_small_as_asked(rule, tokens, chunk, data) -> None:
    """However few logits at once, any queries give the same rows; no chunk is larger, unless it is one query's."""
    wanted = sorted(data.draw(st.sets(st.integers(0, tokens - 1), min_size=1)))
    asked = attending(rule, tokens, 2, 3, wanted)
    whole = pattern(attending(rule, tokens, 2, 3), 1 << 20)[:, wanted]
    queries = []
    for part in weights_of(asked, chunk):
        assert part.weights.numel() <= chunk or part.weights.shape[1] == 1
        queries += range(part.queries.start, part.queries.stop)
        assert torch.allclose(part.weights, whole[:, part.queries, part.keys], atol=1e-5)
        assert whole[:, part.queries].sum() == pytest.approx(float(part.weights.sum()), rel=1e-4)
    assert queries == list(range(len(wanted)))


def test_a_long_prompt_takes_no_square_of_memory() -> None:
    """20,000 tokens of 4 heads: the pattern would take 6.4 GB; no tensor of the summary's parts is beyond 64 MiB."""
    asked = attending(AttentionRule(0.3, window=64), 20_000, 1, 0, wanted=[*range(0, 20_000, 10)])
    largest = max(part.weights.nbytes for part in weights_of(asked))
    assert largest <= 64 << 20
    found = summarised(asked, 3)
    assert found.targets.shape == (4, 2_000, 3)
    assert (found.positions[:, None] - found.targets).max() < 64
    with pytest.raises(InvalidRequest, match=r"4 heads, 2000 queries and 20000 keys takes 640,000,000 bytes"):
        pattern(asked, 1 << 28)


@pytest.mark.parametrize("sinks", [(), (0.1, -1.0, 0.5, 2.0)])
def test_weights_are_of_float32_whatever_the_process_has_set(sinks) -> None:
    """Products in bfloat16, as autocast makes them, would be off by hundredths; so would results of another dtype."""
    asked = attending(AttentionRule(0.9, sinks=sinks), 60, 2, 0)
    plain, summary = pattern(asked, 1 << 20), summarised(asked, 3)
    before, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    try:
        torch.set_default_dtype(torch.bfloat16)
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            again, other = pattern(asked, 1 << 20), summarised(asked, 3)
    finally:
        torch.set_default_dtype(before)
        torch.set_float32_matmul_precision(precision)
    assert again.dtype == torch.float32
    assert torch.equal(again, plain)
    for name in ("targets", "weights", "entropy", "first", "sink"):
        one, same = getattr(summary, name), getattr(other, name)
        assert one.dtype == same.dtype
        assert torch.equal(one, same), name


def test_a_query_whose_keys_are_not_all_there_is_refused() -> None:
    """A hole in what a query sees is an error; one that it does not see is none."""
    full = attending(AttentionRule(1.0, window=5), 20, 2, 0)
    kept = torch.tensor([position for position in range(20) if position != 7])

    def holey(wanted: list[int]) -> Attending:
        at = torch.tensor(wanted)
        return Attending(full.rule, full.queries[at], full.keys[kept], at, kept)

    rows = pattern(full, 1 << 20)[:, [6, 12, 19]][..., kept]
    assert torch.allclose(pattern(holey([6, 12, 19]), 1 << 20), rows, atol=1e-6)
    with pytest.raises(InvalidSelection, match="position 11 reads the keys of positions 7 to 11, and 4 of these 5"):
        holey([6, 11])
    with pytest.raises(InvalidRequest, match="4 heads of queries, 3 of keys and 0 sinks"):
        attending(AttentionRule(1.0), 3, 3, 0)
    with pytest.raises(InvalidRequest, match="4 heads of queries, 2 of keys and 3 sinks"):
        attending(AttentionRule(1.0, sinks=(0.0,) * 3), 3, 2, 0)


def test_ranks_bring_the_sinks_of_their_heads_and_nothing_else() -> None:
    """Sinks are joined in the order of the ranks; ranks that differ in anything else are not believed."""
    one, two = AttentionRule(0.5, sinks=(1.0, 2.0)), AttentionRule(0.5, sinks=(3.0, 4.0))
    assert joined([one, two]) == AttentionRule(0.5, sinks=(1.0, 2.0, 3.0, 4.0))
    assert joined([one]) == one
    with pytest.raises(
        InvalidRequest, match="layer 3 cannot be computed: its tensor-parallel ranks attend differently"
    ):
        joined([one, msgspec.structs.replace(two, window=3)]).understood(3)


def test_a_handle_without_what_it_takes_says_what() -> None:
    """No queries, no rule, a rule that is not understood, a `top` that is no number."""
    handle = a_handle(sites=("q", "k"), attention_rules={0: AttentionRule(1.0, unknown="it adds ALiBi's slopes")})
    with pytest.raises(LayerOutOfRange, match=r"q\[0\] was not captured"):
        a_handle().attention(0)
    with pytest.raises(InvalidRequest, match="layer 1 cannot be computed: this handle was made without"):
        handle.attention(1)
    with pytest.raises(InvalidRequest, match="layer 0 cannot be computed: it adds ALiBi's slopes"):
        handle.attention_pattern(0)
    for top in (0, -1, True, "many"):
        with pytest.raises(InvalidRequest, match="give a whole number, 1 or more"):
            handle.attention(0, top=top)
    for most in ("x", 1.5, None, True):
        with pytest.raises(InvalidRequest, match="give a whole number of bytes"):
            handle.attention_pattern(0, max_bytes=most)


def test_old_files_are_read_and_say_that_they_have_no_rule(tmp_path) -> None:
    """The header's entry is one that older files lack."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    path = a_handle(sites=("q", "k"), attention_rules={0: AttentionRule(1.0)}).save(tmp_path / "new.safetensors")
    with safe_open(path, "pt") as file:
        header = msgspec.json.decode(file.metadata()["steercap"])
    del header["attention_rules"]
    save_file(load_file(path), tmp_path / "old.safetensors", {"steercap": msgspec.json.encode(header).decode()})
    assert isinstance(CaptureHandle.load(path).attention(0), AttentionSummary)
    with pytest.raises(InvalidRequest, match="made without"):
        CaptureHandle.load(tmp_path / "old.safetensors").attention(0)


def test_a_head_without_a_sink_among_others_is_saved_and_read(tmp_path) -> None:
    """Its logit is minus infinity, which JSON has no number for; its weights are those without a sink."""
    tokens = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(0))
    places = torch.arange(5)
    found, none = (
        pattern(Attending(AttentionRule(1.0, sinks=sinks), tokens, tokens, places, places), 1 << 20)
        for sinks in ((0.0, -math.inf, 1.0, 2.0), ())
    )
    assert torch.equal(found[1], none[1])
    handle = a_handle(sites=("q", "k"), attention_rules={0: AttentionRule(1.0, sinks=(0.5, -math.inf))})
    read = CaptureHandle.load(handle.save(tmp_path / "a.safetensors"))
    assert read.attention_rules == handle.attention_rules
    assert read.attention_rules[0].sinks[0] == 0.5


@pytest.fixture(scope="module")
def module():
    """Makes modules as vLLM's models do."""
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention

    def make(kind: type = Attention, **arguments):
        config = VllmConfig(model_config=ModelConfig(str(tiny_checkpoint("llama")), dtype="float32"))
        with set_current_vllm_config(config):
            return kind(4, 32, 0.125, num_kv_heads=2, prefix="layers.0.attn", **arguments)

    return make


def test_a_rule_is_read_off_the_module(module) -> None:
    """Scale, window, cap and sinks are those that vLLM's module was made with."""
    from steercap.adapters.modules import rule_of

    assert rule_of(module()) == AttentionRule(0.125)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    found = rule_of(module(per_layer_sliding_window=7, logits_soft_cap=30.0, sinks=sinks))
    assert found == AttentionRule(0.125, 7, 30.0, (0.5, -1.0, 2.0, 0.0))


def test_what_is_not_understood_is_said(module) -> None:
    """ALiBi, keys in another dtype, attention that is not causal, and other kinds of modules have no weights here."""
    from vllm.config import CacheConfig
    from vllm.model_executor.layers.attention import Attention, EncoderOnlyAttention
    from vllm.v1.attention.backend import AttentionType

    from steercap.adapters.modules import rule_of

    class Other(Attention):
        """A model's own."""

    assert "ALiBi" in rule_of(module(alibi_slopes=[0.1] * 4)).unknown
    assert "vLLM's Other" in rule_of(module(Other)).unknown
    assert "EncoderOnlyAttention" in rule_of(module(EncoderOnlyAttention)).unknown
    assert "encoder" in rule_of(module(attn_type=AttentionType.ENCODER)).unknown
    assert "cached as fp8" in rule_of(module(cache_config=CacheConfig(cache_dtype="fp8"))).unknown
    assert not rule_of(module()).unknown


@pytest.mark.parametrize("seed", range(3))
def test_entropy_and_targets_are_those_of_numpy(seed) -> None:
    """In float64, by NumPy's own functions."""
    asked = attending(AttentionRule(0.4, soft_cap=20.0), 50, 2, seed)
    found = summarised(asked, 4)
    keys = np.repeat(asked.keys.double().numpy(), 2, axis=1)
    logits = 20 * np.tanh(np.einsum("qhd,khd->hqk", asked.queries.double().numpy(), keys) * 0.4 / 20)
    logits[:, np.triu(np.ones((50, 50), dtype=bool), 1)] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.nansum(weights * np.log(weights), axis=-1)
    np.testing.assert_allclose(found.entropy, entropy, atol=1e-5)
    np.testing.assert_array_equal(found.targets[:, 10:], np.argsort(-weights, axis=-1)[:, 10:, :4])


def test_models_of_several_threads_are_visited_apart() -> None:
    """Queries are read and changed in transformers' attention function, which all models share; none is left in its place."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    references = [Reference(tiny_checkpoint(family)) for family in ("llama", "opt")]
    points = [Point(layer, site) for layer in range(4) for site in ("q", "k", "v", "z")]
    steering = spec("add", 128, seed=1, layers=[0, 2], site="q")

    def rows(reference: Reference, steering: SteeringSpec | None = steering) -> dict[Point, torch.Tensor]:
        return reference.rows(random_prompt(30, 1), points, steering=steering, prompt_len=20)

    alone = [rows(reference) for reference in references]
    for one, reference in zip(alone, references, strict=True):
        assert not torch.allclose(one[Point(0, "q")], rows(reference, None)[Point(0, "q")])
    with ThreadPoolExecutor(2) as pool:
        for _ in range(10):
            for known, found in zip(alone, pool.map(rows, references), strict=True):
                assert all(torch.equal(known[point], found[point]) for point in points)
    assert "eager" not in ALL_ATTENTION_FUNCTIONS


LAYERS, HEADS, KV_HEADS, SIZE = (1, 4), 4, 2, 32


def runtime_of(kind: str, rules: dict[int, AttentionRule], shard: int, ranks: int) -> Runtime:
    """One rank with the queries and keys of two layers, as bfloat16, and a point of the stream between them."""
    heads = [PointSchema((count, SIZE), "bfloat16", shards=ranks) for count in (HEADS, KV_HEADS)]
    runtime = some_runtime(
        kind, 5, schemas=[*heads, PointSchema((8,), "bfloat16"), *heads], shard=shard, device_ring_bytes=8 << 20
    )
    runtime._attention = rules
    assert isinstance(decode_answer(runtime.answer(encode(Call((), Attach(8 << 20))))), Attached)
    return runtime


def passes_of(runtime: Runtime, kind: str, rows: dict[int, torch.Tensor], passes: list[tuple[int, int]]) -> None:
    """Run passes over positions of one request, whose rows at each point are given."""
    for start, stop in passes:
        positions = np.arange(start, stop)
        runtime.begin_step(batch(kind, ["r"], [start], [stop - start], positions + 7, positions))
        for point in runtime.taps.points:
            own = rows[point][start:stop].flatten(1)
            tap(runtime, own.to(device_of(kind)), None, point)
        runtime.end_step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", ["r", "n"])
def test_a_token_behind_the_end_writes_to_no_page_that_the_summary_freed(kind, first, monkeypatch) -> None:
    """The summary is asked for while a pass with one more token of its request is on its way, and is not finished: the
    page behind the request's last is another's by then.
    """
    rules = {1: AttentionRule(0.3), 4: AttentionRule(0.2)}
    runtime = runtime_of(kind, rules, 0, 1)
    capture = CapturePlan((0, 1, 3, 4), (Range(0, None),), None, RAW)
    asked = msgspec.structs.replace(capture, attention=AttentionPlan(3, ((1, 0, 1), (4, 3, 4))))
    runtime.register("r", Plan("r", 40, 4000, capture=asked).encode(), 0)
    kept = runtime._kept[Owner("r", 0)].capture_buffer
    assert kept is not None
    total = runtime._shape.lines // kept._record  # its rows end with a page

    def run(*parts: tuple[str, int, int, float]) -> None:
        names, starts, counts, _ = zip(*parts, strict=True)
        positions = np.concatenate([np.arange(start, start + count) for _, start, count, _ in parts])
        runtime.begin_step(batch(kind, list(names), list(starts), list(counts), positions + 7, positions))
        for point in runtime.taps.points:
            width = runtime.taps.schemas[point].width
            rows = [torch.full((count, width), value, dtype=torch.bfloat16) for _, _, count, value in parts]
            tap(runtime, torch.cat(rows).to(device_of(kind)), None, point)
        runtime.end_step()

    run(("r", 0, total - 2, 1.0))
    for at in (total - 2, total - 1):
        run(("r", at, 1, 1.0))
    monkeypatch.setattr(buffers, "SLICE", 1000)
    monkeypatch.setattr(buffers, "DEVICE_SLICE", 1000)
    question = encode(Call((), Collect((Wanted(Owner("r", 0), total),))))
    assert decode_answer(runtime.answer(question)).unfinished
    runtime.register("n", Plan("n", 3, 3, capture=capture).encode(), 0)
    run(*sorted([("r", total, 1, 99.0), ("n", 0, 3, 2.0)], key=lambda part: part[0] != first))
    (share,) = decode_answer(runtime.answer(encode(Call((), Collect((Wanted(Owner("n", 0), 3),)))))).shares
    assert share.failure is None
    assert all(bool((rows == 2).all()) for rows in kept_of(runtime, share))
    while (answer := decode_answer(runtime.answer(question))).unfinished:
        pass
    assert answer.shares[0].failure is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "total", "prompt"), [(1, 70, 40), (2, 33, 33)])
def test_workers_make_the_summary_of_rows_that_came_in_chunks(kind, ranks, total, prompt, monkeypatch) -> None:
    """Chunks of a prompt, one that is computed twice, and single tokens, on each rank of a group: what the client sees
    is the summary of all queries and keys, up to the rounding of the codes; pages that are not needed are free.
    """
    generator = torch.Generator().manual_seed(total)
    rows = {
        point: torch.randn(total, *shape, generator=generator).bfloat16()
        for point, shape in enumerate([(HEADS, SIZE), (KV_HEADS, SIZE), (8,), (HEADS, SIZE), (KV_HEADS, SIZE)])
    }
    rules = {
        1: AttentionRule(0.3, window=12, soft_cap=20.0),
        4: AttentionRule(0.2, sinks=tuple(torch.randn(HEADS, generator=generator).tolist())),
    }
    asked = AttentionPlan(3, ((1, 0, 1), (4, 3, 4)))
    plan = Plan("r", prompt, 200, capture=CapturePlan((0, 1, 3, 4), (Range(0, None),), None, RAW, attention=asked))
    found: dict[int, list[CodedRows]] = {0: [], 3: []}
    for shard in range(ranks):
        of_rank = {
            layer: msgspec.structs.replace(rule, sinks=rule.sinks[shard * HEADS // ranks :][: HEADS // ranks])
            for layer, rule in rules.items()
        }
        runtime = runtime_of(kind, of_rank, shard, ranks)
        runtime.register("r", plan.encode(), 0)
        own = {point: row if row.dim() < 3 else row.chunk(ranks, dim=1)[shard] for point, row in rows.items()}
        halves = [(0, 16), (16, prompt), (8, prompt), *((at, at + 1) for at in range(prompt, total))]
        passes_of(runtime, kind, own, halves)
        monkeypatch.setattr(buffers, "SLICE", 1000)
        monkeypatch.setattr(buffers, "DEVICE_SLICE", 1000)
        answers = []
        while len(answers) < 3 or answers[-1].unfinished or answers[-2].unfinished:  # a second fetch is answered alike
            answer = decode_answer(runtime.answer(encode(Call((), Collect((Wanted(Owner("r", 0), total),))))))
            assert isinstance(answer, Collected)
            answers.append(answer)
        assert answers[0].unfinished
        for answer in answers[-2:]:
            (share,) = answer.shares
            assert isinstance(share, CapturedRows)
            kept = kept_of(runtime, share)
        assert (share.points, share.coding, share.stored_rows) == ((0, 3), Coding("attention", 3), total)
        for point, part in zip((0, 3), kept, strict=True):
            assert isinstance(part, CodedRows)
            assert not part.invalid_reason(total)
            found[point].append(part)
        counted = decode_answer(runtime.answer(encode(Call((), GetStats()))))
        assert isinstance(counted, Counted)
        assert counted.pages_in_use <= 1
        other = decode_answer(runtime.answer(encode(Call((), Collect((Wanted(Owner("r", 0), total - 1),))))))
        assert f"was summarised for {total} inputs" in str(other.shares[0].failure)
    for layer, queries, keys in asked.layers:
        at = torch.arange(total)
        wanted = summarised(Attending(rules[layer], rows[queries], rows[keys], at, at), 3)
        numbers = CodedRows.joined(found[queries])
        read = summary_of(numbers.numbers(), at, 3)
        assert torch.equal(read.targets, wanted.targets)
        off = (numbers.numbers() - numbers_of(wanted).unflatten(1, (HEADS, -1))).abs()
        assert bool((off <= numbers.error_bound() + 1e-6).all())
        assert numbers.nbytes == total * HEADS * (3 * 3 + 4)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"attention": 0}, "attention=0; give an integer from 1 to 128"),
        ({"attention": 129}, "from 1 to 128"),
        ({"attention": True}, "attention=True; give an integer"),
        ({"attention": "8"}, "attention='8'; give an integer"),
        *(
            ({"attention": 8, **other}, f"leave {next(iter(other))}= out")
            for other in (
                {"sites": "resid_pre"},
                {"sites": ("k", "q")},
                {"at": "q[1]"},
                {"reduce": "mean"},
                {"codec": "full8"},
                {"codec_k": 8},
                {"codec_seed": 0},
                {"before_edits": True},
                {"allow_nonfinite": True},
            )
        ),
        *(
            ({"attention": 8, "tokens": tokens}, "reads the keys of all tokens before; give 'all' as tokens")
            for tokens in ("generated", "last_prompt", 3, slice(1, None), slice(None, None, 2), [0, 1])
        ),
    ],
)
def test_what_cannot_be_summarised_is_refused_by_name(given, says) -> None:
    """Numbers that are none, what changes the rows, and tokens whose keys would be missing."""
    with pytest.raises(InvalidSpec, match=re.escape(says)):
        CaptureSpec(**given)


def test_a_spec_of_attention_is_of_queries_and_keys_and_can_be_changed() -> None:
    """Its sites follow, also in a copy; it equals what says them."""
    asked = CaptureSpec(attention=8, layers=3, tokens=slice(0, 9))
    assert (asked.sites, asked.keeps_rows) == (("q", "k"), False)
    assert replace(asked, layers=2) == CaptureSpec(attention=8, layers=2, tokens=slice(0, 9), sites=("q", "k"))


def test_targets_in_files_are_those_of_the_workers(tmp_path) -> None:
    """As a handle's file and as an .npz by its own formula; a damaged entropy is found, and targets are no rows."""
    found = attending(AttentionRule(0.5, sinks=(0.1, 1.0, -1.0, 0.0)), 12, 2, 5)
    wanted = summarised(found, 3)
    schema, coding, codec = PointSchema((4, 8), "float32"), Coding("attention", 3), ENCODINGS["attention"]
    assert isinstance(codec, Codec)
    kept = CodedRows(
        coding, schema, codec.parts(codec.encode(numbers_of(wanted), schema, coding, None), schema, coding)
    )
    point, receipt = Point(1, "q"), Receipt((Point(1, "q"),), np.arange(12), np.arange(12), 12, None)
    handle = CaptureHandle(
        request_id="a",
        model="m",
        text="",
        prompt_token_ids=range(12),
        output_token_ids=(8,),
        points=(point,),
        num_layers=4,
        lifecycle=Lifecycle("a", found=Found(Captures({point: kept}, 4), receipt)),
    )
    again = CaptureHandle.load(handle.save(tmp_path / "a.safetensors"))
    for read in (handle.attention(1), again.attention(-3), handle.attention(1, top=3, tokens=slice(0, 12))):
        assert torch.equal(read.targets, wanted.targets)
        torch.testing.assert_close(read.weights, wanted.weights, atol=0.5 / 255 + 1e-6, rtol=0)
        torch.testing.assert_close(read.sink, wanted.sink, atol=0.5 / 255 + 1e-6, rtol=0)
        torch.testing.assert_close(read.entropy, wanted.entropy, atol=1e-6, rtol=2**-11)
    assert torch.equal(again.attention(1, top=2, tokens=[4, 5]).targets, wanted.targets[:, 4:6, :2])
    assert layout_of(handle.as_saved()).returned == "summary"
    (rows,) = npz.read(handle.save_npz(tmp_path / "a.npz")).values()
    assert torch.equal(rows, kept.numbers())
    kept.parts["entropy"][3, 1] = torch.nan
    with pytest.raises(InvalidFile, match="'entropy' must be finite, and not negative"):
        CaptureHandle.load(handle.save(tmp_path / "b.safetensors"))
    refused: list[Callable[[], object]] = [
        lambda: handle.captures[1],
        handle.to_numpy,
        handle.coded[1].inner,
        lambda: stack([handle]),
    ]
    for one in refused:
        with pytest.raises(InvalidSpec, match="targets of attention, not rows"):
            one()
    with pytest.raises(InvalidRequest, match="3 targets of each head and token were kept; give a number up to 3"):
        handle.attention(1, top=4)


def test_a_file_of_before_without_a_number_for_a_sink_is_read() -> None:
    """JSON wrote minus infinity as null, which is the sink that takes nothing."""
    rule = msgspec.json.decode(b'{"scale": 1.0, "sinks": [null, 0.5]}', type=AttentionRule)
    assert rule.sinks == (-sys.float_info.max, 0.5)
