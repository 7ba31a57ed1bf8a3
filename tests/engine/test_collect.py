"""`collect`: what is in a data set is what `model.read` gives, once each, whatever happens on the way."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file
from support.folders import digests
from support.rows import MAX_ERROR, MIN_COSINE, counter, random_prompt, settled

from steercap import Add, Calibration, CaptureSpec, Progress
from steercap.errors import (
    CollectionStopped,
    InvalidFile,
    InvalidRequest,
    InvalidSelection,
    InvalidSetting,
    InvalidSpec,
    RunDiffers,
)
from steercap.lab.datasets import ActivationDataset, DatasetFolder, verify
from steercap.lab.datasets.collecting import ByPredicate, ByProbe, OneIn, collect, open_source, pipeline
from steercap.lab.datasets.collecting.samples import Selected, seed_of
from steercap.lab.datasets.storage import LocalFolder
from steercap.lab.directions import calibrate
from steercap.steering import LayerVectors
from steercap.testing import compare_rows

#: Documents of several windows, of one, of none, and of a single token.
DOCUMENTS = [random_prompt(length, seed) for seed, length in enumerate([30, 75, 0, 1, 40, 12, 33])]
CONTEXT = 32


def read(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, torch.Tensor]]:
    """A data set as other tools read it: pyarrow and safetensors, and nothing of ours."""
    indices, tensors = [], []
    for path in sorted((folder / "shards").glob("[0-9]*.parquet")):
        indices.append(parquet.read_table(path))
        tensors.append(load_file(path.with_suffix(".safetensors")))
    index = pa.concat_tables(indices)
    columns = {name: index[name].to_numpy() for name in ("document", "window", "position", "token")}
    names = tensors[0].keys() if tensors else ()
    return columns, {name: torch.cat([one[name] for one in tensors]) for name in names}


def windows(document: int) -> list[list[int]]:
    ids = DOCUMENTS[document]
    return [ids[start : start + CONTEXT] for start in range(0, len(ids), CONTEXT)]


@pytest.mark.slow
async def test_rows_are_those_of_read_and_of_transformers(tiny, tiny_reference, tmp_path) -> None:
    """Every token of every document once, in order, under its labels, whatever is under way at once."""
    found = await collect(
        tiny,
        DOCUMENTS,
        tmp_path,
        layers=[0, -1],
        sites=["resid_post", "mlp_out"],
        context=CONTEXT,
        documents_per_shard=3,
    )
    index, tensors = read(tmp_path)
    every = [(d, w, ids) for d in range(len(DOCUMENTS)) for w, ids in enumerate(windows(d))]
    assert index["token"].tolist() == [token for _, _, ids in every for token in ids]
    assert index["document"].tolist() == [d for d, _, ids in every for _ in ids]
    assert index["window"].tolist() == [w for _, w, ids in every for _ in ids]
    assert index["position"].tolist() == [at for _, _, ids in every for at in range(len(ids))]
    assert found.totals.rows == found.totals.tokens == sum(map(len, DOCUMENTS))
    assert (found.totals.documents, found.totals.shards) == (len(DOCUMENTS), 3)
    at = 0
    for _, _, ids in every:
        handle = await tiny.read(ids, capture=CaptureSpec(layers=[0, -1], sites=["resid_post", "mlp_out"]))
        points = handle.points
        reference = tiny_reference.rows(ids, points)
        async with handle:
            for point in points:
                rows = tensors[f"rows.{point.site}.{point.layer}"][at : at + len(ids)]
                # Another batch may round otherwise: what `read` gives is as near as transformers' is.
                for other in (handle.captures[point], reference[point].flatten(1)):
                    same = compare_rows(rows, other)
                    assert same.cosine > MIN_COSINE
                    assert same.error < MAX_ERROR
        at += len(ids)
    assert verify(tmp_path) == found.totals


async def test_one_at_a_time_gives_the_same_bits_wherever_it_is_broken_off(tiny, tmp_path) -> None:
    """With `concurrency=1`, and shards made in two calls."""
    asked = {"layers": [1], "context": CONTEXT, "documents_per_shard": 2, "concurrency": 1}
    whole = await collect(tiny, DOCUMENTS, tmp_path / "whole", **asked)

    def broken_off():
        yield from DOCUMENTS[:5]
        raise KeyError("the corpus breaks off")

    with pytest.raises(KeyError, match="breaks off"):
        await collect(tiny, broken_off(), tmp_path / "parts", **asked)
    assert not (tmp_path / "parts" / "dataset.json").exists()
    there = DatasetFolder.open(tmp_path / "parts").receipts()
    rest = await collect(tiny, DOCUMENTS, tmp_path / "parts", **asked)
    assert rest.resumed == len(there)
    assert rest.totals == whole.totals
    assert digests(tmp_path / "parts") == digests(tmp_path / "whole")
    again = await collect(tiny, DOCUMENTS, tmp_path / "parts", **asked)
    assert (again.tokens, again.totals) == (0, whole.totals), "nothing is read twice"


async def test_one_at_a_time_gives_the_same_bits_whatever_the_prefix_cache_holds(tiny, tmp_path) -> None:
    """Only last tokens, behind a beginning that all documents share: it is computed anew for each."""
    shared = random_prompt(160, 99)
    documents = [[*shared, *random_prompt(length, length)] for length in (9, 20, 31, 14)]
    asked = {"layers": [3], "documents_per_shard": 1, "tokens": "last_prompt"}
    before = counter(tiny, "counter_prefix_cache_hits")
    await collect(tiny, documents, tmp_path / "fast", **asked, concurrency=2)
    hits = counter(tiny, "counter_prefix_cache_hits")
    assert hits > before
    asked["concurrency"] = 1
    await collect(tiny, documents, tmp_path / "whole", **asked)
    assert counter(tiny, "counter_prefix_cache_hits") == hits
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    (tmp_path / "again" / "shards" / "000002.json").unlink()
    mended = await collect(tiny, documents, tmp_path / "again", **asked)
    assert mended.resumed == 3
    assert digests(tmp_path / "again") == digests(tmp_path / "whole")


async def test_a_shard_has_no_more_documents_than_a_kill_may_lose(tiny, tmp_path) -> None:
    """The first few documents, of which nothing is kept, say nothing of those behind them."""
    documents = [[5]] * 300 + [random_prompt(30, 1)]
    found = await collect(tiny, documents, tmp_path, layers=[1], tokens=slice(1, None))
    assert found.totals.rows == 29
    assert DatasetFolder.open(tmp_path).definition.documents_per_shard == 1 << 14


async def test_another_corpus_or_another_question_is_refused(tiny, tmp_path) -> None:
    """By the digests of its documents, and by what was asked."""
    asked = {"layers": [1], "context": CONTEXT, "documents_per_shard": 2}
    await collect(tiny, DOCUMENTS, tmp_path, **asked)
    changed = [*DOCUMENTS[:3], DOCUMENTS[3] + [7], *DOCUMENTS[4:]]
    for corpus in (changed, DOCUMENTS[:2], [*DOCUMENTS, [1]]):
        with pytest.raises(RunDiffers):
            await collect(tiny, corpus, tmp_path, **asked)
    for other in ({"layers": [2]}, {"context": 16}, {"tokens": OneIn(2)}, {"codec": "full8"}, {"bos": "window"}):
        with pytest.raises(RunDiffers, match="another data set"):
            await collect(tiny, DOCUMENTS, tmp_path, **{**asked, **other})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(RunDiffers, match=r"notes\.txt"):
        await collect(tiny, DOCUMENTS, tmp_path / "other", **asked)


async def test_rows_are_calibrated_alike_or_refused(tiny, tmp_path) -> None:
    """A data set has one calibration, found again in its file; its rows are the model's up to the codec's bound."""
    calibration = await calibrate(tiny, [random_prompt(40, seed) for seed in range(8)], layers=[1])
    again = Calibration.load(calibration.save(tmp_path / "calibration.safetensors"))
    point = calibration.points[0]
    wider = Calibration(calibration.means, {point: calibration.spreads[point] * 2})
    asked = {"context": CONTEXT, "documents_per_shard": 2}
    folder = tmp_path / "data"
    await collect(tiny, DOCUMENTS, folder, capture=CaptureSpec(layers=[1], calibration=calibration), **asked)
    found = await collect(tiny, DOCUMENTS, folder, capture=CaptureSpec(layers=[1], calibration=again), **asked)
    assert found.tokens == 0  # all was there
    for other in (CaptureSpec(layers=[1], calibration=wider), CaptureSpec(layers=[1], codec="full8")):
        with pytest.raises(RunDiffers, match="calibration was"):
            await collect(tiny, DOCUMENTS, folder, capture=other, **asked)
    await collect(tiny, DOCUMENTS, tmp_path / "raw", layers=[1], **asked)
    coded, raw = (ActivationDataset(path, join="concatenate")[:] for path in (folder, tmp_path / "raw"))
    assert raw.shape == (sum(map(len, DOCUMENTS)), 128)
    error = (coded - raw).norm(dim=-1) / raw.norm(dim=-1)
    assert 0 < error.max() < 0.02


async def test_a_predicate_holds_where_nothing_generated_is_kept(tiny, tmp_path) -> None:
    """With `sampling_params=` too: of prompts alone, and of documents that end with their first token."""
    even = partial(ByPredicate, lambda _, ids: ids % 2 == 0, name="even")
    prompts = [[10, 11, 12, 13, 14], [20, 21, 22]]
    at_once = {"stop_token_ids": list(range(512)), "ignore_eos": False}
    for name, sample, more in (("prompts", even(of="prompt"), {"ignore_eos": True}), ("ended", even(), at_once)):
        params = {"max_tokens": 4, "temperature": 0.0, **more}
        await collect(tiny, prompts, tmp_path / name, layers=1, tokens=sample, sampling_params=params)
        index, _ = read(tmp_path / name)
        assert index["token"].tolist() == [10, 12, 14, 20, 22]


@pytest.mark.parametrize(("documents", "per_shard"), [(40, 5), (40, None), (2, None)])
async def test_a_source_whose_task_somebody_cancelled_ends_the_collection(documents, per_shard, tiny, tmp_path) -> None:
    """With an error, where it waited for ever; also while the first documents are looked at."""

    async def source() -> AsyncIterator[str]:
        for _ in range(documents):
            yield "a document"
        task = asyncio.ensure_future(asyncio.sleep(9))
        task.cancel()
        await task

    with pytest.raises(RuntimeError, match="was cancelled"):
        async with asyncio.timeout(60):
            await collect(tiny, source(), tmp_path / "data", layers=1, documents_per_shard=per_shard)
    assert await settled(tiny) == (0, 0, 0)


async def test_a_data_set_that_grows_is_not_complete_meanwhile(tiny, tmp_path) -> None:
    """Documents behind a last full shard go on from it; interrupted, the old totals are gone, and it goes on again."""
    asked = {"layers": 1, "context": CONTEXT, "documents_per_shard": 2, "concurrency": 1}
    corpus = DOCUMENTS * 5  # so many shards that most are written before the last documents are read

    def stop(progress: Progress) -> None:
        if progress.details["shards"] > 2:
            raise KeyError("enough")

    await collect(tiny, corpus[:4], tmp_path / "grown", **asked)
    assert DatasetFolder.open(tmp_path / "grown").totals().shards == 2
    with pytest.raises(KeyError):
        await collect(tiny, corpus, tmp_path / "grown", progress=stop, **asked)
    assert len(DatasetFolder.open(tmp_path / "grown").receipts()) >= 3
    assert DatasetFolder.open(tmp_path / "grown").totals() is None
    await collect(tiny, corpus, tmp_path / "grown", **asked)
    await collect(tiny, corpus, tmp_path / "whole", **asked)
    assert digests(tmp_path / "grown") == digests(tmp_path / "whole")


async def test_a_corpus_that_grew_behind_a_short_shard_says_what_to_remove(tiny, tmp_path) -> None:
    """Told apart from another corpus; without that receipt the same call goes on, to the data set of all of it."""
    asked = {"layers": 1, "context": CONTEXT, "documents_per_shard": 2, "concurrency": 1}
    await collect(tiny, DOCUMENTS[:3], tmp_path / "grown", **asked)
    before = digests(tmp_path / "grown")
    remove = r"shard 1, its last, of 1 documents, and the corpus has more after these: it has grown\. Remove (\S+), and"
    for corpus in (iter(DOCUMENTS), DOCUMENTS[:4]):
        with pytest.raises(RunDiffers, match=remove) as grown:
            await collect(tiny, corpus, tmp_path / "grown", **asked)
    changed = [*DOCUMENTS[:2], [7], *DOCUMENTS[3:]]
    for corpus in (changed, DOCUMENTS[:2]):
        with pytest.raises(RunDiffers, match="another folder, or the corpus it was begun with"):
            await collect(tiny, corpus, tmp_path / "grown", **asked)
    assert digests(tmp_path / "grown") == before
    await asyncio.to_thread(Path(re.search(remove, str(grown.value))[1]).unlink)
    found = await collect(tiny, iter(DOCUMENTS), tmp_path / "grown", **asked)
    assert (found.resumed, found.tokens) == (1, sum(map(len, DOCUMENTS[2:])))
    await collect(tiny, DOCUMENTS, tmp_path / "whole", **asked)
    assert digests(tmp_path / "grown") == digests(tmp_path / "whole")


async def test_samples_keep_the_rows_they_name(tiny, tmp_path) -> None:
    """One in k, by predicate, by probe and by selection: subsets of all rows, with the labels of these."""
    await collect(tiny, DOCUMENTS, tmp_path / "all", layers=[1], context=CONTEXT)
    index, tensors = read(tmp_path / "all")
    rows = tensors["rows.resid_post.1"]
    probe = LayerVectors({1: torch.randn(128, generator=torch.Generator().manual_seed(0))})
    products = rows.float() @ probe[1]
    threshold = float(products.median())
    clear = (products - threshold).abs() > 1e-3  # nearer to it another batch may round otherwise
    samples = {
        "one_in": (OneIn(3, seed=1), None),
        "predicate": (ByPredicate(lambda _, ids: ids % 2 == 0, name="even"), index["token"] % 2 == 0),
        "probe": (ByProbe(probe, layer=1, above=threshold), (products >= threshold).numpy()),
        "selection": (slice(1, None), index["position"] > 0),
        "selected": (Selected(slice(1, None)), index["position"] > 0),
        "capture": (CaptureSpec(layers=[1], tokens=slice(1, None)), index["position"] > 0),
    }
    for name, (sample, wanted) in samples.items():
        which = {"capture": sample} if isinstance(sample, CaptureSpec) else {"layers": [1], "tokens": sample}
        found = await collect(tiny, DOCUMENTS, tmp_path / name, context=CONTEXT, **which)
        part, own = read(tmp_path / name)
        keys = list(zip(index["document"], index["window"], index["position"], strict=True))
        kept = {key: at for at, key in enumerate(zip(part["document"], part["window"], part["position"], strict=True))}
        mask = np.array([key in kept for key in keys])
        assert len(kept) == mask.sum() == found.totals.rows > 0
        if wanted is not None:
            assert np.array_equal(
                mask[clear] if name == "probe" else mask, wanted[clear] if name == "probe" else wanted
            )
        assert np.array_equal(index["token"][mask], part["token"])
        assert compare_rows(own["rows.resid_post.1"], rows[torch.from_numpy(mask)]).error < MAX_ERROR


async def test_codecs_keep_what_a_handle_keeps(tiny, tmp_path) -> None:
    """Codes and scales, as `CodedRows` of `read` have them."""
    for codec, k in (("full8", None), ("rp8", 16), ("topk8", 8)):
        folder = tmp_path / codec
        await collect(tiny, DOCUMENTS[:1], folder, layers=[1], codec=codec, codec_k=k, concurrency=1)
        _, tensors = read(folder)
        async with await tiny.read(DOCUMENTS[0], capture=CaptureSpec(layers=[1], codec=codec, codec_k=k)) as handle:
            for name, part in handle.coded[1].parts.items():
                assert torch.equal(tensors[f"{name}.resid_post.1"], part), (codec, name)


async def test_what_is_generated_is_collected_with_seeds_of_its_own(tiny, tmp_path) -> None:
    """Rows of prompt and answer; a document's answer depends on its number, and on nothing that runs beside it."""
    params = {"max_tokens": 6, "temperature": 1.0, "ignore_eos": True}
    documents = [random_prompt(10, 3)] * 4
    await collect(tiny, documents, tmp_path, layers=[1], sampling_params=params, seed=5)
    index, tensors = read(tmp_path)
    answers = []
    for number, prompt in enumerate(documents):
        own = {**params, "seed": seed_of(5, number)}
        _, handle = await tiny.generate(prompt, own, capture=CaptureSpec(layers=[1]))
        mine = index["document"] == number
        async with handle:
            assert index["token"][mine].tolist() == handle.token_ids.tolist()
            assert (
                compare_rows(tensors["rows.resid_post.1"][torch.from_numpy(mine)], handle.captures[1]).error < MAX_ERROR
            )
        answers.append(tuple(handle.output_token_ids))
    assert len(set(answers)) > 1
    with pytest.raises(InvalidSetting, match="seed"):
        await collect(tiny, documents, tmp_path / "b", sampling_params={"seed": 1})
    with pytest.raises(InvalidSetting, match="split"):
        await collect(tiny, documents, tmp_path / "b", sampling_params=params, long="split")


