"""Corpora of every kind, windows of their documents, and which tokens are kept."""

import asyncio
import errno
import gzip
import io
import itertools
import json
import threading
from codecs import BOM_UTF8
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from shards import definition_of, shard_of

from steercap.captures.rows import Captures
from steercap.core.spec import Point
from steercap.core.tokens import selected
from steercap.errors import (
    CollectionStopped,
    InvalidFile,
    InvalidPrompt,
    InvalidRequest,
    InvalidSelection,
    InvalidSetting,
    InvalidSpec,
)
from steercap.lab.datasets import DatasetFolder
from steercap.lab.datasets.collecting import ByPredicate, ByProbe, OneIn, open_source
from steercap.lab.datasets.collecting.calls import _kept, collect
from steercap.lab.datasets.collecting.documents import CorpusDocument, Cutting, NotDocument, Window, content_of
from steercap.lab.datasets.collecting.feeding import feed
from steercap.lab.datasets.collecting.reading import Block, Ended
from steercap.lab.datasets.collecting.samples import Selected, sample_of, seed_of
from steercap.lab.datasets.collecting.shards import Sharder, stopping
from steercap.steering.layers import LayerVectors
from steercap.testing import tokenizer

TEXTS = ["one\u2028two", "", "drei — três", "four " * 50]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


def contents(source):
    return [one.content if isinstance(one.content, (str, list)) else one.content.tolist() for one in source]


def write_jsonl(path: Path, records=None, opened=open):
    with opened(path, "wb") as file:
        for record in [{"text": text} for text in TEXTS] if records is None else records:
            file.write(json.dumps(record).encode() + b"\n")
    return path


def write_parquet(path: Path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns or {"text": TEXTS, "more": list(range(len(TEXTS)))}), path, row_group_size=3)
    return path


def write_arrow(path: Path, kind=pa.ipc.new_stream):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"label": [0] * len(TEXTS), "text": TEXTS})
    with kind(str(path), table.schema) as writer:
        for batch in table.to_batches(max_chunksize=3):
            writer.write_batch(batch)
    return path


def zstd(path: Path, data: bytes):
    with pa.CompressedOutputStream(str(path), "zstd") as stream:
        stream.write(data)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "gz", "zst", "parquet", "arrow", "arrow listed", "iterator"])
def test_every_kind_of_corpus_gives_the_same_documents(tmp_path, kind):
    """The same texts, in their order, empty ones and odd characters included."""
    match kind:
        case "jsonl":
            corpus = write_jsonl(tmp_path / "a.jsonl")
        case "gz":
            corpus = write_jsonl(tmp_path / "a.jsonl.gz", opened=gzip.open)
        case "zst":
            corpus = zstd(tmp_path / "a.jsonl.zst", write_jsonl(tmp_path / "a.jsonl").read_bytes())
        case "parquet":
            corpus = write_parquet(tmp_path / "a.parquet")
        case "arrow":
            corpus = write_arrow(tmp_path / "a.arrow")
        case "arrow listed":
            corpus = write_arrow(tmp_path / "a.arrow", pa.ipc.new_file)
        case "iterator":
            corpus = (text for text in TEXTS)
    source = open_source(corpus)
    documents = list(source)
    assert [one.content for one in documents] == TEXTS
    assert [one.number for one in documents] == list(range(len(TEXTS)))
    if kind != "iterator":
        assert all(str(corpus) in one.where for one in documents)
        assert source.bytes == corpus.stat().st_size
        assert source.bytes - 8 <= documents[-1].bytes <= source.bytes  # an Arrow stream has an end of 8 bytes
        assert list(source) == documents, "a file is read again from its beginning"


def test_a_number_of_documents_is_known_where_files_say_it(tmp_path):
    """Of tables, and of lists; JSON lines would have to be read for it."""
    assert open_source(write_parquet(tmp_path / "a.parquet")).count == len(TEXTS)
    assert open_source(write_jsonl(tmp_path / "a.jsonl")).count is None
    assert open_source(TEXTS).count == len(TEXTS)


@pytest.mark.parametrize(
    ("unit", "wanted"),
    [("line", ["a", "b ", "c"]), ("paragraph", ["a\nb ", "c"]), ("file", ["a\nb \n\n \nc\n"])],
)
@pytest.mark.parametrize(("ending", "mark"), [("\n", b""), ("\r\n", b""), ("\r\n", BOM_UTF8)])
def test_a_text_file_is_cut_as_asked(tmp_path, unit, wanted, ending, mark):
    """By lines, paragraphs or not at all; the mark that Windows begins files with is no text."""
    path = tmp_path / "a.txt"
    path.write_bytes(mark + b"a\nb \n\n \nc\n".replace(b"\n", ending.encode()))
    found = contents(open_source(path, unit=unit))
    assert [text.replace(ending, "\n") for text in found if text.strip()] == wanted


def test_data_sets_of_hugging_face_are_read_by_pyarrow_alone(tmp_path):
    """`save_to_disk` of one data set and of several splits, and the folder of a snapshot of the hub."""
    for split in ("train", "test"):
        write_arrow(tmp_path / "saved" / split / "data-00000-of-00001.arrow")
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": split}
        (tmp_path / "saved" / split / "state.json").write_text(json.dumps(state))
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert contents(open_source(tmp_path / "saved" / "train")) == TEXTS
    assert contents(open_source(tmp_path / "saved", split="test")) == TEXTS
    with pytest.raises(InvalidFile, match="'train', 'test'"):
        open_source(tmp_path / "saved")
    hub = tmp_path / "hub"
    for name in ("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001"):
        write_parquet(hub / "data" / f"{name}.parquet")
    (hub / "README.md").write_text("# A data set")
    assert contents(open_source(str(hub), split="train")) == TEXTS * 2
    with pytest.raises(InvalidFile, match="train, validation"):
        open_source(hub)
    with pytest.raises(InvalidFile, match="no file of split='dev'"):
        open_source(hub, split="dev")


@pytest.mark.parametrize("name", ["train-data", "test", "valid_x", "texts"])
def test_a_file_is_of_the_split_in_its_own_name(name, tmp_path, monkeypatch) -> None:
    """Whatever the folder is called; its folder's name counts for a file of no split, the given one's if nothing else says one."""
    folder = tmp_path / name
    (folder / "dev").mkdir(parents=True)
    for file in ("train", "test-0", "dev/part", "dev/train.2"):
        (folder / f"{file}.jsonl").write_text(json.dumps({"text": file}) + "\n")
    wanted = {"train": ["dev/train.2", "train"], "test": ["test-0"], "dev": ["dev/part"]}
    monkeypatch.chdir(folder)
    for corpus in (folder, str(folder / "**" / "*.jsonl"), "."):
        for split, names in wanted.items():
            assert contents(open_source(corpus, split=split)) == names
        with pytest.raises(InvalidFile, match="holds splits dev, test, train"):
            open_source(corpus)
    (folder / "dev" / "train.2.jsonl").unlink()
    for corpus in (folder / "dev", folder / "dev" / "part.jsonl", f"{folder}/dev/*"):
        assert contents(open_source(corpus, split="dev")) == contents(open_source(corpus)) == ["dev/part"]
        with pytest.raises(InvalidFile, match="holds no file of split='train'"):
            open_source(corpus, split="train")


def test_a_split_of_another_name_is_a_folder_or_a_part_of_a_file_s_name(tmp_path) -> None:
    """A usual name in the file does not count where another is asked for."""
    for name in ("chunk1/train-0", "chunk1/rest", "math/train-0", "more.math"):
        (path := tmp_path / f"{name}.jsonl").parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"text": name}) + "\n")
    assert contents(open_source(tmp_path, split="chunk1")) == ["chunk1/rest", "chunk1/train-0"]
    assert contents(open_source(tmp_path, split="math")) == ["math/train-0", "more.math"]