async def test_steering_changes_what_is_collected_and_what_it_is(tiny, tmp_path) -> None:
    """Given, or in force around the call; another one is another data set."""
    spec = Add(torch.ones(128), 3.0, layer=0)
    await collect(tiny, DOCUMENTS[:1], tmp_path / "plain", layers=[1])
    await collect(tiny, DOCUMENTS[:1], tmp_path / "given", layers=[1], steering=spec)
    async with tiny.steered(spec):
        await collect(tiny, DOCUMENTS[:1], tmp_path / "inside", layers=[1])
    plain, given, inside = (read(tmp_path / name)[1]["rows.resid_post.1"] for name in ("plain", "given", "inside"))
    assert (plain - given).abs().max() > 0.1
    assert compare_rows(given, inside).error < MAX_ERROR
    with pytest.raises(RunDiffers, match="steering"):
        await collect(tiny, DOCUMENTS[:1], tmp_path / "given", layers=[1])


async def test_texts_chats_and_files_are_read_as_the_tokenizer_reads_them(tiny, tmp_path) -> None:
    """From JSON lines with bad ones among them, which are counted."""
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "Hello"}\nnothing\n{"tokens": [1, 2, 3]}\n"World"\n')
    source = open_source(path, bad="skip")
    seen = []
    found = await collect(tiny, source, tmp_path / "a", layers=[1], progress=seen.append)
    assert (found.skipped, found.totals.documents) == (1, 3)
    assert read(tmp_path / "a")[0]["token"].tolist() == [
        *tiny.tokenizer.encode("Hello"),
        *[1, 2, 3],
        *tiny.tokenizer.encode("World"),
    ]
    assert (seen[-1].stage, seen[-1].done) == ("bytes of the corpus", seen[-1].total)
    assert seen[-1].details["tokens"] == found.totals.tokens == found.tokens
    with pytest.raises(InvalidFile, match="line 2"):
        await collect(tiny, path, tmp_path / "b", layers=[1])
    with pytest.raises(InvalidRequest, match="chat template"):
        await collect(tiny, [chat], tmp_path / "c", layers=[1])
    with pytest.raises(InvalidRequest, match="document 1"):
        await collect(tiny, [[1], [10**9]], tmp_path / "d", layers=[1])
    halves = ["Hello", "a\ud800b", [{"role": "user", "content": "\udc00"}], "World"]
    with pytest.raises(InvalidRequest, match=r"document 1: '\\ud800' is half of a surrogate pair"):
        await collect(tiny, halves, tmp_path / "e", layers=[1])
    found = await collect(tiny, open_source(halves, bad="skip"), tmp_path / "e", layers=[1])
    assert (found.skipped, found.totals.documents) == (2, 2)
    with pytest.raises(InvalidSelection, match=r"document 1, window 0: position 3 .*slice\(3, 4\)"):
        await collect(tiny, [[1] * 4, [1] * 3], tmp_path / "f", layers=[1], tokens=3)
    found = await collect(tiny, [[1] * 4, [1] * 3], tmp_path / "g", layers=[1], tokens=slice(3, 4))
    assert (found.totals.documents, found.totals.rows) == (2, 1)


async def test_what_does_not_fit_is_told_before_anything_is_read(tiny, tmp_path) -> None:
    """And nothing is written."""
    corpus = iter(DOCUMENTS)
    wrong = [
        ({"context": 10_000}, InvalidSetting),
        ({"concurrency": 0}, InvalidSetting),
        ({"shard_bytes": 0}, InvalidSetting),
        ({"capture": CaptureSpec(reduce="mean")}, InvalidSpec),
        ({"capture": CaptureSpec(), "layers": [1]}, InvalidSpec),
        ({"capture": CaptureSpec(tokens="prompt"), "tokens": OneIn(2)}, InvalidSpec),
        ({"layers": [99]}, InvalidSpec),
        ({"attention": 0}, InvalidSpec),
        ({"attention": 4, "tokens": "generated"}, InvalidSpec),
        ({"attention": 4, "tokens": OneIn(2)}, InvalidSpec),
        ({"attention": 4, "statistics_every": 8}, InvalidSetting),
        ({"layers": [1], "tokens": ByProbe(LayerVectors({2: torch.ones(128)}), layer=2, above=0.0)}, InvalidSpec),
    ]
    for asked, error in wrong:
        with pytest.raises(error):
            await collect(tiny, corpus, tmp_path / "folder", **asked)
    assert not (tmp_path / "folder").exists()
    assert next(corpus) is DOCUMENTS[0]