@pytest.mark.parametrize(
    ("held_out", "split"),
    [
        *(("val", "val"), ("eval-0", "eval"), ("Test", "test"), ("test/en/0", "test"), ("my_held_out", "held_out")),
        *(("testing-0", "testing"), ("evals/0", "evals")),
    ],
)
def test_splits_that_are_spelt_otherwise_are_not_read_together(held_out, split, tmp_path) -> None:
    """Held-out documents do not enter a data set of training: shortened, in capitals, or in a folder of folders."""
    for name in ("train/en/0", held_out):
        (path := tmp_path / f"{name}.jsonl").parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": name}) + "\n")
    with pytest.raises(InvalidFile, match="holds splits"):
        open_source(tmp_path)
    assert contents(open_source(tmp_path, split="train")) == ["train/en/0"]
    assert contents(open_source(tmp_path, split=split)) == [held_out]


def test_a_data_set_may_be_called_as_a_split_is(tmp_path) -> None:
    """As `datasets` names the files of its cache: "llm-eval.train.jsonl" is of the training split."""
    for split in ("train", "test"):
        write_jsonl(tmp_path / f"llm-eval.{split}.jsonl", [{"text": split}])
    with pytest.raises(InvalidFile, match="holds splits test, train"):
        open_source(tmp_path)
    assert contents(open_source(tmp_path, split="test")) == ["test"]


async def test_an_iterator_that_was_begun_is_refused() -> None:
    """Its first documents are gone: the same call again would make a data set without them."""
    texts = (text for text in TEXTS)
    source = open_source(texts)
    next(iter(source))
    for again in (source, open_source(texts)):
        with pytest.raises(InvalidRequest, match="was begun by an earlier call"):
            list(again)
    assert contents(open_source(text for text in TEXTS)) == TEXTS
    lines = io.StringIO("a\nb\n")
    for _ in range(2):
        assert contents(open_source(lines)) == ["a\n", "b\n"]
        lines.seek(0)

    async def coming():
        for text in TEXTS:
            yield text

    once = coming()
    open_source(once).begin()
    with pytest.raises(InvalidRequest, match="was begun by an earlier call"):
        open_source(once).begin()


def test_what_a_corpus_does_not_have_is_not_asked_for(tmp_path):
    """A split of one file, or a format of documents: the wrong text would be read, without a word."""
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "a"}\n')
    for asked in ({"format": "jsonl"}, {"split": "train"}, {"unit": "file"}):
        with pytest.raises(InvalidSetting, match="are for files"):
            open_source([str(path)], **asked)
    with pytest.raises(InvalidFile, match="holds no file of split='dev'"):
        open_source(path, split="dev")
    assert contents(open_source(path, split="train")) == ["a"]


def test_patterns_and_several_paths_keep_their_order(tmp_path):
    """A pattern's files by name, paths as they were given."""
    for name in "ba":
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": name}])
    assert contents(open_source(f"{tmp_path}/*.jsonl")) == ["a", "b"]
    assert contents(open_source([tmp_path / "b.jsonl", tmp_path / "a.jsonl"])) == ["b", "a"]
    write_parquet(tmp_path / "c.parquet")
    with pytest.raises(InvalidFile, match="several kinds"):
        open_source(tmp_path)
    with pytest.raises(InvalidFile, match="no such file"):
        open_source(tmp_path / "d.jsonl")
    with pytest.raises(InvalidFile, match="does not tell the format"):
        open_source(Path(__file__))


@pytest.mark.parametrize(
    ("item", "wanted"),
    [
        ("text", "text"),
        ([1, 2], [1, 2]),
        (np.array([3, 4], dtype=np.uint16), [3, 4]),
        (torch.tensor([5]), [5]),
        (CHAT, CHAT),
        ({"text": "t", "id": 7}, "t"),
        ({"messages": CHAT}, CHAT),
        ({"tokens": [1]}, [1]),
        ({"tokens": []}, []),
    ],
)
def test_items_are_documents(item, wanted):
    """Text, token ids of any library, messages, and records of these."""
    found = content_of(item)
    assert (found if isinstance(found, (str, list)) else found.tolist()) == wanted