async def test_a_second_writer_is_refused(tiny, tmp_path) -> None:
    """While the first writes; afterwards it may."""
    began, go_on = threading.Event(), threading.Event()

    def slow():
        yield DOCUMENTS[0]
        began.set()
        go_on.wait(60)

    first = asyncio.ensure_future(collect(tiny, slow(), tmp_path, layers=[1]))
    await asyncio.to_thread(began.wait, 60)
    with pytest.raises(InvalidRequest, match="another call"):
        await collect(tiny, DOCUMENTS[:1], tmp_path, layers=[1])
    go_on.set()
    await first
    assert (await collect(tiny, DOCUMENTS[:1], tmp_path, layers=[1])).tokens == 0


async def test_a_cancelled_call_stops_cleanly_and_the_next_goes_on(tiny, tmp_path) -> None:
    """At any moment; the model holds nothing of it afterwards."""
    asked = {"layers": "all", "context": CONTEXT, "documents_per_shard": 2}
    cancelled = 0
    for steps in (0, 1, 5, 20, 60):
        task = asyncio.ensure_future(collect(tiny, DOCUMENTS * 6, tmp_path, **asked))
        for _ in range(steps):
            await asyncio.sleep(0.005)
        if task.cancel():  # a quick machine has the rest by then
            cancelled += 1
            with pytest.raises(asyncio.CancelledError):
                await task
    assert cancelled > 1
    found = await collect(tiny, DOCUMENTS * 6, tmp_path, **asked)
    assert found.totals.rows == 6 * sum(map(len, DOCUMENTS))
    assert verify(tmp_path) == found.totals
    await nothing_is_held(tiny)


async def test_rows_on_their_way_are_given_back_when_a_call_is_cancelled(tiny, tmp_path, monkeypatch) -> None:
    """At once, not when the garbage collector comes to what held them."""
    fetching, fetch = asyncio.Event(), tiny.fetch_captures_batch

    async def fetched(wanted):
        fetching.set()
        await fetch(wanted)

    monkeypatch.setattr(tiny, "fetch_captures_batch", fetched)
    gc.disable()
    try:
        task = asyncio.ensure_future(collect(tiny, DOCUMENTS * 30, tmp_path, layers="all"))
        await fetching.wait()
        assert task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await nothing_is_held(tiny)
    finally:
        gc.enable()


@pytest.mark.parametrize("steps", range(5))
async def test_rows_that_wait_are_given_back_when_a_call_is_cancelled_twice(steps, tiny, tmp_path, monkeypatch) -> None:
    """The second time while it ends: what waits to be fetched is given back, and what still comes."""
    groups = []

    async def fetched(group):
        groups.append(group)
        await asyncio.Event().wait()

    monkeypatch.setattr(tiny, "fetch_captures_batch", fetched)
    gc.disable()
    try:
        task = asyncio.ensure_future(collect(tiny, DOCUMENTS * 30, tmp_path, layers="all", codec="full8"))
        while len(groups) < pipeline.FETCHES:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # more has come than is being fetched
        for _ in range(2):
            assert task.cancel()
            for _ in range(steps):
                await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        await nothing_is_held(tiny)
    finally:
        gc.enable()