@pytest.mark.parametrize(
    "item", [None, 3, 1.5, b"text", [1, "a"], [1.0], [True], [-1], [[1]], {"other": "t"}, {"text": None}, [{"role": 1}]]
)
def test_anything_else_is_no_document(item):
    """And the error says what it is."""
    with pytest.raises(NotDocument):
        content_of(item)


def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path):
    """By file and line; nothing is left out in silence."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(BOM_UTF8 + b'{"text": "a"}\nno json\n{"other": 1}\n\xff\n"b"\n')
    with pytest.raises(InvalidFile, match=r"a\.jsonl, line 2: no JSON"):
        list(open_source(path))
    source = open_source(path, bad="skip")
    assert contents(source) == ["a", "b"]
    assert source.skipped == 3
    assert [complaint.split(": ")[0] for complaint in source.complaints] == [f"{path}, line {n}" for n in (2, 3, 4)]
    with pytest.raises(InvalidRequest, match="document 1"):
        list(open_source(["a", 3]))


HALF = "a\ud800b"


@pytest.mark.parametrize(
    "item", [HALF, {"text": HALF}, [{"role": "user", "content": HALF}], [{**CHAT[0], "name": HALF}], "b\udc00"]
)
def test_half_of_a_surrogate_pair_is_no_text(item):
    """Tokenizers and UTF-8 take none, so the document is named, or skipped and counted."""
    with pytest.raises(InvalidRequest, match=r"document 1: .*half of a surrogate pair, which is not text"):
        list(open_source(["a", item]))
    source = open_source(["a", item, "\U0001f600"], bad="skip")
    assert contents(source) == ["a", "\U0001f600"]
    assert source.skipped == 1
    assert source.complaints[0].startswith("document 1: ")


async def test_half_of_a_surrogate_pair_is_named_where_documents_are_made_as_they_go():
    """And what comes behind it is read, where such are skipped."""

    async def later():
        for text in ("a", HALF, "b"):
            yield text

    with pytest.raises(InvalidRequest, match=r"document 1: .*half of a surrogate pair"):
        await fed(open_source(later()))
    assert len(await fed(open_source(later(), bad="skip"))) == 2


def test_half_of_a_surrogate_pair_in_a_file_is_named(tmp_path):
    """As an escape of JSON, which is whole pairs and no more; a line that was cut off is none for what it held before."""
    path = tmp_path / "a.jsonl"
    halves = [r'{"text": "a\ud800b"}', r'"\uD800"', r'"\udc00 and more"', r'"\ud800\u0041"']
    path.write_text("\n".join([r'"\ud83d\ude00"', *halves, r'"\ud83d\ude00', r'"\\ud800"']))
    source = open_source(path, bad="skip")
    assert contents(source) == ["\U0001f600", r"\ud800"]
    for number, complaint in enumerate(source.complaints[:4], 2):
        assert f"line {number}: '\\ud" in complaint
        assert "is half of a surrogate pair, which is not" in complaint
    assert "line 6: no JSON: " in source.complaints[4]
    with pytest.raises(InvalidFile, match=r"line 2: '\\ud800' is half of a surrogate pair"):
        list(open_source(path))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_row_that_is_not_utf8_is_named(tmp_path, kind):
    """Arrow does not look at what texts hold: half of a surrogate pair, as some write it."""
    texts = [b"one", b"a\xed\xa0\x80b", b"two"]
    table = pa.table({"text": pa.array(texts, pa.binary()).view(pa.string())})
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(InvalidFile, match=f"a.{kind}, row 2: not UTF-8: invalid continuation byte at byte 1"):
        list(open_source(path))
    source = open_source(path, bad="skip")
    assert contents(source) == ["one", "two"]
    assert source.skipped == 1


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow"])
@settings(max_examples=25, deadline=None)
@given(share=st.floats(0, 0.99))
def test_a_truncated_file_is_an_error_that_names_it(tmp_path_factory, name, share):
    """Never fewer documents, whatever is skipped."""
    path = tmp_path_factory.mktemp("cut") / name
    match name.rpartition(".")[2]:
        case "gz":
            write_jsonl(path, opened=gzip.open)
        case "zst":
            zstd(path, write_jsonl(path.with_name("b")).read_bytes())
        case "parquet":
            write_parquet(path)
        case _:
            write_arrow(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(InvalidFile, match=name):
        assert contents(open_source(path, bad="skip")) != TEXTS


def test_memory_is_that_of_a_few_documents(tmp_path):
    """A corpus of 40 MB is gone through in less than a quarter of it."""
    import tracemalloc

    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        for number in range(2000):
            file.write(json.dumps({"text": f"{number} " * 4000}) + "\n")
    tracemalloc.start()
    assert sum(1 for _ in open_source(path)) == 2000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 30 << 20
    assert peak < 8 << 20


# Windows


def cutting(context=8, **how):
    return Cutting(tokenizer(), context, **how)


def windows_of(cut, *contents):
    return list(cut.windows([CorpusDocument(n, content_of(one), f"document {n}") for n, one in enumerate(contents)]))


@pytest.mark.parametrize("bos", ["document", "window", "none"])
@settings(max_examples=50, deadline=None)
@given(ids=st.lists(st.integers(0, 255), max_size=40), context=st.integers(2, 12))
def test_windows_hold_every_token_once(ids, context, bos):
    """In order, none longer than the context, and with the beginning where it was asked for."""
    (found,) = windows_of(cutting(context, bos=bos), ids)
    begun = [256] if bos == "window" else []
    tokens = [window.token_ids.tolist() for window in found]
    assert all(one[: len(begun)] == begun and len(begun) < len(one) <= context for one in tokens)
    assert list(itertools.chain.from_iterable(one[len(begun) :] for one in tokens)) == ids
    assert [window.number for window in found] == list(range(len(found)))


def test_a_beginning_that_is_there_is_not_doubled():
    """Text that the tokenizer begins itself, and token ids that bring theirs."""
    (found,) = windows_of(cutting(4, bos="window"), [256, 1, 2, 3, 4])
    assert [window.token_ids.tolist() for window in found] == [[256, 1, 2, 3], [256, 4]]
    alone, twice, again = windows_of(cutting(4, bos="window"), [256], [256, 256, 1], [256, 1, 2, 3, 256, 4])
    assert [window.token_ids.tolist() for window in twice] == [[256, 256, 1]]
    assert [window.token_ids.tolist() for window in alone] == [[256]]
    assert [window.token_ids.tolist() for window in again] == [[256, 1, 2, 3], [256, 4]]


def test_long_documents_are_cut_off_or_refused_as_asked():
    """And the error names the document."""
    with pytest.raises(InvalidSetting, match=r"^long='truncate'; give 'split' or 'cut' or 'refuse'$"):
        cutting(3, long="truncate")
    (found,) = windows_of(cutting(3, long="cut"), "abcdef")
    assert [window.token_ids.tolist() for window in found] == [tokenizer().encode("abc")]
    with pytest.raises(InvalidPrompt, match="document 1 has 6 tokens"):
        windows_of(cutting(3, long="refuse"), "abc", "abcdef")


def test_a_conversation_that_the_template_refuses_is_named():
    """One that takes no role but the user's."""
    own = tokenizer()
    own.chat_template = (
        "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('users alone') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    said = [{"role": "user", "content": "abc"}]
    with pytest.raises(InvalidRequest, match=r"^document 1: the chat template .* users alone"):
        windows_of(Cutting(own, 8), said, [*said, {"role": "tool", "content": "def"}])


def test_texts_are_tokenised_as_one_by_one():
    """Many at once give what each gives alone."""
    own = tokenizer()
    found = windows_of(cutting(1000), *TEXTS, [1, 2])
    assert [[w.token_ids.tolist() for w in one] for one in found] == [
        *([own.encode(text)] if text else [] for text in TEXTS),
        [[1, 2]],
    ]


@pytest.mark.parametrize("how", [{"context": 0}, {"context": 1, "bos": "window"}, {"long": "wrap"}, {"bos": "every"}])
def test_settings_of_windows_are_checked(how):
    """Before anything is read."""
    with pytest.raises(InvalidSetting):
        cutting(**how)


# Samples


def window(tokens=200, document=0, number=0):
    return Window(document, number, np.arange(tokens), "document")


def drawn(sample, one, limit=None):
    limit = limit or len(one.token_ids)
    found = sample.asked(one, limit)
    return np.zeros(limit, bool) if found is None else selected(found.ranges(len(one.token_ids), limit), limit)


def test_one_in_k_depends_on_the_place_alone():
    """Not on what was read before; a generated token does not change those of the prompt, nor their number."""
    sample = OneIn(8, seed=3)
    masks = [drawn(sample, window(document=n)) for n in range(200)]
    again = [drawn(sample, window(document=n)) for n in reversed(range(200))][::-1]
    assert all(np.array_equal(one, other) for one, other in zip(masks, again, strict=True))
    assert np.array_equal(drawn(sample, window(), limit=240)[:200], masks[0])
    share = np.mean(masks)
    assert abs(share - 1 / 8) < 4 * (1 / 8 * 7 / 8 / 40000) ** 0.5
    # Neither documents, windows nor seeds draw the same places: about one in 64 of them is in both.
    for other in (drawn(OneIn(8, seed=4), window()), drawn(sample, window(number=1)), masks[1]):
        assert (masks[0] & other).sum() < 12
    columns = np.mean(masks, axis=0)
    assert columns.min() > 0.02, "no position is preferred"
    assert columns.max() < 0.3


def test_numbers_of_numpy_are_described() -> None:
    """A data set's definition is JSON."""
    probe = LayerVectors({np.int64(3): torch.ones(4)})
    samples = (OneIn(np.int64(4), seed=np.int64(1)), ByProbe(probe, layer=3, above=np.float32(0.5)))
    plain = (OneIn(4, seed=1), ByProbe(probe, layer=3, above=0.5))
    for sample, same in zip(samples, plain, strict=True):
        assert json.loads(json.dumps(sample.described())) == same.described()


@pytest.mark.parametrize("bounds", [{}, {"above": "0.5", "below": 6.0}, {"above": True}, {"below": float("nan")}])
def test_thresholds_of_a_probe_are_numbers(bounds) -> None:
    """One that cannot be read is not left out."""
    with pytest.raises(InvalidSpec, match="as numbers"):
        ByProbe(LayerVectors({3: torch.ones(4)}), layer=3, **bounds)


def test_one_in_k_draws_from_a_selection():
    """A window of which nothing is selected, or drawn, is not read at all."""
    sample = OneIn(2, of=slice(100, None))
    assert not drawn(sample, window())[:100].any()
    assert drawn(sample, window())[100:].any()
    assert sample.asked(window(50), 50) is None
    assert sample_of(slice(1, None)).asked(window(1), 1) is None


def test_a_predicate_sees_the_tokens():
    """Those of the prompt before it is read; with what is generated, behind it."""
    even = ByPredicate(lambda _, ids: ids % 2 == 0, name="even")
    assert drawn(even, window(6)).tolist() == [True, False] * 3
    whole = even.asked(window(6), 8)
    assert str(whole) == "'all'"
    ids = np.array([0, 1, 2, 3, 4, 5, 9, 8])
    kept = even.kept(window(6), 8, np.arange(8), ids, None)
    assert kept.tolist() == [True, False] * 3 + [False, True]
    # Also where no token that was generated has a row: it was not chosen before, as one might have come.
    assert even.kept(window(6), 8, np.arange(6), ids[:6], None).tolist() == [True, False] * 3
    assert even.kept(window(6), 8, np.array([1, 4]), ids, None).tolist() == [False, True]
    assert even.kept(window(6), 6, np.array([0, 2, 4]), ids[:6], None) is None
    with pytest.raises(InvalidSpec, match="6 truth values"):
        drawn(ByPredicate(lambda *_: [1], name="wrong"), window(6))
    with pytest.raises(InvalidSpec, match="name="):
        ByPredicate(lambda _, ids: ids > 0)


def test_a_probe_keeps_what_lies_far_along_it():
    """By the product with the direction as it is."""
    rows = torch.tensor([[1.0, 0.0], [0.0, 5.0], [3.0, 1.0]])
    captures = Captures({Point(1, "resid_post"): rows}, 4)
    probe = LayerVectors({1: torch.tensor([2.0, 0.0])})
    kept = ByProbe(probe, layer=1, above=2.0).kept(window(3), 3, np.arange(3), np.arange(3), captures)
    assert kept.tolist() == [True, False, True]
    between = ByProbe(probe, layer=1, above=2.0, below=5.0)
    assert between.kept(window(3), 3, np.arange(3), np.arange(3), captures).tolist() == [True, False, False]
    with pytest.raises(InvalidSpec, match="threshold"):
        ByProbe(probe, layer=1)
    with pytest.raises(InvalidSpec, match="layer 2"):
        ByProbe(probe, layer=2, above=0.0)


def test_samples_say_what_they_depend_on():
    """No two that keep other tokens say the same."""
    probe = LayerVectors({1: torch.tensor([2.0, 0.0])})
    samples = [
        Selected("all"),
        Selected(slice(1, None)),
        OneIn(2),
        OneIn(2, seed=1),
        OneIn(3),
        OneIn(2, of="prompt"),
        ByPredicate(lambda _, i: i > 0, name="a"),
        ByPredicate(lambda _, i: i > 0, name="b"),
        ByProbe(probe, layer=1, above=1.0),
        ByProbe(probe, layer=1, below=1.0),
        ByProbe(LayerVectors({1: torch.tensor([2.0, 0.5])}), layer=1, above=1.0),
    ]
    assert len({json.dumps(one.described(), sort_keys=True) for one in samples}) == len(samples)


async def test_a_seed_of_sampling_is_not_taken_for_that_of_a_codec(tmp_path) -> None:
    """`seed=` beside a codec once left the codec's seed at 0, without a word."""
    with pytest.raises(InvalidSpec, match="give codec_seed= for a codec's matrix"):
        await collect(None, ["a"], tmp_path, layers=[1], codec="rp8", codec_k=64, seed=3)  # type: ignore[arg-type]
    assert _kept(None, None, codec="rp8", codec_k=64, codec_seed=3)[0].codec_seed == 3


def test_seeds_of_documents_are_all_different():
    """And such as vLLM takes."""
    found = {seed_of(seed, number) for seed in (0, 1) for number in range(5000)}
    assert len(found) == 10_000
    assert min(found) >= 0
    assert max(found) < 1 << 63


# Writing


@pytest.mark.parametrize("times", [1, 2])
async def test_nobody_may_write_before_who_writes_has_ended(times, tmp_path, monkeypatch) -> None:
    """Cancelled as often as one likes, `aclose` ends when the last shard is written: the folder's lock goes with it."""
    goes_on, definition = threading.Event(), definition_of()
    folder = DatasetFolder.begin(tmp_path, definition)
    write = DatasetFolder.write

    def slow(self, shard):
        goes_on.wait(120)
        return write(self, shard)

    monkeypatch.setattr(DatasetFolder, "write", slow)
    sharder = Sharder(folder, [known.point for known in definition.points], {}, 1 << 20)
    shard = shard_of(definition, 0)
    ended = [Ended(number, bytes(32), 5, None) for number in range(4)]
    await sharder.add(Block(shard.index, {point: [rows] for point, rows in shard.rows.items()}, ended))
    closing = asyncio.create_task(sharder.aclose())
    for _ in range(times):
        await asyncio.sleep(0.05)
        closing.cancel()
    await asyncio.sleep(0.05)
    assert not closing.done()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert [*folder.sound()] == [0]


# Feeding


class Asking:
    def __init__(self, tokens="all", **how):
        self.cutting, self.sample = cutting(**how), sample_of(tokens)

    def asked(self, window):
        return self.sample.asked(window, len(window.token_ids))


async def fed(source, wanted=lambda _: True, tokens="all"):
    return [one async for batch in feed(source, Asking(tokens), wanted) for one in batch]


async def test_documents_are_fed_in_order_and_hashed(tmp_path):
    """Also those that are not wanted, which are not cut into windows; and from an async iterator."""

    async def later():
        for text in TEXTS:
            yield text

    found = await fed(open_source(write_jsonl(tmp_path / "a.jsonl")))
    assert [one.number for one in found] == [0, 1, 2, 3]
    assert [sum(len(window.token_ids) for window, _ in one.windows) for one in found] == [
        len(text.encode()) for text in TEXTS
    ]
    assert len({one.digest for one in found}) == 4
    skipping = await fed(open_source(later()), lambda number: number != 2)
    assert [one.digest for one in skipping] == [one.digest for one in found]
    assert [one.windows is None for one in skipping] == [False, False, True, False]


async def test_an_error_comes_where_its_document_is():
    """Those before it are fed first."""
    source, found = open_source([*["text"] * 100, 3]), []

    async def take():
        async for batch in feed(source, Asking()):
            found.extend(batch)

    with pytest.raises(InvalidRequest, match="document 100"):
        await take()
    assert len(found) == 64  # what was in its batch comes with it or not at all


@pytest.mark.parametrize("sample", [lambda tokens: tokens, lambda tokens: OneIn(1, of=tokens)])
@pytest.mark.parametrize(("at", "instead"), [(3, slice(3, 4)), (-4, slice(-4, -3))])
async def test_a_position_outside_a_window_names_it(sample, at, instead):
    """And what gives nothing there instead, in windows of 8 tokens; in others it gives that position."""
    documents = [[7] * 4, [7] * 11]
    outside = rf"^document 1, window 1: position {at} is outside .*; slice\({at}, {at + 1}\) keeps nothing of shorter"
    with pytest.raises(InvalidSelection, match=outside):
        await fed(open_source(documents), tokens=sample(at))
    found = await fed(open_source(documents), tokens=sample(instead))
    masks = [(selection, len(window.token_ids)) for one in found for window, selection in one.windows]
    whole, first, second = (one and np.flatnonzero(selected(one.ranges(n, n), n)).tolist() for one, n in masks)
    assert (whole, first, second) == ([at % 4], [at % 8], None)


async def test_a_mask_that_fits_no_window_names_the_first():
    """Without advice on positions."""
    with pytest.raises(InvalidSelection, match=r"^document 0, window 0: .* mask of 3 .*handle\.positions\[mask\]$"):
        await fed(open_source([[1, 2]]), tokens=[True, False, True])


async def test_feeding_ends_with_who_takes_it():
    """The thread that reads stops, however long the corpus is, and does not run ahead."""
    read = 0

    def endless():
        nonlocal read
        while True:
            read += 1
            yield "text"

    found = feed(open_source(endless()), Asking())
    await anext(found)
    await found.aclose()
    for thread in threading.enumerate():
        if thread.name == "steercap feeder":
            thread.join(5)
            assert not thread.is_alive()
    assert read <= 64 * 5


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "there cannot be written to: .*: make room, and the same"),
        (PermissionError(errno.EACCES, "Permission denied"), "there cannot be written to: .*: mend that, and the same"),
        (CollectionStopped("an actor was lost"), "^an actor was lost$"),
    ],
)
def test_what_stopped_a_collection_is_said_once_and_as_it_is(error, says) -> None:
    """Room is asked for where there is none, and what has been said already stays as it is."""
    with pytest.raises(CollectionStopped, match=says), stopping("there"):
        raise error