async def nothing_is_held(model) -> None:
    for _ in range(200):
        stats = await model.stats()
        if not stats.handles_held and not stats.capture_bytes_claimed:
            break
        await asyncio.sleep(0.05)
    assert not stats.handles_held
    assert not stats.capture_bytes_claimed


async def test_a_full_disk_is_a_clean_stop(tiny, tmp_path, monkeypatch) -> None:
    """The error says how far it is; with room again the same call goes on."""
    asked = {"layers": [1], "context": CONTEXT, "documents_per_shard": 2}
    write, written = LocalFolder.write, []

    def full(self, name, chunks):
        if name.startswith("shards/000002"):
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(name)
        return write(self, name, chunks)

    with monkeypatch.context() as patched:
        patched.setattr(LocalFolder, "write", full)
        with pytest.raises(CollectionStopped, match=r"No space left.*\d shards are there.*the same call resumes"):
            await collect(tiny, DOCUMENTS, tmp_path, **asked)
    assert "shards/000000.json" in written
    found = await collect(tiny, DOCUMENTS, tmp_path, **asked)
    assert found.resumed >= 1
    assert verify(tmp_path) == found.totals


async def test_a_damaged_shard_is_mended(tiny, tmp_path) -> None:
    """One that is cut short always, one whose bytes were changed if hashes are compared."""
    asked = {"layers": [1], "context": CONTEXT, "documents_per_shard": 2, "concurrency": 1}
    whole = await collect(tiny, DOCUMENTS, tmp_path, **asked)
    files = digests(tmp_path)
    cut, changed = tmp_path / "shards" / "000001.safetensors", tmp_path / "shards" / "000002.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    data = bytearray(changed.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    first = await collect(tiny, DOCUMENTS, tmp_path, **asked)
    assert first.mended == 1
    with pytest.raises(InvalidFile, match="000002"):
        verify(tmp_path)
    second = await collect(tiny, DOCUMENTS, tmp_path, verify=True, **asked)
    assert (second.mended, second.totals) == (1, whole.totals)
    assert digests(tmp_path) == files


async def test_a_shard_whose_receipt_is_damaged_is_mended(tiny, tmp_path) -> None:
    """One that was cut off, and one that is no JSON; what reads the data set is refused until then."""
    asked = {"layers": [1], "context": CONTEXT, "documents_per_shard": 2, "concurrency": 1}
    whole = await collect(tiny, DOCUMENTS, tmp_path, **asked)
    files = digests(tmp_path)
    cut, other = tmp_path / "shards" / "000001.json", tmp_path / "shards" / "000003.json"
    cut.write_bytes(cut.read_bytes()[:-20])
    other.write_bytes(bytes(64))
    with pytest.raises(InvalidFile, match=r"000001\.json cannot be read"):
        verify(tmp_path)
    found = await collect(tiny, DOCUMENTS, tmp_path, **asked)
    assert (found.resumed, found.mended, found.totals) == (4, 2, whole.totals)
    assert digests(tmp_path) == files


@pytest.mark.slow
async def test_a_slow_disk_slows_the_model_and_fills_no_memory(tiny, tmp_path, monkeypatch) -> None:
    """No more is read ahead than is said to be, however far the corpus goes."""
    taken, held = 0, asyncio.Event()
    loop, hold = asyncio.get_running_loop(), threading.Event()
    write = LocalFolder.write

    def endless():
        nonlocal taken
        for number in range(1000):
            taken += 1
            yield random_prompt(20, number)

    def slow(self, name, chunks):
        if name.startswith("shards/"):
            loop.call_soon_threadsafe(held.set)
            hold.wait(60)
        return write(self, name, chunks)

    monkeypatch.setattr(LocalFolder, "write", slow)
    task = asyncio.ensure_future(collect(tiny, endless(), tmp_path, layers=[1], documents_per_shard=10, concurrency=16))
    await held.wait()
    before = -1
    while before != taken:  # until nothing moves any more
        before = taken
        await asyncio.sleep(0.5)
    assert taken < 700
    hold.set()
    found = await task
    assert found.totals.documents == 1000


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.timeout(1800)
def test_ten_kills_leave_the_data_set_of_a_run_without(tmp_path) -> None:
    """Bit for bit, at random moments and before random operations on files."""
    script = Path(__file__).parent.parent / "run_collect_kills.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "kills"), "7", "10"],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["kills"] == 10
